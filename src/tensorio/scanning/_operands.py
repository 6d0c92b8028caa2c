"""Where the operands of pickle opcodes end, and what those that matter say.

Source: CPython's ``Lib/pickletools.py`` and ``Modules/_pickle.c`` (protocols 0 to 5).
"""

from __future__ import annotations

import contextlib
import re
import struct

__all__ = [
    "LENGTH",
    "NAMES",
    "NO_OPCODE",
    "TEXT_MAX",
    "WIDTH",
    "Truncated",
    "end_of_operand",
    "line_at",
    "number_at",
    "text_at",
]

# Characters of a text that are looked at: no name that leads anywhere is longer.
TEXT_MAX = 4096
NUMBER_MAX = 20  # bytes of an int that are read

# What follows an opcode: so many bytes; or a length in so many bytes and then the data; or lines; -1 if no opcode.
LINE, LINES, BYTES1, BYTES4, SIGNED4, BYTES8, NO_OPCODE = -2, -3, -4, -5, -6, -7, -1

_FIXED = {
    0: "(MARK .STOP 0POP 1POP_MARK 2DUP NNONE RREDUCE aAPPEND bBUILD dDICT }EMPTY_DICT eAPPENDS lLIST ]EMPTY_LIST "
       "oOBJ QBINPERSID sSETITEM tTUPLE )EMPTY_TUPLE uSETITEMS \x81NEWOBJ \x85TUPLE1 \x86TUPLE2 \x87TUPLE3 "
       "\x88NEWTRUE \x89NEWFALSE \x8fEMPTY_SET \x90ADDITEMS \x91FROZENSET \x92NEWOBJ_EX \x93STACK_GLOBAL "
       "\x94MEMOIZE \x97NEXT_BUFFER \x98READONLY_BUFFER",
    1: "KBININT1 hBINGET qBINPUT \x80PROTO \x82EXT1",
    2: "MBININT2 \x83EXT2",
    4: "JBININT jLONG_BINGET rLONG_BINPUT \x84EXT4",
    8: "GBINFLOAT \x95FRAME",
    LINE: "FFLOAT IINT LLONG PPERSID SSTRING VUNICODE gGET pPUT",
    LINES: "cGLOBAL iINST",
    BYTES1: "USHORT_BINSTRING CSHORT_BINBYTES \x8cSHORT_BINUNICODE \x8aLONG1",
    BYTES4: "XBINUNICODE BBINBYTES",
    SIGNED4: "TBINSTRING \x8bLONG4",
    BYTES8: "\x8dBINUNICODE8 \x8eBINBYTES8 \x96BYTEARRAY8",
}  # fmt: skip

LENGTH = [NO_OPCODE] * 256
NAMES = [""] * 256
for _length, _words in _FIXED.items():
    for _word in _words.split(" "):
        LENGTH[ord(_word[0])] = _length
        NAMES[ord(_word[0])] = _word[1:]

# Bytes of the length in front of the data, by opcode.
WIDTH = [{BYTES1: 1, BYTES4: 4, SIGNED4: 4, BYTES8: 8}.get(_kind, 0) for _kind in LENGTH]

