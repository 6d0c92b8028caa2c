"""What of a save is as it was in its base, byte for byte, and the delta that holds the rest.

Bytes are compared with those of the base where they are, by all cores, and
their checksums taken while they are in the cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensorio import _core, formats
from tensorio.checkpoint._checkpoint import Checkpoint, open_checkpoint
from tensorio.checkpoint._delta import CHAIN_MAX, Note, fingerprint
from tensorio.checkpoint._several import place_of_several
from tensorio.errors import DecryptionError, FormatError, UnsupportedError, escaped
from tensorio.formats._base import DELTA_KEY, OpenOptions, SaveOptions
from tensorio.formats._items import Items, items_of
from tensorio.storage.files import FileStorage, Identity
from tensorio.storage.reading import in_threads, readers

if TYPE_CHECKING:
    from tensorio.formats._base import Format
    from tensorio.plan import LaidOut

__all__ = ["plan_delta"]

# Bytes of a tensor that one thread looks at, and how many of them at a time: both sides fit the second-level cache.
PART, STEP = 16 << 20, 256 << 10


def plan_delta(obj: Any, base: Any, target: Format, options: SaveOptions) -> tuple[LaidOut, Callable[[], object], int]:
    """Lay out a file of what changed since a base.

    Parameters
    ----------
    obj : object
        What `tensorio.save` takes.
    base : str, os.PathLike or Checkpoint
    target : Format
    options : SaveOptions

    Returns
    -------
    plan : LaidOut
        A whole file if everything changed.
    check : callable
        To be called when the file is written, before it gets its name: raises if the base is no longer what it was.
    unchanged : int
        Bytes of the tensors that are not in it.

    Raises
    ------
    UnsupportedError
        Not a ``.safetensors`` file beside another; or the chain of bases is as long as chains may be.
    ValueError
        The target is the base, or one of the files the base refers to.
    """
    if target.NAME != "safetensors":
        raise UnsupportedError(
            f"base= is for .safetensors files; a file of format {target.NAME} can't refer to another"
        )
    if DELTA_KEY in (options.metadata or {}):
        raise ValueError(f"metadata= may not have the key {DELTA_KEY}, which base= writes")
    path = base._place if isinstance(base, Checkpoint) else os.fsdecode(os.fspath(base))
    if path is None:
        raise ValueError("base= is to be a path, or a checkpoint that was opened by one")
    items = items_of(obj)
    with _opened(path) as before:
        _require_fit(before, path, options.name)
        sums = _unchanged(items, before)
        rest = [i for i, name in enumerate(items.names) if name not in sums]
        nbytes = sum(items.payloads.sizes) - sum(items.payloads.sizes[i] for i in rest)
        metadata = dict(options.metadata or {})
        if sums:
            storage = before._storage(0)  # of a delta, only what is in the file itself makes its fingerprint
            mark = fingerprint(storage, formats.get("safetensors").open(storage, OpenOptions()).table)
            metadata[DELTA_KEY] = Note(os.path.basename(path), mark, sums).text()
        changed = SaveOptions(
            metadata or options.metadata, options.align, options.compact, options.name, options.digests
        )
        plan = target.plan_items(_selected(items, rest), changed)  # type: ignore[attr-defined]
        before.check_unchanged()
        return plan, partial(_require_still_there, _identities(before)), nbytes


def _opened(path: str) -> Checkpoint:
    """Open the base: the file that is to be named in the delta, and no folder or index that leads to one."""
    if place_of_several(path) is not None:
        raise _no_base(path)
    try:
        return open_checkpoint(path, unknown="opaque")
    except DecryptionError:
        raise _no_base(path) from None


def _no_base(path: str) -> UnsupportedError:
    return UnsupportedError(
        "base= is one .safetensors file, of which nothing is encrypted; save the first checkpoint as one", path=path
    )


def _identities(before: Checkpoint) -> dict[str, Identity]:
    """What each file of the chain is."""
    files = map(os.path.abspath, before.files)  # they are looked at later, wherever the current folder is then
    storages = before._opened.storages
    return {file: s.identity for file, s in zip(files, storages, strict=True) if isinstance(s, FileStorage)}


def _require_still_there(files: dict[str, Identity]) -> None:
    """Raise if a file of the base was replaced, or written to, since it was compared."""
    for path, identity in files.items():
        if Identity.of(path) != identity:
            raise FormatError("base= was replaced while the delta was written; save again", path=path)


def _require_fit(before: Checkpoint, path: str, name: str | None) -> None:
    """Refuse what could not be opened again as a delta of its base."""
    if before.format != "safetensors" or len(before._opened.storages) != 1 + len(before._opened.bases):
        raise _no_base(path)
    if name is None:
        raise UnsupportedError("a delta is found with its base by its path: base= needs a path to save to")
    if os.path.realpath(os.path.dirname(name) or ".") != os.path.realpath(os.path.dirname(path) or "."):
        raise UnsupportedError(
            f"a delta is to be in the folder of its base {escaped(path)}; save it there, or save without base=",
            path=name,
        )
    if os.path.exists(name) and any(os.path.samefile(name, file) for file in before.files):
        raise ValueError(f"{name!r}, which is to be written, is one that base= needs; give the new file another name")
    if len(before.files) >= CHAIN_MAX:
        raise UnsupportedError(
            f"base= is the last of {CHAIN_MAX} files, one on the other; save without base=", path=path
        )


def _selected(items: Items, numbers: list[int]) -> Items:
    out = Items()
    out.names = [items.names[i] for i in numbers]
    out.dtypes = [items.dtypes[i] for i in numbers]
    out.shapes = [items.shapes[i] for i in numbers]
    out.payloads = items.payloads.select(numbers)
    return out


# ----------------------------------------------------------------------- comparing


class _Part(NamedTuple):
    """A part of a tensor: number of the item, bytes in the base, where they begin in the tensor."""

    item: int
    theirs: memoryview
    offset: int


def _unchanged(items: Items, before: Checkpoint) -> dict[str, int]:
    """The tensors that are the same in the base, and the CRC-32 of each."""
    parts = [part for i in range(len(items.names)) for part in _parts(i, items, before)]
    changed: set[int] = set()
    sums: dict[int, int] = {}

    crcs: list[int | None] = [None] * len(parts)

    def compare(number: int) -> None:
        part = parts[number]
        if part.item not in changed:
            crcs[number] = _same(items, part)
        if crcs[number] is None:
            changed.add(part.item)

    in_threads(compare, range(len(parts)), readers())  # not by a pool, which takes no work at the end of a program
    for part, crc in zip(parts, crcs, strict=True):
        if crc is not None:
            sums[part.item] = _core.crc32_combine(sums.get(part.item, 0), crc, len(part.theirs))
    return {items.names[i]: crc for i, crc in sums.items() if i not in changed}


def _parts(i: int, items: Items, before: Checkpoint) -> Iterator[_Part]:
    """What is to be compared of a tensor; nothing if it can't be the same."""
    info = before.infos.get(items.names[i])
    size = items.payloads.sizes[i]
    if info is None or (info.dtype, info.shape, info.nbytes) != (items.dtypes[i], items.shapes[i], size) or not size:
        return
    extent = info.chunks[0].extent
    theirs = before._storage(extent.storage).view()[extent.offset : extent.offset + size]
    step = size if i in items.payloads.makers else PART  # what must be made is made from its start on
    for at in range(0, size, step):
        yield _Part(i, theirs[at : at + step], at)


def _same(items: Items, part: _Part) -> int | None:
    """The CRC-32 of a part that is the same on both sides; None if it is not."""
    payloads = items.payloads
    crc = at = 0
    if part.item in payloads.makers:
        pieces: Iterator[Any] = payloads.pieces(part.item)
    else:
        ours = _core.memory(payloads.addresses[part.item] + part.offset, len(part.theirs), payloads.keep)
        pieces = (ours[start : start + STEP] for start in range(0, len(ours), STEP))
    for piece in pieces:
        if not _equal(piece, part.theirs[at : at + len(piece)]):
            return None
        crc = _core.crc32(piece, crc)
        at += len(piece)
    return crc


def _equal(a: memoryview, b: memoryview) -> bool:
    """Whether bytes are the same, eight at a time where they are as many."""
    unit = np.uint64 if len(a) % 8 == 0 else np.uint8
    return bool((np.frombuffer(a, unit) == np.frombuffer(b, unit)).all())
