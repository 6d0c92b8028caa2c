/* SPDX-License-Identifier: Apache-2.0
 *
 * The reader works from the end to the front and believes nothing twice: the
 * end record says where the central directory is, the directory says where
 * the records are, and each local header must then repeat what the directory
 * said about it.
 *
 *   0                                                             len
 *   |[L0][payload 0][D0] [L1][payload 1] ... |C0 C1 ...|E64 X|E |comment, trailing
 *   |<-- file order; each ends before the  ->|<- size ->|     |
 *   |    next one's header begins            |          |     +- found backwards
 *   +- L0 is byte 0          directory_offset+          +- offset + size is here
 *
 *   L local file header      C central directory header   E end record
 *   D data descriptor        E64 zip64 end record, 56 bytes, X its locator, 20
 *
 * Three equalities carry the weight. The directory must end exactly where its
 * end record begins, so the archive cannot be shifted against its offsets. Its
 * entries must use it up exactly, so the count cannot lie. And with records in
 * file order, each must end at or before the header of the next (the last one:
 * before the directory), which excludes overlap, aliasing and escape at once.
 *
 * Everything is read through cursors: one over the directory, and for each
 * record one that ends where the next record begins.
 */
#include "zip_read.h"

#include "zip_format.h"

/* Bit 0 (encrypted), 5 (patched), 6 (strong encryption) and 13 (masked header)
 * make readers disagree on the payload; the rest are reserved. APPNOTE 4.4.4. */
#define FLAGS_ALLOWED (ZIP_FLAG_DEFLATE_OPTIONS | ZIP_FLAG_DESCRIPTOR | ZIP_FLAG_UTF8)

/* Unit of "touching" a mapped file, in bytes. The smallest page of the systems
 * we run on; larger pages only make the promise easier to keep. */
#define PAGE_SIZE 4096u

/* `order` holds 32-bit indices. */
#define RECORDS_MAX 0xFFFFFFFFu

/* Between the directory and the end record of a zip64 archive. */
#define END64_AND_LOCATOR ((uint64_t)ZIP_END64_SIZE + ZIP_LOCATOR_SIZE)

/* ---- End records (private) ---- */

static int is_signature(const uint8_t *buf, uint64_t len, uint64_t at, uint32_t signature)
{
    tio_cursor c = tio_cursor_at(buf, len, at);
    const uint8_t *p = tio_take(&c, ZIP_SIGNATURE_SIZE);
    return p && tio_load32(p) == signature;
}

/* Does the buffer begin as an archive does, as far as it goes? */
static int begins_as_archive(const uint8_t *buf, uint64_t len)
{
    uint64_t n = len < ZIP_SIGNATURE_SIZE ? len : ZIP_SIGNATURE_SIZE;
    tio_cursor c = tio_cursor_at(buf, len, 0);
    uint8_t signature[ZIP_SIGNATURE_SIZE];
    tio_store32(signature, ZIP_LOCAL_SIGNATURE);
    return n == 0 || memcmp(tio_take(&c, n), signature, (size_t)n) == 0;
}

/* Move *at back to the nearest end record signature in [lowest, *at). */
static int find_end_before(const uint8_t *buf, uint64_t len, uint64_t lowest, uint64_t *at)
{
    uint64_t i = *at;
    while (i-- > lowest) {
        if (is_signature(buf, len, i, ZIP_END_SIGNATURE)) {
            *at = i;
            return 1;
        }
    }
    return 0;
}

/* Where the central directory has to end. */
static uint64_t directory_limit(const tio_zip_archive *zip)
{
    return zip->zip64 ? zip->end_offset - END64_AND_LOCATOR : zip->end_offset;
}

/* A disk number or a number of disks: we read archives in one piece. */
static int check_disk(uint32_t number, uint32_t most, uint64_t at, tio_error *err)
{
    if (number <= most)
        return TIO_OK;
    return tio_fail(err, TIO_UNSUPPORTED, at, most, number,
                    "end of central directory: disk number (archive in several parts)");
}