_NEWLINE = re.compile(rb"\n")
_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|[0-7]{1,3}|[\n\\'\"abfnrtv])")
_ESCAPED = dict(
    zip(b"\n\\'\"abfnrtv", (b"", b"\\", b"'", b'"', b"\a", b"\b", b"\f", b"\n", b"\r", b"\t", b"\v"), strict=True)
)


class Truncated(Exception):
    """The bytes end inside an operand; the message says which."""


def end_of_operand(data: memoryview, at: int) -> int:
    """Return where the operand of the opcode at `at` ends, if it is not of a fixed length.

    Raises
    ------
    Truncated
        The data end before it, or its length is negative.
    """
    opcode = data[at]
    kind = LENGTH[opcode]
    if kind in (LINE, LINES):
        end = _line_end(data, at + 1, opcode)
        return end if kind == LINE else _line_end(data, end, opcode)
    begin = at + 1 + WIDTH[opcode]
    if begin > len(data):
        raise Truncated(f"the data end inside {NAMES[opcode]}")
    nbytes = int.from_bytes(data[at + 1 : begin], "little", signed=kind == SIGNED4)
    if not 0 <= nbytes <= len(data) - begin:
        raise Truncated(f"{NAMES[opcode]} of {nbytes} bytes, where {len(data) - begin} are left")
    return begin + nbytes


def data_at(data: memoryview, at: int) -> tuple[int, int]:
    """Return where the data of the opcode at `at` begin, behind their length, and how many bytes they are."""
    begin = at + 1 + WIDTH[data[at]]
    return begin, int.from_bytes(data[at + 1 : begin], "little")


def _line_end(data: memoryview, begin: int, opcode: int) -> int:
    found = _NEWLINE.search(data, begin)
    if found is None:
        raise Truncated(f"the data end inside a line of {NAMES[opcode]}")
    return found.end()


def line_at(data: memoryview, begin: int) -> tuple[str, int]:
    """Return the line that begins at `begin`, cut at `TEXT_MAX` bytes, and where the next one begins.

    Bytes that are not UTF-8 become backslash escapes; data without a newline count as a line.
    """
    found = _NEWLINE.search(data, begin)
    end = len(data) if found is None else found.start()
    return _decoded(bytes(data[begin : min(end, begin + TEXT_MAX)])), end + 1


def text_at(data: memoryview, at: int) -> str:
    """Return what the string opcode at `at` says, cut at `TEXT_MAX` bytes."""
    opcode = data[at]
    width = WIDTH[opcode]
    if not width:
        found = _NEWLINE.search(data, at)
        end = len(data) if found is None else found.start()
        return _of_line(opcode, bytes(data[at + 1 : min(end, at + 1 + TEXT_MAX)]))
    begin, nbytes = data_at(data, at)
    return _decoded(bytes(data[begin : begin + min(nbytes, TEXT_MAX)]))


def _of_line(opcode: int, raw: bytes) -> str:
    """The text of UNICODE (raw escapes) or STRING (quoted, Python's escapes)."""
    with contextlib.suppress(ValueError):
        if opcode == ord("V"):
            return raw.decode("raw-unicode-escape")
        quoted = raw.strip()
        if len(quoted) >= 2 and quoted[0] == quoted[-1] and quoted[:1] in (b"'", b'"'):
            quoted = quoted[1:-1]
        return _decoded(_ESCAPE.sub(_unescaped, quoted))
    return _decoded(raw)


def _unescaped(found: re.Match[bytes]) -> bytes:
    """What one escape of Python's stands for."""
    what = found[1]
    if what[:1] == b"x":
        return bytes([int(what[1:], 16)])
    return bytes([int(what, 8) & 0xFF]) if what.isdigit() else _ESCAPED[what[0]]


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return raw.decode("utf-8", "backslashreplace")


def number_at(data: memoryview, at: int) -> int | None:
    """Return the int that the opcode at `at` pushes; None if it is no int of reasonable length."""
    opcode = data[at]
    if opcode in b"KM":
        return int.from_bytes(data[at + 1 : at + LENGTH[opcode] + 1], "little")
    if opcode == ord("J"):
        return int(struct.unpack_from("<i", data, at + 1)[0])
    if opcode in b"\x8a\x8b":
        begin = at + (2 if opcode == 0x8A else 5)
        nbytes = int.from_bytes(data[at + 1 : begin], "little")
        return int.from_bytes(data[begin : begin + nbytes], "little", signed=True) if nbytes <= NUMBER_MAX else None
    if opcode in b"IL":
        word = line_at(data, at + 1)[0].strip().removesuffix("L")
        return int(word) if len(word) <= 2 * NUMBER_MAX and re.fullmatch(r"-?[0-9]+", word) else None
    return None
