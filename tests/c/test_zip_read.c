/* SPDX-License-Identifier: Apache-2.0
 *
 * tio_zip_open and tio_zip_read over archives spelled out byte by byte. A
 * failure case is such an archive with a field or two replaced; it names the
 * code and the offset of the byte that must be blamed. Each archive is copied
 * to a heap block of its own size, so that a sanitizer sees a read past it.
 */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "zip_read.h"

#define U16(v) (uint8_t)((v) & 0xFF), (uint8_t)((v) >> 8 & 0xFF)
#define U32(v) U16((v) & 0xFFFF), U16((v) >> 16 & 0xFFFF)
#define U64(v) U32((v) & 0xFFFFFFFF), U32((uint64_t)(v) >> 32)
#define ONES32 0xFFFFFFFF

/* Two records, as plain tools write them: "a" stored, with sizes in front, and
 * "bb" deflated, with a descriptor behind. */
static const uint8_t PLAIN[] = {
    /*   0 */ 'P',
    'K',
    3,
    4,                 /* local file header */
    /*   4 */ U16(20), /* version needed */
    /*   6 */ U16(0),  /* flags */
    /*   8 */ U16(0),  /* method: stored */
    /*  10 */ U16(0),
    U16(0), /* time, date */
    /*  14 */ U32(0x11223344),
    U32(3),
    U32(3), /* CRC, compressed, uncompressed */
    /*  26 */ U16(1),
    U16(4), /* name length, extra length */
    /*  30 */ 'a',
    'F',
    'B',
    U16(0),
    /*  35 */ 'x',
    'y',
    'z',

    /*  38 */ 'P',
    'K',
    3,
    4,
    /*  42 */ U16(20),
    U16(0x0808),      /* flags: descriptor, UTF-8 */
    /*  46 */ U16(8), /* method: deflated */
    /*  48 */ U16(0),
    U16(0),
    /*  52 */ U32(0),
    U32(0),
    U32(0),
    /*  64 */ U16(2),
    U16(0),
    /*  68 */ 'b',
    'b',
    /*  70 */ '1',
    '2',
    '3',
    '4',
    '5',
    '6',
    '7',
    '8',
    /*  78 */ 'P',
    'K',
    7,
    8, /* data descriptor */
    /*  82 */ U32(0x55667788),
    U32(8),
    U32(20),

    /*  94 */ 'P',
    'K',
    1,
    2, /* central directory header */
    /*  98 */ U16(20),
    U16(20),
    U16(0),
    U16(0),
    U16(0),
    U16(0), /* made by ... date */
    /* 110 */ U32(0x11223344),
    U32(3),
    U32(3),
    /* 122 */ U16(1),
    U16(0),
    U16(0), /* name, extra, comment length */
    /* 128 */ U16(0),
    U16(0),
    U32(0),
    U32(0), /* disk, attributes, local header offset */
    /* 140 */ 'a',

    /* 141 */ 'P',
    'K',
    1,
    2,
    /* 145 */ U16(20),
    U16(20),
    U16(0x0808),
    U16(8),
    U16(0),
    U16(0),
    /* 157 */ U32(0x55667788),
    U32(8),
    U32(20),
    /* 169 */ U16(2),
    U16(0),
    U16(0),
    /* 175 */ U16(0),
    U16(0),
    U32(0),
    U32(38),
    /* 187 */ 'b',
    'b',

    /* 189 */ 'P',
    'K',
    5,
    6, /* end of central directory record */
    /* 193 */ U16(0),
    U16(0),
    U16(2),
    U16(2), /* disks, entries here, entries */
    /* 201 */ U32(95),
    U32(94),
    U16(0), /* directory size, offset; comment length */
};

/* One record with every number in a zip64 field, although all are small. */
static const uint8_t
    WIDE
        [] =
            {
                /*   0 */ 'P',
                'K',
                3,
                4,
                /*   4 */ U16(45),
                U16(0),
                U16(0),
                U16(0),
                U16(0),
                /*  14 */ U32(0xCAFE),
                U32(ONES32),
                U32(ONES32),
                /*  26 */ U16(1),
                U16(20),
                /*  30 */ 'w',
                /*  31 */ U16(1),
                U16(16),
                U64(4),
                U64(0), /* zip64, compressed size 0 as torch has it */
                /*  51 */ 'd',
                'a',
                't',
                'a',

                /*  55 */ 'P',
                'K',
                1,
                2,
                /*  59 */ U16(45),
                U16(45),
                U16(0),
                U16(0),
                U16(0),
                U16(0),
                /*  71 */ U32(0xCAFE),
                U32(ONES32),
                U32(ONES32),
                /*  83 */ U16(1),
                U16(28),
                U16(0),
                /*  89 */ U16(0),
                U16(0),
                U32(0),
                U32(ONES32),
                /* 101 */ 'w',
                /* 102 */ U16(1),
                U16(24),
                U64(4),
                U64(4),
                U64(0),

                /* 130 */ 'P',
                'K',
                6,
                6, /* zip64 end of central directory record */
                /* 134 */ U64(44),
                U16(45),
                U16(45),
                U32(0),
                U32(0), /* size, versions, disks */
                /* 154 */ U64(1),
                U64(1),
                U64(75),
                U64(55), /* entries here, entries, size, offset */

                /* 186 */ 'P',
                'K',
                6,
                7, /* zip64 end of central directory locator */
                /* 190 */ U32(0),
                U64(130),
                U32(1),

                /* 206 */ 'P',
                'K',
                5,
                6,
                /* 210 */ U16(0),
                U16(0),
                U16(0xFFFF),
                U16(0xFFFF),
                /* 218 */ U32(ONES32),
                U32(ONES32),
                U16(0),
};

