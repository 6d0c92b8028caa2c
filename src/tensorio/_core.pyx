# SPDX-License-Identifier: Apache-2.0
"""The airlock: the only way from Python into the C core, and back.

Functions only, no state. Each gets a buffer, calls C (without the GIL where
the input may be large), turns a status into an exception, builds the result
in one batch, and releases the buffer. Rows that only C reads travel as opaque
bytearrays.
"""
cimport cython
from cpython cimport array
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

import array as _array

from tensorio import errors as _errors

from tensorio._append cimport *
from tensorio._csrc cimport *

cdef extern from "Python.h":
    str PyUnicode_DecodeUTF8(const char *s, Py_ssize_t size, const char *errors)
    const char *PyUnicode_AsUTF8AndSize(object s, Py_ssize_t *size) except NULL
    int PyBuffer_FillInfo(Py_buffer *view, object exporter, void *buf, Py_ssize_t n, int readonly, int flags) except -1

cdef enum:
    NOGIL_FROM = 32768  # bytes; below it, letting go of the GIL costs more than the work
    META_COST = 224     # bytes of a pair of short strings, its tuple, and its places in a list and a dict
    NOTES_FIXED = 64 << 20

cdef array.array _Q = _array.array("q")

tio_crc32_init()
tio_match_init()

ZIP_ALIGN = TIO_ZIP_ALIGN
ZIP_ALIGN_MAX = TIO_ZIP_ALIGN_MAX

# C status -> exception: the one table.
cdef dict _CLASSES = {
    TIO_TRUNCATED: _errors.TruncatedError,
    TIO_MALFORMED: _errors.HeaderError,
    TIO_UNSUPPORTED: _errors.UnsupportedError,
    TIO_LIMIT: _errors.LimitError,
    TIO_MISMATCH: _errors.HeaderError,
}


cdef object _fault(const tio_error *err, str record=None):
    """The exception for a status: kind, place and sentence."""
    message = err.what.decode("ascii")
    if err.want or err.got:
        message = f"{message}: expected {err.want}, found {err.got}"
    if err.code == TIO_TRUNCATED:
        message += "; the file is incomplete: copy or download it again"
    return _CLASSES.get(err.code, _errors.FormatError)(message, offset=err.offset, record=record)


cdef class _Buffer:
    """A read-only buffer held for the length of one call."""
    cdef Py_buffer raw
    cdef bint held
    cdef const uint8_t *ptr
    cdef size_t nbytes

    def __cinit__(self, obj):
        self.held = False
        PyObject_GetBuffer(obj, &self.raw, PyBUF_SIMPLE)
        self.held = True
        self.ptr = <const uint8_t *> self.raw.buf
        self.nbytes = <size_t> self.raw.len

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.raw)


def address(buffer):
    """Return the address of the first byte of a writable or read-only buffer."""
    return <uintptr_t> _Buffer(buffer).ptr


def touch(buffer):
    """Read one byte of each page, so that all of them are mapped; releases the GIL."""
    cdef _Buffer data = _Buffer(buffer)
    cdef const volatile uint8_t *p = data.ptr
    cdef size_t at
    with nogil:
        for at in range(0, data.nbytes, 4096):
            p[at]
        if data.nbytes:
            p[data.nbytes - 1]


@cython.final
cdef class _Memory:
    """Exports memory of somebody else's, and keeps that object alive for as long as there are views."""
    cdef object owner
    cdef void *ptr
    cdef Py_ssize_t nbytes

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.ptr, self.nbytes, 1, flags)


def memory(uintptr_t address, Py_ssize_t nbytes, owner):
    """Return a read-only view of memory that lives as long as `owner` does, which the view keeps alive."""
    cdef _Memory out
    if nbytes == 0:
        return memoryview(b"")
    out = _Memory.__new__(_Memory)
    out.owner, out.ptr, out.nbytes = owner, <void *> address, nbytes
    return memoryview(out)


def gather(addresses, sizes, Py_ssize_t first, uint64_t limit, uint64_t small):
    """Join consecutive small payloads that lie in memory.

    Parameters
    ----------
    addresses, sizes : array of int64
        Of all payloads; an address of 0 stands for one that is not in memory.
    first : int
        Payload to begin with.
    limit : int
        Bytes to stop at.
    small : int
        Payloads of more bytes than this are left to the caller.

    Returns
    -------
    data : bytes
    next : int
        First payload that is not in `data`.
    """
    cdef const int64_t[::1] where = addresses
    cdef const int64_t[::1] nbytes = sizes
    cdef Py_ssize_t i, n = len(addresses)
    cdef uint64_t total = 0
    cdef bytes out
    cdef char *p
    for i in range(first, n):
        if total >= limit or <uint64_t> nbytes[i] > small or (where[i] == 0 and nbytes[i]):
            break
        total += <uint64_t> nbytes[i]
    else:
        i = n
    out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> total)
    p = PyBytes_AS_STRING(out)
    for k in range(first, i):
        if nbytes[k]:  # an empty array may be at NULL, which memcpy does not take even for nothing
            memcpy(p, <const void *> <uintptr_t> where[k], nbytes[k])
        p += nbytes[k]
    return out, i


