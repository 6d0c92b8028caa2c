"""A rank's part of a checkpoint that is not cut: views of its slices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from tensorio.dtypes import BY_NAME, numpy_dtype
from tensorio.errors import TensorMismatchError, TensorNotFoundError, UnsupportedError, error_context, escaped
from tensorio.storage.files import FileStorage
from tensorio.tensors import CONJ, NEG, Chunk, Extent, TensorInfo
from tensorio.tp import Cut, Rule, Rules, cut_of
from tensorio.tp._cuts import Rows, rows_of

if TYPE_CHECKING:
    import numpy as np

    from tensorio.checkpoint._checkpoint import Checkpoint
    from tensorio.storage.base import Storage

    Progress = Callable[[int, int], object]
    Array = np.ndarray[Any, Any]

__all__ = ["Division", "RankView", "part_info", "raw_shape"]


class Division:
    """A checkpoint and the rules by which it is cut.

    Parameters
    ----------
    checkpoint : Checkpoint
    tp : int
        Number of ranks.
    rules : Rules
    default : str
        See `Rules.resolve`.

    Attributes
    ----------
    checkpoint, tp, rules
        As given.
    resolved : Resolved
        Each tensor's rule.
    infos : dict of str to TensorInfo
        Of all tensors, unpacked.
    """

    def __init__(self, checkpoint: Checkpoint, tp: int, rules: Rules, default: str) -> None:
        if type(tp) is not int or tp < 1:
            raise ValueError(f"expected tp to be a positive whole number of ranks, found {tp!r}")
        self.checkpoint = checkpoint
        self.tp = tp
        self.rules = rules
        with error_context(path=checkpoint._name):
            self.resolved = rules.resolve(checkpoint, default)
            for fqn, rule in self.resolved.rules.items():
                self._require_plain(fqn, rule)
            infos = checkpoint.infos
            self.infos = {fqn: infos[fqn] for fqn in self.resolved.rules}

    def _require_plain(self, fqn: str, rule: Rule) -> None:
        """Refuse to cut a part of a tensor that NumPy has no array for: it would fit no other part."""
        if rule.action != "cut":
            return
        kinds = self.checkpoint._kinds
        steps = fqn.split(".") if kinds else []
        whole = next((name for i in range(len(steps)) if (name := ".".join(steps[:i])) in kinds), None)
        if whole is not None:
            raise UnsupportedError(
                f"a part of a {type(kinds[whole]).__name__} can't be cut: {escaped(whole)} is no plain tensor; "
                "its rule may be 'replicate' or 'skip'", record=fqn,
            )  # fmt: skip

    def cut(self, fqn: str, rank: int) -> Cut | None:
        """Return what a rank has of a tensor; None if nothing."""
        return cut_of(self.resolved.rules[fqn], fqn, self.infos[fqn].shape, rank, self.tp)

    def cuts(self, rank: int) -> dict[str, Cut]:
        """Return what a rank has of all tensors, in the order of the checkpoint."""
        with error_context(path=self.checkpoint._name):
            found = {fqn: self.cut(fqn, rank) for fqn in self.resolved.rules}
        return {fqn: cut for fqn, cut in found.items() if cut is not None}


class RankView(Mapping[str, "Array"]):
    """What one rank of a tensor-parallel group has of a checkpoint, straight from the file that is not cut.

    A context manager. Full dotted names to arrays, made when asked for: views of
    the file's mapping where the rank's part is one slice of the tensor; copies
    where it is padded or made of several sections.

    Attributes
    ----------
    rank, tp : int
        Number of this rank, and of all.
    metadata : dict of str to str
        The file's notes.
    infos : mapping of str to TensorInfo
        Shapes of the rank's tensors, and where their pieces lie in the file; what
        no piece covers is padding, of zeros. Touches no payload.
    nbytes : int
        Bytes of the rank's tensors.

    Notes
    -----
    Only the bytes of the rank's slices are touched, rounded to pages; what the
    system reads ahead around them is its own choice.
    """

    def __init__(self, division: Division, rank: int, owned: bool) -> None:
        self.rank = rank
        self.tp = division.tp
        self._checkpoint = division.checkpoint
        self._owned = owned
        self._cuts = division.cuts(rank)

    def __len__(self) -> int:
        return len(self._cuts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._cuts)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._cuts

    def __getitem__(self, fqn: str) -> Array:
        cut = self._cut(fqn)
        checkpoint = self._checkpoint
        if cut.whole:
            return checkpoint[fqn]
        table = checkpoint._table
        row = table.row_of(fqn)
        with error_context(path=checkpoint._name, record=fqn):
            info = table.info(row, fqn)
            part = _part(self._plain(info, row, cut), info, cut)
            flags = table.flags(row)
            return checkpoint._computed(part, flags) if flags & (CONJ | NEG) else part

    def _plain(self, info: TensorInfo, row: int, cut: Cut) -> Array:
        """The whole tensor as an array, of which only the part is brought into memory where page faults are dear."""
        checkpoint = self._checkpoint
        if len(info.chunks) != 1:
            raise UnsupportedError("a tensor of several chunks can't be shown as one view")
        storage = checkpoint._storage(info.chunks[0].extent.storage)
        for chunk in part_info(info, cut).chunks if storage.ahead else ():
            storage.read_ahead(chunk.extent.offset, chunk.extent.nbytes)
        table = checkpoint._table
        array: Array = checkpoint._arrays.view_row(table.rows, table.dims, row, storage.lease())
        return array

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.tp} of {self._checkpoint!r}, {len(self)} tensors>"

    @property
    def metadata(self) -> dict[str, str]:
        """The file's free string-to-string notes (a copy)."""
        return self._checkpoint.metadata

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """What is known of each of the rank's tensors without touching its bytes."""
        return _PartInfos(self._checkpoint.infos, self._cuts)

    @property
    def nbytes(self) -> int:
        """Bytes of the rank's tensors, padding included; tied ones count once per name."""
        return sum(info.nbytes for info in self.infos.values())

    def _cut(self, fqn: str) -> Cut:
        cut = self._cuts.get(fqn)
        if cut is None:
            if fqn in self._checkpoint:
                raise TensorNotFoundError(f"rank {self.rank} has nothing of {escaped(fqn)}")
            raise TensorNotFoundError.among(fqn, list(self._cuts))
        return cut

    def read_into(
        self, out: Mapping[str, Array], *, progress: Progress | None = None, threads: int | None = None
    ) -> None:
        """Read tensors into arrays of the caller's, in parallel.

        Parameters
        ----------
        out : mapping of str to ndarray
            Arrays of the shapes and dtypes of the rank's tensors of those names;
            other tensors are not read.
        progress, threads
            See `Checkpoint.read_into`.

        Raises
        ------
        TensorMismatchError
            An array does not fit; none was written to.
        TensorNotFoundError
            The rank has no tensor of that name; likewise.

        Notes
        -----
        What is in one run in the file and in the array goes by ``pread``, exactly
        its bytes; slices of every row are copied from the mapping.
        """
        from tensorio.checkpoint._into import read_runs

        checkpoint = self._checkpoint
        infos = {fqn: part_info(checkpoint.infos[fqn], self._cut(fqn)) for fqn in out}
        for fqn, info in infos.items():
            _require_fitting(info, out[fqn])
        runs: list[tuple[Storage, int, memoryview]] = []
        jobs: list[tuple[int, Callable[[], object]]] = []
        for fqn, info in infos.items():
            places = _runs_into(info, self._cut(fqn), checkpoint.infos[fqn], out[fqn])
            if places is None:
                jobs.append((info.nbytes, partial(self._copy, fqn, out[fqn])))
            for index, offset, target in places or ():
                runs.append((checkpoint._storage(index), offset, target))
        read_runs(runs, jobs, checkpoint._name, progress, threads)

    def _copy(self, fqn: str, target: Array) -> None:
        import numpy as np

        np.copyto(target, self[fqn])

    def prefetch(self, fqns: Iterable[str] | None = None) -> None:
        """Ask the system to read the rank's slices into memory ahead of use; returns at once.

        Parameters
        ----------
        fqns : iterable of str, optional
            All of the rank's tensors if not given.
        """
        infos = self.infos
        for fqn in self if fqns is None else fqns:
            self._cut(fqn)
            for chunk in infos[fqn].chunks:
                storage = self._checkpoint._storage(chunk.extent.storage)
                if isinstance(storage, FileStorage):
                    storage.prefetch(chunk.extent.offset, chunk.extent.nbytes)

    def close(self) -> None:
        """Let go of the file, if it was opened for this view; arrays handed out stay valid."""
        if self._owned:
            self._checkpoint.close()

    def __enter__(self) -> RankView:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _PartInfos(Mapping[str, TensorInfo]):
    """What is known of a rank's tensors, worked out on access."""

    def __init__(self, whole: Mapping[str, TensorInfo], cuts: dict[str, Cut]) -> None:
        self._whole = whole
        self._cuts = cuts

    def __len__(self) -> int:
        return len(self._cuts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._cuts)

    def __getitem__(self, fqn: str) -> TensorInfo:
        return part_info(self._whole[fqn], self._cuts[fqn])


