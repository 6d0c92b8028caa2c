/* SPDX-License-Identifier: Apache-2.0
 *
 * Elements that are not finite: the first one, and how many there are.
 *
 * Of every floating point type here, the test is one and the same: some bits of the element,
 * all set or equal to one pattern. IEEE 754 types (and bfloat16, float8_e5m2): the exponent is all
 * ones. float8_e4m3fn and float8_e8m0fnu have a NaN of all ones and no infinity; the fnuz types
 * have one NaN, the pattern of -0. So a type is a width, a mask and a pattern:
 *
 *     element & mask == pattern
 *
 * A complex type is twice as many elements of half its width. Which numbers go with which type
 * stands in tensorio/checkpoint/_finite.py.
 */
#ifndef TENSORIO_FINITE_H
#define TENSORIO_FINITE_H

#include <stddef.h>
#include <stdint.h>

/* Choose the fastest variant this CPU has. Call once before tio_match_find; until then the
 * portable variant answers. */
void tio_match_init(void);

/* The index of the first of `count` elements of `width` bytes (1, 2, 4 or 8), in the byte order of
 * this machine, for which element & mask == pattern; `count` if there is none, or if the width is
 * another one. Bits of mask and pattern beyond the width do not count. Any alignment; buf may be
 * NULL if count is 0. Reads nothing but these elements. Pure, thread-safe. */
size_t tio_match_find(const uint8_t *buf, size_t count, unsigned width, uint64_t mask,
                      uint64_t pattern);

/* How many of them there are; portable, for the rare buffer that has one. */
size_t tio_match_count(const uint8_t *buf, size_t count, unsigned width, uint64_t mask,
                       uint64_t pattern);

/* What to look for in the elements of one type; a width of 0 stands for a type that is passed
 * over. */
typedef struct {
    uint64_t width, mask, pattern;
} tio_match_kind;

/* Elements one after the other in memory. */
typedef struct {
    int64_t kind;    /* row in a table of kinds */
    int64_t address; /* of the first */
    int64_t nbytes;
    int64_t tensor; /* the caller's number, not looked at */
    int64_t start;  /* of the first element, in bytes from that of the tensor; not looked at */
} tio_match_run;

/* The first of the runs [from, to) that has a match, and the index of that in *first; `to` if there
 * is none. Many short runs cost their bytes and little more. */
size_t tio_match_runs(const tio_match_run *runs, size_t from, size_t to,
                      const tio_match_kind *kinds, size_t *first);

/* The ranked table, portable first, faster ones behind it; see crc32.h. */
typedef size_t (*tio_match_fn)(const uint8_t *buf, size_t count, unsigned width, uint64_t mask,
                               uint64_t pattern);

int tio_match_variant_count(void);
const char *tio_match_variant_name(int row); /* "portable", "avx2", "avx512", "neon" */
int tio_match_variant_usable(int row);       /* does this CPU have it? Some microseconds */
tio_match_fn tio_match_variant(int row);
const char *tio_match_chosen(void); /* the row that tio_match_find uses now */

#endif