# ---------------------------------------------------------------- checksums

def join(pieces, Py_ssize_t nbytes):
    """Return buffers one after the other as bytes, like ``b"".join``, releasing the GIL for the large ones.

    Parameters
    ----------
    pieces : iterable of buffer
    nbytes : int
        What all of them together have, in bytes.
    """
    cdef bytes out = PyBytes_FromStringAndSize(NULL, nbytes)
    cdef char *at = PyBytes_AS_STRING(out)
    cdef size_t room = <size_t> nbytes
    cdef _Buffer data
    for piece in pieces:
        data = _Buffer(piece)
        if data.nbytes > room:
            raise ValueError(f"pieces of over {nbytes} bytes")
        if data.nbytes < NOGIL_FROM:
            memcpy(at, data.ptr, data.nbytes)
        else:
            with nogil:
                memcpy(at, data.ptr, data.nbytes)
        at += data.nbytes
        room -= data.nbytes
    if room:
        raise ValueError(f"pieces of {<size_t> nbytes - room} bytes, expected were {nbytes}")
    return out


def crc32(buffer, uint32_t value=0):
    """Return the CRC-32 (as in zip) of `buffer` appended to bytes whose checksum is `value`.

    Parameters
    ----------
    buffer : contiguous buffer
    value : int
        0 for none.

    Notes
    -----
    At memory speed on CPUs with carry-less multiplication; releases the GIL
    from 32 KiB on.
    """
    cdef Py_buffer raw
    PyObject_GetBuffer(buffer, &raw, PyBUF_SIMPLE)
    if raw.len < NOGIL_FROM:
        value = tio_crc32(value, <const uint8_t *> raw.buf, <size_t> raw.len)
    else:
        with nogil:
            value = tio_crc32(value, <const uint8_t *> raw.buf, <size_t> raw.len)
    PyBuffer_Release(&raw)
    return value


def crc32_combine(uint32_t a, uint32_t b, uint64_t len_b):
    """Return the CRC-32 of A followed by B from those of A and B and B's length in bytes."""
    return tio_crc32_combine(a, b, len_b)


def crc32_variants():
    """Return the names of the CRC-32 variants this CPU can run, portable first (for tests)."""
    return [tio_crc32_variant_name(i).decode() for i in range(tio_crc32_variant_count())
            if tio_crc32_variant_usable(i)]


def crc32_with(str variant, buffer, uint32_t value=0):
    """Like `crc32` with a named variant (for tests and benches)."""
    cdef _Buffer data = _Buffer(buffer)
    cdef tio_crc32_fn fn
    cdef int i
    for i in range(tio_crc32_variant_count()):
        if tio_crc32_variant_usable(i) and tio_crc32_variant_name(i).decode() == variant:
            fn = tio_crc32_variant(i)
            with nogil:
                value = fn(value, data.ptr, data.nbytes)
            return value
    raise ValueError(f"no CRC-32 variant {variant!r} on this CPU")


# ------------------------------------------------------- elements not finite

def match_find(uintptr_t address, size_t count, unsigned width, uint64_t mask, uint64_t pattern):
    """Return the index of the first element for which ``element & mask == pattern``; `count` if there is none.

    Parameters
    ----------
    address : int
        Of `count` elements of `width` bytes (1, 2, 4 or 8) in native byte order; the
        caller keeps their memory alive.

    Notes
    -----
    At memory speed; releases the GIL.
    """
    cdef size_t found
    with nogil:
        found = tio_match_find(<const uint8_t *> address, count, width, mask, pattern)
    return found


def match_count(uintptr_t address, size_t count, unsigned width, uint64_t mask, uint64_t pattern):
    """Return how many of the elements match; see `match_find`."""
    cdef size_t found
    with nogil:
        found = tio_match_count(<const uint8_t *> address, count, width, mask, pattern)
    return found


def match_variants():
    """Return the names of the variants of `match_find` this CPU can run, portable first (for tests)."""
    return [tio_match_variant_name(i).decode() for i in range(tio_match_variant_count())
            if tio_match_variant_usable(i)]


def match_with(str variant, uintptr_t address, size_t count, unsigned width, uint64_t mask, uint64_t pattern):
    """Like `match_find` with a named variant (for tests and benches)."""
    cdef tio_match_fn fn
    cdef int i
    for i in range(tio_match_variant_count()):
        if tio_match_variant_usable(i) and tio_match_variant_name(i).decode() == variant:
            fn = tio_match_variant(i)
            with nogil:
                count = fn(<const uint8_t *> address, count, width, mask, pattern)
            return count
    raise ValueError(f"no variant {variant!r} on this CPU")


# -------------------------------------------------------------- safetensors

cdef struct _StRows:
    tio_row *rows
    uint64_t *bits
    int64_t *dims
    size_t n
    size_t room
    size_t n_dims
    size_t dims_room


