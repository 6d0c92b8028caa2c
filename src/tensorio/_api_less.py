"""The public functions that write less: parts of checkpoints, and checkpoints put together of parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tensorio.checkpoint._checkpoint import open_checkpoint
from tensorio.checkpoint._merge import Merged, merge_files
from tensorio.checkpoint._options import reading_options
from tensorio.errors import UnsupportedError

if TYPE_CHECKING:
    from tensorio.checkpoint._strip import Stripped

__all__ = ["delta_chain", "merge", "strip"]

Progress = Callable[[int, int], object]


def merge(
    base: Any,
    *adapters: Any,
    dst: Any,
    on_conflict: str = "replace",
    rename: Callable[[str], str] | Mapping[str, str] | None = None,
    format: str | None = None,
    max_shard_size: int | str | None = None,
    unknown: str = "error",
    allow: Iterable[type] = (),
    key: Any = None,
    durable: bool = True,
    progress: Progress | None = None,
) -> Merged:
    """Write the tensors of several checkpoints to one, by name; no tensor is loaded.

    Parameters
    ----------
    base, *adapters
        See `open`; in the order in which they count, the last one most. An opened
        `Checkpoint` is taken as it is, and stays open.
    dst, durable, progress
        See `save`. May be one of the sources.
    on_conflict : {"replace", "keep", "error"}
        Which tensor of a name that two files have is written: the later one,
        which must be of the same dtype and shape, or the earlier one; or none
        is, and it is an error.
    rename : callable or mapping, optional
        New names for the tensors of the adapters (not of the base), for example
        ``lambda name: name.removeprefix("base_model.model.")``.
    format : str, optional
        Of `dst`; by its suffix if not given.
    max_shard_size : int or str, optional
        Write several files and an index, as `save` does.
    unknown, allow
        See `open`.
    key
        See `open`; of all files that are given by path: a function is asked for
        that of each. What is written is not encrypted.

    Returns
    -------
    Merged
        What was added and replaced, and the values that are no tensors, which
        are dropped.

    Raises
    ------
    TensorMismatchError
        Two tensors of a name that don't fit, or may not be; nothing is written.
    See `open` and `save`.

    Notes
    -----
    Bytes are copied as they are. Nothing is computed: the products of LoRA's
    pairs are not added to the weights. Memory as `convert`.
    """
    return merge_files(
        (base, *adapters), dst, on_conflict=on_conflict, rename=rename, format=format, max_shard_size=max_shard_size,
        reading=reading_options(False, unknown, allow, False, key=key), durable=durable, progress=progress,
    )  # fmt: skip


def strip(
    src: Any,
    dst: Any,
    *,
    keep: str | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    flat: bool = False,
    format: str | None = None,
    max_shard_size: int | str | None = None,
    dry_run: bool = False,
    unknown: str = "opaque",
    allow: Iterable[type] = (),
    key: Any = None,
    durable: bool = True,
    progress: Progress | None = None,
) -> Stripped:
    """Write what inference needs of a training checkpoint: its weights, and no optimizer or RNG state.

    Parameters
    ----------
    src, allow, key
        See `open`; what is written is not encrypted.
    dst, durable, progress
        See `save`. May be `src`.
    keep : str, optional
        Key of the entry with the weights, for example ``"ema"``. If not given:
        the first of ``state_dict``, ``model_state_dict``, ``model``, ``module``
        and some more that is there; without one of them, everything is kept but
        what training alone needs, by the names in use. Other copies of the
        weights, such as moving averages, are not kept.
    include : str or iterable of str, optional
        Patterns of tensor names, as in `tensorio.tp`: keep these tensors, instead
        of what the keys say.
    exclude : str or iterable of str, optional
        Patterns of tensors that are not kept.
    flat : bool
        Leave out the key above the weights. Formats of names and tensors always
        do.
    format : str, optional
        Of `dst`; by its suffix if not given.
    max_shard_size : int or str, optional
        Write several files and an index, as `save` does; names are flat then.
    dry_run : bool
        Only say what would be done.
    unknown : {"opaque", "error"}
        See `open`. Objects of classes that are not allowed do not matter where
        they are left out. Pickled modules are written as their state dicts.

    Returns
    -------
    Stripped
        What was kept, and what was left out with its bytes.

    Raises
    ------
    TensorMismatchError
        No tensor would be left, or `keep` is no entry with tensors.
    See `open` and `save`.

    Notes
    -----
    Of a storage, only what the kept tensors reach is written, as with
    ``save(..., compact=True)``. Memory as `convert`.
    """
    from tensorio.checkpoint._strip import strip_file

    return strip_file(
        src, dst, keep=keep, include=include, exclude=exclude, flat=flat, format=format,
        max_shard_size=max_shard_size, dry_run=dry_run,
        reading=reading_options(False, unknown, allow, False, key=key), durable=durable, progress=progress,
    )  # fmt: skip


def delta_chain(path: Any, *, key: Any = None) -> list[str]:
    """List the files that a checkpoint needs: itself and, behind a delta, its base, that one's base, and so on.

    Parameters
    ----------
    path : str or os.PathLike
        Of a file, or of a checkpoint in several files.
    key
        See `open`; of all files of the chain.

    Returns
    -------
    list of str
        None of them may be deleted or changed as long as the first is to be read.

    Raises
    ------
    UnsupportedError
        `path` is no path: nothing in memory refers to a file.
    See `open`.

    Notes
    -----
    Opens every file of the chain and checks it against what the one before says of
    it: costs their headers, and 192 bytes of at most 1,024 tensors of each.
    """
    with open_checkpoint(path, **reading_options(False, "opaque", (), False, key=key)) as checkpoint:
        if checkpoint.path is None:
            raise UnsupportedError("only a file with a path can refer to others")
        return list(checkpoint.files)
