/* SPDX-License-Identifier: Apache-2.0
 *
 * The zip writer, against the reader. The input chooses sizes, names, checksums
 * and the alignment; the archive is laid out in a mapping of 9 GiB of which only
 * the headers are ever touched, so that zip64 records are real. Holds: each part
 * is as long as promised, payloads are aligned, and the reader finds every record
 * with the numbers that went in.
 */
#include <sys/mman.h>

#include "fuzz.h"
#include "zip_format.h"
#include "zip_read.h"
#include "zip_write.h"

enum { RECORDS = 12, NAME_MAX_FUZZED = 300 };

#define ROOM     ((uint64_t)9 << 30)
#define PAGE     4096u
#define SIZE_TOP ((uint64_t)1 << 33)

static uint8_t *mapping(void)
{
    static uint8_t *map;
    if (map == NULL) {
        map = mmap(NULL, ROOM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
        if (map == MAP_FAILED)
            abort();
    }
    return map;
}

static void forget(uint8_t *map, uint64_t from, uint64_t to)
{
    from -= from % PAGE;
    to += (PAGE - to % PAGE) % PAGE;
    madvise(map + from, (size_t)(to - from), MADV_DONTNEED);
}

static uint64_t choose_size(choices *c)
{
    static const uint64_t edges[] = {0, 1, 0xFFFFFFFE, 0xFFFFFFFF, 0x100000000, 0xFFFF, 63, 64};
    uint64_t kind = choose(c, 1);
    if (kind < 128)
        return choose(c, 2);
    if (kind < 224)
        return edges[kind % 8];
    return choose(c, 5) % SIZE_TOP;
}

/* Any numbers at all: refused, or in order. Nothing is written. */
static void check_place(choices *c)
{
    tio_zip_entry e;
    uint64_t offset = choose(c, 8);
    uint32_t align = (uint32_t)choose(c, 3);
    tio_error err = blank_error(0xAA);
    int rc;
    memset(&e, 0, sizeof e);
    e.size = choose(c, 8);
    e.name_len = (uint16_t)choose(c, 2);
    rc = tio_zip_place(&e, offset, align, &err);
    if (rc != TIO_OK) {
        check_error(rc, &err, offset, offset);
        return;
    }
    HOLDS(align >= 1 && align <= TIO_ZIP_ALIGN_MAX && e.name_len > 0);
    HOLDS(e.header_offset == offset && e.data_offset % align == 0);
    HOLDS(e.data_offset > offset &&
          e.data_offset - offset < ZIP_LOCAL_SIZE + 0x10000u + e.name_len);
    HOLDS(e.end_offset - e.data_offset >= e.size && e.end_offset >= e.data_offset);
    HOLDS(tio_zip_central_size(&e) <= ZIP_CENTRAL_SIZE + e.name_len + 28u);
}

/* A part written into a block of exactly the promised size, then copied to its place. */
static void put_part(uint8_t *map, uint64_t at, const uint8_t *part, uint64_t n, uint64_t promised)
{
    HOLDS(n == promised);
    memcpy(map + at, part, (size_t)n);
}

static void write_record(uint8_t *map, const tio_zip_entry *e, const uint8_t *name)
{
    uint64_t head = e->data_offset - e->header_offset;
    uint64_t tail = e->end_offset - e->data_offset - e->size;
    uint8_t *part = block(head);
    put_part(map, e->header_offset, part, tio_zip_local(e, name, part), head);
    free(part);
    part = block(tail);
    put_part(map, e->data_offset + e->size, part, tio_zip_descriptor(e, part), tail);
    free(part);
}

static void check_read(const uint8_t *map, uint64_t len, const tio_zip_entry *e, unsigned n,
                       const uint8_t (*names)[NAME_MAX_FUZZED])
{
    tio_zip_archive zip;
    tio_zip_record rows[RECORDS];
    uint32_t order[RECORDS];
    uint64_t bad;
    unsigned i;
    tio_error err;
    HOLDS(tio_zip_open(map, len, &zip, &err) == TIO_OK);
    HOLDS(zip.n_records == n && zip.zip64 == 1 && zip.archive_end == len);
    HOLDS(tio_zip_read(map, len, &zip, rows, order, &bad, NULL, NULL, &err) == TIO_OK);
    for (i = 0; i < n; i++) {
        HOLDS(order[i] == i && rows[i].header_offset == e[i].header_offset);
        HOLDS(rows[i].data_offset == e[i].data_offset && rows[i].size == e[i].size);
        HOLDS(rows[i].compressed == e[i].size && rows[i].crc32 == e[i].crc32);
        HOLDS(rows[i].method == ZIP_METHOD_STORED && rows[i].name_len == e[i].name_len);
        HOLDS(memcmp(map + rows[i].name_offset, names[i], e[i].name_len) == 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint8_t names[RECORDS][NAME_MAX_FUZZED];
    tio_zip_entry e[RECORDS];
    choices c = {data, size};
    uint8_t *map = mapping();
    unsigned n = 0, want = 1 + (unsigned)choose(&c, 1) % RECORDS, i;
    uint32_t align = 1 + (uint32_t)choose(&c, 2) % TIO_ZIP_ALIGN_MAX;
    uint64_t at = 0, directory;
    tio_error err;
    check_place(&c);
    for (; n < want; n++) {
        memset(&e[n], 0xAA, sizeof e[n]);
        e[n].size = choose_size(&c);
        e[n].crc32 = (uint32_t)choose(&c, 4) * (e[n].size != 0); /* of nothing it is 0 */
        e[n].name_len = (uint16_t)(1 + choose(&c, 2) % NAME_MAX_FUZZED);
        for (i = 0; i < e[n].name_len; i++)
            names[n][i] = (uint8_t)('a' + (i + n + e[n].crc32) % 30);
        HOLDS(tio_zip_place(&e[n], at, align, &err) == TIO_OK);
        HOLDS(e[n].data_offset % align == 0);
        if (e[n].end_offset > ROOM - 100000)
            break;
        write_record(map, &e[n], names[n]);
        at = e[n].end_offset;
    }
    directory = at;
    for (i = 0; i < n; i++) {
        uint64_t promised = tio_zip_central_size(&e[i]);
        uint8_t *part = block(promised);
        put_part(map, at, part, tio_zip_central(&e[i], names[i], part), promised);
        free(part);
        at += promised;
    }
    if (n > 0) {
        tio_zip_tail(n, directory, at - directory, map + at);
        at += TIO_ZIP_TAIL_SIZE;
        check_read(map, at, e, n, (const uint8_t (*)[NAME_MAX_FUZZED])names);
        for (i = 0; i < n; i++) {
            forget(map, e[i].header_offset, e[i].data_offset);
            forget(map, e[i].data_offset + e[i].size, e[i].end_offset);
        }
        forget(map, directory, at);
    }
    return 0;
}