cdef int _st_grow(_StRows *t, unsigned rank) except -1:
    cdef size_t room
    cdef void *p
    if t.n == t.room:
        room = 2 * t.room if t.room else 64
        p = PyMem_Realloc(t.rows, room * sizeof(tio_row))
        if p == NULL:
            raise MemoryError()
        t.rows = <tio_row *> p
        p = PyMem_Realloc(t.bits, room * sizeof(uint64_t))
        if p == NULL:
            raise MemoryError()
        t.bits = <uint64_t *> p
        t.room = room
    if t.n_dims + 2 * rank > t.dims_room:
        room = 2 * t.dims_room + 2 * rank + 256
        p = PyMem_Realloc(t.dims, room * sizeof(int64_t))
        if p == NULL:
            raise MemoryError()
        t.dims = <int64_t *> p
        t.dims_room = room
    return 0


cdef int _st_add(_StRows *t, const tio_st_event *ev, const uint8_t *codes, tio_error *err) except -100:
    """Append one tensor's row; its strides are C order, or 0 for packed types."""
    cdef tio_row *row
    cdef int64_t step
    cdef int64_t *dims
    cdef unsigned i, bits = tio_st_dtype_bits(ev.dtype)
    cdef uint64_t total = 0
    cdef int rc = tio_st_nbits(ev, &total, err)
    if rc < 0:
        return rc
    _st_grow(t, ev.rank)
    row = &t.rows[t.n]
    row.dtype = codes[ev.dtype]
    row.flags = 0
    row.rank = ev.rank
    row.dims = <int64_t> t.n_dims
    row.storage = 0
    row.offset = <int64_t> ev.begin
    row.nbytes = <int64_t> ev.end
    row.chunks = 1
    row.chunk = 0
    t.bits[t.n] = total
    dims = t.dims + t.n_dims
    step = 0 if bits % 8 else bits // 8
    for i in range(ev.rank):
        if ev.shape[i] > <uint64_t> 0x7FFFFFFFFFFFFFFF:
            err.code = TIO_LIMIT
            err.offset = ev.name.offset
            err.want = 0
            err.got = 0
            err.what = b"tensor entry: shape: a dimension over 2^63 - 1"
            return TIO_LIMIT
        dims[i] = <int64_t> ev.shape[i]
    for i in range(ev.rank, 0, -1):
        dims[ev.rank + i - 1] = step
        # A product that overflows has a zero elsewhere (the total did not overflow).
        step = <int64_t> (<uint64_t> step * (ev.shape[i - 1] if ev.shape[i - 1] else 1))
    t.n += 1
    t.n_dims += 2 * ev.rank
    return 0


cdef str _st_text(const tio_json_token *tok, bytearray scratch):
    """The string of a token, unescaped."""
    cdef uint64_t n
    if not tok.escaped:
        return PyUnicode_DecodeUTF8(<const char *> tok.text, <Py_ssize_t> tok.text_len, NULL)
    if <uint64_t> PyByteArray_GET_SIZE(scratch) < tok.text_len:
        scratch.extend(bytes(tok.text_len))
    n = tio_json_unescape(tok, <uint8_t *> PyByteArray_AS_STRING(scratch))
    return PyUnicode_DecodeUTF8(PyByteArray_AS_STRING(scratch), <Py_ssize_t> n, NULL)


cdef object _st_span_fault(const uint8_t *ptr, uint64_t nbytes, uint64_t bad, list names, tio_error *err):
    """Find where the entry at fault is written, for the message."""
    cdef tio_st_reader reader
    cdef tio_st_event ev
    cdef tio_error ignored
    cdef uint64_t i = 0
    if len(set(names)) != len(names):  # found later if the spans are right; here it is why they are not
        seen = set()
        twice = next(n for n in names if n in seen or seen.add(n))
        return _errors.HeaderError("duplicate tensor name", record=twice)
    if bad < <uint64_t> len(names):
        tio_st_open(&reader, ptr, nbytes, &ignored)
        while tio_st_next(&reader, &ev, &ignored) == 1:
            if ev.kind != TIO_ST_EV_TENSOR:
                continue
            if i == bad:
                err.offset = ev.name.offset
                break
            i += 1
        return _fault(err, names[bad])
    tio_st_open(&reader, ptr, nbytes, &ignored)
    err.offset = reader.data_offset + (err.want if err.want < err.got else err.got)
    return _fault(err)


