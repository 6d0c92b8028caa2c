/* SPDX-License-Identifier: Apache-2.0
 *
 * What tio_zip_* writes, against bytes spelled out from the layout that
 * torch.save (2.13) has: each structure alone, at the edges where a number
 * becomes wide, and whole archives through the reader. Output goes to heap
 * blocks of the promised size, so that a sanitizer sees a write past it.
 */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "zip_read.h"
#include "zip_write.h"

#define U16(v)  (uint8_t)((v) & 0xFF), (uint8_t)((v) >> 8 & 0xFF)
#define U32(v)  U16((v) & 0xFFFF), U16((v) >> 16 & 0xFFFF)
#define U64(v)  U32((v) & 0xFFFFFFFF), U32((uint64_t)(v) >> 32)
#define ONES32  0xFFFFFFFFull
#define SIX_GIB 0x180000000ull

/* A placed record with a name of one byte. */
static tio_zip_entry placed(uint64_t size, uint64_t offset, uint32_t align)
{
    tio_zip_entry e;
    tio_error err;
    memset(&e, 0, sizeof e);
    e.size = size;
    e.name_len = 1;
    e.crc32 = 0x11223344;
    CHECK(tio_zip_place(&e, offset, align, &err) == TIO_OK);
    return e;
}

/* ---- One structure each ---- */

typedef uint64_t writer(const tio_zip_entry *e, uint8_t *out);

static uint64_t local(const tio_zip_entry *e, uint8_t *out)
{
    return tio_zip_local(e, (const uint8_t *)"n", out);
}

static uint64_t central(const tio_zip_entry *e, uint8_t *out)
{
    return tio_zip_central(e, (const uint8_t *)"n", out);
}

static int writes(writer *w, const tio_zip_entry *e, const uint8_t *expected, size_t n)
{
    uint8_t *out = malloc(n ? n : 1);
    uint64_t written = w(e, out);
    size_t i;
    for (i = 0; i < n && written == n; i++) {
        if (out[i] != expected[i]) {
            printf("  byte %zu: want %02x, got %02x\n", i, expected[i], out[i]);
            break;
        }
    }
    if (written != n)
        printf("  want %zu bytes, got %llu\n", n, (unsigned long long)written);
    free(out);
    return written == n && i == n;
}

#define WRITES(w, e, expected) CHECK(writes(w, e, expected, sizeof(expected)))

static void test_local(void)
{
    static const uint8_t expected[] = {
        'P',         'K',         3,      4, /* signature */
        U16(0),                              /* version needed */
        U16(0x0808),                         /* flags: descriptor, UTF-8 */
        U16(0),                              /* stored */
        U16(0),      U16(0),                 /* time, date */
        U32(0),      U32(0),      U32(0),    /* CRC and sizes stand behind the payload */
        U16(1),      U16(4 + 13),            /* name length, extra length */
        'n',         'F',         'B',    U16(13), 'Z', 'Z', 'Z', 'Z', 'Z',
        'Z',         'Z',         'Z',    'Z',     'Z', 'Z', 'Z', 'Z',
    };
    tio_zip_entry e = placed(5, 0, 16);
    CHECK(e.header_offset == 0 && e.data_offset == 48 && e.end_offset == 48 + 5 + 16);
    WRITES(local, &e, expected);
}

static void test_local_empty_payload(void)
{
    static const uint8_t expected[] = {
        'P',    'K',    3,      4,      U16(0), U16(0x0800), U16(0),
        U16(0), U16(0), U32(0), U32(0), U32(0), U16(1),      U16(4 + 2),
        'n',    'F',    'B',    U16(2), 'Z',    'Z', /* padded all the same */
    };
    tio_zip_entry e = placed(0, 11, 16);
    e.crc32 = 0;
    CHECK(e.data_offset == 48 && e.end_offset == 48);
    WRITES(local, &e, expected);
    CHECK(writes(tio_zip_descriptor, &e, expected, 0));
}

static void test_local_no_padding_due(void)
{
    static const uint8_t
        expected
            [] =
                {
                    'P',    'K',    3,      4,      U16(0), U16(0x0808), U16(0),
                    U16(0), U16(0), U32(0), U32(0), U32(0), U16(1),      U16(4),
                    'n',    'F',    'B',    U16(0), /* its head is there with nothing in it */
    };
    tio_zip_entry e = placed(5, 29, 64);
    CHECK(e.data_offset == 64);
    WRITES(local, &e, expected);
    e = placed(5, 29, 1);
    CHECK(e.data_offset == 64);
    WRITES(local, &e, expected);
}

