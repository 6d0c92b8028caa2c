/* SPDX-License-Identifier: Apache-2.0
 *
 * Elements that match, by vectors of 32 and of 64 bytes. Included by finite.c only.
 *
 * Each variant is one macro, stamped out for the four widths: what differs is how wide the
 * comparison is.
 */
#ifndef TENSORIO_FINITE_X86_H
#define TENSORIO_FINITE_X86_H

#include <immintrin.h>

#define TIO_TARGET_MATCH256 __attribute__((target("avx2")))
#define TIO_TARGET_MATCH512 __attribute__((target("avx512f,avx512bw,avx512vl")))

/* Elements of a whole block without a match are passed over; the number passed over. */
#define TIO_SKIP256(bits, set)                                                                     \
    TIO_TARGET_MATCH256 static size_t tio_skip256_##bits(const uint8_t *buf, size_t nbytes,        \
                                                         uint64_t mask, uint64_t pattern)          \
    {                                                                                              \
        const __m256i m = set(mask), want = set(pattern);                                          \
        size_t at, i;                                                                              \
        for (at = 0; nbytes - at >= BLOCK; at += BLOCK) {                                          \
            __m256i found = _mm256_setzero_si256();                                                \
            for (i = 0; i < BLOCK; i += 32) {                                                      \
                const __m256i v = _mm256_loadu_si256(                                              \
                    (const __m256i *)(const void *)(buf + at + i));                                \
                found = _mm256_or_si256(found,                                                     \
                                        _mm256_cmpeq_epi##bits(_mm256_and_si256(v, m), want));     \
            }                                                                                      \
            if (!_mm256_testz_si256(found, found))                                                 \
                break;                                                                             \
        }                                                                                          \
        return at;                                                                                 \
    }

#define TIO_SET256_8(x)  _mm256_set1_epi8((char)(uint8_t)(x))
#define TIO_SET256_16(x) _mm256_set1_epi16((short)(uint16_t)(x))
#define TIO_SET256_32(x) _mm256_set1_epi32((int)(uint32_t)(x))
#define TIO_SET256_64(x) _mm256_set1_epi64x((long long)(x))

TIO_SKIP256(8, TIO_SET256_8)
TIO_SKIP256(16, TIO_SET256_16)
TIO_SKIP256(32, TIO_SET256_32)
TIO_SKIP256(64, TIO_SET256_64)

#define TIO_SKIP512(bits, set)                                                                     \
    TIO_TARGET_MATCH512 static size_t tio_skip512_##bits(const uint8_t *buf, size_t nbytes,        \
                                                         uint64_t mask, uint64_t pattern)          \
    {                                                                                              \
        const __m512i m = set(mask), want = set(pattern);                                          \
        size_t at, i;                                                                              \
        for (at = 0; nbytes - at >= BLOCK; at += BLOCK) {                                          \
            uint64_t found = 0;                                                                    \
            for (i = 0; i < BLOCK; i += 64) {                                                      \
                const __m512i v = _mm512_loadu_si512(buf + at + i);                                \
                found |= _mm512_cmpeq_epi##bits##_mask(_mm512_and_si512(v, m), want);              \
            }                                                                                      \
            if (found)                                                                             \
                break;                                                                             \
        }                                                                                          \
        return at;                                                                                 \
    }

#define TIO_SET512_8(x)  _mm512_set1_epi8((char)(uint8_t)(x))
#define TIO_SET512_16(x) _mm512_set1_epi16((short)(uint16_t)(x))
#define TIO_SET512_32(x) _mm512_set1_epi32((int)(uint32_t)(x))
#define TIO_SET512_64(x) _mm512_set1_epi64((long long)(x))

TIO_SKIP512(8, TIO_SET512_8)
TIO_SKIP512(16, TIO_SET512_16)
TIO_SKIP512(32, TIO_SET512_32)
TIO_SKIP512(64, TIO_SET512_64)

#define TIO_MATCH_BY(name, bytes)                                                                  \
    static size_t name(const uint8_t *buf, size_t count, unsigned width, uint64_t mask,            \
                       uint64_t pattern)                                                           \
    {                                                                                              \
        const size_t nbytes = count * width;                                                       \
        const size_t at = (width == 1   ? tio_skip##bytes##_8(buf, nbytes, mask, pattern)          \
                           : width == 2 ? tio_skip##bytes##_16(buf, nbytes, mask, pattern)         \
                           : width == 4 ? tio_skip##bytes##_32(buf, nbytes, mask, pattern)         \
                                        : tio_skip##bytes##_64(buf, nbytes, mask, pattern)) /      \
                          width;                                                                   \
        return at + find_slowly(buf + at * width, count - at, width, mask, pattern);               \
    }

TIO_MATCH_BY(tio_match_avx2, 256)
TIO_MATCH_BY(tio_match_avx512, 512)

#endif
