/* SPDX-License-Identifier: Apache-2.0
 *
 * The checksum. Holds: every variant that this CPU has gives what the bit by
 * bit definition gives, at any alignment and length, in one piece, in two, and
 * combined. The first bytes choose; the rest is repeated up to a length at which
 * the widest kernels run their main loops.
 */
#include "cpu.h"
#include "crc32.h"
#include "fuzz.h"

enum { LONGEST = 6000, ALIGNMENTS = 64 };

static uint32_t by_bits(uint32_t crc, const uint8_t *p, size_t n)
{
    size_t i;
    int bit;
    for (crc = ~crc, i = 0; i < n; i++)
        for (crc ^= p[i], bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
    return ~crc;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    choices c = {data, size};
    uint32_t start = (uint32_t)choose(&c, 4), want;
    size_t shift = (size_t)choose(&c, 1) % ALIGNMENTS;
    size_t length = (size_t)choose(&c, 2) % LONGEST, cut = (size_t)choose(&c, 2), i;
    uint8_t *whole = block(shift + length), *text = whole + shift;
    int row;
    cut = length ? cut % (length + 1) : 0;
    for (i = 0; i < length; i++)
        text[i] = c.left ? (uint8_t)(c.bytes[i % c.left] + i / c.left) : (uint8_t)(i * 7);
    want = by_bits(start, text, length);
    for (row = 0; row < tio_crc32_variant_count(); row++) {
        tio_crc32_fn crc32 = tio_crc32_variant(row);
        uint32_t head;
        HOLDS(tio_crc32_variant_name(row)[0] != 0);
        if (!tio_crc32_variant_usable(row))
            continue;
        HOLDS(crc32(start, text, length) == want);
        head = crc32(start, text, cut);
        HOLDS(crc32(head, text + cut, length - cut) == want);
        HOLDS(tio_crc32_combine(head, crc32(0, text + cut, length - cut), length - cut) == want);
    }
    tio_crc32_init();
    HOLDS(tio_crc32(start, text, length) == want);
    free(whole);
    return 0;
}
