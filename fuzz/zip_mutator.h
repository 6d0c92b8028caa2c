/* SPDX-License-Identifier: Apache-2.0
 *
 * Changes to archives that no change of single bytes finds: a number that two
 * headers must agree on is changed in both, sizes become those of the gap that
 * is there, entries change places.
 */
#ifndef TENSORIO_FUZZ_ZIP_MUTATOR_H
#define TENSORIO_FUZZ_ZIP_MUTATOR_H

#include "fuzz.h"
#include "zip_format.h"

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);

enum { ENTRIES = 64 };

static size_t find_entries(const uint8_t *data, size_t size, size_t *at)
{
    size_t i, n = 0;
    for (i = 0; i + ZIP_CENTRAL_SIZE <= size && n < ENTRIES; i++)
        if (tio_load32(data + i) == ZIP_CENTRAL_SIGNATURE)
            at[n++] = i;
    return n;
}

static unsigned next_random(unsigned *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* The first local header behind `at`, or the first central one: where a payload has to end. */
static uint32_t next_structure(const uint8_t *data, size_t size, size_t at)
{
    for (; at + 4 <= size; at++)
        if (tio_load32(data + at) == ZIP_LOCAL_SIGNATURE ||
            tio_load32(data + at) == ZIP_CENTRAL_SIGNATURE)
            break;
    return (uint32_t)at;
}

/* Put a size into both headers, where the local one has a size at all. */
static void put_size(uint8_t *central, uint8_t *local, int far, int near, uint32_t value)
{
    if (local != NULL && tio_load32(local + near) == tio_load32(central + far))
        tio_store32(local + near, value);
    tio_store32(central + far, value);
}

static void change_sizes(uint8_t *data, size_t size, uint8_t *c, uint8_t *l, unsigned *r)
{
    uint32_t value = tio_load32(c + ZIP_CENTRAL_COMPRESSED_SIZE);
    unsigned kind = next_random(r) % 4;
    if (kind == 0 && l != NULL) { /* up to the next structure */
        size_t payload = (size_t)(l - data) + ZIP_LOCAL_SIZE +
                         tio_load16(l + ZIP_LOCAL_NAME_LENGTH) +
                         tio_load16(l + ZIP_LOCAL_EXTRA_LENGTH);
        value = next_structure(data, size, payload) - (uint32_t)payload;
    } else if (kind == 1) {
        value = ZIP_MASKED32;
    }
    value += next_random(r) % 9 - 4;
    put_size(c, l, ZIP_CENTRAL_COMPRESSED_SIZE, ZIP_LOCAL_COMPRESSED_SIZE, value);
    if (next_random(r) % 4)
        put_size(c, l, ZIP_CENTRAL_UNCOMPRESSED_SIZE, ZIP_LOCAL_UNCOMPRESSED_SIZE, value);
}

/* One bit of flags, method or CRC, or one byte of the name, in both. */
static void change_both(uint8_t *data, size_t size, uint8_t *c, uint8_t *l, unsigned *r)
{
    static const int far[] = {ZIP_CENTRAL_FLAGS, ZIP_CENTRAL_METHOD, ZIP_CENTRAL_CRC32,
                              ZIP_CENTRAL_SIZE};
    static const int near[] = {ZIP_LOCAL_FLAGS, ZIP_LOCAL_METHOD, ZIP_LOCAL_CRC32, ZIP_LOCAL_SIZE};
    unsigned i = next_random(r) % 4, bit = next_random(r) % 8, byte = next_random(r) % 2;
    if ((size_t)(c - data) + (unsigned)far[i] + byte >= size)
        return;
    c[(unsigned)far[i] + byte] ^= (uint8_t)(1u << bit);
    if (l != NULL && (size_t)(l - data) + (unsigned)near[i] + byte < size)
        l[(unsigned)near[i] + byte] ^= (uint8_t)(1u << bit);
}

/* Padding that grows into the payload, or gives way to it. */
static void change_padding(uint8_t *data, size_t size, uint8_t *l, unsigned *r)
{
    size_t extra = (size_t)(l - data) + ZIP_LOCAL_SIZE + tio_load16(l + ZIP_LOCAL_NAME_LENGTH);
    unsigned by = next_random(r) % 9 - 4;
    if (extra + ZIP_EXTRA_SIZE > size)
        return;
    tio_store16(l + ZIP_LOCAL_EXTRA_LENGTH,
                (uint16_t)(tio_load16(l + ZIP_LOCAL_EXTRA_LENGTH) + by));
    tio_store16(data + extra + ZIP_EXTRA_DATA_SIZE,
                (uint16_t)(tio_load16(data + extra + ZIP_EXTRA_DATA_SIZE) + by));
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed)
{
    size_t at[ENTRIES], n = find_entries(data, size, at);
    unsigned r = seed;
    uint8_t *c, *other, *l = NULL, swapped[ZIP_CENTRAL_SIZE];
    uint32_t offset;
    if (n == 0 || next_random(&r) % 2)
        return LLVMFuzzerMutate(data, size, max_size);
    c = data + at[next_random(&r) % n];
    other = data + at[next_random(&r) % n];
    offset = tio_load32(c + ZIP_CENTRAL_LOCAL_OFFSET);
    if (offset < size && size - offset >= ZIP_LOCAL_SIZE &&
        tio_load32(data + offset) == ZIP_LOCAL_SIGNATURE)
        l = data + offset;
    switch (next_random(&r) % 6) {
    case 0:
    case 1: change_sizes(data, size, c, l, &r); break;
    case 2: change_both(data, size, c, l, &r); break;
    case 3: /* where another record is, or near */
        offset = tio_load32(other + ZIP_CENTRAL_LOCAL_OFFSET) + next_random(&r) % 3 - 1;
        tio_store32(c + ZIP_CENTRAL_LOCAL_OFFSET, offset);
        break;
    case 4:
        memcpy(swapped, c, sizeof swapped);
        memmove(c, other, sizeof swapped);
        memcpy(other, swapped, sizeof swapped);
        break;
    default:
        if (l != NULL)
            change_padding(data, size, l, &r);
    }
    return size;
}

#endif