def st_read(buffer, bytes codes not None):
    """Parse and check the header of a safetensors file.

    Parameters
    ----------
    buffer : buffer
        The whole file; no byte behind the header is touched.
    codes : bytes
        The `tensorio.dtypes` code of each format dtype, in the order of
        ``csrc/st_header.h``.

    Returns
    -------
    names : list of str
        In header order; duplicates are the caller's to refuse.
    rows, dims : array of int64
        Columns of a `Table`; offsets count from the start of the file.
    metadata : list of (str, str) or None
        Pairs in file order; None if absent or null.
    data_offset : int
        Where the payload starts, in bytes.
    """
    cdef _Buffer data = _Buffer(buffer)
    cdef tio_st_reader reader
    cdef tio_st_event ev
    cdef tio_error err
    cdef _StRows t
    cdef list names = []
    cdef object metadata = None
    cdef bytearray scratch = bytearray()
    cdef int64_t notes
    cdef int rc
    memset(&t, 0, sizeof(t))
    memset(&err, 0, sizeof(err))
    if tio_st_open(&reader, data.ptr, data.nbytes, &err) < 0:
        raise _fault(&err)
    # Promise P3 of docs/security.md, less a share for the tensors.
    notes = (NOTES_FIXED + 2 * <int64_t> reader.header_len) // 4 * 3
    try:
        while True:
            rc = tio_st_next(&reader, &ev, &err)
            if rc <= 0:
                break
            if ev.kind == TIO_ST_EV_TENSOR:
                names.append(_st_text(&ev.name, scratch))
                rc = _st_add(&t, &ev, <const uint8_t *> PyBytes_AS_STRING(codes), &err)
                if rc < 0:
                    err.offset = ev.name.offset
                    raise _fault(&err, names[len(names) - 1])
            elif ev.kind != TIO_ST_EV_META_NULL:
                if metadata is None:
                    metadata = []
                if ev.kind == TIO_ST_EV_META:
                    notes -= META_COST + <int64_t> (ev.name.text_len + ev.value.text_len)
                    if notes < 0:
                        raise _errors.LimitError("__metadata__ that would take over twice the header's size in memory",
                                                 offset=ev.name.offset)
                    (<list> metadata).append((_st_text(&ev.name, scratch), _st_text(&ev.value, scratch)))
        if rc < 0:
            raise _fault(&err)
        _st_spans(&t, &reader, data, names)
        return (names, _longs(t.rows, t.n * sizeof(tio_row)), _longs(t.dims, t.n_dims * 8), metadata,
                reader.data_offset)
    finally:
        PyMem_Free(t.rows)
        PyMem_Free(t.bits)
        PyMem_Free(t.dims)


cdef int _st_spans(_StRows *t, const tio_st_reader *reader, _Buffer data, list names) except -1:
    """Check that the tensors tile the payload, then turn (begin, end) into file offset and size."""
    cdef size_t i, n = t.n
    cdef uint64_t bad = 0, payload = reader.file_len - reader.data_offset
    cdef tio_error err
    cdef int rc
    cdef uint64_t *spans = <uint64_t *> PyMem_Malloc((n + 1) * (2 * sizeof(uint64_t) + sizeof(uint32_t)))
    if spans == NULL:
        raise MemoryError()
    try:
        for i in range(n):
            spans[i] = <uint64_t> t.rows[i].offset
            spans[n + i] = <uint64_t> t.rows[i].nbytes
        memset(&err, 0, sizeof(err))
        with nogil:
            rc = tio_st_check(spans, spans + n, t.bits, <uint32_t *> (spans + 2 * n), n, payload, &bad, &err)
        if rc < 0:
            raise _st_span_fault(data.ptr, data.nbytes, bad, names, &err)
        for i in range(n):
            t.rows[i].nbytes -= t.rows[i].offset
            t.rows[i].offset += <int64_t> reader.data_offset
    finally:
        PyMem_Free(spans)
    return 0


