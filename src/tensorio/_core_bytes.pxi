# SPDX-License-Identifier: Apache-2.0
# Bytes in memory, whatever they mean: where they are, joined, their checksums, elements of a pattern.
# A part of _core.pyx, in which what they share is defined.

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


# ---------------------------------------------------------------- checksums

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

def match_count(uintptr_t address, size_t count, unsigned width, uint64_t mask, uint64_t pattern):
    """Return for how many of the elements ``element & mask == pattern``; releases the GIL.

    Parameters
    ----------
    address : int
        Of `count` elements of `width` bytes (1, 2, 4 or 8) in native byte order; the
        caller keeps their memory alive.
    """
    cdef size_t found
    with nogil:
        found = tio_match_count(<const uint8_t *> address, count, width, mask, pattern)
    return found


def match_cut(places, kinds, int64_t part, int64_t task, int64_t cost):
    """Cut tensors into runs, and those into tasks for threads.

    Parameters
    ----------
    places : array of int64
        Of each tensor: row in `kinds`, address and bytes; a row below 0 stands for
        one that is not in memory as it is.
    kinds : array of uint64
        Of each type: width, mask and pattern as for `match_count`; a width of 0
        stands for one that is passed over.
    part : int
        Bytes of a run at most, a multiple of every width.
    task, cost : int
        What a task has at least, counting the bytes and `cost` of each run.

    Returns
    -------
    runs : bytearray
        Opaque; for `match_runs`.
    ends : list of int
        Behind the last run of each task.
    nbytes : int
        Of all runs.
    """
    cdef const int64_t[::1] where = places
    cdef const uint64_t[::1] table = kinds
    cdef Py_ssize_t i, n = len(places) // 3, types = len(kinds) // 3, total = 0
    cdef int64_t at, size, nbytes = 0, weight = 0
    cdef bytearray runs
    cdef tio_match_run *run
    cdef list ends = []
    for i in range(n):
        if 0 <= where[3 * i] < types and table[3 * where[3 * i]]:
            total += (where[3 * i + 2] + part - 1) // part
    runs = PyByteArray_FromStringAndSize(NULL, total * <Py_ssize_t> sizeof(tio_match_run))
    run = <tio_match_run *> PyByteArray_AS_STRING(runs)
    total = 0
    for i in range(n):
        if not (0 <= where[3 * i] < types and table[3 * where[3 * i]]):
            continue
        at = 0
        while at < where[3 * i + 2]:  # a range with such a step would be Python's
            size = min(part, where[3 * i + 2] - at)
            run.kind, run.address, run.nbytes, run.tensor, run.start = where[3 * i], where[3 * i + 1] + at, size, i, at
            run += 1
            at += size
            total += 1
            nbytes += size
            weight += size + cost
            if weight >= task:
                ends.append(total)
                weight = 0
    if weight:
        ends.append(total)
    return runs, ends, nbytes


def match_runs(bytearray runs not None, kinds, Py_ssize_t begin, Py_ssize_t end):
    """Find the first match in each of the runs ``[begin, end)``.

    Returns
    -------
    list of (tensor, kind, address, nbytes, start)
        Of runs that have one: the number of the tensor, the row in `kinds`, where
        the element is, the bytes from there to the end of the run, and those from
        the start of the tensor to there.

    Notes
    -----
    At memory speed, without the GIL; the caller keeps the memory alive.
    """
    cdef const uint64_t[::1] table = kinds
    cdef const tio_match_run *all_runs = <const tio_match_run *> PyByteArray_AS_STRING(runs)
    cdef const tio_match_run *run
    cdef size_t first = 0, at = <size_t> begin, to = <size_t> end
    cdef int64_t skipped
    cdef list found = []
    if not 0 <= begin <= end <= PyByteArray_GET_SIZE(runs) // <Py_ssize_t> sizeof(tio_match_run):
        raise IndexError(end)
    while at < to:
        with nogil:
            at = tio_match_runs(all_runs, at, to, <const tio_match_kind *> &table[0], &first)
        if at < to:
            run = &all_runs[at]
            skipped = <int64_t> (first * table[3 * run.kind])
            found.append((run.tensor, run.kind, run.address + skipped, run.nbytes - skipped, run.start + skipped))
            at += 1
    return found


def match_variants():
    """Return the names of the variants of the search this CPU can run, portable first (for tests)."""
    return [tio_match_variant_name(i).decode() for i in range(tio_match_variant_count())
            if tio_match_variant_usable(i)]


def match_with(str variant, uintptr_t address, size_t count, unsigned width, uint64_t mask, uint64_t pattern):
    """Return the index of the first match, or `count`, with a named variant (for tests and benches)."""
    cdef tio_match_fn fn
    cdef int i
    for i in range(tio_match_variant_count()):
        if tio_match_variant_usable(i) and tio_match_variant_name(i).decode() == variant:
            fn = tio_match_variant(i)
            with nogil:
                count = fn(<const uint8_t *> address, count, width, mask, pattern)
            return count
    raise ValueError(f"no variant {variant!r} on this CPU")
