/* SPDX-License-Identifier: Apache-2.0
 *
 * The zip directory reader. Holds: records lie in file order before the
 * directory, disjoint, with a local header each that bears the same name; no
 * payload byte is looked at; no byte below what `passed` reports is looked at
 * again (it is poisoned); two runs agree, with and without the callback.
 */
#include <sanitizer/asan_interface.h>

#include "fuzz.h"
#include "zip_format.h"
#include "zip_mutator.h"
#include "zip_read.h"

typedef struct {
    const uint8_t *buf;
    uint64_t reported, limit;
} watcher;

static void poison_passed(void *context, uint64_t offset)
{
    watcher *w = context;
    HOLDS(offset >= w->reported && offset <= w->limit);
    ASAN_POISON_MEMORY_REGION(w->buf, (size_t)offset);
    w->reported = offset;
}

typedef struct {
    int opened, rc;
    tio_zip_archive zip;
    tio_zip_record *rows;
    uint32_t *order;
    uint64_t bad;
    tio_error err;
} outcome;

static void release(outcome *o)
{
    free(o->rows);
    free(o->order);
}

static void check_archive(const tio_zip_archive *zip, uint64_t len)
{
    HOLDS(zip->archive_end <= len && zip->archive_end >= zip->end_offset + ZIP_END_SIZE);
    HOLDS(zip->directory_offset <= zip->end_offset);
    HOLDS(zip->directory_size <= zip->end_offset - zip->directory_offset);
    HOLDS(zip->n_records <= zip->directory_size / ZIP_CENTRAL_SIZE);
    HOLDS(zip->zip64 == 0 || zip->zip64 == 1);
    HOLDS(zip->n_records != 0 || zip->directory_size == 0);
}

static outcome read_archive(const uint8_t *bytes, uint64_t len, int watched)
{
    uint8_t *buf = copy_of(bytes, len);
    watcher w = {buf, 0, 0};
    outcome o;
    memset(&o, watched ? 0xAA : 0x55, sizeof o);
    o.rows = NULL;
    o.order = NULL;
    o.err = blank_error(watched ? 0xAA : 0x55);
    o.rc = tio_zip_open(buf, len, &o.zip, &o.err);
    o.opened = o.rc == TIO_OK;
    if (o.opened) {
        check_archive(&o.zip, len);
        o.rows = block(o.zip.n_records * sizeof *o.rows);
        o.order = block(o.zip.n_records * sizeof *o.order);
        w.limit = o.zip.directory_offset;
        o.rc = tio_zip_read(buf, len, &o.zip, o.rows, o.order, &o.bad,
                            watched ? poison_passed : NULL, &w, &o.err);
        HOLDS(o.bad <= o.zip.n_records);
        HOLDS(o.rc != TIO_OK || o.bad == o.zip.n_records);
    }
    if (o.rc != TIO_OK)
        check_error(o.rc, &o.err, 0, len);
    ASAN_UNPOISON_MEMORY_REGION(buf, (size_t)len);
    free(buf);
    return o;
}

/* Records of an accepted archive, by what APPNOTE says about each. */
static void check_records(const uint8_t *buf, const outcome *o)
{
    uint64_t k, from = 0, directory = o->zip.directory_offset;
    uint8_t *seen = block(o->zip.n_records);
    memset(seen, 0, (size_t)o->zip.n_records);
    for (k = 0; k < o->zip.n_records; k++) {
        const tio_zip_record *r;
        HOLDS(o->order[k] < o->zip.n_records && !seen[o->order[k]]);
        seen[o->order[k]] = 1;
        r = &o->rows[o->order[k]];
        HOLDS(k > 0 || r->header_offset == 0);
        HOLDS(r->header_offset >= from && r->header_offset <= directory - ZIP_LOCAL_SIZE);
        HOLDS(tio_load32(buf + r->header_offset) == ZIP_LOCAL_SIGNATURE);
        HOLDS(r->data_offset >= r->header_offset + ZIP_LOCAL_SIZE + r->name_len);
        HOLDS(r->data_offset <= directory && r->compressed <= directory - r->data_offset);
        HOLDS(r->name_len > 0 && r->name_offset >= directory + ZIP_CENTRAL_SIZE);
        HOLDS(r->name_offset + r->name_len <= directory + o->zip.directory_size);
        HOLDS(tio_load32(buf + r->name_offset - ZIP_CENTRAL_SIZE) == ZIP_CENTRAL_SIGNATURE);
        HOLDS(memcmp(buf + r->name_offset, buf + r->header_offset + ZIP_LOCAL_SIZE, r->name_len) ==
              0);
        HOLDS(r->method == ZIP_METHOD_DEFLATED ||
              (r->method == ZIP_METHOD_STORED && r->size == r->compressed));
        from = r->data_offset + r->compressed;
    }
    free(seen);
}

static int same_rows(const outcome *a, const outcome *b)
{
    uint64_t i;
    for (i = 0; i < a->zip.n_records; i++) {
        const tio_zip_record *x = &a->rows[i], *y = &b->rows[i];
        if (x->header_offset != y->header_offset || x->data_offset != y->data_offset ||
            x->compressed != y->compressed || x->size != y->size ||
            x->name_offset != y->name_offset || x->crc32 != y->crc32 ||
            x->name_len != y->name_len || x->method != y->method || x->flags != y->flags ||
            a->order[i] != b->order[i])
            return 0;
    }
    return 1;
}

static int same_archive(const tio_zip_archive *a, const tio_zip_archive *b)
{
    return a->n_records == b->n_records && a->directory_offset == b->directory_offset &&
           a->directory_size == b->directory_size && a->end_offset == b->end_offset &&
           a->archive_end == b->archive_end && a->zip64 == b->zip64;
}

static void check_same(const outcome *a, const outcome *b)
{
    HOLDS(a->opened == b->opened && a->rc == b->rc);
    HOLDS(a->rc == TIO_OK || same_error(&a->err, &b->err));
    HOLDS(!a->opened || same_archive(&a->zip, &b->zip));
    HOLDS(!a->opened || a->bad == b->bad);
    HOLDS(a->rc != TIO_OK || same_rows(a, b));
}

/* Payloads hold whatever they like; even an end record. */
static void check_payloads_unseen(const uint8_t *data, uint64_t len, const outcome *o)
{
    uint8_t *other = copy_of(data, len);
    uint64_t i;
    outcome again;
    for (i = 0; i < o->zip.n_records; i++) {
        uint64_t k, at = o->rows[i].data_offset;
        for (k = 0; k < o->rows[i].compressed; k++)
            other[at + k] = (uint8_t)(i % 2 ? ~other[at + k] : "PK\5\6"[k % 4]);
    }
    again = read_archive(other, len, 0);
    check_same(o, &again);
    release(&again);
    free(other);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    outcome a = read_archive(data, size, 1), b = read_archive(data, size, 0);
    check_same(&a, &b);
    if (a.rc == TIO_OK) {
        check_records(data, &a);
        check_payloads_unseen(data, size, &a);
    }
    release(&a);
    release(&b);
    return 0;
}