/* The end record's own fields. */
static int take_end(const uint8_t *e, uint64_t at, tio_zip_archive *zip, tio_error *err)
{
    uint16_t disk = tio_load16(e + ZIP_END_DISK);
    uint16_t directory_disk = tio_load16(e + ZIP_END_DIRECTORY_DISK);
    uint16_t on_disk = tio_load16(e + ZIP_END_ENTRIES_ON_DISK);
    int rc;
    zip->n_records = tio_load16(e + ZIP_END_ENTRIES);
    zip->directory_size = tio_load32(e + ZIP_END_DIRECTORY_SIZE);
    zip->directory_offset = tio_load32(e + ZIP_END_DIRECTORY_OFFSET);
    zip->end_offset = at;
    zip->archive_end = at + ZIP_END_SIZE + tio_load16(e + ZIP_END_COMMENT_LENGTH);
    rc = check_disk(disk, 0, at + ZIP_END_DISK, err);
    if (rc == TIO_OK)
        rc = check_disk(directory_disk, 0, at + ZIP_END_DIRECTORY_DISK, err);
    if (rc == TIO_OK && on_disk != zip->n_records)
        rc = tio_fail(err, TIO_MALFORMED, at + ZIP_END_ENTRIES_ON_DISK, zip->n_records, on_disk,
                      "end of central directory record: entries on this disk");
    return rc;
}

/* The locator `x` at `at`, which must point at the ZIP_END64_SIZE bytes in front of it. */
static int check_locator(const uint8_t *x, uint64_t at, tio_error *err)
{
    uint32_t disk = tio_load32(x + ZIP_LOCATOR_END64_DISK);
    uint32_t disks = tio_load32(x + ZIP_LOCATOR_DISKS);
    uint64_t end64 = tio_load64(x + ZIP_LOCATOR_END64_OFFSET);
    int rc = check_disk(disk, 0, at + ZIP_LOCATOR_END64_DISK, err);
    if (rc == TIO_OK)
        rc = check_disk(disks, 1, at + ZIP_LOCATOR_DISKS, err);
    if (rc == TIO_OK && end64 != at - ZIP_END64_SIZE)
        rc = tio_fail(err, TIO_MALFORMED, at + ZIP_LOCATOR_END64_OFFSET, at - ZIP_END64_SIZE, end64,
                      "zip64 end of central directory locator: offset of the record");
    return rc;
}

/* The zip64 end record `w` at `at`; its numbers replace those of the end record. */
static int take_end64(const uint8_t *w, uint64_t at, tio_zip_archive *zip, tio_error *err)
{
    uint32_t disk = tio_load32(w + ZIP_END64_DISK);
    uint32_t directory_disk = tio_load32(w + ZIP_END64_DIRECTORY_DISK);
    uint64_t on_disk = tio_load64(w + ZIP_END64_ENTRIES_ON_DISK);
    uint64_t size = tio_load64(w + ZIP_END64_RECORD_SIZE);
    int rc;
    if (tio_load32(w) != ZIP_END64_SIGNATURE)
        return tio_fail(err, TIO_MALFORMED, at, ZIP_END64_SIGNATURE, tio_load32(w),
                        "zip64 end of central directory record: signature");
    zip->n_records = tio_load64(w + ZIP_END64_ENTRIES);
    zip->directory_size = tio_load64(w + ZIP_END64_DIRECTORY_SIZE);
    zip->directory_offset = tio_load64(w + ZIP_END64_DIRECTORY_OFFSET);
    if (size != ZIP_END64_SIZE - ZIP_END64_SIZE_LEAD)
        return tio_fail(err, TIO_MALFORMED, at + ZIP_END64_RECORD_SIZE,
                        ZIP_END64_SIZE - ZIP_END64_SIZE_LEAD, size,
                        "zip64 end of central directory record: size of the record");
    rc = check_disk(disk, 0, at + ZIP_END64_DISK, err);
    if (rc == TIO_OK)
        rc = check_disk(directory_disk, 0, at + ZIP_END64_DIRECTORY_DISK, err);
    if (rc == TIO_OK && on_disk != zip->n_records)
        rc = tio_fail(err, TIO_MALFORMED, at + ZIP_END64_ENTRIES_ON_DISK, zip->n_records, on_disk,
                      "zip64 end of central directory record: entries on this disk");
    return rc;
}

/* A field of the end record against its wide twin: the same number, or all
 * ones. Most writers give all ones only to a number that does not fit, Go's
 * archive/zip to all three once one does not; no reader takes it for a number. */
static int check_twin(uint64_t narrow, uint64_t masked, uint64_t wide, uint64_t at, tio_error *err)
{
    if (narrow == wide || narrow == masked)
        return TIO_OK;
    return tio_fail(err, TIO_MISMATCH, at, wide, narrow,
                    "end of central directory record: contradicts the zip64 record");
}

