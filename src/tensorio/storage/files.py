"""Files as storages: mapped, or read into memory.

The only module that owns mappings.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from tensorio import _core, _host
from tensorio.errors import FormatError, TruncatedError
from tensorio.storage.base import LazyStorage, MemoryStorage, Storage
from tensorio.storage.reading import HUGE_PAGE, READ_PIECE, arena, read_ahead, read_into, read_parts
from tensorio.system import paging
from tensorio.system.disks import Disk, disk_of

if TYPE_CHECKING:
    Progress = Callable[[int, int], object]

__all__ = ["FileStorage", "Identity", "LazyStorage", "MemoryStorage", "Storage", "arena", "storage_of"]

# A one-pass reader of a mapping gets pieces that fit the cache, and pages behind it are unmapped a window at a time.
STREAM_PIECE = 512 << 10
WINDOW = 8 << 20
# Where headers are, as a rule: they are brought in alone if the file is cold.
HEAD, TAIL = 1 << 20, 256 << 10
# A file of so many bytes is cold if less than this part of it is cached: its headers, as a rule.
COLD_FROM, SHARE_OF_HEADERS = 64 << 20, 16


# What filesystems answer that can't map a file, or not shared: then it is read instead.
_CANT_MAP = {errno.ENODEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}


class Identity(NamedTuple):
    """Tells whether a path still names the file that was opened."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, file: int | str) -> Identity:
        """Identify the file open at a descriptor, or of a name."""
        s = os.stat(file)
        return cls(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns)


