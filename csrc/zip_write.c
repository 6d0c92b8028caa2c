/* SPDX-License-Identifier: Apache-2.0
 *
 * The zip archive of torch.save, byte for byte.
 *
 *   local header   50 4b 03 04 | 00 00 | flags | 00 00 | 00 00 | 00 00 |
 *                  00 00 00 00 | 00 00 00 00 | 00 00 00 00 | name len | extra len
 *                  needed 0, stored, no time and date; CRC and sizes 0, at any size
 *   name
 *   zip64 field    01 00 | 8, 16 or 24 | [size, 0] if the size is wide | [own offset] if wide
 *   padding field  "FB" | L | L times "Z", up to the next multiple of the
 *                  alignment; there with L = 0, too, and before empty payloads
 *   payload
 *   descriptor     50 4b 07 08 | CRC | compressed | uncompressed; none behind an
 *                  empty payload; 8-byte sizes if the record has a zip64 field
 *   ...
 *   central header per record: made-by 0, CRC and sizes true, no padding field
 *   zip64 end record, locator, end record: always all three, no comment
 *
 * A number is wide from 0xFFFFFFFF on, that value included. Flags are 0x0808
 * (descriptor, UTF-8 name) or, for an empty payload, 0x0800.
 *
 * Two quirks are kept, since they are what makes the file torch's: an offset in
 * the zip64 field of a local header, where APPNOTE has none, and a compressed
 * size of 0 there. Readers take both from the central directory.
 *
 * Source: bytes that torch 2.13 wrote, records beyond 4 GiB among them.
 */
#include "zip_write.h"

#include "zip_format.h"

#define PADDING_ID   0x4246u /* "FB" */
#define PADDING_BYTE 'Z'

/* Fixed words of the tail, as torch's zip library writes them. */
#define END64_MADE_BY 0x031Eu /* unix, APPNOTE 3.0 */
#define END64_NEEDED  0x002Du /* 4.5, the first version with zip64 */

static int is_wide(uint64_t number)
{
    return number >= ZIP_MASKED32;
}

static uint32_t narrow(uint64_t number)
{
    return is_wide(number) ? ZIP_MASKED32 : (uint32_t)number;
}

static uint16_t flags_of(const tio_zip_entry *e)
{
    return (uint16_t)(e->size != 0 ? ZIP_FLAG_DESCRIPTOR | ZIP_FLAG_UTF8 : ZIP_FLAG_UTF8);
}

/* Bytes of the zip64 field, the same in both headers; 0 if nothing is wide. */
static uint64_t zip64_size(const tio_zip_entry *e)
{
    uint64_t n = (is_wide(e->size) ? 2 * ZIP_ZIP64_VALUE_SIZE : 0) +
                 (is_wide(e->header_offset) ? ZIP_ZIP64_VALUE_SIZE : 0);
    return n != 0 ? ZIP_EXTRA_SIZE + n : 0;
}

static uint64_t descriptor_size(const tio_zip_entry *e)
{
    if (e->size == 0)
        return 0;
    return zip64_size(e) != 0 ? ZIP_DESCRIPTOR_SIZE64 : ZIP_DESCRIPTOR_SIZE;
}

static uint8_t *put16(uint8_t *p, uint16_t v)
{
    tio_store16(p, v);
    return p + sizeof v;
}

static uint8_t *put32(uint8_t *p, uint32_t v)
{
    tio_store32(p, v);
    return p + sizeof v;
}

static uint8_t *put64(uint8_t *p, uint64_t v)
{
    tio_store64(p, v);
    return p + sizeof v;
}

static uint8_t *put_bytes(uint8_t *p, const uint8_t *bytes, uint64_t n)
{
    memcpy(p, bytes, (size_t)n);
    return p + n;
}

static uint8_t *put_zip64(uint8_t *p, const tio_zip_entry *e, uint64_t compressed)
{
    uint64_t n = zip64_size(e);
    if (n == 0)
        return p;
    p = put16(p, ZIP_EXTRA_ZIP64);
    p = put16(p, (uint16_t)(n - ZIP_EXTRA_SIZE));
    if (is_wide(e->size)) {
        p = put64(p, e->size);
        p = put64(p, compressed);
    }
    if (is_wide(e->header_offset))
        p = put64(p, e->header_offset);
    return p;
}

int tio_zip_place(tio_zip_entry *e, uint64_t offset, uint32_t align, tio_error *err)
{
    uint64_t at, end;
    if (align == 0 || align > TIO_ZIP_ALIGN_MAX)
        return tio_fail(err, TIO_LIMIT, offset, TIO_ZIP_ALIGN_MAX, align, "alignment of payloads");
    if (e->name_len == 0)
        return tio_fail(err, TIO_MALFORMED, offset, 1, 0, "local file header: file name length");
    e->header_offset = offset;
    if (!tio_add(offset, ZIP_LOCAL_SIZE + e->name_len + zip64_size(e) + ZIP_EXTRA_SIZE, &at) ||
        !tio_add(at, (align - at % align) % align, &at) || !tio_add(at, e->size, &end) ||
        !tio_add(end, descriptor_size(e), &end))
        return tio_fail(err, TIO_LIMIT, offset, UINT64_MAX - offset, e->size,
                        "local file header: record ends beyond 64 bits");
    e->data_offset = at;
    e->end_offset = end;
    return TIO_OK;
}

