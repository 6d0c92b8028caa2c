# SPDX-License-Identifier: Apache-2.0
# The bottom of the pickle machine: its input, stack, memo, budget, and the errors that say where. Knows no tensors.
# A part of _unpickler.pyx, in which all names are defined.

cdef enum:
    MAX_LONG = 255  # bytes of one integer: conversion to text is quadratic
    MAX_DIGITS = 640  # of an integer in text, for the same reason: what CPython takes without a limit being set
    # What objects made by one opcode take, in bytes: measured with sys.getsizeof on CPython 3.11, rounded up.
    COST_OBJECT = 64
    # Promise P3 of docs/security.md: a pickle costs at most 32 times its bytes in memory, besides what is spare.
    BUDGET_PER_BYTE = 32
    MEMO_AHEAD = 4096  # slots that may be filled before as many bytes were read


cdef class _Stack:
    """The input, the stack with its marks, the memo and the budget of one run.

    Parameters
    ----------
    pickle : buffer
        Bytes that begin with the pickle at `start`.
    start : int
        Errors count offsets from here.
    """
    cdef const uint8_t *buf
    cdef Py_ssize_t n, pos, at
    cdef Py_buffer raw
    cdef bint held
    cdef Py_ssize_t start  # of the pickle within the buffer
    cdef PyObject **stack
    cdef Py_ssize_t sp, room
    cdef Py_ssize_t *marks
    cdef Py_ssize_t mp, marks_room
    cdef Py_ssize_t floor  # stack height at the innermost mark
    cdef PyObject **memo
    cdef Py_ssize_t memo_room
    cdef Py_ssize_t memo_next
    cdef Py_ssize_t frame_end  # of the open FRAME; 0 if none
    cdef int64_t budget  # bytes that may still be made, besides what the bytes read allow
    cdef const char *errors  # how text is decoded
    cdef bint plain  # whether what is odd, though not damaged, ends the run by `NotPlain`
    cdef Py_ssize_t placeholders  # mentions of storages, less those that tensors were made of

    def __cinit__(self, pickle, Py_ssize_t start, *args):
        PyObject_GetBuffer(pickle, &self.raw, PyBUF_SIMPLE)
        self.held = True
        if not 0 <= start <= self.raw.len:
            raise ValueError(f"start {start} in a buffer of {self.raw.len} bytes")
        self.start = start
        self.buf = <const uint8_t *> self.raw.buf + start
        self.n = self.raw.len - start

    def __dealloc__(self):
        self.close()
        PyMem_Free(self.stack)
        PyMem_Free(self.marks)
        PyMem_Free(self.memo)

    cdef int close(self) except -1:
        """Let go of the pickle and of all objects: an error's traceback may keep this object much longer."""
        cdef Py_ssize_t i, count = self.memo_room
        self.drop(0)
        self.memo_room = 0
        for i in range(count):
            if not <size_t> self.memo[i] & 1:
                Py_XDECREF(self.memo[i])
        if self.held:
            self.held = False
            PyBuffer_Release(&self.raw)
        return 0

    # ------------------------------------------------------------ failures

    @cython.final
    cdef int wrong(self, str what) except -1:
        """Structural damage: say which opcode, where, and which rule."""
        raise HeaderError(f"pickle opcode 0x{self.buf[self.at]:02x}: {what}", offset=self.at)

    @cython.final
    cdef int short(self) except -1:
        raise TruncatedError(
            f"pickle opcode 0x{self.buf[self.at]:02x}: its argument runs past the end of the pickle of {self.n} bytes",
            offset=self.at)

    @cython.final
    cdef int expected(self, str what, object found) except -1:
        return self.wrong(f"expected {what}, found {_kind_of(found)}")

    # ----------------------------------------------------------- the stack

    @cython.final
    cdef int grow(self) except -1:
        cdef Py_ssize_t room = 2 * self.room if self.room else 256
        cdef PyObject **p = <PyObject **> PyMem_Realloc(self.stack, room * sizeof(PyObject *))
        if p == NULL:
            raise MemoryError()
        self.stack = p
        self.room = room
        return 0

    @cython.final
    cdef inline int push(self, object o) except -1:
        if self.sp == self.room:
            self.grow()
        Py_INCREF(o)
        self.stack[self.sp] = <PyObject *> o
        self.sp += 1
        return 0

    @cython.final
    cdef inline int need(self, Py_ssize_t count) except -1:
        """At least `count` items above the innermost mark."""
        if self.sp - self.floor < count:
            self.wrong("the stack has too few items")
        return 0

    @cython.final
    cdef inline object pop(self):
        cdef object o
        self.sp -= 1
        o = <object> self.stack[self.sp]
        Py_DECREF(o)
        return o

    @cython.final
    cdef int drop(self, Py_ssize_t height) except -1:
        """Pop down to `height`. Objects are let go one at a time, so that the stack is whole whenever code runs."""
        while self.sp > height:
            self.sp -= 1
            Py_DECREF(<object> self.stack[self.sp])
        return 0

    @cython.final
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

    @cython.final
    cdef Py_ssize_t unmark(self) except -1:
        """Close the innermost mark; the height at which it stood."""
        cdef Py_ssize_t height
        if self.mp == 0:
            self.wrong("there is no open mark")
        self.mp -= 1
        height = self.marks[self.mp]
        self.floor = self.marks[self.mp - 1] if self.mp else 0
        return height

    @cython.final
    cdef inline int charge(self, int64_t nbytes) except -1:
        """Count what an opcode makes.

        What the bytes read so far allow, since nobody knows how many of those that follow are the pickle's. A third
        of what is promised is left for what this does not count: the stack, the memo, fragmentation.
        """
        self.budget -= nbytes
        if self.budget + self.allowance() < 0:
            raise LimitError(
                f"pickle of {self.n} bytes that would take over {BUDGET_PER_BYTE} times its size in memory",
                offset=self.at)
        return 0

    @cython.final
    cdef inline int64_t allowance(self):
        return BUDGET_PER_BYTE * <int64_t> self.pos // 3 * 2

    # ------------------------------------------------------------ the memo

    @cython.final
    cdef int memo_grow(self, Py_ssize_t index) except -1:
        cdef Py_ssize_t room
        cdef void *p
        # A pickle of n bytes can't fill more than n slots, and fills them in order: larger numbers only ask for memory.
        if index < 0 or index > self.n or index > self.pos + MEMO_AHEAD:
            raise LimitError(f"pickle memo slot {index} in a pickle of {self.n} bytes", offset=self.at)
        room = index + index // 2 + 256
        p = PyMem_Realloc(self.memo, room * sizeof(PyObject *))
        if p == NULL:
            raise MemoryError()
        self.memo = <PyObject **> p
        memset(self.memo + self.memo_room, 0, (room - self.memo_room) * sizeof(PyObject *))
        self.memo_room = room
        return 0

    @cython.final
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

    @cython.final
    cdef inline int put(self, Py_ssize_t index) except -1:
        self.need(1)
        if index >= self.memo_room:
            self.memo_grow(index)
        if type(<object> self.stack[self.sp - 1]) is _Unbuilt:
            (<object> self.stack[self.sp - 1]).slots.append(index)
        Py_INCREF(<object> self.stack[self.sp - 1])
        return self.memo_set(index, self.stack[self.sp - 1])

    @cython.final
    cdef int replace(self, object built) except -1:
        """Put what became of the `Unbuilt` at the top in its place: on the stack and in the memo."""
        unbuilt = self.pop()
        for index in (<list> unbuilt.slots):
            if self.memo[<Py_ssize_t> index] == <PyObject *> unbuilt:
                Py_INCREF(built)
                self.memo_set(index, <PyObject *> built)
        return self.push(built)

    @cython.final
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

    @cython.final
    cdef int get(self, Py_ssize_t index) except -1:
        if index < 0 or index >= self.memo_room or self.memo[index] == NULL:
            self.wrong(f"memo slot {index} was never set")
        if <size_t> self.memo[index] & 1:
            self.revive(index)
        self.again(<object> self.memo[index])
        return self.push(<object> self.memo[index])

    @cython.final
    cdef inline int again(self, object o) except -1:
        """Check what is about to be on the stack a second time."""
        if type(o) is _StorageRef:
            self.placeholders += 1  # each mention is counted, see `finish`
        elif type(o) is _Unbuilt:
            self.wrong("an object that is referred to before it has its state")
        return 0

    # ------------------------------------------------------------ operands

    @cython.final
    cdef inline const uint8_t *take(self, Py_ssize_t count) except NULL:
        cdef const uint8_t *p = self.buf + self.pos
        if count > self.n - self.pos:
            self.short()
        self.pos += count
        return p

    @cython.final
    cdef const uint8_t *take_u(self, uint64_t count) except NULL:
        """Like `take`, for lengths as they are in the file."""
        if count > <uint64_t> (self.n - self.pos):
            self.short()
        return self.take(<Py_ssize_t> count)

    @cython.final
    cdef int text(self, const uint8_t *p, uint64_t count) except -1:
        self.charge(COST_OBJECT + <int64_t> count)
        try:
            return self.push(PyUnicode_DecodeUTF8(<const char *> p, <Py_ssize_t> count, self.errors))
        except UnicodeDecodeError:
            self.wrong("expected UTF-8")

    @cython.final
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

    @cython.final
    cdef int integer(self, uint64_t count) except -1:
        """LONG1, LONG4: a little-endian two's complement number."""
        cdef const uint8_t *p
        if count > MAX_LONG:
            raise LimitError(f"pickle integer of {count} bytes; at most {MAX_LONG} are read", offset=self.at)
        p = self.take_u(count) if count else self.buf
        return self.push(int.from_bytes(PyBytes_FromStringAndSize(<const char *> p, <Py_ssize_t> count), "little",
                                        signed=True))

    # ------------------------------------------------------- text operands

    @cython.final
    cdef bytes text_line(self, Py_ssize_t limit):
        """The argument of an opcode of protocol 0: up to the next newline, at most `limit` bytes."""
        cdef const uint8_t *p
        cdef Py_ssize_t count
        self.line(&p, &count)
        if count > limit:
            raise LimitError(f"pickle number of {count} characters; at most {limit} are read", offset=self.at)
        return PyBytes_FromStringAndSize(<const char *> p, count)

    @cython.final
    cdef object text_int(self, bint long_suffix):
        """INT ("5", or "00" and "01" for bools), LONG ("5L")."""
        cdef bytes text = self.text_line(MAX_DIGITS)
        if not long_suffix and text == b"00":
            return False
        if not long_suffix and text == b"01":
            return True
        if long_suffix and text.endswith(b"L"):
            text = text[0:len(text) - 1]
        if not _DECIMAL.match(text):
            self.wrong(f"expected a decimal number, found {escaped(text)}")
        return int(text)

    @cython.final
    cdef object text_float(self):
        cdef bytes text = self.text_line(MAX_DIGITS)
        if not _FLOAT.match(text):
            self.wrong(f"expected a number, found {escaped(text)}")
        return float(text)

    @cython.final
    cdef Py_ssize_t text_index(self) except -1:
        cdef bytes text = self.text_line(18)
        if not text.isdigit():
            self.wrong(f"expected a memo slot, found {escaped(text)}")
        return int(text)

    @cython.final
    cdef str text_unicode(self):
        """UNICODE: raw-unicode-escape; narrow builds of Python 2 wrote characters over U+FFFF as two halves."""
        cdef bytes text = self.text_line(self.n)
        self.charge(COST_OBJECT + 4 * len(text))
        try:
            shown = text.decode("raw-unicode-escape")
            return shown.encode("utf-16", "surrogatepass").decode("utf-16") if _HALF.search(shown) else shown
        except UnicodeError:
            self.wrong("expected text in raw-unicode-escape")

    @cython.final
    cdef bytes text_string(self):
        """STRING: a quoted string literal of Python 2."""
        cdef bytes text = self.text_line(self.n).strip()
        self.charge(COST_OBJECT + 2 * len(text))
        if not _QUOTED.match(text):
            self.wrong("expected a quoted string")
        try:
            return _ESCAPE.sub(_unescape, text[1:len(text) - 1])
        except KeyError:
            self.wrong("an escape that no string literal has")

    @cython.final
    cdef object decoded(self, bytes raw, object encoding):
        """A string of Python 2: text in `encoding`; if that is None, text if it is UTF-8, else bytes."""
        if encoding == "bytes":
            return raw
        try:
            return raw.decode("utf-8" if encoding is None else encoding)
        except UnicodeError:
            if encoding is None:
                return raw
            if self.plain:
                raise _NotPlain("text in another encoding") from None
            self.wrong(f"expected text in {encoding}, found {escaped(raw)}; try encoding='latin1' or 'bytes'")


_DECIMAL = _re.compile(rb"[+-]?[0-9]{1,640}\Z")
_FLOAT = _re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]{1,4})?|\.[0-9]+(?:[eE][+-]?[0-9]{1,4})?|inf|nan)\Z")
_QUOTED = _re.compile(rb"(?:'.*'|\".*\")\Z", _re.S)
_HALF = _re.compile("[\ud800-\udfff]")
_ESCAPE = _re.compile(rb"\\(?:x([0-9a-fA-F]{2})|([0-7]{1,3})|(.))", _re.S)
_PLAIN_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v",
                  b"\n": b"", b"\\": b"\\", b"'": b"'", b'"': b'"'}


def _unescape(found):
    """One escape of a string literal, as Python 2's repr wrote it."""
    hexadecimal, octal, plain = found.groups()
    if plain is not None:
        return _PLAIN_ESCAPES[plain]
    return bytes([int(hexadecimal, 16) if hexadecimal else int(octal, 8) & 0xFF])
