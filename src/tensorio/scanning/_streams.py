"""Pickles one behind the other, alone or with the bytes of tensors between them.

Sources: ``torch/serialization.py`` of 2.13, ``_legacy_save``, ``_legacy_load`` and ``legacy_load`` (tar).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from tensorio.scanning._collect import Trust
from tensorio.scanning._found import Named, itemsize, plausible

if TYPE_CHECKING:
    from tensorio.scanning._collect import Blob, Collector
    from tensorio.scanning._found import Walk

__all__ = ["look_pickle", "look_tar_stream", "starts_as_pickle"]

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PICKLES = 4  # behind the magic number: protocol, system, object, keys
_COUNT = 8  # bytes


def starts_as_pickle(head: bytes) -> bool:
    """Tell whether data begin with PROTO of a protocol that there is."""
    return len(head) > 1 and head[0] == 0x80 and head[1] <= 5


def look_pickle(c: Collector, blob: Blob, *, keys: bool = False) -> int | None:
    """Look at the pickle that `blob` begins with, and at all that belongs to it.

    Returns
    -------
    int or None
        First byte behind it; None if there is none.
    """
    found = c.walk(blob, 0, keys=keys)
    proto = starts_as_pickle(bytes(blob.view[:2]))
    sure = blob.trust is Trust.SURE or (blob.trust is Trust.MAYBE and proto)
    if not sure and not _makes_sense(found, proto, blob.trust is Trust.MAYBE or blob.origin > 0):
        return None
    if found.value == LEGACY_MAGIC and found.end is not None:
        return _look_legacy(c, blob, found.end)
    return _look_found(c, blob, found)


def _makes_sense(found: Walk, proto: bool, alone: bool) -> bool:
    """Whether it can't be by chance that bytes can be walked as a pickle; `alone`: they are not one tensor of many."""
    until = found.at if found.error is None else found.error[0]
    named = [ref for ref in found.refs if ref.offset < until and plausible(ref)]
    if found.end is not None and found.error is None:
        return alone or bool(named) or (proto and (bool(found.odd) or found.end - found.start > _COUNT))
    return any(ref.uses or ref.group == "dangerous" for ref in named)


def _look_found(c: Collector, blob: Blob, found: Walk) -> int:
    """Note what a walk found, and look into bytes that the pickle holds; returns where it ends."""
    c.report(blob, found)
    for nested in found.nested:
        _look_found(c, blob, nested)
    for begin, nbytes, sure in found.inner:
        if nbytes < 0:
            c.unreadable(blob, begin, "more bytes in a pickle that may be pickles than are looked into")
            break
        trust = Trust.SURE if sure else Trust.UNLIKELY
        c.look(blob.inside(f"bytes at {blob.origin + begin}", blob.view[begin : begin + nbytes], trust, begin))
    if found.end is not None:
        return found.end
    c.sweep(blob, found.at)
    return len(blob.view)


# ------------------------------------------------------------------ legacy torch streams


def _look_legacy(c: Collector, blob: Blob, at: int) -> int:
    """Look at the four pickles behind the magic number, and skip the tensors' bytes behind them."""
    storages: dict[str, int] = {}
    for _ in range(_LEGACY_PICKLES):
        part = blob.part(at, None, Trust.SURE)
        found = c.walk(part, 0)
        storages.update(found.storages)
        at += _look_found(c, part, found)
        if found.end is None:
            return at
    if -1 in storages.values():
        c.note(blob, "the bytes of the tensors can't be told apart: a storage class that is not known")
        c.sweep(blob, at)
        return len(blob.view)
    end = at + sum(_COUNT + max(nbytes, 0) for nbytes in storages.values())
    if end > len(blob.view):
        c.note(blob, f"ends {end - len(blob.view)} bytes before its tensors do")
        end = len(blob.view)
    return end


# ------------------------------------------------------------------ members of torch tar files


def look_tar_stream(c: Collector, blob: Blob, leaf: str) -> int:
    """Look at ``storages`` or ``tensors`` of a torch tar file: a count, then so many pickles, each with raw bytes.

    Returns
    -------
    int
        Where what is understood ends.
    """
    skip = {"storages": _behind_storage, "tensors": _behind_tensor}[leaf]
    first = c.walk(blob, 0)
    at = _look_found(c, blob, first)
    if first.end is None or not isinstance(first.value, int):
        return at
    for _ in range(first.value):
        part = blob.part(at, None, Trust.SURE)
        found = c.walk(part, 0)
        at += _look_found(c, part, found)
        if found.end is None:
            return at
        raw = skip(blob.view, at, found)
        if raw is None:
            c.unreadable(blob, at, "could not be read to the end: no tensor where one should be")
            c.sweep(blob, at)
            return len(blob.view)
        at += raw
    if leaf == "storages" and at < len(blob.view):  # then the views of storages, in one pickle
        part = blob.part(at, None, Trust.SURE)
        at += _look_found(c, part, c.walk(part, 0))
    return at


def _behind_storage(view: memoryview, at: int, found: Walk) -> int | None:
    """Bytes of a storage: a count and that many elements of the class that the pickle in front names."""
    match found.value:
        case (_, _, Named(number)) if at + _COUNT <= len(view):
            size = itemsize(found.refs[number])
            count = struct.unpack_from("<q", view, at)[0]
            nbytes = _COUNT + size * int(count)
            return nbytes if size > 0 and count >= 0 and at + nbytes <= len(view) else None
    return None


def _behind_tensor(view: memoryview, at: int, found: Walk) -> int | None:
    """Bytes of a tensor's place: dimensions, 4 bytes, sizes, strides, offset."""
    if at + _COUNT > len(view):
        return None
    dims = struct.unpack_from("<i", view, at)[0]
    nbytes = 2 * _COUNT + 2 * _COUNT * int(dims)
    return nbytes if dims >= 0 and at + nbytes <= len(view) else None
