"""Memory to read into, and reading a file into it, or into the page cache, by large reads of several threads."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from tensorio import _core, _host
from tensorio.errors import TensorIOError, TruncatedError
from tensorio.system import memory, paging

if TYPE_CHECKING:
    Progress = Callable[[int, int], object]
    Cached = Callable[[int, int], int]

__all__ = ["NORESERVE", "arena", "in_threads", "pread_full", "read_ahead", "read_into", "read_parts", "readers",
           "scratch", "unreadable"]  # fmt: skip

# Bytes per pread: large enough that the call is free, small enough to share work.
READ_PIECE = 8 << 20
HUGE_PAGE = 2 << 20
MAX_READERS = 16
# Threads that wait for a disk or a server, whatever the number of cores (measured: bench/bench_cold.py).
WAITING_READERS = 8
# Where each read waits for a server: pieces of about what one request may carry, and more of them at once.
FAR_PIECE = 1 << 20
FAR_READERS = 16
# A file that is smaller may as well stay in the page cache.
DIRECT_FROM = 64 << 20
PAGE = mmap.PAGESIZE
# Not in the mmap module before 3.13; the number is the kernel's on Linux, and means something else on other systems.
NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)

Job = TypeVar("Job")
_local = threading.local()


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
    if need > HUGE_PAGE and need > (available := memory.available()):
        raise OSError(
            errno.ENOMEM,
            f"reading needs {need} bytes of memory and {available} are available; open it with mmap=True",
            name,
        )
    if os.name != "posix":
        return memoryview(bytearray(nbytes))
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # or a child process would write to its parent's arrays
    if nbytes < HUGE_PAGE:
        return memoryview(mmap.mmap(-1, max(nbytes, 1), flags=private))[:nbytes]
    block = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=private | NORESERVE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _host.advise(block, mmap.MADV_HUGEPAGE)  # a kernel without them: small pages do, at some cost
    skip = -_core.address(block) % HUGE_PAGE
    return memoryview(block)[skip : skip + nbytes]


def in_threads(work: Callable[[Job], object], jobs: Sequence[Job], threads: int) -> None:
    """Call `work` with each of the jobs, in order, from this thread and others; the first error ends it.

    None of them works on when it returns or raises, Ctrl-C included; a second Ctrl-C does not wait for that.
    """
    queue, lock = iter(jobs), threading.Lock()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            while not failed:
                with lock:
                    todo = list(islice(queue, 1))
                if not todo:
                    return
                work(todo[0])
        except BaseException as error:  # one of `progress`, too, whatever it is: StopIteration is no end of the jobs
            failed.append(error)

    ends = [threading.Event() for _ in range(min(threads, len(jobs)) - 1)]

    def help_out(end: threading.Event) -> None:
        run()
        end.set()

    others = [threading.Thread(target=help_out, args=(end,), daemon=True) for end in ends]

    def wait() -> None:
        for thread, end in zip(others, ends, strict=True):
            if thread.ident is not None:
                end.wait()  # not `join`, which takes a thread for done once it was interrupted (Python 3.11)

    try:
        with contextlib.suppress(RuntimeError):  # no more threads to be had: those that started do, or this one alone
            for thread in others:
                thread.start()
        run()
        wait()
    except BaseException as error:  # Ctrl-C, while waiting
        failed.append(error)
        wait()  # they write to memory that is the caller's, from a descriptor that will be another file's
    for thread in others:
        if thread.ident is not None:
            thread.join()
    if failed:
        raise failed[0]


def read_into(
    fd: int,
    start: int,
    out: memoryview,
    progress: Progress | None = None,
    cached: Cached | None = None,
    direct: bool = False,
) -> None:
    """Fill `out` from the file at `start` by large reads in parallel; holes of the file are not read.

    Parameters
    ----------
    fd : int
    start : int
        In bytes, of the first one in the file.
    out : memoryview
        As long as what is to be read; zeroes where the file has holes.
    progress : callable, optional
        Called as ``progress(done, total)`` in bytes, never by two threads at once.
    cached : callable, optional
        Says how many bytes of a range (offset from `start`, bytes) are in the page cache: threads that wait for the
        rest may be more than there are cores.
    direct : bool
        Whether to read what is not cached past the cache, if the file is large and the system can do it: a disk's
        speed for a sixth of the CPU time.
    """
    waits = cached is not None and 0 <= cached(0, len(out)) < len(out) // 2
    total = 0
    missing = start + len(out) - os.fstat(fd).st_size
    if missing > 0:  # it would look like a hole
        raise TruncatedError(f"the file ends {missing} bytes too early", offset=start + len(out) - missing)
    done = 0
    lock = threading.Lock()
    with _Direct(fd, start, out, cached if waits and direct and len(out) >= DIRECT_FROM else None) as past:
        spans = _pieces(_data_spans(fd, start, len(out)), FAR_PIECE if waits and not direct else READ_PIECE)
        total = sum(n for _, n in spans)
        cold = {span for span in spans if past.is_cold(*span)}
        # Those first: the others, read through the cache, have the system read on behind them.
        spans.sort(key=lambda span: span not in cold)

        def read(span: tuple[int, int]) -> None:
            nonlocal done
            at, n = span
            skip = past.read(at, n) if span in cold else 0
            pread_full(fd, start + at + skip, out[at + skip : at + n])
            if progress is not None:
                with lock:
                    done += n
                    progress(done, total)

        in_threads(read, spans, (WAITING_READERS if direct else FAR_READERS) if waits else readers())


def readers() -> int:
    """Threads for work that keeps a core busy."""
    return min(MAX_READERS, os.cpu_count() or 1)


def _pieces(spans: Iterator[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """Offset and bytes of each read."""
    return [(at, min(most, end - at)) for begin, end in spans for at in range(begin, end, most)]


class _Direct:
    """Reads past the page cache (O_DIRECT) of what is not in it; falls back at the first sign of trouble."""

    def __init__(self, fd: int, start: int, out: memoryview, cached: Cached | None) -> None:
        self._fd = -1
        self._start, self._out, self._cached = start, out, cached
        if cached is None or not hasattr(os, "O_DIRECT"):
            return
        self._memory, self._step = _host.direct_alignment(fd) or (PAGE, PAGE)
        if not self._step or start % self._step or _core.address(out) % self._memory:
            return
        with contextlib.suppress(OSError):
            # The same file, whatever has become of its name; the flag of the descriptor itself is not ours to change.
            self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            # If another thread forks meanwhile, the child may be left with the pages that the disk writes to, and we
            # with copies from before: open(2), O_DIRECT. What no child has, nobody copies.
            paging.advise(out, "MADV_DONTFORK")

    def is_cold(self, at: int, nbytes: int) -> bool:
        """Whether most of a range is to be read past the cache."""
        return self._fd >= 0 and self._cached is not None and self._cached(at, nbytes) <= nbytes // 2

    def read(self, at: int, nbytes: int) -> int:
        """Read from the beginning of a range; return how many bytes, 0 if it is to be read otherwise."""
        whole = nbytes // self._step * self._step
        if not whole:
            return 0
        try:
            return os.preadv(self._fd, [self._out[at : at + whole]], self._start + at)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EIO):
                raise
            return 0  # read through the cache, what is wrong with the disk will be said again

    def __enter__(self) -> _Direct:
        return self

    def __exit__(self, *exc: object) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            paging.advise(self._out, "MADV_DOFORK")
            os.close(fd)


def read_ahead(fd: int, spans: Sequence[tuple[int, int]], progress: Callable[[int], object] | None = None) -> None:
    """Have parts of a file brought into the page cache by large reads.

    Parameters
    ----------
    fd : int
    spans : sequence of (int, int)
        Offset in the file, and bytes.
    progress : callable, optional
        Called with the bytes of each read that is done, by several threads; may raise to end it.
    """
    here = threading.local()

    def read(span: tuple[int, int]) -> None:
        if not hasattr(here, "scratch"):
            here.scratch = memoryview(mmap.mmap(-1, FAR_PIECE))
        offset, nbytes = span
        pread_full(fd, offset, here.scratch[:nbytes])
        if progress is not None:
            progress(nbytes)

    in_threads(read, _pieces(((at, at + n) for at, n in spans), FAR_PIECE), FAR_READERS)


def read_parts(fd: int, parts: Sequence[tuple[int, memoryview]]) -> None:
    """Fill several buffers by one call.

    Parameters
    ----------
    fd : int
    parts : sequence of (int, memoryview)
        Offset in the file, ascending and not overlapping; what is between two of them is read, too, and dropped.
    """
    first, position = parts[0][0], parts[0][0]
    buffers: list[bytearray | memoryview] = []
    for offset, target in parts:
        if offset > position:
            buffers.append(bytearray(offset - position))
        buffers.append(target)
        position = offset + len(target)
    if len(buffers) > 1 and hasattr(os, "preadv") and os.preadv(fd, buffers, first) == position - first:
        return
    for offset, target in parts:
        pread_full(fd, offset, target)


def _data_spans(fd: int, start: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of ``[0, nbytes)`` that are not holes of a sparse file."""
    if not hasattr(os, "SEEK_DATA"):
        yield 0, nbytes
        return
    at, end = start, start + nbytes
    while at < end:
        try:
            with _place_kept(fd):
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


