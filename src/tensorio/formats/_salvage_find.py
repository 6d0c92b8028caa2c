"""Finding the pickle of a damaged torch zip, and storages without one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING

from tensorio.formats._salvage import Damaged
from tensorio.formats._salvage_layout import FOLDERS, LOCAL_SIZE, PICKLE
from tensorio.formats._salvage_parts import LOCAL, Directory, Header, Piece, State, descriptor_size

if TYPE_CHECKING:
    Progress = Callable[[int], object]

__all__ = ["find_pickle", "whole_storages"]

VOTERS = 9  # headers whose names tell the archive's folder


def find_pickle(archive: Damaged, directory: Directory | None) -> tuple[str, Piece] | None:
    """Find the object's pickle.

    Returns
    -------
    (prefix, piece) or None
        The folder of all records, and the pickle's own.
    """
    prefix = _prefix(archive, directory)
    listed = None
    if directory is not None:
        entries = (directory.entries[at] for at in directory.offsets)
        entry = next((entry for entry in entries if entry.name == f"{prefix}/{PICKLE}"), None)
        listed = None if entry is None else archive.listed(directory, entry)
    if listed is None or not listed.whole:
        listed = _walked_pickle(archive) or listed
    return None if listed is None else (prefix, listed)


def _prefix(archive: Damaged, directory: Directory | None) -> str:
    """The folder of all records, by what most of them say: any one name may be damaged."""
    if directory is not None:
        names = [entry.name for entry in directory.entries.values()]
    else:
        first = islice(archive.signatures(LOCAL, 0), VOTERS)
        names = [header.name for header in map(archive.header, first) if header is not None]
    count = Counter(name.partition("/")[0] for name in names)
    return max(count, key=count.__getitem__, default="")


def _walked_pickle(archive: Damaged) -> Piece | None:
    at, storages = 0, False
    while (header := archive.header(at)) is not None:
        name = header.name.partition("/")[2]
        piece = archive.whole(header)
        if name == PICKLE:
            return piece or _unended(archive, header)
        if piece is None or piece.end is None or piece.state is State.CUT:
            break
        storages |= name.startswith(FOLDERS)
        at = piece.end
    return None if storages else _searched_pickle(archive, at)


def _searched_pickle(archive: Damaged, lost: int) -> Piece | None:
    """The thread was lost in front of the pickle: find its header, or its end in front of the next record's header."""
    for at in archive.signatures(LOCAL, lost + 1):
        header = archive.header(at)
        if header is None:
            continue
        prefix, _, name = header.name.partition("/")
        if name == PICKLE:
            return archive.whole(header) or _unended(archive, header)
        told = archive.before(at, lost + LOCAL_SIZE)
        if told is not None and told[1] and _is_pickle(archive.view[told[0] : told[0] + told[1]]):
            piece = Piece(f"{prefix}/{PICKLE}", told[0], told[1], told[1], False, State.DAMAGED)
            return archive.judge(piece, True, ())
        if name.startswith(FOLDERS):
            return None  # behind the first storage, there are only pickles of archives inside payloads
    return None


def _is_pickle(payload: memoryview) -> bool:
    """Whether a payload begins with PROTO and ends with STOP."""
    return bytes(payload[:2]) in (b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5") and bytes(payload[-1:]) == b"."


def _unended(archive: Damaged, header: Header) -> Piece:
    """A pickle whose end nothing tells: all up to the next header, less a descriptor; or up to the end of the file."""
    end = next(
        (at - descriptor_size(0, 1) for at in archive.signatures(LOCAL, header.start) if archive.header(at)), None
    )
    if end is None or end < header.start:
        size = archive.nbytes - header.start
        why = "cut off by the end of the file"
        return Piece(header.name, header.start, size, size, header.deflated, State.CUT, why)
    size = end - header.start
    return Piece(header.name, header.start, size, size, header.deflated, State.DAMAGED, "its checksum is damaged")


def whole_storages(archive: Damaged, directory: Directory | None, progress: Progress | None = None) -> dict[str, Piece]:
    """Find storages when nothing is known of them: every whole record in a folder ``data`` whose checksum is right.

    Returns
    -------
    dict of str to Piece
        By their name in the archive's folder. Of two records of one name, the first.
    """
    found: dict[str, Piece] = {}
    at: int | None = 0
    while at is not None and at < archive.nbytes:
        header = archive.header(at)
        entry = None if directory is None else directory.entries.get(at)
        piece = None
        if header is not None:
            piece = archive.whole(header, entry if entry is not None and entry.name == header.name else None)
        elif entry is not None and directory is not None:
            piece = archive.listed(directory, entry)
        name = "" if piece is None else piece.record.partition("/")[2]
        if piece is not None and name.startswith(FOLDERS) and piece.whole:
            found.setdefault(name, piece)
        if piece is not None and piece.end is not None and piece.state is not State.CUT:
            at = piece.end
        else:
            at = next(archive.signatures(LOCAL, at + 4), None)
        if progress is not None and at is not None:
            progress(at)
    return found
