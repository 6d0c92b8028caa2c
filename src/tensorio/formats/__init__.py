"""One file = one format; the only door from a path to a reader.

Formats are the public modules of this package. `of_storage` asks each whether
it recognises the first bytes; the name's suffix decides only what to write.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from typing import cast

from tensorio.encryption._opening import refuse_without_key
from tensorio.errors import UnknownFormatError, UnsupportedError
from tensorio.formats._base import Format, SaveOptions
from tensorio.formats._looks import looks_like, unknown
from tensorio.storage.base import Storage

__all__ = ["WRITTEN", "for_target", "get", "names", "of_storage", "target_name"]

# In the order in which they are asked: exact signatures before plausible ones.
_NAMES = (
    "torch_zip", "torchscript", "torch_export", "torch_package", "torch_legacy", "torch_tar", "archive", "safetensors",
    "pickle",
)  # fmt: skip
# Modules that are not called what their format is.
_MODULES = {"pickle": "plain_pickle"}

WRITTEN = ("safetensors", "torch_zip")  # the others are only read

HEAD = 4096  # bytes shown to `recognises`


def names() -> tuple[str, ...]:
    """Return the names of all formats."""
    return _NAMES


@cache
def get(name: str) -> Format:
    """Return the format called `name` (imports it on first use)."""
    if name not in _NAMES:
        raise UnsupportedError(f"no format called {name!r}; there are {', '.join(_NAMES)}")
    return cast(Format, importlib.import_module(f"tensorio.formats.{_MODULES.get(name, name)}"))


def of_storage(storage: Storage, name: str | None = None, path: str = "") -> Format:
    """Return the format of a file, by content; `name` asks for one and skips the question.

    A file that nobody recognises, and that looks like nothing else either, goes
    to the format that its suffix names, whose own error says more.

    Raises
    ------
    UnknownFormatError
        Nobody recognised it; the message says what it looks like.
    """
    refuse_without_key(storage)
    if name is not None:
        return get(name)
    head = bytes(storage.view_for(0, min(HEAD, storage.nbytes))[:HEAD])
    for candidate in _NAMES:
        if get(candidate).recognises(head, storage):
            return get(candidate)
    guess = looks_like(head, storage)
    suffix = os.path.splitext(path)[1].lower()
    for candidate in _NAMES:
        if guess is None and suffix in get(candidate).OPENED_BY_SUFFIX:
            return get(candidate)
    raise UnknownFormatError(guess or unknown(head, storage))


def for_target(target: object, name: str | None = None) -> Format:
    """Return the format to write to a target, by name or by the suffix of its path.

    Raises
    ------
    UnsupportedError
        There is no format of that name, or it is only read.
    ValueError
        There is no name, and no suffix that says it.
    """
    if name is not None:
        if name not in _NAMES:
            raise UnsupportedError(f"no format called {name!r}; those that can be written: {', '.join(WRITTEN)}")
        if name not in WRITTEN:
            get(name).plan(None, SaveOptions())  # refuses, and says why
        return get(name)
    if not isinstance(target, str | bytes | os.PathLike):
        raise ValueError(f"format= is needed to save to a file object; one of {', '.join(WRITTEN)}")
    path = os.fsdecode(os.fspath(target))
    suffix = os.path.splitext(path)[1].lower()
    for candidate in _NAMES:
        if suffix in get(candidate).SUFFIXES:
            return get(candidate)
    if os.path.isdir(path):
        raise ValueError(f"{path!r} is a folder; name a file in it, or say max_shard_size= to save several files to it")
    known = [s for n in _NAMES for s in get(n).SUFFIXES]
    raise ValueError(f"the suffix {suffix!r} names no format; known are {', '.join(known)}; or give format=")


def target_name(target: object) -> str | None:
    """Return the path of a target as text; None for a file object."""
    return os.fsdecode(os.fspath(target)) if isinstance(target, str | bytes | os.PathLike) else None
