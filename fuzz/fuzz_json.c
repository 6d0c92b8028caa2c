/* SPDX-License-Identifier: Apache-2.0
 *
 * The JSON tokenizer. Holds: tokens lie inside the text, in order, and nest;
 * strings are UTF-8 and survive unescape, quote, read; numbers fit a double and
 * plain ones are what strtoull says; skip ends where stepping ends; two runs
 * with other bases agree; an accepted text's prefix is accepted or truncated.
 */
#include <errno.h>
#include <float.h>
#include <math.h>

#include "fuzz.h"
#include "json.h"

/* serde_json's own arithmetic takes some numbers that round beyond a double, by a few parts in 2^53. */
#define NEAR_ONE (1 + 0x1p-50L)

enum { SKIPS = 8 }; /* containers per text that are skipped, too: keeps the cost linear */

static void check_string(const tio_json_token *tok)
{
    uint8_t *plain = block(tok->text_len), *quoted;
    uint64_t n = tio_json_unescape(tok, plain), written;
    tio_json again;
    tio_json_token t;
    tio_error err;
    HOLDS(n <= tok->text_len);
    HOLDS(tok->escaped || n == tok->text_len);
    HOLDS(tok->escaped == (tok->text_len && memchr(tok->text, '\\', (size_t)tok->text_len)));
    HOLDS(is_utf8(plain, n));
    quoted = block(6 * n + 2);
    written = tio_json_quote(plain, n, quoted);
    HOLDS(written <= 6 * n + 2);
    tio_json_init(&again, quoted, written, 0);
    HOLDS(tio_json_next(&again, &t, &err) == 1 && t.type == TIO_JSON_STRING);
    HOLDS(t.text_len == written - 2);
    {
        uint8_t *back = block(t.text_len);
        HOLDS(tio_json_unescape(&t, back) == n && memcmp(back, plain, (size_t)n) == 0);
        free(back);
    }
    HOLDS(tio_json_next(&again, &t, &err) == 0);
    free(quoted);
    free(plain);
}

static void check_number(const tio_json *j, const tio_json_token *tok)
{
    char *text = (char *)block(tok->text_len + 1);
    uint64_t value = 0;
    tio_error err = blank_error(0xAA);
    int rc = tio_json_u64(j, tok, &value, &err);
    size_t digits;
    memcpy(text, tok->text, (size_t)tok->text_len);
    text[tok->text_len] = 0;
    HOLDS(fabsl(strtold(text, NULL)) <= (long double)DBL_MAX * NEAR_ONE);
    digits = strspn(text, "0123456789");
    if (rc < 0) {
        check_error(rc, &err, tok->offset, tok->offset + tok->text_len);
        if (digits == tok->text_len) { /* too big, then */
            errno = 0;
            strtoull(text, NULL, 10);
            HOLDS(errno == ERANGE);
        }
    } else {
        HOLDS(rc == 0 && digits == tok->text_len);
        errno = 0;
        HOLDS(strtoull(text, NULL, 10) == value && errno == 0);
    }
    free(text);
}

/* A container that was just opened: skipping it must end where stepping through it does. */
static void check_skip(const tio_json *opened, const tio_json_token *tok)
{
    tio_json skipped = *opened, stepped = *opened;
    tio_error a = blank_error(0xAA), b = blank_error(0x55);
    tio_json_token t;
    int rc = tio_json_skip(&skipped, tok, &a), step = 1;
    while (step > 0 && stepped.depth >= opened->depth)
        step = tio_json_next(&stepped, &t, &b);
    if (rc < 0) {
        HOLDS(step == rc && same_error(&a, &b));
        return;
    }
    HOLDS(rc == 0 && step == 1);
    HOLDS(skipped.in.pos == stepped.in.pos && skipped.depth == stepped.depth);
    HOLDS(skipped.depth == opened->depth - 1 && skipped.state == stepped.state);
}

static void check_inside(const tio_json_token *tok, const uint8_t *data, uint64_t size,
                         uint64_t base)
{
    HOLDS(tok->type > TIO_JSON_END && tok->type <= TIO_JSON_NULL);
    HOLDS(tok->offset >= base && tok->offset < base + size);
    if (tok->type != TIO_JSON_KEY && tok->type != TIO_JSON_STRING && tok->type != TIO_JSON_NUMBER)
        return;
    HOLDS(tok->text >= data && tok->text_len <= (uint64_t)(data + size - tok->text));
    if (tok->type == TIO_JSON_NUMBER)
        HOLDS(tok->text == data + (tok->offset - base) && tok->text_len > 0);
    else
        HOLDS(tok->text == data + (tok->offset - base) + 1 && tok->text[-1] == '"' &&
              tok->text[tok->text_len] == '"');
}

