/* SPDX-License-Identifier: Apache-2.0
 *
 * CRC-32 on 64-bit ARM, which has an instruction for this very polynomial, crc32x (8 bytes at a
 * time), and a carry-less multiplication, pmull. Included by crc32.c only, which explains blocks
 * and folding.
 *
 * crc32x starts once per cycle, but its result takes 2 or 3; so one stream leaves it idle half of
 * the time. And pmull runs in another unit. The faster variant keeps both busy, in chunks:
 *
 *     | stream a | stream b | stream c | folded part                            |
 *       two crc32x a step in each        four accumulators, eight pmull a step
 *
 * All four start from zero. At the end of a chunk each remainder is moved on over the bytes that
 * follow it, and so is the remainder of everything before; their sum is the new remainder. That
 * way chunks hardly wait for each other.
 *
 * The instructions are assembly because clang before 16 hides the intrinsics unless the whole file
 * is compiled for them. Speed was not measured on hardware: this was tested under qemu.
 */
#ifndef TENSORIO_CRC32_ARM_H
#define TENSORIO_CRC32_ARM_H

#include <arm_neon.h>

#if defined(__clang__)
#define TIO_TARGET_CRC   __attribute__((target("crc")))
#define TIO_TARGET_PMULL __attribute__((target("crc,aes")))
#else
#define TIO_TARGET_CRC   __attribute__((target("+crc")))
#define TIO_TARGET_PMULL __attribute__((target("+crc+crypto")))
#endif
/* Helpers must be inlined, or vectors would pass through memory. */
#define TIO_INLINE static inline __attribute__((always_inline))

/* The remainder `c` after one more byte, and after 8 more. No inversions here. */
TIO_INLINE TIO_TARGET_CRC uint32_t tio_crc32b(uint32_t c, uint8_t byte)
{
    __asm__("crc32b %w0, %w0, %w1" : "+r"(c) : "r"(byte));
    return c;
}

TIO_INLINE TIO_TARGET_CRC uint32_t tio_crc32x(uint32_t c, uint64_t word)
{
    __asm__("crc32x %w0, %w0, %x1" : "+r"(c) : "r"(word));
    return c;
}

TIO_INLINE TIO_TARGET_CRC uint32_t tio_stream(uint32_t c, const uint8_t *buf, size_t len)
{
    for (; len >= 8; buf += 8, len -= 8)
        c = tio_crc32x(c, tio_load64(buf));
    for (; len > 0; buf++, len--)
        c = tio_crc32b(c, *buf);
    return c;
}

TIO_TARGET_CRC static uint32_t tio_crc32_armv8(uint32_t crc, const uint8_t *buf, size_t len)
{
    return ~tio_stream(~crc, buf, len);
}

TIO_INLINE TIO_TARGET_PMULL uint64x2_t tio_load128(const uint8_t *p)
{
    return vreinterpretq_u64_u8(vld1q_u8(p));
}

/* `a` moved on by the distance of the pair k, onto `data`. */
TIO_INLINE TIO_TARGET_PMULL uint64x2_t tio_fold128(uint64x2_t a, uint64x2_t k, uint64x2_t data)
{
    uint64x2_t first, second;
    __asm__("pmull %0.1q, %1.1d, %2.1d" : "=w"(first) : "w"(a), "w"(k));
    __asm__("pmull2 %0.1q, %1.2d, %2.2d" : "=w"(second) : "w"(a), "w"(k));
    return veorq_u64(veorq_u64(first, second), data);
}

/* The remainder of a block: crc32x is the definition of it. */
TIO_INLINE TIO_TARGET_PMULL uint32_t tio_reduce128(uint64x2_t block)
{
    return tio_crc32x(tio_crc32x(0, vgetq_lane_u64(block, 0)), vgetq_lane_u64(block, 1));
}

TIO_INLINE TIO_TARGET_PMULL uint64x2_t tio_join128(uint64x2_t a, uint64x2_t b, uint64x2_t c,
                                                   uint64x2_t d)
{
    const uint64x2_t k2 = vld1q_u64(tio_crc32_fold[32]), k1 = vld1q_u64(tio_crc32_fold[16]);
    c = tio_fold128(a, k2, c);
    d = tio_fold128(b, k2, d);
    return tio_fold128(c, k1, d);
}

