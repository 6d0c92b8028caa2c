"""What others keep in a folder, given to the folder that takes its place.

Files become hard links: no byte is copied, and owner, mode and times stay.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator

__all__ = ["CantCarry", "Carried", "Moved", "carry", "carry_late", "put_back", "take_mode", "take_owner"]

MOST = 1000  # entries; a folder with more is not a checkpoint's
COPIED_MOST = 64 << 20  # bytes in files that can't be linked
# What link(2) answers where a file can't have a second name: here, or not by this user.
_NO_LINKS = {errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EXDEV}

# By path from the folder's top: which file it was.
Carried = dict[str, tuple[int, ...]]
Moved = list[tuple[str, str]]  # from where, and to where
Ours = Callable[[str], set[str]]


class CantCarry(Exception):
    """It would take too long, or leave something behind."""


def carry(old: str, new: str, ours: Ours) -> Carried:
    """Give a folder all that another one holds, but for what is replaced, and for names that it has.

    Parameters
    ----------
    old, new : str
        On one filesystem.
    ours : callable
        Returns the names at the top of a folder that are replaced.

    Returns
    -------
    dict
        What was there.

    Raises
    ------
    CantCarry
        There are too many files, one can't be linked and is too large to copy, or
        another filesystem is mounted below.
    OSError
        From the system.
    """
    carried: Carried = {}
    room = COPIED_MOST
    folders: Moved = []
    for path, found in _walk(old, ours(old), os.stat(old).st_dev):
        if len(carried) >= MOST:
            raise CantCarry
        carried[path] = _identity(found)
        target = os.path.join(new, path)
        if stat.S_ISDIR(found.st_mode):
            os.mkdir(target, 0o700)
            folders.append((os.path.join(old, path), target))
        elif not os.path.lexists(target):
            room -= _again(os.path.join(old, path), target, found, room)
    _take_all(folders)
    return carried


def carry_late(old: str, new: str, left: set[str], carried: Carried, moved: Moved) -> set[str]:
    """Bring over what came to a folder, or went from it, since `carry` looked.

    Parameters
    ----------
    left : set of str
        Names at the top of the old folder that stay there.
    moved : list
        Is given each file that is moved: `put_back` undoes it.

    Returns
    -------
    set of str
        Folders whose names changed, to be synced.

    Notes
    -----
    What was put into the new folder meanwhile stays.
    """
    now = dict(_walk(old, left, None))
    changed: set[str] = set()
    made: list[tuple[str, str]] = []
    try:
        for path, found in now.items():
            source, target = os.path.join(old, path), os.path.join(new, path)
            if stat.S_ISDIR(found.st_mode):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(target, 0o700)
                    made.append((source, target))
                    changed.add(os.path.dirname(target))
            elif carried.get(path) != _identity(found) and _is_as_carried(target, carried.get(path)):
                os.replace(source, target)
                moved.append((source, target))
                changed.add(os.path.dirname(target))
    finally:
        _take_all(made)
    for path in carried.keys() - now.keys():
        target = os.path.join(new, path)
        if os.path.lexists(target) and _is_as_carried(target, carried[path]):
            with contextlib.suppress(OSError):  # a folder, or gone already
                os.unlink(target)
                changed.add(os.path.dirname(target))
    return changed


def put_back(moved: Moved) -> None:
    """Undo what `carry_late` has moved, as far as that can be had."""
    for source, target in reversed(moved):
        with contextlib.suppress(OSError):
            os.replace(target, source)


def _take_all(folders: Moved) -> None:
    """Give folders times, modes and owners of others, once all is in them."""
    for source, target in reversed(folders):
        shutil.copystat(source, target)
        take_owner(target, os.stat(source))


def _is_as_carried(target: str, was: tuple[int, ...] | None) -> bool:
    """Tell whether there is nothing at a path, or what was carried there: a link, or a copy of that size and time."""
    try:
        found = _identity(os.stat(target, follow_symlinks=False))
    except FileNotFoundError:
        return True
    return was is not None and found[1:] == was[1:]


def _walk(folder: str, left: set[str], device: int | None) -> Iterator[tuple[str, os.stat_result]]:
    """Yield paths and what they are, folders before what is in them; `left` are names at the top to be passed over."""
    pending = [""]
    while pending:
        within = pending.pop()
        with os.scandir(os.path.join(folder, within)) as entries:
            for entry in entries:
                path = os.path.join(within, entry.name)
                if not within and entry.name in left:
                    continue
                found = os.stat(os.path.join(folder, path), follow_symlinks=False)
                if device not in (None, found.st_dev):
                    raise CantCarry
                if stat.S_ISDIR(found.st_mode):
                    pending.append(path)
                yield path, found


def _identity(found: os.stat_result) -> tuple[int, ...]:
    if stat.S_ISDIR(found.st_mode):
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _again(source: str, target: str, found: os.stat_result, room: int) -> int:
    """Give what is not a folder a second name, or copy it; return the bytes copied."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    else:
        return 0
    if stat.S_ISLNK(found.st_mode):
        os.symlink(os.readlink(source), target)
        return 0
    if not stat.S_ISREG(found.st_mode) or found.st_size > room:
        raise CantCarry
    shutil.copy2(source, target)
    take_owner(target, found)
    fd = os.open(target, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    return found.st_size


def take_owner(target: str, found: os.stat_result) -> None:
    """Give a file or folder the owner of another, as far as that is allowed."""
    if hasattr(os, "chown"):
        with contextlib.suppress(PermissionError):
            os.chown(target, found.st_uid, found.st_gid)


def take_mode(target: str, found: os.stat_result) -> None:
    """Give a file or folder the owner of another, as far as that is allowed, and its mode."""
    take_owner(target, found)
    os.chmod(target, stat.S_IMODE(found.st_mode))  # behind the owner, whose change takes bits away
