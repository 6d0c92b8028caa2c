"""Folders that appear whole or not at all, and several files written at once.

A folder is made beside its target and takes its name when all of its files are
there: by a rename, or in exchange with the folder that has the name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING

from tensorio import _host
from tensorio.writing.carrying import CantCarry, Carried, Moved, carry, carry_late, put_back, take_mode
from tensorio.writing.late import noted
from tensorio.writing.output import naming, preallocate, renamed, settle, sync_folder, syncing_names, writing
from tensorio.writing.temporaries import clean_stale, kept, made_folder

if TYPE_CHECKING:
    from tensorio.plan import Plan

    Progress = Callable[[int, int], object]

__all__ = [
    "NO_EXCHANGE",
    "publish_folder",
    "put_back_all",
    "require_free",
    "require_writable",
    "staged_folder",
    "write_together",
]

# What says that two names can't be exchanged: on this system or filesystem, over this mount point, by this user.
NO_EXCHANGE = {
    errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV, errno.EBUSY, errno.EACCES, errno.EPERM, errno.EROFS,
}  # fmt: skip
_ASIDE = ".tensorio.old"


def require_free(target: str, replaceable: Callable[[str], bool] | None = None) -> None:
    """Raise unless there is nothing at a path, or an empty folder, or one that may be replaced.

    Raises
    ------
    FileExistsError
        A folder with files in it.
    NotADirectoryError
        A file.
    """
    try:
        held = os.listdir(target)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise NotADirectoryError(errno.ENOTDIR, "expected the name of a folder to make, found a file", target) from None
    if held and (replaceable is None or not replaceable(target)):
        why = "" if replaceable is None else ", with others in it than an earlier run made"
        raise FileExistsError(errno.EEXIST, f"the folder is not empty{why}", target)


def require_writable(folder: str) -> None:
    """Raise if a folder is there whose files could not be removed once another has taken its place.

    Raises
    ------
    PermissionError
    OSError
        With EROFS: it is on a disk that nobody may write to.
    """
    if os.path.isdir(folder) and not os.access(folder, os.W_OK | os.X_OK):
        read_only = hasattr(os, "statvfs") and os.statvfs(folder).f_flag & os.ST_RDONLY
        number = errno.EROFS if read_only else errno.EACCES
        raise OSError(number, os.strerror(number), folder)


@contextlib.contextmanager
def staged_folder(
    target: str | os.PathLike[str], *, replaceable: Callable[[str], bool] | None = None, durable: bool = True
) -> Iterator[str]:
    """Make a folder, to be filled by the block, that takes its name when the block is done.

    Parameters
    ----------
    target : str or os.PathLike
        May be there if it is empty.
    replaceable : callable, optional
        Tells of a folder with files in it whether it may be replaced, and is
        asked again at the end; nothing may be if not given.
    durable : bool
        Sync the folders to disk. Files are the block's business.

    Yields
    ------
    str
        Where to write the files.

    Notes
    -----
    A block that fails leaves nothing; a process that is killed leaves a folder
    whose name begins with a dot. The new folder has the old one's mode. Where
    names can't be exchanged (other systems than Linux, some network filesystems),
    the old one is moved aside first: between two renames there is none of that
    name, and if the process is killed there, the next save puts it back.
    """
    final = os.path.realpath(os.fspath(target))  # a link stays a link
    parent, name = os.path.split(final)
    _put_back(parent, name)
    clean_stale(parent, name)
    require_free(final, replaceable)
    require_writable(final)
    with contextlib.ExitStack() as stack:
        with naming(final):
            staging = stack.enter_context(made_folder(parent, name, 0o700 if os.path.isdir(final) else 0o777))
        yield staging
        require_free(final, replaceable)
        if not publish_folder(staging, final, durable=durable):
            with naming(final), syncing_names(parent, durable):
                _swap(staging, final)


def _swap(staging: str, final: str) -> None:
    """Give a folder the name of another in two renames."""
    parent, name = os.path.split(final)
    aside = os.path.join(parent, f".{name}{_ASIDE}")
    os.rename(final, aside)
    try:
        os.rename(staging, final)
    except BaseException:
        os.rename(aside, final)
        raise
    shutil.rmtree(aside)


def put_back_all(parent: str, ours: Callable[[str], bool]) -> None:
    """Do for many names what `staged_folder` does for one: put back what killed processes moved aside.

    Parameters
    ----------
    ours : callable
        Tells whether nobody else writes to a name.

    Raises
    ------
    OSError
        One can't be renamed.
    """
    for name in os.listdir(parent):
        if name.startswith(".") and name.endswith(_ASIDE) and ours(name[1 : -len(_ASIDE)]):
            _put_back(parent, name[1 : -len(_ASIDE)])


def _put_back(parent: str, name: str) -> None:
    """Undo the first of two renames, if a killed process came no further; finish after the second."""
    aside, final = os.path.join(parent, f".{name}{_ASIDE}"), os.path.join(parent, name)
    if not os.path.isdir(aside):
        return
    if os.path.lexists(final):
        shutil.rmtree(aside, ignore_errors=True)
    else:
        with naming(final):
            os.rename(aside, final)


def publish_folder(
    staging: str, final: str, *, ours: Callable[[str], set[str]] | None = None, durable: bool = True
) -> bool:
    """Give a folder its name; what had it before has the name of `staging` then, if it was not empty.

    Parameters
    ----------
    staging, final : str
        In one folder; `final` is no link.
    ours : callable, optional
        Returns the names in a folder that are replaced: all else is carried over,
        see `tensorio.writing.carrying`. All is replaced if not given.
    durable : bool
        Sync folders to disk; files must be.

    Returns
    -------
    bool
        False: names can't be exchanged here, or something can't be carried over;
        `final` is as it was, and `staging` may have files of it.
    """
    with naming(final), syncing_names(os.path.dirname(final), durable):
        _take_over(staging, final)
        if durable:
            sync_folder(staging)
        try:
            renamed(staging, final)  # to a name that is free, or an empty folder's
        except OSError as error:
            if error.errno not in NO_EXCHANGE | {errno.ENOTEMPTY, errno.EEXIST} or not os.path.isdir(final):
                raise
            return _exchanged(staging, final, ours, durable)
    return True


def _take_over(staging: str, final: str) -> None:
    """Take the mode, and as far as allowed the owner, of a folder that is there."""
    try:
        old = os.stat(final)
    except FileNotFoundError:
        return
    take_mode(staging, old)


def _exchanged(staging: str, final: str, ours: Callable[[str], set[str]] | None, durable: bool) -> bool:
    carried: Carried = {}
    if ours is not None:
        try:
            carried = carry(final, staging, ours)
        except (CantCarry, OSError):
            return False
    if durable:
        for folder, _, _ in os.walk(staging):
            sync_folder(folder)
    with kept(final):
        if ours is None:
            return _exchanged_names(staging, final)
        # What comes late to the old folder is still to be brought over from it: by whoever cleans up, after a kill.
        new = os.stat(staging)
        moved: Moved = []
        with noted(staging, final, ours(final), carried, durable=durable):
            try:
                if not _exchanged_names(staging, final):
                    return False
                changed = carry_late(staging, final, ours(staging), carried, moved)
                for folder in changed if durable else ():
                    sync_folder(folder)
            except BaseException:
                put_back(moved)
                if os.path.samestat(os.stat(final), new):
                    _exchange(staging, final)  # the old folder, with what can't be brought over
                raise
    return True


def _exchanged_names(staging: str, final: str) -> bool:
    code = _exchange(staging, final)
    if code and code not in NO_EXCHANGE:
        raise OSError(code, os.strerror(code), final)
    return not code


def _exchange(a: str, b: str) -> int:
    """Exchange two names; again, if a signal came first."""
    while (code := _host.exchange(a, b)) == errno.EINTR:
        pass
    return code


def write_together(
    chains: Iterable[Iterable[tuple[str, Plan]]],
    *,
    durable: bool = True,
    progress: Progress | None = None,
    total: int = 0,
) -> None:
    """Write several chains of new files, a piece of each in turn.

    Sources that the chains share are read once, if each chain has about the same
    of it at about the same place.

    Parameters
    ----------
    chains : iterable of iterable of (str, Plan)
        Paths that must not exist, and what to write there; one file of each chain
        is open at a time.
    total : int
        Bytes of all, for `progress`.

    Raises
    ------
    OSError
        From the system, with the file's name.
    """
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(contextlib.closing(_written(chain, durable))) for chain in chains]
        done = 0
        while writers:
            for writer in list(writers):
                nbytes = next(writer, None)
                if nbytes is None:
                    writers.remove(writer)
                    continue
                done += nbytes
                if progress is not None:
                    progress(done, total)


def _written(chain: Iterable[tuple[str, Plan]], durable: bool) -> Generator[int, None, None]:
    """Write the files of one chain; yield the bytes written after each piece."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    for path, plan in chain:
        with naming(path):
            fd = os.open(path, flags, 0o666)
        try:
            with naming(path):
                preallocate(fd, plan.nbytes)
            yield from writing(plan, fd, path)
            with naming(path):
                settle(fd, durable)
        finally:
            with contextlib.suppress(OSError):  # what it could tell, `settle` has asked
                os.close(fd)
