"""Cut a checkpoint into a file per rank of a tensor-parallel group."""

from __future__ import annotations

import os
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tensorio import formats
from tensorio.checkpoint._checkpoint import open_checkpoint
from tensorio.checkpoint._manifest import MANIFEST, RANKS_MAX, Manifest, Part, is_plain_name, read_manifest
from tensorio.checkpoint._packing import nbytes_of
from tensorio.checkpoint._ranked import Division
from tensorio.errors import TensorIOError, UnsupportedError, error_context
from tensorio.plan import FlatPlan, Payloads
from tensorio.tp import Rules, config_of, rules_of
from tensorio.writing.folders import require_free, staged_folder, write_together

if TYPE_CHECKING:
    from tensorio.checkpoint._pieces import Piece
    from tensorio.formats._base import Format
    from tensorio.plan import Plan

    Progress = Callable[[int, int], object]

__all__ = ["NAME", "ShardReport", "rules_for", "shard_checkpoint"]

# What vLLM's loader of format "sharded_state" looks for, without the suffix (documentation of vLLM 0.11.2,
# `ShardedStateLoader.DEFAULT_PATTERN`).
NAME = "model-rank-{rank}-part-{part}"


@dataclass(frozen=True)
class ShardReport:
    """What `tensorio.shard` wrote, or would write.

    Attributes
    ----------
    source, target : str
    format : str
        Of the files.
    tp : int
        Number of ranks.
    tensors : int
        In the source.
    files : tuple of tuple of str
        Names of each rank's files.
    nbytes : tuple of int
        Of each rank's files, in bytes.
    rules : mapping of str to int
        How many tensors each rule took, by pattern.
    unmatched : tuple of str
        Names that no rule fits, left to `default`.
    skipped : tuple of str
        Names of tensors that no file has.
    padded : tuple of str
        Names of tensors to which zeros were added.
    repeated : tuple of str
        Names of tensors whose heads are on several ranks, since there are fewer heads than ranks.
    dropped : tuple of str
        Names of values that are no tensors.
    """

    source: str
    target: str
    format: str
    tp: int
    tensors: int
    files: tuple[tuple[str, ...], ...]
    nbytes: tuple[int, ...]
    rules: Mapping[str, int] = field(default_factory=dict)
    unmatched: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    padded: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    def __str__(self) -> str:
        files = sum(map(len, self.files))
        return f"{self.source}: {self.tensors} tensors for {self.tp} ranks in {files} files ({sum(self.nbytes)} bytes)"


def rules_for(source: Any, rules: Any, config: Any) -> Rules:
    """Return the rules; a ``config.json`` beside the source is looked into if they need a number that is not given."""
    rules = list(rules) if isinstance(rules, Iterator) else rules  # they may be gone through twice
    if config is not None:
        return rules_of(rules, config_of(config))
    try:
        return rules_of(rules)
    except ValueError:
        beside = _config_beside(source)
        if beside is None:
            raise
    return rules_of(rules, config_of(beside))


def _config_beside(source: Any) -> str | None:
    """The path of the ``config.json`` in a folder, or in that of a file."""
    if not isinstance(source, str | os.PathLike):
        return None
    path = os.fspath(source)
    beside = os.path.join(path if os.path.isdir(path) else os.path.dirname(path), "config.json")
    return beside if os.path.isfile(beside) else None


def shard_checkpoint(
    src: Any, dst: Any, *, tp: int, rules: Any, config: Any, default: str, format: str | None, name: str | None,
    max_shard_size: int | str | None, metadata: Mapping[str, str] | None, overwrite: bool, dry_run: bool, durable: bool,
    progress: Progress | None, **options: Any,
) -> ShardReport:  # fmt: skip
    """Cut a checkpoint; see `tensorio.shard`."""
    if type(tp) is int and tp > RANKS_MAX:
        raise ValueError(f"expected at most {RANKS_MAX} ranks, found {tp}")
    pattern, target = _naming(name, format)
    if metadata and not hasattr(target, "plan_items"):
        raise UnsupportedError(f"files of the format {target.NAME} have no place for metadata=")
    most = None if max_shard_size is None else nbytes_of(max_shard_size)
    folder = os.fspath(dst)
    replaceable = _is_ours if overwrite else None
    require_free(folder, replaceable)
    resolved = rules_for(src, rules, config)
    with open_checkpoint(src, **options) as checkpoint, error_context(path=checkpoint._name):
        division = Division(checkpoint, tp, resolved, default)
        job = _Job(division, target, pattern, most, metadata)
        report = job.report(folder)
        if not dry_run:
            with staged_folder(folder, replaceable=replaceable, durable=durable) as staging:
                note = os.path.join(staging, MANIFEST)
                placed = [[(os.path.join(staging, file), plan) for file, plan in chain] for chain in job.chains]
                write_together(placed, durable=durable, progress=progress, total=sum(report.nbytes))
                checkpoint.check_unchanged()
                write_together([[(note, FlatPlan(job.manifest().text(), Payloads()))]], durable=durable)
    return report


