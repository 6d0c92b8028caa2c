# SPDX-License-Identifier: Apache-2.0
"""The pickle machine: reads a pickle as data.

A name in the pickle selects one of the functions below by exact (module,
name) from the frozen table of `tensorio.allowlist`; nothing is imported or
called by the file's word. Whatever else it names becomes an inert `Opaque`,
so that all refused names can be listed at once.

Every opcode checks what it pops. Lengths are compared with the bytes left
before anything is allocated; the memo may not outgrow the pickle; keys that
are expensive to hash are refused. A tensor is proven inside its record before
it exists.

Opcodes and their arguments: CPython's ``Lib/pickletools.py``.
"""
cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.dict cimport PyDict_SetItem, PyDict_Size
from cpython.list cimport PyList_Append
from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.ref cimport Py_DECREF, Py_INCREF, Py_XDECREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memchr, memcpy, memset

from array import array as _array
from collections import Counter, OrderedDict

from tensorio._csrc cimport *

from tensorio._calls import CALLS as _CALLS
from tensorio.allowlist import ALLOWED as _ALLOWED
from tensorio.dtypes import BY_NAME as _BY_NAME
from tensorio.errors import (
    FormatError, HeaderError, LimitError, TruncatedError, UnsafePickleError, UnsupportedError, escaped,
)
from tensorio.pickles import Loaded as _Loaded, Rules as _Rules
from tensorio.values import Device, Opaque, Size, TorchDType

cdef type _Opaque = Opaque
cdef type _Size = Size
cdef type _TorchDType = TorchDType
cdef type _Device = Device
cdef type _Counter = Counter
cdef tuple _SIZED = (str, bytes, list, tuple, dict)  # what the functions of tensorio._calls copy

cdef extern from "Python.h":
    object PyUnicode_DecodeUTF8(const char *s, Py_ssize_t size, const char *errors)
    object PyLong_FromLongLong(long long v)
    void PyTuple_SET_ITEM(PyObject *t, Py_ssize_t i, PyObject *o)
    PyObject *PyTuple_New_raw "PyTuple_New" (Py_ssize_t n)
    object PyODict_New()
    int PyODict_CheckExact(object o)
    int PyODict_SetItem(object d, object key, object value) except -1
    int PyObject_SetItem(object o, object key, object value) except -1
    int PyUnicode_CheckExact(object o)
    int PyLong_CheckExact(object o)
    int PyTuple_CheckExact(object o)
    int PyDict_CheckExact(object o)
    int PyList_CheckExact(object o)
    const char *PyUnicode_AsUTF8AndSize(object o, Py_ssize_t *size) except NULL

cdef enum:
    MAX_RANK = 64          # dimensions, NumPy's NPY_MAXDIMS
    MAX_LONG = 255         # bytes of one integer: conversion to text is quadratic
    MAX_KEY_DEPTH = 8      # tuples in tuples as a key: CPython hashes them recursively, without a cache
    MAX_KEY_NODES = 64
    MAX_TUPLE_KEYS = 4096  # per pickle: their hash is not salted, so that they can be made to collide
    MAX_REFUSED = 1000     # refused names listed
    # What objects made by one opcode take, in bytes: measured with sys.getsizeof on CPython 3.11, rounded up.
    COST_OBJECT = 64
    COST_DICT = 96
    COST_ORDERED_DICT = 320
    COST_SET = 256
    COST_OPAQUE = 512
    COST_ITEM = 72         # of a dict or set, with the room they keep free
    COST_TENSOR = 320      # an array, or a leaf and its row
    # Promise P3 of docs/security.md: a pickle costs at most this much memory, plus 32 times its bytes.
    BUDGET_FIXED = 64 << 20
    BUDGET_PER_BYTE = 32

# |int| below this is its own hash; from here on, many ints share one (CPython's _PyHASH_MODULUS).
cdef long long _HASH_MODULUS = (1LL << 61) - 1

cdef enum Kind:
    K_OPAQUE = 0
    K_STORAGE
    K_UNTYPED
    K_DTYPE
    K_REBUILD
    K_REBUILD_V2
    K_REBUILD_V3
    K_REBUILD_PARAMETER
    K_ORDERED_DICT
    K_CALL  # one of tensorio._calls
    K_NP_RECONSTRUCT
    K_NP_SCALAR
    K_NP_NDARRAY
    K_NP_DTYPE

cdef dict _KINDS = {
    "storage": K_STORAGE, "untyped": K_UNTYPED, "dtype": K_DTYPE, "rebuild": K_REBUILD, "rebuild_v2": K_REBUILD_V2,
    "rebuild_v3": K_REBUILD_V3, "rebuild_parameter": K_REBUILD_PARAMETER, "np_reconstruct": K_NP_RECONSTRUCT,
    "np_scalar": K_NP_SCALAR, "np_ndarray": K_NP_NDARRAY, "np_dtype": K_NP_DTYPE, **dict.fromkeys(_CALLS, K_CALL),
    "ordered_dict": K_ORDERED_DICT,
}


@cython.final
cdef class _Global:
    """What a (module, name) in the pickle stands for."""
    cdef readonly str module, name, kind_name
    cdef int kind
    cdef int dtype
    cdef int itemsize
    cdef object value  # what it is in the tree, for dtypes

    def __repr__(self):
        return f"<global {escaped(self.module)}.{escaped(self.name)}>"


@cython.final
@cython.freelist(64)
cdef class _StorageRef:
    """One mention of a storage: the record it names, and as what."""
    cdef int64_t record
    cdef int64_t numel
    cdef _Global cls


@cython.final
@cython.freelist(64)
cdef class Leaf:
    """Stands for a tensor in a tree.

    Attributes
    ----------
    row : int
        Number of its row in the table.
    """
    cdef readonly Py_ssize_t row

    def __init__(self, Py_ssize_t row):
        self.row = row

    def __repr__(self):
        return f"<tensor {self.row}>"


class _Restart(Exception):
    """The pickle asks for an object that the fast path did not make."""


cdef dict _make_globals():
    table = {}
    for (module, name), entry in _ALLOWED.items():
        g = _Global()
        g.module, g.name, g.kind_name, g.kind = module, name, entry.kind, _KINDS[entry.kind]
        if entry.dtype:
            g.dtype, g.itemsize = _BY_NAME[entry.dtype].code, _BY_NAME[entry.dtype].itemsize
            g.value = TorchDType(entry.dtype)
        table[f"{module}\n{name}\n".encode()] = g
    return table


cdef dict _GLOBALS = _make_globals()

ctypedef object (*make_view_fn)(PyObject *lease, int64_t dtype, int64_t rank, const int64_t *shape,
                                const int64_t *strides, int64_t offset, int64_t nbytes)


cdef struct Seen:
    int64_t numel
    void *cls  # the storage class as which a record was mentioned first; borrowed from the table of globals


