"""The public functions that read; those that write: `_api_save`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from tensorio import formats
from tensorio.checkpoint._checkpoint import Checkpoint, load_file, open_checkpoint
from tensorio.checkpoint._options import reading_options
from tensorio.checkpoint._several import place_of_several
from tensorio.checkpoint._verify import Report, verify_path
from tensorio.encryption._header import is_encrypted
from tensorio.encryption._opening import head_of
from tensorio.errors import DecryptionError, FormatError, UnknownFormatError, UnsupportedError, error_context
from tensorio.formats._base import OpenOptions
from tensorio.scanning._report import ScanReport
from tensorio.storage.opening import open_storage
from tensorio.tree import prune

__all__ = ["identify", "load", "open", "scan", "verify"]

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
    verify: bool | str = False,
    key: Any = None,
) -> Checkpoint:
    """Open a checkpoint without reading its payload.

    Parameters
    ----------
    path : str, os.PathLike, buffer or seekable binary file object
        A file object counts from its current position on. Addresses such as
        ``s3://...`` are read whole through fsspec (extra ``remote``). A folder
        of files with an index (``model.safetensors.index.json``,
        ``pytorch_model.bin.index.json``), or the index itself, is opened as one
        checkpoint; a folder with a ``model.safetensors`` or a
        ``pytorch_model.bin`` as that file.
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
    verify : {False, True, "require"}
        Compare the bytes with every checksum there is of them first, as
        `tensorio.verify` does; "require" refuses a file with payload bytes
        that none covers.
    key : bytes, str or callable, optional
        Of a file, or of tensors, that `encrypt` encrypted: 32 bytes;
        ``"env:NAME"`` or ``"file:PATH"``; or a function that is called with the
        name of the key in the file and returns one of these. A file that is
        not encrypted is refused.

    Returns
    -------
    Checkpoint
        Full dotted names to arrays; copies: no.

    Raises
    ------
    FormatError
        The bytes are wrong; see `tensorio.errors` for the kinds.
    DecryptionError
        Encrypted, and there is no key or not the right one; or changed since.
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
    most one page per record). Of an encrypted file, the chunks of the header of
    a ``.safetensors``, and all of any other; decrypted bytes are private memory.
    """
    options = reading_options(writable, unknown, allow, strict, encoding, key)
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
    verify: bool | str = False,
    check_finite: bool = False,
    key: Any = None,
    progress: Progress | None = None,
) -> Any:
    """Return what was saved, with NumPy arrays at the tensors.

    Parameters
    ----------
    names : iterable of str, optional
        Full dotted names of the tensors wanted; the rest of what was saved is
        dropped.
    check_finite : bool
        Refuse NaN and infinity: reads all tensors that are returned.
    progress : callable, optional
        Called as ``progress(done, total)`` in bytes, with ``mmap=False`` or
        ``verify=True``.
    path, format, mmap, writable, unknown, allow, encoding, strict, verify, key
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
    TensorNotFoundError
        `names` has one that is not there.
    NonFiniteError
        With ``check_finite=True``: ``.found`` has every such tensor.
    See `open` for the rest.

    Notes
    -----
    Costs what `open` costs and less than a microsecond for each array; a page of
    the file is read when it is looked at. With ``mmap=False``, or on a disk that is
    far away, all of the file is read before this returns.
    """
    options = reading_options(writable, unknown, allow, strict, encoding, key)
    if names is None and not verify and place_of_several(path) is None:
        loaded = load_file(path, format=format, mmap=mmap, progress=progress, options=OpenOptions(**options))
    else:
        checkpoint = open_checkpoint(path, format=format, mmap=mmap, verify=verify, progress=progress, **options)
        with checkpoint:
            loaded = checkpoint.tree() if names is None else _selected(checkpoint, names)
    if check_finite:
        from tensorio.checkpoint._finite import require_finite

        with error_context(path=formats.target_name(path)):
            require_finite(loaded, "nothing is returned")
    return loaded


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


def verify(
    path: Any, *, manifest: Any = None, require: bool = False, key: Any = None, progress: Progress | None = None
) -> Report:
    """Check the structure of a checkpoint and compare it with every checksum there is of it, with all cores.

    Those are: the CRC-32 of each record of a zip archive; the digests of
    tensors that ``save(..., digests=True)`` put into a file; a manifest of the
    SHA-256 of whole files.

    Parameters
    ----------
    path
        See `open`. A folder that is no checkpoint is compared with the manifest
        in it.
    manifest : str, os.PathLike or False, optional
        A list as ``sha256sum`` writes it, with names relative to the folder
        that `path` is, or is in. If not given, it is looked for: beside a file
        ``<file>.sha256``, then ``checkpoint.sha256`` or ``SHA256SUMS`` in its
        folder; inside a folder, one of these two. False: none is used.
    require : bool
        Whether payload bytes that nothing covers are a problem.
    key
        See `open`. Of what is encrypted, the tag of every chunk is checked.
    progress : callable, optional
        Called as ``progress(done, total)`` in bytes.

    Returns
    -------
    Report
        What is wrong: in which file, record and bytes, and whose they are; what
        was compared; and how many bytes nothing covers.

    Raises
    ------
    FormatError
        The structure of a file is wrong, so that there is nothing to compare; in
        a folder it is a problem of the report, and the other files are compared.
        Or the manifest that was given is none.
    OSError
        From the system: there is no such file or folder. What can't be read of
        one is a problem of the report.

    Notes
    -----
    Reads the payload once for checksums and digests and once for a manifest.
    One file's SHA-256 can't be shared by several cores.
    """
    return verify_path(path, manifest, require, progress, key=key)


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

    Parameters
    ----------
    path
        See `open`.

    Returns
    -------
    str
        As `format` takes it; ``"encrypted"`` for what is encrypted as a whole.

    Raises
    ------
    UnknownFormatError
        No format recognises it; the message says what it looks like.
    OSError
        From the system.

    Notes
    -----
    Looks at the first bytes, and at the directory of an archive; of a checkpoint in
    several files, and where the suffix decides, at the headers.
    """
    if place_of_several(path) is not None:
        try:
            with open_checkpoint(path, unknown="opaque") as checkpoint:
                return checkpoint.format
        except DecryptionError:
            return "encrypted"
    storage, _, name = open_storage(path)
    try:
        with error_context(path=name):
            if is_encrypted(head_of(storage)):
                return "encrypted"
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
