/* SPDX-License-Identifier: Apache-2.0
 *
 * Elements that match: every row of the table against a loop that looks at one element at a time.
 */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "finite.h"

#define ROOM 1100 /* bytes: some blocks and a rest, at every alignment */

static uint64_t load(const uint8_t *p, unsigned width)
{
    uint16_t two;
    uint32_t four;
    uint64_t eight;
    switch (width) {
    case 1: return *p;
    case 2: memcpy(&two, p, 2); return two;
    case 4: memcpy(&four, p, 4); return four;
    default: memcpy(&eight, p, 8); return eight;
    }
}

static void store(uint8_t *p, unsigned width, uint64_t value)
{
    const uint16_t two = (uint16_t)value;
    const uint32_t four = (uint32_t)value;
    if (width == 1)
        *p = (uint8_t)value;
    else if (width == 2)
        memcpy(p, &two, 2);
    else if (width == 4)
        memcpy(p, &four, 4);
    else
        memcpy(p, &value, 8);
}

static size_t reference(const uint8_t *buf, size_t count, unsigned width, uint64_t mask,
                        uint64_t pattern)
{
    size_t i;
    for (i = 0; i < count; i++)
        if ((load(buf + i * width, width) & mask) == pattern)
            return i;
    return count;
}

static const struct {
    unsigned width;
    uint64_t mask, pattern;
} KINDS[] = {
    {1, 0x7C, 0x7C},             /* float8_e5m2 */
    {1, 0x7F, 0x7F},             /* float8_e4m3fn */
    {1, 0xFF, 0x80},             /* the fnuz types */
    {2, 0x7C00, 0x7C00},         /* float16 */
    {2, 0x7F80, 0x7F80},         /* bfloat16 */
    {4, 0x7F800000, 0x7F800000}, /* float32 */
    {8, 0x7FF0000000000000, 0x7FF0000000000000},
};
#define N_KINDS (sizeof KINDS / sizeof *KINDS)

/* Every place of the one match, every length around the blocks, every alignment; the buffer is
 * exactly as long as it says, so that a sanitizer sees every byte read too far. */
static void test_the_first_match_is_found(tio_match_fn find)
{
    size_t k, nbytes, place, shift;
    for (k = 0; k < N_KINDS; k++) {
        const unsigned width = KINDS[k].width;
        for (nbytes = 0; nbytes <= ROOM; nbytes += nbytes < 64 ? width : 96) {
            const size_t count = nbytes / width;
            for (shift = 0; shift < 3; shift++) {
                uint8_t *all = calloc(nbytes + shift ? nbytes + shift : 1, 1), *buf = all + shift;
                CHECK(find(buf, count, width, KINDS[k].mask, KINDS[k].pattern) == count);
                for (place = 0; place < count; place += 1 + place / 40) {
                    store(buf + place * width, width, KINDS[k].pattern);
                    CHECK(find(buf, count, width, KINDS[k].mask, KINDS[k].pattern) == place);
                    store(buf + place * width, width, 0);
                }
                free(all);
            }
        }
    }
}

static void test_random_bytes_agree(tio_match_fn find)
{
    uint8_t buf[ROOM];
    uint64_t state = 88172645463325252u;
    size_t k, i;
    int round;
    for (round = 0; round < 300; round++)
        for (k = 0; k < N_KINDS; k++) {
            const size_t count = ROOM / KINDS[k].width - (size_t)round % 9;
            for (i = 0; i < ROOM; i++) {
                state ^= state << 13, state ^= state >> 7, state ^= state << 17;
                /* rarely all ones: matches far in as well as at once */
                buf[i] = (uint8_t)(state >> 20) & (uint8_t)(round % 3 ? 0x3F : 0xFF);
            }
            CHECK(find(buf, count, KINDS[k].width, KINDS[k].mask, KINDS[k].pattern) ==
                  reference(buf, count, KINDS[k].width, KINDS[k].mask, KINDS[k].pattern));
        }
}

static void test_counts(void)
{
    uint8_t buf[ROOM];
    size_t k, i;
    for (k = 0; k < N_KINDS; k++) {
        const unsigned width = KINDS[k].width;
        memset(buf, 0, sizeof buf);
        for (i = 0; i < 7; i++)
            store(buf + i * 13 * width, width, KINDS[k].pattern);
        CHECK(tio_match_count(buf, 100, width, KINDS[k].mask, KINDS[k].pattern) == 7);
        CHECK(tio_match_count(buf, 13, width, KINDS[k].mask, KINDS[k].pattern) == 1);
        CHECK(tio_match_count(NULL, 0, width, KINDS[k].mask, KINDS[k].pattern) == 0);
    }
}

static void test_other_widths_match_nothing(void)
{
    const uint8_t buf[16] = {0};
    CHECK(tio_match_find(buf, 5, 3, 0, 0) == 5);
    CHECK(tio_match_find(buf, 1, 16, 0, 0) == 1);
    CHECK(tio_match_count(buf, 5, 3, 0, 0) == 0);
}

static void test_runs(void)
{
    static const tio_match_kind kinds[] = {
        {4, 0x7F800000, 0x7F800000}, {0, 0, 0}, {1, 0x7C, 0x7C}, {3, 0, 0}};
    uint8_t a[400] = {0}, b[65] = {0}, c[8] = {0};
    const int64_t at_a = (int64_t)(uintptr_t)a, at_b = (int64_t)(uintptr_t)b,
                  at_c = (int64_t)(uintptr_t)c;
    const tio_match_run runs[] = {
        {0, at_a, sizeof a, 7, 0}, {1, at_b, sizeof b, 8, 0}, {2, at_b, sizeof b, 9, 64},
        {3, at_c, sizeof c, 1, 0}, {0, 0, 0, 2, 0},           {0, at_c, sizeof c, 3, 0}};
    size_t first = 0;

    CHECK(tio_match_runs(runs, 0, 6, kinds, &first) == 6);
    memset(c, 0xFF, sizeof c); /* of the unknown width, too */
    b[64] = 0x7D;
    CHECK(tio_match_runs(runs, 0, 6, kinds, &first) == 2 && first == 64);
    CHECK(tio_match_runs(runs, 3, 6, kinds, &first) == 5 && first == 0);
    CHECK(tio_match_runs(runs, 3, 5, kinds, &first) == 5);
    a[398] = 0x80, a[399] = 0x7F;
    CHECK(tio_match_runs(runs, 0, 6, kinds, &first) == 0 && first == 99);
    CHECK(tio_match_runs(runs, 6, 6, kinds, &first) == 6);
}

int main(void)
{
    int row;
    CHECK(strcmp(tio_match_chosen(), "portable") == 0);
    tio_match_init();
    for (row = 0; row < tio_match_variant_count(); row++)
        if (tio_match_variant_usable(row)) {
            printf("%s ", tio_match_variant_name(row));
            test_the_first_match_is_found(tio_match_variant(row));
            test_random_bytes_agree(tio_match_variant(row));
        }
    test_counts();
    test_other_widths_match_nothing();
    test_runs();
    return check_summary();
}
