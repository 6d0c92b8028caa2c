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

The machine is one class in eight files: `_Stack` (input, stack, memo, budget),
`_Names` (what names stand for), `_Storages` (the records they are), `_Tensors`
(views, rows), `_Arrays` (bytes, NumPy arrays), `_Containers` (and keys), `_Calls`
(calls, states, persistent ids) and, here, `_Machine` (the loop).
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
    # As COST_OBJECT in _machine_stack.pxi.
    COST_DICT = 96
    COST_ORDERED_DICT = 320
    COST_SET = 256
    COST_OPAQUE = 512
    COST_ITEM = 72         # of a dict or set, with the room they keep free


class _Restart(Exception):
    """The pickle asks for an object that the fast path did not make."""


include "_machine_stack.pxi"
include "_machine_names.pxi"
include "_machine_storages.pxi"
include "_machine_tensors.pxi"
include "_machine_numpy.pxi"
include "_machine_containers.pxi"
include "_machine_calls.pxi"


@cython.final
cdef class _Machine(_Calls):
    """One run over one pickle; see `loads` for its parameters."""
    cdef bint fast  # whether to take plain tensors by the fast path

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

    def inner_pickle(self):
        """A pickle in the middle of this one, by the same rules and on the same budget; all in it are values."""
        cdef _Machine inner = _Machine(<object> self.raw.obj, self.start + self.pos, self.rules,
                                       self.named is not None, _Records.none(), None, None, None, 0, 0, -1, None, None,
                                       None)
        inner.budget, inner.tuple_keys = self.budget + self.allowance(), self.tuple_keys
        try:
            made = inner.run()
        except (FormatError, UnsupportedError) as error:
            if error.offset is not None:
                error.offset += self.pos
            raise
        finally:
            inner.close()
            self.refused.extend(inner.refused)
            if self.named is not None:
                self.named.extend([named._replace(offset=named.offset + self.pos) for named in inner.named])
        self.budget, self.tuple_keys = inner.budget - self.allowance(), inner.tuple_keys
        self.pos += inner.pos
        return made


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
        machine = _Machine(pickle, start, rules, False, records, leases, decode, wanted, first_row, first_dim,
                           own_storage, made_storage, nested_storage, placed)
        machine.fast = fast
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
    cdef _Machine machine = _Machine(pickle, start, _Rules("opaque", None, {}, own), True, None, None, None, None, 0, 0,
                                     0, None, None, None)
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
