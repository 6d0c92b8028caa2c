"""Files that appear whole or not at all.

A save goes to a temporary sibling and is renamed over the target: readers see
the old file or the new one, existing mappings of the old one stay valid, and a
failed save leaves the old file as it was and no litter. With ``durable=True``
the file is synced before the rename and its folder behind it, so that a save
that has returned survives a power cut. docs/durability.md has the steps, and
what they are worth on which filesystem.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tensorio import _host
from tensorio.errors import UnsupportedError
from tensorio.writing.temporaries import clean_stale, made_file, made_folder

if TYPE_CHECKING:
    from tensorio.plan import Plan

    Progress = Callable[[int, int], object]

__all__ = [
    "naming", "preallocate", "renamed", "replacing", "settle", "sync_folder", "syncing_names", "write_plan", "writing",
]  # fmt: skip

# What a filesystem without the call answers; anything else is a real failure.
_NOT_OFFERED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV}
_TRIES = 3  # at what signals interrupt, where it can be done without


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
    clean_stale(folder, name)
    with contextlib.ExitStack() as stack:
        with naming(target):  # nobody else may put something in the place of what is written
            beside = stack.enter_context(made_folder(folder, name, 0o700))
        written = os.path.join(beside, name)
        yield written
        with naming(target):
            if old is not None:
                os.chmod(written, stat.S_IMODE(old.st_mode))
            renamed(written, target)


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
    clean_stale(folder, name)
    # As long as it is written, it is for nobody who may not read what it replaces.
    mode = 0o666 if old is None else stat.S_IMODE(old.st_mode) & 0o600
    with contextlib.ExitStack() as stack:
        with naming(path):
            stack.enter_context(syncing_names(folder, durable))
            fd, temporary = stack.enter_context(made_file(folder, name, mode))
            preallocate(fd, plan.nbytes)
        _write_descriptor(plan, fd, path, progress)
        with naming(path):
            _take_mode(fd, old)
            settle(fd, durable)
        if check is not None:
            check(fd)
        with naming(path):
            renamed(temporary, target)
            stack.close()


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
def naming(path: str | bytes) -> Iterator[None]:
    """Give an OSError that rises through the name of the file the user asked for."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fsdecode(path)) from error  # of the class that goes with errno


def _saying(error: OSError, what: str) -> OSError:
    """Return an error that says more; of the class that goes with its errno."""
    return OSError(error.errno, f"{error.strerror}: {what}", error.filename)


def preallocate(fd: int, nbytes: int) -> None:
    """Reserve the space, so that a full disk shows before the first byte; nothing where that is not offered.

    Raises
    ------
    OSError
        ENOSPC, EDQUOT, EFBIG, EIO: with what is needed and what is there.
    """
    error = 0
    for _ in range(_TRIES if nbytes else 0):
        error = _host.reserve(fd, nbytes)
        if error != errno.EINTR:
            break
    if error in _NOT_OFFERED or error in (0, errno.EINTR):
        return
    space = f"{nbytes} bytes are needed"
    if error == errno.ENOSPC:
        disk, taken = os.fstatvfs(fd), os.fstat(fd).st_blocks * 512  # what there was, it may have taken
        space += f", {disk.f_bavail * disk.f_frsize + taken} are free"
    raise OSError(error, f"{os.strerror(error)}: {space}")


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
        view = memoryview(piece)
        with naming(path):
            while len(view):
                taken = _write(fd, view, done, plan.nbytes)
                view = view[taken:]
                done += taken
        yield len(piece)
    if done != plan.nbytes:
        raise ValueError(f"the plan promised {plan.nbytes} bytes and yielded {done}")


def _write(fd: int, view: memoryview, done: int, nbytes: int) -> int:
    """Call write(2), which may take less than it is given. Python repeats it after a signal, nobody does after EIO."""
    try:
        taken = os.write(fd, view)
    except OSError as error:
        raise _saying(error, f"{done} of {nbytes} bytes were written") from error
    if taken == 0:
        raise OSError(errno.EIO, f"{os.strerror(errno.EIO)}: write took no more after {done} of {nbytes} bytes")
    return taken


def settle(fd: int, durable: bool) -> None:
    """Sync a file that is all written, and have the system say now what it would say at close.

    Raises
    ------
    OSError
        Some of the bytes are not on the disk, and are not to be had any more: a second fsync proves nothing.
    """
    try:
        if durable:
            os.fsync(fd)
        # NFS, FUSE and quotas have errors that show at close only; any descriptor's will do. This one stays open: its
        # lock keeps the file until it is renamed.
        with contextlib.suppress(InterruptedError):  # closed all the same
            os.close(os.dup(fd))
    except OSError as error:
        raise _saying(error, "the bytes written may not be on the disk") from error


def renamed(temporary: str, target: str) -> None:
    """Rename over a file; again, if a signal came between (NFS and FUSE), which does not tell whether it was done."""
    while True:
        try:
            os.replace(temporary, target)
        except InterruptedError:
            if os.path.lexists(temporary):
                continue
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP):
                raise _saying(
                    error, "without rename, no save is atomic; save to another filesystem, and copy"
                ) from error
            raise
        return


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
    with syncing_names(folder):
        pass


@contextlib.contextmanager
def syncing_names(folder: str, durable: bool = True) -> Iterator[None]:
    """Sync a folder's names to disk behind the block that changes them, where there is a call for it.

    Raises
    ------
    OSError
        Before the block: the folder can't be opened. Behind it: the new names are there, not proven to last.
    """
    if not durable or os.name != "posix":  # Windows has no such call; its rename is journalled
        yield
        return
    fd = os.open(folder or ".", os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        yield
        _sync_names(fd)
    finally:
        try:  # noqa: SIM105 - to suppress takes memory, and there may be none
            os.close(fd)
        except OSError:
            pass


def _sync_names(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise _saying(error, "what was saved is in place, but a power cut may take it back") from error
