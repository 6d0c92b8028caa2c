"""Manifests: lists of the SHA-256 of files, beside a file or inside a folder, that ``sha256sum -c`` accepts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from tensorio.checkpoint._checks import Work, sha256_of
from tensorio.errors import HeaderError, LimitError, error_context, escaped
from tensorio.plan import FlatPlan, Payloads
from tensorio.storage.opening import open_storage
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

LARGEST = 64 << 20  # bytes; half a million files


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


def read_sums(path: str) -> dict[str, str]:
    """Return the digests of a manifest by name.

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
            text = os.fsdecode(bytes(storage.view()))
            if is_sha256(text.strip()) and path.endswith(SUFFIX):  # a digest alone: whose it is, the name says
                return {os.path.basename(path).removesuffix(SUFFIX): text.strip().lower()}
            return _relative(sums_of(text))
    finally:
        storage.close()


def _relative(digests: dict[str, str]) -> dict[str, str]:
    """Take ``./`` from the names; refuse those that lead elsewhere."""
    found: dict[str, str] = {}
    for name, digest in digests.items():
        plain = name[2:] if name.startswith("./") else name
        if not plain or os.path.isabs(plain) or ".." in plain.split("/") or "\0" in plain or plain in found:
            raise HeaderError(f"expected each name once, of a file below the folder, found {escaped(name)}")
        found[plain] = digest
    return found


def find_sums(path: str, manifest: str | None = None) -> Manifest | None:
    """Return the manifest that covers a file or folder; None if there is none.

    Beside a file: ``<file>.sha256``; else, if it names the file, ``checkpoint.sha256`` or ``SHA256SUMS`` in its
    folder. Inside a folder: one of these two.

    Parameters
    ----------
    path : str
    manifest : str, optional
        The one to use; its names are relative to the folder that `path` is, or is in.

    Raises
    ------
    HeaderError
        The one beside a file, or the given one, does not name it.
    """
    if os.path.isdir(path):
        candidates = [os.path.join(path, name) for name in (INSIDE, *OTHERS)]
        for candidate in candidates if manifest is None else [manifest]:
            if manifest is not None or os.path.isfile(candidate):
                return Manifest(candidate, path, read_sums(candidate), whole=True)
        return None
    folder, name = os.path.split(path)
    beside = path + SUFFIX if manifest is None else manifest
    if manifest is not None or os.path.isfile(beside):
        digests = read_sums(beside)
        if name not in digests:
            raise HeaderError(f"expected a line for {escaped(name)}, found none", path=beside)
        return Manifest(beside, folder, {name: digests[name]})
    for candidate in (os.path.join(folder, other) for other in (INSIDE, *OTHERS)):
        if os.path.isfile(candidate) and name in (digests := read_sums(candidate)):
            return Manifest(candidate, folder, {name: digests[name]})
    return None


def files_below(folder: str) -> Iterator[str]:
    """Yield the names of all files below a folder that a manifest is to name, in order.

    Not manifests themselves, temporaries of saves, or what is in folders whose name begins with a dot.
    """
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside = os.path.relpath(here, folder)
        for name in sorted(names):
            top = inside == os.curdir
            if (top and name in (INSIDE, *OTHERS)) or (name.startswith(".") and name.endswith(".tmp")):
                continue
            if os.path.isfile(os.path.join(here, name)):
                yield name if top else "/".join((*inside.split(os.sep), name))


def hash_file(path: str, advance: Callable[[int], object] = lambda nbytes: None) -> str:
    """Return the SHA-256 of a file as hex digits; `advance` is told the bytes that are done."""
    storage, _, _ = open_storage(path, local=True)
    try:
        digest = sha256_of(storage, 0, storage.nbytes, advance)
        storage.check_unchanged()
        return digest
    finally:
        storage.close()


def write_manifest(path: Any, *, durable: bool = True, progress: Progress | None = None) -> str:
    """Write the SHA-256 of a file, or of all files of a folder; see `tensorio.write_manifest`."""
    target = os.fsdecode(os.fspath(path))
    if os.path.isdir(target):
        folder, names, manifest = target, list(files_below(target)), os.path.join(target, INSIDE)
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
