"""Several checkpoints in one file, by name: a base, and what adapters put in its place or beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tensorio import formats
from tensorio.checkpoint._checkpoint import Checkpoint, open_checkpoint
from tensorio.checkpoint._packing import Entry, nbytes_of, stored_entry
from tensorio.checkpoint._shards import Shards, shard_target
from tensorio.checkpoint._watched import write_file
from tensorio.encryption._opening import NOT_ENCRYPTED
from tensorio.errors import DecryptionError, TensorMismatchError, error_context
from tensorio.plan import CheckedPlan

if TYPE_CHECKING:
    from tensorio.checkpoint._shards import ShardTarget
    from tensorio.formats._base import Format
    from tensorio.plan import LaidOut
    from tensorio.tensors import TensorInfo

    Progress = Callable[[int, int], object]
    Rename = Callable[[str], str] | Mapping[str, str]

__all__ = ["CONFLICTS", "Merged", "merge_files"]

CONFLICTS = ("replace", "keep", "error")


@dataclass(frozen=True)
class Merged:
    """What `tensorio.merge` wrote.

    Attributes
    ----------
    path : str or None
        As given; None for a file object.
    nbytes : int
        Bytes of all files that were written.
    added : tuple of str
        Tensors that the base does not have.
    replaced : tuple of str
        Tensors of earlier files in whose place are those of later ones.
    kept : tuple of str
        Tensors of later files that are not in it: with ``on_conflict="keep"``.
    dropped : tuple of str
        Values that are no tensors.
    """

    path: str | None
    nbytes: int
    added: tuple[str, ...]
    replaced: tuple[str, ...]
    kept: tuple[str, ...]
    dropped: tuple[str, ...]


def merge_files(
    sources: Iterable[Any], dst: Any, *, on_conflict: str, rename: Rename | None, format: str | None,
    max_shard_size: int | str | None, reading: dict[str, Any], durable: bool, progress: Progress | None,
) -> Merged:  # fmt: skip
    """Merge; see `tensorio.merge`."""
    from tensorio.checkpoint._convert import others  # needs NumPy

    if on_conflict not in CONFLICTS:
        raise ValueError(f"on_conflict= is one of {', '.join(CONFLICTS)}, not {on_conflict!r}")
    if max_shard_size is None:
        write = partial(_one, formats.for_target(dst, format))
    else:
        write = partial(_several, shard_target(dst, format), nbytes_of(max_shard_size))
    with ExitStack() as stack:
        opened = [_opened(source, reading, stack) for source in sources]
        union = _Union(opened[0], on_conflict)
        for number, checkpoint in enumerate(opened[1:], 1):
            union.add(number, checkpoint, rename)
        dropped = tuple(value for checkpoint in opened for value in others(checkpoint))
        nbytes = write(dst, union, opened, durable=durable, progress=progress)
    return Merged(
        formats.target_name(dst), nbytes, tuple(union.added), tuple(union.replaced), tuple(union.kept), dropped
    )


def _one(target: Format, dst: Any, union: _Union, opened: list[Checkpoint], **writing: Any) -> int:
    """Write one file; return its bytes."""
    plan = union.plan(opened, union.names, target, formats.target_name(dst) or "")
    write_file(CheckedPlan(plan, partial(_check, opened)), dst, **writing)
    return plan.nbytes


def _several(target: ShardTarget, most: int, dst: Any, union: _Union, opened: list[Checkpoint], **writing: Any) -> int:
    """Write files of limited size and an index; return the bytes of all."""

    def plan(names: list[str], file: str) -> LaidOut:
        return union.plan(opened, names, target.format, file)

    shards = Shards(target, union.entries(), most, plan)
    shards.write(check=partial(_check, opened), **writing)
    return shards.nbytes


def _opened(source: Any, reading: dict[str, Any], stack: ExitStack) -> Checkpoint:
    """Open a file until the stack is closed; a checkpoint that is open already stays its owner's."""
    if isinstance(source, Checkpoint):
        return source
    try:
        return stack.enter_context(open_checkpoint(source, **reading))
    except DecryptionError as error:
        if error.message == NOT_ENCRYPTED:
            error.message = (
                "nothing in the file is encrypted, and key= (or --key) is of all that is merged: it may have been "
                "replaced; encrypt it, or open it yourself and merge the checkpoint"
            )
        raise


def _check(opened: list[Checkpoint]) -> None:
    for checkpoint in opened:
        checkpoint.check_unchanged()


class _Union:
    """The tensors of all files so far: by name, the number of the file and what is known of the tensor."""

    def __init__(self, base: Checkpoint, on_conflict: str) -> None:
        self._on_conflict = on_conflict
        self._found: dict[str, tuple[int, TensorInfo]] = {fqn: (0, info) for fqn, info in base.infos.items()}
        self.added: list[str] = []
        self.replaced: list[str] = []
        self.kept: list[str] = []

    def add(self, number: int, checkpoint: Checkpoint, rename: Rename | None) -> None:
        """Put the tensors of a further file to them."""
        from tensorio.checkpoint._convert import renamed

        with error_context(path=checkpoint._name):
            for fqn, name in renamed(list(checkpoint), rename).items():
                info = checkpoint.infos[fqn]
                before = self._found.get(name)
                if before is not None and not self._replaces(name, before[1], info):
                    self.kept.append(name)
                    continue
                (self.added if before is None else self.replaced).append(name)
                self._found[name] = number, info

    def _replaces(self, name: str, old: TensorInfo, new: TensorInfo) -> bool:
        if self._on_conflict == "error":
            raise TensorMismatchError(
                "the tensor is in an earlier file, too; on_conflict= 'replace' or 'keep' says which one counts",
                record=name,
            )
        if self._on_conflict == "keep":
            return False
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            raise TensorMismatchError(
                f"expected {old.dtype} of shape {list(old.shape)}, as in an earlier file, found {new.dtype} of shape "
                f"{list(new.shape)}", record=name,
            )  # fmt: skip
        return True

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in order."""
        return list(self._found)

    def entries(self) -> list[Entry]:
        """What each tensor counts; those of the same bytes are put together."""
        return [stored_entry(name, info, number) for name, (number, info) in self._found.items()]

    def plan(self, opened: list[Checkpoint], names: list[str], target: Format, file: str) -> LaidOut:
        """Lay out a file of some tensors; bytes stay where they are until it is written."""
        from tensorio.checkpoint._pieces import piece_of, plan_pieces  # needs NumPy
        from tensorio.tp import Cut

        pieces = []
        for fqn in names:
            number, info = self._found[fqn]
            with error_context(path=opened[number]._name):
                piece = piece_of(opened[number], info, Cut(-1, (), 0, info.shape))
            pieces.append(piece._replace(fqn=fqn, key=(number, piece.key)))
        return plan_pieces(pieces, target, opened[0]._opened.metadata, file)
