"""Save what is left of a damaged file: every tensor whose bytes are all there and, where that can be told, right."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorio import formats
from tensorio.checkpoint._checkpoint import Checkpoint, NamedTable
from tensorio.checkpoint._remains import NO_CHECKSUMS, Choices, Remains, remains
from tensorio.checkpoint._watched import write_file
from tensorio.checkpoint._without import without
from tensorio.encryption._header import is_encrypted
from tensorio.encryption._opening import NOT_ENCRYPTED, head_of
from tensorio.encryption._salvage import Hole, Salvaged, salvaged, salvaged_tensors
from tensorio.errors import DecryptionError, HeaderError, TensorIOError, UnsupportedError, error_context, escaped
from tensorio.formats import safetensors
from tensorio.formats._base import OpenOptions
from tensorio.formats._salvage_parts import State
from tensorio.storage.files import FileStorage
from tensorio.storage.opening import open_storage
from tensorio.tree import fqns

if TYPE_CHECKING:
    from tensorio.formats._base import Format, Opened
    from tensorio.formats._salvage_parts import Piece
    from tensorio.plan import Plan
    from tensorio.storage.base import Storage

    Progress = Callable[[int, int], object]

__all__ = ["Loss", "Recovery", "recover_file"]


class Loss(NamedTuple):
    """Why a tensor was lost, or may be wrong.

    Attributes
    ----------
    reason : str
    record : str
        The byte range of the file that it is in, by name.
    offset : int or None
        Of the range's first byte; None if it is not known.
    nbytes : int
        Of the range, as it was.
    """

    reason: str
    record: str
    offset: int | None
    nbytes: int


@dataclass(frozen=True)
class Recovery:
    """What `tensorio.recover` saved, and what it could not.

    Attributes
    ----------
    path : str
        The damaged file.
    format : str
        Its format.
    healthy : bool
        Whether nothing was wrong with it.
    saved : tuple of str
        Full dotted names of the tensors saved.
    not_proven : mapping of str to str
        Those of `saved` whose bytes are all there, but which no checksum
        covers, with the reason.
    lost : mapping of str to Loss
        Tensors that were not saved.
    damaged : mapping of str to Loss
        Tensors that were saved although their bytes are known to be wrong
        (``keep_damaged=True``).
    dropped : tuple of str
        Names of values other than tensors that the target format can't hold.
    raw : bool
        Whether only bytes without shape and type were left (``raw=True``).
    saved_nbytes, lost_nbytes : int
        Bytes of the tensors in `saved`, and in `lost`; tied ones count once per name.
    """

    path: str
    format: str
    healthy: bool
    saved: tuple[str, ...]
    not_proven: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, Loss] = field(default_factory=dict)
    damaged: Mapping[str, Loss] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    raw: bool = False
    saved_nbytes: int = 0
    lost_nbytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether every tensor was saved, and none is known to be wrong."""
        return not self.lost and not self.damaged

    def __str__(self) -> str:
        kept = f", {len(self.damaged)} kept damaged" if self.damaged else ""
        return (
            f"{self.path}: {len(self.saved)} tensors saved ({self.saved_nbytes} bytes), "
            f"{len(self.lost)} lost ({self.lost_nbytes} bytes){kept}"
        )


def recover_file(source: Any, target: Any, *, format: str | None, raw: bool, keep_damaged: bool, options: OpenOptions,
                 durable: bool, progress: Progress | None) -> Recovery:  # fmt: skip
    """Save what is left of a file; see `tensorio.recover`."""
    chosen = formats.for_target(target, format)
    _require_another(source, target)
    storage, _, name = open_storage(source)
    show: Progress = progress or (lambda done, total: None)
    try:
        with error_context(path=name):
            nbytes = storage.nbytes
            plain = _plain(storage, options)
            choices = Choices(replace(options, key=None), raw, keep_damaged)
            left = remains(plain.storage, name, choices, lambda at: show(at, 2 * nbytes))
            if plain.storage is not storage:
                left = _by_tags(left, plain.holes, keep_damaged)
            elif options.key is not None:
                left = _decrypted(left, options)
            report = _Fates(left, keep_damaged)
            checkpoint = Checkpoint(report.pruned(), None, name, {})
            plan, dropped = _plan(checkpoint, chosen, formats.target_name(target))
            healthy = plain.whole and not report.lost and not report.damaged and _opens(plain.storage, name)
            if isinstance(storage, FileStorage):
                storage.check_unchanged()
        write_file(plan, target, durable=durable, progress=lambda done, total: show(nbytes + done, nbytes + total))
    finally:
        storage.close()
    return report.recovery(name, healthy, dropped)


def _plain(storage: Storage, options: OpenOptions) -> Salvaged:
    """What is to be looked at of a file: all of it, or what can be decrypted."""
    if options.key is not None and is_encrypted(head_of(storage)):
        return salvaged(storage, options.key)
    if options.key is not None and not safetensors.recognises(head_of(storage), storage):
        raise DecryptionError(NOT_ENCRYPTED)
    return Salvaged(storage, [], True)


def _decrypted(left: Remains, options: OpenOptions) -> Remains:
    """Decrypt tensors that are encrypted by themselves."""
    wrong = salvaged_tensors(left.opened, options)
    pieces = list(left.pieces)
    for name, i in zip(left.opened.table.names, left.piece_of, strict=True):
        if name in wrong and pieces[i].whole:
            pieces[i] = pieces[i]._replace(state=State.CUT if wrong[name] else State.PROVEN, why=wrong[name])
    return left._replace(pieces=pieces)


