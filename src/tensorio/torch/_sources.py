"""What a caller of `torch.load` may give as a file, as a storage of writable bytes."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from tensorio.storage.base import MemoryStorage, Storage
from tensorio.storage.files import FileStorage
from tensorio.storage.opening import open_storage
from tensorio.storage.reading import arena

__all__ = ["is_path", "is_real_file", "open_source"]

_FIRST = 1 << 16  # bytes read at first from what does not know how long it is
# Finding their end is decoding all of it.
_PACKED = {"GzipFile", "BZ2File", "LZMAFile", "ZipExtFile"}


def is_path(f: object) -> bool:
    """Tell whether `f` names a file, by torch's rule."""
    return isinstance(f, str | os.PathLike)


def is_real_file(f: object) -> bool:
    """Tell whether a file object is one of the system's, whose descriptor has the same bytes."""
    return hasattr(_inner(f), "raw") or type(_inner(f)).__name__ == "FileIO"


def open_source(f: Any, mmap: bool, *, local: bool = True) -> tuple[Storage, str]:
    """Return the bytes from the current position on, and what to call them.

    Parameters
    ----------
    f : str, os.PathLike, buffer or seekable binary file object
    mmap : bool
        Whether a file may be mapped. One that `f` could write to is not: it is
        read, as its next write would change what was loaded.
    local : bool
        Whether every str is the name of a file, as it is to torch.

    Raises
    ------
    OSError
        From the system.
    UnsupportedError
        No regular file; a file object of text.
    """
    if not is_path(f) and hasattr(f, "read") and not _is_file(f):
        return _read(f), f"<file object {getattr(f, 'name', type(f).__name__)}>"
    storage, _, name = open_storage(f if is_path(f) else _inner(f), writable=True, local=local)
    try:
        if isinstance(storage, FileStorage) and storage.nbytes and not (mmap and (is_path(f) or not f.writable())):
            storage.read_all()
    except BaseException:
        storage.close()
        raise
    return storage, name


def _inner(f: object) -> object:
    return f.file if isinstance(f, tempfile._TemporaryFileWrapper) else f


def _is_file(f: object) -> bool:
    """What `open_storage` maps."""
    try:
        return is_real_file(f) and _inner(f).fileno() >= 0  # type: ignore[attr-defined]
    except (OSError, AttributeError, ValueError):
        return False


def _read(f: Any) -> MemoryStorage:
    """All that is left of a file object, in memory of our own."""
    if not hasattr(f, "readinto"):
        data = f.read()
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"expected a binary file object, but read() returned {type(data).__name__}")
        out = arena(len(data))
        out[:] = data
        return MemoryStorage(out, writable=True)
    room, at = arena(_expected(f)), 0
    while True:
        count = f.readinto(room[at:]) if at < len(room) else 0
        at += count or 0
        if at < len(room) and not count:
            break
        if at == len(room):
            more = f.read(_FIRST)
            if not more:
                break
            room = _grown(room, at + len(more))
            room[at : at + len(more)] = more
            at += len(more)
    return MemoryStorage(room[:at], writable=True)


def _grown(room: memoryview, need: int) -> memoryview:
    out = arena(max(2 * len(room), need + _FIRST))
    out[: len(room)] = room
    return out


def _expected(f: Any) -> int:
    """How many bytes are probably left."""
    if type(f).__name__ in _PACKED:
        return _FIRST
    at = f.tell()
    f.seek(0, os.SEEK_END)
    end = f.tell()
    f.seek(at)
    return max(int(end) - int(at), 0)