static int check_twins(const uint8_t *e, const tio_zip_archive *zip, tio_error *err)
{
    uint64_t at = zip->end_offset;
    int rc = check_twin(tio_load16(e + ZIP_END_ENTRIES), ZIP_MASKED16, zip->n_records,
                        at + ZIP_END_ENTRIES, err);
    if (rc == TIO_OK)
        rc = check_twin(tio_load32(e + ZIP_END_DIRECTORY_SIZE), ZIP_MASKED32, zip->directory_size,
                        at + ZIP_END_DIRECTORY_SIZE, err);
    if (rc == TIO_OK)
        rc = check_twin(tio_load32(e + ZIP_END_DIRECTORY_OFFSET), ZIP_MASKED32,
                        zip->directory_offset, at + ZIP_END_DIRECTORY_OFFSET, err);
    return rc;
}

/* A locator right before the end record `e` makes the archive zip64. Its
 * record must be the 56 bytes before that: an extensible data sector between
 * them (APPNOTE 4.3.14.2; nobody writes one) would hide the record from
 * readers that look only there, such as CPython's before CVE-2025-8291. */
static int take_zip64(const uint8_t *buf, const uint8_t *e, tio_zip_archive *zip, tio_error *err)
{
    uint64_t at = zip->end_offset;
    tio_cursor c;
    int rc;
    if (at < ZIP_LOCATOR_SIZE ||
        !is_signature(buf, at, at - ZIP_LOCATOR_SIZE, ZIP_LOCATOR_SIGNATURE))
        return TIO_OK;
    if (at < END64_AND_LOCATOR)
        return tio_fail(err, TIO_MALFORMED, at - ZIP_LOCATOR_SIZE, END64_AND_LOCATOR, at,
                        "zip64 end of central directory locator: no room for the record");
    zip->zip64 = 1;
    c = tio_cursor_at(buf, at, at - END64_AND_LOCATOR);
    rc = take_end64(tio_take(&c, ZIP_END64_SIZE), at - END64_AND_LOCATOR, zip, err);
    if (rc == TIO_OK)
        rc = check_locator(tio_take(&c, ZIP_LOCATOR_SIZE), at - ZIP_LOCATOR_SIZE, err);
    if (rc == TIO_OK)
        rc = check_twins(e, zip, err);
    return rc;
}

/* Does the directory end where the end records begin, with room for its entries? */
static int check_directory_place(const tio_zip_archive *zip, tio_error *err)
{
    uint64_t limit = directory_limit(zip), end;
    uint64_t field = limit + (zip->zip64 ? ZIP_END64_DIRECTORY_OFFSET : ZIP_END_DIRECTORY_OFFSET);
    uint64_t entries = limit + (zip->zip64 ? ZIP_END64_ENTRIES : ZIP_END_ENTRIES);
    uint64_t room = zip->directory_size / ZIP_CENTRAL_SIZE;
    if (!tio_add(zip->directory_offset, zip->directory_size, &end) || end > limit)
        return tio_fail(err, TIO_MALFORMED, field, limit, end,
                        "end of central directory record: directory reaches behind it");
    if (end < limit)
        return tio_fail(err, TIO_MALFORMED, field, limit, end,
                        "end of central directory record: directory ends before it (bytes in front "
                        "of the archive?)");
    if (zip->n_records > room)
        return tio_fail(err, TIO_MALFORMED, entries, room, zip->n_records,
                        "end of central directory record: more entries than the directory holds");
    if (zip->n_records == 0 && limit != 0)
        return tio_fail(err, TIO_MALFORMED, entries, 1, 0,
                        "end of central directory record: no entries, but bytes before it");
    if (zip->n_records > RECORDS_MAX)
        return tio_fail(err, TIO_LIMIT, entries, RECORDS_MAX, zip->n_records,
                        "end of central directory record: number of entries");
    return TIO_OK;
}

/* Is there a whole and plausible end record at `at`, with its zip64 kin? */
static int check_end(const uint8_t *buf, uint64_t len, uint64_t at, tio_zip_archive *zip,
                     tio_error *err)
{
    tio_cursor c = tio_cursor_at(buf, len, at);
    const uint8_t *e = tio_take(&c, ZIP_END_SIZE);
    int rc;
    if (!e)
        return tio_fail(err, TIO_TRUNCATED, at, at + ZIP_END_SIZE, len,
                        "end of central directory record: cut short");
    rc = take_end(e, at, zip, err);
    if (rc == TIO_OK)
        rc = take_zip64(buf, e, zip, err);
    if (rc == TIO_OK)
        rc = check_directory_place(zip, err);
    if (rc == TIO_OK && zip->archive_end > len)
        rc = tio_fail(err, TIO_TRUNCATED, at + ZIP_END_COMMENT_LENGTH, zip->archive_end, len,
                      "end of central directory record: comment cut short");
    return rc;
}

/* Bytes behind the end record, comment or not, are harmless as long as no
 * reader can take them for another end. The record's own fields are searched
 * with them, since a reader that goes backwards meets those first. */
