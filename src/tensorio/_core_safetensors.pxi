# SPDX-License-Identifier: Apache-2.0
# The header of a safetensors file, read into the columns of a table and written.
# A part of _core.pyx, in which what they share is defined.

cdef enum:
    META_COST = 224     # bytes of a pair of short strings, its tuple, and its places in a list and a dict
    NOTES_FIXED = 64 << 20

# ------------------------------------------------------------------ reading

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


# ------------------------------------------------------------------ writing

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
