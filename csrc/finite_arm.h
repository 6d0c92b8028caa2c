/* SPDX-License-Identifier: Apache-2.0
 *
 * Elements that match, by the vectors of 64-bit ARM. Included by finite.c only.
 *
 * Vectors are loaded as elements, not as bytes, so that the byte order of the machine holds.
 * Speed was not measured on hardware: this was tested under qemu.
 */
#ifndef TENSORIO_FINITE_ARM_H
#define TENSORIO_FINITE_ARM_H

#include <arm_neon.h>

/* Elements of a whole block without a match are passed over; the number of bytes passed over. */
#define TIO_SKIP_NEON(bits, lanes)                                                                 \
    static size_t tio_skip_neon##bits(const uint8_t *buf, size_t nbytes, uint64_t mask,            \
                                      uint64_t pattern)                                            \
    {                                                                                              \
        const uint##bits##x##lanes##_t m = vdupq_n_u##bits((uint##bits##_t)mask);                  \
        const uint##bits##x##lanes##_t want = vdupq_n_u##bits((uint##bits##_t)pattern);            \
        size_t at, i;                                                                              \
        for (at = 0; nbytes - at >= BLOCK; at += BLOCK) {                                          \
            uint##bits##x##lanes##_t found = vdupq_n_u##bits(0);                                   \
            for (i = 0; i < BLOCK; i += 16) {                                                      \
                uint##bits##x##lanes##_t v;                                                        \
                memcpy(&v, buf + at + i, sizeof v);                                                \
                found = vorrq_u##bits(found, vceqq_u##bits(vandq_u##bits(v, m), want));            \
            }                                                                                      \
            if (vmaxvq_u32(vreinterpretq_u32_u##bits(found)))                                      \
                break;                                                                             \
        }                                                                                          \
        return at;                                                                                 \
    }

#define vreinterpretq_u32_u32(v) (v)
TIO_SKIP_NEON(8, 16)
TIO_SKIP_NEON(16, 8)
TIO_SKIP_NEON(32, 4)
TIO_SKIP_NEON(64, 2)
#undef vreinterpretq_u32_u32

static size_t tio_match_neon(const uint8_t *buf, size_t count, unsigned width, uint64_t mask,
                             uint64_t pattern)
{
    const size_t nbytes = count * width;
    const size_t at = (width == 1   ? tio_skip_neon8(buf, nbytes, mask, pattern)
                       : width == 2 ? tio_skip_neon16(buf, nbytes, mask, pattern)
                       : width == 4 ? tio_skip_neon32(buf, nbytes, mask, pattern)
                                    : tio_skip_neon64(buf, nbytes, mask, pattern)) /
                      width;
    return at + find_slowly(buf + at * width, count - at, width, mask, pattern);
}

#endif
