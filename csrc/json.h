/* SPDX-License-Identifier: Apache-2.0
 *
 * Strict pull tokenizer for one JSON text (RFC 8259), no tree, no allocation.
 *
 * Accepts exactly what serde_json 1.0 accepts, because the reference reader of
 * safetensors is built on it: UTF-8 without surrogates or overlongs, the four
 * white-space bytes around tokens, no control bytes below 0x20 in strings, the
 * eight escapes and \uXXXX with proper pairs only, numbers of the RFC grammar
 * and in range of a double, at most TIO_JSON_DEPTH nested containers.
 */
#ifndef TENSORIO_JSON_H
#define TENSORIO_JSON_H

#include "common.h"

/* serde_json's recursion limit: the 128th nested container is refused. */
#define TIO_JSON_DEPTH 127

enum {
    TIO_JSON_END = 0, /* the text is over (only white space behind the value) */
    TIO_JSON_OBJECT_BEGIN,
    TIO_JSON_OBJECT_END,
    TIO_JSON_ARRAY_BEGIN,
    TIO_JSON_ARRAY_END,
    TIO_JSON_KEY, /* a member's name; the ':' behind it is consumed */
    TIO_JSON_STRING,
    TIO_JSON_NUMBER,
    TIO_JSON_TRUE,
    TIO_JSON_FALSE,
    TIO_JSON_NULL
};

typedef struct {
    int type;
    int escaped;         /* KEY, STRING: text holds at least one backslash */
    const uint8_t *text; /* KEY, STRING: the bytes between the quotes; NUMBER: its characters */
    uint64_t text_len;
    uint64_t offset; /* of the token's first byte, from `base` (see init) */
} tio_json_token;

typedef struct {
    tio_cursor in;
    uint64_t base;                     /* added to every offset reported */
    uint8_t kinds[TIO_JSON_DEPTH + 1]; /* '{' or '[' per open container */
    int depth;
    int state; /* private: what may come next */
} tio_json;

/* `base` is the file offset of buf[0]: all offsets in tokens and errors are
 * file offsets. */
void tio_json_init(tio_json *j, const uint8_t *buf, uint64_t len, uint64_t base);

/* 1 and a token, 0 at the end of the text, or a negative code with *err. */
int tio_json_next(tio_json *j, tio_json_token *tok, tio_error *err);

/* Consume the rest of the value that `tok` (just returned) begins: nothing for
 * a scalar, up to and including the matching end for a container. */
int tio_json_skip(tio_json *j, const tio_json_token *tok, tio_error *err);

/* Unescape a KEY or STRING into out (capacity >= text_len always suffices);
 * returns the number of bytes written. The token is known valid. */
uint64_t tio_json_unescape(const tio_json_token *tok, uint8_t *out);

/* A NUMBER as a plain unsigned decimal below 2^64: 0 on success, else
 * TIO_MALFORMED (sign, fraction, exponent, too big) with *err. */
int tio_json_u64(const tio_json *j, const tio_json_token *tok, uint64_t *value, tio_error *err);

/* Write `len` bytes of UTF-8 as a JSON string with quotes, escaped as
 * serde_json does: \" \\ \b \t \n \f \r, other bytes < 0x20 as \u00xx
 * (lower case), nothing else. Needs up to 6*len + 2 bytes; returns the number
 * written. */
uint64_t tio_json_quote(const uint8_t *text, uint64_t len, uint8_t *out);

#endif
