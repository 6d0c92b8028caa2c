# SPDX-License-Identifier: Apache-2.0
"""Table rows as DLPack capsules: the way into torch, JAX and others that copies nothing and needs none of them.

A capsule holds the `Lease` of its storage, so that the mapping lives as long
as the last tensor made from it. The structures are those of DLPack's ABI
before version 1, which every consumer takes.

Source: github.com/dmlc/dlpack, include/dlpack/dlpack.h, release 1.2.
"""
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetContext, PyCapsule_IsValid, PyCapsule_New, PyCapsule_SetContext
from cpython.pycapsule cimport PyCapsule_SetDestructor
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, int64_t, intptr_t, uint8_t, uint16_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from tensorio._append cimport *
from tensorio._arrays cimport Lease
from tensorio._csrc cimport tio_row

from array import array as _array

from tensorio.dtypes import BY_NAME as _BY_NAME, DTYPES as _DTYPES
from tensorio.errors import HeaderError, UnsupportedError

cdef extern from "Python.h":
    ctypedef int PyGILState_STATE
    PyGILState_STATE PyGILState_Ensure() nogil
    void PyGILState_Release(PyGILState_STATE) nogil
    int Py_IsInitialized() nogil
    object PyObject_CallOneArg(object callable, object arg)

cdef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes

cdef struct DLTensor:
    void *data
    int32_t device_type
    int32_t device_id
    int32_t ndim
    DLDataType dtype
    int64_t *shape
    int64_t *strides
    uint64_t byte_offset

cdef struct Managed:  # DLManagedTensor, and behind it what is ours
    DLTensor tensor
    void *manager_ctx
    void (*deleter)(Managed *) noexcept nogil
    PyObject *lease
    void *copy  # in the place of the lease
    bint done  # nothing is held any more
    bint alone  # the capsule is gone
    int64_t dims[1]  # shape and strides, as many as there are

cdef enum:
    CPU = 1  # kDLCPU
    INT = 0, UINT = 1, FLOAT = 2, BFLOAT = 4, COMPLEX = 5, BOOL = 6
    MAX_DTYPES = 64
    MAX_RANK = 64

# The type codes of DLPack; a type that has none is not listed.
cdef dict _CODES = {
    "bool": (BOOL, 8, 1),
    **{f"uint{n}": (UINT, n, 1) for n in (8, 16, 32, 64)},
    **{f"int{n}": (INT, n, 1) for n in (8, 16, 32, 64)},
    **{f"float{n}": (FLOAT, n, 1) for n in (16, 32, 64)},
    **{f"complex{n}": (COMPLEX, n, 1) for n in (32, 64, 128)},
    "bfloat16": (BFLOAT, 16, 1),
    "float8_e4m3fn": (10, 8, 1),
    "float8_e4m3fnuz": (11, 8, 1),
    "float8_e5m2": (12, 8, 1),
    "float8_e5m2fnuz": (13, 8, 1),
    "float8_e8m0fnu": (14, 8, 1),
    "float4_e2m1fn_x2": (17, 4, 2),
}
cdef DLDataType[MAX_DTYPES] _dtypes
cdef int[MAX_DTYPES] _itemsize
for _d in _DTYPES:
    _dtypes[_d.code].code, _dtypes[_d.code].bits, _dtypes[_d.code].lanes = _CODES.get(_d.name, (0, 0, 0))
    _itemsize[_d.code] = _d.itemsize
# Two elements in a byte, the shape counting elements: shown as bytes of two, as torch does.
cdef int _FLOAT4 = _BY_NAME["float4_e2m1fn"].code
cdef int _FLOAT4_X2 = _BY_NAME["float4_e2m1fn_x2"].code


cdef void _release(Managed *managed) noexcept nogil:
    """Called by the consumer, from any of its threads, with or without the GIL."""
    cdef PyGILState_STATE state
    if not Py_IsInitialized():
        return
    state = PyGILState_Ensure()
    with gil:
        _let_go(managed)
        if managed.alone:
            free(managed)
    PyGILState_Release(state)


