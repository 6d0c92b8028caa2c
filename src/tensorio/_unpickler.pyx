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

The machine is one class in four files: `_Stack` (input, stack, memo, budget),
`_Tensors` (storages, views, rows), `_Arrays` (bytes, NumPy arrays) and, here,
`_Machine` (names, containers, calls, the loop).
"""
cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.dict cimport PyDict_SetItem, PyDict_Size
from cpython.list cimport PyList_Append
from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.ref cimport Py_DECREF, Py_INCREF, Py_XDECREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memchr, memcpy, memset

import re as _re
from _compat_pickle import IMPORT_MAPPING as _IMPORT_MAPPING, NAME_MAPPING as _NAME_MAPPING
from array import array as _array
from collections import Counter, OrderedDict, deque
from enum import Enum
from sys import modules as _modules

from tensorio._append cimport *
from tensorio._csrc cimport *

from tensorio.allowlist import ALLOWED as _ALLOWED
from tensorio.dtypes import BY_NAME as _BY_NAME, DTYPES as _DTYPES
from tensorio.errors import (
    FormatError, HeaderError, LimitError, TruncatedError, UnsafePickleError, UnsupportedError, escaped,
)
from tensorio.kinds import TensorKind as _TensorKind
from tensorio.machine.calls import CALLS as _CALLS, STATES as _STATES, TYPES as _TYPES, Redirect as _Redirect
from tensorio.machine.calls import DICTS as _DICTS, LISTS as _LISTS, is_key as _is_key
from tensorio.machine.rebuild_kinds import KINDS as _REBUILD_KINDS
from tensorio.pickles import Loaded as _Loaded, Mentioned as _Mentioned, Named as _Named, Rules as _Rules
from tensorio.pickles import NotPlain as _NotPlain, Records as _Records, Unbuilt as _Unbuilt_class
from tensorio.values import Device, Opaque, Size, TorchDType, TorchTag

cdef object _new_tuple = tuple.__new__
cdef type _Opaque = Opaque
cdef type _Size = Size
cdef type _TorchDType = TorchDType
cdef type _TorchTag = TorchTag
cdef type _Device = Device
cdef type _Counter = Counter
cdef type _Unbuilt = _Unbuilt_class
cdef tuple _SIZED = (list, tuple, dict)  # what the functions of tensorio.machine.calls copy

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
    MAX_KEY_DEPTH = 8      # tuples in tuples as a key: CPython hashes them recursively, without a cache
    MAX_KEY_NODES = 64
    MAX_TUPLE_KEYS = 4096  # per pickle: their hash is not salted, so that they can be made to collide
    MAX_REFUSED = 1000     # refused names listed
    # As COST_OBJECT in _machine_stack.pxi.
    COST_DICT = 96
    COST_ORDERED_DICT = 320
    COST_SET = 256
    COST_OPAQUE = 512
    COST_ITEM = 72         # of a dict or set, with the room they keep free

# |int| below this is its own hash; from here on, many ints share one (CPython's _PyHASH_MODULUS).
cdef long long _HASH_MODULUS = (1LL << 61) - 1

cdef enum Kind:
    K_OPAQUE = 0
    K_STORAGE
    K_UNTYPED
    K_VALUE  # stands for itself in the tree: dtypes, tags, types
    K_INERT  # an Opaque that is not refused
    K_REBUILD
    K_REBUILD_V2
    K_REBUILD_V3
    K_REBUILD_PARAMETER
    K_REBUILD_PARAMETER_STATE
    K_REBUILD_QTENSOR
    K_REBUILD_FROM_TYPE
    K_REBUILD_KIND  # one of tensorio.machine.rebuild_kinds
    K_ORDERED_DICT
    K_CALL  # one of tensorio.machine.calls
    K_LOAD_FROM_BYTES
    K_JOBLIB_ARRAY
    K_NP_RECONSTRUCT
    K_NP_FROMBUFFER
    K_NP_SCALAR
    K_NP_NDARRAY
    K_NP_DTYPE

cdef dict _KINDS = {
    **dict.fromkeys(_REBUILD_KINDS, K_REBUILD_KIND), **dict.fromkeys(_CALLS, K_CALL),
    "storage": K_STORAGE, "untyped": K_UNTYPED, "dtype": K_VALUE, "tag": K_VALUE, "inert": K_INERT,
    "rebuild": K_REBUILD, "rebuild_v2": K_REBUILD_V2, "rebuild_v3": K_REBUILD_V3,
    "rebuild_parameter": K_REBUILD_PARAMETER, "rebuild_parameter_with_state": K_REBUILD_PARAMETER_STATE,
    "rebuild_qtensor": K_REBUILD_QTENSOR, "rebuild_from_type": K_REBUILD_FROM_TYPE, "ordered_dict": K_ORDERED_DICT,
    "ellipsis": K_VALUE, "load_from_bytes": K_LOAD_FROM_BYTES,
    "joblib_array": K_JOBLIB_ARRAY, "np_reconstruct": K_NP_RECONSTRUCT, "np_frombuffer": K_NP_FROMBUFFER,
    "np_scalar": K_NP_SCALAR,
    "np_ndarray": K_NP_NDARRAY, "np_type": K_NP_NDARRAY, "np_dtype": K_NP_DTYPE,
}


# What may be asked for a tensor in the place of another.
cdef tuple _TENSOR_KINDS = (K_REBUILD, K_REBUILD_V2, K_REBUILD_V3, K_REBUILD_PARAMETER, K_REBUILD_PARAMETER_STATE,
                            K_REBUILD_QTENSOR, K_REBUILD_KIND)


@cython.final
cdef class _Global:
    """What a (module, name) in the pickle stands for."""
    cdef readonly str module, name, kind_name
    cdef int kind
    cdef int dtype
    cdef int itemsize
    cdef object value  # what it is in the tree, for dtypes and tags

    def __repr__(self):
        return f"<global {escaped(self.module)}.{escaped(self.name)}>"


class _Restart(Exception):
    """The pickle asks for an object that the fast path did not make."""


cdef dict _BY_TYPE = {}  # plain types, which stand for themselves in the tree until they are called


cdef dict _make_globals():
    table = {}
    for (module, name), entry in _ALLOWED.items():
        g = _Global()
        g.module, g.name, g.kind_name, g.kind = module, name, entry.kind, _KINDS[entry.kind]
        if entry.kind == "tag":
            g.value = TorchTag(f"{module}.{name}")
        elif entry.kind == "ellipsis":
            g.value = ...
        elif entry.kind in _TYPES and entry.kind != "ordered_dict":
            g.value = _TYPES[entry.kind]
            _BY_TYPE[g.value] = g
        elif entry.dtype and entry.kind != "np_type":
            g.value = TorchDType(entry.dtype) if entry.kind == "dtype" else None
            if entry.dtype in _BY_NAME:
                g.dtype, g.itemsize = _BY_NAME[entry.dtype].code, _BY_NAME[entry.dtype].itemsize
        table[f"{module}\n{name}\n".encode()] = g
    return table


cdef dict _GLOBALS = _make_globals()

include "_machine_stack.pxi"
include "_machine_tensors.pxi"
include "_machine_numpy.pxi"


@cython.final
cdef class _Machine(_Arrays):
    """One run over one pickle; see `loads` for its parameters.

    Parameters
    ----------
    fast : bool
        Whether to take plain tensors by the fast path.
    sweep : bool
        Whether to note every name, and to go on where only a value is odd.
    """
    cdef bint fast
    cdef object rules
    cdef bint lenient  # unknown objects are kept
    cdef dict placed
    cdef dict placed_made
    cdef int tuple_keys
    cdef int unbuilt  # objects that still need a state
    cdef bint bare_names  # whether names of functions of ours stand in a container by themselves
    cdef set allowed  # classes
    cdef dict opaque
    cdef readonly list refused
    cdef readonly list named

    def __cinit__(self, pickle, Py_ssize_t start, records, list leases, decode, set wanted, Py_ssize_t first_row,
                  Py_ssize_t first_dim, rules, int64_t own_storage, made_storage, nested_storage, dict placed,
                  bint fast, bint sweep):
        self.rules = rules
        self.legacy = rules.legacy
        self.allowed = set(rules.allow.values())
        self.lenient = rules.unknown == "opaque"
        self.placed = placed
        self.placed_made = {}
        self.fast = fast
        self.opaque = {}
        self.refused = []
        self.named = [] if sweep else None

    # -------------------------------------------------------------- globals

    cdef object find(self, bytes key):
        """The meaning of ``b"module\\nname\\n"``; an Opaque for what is not allowed."""
        found = _GLOBALS.get(key)
        if found is None:
            found = self.find_rare(key)
        elif self.named is not None:
            self.named.append(_Named((<_Global> found).module, (<_Global> found).name, self.at))
        if type(found) is _Global:
            if (<_Global> found).value is not None:
                return self.value_of((<_Global> found).value)
            if (<_Global> found).kind == K_INERT:
                if self.maker is not None:
                    raise _NotPlain("an object of torch's own")
                return self.inert(key, (<_Global> found).module, (<_Global> found).name)
        return found

    cdef inline object value_of(self, object value):
        """What a name that stands for itself is in the tree."""
        if self.maker is None:
            return value
        found = self.maker.values.get(value)
        if found is None:
            raise _NotPlain("a value of some other sort")
        return found

    cdef object find_rare(self, bytes key):
        """Names that the table does not have as they are: Python 2's, the caller's, the file's own, unknown ones."""
        try:
            module, name, _ = key.decode("utf-8").split("\n")
        except (UnicodeDecodeError, ValueError):
            self.wrong("a name that is not UTF-8, or has a newline")
        if self.named is not None:
            self.named.append(_Named(module, name, self.at))
        modern = _NAME_MAPPING.get((module, name)) or (_IMPORT_MAPPING.get(module, module), name)
        found = _GLOBALS.get(f"{modern[0]}\n{modern[1]}\n".encode())
        if found is not None:
            return found
        if self.maker is not None:
            raise _NotPlain("a name that is not on the list")
        found = self.rules.allow.get((module, name))
        if found is not None:
            return found
        known = key in self.opaque
        found = self.inert(key, module, name)
        own = self.rules.own and module.startswith(self.rules.own)
        if not (known or own) and len(self.refused) < MAX_REFUSED:
            self.refused.append(f"{module}.{name}")
        return found

    cdef object inert(self, bytes key, str module, str name):
        found = self.opaque.get(key)
        if found is None:
            self.charge(COST_OPAQUE + 4 * len(key))
            found = self.opaque[key] = _Opaque(module, name)
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
        return self.push(self.find(f"{module}\n{name}\n".encode("utf-8", "surrogatepass")))

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
            if type(<object> self.stack[height + i]) is _Global \
                    and (<_Global> <object> self.stack[height + i]).kind in (K_CALL, K_ORDERED_DICT):
                self.bare_names = True  # other kinds are arguments of torch's and NumPy's calls
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
        cdef object key, target, put = None
        if height <= self.floor:
            self.wrong("there is no mapping below the items")
        if (self.sp - height) & 1:
            self.wrong("expected keys and values in pairs")
        target = <object> self.stack[height - 1]
        if type(target) is _Opaque:
            (<list> target.items).extend([(<object> self.stack[i], <object> self.stack[i + 1])
                                          for i in range(height, self.sp, 2)])
            return self.drop(height)
        if not PyDict_CheckExact(target) and not PyODict_CheckExact(target):
            put = self.setter(target)
        before = PyDict_Size(target)
        self.charge(COST_ITEM * (self.sp - height) // 2)
        for i in range(height, self.sp, 2):
            key = <object> self.stack[i]
            if type(<object> self.stack[i + 1]) is _Global:
                self.bare_names = True
            if not PyUnicode_CheckExact(key):
                key = self.as_key(key)
            if PyDict_CheckExact(target):
                PyDict_SetItem(target, key, <object> self.stack[i + 1])
            elif PyODict_CheckExact(target):
                PyODict_SetItem(target, key, <object> self.stack[i + 1])
            else:
                put(target, key, <object> self.stack[i + 1])
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
        if PyList_CheckExact(target):
            for i in range(height, self.sp):
                if type(<object> self.stack[i]) is _Global:
                    self.bare_names = True
                PyList_Append(target, <object> self.stack[i])
        else:
            append = self.appender(target)
            for i in range(height, self.sp):
                append(target, <object> self.stack[i])
        return self.drop(height)

    cdef object appender(self, object target):
        """What items are appended with: never a method of an allowed class's own."""
        append = None
        if type(target) in _LISTS:
            append = type(target).append
        elif type(target) in self.allowed:
            from tensorio import allowing
            append = allowing.appender(target)
        if append is None:
            self.expected("a list", target)
        return append

    cdef object setter(self, object target):
        """What items are set with: never a method of an allowed class's own."""
        put = None
        if type(target) in _DICTS:
            put = dict.__setitem__
        elif type(target) in self.allowed:
            from tensorio import allowing
            put = allowing.setter(target)
        if put is None:
            self.expected("a dict", target)
        return put

    cdef int op_dict(self, Py_ssize_t height) except -1:
        """DICT: the pairs above the mark become a dict."""
        cdef Py_ssize_t i
        cdef dict out = {}
        if (self.sp - height) & 1:
            self.wrong("expected keys and values in pairs")
        self.charge(COST_DICT + COST_ITEM * (self.sp - height) // 2)
        for i in range(height, self.sp, 2):
            out[self.as_key(<object> self.stack[i])] = <object> self.stack[i + 1]
        if len(out) != (self.sp - height) // 2:
            self.wrong("a key that occurs twice")
        self.drop(height)
        return self.push(out)

    cdef int add_items(self, Py_ssize_t height) except -1:
        cdef Py_ssize_t i
        if height <= self.floor:
            self.wrong("there is no set below the items")
        target = <object> self.stack[height - 1]
        if type(target) is not set:
            self.expected("a set", target)
        self.charge(COST_ITEM * (self.sp - height))
        for i in range(height, self.sp):
            (<set> target).add(self.as_key(<object> self.stack[i]))
        return self.drop(height)

    cdef object as_key(self, object key):
        """A key, once it is known to be cheap to hash."""
        if type(key) is _Span:
            key = self.contents(<_Span> key)
        self.check_key(key)
        return key

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
                  or _is_key(key) or type(key) is _Global or type(key) is _Opaque):
            if self.plain:
                raise _NotPlain("a key of some other sort")
            if type(key) is not Leaf or self.rules.maker is None:  # torch's tensors are keys by identity
                self.expected("a key of a plain type", key)
        return 0

    # --------------------------------------------------------------- calls

    cdef int op_reduce(self) except -1:
        cdef object args
        self.need(2)
        args = <object> self.stack[self.sp - 1]
        if not PyTuple_CheckExact(args):
            self.expected("a tuple of arguments", args)
        out = self.call(<object> self.stack[self.sp - 2], <tuple> args, None, self.buf[self.at] == c"R")
        self.drop(self.sp - 2)
        return self.push_made(out)

    cdef int op_newobj_ex(self) except -1:
        """cls.__new__(cls, *args, **kwargs)."""
        self.need(3)
        args, kwargs = <object> self.stack[self.sp - 2], <object> self.stack[self.sp - 1]
        if not PyTuple_CheckExact(args):
            self.expected("a tuple of arguments", args)
        if type(kwargs) is not dict:
            self.expected("a dict of arguments", kwargs)
        out = self.call(<object> self.stack[self.sp - 3], <tuple> args, <dict> kwargs, False)
        self.drop(self.sp - 3)
        return self.push_made(out)

    cdef int op_inst(self) except -1:
        """INST and OBJ: a class and, from the mark on, its arguments; INST names the class in its own text."""
        cdef const uint8_t *module
        cdef const uint8_t *name
        cdef Py_ssize_t n_module, n_name, height
        if self.buf[self.at] == c"i":
            self.line(&module, &n_module)
            self.line(&name, &n_name)
            height = self.unmark()
            cls = self.find(PyBytes_FromStringAndSize(<const char *> module, n_module + n_name + 2))
            first = height
        else:
            height = self.unmark()
            if height == self.sp:
                self.wrong("expected a class behind the mark")
            cls = <object> self.stack[height]
            first = height + 1
        self.charge(COST_OBJECT + 8 * (self.sp - height))
        args = tuple([<object> self.stack[i] for i in range(first, self.sp)])
        out = self.call(cls, args, None, False)
        self.drop(height)
        return self.push_made(out)

    cdef inline int push_made(self, object made) except -1:
        if type(made) is _Unbuilt:
            self.unbuilt += 1
        return self.push(made)

    cdef int op_extension(self, uint32_t code) except -1:
        """EXT1, EXT2, EXT4: a name that only the process which wrote the pickle knows."""
        return self.push(self.find(f"copyreg\nextension {code}\n".encode()))

    cdef object call(self, object callee, tuple args, dict kwargs, bint reduce):
        """What ``callee(*args)`` stands for, if `reduce`; else, ``callee.__new__(callee, *args, **kwargs)``."""
        cdef int kind
        if type(callee) is _Opaque:
            self.charge(COST_OPAQUE)
            out = _Opaque(callee.module, callee.name, args)
            out.kwargs = kwargs or None
            return out
        if type(callee) is not _Global:
            return self.call_value(callee, args, kwargs, reduce)
        if kwargs:
            self.wrong(f"{callee!r} takes no named arguments")
        kind = (<_Global> callee).kind
        if self.placed is not None and args and type(args[0]) is tuple and kind in (K_REBUILD, K_REBUILD_V2):
            args = (self.spelled_storage(args[0]), *args[1:])
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
        except (FormatError, UnsupportedError) as error:
            if error.offset is None:
                error.offset = self.at
            raise

    cdef object call_value(self, object callee, tuple args, dict kwargs, bint reduce):
        """Calls of what stands for itself in the tree: plain types, classes that the caller allowed, torch's of old."""
        if type(callee) is _TorchTag:
            return self.old_tensor(callee, args)
        if isinstance(callee, type) and callee in self.allowed:
            self.charge(COST_OPAQUE)
            from tensorio import allowing
            if reduce:
                return allowing.call(callee, self.resolved(args), self.check)
            return allowing.make(callee, self.resolved(args), self.resolved(kwargs), self.check)
        if isinstance(callee, type) and callee in _BY_TYPE:
            return self.call(_BY_TYPE[callee], args, kwargs, reduce)
        self.expected("something to call", callee)

    cdef object old_tensor(self, object tag, tuple args):
        """torch.nn.Parameter(tensor) and torch.FloatTensor() of releases up to 0.3, filled by their state."""
        self.charge(COST_OPAQUE)
        if not args:
            return _Unbuilt(tag)
        if ".sparse." in tag and 2 <= len(args) <= 3 and self.is_tensor(args[0]) and self.is_tensor(args[1]):
            raise UnsupportedError(f"pickle opcode 0x{self.buf[self.at]:02x}: {tag} called with indices and values, "
                                   "as no writer of torch's does", offset=self.at)
        if not self.is_tensor(args[0]) or len(args) > 2:
            self.wrong(f"{tag} is a tag here and can't be called with what is no tensor")
        if type(args[0]) is Leaf and tag in ("torch.nn.parameter.Parameter", "torch.nn.Parameter"):
            self.row_of(<Leaf> args[0]).flags |= TIO_ROW_PARAMETER
        return args[0]

    cdef object call_rare(self, int kind, _Global callee, tuple args):
        # What these make is an object of fixed size, plus at most a copy of their first argument.
        first = args[0] if args else None
        if PyUnicode_CheckExact(first) or type(first) is bytes:
            self.charge(COST_DICT + 2 * <int64_t> len(first))
        else:
            self.charge(COST_OPAQUE + (COST_ITEM * <int64_t> len(first) if isinstance(first, _SIZED) else 0))
        if self.maker is not None and kind < K_NP_RECONSTRUCT:
            return self.call_plain(kind, callee, args)
        if kind == K_REBUILD_KIND:
            return _REBUILD_KINDS[callee.kind_name](args, self)
        if kind == K_REBUILD_QTENSOR:
            return self.qtensor(args)
        if kind == K_REBUILD_FROM_TYPE:
            return self.from_type(args)
        if kind == K_REBUILD_PARAMETER_STATE:
            if len(args) != 4:
                self.wrong(f"expected 4 arguments to rebuild a parameter with state, found {len(args)}")
            return self.parameter(args[:3])
        if kind == K_CALL or kind == K_ORDERED_DICT:
            made = _CALLS[callee.kind_name](self.spelled_out(args), self.check)
            if type(made) is _Redirect:
                return self.call(made.callee, made.args, made.kwargs, False)
            return made
        if kind == K_LOAD_FROM_BYTES:
            return self.load_from_bytes(args) if self.named is None else _Opaque(callee.module, callee.name, args)
        if kind == K_JOBLIB_ARRAY:
            return _Unbuilt("joblib_array")
        return self.call_numpy(kind, callee, args)

    cdef object call_plain(self, int kind, _Global callee, tuple args):
        """The calls that a maker's tensors go with."""
        if kind == K_REBUILD_PARAMETER_STATE and len(args) == 4 and not args[3]:
            return self.parameter(args[:3])
        call = self.maker.calls.get(callee.kind_name) if kind == K_CALL or kind == K_ORDERED_DICT else None
        if call is None:
            raise _NotPlain(f"a call of {callee.name}")
        return call(self.spelled_out(args), self.check)

    cdef object qtensor(self, tuple args):
        """(storage, offset, size, stride, quantizer, requires_grad, hooks)."""
        cdef _StorageRef ref
        if len(args) != 7:
            self.wrong(f"expected 7 arguments to rebuild a quantized tensor, found {len(args)}")
        if type(args[0]) is _Opaque:
            return _Opaque("torch._utils", "_rebuild_qtensor", args)
        if type(args[0]) is not _StorageRef:
            self.expected("a storage", args[0])
        ref = <_StorageRef> args[0]
        # Elements of 2 and 4 bits can't be a view: the storage as it is, and what it would be.
        packed = ref.cls.name in ("QUInt4x2Storage", "QUInt2x4Storage")
        if packed:
            self.placeholders -= 1
        values = self.whole_storage(ref) if packed else self.rebuild(args[:4], 1)
        return _REBUILD_KINDS["rebuild_qtensor"]((values, args[4], args[5], ref.cls.name, args[1:4]), self)

    cdef object from_type(self, tuple args):
        """(function, class, arguments, state): a subclass of tensor."""
        if len(args) != 4 or not PyTuple_CheckExact(args[2]):
            self.wrong("expected a function, a class, arguments and a state to rebuild a tensor of some type")
        func = args[0]
        if type(func) is _Global and (<_Global> func).kind not in _TENSOR_KINDS:
            self.expected("a function that rebuilds a tensor", func)  # one of another type might call one, and so on
        if type(func) is _Global or type(func) is _Opaque:
            made = self.call(func, <tuple> args[2], None, True)
        else:  # before 2.6, a jagged tensor was made by its class
            self.charge(COST_OPAQUE)
            made = _REBUILD_KINDS["from_class"]((func, args[2], args[3]), self)
        return _REBUILD_KINDS["from_type"]((made, args[1], args[3]), self)

    def check(self, key):
        """Refuse what is expensive to hash."""
        self.check_key(key)

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
        elif type(target) is _Unbuilt:
            state = self.pop()
            self.unbuilt -= 1
            return self.replace(self.build(target, state))
        elif self.maker is not None and id(target) not in self.unfilled:
            raise _NotPlain("an object that takes a state")
        elif id(target) not in self.unfilled and self.is_tensor(target):
            self.old_variable(target, state)
        else:
            self.build_in_place(target, state)
        return self.drop(self.sp - 1)

    cdef object build(self, object unbuilt, object state):
        """What an object without contents becomes with its state."""
        try:
            if type(unbuilt.kind) is _TorchTag:
                return self.old_state(unbuilt.kind, state)
            if unbuilt.kind == "np_array":
                return self.np_array(state)
            if unbuilt.kind == "joblib_array":
                return self.joblib_array(state)
            return _STATES[unbuilt.kind](unbuilt, state, self.check)
        except (FormatError, UnsupportedError) as error:
            if error.offset is None:
                error.offset = self.at
            raise

    cdef int build_in_place(self, object target, object state) except -1:
        try:
            if self.unfilled.pop(id(target), None) is not None:
                self.numpy_state(target, state)
            elif type(target) in _STATES:
                _STATES[type(target)](target, state, self.check)
            elif type(target) in self.allowed:
                from tensorio import allowing
                allowing.set_state(target, self.resolved(state))
            else:
                self.expected("an object that takes a state", target)
        except (FormatError, UnsupportedError) as error:
            if error.offset is None:
                error.offset = self.at
            raise
        return 0

    cdef object old_state(self, object tag, object state):
        """A tensor of the time before `_rebuild_tensor`: (storage, offset, size, stride), or a Variable around one."""
        if PyTuple_CheckExact(state) and len(state) == 4 and type(state[0]) is _StorageRef:
            return self.rebuild(state, 1)
        if PyTuple_CheckExact(state) and len(state) == 5 and self.is_tensor(state[0]):
            return state[0]
        self.wrong(f"expected the state of a {tag}: storage, offset, size and stride, or a tensor and its flags")

    cdef int old_variable(self, object target, object state) except -1:
        """Releases up to 0.3: (requires_grad, volatile, hooks) of a Variable."""
        if not PyTuple_CheckExact(state) or len(state) != 3 or type(state[0]) is not bool:
            self.wrong("expected the state of a Variable: requires_grad, volatile and hooks")
        if type(target) is Leaf and state[0] is True:
            self.row_of(<Leaf> target).flags |= TIO_ROW_REQUIRES_GRAD
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

    # ------------------------------------------------------- persistent ids

    cdef int op_persid(self, object pid) except -1:
        """What a persistent id stands for goes where it was: at the top of the stack."""
        if PyUnicode_CheckExact(pid):
            found = self.place(pid)
            self.drop(self.sp - 1)  # last: it may have held the only reference to the id
            return self.push(found)
        word = <object> PyTuple_GET_ITEM(pid, 0) if PyTuple_CheckExact(pid) and PyTuple_GET_SIZE(pid) else None
        count = len(pid) if word is not None else 0
        if _is_word(word, "storage"):
            if count != 5 and not (count == 6 and self.rules.legacy) and self.named is None:
                self.wrong(f"expected a persistent id of 5 parts, found {count}")
            if 5 <= count <= 6 and type(<object> PyTuple_GET_ITEM(pid, 1)) is not _Opaque:
                return self.op_binpersid(self.rules.legacy)
        elif _is_word(word, "module") and count == 4 and self.rules.legacy:  # class, source file, source
            return self.module_class(<object> PyTuple_GET_ITEM(pid, 1))
        elif self.placed is not None and count == 3 and type(word) is not str:  # the same, in tar files
            return self.module_class(word)
        elif _is_word(word, "reduce_package"):  # torch.package: (word, number, function, arguments); kept as data
            pass
        elif not (self.named is not None or (self.lenient and type(word) is str)):
            self.wrong("expected a persistent id: ('storage', class, key, location, numel), found "
                       + (f"a tuple that begins with {_kind_of(pid[0])}" if count else _kind_of(pid)))
        out = _Opaque("", "persistent id", pid if PyTuple_CheckExact(pid) else (pid,))
        self.charge(COST_OPAQUE)
        self.drop(self.sp - 1)
        return self.push(out)

    cdef int module_class(self, object cls) except -1:
        """The class of a module, told by a persistent id; what is known to be something else is none."""
        if type(cls) is not _Opaque and not (isinstance(cls, type) and cls in self.allowed):
            self.expected("the class of a module in a persistent id", cls)
        kept = cls  # the id may be all that holds it
        self.drop(self.sp - 1)
        return self.push(kept)

    cdef object spelled_storage(self, tuple pid):
        """Tar files whose writer put the parts of a persistent id where the storage would be."""
        self.push(pid)
        self.op_persid(<object> self.stack[self.sp - 1])
        return self.pop()

    cdef object place(self, str key):
        """A tensor or storage that is described elsewhere in the file."""
        cdef tio_row row
        cdef int64_t[2 * MAX_RANK] dims
        cdef Py_ssize_t record
        cdef int itemsize
        found = self.placed_made.get(key)
        if found is not None:
            return found
        placed = None if self.placed is None else self.placed.get(key)
        if placed is None:
            if self.named is not None:
                return _Opaque("", "persistent id", (key,))
            self.wrong(f"persistent id {escaped(key)}: there is no such tensor in the file")
        if self.maker is not None:
            self.location = "cpu"
            self.moves = self.maker.moves("cpu")
        record = placed.record
        if not 0 <= record < self.n_records:
            raise ValueError(f"record {record}")
        known = _BY_NAME[placed.dtype]
        row.dtype, row.flags, itemsize = known.code, 0, known.itemsize
        if placed.size is None:
            row.rank = 1
            dims[0], dims[1] = self.extents[record].nbytes // itemsize, 1
        else:
            row.rank = self.read_dims(placed.size, placed.stride, dims)
        self.geometry(self.whole(placed.offset, "the storage offset"), record, 0, self.extents[record].nbytes, itemsize,
                      &row, dims)
        found = self.placed_made[key] = self.tensor(&row, dims)
        return found

    def inner_pickle(self):
        """A pickle in the middle of this one, by the same rules and on the same budget; all in it are values."""
        cdef _Machine inner = _Machine(<object> self.raw.obj, self.start + self.pos, _Records.none(), None, None, None,
                                       0, 0, self.rules, -1, None, None, None, False, self.named is not None)
        inner.budget, inner.tuple_keys = self.budget + self.allowance(), self.tuple_keys
        try:
            made = inner.run()
        except (FormatError, UnsupportedError) as error:
            if error.offset is not None:
                error.offset += self.pos
            raise
        finally:
            self.refused.extend(inner.refused)
            if self.named is not None:
                self.named.extend([named._replace(offset=named.offset + self.pos) for named in inner.named])
        self.budget, self.tuple_keys = inner.budget - self.allowance(), inner.tuple_keys
        self.pos += inner.pos
        return made

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
                self.need(1)
                self.op_persid(<object> self.stack[self.sp - 1])
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
        """Opcodes that torch does not write for tensors; first those that it writes for values."""
        cdef uint64_t count
        if op == 0x80:  # PROTO
            if self.take(1)[0] > 5:
                self.wrong(f"expected protocol 5 or less, found {self.buf[self.pos - 1]}")
        elif op == 0x8a:  # LONG1
            self.integer(self.take(1)[0])
        elif op == 0x8b:  # LONG4
            self.integer(tio_load32(self.take(4)))
        elif op == 0x81:  # NEWOBJ
            self.op_reduce()
        elif op == 0x92:  # NEWOBJ_EX
            self.op_newobj_ex()
        elif op == 0x8c:  # SHORT_BINUNICODE
            count = self.take(1)[0]
            self.text(self.take_u(count) if count else self.buf, count)
        elif op == 0x8d:  # BINUNICODE8
            count = tio_load64(self.take(8))
            self.text(self.take_u(count) if count else self.buf, count)
        elif op == 0x95:  # FRAME: a hint for readers of streams, but it may not lie
            count = tio_load64(self.take(8))
            if count > <uint64_t> (self.n - self.pos):
                self.short()
            self.frame_end = self.pos + <Py_ssize_t> count
        elif op == 0x94:  # MEMOIZE
            self.put(self.memo_next)
        elif op == 0x93:  # STACK_GLOBAL
            self.op_stack_global()
        elif op == c"0":  # POP
            if self.sp == self.floor and self.mp:
                self.unmark()
            else:
                self.need(1)
                self.drop_top()
        elif op == c"1":  # POP_MARK
            self.drop(self.unmark())
        elif op == c"2":  # DUP
            self.need(1)
            self.again(<object> self.stack[self.sp - 1])
            self.push(<object> self.stack[self.sp - 1])
        elif op == c"i" or op == c"o":  # INST, OBJ
            self.op_inst()
        elif op == 0x82:  # EXT1
            self.op_extension(self.take(1)[0])
        elif op == 0x83:  # EXT2
            count = self.take(2)[0]
            self.op_extension(<uint32_t> (count | <uint32_t> self.buf[self.pos - 1] << 8))
        elif op == 0x84:  # EXT4
            self.op_extension(tio_load32(self.take(4)))
        elif not self.bytes_op(op) and not self.container_op(op) and not self.text_op(op):
            if op == 0x97 or op == 0x98:  # NEXT_BUFFER, READONLY_BUFFER
                raise UnsupportedError(f"pickle opcode 0x{op:02x}: a buffer that was handed over outside of the file",
                                       offset=self.at)
            self.wrong("no pickle has such an opcode")
        return 0

    cdef int drop_top(self) except -1:
        if type(<object> self.stack[self.sp - 1]) is _StorageRef:
            self.placeholders -= 1
        return self.drop(self.sp - 1)

    cdef bint container_op(self, uint8_t op) except -1:
        cdef Py_ssize_t i, height
        if op == 0x8f:  # EMPTY_SET
            self.charge(COST_SET)
            self.push(set())
        elif op == 0x90:  # ADDITEMS
            self.add_items(self.unmark())
        elif op == 0x91:  # FROZENSET
            height = self.unmark()
            self.charge(COST_SET + COST_ITEM * (self.sp - height))
            elements = frozenset([self.as_key(<object> self.stack[i]) for i in range(height, self.sp)])
            self.drop(height)
            self.push(elements)
        elif op == c"l":  # LIST
            self.op_list(self.unmark())
        elif op == c"d":  # DICT
            self.op_dict(self.unmark())
        else:
            return False
        return True

    cdef bint text_op(self, uint8_t op) except -1:
        """Protocol 0, whose arguments are lines of text."""
        if op == c"I":  # INT
            self.push(self.text_int(False))
        elif op == c"L":  # LONG
            self.push(self.text_int(True))
        elif op == c"F":  # FLOAT
            self.push(self.text_float())
        elif op == c"V":  # UNICODE
            self.push(self.text_unicode())
        elif op == c"S":  # STRING
            self.push(self.decoded(self.text_string(), self.encoding))
        elif op == c"g":  # GET
            self.get(self.text_index())
        elif op == c"p":  # PUT
            self.put(self.text_index())
        elif op == c"P":  # PERSID
            self.push(self.place(self.text_line(MAX_DIGITS).decode("latin-1")))
        else:
            return False
        return True

    # ------------------------------------------------------------ the result

    cdef object finish(self):
        if self.mp or self.sp != 1:
            self.wrong("the pickle stops with more or less than one object")
        out = self.pop()
        if self.unbuilt:
            self.wrong("the pickle stops before an object has its state")
        if self.placeholders or self.spans or self.bare_names or type(out) is _Global:
            if self.maker is not None:
                raise _NotPlain("a storage, or a name, by itself")
            return self.spell_out(out, True)
        return out

    cdef object resolved(self, object node):
        """What user code is given: without the marks that this machine leaves in trees until `finish`."""
        return self.spell_out(node, False) if self.spans or self.bare_names else node

    cdef object spell_out(self, object root, bint whole):
        """Put arrays for storages that were saved by themselves, bytes for spans, `Opaque` for bare names.

        In everything that holds other objects, except sets; if it is the `whole` tree, a storage that is found nowhere
        is refused. Tuples are made anew, inner ones first.
        """
        cdef dict done = {}  # by id of containers that were gone through: (container, what it became)
        cdef list stack = [(root, False)]
        while stack:
            node, ready = stack.pop()
            if type(node) is _StorageRef and whole:
                self.placeholders -= 1
            if isinstance(node, _FLAT) or (id(node) in done and not ready):
                continue
            if type(node) is _StorageRef:
                if whole:
                    done[id(node)] = (node, self.whole_storage(<_StorageRef> node))
            elif type(node) is _Global:
                done[id(node)] = (node, _Opaque((<_Global> node).module, (<_Global> node).name))
            elif type(node) is _Span:
                done[id(node)] = (node, self.contents(<_Span> node))
            elif ready:
                done[id(node)] = (node, _exchanged(node, done))
            else:
                inside = _inside(node)
                if inside:
                    done[id(node)] = (node, node)
                    stack.append((node, True))
                    stack.extend([(child, False) for child in inside])
        if whole and self.placeholders > 0:
            raise UnsupportedError("a storage that was saved by itself, inside a set or an unknown object")
        return done[id(root)][1] if id(root) in done else root


cdef tuple _FLAT = (str, bytes, bytearray, int, float, complex, type, Enum, Leaf, type(None))


cdef list _inside(object node):
    """What an object holds, its attributes as the dict that they are in."""
    cdef list out
    if isinstance(node, dict):
        out = list((<dict> node).values())
    elif isinstance(node, (list, tuple, deque)):
        out = list(node)
    elif type(node) is _Opaque:
        out = [node.args, node.kwargs, node.state, node.items]
    elif isinstance(node, _TensorKind):
        out = [getattr(node, name) for name in node.PARTS]
    else:
        out = []
    held = _attributes_of(node)
    if held:
        out.append(held)
    return out


cdef object _attributes_of(object node):
    try:
        held = object.__getattribute__(node, "__dict__")
    except AttributeError:
        return None
    return held if type(held) is dict else None


cdef object _exchanged(object node, dict done):
    """A container with its children as they became; the same one, but for tuples."""
    if type(node) is tuple:
        new = tuple([done[id(child)][1] if id(child) in done else child for child in node])
        return node if all([a is b for a, b in zip(new, node)]) else new
    if isinstance(node, dict):
        for key, child in list((<dict> node).items()):
            if id(child) in done and done[id(child)][1] is not child:
                dict.__setitem__(node, key, done[id(child)][1])
    elif isinstance(node, (list, deque)):
        base = list if isinstance(node, list) else deque
        for i, child in enumerate(list(node)):
            if id(child) in done and done[id(child)][1] is not child:
                base.__setitem__(node, i, done[id(child)][1])
    elif type(node) is _Opaque or isinstance(node, _TensorKind):
        for name in ("args", "kwargs", "state") if type(node) is _Opaque else node.PARTS:
            child = getattr(node, name)
            if id(child) in done and done[id(child)][1] is not child:
                object.__setattr__(node, name, done[id(child)][1])
    return node


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
    from tensorio.machine import rebuild
    return rebuild.lazy_bits(plain, conj, neg)


cdef object _rebuild_module():
    """The rare kinds need NumPy, which most pickles of tensors do not."""
    from tensorio.machine import rebuild
    return rebuild


def loads(pickle, records=None, *, list leases=None, decode=None, set wanted=None, rules=_Rules(),
          Py_ssize_t start=0, Py_ssize_t first_row=0, Py_ssize_t first_dim=0, dict placed=None,
          int64_t own_storage=-1, made_storage=None, nested_storage=None):
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
    own_storage : int
        Storage index of the buffer: NumPy arrays of plain types whose bytes are
        in the pickle become tensors over it. -1: they are copied out as values.
    made_storage : callable, optional
        ``made_storage(data)`` returns the storage index of bytes that had to be
        made, so that the other arrays of plain types are tensors, too; with
        `leases`, it has appended the lease of that storage. None: they are
        values.
    nested_storage : callable, optional
        ``nested_storage(place, nbytes)`` returns (dtype, storage, offset, nbytes)
        of the elements of a storage that was saved as a file of its own into a
        string of bytes: `place` is where that lies in the buffer, or the bytes
        themselves if they had to be made.

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
    cdef _Machine machine = None
    for fast in (True, False):
        machine = _Machine(pickle, start, records, leases, decode, wanted, first_row, first_dim, rules, own_storage,
                           made_storage, nested_storage, placed, fast, False)
        try:
            obj = machine.run()
            break
        except _Restart:
            continue
        except UnsafePickleError as error:  # what an allowed class leads to
            raise _refusal([*machine.refused, *error.globals]) from None
        except (FormatError, UnsupportedError):
            if machine.refused and rules.unknown == "error":
                raise _refusal(machine.refused) from None
            raise
        finally:
            machine.close()
    if machine.refused and rules.unknown == "error":
        raise _refusal(machine.refused)
    rows, dims = machine.table()
    return _Loaded(obj, rows, dims, start + machine.pos, machine.mentioned or [])


def names(pickle, Py_ssize_t start=0, str own=""):
    """List every name that a pickle refers to, in order, without making any tensor of it.

    Parameters
    ----------
    pickle : buffer
    start : int
        Where the pickle begins in the buffer.
    own : str
        See `Rules`.

    Returns
    -------
    named : list of Named
        Once per opcode that names something.
    end : int or None
        First byte behind the pickle; None if it could not be read to its end.
    error : TensorIOError or None
        Why not.
    """
    cdef _Machine machine = _Machine(pickle, start, None, None, None, None, 0, 0, _Rules("opaque", None, {}, own), 0,
                                     None, None, None, False, True)
    try:
        machine.run()
    except (FormatError, UnsupportedError) as error:
        return machine.named, None, error
    finally:
        machine.close()
    return machine.named, start + machine.pos, None


cdef object _refusal(list refused):
    shown = ", ".join(escaped(name) for name in refused[:4])
    more = f" and {len(refused) - 4} more (see .globals)" if len(refused) > 4 else ""
    return UnsafePickleError(
        f"the pickle names what is not on the list of harmless names: {shown}{more}; "
        "unknown='opaque' opens it without running any of it", globals=refused)