cdef class _Machine:
    """One run over one pickle.

    Parameters
    ----------
    pickle : buffer
        The pickle's bytes.
    numbers : array of int64
        Record of the storage key "0", "1", ...; -1 where there is none.
    keys : dict of str to int
        Record of every other storage key.
    extents : array of int64
        (storage, offset, nbytes) per record, in bytes.
    leases : list of Lease or None
        By storage index: tensors become arrays at once. None: tensors become
        `Leaf`, and rows are kept for a table.
    decode : callable
        ``decode(record, dtype)`` returns the lease of a record that is not raw
        in its file (storage -1).
    wanted : set of int or None
        Numbers of the tensors that become arrays; the others become `Leaf`.
    fast : bool
        Whether to take plain tensors by the fast path.
    """
    cdef const uint8_t *buf
    cdef Py_ssize_t n, pos, at
    cdef Py_buffer raw
    cdef bint held
    cdef dict keys
    cdef bint fast
    cdef object numbers_owner
    cdef const int64_t *numbers
    cdef Py_ssize_t n_numbers
    cdef object extents_owner
    cdef const int64_t *extents
    cdef list leases
    cdef object decode
    cdef set wanted
    cdef make_view_fn make_view
    cdef type ndarray
    cdef PyObject **stack
    cdef Py_ssize_t sp, room
    cdef Py_ssize_t *marks
    cdef Py_ssize_t mp, marks_room
    cdef Py_ssize_t floor  # stack height at the innermost mark
    cdef PyObject **memo
    cdef Py_ssize_t memo_room
    cdef Py_ssize_t memo_next
    cdef Py_ssize_t frame_end  # of the open FRAME; 0 if none
    cdef Seen *seen
    cdef tio_row *rows
    cdef Py_ssize_t n_rows, rows_room
    cdef int64_t *dims
    cdef Py_ssize_t n_dims, dims_room
    cdef int tuple_keys
    cdef Py_ssize_t bare_storages  # mentioned, less those that tensors were made of
    cdef int64_t budget  # bytes that may still be made
    cdef dict opaque
    cdef dict nested  # by id: (array of objects, how deep such arrays lie in it)
    cdef dict unfilled  # NumPy arrays and dtypes that may still be given a state, by id
    cdef readonly list refused

    def __cinit__(self, pickle, numbers, dict keys not None, extents, list leases=None, decode=None, set wanted=None,
                  bint fast=True):
        cdef Py_ssize_t n_records
        cdef const int64_t[::1] cells
        PyObject_GetBuffer(pickle, &self.raw, PyBUF_SIMPLE)
        self.held = True
        self.buf = <const uint8_t *> self.raw.buf
        self.n = self.raw.len
        self.keys = keys
        self.fast = fast
        self.numbers_owner = numbers
        self.n_numbers = len(numbers)
        if self.n_numbers:
            cells = numbers
            self.numbers = &cells[0]
        self.extents_owner = extents
        n_records = len(extents) // 3
        if n_records:
            cells = extents
            self.extents = &cells[0]
        self.leases = leases
        self.decode = decode
        self.wanted = wanted
        self.opaque = {}
        self.unfilled = {}
        self.nested = {}
        self.refused = []
        # A third of what is promised is left for what this does not count: the stack, the memo, fragmentation.
        self.budget = (BUDGET_FIXED + BUDGET_PER_BYTE * <int64_t> self.n) // 3 * 2
        if leases is not None:
            from tensorio import _arrays
            import numpy
            self.make_view = <make_view_fn> (<void **> PyCapsule_GetPointer(
                _arrays.make_view, "tensorio._arrays.make_view"))
            self.ndarray = numpy.ndarray
        self.seen = <Seen *> PyMem_Malloc((n_records + 1) * sizeof(Seen))
        if self.seen == NULL:
            raise MemoryError()
        memset(self.seen, 0, (n_records + 1) * sizeof(Seen))

    def __dealloc__(self):
        cdef Py_ssize_t i
        for i in range(self.sp):
            Py_DECREF(<object> self.stack[i])
        for i in range(self.memo_room):
            if not <size_t> self.memo[i] & 1:
                Py_XDECREF(self.memo[i])
        PyMem_Free(self.stack)
        PyMem_Free(self.marks)
        PyMem_Free(self.memo)
        PyMem_Free(self.seen)
        PyMem_Free(self.rows)
        PyMem_Free(self.dims)
        if self.held:
            PyBuffer_Release(&self.raw)

    # ------------------------------------------------------------ failures

    cdef int wrong(self, str what) except -1:
        """Structural damage: say which opcode, where, and which rule."""
        raise HeaderError(f"pickle opcode 0x{self.buf[self.at]:02x}: {what}", offset=self.at)

    cdef int short(self) except -1:
        raise TruncatedError(
            f"pickle opcode 0x{self.buf[self.at]:02x}: its argument runs past the end of the pickle of {self.n} bytes",
            offset=self.at)

    cdef int expected(self, str what, object found) except -1:
        return self.wrong(f"expected {what}, found {_kind_of(found)}")

    # ----------------------------------------------------------- the stack

    cdef int grow(self) except -1:
        cdef Py_ssize_t room = 2 * self.room if self.room else 256
        cdef PyObject **p = <PyObject **> PyMem_Realloc(self.stack, room * sizeof(PyObject *))
        if p == NULL:
            raise MemoryError()
        self.stack = p
        self.room = room
        return 0

    cdef inline int push(self, object o) except -1:
        if self.sp == self.room:
            self.grow()
        Py_INCREF(o)
        self.stack[self.sp] = <PyObject *> o
        self.sp += 1
        return 0

    cdef inline int need(self, Py_ssize_t count) except -1:
        """At least `count` items above the innermost mark."""
        if self.sp - self.floor < count:
            self.wrong("the stack has too few items")
        return 0

    cdef inline object pop(self):
        cdef object o
        self.sp -= 1
        o = <object> self.stack[self.sp]
        Py_DECREF(o)
        return o

    cdef int drop(self, Py_ssize_t height) except -1:
        """Pop down to `height`. Objects are let go one at a time, so that the stack is whole whenever code runs."""
        while self.sp > height:
            self.sp -= 1
            Py_DECREF(<object> self.stack[self.sp])
        return 0

    cdef int mark(self) except -1:
        cdef Py_ssize_t room
        cdef void *p
        if self.mp == self.marks_room:
            room = 2 * self.marks_room if self.marks_room else 64
            p = PyMem_Realloc(self.marks, room * sizeof(Py_ssize_t))
            if p == NULL:
                raise MemoryError()
            self.marks = <Py_ssize_t *> p
            self.marks_room = room
        self.marks[self.mp] = self.sp
        self.mp += 1
        self.floor = self.sp
        return 0

    cdef Py_ssize_t unmark(self) except -1:
        """Close the innermost mark; the height at which it stood."""
        cdef Py_ssize_t height
        if self.mp == 0:
            self.wrong("there is no open mark")
        self.mp -= 1
        height = self.marks[self.mp]
        self.floor = self.marks[self.mp - 1] if self.mp else 0
        return height

    cdef inline int charge(self, int64_t nbytes) except -1:
        """Count what an opcode makes."""
        self.budget -= nbytes
        if self.budget < 0:
            raise LimitError(
                f"pickle of {self.n} bytes that would take over {BUDGET_PER_BYTE} times its size in memory",
                offset=self.at)
        return 0

    # ------------------------------------------------------------ the memo

    cdef int memo_grow(self, Py_ssize_t index) except -1:
        cdef Py_ssize_t room
        cdef void *p
        # A pickle of n bytes can't fill more than n slots: larger numbers only ask for memory.
        if index > self.n:
            raise LimitError(f"pickle memo slot {index} in a pickle of {self.n} bytes", offset=self.at)
        room = index + index // 2 + 256
        p = PyMem_Realloc(self.memo, room * sizeof(PyObject *))
        if p == NULL:
            raise MemoryError()
        self.memo = <PyObject **> p
        memset(self.memo + self.memo_room, 0, (room - self.memo_room) * sizeof(PyObject *))
        self.memo_room = room
        return 0

    cdef inline int memo_set(self, Py_ssize_t index, PyObject *value) except -1:
        """Put an owned reference (or an odd word, see `revive`) into a slot."""
        cdef PyObject *old
        if index >= self.memo_room:
            self.memo_grow(index)
        old = self.memo[index]
        self.memo[index] = value
        if old == NULL:
            self.memo_next += 1
        elif not <size_t> old & 1:
            Py_DECREF(<object> old)
        return 0

    cdef inline int put(self, Py_ssize_t index) except -1:
        self.need(1)
        if index >= self.memo_room:
            self.memo_grow(index)
        Py_INCREF(<object> self.stack[self.sp - 1])
        return self.memo_set(index, self.stack[self.sp - 1])

    cdef int revive(self, Py_ssize_t index) except -1:
        """Make the object of a slot that the fast path left as an odd word.

        The word is twice the position of a storage key's BINUNICODE plus one.
        1 stands for objects that nothing is known to ask for again (argument
        tuples, empty hooks): if a pickle does, it is run again without the fast
        path.
        """
        cdef Py_ssize_t count, at = <Py_ssize_t> (<size_t> self.memo[index] >> 1)
        if at == 0:
            raise _Restart
        count = tio_load32(self.buf + at + 1)
        if count > self.n - at - 5:  # it was checked, but a mapped file or the caller's buffer may change meanwhile
            self.wrong("the pickle changed while it was read")
        key = PyUnicode_DecodeUTF8(<const char *> self.buf + at + 5, count, NULL)
        Py_INCREF(key)
        self.memo[index] = <PyObject *> key
        return 0

    cdef int get(self, Py_ssize_t index) except -1:
        if index >= self.memo_room or self.memo[index] == NULL:
            self.wrong(f"memo slot {index} was never set")
        if <size_t> self.memo[index] & 1:
            self.revive(index)
        self.once(<object> self.memo[index])
        return self.push(<object> self.memo[index])

    cdef inline int once(self, object o) except -1:
        """`whole_storages` counts mentions of storages, so that each must have a persistent id of its own."""
        if type(o) is _StorageRef:
            self.wrong("a storage that is referred to without its persistent id")
        return 0

    # ------------------------------------------------------------ operands

    cdef inline const uint8_t *take(self, Py_ssize_t count) except NULL:
        cdef const uint8_t *p = self.buf + self.pos
        if count > self.n - self.pos:
            self.short()
        self.pos += count
        return p

    cdef const uint8_t *take_u(self, uint64_t count) except NULL:
        """Like `take`, for lengths as they are in the file."""
        if count > <uint64_t> (self.n - self.pos):
            self.short()
        return self.take(<Py_ssize_t> count)

    cdef int text(self, const uint8_t *p, uint64_t count) except -1:
        self.charge(COST_OBJECT + <int64_t> count)
        try:
            return self.push(PyUnicode_DecodeUTF8(<const char *> p, <Py_ssize_t> count, NULL))
        except UnicodeDecodeError:
            self.wrong("expected UTF-8")

    cdef int line(self, const uint8_t **p, Py_ssize_t *count) except -1:
        """A text argument up to the next newline."""
        cdef const uint8_t *start = self.buf + self.pos
        cdef const uint8_t *end = <const uint8_t *> memchr(start, 10, self.n - self.pos)
        if end == NULL:
            self.short()
        p[0] = start
        count[0] = end - start
        self.pos += count[0] + 1
        return 0

    cdef int integer(self, uint64_t count) except -1:
        """LONG1, LONG4: a little-endian two's complement number."""
        cdef const uint8_t *p
        if count > MAX_LONG:
            raise LimitError(f"pickle integer of {count} bytes; at most {MAX_LONG} are read", offset=self.at)
        p = self.take_u(count) if count else self.buf
        return self.push(int.from_bytes(PyBytes_FromStringAndSize(<const char *> p, <Py_ssize_t> count), "little",
                                        signed=True))

    # -------------------------------------------------------------- globals

    cdef object find(self, bytes key):
        """The meaning of ``b"module\\nname\\n"``; an Opaque for what is not allowed."""
        found = _GLOBALS.get(key)
        if found is not None:
            return (<_Global> found).value if (<_Global> found).kind == K_DTYPE else found
        found = self.opaque.get(key)
        if found is not None:
            return found
        try:
            module, name, _ = key.decode("utf-8").split("\n")
        except (UnicodeDecodeError, ValueError):
            self.wrong("a name that is not UTF-8, or has a newline")
        self.charge(COST_OPAQUE + 4 * len(key))
        found = _Opaque(module, name)
        self.opaque[key] = found
        if len(self.refused) < MAX_REFUSED:
            self.refused.append(f"{module}.{name}")
        return found

    cdef int op_global(self) except -1:
        cdef const uint8_t *module
        cdef const uint8_t *name
        cdef Py_ssize_t n_module, n_name
        self.line(&module, &n_module)
        self.line(&name, &n_name)
        return self.push(self.find(PyBytes_FromStringAndSize(<const char *> module, n_module + n_name + 2)))

    cdef int op_stack_global(self) except -1:
        self.need(2)
        name = self.pop()
        module = self.pop()
        if not PyUnicode_CheckExact(name) or not PyUnicode_CheckExact(module):
            self.wrong("expected two strings")
        return self.push(self.find(f"{module}\n{name}\n".encode()))

    # ----------------------------------------------------------- containers

    cdef int op_tuple(self, Py_ssize_t height) except -1:
        """Everything above `height` becomes one tuple; references move, none is made."""
        cdef Py_ssize_t i, count = self.sp - height
        cdef PyObject *t
        self.charge(COST_OBJECT + 8 * count)
        t = PyTuple_New_raw(count)
        if t == NULL:
            raise MemoryError()
        for i in range(count):
            PyTuple_SET_ITEM(t, i, self.stack[height + i])
        self.sp = height
        if self.sp == self.room:
            self.grow()
        self.stack[self.sp] = t
        self.sp += 1
        return 0

    cdef int op_list(self, Py_ssize_t height) except -1:
        cdef list out
        self.charge(COST_DICT + 8 * (self.sp - height))
        out = [<object> self.stack[i] for i in range(height, self.sp)]
        self.drop(height)
        return self.push(out)

    cdef int set_items(self, Py_ssize_t height) except -1:
        """Pairs above `height` go into the mapping below them; a key may come once."""
        cdef Py_ssize_t i, before
        cdef object key, target
        if height <= self.floor:
            self.wrong("there is no mapping below the items")
        if (self.sp - height) & 1:
            self.wrong("expected keys and values in pairs")
        target = <object> self.stack[height - 1]
        if type(target) is _Opaque:
            (<list> target.items).extend([(<object> self.stack[i], <object> self.stack[i + 1])
                                          for i in range(height, self.sp, 2)])
            return self.drop(height)
        if not PyDict_CheckExact(target) and not PyODict_CheckExact(target) and type(target) is not _Counter:
            self.expected("a dict", target)
        before = PyDict_Size(target)
        self.charge(COST_ITEM * (self.sp - height) // 2)
        for i in range(height, self.sp, 2):
            key = <object> self.stack[i]
            if not PyUnicode_CheckExact(key):
                self.check_key(key)
            if PyDict_CheckExact(target):
                PyDict_SetItem(target, key, <object> self.stack[i + 1])
            elif PyODict_CheckExact(target):
                PyODict_SetItem(target, key, <object> self.stack[i + 1])
            else:
                dict.__setitem__(target, key, <object> self.stack[i + 1])
        if PyDict_Size(target) - before != (self.sp - height) // 2:
            self.wrong("a key that occurs twice")
        return self.drop(height)

    cdef int append_items(self, Py_ssize_t height) except -1:
        cdef Py_ssize_t i
        cdef object target
        if height <= self.floor:
            self.wrong("there is no list below the items")
        target = <object> self.stack[height - 1]
        if type(target) is _Opaque:
            target = target.items
        if not PyList_CheckExact(target):
            self.expected("a list", target)
        for i in range(height, self.sp):
            PyList_Append(target, <object> self.stack[i])
        return self.drop(height)

    cdef int add_items(self, Py_ssize_t height) except -1:
        cdef Py_ssize_t i
        if height <= self.floor:
            self.wrong("there is no set below the items")
        target = <object> self.stack[height - 1]
        if type(target) is not set:
            self.expected("a set", target)
        self.charge(COST_ITEM * (self.sp - height))
        for i in range(height, self.sp):
            self.check_key(<object> self.stack[i])
            (<set> target).add(<object> self.stack[i])
        return self.drop(height)

    cdef int check_key(self, object key) except -1:
        """Only keys whose hash is cheap and hard to make collide."""
        cdef int nodes = MAX_KEY_NODES
        if type(key) is tuple or isinstance(key, _Size):
            self.tuple_keys += 1
            if self.tuple_keys > MAX_TUPLE_KEYS:
                raise LimitError(f"pickle with more than {MAX_TUPLE_KEYS} tuples as keys", offset=self.at)
        self.check_key_part(key, 0, &nodes)
        return 0

    cdef int check_key_part(self, object key, int depth, int *nodes) except -1:
        cdef int overflow = 0
        cdef long long value
        nodes[0] -= 1
        if depth > MAX_KEY_DEPTH or nodes[0] < 0:
            raise LimitError(f"pickle key of over {MAX_KEY_DEPTH} levels or {MAX_KEY_NODES} parts", offset=self.at)
        if PyLong_CheckExact(key):
            value = PyLong_AsLongLongAndOverflow(key, &overflow)
            if overflow or value >= _HASH_MODULUS or value <= -_HASH_MODULUS:
                raise LimitError("pickle key: an int of 61 bits or more", offset=self.at)
        elif type(key) is tuple or isinstance(key, (_Size, _Device)):
            for part in <tuple> key:
                self.check_key_part(part, depth + 1, nodes)
        elif not (isinstance(key, (str, bytes, bool, float)) or key is None
                  or type(key) is _Global or type(key) is _Opaque):
            self.expected("a key of a plain type", key)
        return 0

    # --------------------------------------------------------------- calls

    cdef int op_reduce(self) except -1:
        cdef object callee, args
        self.need(2)
        callee = <object> self.stack[self.sp - 2]
        args = <object> self.stack[self.sp - 1]
        if not PyTuple_CheckExact(args):
            self.expected("a tuple of arguments", args)
        out = self.call(callee, <tuple> args)
        self.drop(self.sp - 2)
        return self.push(out)

    cdef object call(self, object callee, tuple args):
        cdef int kind
        if type(callee) is _Opaque:
            self.charge(COST_OPAQUE)
            return _Opaque(callee.module, callee.name, args)
        if type(callee) is not _Global:
            self.expected("something to call", callee)
        kind = (<_Global> callee).kind
        if kind == K_REBUILD_V2:
            return self.rebuild(args, 2)
        if kind == K_REBUILD_V3:
            return self.rebuild(args, 3)
        if kind == K_REBUILD:
            return self.rebuild(args, 1)
        if kind == K_REBUILD_PARAMETER:
            return self.parameter(args)
        if kind == K_ORDERED_DICT and PyTuple_GET_SIZE(args) == 0:
            self.charge(COST_ORDERED_DICT)
            return PyODict_New()
        try:
            return self.call_rare(kind, callee, args)
        except FormatError as error:
            if error.offset is None:
                error.offset = self.at
            raise
        except UnsupportedError as error:
            error.offset = self.at
            raise

    cdef object call_rare(self, int kind, _Global callee, tuple args):
        # What these make is an object of fixed size, plus at most a copy of their first argument.
        self.charge(COST_OPAQUE + (COST_ITEM * <int64_t> len(args[0]) if args and isinstance(args[0], _SIZED) else 0))
        if kind == K_CALL or kind == K_ORDERED_DICT:
            return _CALLS[callee.kind_name](args, self.check)
        if kind == K_NP_SCALAR:
            return _rebuild_module().np_scalar(args)
        if kind == K_NP_RECONSTRUCT:
            made = _rebuild_module().np_reconstruct(args)
        elif kind == K_NP_DTYPE:
            made = _rebuild_module().np_dtype(args)
        else:
            self.wrong(f"{callee.module}.{callee.name} is a tag and can't be called")
        self.unfilled[id(made)] = made
        return made

    def check(self, key):
        """Refuse what is expensive to hash."""
        self.check_key(key)

    # ------------------------------------------------------------- storages

    cdef int op_binpersid(self) except -1:
        """("storage", class, key, location, numel) becomes a `_StorageRef`."""
        cdef object pid, cls, key
        cdef _StorageRef ref
        cdef const char *text
        cdef Py_ssize_t count
        self.need(1)
        pid = <object> self.stack[self.sp - 1]
        if not PyTuple_CheckExact(pid) or PyTuple_GET_SIZE(pid) != 5:
            self.expected("a persistent id of 5 parts", pid)
        if not _is_word(<object> PyTuple_GET_ITEM(pid, 0), "storage"):
            self.wrong("expected a persistent id that begins with 'storage'")
        cls = <object> PyTuple_GET_ITEM(pid, 1)
        key = <object> PyTuple_GET_ITEM(pid, 2)
        if type(cls) is _Opaque:
            return self.opaque_storage(pid)
        if type(cls) is not _Global or ((<_Global> cls).kind != K_STORAGE and (<_Global> cls).kind != K_UNTYPED):
            self.expected("a storage class in a persistent id", cls)
        if type(key) is bytes:  # how Python 2 wrote it
            key = (<bytes> key).decode("latin-1")
        if not PyUnicode_CheckExact(key):
            self.expected("a storage key (str)", key)
        text = PyUnicode_AsUTF8AndSize(key, &count)
        ref = _StorageRef()
        ref.numel = self.whole(<object> PyTuple_GET_ITEM(pid, 4), "the number of elements of a storage")
        ref.cls = <_Global> cls
        ref.record = self.mention(<const uint8_t *> text, count, ref.cls, ref.numel)
        self.bare_storages += 1
        self.drop(self.sp - 1)
        return self.push(ref)

    cdef Py_ssize_t mention(self, const uint8_t *key, Py_ssize_t count, _Global cls, int64_t numel) except -1:
        """The record of a storage key, proven to hold exactly what the pickle says, each time in the same words."""
        cdef Py_ssize_t record = self.find_record(key, count)
        cdef Seen *seen
        cdef uint64_t want
        if record < 0:
            self.wrong(f"storage {self.shown(key, count)} has no record in the archive")
        seen = &self.seen[record]
        if seen.cls == <void *> cls and seen.numel == numel:
            return record
        if seen.cls != NULL:
            self.wrong(f"storage {self.shown(key, count)} is mentioned twice, with different types or sizes")
        if not tio_mul(<uint64_t> numel, <uint64_t> cls.itemsize, &want) \
                or want != <uint64_t> self.extents[3 * record + 2]:
            raise HeaderError(
                f"storage {self.shown(key, count)}: expected {numel} elements of {cls.itemsize} bytes, found a record "
                f"of {self.extents[3 * record + 2]} bytes", offset=self.at)
        seen.cls = <void *> cls
        seen.numel = numel
        return record

    cdef Py_ssize_t find_record(self, const uint8_t *key, Py_ssize_t count) except -2:
        """The record of a storage key; -1 if there is none."""
        cdef int64_t number = tio_decimal(key, count)
        cdef object found
        if 0 <= number < self.n_numbers:
            return self.numbers[number]
        found = self.keys.get(PyUnicode_DecodeUTF8(<const char *> key, count, NULL))
        return -1 if found is None else <Py_ssize_t> found

    cdef str shown(self, const uint8_t *key, Py_ssize_t count):
        return escaped(PyBytes_FromStringAndSize(<const char *> key, min(count, 100)))

    cdef int opaque_storage(self, tuple pid) except -1:
        out = _Opaque("", "persistent id", pid)
        self.drop(self.sp - 1)
        return self.push(out)

    cdef int64_t whole(self, object value, str what) except -1:
        """A non-negative int below 2^63."""
        cdef int overflow = 0
        cdef long long n
        if not PyLong_CheckExact(value):
            self.expected(f"an int as {what}", value)
        n = PyLong_AsLongLongAndOverflow(value, &overflow)
        if overflow or n < 0:
            self.wrong(f"{what} is negative or over 2^63 - 1")
        return n

    # -------------------------------------------------------------- tensors

    cdef object rebuild(self, tuple args, int version):
        """A view: (storage, offset, size, stride[, requires_grad, hooks[, dtype]][, metadata])."""
        cdef Py_ssize_t count = PyTuple_GET_SIZE(args), fixed = 4 if version == 1 else 4 + version
        cdef _StorageRef ref
        cdef tio_row row
        cdef int64_t[2 * MAX_RANK] dims
        cdef int itemsize
        cdef object storage
        if count != fixed and not (version > 1 and count == fixed + 1):
            self.wrong(f"expected {fixed} arguments to rebuild a tensor, found {count}")
        storage = <object> PyTuple_GET_ITEM(args, 0)
        if type(storage) is _Opaque:
            return _Opaque("torch._utils", "_rebuild_tensor", args)
        if type(storage) is not _StorageRef:
            self.expected("a storage", storage)
        ref = <_StorageRef> storage
        self.bare_storages -= 1
        row.dtype = ref.cls.dtype
        row.flags = 0
        itemsize = ref.cls.itemsize
        if version == 3:
            itemsize = self.dtype_v3(ref, <object> PyTuple_GET_ITEM(args, 6), &row)
        elif ref.cls.kind == K_UNTYPED:
            self.wrong("an untyped storage needs a dtype")
        if version > 1:
            self.check_grad(<object> PyTuple_GET_ITEM(args, 4), <object> PyTuple_GET_ITEM(args, 5), &row)
        if count > fixed:
            self.check_bits(<object> PyTuple_GET_ITEM(args, fixed), &row)
        row.rank = self.read_dims(<object> PyTuple_GET_ITEM(args, 2), <object> PyTuple_GET_ITEM(args, 3), dims)
        self.geometry(self.whole(<object> PyTuple_GET_ITEM(args, 1), "the storage offset"), ref.record, itemsize, &row,
                      dims)
        return self.tensor(&row, dims)

    cdef Py_ssize_t read_dims(self, object size, object stride, int64_t *dims) except -1:
        """Size and stride, as Python has them; the rank."""
        cdef Py_ssize_t i, rank
        if not isinstance(size, (tuple, list)) or not isinstance(stride, (tuple, list)):
            self.wrong("expected size and stride as tuples of int")
        rank = len(size)
        if rank != len(stride):
            self.wrong(f"size has {rank} dimensions and stride {len(stride)}")
        if rank > MAX_RANK:
            raise LimitError(f"tensor of {rank} dimensions; at most {MAX_RANK} are read", offset=self.at)
        for i in range(rank):
            dims[i] = self.whole(size[i], "a size")
            dims[rank + i] = self.whole(stride[i], "a stride")
        return rank

    cdef int dtype_v3(self, _StorageRef ref, object dtype, tio_row *row) except -1:
        if type(dtype) is not _TorchDType:
            self.expected("a dtype", dtype)
        if ref.cls.kind != K_UNTYPED:
            self.wrong("expected an untyped storage")
        known = _BY_NAME[dtype]
        row.dtype = known.code
        return known.itemsize

    cdef int check_grad(self, object requires_grad, object hooks, tio_row *row) except -1:
        if requires_grad is True:
            row.flags |= TIO_ROW_REQUIRES_GRAD
        elif requires_grad is not False:
            self.expected("a bool as requires_grad", requires_grad)
        if hooks is not None and not PyODict_CheckExact(hooks):
            self.expected("an OrderedDict of hooks", hooks)
        return 0

    cdef int check_bits(self, object metadata, tio_row *row) except -1:
        """The conjugate and negative bits; other keys are notes that torch ignores, too."""
        if type(metadata) is not dict:
            self.expected("a dict of tensor metadata", metadata)
        for name, bit in (("conj", TIO_ROW_CONJ), ("neg", TIO_ROW_NEG)):
            value = (<dict> metadata).get(name, False)
            if value is True:
                row.flags |= bit
            elif value is not False:
                self.expected(f"a bool as {name}", value)
        return 0

    cdef int geometry(self, int64_t first, Py_ssize_t record, int itemsize, tio_row *row, int64_t *dims) except -1:
        """Prove the view inside its record, turn strides into bytes, and fill the row.

        `first` and the strides in `dims` count elements; all are known not to be negative.
        """
        cdef Py_ssize_t i, rank = row.rank
        cdef uint64_t offset, span = 0, term, n, room
        cdef bint empty = False
        cdef const int64_t *extent = self.extents + 3 * record
        for i in range(rank):
            empty = empty or dims[i] == 0
        for i in range(rank):
            n = <uint64_t> (dims[i] - 1) if dims[i] else 0
            if not tio_mul(<uint64_t> dims[rank + i], <uint64_t> itemsize, &term) or term >> 63:
                if n and not empty:
                    self.wrong("a stride of over 2^63 - 1 bytes")
                term = 0  # never stepped along
            dims[rank + i] = <int64_t> term
            if not empty and (not tio_mul(n, term, &term) or not tio_add(span, term, &span)):
                self.wrong("size and stride overflow")
        row.storage = extent[0] if extent[0] >= 0 else -1 - record  # not raw in the file: a storage is made for it
        row.offset = extent[1]
        row.chunks = 1
        row.chunk = 0
        row.nbytes = 0
        if empty:
            return 0
        room = <uint64_t> extent[2]
        if not tio_mul(<uint64_t> first, <uint64_t> itemsize, &offset) \
                or not tio_add(span, <uint64_t> itemsize, &span) or offset > room or span > room - offset:
            self.wrong(f"the tensor leaves its storage: expected at most {room} bytes, found a view of {span} bytes at "
                       f"{offset}")
        row.offset += <int64_t> offset
        row.nbytes = <int64_t> span
        return 0

    cdef object tensor(self, tio_row *row, int64_t *dims):
        """An array, or a leaf and a row."""
        cdef Leaf leaf
        self.charge(COST_TENSOR + 16 * row.rank)
        if self.leases is not None and (self.wanted is None or self.n_rows in self.wanted):
            self.n_rows += 1
            return self.array(row, dims)
        leaf = Leaf.__new__(Leaf)
        leaf.row = self.n_rows
        if self.leases is None:
            self.keep_row(row, dims)
        self.n_rows += 1
        return leaf

    cdef object array(self, tio_row *row, int64_t *dims):
        cdef object lease
        cdef int64_t i
        cdef uint64_t made
        if row.storage >= 0:
            lease = self.leases[row.storage]
        else:
            lease = self.decode(-1 - row.storage, row.dtype)
        out = self.make_view(<PyObject *> lease, row.dtype, row.rank, dims, dims + row.rank, row.offset, row.nbytes)
        if row.flags & (TIO_ROW_CONJ | TIO_ROW_NEG):
            made = <uint64_t> out.itemsize
            for i in range(row.rank):  # a copy is made, which may be larger than the bytes it is of
                if dims[row.rank + i] and (not tio_mul(made, <uint64_t> dims[i], &made) or made >> 62):
                    made = <uint64_t> 1 << 62
                    break
            self.charge(max(0, <int64_t> made - row.nbytes))
            out = _lazy_bits(out, row.flags & TIO_ROW_CONJ, row.flags & TIO_ROW_NEG)
        return out

    cdef int keep_row(self, tio_row *row, int64_t *dims) except -1:
        self.grow_rows(2 * row.rank)
        row.dims = self.n_dims
        memcpy(self.dims + self.n_dims, dims, 2 * row.rank * sizeof(int64_t))
        self.n_dims += 2 * row.rank
        self.rows[self.n_rows] = row[0]
        return 0

    cdef int grow_rows(self, Py_ssize_t more_dims) except -1:
        cdef Py_ssize_t room
        cdef void *p
        if self.n_rows == self.rows_room:
            room = 2 * self.rows_room if self.rows_room else 64
            p = PyMem_Realloc(self.rows, room * sizeof(tio_row))
            if p == NULL:
                raise MemoryError()
            self.rows = <tio_row *> p
            self.rows_room = room
        if self.n_dims + more_dims > self.dims_room:
            room = 2 * self.dims_room + more_dims + 256
            p = PyMem_Realloc(self.dims, room * sizeof(int64_t))
            if p == NULL:
                raise MemoryError()
            self.dims = <int64_t *> p
            self.dims_room = room
        return 0

    cdef object parameter(self, tuple args):
        """(tensor, requires_grad, hooks): the same tensor, marked."""
        cdef tio_row scratch
        cdef tio_row *row = &scratch
        scratch.flags = 0
        if len(args) != 3:
            self.wrong(f"expected 3 arguments to rebuild a parameter, found {len(args)}")
        tensor = args[0]
        if type(tensor) is _Opaque:
            return _Opaque("torch._utils", "_rebuild_parameter", args)
        if type(tensor) is Leaf:
            if self.leases is None:
                row = &self.rows[(<Leaf> tensor).row]
                row.flags &= ~<int64_t> TIO_ROW_REQUIRES_GRAD
        elif self.ndarray is None or type(tensor) is not self.ndarray:
            self.expected("a tensor", tensor)
        self.check_grad(args[1], args[2], row)
        row.flags |= TIO_ROW_PARAMETER
        return tensor

    # ------------------------------------------------------- the fast path

    cdef inline bint at_rebuild(self):
        cdef object top = <object> self.stack[self.sp - 1]
        return type(top) is _Global and (<_Global> top).kind == K_REBUILD_V2

    cdef bint fast_tensor(self) except -1:
        """Take all opcodes of a plain tensor at once, and make nothing but the tensor.

        Called behind the MARK of a `_rebuild_tensor_v2` call. Bytes that are
        anything else than `csrc/tensor_ops.h` describes are left to the slow
        path, as are memo slots that hold something else.
        """
        cdef tio_tensor_ops ops
        cdef tio_row row
        cdef _Global cls
        cdef object key
        cdef const uint8_t *text
        cdef Py_ssize_t i, count, record
        if not tio_tensor_ops_match(self.buf, <uint64_t> self.n, <uint64_t> self.pos, &ops):
            return False
        if not _is_word(self.peek(ops.word), "storage") or not PyUnicode_CheckExact(self.peek(ops.location)) \
                or self.kind_at(ops.cls) != K_STORAGE or self.kind_at(ops.hooks) != K_ORDERED_DICT:
            return False
        if ops.key_slot < 0:
            text, count = ops.key, <Py_ssize_t> ops.key_len
        else:
            key = self.peek(<Py_ssize_t> ops.key_slot)
            if not PyUnicode_CheckExact(key):
                return False
            text = <const uint8_t *> PyUnicode_AsUTF8AndSize(key, &count)
        cls = <_Global> self.peek(ops.cls)
        record = self.mention(text, count, cls, ops.numel)
        row.flags = TIO_ROW_REQUIRES_GRAD if ops.requires_grad else 0
        row.dtype = cls.dtype
        row.rank = ops.rank
        self.geometry(ops.offset, record, cls.itemsize, &row, ops.dims)
        made = self.tensor(&row, ops.dims)
        for i in range(TIO_TENSOR_PUTS):
            if ops.puts[i] >= 0:
                self.memo_set(<Py_ssize_t> ops.puts[i], <PyObject *> <size_t> (1 if i else 2 * ops.key_at + 1))
        self.pos = <Py_ssize_t> ops.end
        self.drop(self.sp - 1)
        self.push(made)
        return True

    cdef inline object peek(self, Py_ssize_t slot):
        """What a memo slot holds; None if nothing, or nothing that was made."""
        if slot >= self.memo_room or self.memo[slot] == NULL:
            return None
        if <size_t> self.memo[slot] & 1:
            if <size_t> self.memo[slot] == 1:
                return None
            self.revive(slot)
        return <object> self.memo[slot]

    cdef inline int kind_at(self, Py_ssize_t slot) except -1:
        cdef object held = self.peek(slot)
        return (<_Global> held).kind if type(held) is _Global else K_OPAQUE

    # ---------------------------------------------------------------- state

    cdef int op_build(self) except -1:
        cdef object target, state
        self.need(2)
        target = <object> self.stack[self.sp - 2]
        state = <object> self.stack[self.sp - 1]
        if type(target) is _Opaque:
            target.state = state
        elif PyODict_CheckExact(target) or type(target) is _Counter:
            self.set_attributes(target, state)
        elif self.unfilled.pop(id(target), None) is not None:
            self.numpy_state(target, state)
        else:
            self.expected("an object that takes a state", target)
        return self.drop(self.sp - 1)

    cdef int numpy_state(self, object target, object state) except -1:
        """Fill an array or dtype that was made for it, once."""
        try:
            if type(target).__name__ == "ndarray":
                _rebuild_module().np_state(target, state, self.unfilled, self.nested)
            else:
                _rebuild_module().np_dtype_state(target, state)
        except (FormatError, UnsupportedError) as error:
            error.offset = self.at
            raise
        return 0

    cdef int set_attributes(self, object target, object state) except -1:
        """Attributes of a dict, such as a state dict's ``_metadata``; none may hide one of its methods."""
        if type(state) is not dict:
            self.expected("a dict of attributes", state)
        for name in <dict> state:
            if type(name) is not str or not name.isidentifier() or hasattr(OrderedDict, name) or hasattr(Counter, name):
                self.wrong(f"attribute {escaped(name)} of a dict")
        target.__dict__.update(state)
        return 0

    cdef int op_newobj(self) except -1:
        """cls.__new__(cls, *args) for classes that are not allowed: inert. OrderedDict and set as a call."""
        self.need(2)
        args = <object> self.stack[self.sp - 1]
        if not PyTuple_CheckExact(args):
            self.expected("a tuple of arguments", args)
        out = self.call(<object> self.stack[self.sp - 2], <tuple> args)
        self.drop(self.sp - 2)
        return self.push(out)

    # ------------------------------------------------------------- the loop

    def run(self):
        """Run to STOP and return the object."""
        return self.loop()

    cdef object loop(self):
        cdef uint8_t op
        cdef const uint8_t *p
        cdef Py_ssize_t height
        while True:
            if self.pos >= self.n:
                self.at = self.pos
                raise TruncatedError(f"the pickle of {self.n} bytes ends before its STOP opcode", offset=self.pos)
            if self.frame_end and self.pos >= self.frame_end:
                self.end_frame()
            self.at = self.pos
            op = self.buf[self.pos]
            self.pos += 1
            if op == c"q":  # BINPUT
                self.put(self.take(1)[0])
            elif op == c"h":  # BINGET
                self.get(self.take(1)[0])
            elif op == c"r":  # LONG_BINPUT
                self.put(tio_load32(self.take(4)))
            elif op == c"j":  # LONG_BINGET
                self.get(tio_load32(self.take(4)))
            elif op == c"K":  # BININT1
                self.push(self.take(1)[0])
            elif op == c"M":  # BININT2
                p = self.take(2)
                self.push(p[0] | p[1] << 8)
            elif op == c"J":  # BININT
                self.push(<int32_t> tio_load32(self.take(4)))
            elif op == c"X":  # BINUNICODE
                height = tio_load32(self.take(4))
                self.text(self.take(height) if height else self.buf, height)
            elif op == c"(":  # MARK
                if not (self.fast and self.sp > self.floor and self.at_rebuild() and self.fast_tensor()):
                    self.mark()
            elif op == c"t":  # TUPLE
                self.op_tuple(self.unmark())
            elif op == 0x85:  # TUPLE1
                self.need(1)
                self.op_tuple(self.sp - 1)
            elif op == 0x86:  # TUPLE2
                self.need(2)
                self.op_tuple(self.sp - 2)
            elif op == 0x87:  # TUPLE3
                self.need(3)
                self.op_tuple(self.sp - 3)
            elif op == c")":  # EMPTY_TUPLE
                self.push(())
            elif op == c"R":  # REDUCE
                self.op_reduce()
            elif op == c"Q":  # BINPERSID
                self.op_binpersid()
            elif op == 0x89:  # NEWFALSE
                self.push(False)
            elif op == 0x88:  # NEWTRUE
                self.push(True)
            elif op == c"N":  # NONE
                self.push(None)
            elif op == c"u":  # SETITEMS
                self.set_items(self.unmark())
            elif op == c"s":  # SETITEM
                self.need(3)
                self.set_items(self.sp - 2)
            elif op == c"e":  # APPENDS
                self.append_items(self.unmark())
            elif op == c"a":  # APPEND
                self.need(2)
                self.append_items(self.sp - 1)
            elif op == c"}":  # EMPTY_DICT
                self.charge(COST_DICT)
                self.push({})
            elif op == c"]":  # EMPTY_LIST
                self.charge(COST_DICT)
                self.push([])
            elif op == c"c":  # GLOBAL
                self.op_global()
            elif op == c"G":  # BINFLOAT, big-endian
                self.push(tio_load_double(self.take(8)))
            elif op == c"b":  # BUILD
                self.op_build()
            elif op == c".":  # STOP
                return self.finish()
            else:
                self.rare_op(op)

    cdef int end_frame(self) except -1:
        if self.pos != self.frame_end:
            self.wrong("the frame ends inside this opcode")
        self.frame_end = 0
        return 0

    cdef int rare_op(self, uint8_t op) except -1:
        """Opcodes that torch does not write for tensors."""
        cdef uint64_t count
        cdef Py_ssize_t i, height
        if op == 0x80:  # PROTO
            if self.take(1)[0] > 5:
                self.wrong(f"expected protocol 5 or less, found {self.buf[self.pos - 1]}")
        elif op == 0x8a:  # LONG1
            self.integer(self.take(1)[0])
        elif op == 0x8b:  # LONG4
            self.integer(tio_load32(self.take(4)))
        elif op == 0x81:  # NEWOBJ
            self.op_newobj()
        elif op == 0x8c:  # SHORT_BINUNICODE
            count = self.take(1)[0]
            self.text(self.take_u(count) if count else self.buf, count)
        elif op == 0x8d:  # BINUNICODE8
            count = tio_load64(self.take(8))
            self.text(self.take_u(count) if count else self.buf, count)
        elif op == c"U":  # SHORT_BINSTRING: Python 2's str, taken as text
            count = self.take(1)[0]
            self.text(self.take_u(count) if count else self.buf, count)
        elif op == c"C" or op == c"B" or op == 0x8e:  # SHORT_BINBYTES, BINBYTES, BINBYTES8
            count = self.take(1)[0] if op == c"C" else tio_load32(self.take(4)) if op == c"B" \
                else tio_load64(self.take(8))
            self.push(PyBytes_FromStringAndSize(<const char *> self.take_u(count) if count else NULL,
                                                <Py_ssize_t> count))
        elif op == 0x95:  # FRAME: a hint for readers of streams, but it may not lie
            count = tio_load64(self.take(8))
            if count > <uint64_t> (self.n - self.pos):
                self.short()
            self.frame_end = self.pos + <Py_ssize_t> count
        elif op == 0x94:  # MEMOIZE
            self.put(self.memo_next)
        elif op == 0x93:  # STACK_GLOBAL
            self.op_stack_global()
        elif op == 0x8f:  # EMPTY_SET
            self.charge(COST_SET)
            self.push(set())
        elif op == 0x90:  # ADDITEMS
            self.add_items(self.unmark())
        elif op == c"0":  # POP
            if self.sp == self.floor and self.mp:
                self.unmark()
            else:
                self.need(1)
                self.drop(self.sp - 1)
        elif op == c"1":  # POP_MARK
            self.drop(self.unmark())
        elif op == 0x91:  # FROZENSET
            height = self.unmark()
            self.charge(COST_SET + COST_ITEM * (self.sp - height))
            for i in range(height, self.sp):
                self.check_key(<object> self.stack[i])
            elements = frozenset([<object> self.stack[i] for i in range(height, self.sp)])
            self.drop(height)
            self.push(elements)
        elif op == 0x96:  # BYTEARRAY8
            count = tio_load64(self.take(8))
            self.push(bytearray(PyBytes_FromStringAndSize(<const char *> self.take_u(count) if count else NULL,
                                                          <Py_ssize_t> count)))
        elif op == c"2":  # DUP
            self.need(1)
            self.once(<object> self.stack[self.sp - 1])
            self.push(<object> self.stack[self.sp - 1])
        elif op == c"l":  # LIST
            self.op_list(self.unmark())
        else:
            raise UnsupportedError(f"pickle opcode 0x{op:02x} is not read in this version", offset=self.at)
        return 0

    cdef object finish(self):
        if self.mp or self.sp != 1:
            self.wrong("the pickle stops with more or less than one object")
        out = self.pop()
        return self.whole_storages(out) if self.bare_storages else out

    cdef object whole_storages(self, object root):
        """Show storages that were saved by themselves as flat arrays: at the top, in dicts and in lists.

        Elsewhere they are refused; each mention is one `_StorageRef`.
        """
        cdef list stack = [root] if isinstance(root, (dict, list)) else []
        cdef set seen = set()
        if type(root) is _StorageRef:
            return self.whole_storage(<_StorageRef> root)
        while stack:
            node = stack.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            for key, child in list(node.items() if isinstance(node, dict) else enumerate(node)):
                if type(child) is _StorageRef:
                    node[key] = self.whole_storage(<_StorageRef> child)
                elif isinstance(child, (dict, list)):
                    stack.append(child)
        if self.bare_storages:
            raise UnsupportedError("a storage that was saved by itself, inside a tuple or an unknown object")
        return root

    cdef object whole_storage(self, _StorageRef ref):
        cdef tio_row row
        cdef int64_t[2] dims
        self.bare_storages -= 1
        row.dtype, row.flags, row.rank = ref.cls.dtype, 0, 1
        dims[0], dims[1] = ref.numel, 1
        self.geometry(0, ref.record, ref.cls.itemsize, &row, dims)
        return self.tensor(&row, dims)

    def table(self):
        """Return (rows, dims), arrays of int64, of the tensors met; empty if they became arrays."""
        rows, dims = _array("q"), _array("q")
        if self.leases is None:
            rows.frombytes(PyBytes_FromStringAndSize(<const char *> self.rows, self.n_rows * sizeof(tio_row)))
            dims.frombytes(PyBytes_FromStringAndSize(<const char *> self.dims, self.n_dims * 8))
        return rows, dims


cdef extern from "Python.h":
    int PyObject_GetBuffer(object o, Py_buffer *view, int flags) except -1
    void PyBuffer_Release(Py_buffer *view)
    enum: PyBUF_SIMPLE


cdef inline bint _is_word(object o, str word):
    return o == word if PyUnicode_CheckExact(o) else (type(o) is bytes and o == word.encode())


cdef str _kind_of(object o):
    """A type's name for messages, in the pickle's terms."""
    if type(o) is _Opaque or type(o) is _Global:
        return f"{escaped(o.module)}.{escaped(o.name)}"
    if type(o) is _StorageRef:
        return "a storage"
    if type(o) is Leaf:
        return "a tensor"
    return type(o).__name__


cdef object _lazy_bits(object plain, bint conj, bint neg):
    from tensorio import _rebuild
    return _rebuild.lazy_bits(plain, conj, neg)


cdef object _rebuild_module():
    """The rare kinds need NumPy, which most pickles of tensors do not."""
    from tensorio import _rebuild
    return _rebuild


def loads(pickle, records=None, *, list leases=None, decode=None, set wanted=None, rules=_Rules(),
          Py_ssize_t start=0, Py_ssize_t first_row=0, Py_ssize_t first_dim=0, dict placed=None):
    """Read one pickle.

    Parameters
    ----------
    pickle : buffer
        Bytes that begin with it, from `start` on; more may follow.
    records : Records or None
        None: they are not known yet; the storages that the pickle mentions are
        numbered as they come and listed in the result.
    leases : list of Lease or None
        By storage index: tensors become arrays at once. None: tensors become
        `Leaf`, and rows are kept for a table.
    decode : callable
        ``decode(record, dtype)`` returns the lease of a record that is not raw
        in its file (storage -1).
    wanted : set of int or None
        Numbers of the tensors that become arrays; the others become `Leaf`.
    rules : Rules
    start : int
        Where the pickle begins in the buffer.
    first_row, first_dim : int
        What the numbers of rows and of cells of dimensions begin with.
    placed : dict of str to Placed, optional
        What persistent ids that are plain strings stand for.

    Returns
    -------
    Loaded

    Raises
    ------
    UnsafePickleError
        Lists every name that is not allowed.
    HeaderError, TruncatedError, LimitError, UnsupportedError
        With the opcode and its byte offset in the pickle.
    """
    cdef _Machine machine
    if records is None or start or first_row or first_dim or placed:
        raise UnsupportedError("not yet")
    machine = _Machine(pickle, records.numbers, records.keys, records.extents, leases, decode, wanted)
    try:
        try:
            obj = machine.run()
        except _Restart:
            machine = _Machine(pickle, records.numbers, records.keys, records.extents, leases, decode, wanted,
                               fast=False)
            obj = machine.run()
    except (FormatError, UnsupportedError):
        if machine.refused and rules.unknown == "error":
            raise _refusal(machine.refused) from None
        raise
    if machine.refused and rules.unknown == "error":
        raise _refusal(machine.refused)
    rows, dims = machine.table()
    return _Loaded(obj, rows, dims, machine.pos, [])


cdef object _refusal(list refused):
    shown = ", ".join(escaped(name) for name in refused[:4])
    more = f" and {len(refused) - 4} more (see .globals)" if len(refused) > 4 else ""
    return UnsafePickleError(
        f"the pickle names what is not on the list of harmless names: {shown}{more}; "
        "unknown='opaque' opens it without running any of it", globals=refused)
