"""The lock of who writes to a folder: held by the process, let go of by its end, however it ends."""

from __future__ import annotations

import contextlib
import errno
import os
import weakref

from tensorio.errors import LockedError, UnsupportedError, escaped
from tensorio.writing.output import naming

__all__ = ["WriterLock"]

_NAME = ".lock"
_HOLDER_MAX = 256  # bytes of the note on who holds it

_held: weakref.WeakSet[WriterLock] = weakref.WeakSet()


class WriterLock:
    """A lock (flock(2)) on the file ``.lock`` in a folder; the file stays when it is let go of."""

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, _NAME)
        self._fd = -1

    def acquire(self) -> None:
        """Take the lock; nothing if it is held by this object already.

        Raises
        ------
        LockedError
            Somebody else has it.
        UnsupportedError
            The filesystem has no locks.
        """
        if self._fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(self.path), os.fstat(self._fd)):
                    return
            self.release()  # of a folder that was removed; another may lock the one that is there now
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            _lock(fd, self.path)
            with naming(self.path):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        except BaseException:
            _close(fd)
            raise
        self._fd = fd
        _held.add(self)

    def release(self) -> None:
        """Let go of it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            _held.discard(self)
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
            _unlock(fd)
            _close(fd)

    __del__ = release

    def forget(self) -> None:
        """Close it in a forked child, so that the lock goes with the parent, whose it is."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            _close(fd)


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):  # of the note who holds it; closed all the same
        os.close(fd)


def _unlock(fd: int) -> None:
    """Let go by name: a child that was just forked may not have come to close its descriptor of the lock."""
    with contextlib.suppress(OSError, ImportError):  # nothing can be imported at the very end of a program
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_UN)


def _lock(fd: int, path: str) -> None:
    try:
        import fcntl
    except ImportError:
        raise UnsupportedError("this system has no flock; say lock=False if nobody else writes there") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, _HOLDER_MAX, 0).strip()
        who = f": {escaped(holder)[1:-1]}" if holder else ""
        raise LockedError(
            f"somebody else saves checkpoints to this folder{who}; wait for it or end it", path=os.path.dirname(path)
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
        raise UnsupportedError(
            "the filesystem has no locks; say lock=False if nobody else writes there", path=path
        ) from None


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
