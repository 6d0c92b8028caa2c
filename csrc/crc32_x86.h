/* SPDX-License-Identifier: Apache-2.0
 *
 * CRC-32 by carry-less multiplication, 16, 32 or 64 bytes to a vector. Included by crc32.c only,
 * which explains blocks and folding.
 *
 * The three variants have one plan, with W the bytes of a vector:
 *
 *     | odd bytes | W | W | W | W | ...                   | W | W |
 *       len % W     a   b   c   d    a, b, c, d again ...   a   a
 *
 * The odd bytes come first: folded over as many bytes as there are, they land on the vector behind
 * them, and no tail is left. Four accumulators then hide the latency of the multiplier. At the end
 * they are folded into one, that one into a block, and the block into the remainder.
 *
 * A variant is a function with a target attribute, so no file needs compiler flags. Short messages
 * are passed to the narrower variant before any wide register is touched: SSE code that runs while
 * the upper halves are in use costs some 140 ns a call (measured, Sapphire Rapids).
 */
#ifndef TENSORIO_CRC32_X86_H
#define TENSORIO_CRC32_X86_H

#include <immintrin.h>

#define TIO_TARGET_PCLMUL     __attribute__((target("pclmul,sse4.1")))
#define TIO_TARGET_VPCLMUL256 __attribute__((target("pclmul,avx2,vpclmulqdq")))
#define TIO_TARGET_VPCLMUL512                                                                      \
    __attribute__((target("pclmul,avx2,avx512f,avx512bw,avx512vl,vpclmulqdq")))
/* Helpers must be inlined, or vectors would pass through memory. */
#define TIO_INLINE static inline __attribute__((always_inline))

/* Bytes. Measured on Sapphire Rapids: 256 MiB in memory, 13.6 GB/s without and 15.8 with; 256 KiB
 * in the second-level cache, 87 and 92. With 2048 the narrower variants lose a tenth in memory. The
 * address may lie behind the message: a prefetch does not fault. */
#define TIO_PREFETCH_AHEAD 4096

TIO_INLINE void tio_prefetch(const uint8_t *p)
{
    _mm_prefetch((const char *)((uintptr_t)p + TIO_PREFETCH_AHEAD), _MM_HINT_T0);
}

static const uint8_t tio_iota[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10,
                                     11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                     22, 23, 24, 25, 26, 27, 28, 29, 30, 31};

/* ---- 16 bytes ---- */

TIO_INLINE TIO_TARGET_PCLMUL __m128i tio_load128(const void *p)
{
    return _mm_loadu_si128((const __m128i *)p);
}

/* `a` moved on by the distance of the pair k, onto `data`. */
TIO_INLINE TIO_TARGET_PCLMUL __m128i tio_fold128(__m128i a, __m128i k, __m128i data)
{
    const __m128i first = _mm_clmulepi64_si128(a, k, 0x00);
    const __m128i second = _mm_clmulepi64_si128(a, k, 0x11);
    return _mm_xor_si128(_mm_xor_si128(first, second), data);
}

/* The remainder so far, where it belongs: on the first 4 bytes. */
TIO_INLINE TIO_TARGET_PCLMUL __m128i tio_state128(uint32_t crc)
{
    return _mm_cvtsi32_si128((int)~crc);
}

/* The checksum of a message that was folded into one block: three multiplications, derived in
 * tools/gen_crc32_tables.py, reduce_triple(). */
TIO_INLINE TIO_TARGET_PCLMUL uint32_t tio_reduce128(__m128i block)
{
    const __m128i k = tio_load128(tio_crc32_reduce), p = tio_load128(tio_crc32_reduce + 2);
    __m128i quotient;

    block = _mm_xor_si128(_mm_clmulepi64_si128(block, k, 0x00), _mm_srli_si128(block, 8));
    quotient = _mm_clmulepi64_si128(block, k, 0x10);
    block = _mm_xor_si128(block, _mm_clmulepi64_si128(quotient, p, 0x00));
    return ~(uint32_t)_mm_extract_epi32(block, 2);
}

