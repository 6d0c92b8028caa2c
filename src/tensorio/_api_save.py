"""The public functions that write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tensorio import formats
from tensorio.checkpoint._checkpoint import open_checkpoint
from tensorio.checkpoint._options import reading_options
from tensorio.checkpoint._recover import Recovery, recover_file
from tensorio.checkpoint._saving import Saved, SaveRequest, save_object
from tensorio.checkpoint._sums import write_manifest as _write_manifest
from tensorio.checkpoint._watched import write_file
from tensorio.errors import UnsupportedError
from tensorio.formats._base import OpenOptions
from tensorio.plan import CheckedPlan

__all__ = ["convert", "recover", "save", "write_manifest"]

Progress = Callable[[int, int], object]


def save(
    obj: Any,
    path: Any,
    *,
    format: str | None = None,
    metadata: Mapping[str, str] | None = None,
    align: int | None = None,
    compact: bool = False,
    max_shard_size: int | str | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    base: Any = None,
    digests: bool = False,
    manifest: bool = False,
    readback: bool = False,
    check_finite: bool = False,
    durable: bool = True,
    progress: Progress | None = None,
) -> Saved:
    """Save tensors (and, in formats that hold them, plain Python objects around them).

    Parameters
    ----------
    obj : object
        NumPy arrays, torch tensors or anything that speaks DLPack, in nested
        dicts and lists. Arrays whose byte ranges overlap are stored once.
    path : str, os.PathLike or writable binary file object
        The suffix selects the format: ``.safetensors``; ``.pt``, ``.pth``,
        ``.bin``, ``.ckpt`` for a torch zip. With `max_shard_size`, a folder, or
        a file in one.
    format : str, optional
        Overrides the suffix; needed for a file object.
    metadata : mapping of str to str, optional
        Notes, in formats that have room for them.
    align : int, optional
        Where payloads start, in bytes: each record of a ``.pt`` (default 64, at
        most 32768), the first tensor of a ``.safetensors`` (default 8).
    compact : bool
        Write only the part of each storage that the tensors reach, and views
        with holes in them, such as ``weight[:, ::2]``, without the holes, in C
        order, if no other tensor shares their bytes. ``Saved.left_out`` says how
        much that was. Formats of names and tensors never hold more.
    max_shard_size : int or str, optional
        Save a flat dict of tensors in several files of at most so many bytes of
        tensors (``"5GB"``; a larger tensor has a file to itself), and an index
        that says which file has which tensor, with Hugging Face's names:
        ``model-00001-of-00003.safetensors``, ``model.safetensors.index.json``;
        ``pytorch_model-00001-of-00003.bin`` for ``format="torch_zip"``; the stem
        of the file, if one is named. One file, without an index, if all fits.
    include, exclude : str or iterable of str, optional
        Patterns of tensor names, as in `tensorio.tp`: ``"**.lora_*.**"``. Save
        only the tensors that `include` fits and `exclude` does not. With
        `include`, what is no tensor is left out, too.
    base : str, os.PathLike or Checkpoint, optional
        A ``.safetensors`` file in the folder of `path`. Only the tensors whose
        bytes, dtype or shape differ from its are stored; for the rest the new
        file, a delta, refers to it, and can't be read whole without it. For
        ``.safetensors`` only.
    digests : bool
        Put a SHA-256 of each tensor's bytes among the notes of a
        ``.safetensors`` file (key ``tensorio.sha256``); `verify` compares them.
        Reads the tensors once more, with all cores. Other formats refuse it.
    manifest : bool
        Write the SHA-256 of the file to ``<path>.sha256``, as ``sha256sum -c``
        takes it: computed by another thread while the file is written, at most
        1 to 2 GB/s on current CPUs. Without it, one that is there of an old
        file of this name is removed. With `max_shard_size`: of all files, to
        ``checkpoint.sha256`` in the folder.
    readback : bool
        When the file is on disk, read it back past the page cache, where the
        system lets go of its pages, and compare it with what was written,
        before it gets its name.
    check_finite : bool
        Refuse NaN and infinity, before anything is written: costs a read of memory.
    durable : bool
        Sync file and folder to disk before returning.
    progress : callable, optional
        Called as ``progress(done, total)`` in bytes.

    Returns
    -------
    Saved
        Which files were written, and how many bytes.

    Raises
    ------
    OSError
        From the system; the old file is as it was, and no temporary is left.
    ChecksumError
        With ``readback=True``: the disk has other bytes than were written. The
        old file is as it was.
    UnsupportedError, TensorMismatchError
        The format can't hold something in `obj`, or an option; or `base` does not fit.
    NonFiniteError
        With ``check_finite=True``: ``.found`` has every such tensor.
    TensorNotFoundError
        A pattern of `include` fits no tensor.
    ValueError
        A pattern means nothing, or `path` is a file that `base` needs.

    Notes
    -----
    With `base`, tensors are compared byte for byte, by all cores, at the speed
    at which both can be read.

    The file appears whole or not at all: it is written beside the target and
    renamed. Memory: under 32 MiB beyond the tensors.

    So do the files of `max_shard_size`: they are written into a folder beside the
    named one, which then takes its place, with all files that are not the
    checkpoint's; or, where folders can't be exchanged and if a file was named,
    get names of their own, and the index is replaced last. Files of the earlier
    checkpoint of that name are removed.
    """
    request = SaveRequest(
        format, metadata, align, compact, max_shard_size, include, exclude, base, digests, manifest, readback,
        check_finite, durable, progress,
    )  # fmt: skip
    return save_object(obj, path, request)


def convert(
    src: Any,
    dst: Any,
    *,
    format: str | None = None,
    dtype: str | None = None,
    rename: Callable[[str], str] | Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    compact: bool = False,
    unknown: str = "error",
    allow: Iterable[type] = (),
    strict: bool = False,
    key: Any = None,
    durable: bool = True,
    progress: Progress | None = None,
) -> list[str]:
    """Write a checkpoint again in another format; no tensor is loaded.

    Parameters
    ----------
    src, unknown, allow, strict, key
        See `open`; what is written is not encrypted.
    dst, durable, progress
        See `save`.
    format : str, optional
        Of `dst`; by its suffix if not given.
    dtype : optional
        Not available yet; must be None.
    rename : callable or mapping, optional
        New names for tensors; the result is then flat.
    max_shard_size : int or str, optional
        Write several files and an index, as `save` does; names are flat then.
    include, exclude, compact
        See `save`; names are those of `src`.

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
    64 MiB of memory, whatever the size. What is encrypted and no
    ``.safetensors`` is decrypted to memory first.
    """
    from tensorio.checkpoint._choosing import Choice
    from tensorio.checkpoint._convert import convert_checkpoint

    if dtype is not None:
        raise UnsupportedError("dtype= is not available in this version")
    options = reading_options(False, unknown, allow, strict, key=key)
    choice = Choice(include, exclude)
    if max_shard_size is not None:
        from tensorio.checkpoint._shards import convert_shards

        with open_checkpoint(src, **options) as checkpoint:
            return convert_shards(
                checkpoint, dst, format, max_shard_size, rename, choice, compact, durable=durable, progress=progress
            )
    target = formats.for_target(dst, format)
    with open_checkpoint(src, **options) as checkpoint:
        plan, dropped = convert_checkpoint(
            checkpoint, target, formats.target_name(dst), rename, choice=choice, compact=compact
        )
        write_file(CheckedPlan(plan, checkpoint.check_unchanged), dst, durable=durable, progress=progress)
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
    key: Any = None,
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
    key
        See `open`. A tensor with bytes in a chunk that is gone or changed is
        lost; of a file that is encrypted as a whole, places are those before
        encryption. What is written is not encrypted.
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
    Reads all of the file. Time is linear in its size whatever is in it; memory is
    that of `convert`. A file that is encrypted as a whole is decrypted to memory.
    """
    options = OpenOptions(**reading_options(False, unknown, allow, False, encoding, key))
    return recover_file(
        src, dst, format=format, raw=raw, keep_damaged=keep_damaged, options=options, durable=durable, progress=progress
    )


def write_manifest(path: Any, *, durable: bool = True, progress: Progress | None = None) -> str:
    """Write the SHA-256 of a file, or of all files of a folder, as ``sha256sum -c`` takes them.

    Parameters
    ----------
    path : str or os.PathLike
        Of a file: the manifest is written beside it, ``<path>.sha256``. Of a
        folder: inside, ``checkpoint.sha256``; it names all files below, links
        to files too, except what is in folders whose name begins with a dot.
        The index of a checkpoint in several files stands for its folder.
    durable : bool
        Sync the manifest to disk before returning.
    progress : callable, optional
        Called as ``progress(done, total)`` in bytes.

    Returns
    -------
    str
        Path of the manifest; one that was there is replaced.

    Raises
    ------
    OSError
        From the system.
    FormatError
        A file was written to meanwhile; an index that is none.
    UnsupportedError
        Something that is no regular file.

    Notes
    -----
    Several files are hashed at once, a core each; one file by one core.
    """
    return _write_manifest(path, durable=durable, progress=progress)