static const uint8_t EMPTY[] = {
    'P', 'K', 5, 6, U16(0), U16(0), U16(0), U16(0), U32(0), U32(0), U16(0),
};

/* ---- Running the reader ---- */

typedef struct {
    int code;
    tio_error err;
    uint64_t bad;
    tio_zip_archive zip;
    tio_zip_record *rows; /* of zip.n_records; NULL after a failure */
    uint32_t *order;
} outcome;

static uint8_t *exact_copy(const void *bytes, size_t n)
{
    uint8_t *p = malloc(n ? n : 1);
    if (p && n)
        memcpy(p, bytes, n);
    return p;
}

static void release(outcome *o)
{
    free(o->rows);
    free(o->order);
    o->rows = NULL;
    o->order = NULL;
}

static outcome read_archive(const void *bytes, size_t n)
{
    outcome o;
    uint8_t *buf = exact_copy(bytes, n);
    memset(&o, 0, sizeof o);
    o.bad = UINT64_MAX;
    o.code = tio_zip_open(n ? buf : NULL, n, &o.zip, &o.err);
    if (o.code == TIO_OK) {
        o.rows = malloc(o.zip.n_records * sizeof *o.rows + 1);
        o.order = malloc(o.zip.n_records * sizeof *o.order + 1);
        o.code = tio_zip_read(buf, n, &o.zip, o.rows, o.order, &o.bad, NULL, NULL, &o.err);
    }
    if (o.code != TIO_OK)
        release(&o);
    free(buf);
    return o;
}

/* Does reading fail with this code, blaming this byte, in words that contain `what`? */
static int fails(const void *bytes, size_t n, int code, uint64_t offset, const char *what)
{
    outcome o = read_archive(bytes, n);
    int same = o.code == code && o.err.code == code && o.err.offset == offset && o.err.what &&
               strstr(o.err.what, what) != NULL;
    if (!same)
        printf("  got %s at %llu: %s\n", tio_code_name(o.code), (unsigned long long)o.err.offset,
               o.code && o.err.what ? o.err.what : "-");
    release(&o);
    return same;
}

static int accepts(const void *bytes, size_t n)
{
    outcome o = read_archive(bytes, n);
    int good = o.code == TIO_OK;
    if (!good)
        printf("  got %s at %llu: %s\n", tio_code_name(o.code), (unsigned long long)o.err.offset,
               o.err.what);
    release(&o);
    return good;
}

/* ---- Archives with replaced fields ---- */

typedef struct {
    size_t at;
    unsigned width; /* bytes; 0 ends a list */
    uint64_t value;
} patch;

typedef struct {
    const char *name;
    patch patches[4];
    int code; /* TIO_OK: must be accepted */
    uint64_t offset;
    const char *what;
} situation;

static void apply(uint8_t *bytes, const patch *p)
{
    for (; p->width != 0; p++) {
        unsigned i;
        for (i = 0; i < p->width; i++)
            bytes[p->at + i] = (uint8_t)(p->value >> 8 * i);
    }
}

static void run(const uint8_t *base, size_t n, const situation *s, size_t count)
{
    size_t i;
    for (i = 0; i < count; i++) {
        uint8_t *bytes = exact_copy(base, n);
        apply(bytes, s[i].patches);
        if (!CHECK(s[i].code == TIO_OK ? accepts(bytes, n)
                                       : fails(bytes, n, s[i].code, s[i].offset, s[i].what)))
            printf("  in situation: %s\n", s[i].name);
        free(bytes);
    }
}

#define RUN(base, table) run(base, sizeof(base), table, sizeof(table) / sizeof *(table))

static void test_end_record(void)
{
    static const situation table[] = {
        {"signature gone", {{189, 1, 'Q'}}, TIO_TRUNCATED, 211, "not found"},
        {"disk number", {{193, 2, 1}}, TIO_UNSUPPORTED, 193, "several parts"},
        {"directory's disk", {{195, 2, 1}}, TIO_UNSUPPORTED, 195, "several parts"},
        {"counts differ", {{197, 2, 1}}, TIO_MALFORMED, 197, "entries on this disk"},
        {"too many entries", {{197, 2, 3}, {199, 2, 3}}, TIO_MALFORMED, 199, "more entries"},
        {"no entries", {{197, 2, 0}, {199, 2, 0}}, TIO_MALFORMED, 199, "no entries"},
        {"one entry unlisted", {{197, 2, 1}, {199, 2, 1}}, TIO_MALFORMED, 141, "bytes left"},
        {"directory too long", {{201, 4, 96}}, TIO_MALFORMED, 205, "reaches behind"},
        {"directory far too long", {{201, 4, ONES32}}, TIO_MALFORMED, 205, "reaches behind"},
        {"directory too far", {{205, 4, 95}}, TIO_MALFORMED, 205, "reaches behind"},
        {"directory too short", {{201, 4, 94}}, TIO_MALFORMED, 205, "ends before"},
        {"directory shifted", {{201, 4, 94}, {205, 4, 95}}, TIO_MALFORMED, 95, "signature"},
        {"comment missing", {{209, 2, 1}}, TIO_TRUNCATED, 209, "comment cut short"},
    };
    RUN(PLAIN, table);
}

