"""Files and folders that are there for the length of a save, and what killed processes left of theirs.

Who makes one holds a lock on it (flock(2)) for as long as it lives: the system drops the lock with the process,
however that ends. A temporary that nobody holds is litter. Where locks do not reach every host that may write to the
folder, or there are none, the name decides: it says which process made it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator

from tensorio.system.disks import disk_of
from tensorio.system.processes import boot_id, is_running, pid_namespace, start_time
from tensorio.writing import late

__all__ = ["clean_stale", "kept", "made_file", "made_folder", "temporary_name"]

_TRIES = 8  # at names, each new: somebody who cleans may hold a new one for a moment
_MARK, _END = ".tensorio-", ".tmp"
# Looking through 100,000 names takes tens of milliseconds. A folder of so many names is looked through for a save only
# where that adds little to the time since the last one did.
_MANY, _SHARE = 10_000, 100
_rest: dict[str, float] = {}  # the folder of many names, and until when it is let alone

# Another one in a forked child. To compare numbers of processes takes memory, and there may be none.
_process = object()


def _forked() -> None:
    global _process
    _process = object()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def temporary_name(folder: str, name: str) -> str:
    """Return a path for what will be renamed to `name` in a folder: new, and saying which process asked.

    Notes
    -----
    ``.NAME.tensorio-PID-START-HOST-RANDOM.tmp``: START as in `tensorio.system.processes.start_time`,
    HOST the boot and the namespace that the id is from. NAME is cut to 150 bytes, so
    that the longest names (255 bytes) have a temporary, too.
    """
    return os.path.join(folder, f"{_prefix(name)}{_maker(os.getpid())}-{secrets.token_hex(4)}{_END}")


def _prefix(name: str) -> str:
    return f".{os.fsdecode(os.fsencode(name)[:150])}{_MARK}"


@functools.lru_cache(1)  # for the one process that this is, until it forks
def _maker(pid: int) -> str:
    return f"{pid}-{start_time(pid):x}-{_host()}"


def _host() -> str:
    return f"{boot_id()[:8]}.{pid_namespace():x}"


@contextlib.contextmanager
def made_file(folder: str, name: str, mode: int) -> Iterator[tuple[int, str]]:
    """Make a temporary file, open to read and write, and close it at the end; after an error, remove it.

    Yields
    ------
    (int, str)
        Descriptor and path. Whoever renames it does so within the block: to the end of it, nobody takes it for litter.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

    def make(path: str) -> int:
        return os.open(path, flags, mode)

    fd, path = _held(make, folder, name)
    maker = _process
    try:
        yield fd, path
    except BaseException:
        if _process is maker:  # a forked child may let go of the generator: the file is its parent's
            _remove(path)
        raise
    finally:
        try:  # noqa: SIM105 - to suppress takes memory, and there may be none
            os.close(fd)
        except OSError:  # what it could tell, `output.settle` has asked before the rename
            pass


@contextlib.contextmanager
def made_folder(folder: str, name: str, mode: int, final: str | None = None) -> Iterator[str]:
    """Make a temporary folder; what has its name at the end (after an exchange of names, the old one) is removed.

    Parameters
    ----------
    final : str, optional
        Where its files are going to be, if not in a folder of that name. Errors of the system name them there: nobody
        has heard of the temporary.

    Yields
    ------
    str
        Its path. To the end of the block, nobody takes it for litter.
    """

    def make(path: str) -> int:
        os.mkdir(path, mode)
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if os.name == "posix" else -1
        except BaseException:
            os.rmdir(path)
            raise

    fd, path = _held(make, folder, name)
    maker = _process
    try:
        yield path
    except OSError as error:
        found = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
        if not found.startswith(path + os.sep):
            raise
        placed = (final or os.path.join(folder, name)) + found[len(path) :]
        raise OSError(error.errno, error.strerror, placed) from error
    finally:
        if _process is maker:  # as above
            _give_up(path, fd)
        elif fd >= 0:
            os.close(fd)


def _held(make: Callable[[str], int], folder: str, name: str) -> tuple[int, str]:
    """Make something under a new name and lock it; again, if it was taken for litter in between."""
    for _ in range(_TRIES):
        path = temporary_name(folder, name)
        fd = None
        try:
            fd = make(path)
            if fd < 0 or (_lock(fd) is not False and _is(path, fd)):
                return fd, path
        except BaseException as error:  # an interrupt, or no memory to look
            if fd is not None or not isinstance(error, OSError):  # else it is not there, or another's
                _give_up(path, -1 if fd is None else fd)
            raise
        _give_up(path, fd)
    raise OSError(errno.EBUSY, "temporary files are taken away as they are made", os.path.join(folder, name))


