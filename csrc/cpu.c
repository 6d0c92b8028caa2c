/* SPDX-License-Identifier: Apache-2.0
 *
 * One function per architecture, chosen by the preprocessor. Bit positions: Intel SDM volume 2A,
 * CPUID; Linux arch/arm64/include/uapi/asm/hwcap.h.
 */
#include "cpu.h"

#if (defined(__GNUC__) || defined(__clang__)) && (defined(__x86_64__) || defined(_M_X64))

#include <cpuid.h>

enum {
    LEAF1_ECX_PCLMULQDQ = 1 << 1,
    LEAF1_ECX_SSE41 = 1 << 19,
    LEAF1_ECX_OSXSAVE = 1 << 27,
    LEAF7_EBX_AVX2 = 1 << 5,
    LEAF7_EBX_AVX512F = 1 << 16,
    LEAF7_EBX_AVX512BW = 1 << 30,
    LEAF7_ECX_VPCLMULQDQ = 1 << 10,
    XCR0_YMM = 0x06, /* SSE and AVX state */
    XCR0_ZMM = 0xE6  /* the same, mask registers, and both parts of the zmm registers */
};

/* Not in an enum: bit 31 is beyond int. */
#define LEAF7_EBX_AVX512VL (1u << 31)

/* Register sets that the system saves. Assembly, as the intrinsic needs a compiler flag. */
static unsigned read_xcr0(void)
{
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static int has_all(unsigned word, unsigned bits)
{
    return (word & bits) == bits;
}

unsigned tio_cpu_features(void)
{
    unsigned eax, ebx, ecx, edx, xcr0 = 0, features = 0;

    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx))
        return 0;
    if (has_all(ecx, LEAF1_ECX_PCLMULQDQ | LEAF1_ECX_SSE41))
        features |= TIO_CPU_PCLMUL;
    if (ecx & LEAF1_ECX_OSXSAVE)
        xcr0 = read_xcr0();
    if (!has_all(xcr0, XCR0_YMM) || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx))
        return features;
    if (ebx & LEAF7_EBX_AVX2)
        features |= TIO_CPU_AVX2;
    if (ecx & LEAF7_ECX_VPCLMULQDQ)
        features |= TIO_CPU_VPCLMUL;
    if (has_all(xcr0, XCR0_ZMM) &&
        has_all(ebx, LEAF7_EBX_AVX512F | LEAF7_EBX_AVX512BW | LEAF7_EBX_AVX512VL))
        features |= TIO_CPU_AVX512;
    return features;
}

#elif defined(__aarch64__) && defined(__APPLE__)

/* Every Apple CPU that runs 64-bit macOS has both. */
unsigned tio_cpu_features(void)
{
    return TIO_CPU_ARM_CRC32 | TIO_CPU_ARM_PMULL;
}

#elif defined(__aarch64__) && defined(__linux__)

#include <sys/auxv.h>

/* The kernel's numbers; <asm/hwcap.h> is not part of libc. */
#define LINUX_HWCAP_PMULL (1UL << 4)
#define LINUX_HWCAP_CRC32 (1UL << 7)

unsigned tio_cpu_features(void)
{
    unsigned long hwcap = getauxval(AT_HWCAP);
    unsigned features = 0;

    if (hwcap & LINUX_HWCAP_CRC32)
        features |= TIO_CPU_ARM_CRC32;
    if (hwcap & LINUX_HWCAP_PMULL)
        features |= TIO_CPU_ARM_PMULL;
    return features;
}

#else

unsigned tio_cpu_features(void)
{
    return 0;
}

#endif