static void test_end64(void)
{
    static const situation table[] = {
        {"narrow twins true", {{214, 4, 0x10001}, {218, 4, 75}, {222, 4, 55}}, TIO_OK, 0, NULL},
        {"entries differ", {{214, 4, 0x20002}}, TIO_MISMATCH, 216, "contradicts"},
        {"size differs", {{218, 4, 74}}, TIO_MISMATCH, 218, "contradicts"},
        {"offset differs", {{222, 4, 56}}, TIO_MISMATCH, 222, "contradicts"},
        {"not its signature", {{133, 1, 7}}, TIO_MALFORMED, 130, "signature"},
        {"data sector", {{134, 8, 45}}, TIO_MALFORMED, 134, "size of the record"},
        {"size 2^64-1", {{134, 8, UINT64_MAX}}, TIO_MALFORMED, 134, "size of the record"},
        {"disk", {{146, 4, 1}}, TIO_UNSUPPORTED, 146, "several parts"},
        {"directory's disk", {{150, 4, 1}}, TIO_UNSUPPORTED, 150, "several parts"},
        {"counts differ", {{154, 8, 2}}, TIO_MALFORMED, 154, "entries on this disk"},
        {"too many entries", {{154, 8, 2}, {162, 8, 2}}, TIO_MALFORMED, 162, "more entries"},
        {"2^64-1", {{154, 8, UINT64_MAX}, {162, 8, UINT64_MAX}}, TIO_MALFORMED, 162, "more"},
        {"size 2^63", {{170, 8, 1ull << 63}}, TIO_MALFORMED, 178, "reaches behind"},
        {"sum wraps", {{170, 8, UINT64_MAX}, {178, 8, 131}}, TIO_MALFORMED, 178, "reaches behind"},
        {"too short", {{170, 8, 74}}, TIO_MALFORMED, 178, "ends before"},
        {"locator's disk", {{190, 4, 1}}, TIO_UNSUPPORTED, 190, "several parts"},
        {"two disks", {{202, 4, 2}}, TIO_UNSUPPORTED, 202, "several parts"},
        {"no disk", {{202, 4, 0}}, TIO_OK, 0, NULL},
        {"locator short", {{194, 8, 129}}, TIO_MALFORMED, 194, "offset of the record"},
        {"locator past end", {{194, 8, UINT64_MAX}}, TIO_MALFORMED, 194, "offset of the record"},
        {"no locator", {{189, 1, 8}}, TIO_MALFORMED, 222, "reaches behind"},
    };
    RUN(WIDE, table);
}

static void test_central(void)
{
    static const situation table[] = {
        {"signature", {{141, 1, 'Q'}}, TIO_MALFORMED, 141, "signature"},
        {"encrypted", {{149, 2, 0x0809}}, TIO_UNSUPPORTED, 149, "bit flag"},
        {"patched", {{149, 2, 0x0828}}, TIO_UNSUPPORTED, 149, "bit flag"},
        {"strong encryption", {{149, 2, 0x0848}}, TIO_UNSUPPORTED, 149, "bit flag"},
        {"masked header", {{149, 2, 0x2808}}, TIO_UNSUPPORTED, 149, "bit flag"},
        {"deflate options", {{149, 2, 0x080E}, {44, 2, 0x080E}}, TIO_OK, 0, NULL},
        {"lzma", {{151, 2, 14}}, TIO_UNSUPPORTED, 151, "compression method"},
        {"aes", {{151, 2, 99}}, TIO_UNSUPPORTED, 151, "compression method"},
        {"stored, sizes differ", {{118, 4, 4}}, TIO_MALFORMED, 114, "stored record"},
        {"no name", {{122, 2, 0}}, TIO_MALFORMED, 122, "file name length"},
        {"name past directory", {{169, 2, 3}}, TIO_MALFORMED, 169, "run past"},
        {"extra past directory", {{171, 2, 0xFFFF}}, TIO_MALFORMED, 169, "run past"},
        {"comment past directory", {{173, 2, 1}}, TIO_MALFORMED, 169, "run past"},
        {"comment swallows entry", {{126, 2, 48}}, TIO_MALFORMED, 189, "more entries than"},
        {"disk start", {{128, 2, 1}}, TIO_UNSUPPORTED, 128, "disk number start"},
        {"symlink", {{132, 4, 0xA1FF0000}}, TIO_UNSUPPORTED, 132, "symbolic link"},
        {"symlink by unix", {{98, 2, 0x0314}, {132, 4, 0xA1ED0000}}, TIO_UNSUPPORTED, 132, "symb"},
        {"regular by unix", {{98, 2, 0x0314}, {132, 4, 0x81A40000}}, TIO_OK, 0, NULL},
        {"offset is directory's", {{183, 4, 94}}, TIO_MALFORMED, 183, "behind the records"},
        {"offset past file", {{183, 4, 0xFFFFFFFE}}, TIO_MALFORMED, 183, "behind the records"},
        {"offset wide, no field", {{183, 4, ONES32}}, TIO_MALFORMED, 189, "missing or too short"},
        {"nothing at byte 0", {{136, 4, 1}}, TIO_MALFORMED, 136, "no record begins at byte 0"},
        {"same header twice", {{183, 4, 0}}, TIO_MALFORMED, 0, "overlaps"},
        {"header inside header", {{183, 4, 29}}, TIO_MALFORMED, 0, "overlaps"},
        {"header inside extra", {{183, 4, 34}}, TIO_MALFORMED, 26, "extra field overlap"},
        {"header inside payload", {{183, 4, 37}}, TIO_MALFORMED, 114, "payload overlaps"},
        {"payload meets descriptor", {{161, 4, 24}, {86, 4, 24}}, TIO_OK, 0, NULL},
        {"payload meets directory", {{161, 4, 25}}, TIO_MALFORMED, 161, "payload overlaps"},
    };
    RUN(PLAIN, table);
}

