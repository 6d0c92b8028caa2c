"""Segments: memory that other processes can map, filled once and sealed.

A segment is a file without a name (memfd): it lives as long as a descriptor or
a mapping of it does, and the kernel refuses to shrink, grow or change it once
it is sealed, whoever asks. Where there is no such thing, it is a file in a
folder for temporary ones, which only its mode protects.

References
----------
memfd_create(2); fcntl(2), "File Sealing"; Documentation/admin-guide/mm/transhuge.rst and hugetlbpage.rst.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from tensorio.system import memory

if TYPE_CHECKING:
    from tensorio.plan import Buffer, Plan

    Progress = Callable[[int, int], object]

__all__ = [
    "Segment",
    "anonymous_file",
    "content_nbytes",
    "is_sealed",
    "make_file",
    "make_memory",
    "open_file",
    "open_held",
    "spool",
]

HAS_MEMFD = hasattr(os, "memfd_create")
HUGE_PAGE = 2 << 20
# Files in huge pages have a size in huge pages: the last bytes say how many of the others count.
_TRAILER = b"tensorio"
_TRAILER_NBYTES = len(_TRAILER) + 8
# MFD_NOEXEC_SEAL, not in the os module: never a program. Without it, vm.memfd_noexec=2 refuses the call.
_NOEXEC_SEAL = 0x8
NAME_MAX = 200  # memfd_create(2) takes 249 bytes
_READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_CAREFUL = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class Segment(NamedTuple):
    """A filled segment.

    Attributes
    ----------
    fd : int
        Read-only descriptor, the caller's to close.
    pages : str
        ``"reserved"``: huge pages that the administrator set aside;
        ``"transparent"``: huge pages that the kernel made of the others, for
        half of the bytes or more; ``"small"``.
    """

    fd: int
    pages: str = "small"


# ------------------------------------------------------------------------ making


def make_memory(plan: Plan, name: str, *, huge_pages: bool = False, progress: Progress | None = None) -> Segment:
    """Lay out a plan in memory without a name, and seal it.

    Parameters
    ----------
    name : str
        What ``/proc/PID/maps`` calls it, behind ``memfd:``.
    huge_pages : bool
        Use reserved huge pages, or else transparent ones, or else small ones.

    Raises
    ------
    OSError
        ENOMEM: there is less memory than it takes, here or in this container.
    """
    require_memory(plan.nbytes)
    if not HAS_MEMFD:
        return Segment(_unlinked(plan, progress))
    if huge_pages and (fd := _reserved(name, plan.nbytes)) is not None:
        return Segment(_filled(fd, plan, progress, mapped=True)[0], "reserved")
    fd = anonymous_file(name)
    try:
        if plan.nbytes and not huge_pages:
            os.posix_fallocate(fd, 0, plan.nbytes)
        else:
            os.ftruncate(fd, plan.nbytes)
    except BaseException:
        os.close(fd)
        raise
    return Segment(*_filled(fd, plan, progress, mapped=huge_pages and plan.nbytes > 0))


def require_memory(nbytes: int) -> None:
    """Refuse up front what the system would kill the process for."""
    if nbytes > HUGE_PAGE and nbytes > (free := memory.available()):
        raise OSError(errno.ENOMEM, f"publishing needs {nbytes} bytes of memory and {free} are available")


def anonymous_file(name: str, flags: int = 0) -> int:
    """Return a descriptor of an empty file in memory; `flags` are those of memfd_create(2)."""
    short = os.fsencode(name)[:NAME_MAX].decode("utf-8", "ignore")
    flags |= os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(short, flags | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(short, flags)  # a kernel before 6.3


def _reserved(name: str, nbytes: int) -> int | None:
    """A segment in huge pages that were set aside (``vm.nr_hugepages``); None if there are too few."""
    size = -(-(nbytes + _TRAILER_NBYTES) // HUGE_PAGE) * HUGE_PAGE
    fd = -1
    try:
        fd = anonymous_file(name, os.MFD_HUGETLB | os.MFD_HUGE_2MB)
        os.ftruncate(fd, size)
        with mmap.mmap(fd, size) as pages:  # reserves them all, or fails
            pages[size - _TRAILER_NBYTES :] = _TRAILER + nbytes.to_bytes(8, "little")
    except (OSError, AttributeError, ValueError):
        if fd >= 0:
            os.close(fd)
        return None
    return fd


def _filled(fd: int, plan: Plan, progress: Progress | None, *, mapped: bool) -> tuple[int, str]:
    """Fill and seal; a read-only descriptor instead of `fd`, which is closed, and the kind of its pages."""
    try:
        pages = _fill_mapped(fd, plan, progress) if mapped else _fill(fd, plan.pieces(), plan.nbytes, progress)
        return _sealed(fd), pages
    finally:
        os.close(fd)


def _fill(fd: int, pieces: Iterator[Buffer], total: int, progress: Progress | None) -> str:
    done = 0
    for piece in pieces:
        view = memoryview(piece).cast("B")
        while len(view):
            view = view[os.write(fd, view) :]
        done += len(piece)
        if progress is not None:
            progress(done, total)
    return "small"


def _fill_mapped(fd: int, plan: Plan, progress: Progress | None) -> str:
    """Fill through a mapping: only page faults on advised mappings make huge pages (write(2) makes small ones)."""
    done = 0
    with mmap.mmap(fd, os.fstat(fd).st_size) as pages:
        with contextlib.suppress(OSError, AttributeError):  # no transparent huge pages in this kernel
            pages.madvise(mmap.MADV_HUGEPAGE)
        for piece in plan.pieces():
            nbytes = memoryview(piece).nbytes
            pages[done : done + nbytes] = piece
            done += nbytes
            if progress is not None:
                progress(done, plan.nbytes)
        return "transparent" if 2 * _in_huge_pages(fd) >= plan.nbytes else "small"


def _in_huge_pages(fd: int) -> int:
    """Bytes of this process's mappings of a file that are in huge pages."""
    inode, found, ours = os.fstat(fd).st_ino, 0, False
    with contextlib.suppress(OSError), open("/proc/self/smaps", "rb") as f:
        for line in f:
            words = line.split()
            if not words[0].endswith(b":"):
                ours = int(words[4]) == inode
            elif ours and words[0] == b"ShmemPmdMapped:":
                found += int(words[1]) * 1024
    return found