static int check_no_second_end(const uint8_t *buf, uint64_t len, const tio_zip_archive *zip,
                               tio_error *err)
{
    uint64_t i;
    if (len == zip->end_offset + ZIP_END_SIZE)
        return TIO_OK;
    for (i = zip->end_offset + ZIP_SIGNATURE_SIZE; i < len; i++) {
        if (is_signature(buf, len, i, ZIP_END_SIGNATURE) ||
            is_signature(buf, len, i, ZIP_END64_SIGNATURE) ||
            is_signature(buf, len, i, ZIP_LOCATOR_SIGNATURE))
            return tio_fail(err, TIO_MALFORMED, i, 0, 0,
                            "end of central directory record: second end record");
    }
    return TIO_OK;
}

/* An end record whose archive would begin later than at byte 0, and which has
 * bytes behind it, in a buffer that does begin as an archive: most likely that
 * of an archive inside a payload (torch.export nests them), and the outer one
 * is cut off. */
static int looks_nested(const uint8_t *buf, uint64_t len, const tio_zip_archive *zip)
{
    uint64_t end;
    return zip->archive_end < len && begins_as_archive(buf, len) &&
           tio_add(zip->directory_offset, zip->directory_size, &end) && end < directory_limit(zip);
}

/* Nothing to trust in the tail. All that is sure to be missing is an end
 * record, of which up to 3 bytes may be there. */
static int fail_no_end(const uint8_t *buf, uint64_t len, tio_error *err)
{
    uint64_t torn = len < ZIP_SIGNATURE_SIZE ? len : ZIP_SIGNATURE_SIZE - 1;
    if (begins_as_archive(buf, len))
        return tio_fail(err, TIO_TRUNCATED, len, len - torn + ZIP_END_SIZE, len,
                        "end of central directory record: not found");
    return tio_fail(err, TIO_MALFORMED, 0, 0, 0, "end of central directory record: not found");
}

int tio_zip_open(const uint8_t *buf, uint64_t len, tio_zip_archive *zip, tio_error *err)
{
    uint64_t window = ZIP_COMMENT_MAX + ZIP_END_SIZE;
    uint64_t lowest = len > window ? len - window : 0;
    uint64_t at = len;
    tio_error first = {TIO_OK, 0, 0, 0, NULL};
    while (find_end_before(buf, len, lowest, &at)) {
        tio_zip_archive found = {0, 0, 0, 0, 0, 0};
        tio_error e;
        int rc = check_end(buf, len, at, &found, &e);
        if (rc == TIO_OK) {
            rc = check_no_second_end(buf, len, &found, err);
            if (rc == TIO_OK)
                *zip = found;
            return rc;
        }
        if (first.code == TIO_OK && !looks_nested(buf, len, &found))
            first = e;
    }
    if (first.code == TIO_OK)
        return fail_no_end(buf, len, err);
    *err = first;
    return first.code;
}

/* ---- Extra fields (private) ---- */

/* Walk the sub-fields of an extra field, which must fill it exactly: a length
 * that is off by a few bytes shifts the payload, and shows here. *zip64 becomes
 * a cursor over the data of the zip64 sub-field, or stays as it is (its buf
 * NULL, by custom of the callers). */
static int walk_extra(tio_cursor x, tio_cursor *zip64, tio_error *err)
{
    int seen = 0;
    while (x.pos < x.len) {
        uint64_t at = x.pos;
        const uint8_t *head = tio_take(&x, ZIP_EXTRA_SIZE);
        uint16_t size;
        if (!head)
            return tio_fail(err, TIO_MALFORMED, at, ZIP_EXTRA_SIZE, x.len - at,
                            "extra field: bytes left behind the last sub-field");
        size = tio_load16(head + ZIP_EXTRA_DATA_SIZE);
        if (!tio_take(&x, size))
            return tio_fail(err, TIO_MALFORMED, at + ZIP_EXTRA_DATA_SIZE, x.len - x.pos, size,
                            "extra field: data size of a sub-field beyond the extra field");
        if (tio_load16(head) != ZIP_EXTRA_ZIP64)
            continue;
        if (seen++)
            return tio_fail(err, TIO_MALFORMED, at, 0, 0, "extra field: second zip64 field");
        *zip64 = tio_cursor_at(x.buf, x.pos, x.pos - size);
    }
    return TIO_OK;
}

/* ---- Central directory (private) ---- */

/* Replace the values that are all ones in the 32-bit fields by those of the
 * zip64 field, which has them in this order and has no others. A longer field
 * is taken if the values it must have come first: then readers that count
 * values and readers that know positions see the same (Go writes all three
 * when only the sizes are due). */