static void test_zip64_field(void)
{
    static const situation table[] = {
        {"other field", {{102, 2, 2}}, TIO_MALFORMED, 130, "missing or too short"},
        {"size 2^63", {{106, 8, 1ull << 63}}, TIO_MALFORMED, 75, "stored record"},
        {"both 2^63", {{106, 8, 1ull << 63}, {114, 8, 1ull << 63}}, TIO_MALFORMED, 75, "payload"},
        {"both 2^64-1", {{106, 8, UINT64_MAX}, {114, 8, UINT64_MAX}}, TIO_MALFORMED, 75, "payload"},
        {"offset 2^64-1", {{122, 8, UINT64_MAX}}, TIO_MALFORMED, 97, "behind the records"},
        {"too short", {{104, 2, 20}, {126, 4, 0}}, TIO_MALFORMED, 122, "missing or too short"},
        {"split in two", {{104, 2, 8}, {114, 2, 1}, {116, 2, 12}}, TIO_MALFORMED, 114, "second"},
        {"bytes left", {{104, 2, 21}}, TIO_MALFORMED, 127, "bytes left"},
        {"length lies", {{104, 2, 65000}}, TIO_MALFORMED, 104, "beyond the extra field"},
        {"one too long", {{104, 2, 25}}, TIO_MALFORMED, 104, "beyond the extra field"},
        {"none due", {{75, 8, 0x400000004}, {97, 4, 0}}, TIO_OK, 0, NULL},
        {"sizes due, offset given", {{97, 4, 0}}, TIO_OK, 0, NULL},
        {"offset due, sizes given", {{75, 8, 0x400000004}}, TIO_MALFORMED, 114, "more than is due"},
        {"compressed size not due", {{75, 4, 4}}, TIO_MALFORMED, 122, "more than is due"},
    };
    RUN(WIDE, table);
}

static void test_local(void)
{
    static const situation table[] = {
        {"signature", {{38, 1, 'Q'}}, TIO_MALFORMED, 38, "signature"},
        {"flags", {{44, 2, 0x0008}}, TIO_MISMATCH, 44, "flags differ"},
        {"method", {{46, 2, 0}}, TIO_MISMATCH, 46, "method differs"},
        {"name length", {{64, 2, 1}}, TIO_MISMATCH, 64, "name length differs"},
        {"name", {{69, 1, 'c'}}, TIO_MISMATCH, 68, "name differs"},
        {"CRC", {{14, 4, 0}}, TIO_MISMATCH, 14, "CRC-32 differs"},
        {"compressed size", {{18, 4, 2}}, TIO_MISMATCH, 18, "compressed size differs"},
        {"uncompressed size", {{22, 4, 0}}, TIO_MISMATCH, 22, "uncompressed size differs"},
        {"wide without field", {{18, 4, ONES32}}, TIO_MISMATCH, 18, "compressed size differs"},
        {"wide with field", {{31, 4, 1}, {18, 8, UINT64_MAX}}, TIO_OK, 0, NULL},
        {"extra past next record", {{28, 2, 8}}, TIO_MALFORMED, 26, "extra field overlap"},
        {"extra too long", {{28, 2, 7}}, TIO_MALFORMED, 35, "bytes left"},
        {"extra too short", {{28, 2, 3}}, TIO_MALFORMED, 31, "bytes left"},
        {"sub-field too long", {{33, 2, 1}}, TIO_MALFORMED, 33, "beyond the extra field"},
        {"late CRC true", {{52, 4, 0x55667788}}, TIO_OK, 0, NULL},
        {"late CRC wrong", {{52, 4, 1}}, TIO_MISMATCH, 52, "CRC-32 differs"},
        {"late sizes true", {{56, 4, 8}, {60, 4, 20}}, TIO_OK, 0, NULL},
        {"late sizes all ones", {{56, 8, UINT64_MAX}}, TIO_OK, 0, NULL},
        {"late compressed wrong", {{56, 4, 7}}, TIO_MISMATCH, 56, "compressed size differs"},
        {"late size wrong", {{60, 4, 8}}, TIO_MISMATCH, 60, "uncompressed size differs"},
    };
    RUN(PLAIN, table);
}

static void test_descriptor(void)
{
    static const situation table[] = {
        {"CRC", {{82, 4, 0}}, TIO_MISMATCH, 82, "CRC-32 differs"},
        {"compressed size", {{86, 4, 9}}, TIO_MISMATCH, 86, "sizes differ"},
        {"uncompressed size", {{90, 4, 9}}, TIO_MISMATCH, 86, "sizes differ"},
        {"no signature", {{78, 4, 0}, {82, 4, 0}}, TIO_OK, 0, NULL},
    };
    RUN(PLAIN, table);
}

/* ---- Archives that are put together ---- */

typedef struct {
    uint8_t *bytes;
    size_t n;
} blob;

static void add(blob *b, const void *bytes, size_t n)
{
    b->bytes = realloc(b->bytes, b->n + n + 1);
    if (bytes)
        memcpy(b->bytes + b->n, bytes, n);
    else
        memset(b->bytes + b->n, 0, n);
    b->n += n;
}

static void add_number(blob *b, unsigned width, uint64_t value)
{
    uint8_t bytes[8];
    unsigned i;
    for (i = 0; i < width; i++)
        bytes[i] = (uint8_t)(value >> 8 * i);
    add(b, bytes, width);
}

