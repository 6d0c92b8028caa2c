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
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Realloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy

cimport numpy as cnp

import sys
from _compat_pickle import REVERSE_IMPORT_MAPPING, REVERSE_NAME_MAPPING
from _codecs import encode as _codecs_encode
from collections import OrderedDict
from copyreg import dispatch_table as _dispatch_table
from pickle import PicklingError, whichmodule
from types import FunctionType as _FunctionType

from tensorio import _arrays
from tensorio.dtypes import BY_NAME, DTYPES
from tensorio.errors import TensorMismatchError, UnsupportedError
from tensorio.formats._items import as_numpy, is_foreign_tensor
from tensorio.values import Device, Opaque, Size, TorchDType

cnp.import_array()

cdef extern from "Python.h":
    int Py_EnterRecursiveCall(const char *where) except -1
    void Py_LeaveRecursiveCall()
    const char *PyUnicode_AsUTF8AndSize(object o, Py_ssize_t *size) except NULL
    int PyFloat_Pack8(double x, char *p, int le) except -1
    long long PyLong_AsLongLongAndOverflow(object o, int *overflow) except? -1

cdef enum:
    BATCH = 1000  # items per APPENDS and SETITEMS, as CPython's _pickle.c
    MAX_RANK = 64

# Storage class of each element type; others go by UntypedStorage and a dtype (torch's rebuild_v3).
_STORAGE_NAMES = {
    "float64": "DoubleStorage", "float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage",
    "int64": "LongStorage", "int32": "IntStorage", "int16": "ShortStorage", "int8": "CharStorage",
    "uint8": "ByteStorage", "bool": "BoolStorage", "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
}
cdef list _STORAGE_OF = [_STORAGE_NAMES.get(d.name) for d in DTYPES]
cdef list _SAVABLE = [not d.packed for d in DTYPES]
cdef list _NAME_OF = [d.name for d in DTYPES]
cdef int[64] _itemsize
for _d in DTYPES:
    _itemsize[_d.code] = _d.itemsize


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


@cython.final
cdef class Piece:
    """One storage of the file to be.

    Attributes
    ----------
    key : str
        Its name below ``data/``.
    nbytes : int
    source : object
        (address, nbytes) of memory that `Pickler.keep` holds, or what the
        caller's `leaf` gave.
    """
    cdef readonly str key
    cdef readonly object source
    cdef readonly int64_t nbytes


@cython.final
cdef class Span:
    """The bytes that one tensor reaches, and the kind of storage they need."""
    cdef object space     # what addresses count in: None for memory, else the index of a storage
    cdef int dtype
    cdef int64_t lo, hi   # bytes
    cdef Piece piece
    cdef int64_t base     # lo of the group it is in


cdef struct Tensor:
    int dtype
    int rank
    int flags
    int64_t first         # elements from the start of the storage
    int64_t *dims         # shape, then strides in elements


