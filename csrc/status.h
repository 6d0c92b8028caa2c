/* SPDX-License-Identifier: Apache-2.0
 *
 * How a C function says what went wrong: a kind, a place and a sentence.
 *
 * Functions return `int`: 0 is success, negative is one of the codes below;
 * pull iterators return 1 (filled) and 0 (end). On failure they fill a
 * caller-owned `tio_error`; on success they leave it alone. Codes are told
 * apart because callers act differently on each: fetch the rest of the file,
 * give the file up, use another tool, raise a limit, compare two sources.
 */
#ifndef TENSORIO_STATUS_H
#define TENSORIO_STATUS_H

#include <stdint.h>

enum {
    TIO_OK = 0,
    TIO_TRUNCATED = -1,   /* the bytes end before the structure does */
    TIO_MALFORMED = -2,   /* the bytes break a rule of the format */
    TIO_UNSUPPORTED = -3, /* legal, but not handled here */
    TIO_LIMIT = -4,       /* beyond a stated safety limit */
    TIO_MISMATCH = -5,    /* two places of the file that must agree do not */
    TIO_NOSPACE = -6      /* the caller's output buffer is too small */
};

/* offset: byte position in the input at which the rule was broken.
 * want, got: the numbers compared, both 0 where no number is involved.
 * what: constant text naming the field in the words of the format's
 *       specification and the rule, e.g. "central directory: local header
 *       offset"; never contains bytes of the file. */
typedef struct {
    int code;
    uint64_t offset;
    uint64_t want;
    uint64_t got;
    const char *what;
} tio_error;

/* Fill `err` and return `code`, so that a failing check is one line. */
int tio_fail(tio_error *err, int code, uint64_t offset, uint64_t want, uint64_t got,
             const char *what);

/* The name of a code, e.g. "truncated"; "unknown" for anything else. */
const char *tio_code_name(int code);

#endif