static void add_local(blob *b, const char *name, uint16_t flags, uint32_t size)
{
    add(b, "PK\3\4\0\0", 6);
    add_number(b, 2, flags);
    add(b, NULL, 10); /* method, time, date, CRC */
    add_number(b, 4, flags & 8 ? 0 : size);
    add_number(b, 4, flags & 8 ? 0 : size);
    add_number(b, 2, strlen(name));
    add_number(b, 2, 0);
    add(b, name, strlen(name));
}

static void add_central(blob *b, const char *name, uint16_t flags, uint32_t size, uint32_t offset)
{
    add(b, "PK\1\2\0\0\0\0", 8);
    add_number(b, 2, flags);
    add(b, NULL, 10);
    add_number(b, 4, size);
    add_number(b, 4, size);
    add_number(b, 2, strlen(name));
    add(b, NULL, 12);
    add_number(b, 4, offset);
    add(b, name, strlen(name));
}

static void add_end(blob *b, size_t entries, size_t directory, size_t comment)
{
    size_t size = b->n - directory;
    add(b, "PK\5\6\0\0\0\0", 8);
    add_number(b, 2, entries);
    add_number(b, 2, entries);
    add_number(b, 4, size);
    add_number(b, 4, directory);
    add_number(b, 2, comment);
}

/* One record "r" of `size` zeros and flag bit 3, `descriptor` behind it. */
static blob one_record(uint32_t size, const void *descriptor, size_t descriptor_size)
{
    blob b = {NULL, 0};
    size_t directory;
    add_local(&b, "r", 8, size);
    add(&b, NULL, size);
    add(&b, descriptor, descriptor_size);
    directory = b.n;
    add_central(&b, "r", 8, size, 0);
    add_end(&b, 1, directory, 0);
    return b;
}

static void test_fields_of_plain(void)
{
    outcome o = read_archive(PLAIN, sizeof PLAIN);
    const tio_zip_record *a, *b;
    if (!CHECK(o.code == TIO_OK))
        return;
    CHECK(o.zip.n_records == 2 && o.zip.zip64 == 0);
    CHECK(o.zip.directory_offset == 94 && o.zip.directory_size == 95);
    CHECK(o.zip.end_offset == 189 && o.zip.archive_end == 211);
    CHECK(o.bad == 2);
    CHECK(o.order[0] == 0 && o.order[1] == 1);
    a = &o.rows[0];
    CHECK(a->header_offset == 0 && a->data_offset == 35 && a->compressed == 3 && a->size == 3);
    CHECK(a->name_offset == 140 && a->name_len == 1);
    CHECK(a->crc32 == 0x11223344 && a->method == 0 && a->flags == 0);
    b = &o.rows[1];
    CHECK(b->header_offset == 38 && b->data_offset == 70 && b->compressed == 8 && b->size == 20);
    CHECK(b->name_offset == 187 && b->name_len == 2);
    CHECK(b->crc32 == 0x55667788 && b->method == 8 && b->flags == 0x0808);
    release(&o);
}

static void test_fields_of_wide(void)
{
    outcome o = read_archive(WIDE, sizeof WIDE);
    if (!CHECK(o.code == TIO_OK))
        return;
    CHECK(o.zip.n_records == 1 && o.zip.zip64 == 1);
    CHECK(o.zip.directory_offset == 55 && o.zip.directory_size == 75);
    CHECK(o.zip.end_offset == 206 && o.zip.archive_end == 228);
    CHECK(o.rows[0].header_offset == 0 && o.rows[0].data_offset == 51);
    CHECK(o.rows[0].compressed == 4 && o.rows[0].size == 4);
    release(&o);
}

static void test_empty_archive(void)
{
    blob b = {NULL, 0};
    CHECK(accepts(EMPTY, sizeof EMPTY));
    add(&b, WIDE + 130, 98); /* and one that is nothing but a zip64 tail */
    memset(b.bytes + 24, 0, 32);
    memset(b.bytes + 64, 0, 8);
    CHECK(accepts(b.bytes, b.n));
    b.n = 0;
    add(&b, "junk", 4);
    add_end(&b, 0, 4, 0);
    CHECK(fails(b.bytes, b.n, TIO_MALFORMED, 4 + 10, "no entries"));
    free(b.bytes);
}

/* Directory order is free; `order` is the file's. */
static void test_directory_out_of_order(void)
{
    blob b = {NULL, 0};
    outcome o;
    add(&b, PLAIN, 94);
    add(&b, PLAIN + 141, 48);
    add(&b, PLAIN + 94, 47);
    add(&b, PLAIN + 189, 22);
    o = read_archive(b.bytes, b.n);
    if (CHECK(o.code == TIO_OK)) {
        CHECK(o.rows[0].header_offset == 38 && o.rows[1].header_offset == 0);
        CHECK(o.order[0] == 1 && o.order[1] == 0);
    }
    release(&o);
    b.bytes[94 + 42] = 0; /* "bb" now claims the header of "a" */
    CHECK(fails(b.bytes, b.n, TIO_MALFORMED, 0, "overlaps"));
    free(b.bytes);
}

