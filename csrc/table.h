/* SPDX-License-Identifier: Apache-2.0
 *
 * The packed table of tensors that formats fill and everything else reads: one
 * fixed row per tensor, one per further chunk, and a pool of dimensions.
 * All fields are signed 64-bit, so that Python reads them as array('q').
 *
 * A tensor of one chunk (every tensor of an ordinary file) has its extent in its
 * row. A tensor of several has `chunks` > 1 and its extents in the chunk rows
 * [chunk, chunk + chunks); storage, offset and nbytes of its row are then 0.
 */
#ifndef TENSORIO_TABLE_H
#define TENSORIO_TABLE_H

#include <stdint.h>

typedef struct {
    int64_t dtype;   /* code of the row in tensorio.dtypes */
    int64_t flags;   /* TIO_ROW_ bits */
    int64_t rank;    /* dimensions */
    int64_t dims;    /* first of shape[rank], strides[rank] (bytes) in the pool */
    int64_t storage; /* index of the storage */
    int64_t offset;  /* bytes from the storage's start to the element [0, 0, ...] */
    int64_t nbytes;  /* of the extent: from the first byte to behind the last that is touched */
    int64_t chunks;  /* number of chunks */
    int64_t chunk;   /* first chunk row, if chunks > 1 */
} tio_row;

typedef struct {
    int64_t storage;
    int64_t offset;
    int64_t nbytes;
    int64_t dims; /* first of offsets[rank], shape[rank], strides[rank] (bytes) in the pool */
} tio_chunk_row;

enum {
    TIO_ROW_REQUIRES_GRAD = 1, /* torch: the tensor asked for gradients */
    TIO_ROW_PARAMETER = 2,     /* torch: saved as a Parameter */
    TIO_ROW_CONJ = 4,          /* torch: the values are the conjugates of the bytes */
    TIO_ROW_NEG = 8            /* torch: the values are the negatives of the bytes */
};

#endif