class _Descriptor:
    """A descriptor, closed when the last who has this object lets go of it."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        try:  # noqa: SIM105 - to suppress takes memory, and there may be none
            os.close(self.fd)
        except OSError:
            pass


class FileStorage(Storage):
    """A regular file, mapped; or, after `read_all`, a copy of it in memory.

    Parameters
    ----------
    fd : int
        Open descriptor; owned by this object once there is one, see `storage_of`.
    name : str
        For messages.
    start : int
        First byte that counts (a file object may stand in mid-file).
    writable : bool
        Map private copy-on-write pages instead of read-only shared ones.

    Attributes
    ----------
    random : bool
        Whether single pages will be looked at here and there, so that nothing is to be read around them.
    """

    def __init__(self, fd: int, name: str, *, start: int = 0, writable: bool = False) -> None:
        super().__init__()
        self.name = name
        self.writable = writable
        self._start = start
        self._view: memoryview | None = None
        self._map: _host.Mapping | mmap.mmap | None = None
        self._huge = False
        self.random = False
        self._fetched = bytearray()
        self._fd = fd
        self._file: _Descriptor | None = None
        try:
            self.identity = Identity.of(fd)
            if start > self.identity.size:
                raise TruncatedError(f"expected data at offset {start}, but the file has {self.identity.size} bytes")
            self.nbytes = self.identity.size - start
            if self.identity.size:
                self._map_or_read()
                self._bring_ends()
            self._file = _Descriptor(fd)
        except BaseException:
            self._fd = -1  # the caller's again
            raise

    def _map_or_read(self) -> None:
        try:
            self._map = self._mapped()
        except OSError as error:
            if error.errno not in _CANT_MAP:
                raise
            self.read_all()

    def _bring_ends(self) -> None:
        """Have the headers of a cold file read, without the mark on a page behind them that makes the system read on.

        It would read on by small pages, at the pace of its own, and the first payload would never be a miss that is
        answered with huge ones.
        """
        size = self.identity.size
        if self._map is None or size < HUGE_PAGE or _host.cached(self._fd, self._start, mmap.PAGESIZE) != 0:
            return
        os.posix_fadvise(self._fd, self._start, HEAD, os.POSIX_FADV_WILLNEED)
        os.posix_fadvise(self._fd, max(size - TAIL, 0), TAIL, os.POSIX_FADV_WILLNEED)

    def _mapped(self) -> _host.Mapping | mmap.mmap:
        size = self.identity.size
        if os.name != "posix":
            return mmap.mmap(self._fd, size, access=mmap.ACCESS_COPY if self.writable else mmap.ACCESS_READ)
        return _host.Mapping(self._fd, size, self.writable, os.fsencode(self.name))

    @property
    def mapped(self) -> bool:  # type: ignore[override]
        return self._map is not None and not self.writable

    def view(self) -> memoryview:
        view, mapping = self._view, self._map
        if self._fd < 0:
            raise ValueError("the checkpoint is closed")
        if view is None:
            nothing = bytearray() if self.writable else b""  # an empty file can't be mapped
            view = self._view = memoryview(nothing if mapping is None else mapping)[self._start :]
        return view

    def fileno(self) -> tuple[int, int]:
        """Return the descriptor and the offset in it of this storage's first byte; for no longer than it is open."""
        return self._fd, self._start

    @contextlib.contextmanager
    def lent(self) -> Iterator[tuple[int, int]]:
        """Lend what `fileno` returns: a descriptor that stays the file's though another thread closes the storage.

        Raises
        ------
        ValueError
            It is closed.
        """
        file = self._file
        if file is None:
            raise ValueError("the checkpoint is closed")
        yield file.fd, self._start

    @property
    def disk(self) -> Disk:
        """The filesystem that the file is on."""
        return disk_of(self.identity.device, self._fd)

    @property
    def in_memory(self) -> bool:
        """Whether there is a copy of the file, or nothing to be copied, and no mapping."""
        return self._map is None

    def _before_use(self) -> None:
        """Have huge pages from here on; until then, each header would have cost two of them."""
        if self._map is None:
            return
        if self.random:
            paging.advise(self._map, "MADV_RANDOM")
        elif not self._huge and self.identity.size >= HUGE_PAGE:
            self._huge = True
            self._forget_headers()
            paging.advise(self._map, "MADV_HUGEPAGE")

    def _forget_headers(self) -> None:
        """Let go of the single pages that scattered headers left in a cold file.

        Around each, the system could bring in small pages only: 4 ms of CPU per header, and half the disk's pace.
        """
        size = self.identity.size
        if size < COLD_FROM or self._map is None or not hasattr(os, "posix_fadvise"):
            return
        if 0 < _host.cached(self._fd, 0, size) < size // SHARE_OF_HEADERS:
            paging.advise(self._map, "MADV_DONTNEED")  # pages that are mapped stay in the cache
            os.posix_fadvise(self._fd, HEAD, max(size - TAIL - HEAD, 0), os.POSIX_FADV_DONTNEED)

    @contextlib.contextmanager
    def scattered(self) -> Iterator[None]:
        if self._map is None:
            yield
            return
        mapping = self._map
        paging.advise(mapping, "MADV_RANDOM")
        if self._huge:  # or the system reads two huge pages around each byte, random or not
            paging.advise(mapping, "MADV_NOHUGEPAGE")
        try:
            yield
        finally:
            paging.advise(mapping, "MADV_RANDOM" if self.random else "MADV_NORMAL")
            if self._huge:
                paging.advise(mapping, "MADV_HUGEPAGE")

    def check_unchanged(self) -> None:
        now = Identity.of(self._fd)
        if (now.size, now.mtime_ns) != (self.identity.size, self.identity.mtime_ns):
            raise FormatError(
                f"the file changed while it was read: expected {self.identity.size} bytes, "
                f"found {now.size} bytes and a new modification time; try again when its writer is done"
            )

    def read_all(self, progress: Progress | None = None) -> None:
        """Replace the mapping by a copy in huge pages, by large reads in parallel; holes are not read.

        What is not in the page cache is read past it, from disks where that is quicker.
        """
        data = arena(self.nbytes, self._bytes_on_disk(), self.name)
        read_into(self._fd, self._start, data, progress, self._cached, self.disk.direct)
        self._unmap()
        self._view = data

    def read_parts(self, parts: list[tuple[int, memoryview]]) -> None:
        """Fill buffers from near places of the file, (offset, target), ascending; see `reading.read_parts`."""
        begin, end = parts[0][0], parts[-1][0] + len(parts[-1][1])
        if self._map is not None and not self.disk.far and self._cached(begin, end - begin) < (end - begin) // 2:
            for _ in self.bring(begin, end - begin):
                pass  # into huge pages of the cache: a fifth of the time that read(2) needs for small ones
        with self.lent() as (fd, start):
            read_parts(fd, [(start + offset, target) for offset, target in parts])

    def evict(self, offset: int, nbytes: int) -> None:
        if self._map is not None and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, self._start + offset, nbytes, os.POSIX_FADV_DONTNEED)

    def _cached(self, offset: int, nbytes: int) -> int:
        """Bytes of a range that are in the page cache; those of all of it if nothing tells."""
        found = _host.cached(self._fd, self._start + offset, nbytes)
        if found < 0 and self._map is not None:
            found = _host.resident(self.view()[offset : offset + nbytes])
        return nbytes if found < 0 else found

    def prefetch(self, offset: int, nbytes: int) -> None:
        """Ask the system to read a range ahead of use; a hint, without effect where there is none."""
        if hasattr(mmap, "MADV_WILLNEED"):
            self._advise(mmap.MADV_WILLNEED, offset, nbytes)

    def bring(self, offset: int, nbytes: int) -> Iterator[int]:
        if self._map is None:
            yield nbytes
        elif self.ahead or self.disk.far:
            for at in range(offset, offset + nbytes, paging.STEP):
                step = min(paging.STEP, offset + nbytes - at)
                self._fetch(at, step)
                yield step
        else:
            self._before_use()
            yield from paging.populate(self.view()[offset : offset + nbytes], self.check_unchanged)

    def populate(self, offset: int, nbytes: int, *, progress: Progress | None = None,
                 cancelled: Callable[[], bool] | None = None) -> None:  # fmt: skip
        """Bring a range into memory and map its pages, in steps of 32 MiB, with Python's lock released.

        Parameters
        ----------
        offset, nbytes : int
        progress : callable, optional
            Called as ``progress(done, total)`` in bytes after each step.
        cancelled : callable, optional
            Asked before each step whether to stop.

        Raises
        ------
        FormatError
            The file shrank.
        """
        done = 0
        steps = self.bring(offset, nbytes)
        while not (cancelled is not None and cancelled()):
            step = next(steps, None)
            if step is None:
                return
            done += step
            if progress is not None:
                progress(done, nbytes)

    def read_ahead(self, offset: int, nbytes: int) -> None:
        if self.ahead and self._map is not None:
            self._fetch(offset, nbytes)

    def _fetch(self, offset: int, nbytes: int) -> None:
        """Read the pieces of a range that were not read before."""
        if not self._fetched:
            self._fetched = bytearray(-(-self.nbytes // READ_PIECE))
        done = self._fetched
        pieces = [i for i in range(offset // READ_PIECE, -(-(offset + nbytes) // READ_PIECE)) if not done[i]]
        spans = [(i * READ_PIECE, min(READ_PIECE, self.nbytes - i * READ_PIECE)) for i in pieces]
        with self.lent() as (fd, start):
            read_ahead(fd, [(start + at, n) for at, n in spans])
        for i in pieces:
            done[i] = 1

    def stream(self, offset: int, nbytes: int) -> Iterator[memoryview]:
        view = self.view()
        self._before_use()
        for window in range(offset, offset + nbytes, WINDOW):
            end = min(window + WINDOW, offset + nbytes)
            self.read_ahead(window, end - window)
            for at in range(window, end, STREAM_PIECE):
                piece = view[at : min(at + STREAM_PIECE, end)]
                _core.touch(piece)  # write(2) from pages that are not mapped yet is a quarter slower (measured)
                yield piece
            self.release(window, end - window)

    def release(self, offset: int, nbytes: int) -> None:
        if hasattr(mmap, "MADV_DONTNEED") and self.mapped:
            self._advise(mmap.MADV_DONTNEED, offset, nbytes)

    def _advise(self, advice: int, offset: int, nbytes: int) -> None:
        if self._map is not None and nbytes:
            _host.advise(self.view()[offset : offset + nbytes], advice)

    def _bytes_on_disk(self) -> int:
        blocks = getattr(os.fstat(self._fd), "st_blocks", None)
        return self.nbytes if blocks is None else min(self.nbytes, int(blocks) * 512)

    def _unmap(self) -> None:
        self._view = None
        self._lease = None
        self._map = None  # if views are alive, the last one to go takes the mapping with it

    def close(self) -> None:
        fd, self._fd = self._fd, -1  # first, so that other threads find it closed and not empty
        if fd >= 0:
            try:
                self._unmap()
            finally:
                self._file = None

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


def storage_of(fd: int, name: str, *, start: int = 0, writable: bool = False) -> FileStorage:
    """Return the storage of a file that is open at a descriptor, which is closed if there is none; see `FileStorage`.

    An object could not see to that: there may be no memory for the object itself.
    """
    try:
        return FileStorage(fd, name, start=start, writable=writable)
    except BaseException:
        os.close(fd)
        raise
