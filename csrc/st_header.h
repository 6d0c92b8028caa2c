/* SPDX-License-Identifier: Apache-2.0
 *
 * The header of a safetensors file, read and written.
 *
 *   offset  size  content
 *   0       8     N, little-endian u64, at most TIO_ST_HEADER_MAX
 *   8       N     JSON object: "__metadata__" (string to string, or null) and
 *                 name -> {"dtype","shape","data_offsets":[begin,end]};
 *                 padded with spaces
 *   8+N     -     payload; offsets count from here; tensors cover it exactly:
 *                 no hole, no overlap, no trailing byte
 *
 * Source: the reference implementation, release 0.8.0 (its checks in its
 * order), except that duplicate names are the caller's to refuse.
 */
#ifndef TENSORIO_ST_HEADER_H
#define TENSORIO_ST_HEADER_H

#include "common.h"
#include "json.h"

#define TIO_ST_HEADER_MAX 100000000u /* bytes of JSON; the reference's limit, decimal */
#define TIO_ST_RANK_MAX   64         /* dimensions; NumPy's NPY_MAXDIMS */

/* In the writer's order: descending as the reference sorts (widest first). */
enum {
    TIO_ST_U64 = 0,
    TIO_ST_I64,
    TIO_ST_F64,
    TIO_ST_C64,
    TIO_ST_F32,
    TIO_ST_U32,
    TIO_ST_I32,
    TIO_ST_BF16,
    TIO_ST_F16,
    TIO_ST_U16,
    TIO_ST_I16,
    TIO_ST_F8_E5M2FNUZ,
    TIO_ST_F8_E4M3FNUZ,
    TIO_ST_F8_E8M0,
    TIO_ST_F8_E4M3,
    TIO_ST_F8_E5M2,
    TIO_ST_I8,
    TIO_ST_U8,
    TIO_ST_F6_E3M2,
    TIO_ST_F6_E2M3,
    TIO_ST_F4,
    TIO_ST_BOOL,
    TIO_ST_DTYPES
};

const char *tio_st_dtype_name(int dtype); /* "F32"; NULL out of range */
unsigned tio_st_dtype_bits(int dtype);    /* bits per element: 64 .. 4 */

typedef struct {
    int kind;             /* one of the TIO_ST_EV_ values */
    tio_json_token name;  /* TENSOR: its name; META: the key */
    tio_json_token value; /* META: the string value */
    int dtype;            /* TENSOR */
    unsigned rank;        /* TENSOR */
    uint64_t shape[TIO_ST_RANK_MAX];
    uint64_t begin, end; /* TENSOR: data_offsets as written, unchecked */
} tio_st_event;

enum {
    TIO_ST_EV_TENSOR = 1,
    TIO_ST_EV_META,      /* one key and value of __metadata__ */
    TIO_ST_EV_META_NULL, /* "__metadata__": null */
    TIO_ST_EV_META_EMPTY /* "__metadata__": {} */
};

typedef struct {
    tio_json json;
    uint64_t header_len;  /* N */
    uint64_t data_offset; /* 8 + N */
    uint64_t file_len;
    int phase;         /* private */
    int seen_metadata; /* private: "__metadata__" may come once */
} tio_st_reader;

/* Check the frame (enough bytes for N, N within the limit, 8 + N <= len) and
 * get ready to iterate. `buf` holds the whole file, of `len` bytes, but no
 * byte behind the header is ever touched. */
int tio_st_open(tio_st_reader *r, const uint8_t *buf, uint64_t len, tio_error *err);

/* 1 and an event, 0 at the end of a well-formed header, or a negative code. */
int tio_st_next(tio_st_reader *r, tio_st_event *ev, tio_error *err);

/* The rules between entries, for n tensors, in payload order:
 *   - begin[i] equals the end of its predecessor (0 for the first), begin <= end,
 *   - bits[i] = the product of the shape times bits per element (see
 *     tio_st_nbits) divides by 8 and equals the span,
 *   - the last end plus data_offset is the file's length.
 * `order` is scratch for n indices and receives the payload order (ties of
 * empty tensors in header order). On failure *bad is the index of the tensor
 * at fault (n if none). offset in *err is left 0 for the caller to fill in from
 * its own notes. O(n) for tensors listed in payload order, else O(n log n). */
int tio_st_check(const uint64_t *begin, const uint64_t *end, const uint64_t *bits, uint32_t *order,
                 uint64_t n, uint64_t data_len, uint64_t *bad, tio_error *err);

/* Product of the shape, left to right, times the dtype's bits, with overflow
 * as the reference sees it ([2^32, 2^32, 0] overflows). */
int tio_st_nbits(const tio_st_event *ev, uint64_t *bits, tio_error *err);

/* Write one entry `"name":{"dtype":"F32","shape":[2,3],"data_offsets":[b,e]}`
 * without a comma. Needs up to 6*name_len + 21*rank + 128 bytes; returns the
 * number written. */
uint64_t tio_st_entry(uint8_t *out, const uint8_t *name, uint64_t name_len, int dtype,
                      const uint64_t *shape, unsigned rank, uint64_t begin, uint64_t end);

#endif