cdef class Pickler:
    """One run over one object.

    Parameters
    ----------
    groups : list of Span or None
        From an earlier run over the same object that found arrays sharing
        memory: the storage each array in turn belongs to.
    leaf : callable or None
        ``leaf(obj)`` answers (dtype code, space, offset, nbytes, shape, strides
        in bytes, flags) for tensors that stand for bytes elsewhere.
    compact : bool
        Store the part of torch's storages that tensors reach, not all of them.
    """
    cdef char *out
    cdef Py_ssize_t n, room
    cdef PyObject **slots   # open addressing: object, index
    cdef uint32_t *numbers
    cdef Py_ssize_t mask, used
    cdef uint32_t next_index
    cdef readonly list keep
    cdef readonly list pieces
    cdef readonly list spans
    cdef list groups
    cdef object leaf
    cdef bint compact
    cdef dict by_storage    # torch storages: (identity, class) -> Piece
    cdef object torch, torch_tensor, torch_parameter
    cdef object g_v2, g_v3, g_parameter, g_untyped
    cdef list g_storage

    def __cinit__(self, list groups=None, leaf=None, bint compact=False):
        self.keep, self.pieces, self.spans = [], [], []
        self.groups = groups
        self.leaf = leaf
        self.compact = compact
        self.by_storage = {}
        self.torch = sys.modules.get("torch")
        self.torch_tensor = getattr(self.torch, "Tensor", None)
        self.torch_parameter = getattr(getattr(self.torch, "nn", None), "Parameter", None)
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

    def dump(self, obj):
        """Return the pickle of `obj`."""
        self.write(b"\x80\x02", 2)
        self.save(obj)
        self.op(c".")
        return PyBytes_FromStringAndSize(self.out, self.n)

    # ---------------------------------------------------------------- output

    cdef inline char *reserve(self, Py_ssize_t count) except NULL:
        cdef char *p
        if self.n + count > self.room:
            self.room = 2 * self.room + count + 4096
            p = <char *> PyMem_Realloc(self.out, self.room)
            if p == NULL:
                raise MemoryError()
            self.out = p
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
        Py_EnterRecursiveCall(" while saving an object")
        try:
            return self.save_more(obj, kind)
        finally:
            Py_LeaveRecursiveCall()

    cdef int save_more(self, object obj, type kind) except -1:
        if kind is dict:
            return self.save_dict(<dict> obj)
        if kind is cnp.ndarray and self.save_array(<cnp.ndarray> obj):
            return 0
        if kind is tuple:
            return self.save_tuple(<tuple> obj)
        if kind is list:
            return self.save_list(<list> obj)
        if self.torch is not None and self.save_torch(obj):
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
        if self.leaf is not None and kind.__name__ == "Leaf":
            return self.save_leaf(obj)
        if kind is _Named:
            return self.save_global(obj, obj.module, obj.name)
        if kind is TorchDType:
            return self.save_global(obj, "torch", str(obj))
        if kind is Size:
            return self.save_reduce((_torch_global("torch", "Size"), (tuple(obj),)), obj)
        if kind is Device:
            return self.save_reduce((_torch_global("torch", "device"), (obj.type,) if obj.index is None else tuple(obj)),
                                    obj)
        if kind is Opaque:
            raise UnsupportedError(f"{obj!r} stands for an object of a class that was not allowed when the file was "
                                   "opened, and can't be written")
        if is_foreign_tensor(obj):
            array = as_numpy(obj)
            self.keep.append(array)
            if self.save_array(array, obj):
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
        cdef char *p
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
        return PyFloat_Pack8(value, p + 1, 0)

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
                for i in range(count):
                    self.op(c"0")
            self.recall(obj)
            return 0
        self.op(c"t" if count > 3 else <char> (0x84 + count))
        return self.memoize(obj)

    cdef int save_list(self, list obj) except -1:
        cdef Py_ssize_t i = 0, count = len(obj)
        self.op(c"]")
        self.memoize(obj)
        if count == 1:
            self.save(obj[0])
            return self.op(c"a")
        while i < len(obj):
            self.op(c"(")
            for i in range(i, min(i + BATCH, len(obj))):
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
            __import__(module)
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
        module, name = REVERSE_NAME_MAPPING.get((module, name), (module, name))
        module = REVERSE_IMPORT_MAPPING.get(module, module)
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
        if not callable(callee) and type(callee) is not _Named or type(args) is not tuple:
            raise PicklingError(f"expected a reduction of {type(obj).__name__} to begin with a callable and a tuple")
        name = getattr(callee, "__name__", "")
        if name == "__newobj__":
            self.save(args[0])
            self.save(args[1:])
            self.op(<char> 0x81)
        elif name == "__newobj_ex__":
            import functools
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

    cdef Piece new_piece(self, object source, int64_t nbytes):
        cdef Piece piece = Piece()
        piece.key = str(len(self.pieces))
        piece.source = source
        piece.nbytes = nbytes
        self.pieces.append(piece)
        return piece

    cdef Piece place(self, object space, int dtype, int64_t lo, int64_t hi, int64_t *base):
        """The storage of a tensor that reaches [lo, hi) of `space`, and where that starts."""
        cdef Span span = Span(), group
        span.space, span.dtype, span.lo, span.hi = space, dtype, lo, hi
        span.base = lo
        if self.groups is None:
            span.piece = self.new_piece((space, lo, hi - lo), hi - lo)
        else:
            group = <Span> self.groups[len(self.spans)]
            if group.piece is None:
                group.piece = self.new_piece((space, group.lo, group.hi - group.lo), group.hi - group.lo)
            span.piece = group.piece
            span.base = group.lo
        self.spans.append(span)
        base[0] = span.base
        return span.piece

    cdef int pid(self, Piece piece, object cls, str location, int64_t numel) except -1:
        """("storage", class, key, location, numel), as a persistent id."""
        self.op(c"(")
        self.word("storage")
        self.global_of(cls)
        self.word(piece.key)
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

    cdef int tensor(self, Tensor *t, Piece piece, str location) except -1:
        """The call that rebuilds a tensor, without its own memo slot."""
        cdef object cls = self.g_storage[t.dtype]
        cdef bint typed = cls is not None
        self.global_of(self.g_v2 if typed else self.g_v3)
        self.op(c"(")
        if typed:
            self.pid(piece, cls, location, piece.nbytes // _itemsize[t.dtype])
        else:
            self.pid(piece, self.g_untyped, location, piece.nbytes)
        self.any_int(t.first)
        self.ints(t.dims, t.rank)
        self.ints(t.dims + t.rank, t.rank)
        self.op(<char> 0x88 if t.flags & 1 else <char> 0x89)
        self.hooks()
        if not typed:
            self.global_of(self.dtype_global(t.dtype))
        if t.flags & 12:
            self.save({name: True for name, bit in (("conj", 4), ("neg", 8)) if t.flags & bit})
        self.op(c"t")
        self.put_next()
        return self.op(c"R")

    cdef object dtype_global(self, int dtype):
        return _torch_global("torch", _NAME_OF[dtype])

    cdef int parameter(self, Tensor *t, Piece piece, str location) except -1:
        """A tensor wrapped as a Parameter."""
        cdef bint grad = t.flags & 1
        t.flags &= ~1
        self.global_of(self.g_parameter)
        self.tensor(t, piece, location)
        self.put_next()
        self.op(<char> 0x88 if grad else <char> 0x89)
        self.hooks()
        self.op(<char> 0x87)
        self.put_next()
        return self.op(c"R")

    cdef bint save_array(self, cnp.ndarray a, object owner=None) except -1:
        """A NumPy array as the tensor that torch.from_numpy makes of it; False for types that are no tensor's."""
        cdef int dtype = _arrays.dtype_code(a)
        cdef Tensor t
        cdef int64_t[2 * MAX_RANK] dims
        cdef int64_t lo, hi, base, item
        cdef Piece piece
        if dtype < 0:
            if a.dtype.isnative or _arrays.dtype_code(native := a.astype(a.dtype.newbyteorder("="))) < 0:
                return False
            return self.save_array(native, a)
        if not _SAVABLE[dtype]:
            return False
        item = _itemsize[dtype]
        t.dtype, t.rank, t.flags = dtype, a.ndim, 0
        t.dims = dims
        lo = <int64_t> <uintptr_t> cnp.PyArray_DATA(a)
        hi = lo + _reach(a, item, dims)
        if hi < lo:
            return self.save_array(cnp.PyArray_GETCONTIGUOUS(_fresh(a)), a if owner is None else owner)
        self.keep.append(a)
        piece = self.place(None, dtype, lo, hi, &base)
        t.first = (lo - base) // item
        self.tensor(&t, piece, "cpu")
        self.memoize(a if owner is None else owner)
        return True

    cdef int save_leaf(self, object obj) except -1:
        """A tensor whose bytes are elsewhere."""
        cdef Tensor t
        cdef int64_t[2 * MAX_RANK] dims
        cdef int64_t base, item
        cdef int i
        cdef Piece piece
        dtype, space, offset, nbytes, shape, strides, flags = self.leaf(obj)
        if not _SAVABLE[dtype]:
            raise UnsupportedError(f"torch files have no dtype for {_NAME_OF[dtype]}")
        item = _itemsize[dtype]
        t.dtype, t.rank, t.flags, t.dims = dtype, len(shape), flags, dims
        for i in range(t.rank):
            dims[i] = shape[i]
            dims[t.rank + i] = strides[i] // item
        piece = self.place(space, dtype, offset, offset + nbytes, &base)
        t.first = (offset - base) // item
        if flags & 2:
            self.parameter(&t, piece, "cpu")
        else:
            self.tensor(&t, piece, "cpu")
        return self.memoize(obj)

    cdef bint save_torch(self, object obj) except -1:
        """torch's tensors and storages; False for anything else."""
        cdef object torch = self.torch
        if isinstance(obj, self.torch_tensor):
            kind = type(obj)
            if (kind is self.torch_tensor or kind is self.torch_parameter) and self.is_plain(obj):
                self.save_plain(obj, kind is self.torch_parameter)
            else:
                self.save_by_reduction(obj, kind)
            return True
        if isinstance(obj, torch.storage.TypedStorage):
            self.save_storage(obj._untyped_storage, obj._size(), getattr(torch, obj._pickle_storage_type()))
            return True
        if torch.is_storage(obj):
            self.save_storage(obj, obj.nbytes(), self.g_untyped)
            return True
        return False

    cdef bint is_plain(self, object obj) except -1:
        """Whether a tensor is one strided view of memory without Python attributes."""
        return obj.layout is self.torch.strided and obj.device.type == "cpu" and not obj.__dict__ \
            and not obj.is_quantized and not obj.is_conj() and not obj.is_neg() and not obj.is_nested

    cdef int save_plain(self, object obj, bint parameter) except -1:
        cdef Tensor t
        cdef int64_t[2 * MAX_RANK] dims
        cdef int i
        cdef Piece piece
        name = str(obj.dtype)[6:]  # behind "torch."
        row = BY_NAME.get(name)
        if row is None:
            return self.save_by_reduction(obj, type(obj))
        t.dtype = row.code
        shape, strides = obj.shape, obj.stride()
        t.rank, t.dims = len(shape), dims
        if t.rank > MAX_RANK:
            raise UnsupportedError(f"tensor of {t.rank} dimensions; at most {MAX_RANK} are written")
        for i in range(t.rank):
            dims[i] = shape[i]
            dims[t.rank + i] = strides[i]
        t.flags = 1 if obj.requires_grad else 0
        t.first = obj.storage_offset()
        piece = self.torch_piece(obj, &t)
        if parameter:
            self.parameter(&t, piece, "cpu")
        else:
            self.tensor(&t, piece, "cpu")
        return self.memoize(obj)

    cdef Piece torch_piece(self, object obj, Tensor *t):
        """The storage of a plain tensor: all of torch's, or with `compact` the part that is reached."""
        cdef int64_t lo, hi, base, item = _itemsize[t.dtype]
        cdef int i
        cdef Piece piece
        storage = obj.untyped_storage()
        if not self.compact:
            return self.whole_storage(storage, t.dtype)
        lo = hi = <int64_t> <uintptr_t> (<object> storage.data_ptr()) + t.first * item
        if obj.numel():
            hi += item
            for i in range(t.rank):
                hi += (t.dims[i] - 1) * t.dims[t.rank + i] * item
        self.keep.append(storage)
        piece = self.place(None, t.dtype, lo, hi, &base)
        t.first = (lo - base) // item
        return piece

    cdef Piece whole_storage(self, object storage, object cls):
        """One piece per torch storage and class, in order of first appearance."""
        key = (storage._cdata, cls)
        piece = self.by_storage.get(key)
        if piece is None:
            self.keep.append(storage)
            nbytes = storage.nbytes()
            piece = self.by_storage[key] = self.new_piece((None, storage.data_ptr(), nbytes), nbytes)
        return <Piece> piece

    cdef int save_storage(self, object storage, int64_t numel, object cls) except -1:
        """A bare storage, on its own or out of a reduction; a device's bytes are fetched."""
        location = self.torch.serialization.location_tag(storage)
        key = (storage._cdata, _class_code(cls))
        piece = self.by_storage.get(key)
        if piece is None:
            here = storage if storage.device.type in ("cpu", "meta") else storage.cpu()
            self.keep.extend((storage, here))
            nbytes = storage.nbytes()
            piece = self.by_storage[key] = self.new_piece((None, here.data_ptr(), nbytes), nbytes)
        return self.pid(<Piece> piece, cls, location, numel)


cdef object _class_code(object cls):
    """The dtype code a plain tensor of a storage class goes by, so that both find the same piece."""
    name = getattr(cls, "__name__", "")
    for code, known in enumerate(_STORAGE_OF):
        if known == name:
            return code
    return name


cdef cnp.ndarray _fresh(cnp.ndarray a):
    return a.copy()


cdef int64_t _reach(cnp.ndarray a, int64_t item, int64_t *dims) except? -2:
    """Bytes from the first to behind the last element, and shape and strides; -1 if strides don't suit torch."""
    cdef int i
    cdef int64_t reach = item
    cdef bint odd = a.ndim > MAX_RANK
    if odd:
        return -1
    for i in range(a.ndim):
        dims[i] = a.shape[i]
        if a.shape[i] > 1 and (a.strides[i] < 0 or a.strides[i] % item):
            odd = True
        dims[a.ndim + i] = a.strides[i] // item if a.strides[i] > 0 else 0
        reach += (a.shape[i] - 1) * a.strides[i]
    if a.size == 0:
        return 0
    return -1 if odd else reach


cdef bytes _long_bytes(object value):
    """Two's complement, little-endian, no byte more than needed."""
    count = (value.bit_length() >> 3) + 1
    data = value.to_bytes(count, "little", signed=True)
    if value < 0 and count > 1 and data[count - 1] == 0xFF and data[count - 2] & 0x80:
        data = data[:count - 1]
    return data


cdef list _grouped(list spans):
    """The group of each span, if any two share bytes in one way; else None.

    A group is a run of overlapping spans of one type whose distances are whole
    elements; it reaches from the lowest to the highest byte.
    """
    cdef Span s, group = None
    cdef bint shared = False
    cdef list order = sorted(
        [i for i in range(len(spans)) if (<Span> spans[i]).hi > (<Span> spans[i]).lo], key=lambda i: _span_key(spans[i]))
    cdef list out = [None] * len(spans)
    last = None
    for i in order:
        s = <Span> spans[i]
        kind = _span_key(s)[:3]
        if kind == last and s.lo < group.hi:
            shared = True
            group.hi = max(group.hi, s.hi)
        else:
            group = Span()
            group.space, group.dtype, group.lo, group.hi = s.space, s.dtype, s.lo, s.hi
            last = kind
        out[i] = group
    if not shared:
        return None
    for i in range(len(spans)):
        if out[i] is None:  # empty: a storage of its own
            s = <Span> spans[i]
            group = Span()
            group.space, group.dtype, group.lo, group.hi = s.space, s.dtype, s.lo, s.hi
            out[i] = group
    return out


cdef tuple _span_key(Span s):
    return (-1 if s.space is None else s.space), s.dtype, s.lo % _itemsize[s.dtype], s.lo


def dumps(obj, leaf=None, bint compact=False):
    """Return the pickle of a torch file and the storages that go with it.

    Parameters
    ----------
    obj : object
    leaf, compact
        See `Pickler`.

    Returns
    -------
    data : bytes
    pieces : list of Piece
        In the order of their keys.
    keep : list
        Objects whose memory the pieces point into.

    Notes
    -----
    Arrays that share memory are found after a first run; the second then
    knows their storages.
    """
    cdef Pickler pickler = Pickler(None, leaf, compact)
    data = pickler.dump(obj)
    groups = _grouped(pickler.spans)
    if groups is not None:
        first = pickler
        pickler = Pickler(groups, leaf, compact)
        data = pickler.dump(obj)
        pickler.keep.append(first.keep)
    return data, pickler.pieces, pickler.keep
