"""The public functions for tensor parallelism."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tensorio.checkpoint._checkpoint import Checkpoint, open_checkpoint
from tensorio.checkpoint._options import reading_options
from tensorio.checkpoint._ranked import Division, RankView
from tensorio.checkpoint._shard import ShardReport, rules_for, shard_checkpoint

if TYPE_CHECKING:
    from tensorio.tp import Rules

__all__ = ["ranked", "shard", "unshard"]

Progress = Callable[[int, int], object]


def ranked(
    source: Any,
    rank: int,
    *,
    tp: int,
    rules: Rules | str | os.PathLike[str] | Mapping[str, Any] | Iterable[Any],
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    default: str = "error",
    unknown: str = "error",
    allow: Iterable[type] = (),
    key: Any = None,
) -> RankView:
    """Open what one rank of a tensor-parallel group needs of a checkpoint that is not cut.

    Parameters
    ----------
    source : Checkpoint, path, buffer or seekable binary file object
        An opened checkpoint stays the caller's, and must stay open; else see
        `open`. A folder with a ``model.safetensors.index.json`` is opened as one.
    rank, tp : int
        Number of this rank, from 0, and of all.
    rules, config, default
        See `shard`.
    unknown, allow, key
        See `open`; for a `source` that is not opened yet.

    Returns
    -------
    RankView
        Full dotted names to the rank's arrays; copies: only where a tensor is
        padded, or several of its sections are the rank's.

    Raises
    ------
    See `shard` and `open`.

    Notes
    -----
    Costs O(number of tensors) and touches no payload.
    """
    owned = not isinstance(source, Checkpoint)
    name = source.path if isinstance(source, Checkpoint) else source
    resolved = rules_for(name, rules, config)
    options = reading_options(False, unknown, allow, False, key=key)
    checkpoint = open_checkpoint(source, **options) if owned else source
    try:
        return RankView(Division(checkpoint, tp, resolved, default), rank, owned)
    except BaseException:
        if owned:
            checkpoint.close()
        raise


def shard(
    src: Any,
    dst: str | os.PathLike[str],
    *,
    tp: int,
    rules: Rules | str | os.PathLike[str] | Mapping[str, Any] | Iterable[Any],
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    default: str = "error",
    format: str | None = None,
    name: str | None = None,
    max_shard_size: int | str | None = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    unknown: str = "error",
    allow: Iterable[type] = (),
    key: Any = None,
    durable: bool = True,
    progress: Progress | None = None,
) -> ShardReport:
    """Cut a checkpoint into files for each rank of a tensor-parallel group; no tensor is loaded.

    Parameters
    ----------
    src : path, buffer or seekable binary file object
        See `open`; a folder with a ``model.safetensors.index.json``, too.
    dst : str or os.PathLike
        A folder that is made; it may be there if it is empty.
    tp : int
        Number of ranks, at most 1024.
    rules : Rules, str, os.PathLike, mapping or iterable
        What becomes of which tensor: the name of a preset (see
        `tensorio.tp.presets`), a file of rules, or a mapping of patterns to
        dimensions or words; see `tensorio.tp`.
    config : mapping or path, optional
        The model's ``config.json``, where rules take numbers of heads from it;
        the one beside `src`, or in it, if not given.
    default : {"error", "replicate", "skip"}
        What becomes of tensors that no rule fits.
    format : str, optional
        Of the files: ``"safetensors"``, or ``"torch_zip"``, which keeps tied
        tensors tied; by the suffix of `name` if that is given.
    name : str, optional
        Of the files, with ``{rank}`` and, for several files a rank, ``{part}`` in
        it; ``"model-rank-{rank}-part-{part}.safetensors"`` if not given.
    max_shard_size : int or str, optional
        Bytes of tensors in one file, or a decimal size such as ``"5GB"``; a larger
        tensor gets a file of its own. One file a rank if not given.
    metadata : mapping of str to str, optional
        Notes for the files, besides those of `src`.
    overwrite : bool
        Replace a folder that has nothing in it but what an earlier call made.
    dry_run : bool
        Write nothing.
    unknown, allow, key
        See `open`; what is written is not encrypted.
    durable : bool
        Sync files and folder to disk before returning.
    progress : callable, optional
        Called as ``progress(done, total)`` in bytes.

    Returns
    -------
    ShardReport
        Files and bytes of each rank, and what became of which tensors.

    Raises
    ------
    TensorMismatchError
        A tensor without a rule, a rule without a tensor, or a tensor that can't
        be cut as its rule says.
    UnsupportedError
        The cut goes through a byte that several elements share, or through a part
        of a sparse or quantized tensor of torch. (Scales that are tensors of their
        own have rules of their own.)
    ValueError
        Something is wrong with the rules or other arguments.
    FileExistsError, NotADirectoryError
        `dst` is there already.
    See `open` and `save` for the rest.

    Notes
    -----
    The folder appears whole or not at all. Beside the files, it has a
    ``tensorio_tp.json``, from which `unshard` puts them together again. Bytes go
    from the source's mapping to the files a piece at a time, to all ranks in
    turn: under 64 MiB of memory, whatever the size, and the source is read once.
    """
    return shard_checkpoint(
        src, dst, tp=tp, rules=rules, config=config, default=default, format=format, name=name,
        max_shard_size=max_shard_size, metadata=metadata, overwrite=overwrite, dry_run=dry_run, durable=durable,
        progress=progress, **reading_options(False, unknown, allow, False, key=key),
    )  # fmt: skip


def unshard(
    src: str | os.PathLike[str],
    dst: Any,
    *,
    format: str | None = None,
    key: Any = None,
    durable: bool = True,
    progress: Progress | None = None,
) -> list[str]:
    """Put the files that `shard` made together again; no tensor is loaded.

    Parameters
    ----------
    src : str or os.PathLike
        The folder, with its ``tensorio_tp.json``.
    dst, format, durable, progress
        See `save`.
    key
        See `open`; of all files, if the folder was encrypted. What is written is
        not encrypted.

    Returns
    -------
    list of str
        Names of tensors that were skipped when the checkpoint was cut, and are
        missing now.

    Raises
    ------
    FormatError
        A file is missing, or is not what the manifest says.
    TensorMismatchError
        Ranks differ in what all of them should have, or a tensor has not the
        shape or type that it should.

    Notes
    -----
    Tensors get the bytes that they had, and notes (in formats that have a place
    for them); names are flat. What was padded is cut off, whatever it is by now.
    Memory: under 64 MiB.
    """
    from tensorio.checkpoint._unshard import unshard_folder

    options = {} if key is None else reading_options(False, "error", (), False, key=key)
    return unshard_folder(src, dst, format=format, options=options, durable=durable, progress=progress)