static int take_wide(tio_cursor z, tio_zip_record *r, tio_error *err)
{
    uint64_t *const value[3] = {&r->size, &r->compressed, &r->header_offset};
    unsigned due = 0, i;
    for (i = 0; i < 3; i++) {
        const uint8_t *p;
        if (*value[i] != ZIP_MASKED32)
            continue;
        due |= 1u << i;
        p = tio_take(&z, ZIP_ZIP64_VALUE_SIZE);
        if (!p)
            return tio_fail(err, TIO_MALFORMED, z.pos, ZIP_ZIP64_VALUE_SIZE, z.len - z.pos,
                            "central directory header: zip64 extra field is missing or too short");
        *value[i] = tio_load64(p);
    }
    if (z.pos < z.len && (due & (due + 1)) != 0)
        return tio_fail(err, TIO_MALFORMED, z.pos, 0, z.len - z.pos,
                        "central directory header: zip64 extra field holds more than is due");
    return TIO_OK;
}

/* What this reader does not handle: everything that needs more than stored or
 * deflated bytes of one file in one piece. */
static int check_handled(const uint8_t *h, uint64_t entry, const tio_zip_record *r, tio_error *err)
{
    uint32_t mode = tio_load32(h + ZIP_CENTRAL_EXTERNAL_ATTRIBUTES) >> ZIP_UNIX_MODE_SHIFT;
    if ((r->flags & ~FLAGS_ALLOWED) != 0)
        return tio_fail(err, TIO_UNSUPPORTED, entry + ZIP_CENTRAL_FLAGS, 0, r->flags,
                        "central directory header: general purpose bit flag (encrypted, patched or "
                        "reserved)");
    if (r->method != ZIP_METHOD_STORED && r->method != ZIP_METHOD_DEFLATED)
        return tio_fail(err, TIO_UNSUPPORTED, entry + ZIP_CENTRAL_METHOD, 0, r->method,
                        "central directory header: compression method");
    if (tio_load16(h + ZIP_CENTRAL_DISK_START) != 0)
        return tio_fail(err, TIO_UNSUPPORTED, entry + ZIP_CENTRAL_DISK_START, 0,
                        tio_load16(h + ZIP_CENTRAL_DISK_START),
                        "central directory header: disk number start");
    /* Whatever "version made by" says: extractors differ on when to believe it. */
    if ((mode & ZIP_UNIX_S_IFMT) == ZIP_UNIX_S_IFLNK)
        return tio_fail(err, TIO_UNSUPPORTED, entry + ZIP_CENTRAL_EXTERNAL_ATTRIBUTES, 0, mode,
                        "central directory header: external file attributes (symbolic link)");
    return TIO_OK;
}

static int check_sizes(uint64_t entry, const tio_zip_record *r, uint64_t directory, tio_error *err)
{
    if (r->method == ZIP_METHOD_STORED && r->compressed != r->size)
        return tio_fail(err, TIO_MALFORMED, entry + ZIP_CENTRAL_COMPRESSED_SIZE, r->size,
                        r->compressed, "central directory header: sizes of a stored record differ");
    if (r->header_offset >= directory)
        return tio_fail(err, TIO_MALFORMED, entry + ZIP_CENTRAL_LOCAL_OFFSET, directory,
                        r->header_offset,
                        "central directory header: local header offset behind the records");
    return TIO_OK;
}