def _naming(name: str | None, format: str | None) -> tuple[str, Format]:
    """The pattern of the files' names, and their format."""
    if name is None:
        target = formats.for_target(NAME, format or "safetensors")
        pattern = NAME + "".join(target.SUFFIXES[:1])
    else:
        pattern = name
        _require_pattern(name)
        target = formats.for_target(name, format)
    return pattern, target


def _require_pattern(name: str) -> None:
    try:
        fields = {key for _, key, _, _ in string.Formatter().parse(name) if key is not None}
        named = name.format(rank=0, part=0)
    except (ValueError, IndexError, KeyError, AttributeError):
        fields, named = set(), ""
    if "rank" not in fields or not is_plain_name(named) or named == MANIFEST:
        raise ValueError(f"expected name= to be a file name with {{rank}} and perhaps {{part}}, found {name!r}")


def _is_ours(folder: str) -> bool:
    """Whether a folder has nothing in it but what an earlier run made."""
    try:
        made = read_manifest(os.path.join(folder, MANIFEST)).names
        with os.scandir(folder) as entries:
            return all(entry.name in made and not entry.is_dir(follow_symlinks=False) for entry in entries)
    except (OSError, TensorIOError):
        return False


class _Job:
    """One checkpoint, cut: which file gets which tensors."""

    def __init__(
        self,
        division: Division,
        target: Format,
        pattern: str,
        most: int | None,
        metadata: Mapping[str, str] | None,
    ) -> None:
        self._division = division
        self._checkpoint = division.checkpoint
        self._target = target
        self._pattern = pattern
        self._metadata = dict(metadata or {})
        self._ranks = [list(_parts(self._pieces(rank), most)) for rank in range(division.tp)]
        if max(map(len, self._ranks)) > 1 and pattern.format(rank=0, part=0) == pattern.format(rank=0, part=1):
            raise ValueError("name= needs {part} in it: a rank has several files")

    def _pieces(self, rank: int) -> Iterator[Piece]:
        from tensorio.checkpoint._pieces import piece_of  # needs NumPy

        for fqn, cut in self._division.cuts(rank).items():
            yield piece_of(self._checkpoint, self._division.infos[fqn], cut)

    @property
    def _source(self) -> str:
        return os.path.basename(os.path.normpath(self._checkpoint._name))

    def _files(self, rank: int) -> list[str]:
        return [self._pattern.format(rank=rank, part=part) for part in range(len(self._ranks[rank]))]

    @cached_property
    def chains(self) -> list[list[tuple[str, Plan]]]:
        """The layout of each rank's files."""
        return [self._chain(rank) for rank in range(self._division.tp)]

    def _chain(self, rank: int) -> list[tuple[str, Plan]]:
        from tensorio.checkpoint._pieces import plan_pieces

        notes = {
            **self._checkpoint.metadata, **self._metadata, "tensorio.tp": str(self._division.tp),
            "tensorio.rank": str(rank), "tensorio.source": self._source,
            "tensorio.rules": self._division.rules.digest,
        }  # fmt: skip
        parts = zip(self._files(rank), self._ranks[rank], strict=True)
        return [(name, plan_pieces(pieces, self._target, notes, name)) for name, pieces in parts]

    def manifest(self) -> Manifest:
        """Return what says how the files are to be put together."""
        infos, rules = self._division.infos, self._division.resolved.rules
        tensors = {f: Part(infos[f].dtype, infos[f].shape, rule) for f, rule in rules.items() if rule.action != "skip"}
        return Manifest(
            self._division.tp, self._source, self._division.rules.digest, self._checkpoint._opened.metadata,
            tuple(tuple(self._files(rank)) for rank in range(self._division.tp)), tensors, self._skipped(),
        )  # fmt: skip

    def _skipped(self) -> tuple[str, ...]:
        return tuple(fqn for fqn, rule in self._division.resolved.rules.items() if rule.action == "skip")

    def report(self, folder: str) -> ShardReport:
        """Say what the files will be."""
        from tensorio.checkpoint._convert import others

        division, tp = self._division, self._division.tp
        resolved = division.resolved
        cuts = [fqn for fqn, rule in resolved.rules.items() if rule.action == "cut"]
        last = {fqn: division.cut(fqn, tp - 1) for fqn in cuts}
        return ShardReport(
            self._source, folder, self._target.NAME, tp, len(resolved.rules),
            tuple(tuple(self._files(rank)) for rank in range(tp)),
            tuple(sum(plan.nbytes for _, plan in chain) for chain in self.chains),
            {rule.pattern: count for rule, count in resolved.counts.items()},
            resolved.unmatched, self._skipped(),
            tuple(fqn for fqn, cut in last.items() if cut is not None and cut.pad),
            tuple(fqn for fqn in cuts if any(heads < tp for heads in resolved.rules[fqn].heads)),
            tuple(others(self._checkpoint)),
        )  # fmt: skip


def _parts(pieces: Iterable[Piece], most: int | None) -> Iterator[list[Piece]]:
    """Tensors in files of at most so many bytes of tensors, or one of a single larger tensor; at least one file."""
    part: list[Piece] = []
    size = 0
    for piece in pieces:
        if part and most is not None and size + piece.nbytes > most:
            yield part
            part, size = [], 0
        part.append(piece)
        size += piece.nbytes
    yield part
