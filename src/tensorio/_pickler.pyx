# SPDX-License-Identifier: Apache-2.0
"""Writes the pickle of a torch file, with or without torch.

Byte for byte what CPython's C pickler writes at protocol 2 when torch.save
drives it, for tensors, plain Python values and whatever reduces to them: the
same opcodes, the same memo, by object identity. NumPy arrays are written as the
tensors that ``torch.from_numpy`` makes of them.

Opcodes: CPython's ``Lib/pickletools.py``; batching and memo: its
``Modules/_pickle.c``; the shape of a tensor's reduction: torch 2.13.
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
    BATCH = 1000  # items per APPENDS and SETITEMS, as CPython's _pickle.c
    ALONE_MAX = 256  # views of one storage that are compared with each other, in pairs
    SHARE_WORK = 10_000  # steps of NumPy's search for a byte that two views share; usual views take under ten
    MAX_DEPTH = 2000  # levels: about 1 KiB of a thread's stack each, of which some have 2 MiB

cdef array.array _Q = _array.array("q")
cdef int REQUIRES_GRAD = TIO_ROW_REQUIRES_GRAD
cdef int PARAMETER = TIO_ROW_PARAMETER
cdef int CONJ = TIO_ROW_CONJ
cdef int NEG = TIO_ROW_NEG

# Storage class of each element type; others go by UntypedStorage and a dtype (torch's rebuild_v3).
_STORAGE_NAMES = {
    "float64": "DoubleStorage", "float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage",
    "int64": "LongStorage", "int32": "IntStorage", "int16": "ShortStorage", "int8": "CharStorage",
    "uint8": "ByteStorage", "bool": "BoolStorage", "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
}
cdef list _STORAGE_OF = [_STORAGE_NAMES.get(d.name) for d in _DTYPES]
cdef type _ndarray = np.ndarray
cdef int _BYTE = _BY_NAME["uint8"].code
cdef str _BY_BYTES = "bytes"  # torch takes all types without a storage class, and uint8, for one
cdef list _NAME_OF = [d.name for d in _DTYPES]
cdef int[64] _ITEMSIZE
for _d in _DTYPES:
    _ITEMSIZE[_d.code] = _d.itemsize


# Storage class of quantized integers. Their codes, for spans only, are no rows of the table: a storage of theirs
# is never shared with one of plain integers.
_QUANTIZED = {"qint8": (63, "QInt8Storage"), "quint8": (62, "QUInt8Storage"), "qint32": (61, "QInt32Storage"),
              "quint4x2": (60, "QUInt4x2Storage"), "quint2x4": (59, "QUInt2x4Storage")}
for _code, _name in _QUANTIZED.values():
    _ITEMSIZE[_code] = 4 if _name == "QInt32Storage" else 1

_LAYOUTS = frozenset(f"torch.{name}" for name in ("strided", "jagged", "_mkldnn", "sparse_coo", "sparse_csr",
                                                  "sparse_csc", "sparse_bsr", "sparse_bsc"))


class _Named:
    """A global of torch by name, for when torch is not there."""

    __slots__ = ("module", "name")

    def __init__(self, module, name):
        self.module = module
        self.name = name


_named = {}


cdef object _torch_global(str module, str name):
    """torch's own object, if somebody imported torch, so that it shares the memo with the user's; else its name."""
    found = getattr(sys.modules.get(module), name, None)
    if found is None:
        found = _named.get((module, name))
        if found is None:
            found = _named.setdefault((module, name), _Named(module, name))
    return found


cdef struct Piece:
    int64_t space    # what `lo` counts in: -1 for memory, else the index of a storage
    int64_t lo       # first byte
    int64_t nbytes


cdef struct Span:
    # The bytes that one tensor reaches, and what kind of storage they need.
    int64_t space
    int64_t lo
    int64_t hi
    int64_t group_lo  # of the group of overlapping spans it is in
    int64_t group_hi
    int32_t group
    int32_t dtype
    int32_t alone    # not 0: number of a view that shares no byte with another, and is written in C order
    bint held        # a torch tensor's, whose whole storage would be written if not for `compact`


@cython.final
cdef class _Pickler:
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
    cdef char *out
    cdef Py_ssize_t n, room
    cdef PyObject **slots   # open addressing: object, index
    cdef uint32_t *numbers
    cdef Py_ssize_t mask, used
    cdef uint32_t next_index
    cdef int depth
    cdef readonly list keep
    cdef readonly dict made  # piece -> array that must be copied to be written
    cdef Piece *pieces
    cdef Py_ssize_t n_pieces, pieces_room
    cdef list keys          # names of the pieces, below data/
    cdef Span *spans
    cdef Py_ssize_t n_spans, spans_room
    cdef _Pickler grouped
    cdef int32_t *group_pieces  # piece of each group, -1 before its first mention
    cdef object leaf
    cdef object fetch
    cdef bint compact
    cdef dict holed         # compact: views with holes, by number of their span; see `_elements`
    cdef dict alone_pieces  # compact: piece of each view that is alone
    cdef dict whole         # compact: bytes of the torch storages that are written in part, as `by_storage`
    cdef int64_t placed     # bytes of the pieces of spans
    cdef bint exact
    cdef dict classes       # exact: the class as which the bytes at an address are saved
    cdef dict by_storage    # torch storages: (identity, class) -> Piece
    cdef object torch, torch_tensor, torch_parameter, torch_storage, torch_typed_storage
    cdef object g_v2, g_v3, g_parameter, g_untyped
    cdef list g_storage

    def __cinit__(self, _Pickler grouped=None, leaf=None, bint compact=False, bint exact=False, fetch=None):
        cdef Py_ssize_t i
        self.keep, self.keys = [], []
        self.made = {}
        self.grouped = grouped
        if grouped is not None:
            self.group_pieces = <int32_t *> PyMem_Calloc(grouped.n_spans + 1, sizeof(int32_t))
            if self.group_pieces == NULL:
                raise MemoryError()
            for i in range(grouped.n_spans):
                self.group_pieces[i] = -1
        self.leaf = leaf
        self.fetch = fetch
        self.compact = compact
        self.holed, self.alone_pieces, self.whole = {}, {}, {}
        self.exact = exact
        self.classes = {}
        self.by_storage = {}
        self.torch = sys.modules.get("torch")
        self.torch_tensor = getattr(self.torch, "Tensor", None)
        self.torch_parameter = getattr(getattr(self.torch, "nn", None), "Parameter", None)
        self.torch_storage = getattr(self.torch, "UntypedStorage", None)
        self.torch_typed_storage = getattr(self.torch, "TypedStorage", None)
        self.g_v2 = _torch_global("torch._utils", "_rebuild_tensor_v2")
        self.g_v3 = _torch_global("torch._utils", "_rebuild_tensor_v3")
        self.g_parameter = _torch_global("torch._utils", "_rebuild_parameter")
        self.g_untyped = _torch_global("torch.storage", "UntypedStorage")
        self.g_storage = [None if name is None else _torch_global("torch", name) for name in _STORAGE_OF]
        self.mask = 1023
        self.slots = <PyObject **> PyMem_Calloc(self.mask + 1, sizeof(PyObject *))
        self.numbers = <uint32_t *> PyMem_Calloc(self.mask + 1, sizeof(uint32_t))
        if self.slots == NULL or self.numbers == NULL:
            raise MemoryError()

    def __dealloc__(self):
        cdef Py_ssize_t i
        if self.slots != NULL:
            for i in range(self.mask + 1):
                if self.slots[i] != NULL:
                    Py_DECREF(<object> self.slots[i])
        PyMem_Free(self.slots)
        PyMem_Free(self.numbers)
        PyMem_Free(self.out)
        PyMem_Free(self.pieces)
        PyMem_Free(self.spans)
        PyMem_Free(self.group_pieces)

    def dump(self, obj):
        """Return the pickle of `obj`."""
        self.write(b"\x80\x02", 2)
        self.save(obj)
        self.op(c".")
        return PyBytes_FromStringAndSize(self.out, self.n)

    # ---------------------------------------------------------------- output

    cdef inline char *reserve(self, Py_ssize_t count) except NULL:
        cdef char *p
        cdef Py_ssize_t room
        if self.n + count > self.room:
            room = 2 * self.room + count + 4096
            p = <char *> PyMem_Realloc(self.out, room)
            if p == NULL:
                raise MemoryError()
            self.out, self.room = p, room
        p = self.out + self.n
        self.n += count
        return p

    cdef inline int write(self, const char *p, Py_ssize_t count) except -1:
        memcpy(self.reserve(count), p, count)
        return 0

    cdef inline int op(self, char c) except -1:
        self.reserve(1)[0] = c
        return 0

    cdef inline int op1(self, char c, uint8_t value) except -1:
        cdef char *p = self.reserve(2)
        p[0] = c
        p[1] = <char> value
        return 0

    cdef inline int op4(self, char c, uint32_t value) except -1:
        cdef char *p = self.reserve(5)
        p[0] = c
        p[1] = <char> (value & 0xFF)
        p[2] = <char> (value >> 8 & 0xFF)
        p[3] = <char> (value >> 16 & 0xFF)
        p[4] = <char> (value >> 24)
        return 0

    # ------------------------------------------------------------------ memo

    cdef inline int put_next(self) except -1:
        """Write the put of an object that nobody can refer to again."""
        if self.next_index < 256:
            self.op1(c"q", <uint8_t> self.next_index)
        else:
            self.op4(c"r", self.next_index)
        self.next_index += 1
        return 0

    cdef int memoize(self, object obj) except -1:
        """Remember an object by identity, keep it alive (its id must not be used again), and write its put."""
        cdef Py_ssize_t i
        if 2 * self.used > self.mask:
            self.rehash()
        i = self.slot_of(<PyObject *> obj)
        Py_INCREF(obj)
        self.slots[i] = <PyObject *> obj
        self.numbers[i] = self.next_index
        self.used += 1
        return self.put_next()

    cdef inline Py_ssize_t slot_of(self, PyObject *obj) noexcept:
        """The slot that holds `obj`, or the free one where it belongs."""
        cdef Py_ssize_t i = <Py_ssize_t> ((<uintptr_t> obj >> 4) * 0x9E3779B97F4A7C15ULL >> 24) & self.mask
        while self.slots[i] != NULL and self.slots[i] != obj:
            i = (i + 1) & self.mask
        return i

    cdef int rehash(self) except -1:
        cdef PyObject **old = self.slots
        cdef uint32_t *old_numbers = self.numbers
        cdef Py_ssize_t i, j, count = self.mask + 1
        cdef PyObject **slots = <PyObject **> PyMem_Calloc(4 * count, sizeof(PyObject *))
        cdef uint32_t *numbers = <uint32_t *> PyMem_Calloc(4 * count, sizeof(uint32_t))
        if slots == NULL or numbers == NULL:
            PyMem_Free(slots)
            PyMem_Free(numbers)
            raise MemoryError()
        self.slots, self.numbers, self.mask = slots, numbers, 4 * count - 1
        for i in range(count):
            if old[i] != NULL:
                j = self.slot_of(old[i])
                self.slots[j] = old[i]
                self.numbers[j] = old_numbers[i]
        PyMem_Free(old)
        PyMem_Free(old_numbers)
        return 0

    cdef inline bint recall(self, object obj) except -1:
        """Write a get if the object was written before."""
        cdef Py_ssize_t i = self.slot_of(<PyObject *> obj)
        if self.slots[i] == NULL:
            return False
        if self.numbers[i] < 256:
            self.op1(c"h", <uint8_t> self.numbers[i])
        else:
            self.op4(c"j", self.numbers[i])
        return True

    # --------------------------------------------------------------- objects

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

    cdef int save_by_reduction(self, object obj, type kind) except -1:
        """Whatever else there is goes by copyreg and ``__reduce_ex__``, as in any pickle."""
        reduce = _dispatch_table.get(kind)
        value = obj.__reduce_ex__(2) if reduce is None else reduce(obj)
        if type(value) is str:
            return self.save_named(obj, value)
        if type(value) is not tuple or not 2 <= len(value) <= 6:
            raise PicklingError(f"expected __reduce__ of {kind.__name__} to return a tuple of 2 to 6 parts")
        return self.save_reduce(value, obj)

    cdef int save_int(self, object obj) except -1:
        cdef int overflow = 0
        cdef long long value = PyLong_AsLongLongAndOverflow(obj, &overflow)
        if not overflow and -0x80000000LL <= value <= 0x7FFFFFFFLL:
            return self.small_int(value)
        data = _long_bytes(obj)
        if len(data) < 256:
            self.op1(<char> 0x8a, <uint8_t> len(data))
        else:
            self.op4(<char> 0x8b, <uint32_t> len(data))
        return self.write(data, len(data))

    cdef inline int small_int(self, int64_t value) except -1:
        """An int of 32 bits: BININT1, BININT2 or BININT."""
        cdef char *p
        if 0 <= value < 256:
            return self.op1(c"K", <uint8_t> value)
        if 0 <= value < 65536:
            p = self.reserve(3)
            p[0] = c"M"
            p[1] = <char> (value & 0xFF)
            p[2] = <char> (value >> 8)
            return 0
        return self.op4(c"J", <uint32_t> (value & 0xFFFFFFFF))

    cdef inline int any_int(self, int64_t value) except -1:
        if -0x80000000LL <= value <= 0x7FFFFFFFLL:
            return self.small_int(value)
        return self.save_int(value)

    cdef int save_float(self, double value) except -1:
        cdef char *p = self.reserve(9)
        p[0] = c"G"
        tio_store_double(<uint8_t *> p + 1, value)
        return 0

    cdef int save_str(self, str obj) except -1:
        cdef Py_ssize_t count
        cdef const char *p
        cdef bytes odd
        try:
            p = PyUnicode_AsUTF8AndSize(obj, &count)
        except UnicodeEncodeError:  # lone surrogates: written as CPython does
            odd = obj.encode("utf-8", "surrogatepass")
            p, count = odd, len(odd)
        if count > 0xFFFFFFFF:
            raise UnsupportedError("a string of over 4 GiB does not fit a pickle of protocol 2")
        self.op4(c"X", <uint32_t> count)
        self.write(p, count)
        return self.memoize(obj)

    cdef inline int word(self, str obj) except -1:
        """A string that was probably written before."""
        return 0 if self.recall(obj) else self.save_str(obj)

    cdef int save_bytes(self, bytes obj) except -1:
        if not obj:
            return self.save_reduce((bytes, ()), obj)
        return self.save_reduce((_codecs_encode, (obj.decode("latin-1"), "latin1")), obj)

    # ------------------------------------------------------------ containers

    cdef int save_tuple(self, tuple obj) except -1:
        cdef Py_ssize_t i, count = len(obj)
        if count == 0:
            return self.op(c")")
        if count > 3:
            self.op(c"(")
        for part in obj:
            self.save(part)
        i = self.slot_of(<PyObject *> obj)
        if self.slots[i] != NULL:  # a part held the tuple itself, which wrote it whole
            if count > 3:
                self.op(c"1")
            else:
                for _ in range(count):
                    self.op(c"0")
            self.recall(obj)
            return 0
        self.op(c"t" if count > 3 else <char> (0x84 + count))
        return self.memoize(obj)

    cdef int save_list(self, list obj) except -1:
        cdef Py_ssize_t end, i = 0, count = len(obj)
        self.op(c"]")
        self.memoize(obj)
        if count == 1:
            self.save(obj[0])
            return self.op(c"a")
        while i < len(obj):
            self.op(c"(")
            end = i + BATCH
            while i < end and i < len(obj):  # what is saved may change the list
                self.save(obj[i])
                i += 1
            self.op(c"e")
        return 0

    cdef int save_dict(self, dict obj) except -1:
        cdef Py_ssize_t left = len(obj), count = len(obj)
        self.op(c"}")
        self.memoize(obj)
        if count == 0:
            return 0
        for key, value in obj.items():
            if count > 1 and (count - left) % BATCH == 0:
                self.op(c"(")
            self.save(key)
            self.save(value)
            left -= 1
            if count == 1:
                self.op(c"s")
            elif left == 0 or (count - left) % BATCH == 0:
                self.op(c"u")
        if count % BATCH == 0:  # CPython asks for one more batch, which is empty
            self.op(c"(")
            self.op(c"u")
        return 0

    cdef int batch(self, object items, bint pairs) except -1:
        """Items of an iterator, as CPython batches those of a reduction: a last one alone has no mark."""
        cdef Py_ssize_t count = BATCH
        items = iter(items)
        while count == BATCH:
            chunk = []
            for item in items:
                chunk.append(item)
                if len(chunk) == BATCH:
                    break
            count = len(chunk)
            if count == 0:
                return 0
            if count > 1:
                self.op(c"(")
            for item in chunk:
                if pairs:
                    if type(item) is not tuple or len(<tuple> item) != 2:
                        raise PicklingError("expected pairs from a reduction's dict items")
                    self.save((<tuple> item)[0])
                    self.save((<tuple> item)[1])
                else:
                    self.save(item)
            if pairs:
                self.op(c"u" if count > 1 else c"s")
            else:
                self.op(c"e" if count > 1 else c"a")
        return 0

    # ------------------------------------------------- globals and reductions

    cdef int save_type(self, object obj) except -1:
        for constant in (None, NotImplemented, ...):
            if obj is type(constant):
                return self.save_reduce((type, (constant,)), obj)
        return self.save_named(obj, None)

    cdef int save_named(self, object obj, object name) except -1:
        """A global by its qualified name."""
        if name is None:
            name = getattr(obj, "__qualname__", None) or obj.__name__
        module = whichmodule(obj, name)
        found = sys.modules.get(module)
        parent = None
        if found is None:
            try:
                __import__(module)
            except ImportError:
                raise PicklingError(f"can't save {obj!r}: there is no module {module}") from None
            found = sys.modules[module]
        for part in name.split("."):
            if part == "<locals>" or not hasattr(found, part):
                raise PicklingError(f"can't save {obj!r}: it's not found as {module}.{name}")
            parent, found = found, getattr(found, part)
        if found is not obj:
            raise PicklingError(f"can't save {obj!r}: it's not the same object as {module}.{name}")
        if parent is not sys.modules[module]:
            return self.save_reduce((getattr, (parent, name.rpartition(".")[2])), obj)
        return self.save_global(obj, module, name)

    cdef int save_global(self, object obj, str module, str name) except -1:
        """A GLOBAL under its Python 2 name, as protocol 2 has it."""
        module, name = _NAMES.get((module, name), (module, name))
        module = _IMPORTS.get(module, module)
        if "\n" in module or "\n" in name:
            raise PicklingError(f"can't save {module!r}.{name!r}: not a name")
        try:
            text = f"c{module}\n{name}\n".encode("ascii")
        except UnicodeEncodeError:
            raise PicklingError(f"can't save {module}.{name}: not an ASCII name") from None
        self.write(text, len(text))
        return self.memoize(obj)

    cdef inline int global_of(self, object obj) except -1:
        """A global that was probably written before."""
        return 0 if self.recall(obj) else self.save(obj)

    cdef int save_reduce(self, tuple value, object obj) except -1:
        """(callable, arguments[, state[, list items[, dict items[, state setter]]]])."""
        callee, args = value[0], value[1]
        state = value[2] if len(value) > 2 else None
        if not callable(callee) and type(callee) is not _Named or type(args) is not tuple \
                or len(value) > 5 and value[5] is not None and not callable(value[5]):
            raise PicklingError(f"expected a reduction of {type(obj).__name__} to begin with a callable and a tuple")
        name = getattr(callee, "__name__", "")
        if name == "__newobj__":
            if not args or args[0] is not obj.__class__:
                raise PicklingError(f"expected the reduction of {type(obj).__name__} to make one of that class")
            self.save(args[0])
            self.save(args[1:])
            self.op(<char> 0x81)
        elif name == "__newobj_ex__":
            import functools
            if len(args) != 3 or type(args[1]) is not tuple or type(args[2]) is not dict:
                raise PicklingError("expected a class, a tuple and a dict from a reduction by __newobj_ex__")
            cls, positional, keywords = args
            self.save(functools.partial(cls.__new__, cls, *positional, **keywords))
            self.save(())
            self.op(c"R")
        else:
            self.save(callee)
            self.save(args)
            self.op(c"R")
        if self.slots[self.slot_of(<PyObject *> obj)] != NULL:  # an argument held the object itself
            self.op(c"0")
            self.recall(obj)
        else:
            self.memoize(obj)
        if len(value) > 3 and value[3] is not None:
            self.batch(value[3], False)
        if len(value) > 4 and value[4] is not None:
            self.batch(value[4], True)
        if state is not None:
            self.save_state(value, obj, state)
        return 0

    cdef int save_state(self, tuple value, object obj, object state) except -1:
        if len(value) > 5 and value[5] is not None:
            self.save(value[5])
            self.save(obj)
            self.save(state)
            self.op(<char> 0x86)
            self.op(c"R")
            return self.op(c"0")
        self.save(state)
        return self.op(c"b")

    # --------------------------------------------------------------- storages

    cdef int32_t new_piece(self, int64_t space, int64_t lo, int64_t nbytes) except -1:
        cdef Piece *p
        cdef Py_ssize_t room
        if self.n_pieces == self.pieces_room:
            room = 2 * self.pieces_room + 64
            p = <Piece *> PyMem_Realloc(self.pieces, room * sizeof(Piece))
            if p == NULL:
                raise MemoryError()
            self.pieces, self.pieces_room = p, room
        p = &self.pieces[self.n_pieces]
        p.space, p.lo, p.nbytes = space, lo, nbytes
        self.keys.append(str(self.n_pieces))
        self.n_pieces += 1
        return <int32_t> (self.n_pieces - 1)

    cdef int span(self, int64_t space, int dtype, int64_t lo, int64_t hi) except -1:
        """Note what a tensor reaches, as the span that is next, where the caller counts it."""
        cdef Span *s
        cdef Py_ssize_t room
        if self.n_spans == self.spans_room:
            room = 2 * self.spans_room + 64
            s = <Span *> PyMem_Realloc(self.spans, room * sizeof(Span))
            if s == NULL:
                raise MemoryError()
            self.spans, self.spans_room = s, room
        s = &self.spans[self.n_spans]
        s.space, s.dtype, s.lo, s.hi, s.alone, s.held = space, dtype, lo, hi, 0, False
        return 0

    cdef int32_t place(self, int64_t space, int dtype, int64_t lo, int64_t hi, int64_t *first) except -1:
        """The piece of a tensor that reaches [lo, hi) of `space`, and the element of it where the tensor starts."""
        cdef const Span *found
        cdef int32_t piece
        self.span(space, dtype, lo, hi)
        first[0] = 0
        if self.grouped is None:
            piece = self.new_piece(space, lo, hi - lo)
            self.placed += hi - lo
        else:
            # Reductions are asked again, and other threads run meanwhile: the spans of both runs must correspond.
            if self.n_spans >= self.grouped.n_spans:
                raise UnsupportedError("the object changed while it was saved")
            found = &self.grouped.spans[self.n_spans]
            if found.space != space or found.dtype != dtype or found.hi - found.lo != hi - lo:
                raise UnsupportedError("the object changed while it was saved")
            # Of the first run, whose copies of odd arrays are at other places than this one's.
            first[0] = (found.lo - found.group_lo) // _ITEMSIZE[dtype]
            piece = self.group_pieces[found.group]
            if piece < 0:
                piece = self.new_piece(space, found.group_lo, found.group_hi - found.group_lo)
                self.placed += found.group_hi - found.group_lo
                self.group_pieces[found.group] = piece
        self.n_spans += 1
        return piece

    cdef int32_t place_view(self, int64_t space, Tensor *t, int64_t lo, int64_t hi, object view,
                            int64_t *first) except -1:
        """The same of a strided view, whose strides change if it can be written without its holes.

        `view` is an array or leaf of its elements; None for memory.
        """
        cdef int64_t nbytes = t.itemsize
        cdef int32_t alone
        cdef int i
        if not self.compact:
            return self.place(space, t.dtype, lo, hi, first)
        for i in range(t.rank):
            nbytes *= t.shape[i]
        if self.grouped is None:
            if nbytes < hi - lo:
                self.holed[self.n_spans] = (space, lo, *_layout(t))
            return self.place(space, t.dtype, lo, hi, first)
        alone = self.grouped.spans[self.n_spans].alone if self.n_spans < self.grouped.n_spans else 0
        if not alone:
            return self.place(space, t.dtype, lo, hi, first)
        if _layout(t) != self.grouped.holed[self.n_spans][2:]:
            raise UnsupportedError("the object changed while it was saved")
        self.span(space, t.dtype, lo, hi)
        self.n_spans += 1
        first[0] = 0
        piece = self.alone_pieces.get(alone)
        if piece is None:
            piece = self.alone_pieces[alone] = self.new_piece(-1, 0, nbytes)
            self.made[piece] = _elements(-1, lo, *_layout(t)) if view is None else view
            self.placed += nbytes
        _c_order(t)
        return piece

    cdef int pid(self, int32_t piece, object cls, str location, int64_t numel) except -1:
        """("storage", class, key, location, numel), as a persistent id."""
        self.op(c"(")
        self.word("storage")
        self.global_of(cls)
        self.word(<str> self.keys[piece])
        self.word(location)
        self.any_int(numel)
        self.op(c"t")
        self.put_next()
        return self.op(c"Q")

    # ---------------------------------------------------------------- tensors

    cdef int ints(self, const int64_t *values, int count) except -1:
        """A tuple of ints that nothing else refers to."""
        cdef int i
        if count == 0:
            return self.op(c")")
        if count > 3:
            self.op(c"(")
        for i in range(count):
            self.any_int(values[i])
        self.op(c"t" if count > 3 else <char> (0x84 + count))
        return self.put_next()

    cdef int hooks(self) except -1:
        """The empty OrderedDict of hooks that torch writes with each tensor."""
        self.global_of(OrderedDict)
        self.op(c")")
        self.op(c"R")
        return self.put_next()

    cdef int tensor(self, const Tensor *t, int32_t piece, int64_t first) except -1:
        """The call that rebuilds a tensor `first` elements into its storage, without its own memo slot."""
        cdef object cls = self.g_storage[t.dtype]
        cdef bint typed = cls is not None
        cdef int64_t nbytes = self.pieces[piece].nbytes
        self.global_of(self.g_v2 if typed else self.g_v3)
        self.op(c"(")
        if typed:
            self.pid(piece, cls, "cpu", nbytes // t.itemsize)
        else:
            self.pid(piece, self.g_untyped, "cpu", nbytes)
        self.any_int(first)
        self.ints(t.shape, t.rank)
        self.ints(t.strides, t.rank)
        self.op(<char> 0x88 if t.flags & REQUIRES_GRAD else <char> 0x89)
        self.hooks()
        if not typed:
            self.global_of(_torch_global("torch", _NAME_OF[t.dtype]))
        if t.flags & (CONJ | NEG):
            self.save({name: True for name, bit in (("conj", CONJ), ("neg", NEG)) if t.flags & bit})
        self.op(c"t")
        self.put_next()
        return self.op(c"R")

    cdef int parameter(self, Tensor *t, int32_t piece, int64_t first) except -1:
        """A tensor wrapped as a Parameter, which asks for gradients in its stead."""
        cdef bint grad = t.flags & REQUIRES_GRAD
        t.flags &= ~REQUIRES_GRAD
        self.global_of(self.g_parameter)
        self.tensor(t, piece, first)
        self.put_next()
        self.op(<char> 0x88 if grad else <char> 0x89)
        self.hooks()
        self.op(<char> 0x87)
        self.put_next()
        return self.op(c"R")

    cdef bint save_array(self, object a, object owner) except -1:
        """A NumPy array as the tensor that torch.from_numpy makes of it; False for types that are no tensor's."""
        cdef Tensor t
        cdef int64_t first
        cdef int32_t piece = self.place_array(a, &t, -1, &first)
        if piece < 0:
            return False
        self.tensor(&t, piece, first)
        self.memoize(owner)
        return True

    cdef int32_t place_array(self, object a, Tensor *t, int group, int64_t *first) except -1:
        """The piece of an array, as `place`; -2 for types that are no tensor's.

        A `group` that is not negative stands for its type where storages are shared.
        """
        if a.ndim > MAX_RANK:
            return -2
        of_array(a, t)
        if t.dtype < 0 or t.reach < 0:
            first[0] = 0
            return self.place_copy(a, t)
        self.keep.append(a)
        if group < 0:
            return self.place_view(-1, t, t.address, t.address + t.reach, a, first)
        return self.place(-1, group, t.address, t.address + t.reach, first)

    cdef int32_t place_copy(self, object a, Tensor *t) except -1:
        """An array of foreign byte order or odd strides: written in C order, copied when its turn comes."""
        cdef int32_t piece
        row = of_numpy(a.dtype)
        if row is None:
            return -2
        t.dtype, t.itemsize = row.code, row.itemsize
        _c_order(t)
        piece = self.new_piece(-1, 0, t.numel * t.itemsize)
        self.made[piece] = a
        return piece

    cdef int save_leaf(self, object obj) except -1:
        """A tensor whose bytes are elsewhere."""
        cdef Tensor t
        cdef int64_t first
        cdef int32_t piece = self.place_leaf(obj, &t, -1, &first)
        if t.flags & PARAMETER:
            self.parameter(&t, piece, first)
        else:
            self.tensor(&t, piece, first)
        return self.memoize(obj)

    cdef int32_t place_leaf(self, object obj, Tensor *t, int group, int64_t *first) except -1:
        """The piece of a leaf, as `place_array`."""
        cdef int64_t offset, nbytes, space
        cdef int i
        dtype, space, offset, nbytes, shape, strides, flags = self.leaf(obj)
        if _DTYPES[dtype].packed:
            raise UnsupportedError(f"torch files have no dtype for {_NAME_OF[dtype]}")
        t.dtype, t.rank, t.flags, t.itemsize = dtype, len(shape), flags, _DTYPES[dtype].itemsize
        for i in range(t.rank):
            t.shape[i] = shape[i]
            t.strides[i] = strides[i] // t.itemsize
        if group < 0:
            return self.place_view(space, t, offset, offset + nbytes, obj, first)
        return self.place(space, group, offset, offset + nbytes, first)

    # ---------------------------------------- tensors that NumPy has no array for

    cdef int save_kind(self, object obj) except -1:
        """As torch reduces them."""
        if not any([type(part) is _Leaf for part in obj.parts().values()]):  # leaves were checked when they were read
            obj.check()
        if obj.parameter:
            bare = _replace(obj, parameter=False, requires_grad=False)
            return self.save_reduce((self.g_parameter, (bare, obj.requires_grad, OrderedDict())), obj)
        if type(obj) is _QuantizedTensor:
            return self.save_quantized(obj)
        return self.save_reduce(_reduction(obj), obj)

    cdef int save_quantized(self, object obj) except -1:
        """(storage, offset, size, stride, quantizer, requires_grad, hooks)."""
        cdef Tensor t
        cdef int64_t first
        cdef int32_t piece
        group, storage = _QUANTIZED[obj.dtype]
        if self.leaf is not None and type(obj.values) is _Leaf:
            piece = self.place_leaf(obj.values, &t, group, &first)
        else:
            piece = self.place_array(obj.values, &t, group, &first)
        if _QUANTIZED_TYPES[obj.dtype][1] < 8:
            _flat(obj.shape, &t)
            if first:
                raise UnsupportedError(f"a {obj.dtype} tensor that shares its bytes with another can't be written")
        self.global_of(_torch_global("torch._utils", "_rebuild_qtensor"))
        self.op(c"(")
        self.pid(piece, _torch_global("torch", storage), "cpu", self.pieces[piece].nbytes // t.itemsize)
        self.any_int(first)
        self.ints(t.shape, t.rank)
        self.ints(t.strides, t.rank)
        scale, zero_point = (list(n) if type(n) is tuple else n for n in (obj.scale, obj.zero_point))
        ends = (scale, zero_point) if obj.axis is None else (scale, zero_point, obj.axis)
        self.save((TorchTag(f"torch.{obj.scheme}"), *ends))
        self.op(<char> 0x88 if obj.requires_grad else <char> 0x89)
        self.hooks()
        self.op(c"t")
        self.put_next()
        self.op(c"R")
        return self.memoize(obj)

    cdef int save_tag(self, str name) except -1:
        """A constant or class of torch: layouts by a call, all others as a global."""
        module, _, short = name.rpartition(".")
        found = _torch_global(module, short)
        if name not in _LAYOUTS:
            if type(found).__name__ == "memory_format":  # torch can't pickle these
                found = _named.setdefault((module, short), _Named(module, short))
            return self.global_of(found)
        if type(found) is not _Named:
            return self.global_of(found)
        return 0 if self.recall(found) else self.save_reduce(
            (_torch_global("torch.serialization", "_get_layout"), (name,)), found)

    cdef bint save_torch(self, object obj, type kind) except -1:
        """torch's tensors and storages; False for anything else."""
        cdef Tensor t
        cdef bint plain = kind is self.torch_tensor or kind is self.torch_parameter
        if plain or isinstance(obj, self.torch_tensor):
            if plain and not obj.__dict__:
                of_torch(obj, &t)
                if t.dtype >= 0 and not t.flags & (CONJ | NEG):
                    self.save_plain(obj, &t, kind is self.torch_parameter)
                    return True
                if t.dtype < 0 and not obj.is_quantized and str(obj.dtype).partition(".")[2] not in _BY_NAME:
                    raise UnsupportedError(f"torch files have no storage for {obj.dtype}")
            self.save_by_reduction(obj, kind)
            return True
        if kind is self.torch_storage:
            self.save_storage(obj, obj.nbytes(), self.g_untyped)
            return True
        if isinstance(obj, self.torch_typed_storage):
            self.save_storage(obj._untyped_storage, obj._size(), getattr(self.torch, obj._pickle_storage_type()))
            return True
        return False

    cdef int save_plain(self, object obj, Tensor *t, bint parameter) except -1:
        """A tensor that is one strided view of memory, without Python attributes."""
        cdef int64_t first
        cdef int32_t piece
        storage = obj.untyped_storage()
        if self.compact and self.is_whole(storage, t):
            piece = self.whole_storage(storage, t.dtype)
            first = obj.storage_offset()
        elif self.compact:
            self.keep.append(storage)
            if <int64_t> obj.storage_offset() * t.itemsize + t.reach > <int64_t> storage.nbytes():
                raise UnsupportedError("a torch tensor is larger than its storage, which was resized; nothing to save")
            self.whole[self.storage_key(storage, t.dtype)] = storage.nbytes()
            piece = self.place_view(-1, t, t.address, t.address + t.reach, None, &first)
            self.spans[self.n_spans - 1].held = True
        else:
            piece = self.whole_storage(storage, t.dtype)
            first = obj.storage_offset()
        if parameter:
            self.parameter(t, piece, first)
        else:
            self.tensor(t, piece, first)
        return self.memoize(obj)

    cdef bint is_whole(self, object storage, const Tensor *t) except -1:
        """Compact: whether a storage is written whole, since something that torch reduces itself refers to it.

        The first run found that out; the second one then counts the span that it does not place.
        """
        key = self.storage_key(storage, t.dtype)
        if self.grouped is None or key not in self.grouped.by_storage:
            return False
        if key not in self.whole:
            self.whole[key] = storage.nbytes()
            self.placed += storage.nbytes()
        self.span(-1, t.dtype, t.address, t.address + t.reach)
        self.n_spans += 1
        return True

    cdef tuple storage_key(self, object storage, object kind):
        """What stands for a torch storage as of one class; as in torch, an empty one is of every class."""
        by_bytes = kind == _BYTE or kind == "UntypedStorage" or type(kind) is int and _STORAGE_OF[kind] is None
        return storage._cdata, (_BY_BYTES if by_bytes else kind) if storage.nbytes() else None

    cdef int32_t whole_storage(self, object storage, object kind) except -1:
        """One piece per torch storage and class, in order of first appearance; a device's bytes are fetched."""
        count = storage.nbytes()
        key = self.storage_key(storage, kind)
        if self.exact and count and self.classes.setdefault(storage.data_ptr(), key[1]) != key[1]:
            raise UnsupportedError("bytes that are saved as two types")
        piece = self.by_storage.get(key)
        if piece is None:
            if storage.device.type == "meta":
                raise UnsupportedError("a storage on the meta device has no bytes to save")
            if self.exact and storage.device.type != "cpu":
                raise UnsupportedError("a storage on another device")
            if storage.device.type in ("cpu", "meta"):
                here = storage
            else:
                here = storage.cpu() if self.fetch is None else self.fetch(storage)
            self.keep.append((storage, here))
            piece = self.new_piece(-1, <int64_t> <uintptr_t> (<object> here.data_ptr()), count)
            self.by_storage[key] = piece
        return piece

    cdef int save_storage(self, object storage, int64_t numel, object cls) except -1:
        """A bare storage, on its own or out of a reduction."""
        location = self.torch.serialization.location_tag(storage)
        return self.pid(self.whole_storage(storage, _class_code(cls)), cls, location, numel)


def _reduction(obj):
    """The call that rebuilds a tensor that NumPy has no array for, but for quantized ones."""
    kind = type(obj)
    if kind is _SparseTensor:
        parts = (obj.indices, obj.values) if obj.layout == "coo" else (obj.compressed, obj.indices, obj.values)
        last = () if obj.layout != "coo" or obj.is_coalesced is None else (obj.is_coalesced,)
        data = (*parts, Size(obj.shape), *last)
        return _torch_global("torch._utils", "_rebuild_sparse_tensor"), (TorchTag(f"torch.sparse_{obj.layout}"), data)
    if kind is _MetaTensor:
        dtype = _torch_global("torch", obj.dtype)
        return (_torch_global("torch._utils", "_rebuild_meta_tensor_no_storage"),
                (dtype, obj.shape, obj.strides, obj.requires_grad))
    if kind is _NestedTensor:
        offsets = np.array(obj.offsets, np.int64) if type(obj.offsets) is tuple else obj.offsets
        return (_torch_global("torch._utils", "_rebuild_nested_tensor"),
                (obj.buffer, obj.sizes, obj.strides, offsets))
    if kind is _JaggedTensor:
        module = "torch.nested._internal.nested_tensor"
        words = {"values": obj.values, "offsets": obj.offsets, "lengths": obj.lengths, "_ragged_idx": obj.ragged_idx,
                 "_metadata_cache": {}, "requires_grad": obj.requires_grad}
        return (_torch_global("torch._tensor", "_rebuild_from_type_v2"),
                (_torch_global(module, "_rebuild_njt"), _torch_global(module, "NestedTensor"), (words,), None))
    raise UnsupportedError(f"{obj!r} can't be written: torch makes it by running its class, with the processes it is "
                           "spread over; save its parts instead")


cdef int _flat(tuple shape, Tensor *t) except -1:
    """Give a tensor a shape, with strides in C order."""
    cdef int i
    if len(shape) > MAX_RANK:
        raise UnsupportedError(f"a tensor of {len(shape)} dimensions; torch has at most {MAX_RANK}")
    t.rank = <int> len(shape)
    for i in range(t.rank):
        t.shape[i] = shape[i]
    _c_order(t)
    return 0


cdef void _c_order(Tensor *t) noexcept:
    """Give a tensor of a shape the strides of C order."""
    cdef int i
    cdef int64_t step = 1
    for i in range(t.rank - 1, -1, -1):
        t.strides[i] = step
        step *= max(t.shape[i], 1)


cdef tuple _layout(const Tensor *t):
    """(shape, strides in bytes, itemsize)."""
    cdef int i
    shape = tuple([t.shape[i] for i in range(t.rank)])
    return shape, tuple([t.strides[i] * t.itemsize for i in range(t.rank)]), t.itemsize


def _elements(space, lo, shape, strides, itemsize):
    """An array of a view's place in memory; for another space, of one like it, which is not to be looked at."""
    memory = _core.memory(lo if space < 0 else lo + itemsize, _reach(shape, strides, itemsize), None)
    return np.ndarray(shape, f"V{itemsize}", memory, 0, strides)


cdef object _class_code(object cls):
    """The dtype code a plain tensor of a storage class goes by, so that both find the same piece."""
    name = getattr(cls, "__name__", "")
    for code, known in enumerate(_STORAGE_OF):
        if known == name:
            return code
    return name


cdef bytes _long_bytes(object value):
    """Two's complement, little-endian, no byte more than needed."""
    count = (value.bit_length() >> 3) + 1
    data = value.to_bytes(count, "little", signed=True)
    if value < 0 and count > 1 and data[count - 1] == 0xFF and data[count - 2] & 0x80:
        data = data[:count - 1]
    return data


cdef int _by_place(const void *a, const void *b) noexcept nogil:
    """Order spans by what must be equal in a group, then by where they start."""
    cdef const Span *x = (<const Span **> a)[0]
    cdef const Span *y = (<const Span **> b)[0]
    cdef int64_t item = _ITEMSIZE[x.dtype]
    if x.space != y.space:
        return -1 if x.space < y.space else 1
    if x.dtype != y.dtype:
        return -1 if x.dtype < y.dtype else 1
    if x.lo % item != y.lo % item:
        return -1 if x.lo % item < y.lo % item else 1
    if x.lo != y.lo:
        return -1 if x.lo < y.lo else 1
    return -1 if x < y else 1


cdef bint _group(Span *spans, Py_ssize_t n) except -1:
    """Put spans that share bytes into groups; whether there are any.

    A group is a run of overlapping spans of one type whose distances are whole
    elements; it reaches from the lowest to the highest byte. Empty spans stay
    alone.
    """
    cdef Span **order = <Span **> PyMem_Calloc(n + 1, sizeof(Span *))
    cdef Span *s
    cdef Span *first = NULL
    cdef Py_ssize_t i, j = 0
    cdef int32_t group = -1, open_group = -1
    cdef int64_t hi = 0
    cdef bint shared = False
    if order == NULL:
        raise MemoryError()
    for i in range(n):
        order[i] = &spans[i]
    qsort(order, n, sizeof(Span *), _by_place)
    for i in range(n):
        s = order[i]
        if s.hi == s.lo or s.alone:  # shares nothing, and must not come between two that do
            group += 1
            s.group, s.group_lo, s.group_hi = group, s.lo, s.hi
            continue
        if first != NULL and s.lo < hi and s.hi > s.lo and s.space == first.space and s.dtype == first.dtype \
                and (s.lo - first.lo) % _ITEMSIZE[s.dtype] == 0:
            shared = True
        else:
            _close_group(order, j, i, hi)
            j, first, hi = i, s, s.lo
            group += 1
            open_group = group
        hi = max(hi, s.hi)
        s.group = open_group
    _close_group(order, j, n, hi)
    PyMem_Free(order)
    return shared


cdef void _close_group(Span **order, Py_ssize_t first, Py_ssize_t last, int64_t hi) noexcept:
    cdef Py_ssize_t i
    for i in range(first, last):
        if order[i].hi > order[i].lo and not order[i].alone:
            order[i].group_lo = order[first].lo
            order[i].group_hi = hi


cdef int64_t _uncompacted(_Pickler pickler) except -1:
    """Bytes of the storages that would be written if not for `compact`: torch's whole, others from end to end."""
    cdef Span *s
    cdef Py_ssize_t i
    held = {pickler.spans[i].group for i in range(pickler.n_spans) if pickler.spans[i].held}
    groups = {}
    for i in range(pickler.n_spans):
        s = &pickler.spans[i]
        if s.group not in held:
            groups[s.group] = s.group_hi - s.group_lo
    return sum(pickler.whole.values()) + sum(groups.values())


cdef bint _find_alone(_Pickler pickler) except -1:
    """Mark the views with holes that are to be written by themselves: they share no byte with another; whether any are.

    What the others reach stays from end to end, which must be less for it.
    """
    cdef Py_ssize_t i
    cdef Span *s
    groups = {pickler.spans[n].group: {} for n in pickler.holed}
    for i in range(pickler.n_spans):
        s = &pickler.spans[i]
        if s.group in groups and s.hi > s.lo:
            view = pickler.holed.get(i, (s.space, s.lo, (s.hi - s.lo,), (1,), 1))
            groups[s.group].setdefault(view, []).append(i)
    count = 0
    for views in groups.values():
        if len(views) > ALONE_MAX:
            continue
        places = {view: _elements(*view) for view in views}
        alone = [view for view, numbers in views.items() if numbers[0] in pickler.holed and not any(
                 [_share(places[view], other) for key, other in places.items() if key != view])]
        rest = _spanned([view for view in views if view not in alone])
        if rest + sum([view[4] * prod(view[2]) for view in alone]) >= _spanned(views):
            continue
        for view in alone:
            count += 1
            for n in views[view]:
                pickler.spans[n].alone = count
    return count > 0


def _spanned(views):
    """Bytes from end to end of each run of overlapping views."""
    total, end = 0, 0
    for lo, hi in sorted([(view[1], view[1] + _reach(*view[2:])) for view in views]):
        total += max(hi - max(lo, end), 0)
        end = max(end, hi)
    return total


def _reach(shape, strides, itemsize):
    """Bytes from the first element of a view to behind its last one."""
    return itemsize + sum([(n - 1) * stride for n, stride in zip(shape, strides)])


def _share(a, b):
    """Whether two views have a byte in common; where that is too hard to tell, they have."""
    try:
        return np.shares_memory(a, b, SHARE_WORK)
    except np.exceptions.TooHardError:
        return True


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