cdef array.array _longs(const void *p, size_t nbytes):
    cdef array.array out = array.clone(_Q, <Py_ssize_t> (nbytes // 8), False)
    if nbytes:
        memcpy(out.data.as_chars, p, nbytes)
    return out


def st_dtypes():
    """Return (format name, bits per element) of each dtype, in the writer's order."""
    return [(tio_st_dtype_name(i).decode(), tio_st_dtype_bits(i)) for i in range(TIO_ST_DTYPES)]


def st_header(list names not None, list dtypes not None, list shapes not None, list sizes not None, metadata=None,
              uint64_t extra=0):
    """Return the header of a safetensors file whose tensors lie back to back in the given order.

    Parameters
    ----------
    names : list of str
    dtypes : list of int
        Format dtype, as an index into `st_dtypes()`.
    shapes : list of sequence of int
    sizes : list of int
        In bytes.
    metadata : list of (str, str), optional
        Written in this order; an empty list writes ``{}``.
    extra : int
        Further spaces of padding, in bytes, a multiple of 8.

    Returns
    -------
    bytes
        The length field and the JSON, padded with spaces to a multiple of 8.

    Raises
    ------
    LimitError
        A header over 100,000,000 bytes, which no reader accepts.
    """
    cdef bytearray out = bytearray(4096)
    cdef size_t at = 9, need
    cdef uint64_t begin = 0
    cdef uint64_t[64] shape
    cdef Py_ssize_t i, k, rank, name_len
    cdef const char *name
    cdef uint8_t *p
    cdef bint first = True
    PyByteArray_AS_STRING(out)[8] = b"{"
    if metadata is not None:
        at += _st_metadata(out, at, metadata)
        first = False
    for i in range(len(names)):
        rank = len(shapes[i])
        if rank > TIO_ST_RANK_MAX:
            raise _errors.LimitError(f"tensor of {rank} dimensions; at most {TIO_ST_RANK_MAX} are written",
                                     record=names[i])
        for k in range(rank):
            shape[k] = shapes[i][k]
        name = PyUnicode_AsUTF8AndSize(names[i], &name_len)
        need = at + 6 * <size_t> name_len + 21 * <size_t> rank + 192
        if need > <size_t> PyByteArray_GET_SIZE(out):
            out.extend(bytes(need + at))
        p = <uint8_t *> PyByteArray_AS_STRING(out)
        if not first:
            p[at] = b","
            at += 1
        first = False
        at += tio_st_entry(p + at, <const uint8_t *> name, <uint64_t> name_len, dtypes[i], shape, <unsigned> rank,
                           begin, begin + <uint64_t> sizes[i])
        begin += <uint64_t> sizes[i]
    return _st_finish(out, at, extra)


cdef size_t _st_metadata(bytearray out, size_t at, list pairs) except 0:
    """Append ``"__metadata__":{...}``; the number of bytes written."""
    cdef size_t start = at
    cdef const char *text
    cdef Py_ssize_t n
    cdef bytearray piece = bytearray(b'"__metadata__":{')
    cdef bytearray quoted
    for i, (key, value) in enumerate(pairs):
        if i:
            piece += b","
        for j, part in enumerate((key, value)):
            text = PyUnicode_AsUTF8AndSize(part, &n)
            quoted = bytearray(6 * n + 2)
            del quoted[tio_json_quote(<const uint8_t *> text, n, <uint8_t *> PyByteArray_AS_STRING(quoted)):]
            piece += b":" + quoted if j else quoted
    piece += b"}"
    if <size_t> len(out) < at + <size_t> len(piece):
        out.extend(bytes(len(piece)))
    memcpy(PyByteArray_AS_STRING(out) + at, PyByteArray_AS_STRING(piece), len(piece))
    return at + <size_t> len(piece) - start


cdef bytes _st_finish(bytearray out, size_t at, uint64_t extra):
    cdef uint64_t length, end
    cdef int i
    cdef bytes header
    cdef char *p
    end = at + 1
    length = (end - 8 + 7) // 8 * 8 + extra
    if length > TIO_ST_HEADER_MAX:
        raise _errors.LimitError(f"header of {length} bytes: readers accept at most {TIO_ST_HEADER_MAX}; "
                                 "save fewer tensors per file")
    header = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> (8 + length))
    p = PyBytes_AS_STRING(header)
    memset(p, b" ", 8 + length)
    memcpy(p, PyByteArray_AS_STRING(out), at)
    p[at] = b"}"
    for i in range(8):
        p[i] = <char> <uint8_t> (length >> (8 * i) & 0xFF)
    return header


# ---------------------------------------------------------------------- zip

cdef extern from *:
    """
    #if defined(__unix__) || defined(__APPLE__)
    #include <sys/mman.h>
    /* Unmap the pages of [from, to) of a file mapping; the page cache still has them. */
    static void tio_let_go(const unsigned char *from, const unsigned char *to)
    {
        uintptr_t a = ((uintptr_t)from + 4095) & ~(uintptr_t)4095;
        uintptr_t b = (uintptr_t)to & ~(uintptr_t)4095;
        if (b > a)
            (void)madvise((void *)a, b - a, MADV_DONTNEED);
    }
    #else
    static void tio_let_go(const unsigned char *from, const unsigned char *to)
    {
        (void)from;
        (void)to;
    }
    #endif
    """
    void tio_let_go(const uint8_t *begin, const uint8_t *end) noexcept nogil


cdef void _let_go(void *base, uint64_t offset) noexcept nogil:
    tio_let_go(<const uint8_t *> base, <const uint8_t *> base + offset)


def zip_read(buffer, bint mapped=False):
    """Find, read and check the records of a zip archive that starts at the buffer's first byte.

    Parameters
    ----------
    mapped : bool
        Whether the buffer is a file mapping that nobody has written to: its
        pages are then let go behind the reader, so that memory stays flat.

    Returns
    -------
    rows : bytearray
        Opaque; for the other ``zip_`` functions.
    directory_offset, archive_end : int
        Of the central directory and behind the archive, in bytes.

    Notes
    -----
    Touches the directory and each record's local header, no payload; about
    0.1 us per record.
    """
    cdef _Buffer data = _Buffer(buffer)
    cdef tio_zip_archive zip
    cdef tio_error err
    cdef bytearray rows
    cdef uint32_t *order
    cdef uint64_t bad = 0
    cdef tio_zip_record *out
    cdef tio_zip_passed passed = NULL
    cdef int rc
    if mapped:
        passed = _let_go
    memset(&err, 0, sizeof(err))
    if tio_zip_open(data.ptr, data.nbytes, &zip, &err) < 0:
        raise _fault(&err)
    rows = PyByteArray_FromStringAndSize(NULL, <Py_ssize_t> (zip.n_records * sizeof(tio_zip_record)))
    out = <tio_zip_record *> PyByteArray_AS_STRING(rows)
    order = <uint32_t *> PyMem_Malloc((zip.n_records + 1) * sizeof(uint32_t))
    if order == NULL:
        raise MemoryError()
    try:
        with nogil:
            rc = tio_zip_read(data.ptr, data.nbytes, &zip, out, order, &bad, passed, <void *> data.ptr, &err)
        if rc < 0:
            raise _fault(&err)
    finally:
        PyMem_Free(order)
    return rows, zip.directory_offset, zip.archive_end


cdef tio_zip_record *_zip_rows(bytearray rows):
    return <tio_zip_record *> PyByteArray_AS_STRING(rows)


cdef Py_ssize_t _zip_count(bytearray rows):
    return PyByteArray_GET_SIZE(rows) // <Py_ssize_t> sizeof(tio_zip_record)


cdef str _zip_name(const char *p, Py_ssize_t n, const tio_zip_record *r):
    try:
        return PyUnicode_DecodeUTF8(p, n, NULL)
    except UnicodeDecodeError:
        raise _errors.HeaderError("central directory: file name: expected UTF-8", offset=r.name_offset) from None


def zip_names(buffer, bytearray rows not None, str inner not None):
    """Return the record numbers by name, those below the folder `inner` apart.

    Parameters
    ----------
    inner : str
        A prefix such as ``"archive/data/"``; may be empty for none.

    Returns
    -------
    numbers : array of int64
        Record of the name "0", "1", ... below `inner`; -1 where there is none.
        May be shorter than the largest number, which is then in `inside`.
    inside : dict of str to int
        Other names below `inner`, without it.
    outside : dict of str to int
        All other names, in full.

    Raises
    ------
    HeaderError
        A name that occurs twice, is not UTF-8, or has a NUL or a ``..`` component.

    Notes
    -----
    Numbered names, of which there are as many as storages, cost no Python object.
    """
    cdef _Buffer data = _Buffer(buffer)
    cdef tio_zip_record *r = _zip_rows(rows)
    cdef dict inside = {}, outside = {}, into
    cdef bytes folder = inner.encode()
    cdef Py_ssize_t i, n, known = 0, count = _zip_count(rows), skip = PyBytes_GET_SIZE(folder)
    cdef array.array numbers = array.clone(_Q, count, False)
    cdef int64_t number
    cdef const uint8_t *name
    memset(numbers.data.as_chars, 0xFF, count * 8)
    for i in range(count):
        name = data.ptr + r[i].name_offset
        n = r[i].name_len
        into = outside
        if skip and n > skip and memcmp(name, PyBytes_AS_STRING(folder), skip) == 0:
            number = tio_decimal(name + skip, n - skip)
            if 0 <= number < count:
                if numbers.data.as_longlongs[number] >= 0:
                    raise _twice(_zip_name(<const char *> name, n, &r[i]), &r[i])
                numbers.data.as_longlongs[number] = i
                continue
            into = inside
            name += skip
            n -= skip
        text = _zip_name(<const char *> name, n, &r[i])
        if _odd_name(<const char *> data.ptr + r[i].name_offset, r[i].name_len):
            raise _errors.HeaderError("central directory: file name: NUL or '..' component", offset=r[i].name_offset)
        into[text] = i
        known += 1
        if len(inside) + len(outside) != known:
            raise _twice(text, &r[i])
    return numbers, inside, outside


cdef object _twice(str name, const tio_zip_record *r):
    return _errors.HeaderError("central directory: file name: the same name twice", record=name, offset=r.name_offset)


cdef extern from "string.h" nogil:
    int memcmp(const void *a, const void *b, size_t n)
    void *memchr(const void *s, int c, size_t n)


cdef bint _odd_name(const char *p, Py_ssize_t n) noexcept nogil:
    """Whether a name has a NUL or a ``..`` component between slashes of either kind."""
    cdef Py_ssize_t i
    if memchr(p, 0, n) != NULL:
        return True
    for i in range(n - 1):
        if p[i] == c"." and p[i + 1] == c"." and (i == 0 or p[i - 1] == c"/" or p[i - 1] == c"\\") \
                and (i + 2 == n or p[i + 2] == c"/" or p[i + 2] == c"\\"):
            return True
    return False


def zip_name(buffer, bytearray rows not None, Py_ssize_t i):
    """Return the full name of record `i`."""
    if not 0 <= i < _zip_count(rows):
        raise IndexError(i)
    cdef _Buffer data = _Buffer(buffer)
    cdef tio_zip_record *r = _zip_rows(rows) + i
    return _zip_name(<const char *> data.ptr + r.name_offset, r.name_len, r)


def zip_record(bytearray rows not None, Py_ssize_t i):
    """Return (data_offset, compressed, size, crc32, method, header_offset) of record `i`, in bytes."""
    if not 0 <= i < _zip_count(rows):
        raise IndexError(i)
    cdef tio_zip_record *r = _zip_rows(rows) + i
    return r.data_offset, r.compressed, r.size, r.crc32, r.method, r.header_offset


def zip_records(buffer, bytearray rows not None):
    """Return [(name, data_offset, compressed, size, crc32, method)] of all records, in directory order."""
    cdef _Buffer data = _Buffer(buffer)
    cdef tio_zip_record *r = _zip_rows(rows)
    cdef Py_ssize_t i
    return [(_zip_name(<const char *> data.ptr + r[i].name_offset, r[i].name_len, &r[i]), r[i].data_offset,
             r[i].compressed, r[i].size, r[i].crc32, r[i].method) for i in range(_zip_count(rows))]


def zip_extents(bytearray rows not None):
    """Return array('q') of (storage, offset, nbytes) per record; storage is -1 for deflated ones, else 0."""
    cdef tio_zip_record *r = _zip_rows(rows)
    cdef Py_ssize_t i, n = _zip_count(rows)
    cdef array.array out = array.clone(_Q, 3 * n, False)
    for i in range(n):
        out.data.as_longlongs[3 * i] = -1 if r[i].method else 0
        out.data.as_longlongs[3 * i + 1] = 0 if r[i].method else <int64_t> r[i].data_offset
        out.data.as_longlongs[3 * i + 2] = <int64_t> r[i].size
    return out


def zip_check_small(buffer, bytearray rows not None, uint64_t limit, bint mapped=False):
    """Check the CRC of every stored record of at most `limit` bytes.

    Parameters
    ----------
    mapped : bool
        See `zip_read`.

    Returns
    -------
    tuple or None
        (record number, expected, actual) of the first that differs. A stored
        CRC of 0 counts as "not computed".
    """
    cdef _Buffer data = _Buffer(buffer)
    cdef tio_zip_record *r = _zip_rows(rows)
    cdef Py_ssize_t i, n = _zip_count(rows)
    cdef uint32_t actual = 0
    with nogil:
        for i in range(n):
            if mapped and i % 256 == 255:
                _let_go(<void *> data.ptr, r[i].header_offset)
            if r[i].size > limit or r[i].method or r[i].crc32 == 0:
                continue
            actual = tio_crc32(0, data.ptr + r[i].data_offset, r[i].size)
            if actual != r[i].crc32:
                break
        else:
            i = n
    return None if i == n else (i, r[i].crc32, actual)


cdef struct _Placed:
    tio_zip_entry entry
    uint64_t name  # offset of its name in the blob of names


cdef _Placed *_placed(bytearray plan):
    return <_Placed *> PyByteArray_AS_STRING(plan)


cdef Py_ssize_t _placed_count(bytearray plan):
    return PyByteArray_GET_SIZE(plan) // <Py_ssize_t> sizeof(_Placed)


cdef _Placed *_placed_at(bytearray plan, Py_ssize_t i) except NULL:
    if not 0 <= i < _placed_count(plan):
        raise IndexError(i)
    return _placed(plan) + i


def zip_place(list head not None, bytes folder not None, sizes, list tail not None, uint32_t align):
    """Lay out stored records one behind the other, as torch.save does.

    Parameters
    ----------
    head, tail : list of (bytes, int)
        UTF-8 name and payload size in bytes of the records before and behind
        the numbered ones.
    folder : bytes
        What the names of the numbered records begin with.
    sizes : array of int64
        Payload sizes of the records ``folder0``, ``folder1``, ...
    align : int
        Payloads start at multiples of this, 1 to 32768 bytes.

    Returns
    -------
    plan : bytearray
    names : bytearray
        Opaque; for the functions below.
    directory_offset : int
        Where the central directory starts, in bytes.
    """
    cdef const int64_t[::1] nbytes = sizes if len(sizes) else _EMPTY
    cdef Py_ssize_t i, numbered = len(sizes), count = len(head) + numbered + len(tail)
    cdef bytearray plan = PyByteArray_FromStringAndSize(NULL, count * <Py_ssize_t> sizeof(_Placed))
    cdef bytearray names = bytearray(numbered * (len(folder) + 10) + sum([len(n) for n, _ in head + tail]) + 1)
    cdef _Placed *p = _placed(plan)
    cdef uint64_t at = 0, offset = 0
    for name, size in head:
        _place(p, names, &at, name, -1, size, &offset, align)
        p += 1
    for i in range(numbered):
        _place(p, names, &at, folder, i, <uint64_t> nbytes[i], &offset, align)
        p += 1
    for name, size in tail:
        _place(p, names, &at, name, -1, size, &offset, align)
        p += 1
    return plan, names, offset


cdef int _place(_Placed *p, bytearray names, uint64_t *at, bytes name, int64_t number, uint64_t size, uint64_t *offset,
                uint32_t align) except -1:
    """Place one record, its name (and number, if any) appended to the blob."""
    cdef char *blob = PyByteArray_AS_STRING(names) + at[0]
    cdef uint64_t n = <uint64_t> PyBytes_GET_SIZE(name)
    cdef char[20] digits
    cdef int k = 0
    cdef tio_error err
    if n + 10 > 0xFFFF:
        raise _errors.LimitError("zip record: file name of over 65525 bytes")
    memcpy(blob, PyBytes_AS_STRING(name), n)
    if number >= 0:
        while k == 0 or number:
            digits[k] = <char> (48 + number % 10)
            number //= 10
            k += 1
        while k:
            k -= 1
            blob[n] = digits[k]
            n += 1
    p.name = at[0]
    p.entry.size = size
    p.entry.name_len = <uint16_t> n
    p.entry.crc32 = 0
    memset(&err, 0, sizeof(err))
    if tio_zip_place(&p.entry, offset[0], align, &err) < 0:
        raise _fault(&err)
    at[0] += n
    offset[0] = p.entry.end_offset
    return 0


cdef inline const uint8_t *_name_of(bytearray names, const _Placed *p):
    return <const uint8_t *> PyByteArray_AS_STRING(names) + p.name


def zip_placed(bytearray plan not None, Py_ssize_t i):
    """Return (header_offset, data_offset, end_offset) of record `i` of a plan, in bytes."""
    cdef tio_zip_entry *e = &_placed_at(plan, i).entry
    return e.header_offset, e.data_offset, e.end_offset


def zip_local(bytearray plan not None, bytearray names not None, Py_ssize_t i):
    """Return the bytes of record `i` in front of its payload."""
    cdef _Placed *p = _placed_at(plan, i)
    cdef bytes out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> (p.entry.data_offset - p.entry.header_offset))
    tio_zip_local(&p.entry, _name_of(names, p), <uint8_t *> PyBytes_AS_STRING(out))
    return out


