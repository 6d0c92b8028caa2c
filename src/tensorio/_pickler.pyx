# SPDX-License-Identifier: Apache-2.0
"""Writes the pickle of a torch file, with or without torch.

Byte for byte what CPython's C pickler writes at protocol 2 when torch.save
drives it, for tensors, plain Python values and whatever reduces to them: the
same opcodes, the same memo, by object identity. NumPy arrays are written as the
tensors that ``torch.from_numpy`` makes of them.

Opcodes: CPython's ``Lib/pickletools.py``; batching and memo: its
``Modules/_pickle.c``; the shape of a tensor's reduction: torch 2.13.

The pickler is one class in six files: `_Output` (bytes, memo, numbers and text),
`_Objects` (containers, names, reductions), `_Storages` (pieces, and the tensors
that share them), `_Tensors` (calls that rebuild them), `_Torch` (torch's own
objects) and, here, `_Pickler` (which object is written how).
"""
cimport cython
from cpython cimport array
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Realloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uintptr_t
from libc.stdlib cimport qsort
from libc.string cimport memcpy

from tensorio._append cimport *
from tensorio._csrc cimport TIO_ROW_CONJ, TIO_ROW_NEG, TIO_ROW_PARAMETER, TIO_ROW_REQUIRES_GRAD, tio_store_double
from tensorio._source cimport MAX_RANK, Tensor, of_array, of_torch

import array as _array
import sys
from _compat_pickle import REVERSE_IMPORT_MAPPING as _IMPORTS, REVERSE_NAME_MAPPING as _NAMES
from _codecs import encode as _codecs_encode
from collections import OrderedDict
from math import prod
from dataclasses import replace as _replace
from copyreg import dispatch_table as _dispatch_table
from pickle import PicklingError, whichmodule
from types import FunctionType as _FunctionType

import numpy as np

from tensorio import _core
from tensorio.dtypes import BY_NAME as _BY_NAME, DTYPES as _DTYPES, of_numpy
from tensorio.errors import UnsupportedError
from tensorio._unpickler import Leaf as _Leaf, _Global
from tensorio.allowlist import ALLOWED as _ALLOWED
from tensorio.arraylike import as_numpy as _as_numpy, is_foreign_tensor as _is_foreign_tensor
from tensorio.kinds._base import (
    QUANTIZED as _QUANTIZED_TYPES, JaggedTensor as _JaggedTensor, MetaTensor as _MetaTensor,
    NestedTensor as _NestedTensor, QuantizedTensor as _QuantizedTensor, TensorKind as _TensorKind,
)
from tensorio.kinds.sparse import SparseTensor as _SparseTensor
from tensorio.values import Device, Opaque, Size, TorchDType, TorchTag

cdef extern from "Python.h":
    int Py_EnterRecursiveCall(const char *where)  # not zero, and an error set, when too deep
    void Py_LeaveRecursiveCall()
    const char *PyUnicode_AsUTF8AndSize(object o, Py_ssize_t *size) except NULL
    long long PyLong_AsLongLongAndOverflow(object o, int *overflow) except? -1

cdef enum:
    MAX_DEPTH = 2000  # levels: about 1 KiB of a thread's stack each, of which some have 2 MiB

cdef array.array _Q = _array.array("q")
cdef type _ndarray = np.ndarray

include "_pickler_output.pxi"
include "_pickler_objects.pxi"
include "_pickler_storages.pxi"
include "_pickler_tensors.pxi"
include "_pickler_torch.pxi"


