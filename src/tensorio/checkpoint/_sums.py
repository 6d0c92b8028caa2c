"""Manifests: lists of the SHA-256 of files, beside a file or inside a folder, that ``sha256sum -c`` accepts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from tensorio.checkpoint._checks import Work, pieces_of, sha256_of
from tensorio.checkpoint._several import INDEX_SUFFIX
from tensorio.errors import HeaderError, LimitError, TensorIOError, error_context, escaped
from tensorio.plan import FlatPlan, Payloads
from tensorio.storage.opening import open_storage
from tensorio.storage.reading import unreadable
from tensorio.sums import INSIDE, OTHERS, SUFFIX, is_sha256, sums_of, sums_text
from tensorio.writing.output import write_plan

__all__ = [
    "INSIDE",
    "SUFFIX",
    "Manifest",
    "files_below",
    "find_sums",
    "hash_file",
    "read_sums",
    "write_manifest",
    "write_sums",
]

Progress = Callable[[int, int], object]
Refuse = Callable[[TensorIOError], object]

LARGEST = 64 << 20  # bytes; half a million files
_TOP = (INSIDE, *OTHERS)  # what lists of a folder are called
_MARK = os.fsdecode(b"\xef\xbb\xbf")  # U+FEFF in UTF-8, in front of texts of some editors


class Manifest(NamedTuple):
    """A list of digests.

    Attributes
    ----------
    path : str
    folder : str
        What the names are relative to.
    digests : dict of str to str
        Hex digits by name.
    whole : bool
        Whether it is to name all files of the folder.
    """

    path: str
    folder: str
    digests: dict[str, str]
    whole: bool = False


def write_sums(path: str, digests: Mapping[str, str], *, durable: bool = True) -> None:
    """Write a manifest; it appears whole or not at all.

    Parameters
    ----------
    path : str
    digests : mapping of str to str
        Hex digits by name, relative to the manifest's folder.
    """
    text = os.fsencode(sums_text(digests))
    write_plan(FlatPlan(text, Payloads()), path, durable=durable)


def read_sums(path: str, refuse: Refuse | None = None) -> dict[str, str]:
    """Return the digests of a manifest by name.

    Parameters
    ----------
    path : str
    refuse : callable, optional
        Is given the error of each line that is not understood, and the others are returned; else it is raised.

    Raises
    ------
    HeaderError
        Not such a list; a name that leads out of the folder.
    LimitError
        Over 64 MiB.
    """
    storage, _, _ = open_storage(path, local=True)
    try:
        with error_context(path=path):
            if storage.nbytes > LARGEST:
                raise LimitError(f"expected a list of SHA-256 digests, found {storage.nbytes} bytes")
            text = os.fsdecode(b"".join(pieces_of(storage, 0, storage.nbytes))).removeprefix(_MARK)
            beside = os.path.basename(path).removesuffix(SUFFIX) if path.endswith(SUFFIX) else None
            if is_sha256(text.strip()) and beside:  # a digest alone: whose it is, the name says
                return {beside: text.strip().lower()}
            return _relative(sums_of(text, refuse), beside, refuse)
    finally:
        storage.close()


def _relative(digests: dict[str, str], beside: str | None, refuse: Refuse | None) -> dict[str, str]:
    """Take ``./`` from the names; refuse those that lead elsewhere.

    Where there is one alone, and it is the file that the list is beside, its folder does not matter:
    ``sha256sum /data/m.pt > /data/m.pt.sha256``.
    """
    if len(digests) == 1 and beside:
        ((name, digest),) = digests.items()
        if os.path.basename(name) == beside:
            return {beside: digest}
    found: dict[str, str] = {}
    for name, digest in digests.items():
        plain = name[2:] if name.startswith("./") else name
        if plain and not os.path.isabs(plain) and ".." not in plain.split("/") and "\0" not in plain:
            if found.setdefault(plain, digest) == digest:
                continue
            del found[plain]
        error = HeaderError(f"expected each name once, of a file below the folder, found {escaped(name)}")
        if refuse is None:
            raise error
        refuse(error)
    return found


def find_sums(path: str, manifest: str | None = None, refuse: Refuse | None = None) -> Manifest | None:
    """Return the manifest that covers a file or folder; None if there is none.

    Beside a file: ``<file>.sha256``; else, if it names the file, ``checkpoint.sha256`` or ``SHA256SUMS`` in its
    folder. Inside a folder: one of these two.

    Parameters
    ----------
    path : str
    manifest : str, optional
        The one to use; its names are relative to the folder that `path` is, or is in.
    refuse : callable, optional
        Is given one error, with a path, for each list that was found and is not understood, can't be read, or does not
        name the file that it is beside; what is understood of it is used.

    Raises
    ------
    HeaderError, OSError
        The given one does not name the file, is not understood, or can't be read.
    """
    folder, name = (path, None) if os.path.isdir(path) else os.path.split(path)
    if manifest is not None:
        digests = read_sums(manifest)
        if name is not None and name not in digests:
            raise _does_not_name(name, manifest)
        return Manifest(manifest, folder, digests if name is None else {name: digests[name]}, whole=name is None)
    refuse = refuse or (lambda error: None)
    for candidate in ([] if name is None else [path + SUFFIX]) + [os.path.join(folder, n) for n in (INSIDE, *OTHERS)]:
        found = _understood(candidate, refuse)
        if found is not None and name is None:
            return Manifest(candidate, folder, found, whole=True)
        if found is not None and name in found:
            return Manifest(candidate, folder, {name: found[name]})
        if found is not None and candidate == path + SUFFIX:
            refuse(_does_not_name(str(name), candidate))
    return None


def _does_not_name(name: str, manifest: str) -> HeaderError:
    return HeaderError(f"expected a line for {escaped(name)}, found none", path=manifest)


def _understood(path: str, refuse: Refuse) -> dict[str, str] | None:
    """The digests of a list that was found; None if there is none, or nothing of it is understood."""
    if not os.path.isfile(path):
        return None
    bad: list[TensorIOError] = []
    found: dict[str, str] = {}
    try:
        found = read_sums(path, bad.append)
    except TensorIOError as error:
        bad.append(error)
    except OSError as error:
        bad.append(unreadable(error))
    if not bad:
        return found
    more = f"; it is one of {len(bad)} such lines" if len(bad) > 1 else ""
    first = type(bad[0])(f"not used: {bad[0].message}{more}", path=path)
    refuse(first)
    return found or None


def files_below(folder: str, onerror: Callable[[OSError], object] | None = None) -> Iterator[str]:
    """Yield the names of all files below a folder that a manifest is to name, in order.

    Not manifests themselves, temporaries of saves, or what is in folders whose name begins with a dot.

    Parameters
    ----------
    folder : str
    onerror : callable, optional
        Is given the error of a folder that can't be read; without it, such a folder is skipped.
    """
    waiting = [""]
    while waiting:
        inside = waiting.pop()
        try:
            with os.scandir(os.path.join(folder, inside) if inside else folder) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError as error:
            if onerror is not None:
                onerror(error)
            continue
        prefix, below = f"{inside}/" if inside else "", list[str]()
        for entry in entries:
            name = entry.name
            if entry.is_dir(follow_symlinks=False):
                if not name.startswith("."):
                    below.append(prefix + name)
            elif not ((not inside and name in _TOP) or (name.startswith(".") and name.endswith(".tmp"))):
                with contextlib.suppress(OSError):  # a link that leads nowhere
                    if entry.is_file():
                        yield prefix + name
        waiting += reversed(below)


def _raise(error: OSError) -> None:
    raise error


def hash_file(path: str, advance: Callable[[int], object] = lambda nbytes: None) -> str:
    """Return the SHA-256 of a file as hex digits; `advance` is told the bytes that are done."""
    storage, _, _ = open_storage(path, local=True)
    try:
        with error_context(path=path):
            digest = sha256_of(storage, 0, storage.nbytes, advance)
            storage.check_unchanged()
        return digest
    except TensorIOError as error:
        if isinstance(error.__cause__, OSError):
            raise OSError(error.__cause__.errno, error.message, path) from None
        raise
    finally:
        storage.close()


def _folder_of_index(path: str) -> str:
    """The folder that an index stands for, if a path is of one, or of a file that has one in its place.

    Raises
    ------
    FileNotFoundError
        A file that the index names is not there: a list without it would pass for one of the whole checkpoint.
    """
    if not os.path.exists(path) and os.path.isfile(path + INDEX_SUFFIX):
        path += INDEX_SUFFIX
    if not path.endswith(INDEX_SUFFIX) or not os.path.isfile(path):
        return path
    from tensorio.checkpoint._index import read_index

    folder = os.path.dirname(path) or os.curdir
    for name in dict.fromkeys(read_index(path).values()):
        os.stat(os.path.join(folder, name))
    return folder


def write_manifest(path: Any, *, durable: bool = True, progress: Progress | None = None) -> str:
    """Write the SHA-256 of a file, or of all files of a folder; see `tensorio.write_manifest`."""
    target = _folder_of_index(os.fsdecode(os.fspath(path)))
    if os.path.isdir(target):
        folder, names, manifest = target, list(files_below(target, _raise)), os.path.join(target, INSIDE)
    else:
        folder, name = os.path.split(target)
        names, manifest = [name], target + SUFFIX
    digests = dict.fromkeys(names, "")
    work = Work(progress)

    def job(name: str, advance: Callable[[int], None]) -> None:
        digests[name] = hash_file(os.path.join(folder, name), advance)

    for name in names:
        work.add(os.stat(os.path.join(folder, name)).st_size, partial(job, name))
    work.run()
    write_sums(manifest, digests, durable=durable)
    return manifest