static void test_local_wide_size(void)
{
    static const uint8_t expected[] = {
        'P',    'K',         3,      4,      U16(0),  U16(0x0808),  U16(0), U16(0),
        U16(0), U32(0),      U32(0), U32(0), /* sizes 0 here, too, not all ones */
        U16(1), U16(20 + 4), 'n',    U16(1), U16(16), U64(SIX_GIB), U64(0), /* zip64: size, then a compressed size of 0 */
        'F',    'B',         U16(0),
    };
    tio_zip_entry e = placed(SIX_GIB, 0, 1);
    CHECK(e.data_offset == 55 && e.end_offset == 55 + SIX_GIB + 24);
    WRITES(local, &e, expected);
}

static void test_local_wide_offset(void)
{
    static const uint8_t expected[] = {
        'P',    'K',          3,      4,      U16(0), U16(0x0808), U16(0), U16(0),
        U16(0), U32(0),       U32(0), U32(0), U16(1), U16(12 + 4), 'n',    U16(1),
        U16(8), U64(SIX_GIB), /* zip64: the record's own offset */
        'F',    'B',          U16(0),
    };
    tio_zip_entry e = placed(5, SIX_GIB, 1);
    CHECK(e.data_offset == SIX_GIB + 47 && e.end_offset == SIX_GIB + 47 + 5 + 24);
    WRITES(local, &e, expected);
}

static void test_local_wide_both(void)
{
    static const uint8_t expected[] = {
        'P',    'K',    3,       4,           U16(0), U16(0x0808),  U16(0),
        U16(0), U16(0), U32(0),  U32(0),      U32(0), U16(1),       U16(28 + 4 + 1),
        'n',    U16(1), U16(24), U64(ONES32), U64(0), U64(SIX_GIB), 'F',
        'B',    U16(1), 'Z',
    };
    tio_zip_entry e = placed(ONES32, SIX_GIB, 64);
    CHECK(e.data_offset == SIX_GIB + 64);
    WRITES(local, &e, expected);
}

static void test_descriptor(void)
{
    static const uint8_t narrow[] = {'P', 'K', 7, 8, U32(0x11223344), U32(5), U32(5)};
    static const uint8_t edge[] = {
        'P', 'K', 7, 8, U32(0x11223344), U32(0xFFFFFFFE), U32(0xFFFFFFFE),
    };
    static const uint8_t wide[] = {'P', 'K', 7, 8, U32(0x11223344), U64(ONES32), U64(ONES32)};
    static const uint8_t far[] = {'P', 'K', 7, 8, U32(0x11223344), U64(5), U64(5)};
    tio_zip_entry e = placed(5, 0, 64);
    WRITES(tio_zip_descriptor, &e, narrow);
    e = placed(ONES32 - 1, 0, 64);
    WRITES(tio_zip_descriptor, &e, edge);
    e = placed(ONES32, 0, 64);
    WRITES(tio_zip_descriptor, &e, wide);
    e = placed(5, ONES32, 64); /* a small record that lies far into the file */
    WRITES(tio_zip_descriptor, &e, far);
    e = placed(5, ONES32 - 1, 64);
    WRITES(tio_zip_descriptor, &e, narrow);
}

static void test_central(void)
{
    static const uint8_t expected[] = {
        'P',
        'K',
        1,
        2,
        U16(0),
        U16(0), /* made by, needed */
        U16(0x0808),
        U16(0),
        U16(0),
        U16(0), /* flags, method, time, date */
        U32(0x11223344),
        U32(5),
        U32(5),
        U16(1),
        U16(0),
        U16(0), /* name; no extra field, no comment */
        U16(0),
        U16(0),
        U32(0), /* disk, attributes */
        U32(29),
        'n',
    };
    tio_zip_entry e = placed(5, 29, 64);
    CHECK(tio_zip_central_size(&e) == sizeof expected);
    WRITES(central, &e, expected);
}

static void test_central_empty_payload(void)
{
    static const uint8_t expected[] = {
        'P',    'K',    1,      2,      U16(0), U16(0), U16(0x0800), U16(0), U16(0), U16(0), U32(0),
        U32(0), U32(0), U16(1), U16(0), U16(0), U16(0), U16(0),      U32(0), U32(0), 'n',
    };
    tio_zip_entry e = placed(0, 0, 64);
    e.crc32 = 0;
    WRITES(central, &e, expected);
}

