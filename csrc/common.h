/* SPDX-License-Identifier: Apache-2.0
 *
 * Compiler differences, little-endian loads and stores, checked arithmetic
 * and the bounded cursor: everything that every other file needs, once.
 *
 * Loads and stores go through memcpy: no alignment or aliasing trouble, and
 * compilers turn each into one instruction.
 */
#ifndef TENSORIO_COMMON_H
#define TENSORIO_COMMON_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "status.h"

#if defined(__GNUC__) || defined(__clang__)
#define TIO_LIKELY(x)   __builtin_expect(!!(x), 1)
#define TIO_UNLIKELY(x) __builtin_expect(!!(x), 0)
#else
#define TIO_LIKELY(x)   (x)
#define TIO_UNLIKELY(x) (x)
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#define TIO_BIG_ENDIAN 1
#else
#define TIO_BIG_ENDIAN 0
#endif

static inline uint16_t tio_swap16(uint16_t v)
{
    return (uint16_t)((v >> 8) | (v << 8));
}

static inline uint32_t tio_swap32(uint32_t v)
{
    return (v >> 24) | ((v >> 8) & 0xFF00u) | ((v << 8) & 0xFF0000u) | (v << 24);
}

static inline uint64_t tio_swap64(uint64_t v)
{
    return ((uint64_t)tio_swap32((uint32_t)v) << 32) | tio_swap32((uint32_t)(v >> 32));
}

static inline uint16_t tio_load16(const uint8_t *p)
{
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return TIO_BIG_ENDIAN ? tio_swap16(v) : v;
}

static inline uint32_t tio_load32(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return TIO_BIG_ENDIAN ? tio_swap32(v) : v;
}

static inline uint64_t tio_load64(const uint8_t *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return TIO_BIG_ENDIAN ? tio_swap64(v) : v;
}

static inline void tio_store16(uint8_t *p, uint16_t v)
{
    if (TIO_BIG_ENDIAN)
        v = tio_swap16(v);
    memcpy(p, &v, sizeof v);
}

static inline void tio_store32(uint8_t *p, uint32_t v)
{
    if (TIO_BIG_ENDIAN)
        v = tio_swap32(v);
    memcpy(p, &v, sizeof v);
}

static inline void tio_store64(uint8_t *p, uint64_t v)
{
    if (TIO_BIG_ENDIAN)
        v = tio_swap64(v);
    memcpy(p, &v, sizeof v);
}

/* Big-endian IEEE 754 doubles, as pickles have them. */
static inline double tio_load_double(const uint8_t *p)
{
    uint64_t bits = tio_swap64(tio_load64(p));
    double v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

static inline void tio_store_double(uint8_t *p, double v)
{
    uint64_t bits;
    memcpy(&bits, &v, sizeof bits);
    tio_store64(p, tio_swap64(bits));
}

/* Sums and products of numbers that come from a file. Return 1 and set *out,
 * or return 0 on overflow. */
static inline int tio_add(uint64_t a, uint64_t b, uint64_t *out)
{
    *out = a + b;
    return *out >= a;
}

static inline int tio_mul(uint64_t a, uint64_t b, uint64_t *out)
{
#if defined(__GNUC__) || defined(__clang__)
    return !__builtin_mul_overflow(a, b, out);
#else
    *out = a * b;
    return a == 0 || *out / a == b;
#endif
}

/* A canonical decimal number of up to 9 digits ("0", "17", not "017"): its
 * value, or -1. Storage keys are such numbers, as a rule. */
static inline int64_t tio_decimal(const uint8_t *p, uint64_t len)
{
    int64_t value = 0;
    uint64_t i;
    if (len == 0 || len > 9 || (p[0] == '0' && len > 1))
        return -1;
    for (i = 0; i < len; i++) {
        if (p[i] < '0' || p[i] > '9')
            return -1;
        value = value * 10 + (p[i] - '0');
    }
    return value;
}

/* The one place where bounds are checked: all reading of file bytes goes
 * through a cursor over (buf, len). `pos <= len` always holds. */
typedef struct {
    const uint8_t *buf;
    uint64_t len;
    uint64_t pos;
} tio_cursor;

static inline tio_cursor tio_cursor_at(const uint8_t *buf, uint64_t len, uint64_t pos)
{
    tio_cursor c = {buf, len, pos <= len ? pos : len};
    return c;
}

/* The next n bytes, advancing past them; NULL (and no move) if they are not
 * all there. */
static inline const uint8_t *tio_take(tio_cursor *c, uint64_t n)
{
    const uint8_t *p;
    if (TIO_UNLIKELY(n > c->len - c->pos))
        return NULL;
    p = c->buf + c->pos;
    c->pos += n;
    return p;
}

#endif
