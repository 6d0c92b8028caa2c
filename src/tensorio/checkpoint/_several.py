"""Which file says what the checkpoint of a folder is.

As Hugging Face lays them out: ``model.safetensors`` or ``pytorch_model.bin``; of
several files, ``model.safetensors.index.json`` or ``pytorch_model.bin.index.json``
says which they are.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Any, NamedTuple

__all__ = ["INDEX_SUFFIX", "NAMES", "Place", "place_in", "place_of_several"]

INDEX_SUFFIX = ".index.json"
# What is taken of a folder, in the order of transformers 5.24 (`_get_resolved_checkpoint_files`).
NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


class Place(NamedTuple):
    """The file that says what a checkpoint is, and which one of that name.

    Attributes
    ----------
    path : str
    identity : tuple of int
        Changes if another file takes the name, or this one is written to.
    """

    path: str
    identity: tuple[int, ...]

    @property
    def is_index(self) -> bool:
        """Whether it names the files that hold the tensors."""
        return self.path.endswith(INDEX_SUFFIX)


def place_of_several(source: Any) -> str | None:
    """Return the path of a folder, of an index, or of a file that is not there but has an index; None for others.

    Notes
    -----
    One look at the file system, two for a file that is not there.
    """
    if not isinstance(source, str | os.PathLike):
        return None
    path = os.fsdecode(source)
    if path.endswith(INDEX_SUFFIX):
        return path
    try:
        return path if stat.S_ISDIR(os.stat(path).st_mode) else None
    except (OSError, ValueError):
        return path if os.path.isfile(path + INDEX_SUFFIX) else None


def place_in(path: str) -> Place:
    """Choose the file for what `place_of_several` returns.

    Raises
    ------
    IsADirectoryError
        Nothing in the folder says which of its files are a checkpoint.
    FileNotFoundError
        There is nothing of that name.
    """
    if os.path.isdir(path):
        path = _in_folder(path)
    elif not os.path.exists(path) and os.path.isfile(path + INDEX_SUFFIX):
        path += INDEX_SUFFIX
    found = os.stat(path)
    return Place(path, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))


def _in_folder(folder: str) -> str:
    held = set(os.listdir(folder))
    for name in NAMES:
        if name in held:
            return os.path.join(folder, name)
    others = sorted(name for name in held if name.endswith(INDEX_SUFFIX))
    if len(others) == 1:
        return os.path.join(folder, others[0])
    found = f"one of {len(others)} indexes: give the path of one" if others else f"one with none of {', '.join(NAMES)}"
    raise IsADirectoryError(errno.EISDIR, f"expected a checkpoint file, found a folder, {found}", folder)