static void test_central_wide(void)
{
    static const uint8_t size[] = {
        'P',          'K',     1,       2,      U16(0),          U16(0),
        U16(0x0808),  U16(0),  U16(0),  U16(0), U32(0x11223344), U32(ONES32),
        U32(ONES32),  U16(1),  U16(20), U16(0), U16(0),          U16(0),
        U32(0),       U32(29), 'n',     U16(1), U16(16),         U64(SIX_GIB),
        U64(SIX_GIB), /* both sizes true here */
    };
    static const uint8_t offset[] = {
        'P',         'K',         1,       2,      U16(0),          U16(0),
        U16(0x0808), U16(0),      U16(0),  U16(0), U32(0x11223344), U32(5),
        U32(5),      U16(1),      U16(12), U16(0), U16(0),          U16(0),
        U32(0),      U32(ONES32), 'n',     U16(1), U16(8),          U64(SIX_GIB),
    };
    static const uint8_t both[] = {
        'P',         'K',         1,       2,      U16(0),          U16(0),
        U16(0x0808), U16(0),      U16(0),  U16(0), U32(0x11223344), U32(ONES32),
        U32(ONES32), U16(1),      U16(28), U16(0), U16(0),          U16(0),
        U32(0),      U32(ONES32), 'n',     U16(1), U16(24),         U64(ONES32),
        U64(ONES32), U64(ONES32),
    };
    tio_zip_entry e = placed(SIX_GIB, 29, 64);
    CHECK(tio_zip_central_size(&e) == sizeof size);
    WRITES(central, &e, size);
    e = placed(5, SIX_GIB, 64);
    CHECK(tio_zip_central_size(&e) == sizeof offset);
    WRITES(central, &e, offset);
    e = placed(ONES32, ONES32, 64);
    CHECK(tio_zip_central_size(&e) == sizeof both);
    WRITES(central, &e, both);
}

/* A name that ends in a slash is a folder's. */
static void test_central_directory_attribute(void)
{
    uint8_t out[46 + 2];
    tio_zip_entry e = placed(0, 0, 64);
    e.name_len = 2;
    CHECK(tio_zip_central(&e, (const uint8_t *)"d/", out) == sizeof out);
    CHECK(out[38] == 0x10 && out[39] == 0 && out[40] == 0 && out[41] == 0);
}

static void test_tail(void)
{
    static const uint8_t expected[TIO_ZIP_TAIL_SIZE] = {
        'P',    'K',    6,        6,         U64(44), U16(0x031E), U16(0x002D), U32(0),    U32(0),
        U64(3), U64(3), U64(150), U64(1000), /* entries here, entries, size, offset */
        'P',    'K',    6,        7,         U32(0),  U64(1150),   U32(1),      'P',       'K',
        5,      6,      U16(0),   U16(0),    U16(3),  U16(3),      U32(150),    U32(1000), U16(0),
    };
    uint8_t *out = malloc(TIO_ZIP_TAIL_SIZE);
    tio_zip_tail(3, 1000, 150, out);
    CHECK(memcmp(out, expected, sizeof expected) == 0);
    free(out);
}

static void test_tail_wide(void)
{
    static const uint8_t expected[TIO_ZIP_TAIL_SIZE] = {
        'P',
        'K',
        6,
        6,
        U64(44),
        U16(0x031E),
        U16(0x002D),
        U32(0),
        U32(0),
        U64(70000),
        U64(70000),
        U64(SIX_GIB),
        U64(SIX_GIB + 1),
        'P',
        'K',
        6,
        7,
        U32(0),
        U64(2 * SIX_GIB + 1),
        U32(1),
        'P',
        'K',
        5,
        6,
        U16(0),
        U16(0),
        U16(0xFFFF),
        U16(0xFFFF),
        U32(ONES32),
        U32(ONES32),
        U16(0),
    };
    uint8_t out[TIO_ZIP_TAIL_SIZE];
    tio_zip_tail(70000, SIX_GIB + 1, SIX_GIB, out);
    CHECK(memcmp(out, expected, sizeof expected) == 0);
}

/* ---- Placing ---- */

static void test_place_every_alignment(void)
{
    uint32_t align;
    int aligned = 1, near = 1;
    for (align = 1; align <= TIO_ZIP_ALIGN_MAX; align++) {
        tio_zip_entry e = placed(7, 1000003, align);
        aligned &= e.data_offset % align == 0;
        near &= e.data_offset - 1000003 >= 35 && e.data_offset - 1000003 < 35 + align;
    }
    CHECK(aligned);
    CHECK(near);
}

/* The largest padding and zip64 field still fit the 16-bit length. */
static void test_place_longest_extra(void)
{
    tio_zip_entry e = placed(ONES32, SIX_GIB - 62, TIO_ZIP_ALIGN_MAX);
    uint64_t n = e.data_offset - e.header_offset;
    uint8_t *out = malloc(n);
    CHECK(n == 63 + TIO_ZIP_ALIGN_MAX - 1);
    CHECK(local(&e, out) == n);
    CHECK(out[28] + 256u * out[29] == n - 31);
    CHECK(out[n - 1] == 'Z');
    free(out);
}

