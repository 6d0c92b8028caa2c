# SPDX-License-Identifier: Apache-2.0
"""What the user's tensors are: element type, shape, strides, and where the bytes lie.

For NumPy arrays and plain torch tensors; torch is not needed to compile or
import this, its attributes are asked for by name.
"""
from cpython.array cimport array as Column, clone
from libc.stdint cimport int64_t, uintptr_t

cimport numpy as cnp

from tensorio._append cimport *

import array as _array

from tensorio.dtypes import BY_NAME as _BY_NAME, DTYPES as _DTYPES, of_numpy
from tensorio.errors import UnsupportedError as _UnsupportedError

cnp.import_array()

cdef int[64] _itemsize
cdef bint[64] _complex
for _d in _DTYPES:
    _itemsize[_d.code] = _d.itemsize
    _complex[_d.code] = _d.name.startswith("complex")

cdef Column _Q = _array.array("q")

cdef dict _array_codes = {}  # NumPy type number -> code, or -1; user types (ml_dtypes) have numbers of their own
cdef dict _torch_codes = {}  # torch.dtype -> code, or -1


cdef int _array_code(cnp.ndarray a) except -2:
    cdef object code = _array_codes.get(cnp.PyArray_TYPE(a))
    if code is None:
        descr = a.dtype
        row = of_numpy(descr)
        # Of a type with fields, NumPy's flag for the byte order below says nothing.
        code = -1 if row is None or (descr.fields is not None and not descr.isnative) else row.code
        if descr.kind not in "OSUVMm" or row is not None:
            if descr.fields is None:
                _array_codes[cnp.PyArray_TYPE(a)] = code
    return -1 if not cnp.PyArray_ISNOTSWAPPED(a) else <int> code


cdef int of_array(object array, Tensor *t) except -1:
    """Describe a NumPy array."""
    cdef cnp.ndarray a = <cnp.ndarray> array
    cdef int i
    t.dtype = _array_code(a)
    t.rank = a.ndim
    t.flags = 0
    t.address = <int64_t> <uintptr_t> cnp.PyArray_DATA(a)
    t.itemsize = _itemsize[t.dtype] if t.dtype >= 0 else <int> a.itemsize
    t.numel = cnp.PyArray_SIZE(a)
    t.reach = t.itemsize if t.itemsize else 1
    for i in range(t.rank):
        t.shape[i] = a.shape[i]
        t.strides[i] = a.strides[i] // t.itemsize if a.strides[i] > 0 and t.itemsize else 0
        if a.shape[i] > 1 and t.reach >= 0:
            if a.strides[i] < 0 or t.itemsize == 0 or a.strides[i] % t.itemsize:
                t.reach = -1
            else:
                t.reach += (a.shape[i] - 1) * a.strides[i]
    if t.numel == 0:
        t.reach = 0
    return 0


cdef int _torch_kind(object tensor, Tensor *t) except -1:
    """Element type, address, shape and lazy bits of a tensor that is one strided view of CPU memory; else dtype -1.

    Each attribute of a torch tensor costs about 0.1 us: none is asked twice.
    """
    cdef object dtype = tensor.dtype
    cdef object code = _torch_codes.get(dtype)
    cdef int i = 0
    if code is None:
        row = _BY_NAME.get(str(dtype).partition(".")[2])  # quantised types are not in it
        code = _torch_codes[dtype] = -1 if row is None or row.packed else row.code
    t.dtype = code
    if t.dtype < 0 or not tensor.is_cpu or not is_strided(tensor.layout) or tensor.is_nested:
        t.dtype = -1
        return 0
    t.itemsize = _itemsize[t.dtype]
    shape = tensor.shape
    t.rank = len(shape)
    if t.rank > MAX_RANK:
        t.dtype = -1
        return 0
    t.flags = 8 if tensor.is_neg() else 0
    if _complex[t.dtype] and tensor.is_conj():
        t.flags |= 4
    t.address = <int64_t> <uintptr_t> (<object> tensor.data_ptr())
    t.numel = 1
    for i in range(t.rank):
        t.shape[i] = shape[i]
        t.numel *= t.shape[i]
    return 0