TIO_TARGET_PCLMUL static uint32_t tio_crc32_pclmul(uint32_t crc, const uint8_t *buf, size_t len)
{
    __m128i a, b, c, d, k, odd;
    const size_t r = len % 16;

    if (len < 16)
        return tio_crc32_portable(crc, buf, len);
    odd = _mm_cmpgt_epi8(_mm_set1_epi8((char)r), tio_load128(tio_iota));
    odd = _mm_xor_si128(_mm_and_si128(odd, tio_load128(buf)), tio_state128(crc));
    a = tio_fold128(odd, tio_load128(tio_crc32_fold[r]), tio_load128(buf + r));
    buf += r + 16;
    len -= r + 16;
    if (len >= 48) {
        b = tio_load128(buf);
        c = tio_load128(buf + 16);
        d = tio_load128(buf + 32);
        k = tio_load128(tio_crc32_fold[64]);
        for (buf += 48, len -= 48; len >= 64; buf += 64, len -= 64) {
            tio_prefetch(buf);
            a = tio_fold128(a, k, tio_load128(buf));
            b = tio_fold128(b, k, tio_load128(buf + 16));
            c = tio_fold128(c, k, tio_load128(buf + 32));
            d = tio_fold128(d, k, tio_load128(buf + 48));
        }
        k = tio_load128(tio_crc32_fold[32]);
        c = tio_fold128(a, k, c);
        d = tio_fold128(b, k, d);
        a = tio_fold128(c, tio_load128(tio_crc32_fold[16]), d);
    }
    k = tio_load128(tio_crc32_fold[16]);
    for (; len > 0; buf += 16, len -= 16)
        a = tio_fold128(a, k, tio_load128(buf));
    return tio_reduce128(a);
}

/* ---- 32 bytes ---- */

TIO_INLINE TIO_TARGET_VPCLMUL256 __m256i tio_load256(const void *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

TIO_INLINE TIO_TARGET_VPCLMUL256 __m256i tio_pair256(const uint64_t *pair)
{
    return _mm256_broadcastsi128_si256(tio_load128(pair));
}

/* The second product first, so that the first one may overwrite `a`: else gcc 12 copies it. */
TIO_INLINE TIO_TARGET_VPCLMUL256 __m256i tio_fold256(__m256i a, __m256i k, __m256i data)
{
    const __m256i second = _mm256_clmulepi64_epi128(a, k, 0x11);
    const __m256i first = _mm256_clmulepi64_epi128(a, k, 0x00);
    return _mm256_xor_si256(_mm256_xor_si256(first, second), data);
}

TIO_INLINE TIO_TARGET_VPCLMUL256 uint32_t tio_reduce256(__m256i a)
{
    const __m256i lanes = tio_fold256(a, tio_load256(tio_crc32_fold_lanes + 4),
                                      _mm256_setzero_si256());
    return tio_reduce128(
        _mm_xor_si128(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1)));
}

/* At least 32 bytes. */
TIO_TARGET_VPCLMUL256 static uint32_t tio_wide256(uint32_t crc, const uint8_t *buf, size_t len)
{
    __m256i a, b, c, d, k, odd;
    const size_t r = len % 32;

    odd = _mm256_cmpgt_epi8(_mm256_set1_epi8((char)r), tio_load256(tio_iota));
    odd = _mm256_xor_si256(_mm256_and_si256(odd, tio_load256(buf)),
                           _mm256_zextsi128_si256(tio_state128(crc)));
    a = tio_fold256(odd, tio_pair256(tio_crc32_fold[r]), tio_load256(buf + r));
    buf += r + 32;
    len -= r + 32;
    if (len >= 96) {
        b = tio_load256(buf);
        c = tio_load256(buf + 32);
        d = tio_load256(buf + 64);
        k = tio_pair256(tio_crc32_fold_128);
        for (buf += 96, len -= 96; len >= 128; buf += 128, len -= 128) {
            tio_prefetch(buf);
            a = tio_fold256(a, k, tio_load256(buf));
            b = tio_fold256(b, k, tio_load256(buf + 32));
            tio_prefetch(buf + 64);
            c = tio_fold256(c, k, tio_load256(buf + 64));
            d = tio_fold256(d, k, tio_load256(buf + 96));
        }
        k = tio_pair256(tio_crc32_fold[64]);
        c = tio_fold256(a, k, c);
        d = tio_fold256(b, k, d);
        a = tio_fold256(c, tio_pair256(tio_crc32_fold[32]), d);
    }
    k = tio_pair256(tio_crc32_fold[32]);
    for (; len > 0; buf += 32, len -= 32)
        a = tio_fold256(a, k, tio_load256(buf));
    return tio_reduce256(a);
}