/* The next entry of the directory that `c` runs over. */
static int take_central(tio_cursor *c, uint64_t directory, tio_zip_record *r, tio_error *err)
{
    uint64_t entry = c->pos;
    const uint8_t *h = tio_take(c, ZIP_CENTRAL_SIZE);
    uint16_t extra_len, comment_len;
    tio_cursor extra, zip64;
    int rc;
    if (!h)
        return tio_fail(err, TIO_MALFORMED, entry, ZIP_CENTRAL_SIZE, c->len - entry,
                        "central directory: more entries than it has bytes for");
    if (tio_load32(h) != ZIP_CENTRAL_SIGNATURE)
        return tio_fail(err, TIO_MALFORMED, entry, ZIP_CENTRAL_SIGNATURE, tio_load32(h),
                        "central directory header: signature");
    r->flags = tio_load16(h + ZIP_CENTRAL_FLAGS);
    r->method = tio_load16(h + ZIP_CENTRAL_METHOD);
    r->crc32 = tio_load32(h + ZIP_CENTRAL_CRC32);
    r->compressed = tio_load32(h + ZIP_CENTRAL_COMPRESSED_SIZE);
    r->size = tio_load32(h + ZIP_CENTRAL_UNCOMPRESSED_SIZE);
    r->header_offset = tio_load32(h + ZIP_CENTRAL_LOCAL_OFFSET);
    r->name_offset = c->pos;
    r->name_len = tio_load16(h + ZIP_CENTRAL_NAME_LENGTH);
    extra_len = tio_load16(h + ZIP_CENTRAL_EXTRA_LENGTH);
    comment_len = tio_load16(h + ZIP_CENTRAL_COMMENT_LENGTH);
    if (r->name_len == 0)
        return tio_fail(err, TIO_MALFORMED, entry + ZIP_CENTRAL_NAME_LENGTH, 1, 0,
                        "central directory header: file name length");
    if (!tio_take(c, (uint64_t)r->name_len + extra_len + comment_len))
        return tio_fail(err, TIO_MALFORMED, entry + ZIP_CENTRAL_NAME_LENGTH, c->len - c->pos,
                        (uint64_t)r->name_len + extra_len + comment_len,
                        "central directory header: name, extra field and comment run past the "
                        "directory");
    extra = tio_cursor_at(c->buf, c->pos - comment_len, c->pos - comment_len - extra_len);
    zip64 = tio_cursor_at(NULL, extra.len, extra.len);
    rc = check_handled(h, entry, r, err);
    if (rc == TIO_OK && extra_len != 0)
        rc = walk_extra(extra, &zip64, err);
    if (rc == TIO_OK)
        rc = take_wide(zip64, r, err);
    if (rc == TIO_OK)
        rc = check_sizes(entry, r, directory, err);
    return rc;
}

/* ---- Local headers (private) ---- */

/* Where a field of the record's directory entry stands in the file. */
static uint64_t central_field(const tio_zip_record *r, unsigned field)
{
    return r->name_offset - ZIP_CENTRAL_SIZE + field;
}

/* May a local field stand for what the directory says? All ones refer to a
 * zip64 field (whose values nobody can rely on: torch writes a compressed size
 * of 0 there), and 0 to a descriptor. */
static int repeats(uint32_t local, uint64_t central, int may_be_masked, int may_be_zero)
{
    return local == central || (may_be_masked && local == ZIP_MASKED32) ||
           (may_be_zero && local == 0);
}

static int check_local_sizes(const uint8_t *h, const tio_zip_record *r, int has_zip64,
                             tio_error *err)
{
    int later = (r->flags & ZIP_FLAG_DESCRIPTOR) != 0;
    int masked = later || has_zip64;
    uint64_t at = r->header_offset;
    uint32_t crc32 = tio_load32(h + ZIP_LOCAL_CRC32);
    uint32_t compressed = tio_load32(h + ZIP_LOCAL_COMPRESSED_SIZE);
    uint32_t size = tio_load32(h + ZIP_LOCAL_UNCOMPRESSED_SIZE);
    if (!repeats(crc32, r->crc32, later, later))
        return tio_fail(err, TIO_MISMATCH, at + ZIP_LOCAL_CRC32, r->crc32, crc32,
                        "local file header: CRC-32 differs from the central directory");
    if (!repeats(compressed, r->compressed, masked, later))
        return tio_fail(err, TIO_MISMATCH, at + ZIP_LOCAL_COMPRESSED_SIZE, r->compressed,
                        compressed,
                        "local file header: compressed size differs from the central directory");
    if (!repeats(size, r->size, masked, later))
        return tio_fail(err, TIO_MISMATCH, at + ZIP_LOCAL_UNCOMPRESSED_SIZE, r->size, size,
                        "local file header: uncompressed size differs from the central directory");
    return TIO_OK;
}

static int check_local_fields(const uint8_t *h, const tio_zip_record *r, tio_error *err)
{
    uint64_t at = r->header_offset;
    if (tio_load32(h) != ZIP_LOCAL_SIGNATURE)
        return tio_fail(err, TIO_MALFORMED, at, ZIP_LOCAL_SIGNATURE, tio_load32(h),
                        "local file header: signature");
    if (tio_load16(h + ZIP_LOCAL_FLAGS) != r->flags)
        return tio_fail(err, TIO_MISMATCH, at + ZIP_LOCAL_FLAGS, r->flags,
                        tio_load16(h + ZIP_LOCAL_FLAGS),
                        "local file header: flags differ from the central directory");
    if (tio_load16(h + ZIP_LOCAL_METHOD) != r->method)
        return tio_fail(err, TIO_MISMATCH, at + ZIP_LOCAL_METHOD, r->method,
                        tio_load16(h + ZIP_LOCAL_METHOD),
                        "local file header: compression method differs from the central directory");
    if (tio_load16(h + ZIP_LOCAL_NAME_LENGTH) != r->name_len)
        return tio_fail(err, TIO_MISMATCH, at + ZIP_LOCAL_NAME_LENGTH, r->name_len,
                        tio_load16(h + ZIP_LOCAL_NAME_LENGTH),
                        "local file header: file name length differs from the central directory");
    return TIO_OK;
}