static void test_many_out_of_order(void)
{
    enum { COUNT = 1000, STRIDE = 387 }; /* coprime: visits every record once */
    blob b = {NULL, 0};
    uint32_t offset[COUNT];
    size_t directory, i;
    int ordered = 1;
    outcome o;
    for (i = 0; i < COUNT; i++) {
        offset[i] = (uint32_t)b.n;
        add_local(&b, "n", 0, (uint32_t)(i % 7));
        add(&b, NULL, i % 7);
    }
    directory = b.n;
    for (i = 0; i < COUNT; i++)
        add_central(&b, "n", 0, (uint32_t)(i * STRIDE % COUNT % 7), offset[i * STRIDE % COUNT]);
    add_end(&b, COUNT, directory, 0);
    o = read_archive(b.bytes, b.n);
    if (CHECK(o.code == TIO_OK)) {
        for (i = 0; i < COUNT; i++)
            ordered &= o.rows[o.order[i]].header_offset == offset[i];
        CHECK(ordered);
    }
    release(&o);
    free(b.bytes);
}

/* The offsets that are reported as passed: in order, and only of what has been read. */
static void note_passed(void *context, uint64_t offset)
{
    uint64_t *reports = context;
    CHECK(reports[0] == 0 || offset > reports[reports[0]]);
    reports[++reports[0]] = offset;
}

static void test_passed_is_reported(void)
{
    enum { COUNT = 600, RECORD = 31 };
    blob b = {NULL, 0};
    uint64_t reports[COUNT] = {0}, bad;
    size_t directory, i;
    tio_zip_archive zip;
    tio_zip_record *rows = malloc(COUNT * sizeof *rows);
    uint32_t *order = malloc(COUNT * sizeof *order);
    tio_error err;
    for (i = 0; i < COUNT; i++)
        add_local(&b, "n", 0, 0);
    directory = b.n;
    for (i = 0; i < COUNT; i++)
        add_central(&b, "n", 0, 0, (uint32_t)(i * RECORD));
    add_end(&b, COUNT, directory, 0);
    CHECK(tio_zip_open(b.bytes, b.n, &zip, &err) == TIO_OK);
    CHECK(tio_zip_read(b.bytes, b.n, &zip, rows, order, &bad, note_passed, reports, &err) ==
          TIO_OK);
    CHECK(reports[0] == 2 && reports[1] == 255 * RECORD && reports[2] == 511 * RECORD);
    free(order);
    free(rows);
    free(b.bytes);
}

static void test_bad_names_the_record(void)
{
    outcome o;
    uint8_t *bytes = exact_copy(PLAIN, sizeof PLAIN);
    bytes[141] = 'Q';
    o = read_archive(bytes, sizeof PLAIN);
    CHECK(o.code == TIO_MALFORMED && o.bad == 1);
    bytes[141] = 'P';
    bytes[0] = 'Q';
    o = read_archive(bytes, sizeof PLAIN);
    CHECK(o.code == TIO_MALFORMED && o.bad == 0);
    bytes[0] = 'P';
    bytes[197] = bytes[199] = 1;
    o = read_archive(bytes, sizeof PLAIN);
    CHECK(o.code == TIO_MALFORMED && o.bad == 1 && o.zip.n_records == 1);
    free(bytes);
}

/* Extra field and comment of an entry are told apart. */
static void test_extra_then_entry_comment(void)
{
    blob b = {NULL, 0};
    add(&b, WIDE, 130);
    b.bytes[87] = 5;
    add(&b, "noted", 5);
    add_end(&b, 1, 55, 0);
    CHECK(accepts(b.bytes, b.n));
    b.bytes[87] = 6;
    b.bytes[85] = 27;
    CHECK(fails(b.bytes, b.n, TIO_MALFORMED, 104, "beyond the extra field"));
    free(b.bytes);
}

/* The two numbers that were compared, where a reader of the message needs them. */
static void test_numbers_compared(void)
{
    static const struct {
        patch patches[3];
        uint64_t want, got;
    } table[] = {
        {{{197, 2, 1}}, 2, 1},         {{{197, 2, 3}, {199, 2, 3}}, 2, 3},
        {{{201, 4, 96}}, 189, 190},    {{{118, 4, 4}}, 4, 3},
        {{{128, 2, 7}}, 0, 7},         {{{169, 2, 3}}, 2, 3},
        {{{126, 2, 48}}, 46, 0},       {{{183, 4, 96}}, 94, 96},
        {{{183, 4, 29}}, 30, 29},      {{{183, 4, 34}}, 3, 4},
        {{{183, 4, 37}}, 2, 3},        {{{28, 2, 3}}, 4, 3},
        {{{33, 2, 1}}, 0, 1},          {{{44, 2, 0x0008}}, 0x0808, 0x0008},
        {{{46, 2, 9}}, 8, 9},          {{{64, 2, 1}}, 2, 1},
        {{{82, 4, 3}}, 0x55667788, 3}, {{{86, 4, 9}}, 8, 9},
    };
    size_t i;
    for (i = 0; i < sizeof table / sizeof *table; i++) {
        uint8_t *bytes = exact_copy(PLAIN, sizeof PLAIN);
        outcome o;
        apply(bytes, table[i].patches);
        o = read_archive(bytes, sizeof PLAIN);
        if (!CHECK(o.code != TIO_OK && o.err.want == table[i].want && o.err.got == table[i].got))
            printf("  in row %zu: want %llu, got %llu\n", i, (unsigned long long)o.err.want,
                   (unsigned long long)o.err.got);
        release(&o);
        free(bytes);
    }
}

/* ---- Behind the archive ---- */

