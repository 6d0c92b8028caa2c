# SPDX-License-Identifier: Apache-2.0
"""NumPy views of table rows, made in one batch.

The only module that touches NumPy's C API; imported when the first array is
asked for, so that looking at headers needs no NumPy. An array's base is a
`Lease`, which holds the buffer of its storage: the mapping lives as long as
the last view, and no Python code can release it early.
"""
cimport cython
from cpython cimport array
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_New
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int64_t, intptr_t, uint8_t, uint64_t

cimport numpy as cnp

from tensorio._append cimport *
from tensorio._csrc cimport TIO_ROW_CONJ, TIO_ROW_NEG, tio_mul, tio_row

from tensorio.dtypes import DTYPES as _DTYPES, numpy_dtypes
from tensorio.errors import HeaderError, LimitError

cnp.import_array()

cdef extern from "numpy/arrayobject.h":
    ctypedef struct PyArray_Descr:
        pass
    cnp.ndarray PyArray_NewFromDescr(type subtype, PyArray_Descr *descr, int nd, const cnp.npy_intp *dims,
                                     const cnp.npy_intp *strides, void *data, int flags, object obj)
    int PyArray_SetBaseObject(cnp.ndarray arr, PyObject *obj) except -1
    void PyArray_UpdateFlags(cnp.ndarray arr, int flagmask)

cdef enum:
    MAX_DTYPES = 64
    MAX_RANK = 64  # NumPy's NPY_MAXDIMS

cdef list _descrs = list(numpy_dtypes())
cdef int _n_dtypes = len(_descrs)
cdef int[MAX_DTYPES] _itemsize
cdef int[MAX_DTYPES] _bits
for _d in _DTYPES:
    _itemsize[_d.code] = _d.itemsize
    _bits[_d.code] = _d.bits


@cython.final
cdef class Lease:
    """A buffer held for as long as this object lives.

    Parameters
    ----------
    obj : buffer
        Any contiguous buffer.
    writable : bool
        Whether arrays over it may be written to; the buffer must allow it.
    """

    def __cinit__(self, obj, bint writable=False):
        self.held = False
        PyObject_GetBuffer(obj, &self.buffer, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
        self.held = True
        self.ptr = <uint8_t *> self.buffer.buf
        self.nbytes = self.buffer.len
        self.writable = writable

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.buffer)

    def __repr__(self):
        return f"<lease of {self.nbytes} bytes>"


cdef object _make(Lease lease, int64_t dtype, int64_t rank, const int64_t *shape, const int64_t *strides,
                  int64_t offset, int64_t nbytes):
    """One array; the row was proven inside its storage when it was made, and is checked once more here."""
    cdef cnp.npy_intp raw[MAX_RANK]
    cdef const cnp.npy_intp *dims = <const cnp.npy_intp *> shape
    cdef const cnp.npy_intp *steps = <const cnp.npy_intp *> strides
    cdef PyObject *descr
    cdef cnp.ndarray arr
    cdef int flags = cnp.NPY_ARRAY_ALIGNED
    if offset < 0 or nbytes < 0 or offset > lease.nbytes or nbytes > lease.nbytes - offset:
        raise HeaderError(f"extent of {nbytes} bytes lies outside its storage of {lease.nbytes} bytes", offset=offset)
    if rank > MAX_RANK:
        raise LimitError(f"tensor of {rank} dimensions; NumPy arrays have at most {MAX_RANK}")
    if _bits[dtype] < 8:
        rank = _raw_shape(raw, rank, shape, _bits[dtype], nbytes)
        dims = raw
        steps = NULL
    _check_count(rank, dims, _itemsize[dtype])
    if lease.writable:
        flags |= cnp.NPY_ARRAY_WRITEABLE
    descr = <PyObject *> (<list> _descrs)[dtype]
    Py_INCREF(<object> descr)  # NewFromDescr steals it
    arr = PyArray_NewFromDescr(cnp.ndarray, <PyArray_Descr *> descr, <int> rank, dims, steps,
                               lease.ptr + offset, flags, None)
    if steps == NULL or (<intptr_t> (lease.ptr + offset)) & (_itemsize[dtype] - 1):
        PyArray_UpdateFlags(arr, cnp.NPY_ARRAY_ALIGNED)
    Py_INCREF(lease)  # SetBaseObject steals it
    PyArray_SetBaseObject(arr, <PyObject *> lease)
    return arr


cdef int _check_count(int64_t rank, const cnp.npy_intp *dims, int itemsize) except -1:
    """NumPy counts the bytes of an array in 63 bits, over all dimensions that are not 0, wherever they are stored."""
    cdef uint64_t total = <uint64_t> itemsize
    cdef int64_t i
    for i in range(rank):
        if dims[i] and (not tio_mul(total, <uint64_t> dims[i], &total) or total >> 63):
            raise LimitError("tensor whose shape has over 2^63 - 1 bytes; NumPy has no such arrays")
    return 0


cdef int64_t _raw_shape(cnp.npy_intp *raw, int64_t rank, const int64_t *shape, int bits, int64_t nbytes):
    """Shape in bytes of packed elements: the last dimension shrinks, or all is flat where it can't."""
    cdef int64_t i
    if rank == 0 or (shape[rank - 1] * bits) % 8:
        raw[0] = nbytes
        return 1
    for i in range(rank - 1):
        raw[i] = shape[i]
    raw[rank - 1] = shape[rank - 1] * bits // 8
    return rank


cdef object _make_borrowed(PyObject *lease, int64_t dtype, int64_t rank, const int64_t *shape,
                           const int64_t *strides, int64_t offset, int64_t nbytes):
    return _make(<Lease?> <object> lease, dtype, rank, shape, strides, offset, nbytes)