@contextlib.contextmanager
def _place_kept(fd: int) -> Iterator[None]:
    """Leave the position where it was: a file object of the caller's may share it, and have bytes buffered."""
    place = os.lseek(fd, 0, os.SEEK_CUR)
    try:
        yield
    finally:
        os.lseek(fd, place, os.SEEK_SET)


def pread_full(fd: int, offset: int, out: memoryview) -> None:
    """Fill `out` from the file at `offset`, or raise `TruncatedError`."""
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
        with _seek_lock, _place_kept(fd):
            os.lseek(fd, offset, os.SEEK_SET)
            data = os.read(fd, len(out))
        out[: len(data)] = data
        return len(data)


def scratch(use: str, nbytes: int, most: int) -> memoryview:
    """Return memory that this thread's next call for the same use takes again: fresh pages cost more than a copy.

    Parameters
    ----------
    use : str
        What for; always with the same `most`.
    nbytes : int
        More than `most`, and it is new memory.
    most : int
        Bytes that are kept.
    """
    if nbytes > most:
        return memoryview(bytearray(nbytes))
    if not hasattr(_local, use):
        setattr(_local, use, memoryview(bytearray(most)))
    found: memoryview = getattr(_local, use)
    return found[:nbytes]


def unreadable(error: OSError, offset: int | None = None, nbytes: int | None = None) -> TensorIOError:
    """Return the problem for bytes that the system does not give; it has the error as its cause."""
    code = errno.errorcode.get(error.errno or 0, type(error).__name__)
    problem = TensorIOError(f"can't be read: {error.strerror or error} ({code})", offset=offset)
    problem.nbytes = nbytes
    problem.__cause__ = error
    return problem