/* The descriptor that bit 3 announces, at `c`, which ends where the next
 * structure begins. Compared only if
 *   - its signature is there: without it (4.3.9.3) nothing tells it from a gap;
 *   - it shares a page with the next structure, whose page is read anyway.
 *     Opening 1 GiB of large records must touch one page of each, and here the
 *     other page would be the last one of a payload that nobody asked for.
 * The directory decides in any case; the descriptor can only contradict it.
 * Which form it has is not written anywhere (Python writes the wide one for
 * small records, too): one of them must fit. */
static int check_descriptor(tio_cursor c, const tio_zip_record *r, tio_error *err)
{
    uint64_t at = c.pos;
    const uint8_t *d;
    if (at / PAGE_SIZE != c.len / PAGE_SIZE)
        return TIO_OK;
    d = tio_take(&c, ZIP_DESCRIPTOR_SIZE);
    if (!d || tio_load32(d) != ZIP_DESCRIPTOR_SIGNATURE)
        return TIO_OK;
    if (tio_load32(d + ZIP_DESCRIPTOR_CRC32) != r->crc32)
        return tio_fail(err, TIO_MISMATCH, at + ZIP_DESCRIPTOR_CRC32, r->crc32,
                        tio_load32(d + ZIP_DESCRIPTOR_CRC32),
                        "data descriptor: CRC-32 differs from the central directory");
    if (tio_load32(d + ZIP_DESCRIPTOR_COMPRESSED_SIZE) == r->compressed &&
        tio_load32(d + ZIP_DESCRIPTOR_UNCOMPRESSED_SIZE) == r->size)
        return TIO_OK;
    if (tio_take(&c, ZIP_DESCRIPTOR_SIZE64 - ZIP_DESCRIPTOR_SIZE) &&
        tio_load64(d + ZIP_DESCRIPTOR_COMPRESSED_SIZE) == r->compressed &&
        tio_load64(d + ZIP_DESCRIPTOR_UNCOMPRESSED_SIZE64) == r->size)
        return TIO_OK;
    return tio_fail(err, TIO_MISMATCH, at + ZIP_DESCRIPTOR_COMPRESSED_SIZE, r->compressed,
                    tio_load32(d + ZIP_DESCRIPTOR_COMPRESSED_SIZE),
                    "data descriptor: sizes differ from the central directory");
}

/* Hold the local header of `r` against the directory and find its payload. All
 * of it must lie before `limit`, where the next structure begins. */
static int check_local(const uint8_t *buf, uint64_t limit, tio_zip_record *r, tio_error *err)
{
    uint64_t at = r->header_offset;
    tio_cursor c = tio_cursor_at(buf, limit, at);
    tio_cursor zip64 = {NULL, 0, 0};
    const uint8_t *h = tio_take(&c, ZIP_LOCAL_SIZE);
    const uint8_t *name;
    uint16_t extra_len;
    int rc;
    if (!h)
        return tio_fail(err, TIO_MALFORMED, at, ZIP_LOCAL_SIZE, limit - at,
                        "local file header: overlaps the next record or the directory");
    rc = check_local_fields(h, r, err);
    if (rc != TIO_OK)
        return rc;
    extra_len = tio_load16(h + ZIP_LOCAL_EXTRA_LENGTH);
    name = tio_take(&c, r->name_len);
    if (!name || !tio_take(&c, extra_len))
        return tio_fail(err, TIO_MALFORMED, at + ZIP_LOCAL_NAME_LENGTH, limit - c.pos,
                        name ? extra_len : r->name_len,
                        "local file header: name and extra field overlap the next record or the "
                        "directory");
    /* take_central has taken these name_len bytes, so they are inside the buffer. */
    if (memcmp(name, buf + r->name_offset, r->name_len) != 0)
        return tio_fail(err, TIO_MISMATCH, at + ZIP_LOCAL_SIZE, 0, 0,
                        "local file header: file name differs from the central directory");
    if (extra_len != 0) {
        rc = walk_extra(tio_cursor_at(buf, c.pos, c.pos - extra_len), &zip64, err);
        if (rc != TIO_OK)
            return rc;
    }
    rc = check_local_sizes(h, r, zip64.buf != NULL, err);
    if (rc != TIO_OK)
        return rc;
    r->data_offset = c.pos;
    if (!tio_take(&c, r->compressed))
        return tio_fail(err, TIO_MALFORMED, central_field(r, ZIP_CENTRAL_COMPRESSED_SIZE),
                        limit - c.pos, r->compressed,
                        "central directory header: payload overlaps the next record or the "
                        "directory");
    return (r->flags & ZIP_FLAG_DESCRIPTOR) != 0 ? check_descriptor(c, r, err) : TIO_OK;
}