# How the pickle machine reaches `_make` without importing NumPy at load time.
make_view = PyCapsule_New(<void *> &_make_borrowed, "tensorio._arrays.make_view", NULL)


def view(Lease lease not None, int dtype, shape, strides, int64_t offset, int64_t nbytes):
    """Return one array over ``lease[offset : offset + nbytes]``.

    Parameters
    ----------
    lease : Lease
        The storage's bytes.
    dtype : int
        Code of the row in `tensorio.dtypes`.
    shape, strides : sequence of int
        In elements and bytes.
    offset, nbytes : int
        In bytes, from the start of the storage.
    """
    cdef int64_t dims[MAX_RANK]
    cdef int64_t steps[MAX_RANK]
    cdef int i, rank = len(shape)
    if rank > MAX_RANK:
        raise LimitError(f"tensor of {rank} dimensions; NumPy arrays have at most {MAX_RANK}")
    if not 0 <= dtype < _n_dtypes:
        raise ValueError(f"dtype code {dtype}")
    for i in range(rank):
        dims[i] = shape[i]
        steps[i] = strides[i]
    return _make(lease, dtype, rank, dims, steps, offset, nbytes)


def view_row(rows, dims, Py_ssize_t row, Lease lease not None):
    """Return the array of one row of a table, for a tensor of one chunk; see `views`."""
    cdef const int64_t[::1] pool = dims if len(dims) else _EMPTY
    cdef const int64_t[::1] cells = rows
    cdef const tio_row *r
    if not 0 <= row < len(rows) // <Py_ssize_t> (sizeof(tio_row) // 8):
        raise IndexError(row)
    r = <const tio_row *> &cells[0] + row
    return _make(lease, r.dtype, r.rank, &pool[0] + r.dims, &pool[0] + r.dims + r.rank, r.offset, r.nbytes)


def views(rows, dims, list leases not None):
    """Return one array per row, in row order, for tables whose tensors have one chunk each.

    Parameters
    ----------
    rows, dims : array of int64
        Columns of a `Table`.
    leases : list of Lease
        By storage index.

    Notes
    -----
    About 0.15 us per array; touches no payload byte.
    """
    cdef const int64_t[::1] pool = dims if len(dims) else _EMPTY
    cdef const int64_t[::1] cells = rows if len(rows) else _EMPTY
    cdef const int64_t *base = &pool[0]
    cdef const tio_row *row = <const tio_row *> &cells[0]
    cdef Py_ssize_t i, n = len(rows) // (sizeof(tio_row) // 8)
    cdef list out = [None] * n
    for i in range(n):
        out[i] = _make(<Lease?> leases[row.storage], row.dtype, row.rank, base + row.dims,
                       base + row.dims + row.rank, row.offset, row.nbytes)
        row += 1
    return out


def places(rows, dims, picks, lease):
    """Say where the elements of tensors lie that are in C order, and make no array.

    Parameters
    ----------
    rows, dims : array of int64
        Columns of a `Table`.
    picks : array of int64
        Numbers of the rows asked about.
    lease : callable
        Returns the `Lease` of a storage index, which the caller keeps, or None;
        called once for each.

    Returns
    -------
    array of int64
        Three numbers for each: dtype code, address and bytes. The code is -1 for
        what `view_row` and a look at its array must tell.
    """
    cdef const int64_t[::1] pool = dims if len(dims) else _EMPTY
    cdef const int64_t[::1] cells = rows if len(rows) else _EMPTY
    cdef const int64_t[::1] which = picks
    cdef array.array out = array.clone(_EMPTY, 3 * len(picks), zero=True)
    cdef int64_t[::1] to = out
    cdef const tio_row *row
    cdef Py_ssize_t i, n = len(rows) // <Py_ssize_t> (sizeof(tio_row) // 8)
    cdef int64_t nbytes
    cdef dict leases = {}
    for i in range(len(picks)):
        if not 0 <= which[i] < n:
            raise IndexError(which[i])
        row = <const tio_row *> &cells[0] + which[i]
        to[3 * i] = -1
        nbytes = _in_order(row, &pool[0] + row.dims)
        if nbytes < 0:
            continue
        held = leases.get(row.storage, leases)
        if held is leases:
            held = leases[row.storage] = lease(row.storage)
        if held is not None and _within(<Lease?> held, row, nbytes):
            to[3 * i], to[3 * i + 1] = row.dtype, <int64_t> <intptr_t> ((<Lease> held).ptr + row.offset)
            to[3 * i + 2] = nbytes
    return out


cdef int64_t _in_order(const tio_row *row, const int64_t *shape) noexcept nogil:
    """The bytes of a row whose only chunk is the values themselves in C order; -1 for any other."""
    cdef const int64_t *strides = shape + row.rank
    cdef uint64_t step = <uint64_t> _itemsize[row.dtype]
    cdef int64_t i
    cdef bint empty = False
    if row.chunks != 1 or row.rank > MAX_RANK or _bits[row.dtype] < 8 or row.flags & (TIO_ROW_CONJ | TIO_ROW_NEG):
        return -1
    for i in range(row.rank - 1, -1, -1):
        if shape[i] == 0:
            empty = True
            continue
        if shape[i] < 0 or (shape[i] > 1 and not empty and strides[i] != <int64_t> step):
            return -1
        if not tio_mul(step, <uint64_t> shape[i], &step) or step >> 63:
            return -1
    return 0 if empty else <int64_t> step


cdef bint _within(Lease lease, const tio_row *row, int64_t nbytes):
    """Whether the elements are in the extent, and that in its storage."""
    return (row.offset >= 0 and nbytes <= row.nbytes <= lease.nbytes and row.offset <= lease.nbytes - row.nbytes)


cdef array.array _EMPTY = __import__("array").array("q", [0])
