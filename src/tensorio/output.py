"""Files that appear whole or not at all.

A save goes to a temporary sibling and is renamed over the target: readers see
the old file or the new one, existing mappings of the old one stay valid, and a
failed save leaves the old file as it was and no litter. With ``durable=True``
the file is synced before the rename and its folder behind it, so that a save
that has returned survives a power cut.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tensorio.errors import UnsupportedError

if TYPE_CHECKING:
    from tensorio.plan import Plan

    Progress = Callable[[int, int], object]

__all__ = ["naming", "preallocate", "replacing", "sync_folder", "write_plan", "writing"]

# What a filesystem without the call answers; anything else is a real failure.
_NOT_OFFERED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV}


def write_plan(
    plan: Plan,
    target: object,
    *,
    durable: bool = True,
    progress: Progress | None = None,
    check: Callable[[int], object] | None = None,
) -> None:
    """Write a plan to a path (atomically) or into a writable binary file object (as it comes).

    Parameters
    ----------
    check : callable, optional
        Called with a descriptor of the whole new file, written and synced, before it
        gets its name: what it raises fails the save. Not called for file objects.

    Raises
    ------
    OSError
        From the system, with errno and file name; the old file is intact.
    UnsupportedError
        The target exists and is not a regular file.
    """
    if isinstance(target, str | bytes | os.PathLike):
        if "://" in os.fsdecode(target):
            raise UnsupportedError("saving to a remote address can't be made atomic; save to a file and upload that")
        _write_path(plan, os.fspath(target), durable, progress, check)
    elif hasattr(target, "write"):
        _write_object(plan, target.write, progress)
        if hasattr(target, "flush"):
            target.flush()
    else:
        raise TypeError(
            f"expected a path (str, os.PathLike) or a writable binary file object, found {type(target).__name__}"
        )


@contextlib.contextmanager
def replacing(path: str | bytes | os.PathLike[str]) -> Iterator[str]:
    """Let somebody else write a file that is to appear whole or not at all.

    Yields
    ------
    str
        A path of the target's file name, in a folder beside it. What is there at
        the end is renamed over the target; after an error, it is removed.

    Raises
    ------
    OSError
        From the system.
    UnsupportedError
        The target exists and is not a regular file.
    """
    target = os.path.realpath(os.fsdecode(os.fspath(path)))
    old = _old_file(target)
    folder, name = os.path.split(target)
    beside = os.path.join(folder, f".tensorio-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with naming(target):
        os.mkdir(beside, 0o700)  # nobody else may put something in the place of what is written
    written = os.path.join(beside, name)
    try:
        yield written
        with naming(target):
            if old is not None:
                os.chmod(written, stat.S_IMODE(old.st_mode))
            os.replace(written, target)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(written)
        with contextlib.suppress(OSError):
            os.rmdir(beside)


def _write_object(plan: Plan, write: Callable[[bytes], object], progress: Progress | None) -> None:
    done = 0
    for piece in plan.pieces():
        view = memoryview(piece)
        while len(view):
            # Raw streams may take less than they are given; None stands for all, as it does for many wrappers.
            taken = write(view)  # type: ignore[arg-type]
            view = view[taken:] if isinstance(taken, int) else view[len(view) :]
            if taken == 0:
                raise OSError(errno.EIO, "the file object's write() took no bytes")
        done += len(piece)
        if progress is not None:
            progress(done, plan.nbytes)


def _write_path(
    plan: Plan, path: str | bytes, durable: bool, progress: Progress | None, check: Callable[[int], object] | None
) -> None:
    target = os.path.realpath(os.fsdecode(path))  # a link stays a link; the file it names is replaced
    old = _old_file(target)
    folder, name = os.path.split(target)
    # As long as it is written, it is for nobody who may not read what it replaces.
    with _temporary(folder, name, 0o666 if old is None else stat.S_IMODE(old.st_mode) & 0o600) as (fd, temporary):
        with naming(path):
            preallocate(fd, plan.nbytes)
            _write_descriptor(plan, fd, path, progress)
            _take_mode(fd, old)
            if durable:
                os.fsync(fd)
        if check is not None:
            check(fd)
        with naming(path):
            os.replace(temporary, target)
    if durable:
        with naming(path):
            sync_folder(folder)


def _old_file(target: str) -> os.stat_result | None:
    try:
        old = os.stat(target)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(old.st_mode):
        raise IsADirectoryError(errno.EISDIR, "expected a file name to save to, found a folder", target)
    if not stat.S_ISREG(old.st_mode):
        raise UnsupportedError("expected a regular file to replace, found a device, FIFO or socket", path=target)
    return old


@contextlib.contextmanager
def _temporary(folder: str, name: str, mode: int) -> Iterator[tuple[int, str]]:
    """Make a sibling file and close it at the end; remove it if it was not renamed away."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    # The name has room for the longest file names (255 bytes): the target's is cut.
    short = os.fsdecode(os.fsencode(name)[:180])
    temporary = os.path.join(folder, f".{short}.tensorio-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with naming(os.path.join(folder, name)):
        fd = os.open(temporary, flags, mode)
    try:
        yield fd, temporary
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(fd)


@contextlib.contextmanager
def naming(path: str | bytes) -> Iterator[None]:
    """Give an OSError that rises through the name of the file the user asked for."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fsdecode(path)) from error  # of the class that goes with errno


def preallocate(fd: int, nbytes: int) -> None:
    """Reserve the space, so that a full disk shows before the first byte; best effort elsewhere."""
    if not hasattr(os, "posix_fallocate") or nbytes == 0:
        return
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise


def _write_descriptor(plan: Plan, fd: int, path: str | bytes, progress: Progress | None) -> None:
    done = 0
    for nbytes in writing(plan, fd, path):
        done += nbytes
        if progress is not None:
            progress(done, plan.nbytes)


def writing(plan: Plan, fd: int, path: str | bytes) -> Iterator[int]:
    """Write a plan to the descriptor of a path; yield the bytes of each piece once it is written."""
    done = 0
    for piece in plan.pieces():
        with naming(path):
            view = memoryview(piece)
            while len(view):
                view = view[os.write(fd, view) :]
        done += len(piece)
        yield len(piece)
    if done != plan.nbytes:
        raise ValueError(f"the plan promised {plan.nbytes} bytes and yielded {done}")


def _take_mode(fd: int, old: os.stat_result | None) -> None:
    """Keep the mode (and, as far as allowed, the owner) of the file that is replaced."""
    if old is None or not hasattr(os, "fchmod"):
        return
    new = os.fstat(fd)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        with contextlib.suppress(PermissionError):
            os.fchown(fd, old.st_uid, old.st_gid)
    os.fchmod(fd, stat.S_IMODE(old.st_mode))


def sync_folder(folder: str) -> None:
    """Sync a folder's names to disk, where there is a call for it."""
    if os.name != "posix":
        return  # Windows has no such call; its rename is journalled
    fd = os.open(folder or ".", os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
    finally:
        os.close(fd)