@cython.final
cdef class _Pickler(_Torch):
    """One run over one object.

    Parameters
    ----------
    grouped : _Pickler or None
        An earlier run over the same object that found arrays sharing memory:
        its spans say which storage each array in turn belongs to.
    leaf : callable or None
        ``leaf(obj)`` answers (dtype code, space, offset, nbytes, shape, strides
        in bytes, flags) for tensors that stand for bytes elsewhere.
    compact : bool
        Store the part of torch's storages that tensors reach, not all of them; views
        with holes that share no byte with another in C order, without the holes.
    exact : bool
        Write what ``torch.save`` would: NumPy arrays as NumPy pickles them, no
        bytes as two types, nothing from another device.
    fetch : callable or None
        Returns a copy in memory of a torch storage on another device, as something that has a `data_ptr`; the
        storage's own method by default.
    """
    cdef int depth

    def dump(self, obj):
        """Return the pickle of `obj`."""
        self.write(b"\x80\x02", 2)
        self.save(obj)
        self.op(c".")
        return PyBytes_FromStringAndSize(self.out, self.n)

    cdef int save(self, object obj) except -1:
        cdef type kind = type(obj)
        if obj is None:
            return self.op(c"N")
        if obj is True:
            return self.op(<char> 0x88)
        if obj is False:
            return self.op(<char> 0x89)
        if kind is int:
            return self.save_int(obj)
        if kind is float:
            return self.save_float(obj)
        if self.recall(obj):
            return 0
        if kind is str:
            return self.save_str(<str> obj)
        if Py_EnterRecursiveCall(" while saving an object") != 0:
            return -1
        self.depth += 1
        try:
            if self.depth > MAX_DEPTH:
                raise RecursionError(f"maximum recursion depth exceeded: over {MAX_DEPTH} levels while saving")
            return self.save_more(obj, kind)
        finally:
            self.depth -= 1
            Py_LeaveRecursiveCall()

    cdef int save_more(self, object obj, type kind) except -1:
        if kind is dict:
            return self.save_dict(<dict> obj)
        if kind is _ndarray and not self.exact and self.save_array(obj, obj):
            return 0
        if kind is tuple:
            return self.save_tuple(<tuple> obj)
        if kind is list:
            return self.save_list(<list> obj)
        if self.torch is not None and self.save_torch(obj, kind):
            return 0
        if kind is bytes:
            return self.save_bytes(<bytes> obj)
        if kind is bytearray:
            return self.save_reduce((bytearray, (bytes(obj),) if len(<bytearray> obj) else ()), obj)
        if kind is set or kind is frozenset:
            return self.save_reduce((kind, (list(obj),)), obj)
        if issubclass(kind, type):
            return self.save_type(obj)
        if kind is _FunctionType:
            return self.save_named(obj, None)
        return self.save_other(obj, kind)

    cdef int save_other(self, object obj, type kind) except -1:
        if self.leaf is not None and kind is _Leaf:
            return self.save_leaf(obj)
        if kind is _Named or kind is _Global:
            return self.save_global(obj, obj.module, obj.name)
        if kind is TorchDType:
            return self.save_global(obj, "torch", str(obj))
        if kind is TorchTag:
            return self.save_tag(str(obj))
        if isinstance(obj, _TensorKind):
            return self.save_kind(obj)
        if kind is Size:
            return self.save_reduce((_torch_global("torch", "Size"), (tuple(obj),)), obj)
        if kind is Device:
            parts = (obj.type,) if obj.index is None else tuple(obj)
            return self.save_reduce((_torch_global("torch", "device"), parts), obj)
        if kind is Opaque and obj.args is None and obj.state is None and (obj.module, obj.name) in _ALLOWED:
            return self.save_global(obj, obj.module, obj.name)
        if kind is Opaque:
            raise UnsupportedError(f"{obj!r} stands for an object of a class that was not allowed when the file was "
                                   "opened, and can't be written")
        if not self.exact and _is_foreign_tensor(obj):
            a = _as_numpy(obj)
            self.keep.append(a)
            if self.save_array(a, obj):
                return 0
        return self.save_by_reduction(obj, kind)


def dumps(obj, leaf=None, bint compact=False, bint exact=False, fetch=None):
    """Return the pickle of a torch file and the storages that go with it.

    Parameters
    ----------
    obj : object
    leaf, compact, exact, fetch
        See `_Pickler`.

    Returns
    -------
    data : bytes
    spaces, offsets, sizes : array of int64
        The storages ``data/0``, ``data/1``, ...: a space of -1 is memory and the
        offset its address, others are those that `leaf` spoke of.
    keep : list
        Objects whose memory the pieces point into.
    made : dict of int to ndarray or leaf
        Pieces that are an array's elements in C order and native byte order; they
        have no address.
    left_out : int
        Bytes of storages that are not written because of `compact`.

    Notes
    -----
    Arrays that share memory are found after a first run; the second then
    knows their storages. About 0.5 us per array.
    """
    cdef _Pickler pickler = _Pickler(None, leaf, compact, exact, fetch)
    cdef _Pickler first
    cdef Py_ssize_t i
    cdef bint again
    cdef int64_t whole = 0
    data = pickler.dump(obj)
    again = (pickler.n_spans > 1 or compact) and _group(pickler.spans, pickler.n_spans)
    if compact:
        whole = _uncompacted(pickler)
        if pickler.holed and _find_alone(pickler):
            _group(pickler.spans, pickler.n_spans)
            again = True
        again = again or not pickler.whole.keys().isdisjoint(pickler.by_storage)
    if again:
        first = pickler
        pickler = _Pickler(first, leaf, compact, exact, fetch)
        data = pickler.dump(obj)
        pickler.keep.append(first.keep)
    spaces, offsets, sizes = (array.clone(_Q, pickler.n_pieces, False) for _ in range(3))
    for i in range(pickler.n_pieces):
        (<array.array> spaces).data.as_longlongs[i] = pickler.pieces[i].space
        (<array.array> offsets).data.as_longlongs[i] = pickler.pieces[i].lo
        (<array.array> sizes).data.as_longlongs[i] = pickler.pieces[i].nbytes
    return data, spaces, offsets, sizes, pickler.keep, pickler.made, whole - pickler.placed if compact else 0
