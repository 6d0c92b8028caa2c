"""Put the files of a tensor-parallel group together again."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorio import formats
from tensorio.checkpoint._checkpoint import Checkpoint
from tensorio.checkpoint._index import open_joined
from tensorio.checkpoint._manifest import MANIFEST, Manifest, Part, read_manifest
from tensorio.checkpoint._watched import write_file
from tensorio.dtypes import BY_NAME, c_strides
from tensorio.errors import HeaderError, TensorMismatchError, TruncatedError, error_context, escaped
from tensorio.plan import CheckedPlan
from tensorio.tensors import CONJ, NEG, Chunk, Extent, TensorInfo
from tensorio.tp import Cut, cut_of
from tensorio.tp._cuts import homes_of, rows_of

if TYPE_CHECKING:
    from tensorio.checkpoint._pieces import Piece
    from tensorio.checkpoint._weave import Strand
    from tensorio.storage.base import Storage

    Progress = Callable[[int, int], object]

__all__ = ["unshard_folder"]


def unshard_folder(
    src: Any, dst: Any, *, format: str | None, options: dict[str, Any], durable: bool, progress: Progress | None
) -> list[str]:
    """Put rank files together; see `tensorio.unshard`."""
    from tensorio.checkpoint._pieces import plan_pieces  # needs NumPy

    folder = os.fspath(src)
    target = formats.for_target(dst, format)
    manifest = read_manifest(os.path.join(folder, MANIFEST))
    missing = [n for n in sorted(manifest.names - {MANIFEST}) if not os.path.exists(os.path.join(folder, n))]
    if missing:
        more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise TruncatedError(f"the file {escaped(missing[0])}{more} of the group is missing", path=folder)
    with ExitStack() as stack:
        ranks = [stack.enter_context(open_joined(folder, files, **options)[0]) for files in manifest.files]
        with error_context(path=folder):
            group = _Group(manifest, ranks)
            pieces = [group.piece(fqn, part) for fqn, part in manifest.tensors.items()]
        plan = plan_pieces(pieces, target, manifest.metadata, formats.target_name(dst) or "")
        write_file(CheckedPlan(plan, partial(_require_unchanged, ranks)), dst, durable=durable, progress=progress)
    return list(manifest.skipped)


def _require_unchanged(ranks: list[Checkpoint]) -> None:
    for checkpoint in ranks:
        checkpoint.check_unchanged()


class _Group:
    """The opened files of all ranks."""

    def __init__(self, manifest: Manifest, ranks: list[Checkpoint]) -> None:
        self._tp = manifest.tp
        self._ranks = ranks
        for rank, checkpoint in enumerate(ranks):
            for fqn in checkpoint:
                if fqn not in manifest.tensors:
                    raise HeaderError(f"rank {rank} has a tensor that the manifest does not list", record=fqn)

    def piece(self, fqn: str, part: Part) -> Piece:
        """Return a whole tensor, as woven out of what the ranks have of it.

        Raises
        ------
        TensorMismatchError
            A rank's tensor is missing, of another shape or type than it should be,
            or differs where ranks have the same elements.
        """
        from tensorio.checkpoint._pieces import woven

        cuts, extents = [], []
        for rank in range(self._tp):  # one after the other: a manifest may promise more than there is
            cut = cut_of(part.rule, fqn, part.shape, rank, self._tp)
            extents.append(None if cut is None else self._extent(fqn, part, rank, cut))
            cuts.append(cut)
        line: list[Strand] = []
        count, runs = _runs(fqn, part, cuts)
        for run in runs:
            first, *others = (self._strand(extents[place.rank], place, run.nbytes) for place in run.places)
            for place, other in zip(run.places[1:], others, strict=True):
                if not _same(first, other, count):
                    raise TensorMismatchError(
                        f"ranks {run.places[0].rank} and {place.rank} should have the same here, and differ", record=fqn
                    )
            line.append(first)
        strides = c_strides(part.shape, BY_NAME[part.dtype].itemsize)
        nbytes = prod(part.shape) * BY_NAME[part.dtype].bits // 8
        chunk = Chunk((0,) * len(part.shape), part.shape, strides, Extent(0, 0, nbytes))
        return woven(TensorInfo(fqn, part.dtype, part.shape, (chunk,), self._ranks[0].infos[fqn].flags), line, count)

    def _extent(self, fqn: str, part: Part, rank: int, cut: Cut) -> tuple[Storage, int]:
        """The bytes of a rank's tensor, which must be what the manifest says."""
        checkpoint = self._ranks[rank]
        info = checkpoint.infos.get(fqn)
        if info is None:
            raise TensorMismatchError(f"rank {rank} does not have its part of the tensor", record=fqn)
        dtype, shape = info.dtype, info.shape
        if dtype == "float4_e2m1fn_x2" and part.dtype == "float4_e2m1fn":  # what a torch file makes of it
            dtype, shape = part.dtype, (*shape[:-1], 2 * shape[-1])
        if (dtype, shape) != (part.dtype, cut.shape) or not info.contiguous:
            raise TensorMismatchError(
                f"rank {rank}: expected {part.dtype} of shape {list(cut.shape)} in C order, "
                f"found {dtype} of shape {list(shape)}", record=fqn,
            )  # fmt: skip
        extent = info.chunks[0].extent
        if info.flags & (CONJ | NEG):
            raise TensorMismatchError(
                f"rank {rank}: expected plain elements, found some still to be negated", record=fqn
            )
        return checkpoint._storage(extent.storage), extent.offset

    def _strand(self, extent: tuple[Storage, int] | None, place: _Place, nbytes: int) -> Strand:
        from tensorio.checkpoint._weave import Strand

        assert extent is not None
        storage, offset = extent
        return Strand(storage, offset + place.at, place.stride, nbytes)


class _Place(NamedTuple):
    """Where a rank has a run of bytes of each row of a tensor.

    Attributes
    ----------
    rank : int
    at : int
        Of the run in the rank's first row.
    stride : int
        Bytes of the rank's rows.
    """

    rank: int
    at: int
    stride: int


class _Run(NamedTuple):
    """A run of bytes of each row of a tensor, and who has it."""

    nbytes: int
    places: list[_Place]


def _runs(fqn: str, part: Part, cuts: list[Cut | None]) -> tuple[int, list[_Run]]:
    """The number of rows of a tensor, and the runs that each of them is made of, in order."""
    there = {rank: cut for rank, cut in enumerate(cuts) if cut is not None}
    bits = BY_NAME[part.dtype].bits
    rows = {rank: rows_of(cut, fqn, part.shape, bits) for rank, cut in there.items()}
    first = next(iter(rows.values()))
    widths = {rank: sum(hi - lo for lo, hi in row.spans) + row.pad for rank, row in rows.items()}
    runs = []
    for home in homes_of({rank: row.spans for rank, row in rows.items()}):
        places = [_Place(rank, at, widths[rank]) for rank, at in home.places]
        runs.append(_Run(home.hi - home.lo, places))
    return first.height, runs


def _same(a: Strand, b: Strand, count: int) -> bool:
    """Whether two strands are the same bytes."""
    from tensorio.checkpoint._weave import weave

    others = (memoryview(piece) for piece in weave([b], count))
    rest = memoryview(b"")
    for piece in weave([a], count):
        view = memoryview(piece)
        while len(view):
            rest = rest if len(rest) else next(others)
            n = min(len(view), len(rest))
            if bytes(view[:n]) != bytes(rest[:n]):  # memoryviews compare a byte at a time
                return False
            view, rest = view[n:], rest[n:]
    return True