uint64_t tio_zip_local(const tio_zip_entry *e, const uint8_t *name, uint8_t *out)
{
    uint64_t extra = e->data_offset - e->header_offset - ZIP_LOCAL_SIZE - e->name_len;
    uint64_t padding = extra - zip64_size(e) - ZIP_EXTRA_SIZE;
    uint8_t *p = out;
    memset(p, 0, ZIP_LOCAL_SIZE); /* all that is not named below is 0 */
    tio_store32(p, ZIP_LOCAL_SIGNATURE);
    tio_store16(p + ZIP_LOCAL_FLAGS, flags_of(e));
    tio_store16(p + ZIP_LOCAL_NAME_LENGTH, e->name_len);
    tio_store16(p + ZIP_LOCAL_EXTRA_LENGTH, (uint16_t)extra);
    p = put_bytes(p + ZIP_LOCAL_SIZE, name, e->name_len);
    p = put_zip64(p, e, 0);
    p = put16(p, PADDING_ID);
    p = put16(p, (uint16_t)padding);
    memset(p, PADDING_BYTE, (size_t)padding);
    return e->data_offset - e->header_offset;
}

uint64_t tio_zip_descriptor(const tio_zip_entry *e, uint8_t *out)
{
    uint64_t n = descriptor_size(e);
    uint8_t *p = out;
    if (n == 0)
        return 0;
    p = put32(p, ZIP_DESCRIPTOR_SIGNATURE);
    p = put32(p, e->crc32);
    if (n == ZIP_DESCRIPTOR_SIZE64) {
        p = put64(p, e->size);
        put64(p, e->size);
    } else {
        p = put32(p, (uint32_t)e->size);
        put32(p, (uint32_t)e->size);
    }
    return n;
}

uint64_t tio_zip_central_size(const tio_zip_entry *e)
{
    return ZIP_CENTRAL_SIZE + e->name_len + zip64_size(e);
}

uint64_t tio_zip_central(const tio_zip_entry *e, const uint8_t *name, uint8_t *out)
{
    uint8_t *p = out;
    int directory = name[e->name_len - 1] == '/'; /* by the name alone, as miniz does */
    memset(p, 0, ZIP_CENTRAL_SIZE);               /* all that is not named below is 0 */
    tio_store32(p, ZIP_CENTRAL_SIGNATURE);
    tio_store16(p + ZIP_CENTRAL_FLAGS, flags_of(e));
    tio_store32(p + ZIP_CENTRAL_CRC32, e->crc32);
    tio_store32(p + ZIP_CENTRAL_COMPRESSED_SIZE, narrow(e->size));
    tio_store32(p + ZIP_CENTRAL_UNCOMPRESSED_SIZE, narrow(e->size));
    tio_store16(p + ZIP_CENTRAL_NAME_LENGTH, e->name_len);
    tio_store16(p + ZIP_CENTRAL_EXTRA_LENGTH, (uint16_t)zip64_size(e));
    tio_store32(p + ZIP_CENTRAL_EXTERNAL_ATTRIBUTES, directory ? ZIP_DOS_DIRECTORY : 0);
    tio_store32(p + ZIP_CENTRAL_LOCAL_OFFSET, narrow(e->header_offset));
    p = put_bytes(p + ZIP_CENTRAL_SIZE, name, e->name_len);
    put_zip64(p, e, e->size);
    return tio_zip_central_size(e);
}

static void put_end64(uint64_t n_records, uint64_t offset, uint64_t size, uint8_t *out)
{
    memset(out, 0, ZIP_END64_SIZE);
    tio_store32(out, ZIP_END64_SIGNATURE);
    tio_store64(out + ZIP_END64_RECORD_SIZE, ZIP_END64_SIZE - ZIP_END64_SIZE_LEAD);
    tio_store16(out + ZIP_END64_VERSION_MADE_BY, END64_MADE_BY);
    tio_store16(out + ZIP_END64_VERSION_NEEDED, END64_NEEDED);
    tio_store64(out + ZIP_END64_ENTRIES_ON_DISK, n_records);
    tio_store64(out + ZIP_END64_ENTRIES, n_records);
    tio_store64(out + ZIP_END64_DIRECTORY_SIZE, size);
    tio_store64(out + ZIP_END64_DIRECTORY_OFFSET, offset);
}

static void put_locator(uint64_t end64, uint8_t *out)
{
    memset(out, 0, ZIP_LOCATOR_SIZE);
    tio_store32(out, ZIP_LOCATOR_SIGNATURE);
    tio_store64(out + ZIP_LOCATOR_END64_OFFSET, end64);
    tio_store32(out + ZIP_LOCATOR_DISKS, 1);
}

static void put_end(uint64_t n_records, uint64_t offset, uint64_t size, uint8_t *out)
{
    uint16_t n = n_records < ZIP_MASKED16 ? (uint16_t)n_records : ZIP_MASKED16;
    memset(out, 0, ZIP_END_SIZE);
    tio_store32(out, ZIP_END_SIGNATURE);
    tio_store16(out + ZIP_END_ENTRIES_ON_DISK, n);
    tio_store16(out + ZIP_END_ENTRIES, n);
    tio_store32(out + ZIP_END_DIRECTORY_SIZE, narrow(size));
    tio_store32(out + ZIP_END_DIRECTORY_OFFSET, narrow(offset));
}

void tio_zip_tail(uint64_t n_records, uint64_t directory_offset, uint64_t directory_size,
                  uint8_t *out)
{
    put_end64(n_records, directory_offset, directory_size, out);
    put_locator(directory_offset + directory_size, out + ZIP_END64_SIZE);
    put_end(n_records, directory_offset, directory_size, out + ZIP_END64_SIZE + ZIP_LOCATOR_SIZE);
}
