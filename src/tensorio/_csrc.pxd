# SPDX-License-Identifier: Apache-2.0
# The C core as Cython sees it: mirrors csrc/*.h line for line.
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from "status.h" nogil:
    enum:
        TIO_OK
        TIO_TRUNCATED
        TIO_MALFORMED
        TIO_UNSUPPORTED
        TIO_LIMIT
        TIO_MISMATCH
        TIO_NOSPACE
    ctypedef struct tio_error:
        int code
        uint64_t offset
        uint64_t want
        uint64_t got
        const char *what

cdef extern from "common.h" nogil:
    uint32_t tio_load32(const uint8_t *p)
    uint64_t tio_load64(const uint8_t *p)
    int tio_add(uint64_t a, uint64_t b, uint64_t *out)
    int tio_mul(uint64_t a, uint64_t b, uint64_t *out)
    double tio_load_double(const uint8_t *p)
    void tio_store_double(uint8_t *p, double v)
    int64_t tio_decimal(const uint8_t *p, uint64_t len)

cdef extern from "table.h" nogil:
    ctypedef struct tio_row:
        int64_t dtype
        int64_t flags
        int64_t rank
        int64_t dims
        int64_t storage
        int64_t offset
        int64_t nbytes
        int64_t chunks
        int64_t chunk
    enum:
        TIO_ROW_REQUIRES_GRAD
        TIO_ROW_PARAMETER
        TIO_ROW_CONJ
        TIO_ROW_NEG

cdef extern from "crc32.h" nogil:
    void tio_crc32_init()
    uint32_t tio_crc32(uint32_t crc, const uint8_t *buf, size_t len)
    uint32_t tio_crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t len_b)
    ctypedef uint32_t (*tio_crc32_fn)(uint32_t crc, const uint8_t *buf, size_t len)
    int tio_crc32_variant_count()
    const char *tio_crc32_variant_name(int row)
    int tio_crc32_variant_usable(int row)
    tio_crc32_fn tio_crc32_variant(int row)
    const char *tio_crc32_chosen()

cdef extern from "finite.h" nogil:
    void tio_match_init()
    size_t tio_match_count(const uint8_t *buf, size_t count, unsigned width, uint64_t mask, uint64_t pattern)
    ctypedef struct tio_match_kind:
        uint64_t width
        uint64_t mask
        uint64_t pattern
    ctypedef struct tio_match_run:
        int64_t kind
        int64_t address
        int64_t nbytes
        int64_t tensor
        int64_t start
    size_t tio_match_runs(const tio_match_run *runs, size_t begin, size_t end, const tio_match_kind *kinds,
                          size_t *first)
    ctypedef size_t (*tio_match_fn)(const uint8_t *buf, size_t count, unsigned width, uint64_t mask, uint64_t pattern)
    int tio_match_variant_count()
    const char *tio_match_variant_name(int row)
    int tio_match_variant_usable(int row)
    tio_match_fn tio_match_variant(int row)
    const char *tio_match_chosen()

cdef extern from "json.h" nogil:
    ctypedef struct tio_json_token:
        int type
        int escaped
        const uint8_t *text
        uint64_t text_len
        uint64_t offset
    uint64_t tio_json_unescape(const tio_json_token *tok, uint8_t *out)
    uint64_t tio_json_quote(const uint8_t *text, uint64_t len, uint8_t *out)

cdef extern from "st_header.h" nogil:
    enum:
        TIO_ST_HEADER_MAX
        TIO_ST_RANK_MAX
        TIO_ST_DTYPES
        TIO_ST_EV_TENSOR
        TIO_ST_EV_META
        TIO_ST_EV_META_NULL
        TIO_ST_EV_META_EMPTY
    const char *tio_st_dtype_name(int dtype)
    unsigned tio_st_dtype_bits(int dtype)
    ctypedef struct tio_st_event:
        int kind
        tio_json_token name
        tio_json_token value
        int dtype
        unsigned rank
        uint64_t shape[64]
        uint64_t begin
        uint64_t end
    ctypedef struct tio_st_reader:
        uint64_t header_len
        uint64_t data_offset
        uint64_t file_len
    int tio_st_open(tio_st_reader *r, const uint8_t *buf, uint64_t len, tio_error *err)
    int tio_st_next(tio_st_reader *r, tio_st_event *ev, tio_error *err)
    int tio_st_check(const uint64_t *begin, const uint64_t *end, const uint64_t *bits, uint32_t *order,
                     uint64_t n, uint64_t data_len, uint64_t *bad, tio_error *err)
    int tio_st_nbits(const tio_st_event *ev, uint64_t *bits, tio_error *err)
    uint64_t tio_st_entry(uint8_t *out, const uint8_t *name, uint64_t name_len, int dtype,
                          const uint64_t *shape, unsigned rank, uint64_t begin, uint64_t end)

cdef extern from "tensor_ops.h" nogil:
    enum:
        TIO_TENSOR_PUTS
    ctypedef struct tio_tensor_ops:
        uint32_t word
        uint32_t cls
        uint32_t location
        uint32_t hooks
        int64_t key_slot
        uint64_t key_at
        const uint8_t *key
        uint32_t key_len
        int requires_grad
        int legacy
        unsigned rank
        int64_t numel
        int64_t offset
        int64_t dims[128]
        int64_t puts[6]
        uint64_t end
    int tio_tensor_ops_match(const uint8_t *buf, uint64_t len, uint64_t at, tio_tensor_ops *out)

cdef extern from "zip_read.h" nogil:
    ctypedef struct tio_zip_archive:
        uint64_t n_records
        uint64_t directory_offset
        uint64_t directory_size
        uint64_t end_offset
        uint64_t archive_end
        int zip64
    ctypedef struct tio_zip_record:
        uint64_t header_offset
        uint64_t data_offset
        uint64_t compressed
        uint64_t size
        uint64_t name_offset
        uint32_t crc32
        uint16_t name_len
        uint16_t method
        uint16_t flags
    int tio_zip_open(const uint8_t *buf, uint64_t len, tio_zip_archive *zip, tio_error *err)
    ctypedef void (*tio_zip_passed)(void *context, uint64_t offset) noexcept nogil
    int tio_zip_read(const uint8_t *buf, uint64_t len, const tio_zip_archive *zip, tio_zip_record *rows,
                     uint32_t *order, uint64_t *bad, tio_zip_passed passed, void *context, tio_error *err)

cdef extern from "zip_write.h" nogil:
    enum:
        TIO_ZIP_ALIGN
        TIO_ZIP_ALIGN_MAX
        TIO_ZIP_TAIL_SIZE
    ctypedef struct tio_zip_entry:
        uint64_t size
        uint16_t name_len
        uint32_t crc32
        uint64_t header_offset
        uint64_t data_offset
        uint64_t end_offset
    int tio_zip_place(tio_zip_entry *e, uint64_t offset, uint32_t align, tio_error *err)
    uint64_t tio_zip_local(const tio_zip_entry *e, const uint8_t *name, uint8_t *out)
    uint64_t tio_zip_descriptor(const tio_zip_entry *e, uint8_t *out)
    uint64_t tio_zip_central(const tio_zip_entry *e, const uint8_t *name, uint8_t *out)
    uint64_t tio_zip_central_size(const tio_zip_entry *e)
    void tio_zip_tail(uint64_t n_records, uint64_t directory_offset, uint64_t directory_size, uint8_t *out)
