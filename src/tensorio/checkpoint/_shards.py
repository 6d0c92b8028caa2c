"""A checkpoint saved in several files of limited size, with an index: Hugging Face's names and order.

Source: huggingface_hub 2.4 (`save_torch_state_dict`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorio import formats
from tensorio.checkpoint._packing import Entry, entries_of, nbytes_of, split, stored_entry
from tensorio.checkpoint._several import INDEX_SUFFIX, NAMES
from tensorio.checkpoint._sums import INSIDE, SUFFIX, hash_file, read_sums, write_sums
from tensorio.checkpoint._watched import Watched
from tensorio.errors import TensorIOError, UnsupportedError
from tensorio.plan import FlatPlan, Payloads
from tensorio.writing.filesets import publish_set, staged_set
from tensorio.writing.folders import write_together

if TYPE_CHECKING:
    from tensorio.checkpoint._checkpoint import Checkpoint
    from tensorio.checkpoint._choosing import Choice
    from tensorio.checkpoint._convert import Rename
    from tensorio.formats._base import Format, SaveOptions
    from tensorio.plan import LaidOut, Plan

    Progress = Callable[[int, int], object]

__all__ = ["ShardTarget", "Shards", "convert_shards", "converted_shards", "prepare_shards", "shard_target"]

# What files in a folder are called if only the folder is named, by format.
_DEFAULTS = {"safetensors": ("model", ".safetensors"), "torch_zip": ("pytorch_model", ".bin")}
_INDEX_MAX = 256 << 20  # bytes of an old index that is looked into


# --------------------------------------------------------------------------------- names


class ShardTarget(NamedTuple):
    """Where a set of files goes.

    Attributes
    ----------
    folder : str
        As given.
    stem, suffix : str
        Of the name that a single file would have.
    format : Format
    whole : bool
        Whether the folder was named, and not a file in it: it may be exchanged for another.
    """

    folder: str
    stem: str
    suffix: str
    format: Format
    whole: bool


def shard_target(path: Any, format: str | None) -> ShardTarget:
    """Tell where the files of a save go: into a folder, or into that of a file whose name they take.

    Raises
    ------
    UnsupportedError
        A file object, an address, or a format without a name for its files.
    """
    name = formats.target_name(path)
    if name is None or "://" in name:
        raise UnsupportedError("max_shard_size= needs the path of a folder, or of a file in one")
    stem, suffix = os.path.splitext(os.path.basename(name))
    if not os.path.isdir(name) and suffix:
        with contextlib.suppress(ValueError):
            by_suffix = formats.for_target(name)
            chosen = formats.for_target(name, format) if format is not None else by_suffix
            return ShardTarget(os.path.dirname(name) or os.curdir, stem, suffix, chosen, False)
    chosen = formats.for_target(name, format or "safetensors")
    return ShardTarget(name, *_DEFAULTS[chosen.NAME], chosen, True)


class _Set:
    """The names of a set's files, and its index; see `tensorio.writing.filesets.FileSet`."""

    def __init__(self, target: ShardTarget, parts: list[list[str]], total: int) -> None:
        self._stem, self._suffix = target.stem, target.suffix
        self._parts = parts
        self._total = total
        self.single = target.stem + target.suffix
        both = self.single, self.single + INDEX_SUFFIX
        several = len(parts) > 1
        self.commit = both[several]
        self.rivals = {both[not several]}
        self.sums = {INSIDE, *(f"{name}{SUFFIX}" for name in both)}

    def names(self, tag: str = "") -> list[str]:
        """Names of the files that an index names; none for a single file."""
        count = len(self._parts)
        stem = f"{self._stem}-{tag}" if tag else self._stem
        return [f"{stem}-{i + 1:05d}-of-{count:05d}{self._suffix}" for i in range(count)] if count > 1 else []

    def index(self, tag: str = "") -> Plan:
        """Lay out the index."""
        where = {fqn: name for name, fqns in zip(self.names(tag), self._parts, strict=True) for fqn in fqns}
        value = {"metadata": {"total_size": self._total}, "weight_map": where}
        return FlatPlan(json.dumps(value, indent=2).encode(), Payloads())

    def ours(self, folder: str) -> set[str]:
        """What an earlier save left: the single file, the index and what it names, numbered files, their checksums."""
        stem, suffix = re.escape(self._stem), re.escape(self._suffix)
        numbered = re.compile(rf"{stem}(-[0-9a-f]{{8}})?-[0-9]{{5}}-of-[0-9]{{5}}{suffix}")
        named = {self.commit, *self.rivals, *self._named(folder)}
        with os.scandir(folder) as entries:
            files = [entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)]
        tensors = {name for name in files if name in named or numbered.fullmatch(name)}
        sums = self.sums | {f"{name}{SUFFIX}" for name in tensors}
        return tensors | (sums & set(files))

    def _named(self, folder: str) -> set[str]:
        """Files of tensors that an old index names; none if it can't be read."""
        from tensorio.checkpoint._index import read_index

        path = os.path.join(folder, self.single + INDEX_SUFFIX)
        with contextlib.suppress(OSError, ValueError, RecursionError):
            if os.path.getsize(path) <= _INDEX_MAX:
                return {name for name in read_index(path).values() if name.endswith(self._suffix)}
        return set()


# -------------------------------------------------------------------------------- saving


