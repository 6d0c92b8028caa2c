"""What a zip archive is made of, read wherever it may stand, and never with an error: a damaged part is no part.

Layout: APPNOTE 6.3.10, sections 4.3.7 to 4.3.16, and what torch writes in it.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

__all__ = [
    "CENTRAL",
    "DESCRIPTOR",
    "FORMS",
    "LOCAL",
    "MASKED",
    "Directory",
    "Ending",
    "Entry",
    "Header",
    "Piece",
    "State",
    "descriptor_size",
    "directory_place",
    "ending_at",
    "entry_at",
    "has",
    "header_at",
]

LOCAL, CENTRAL, DESCRIPTOR, END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x07\x08", b"PK\x05\x06"
END64, LOCATOR = b"PK\x06\x06", b"PK\x06\x07"
ZIP64 = b"\x01\x00"  # id of the extra field
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_NARROW, _WIDE = struct.Struct("<4sIII"), struct.Struct("<4sIQQ")
FORMS = (_NARROW, _WIDE)  # of descriptors: signature, CRC-32, bytes in the file, bytes unpacked
_END, _END64, _LOCATOR = struct.Struct("<4sHHHHIIH"), struct.Struct("<4sQHHIIQQQQ"), struct.Struct("<4sIQI")
MASKED = 0xFFFFFFFF  # a 32-bit field whose value stands in the zip64 field

LATER = 0x0008  # flag bit 3: sizes and CRC follow the payload
FLAGS = 0x0806 | LATER  # UTF-8 names, and how hard a deflater tried; others change what the payload is
STORED, DEFLATED = 0, 8

# What a header of torch has at most, so that looking at one costs the same whatever it says.
NAME_MAX = 1024  # bytes; a file name has at most 255
EXTRAS_MAX = 8
COMMENT_MAX = 65535
ENDS_MAX = 64  # end records tried


class State(Enum):
    """How sure it is that a payload is what was written."""

    PROVEN = "proven"  # its CRC-32 is right
    UNPROVEN = "not proven"  # all there, but no checksum was ever computed, or the file ends before it
    DAMAGED = "damaged"
    CUT = "cut off"  # by the end of the file
    MISSING = "missing"


class Piece(NamedTuple):
    """What is left of one record.

    Attributes
    ----------
    record : str
        Full name.
    start : int
        Of the payload, in bytes from the start of the file; -1 if it is missing.
    compressed, size : int
        Bytes of the payload in the file, and unpacked.
    deflated : bool
    state : State
    why : str
        In words, if it is not proven.
    end : int or None
        Where the next record begins; None if what stands behind the payload does not tell.
    crc : int or None
        Of the payload as it is, if it was computed.
    """

    record: str
    start: int
    compressed: int
    size: int
    deflated: bool
    state: State
    why: str = ""
    end: int | None = None
    crc: int | None = None

    @property
    def whole(self) -> bool:
        """Whether nothing speaks against it."""
        return self.state in (State.PROVEN, State.UNPROVEN)


class Header(NamedTuple):
    """A local header.

    Attributes
    ----------
    at, start : int
        Where it begins, and where its payload does.
    name : str
    deflated : bool
    later : bool
        Whether sizes and CRC stand behind the payload; else they are the next three.
    crc, compressed, size : int
    """

    at: int
    start: int
    name: str
    deflated: bool
    later: bool
    crc: int
    compressed: int
    size: int


class Entry(NamedTuple):
    """What the central directory says of a record whose local header is at `at`."""

    at: int
    name: str
    deflated: bool
    later: bool
    crc: int
    compressed: int
    size: int


class Ending(NamedTuple):
    """What stands behind a payload: where that ends, and the CRC-32 it gives, if any; `cut` by the end of the file."""

    end: int
    crc: int | None
    cut: bool = False


class Directory:
    """What is left of a central directory.

    Attributes
    ----------
    at : int
        Where it begins.
    entries : dict of int to Entry
        By the offset of the local header.
    """

    def __init__(self, at: int, entries: dict[int, Entry]) -> None:
        self.at = at
        self.entries = entries
        self.offsets = sorted(entries)

    def after(self, at: int) -> int:
        """Return where the structure behind the one at `at` begins."""
        i = bisect_right(self.offsets, at)
        return self.offsets[i] if i < len(self.offsets) else self.at

    def beyond(self, at: int) -> Iterator[int]:
        """Yield the offsets of local headers behind `at`."""
        for i in range(bisect_right(self.offsets, at), len(self.offsets)):
            yield self.offsets[i]

    def start(self, entry: Entry) -> int:
        """Return where a payload begins whose local header is damaged, by where the next structure does."""
        behind = descriptor_size(entry.at, entry.compressed) if entry.later else 0
        return self.after(entry.at) - behind - entry.compressed


# ----------------------------------------------------------------- around a payload


def has(view: memoryview, signature: bytes, at: int) -> bool:
    """Tell whether a structure begins at `at`."""
    return bytes(view[at : at + 4]) == signature


def header_at(view: memoryview, at: int) -> Header | None:
    """Read the local header at `at`; None if there is none, or one that neither torch nor a zip tool would write."""
    if at + _LOCAL.size > len(view):
        return None
    signature, _, flags, method, _, _, crc, compressed, size, n_name, n_extra = _LOCAL.unpack_from(view, at)
    if signature != LOCAL or flags & ~FLAGS or method not in (STORED, DEFLATED) or not 0 < n_name <= NAME_MAX:
        return None
    names = at + _LOCAL.size
    start = names + n_name + n_extra
    name = _name(view, names, n_name) if start <= len(view) else None
    wide = None if name is None else _zip64(view, names + n_name, start)
    if name is None or wide is None:
        return None
    later = bool(flags & LATER)
    if not later:
        size, compressed = _widened((size, compressed), wide)
    return Header(at, start, name, method == DEFLATED, later, crc, compressed, size)


def _name(view: memoryview, at: int, length: int) -> str | None:
    try:
        name = bytes(view[at : at + length]).decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in name else name


def _zip64(view: memoryview, at: int, end: int) -> bytes | None:
    """The zip64 sub-field of an extra field; None if its sub-fields don't fill it: a length in it is damaged."""
    found = b""
    for _ in range(EXTRAS_MAX):
        if at + 4 > end:
            break
        after = at + 4 + int.from_bytes(view[at + 2 : at + 4], "little")
        if bytes(view[at : at + 2]) == ZIP64:
            found = bytes(view[at + 4 : min(after, at + 4 + 24)])
        at = after
    return found if at == end else None


