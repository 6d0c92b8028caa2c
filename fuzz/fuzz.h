/* SPDX-License-Identifier: Apache-2.0
 *
 * What every fuzz target shares: a property that must hold, an error that must
 * be filled, blocks of exactly their size, and a digest of what was handed out.
 *
 * libFuzzer gives each input in a block of its own size, so that the address
 * sanitizer sees a byte read too many.
 */
#ifndef TENSORIO_FUZZ_H
#define TENSORIO_FUZZ_H

#include <stdio.h>
#include <stdlib.h>

#include "common.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define HOLDS(cond) ((cond) ? (void)0 : fuzz_broken(__FILE__, __LINE__, #cond))

static inline void fuzz_broken(const char *file, int line, const char *text)
{
    fprintf(stderr, "%s:%d: does not hold: %s\n", file, line, text);
    abort();
}

/* A failure says what and where, and where is inside the input or at its end. */
static inline void check_error(int rc, const tio_error *err, uint64_t from, uint64_t to)
{
    HOLDS(rc < 0 && rc >= TIO_NOSPACE);
    HOLDS(err->code == rc);
    HOLDS(err->what != NULL && err->what[0] != 0);
    HOLDS(err->offset >= from && err->offset <= to);
}

static inline int same_error(const tio_error *a, const tio_error *b)
{
    return a->code == b->code && a->offset == b->offset && a->want == b->want && a->got == b->got &&
           a->what == b->what;
}

/* An error that nobody has filled yet: other bytes in each of two runs. */
static inline tio_error blank_error(uint8_t fill)
{
    tio_error err;
    memset(&err, fill, sizeof err);
    err.what = NULL;
    return err;
}

static inline void *block(uint64_t size)
{
    void *p = malloc(size ? (size_t)size : 1);
    if (p == NULL)
        abort();
    return p;
}

static inline uint8_t *copy_of(const void *bytes, uint64_t size)
{
    uint8_t *p = block(size);
    if (size)
        memcpy(p, bytes, (size_t)size);
    return p;
}

/* FNV-1a, over all that a parser hands out. */
#define DIGEST_START 0xcbf29ce484222325u

static inline uint64_t digest_bytes(uint64_t digest, const void *bytes, uint64_t size)
{
    const uint8_t *p = bytes;
    uint64_t i;
    for (i = 0; i < size; i++)
        digest = (digest ^ p[i]) * 0x100000001b3u;
    return digest;
}

static inline uint64_t digest_u64(uint64_t digest, uint64_t value)
{
    return digest_bytes(digest, &value, sizeof value);
}

/* Numbers out of the input, for targets that take it as a list of choices; 0 behind its end. */
typedef struct {
    const uint8_t *bytes;
    size_t left;
} choices;

static inline uint64_t choose(choices *c, size_t width)
{
    uint64_t value = 0;
    for (; width > 0 && c->left > 0; width--, c->left--)
        value = value << 8 | *c->bytes++;
    return value;
}

/* Unicode 15, table 3-7, by decoding: another way than the tokenizer's. */
static inline int is_utf8(const uint8_t *p, uint64_t len)
{
    uint64_t i = 0;
    while (i < len) {
        uint32_t c = p[i], more = c < 0x80 ? 0 : c >> 5 == 6 ? 1 : c >> 4 == 14 ? 2 : 3, k;
        static const uint32_t least[4] = {0, 0x80, 0x800, 0x10000};
        if (more == 3 && c >> 3 != 30)
            return 0;
        if (more >= len - i)
            return 0;
        c = more ? c & (0x3Fu >> more) : c;
        for (k = 1; k <= more; k++) {
            if (p[i + k] >> 6 != 2)
                return 0;
            c = c << 6 | (p[i + k] & 0x3F);
        }
        if (c < least[more] || c > 0x10FFFF || (c >= 0xD800 && c <= 0xDFFF))
            return 0;
        i += 1 + more;
    }
    return 1;
}

#endif