static int refuses(uint64_t size, uint16_t name_len, uint64_t offset, uint32_t align, int code,
                   const char *what)
{
    tio_zip_entry e;
    tio_error err;
    memset(&e, 0, sizeof e);
    e.size = size;
    e.name_len = name_len;
    return tio_zip_place(&e, offset, align, &err) == code && err.code == code &&
           err.offset == offset && strstr(err.what, what) != NULL;
}

static void test_place_refusals(void)
{
    CHECK(refuses(5, 1, 9, 0, TIO_LIMIT, "alignment"));
    CHECK(refuses(5, 1, 9, TIO_ZIP_ALIGN_MAX + 1, TIO_LIMIT, "alignment"));
    CHECK(refuses(5, 0, 9, 64, TIO_MALFORMED, "file name length"));
    CHECK(refuses(UINT64_MAX, 1, 0, 64, TIO_LIMIT, "64 bits"));
    CHECK(refuses(UINT64_MAX - 64, 1, 0, 64, TIO_LIMIT, "64 bits")); /* the descriptor's 24 */
    CHECK(refuses(0, 1, UINT64_MAX - 30, 1, TIO_LIMIT, "64 bits"));
    CHECK(refuses(0, 1, UINT64_MAX - 60, 32768, TIO_LIMIT, "64 bits"));
}

/* ---- Whole archives ---- */

enum { COUNT = 40, NAME_MAX = 24 };

/* An archive of COUNT records, record i with i * 5 % 13 bytes of value i. */
static uint8_t *write_archive(uint32_t align, tio_zip_entry *e, uint64_t *len)
{
    char name[NAME_MAX];
    uint64_t at = 0, directory, i;
    uint8_t *out;
    tio_error err;
    for (i = 0; i < COUNT; i++) {
        e[i].size = i * 5 % 13;
        e[i].name_len = (uint16_t)snprintf(name, sizeof name, "archive/data/%d", (int)i);
        e[i].crc32 = e[i].size != 0 ? (uint32_t)i * 0x01010101u : 0;
        CHECK(tio_zip_place(&e[i], at, align, &err) == TIO_OK);
        at = e[i].end_offset;
    }
    directory = at;
    for (i = 0; i < COUNT; i++)
        at += tio_zip_central_size(&e[i]);
    *len = at + TIO_ZIP_TAIL_SIZE;
    out = malloc(*len);
    at = directory;
    for (i = 0; i < COUNT; i++) {
        snprintf(name, sizeof name, "archive/data/%d", (int)i);
        tio_zip_local(&e[i], (const uint8_t *)name, out + e[i].header_offset);
        memset(out + e[i].data_offset, (int)i, e[i].size);
        tio_zip_descriptor(&e[i], out + e[i].data_offset + e[i].size);
        at += tio_zip_central(&e[i], (const uint8_t *)name, out + at);
    }
    tio_zip_tail(COUNT, directory, at - directory, out + at);
    return out;
}

static void test_round_trip(uint32_t align)
{
    tio_zip_entry e[COUNT];
    tio_zip_record rows[COUNT];
    uint32_t order[COUNT];
    uint64_t len, bad, i;
    tio_zip_archive zip;
    tio_error err;
    uint8_t *bytes = write_archive(align, e, &len);
    int same = 1;
    if (CHECK(tio_zip_open(bytes, len, &zip, &err) == TIO_OK && zip.n_records == COUNT) &&
        CHECK(tio_zip_read(bytes, len, &zip, rows, order, &bad, NULL, NULL, &err) == TIO_OK)) {
        for (i = 0; i < COUNT; i++)
            same &= order[i] == i && rows[i].header_offset == e[i].header_offset &&
                    rows[i].data_offset == e[i].data_offset && rows[i].size == e[i].size &&
                    rows[i].crc32 == e[i].crc32 && rows[i].name_len == e[i].name_len;
        CHECK(same);
        CHECK(zip.zip64 && zip.archive_end == len);
    }
    free(bytes);
}

int main(void)
{
    static const uint32_t aligns[] = {1, 2, 3, 16, 48, 64, 100, 4096, 32767, 32768};
    size_t i;
    test_local();
    test_local_empty_payload();
    test_local_no_padding_due();
    test_local_wide_size();
    test_local_wide_offset();
    test_local_wide_both();
    test_descriptor();
    test_central();
    test_central_empty_payload();
    test_central_wide();
    test_central_directory_attribute();
    test_tail();
    test_tail_wide();
    test_place_every_alignment();
    test_place_longest_extra();
    test_place_refusals();
    for (i = 0; i < sizeof aligns / sizeof *aligns; i++)
        test_round_trip(aligns[i]);
    return check_summary();
}