def _widened(values: tuple[int, ...], wide: bytes) -> tuple[int, ...]:
    """Replace the values that are all ones by those of a zip64 field, which has them in this order."""
    found = iter(struct.unpack_from(f"<{len(wide) // 8}Q", wide))
    return tuple(next(found, value) if value == MASKED else value for value in values)


def descriptor_size(at: int, nbytes: int) -> int:
    """Return the bytes of the descriptor that torch writes, for a header at `at` and a payload of `nbytes`."""
    return 0 if not nbytes else _WIDE.size if max(at, nbytes) >= MASKED else _NARROW.size


def ending_at(view: memoryview, at: int, compressed: int, size: int, later: bool) -> Ending | None:
    """Read what stands behind a payload that ends at `at`; None if it is nothing that may stand there."""
    if not later or (size == 0 and not has(view, DESCRIPTOR, at)):
        return Ending(at, None) if _is_next(view, at) else None
    for form in FORMS:
        if at + form.size <= len(view):
            signature, crc, packed, unpacked = form.unpack_from(view, at)
            if signature == DESCRIPTOR and (packed, unpacked) == (compressed, size):
                return Ending(at + form.size, crc)
    rest = bytes(view[at : at + _WIDE.size])
    if at + len(rest) == len(view) and _begins_descriptor(rest, compressed, size):
        return Ending(len(view), int.from_bytes(rest[4:8], "little") if len(rest) >= 8 else None, cut=True)
    for form in FORMS:  # a descriptor that is damaged, in front of a structure in its place
        if _is_next(view, at + form.size):
            return Ending(at + form.size, None)
    return None


def _is_next(view: memoryview, at: int) -> bool:
    return at == len(view) or has(view, LOCAL, at) or has(view, CENTRAL, at)


def _begins_descriptor(rest: bytes, compressed: int, size: int) -> bool:
    """Whether the last bytes of a file are the beginning of a payload's descriptor."""
    sizes = [struct.pack("<QQ", compressed, size)]
    if max(compressed, size) <= MASKED:
        sizes.append(struct.pack("<II", compressed, size))
    return DESCRIPTOR.startswith(rest[:4]) and any(s.startswith(rest[8:]) for s in sizes)


# ---------------------------------------------------------------- central directory


def directory_place(view: memoryview) -> tuple[int, int] | None:
    """Return the first byte of the central directory and the one behind it, if it ends where its end record begins."""
    tail = max(0, len(view) - COMMENT_MAX - _END.size)
    last = bytes(view[tail:])
    at = len(last)
    for _ in range(ENDS_MAX):
        at = last.rfind(END, 0, at)
        if at < 0:
            break
        if at + _END.size <= len(last):
            limit, place = _told_place(view, tail + at)
            if sum(place) == limit:
                return place[0], limit
    return None


def _told_place(view: memoryview, at: int) -> tuple[int, tuple[int, int]]:
    """Where the end records around the one at `at` begin, and the directory's offset and size by them."""
    *_, size, offset, _ = _END.unpack_from(view, at)
    wide = at - _LOCATOR.size - _END64.size
    if wide >= 0 and has(view, END64, wide) and has(view, LOCATOR, at - _LOCATOR.size):
        *_, size, offset = _END64.unpack_from(view, wide)
        return wide, (offset, size)
    return at, (offset, size)


def entry_at(view: memoryview, at: int, end: int) -> tuple[Entry | None, int | None]:
    """Read the entry at `at`, if it is one, and where the next one begins, of a directory that ends at `end`."""
    if at + _CENTRAL.size > end:
        return None, None
    (signature, _, _, flags, method, _, _, crc, compressed, size, n_name, n_extra, n_comment, _, _, _, offset) = (
        _CENTRAL.unpack_from(view, at)
    )
    extra = at + _CENTRAL.size + n_name
    after = extra + n_extra + n_comment
    if signature != CENTRAL or after > end:
        return None, None
    if bytes(view[extra : extra + 2]) == ZIP64:  # it stands first, if at all
        wide = bytes(view[extra + 4 : extra + min(n_extra, 28)])
        size, compressed, offset = _widened((size, compressed, offset), wide)
    name = _name(view, at + _CENTRAL.size, n_name) if 0 < n_name <= NAME_MAX else None
    if name is None or flags & ~FLAGS or method not in (STORED, DEFLATED) or offset >= at:
        return None, after
    return Entry(offset, name, method == DEFLATED, bool(flags & LATER), crc, compressed, size), after
