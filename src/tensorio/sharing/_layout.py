"""What is to be shared: a checkpoint's file as it is, its bytes once more, or its tensors laid out anew.

A file is shared as it is if a mapping of it is all that its readers need: every
tensor raw in it, in native byte order, at an address of its type. Sharing it
costs nothing then: its pages are in the page cache once, whoever maps them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from tensorio import formats
from tensorio.checkpoint._checkpoint import Checkpoint, checkpoint_of, open_checkpoint
from tensorio.checkpoint._convert import convert_checkpoint
from tensorio.dtypes import DTYPES
from tensorio.errors import UnsupportedError
from tensorio.formats._base import SaveOptions
from tensorio.plan import Plan, pieces_of
from tensorio.sharing._dequantized import dequantized
from tensorio.sharing._segments import is_sealed, spool
from tensorio.storage.base import MemoryStorage
from tensorio.storage.files import FileStorage, storage_of
from tensorio.storage.opening import remote_pieces
from tensorio.storage.ranges import place_of
from tensorio.tensors import ROW

if TYPE_CHECKING:
    from tensorio.plan import Buffer
    from tensorio.storage.base import Storage

__all__ = ["Layout", "Verbatim", "laid_out", "opened", "why_not_as_it_is"]

ALIGN = 64  # bytes; a cache line, and what vector units and other libraries ask for
ALIGN_MOST = 8  # bytes; no type that is mapped needs more (complex128 is two float64)


class Verbatim:
    """The bytes of a storage, as a plan."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.nbytes = storage.nbytes

    def pieces(self) -> Iterator[Buffer]:
        """Yield them in order; memory stays flat where they are mapped."""
        return pieces_of(partial(self._storage.stream, 0, self.nbytes), self.nbytes)


class Layout:
    """What will be shared.

    Attributes
    ----------
    plan : Plan or None
        None: the file as it is.
    format : str
        Of the bytes.
    dropped : tuple of str
        Names of notes that the new layout has no place for.
    """

    def __init__(self, plan: Plan | None, format: str, dropped: tuple[str, ...] = ()) -> None:
        self.plan = plan
        self.format = format
        self.dropped = dropped


def opened(source: Any, format: str | None, options: dict[str, Any]) -> tuple[Checkpoint | None, bool]:
    """Return the checkpoint that a source is, and whether it is ours to close; None for objects in memory."""
    if isinstance(source, Checkpoint):
        return source, False
    if isinstance(source, str | os.PathLike) and "://" in os.fsdecode(source):
        return _fetched(os.fsdecode(source), format, options), True
    if isinstance(source, str | os.PathLike | bytes | bytearray | memoryview) or hasattr(source, "read"):
        return open_checkpoint(source, format=format, **options), True
    return None, False


def _fetched(url: str, format: str | None, options: dict[str, Any]) -> Checkpoint:
    """A remote file, read once, into memory that may be shared as it is."""
    fd = spool(remote_pieces(url), f"tensorio:{url.rpartition('/')[2]}", None)
    return checkpoint_of(storage_of(fd, url), None, url, {"format": format, "mmap": True, **options})


def laid_out(source: Any, checkpoint: Checkpoint | None, *, dequantize: bool, anew: bool) -> Layout:
    """Decide what will be shared of a source.

    Parameters
    ----------
    checkpoint : Checkpoint or None
        See `opened`; must stay open until the plan is carried out.
    dequantize : bool
        Replace quantized tensors by what they stand for.
    anew : bool
        Even if the file could be shared as it is.
    """
    if checkpoint is None:
        if dequantize:
            raise UnsupportedError("dequantize=True is for checkpoints; save the object, or dequantize() its tensors")
        target = formats.get("torch_zip")
        return Layout(target.plan(source, SaveOptions(align=ALIGN)), target.NAME)
    whole = dequantized(checkpoint) if dequantize else None
    if whole is None and why_not_as_it_is(checkpoint) is None:
        storage, _ = place_of(checkpoint._opened.storages[0])
        return Layout(Verbatim(storage) if anew or not _is_fixed(checkpoint, storage) else None, checkpoint.format)
    checkpoint = whole or checkpoint
    target = formats.get("safetensors" if checkpoint._opened.flat else "torch_zip")
    plan, dropped = convert_checkpoint(checkpoint, target, None, None, ALIGN)
    return Layout(plan, target.NAME, tuple(dropped))


def _is_fixed(checkpoint: Checkpoint, storage: Storage) -> bool:
    """Whether others can have the bytes where they are: all of a file that has a path, or of sealed memory."""
    if not isinstance(storage, FileStorage) or not storage.mapped or storage.fileno()[1]:
        return False  # in memory, with private changes, or a part of a file
    return checkpoint._place is not None or is_sealed(storage.fileno()[0])


def why_not_as_it_is(checkpoint: Checkpoint) -> str | None:
    """Return why mapping the checkpoint's bytes is not enough; None if it is.

    Notes
    -----
    O(tensors); touches no payload.
    """
    storages, rows = checkpoint._opened.storages, checkpoint._opened.table.rows
    if not storages:
        raise ValueError("the checkpoint is closed")
    if checkpoint._arguments.get("encoding") is not None and not checkpoint._opened.flat:
        return "its texts are to be read in another encoding"
    whole, _ = place_of(storages[0])
    if not isinstance(whole, FileStorage | MemoryStorage):
        return "its bytes are not those of one file"
    places = [place_of(storage) for storage in storages]
    for at in range(0, len(rows), ROW):
        dtype, storage, offset, nbytes = rows[at], rows[at + 4], rows[at + 5], rows[at + 6]
        if rows[at + 7] != 1:
            return "a tensor is in several pieces"
        within, start = places[storage]
        if within is not whole:
            return "a tensor is packed, or in foreign byte order"
        if nbytes and (start + offset) % min(DTYPES[dtype].itemsize or 1, ALIGN_MOST):
            return "a tensor is at an address that is none of its type"
    return None