static void test_comment_and_trailing_bytes(void)
{
    blob b = {NULL, 0};
    outcome o;
    add(&b, PLAIN, sizeof PLAIN);
    b.bytes[209] = 3;
    add(&b, "PK\5-trailing", 12); /* 3 bytes of comment, 9 behind the archive */
    o = read_archive(b.bytes, b.n);
    CHECK(o.code == TIO_OK && o.zip.archive_end == 214);
    release(&o);
    b.bytes[209] = 0;
    add(&b, NULL, 65535 - 12);
    CHECK(accepts(b.bytes, b.n));
    add(&b, NULL, 1); /* the end record is out of the window */
    CHECK(fails(b.bytes, b.n, TIO_TRUNCATED, b.n, "not found"));
    free(b.bytes);
}

static void test_longest_comment(void)
{
    blob b = {NULL, 0};
    add(&b, PLAIN, sizeof PLAIN);
    b.bytes[209] = b.bytes[210] = 0xFF;
    add(&b, NULL, 65535);
    CHECK(accepts(b.bytes, b.n));
    CHECK(fails(b.bytes, b.n - 1, TIO_TRUNCATED, 209, "comment cut short"));
    free(b.bytes);
}

static void test_second_end(void)
{
    static const char *const signatures[] = {"PK\5\6", "PK\6\6", "PK\6\7"};
    size_t i, gap;
    for (i = 0; i < 3; i++) {
        for (gap = 0; gap < 3; gap++) {
            blob b = {NULL, 0};
            add(&b, PLAIN, sizeof PLAIN);
            add(&b, "..", gap);
            add(&b, signatures[i], 4);
            CHECK(fails(b.bytes, b.n, TIO_MALFORMED, 211 + gap, "second end record"));
            add(&b, NULL, 100);
            CHECK(fails(b.bytes, b.n, TIO_MALFORMED, 211 + gap, "second end record"));
            b.bytes[209] = (uint8_t)(gap + 4); /* in the comment, the same */
            CHECK(fails(b.bytes, b.n, TIO_MALFORMED, 211 + gap, "second end record"));
            free(b.bytes);
        }
    }
}

/* An archive of an empty archive in its comment: each end record is good for one reader. */
static void test_second_end_is_plausible(void)
{
    blob b = {NULL, 0};
    add(&b, EMPTY, sizeof EMPTY);
    b.bytes[20] = 22;
    add_end(&b, 0, 22, 0);
    CHECK(fails(b.bytes, b.n, TIO_MALFORMED, 22, "second end record"));
    free(b.bytes);
}

static void test_end_signature_in_payload(void)
{
    uint8_t *bytes = exact_copy(PLAIN, sizeof PLAIN);
    memcpy(bytes + 70, "PK\5\6PK\6\7", 8);
    CHECK(accepts(bytes, sizeof PLAIN));
    free(bytes);
}

static void test_bytes_in_front(void)
{
    blob b = {NULL, 0};
    add(&b, "#!", 2);
    add(&b, PLAIN, sizeof PLAIN);
    CHECK(fails(b.bytes, b.n, TIO_MALFORMED, 2 + 205, "bytes in front of the archive"));
    add(&b, "trailing", 8);
    CHECK(fails(b.bytes, b.n, TIO_MALFORMED, 2 + 205, "bytes in front of the archive"));
    b.n -= 8;
    /* the same with true offsets, as self-extractors have them */
    b.bytes[2 + 136] += 2;
    b.bytes[2 + 183] += 2;
    b.bytes[2 + 205] += 2;
    CHECK(fails(b.bytes, b.n, TIO_MALFORMED, 2 + 136, "no record begins at byte 0"));
    free(b.bytes);
}

/* Two archives end to end: nothing is missing, so this is not called truncated. */
static void test_two_archives_joined(void)
{
    blob b = {NULL, 0}, large = one_record(70000, NULL, 0);
    add(&b, PLAIN, sizeof PLAIN);
    add(&b, PLAIN, sizeof PLAIN);
    CHECK(fails(b.bytes, b.n, TIO_MALFORMED, 211 + 189, "second end record"));
    b.n = sizeof PLAIN;
    add(&b, large.bytes, large.n); /* the first end record is out of the window */
    CHECK(fails(b.bytes, b.n, TIO_MALFORMED, b.n - 22 + 16, "directory ends before it"));
    free(b.bytes);
    free(large.bytes);
}

static void test_locator_without_room(void)
{
    blob b = {NULL, 0};
    add(&b, WIDE + 186, 42);
    CHECK(fails(b.bytes, b.n, TIO_MALFORMED, 0, "no room"));
    free(b.bytes);
}

/* ---- Cut off ---- */

static void test_every_truncation(const uint8_t *base, size_t n)
{
    size_t cut;
    for (cut = 0; cut < n; cut++) {
        outcome o = read_archive(base, cut);
        CHECK(o.code == TIO_TRUNCATED && o.err.got == cut);
        CHECK(o.err.want > cut && o.err.want <= n + 22);
    }
}

static void test_not_an_archive(void)
{
    static const uint8_t zeros[100] = {0};
    CHECK(fails(zeros, sizeof zeros, TIO_MALFORMED, 0, "not found"));
    CHECK(fails("PK\3\5", 4, TIO_MALFORMED, 0, "not found"));
    CHECK(fails("PK\3", 3, TIO_TRUNCATED, 3, "not found"));
    CHECK(fails("", 0, TIO_TRUNCATED, 0, "not found"));
}

/* An outer archive that stores PLAIN or WIDE and is cut behind it: the inner
 * end record must not lead to a verdict about the outer directory. */