def raw_shape(info: TensorInfo) -> tuple[int, ...]:
    """Return the shape of a tensor's array: in bytes where elements share them, flat where a row is no whole bytes."""
    if not info.packed:
        return info.shape
    bits = BY_NAME[info.dtype].bits
    if not info.shape or info.shape[-1] * bits % 8:
        return (info.nbytes,)
    return (*info.shape[:-1], info.shape[-1] * bits // 8)


def part_info(info: TensorInfo, cut: Cut) -> TensorInfo:
    """Return what is known of a rank's tensor: its shape, and a chunk per span, where its bytes lie in the whole."""
    if cut.whole:
        return info
    whole = info.chunks[0]
    rows = rows_of(cut, info.fqn, info.shape, BY_NAME[info.dtype].bits) if info.contiguous else None
    chunks, at = [], 0
    for i, (lo, hi) in enumerate(cut.spans):
        shape = (*cut.shape[: cut.dim], hi - lo, *cut.shape[cut.dim + 1 :])
        start = rows.spans[i][0] if rows else lo * whole.strides[cut.dim]
        extent = Extent(whole.extent.storage, whole.extent.offset + start, _reach(info, shape, whole.strides, rows, i))
        chunks.append(Chunk((*[0] * cut.dim, at, *[0] * (len(shape) - cut.dim - 1)), shape, whole.strides, extent))
        at += hi - lo
    return info._replace(shape=cut.shape, chunks=tuple(chunks))


def _reach(info: TensorInfo, shape: tuple[int, ...], strides: tuple[int, ...], rows: Rows | None, i: int) -> int:
    """Bytes from the first to the last element of a chunk."""
    if 0 in shape:
        return 0
    if rows is not None:
        return (rows.height - 1) * rows.nbytes + rows.spans[i][1] - rows.spans[i][0]
    reach = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return reach + BY_NAME[info.dtype].itemsize


def _require_fitting(info: TensorInfo, target: Array) -> None:
    shape, dtype = raw_shape(info), numpy_dtype(info.dtype)
    if target.shape != shape or target.dtype != dtype:
        raise TensorMismatchError(
            f"out= does not fit: expected {shape} {dtype}, found {target.shape} {target.dtype}", record=info.fqn
        )
    if not target.flags.writeable:
        raise TensorMismatchError("an array of out= is read-only", record=info.fqn)


def _runs_into(
    info: TensorInfo, cut: Cut, whole: TensorInfo, target: Array
) -> list[tuple[int, int, memoryview]] | None:
    """Where a tensor's bytes are, and where each run goes in a target; None unless its pieces are runs that fill it."""
    if not whole.contiguous or whole.flags & (CONJ | NEG) or not target.flags.c_contiguous or cut.pad:
        return None
    if not cut.whole and any(n != 1 for n in info.shape[: cut.dim]):
        return None
    import numpy as np

    raw = target.reshape(-1).view(np.uint8).data if target.size else memoryview(bytearray())
    runs, at = [], 0
    for chunk in info.chunks:
        extent = chunk.extent
        runs.append((extent.storage, extent.offset, raw[at : at + extent.nbytes]))
        at += extent.nbytes
    return [run for run in runs if len(run[2])]


def _part(whole: Array, info: TensorInfo, cut: Cut) -> Array:
    """A rank's part of an array: a view if it is one slice, else a copy."""
    if info.packed:
        rows = rows_of(cut, info.fqn, info.shape, BY_NAME[info.dtype].bits)
        matrix = whole.reshape(rows.height, rows.nbytes)
        part = _part_along(matrix, 1, rows.spans, rows.pad)
        return part.reshape(raw_shape(info._replace(shape=cut.shape)))
    return _part_along(whole, cut.dim, cut.spans, cut.pad)


def _part_along(whole: Array, dim: int, spans: tuple[tuple[int, int], ...], pad: int) -> Array:
    parts = [whole[(*[slice(None)] * dim, slice(lo, hi))] for lo, hi in spans or ((0, 0),)]
    if len(parts) == 1 and not pad:
        return parts[0]
    import numpy as np

    shape = list(whole.shape)
    shape[dim] = pad
    return np.concatenate([*parts, np.zeros(shape, whole.dtype)], axis=dim)