class Shards:
    """A save in several files that is laid out, and of which nothing is written.

    Attributes
    ----------
    payloads : tuple of Payloads
        Of all files.
    nbytes : int
        Of all files.
    left_out : int
        Bytes of storages that no tensor reaches.
    """

    def __init__(
        self, target: ShardTarget, entries: list[Entry], most: int, plan: Callable[[list[str], str], LaidOut]
    ) -> None:
        parts, total = split(entries, most)
        self._folder, self._whole = target.folder, target.whole
        self._files = _Set(target, parts, total)
        names = self._files.names() or [self._files.commit]
        laid_out = [plan(part, name) for name, part in zip(names, parts, strict=True)]
        self.payloads = tuple(laid.payloads for laid in laid_out)
        self.left_out = sum(laid.left_out for laid in laid_out)
        self._plans: list[tuple[str, Plan]] = list(zip(names, laid_out, strict=True))
        if self._files.commit not in names:
            self._plans.append((self._files.commit, self._files.index()))
        self.nbytes = sum(laid.nbytes for _, laid in self._plans)

    def write(
        self, *, manifest: bool = False, readback: bool = False, check: Callable[[], object] | None = None,
        durable: bool = True, progress: Progress | None = None,
    ) -> tuple[str, ...]:  # fmt: skip
        """Write the files, which are visible all of them or none.

        Parameters
        ----------
        manifest, readback : bool
            See `tensorio.save`; the manifest is ``checkpoint.sha256`` in the folder.
        check : callable, optional
            Called when all is written and nothing is visible; what it raises fails the save.

        Returns
        -------
        tuple of str
            Paths of the files that hold tensors.
        """
        files = self._files
        folder = os.path.realpath(self._folder)
        if self._whole:
            _require_first(folder, files.single)
        with staged_set(folder, files, whole=self._whole and not _is_current(folder)) as staging:
            chain = [(os.path.join(staging, name), Watched(laid, hashed=manifest, compared=readback))
                     for name, laid in self._plans]  # fmt: skip
            write_together([chain], durable=durable, progress=progress, total=self.nbytes)
            if readback:
                for path, written in chain:
                    written.check_path(path)
            if check is not None:
                check()
            others = _sums_of_others(folder, files) if manifest else {}
            if manifest:
                write_sums(os.path.join(staging, INSIDE), _sums(chain), durable=durable)
            final = publish_set(staging, folder, files, durable=durable)
        if manifest and not os.path.lexists(os.path.join(folder, INSIDE)):  # the files were put among others
            sums = others | dict(zip(final, _sums(chain).values(), strict=False))
            sums[files.commit] = hash_file(os.path.join(folder, files.commit))
            write_sums(os.path.join(folder, INSIDE), sums, durable=durable)
        return tuple(os.path.join(self._folder, name) for name in final or [files.commit])


def _sums(chain: list[tuple[str, Watched]]) -> dict[str, str]:
    return {os.path.basename(path): written.sha256 for path, written in chain}


def _sums_of_others(folder: str, files: _Set) -> dict[str, str]:
    """What the manifest of a folder says of files that stay there: of those of another save."""
    with contextlib.suppress(OSError, TensorIOError):
        going = files.ours(folder)
        sums = read_sums(os.path.join(folder, INSIDE))
        return {name: digest for name, digest in sums.items() if name not in going}
    return {}


def prepare_shards(
    obj: Any, path: Any, format: str | None, size: int | str, options: Callable[..., SaveOptions]
) -> Shards:
    """Lay out a dict of tensors in files of limited size; see `tensorio.save`.

    Parameters
    ----------
    options : callable
        Returns the options of a file, by ``name=``.
    """
    target = shard_target(path, format)

    def plan(names: list[str], file: str) -> LaidOut:
        return target.format.plan({name: obj[name] for name in names}, options(name=file))

    return Shards(target, entries_of(obj), nbytes_of(size), plan)


def _require_first(folder: str, single: str) -> None:
    """Raise if readers of a folder would take something else than what is to be saved there."""
    for name in NAMES[: NAMES.index(single)]:
        if os.path.lexists(os.path.join(folder, name)):
            raise FileExistsError(
                errno.EEXIST, f"the folder has {name}, which readers take before {single}; remove it, or name a file",
                folder,
            )  # fmt: skip


def _is_current(folder: str) -> bool:
    """Whether it is the folder that this process is in, and would lose by an exchange."""
    with contextlib.suppress(OSError):
        return os.path.samefile(folder, os.curdir)
    return False


def convert_shards(
    checkpoint: Checkpoint, path: Any, format: str | None, size: int | str, rename: Rename | None, choice: Choice,
    compact: bool, *, durable: bool, progress: Progress | None,
) -> list[str]:  # fmt: skip
    """Write a checkpoint again in files of limited size; see `tensorio.convert`."""
    from tensorio.checkpoint._convert import chosen_names, others

    target = shard_target(path, format)
    names = chosen_names(checkpoint, choice)
    shards = converted_shards(checkpoint, target, nbytes_of(size), names, rename, compact)
    shards.write(check=checkpoint.check_unchanged, durable=durable, progress=progress)
    notes = [f"__metadata__.{key}" for key in checkpoint.metadata] if hasattr(target.format, "plan_tree") else []
    return notes + ([] if choice.only else others(checkpoint))


def converted_shards(
    checkpoint: Checkpoint, target: ShardTarget, most: int, names: list[str], rename: Rename | None, compact: bool
) -> Shards:
    """Lay out tensors of a checkpoint in files of limited size."""
    from tensorio.checkpoint._convert import convert_part, renamed

    fqns = {new: fqn for fqn, new in renamed(names, rename).items()}

    def plan(names: list[str], file: str) -> LaidOut:
        return convert_part(checkpoint, target.format, {fqns[name]: name for name in names}, file, compact)

    entries = [stored_entry(new, checkpoint.infos[fqn]) for new, fqn in fqns.items()]
    return Shards(target, entries, most, plan)
