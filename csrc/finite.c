/* SPDX-License-Identifier: Apache-2.0
 *
 * A pass over memory that finds nothing, as a rule, and should cost no more than reading it: so
 * blocks are only asked whether anything in them matches, and the one that says yes is looked at
 * again, element by element.
 */
#include "finite.h"

#include "common.h"
#include "cpu.h"

/* Bytes of a block: four vectors of the widest kind, a multiple of every width. */
#define BLOCK 256u

static int known_width(unsigned width)
{
    return width == 1 || width == 2 || width == 4 || width == 8;
}

/* One element, zero-extended, in this machine's byte order. */
static uint64_t element(const uint8_t *p, unsigned width)
{
    uint16_t two;
    uint32_t four;
    uint64_t eight;

    switch (width) {
    case 1: return *p;
    case 2: memcpy(&two, p, sizeof two); return two;
    case 4: memcpy(&four, p, sizeof four); return four;
    default: memcpy(&eight, p, sizeof eight); return eight;
    }
}

/* The bits that an element has. */
static uint64_t within(unsigned width, uint64_t bits)
{
    return width == 8 ? bits : bits & (((uint64_t)1 << 8 * width) - 1);
}

/* The first match among a few elements. */
static size_t find_slowly(const uint8_t *buf, size_t count, unsigned width, uint64_t mask,
                          uint64_t pattern)
{
    size_t i;

    mask = within(width, mask);
    pattern = within(width, pattern);
    for (i = 0; i < count; i++)
        if ((element(buf + i * width, width) & mask) == pattern)
            return i;
    return count;
}

/* Whether a block has a match, and how many matches there are: a pair of functions for each width,
 * with nothing in their loops that keeps a compiler from using the vectors of the baseline. */
#define PORTABLE(bits)                                                                             \
    static int any##bits(const uint8_t *buf, uint64_t mask, uint64_t pattern)                      \
    {                                                                                              \
        const uint##bits##_t m = (uint##bits##_t)mask, want = (uint##bits##_t)pattern;             \
        uint##bits##_t v[BLOCK / sizeof(uint##bits##_t)], found = 0;                               \
        size_t i;                                                                                  \
        memcpy(v, buf, BLOCK);                                                                     \
        for (i = 0; i < BLOCK / sizeof v[0]; i++)                                                  \
            found = (uint##bits##_t)(found | (uint##bits##_t)((v[i] & m) == want));                \
        return found != 0;                                                                         \
    }                                                                                              \
                                                                                                   \
    static size_t count##bits(const uint8_t *buf, size_t count, uint64_t mask, uint64_t pattern)   \
    {                                                                                              \
        const uint##bits##_t m = (uint##bits##_t)mask, want = (uint##bits##_t)pattern;             \
        uint##bits##_t v;                                                                          \
        size_t i, found = 0;                                                                       \
        for (i = 0; i < count; i++) {                                                              \
            memcpy(&v, buf + i * sizeof v, sizeof v);                                              \
            found += (v & m) == want;                                                              \
        }                                                                                          \
        return found;                                                                              \
    }

PORTABLE(8)
PORTABLE(16)
PORTABLE(32)
PORTABLE(64)

typedef int (*any_fn)(const uint8_t *block, uint64_t mask, uint64_t pattern);

static size_t match_portable(const uint8_t *buf, size_t count, unsigned width, uint64_t mask,
                             uint64_t pattern)
{
    const any_fn any = width == 1 ? any8 : width == 2 ? any16 : width == 4 ? any32 : any64;
    const size_t step = BLOCK / width;
    size_t at;

    for (at = 0; count - at >= step; at += step)
        if (any(buf + at * width, mask, pattern))
            break;
    return at + find_slowly(buf + at * width, count - at, width, mask, pattern);
}

/* Other compilers get the portable variant. */
#if (defined(__x86_64__) || defined(_M_X64)) && (defined(__clang__) || defined(__GNUC__))
#define TIO_MATCH_X86 1
#include "finite_x86.h"
#elif defined(__aarch64__) && (defined(__clang__) || defined(__GNUC__))
#define TIO_MATCH_NEON 1
#include "finite_arm.h"
#endif

typedef struct {
    const char *name;
    unsigned needs; /* CPU features, all of them */
    tio_match_fn fn;
} match_row;

/* Ranked: slowest first. */
static const match_row rows[] = {
    {"portable", 0, match_portable},
#if defined(TIO_MATCH_X86)
    {"avx2", TIO_CPU_AVX2, tio_match_avx2},
    {"avx512", TIO_CPU_AVX2 | TIO_CPU_AVX512, tio_match_avx512},
#elif defined(TIO_MATCH_NEON)
    {"neon", 0, tio_match_neon}, /* a part of the baseline of 64-bit ARM */
#endif
};

static const match_row *chosen = rows;

int tio_match_variant_count(void)
{
    return (int)(sizeof rows / sizeof rows[0]);
}

const char *tio_match_variant_name(int row)
{
    return rows[row].name;
}

int tio_match_variant_usable(int row)
{
    return (rows[row].needs & ~tio_cpu_features()) == 0;
}

tio_match_fn tio_match_variant(int row)
{
    return rows[row].fn;
}

const char *tio_match_chosen(void)
{
    return chosen->name;
}

void tio_match_init(void)
{
    int row = tio_match_variant_count() - 1;

    while (!tio_match_variant_usable(row)) /* row 0 always is */
        row--;
    chosen = &rows[row];
}

size_t tio_match_find(const uint8_t *buf, size_t count, unsigned width, uint64_t mask,
                      uint64_t pattern)
{
    return known_width(width) ? chosen->fn(buf, count, width, mask, pattern) : count;
}

size_t tio_match_runs(const tio_match_run *runs, size_t from, size_t to,
                      const tio_match_kind *kinds, size_t *first)
{
    for (; from < to; from++) {
        const tio_match_run *run = &runs[from];
        const tio_match_kind *kind = &kinds[run->kind];
        const uint8_t *buf = (const uint8_t *)(uintptr_t)run->address;
        const size_t count = kind->width ? (size_t)run->nbytes / (size_t)kind->width : 0;

        *first = tio_match_find(buf, count, (unsigned)kind->width, kind->mask, kind->pattern);
        if (*first < count)
            return from;
    }
    return to;
}

size_t tio_match_count(const uint8_t *buf, size_t count, unsigned width, uint64_t mask,
                       uint64_t pattern)
{
    switch (width) {
    case 1: return count8(buf, count, mask, pattern);
    case 2: return count16(buf, count, mask, pattern);
    case 4: return count32(buf, count, mask, pattern);
    case 8: return count64(buf, count, mask, pattern);
    default: return 0;
    }
}
