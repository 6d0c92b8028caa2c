"""The public functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tensorio import formats
from tensorio.checkpoint._checkpoint import Checkpoint, load_file, open_checkpoint
from tensorio.checkpoint._options import reading_options
from tensorio.checkpoint._recover import Recovery, recover_file
from tensorio.checkpoint._verify import Report
from tensorio.errors import FormatError, UnknownFormatError, UnsupportedError, error_context
from tensorio.formats._base import OpenOptions, SaveOptions
from tensorio.opening import open_storage
from tensorio.output import write_plan
from tensorio.plan import CheckedPlan
from tensorio.scanning._report import ScanReport
from tensorio.tree import prune

__all__ = ["convert", "identify", "load", "open", "recover", "save", "scan", "verify"]

Progress = Callable[[int, int], object]


def open(
    path: Any,
    *,
    format: str | None = None,
    mmap: bool | str = "auto",
    writable: bool = False,
    unknown: str = "error",
    allow: Iterable[type] = (),
    encoding: str | None = None,
    strict: bool = False,
    verify: bool = False,
) -> Checkpoint:
    """Open a checkpoint without reading its payload.

    Parameters
    ----------
    path : str, os.PathLike, buffer or seekable binary file object
        A file object counts from its current position on. Addresses such as
        ``s3://...`` are read whole through fsspec (extra ``remote``).
    format : str, optional
        Name of the format; found by content if not given.
    mmap : {"auto", True, False, "random"}
        Whether to map the file. False reads all of it with all cores into one
        block of memory. "auto" maps, too, unless the file is on a filesystem
        where a page fault is a request to a server or a program (NFS, Lustre,
        FUSE, 9p, ...): from there, `load` reads the file into memory by large
        reads, and `open` maps it but has the bytes of each tensor read ahead
        before its array is handed out. ``Checkpoint.loading`` says what was
        done, and why. "random" maps for single rows here and there out of a
        file that is not in memory: nothing is read around them.
    writable : bool
        Whether arrays may be written to. The file never changes: pages are
        copied when written.
    unknown : {"error", "opaque"}
        What to do with pickled objects of classes that are not allowed: refuse
        them, all names listed; or keep them as inert `Opaque` data.
    allow : iterable of type
        Classes of your own whose pickled objects are to be made, besides those
        of `tensorio.allow`. Their objects are made without calling them, except
        for classes with a ``__reduce__`` of their own; a ``__setstate__`` runs
        if there is one. The table of what runs of each sort of class is in the
        documentation of ``tensorio.allowing``.
    encoding : str, optional
        Of strings that Python 2 pickled: a codec, or ``"bytes"`` to keep them.
        Text where it is UTF-8, else bytes, if not given.
    strict : bool
        Accept exactly what today's reference writer writes.
    verify : bool
        Recompute the file's checksums first.

    Returns
    -------
    Checkpoint
        Full dotted names to arrays; copies: no.

    Raises
    ------
    FormatError
        The bytes are wrong; see `tensorio.errors` for the kinds.
    UnsafePickleError
        With ``unknown="error"``; ``.globals`` has all refused names.
    TypeError, ValueError
        `allow` has something that is no class, or a class that may not be
        allowed: of the standard library, beyond plain data.
    OSError
        From the system.

    Notes
    -----
    Costs the header: O(number of tensors), no payload byte (for ``.pt``, at
    most one page per record).
    """
    options = reading_options(writable, unknown, allow, strict, encoding)
    return open_checkpoint(path, format=format, mmap=mmap, verify=verify, **options)


def load(
    path: Any,
    *,
    format: str | None = None,
    mmap: bool | str = "auto",
    writable: bool = False,
    names: Iterable[str] | None = None,
    unknown: str = "error",
    allow: Iterable[type] = (),
    encoding: str | None = None,
    strict: bool = False,
    verify: bool = False,
    progress: Progress | None = None,
) -> Any:
    """Return what was saved, with NumPy arrays at the tensors.

    Parameters
    ----------
    names : iterable of str, optional
        Full dotted names of the tensors wanted; the rest of what was saved is
        dropped.
    progress : callable, optional
        Called as ``progress(done, total)`` in bytes, with ``mmap=False`` or
        ``verify=True``.
    path, format, mmap, writable, unknown, allow, encoding, strict, verify
        See `open`.

    Returns
    -------
    object
        Nested dicts, lists and plain values as they were saved. Arrays are
        views of one mapping, read-only unless ``writable=True``; the mapping
        lives as long as they do. bfloat16, float8 and other types that NumPy
        does not have are shown through ml_dtypes.

    Raises
    ------
    See `open`; `TensorNotFoundError` for a name that is not there.
    """
    options = reading_options(writable, unknown, allow, strict, encoding)
    if names is None and not verify:
        return load_file(path, format=format, mmap=mmap, progress=progress, options=OpenOptions(**options))
    checkpoint = open_checkpoint(path, format=format, mmap=mmap, verify=verify, progress=progress, **options)
    with checkpoint:
        return checkpoint.tree() if names is None else _selected(checkpoint, names)


def _selected(checkpoint: Checkpoint, names: Iterable[str]) -> Any:
    """The part of the tree that leads to `names`."""
    table = checkpoint._table
    wanted = {name: table.row_of(name) for name in names}
    fill = checkpoint._opened.fill
    if fill is None:
        return {name: checkpoint[name] for name in wanted}
    with error_context(path=checkpoint._name):
        checkpoint._read_ahead(wanted.values())
        return prune(fill(set(wanted.values())), [checkpoint.paths[name] for name in wanted])


def save(
    obj: Any,
    path: Any,
    *,
    format: str | None = None,
    metadata: Mapping[str, str] | None = None,
    align: int | None = None,
    compact: bool = False,
    max_shard_size: int | str | None = None,
    durable: bool = True,
    progress: Progress | None = None,
) -> None:
    """Save tensors (and, in formats that hold them, plain Python objects around them).

    Parameters
    ----------
    obj : object
        NumPy arrays, torch tensors or anything that speaks DLPack, in nested
        dicts and lists. Arrays whose byte ranges overlap are stored once.
    path : str, os.PathLike or writable binary file object
        The suffix selects the format: ``.safetensors``; ``.pt``, ``.pth``,
        ``.bin``, ``.ckpt`` for a torch zip.
    format : str, optional
        Overrides the suffix; needed for a file object.
    metadata : mapping of str to str, optional
        Notes, in formats that have room for them.
    align : int, optional
        Where payloads start, in bytes: each record of a ``.pt`` (default 64, at
        most 32768), the first tensor of a ``.safetensors`` (default 8).
    compact : bool
        Write only the part of each storage that the tensors reach.
    max_shard_size : optional
        Not available yet; must be None.
    durable : bool
        Sync file and folder to disk before returning.
    progress : callable, optional
        Called as ``progress(done, total)`` in bytes.

    Raises
    ------
    OSError
        From the system; the old file is as it was, and no temporary is left.
    UnsupportedError, TensorMismatchError
        The format can't hold something in `obj`.

    Notes
    -----
    The file appears whole or not at all: it is written beside the target and
    renamed. Memory: under 32 MiB beyond the tensors.
    """
    if max_shard_size is not None:
        raise UnsupportedError("max_shard_size= is not available in this version; save one file")
    chosen = formats.for_target(path, format)
    options = SaveOptions(dict(metadata) if metadata is not None else None, align, compact, formats.target_name(path))
    write_plan(chosen.plan(obj, options), path, durable=durable, progress=progress)


def convert(
    src: Any,
    dst: Any,
    *,
    format: str | None = None,
    dtype: str | None = None,
    rename: Callable[[str], str] | Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
    unknown: str = "error",
    allow: Iterable[type] = (),
    strict: bool = False,
    durable: bool = True,
    progress: Progress | None = None,
) -> list[str]:
    """Write a checkpoint again in another format; no tensor is loaded.

    Parameters
    ----------
    src, unknown, allow, strict
        See `open`.
    dst, durable, progress
        See `save`.
    format : str, optional
        Of `dst`; by its suffix if not given.
    dtype : optional
        Not available yet; must be None.
    rename : callable or mapping, optional
        New names for tensors; the result is then flat.
    max_shard_size : optional
        Not available yet; must be None.

    Returns
    -------
    list of str
        Names of what the target format can't hold and was dropped (values that
        are not tensors).

    Raises
    ------
    See `open` and `save`.

    Notes
    -----
    Bytes go from the source's mapping to the target a piece at a time: under
    64 MiB of memory, whatever the size.
    """
    from tensorio.checkpoint._convert import convert_checkpoint

    if dtype is not None:
        raise UnsupportedError("dtype= is not available in this version")
    if max_shard_size is not None:
        raise UnsupportedError("max_shard_size= is not available in this version; write one file")
    target = formats.for_target(dst, format)
    with open_checkpoint(src, **reading_options(False, unknown, allow, strict)) as checkpoint:
        plan, dropped = convert_checkpoint(checkpoint, target, formats.target_name(dst), rename)
        write_plan(CheckedPlan(plan, checkpoint.check_unchanged), dst, durable=durable, progress=progress)
    return dropped


def recover(
    src: Any,
    dst: Any,
    *,
    format: str | None = None,
    raw: bool = False,
    keep_damaged: bool = False,
    unknown: str = "error",
    allow: Iterable[type] = (),
    encoding: str | None = None,
    durable: bool = True,
    progress: Progress | None = None,
) -> Recovery:
    """Save what is left of a damaged file: a torch zip that was cut off or has holes, a safetensors file cut short.

    A tensor is saved if all of its bytes are there and, where a checksum covers
    them, right. Lost ones are left out of their dicts, and are None in lists
    and tuples; everything else is as it was.

    Parameters
    ----------
    src, unknown, allow, encoding
        See `open`. Never written to.
    dst, format, durable
        See `convert`; may not be `src`.
    raw : bool
        If the description of the tensors is lost, save their bytes: flat uint8
        tensors called ``data/0``, ``data/1``, ..., as the file's records are.
    keep_damaged : bool
        Save tensors whose bytes are all there, but wrong by their checksum.
    progress : callable, optional
        Called as ``progress(done, total)`` in bytes, of what is looked at and
        then of what is written.

    Returns
    -------
    Recovery
        What was saved and what was lost, by name and reason.

    Raises
    ------
    FormatError
        Nothing can be saved; `dst` is not written.
    ValueError
        `dst` is `src`.
    See `open` and `save`.

    Notes
    -----
    Reads all of the file. Time is linear in its size whatever is in it; memory
    is that of `convert`.
    """
    options = OpenOptions(**reading_options(False, unknown, allow, False, encoding))
    return recover_file(
        src, dst, format=format, raw=raw, keep_damaged=keep_damaged, options=options, durable=durable, progress=progress
    )


def verify(path: Any, *, progress: Progress | None = None) -> Report:
    """Check a file's structure and recompute every checksum it has, with all cores.

    Parameters
    ----------
    path
        See `open`.
    progress : callable, optional
        Called as ``progress(done, total)`` in bytes.

    Returns
    -------
    Report
        The bad records, and how many bytes have no checksum (all of a
        ``.safetensors`` file).

    Raises
    ------
    FormatError
        The structure is wrong, so that there is nothing to recompute.
    """
    with open_checkpoint(path, unknown="opaque") as checkpoint:
        return checkpoint.verify(progress=progress)


def scan(path: Any, *, allow: Iterable[str | type] = (), progress: Progress | None = None) -> ScanReport:
    """List every name that the pickles in a file or folder refer to; nothing is run, no object is made.

    Parameters
    ----------
    path : str, os.PathLike, buffer or seekable binary file object
        A folder is scanned with all below it; links are not followed.
    allow : iterable of str or type
        Unknown names to accept: ``"module.name"``, ``"module.*"`` for all below
        a module, or classes. Dangerous names are never accepted.
    progress : callable, optional
        Called as ``progress(done, total)`` in bytes, after each file.

    Returns
    -------
    ScanReport
        With ``.verdict``, and a `Finding` for each name and for each part that
        could not be read to its end.

    Raises
    ------
    OSError
        From the system: `path` can't be opened. What is wrong inside a file
        is a finding, and so is a file of a folder that can't be opened.
    UnsupportedError
        Not a regular file or folder.
    ValueError
        Something in `allow` is no name.

    Notes
    -----
    Reads the pickles, the headers of archives and the first bytes of each
    record; time and memory are linear in that. About a microsecond per opcode;
    packed data are unpacked into at most 256 MiB.
    """
    from tensorio.scanning._files import scan_path

    return scan_path(path, allow=allow, progress=progress)


def identify(path: Any) -> str:
    """Return the name of a file's format: by its first bytes; by its suffix if they say nothing and it opens.

    Raises
    ------
    UnknownFormatError
        No format recognises it; the message says what it looks like.
    """
    storage, _, name = open_storage(path)
    try:
        with error_context(path=name):
            try:
                return formats.of_storage(storage).NAME
            except UnknownFormatError:
                named = formats.of_storage(storage, path=name)
                with contextlib.suppress(FormatError, UnsupportedError):
                    named.open(storage, OpenOptions(unknown="opaque"))
                    return named.NAME
                raise
    finally:
        storage.close()