cdef void _let_go(Managed *managed) noexcept:
    cdef PyObject *lease = managed.lease
    free(managed.copy)
    managed.lease = managed.copy = NULL
    managed.done = True
    if lease != NULL:
        Py_DECREF(<object> lease)


cdef void _end_of_capsule(object capsule) noexcept:
    """The structure goes with the later of the capsule and the consumer's tensor.

    A consumer that fails may have called the deleter before, or not, and has not renamed the capsule either way.
    """
    cdef Managed *managed = <Managed *> PyCapsule_GetContext(capsule)
    if not managed.done and PyCapsule_IsValid(capsule, "dltensor"):  # nobody took it
        _let_go(managed)
    if managed.done:
        free(managed)
    else:
        managed.alone = True


cdef object _capsule(Lease lease, int64_t dtype, int64_t rank, const int64_t *shape, const int64_t *strides,
                     int64_t offset, int64_t nbytes, bint copy=False):
    """Like `_arrays._make`: the row was proven inside its storage when it was made, and is checked once more.

    With `copy`, over a copy of the bytes, aligned as malloc does it.
    """
    cdef Managed *managed
    cdef int64_t i, itemsize
    cdef bint halved = dtype == _FLOAT4
    if offset < 0 or nbytes < 0 or offset > lease.nbytes or nbytes > lease.nbytes - offset:
        raise HeaderError(f"extent of {nbytes} bytes lies outside its storage of {lease.nbytes} bytes", offset=offset)
    if not 0 <= dtype < len(_DTYPES) or not 0 <= rank <= MAX_RANK:
        raise ValueError(f"dtype code {dtype}, {rank} dimensions")
    if halved and (not rank or shape[rank - 1] % 2):
        raise UnsupportedError("a tensor of 4-bit numbers whose last dimension is odd can't be shown as bytes of two")
    if halved:
        dtype = _FLOAT4_X2
    if not _dtypes[dtype].bits:
        raise UnsupportedError(f"DLPack has no type for {_DTYPES[dtype].name}")
    managed = <Managed *> malloc(sizeof(Managed) + 2 * rank * sizeof(int64_t))
    if managed == NULL:
        raise MemoryError()
    # Tensors without bytes have no address: torch.save takes two at one address for views of the same memory.
    managed.tensor.data = lease.ptr + offset if nbytes else NULL
    managed.tensor.device_type, managed.tensor.device_id = CPU, 0
    managed.tensor.ndim = <int32_t> rank
    managed.tensor.dtype = _dtypes[dtype]
    managed.tensor.shape = &managed.dims[0]
    managed.tensor.strides = &managed.dims[rank]
    managed.tensor.byte_offset = 0
    managed.manager_ctx = NULL
    managed.deleter = _release
    itemsize = _itemsize[dtype]
    for i in range(rank):
        managed.dims[i] = shape[i]
        managed.dims[rank + i] = strides[i] // itemsize  # DLPack counts elements
    if halved:
        _halve(managed, rank)
    managed.lease = managed.copy = NULL
    managed.done = managed.alone = False
    if copy:
        _copy(managed, nbytes)
    else:
        Py_INCREF(lease)
        managed.lease = <PyObject *> lease
    try:
        capsule = PyCapsule_New(managed, "dltensor", NULL)
        PyCapsule_SetContext(capsule, managed)
        PyCapsule_SetDestructor(capsule, _end_of_capsule)
    except BaseException:
        _let_go(managed)
        free(managed)
        raise
    return capsule


cdef int _copy(Managed *managed, int64_t nbytes) except -1:
    cdef void *made = malloc(nbytes if nbytes else 1)
    if made == NULL:
        free(managed)
        raise MemoryError()
    managed.copy = made
    with nogil:
        memcpy(made, managed.tensor.data, nbytes)
    managed.tensor.data = made
    return 0


