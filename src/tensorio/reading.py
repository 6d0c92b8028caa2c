"""Memory to read into, and reading a file into it with all cores."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tensorio import _core, disks
from tensorio.errors import TruncatedError

if TYPE_CHECKING:
    Progress = Callable[[int, int], object]

__all__ = ["NORESERVE", "arena", "read_into"]

# Bytes per pread: large enough that the call is free, small enough to share work.
READ_PIECE = 8 << 20
HUGE_PAGE = 2 << 20
MAX_READERS = 16
# Not in the mmap module before 3.13; the number is the kernel's on Linux.
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000) if os.name == "posix" and hasattr(os, "SEEK_HOLE") else 0


def arena(nbytes: int, touched: int | None = None, name: str | None = None) -> memoryview:
    """Return zeroed writable memory, aligned to and backed by huge pages where the system has them.

    Parameters
    ----------
    nbytes : int
        Size in bytes.
    touched : int, optional
        How many of them will be written to; more than is available is refused
        up front, because the system would kill the process instead.
    name : str, optional
        The file it is for, for the message.
    """
    need = nbytes if touched is None else touched
    if need > HUGE_PAGE and need > (available := disks.available_memory()):
        raise OSError(
            errno.ENOMEM,
            f"reading needs {need} bytes of memory and {available} are available; open it with mmap=True",
            name,
        )
    if os.name != "posix":
        return memoryview(bytearray(nbytes))
    if nbytes < HUGE_PAGE:
        return memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]
    block = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages: small ones do, at some cost
            block.madvise(mmap.MADV_HUGEPAGE)
    skip = -_core.address(block) % HUGE_PAGE
    return memoryview(block)[skip : skip + nbytes]


def read_into(fd: int, start: int, out: memoryview, progress: Progress | None = None) -> None:
    """Fill `out` from the file at `start`, with as many threads as there are cores."""
    spans = [(at, min(READ_PIECE, end - at)) for begin, end in _data_spans(fd, start, len(out))
             for at in range(begin, end, READ_PIECE)]  # fmt: skip
    total = sum(n for _, n in spans)
    done = 0
    lock = threading.Lock()

    def read(span: tuple[int, int]) -> None:
        nonlocal done
        at, n = span
        _pread_full(fd, start + at, out[at : at + n])
        if progress is not None:
            with lock:
                done += n
                progress(done, total)

    if len(spans) <= 1:
        for span in spans:
            read(span)
        return
    with ThreadPoolExecutor(min(MAX_READERS, os.cpu_count() or 1, len(spans))) as pool:
        for _ in pool.map(read, spans):
            pass


def _data_spans(fd: int, start: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of ``[0, nbytes)`` that are not holes of a sparse file."""
    if not hasattr(os, "SEEK_DATA"):
        yield 0, nbytes
        return
    at, end = start, start + nbytes
    while at < end:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
            hole = os.lseek(fd, at, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return  # a hole up to the end
            yield at - start, nbytes  # the filesystem does not know: read all that is left
            return
        if at < end:
            yield at - start, min(hole, end) - start
        at = hole


def _pread_full(fd: int, offset: int, out: memoryview) -> None:
    done = 0
    while done < len(out):
        n = _pread(fd, offset + done, out[done:])
        if n == 0:
            raise TruncatedError(f"the file ends {len(out) - done} bytes too early", offset=offset + done)
        done += n


if hasattr(os, "preadv"):

    def _pread(fd: int, offset: int, out: memoryview) -> int:
        return os.preadv(fd, [out], offset)

else:
    _seek_lock = threading.Lock()

    def _pread(fd: int, offset: int, out: memoryview) -> int:
        with _seek_lock:
            os.lseek(fd, offset, os.SEEK_SET)
            data = os.read(fd, len(out))
        out[: len(data)] = data
        return len(data)