/* The product of a remainder and one of the multipliers for appended zeros, before reduction: 63
 * bits, so the sum of several still fits one crc32x. */
TIO_INLINE TIO_TARGET_PMULL uint64_t tio_times(uint32_t c, uint32_t multiplier)
{
    const uint64x2_t a = vdupq_n_u64(c), k = vdupq_n_u64(multiplier);
    uint64x2_t product;
    __asm__("pmull %0.1q, %1.1d, %2.1d" : "=w"(product) : "w"(a), "w"(k));
    return vgetq_lane_u64(product, 0);
}

/* One chunk: the remainder `before` and after it. */
TIO_INLINE TIO_TARGET_PMULL uint32_t tio_chunk(uint32_t before, const uint8_t *buf)
{
    const uint64x2_t k = vld1q_u64(tio_crc32_fold[64]);
    const uint8_t *const folded = buf + 3 * TIO_CRC32_ARM_STREAM;
    uint64x2_t v0 = vdupq_n_u64(0), v1 = v0, v2 = v0, v3 = v0;
    uint32_t a = 0, b = 0, c = 0;
    uint64_t sum;
    size_t i;

    for (i = 0; i < TIO_CRC32_ARM_STREAM; i += 16) {
        const uint8_t *const p = buf + i, *const q = folded + 4 * i;
        a = tio_crc32x(a, tio_load64(p));
        v0 = tio_fold128(v0, k, tio_load128(q));
        b = tio_crc32x(b, tio_load64(p + TIO_CRC32_ARM_STREAM));
        v1 = tio_fold128(v1, k, tio_load128(q + 16));
        c = tio_crc32x(c, tio_load64(p + 2 * TIO_CRC32_ARM_STREAM));
        v2 = tio_fold128(v2, k, tio_load128(q + 32));
        a = tio_crc32x(a, tio_load64(p + 8));
        v3 = tio_fold128(v3, k, tio_load128(q + 48));
        b = tio_crc32x(b, tio_load64(p + TIO_CRC32_ARM_STREAM + 8));
        c = tio_crc32x(c, tio_load64(p + 2 * TIO_CRC32_ARM_STREAM + 8));
    }
    sum = tio_times(a, TIO_CRC32_ARM_AFTER_A) ^ tio_times(b, TIO_CRC32_ARM_AFTER_B) ^
          tio_times(c, TIO_CRC32_ARM_AFTER_C) ^ tio_times(before, TIO_CRC32_ARM_WHOLE);
    return tio_crc32x(0, sum) ^ tio_reduce128(tio_join128(v0, v1, v2, v3));
}

TIO_TARGET_PMULL static uint32_t tio_crc32_pmull(uint32_t crc, const uint8_t *buf, size_t len)
{
    const uint64x2_t k = vld1q_u64(tio_crc32_fold[64]);
    uint64x2_t v0, v1, v2, v3;
    uint32_t c = ~crc;

    for (; len >= TIO_CRC32_ARM_CHUNK; buf += TIO_CRC32_ARM_CHUNK, len -= TIO_CRC32_ARM_CHUNK)
        c = tio_chunk(c, buf);
    if (len >= 64) {
        v0 = veorq_u64(tio_load128(buf), vsetq_lane_u64(c, vdupq_n_u64(0), 0));
        v1 = tio_load128(buf + 16);
        v2 = tio_load128(buf + 32);
        v3 = tio_load128(buf + 48);
        for (buf += 64, len -= 64; len >= 64; buf += 64, len -= 64) {
            v0 = tio_fold128(v0, k, tio_load128(buf));
            v1 = tio_fold128(v1, k, tio_load128(buf + 16));
            v2 = tio_fold128(v2, k, tio_load128(buf + 32));
            v3 = tio_fold128(v3, k, tio_load128(buf + 48));
        }
        c = tio_reduce128(tio_join128(v0, v1, v2, v3));
    }
    return ~tio_stream(c, buf, len);
}

#endif