def zip_descriptor(bytearray plan not None, Py_ssize_t i, uint32_t crc):
    """Note the CRC of record `i` and return the bytes behind its payload."""
    cdef tio_zip_entry *e = &_placed_at(plan, i).entry
    cdef uint8_t[24] out
    e.crc32 = crc
    return PyBytes_FromStringAndSize(<const char *> out, <Py_ssize_t> tio_zip_descriptor(e, out))


def zip_pack(bytearray plan not None, bytearray names not None, Py_ssize_t i, bytes payload not None):
    """Return the complete bytes of record `i` and note its CRC."""
    cdef _Placed *p = _placed_at(plan, i)
    cdef bytes out
    if <uint64_t> PyBytes_GET_SIZE(payload) != p.entry.size:
        raise ValueError(f"payload of {len(payload)} bytes, planned were {p.entry.size}")
    out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> (p.entry.end_offset - p.entry.header_offset))
    _pack(p, names, <const uint8_t *> PyBytes_AS_STRING(payload), <uint8_t *> PyBytes_AS_STRING(out))
    return out


cdef uint8_t *_pack(_Placed *p, bytearray names, const uint8_t *payload, uint8_t *out):
    """Write one record; the first byte behind it."""
    out += tio_zip_local(&p.entry, _name_of(names, p), out)
    if p.entry.size:
        memcpy(out, payload, p.entry.size)
    p.entry.crc32 = tio_crc32(0, out, p.entry.size)
    out += p.entry.size
    return out + tio_zip_descriptor(&p.entry, out)