static uint32_t tio_crc32_vpclmul256(uint32_t crc, const uint8_t *buf, size_t len)
{
    return len < 64 ? tio_crc32_pclmul(crc, buf, len) : tio_wide256(crc, buf, len);
}

/* ---- 64 bytes ---- */

TIO_INLINE TIO_TARGET_VPCLMUL512 __m512i tio_load512(const void *p)
{
    return _mm512_loadu_si512(p);
}

TIO_INLINE TIO_TARGET_VPCLMUL512 __m512i tio_pair512(const uint64_t *pair)
{
    return _mm512_broadcast_i32x4(tio_load128(pair));
}

TIO_INLINE TIO_TARGET_VPCLMUL512 __m512i tio_fold512(__m512i a, __m512i k, __m512i data)
{
    const __m512i second = _mm512_clmulepi64_epi128(a, k, 0x11);
    const __m512i first = _mm512_clmulepi64_epi128(a, k, 0x00);
    /* 0x96 is the truth table of a three-way XOR. */
    return _mm512_ternarylogic_epi64(first, second, data, 0x96);
}

TIO_INLINE TIO_TARGET_VPCLMUL512 uint32_t tio_reduce512(__m512i a)
{
    const __m512i lanes = tio_fold512(a, tio_load512(tio_crc32_fold_lanes), _mm512_setzero_si512());
    const __m256i two = _mm256_xor_si256(_mm512_castsi512_si256(lanes),
                                         _mm512_extracti64x4_epi64(lanes, 1));
    return tio_reduce128(
        _mm_xor_si128(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1)));
}

/* At least 64 bytes. */
TIO_TARGET_VPCLMUL512 static uint32_t tio_wide512(uint32_t crc, const uint8_t *buf, size_t len)
{
    __m512i a, b, c, d, k, odd;
    const size_t r = len % 64;

    odd = _mm512_xor_si512(_mm512_maskz_loadu_epi8(((uint64_t)1 << r) - 1, buf),
                           _mm512_zextsi128_si512(tio_state128(crc)));
    a = tio_fold512(odd, tio_pair512(tio_crc32_fold[r]), tio_load512(buf + r));
    buf += r + 64;
    len -= r + 64;
    if (len >= 192) {
        b = tio_load512(buf);
        c = tio_load512(buf + 64);
        d = tio_load512(buf + 128);
        k = tio_pair512(tio_crc32_fold_256);
        for (buf += 192, len -= 192; len >= 256; buf += 256, len -= 256) {
            tio_prefetch(buf);
            a = tio_fold512(a, k, tio_load512(buf));
            tio_prefetch(buf + 64);
            b = tio_fold512(b, k, tio_load512(buf + 64));
            tio_prefetch(buf + 128);
            c = tio_fold512(c, k, tio_load512(buf + 128));
            tio_prefetch(buf + 192);
            d = tio_fold512(d, k, tio_load512(buf + 192));
        }
        k = tio_pair512(tio_crc32_fold_128);
        c = tio_fold512(a, k, c);
        d = tio_fold512(b, k, d);
        a = tio_fold512(c, tio_pair512(tio_crc32_fold[64]), d);
    }
    k = tio_pair512(tio_crc32_fold[64]);
    for (; len > 0; buf += 64, len -= 64)
        a = tio_fold512(a, k, tio_load512(buf));
    return tio_reduce512(a);
}

static uint32_t tio_crc32_vpclmul512(uint32_t crc, const uint8_t *buf, size_t len)
{
    return len < 64 ? tio_crc32_pclmul(crc, buf, len) : tio_wide512(crc, buf, len);
}

#endif
