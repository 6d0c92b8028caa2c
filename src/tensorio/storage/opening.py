"""Whatever a user may call a path, as a storage: paths, buffers, file objects, addresses.

The only module that opens files for reading.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from tensorio import _host
from tensorio.errors import UnsupportedError
from tensorio.storage.base import MemoryStorage, Storage
from tensorio.storage.files import FileStorage, storage_of
from tensorio.storage.reading import arena

if TYPE_CHECKING:
    from typing import BinaryIO

__all__ = ["leave_behind", "open_storage", "read_small", "remote_pieces"]

READ_PIECE = 8 << 20  # bytes of a remote file asked for at a time
# Non-blocking, so that a FIFO without a writer can be recognised instead of waited for.
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def open_storage(source: object, *, writable: bool = False, local: bool = False) -> tuple[Storage, str | None, str]:
    """Open whatever a user may call a path.

    Parameters
    ----------
    source : str, os.PathLike, buffer or seekable binary file object
        A file object counts from its current position on. A str with ``://`` in
        it is an address for fsspec.
    writable : bool
        Whether arrays over the storage may be written to.
    local : bool
        Whether every str is the name of a file, for callers that are to go to
        no network: a file name out of a request must not become an address.

    Returns
    -------
    storage : Storage
    path : str or None
        The path, if there is one to open again.
    name : str
        What to call it in messages.

    Raises
    ------
    OSError
        From the system, with errno and file name.
    UnsupportedError
        Not a regular file (FIFO, device, socket), a file object that can't
        seek, or a remote address.
    """
    if isinstance(source, str | os.PathLike):
        return _open_path(os.fspath(source), writable, local)
    if hasattr(source, "read") and hasattr(source, "seek"):
        return _open_file_object(source, writable)  # type: ignore[arg-type]
    try:
        data = memoryview(source).cast("B")  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            "expected a path (str, os.PathLike), a buffer or a seekable binary file object, "
            f"found {type(source).__name__}"
        ) from None
    return _in_memory(data, writable), None, f"<{type(source).__name__} of {data.nbytes} bytes>"


def _in_memory(data: memoryview, writable: bool) -> MemoryStorage:
    """The caller's bytes as they are, unless arrays over them must be writable and they are not to change."""
    if not writable:
        return MemoryStorage(data)
    copy = arena(data.nbytes)
    _host.copy(copy, data)
    return MemoryStorage(copy, writable=True)


def _open_path(path: str | bytes, writable: bool, local: bool) -> tuple[Storage, str | None, str]:
    name = os.fsdecode(path)
    if "://" in name and not local:
        return _open_remote(name, writable), None, name
    fd = os.open(path, _FLAGS)
    try:
        _require_regular(fd, name)
    except BaseException:
        os.close(fd)
        raise
    return storage_of(fd, name, writable=writable), name, name


def read_small(path: str, most: int) -> bytes:
    """Return what one call reads of a file: a mapping, and an object for it, would cost more than a few bytes.

    Parameters
    ----------
    path : str
        Of what was a regular file when it was looked at.
    most : int
        Bytes; as many are returned where there are more, and fewer than there are if the system gave no more.
    """
    fd = os.open(path, _FLAGS)
    try:
        return os.read(fd, most)
    finally:
        os.close(fd)


def _open_remote(url: str, writable: bool) -> Storage:
    """Read a file at an address that fsspec knows, all of it, into memory."""
    with _remote(url) as f:
        return _in_memory(memoryview(f.read()), writable)


def _remote(url: str) -> Any:
    try:
        import fsspec
    except ImportError:
        raise UnsupportedError(
            "opening a remote address needs fsspec: pip install 'tensorio[remote]'", path=url
        ) from None
    return fsspec.open(url, "rb")


def remote_pieces(url: str) -> Iterator[bytes]:
    """Yield the bytes of a file at an address that fsspec knows, in order, as they are read."""
    with _remote(url) as f:
        while piece := f.read(READ_PIECE):
            yield piece


def _require_regular(fd: int, name: str) -> None:
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(
            errno.EISDIR, "expected one file, found a folder; tensorio.open and load take those of several files", name
        )
    kinds = ((stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a character device"))
    kind = next((word for test, word in kinds if test(mode)), "a device")
    raise UnsupportedError(f"expected a regular file, found {kind}", path=name)


def _open_file_object(f: BinaryIO, writable: bool) -> tuple[Storage, None, str]:
    name = f"<file object {getattr(f, 'name', type(f).__name__)}>"
    try:
        start = f.tell()
        fd = f.fileno() if _is_raw_file(f) else -1
        regular = fd >= 0 and stat.S_ISREG(os.fstat(fd).st_mode)
    except (OSError, AttributeError, ValueError):
        start, regular = -1, False
    if regular:
        if hasattr(f, "flush") and f.writable():
            f.flush()
        return storage_of(os.dup(fd), name, start=start, writable=writable), None, name
    if start < 0:
        raise UnsupportedError(f"expected a seekable binary file object, found {type(f).__name__}", path=name)
    data = f.read()
    if not isinstance(data, bytes | bytearray | memoryview):
        raise UnsupportedError(
            f"expected a binary file object, but read() returned {type(data).__name__}; open it with mode 'rb'",
            path=name,
        )
    return _in_memory(memoryview(data), writable), None, name


def leave_behind(source: object, storage: Storage) -> None:
    """Leave a file object at the first byte behind what was read, where another object may begin.

    For formats that are streams; others read to the end, as far as anyone can tell.
    """
    if storage.used is None or isinstance(source, str | os.PathLike) or not hasattr(source, "seek"):
        return
    # What was read into memory left the position at the end; what was mapped left it where it was.
    f = cast("BinaryIO", source)
    start = storage.fileno()[1] if isinstance(storage, FileStorage) else f.tell() - storage.nbytes
    f.seek(start + storage.used)


def _is_raw_file(f: object) -> bool:
    """Whether the object's bytes are those of its descriptor (a GzipFile has one, too)."""
    return isinstance(f, io.FileIO | io.BufferedReader | io.BufferedRandom) and isinstance(
        getattr(f, "raw", f), io.FileIO
    )
