"""One save, from the user's object to the files of that name: the steps, and their order.

Everything that can be refused is refused before the first byte is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tensorio import formats
from tensorio.checkpoint._choosing import Choice, chosen_part
from tensorio.checkpoint._shards import Shards, prepare_shards
from tensorio.checkpoint._watched import write_file
from tensorio.errors import UnsupportedError
from tensorio.formats._base import SaveOptions
from tensorio.plan import CheckedPlan

if TYPE_CHECKING:
    from tensorio.formats._base import Format
    from tensorio.plan import LaidOut, Payloads

__all__ = ["SaveJob", "SaveRequest", "Saved", "prepare", "save_object"]

Progress = Callable[[int, int], object]
Check = Callable[[], object]


@dataclass(frozen=True)
class Saved:
    """What a save wrote.

    Attributes
    ----------
    path : str or None
        As given; None for a file object.
    files : tuple of str
        Paths of the files that hold tensors, in order; empty for a file object.
    nbytes : int
        Bytes of all files that were written.
    left_out : int
        Bytes of storages that no tensor reaches, and that were not written: with ``compact=True``.
    unchanged : int
        Bytes of tensors that are as they are in the base: with ``base=``.
    clear : tuple of str
        Paths of files of a folder that `encrypt` or `decrypt` copied as they are, and that everybody can read.
    """

    path: str | None
    files: tuple[str, ...]
    nbytes: int
    left_out: int = 0
    unchanged: int = 0
    clear: tuple[str, ...] = ()


@dataclass(frozen=True)
class SaveRequest:
    """How to save; the fields are the arguments of `tensorio.save`."""

    format: str | None = None
    metadata: Mapping[str, str] | None = None
    align: int | None = None
    compact: bool = False
    max_shard_size: int | str | None = None
    include: str | Iterable[str] | None = None
    exclude: str | Iterable[str] | None = None
    base: Any = None
    digests: bool = False
    manifest: bool = False
    readback: bool = False
    check_finite: bool = False
    durable: bool = True
    progress: Progress | None = None


@dataclass(frozen=True)
class SaveJob:
    """A save that is laid out: what is pickled is pickled, and no byte is written.

    Attributes
    ----------
    payloads : tuple of Payloads
        All that is still to be read of the user's memory; whoever copies it first gives the columns its own addresses.
    nbytes : int
        Of all files. What is not of the payloads (headers, pickles) is held in memory until it is written.
    write : callable
        Writes, once. Can be pickled if `progress` can and no payload has a maker, so that another process may do it.
    """

    payloads: tuple[Payloads, ...]
    nbytes: int
    write: Callable[[], Saved]


def save_object(obj: Any, path: Any, request: SaveRequest) -> Saved:
    """Save; see `tensorio.save`."""
    return prepare(obj, path, request).write()


def prepare(obj: Any, path: Any, request: SaveRequest, fetch: Callable[[Any], Any] | None = None) -> SaveJob:
    """Do all of a save that looks at the object, but for the bytes of its tensors.

    Parameters
    ----------
    fetch : callable, optional
        See `SaveOptions`.
    """
    obj = chosen_part(obj, Choice(request.include, request.exclude))
    if request.check_finite:
        from tensorio.checkpoint._finite import require_finite

        require_finite(obj, "nothing was written")
    metadata = None if request.metadata is None else dict(request.metadata)
    options = SaveOptions(
        metadata, request.align, request.compact, formats.target_name(path), request.digests, fetch=fetch
    )
    if request.max_shard_size is not None:
        if request.base is not None:
            raise UnsupportedError("base= is for a save in one file; leave out max_shard_size=")
        shards = prepare_shards(obj, path, request.format, request.max_shard_size, partial(replace, options))
        return SaveJob(
            shards.payloads,
            shards.nbytes,
            partial(_write_shards, shards, path, request.manifest, request.readback, request.durable, request.progress),
        )
    chosen = formats.for_target(path, request.format)
    plan, check, unchanged = _planned(obj, request.base, chosen, options)
    write = partial(_write, plan, check, path, request.manifest, request.readback, request.durable, request.progress,
                    unchanged)  # fmt: skip
    return SaveJob((plan.payloads,), plan.nbytes, write)


def _planned(obj: Any, base: Any, target: Format, options: SaveOptions) -> tuple[LaidOut, Check | None, int]:
    """The layout of the file, what is to be asked once it is written, and the bytes that it leaves to its base."""
    if base is None:
        return target.plan(obj, options), None, 0
    from tensorio.checkpoint._unchanged import plan_delta  # needs NumPy

    return plan_delta(obj, base, target, options)


def _write(
    plan: LaidOut, check: Check | None, path: Any, manifest: bool, readback: bool, durable: bool,
    progress: Progress | None, unchanged: int,
) -> Saved:  # fmt: skip
    checked = plan if check is None else CheckedPlan(plan, check)
    write_file(checked, path, manifest=manifest, readback=readback, durable=durable, progress=progress)
    name = formats.target_name(path)
    return Saved(name, () if name is None else (name,), plan.nbytes, plan.left_out, unchanged)


def _write_shards(
    shards: Shards, path: Any, manifest: bool, readback: bool, durable: bool, progress: Progress | None
) -> Saved:
    files = shards.write(manifest=manifest, readback=readback, durable=durable, progress=progress)
    return Saved(formats.target_name(path), files, shards.nbytes, shards.left_out)