def _sealed(fd: int) -> int:
    """Seal a file in memory for good; a descriptor that can't write, even to one that is not sealed."""
    with contextlib.suppress(OSError):
        os.fchmod(fd, 0o400)
    try:
        reader = os.open(f"/proc/self/fd/{fd}", _READ)
    except OSError:
        reader = os.dup(fd)  # without /proc
    try:
        _seal(fd)
    except BaseException:
        os.close(reader)
        raise
    return reader


def _seal(fd: int) -> None:
    import fcntl

    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _seals())


def _seals() -> int:
    import fcntl

    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def _unlinked(plan: Plan, progress: Progress | None) -> int:
    """A file that has lost its name, for systems without memfd."""
    import tempfile

    return make_file(plan, tempfile.gettempdir(), f"tensorio-{secrets.token_hex(8)}", keep=False, progress=progress)


def make_file(plan: Plan, folder: str, name: str, *, mode: int = 0o400, keep: bool = True,
              progress: Progress | None = None) -> int:  # fmt: skip
    """Lay out a plan in a new file, which must not exist; a read-only descriptor.

    Parameters
    ----------
    keep : bool
        False removes the name at once (where the system allows it for an open file).
    """
    path = os.path.join(folder, name)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    fd = os.open(path, flags, 0o600)
    try:
        if hasattr(os, "posix_fallocate") and plan.nbytes:
            os.posix_fallocate(fd, 0, plan.nbytes)  # a full /dev/shm shows here, and not as a bus error later
        _fill(fd, plan.pieces(), plan.nbytes, progress)
        if hasattr(os, "fchmod"):
            os.fchmod(fd, mode)
        reader = os.open(path, _READ)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(fd)
    if not keep:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return reader


def spool(pieces: Iterator[bytes], name: str, nbytes: int | None) -> int:
    """Take in bytes as they come, of which the number may not be known, and seal them; a read-only descriptor."""
    if nbytes is not None:
        require_memory(nbytes)
    if HAS_MEMFD:
        fd = anonymous_file(name)
    else:
        import tempfile

        fd, path = tempfile.mkstemp(prefix="tensorio-")
        with contextlib.suppress(OSError):
            os.unlink(path)
    try:
        _fill(fd, pieces if nbytes is not None else _as_they_fit(pieces), nbytes or 0, None)
        return _sealed(fd) if HAS_MEMFD else os.dup(fd)
    finally:
        os.close(fd)


def _as_they_fit(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Pass on what comes from who knows where for as long as there is memory for it."""
    taken = 0  # bytes since the last look
    for piece in pieces:
        taken += len(piece)
        if taken > HUGE_PAGE:
            require_memory(taken)
            taken = 0
        yield piece


# ----------------------------------------------------------------------- reaching


def is_sealed(fd: int) -> bool:
    """Tell whether nobody can shrink, grow or change the file, ever."""
    try:
        import fcntl

        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _seals() == _seals()
    except (OSError, ImportError, AttributeError):  # a file that can't be sealed; a system that can't seal
        return False


def content_nbytes(fd: int) -> int:
    """Return how many bytes of a file count: all of them, but for segments in reserved huge pages."""
    status = os.fstat(fd)
    if status.st_size and getattr(status, "st_blksize", 0) >= HUGE_PAGE and status.st_size % HUGE_PAGE == 0:
        tail = os.pread(fd, _TRAILER_NBYTES, status.st_size - _TRAILER_NBYTES)
        nbytes = int.from_bytes(tail[len(_TRAILER) :], "little")
        if tail.startswith(_TRAILER) and nbytes <= status.st_size - _TRAILER_NBYTES:
            return nbytes
    return status.st_size


def open_held(pid: int, fd: int) -> int:
    """Open, for reading, what another process has open; only its own user and the superuser may.

    Raises
    ------
    OSError
        ENOENT: no such process, or it has nothing open there; EACCES.
    """
    return os.open(f"/proc/{pid}/fd/{fd}", _READ | getattr(os, "O_NONBLOCK", 0))


def open_file(path: str, folder: int | None = None) -> int:
    """Open a file for reading, waiting for nobody; below `folder`, through no link."""
    flags = _READ | getattr(os, "O_NONBLOCK", 0)
    return os.open(path, flags) if folder is None else os.open(path, flags | _CAREFUL, dir_fd=folder)
