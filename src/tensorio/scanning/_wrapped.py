"""Packed bytes: gzip, bzip2, xz, zlib, the raw deflate of zip records; unpacked within bounds."""

from __future__ import annotations

import bz2
import lzma
import re
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorio.scanning._collect import UNPACKED_AT_ONCE, Trust

if TYPE_CHECKING:
    from tensorio.scanning._collect import Blob, Collector

__all__ = ["PEEK", "deflated", "look_packed", "packing", "unpack"]

PIECE = 1 << 20  # bytes unpacked at a time
PEEK = 64 << 10  # bytes of a packed record that is not named like a pickle
_JOBLIB = re.compile(rb"ZF0x[0-9a-fA-F]+ *")  # joblib before 0.10: then zlib data


class Unpacked(NamedTuple):
    """What came out.

    Attributes
    ----------
    data : bytearray
    used : int
        Bytes that went in.
    why : str
        Why it is not all; "" if it is.
    """

    data: bytearray
    used: int
    why: str


def _lzma() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(memlimit=UNPACKED_AT_ONCE)


# What the data begin with, what they are, and what unpacks them.
_PACKINGS: tuple[tuple[bytes, str, Callable[[], Any]], ...] = (
    (b"\x1f\x8b\x08", "gzip", lambda: zlib.decompressobj(31)),
    (b"BZh", "bzip2", bz2.BZ2Decompressor),
    (b"\xfd7zXZ\0", "xz", _lzma),
    (b"\x5d\0\0", "lzma", _lzma),
)


def deflated() -> Any:
    """Return what unpacks a deflated zip record."""
    return zlib.decompressobj(-15)


def packing(head: bytes) -> tuple[str, Callable[[], Any], int] | None:
    """Tell how data that begin with `head` are packed: name, what unpacks them, where the packed bytes begin."""
    for signature, name, make in _PACKINGS:
        if head.startswith(signature) and (signature != b"BZh" or head[4:10] == b"1AY&SY"):
            return name, make, 0
    if len(head) > 1 and head[0] == 0x78 and int.from_bytes(head[:2], "big") % 31 == 0 and not head[1] & 0x20:
        return "zlib", zlib.decompressobj, 0
    prefix = _JOBLIB.match(head)
    return ("zlib", zlib.decompressobj, prefix.end()) if prefix is not None else None


def unpack(c: Collector, blob: Blob, make: Callable[[], Any], begin: int = 0, most: int | None = None) -> Unpacked:
    """Unpack the stream (or the streams, one behind the other) at `begin` of `blob`.

    Parameters
    ----------
    most : int, optional
        Bytes wanted; no reason is given if there are more.

    Notes
    -----
    At most `UNPACKED_AT_ONCE` bytes, half as many for each level that the blob is in, and no more than the file's
    budget has left.
    """
    limit = min(UNPACKED_AT_ONCE >> blob.depth, max(c.unpacked, 0), UNPACKED_AT_ONCE if most is None else most)
    out, at, why = bytearray(), begin, ""
    try:
        while at < len(blob.view) and not why:
            done, why = _one_stream(blob.view, at, make(), out, limit)
            c.let_go(blob, at, done)
            at = done
            following = packing(bytes(blob.view[at : at + 10])) if make is not zlib.decompressobj else None
            if following is None or following[1] is not make:
                break
    except (zlib.error, OSError, lzma.LZMAError, EOFError, ValueError) as error:
        why = f"packed data: {error}"
    c.unpacked -= len(out)
    if most is not None and len(out) >= most:
        why = ""
    return Unpacked(out, at - begin, why)


def _one_stream(view: memoryview, at: int, unpacker: Any, out: bytearray, limit: int) -> tuple[int, str]:
    """Append one stream's bytes to `out`; returns where it ends, and why it ends there if that is no good reason."""
    waiting: bytes | memoryview = b""
    while not unpacker.eof:
        if not waiting and getattr(unpacker, "needs_input", True):
            waiting, at = view[at : at + PIECE], min(at + PIECE, len(view))
            if not waiting:
                return at, "packed data are cut short"
        room = limit - len(out)
        if room <= 0:
            return at, f"unpacks to more than {limit} bytes; the rest was not looked at"
        out += unpacker.decompress(waiting, min(room, PIECE))
        waiting = getattr(unpacker, "unconsumed_tail", b"")
    return at - len(unpacker.unused_data), ""


def look_packed(c: Collector, blob: Blob, name: str, make: Callable[[], Any], begin: int) -> int:
    """Look into packed bytes that stand on their own; returns where they end."""
    unpacked = unpack(c, blob, make, begin)
    if not unpacked.data and unpacked.why and (blob.trust is Trust.UNLIKELY or name in ("zlib", "lzma")):
        return 0  # a short signature, by chance
    if unpacked.data:
        trust = Trust.SURE if blob.trust is Trust.SURE else Trust.MAYBE
        c.look(blob.inside(f"unpacked {name}", memoryview(unpacked.data), trust))
    if unpacked.why:
        c.unreadable(blob, begin + unpacked.used, unpacked.why)
    return begin + unpacked.used