cdef object _handed_over(PyObject *lease, PyObject *consumer, int64_t dtype, int64_t rank, const int64_t *shape,
                         const int64_t *strides, int64_t offset, int64_t nbytes):
    """What a consumer makes of a capsule; of a copy, where the elements would not be aligned."""
    cdef Lease held = <Lease?> <object> lease
    cdef bint copy = nbytes and <intptr_t> (held.ptr + offset) & (_itemsize[dtype] - 1) != 0
    return PyObject_CallOneArg(<object> consumer, _capsule(held, dtype, rank, shape, strides, offset, nbytes, copy))


# How the pickle machine reaches `_handed_over` without importing NumPy at load time.
hand_over = PyCapsule_New(<void *> &_handed_over, "tensorio._dlpack.hand_over", NULL)


cdef void _halve(Managed *managed, int64_t rank) noexcept:
    """Count bytes instead of elements, in C order."""
    cdef int64_t i, step = 1
    managed.dims[rank - 1] //= 2
    for i in range(rank - 1, -1, -1):
        managed.dims[rank + i] = step
        step *= max(managed.dims[i], 1)


def has_dtype(int dtype):
    """Tell whether `capsule` takes a dtype code."""
    return 0 <= dtype < len(_DTYPES) and (dtype == _FLOAT4 or _dtypes[dtype].bits != 0)


def capsule(Lease lease not None, int dtype, shape, strides, int64_t offset, int64_t nbytes):
    """Return one tensor over ``lease[offset : offset + nbytes]``, for one consumer.

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

    Returns
    -------
    capsule
        Called ``dltensor``; the memory lives as long as what is made from it.

    Raises
    ------
    UnsupportedError
        DLPack has no such type; see `has_dtype`.
    """
    cdef int64_t[2 * MAX_RANK] dims
    cdef int i, rank = len(shape)
    if rank > MAX_RANK:
        raise ValueError(f"{rank} dimensions")
    for i in range(rank):
        dims[i] = shape[i]
        dims[rank + i] = strides[i]
    return _capsule(lease, dtype, rank, dims, dims + rank, offset, nbytes)


def tensors(rows, dims, list leases not None, consumer):
    """Return ``consumer(capsule)`` per row, in row order, for tables whose tensors have one chunk each.

    Parameters
    ----------
    rows, dims : array of int64
        Columns of a `Table`.
    leases : list of Lease
        By storage index; writable ones, if the consumer does not know of read-only memory.
    consumer : callable
        E.g. ``torch.utils.dlpack.from_dlpack``.

    Notes
    -----
    Touches no payload byte. Each tensor is by itself: none shares with another.
    """
    cdef const int64_t[::1] pool = dims if len(dims) else _EMPTY
    cdef const int64_t[::1] cells = rows if len(rows) else _EMPTY
    cdef const int64_t *base = &pool[0]
    cdef const tio_row *row = <const tio_row *> &cells[0]
    cdef Py_ssize_t i, n = len(rows) // (sizeof(tio_row) // 8)
    cdef list out = [None] * n
    for i in range(n):
        out[i] = consumer(_capsule(<Lease?> leases[row.storage], row.dtype, row.rank, base + row.dims,
                                   base + row.dims + row.rank, row.offset, row.nbytes))
        row += 1
    return out


def tensor_row(rows, dims, Py_ssize_t row, Lease lease not None):
    """Return the capsule of one row of a table, for a tensor of one chunk; see `tensors`."""
    cdef const int64_t[::1] pool = dims if len(dims) else _EMPTY
    cdef const int64_t[::1] cells = rows
    cdef const tio_row *r
    if not 0 <= row < len(rows) // <Py_ssize_t> (sizeof(tio_row) // 8):
        raise IndexError(row)
    r = <const tio_row *> &cells[0] + row
    return _capsule(lease, r.dtype, r.rank, &pool[0] + r.dims, &pool[0] + r.dims + r.rank, r.offset, r.nbytes)


cdef object _EMPTY = _array("q", [0])