/* The brackets, held against a stack of our own. */
static void check_nesting(int type, uint8_t *stack, int *depth)
{
    if (type == TIO_JSON_OBJECT_BEGIN || type == TIO_JSON_ARRAY_BEGIN) {
        HOLDS(*depth < TIO_JSON_DEPTH);
        stack[(*depth)++] = type == TIO_JSON_OBJECT_BEGIN ? TIO_JSON_OBJECT_END
                                                          : TIO_JSON_ARRAY_END;
    } else if (type == TIO_JSON_OBJECT_END || type == TIO_JSON_ARRAY_END) {
        HOLDS(*depth > 0 && stack[--*depth] == type);
    } else if (type == TIO_JSON_KEY) {
        HOLDS(*depth > 0 && stack[*depth - 1] == TIO_JSON_OBJECT_END);
    }
}

/* Read all; the digest of the tokens, and the verdict. */
static uint64_t walk(const uint8_t *data, uint64_t size, uint64_t base, int thorough, int *rc,
                     tio_error *err)
{
    uint64_t digest = DIGEST_START, count = 0, before = 0;
    uint8_t stack[TIO_JSON_DEPTH];
    int depth = 0, skips = 0;
    tio_json j;
    tio_json_token tok;
    tio_json_init(&j, data, size, base);
    while ((*rc = tio_json_next(&j, &tok, err)) == 1) {
        check_inside(&tok, data, size, base);
        check_nesting(tok.type, stack, &depth);
        HOLDS(j.depth == depth && j.in.pos <= size);
        HOLDS(count == 0 || tok.offset > before);
        HOLDS(++count <= size); /* each token takes a byte at least */
        before = tok.offset;
        digest = digest_u64(digest_u64(digest, (uint64_t)tok.type), tok.offset - base);
        if (tok.type == TIO_JSON_KEY || tok.type == TIO_JSON_STRING || tok.type == TIO_JSON_NUMBER)
            digest = digest_bytes(digest, tok.text, tok.text_len);
        if (!thorough)
            continue;
        if (tok.type == TIO_JSON_KEY || tok.type == TIO_JSON_STRING)
            check_string(&tok);
        else if (tok.type == TIO_JSON_NUMBER)
            check_number(&j, &tok);
        else if ((tok.type == TIO_JSON_OBJECT_BEGIN || tok.type == TIO_JSON_ARRAY_BEGIN) &&
                 skips++ < SKIPS)
            check_skip(&j, &tok);
    }
    if (*rc == 0) {
        HOLDS(tok.type == TIO_JSON_END && depth == 0 && j.in.pos == size && count > 0);
        HOLDS(tio_json_next(&j, &tok, err) == 0); /* and stays there */
    } else {
        check_error(*rc, err, base, base + size);
        HOLDS(*rc != TIO_TRUNCATED || err->offset == base + size);
    }
    return digest;
}

static void check_prefix(const uint8_t *data, uint64_t size, uint64_t cut)
{
    uint8_t *part = copy_of(data, cut);
    tio_error err;
    int rc;
    walk(part, cut, 0, 0, &rc, &err);
    HOLDS(rc == 0 || rc == TIO_TRUNCATED || strstr(err.what, "out of range") != NULL);
    HOLDS(cut < size);
    free(part);
}

/* The input as text to be written. */
static void check_quote(const uint8_t *data, uint64_t size)
{
    uint8_t *quoted = block(6 * size + 2);
    uint64_t n = tio_json_quote(data, size, quoted);
    tio_error err;
    int rc;
    HOLDS(n <= 6 * size + 2);
    quoted = realloc(quoted, (size_t)n);
    walk(quoted, n, 0, 1, &rc, &err);
    HOLDS(rc == (is_utf8(data, size) ? 0 : TIO_MALFORMED));
    free(quoted);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    tio_error a = blank_error(0xAA), b = blank_error(0x55);
    int rc, again;
    uint64_t digest = walk(data, size, 0, 1, &rc, &a);
    HOLDS(walk(data, size, 1000, 0, &again, &b) == digest && rc == again);
    if (rc < 0) {
        b.offset -= 1000;
        HOLDS(same_error(&a, &b));
    } else if (size > 0) {
        check_prefix(data, size, digest % size);
    }
    check_quote(data, size);
    return 0;
}