def _by_tags(left: Remains, holes: list[Hole], keep_damaged: bool) -> Remains:
    """Judge what was encrypted by its tags: what has a part in a hole is gone, and the rest is as it was.

    Raises
    ------
    HeaderError
        What describes the tensors has a hole, and no checksum of its own that would have told.
    """
    if left.opened.format != "torch_zip" and holes and holes[0].begin < _first_start(left.pieces):
        if not keep_damaged:
            raise HeaderError(f"the description of the tensors can't be used: {holes[0].why}", offset=holes[0].begin)
        left = left._replace(described=State.DAMAGED)
    pieces, ends = [], [hole.end for hole in holes]
    for piece in left.pieces:
        at = bisect_right(ends, piece.start)
        hit = at < len(holes) and holes[at].begin < piece.start + piece.compressed
        if hit and piece.start >= 0 and piece.compressed:
            piece = piece._replace(state=State.CUT, why=holes[at].why)
        elif piece.why == NO_CHECKSUMS:
            piece = piece._replace(state=State.PROVEN, why="")
        pieces.append(piece)
    return left._replace(pieces=pieces)


def _first_start(pieces: list[Piece]) -> float:
    """Where the first tensor begins, and its description has ended."""
    return min((piece.start for piece in pieces if piece.start >= 0), default=inf)


def _require_another(source: object, target: object) -> None:
    """Refuse to write over the only copy of what is to be saved, by whatever name."""
    path = formats.target_name(target)
    try:
        same = path is not None and isinstance(source, str | os.PathLike) and os.path.samefile(source, path)
    except OSError:
        same = False  # one of them is not there
    if same:
        raise ValueError(f"the target is the damaged file itself: {path!r}; save to another name")


def _plan(checkpoint: Checkpoint, target: Format, name: str | None) -> tuple[Plan, list[str]]:
    from tensorio.checkpoint._convert import convert_checkpoint  # needs NumPy

    try:
        return convert_checkpoint(checkpoint, target, name, None)
    except UnsupportedError as error:
        if hasattr(target, "plan_tree"):
            error.message += "; recover to a .safetensors file, which holds the tensors alone"
        raise


def _opens(storage: Storage, name: str) -> bool:
    try:
        formats.of_storage(storage, None, name).open(storage, OpenOptions(unknown="opaque"))
    except TensorIOError:
        return False
    return True


class _Fates:
    """What became of each tensor, by name."""

    def __init__(self, left: Remains, keep_damaged: bool) -> None:
        self.left = left
        self.saved: list[str] = []
        self.not_proven: dict[str, str] = {}
        self.lost: dict[str, Loss] = {}
        self.damaged: dict[str, Loss] = {}
        self._keep_damaged = keep_damaged
        opened = left.opened
        names = zip(opened.table.names, range(len(opened.table)), strict=True)
        self._names = list(names) if opened.flat else [(n, row) for n, _, row in fqns(opened.tree, opened.budget)]
        self._numbers = {name: opened.table.info(row, name).nbytes for name, row in self._names}
        # The piece of each tensor that has any bytes to lose.
        self._pieces = {row: left.pieces[i] for row, i in enumerate(left.piece_of) if opened.table.info(row, "").numel}
        self._gone = {row for row, piece in self._pieces.items() if self._is_lost(piece)}

    def _is_lost(self, piece: Piece) -> bool:
        return not piece.whole and not (piece.state is State.DAMAGED and self._keep_damaged)

    def pruned(self) -> Opened:
        """Return the file without the lost tensors; notes what became of all.

        Raises
        ------
        HeaderError
            Nothing is left.
        """
        opened = self.left.opened
        if opened.flat:
            still = set(range(len(opened.table))) - self._gone
            opened.table = NamedTable(opened.table, [(name, row) for name, row in self._names if row in still])
        else:
            opened.tree = without(opened.tree, self._gone) if self._gone else opened.tree
            still = {row for _, _, row in fqns(opened.tree, opened.budget)}
        for name, row in self._names:
            self._note(name, row, row in still)
        if self.lost and not self.saved and not self.damaged:
            name, loss = next(iter(self.lost.items()))
            raise HeaderError(f"no tensor is left; of {escaped(name)}: {loss.reason}", record=loss.record)
        return opened

    def _note(self, name: str, row: int, there: bool) -> None:
        piece = self._pieces.get(row)
        described = self.left.described
        if not there:
            self.lost[name] = _loss(piece, "another part of the same tensor is lost")
        elif State.DAMAGED in (described, None if piece is None else piece.state):
            self.damaged[name] = _loss(piece, "its name, shape and type may be wrong")
        else:
            self.saved.append(name)
            if State.UNPROVEN in (described, None if piece is None else piece.state):
                why = "" if piece is None else piece.why
                self.not_proven[name] = why or "its name, shape and type have no checksum"

    def recovery(self, path: str, healthy: bool, dropped: list[str]) -> Recovery:
        """Return the report."""
        return Recovery(
            path, self.left.opened.format, healthy, tuple(self.saved), self.not_proven, self.lost, self.damaged,
            tuple(dropped), self.left.raw,
            sum(self._numbers[name] for name in self.saved), sum(self._numbers[name] for name in self.lost),
        )  # fmt: skip


def _loss(piece: Piece | None, reason: str) -> Loss:
    """What happened to a piece; `reason` if nothing did."""
    if piece is None:
        return Loss(reason, "", None, 0)
    return Loss(piece.why or reason, piece.record, None if piece.start < 0 else piece.start, piece.compressed)
