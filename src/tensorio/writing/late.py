"""What came late to a folder that was replaced, found again after a kill.

A folder that another one takes the place of has the name of a temporary from then on. Until what came late to it is
brought over, a note beside it says so: whoever cleans up after a killed process does that first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorio.writing.carrying import carry_late

if TYPE_CHECKING:
    from tensorio.writing.carrying import Carried

__all__ = ["END", "brought_over", "forget", "noted"]

END = ".late"  # of the note's name, behind that of the temporary
_NOTE_MAX = 16 << 20  # bytes; what is carried has a bound, and so have its names


class _Note(NamedTuple):
    owner: int
    name: str  # of the folder, whichever one has it
    staged: int  # inode of the new one: it has the temporary's name until names are exchanged
    left: set[str]
    carried: Carried


@contextlib.contextmanager
def noted(staging: str, final: str, left: set[str], carried: Carried, *, durable: bool) -> Iterator[None]:
    """Have a note for the length of the block, in which a folder takes the place of another.

    Parameters
    ----------
    staging, final : str
        The new folder and the old one, before the exchange.
    left : set of str
        Names at the top of the old one that are replaced.
    carried : dict
        See `tensorio.writing.carrying.carry`.
    durable : bool
        Sync the note to disk.
    """
    import json

    head = {
        "name": os.path.basename(final), "staged": os.stat(staging).st_ino, "left": sorted(left), "carried": carried,
    }  # fmt: skip
    path = staging + END
    try:
        with open(path, "xb") as file:
            file.write(json.dumps(head).encode())
            if durable:
                file.flush()
                os.fsync(file.fileno())
        yield
    finally:
        forget(path)


def forget(path: str) -> None:
    """Remove a note."""
    with contextlib.suppress(OSError):  # it says nothing about what is not there
        os.unlink(path)


def brought_over(temporary: str) -> bool:
    """Bring over what came late to a folder that a killed process left; tell whether it may be removed now.

    Parameters
    ----------
    temporary : str
        Nobody else cleans it meanwhile.

    Notes
    -----
    What has come to the new folder since then is newer and stays. If there is no folder of that name any more,
    somebody has removed it, with all that it held.
    """
    from tensorio.writing.output import sync_folder  # which is above this, and seldom needed here

    path = temporary + END
    try:
        note = _read(path)
        if note is not None and os.stat(temporary).st_ino != note.staged:
            final = os.path.join(os.path.dirname(temporary), note.name)
            if os.path.isdir(final):
                if note.owner not in (os.stat(final).st_uid, os.geteuid(), 0):
                    return False  # anybody may have put it there
                for folder in carry_late(temporary, final, note.left, note.carried, []):
                    sync_folder(folder)
    except OSError:
        return False
    forget(path)
    return True


def _read(path: str) -> _Note | None:
    """The note; None if there is none, or only a part of one: then names were not exchanged yet."""
    import json

    try:
        with open(path, "rb") as file:
            owner = os.fstat(file.fileno()).st_uid
            fields: dict[str, Any] = json.loads(file.read(_NOTE_MAX))
        carried = {_inside(path): tuple(map(int, was)) for path, was in fields["carried"].items()}
        name = _inside(os.path.basename(fields["name"]))
        return _Note(owner, name, int(fields["staged"]), set(fields["left"]), carried)
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _inside(path: str) -> str:
    """Return a path that leads nowhere but down."""
    if {"", ".", ".."} & set(path.split(os.sep)):
        raise ValueError(path)
    return path
