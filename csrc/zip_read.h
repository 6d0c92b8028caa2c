/* SPDX-License-Identifier: Apache-2.0
 *
 * Zip and zip64 archives that start at the first byte of the buffer: find the
 * end record, read the central directory, check each local header against it.
 *
 *   [local header + name + extra][payload][descriptor]   per record
 *   ...
 *   [central directory entry] per record
 *   [zip64 end record][zip64 locator]  (in zip64 archives; torch always writes them)
 *   [end record][comment]  trailing bytes
 *
 * What two readers could understand differently is refused: duplicate end
 * records, overlapping records, local headers that contradict the central
 * directory in name, method or flags (sizes and CRC only where flag bit 3 is
 * clear; local zip64 fields are ignored, since torch writes them wrong).
 * Duplicate names are left to the caller, who hashes names anyway.
 * Source: APPNOTE 6.3.10 sections 4.3-4.5.
 */
#ifndef TENSORIO_ZIP_READ_H
#define TENSORIO_ZIP_READ_H

#include "common.h"

typedef struct {
    uint64_t n_records;
    uint64_t directory_offset; /* of the first central directory entry */
    uint64_t directory_size;
    uint64_t end_offset;  /* of the end record (PK 05 06) */
    uint64_t archive_end; /* first byte behind the end record's comment */
    int zip64;            /* a zip64 end record was found and used */
} tio_zip_archive;

typedef struct {
    uint64_t header_offset; /* of the local header */
    uint64_t data_offset;   /* of the payload */
    uint64_t compressed;    /* payload bytes in the file */
    uint64_t size;          /* payload bytes when unpacked */
    uint64_t name_offset;   /* of the name in the central directory */
    uint32_t crc32;         /* as the central directory has it; 0 may mean "not computed" */
    uint16_t name_len;
    uint16_t method; /* 0 stored, 8 deflated; others are refused */
    uint16_t flags;
} tio_zip_record;

/* Find and check the end record(s). Touches only the tail of the buffer.
 * On success n_records * 46 <= directory_size, so that the caller may
 * allocate n_records rows. */
int tio_zip_open(const uint8_t *buf, uint64_t len, tio_zip_archive *zip, tio_error *err);

/* Fill rows[0 .. zip->n_records) in directory order and check them: every
 * record within the bytes before the directory, disjoint from the others, its
 * local header in agreement; the directory exactly used up. Touches the
 * directory and each record's local header, no payload. `order` is scratch for
 * n_records indices and receives the records in file order. On failure
 * *bad is the index of the record at fault (n_records if none).
 *
 * `passed`, if not NULL, is called now and then with an offset below which no
 * byte is looked at again: a caller whose buffer is a mapping can then let its
 * pages go, of which the kernel maps 16 for each one touched. */
typedef void (*tio_zip_passed)(void *context, uint64_t offset);

int tio_zip_read(const uint8_t *buf, uint64_t len, const tio_zip_archive *zip, tio_zip_record *rows,
                 uint32_t *order, uint64_t *bad, tio_zip_passed passed, void *context,
                 tio_error *err);

#endif
