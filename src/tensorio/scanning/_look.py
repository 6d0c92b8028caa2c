"""What bytes are, and what may be in them: the one place that decides how to look into them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tensorio.encryption._header import MAGIC
from tensorio.scanning._collect import DEPTH_MAX, Trust
from tensorio.scanning._operands import LENGTH, NO_OPCODE
from tensorio.scanning._streams import look_pickle, look_tar_stream, starts_as_pickle
from tensorio.scanning._tars import BLOCK, is_tar, look_tar
from tensorio.scanning._wrapped import look_packed, packing
from tensorio.scanning._zips import archive_start, look_zip

if TYPE_CHECKING:
    from tensorio.scanning._collect import Blob, Collector

__all__ = ["look"]

HEAD = 1024  # bytes
_ZIP = (b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06", b"PK\x07\x08")

# What can't be looked into, and why not. Sources: the formats' own specifications.
_SEALED: tuple[tuple[bytes, str], ...] = (
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!\x1a\x07", "a rar archive"),
    (b"\x28\xb5\x2f\xfd", "zstd data"),
    (b"\x04\x22\x4d\x18", "lz4 data"),
    (b"MSCF\0\0\0\0", "a cabinet archive"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (MAGIC[:-1], "an encrypted file (decrypt it, and scan that)"),
)
# What holds no pickle, by its first bytes.
_PLAIN: tuple[tuple[bytes, str], ...] = (
    (b"GGUF", "gguf: no pickle; a chat template in it is not looked at"),
    (b"FUGG", "gguf: no pickle; a chat template in it is not looked at"),
    (b"version https://git-lfs", "a git-lfs pointer, not the file itself"),
)

_NPY = b"\x93NUMPY"
# Every type word in a header of plain numbers and texts; with anything else, there may be objects.
_TYPE_WORD = re.compile(rb"[<>|=]?[biufcSUVmMa?]\d*(\[[^\]]*\])?")
_QUOTED = re.compile(rb"'([^']*)'")
_NPY_KEYS = {b"descr", b"fortran_order", b"shape"}
_FIELD = re.compile(rb"\('[^']*', *'([^']*)'")
_SHAPE = re.compile(rb"'shape': *\(([0-9L, ]*)\)")
NPY_HEADER_MAX = 1 << 20  # bytes
DIMS_MAX = 64  # of NumPy


def look(c: Collector, blob: Blob) -> None:
    """Look into all of `blob`: what it begins with, what stands behind that, and an archive at its end."""
    if blob.depth > DEPTH_MAX:
        c.unreadable(blob, 0, f"over {DEPTH_MAX} archives inside each other; not looked into")
        return
    head = bytes(blob.view[:HEAD])
    if blob.trust is Trust.UNLIKELY and not _worth_it(head):
        return
    front = blob
    if not head.startswith(_ZIP) and blob.trust is not Trust.UNLIKELY and archive_start(blob.view) is not None:
        _say(c, blob, "a zip archive behind other bytes")
        front = blob.part(0, look_zip(c, blob))
    at = _look_at_start(c, blob) or 0  # all of it: a pickle may reach over an archive
    while 0 < at < len(front.view):
        end = _look_at_start(c, front.part(at, None, _trust_behind(front, at)))
        if not end:
            break
        at += end
    blob = front
    if 0 < at < len(blob.view) and not c.only_zeros(blob, at):
        c.note(blob, f"{len(blob.view) - at} bytes behind its end, at {blob.origin + at}")
        c.sweep(blob, at)


def _trust_behind(blob: Blob, at: int) -> Trust:
    """Bytes behind a pickle are another one if they begin as one and not as a small number of 8 bytes."""
    head = bytes(blob.view[at : at + 3])
    sure = blob.trust is Trust.SURE and starts_as_pickle(head) and head[2:] != b"\0"
    return Trust.SURE if sure else Trust.UNLIKELY


def _worth_it(head: bytes) -> bool:
    """Whether the bytes of a tensor begin as something else might, by chance or not."""
    return bool(head) and (LENGTH[head[0]] != NO_OPCODE or packing(head) is not None or head[257:262] == b"ustar")


def _say(c: Collector, blob: Blob, what: str) -> None:
    """Note what the file itself is; the first word counts."""
    if blob.depth == 0 and not c.what:
        c.what = what


def _look_at_start(c: Collector, blob: Blob) -> int | None:
    """Look into what `blob` begins with; returns where it ends, None or 0 if it is nothing that is known."""
    head = bytes(blob.view[:HEAD])
    if head.startswith(_ZIP):
        _say(c, blob, "a zip archive")
        look_zip(c, blob)  # what is in front of the last archive begins with a zip, too, and is looked at with it
        return len(blob.view)
    if (blob.trust is not Trust.UNLIKELY or head[257:262] == b"ustar") and is_tar(head[:BLOCK]):
        _say(c, blob, "a tar archive")
        look_pickle(c, blob.part(0, None, Trust.UNLIKELY))
        return look_tar(c, blob)
    if head.startswith(_NPY):
        _say(c, blob, "an .npy array")
        return _look_npy(c, blob)
    packed = packing(head)
    if packed is not None and (blob.trust is not Trust.UNLIKELY or packed[0] != "zlib"):
        end = look_packed(c, blob, *packed)
        if end:
            _say(c, blob, f"{packed[0]} data")
            return end
    for signature, what in _SEALED:
        if head.startswith(signature) and blob.trust is not Trust.UNLIKELY:
            _say(c, blob, what)
            c.say("unknown", blob, 0, f"{what}: can't look inside")
            return len(blob.view)
    return _look_pickle_or_none(c, blob, head)


def _look_pickle_or_none(c: Collector, blob: Blob, head: bytes) -> int | None:
    """Whatever it is, it may be a pickle as well."""
    leaf = blob.record.rsplit("/", 1)[-1].rsplit(" > ", 1)[-1]
    if leaf in ("storages", "tensors") and blob.trust is Trust.SURE:
        return look_tar_stream(c, blob, leaf)
    plain = _plain(blob, head)
    if plain:
        _say(c, blob, plain)
        blob = blob.part(0, None, Trust.UNLIKELY)
    end = look_pickle(c, blob, keys=leaf == "pickle")
    if end is not None:
        _say(c, blob, "a pickle" if starts_as_pickle(head) or end < len(blob.view) else "named like a pickle")
    return end


def _plain(blob: Blob, head: bytes) -> str:
    """What holds no pickle, if that is sure."""
    for signature, what in _PLAIN:
        if head.startswith(signature):
            return what
    size = int.from_bytes(head[:8], "little")
    if not starts_as_pickle(head) and len(head) > 8 and head[8:9] == b"{" and 2 <= size <= len(blob.view) - 8:
        return "safetensors: no code can be in it"
    return ""


def _look_npy(c: Collector, blob: Blob) -> int | None:
    """Look behind the header of an array: objects are in a pickle there."""
    head = bytes(blob.view[:12])
    width = 2 if head[6:7] == b"\x01" else 4
    begin = 8 + width + int.from_bytes(head[8 : 8 + width], "little")
    if len(head) < 12 or begin > len(blob.view):
        c.unreadable(blob, 0, "could not be read to the end: the header of an .npy array is cut short")
        return len(blob.view)
    header = bytes(blob.view[8 + width : begin]) if begin <= NPY_HEADER_MAX else b""
    nbytes = _npy_nbytes(header)
    behind = blob.part(begin, None, Trust.SURE if nbytes is None else Trust.UNLIKELY)
    end = look_pickle(c, behind)
    if nbytes is None:
        return begin + (end or 0)
    return min(begin + nbytes, len(blob.view))


def _npy_nbytes(header: bytes) -> int | None:
    """Bytes of a plain array (very many if that is not worked out); None if it may hold objects."""
    words = [word for word in _QUOTED.findall(header) if word not in _NPY_KEYS]
    fields = _FIELD.findall(header)
    if b'"' in header or b"\\" in header or not words:
        return None
    if fields:  # a structured type: each name is followed by a type
        plain = header.count(b"('") == len(fields) and all(_TYPE_WORD.fullmatch(field) for field in fields)
        return 1 << 62 if plain else None
    shape = _SHAPE.search(header)
    if len(words) != 1 or _TYPE_WORD.fullmatch(words[0]) is None or shape is None:
        return None
    size = re.search(rb"\d+", words[0])
    nbytes = (int(size[0][:9]) if size else 1) * (4 if b"U" in words[0] else 1)
    lengths = re.findall(rb"\d+", shape[1])
    for length in lengths[:DIMS_MAX]:
        nbytes *= int(length[:20])
    return nbytes if len(lengths) <= DIMS_MAX else None