def zip_gather(bytearray plan not None, bytearray names not None, Py_ssize_t start, addresses, sizes, Py_ssize_t first,
               uint64_t limit, uint64_t small):
    """Like `gather`, with each payload as a complete record; record numbers are payload numbers plus `start`."""
    cdef const int64_t[::1] where = addresses
    cdef const int64_t[::1] nbytes = sizes
    cdef _Placed *p = _placed(plan) + start
    cdef Py_ssize_t i, k, n = len(addresses)
    cdef uint64_t begin = p[first].entry.header_offset, end = begin
    cdef bytes out
    cdef uint8_t *to
    for i in range(first, n):
        if end - begin >= limit or <uint64_t> nbytes[i] > small or (where[i] == 0 and nbytes[i]):
            break
        end = p[i].entry.end_offset
    else:
        i = n
    out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> (end - begin))
    to = <uint8_t *> PyBytes_AS_STRING(out)
    for k in range(first, i):
        to = _pack(&p[k], names, <const uint8_t *> <uintptr_t> where[k], to)
    return out, i


def zip_crcs(bytearray plan not None, Py_ssize_t last):
    """Return the noted CRCs of records ``[0, last)`` that are not empty."""
    cdef _Placed *p = _placed(plan)
    return [p[i].entry.crc32 for i in range(last) if p[i].entry.size]


def zip_tail(bytearray plan not None, bytearray names not None, uint64_t directory_offset):
    """Return the central directory and the end records, once all CRCs are noted."""
    cdef _Placed *p = _placed(plan)
    cdef Py_ssize_t i, n = _placed_count(plan)
    cdef uint64_t size = zip_tail_size(plan) - TIO_ZIP_TAIL_SIZE
    cdef bytes out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> (size + TIO_ZIP_TAIL_SIZE))
    cdef uint8_t *to = <uint8_t *> PyBytes_AS_STRING(out)
    for i in range(n):
        to += tio_zip_central(&p[i].entry, _name_of(names, &p[i]), to)
    tio_zip_tail(<uint64_t> n, directory_offset, size, to)
    return out


cpdef uint64_t zip_tail_size(bytearray plan):
    """Return the size in bytes of what `zip_tail` will return."""
    cdef _Placed *p = _placed(plan)
    cdef Py_ssize_t i
    cdef uint64_t size = TIO_ZIP_TAIL_SIZE
    for i in range(_placed_count(plan)):
        size += tio_zip_central_size(&p[i].entry)
    return size


cdef object _EMPTY = _array.array("q", [0])
