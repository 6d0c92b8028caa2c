/* SPDX-License-Identifier: Apache-2.0
 *
 * Every CRC-32 variant that this CPU has, against a bit-at-a-time reference; and the combination of
 * checksums against checksums of the whole.
 */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */

#include <string.h>

#include "../../csrc/common.h"
#include "../../csrc/crc32.h"
#include "check.h"

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#define HAVE_MMAP 1
#endif

enum {
    MAX_SHORT = 1100,       /* beyond four vectors of 64 bytes, twice */
    ALIGNMENTS = 64,        /* of the widest vector */
    ARM_CHUNK = 3584,       /* TIO_CRC32_ARM_CHUNK */
    BIG = (1 << 20) + 4321, /* bytes; odd, and beyond any unrolling */
    ROUNDS = 300,
    FLIPS = 1500 /* bytes */
};

static uint8_t big[BIG];

/* The rows that this CPU can run; asked once, as it is slow in a virtual machine. */
static int rows[16];
static int row_count;

/* xorshift64: the same numbers in every run and on every system. */
static uint64_t random_state = 0x9E3779B97F4A7C15u;

static uint64_t random64(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static uint32_t random32(void)
{
    return (uint32_t)(random64() >> 32);
}

static size_t random_below(size_t n)
{
    return (size_t)(random64() % n);
}

/* By the definition: one bit at a time. */
static uint32_t reference(uint32_t crc, const uint8_t *buf, size_t len)
{
    crc = ~crc;
    for (size_t i = 0; i < len; i++) {
        crc ^= buf[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
    }
    return ~crc;
}

/* All usable variants must give `want`. */
static void check_all(uint32_t seed, const uint8_t *buf, size_t len, uint32_t want)
{
    for (int i = 0; i < row_count; i++) {
        if (!CHECK(tio_crc32_variant(rows[i])(seed, buf, len) == want))
            printf("  %s: seed %08x, len %lu, address %% 64 = %u\n",
                   tio_crc32_variant_name(rows[i]), (unsigned)seed, (unsigned long)len,
                   (unsigned)((uintptr_t)buf % 64));
    }
}

static void test_choice(void)
{
    CHECK(strcmp(tio_crc32_chosen(), "portable") == 0); /* before tio_crc32_init() */
    CHECK(tio_crc32(0, (const uint8_t *)"123456789", 9) == 0xCBF43926u);
    for (int row = 0; row < tio_crc32_variant_count(); row++) {
        const int usable = tio_crc32_variant_usable(row);
        printf("%-12s %s\n", tio_crc32_variant_name(row), usable ? "tested" : "not on this CPU");
        if (usable)
            rows[row_count++] = row;
    }
    CHECK(row_count > 0 && rows[0] == 0);
    tio_crc32_init();
    CHECK(strcmp(tio_crc32_chosen(), tio_crc32_variant_name(rows[row_count - 1])) == 0);
    CHECK(tio_crc32(0, (const uint8_t *)"123456789", 9) == 0xCBF43926u);
}

static void test_known_vectors(void)
{
    static const struct {
        const char *text;
        uint32_t want;
    } cases[] = {
        {"", 0},
        {"a", 0xE8B7BE43u},
        {"abc", 0x352441C2u},
        {"123456789", 0xCBF43926u}, /* the "check" value of CRC catalogues */
        {"The quick brown fox jumps over the lazy dog", 0x414FA339u},
    };
    static const uint8_t zeros[32];
    uint8_t ones[32];

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check_all(0, (const uint8_t *)cases[i].text, strlen(cases[i].text), cases[i].want);
    memset(ones, 0xFF, sizeof ones);
    check_all(0, zeros, sizeof zeros, 0x190A55ADu);
    check_all(0, ones, sizeof ones, 0xFF6CAB0Bu);
    check_all(0, NULL, 0, 0);
    check_all(0x12345678u, NULL, 0, 0x12345678u);
}

/* Every short length at every alignment, from 0 and from a random value. */
static void test_lengths_and_alignments(void)
{
    for (size_t at = 0; at < 2 * ALIGNMENTS; at++) {
        const uint32_t seed = at < ALIGNMENTS ? 0 : random32();
        const uint8_t *buf = big + 64 - (uintptr_t)big % 64 + at % ALIGNMENTS;
        uint32_t want = seed;
        for (size_t len = 0; len <= MAX_SHORT; len++) {
            check_all(seed, buf, len, want);
            want = reference(want, buf + len, 1);
        }
    }
}

static void test_larger_lengths(void)
{
    for (size_t chunks = 1; chunks <= 4; chunks++) {
        for (size_t len = chunks * ARM_CHUNK - 130; len <= chunks * ARM_CHUNK + 130; len += 13) {
            const uint32_t seed = random32();
            check_all(seed, big + 5, len, reference(seed, big + 5, len));
        }
    }
    for (int i = 0; i < ROUNDS; i++) {
        const size_t len = random_below(40000);
        const uint8_t *buf = big + random_below(BIG - len);
        const uint32_t seed = random32();
        check_all(seed, buf, len, reference(seed, buf, len));
    }
    check_all(0, big, BIG, reference(0, big, BIG));
    check_all(0, big + 1, BIG - 1, reference(0, big + 1, BIG - 1));
}

/* One bit at a time set: an error in one multiplier must not hide behind another. */
static void test_sparse_bytes(void)
{
    static uint8_t buf[FLIPS];

    for (size_t i = 0; i < sizeof buf; i++) {
        buf[i] = (uint8_t)(1u << i % 8);
        check_all(0, buf, sizeof buf, reference(0, buf, sizeof buf));
        buf[i] = 0;
    }
}

static void test_split_buffers(void)
{
    for (int i = 0; i < ROUNDS; i++) {
        const size_t len = random_below(9000);
        const uint8_t *buf = big + random_below(BIG - len);
        const uint32_t want = reference(0, buf, len);
        for (int k = 0; k < row_count; k++) {
            uint32_t crc = 0;
            for (size_t pos = 0; pos < len;) {
                const size_t left = len - pos;
                const size_t most = random32() % 4 != 0 && left > 100 ? 100 : left;
                const size_t piece = 1 + random_below(most);
                crc = tio_crc32_variant(rows[k])(crc, buf + pos, piece);
                pos += piece;
            }
            CHECK(crc == want);
        }
    }
}

/* Nothing outside the buffer is touched: at both ends lies a page without access. */
static void test_page_ends(void)
{
#if defined(HAVE_MMAP)
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uint8_t *map = mmap(NULL, 3 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint8_t *const first = map + page, *const end = first + page;

    if (!CHECK(map != MAP_FAILED) || !CHECK(mprotect(first, page, PROT_READ | PROT_WRITE) == 0))
        return;
    memcpy(first, big, page);
    for (size_t len = 0; len <= MAX_SHORT; len++) {
        check_all(7, first, len, reference(7, first, len));
        check_all(7, end - len, len, reference(7, end - len, len));
    }
    check_all(7, first, page, reference(7, first, page));
    munmap(map, 3 * page);
#endif
}

static void test_combine(void)
{
    for (int i = 0; i < ROUNDS; i++) {
        const size_t len = random_below(5000), cut = random_below(len + 1);
        const uint8_t *buf = big + random_below(BIG - len);
        const uint32_t a = reference(0, buf, cut), b = reference(0, buf + cut, len - cut);
        CHECK(tio_crc32_combine(a, b, len - cut) == reference(0, buf, len));
        CHECK(tio_crc32_combine(a, 0, 0) == a);
        CHECK(tio_crc32_combine(0, b, len - cut) == b);
    }
}

static void test_combine_huge_lengths(void)
{
    for (int i = 0; i < ROUNDS; i++) {
        const uint32_t a = random32(), b = random32(), c = random32();
        const uint64_t n = random64() >> 1, m = random64() >> 1;
        /* A, then B of n bytes, then C of m: either pair may be joined first. */
        CHECK(tio_crc32_combine(tio_crc32_combine(a, b, n), c, m) ==
              tio_crc32_combine(a, tio_crc32_combine(b, c, m), n + m));
        /* x^(2^32 - 1) is 1 modulo P, so over as many bytes nothing moves. */
        CHECK(tio_crc32_combine(a, b, 0xFFFFFFFFu) == (a ^ b));
        CHECK(tio_crc32_combine(a, b, UINT64_MAX) == (a ^ b)); /* (2^32 - 1) (2^32 + 1) */
    }
}

int main(void)
{
    for (size_t i = 0; i < BIG; i++)
        big[i] = (uint8_t)random64();
    test_choice();
    test_known_vectors();
    test_lengths_and_alignments();
    test_larger_lengths();
    test_sparse_bytes();
    test_split_buffers();
    test_page_ends();
    test_combine();
    test_combine_huge_lengths();
    return check_summary();
}
