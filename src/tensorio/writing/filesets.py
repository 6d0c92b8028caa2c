"""Files that belong together, one of which names the others: visible all of them, or none.

The folder that has them takes the place of the old one as a whole, with what
others keep there. Where that can't be had, files get names of their own in the
folder that is there, and the one that names the others is renamed last.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from tensorio.system.disks import is_mount
from tensorio.writing.carrying import take_mode
from tensorio.writing.folders import NO_EXCHANGE, publish_folder, require_writable, write_together
from tensorio.writing.output import naming, renamed, syncing_names
from tensorio.writing.temporaries import clean_stale, made_folder

if TYPE_CHECKING:
    from tensorio.plan import Plan

__all__ = ["FileSet", "publish_set", "staged_set"]


class FileSet(Protocol):
    """Files that belong together; one of them names the others, or is alone.

    Attributes
    ----------
    single : str
        The name that one file alone has.
    commit : str
        The name of the one that names the others, or is alone.
    rivals : set of str
        Names that readers may take instead of it.
    sums : set of str
        Names of files that say what others hold: the old ones go before these do.
    """

    single: str
    commit: str
    rivals: set[str]
    sums: set[str]

    def names(self, tag: str = "") -> list[str]:
        """Return the names of the others, which differ from tag to tag."""
        ...

    def index(self, tag: str) -> Plan:
        """Lay out the file that names them."""
        ...

    def ours(self, folder: str) -> set[str]:
        """Return what of a folder this set takes the place of."""
        ...


@contextlib.contextmanager
def staged_set(folder: str, files: FileSet, *, whole: bool) -> Iterator[str]:
    """Make a folder for files that `publish_set` is to make visible: beside theirs, or within it.

    Parameters
    ----------
    folder : str
        No link.
    files : FileSet
    whole : bool
        Whether the folder may be exchanged with another.
    """
    parent, name = os.path.split(folder)
    there = os.path.isdir(folder)
    require_writable(folder)
    clean_stale(parent, name)
    clean_stale(folder, files.single)
    with contextlib.ExitStack() as stack:
        staging = None
        with naming(folder):
            if not there or (whole and not is_mount(folder)):
                try:
                    staging = stack.enter_context(made_folder(parent, name, 0o700 if there else 0o777))
                except OSError as error:
                    if not there or error.errno not in NO_EXCHANGE:
                        raise
            if staging is None:
                staging = stack.enter_context(made_folder(folder, files.single, 0o700, folder))
        yield staging


def publish_set(staging: str, folder: str, files: FileSet, *, durable: bool = True) -> list[str]:
    """Make files visible that were written into a folder by `staged_set`.

    Parameters
    ----------
    staging, folder : str
        `folder` is no link.
    files : FileSet

    Returns
    -------
    list of str
        The names that the files have now, without the one that names the others.

    Notes
    -----
    The folder as a whole takes the place of the old one if it was staged beside
    it. Otherwise, or where that can't be had, files are renamed into the old
    folder, the one that names the others last; then what it replaces is removed.
    """
    _take_modes(staging, folder, files)
    if os.path.dirname(staging) != folder and publish_folder(staging, folder, ours=files.ours, durable=durable):
        return files.names()
    with naming(folder):
        return _publish_within(staging, folder, files, durable)


def _take_modes(staging: str, folder: str, files: FileSet) -> None:
    """Keep mode and owner of the files that are replaced."""
    old = files.ours(folder) if os.path.isdir(folder) else set()
    for name in sorted(old, key=lambda name: name != files.commit):
        try:
            found = os.stat(os.path.join(folder, name))
        except FileNotFoundError:  # a link to nowhere
            continue
        for path in (os.path.join(staging, new) for new in [*files.names(), files.commit]):
            take_mode(path, found)
        return


def _publish_within(staging: str, folder: str, files: FileSet, durable: bool) -> list[str]:
    old, tag = files.ours(folder), ""
    if any(os.path.lexists(os.path.join(folder, name)) for name in files.names()):
        tag = secrets.token_hex(4)
        _write_again(os.path.join(staging, files.commit), files.index(tag), durable)
    new = files.names(tag)
    commit = os.path.join(staging, files.commit)
    sums = [(os.path.join(folder, name), os.path.join(staging, f"old-{name}")) for name in sorted(files.sums & old)]
    try:
        with syncing_names(folder, durable):
            for path, aside in sums:
                renamed(path, aside)
            for name, to in zip(files.names(), new, strict=True):
                renamed(os.path.join(staging, name), os.path.join(folder, to))
        with syncing_names(folder, durable):
            renamed(commit, os.path.join(folder, files.commit))
    except BaseException:
        if os.path.lexists(commit):  # else all is in place, and what failed is the sync behind it
            _remove(folder, new)
            _put_back(sums)
        raise
    if files.rivals & old:
        with syncing_names(folder, durable):  # before files go that it names
            for rival in files.rivals & old:
                os.unlink(os.path.join(folder, rival))
    _remove(folder, old - files.rivals - files.sums - {files.commit, *new})
    return new


def _write_again(path: str, plan: Plan, durable: bool) -> None:
    old = os.stat(path)
    os.unlink(path)
    write_together([[(path, plan)]], durable=durable)
    take_mode(path, old)


def _put_back(moved: Iterable[tuple[str, str]]) -> None:
    for path, aside in moved:
        with contextlib.suppress(OSError):
            os.replace(aside, path)


def _remove(folder: str, names: Iterable[str]) -> None:
    """Remove files that nobody looks for; what can't be is passed over."""
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, name))
