/* SPDX-License-Identifier: Apache-2.0
 *
 * The bytes of a zip archive as torch.save (2.13) lays it out: stored records,
 * each payload aligned by an "FB" extra field in its local header, sizes and
 * CRC in a descriptor behind the payload, zip64 fields only where due, and a
 * tail that is always zip64. Layout first, bytes later: nothing here does I/O.
 *
 * Facts: see zip_write.c (each checked against torch's own output).
 */
#ifndef TENSORIO_ZIP_WRITE_H
#define TENSORIO_ZIP_WRITE_H

#include "common.h"

/* Payload alignment torch uses by default, and the largest power of two whose
 * padding always fits the extra field's 16-bit length. */
#define TIO_ZIP_ALIGN     64u
#define TIO_ZIP_ALIGN_MAX 32768u
#define TIO_ZIP_TAIL_SIZE 98u /* zip64 end record 56 + locator 20 + end record 22 */

typedef struct {
    uint64_t size;          /* in: payload bytes */
    uint16_t name_len;      /* in: bytes of the name, prefix included */
    uint32_t crc32;         /* in, for the descriptor and the central entry */
    uint64_t header_offset; /* out of tio_zip_place */
    uint64_t data_offset;   /* out of tio_zip_place */
    uint64_t end_offset;    /* out: behind the descriptor, where the next record starts */
} tio_zip_entry;

/* Place the record at `offset` (its local header's), with its payload at a
 * multiple of `align` (1 .. TIO_ZIP_ALIGN_MAX; need not be a power of two)
 * from the archive's start. Fills the three out fields. */
int tio_zip_place(tio_zip_entry *e, uint64_t offset, uint32_t align, tio_error *err);

/* Bytes of the local header with name and extra fields
 * (= data_offset - header_offset), written to out; returns their number. */
uint64_t tio_zip_local(const tio_zip_entry *e, const uint8_t *name, uint8_t *out);

/* Bytes of the descriptor (0 for an empty payload, 16, or 24 where a zip64
 * field is due), written to out; returns their number. */
uint64_t tio_zip_descriptor(const tio_zip_entry *e, uint8_t *out);

/* Bytes of the central directory entry, written to out (needs up to
 * 46 + name_len + 28); returns their number. */
uint64_t tio_zip_central(const tio_zip_entry *e, const uint8_t *name, uint8_t *out);
uint64_t tio_zip_central_size(const tio_zip_entry *e);

/* The 98 bytes behind the central directory. */
void tio_zip_tail(uint64_t n_records, uint64_t directory_offset, uint64_t directory_size,
                  uint8_t *out);

#endif
