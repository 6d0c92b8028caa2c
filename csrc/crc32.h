/* SPDX-License-Identifier: Apache-2.0
 *
 * CRC-32 as in zip, gzip and PNG: polynomial 0x04C11DB7, reflected (0xEDB88320), initial
 * value and final XOR 0xFFFFFFFF. Same numbers as zlib's crc32().
 */
#ifndef TENSORIO_CRC32_H
#define TENSORIO_CRC32_H

#include <stddef.h>
#include <stdint.h>

/* Choose the fastest variant this CPU has. Call once before tio_crc32;
 * until then the portable variant answers. */
void tio_crc32_init(void);

/* The checksum of `len` bytes appended to bytes whose checksum is `crc`
 * (0 for none). Any alignment, any length; buf may be NULL if len is 0.
 * Pure: no allocation, thread-safe. */
uint32_t tio_crc32(uint32_t crc, const uint8_t *buf, size_t len);

/* The checksum of A followed by B, given crc(A), crc(B) and len(B).
 * O(log len_b). */
uint32_t tio_crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t len_b);

/* The ranked table, portable first, faster ones behind it; open to tests,
 * which run every row for which tio_crc32_variant_usable() holds. A row is
 * 0 ... count - 1; row 0 is usable everywhere. */
typedef uint32_t (*tio_crc32_fn)(uint32_t crc, const uint8_t *buf, size_t len);

int tio_crc32_variant_count(void);
const char *tio_crc32_variant_name(int row); /* e.g. "portable", "vpclmul512", "pmull" */
int tio_crc32_variant_usable(int row);       /* does this CPU have it? Some microseconds */
tio_crc32_fn tio_crc32_variant(int row);
const char *tio_crc32_chosen(void); /* the row that tio_crc32 uses now */

#endif
