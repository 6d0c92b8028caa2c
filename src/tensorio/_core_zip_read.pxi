# SPDX-License-Identifier: Apache-2.0
# The records of a zip archive: found, checked, told by name and by number.
# A part of _core.pyx, in which what they share is defined.

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
