"""What there is to know of a checkpoint without its payload: totals, sharing, unreached bytes, other values.

Facts only, no text layout; `tensorio.cli.inspect` draws them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tensorio.cli._values import is_simple, value_text
from tensorio.errors import LimitError
from tensorio.tree import Step, children, is_kind, is_leaf
from tensorio.values import Opaque

if TYPE_CHECKING:
    from tensorio.checkpoint._checkpoint import Checkpoint
    from tensorio.formats._base import StoredRecord
    from tensorio.tensors import Extent, TensorInfo
    from tensorio.tree import Path

__all__ = ["Entry", "Partial", "Share", "Stored", "Survey", "file_nbytes", "labels_of", "module_of", "survey"]

# Other values kept for display; a file may hold millions, and nobody reads them.
VALUES_MAX = 20_000
# Parts of a name that become levels of a tree; real models stay below 20.
LEVELS_MAX = 48


class Entry(NamedTuple):
    """One leaf of the saved object, or one object that was not made.

    Attributes
    ----------
    path : tuple
        The keys that lead to it.
    tensor : TensorInfo or None
    kind : str
        Name of a value's type; ``"refused"`` for an object of a class that is not allowed.
    text : str
        A value in short, ready to print.
    """

    path: Path
    tensor: TensorInfo | None
    kind: str = ""
    text: str = ""


@dataclass
class Share:
    """A part of all tensors: how many, of how many elements and bytes."""

    tensors: int = 0
    numel: int = 0
    nbytes: int = 0

    def add(self, info: TensorInfo) -> None:
        """Count one more tensor."""
        self.tensors += 1
        self.numel += info.numel
        self.nbytes += info.nbytes


class Partial(NamedTuple):
    """A stored record of which tensors reach only a part (or nothing)."""

    record: str
    offset: int
    nbytes: int
    reached: int
    fqns: list[str]


@dataclass
class Stored:
    """What of the stored bytes tensors reach.

    Attributes
    ----------
    records : int
        Records that hold tensors.
    nbytes : int
        Their bytes (unpacked, if they are deflated).
    reached : int
        Bytes of them within the extent of at least one tensor.
    others, others_nbytes : int
        Records that hold no tensors: the pickle, version notes, code.
    partly : list of Partial
        Most unreached bytes first.
    skipped : tuple of str
        Members of an archive that hold nothing that tensorio reads.
    unpacked : frozenset of int
        Storages that are made when touched, of records that are packed.
    """

    records: int = 0
    nbytes: int = 0
    reached: int = 0
    others: int = 0
    others_nbytes: int = 0
    partly: list[Partial] = field(default_factory=list)
    skipped: tuple[str, ...] = ()
    unpacked: frozenset[int] = frozenset()


@dataclass
class Survey:
    """Everything `tensorio inspect` shows.

    Attributes
    ----------
    entries : list of Entry
        In saved order.
    total : Share
    by_dtype : dict of str to Share
    stored : Stored
    tied : list of list of str
        Names on exactly the same bytes.
    overlapping : list of list of str
        Names on different bytes that overlap, directly or through one another.
    values : int
        How many leaves are no tensors.
    left_out : int
        Values and refused objects beyond the first `VALUES_MAX`, which `entries` does not have.
    refused : Counter
        How often each class occurs that is not allowed.
    """

    entries: list[Entry] = field(default_factory=list)
    total: Share = field(default_factory=Share)
    by_dtype: dict[str, Share] = field(default_factory=dict)
    stored: Stored = field(default_factory=Stored)
    tied: list[list[str]] = field(default_factory=list)
    overlapping: list[list[str]] = field(default_factory=list)
    values: int = 0
    left_out: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def tensors(self) -> Iterator[Entry]:
        """The entries that are tensors."""
        return (entry for entry in self.entries if entry.tensor is not None)

    def by_module(self, depth: int) -> dict[str, Share]:
        """Return totals by the first `depth` parts of the names, in saved order."""
        shares: dict[str, Share] = {}
        for path, info, *_ in self.tensors:
            assert info is not None
            shares.setdefault(module_of(path, depth), Share()).add(info)
        return shares


def survey(checkpoint: Checkpoint) -> Survey:
    """Look at all that was opened; touches no payload, O(tensors + nodes of the tree)."""
    out = Survey()
    infos = list(checkpoint.infos.values())
    for info in infos:
        out.total.add(info)
        out.by_dtype.setdefault(info.dtype, Share()).add(info)
    if checkpoint._opened.flat:
        out.entries = [Entry((info.fqn,), info) for info in infos]
    else:
        _walk(checkpoint, infos, out)
    out.tied, out.overlapping = _sharing(infos)
    out.stored = _stored(checkpoint, infos)
    return out


# --------------------------------------------------------------------------- names


def labels_of(path: Path, most: int = LEVELS_MAX) -> list[str]:
    """Return the levels of a name: its keys, and what is between dots within them; the last of `most` is the rest."""
    labels: list[str] = []
    for key in path:
        if type(key) is Step:
            continue
        room = most - len(labels)
        if room <= 0:
            labels[-1] += f".{key}"
        else:
            labels += key.split(".", room - 1) if isinstance(key, str) else [str(key)]
    return labels


def module_of(path: Path, depth: int) -> str:
    """Return the first `depth` levels above a tensor, numbers as ``*``: equal layers count together."""
    levels = labels_of(path, depth + 1)[:-1]
    return ".".join("*" if level.isdecimal() else level for level in levels)


# ---------------------------------------------------------------------------- tree


def _walk(checkpoint: Checkpoint, infos: list[TensorInfo], out: Survey) -> None:
    """Fill in the entries of a nested checkpoint; its tensors come in the order in which they were named."""
    named = iter(infos)
    kept = 0
    for path, node in _nodes(checkpoint._opened.tree, checkpoint._opened.budget):
        if is_leaf(node):
            out.entries.append(Entry(path, next(named)))
            continue
        refused = type(node) is Opaque
        if refused:
            out.refused[f"{node.module}.{node.name}"] += 1  # type: ignore[attr-defined]
        else:
            out.values += 1
        if kept == VALUES_MAX:
            out.left_out += 1
        else:
            kept += 1
            out.entries.append(Entry(path, None, "refused" if refused else type(node).__name__, value_text(node)))


def _nodes(root: object, budget: int) -> Iterator[tuple[Path, object]]:
    """Yield path and node of tensors, values, opaque objects and kinds of tensors, as `tensorio.tree.leaves` does.

    Lists of plain values are one value.
    """
    path: list[object] = []
    stack: list[tuple[Iterator[tuple[Path, object]], int, int]] = [(iter([((), root)]), 0, 0)]
    open_ids: set[int] = set()
    while stack:
        inner, ident, taken = stack[-1]
        step = next(inner, None)
        if step is None:
            stack.pop()
            open_ids.discard(ident)
            del path[len(path) - taken :]
            continue
        keys, node = step
        budget -= 1
        if budget < 0:
            raise LimitError("the saved object is shared so often within itself that it can't be listed")
        inside = None if is_simple(node) else children(node)
        if inside is None or type(node) is Opaque or is_kind(node):
            yield (*path, *keys), node
        if inside is None:
            budget -= len(node) if isinstance(node, list | tuple) else 0
        elif id(node) not in open_ids:
            open_ids.add(id(node))
            path.extend(keys)
            stack.append((inside, id(node), len(keys)))


# ------------------------------------------------------------------------- sharing


def _sharing(infos: list[TensorInfo]) -> tuple[list[list[str]], list[list[str]]]:
    """Group the tensors on the same extents, and those on extents that overlap without being the same."""
    names: dict[Extent, list[str]] = {}
    for info in infos:
        for chunk in info.chunks:
            if chunk.extent.nbytes:
                names.setdefault(chunk.extent, []).append(info.fqn)
    tied = [group for group in names.values() if len(group) > 1]
    return tied, [[fqn for extent in group for fqn in names[extent]] for group in _clusters(names) if len(group) > 1]


def _clusters(extents: Iterable[Extent]) -> Iterator[list[Extent]]:
    """Yield the extents in order, in groups that overlap."""
    group: list[Extent] = []
    storage, end = -1, 0
    for extent in sorted(extents):
        if group and (extent.storage != storage or extent.offset >= end):
            yield group
            group, end = [], 0
        group.append(extent)
        storage, end = extent.storage, max(end, extent.offset + extent.nbytes)
    if group:
        yield group


# -------------------------------------------------------------------------- stored


def _stored(checkpoint: Checkpoint, infos: list[TensorInfo]) -> Stored:
    """Compare the records that hold tensors with the extents that tensors reach."""
    opened = checkpoint._opened
    out = Stored(skipped=opened.skipped)
    holding: list[StoredRecord] = []
    for record in (opened.payloads or opened.records)():
        if record.payload:
            holding.append(record)
        else:
            out.others += 1
            out.others_nbytes += record.size
    out.records = len(holding)
    out.nbytes = sum(record.size for record in holding)
    runs = [_run(group) for group in _clusters({c.extent for info in infos for c in info.chunks if c.extent.nbytes})]
    files = {0, *(record.storage for record in holding)}
    out.unpacked = frozenset(storage for storage, *_ in runs) - files
    out.reached = sum(nbytes for *_, nbytes in runs)
    out.reached = min(out.reached, out.nbytes)  # one record may be unpacked as two element types
    if out.reached < out.nbytes and not out.unpacked:
        out.partly = _partly(holding, runs, infos)
    return out


def file_nbytes(checkpoint: Checkpoint) -> int:
    """Return the bytes of all files that a checkpoint is in."""
    return sum(os.path.getsize(file) for file in checkpoint.files)


def _run(group: list[Extent]) -> tuple[int, int, int]:
    """Storage, offset and bytes of what a group of overlapping extents covers."""
    return group[0].storage, group[0].offset, max(e.offset + e.nbytes for e in group) - group[0].offset


def _partly(records: list[StoredRecord], runs: list[tuple[int, int, int]], infos: list[TensorInfo]) -> list[Partial]:
    """Find the records that are not reached as a whole, and who reaches them."""
    records = sorted(records, key=_start)
    reached = _per_record(records, runs)
    short = {i: Partial(r.name, r.offset, r.nbytes, reached.get(i, 0), [])
             for i, r in enumerate(records) if reached.get(i, 0) < r.nbytes}  # fmt: skip
    order = sorted(range(len(infos)), key=lambda t: _start(infos[t].chunks[0].extent))
    at = 0
    for t in order:
        extent = infos[t].chunks[0].extent
        while at < len(records) - 1 and _start(records[at + 1]) <= _start(extent):
            at += 1
        if at in short and extent.nbytes:
            short[at].fqns.append(infos[t].fqn)
    return sorted(short.values(), key=lambda p: p.reached - p.nbytes)


def _start(extent: StoredRecord | Extent) -> tuple[int, int]:
    return extent.storage, extent.offset


def _per_record(records: list[StoredRecord], runs: Iterable[tuple[int, int, int]]) -> dict[int, int]:
    """Bytes reached of each record, by its number; a run lies within one record."""
    reached: dict[int, int] = {}
    at = 0
    for storage, offset, nbytes in runs:
        while at < len(records) - 1 and _start(records[at + 1]) <= (storage, offset):
            at += 1
        reached[at] = reached.get(at, 0) + nbytes
    return reached
