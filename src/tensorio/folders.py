"""Folders that appear whole or not at all, and several files written at once.

A folder is made beside its target and renamed to it when all of its files are
there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING

from tensorio.output import naming, preallocate, sync_folder, writing

if TYPE_CHECKING:
    from tensorio.plan import Plan

    Progress = Callable[[int, int], object]

__all__ = ["require_free", "staged_folder", "write_together"]


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
    whose name begins with a dot. An old folder is moved aside first: between two
    renames there is none of that name. The new one has its mode.
    """
    final = os.path.realpath(os.fspath(target))  # a link stays a link
    require_free(final, replaceable)
    parent, name = os.path.split(final)
    short = os.fsdecode(os.fsencode(name)[:180])
    staging = os.path.join(parent, f".{short}.tensorio-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    old = _mode_of(final)
    with naming(final):
        os.mkdir(staging, 0o777 if old is None else 0o700)
    try:
        yield staging
        if durable:
            sync_folder(staging)
        require_free(final, replaceable)
        with naming(final):
            if old is not None:
                os.chmod(staging, old)
            _put(staging, final)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    if durable:
        sync_folder(parent)


def _mode_of(folder: str) -> int | None:
    """Who may look into a folder that is there."""
    try:
        return stat.S_IMODE(os.stat(folder).st_mode)
    except FileNotFoundError:
        return None


def _put(staging: str, final: str) -> None:
    """Give a folder its name; what had it before goes."""
    if not os.path.isdir(final):
        os.rename(staging, final)
        return
    aside = f"{staging}.old"
    os.rename(final, aside)
    try:
        os.rename(staging, final)
    except BaseException:
        os.rename(aside, final)
        raise
    shutil.rmtree(aside)


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
            if durable:
                with naming(path):
                    os.fsync(fd)
        finally:
            os.close(fd)