/* ---- File order (private) ---- */

/* Let order[root] sink to its place in a heap of n whose top is the largest offset. */
static void sift_down(const tio_zip_record *rows, uint32_t *order, uint64_t root, uint64_t n)
{
    uint32_t moving = order[root];
    uint64_t child;
    while ((child = 2 * root + 1) < n) {
        if (child + 1 < n &&
            rows[order[child]].header_offset < rows[order[child + 1]].header_offset)
            child++;
        if (rows[moving].header_offset >= rows[order[child]].header_offset)
            break;
        order[root] = order[child];
        root = child;
    }
    order[root] = moving;
}

/* Heapsort: needs no memory and has no bad input. Writers keep file order, so
 * this is for the rare archive that was edited. */
static void sort_by_offset(const tio_zip_record *rows, uint32_t *order, uint64_t n)
{
    uint64_t i;
    for (i = n / 2; i-- > 0;)
        sift_down(rows, order, i, n);
    for (i = n; i-- > 1;) {
        uint32_t largest = order[0];
        order[0] = order[i];
        order[i] = largest;
        sift_down(rows, order, 0, i);
    }
}

/* ---- The two passes ---- */

/* First pass: the directory alone. Leaves the records in file order in `order`. */
static int read_directory(const uint8_t *buf, const tio_zip_archive *zip, tio_zip_record *rows,
                          uint32_t *order, uint64_t *bad, tio_error *err)
{
    uint64_t n = zip->n_records, offset = zip->directory_offset, i;
    tio_cursor c = tio_cursor_at(buf, offset + zip->directory_size, offset);
    int in_order = 1;
    for (i = 0; i < n; i++) {
        int rc = take_central(&c, offset, &rows[i], err);
        if (rc != TIO_OK) {
            *bad = i;
            return rc;
        }
        order[i] = (uint32_t)i;
        in_order &= i == 0 || rows[i - 1].header_offset <= rows[i].header_offset;
    }
    if (c.pos != c.len)
        return tio_fail(err, TIO_MALFORMED, c.pos, zip->directory_size, c.pos - offset,
                        "central directory: bytes left behind the last entry");
    if (!in_order)
        sort_by_offset(rows, order, n);
    return TIO_OK;
}

/* Records between two calls of `passed`: 256 with 16 pages of 4 KiB each are 16 MiB. */
#define PASSED_EVERY 256

/* Second pass: each local header, in file order. */
static int read_locals(const uint8_t *buf, const tio_zip_archive *zip, tio_zip_record *rows,
                       const uint32_t *order, uint64_t *bad, tio_zip_passed passed, void *context,
                       tio_error *err)
{
    uint64_t n = zip->n_records, k;
    for (k = 0; k < n; k++) {
        tio_zip_record *r = &rows[order[k]];
        uint64_t limit = k + 1 < n ? rows[order[k + 1]].header_offset : zip->directory_offset;
        int rc;
        if (k == 0 && r->header_offset != 0)
            rc = tio_fail(err, TIO_MALFORMED, central_field(r, ZIP_CENTRAL_LOCAL_OFFSET), 0,
                          r->header_offset, "central directory header: no record begins at byte 0");
        else
            rc = check_local(buf, limit, r, err);
        if (rc != TIO_OK) {
            *bad = order[k];
            return rc;
        }
        if (passed != NULL && k % PASSED_EVERY == PASSED_EVERY - 1)
            passed(context, r->header_offset);
    }
    return TIO_OK;
}

int tio_zip_read(const uint8_t *buf, uint64_t len, const tio_zip_archive *zip, tio_zip_record *rows,
                 uint32_t *order, uint64_t *bad, tio_zip_passed passed, void *context,
                 tio_error *err)
{
    uint64_t end;
    int rc;
    *bad = zip->n_records;
    if (!tio_add(zip->directory_offset, zip->directory_size, &end) || end > len)
        return tio_fail(err, TIO_TRUNCATED, len, end, len, "central directory: cut short");
    rc = read_directory(buf, zip, rows, order, bad, err);
    if (rc != TIO_OK)
        return rc;
    return read_locals(buf, zip, rows, order, bad, passed, context, err);
}
