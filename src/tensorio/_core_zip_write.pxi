# SPDX-License-Identifier: Apache-2.0
# A zip archive to be: where its stored records go, and their bytes, as torch.save lays them out.
# A part of _core.pyx, in which what they share is defined.

cdef object _EMPTY = _array.array("q", [0])


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
