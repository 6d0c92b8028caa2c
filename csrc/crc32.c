/* SPDX-License-Identifier: Apache-2.0
 *
 * CRC-32: what is computed, three ways to do it, and the choice among them.
 *
 * What. Read the bytes of a message as one long polynomial M(x) over GF(2), where adding is XOR:
 * the low bit of the first byte is the highest coefficient. The remainder of M is M x^32 mod P. The
 * checksum is that, with the first 32 bits of M inverted before and the 32 bits of the result
 * inverted after. A 32-bit remainder is held "reflected" as well, its highest coefficient in bit 0;
 * so multiplying by x is a shift to the right, and if a 1 falls out, P is subtracted.
 *
 * Two facts carry everything below. Division is linear: the remainder of a sum is the sum of the
 * remainders, so a message may be cut up and the parts be dealt with apart. And a remainder c that
 * stands before n more bytes counts as c x^8n: adding c to the next 32 bits of the message, in
 * front of which only zeros are left, has the same effect.
 *
 * 1. By table. Of eight bytes, each is followed by 7, 6, ... 0 others. What it adds to the result
 *    depends on its value and on that number only: eight tables of 256. Portable.
 *
 * 2. By folding. Take a 128-bit block H x^64 + L, with n bits more up to the next place where it is
 *    wanted. H (x^(n+64) mod P) + L (x^n mod P) has the same remainder there, and fewer than 128
 *    bits: two carry-less multiplications, and it is added to the block that stands there already.
 *    A whole message so becomes one block. The multipliers depend on n only and are tabulated.
 *
 * 3. By instruction, on ARM.
 *
 * All numbers are derived in tools/gen_crc32_tables.py.
 */
#include "crc32.h"

#include "common.h"
#include "cpu.h"
#include "crc32_tables.h"

/* P without x^32, reflected. */
#define POLYNOMIAL 0xEDB88320u

static uint32_t tio_crc32_portable(uint32_t crc, const uint8_t *buf, size_t len)
{
    uint32_t c = ~crc;

    for (; len >= 8; buf += 8, len -= 8) {
        const uint32_t a = tio_load32(buf) ^ c, b = tio_load32(buf + 4);
        c = tio_crc32_slice[7][a & 0xFF] ^ tio_crc32_slice[6][a >> 8 & 0xFF] ^
            tio_crc32_slice[5][a >> 16 & 0xFF] ^ tio_crc32_slice[4][a >> 24] ^
            tio_crc32_slice[3][b & 0xFF] ^ tio_crc32_slice[2][b >> 8 & 0xFF] ^
            tio_crc32_slice[1][b >> 16 & 0xFF] ^ tio_crc32_slice[0][b >> 24];
    }
    for (; len > 0; buf++, len--)
        c = c >> 8 ^ tio_crc32_slice[0][(c ^ *buf) & 0xFF];
    return ~c;
}

/* Other compilers get the portable variant. gcc 10 is the first with _mm512_zextsi128_si512. */
#if (defined(__x86_64__) || defined(_M_X64)) && (defined(__clang__) || __GNUC__ >= 10)
#define TIO_CRC32_X86 1
#include "crc32_x86.h"
#elif defined(__aarch64__) && !TIO_BIG_ENDIAN && (defined(__clang__) || defined(__GNUC__))
#define TIO_CRC32_ARM 1
#include "crc32_arm.h"
#endif

typedef struct {
    const char *name;
    unsigned needs; /* CPU features, all of them */
    tio_crc32_fn fn;
} crc32_row;

/* Ranked: slowest first. */
static const crc32_row rows[] = {
    {"portable", 0, tio_crc32_portable},
#if defined(TIO_CRC32_X86)
    {"pclmul", TIO_CPU_PCLMUL, tio_crc32_pclmul},
    {"vpclmul256", TIO_CPU_PCLMUL | TIO_CPU_VPCLMUL | TIO_CPU_AVX2, tio_crc32_vpclmul256},
    {"vpclmul512", TIO_CPU_PCLMUL | TIO_CPU_VPCLMUL | TIO_CPU_AVX2 | TIO_CPU_AVX512,
     tio_crc32_vpclmul512},
#elif defined(TIO_CRC32_ARM)
    {"armv8", TIO_CPU_ARM_CRC32, tio_crc32_armv8},
    {"pmull", TIO_CPU_ARM_CRC32 | TIO_CPU_ARM_PMULL, tio_crc32_pmull},
#endif
};

static const crc32_row *chosen = rows;

int tio_crc32_variant_count(void)
{
    return (int)(sizeof rows / sizeof rows[0]);
}

const char *tio_crc32_variant_name(int row)
{
    return rows[row].name;
}

int tio_crc32_variant_usable(int row)
{
    return (rows[row].needs & ~tio_cpu_features()) == 0;
}

tio_crc32_fn tio_crc32_variant(int row)
{
    return rows[row].fn;
}

const char *tio_crc32_chosen(void)
{
    return chosen->name;
}

void tio_crc32_init(void)
{
    int row = tio_crc32_variant_count() - 1;

    while (!tio_crc32_variant_usable(row)) /* row 0 always is */
        row--;
    chosen = &rows[row];
}

uint32_t tio_crc32(uint32_t crc, const uint8_t *buf, size_t len)
{
    return chosen->fn(crc, buf, len);
}

/* The product of two reflected remainders, modulo P: the sum of b x^i for each coefficient of `a`
 * that is 1, from x^0, its top bit, on. */
static uint32_t multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;

    for (; a != 0; a <<= 1) {
        product ^= b & (0 - (a >> 31));
        b = b >> 1 ^ (POLYNOMIAL & (0 - (b & 1)));
    }
    return product;
}

/* crc_a moved on over len_b bytes: times x^(8 len_b), the product of one x^(2^k) for each bit of
 * that exponent. The inversions of A's end and B's beginning cancel. */
uint32_t tio_crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t len_b)
{
    unsigned k = 3; /* 8 = 2^3 */

    for (; len_b != 0; len_b >>= 1, k++)
        if (len_b & 1)
            crc_a = multiply(tio_crc32_squares[k % 32], crc_a);
    return crc_a ^ crc_b;
}