def _give_up(path: str, fd: int) -> None:
    try:
        _remove(path)
    finally:
        if fd >= 0:
            os.close(fd)


@contextlib.contextmanager
def kept(folder: str) -> Iterator[None]:
    """Let nobody take a folder for litter that gets the name of a temporary within the block.

    Raises
    ------
    OSError
        Before the block: the folder can't be opened.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if os.name == "posix" else -1
    try:
        if fd >= 0:
            _lock(fd)  # if somebody else has the lock, that does, too
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def _is(path: str, fd: int) -> bool:
    """Tell whether a path still names what a descriptor is open on."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except OSError:
        return False


def _lock(fd: int) -> bool | None:
    """Take the lock if nobody has it; None if there are no locks here."""
    try:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


def clean_stale(folder: str, name: str | None = None) -> list[str]:
    """Remove what killed processes left of files and folders that they were writing.

    Parameters
    ----------
    folder : str
    name : str, optional
        Only what was to get this name; everything that this package left, if not given.

    Returns
    -------
    list of str
        Paths that are gone.

    Notes
    -----
    What somebody holds is never removed. What came late to a folder that was
    replaced is brought over first, see `tensorio.writing.late`. Where other hosts may write (NFS and its
    like), nor is what another host, or this one before it was started anew, has left.
    Errors are passed over: litter is in nobody's way. Costs one look through the
    folder, some 0.3 us a name; with `name`, one of 10,000 names and more is looked
    through only once in a while.
    """
    began = time.monotonic()
    if name is not None and began < _rest.get(folder, 0):
        return []
    try:
        names = os.listdir(folder or ".") if os.name == "posix" else []  # Windows does not let an open file be removed
    except OSError:
        return []
    prefix = "." if name is None else _prefix(name)
    litter = [n for n in names if n.endswith(_END) and n.startswith(prefix) and _owner(n)]
    gone = [path for path in (os.path.join(folder, n) for n in litter) if _clean(path)]
    for note in (os.path.join(folder, n) for n in names if n.endswith(_END + late.END) and n.startswith(prefix)):
        if _owner(os.path.basename(note)[: -len(late.END)]) and not os.path.lexists(note[: -len(late.END)]):
            late.forget(note)
    _rest.clear()
    if len(names) >= _MANY:
        now = time.monotonic()
        _rest[folder] = now + (now - began) * _SHARE
    return gone


def _owner(name: str) -> tuple[int, int, str] | None:
    """Return process, start and host out of the name of a temporary."""
    words = name[: -len(_END)].rpartition(_MARK)[2].split("-")
    try:
        pid, start, host, _ = words
        return int(pid), int(start, 16), host
    except ValueError:
        return None


def _clean(path: str) -> bool:
    """Remove a temporary unless it may be in use; tell whether it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return False
    try:
        found = os.fstat(fd)
        ours = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
        # The lock is held to the end: of two who clean, one does; and who makes one looks whether it is still there.
        litter = ours and _is_litter(path, fd, found.st_dev) and _is(path, fd)
        return litter and late.brought_over(path) and _remove(path)
    finally:
        os.close(fd)


def _is_litter(path: str, fd: int, device: int) -> bool:
    locked = _lock(fd)
    if locked is False:
        return False
    disk = disk_of(device, fd)
    if locked and disk.local:
        return True  # one system serves all who write here, and it says that nobody holds it
    pid, start, host = _owner(os.path.basename(path)) or (0, 0, "")
    return host == _host() and not is_running(pid, start)


def _remove(path: str) -> bool:
    try:
        os.unlink(path)
    except (IsADirectoryError, PermissionError):  # of a folder Linux says the one, POSIX the other
        _remove_folder(path)
    except OSError:
        return False
    return not os.path.lexists(path)


def _remove_folder(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if os.path.isdir(path):  # what others kept in it may have been read-only
        for here, folders, _ in os.walk(path):
            for folder in [here, *(os.path.join(here, name) for name in folders)]:
                with contextlib.suppress(OSError):
                    if not os.path.islink(folder):
                        os.chmod(folder, 0o700)
        shutil.rmtree(path, ignore_errors=True)