cdef int of_torch(object tensor, Tensor *t) except -1:
    """Describe a torch tensor that is one strided view of CPU memory; other kinds get a dtype of -1."""
    cdef int i
    _torch_kind(tensor, t)
    if t.dtype < 0:
        return 0
    strides = tensor.stride()
    if tensor.requires_grad:
        t.flags |= 1
    t.reach = t.itemsize
    for i in range(t.rank):
        t.strides[i] = strides[i]
        t.reach += (t.shape[i] - 1) * t.strides[i] * t.itemsize
    if t.numel == 0:
        t.reach = 0
    return 0


cdef dict _strided = {}  # torch.layout -> whether it is torch.strided


cdef bint is_strided(object layout) except -1:
    found = _strided.get(layout)
    if found is None:
        found = _strided[layout] = str(layout) == "torch.strided"
    return found


cdef bint is_contiguous(const Tensor *t) noexcept nogil:
    """Whether the elements lie in C order without gaps."""
    cdef int64_t step = 1
    cdef int i
    if t.numel == 0:
        return True
    for i in range(t.rank - 1, -1, -1):
        if t.shape[i] != 1 and t.strides[i] != step:
            return False
        step *= t.shape[i]
    return t.reach >= 0


cdef object _described(const Tensor *t):
    cdef int i
    shape = tuple([t.shape[i] for i in range(t.rank)])
    return t.dtype, shape, t.numel * t.itemsize, t.address, is_contiguous(t) and not t.flags & 12


def describe_array(cnp.ndarray array not None):
    """Return (dtype code, shape, nbytes, address, in C order) of a NumPy array.

    The code is -1 for a type that `tensorio.dtypes` does not have in native
    byte order.
    """
    cdef Tensor t
    of_array(array, &t)
    return _described(&t)


cdef bint _torch_in_order(object tensor, Tensor *t) except -1:
    """Describe a torch tensor; whether its bytes are its elements in C order. False, too, for a dtype of -1."""
    cdef int64_t held
    cdef bint in_order
    _torch_kind(tensor, t)
    if t.dtype < 0:
        return False
    in_order = not t.flags & 12 and tensor.is_contiguous()
    if t.numel:
        if in_order:
            t.reach = t.numel * t.itemsize
        else:
            of_torch(tensor, t)  # torch copies without looking
        held = <int64_t> tensor.untyped_storage().nbytes()
        if <int64_t> tensor.storage_offset() * t.itemsize + t.reach > held:
            raise _UnsupportedError("a torch tensor is larger than its storage, which was resized; nothing to save")
        if not t.address:  # a subclass around other tensors
            t.dtype = -1
            return False
    return in_order


def describe_torch(tensor):
    """Return the same of a torch tensor; None if it is not one strided view of CPU memory."""
    cdef Tensor t
    cdef bint in_order = _torch_in_order(tensor, &t)
    if t.dtype < 0:
        return None
    return t.dtype, tuple([t.shape[i] for i in range(t.rank)]), t.numel * t.itemsize, t.address, in_order


def places(list objects not None, torch_tensor=None):
    """Say where the elements of NumPy arrays and torch tensors lie.

    Parameters
    ----------
    objects : list of object
    torch_tensor : type, optional
        ``torch.Tensor``, if anybody imported torch.

    Returns
    -------
    array of int64
        Three numbers for each: dtype code, address and bytes. The code is -1 for
        what is no such tensor, or not in C order in this memory.
    """
    cdef Column out = clone(_Q, 3 * len(objects), zero=True)
    cdef int64_t[::1] to = out
    cdef Py_ssize_t i
    cdef Tensor t
    cdef bint in_order
    for i, obj in enumerate(objects):
        if cnp.PyArray_Check(obj):
            of_array(obj, &t)
            in_order = t.dtype >= 0 and is_contiguous(&t)
        else:
            in_order = torch_tensor is not None and isinstance(obj, torch_tensor) and _torch_in_order(obj, &t)
        to[3 * i] = -1
        if in_order:
            to[3 * i], to[3 * i + 1], to[3 * i + 2] = t.dtype, t.address, t.numel * t.itemsize
    return out