static void test_truncated_around_nested(const uint8_t *inner, size_t n)
{
    blob b = {NULL, 0};
    add_local(&b, "inner.zip", 0, (uint32_t)n);
    add(&b, inner, n);
    add_local(&b, "next", 0, 100);
    CHECK(fails(b.bytes, b.n, TIO_TRUNCATED, b.n, "not found"));
    free(b.bytes);
}

/* ---- Descriptors and pages ---- */

static void test_descriptor_wide_form(void)
{
    static const uint8_t wide[] = {'P', 'K', 7, 8, U32(0), U64(5), U64(5)};
    static const uint8_t wrong[] = {'P', 'K', 7, 8, U32(0), U64(5), U64(6)};
    blob good = one_record(5, wide, sizeof wide), bad = one_record(5, wrong, sizeof wrong);
    CHECK(accepts(good.bytes, good.n));
    CHECK(fails(bad.bytes, bad.n, TIO_MISMATCH, 36 + 8, "sizes differ"));
    free(good.bytes);
    free(bad.bytes);
}

static void test_descriptor_without_room(void)
{
    static const uint8_t torn[] = {'P', 'K', 7, 8, U32(0), U64(5)};
    blob none = one_record(5, NULL, 0), bare = one_record(5, "\0\0\0\0\5\0\0\0\5\0\0\0", 12);
    blob cut = one_record(5, torn, 15);
    CHECK(accepts(none.bytes, none.n));
    CHECK(accepts(bare.bytes, bare.n));
    CHECK(accepts(cut.bytes, cut.n));
    free(none.bytes);
    free(bare.bytes);
    free(cut.bytes);
}

/* A wrong descriptor is noticed where the next structure begins on its page, and
 * left alone (with its page) where that begins on the next one. */
static void test_descriptor_page(void)
{
    enum { HEAD = 31, PAGE = 4096 };
    static const uint8_t wrong[] = {'P', 'K', 7, 8, U32(1), U32(5), U32(5)};
    blob same = one_record(PAGE - HEAD, wrong, sizeof wrong);
    blob other = one_record(PAGE - HEAD - 1, wrong, sizeof wrong);
    blob last = one_record(PAGE - HEAD - 17, wrong, sizeof wrong);
    CHECK(fails(same.bytes, same.n, TIO_MISMATCH, PAGE + 4, "CRC-32 differs"));
    CHECK(accepts(other.bytes, other.n));
    CHECK(fails(last.bytes, last.n, TIO_MISMATCH, PAGE - 17 + 4, "CRC-32 differs"));
    free(same.bytes);
    free(other.bytes);
    free(last.bytes);
}

/* ---- Every byte, every value ---- */

/* What is accepted must lie inside the file and not overlap. */
static int is_sound(const outcome *o)
{
    uint64_t k, from = 0;
    for (k = 0; k < o->zip.n_records; k++) {
        const tio_zip_record *r = &o->rows[o->order[k]];
        if (r->header_offset < from || r->data_offset < r->header_offset + 30 + r->name_len ||
            r->compressed > o->zip.directory_offset - r->data_offset)
            return 0;
        from = r->data_offset + r->compressed;
    }
    return from <= o->zip.directory_offset;
}

static void test_every_byte_changed(const uint8_t *base, size_t n)
{
    uint8_t *bytes = exact_copy(base, n);
    size_t i;
    unsigned v;
    for (i = 0; i < n; i++) {
        for (v = 1; v < 256; v++) {
            outcome o;
            bytes[i] = (uint8_t)(base[i] ^ v);
            o = read_archive(bytes, n);
            CHECK(o.code == TIO_OK ? is_sound(&o)
                                   : o.err.code == o.code && o.err.what && o.err.offset <= n);
            release(&o);
        }
        bytes[i] = base[i];
    }
    free(bytes);
}

static void test_read_of_another_buffer(void)
{
    tio_zip_archive zip = {2, 94, 95, 189, 211, 0};
    tio_zip_record rows[2];
    uint32_t order[2];
    uint64_t bad;
    tio_error err;
    uint8_t *bytes = exact_copy(PLAIN, 188);
    CHECK(tio_zip_read(bytes, 188, &zip, rows, order, &bad, NULL, NULL, &err) == TIO_TRUNCATED);
    CHECK(err.offset == 188 && err.want == 189 && bad == 2);
    free(bytes);
}

int main(void)
{
    test_fields_of_plain();
    test_fields_of_wide();
    test_empty_archive();
    test_end_record();
    test_end64();
    test_central();
    test_zip64_field();
    test_local();
    test_descriptor();
    test_directory_out_of_order();
    test_many_out_of_order();
    test_passed_is_reported();
    test_bad_names_the_record();
    test_extra_then_entry_comment();
    test_numbers_compared();
    test_comment_and_trailing_bytes();
    test_longest_comment();
    test_second_end();
    test_second_end_is_plausible();
    test_end_signature_in_payload();
    test_bytes_in_front();
    test_two_archives_joined();
    test_locator_without_room();
    test_every_truncation(PLAIN, sizeof PLAIN);
    test_every_truncation(WIDE, sizeof WIDE);
    test_not_an_archive();
    test_truncated_around_nested(PLAIN, sizeof PLAIN);
    test_truncated_around_nested(WIDE, sizeof WIDE);
    test_descriptor_wide_form();
    test_descriptor_without_room();
    test_descriptor_page();
    test_every_byte_changed(PLAIN, sizeof PLAIN);
    test_every_byte_changed(WIDE, sizeof WIDE);
    test_read_of_another_buffer();
    return check_summary();
}
