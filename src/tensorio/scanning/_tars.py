"""Tar archives, those of torch before 0.1.10 among them.

Source: POSIX.1-1988 ustar; GNU tar's manual, "Basic Tar Format"; ``torch/serialization.py``, ``_legacy_load``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorio.errors import escaped
from tensorio.scanning._collect import Trust
from tensorio.scanning._zips import trust_of_name

if TYPE_CHECKING:
    from tensorio.scanning._collect import Blob, Collector

__all__ = ["is_tar", "look_tar"]

BLOCK = 512
_LONG_NAME, _LONG_LINK = b"L", b"K"
_WITHOUT_DATA = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a FIFO"}
_FOLDER, _NOTES = b"5", (b"x", b"g", b"X", b"A")


def is_tar(head: bytes) -> bool:
    """Tell by the checksum whether data begin with a tar header."""
    if len(head) < BLOCK or not head[:1].strip(b"\0") or head[148:155].strip(b"01234567 \0"):
        return False
    stated = _number(head[148:156])
    block = head[:148] + b" " * 8 + head[156:BLOCK]
    return stated is not None and stated in (sum(block), sum(b - 256 if b > 127 else b for b in block))


def _number(raw: bytes) -> int | None:
    """A number in octal digits, or in base 256 if the first bit is set."""
    if raw[:1] and raw[0] & 0x80:
        return int.from_bytes(raw[1:], "big") | (raw[0] & 0x7F) << 8 * (len(raw) - 1)
    digits = raw.split(b"\0")[0].strip()
    try:
        return int(digits, 8) if digits else None
    except ValueError:
        return None


def look_tar(c: Collector, blob: Blob) -> int:
    """Look into every member; returns where the archive ends."""
    view, at, long_name = blob.view, 0, ""
    while at + BLOCK <= len(view):
        head = bytes(view[at : at + BLOCK])
        if not head.strip(b"\0"):
            return _behind(view, at)
        if not is_tar(head):
            c.unreadable(blob, at, "could not be read to the end: no tar header where the next member should begin")
            c.sweep(blob, at)
            return len(view)
        begin, kind = at + BLOCK, head[156:157]
        size = 0 if kind in _WITHOUT_DATA else _number(head[124:136]) or 0
        end = begin + size
        if end > len(view):
            c.unreadable(blob, at, f"a tar member of {size} bytes, where {len(view) - begin} are left")
            end = len(view)
        name = long_name or head[:100].split(b"\0")[0].decode("utf-8", "backslashreplace")
        long_name = ""
        if kind == _LONG_NAME:
            long_name = bytes(view[begin : min(end, begin + 4096)]).split(b"\0")[0].decode("utf-8", "backslashreplace")
        elif kind in _WITHOUT_DATA:
            c.note(blob, f"member {escaped(name)} is {_WITHOUT_DATA[kind]}; not followed")
        elif kind not in (_FOLDER, _LONG_LINK, *_NOTES):
            _look_member(c, blob, name, begin, end)
        at = begin + -(-(end - begin) // BLOCK) * BLOCK
    return len(view)


def _look_member(c: Collector, blob: Blob, name: str, begin: int, end: int) -> None:
    leaf = name.rsplit("/", 1)[-1]
    trust = Trust.SURE if leaf in ("sys_info", "storages", "tensors") else trust_of_name(name)
    c.look(blob.inside(name[:256], blob.view[begin:end], trust, begin))


def _behind(view: memoryview, at: int) -> int:
    """Where the zero blocks end that end an archive: two, and then up to a record of 20 blocks."""
    end = at
    while end + BLOCK <= len(view) and end - at < 20 * BLOCK and not bytes(view[end : end + BLOCK]).strip(b"\0"):
        end += BLOCK
    return end
