/* SPDX-License-Identifier: Apache-2.0
 *
 * What this CPU can do beyond the baseline of its architecture, as far as csrc has code for it.
 * A bit is set only if the operating system also keeps the registers involved.
 */
#ifndef TENSORIO_CPU_H
#define TENSORIO_CPU_H

#include <stdint.h>

enum {
    TIO_CPU_PCLMUL = 1 << 0,    /* x86: PCLMULQDQ and SSE4.1 */
    TIO_CPU_AVX2 = 1 << 1,      /* x86: AVX2 */
    TIO_CPU_AVX512 = 1 << 2,    /* x86: AVX-512 F, BW and VL */
    TIO_CPU_VPCLMUL = 1 << 3,   /* x86: VPCLMULQDQ; which width, the AVX bits say */
    TIO_CPU_ARM_CRC32 = 1 << 4, /* ARM: crc32b ... crc32x */
    TIO_CPU_ARM_PMULL = 1 << 5  /* ARM: pmull of 64-bit words */
};

/* The OR of the bits above; 0 where we do not know how to ask. Keep the answer: asking costs
 * microseconds in a virtual machine, where each cpuid instruction leaves the guest. */
unsigned tio_cpu_features(void);

#endif
