"""Damaged zip archives, read from the front.

Each record tells of itself twice, around its payload, and the central directory
at the end of the file tells it again::

    [local header: name][payload][descriptor: CRC-32, size] ... [directory: name, CRC-32, size, offset]

so that what a cut or a hole took away can often be had from another place. A
payload counts as proven only by a CRC-32 over all its bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tensorio import _core
from tensorio.errors import HeaderError, LimitError
from tensorio.formats._salvage_parts import (
    CENTRAL,
    DESCRIPTOR,
    FORMS,
    Directory,
    Entry,
    Header,
    Piece,
    State,
    directory_place,
    ending_at,
    entry_at,
    has,
    header_at,
)
from tensorio.formats._zip import Inflation

if TYPE_CHECKING:
    from tensorio.storage.base import Storage

__all__ = ["Damaged"]

WINDOW = 512 << 10  # bytes searched or unpacked at a time
SMALL = 64 << 10  # bytes up to which a payload is looked at in one piece
MAX_RATIO = 1100  # deflate reaches 1032:1 (zlib's own figure)
MAX_UNPACKED = 64 << 20  # of a deflated record whose size nothing tells

# What looking for records may cost, in bytes per byte of the file, so that no file makes it take long. A file that was
# damaged by accident takes a pass or two; searching for a descriptor that is not there costs the rest of the file.
CHECKED_PER_BYTE = 8
SEARCHED_PER_BYTE = 16
COST_FIXED = 16 << 20


class Damaged:
    """A file that is or was a zip archive; says what is at a place, and believes nothing of it.

    Parameters
    ----------
    storage : Storage
        All offsets count from its first byte.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.view = storage.view()
        self.nbytes = storage.nbytes
        self._may_check = CHECKED_PER_BYTE * self.nbytes + COST_FIXED
        self._may_inflate = MAX_RATIO * self._may_check
        self._may_search = SEARCHED_PER_BYTE * self.nbytes + COST_FIXED

    def has(self, signature: bytes, at: int) -> bool:
        """Tell whether a structure begins at `at`."""
        return has(self.view, signature, at)

    def header(self, at: int) -> Header | None:
        """Return the local header at `at`, if there is one."""
        return header_at(self.view, at)

    def directory(self) -> Directory | None:
        """Read the central directory that the end record names; None if there is none where it says."""
        place = directory_place(self.view)
        return None if place is None else self.directory_at(*place)

    def directory_at(self, at: int, end: int) -> Directory | None:
        """Read the entries of a directory in ``[at, end)``; damaged ones are skipped."""
        entries: dict[int, Entry] = {}
        place: int | None = at
        while place is not None:
            entry, after = entry_at(self.view, place, end)
            if entry is not None:
                entries.setdefault(entry.at, entry)
            place = after if after is not None else next(self.signatures(CENTRAL, place + 1, end), None)
        return Directory(at, entries) if entries else None

    # ---------------------------------------------------------------- search

    def signatures(self, signature: bytes, start: int, end: int | None = None) -> Iterator[int]:
        """Yield where a signature stands in ``[start, end)``; looks at each byte once, and lets its page go."""
        end = self.nbytes if end is None else min(end, self.nbytes)
        pattern = re.compile(re.escape(signature))
        done = start
        for piece in self.storage.stream(start, max(end - start, 0)):
            for at in range(done, done + len(piece), WINDOW):
                stop = min(at + WINDOW, done + len(piece))
                for match in pattern.finditer(self.view, max(at - len(signature) + 1, start), stop):
                    yield match.start()
            done += len(piece)

    def size_of(self, start: int, end: int | None = None) -> int | None:
        """Find how long a stored payload is, by the first descriptor whose sizes are its distance from `start`.

        None if there is none before `end`, or the search costs too much by now.
        """
        end = min(self.nbytes if end is None else end, start + self._may_search)
        self._may_search -= end - start
        for at in self.signatures(DESCRIPTOR, start, end):
            for form in FORMS:
                if at + form.size <= self.nbytes:
                    _, _, packed, size = form.unpack_from(self.view, at)
                    if packed == size == at - start:
                        self._may_search += end - at
                        return at - start
        return None

    def before(self, at: int, lowest: int) -> tuple[int, int, int] | None:
        """Return (start, size, CRC-32) of the stored payload whose descriptor ends at `at`, by what that says."""
        for form in FORMS:
            if at - form.size >= lowest:
                signature, crc, packed, size = form.unpack_from(self.view, at - form.size)
                start = at - form.size - size
                if signature == DESCRIPTOR and packed == size and start >= lowest:
                    return start, size, crc
        return None

    def described(self, at: int, size: int) -> bool:
        """Tell whether the descriptor of a stored payload of so many bytes stands at `at`."""
        ending = ending_at(self.view, at, size, size, True) if size and at < self.nbytes else None
        return ending is not None and ending.crc is not None

    # -------------------------------------------------------------- checksums

    def checksum(self, start: int, nbytes: int) -> int:
        """Return the CRC-32 of a range; memory stays flat."""
        self._may_check -= nbytes
        if self._may_check < 0:
            raise _too_dear()
        if nbytes <= SMALL:
            return _core.crc32(self.view[start : start + nbytes])
        crc = 0
        for piece in self.storage.stream(start, nbytes):
            crc = _core.crc32(piece, crc)
        return crc

    def inflate(self, start: int, limit: int) -> tuple[int, int, int] | None:
        """Unpack a deflated payload and throw it away.

        Returns
        -------
        (compressed, size, CRC-32) or None
            None if it is damaged, cut off, or of more than `limit` bytes.
        """
        limit = min(limit, (self.nbytes - start) * MAX_RATIO)
        self._may_inflate -= limit
        if self._may_inflate < 0:
            raise _too_dear()
        packed = self.storage.stream(start, min(self.nbytes - start, limit + limit // 8 + SMALL))
        unpacked = Inflation(packed, limit, start)
        crc = 0
        try:
            for data in unpacked:
                crc = _core.crc32(data, crc)
        except HeaderError:
            return None
        return (unpacked.taken, unpacked.size, crc) if unpacked.ended and unpacked.size <= limit else None

    # --------------------------------------------------------------- payloads

    def judge(self, piece: Piece, later: bool, crcs: Iterable[int]) -> Piece:
        """Say how sure a payload is, of which name, place and unpacked size are known.

        Parameters
        ----------
        later : bool
            Whether a descriptor stands behind it.
        crcs : iterable of int
            Its CRC-32 as other places give it.
        """
        if not piece.size and not piece.deflated:
            ending = ending_at(self.view, piece.start, 0, 0, later)
            return piece._replace(state=State.PROVEN, end=None if ending is None else ending.end, crc=0)
        if piece.deflated and piece.crc is None:
            unpacked = self.inflate(piece.start, piece.size)
            if unpacked is None or unpacked[1] != piece.size:
                return piece._replace(state=State.DAMAGED, why="its compressed bytes are damaged or cut off")
            piece = piece._replace(compressed=unpacked[0], crc=unpacked[2])
        if not 0 <= piece.start <= self.nbytes - piece.compressed:
            there = max(self.nbytes - piece.start, 0)
            why = f"cut off by the end of the file: {there} of {piece.compressed} bytes are there"
            return piece._replace(state=State.CUT, why=why, end=self.nbytes)
        ending = ending_at(self.view, piece.start + piece.compressed, piece.compressed, piece.size, later)
        told = {*crcs, *([] if ending is None or ending.crc is None else [ending.crc])}
        piece = piece._replace(end=None if ending is None else ending.end)
        if ending is None and not told:
            return piece._replace(state=State.DAMAGED, why="what stands behind it is damaged, its checksum, too")
        if piece.crc is None and told - {0}:
            piece = piece._replace(crc=self.checksum(piece.start, piece.compressed))
        return _compared(piece, told, ending is not None and ending.cut)

    def whole(self, header: Header, entry: Entry | None = None, end: int | None = None) -> Piece | None:
        """Find all of a payload whose size is not known yet, before `end`; None if nothing tells where it ends."""
        crcs = [] if entry is None else [entry.crc]
        actual = None
        if not header.later:
            compressed, size = header.compressed, header.size
            crcs.append(header.crc)
        elif entry is not None:
            compressed, size = entry.compressed, entry.size
        elif header.deflated:
            unpacked = self.inflate(header.start, MAX_UNPACKED)
            if unpacked is None:
                return None
            compressed, size, actual = unpacked
        else:
            found = self.size_of(header.start, end)
            if found is None:
                return None
            compressed = size = found
        piece = Piece(header.name, header.start, compressed, size, header.deflated, State.DAMAGED, crc=actual)
        return self.judge(piece, header.later, crcs)

    def listed(self, directory: Directory, entry: Entry) -> Piece:
        """Say what is left of a record that the directory lists, whose local header may be damaged."""
        header = self.header(entry.at)
        start = header.start if header is not None and header.name == entry.name else directory.start(entry)
        piece = Piece(entry.name, start, entry.compressed, entry.size, entry.deflated, State.DAMAGED)
        return self.judge(piece, entry.later, (entry.crc,))


def _compared(piece: Piece, told: set[int], cut: bool) -> Piece:
    """Hold the computed CRC-32 against those that the file gives; 0 stands for one that was never computed."""
    if piece.crc in told - {0}:
        if len(told - {0}) == 1:
            return piece._replace(state=State.PROVEN)
        return piece._replace(state=State.UNPROVEN, why="the checksums that the file has of it differ; one is right")
    if told - {0}:
        expected = " or ".join(f"{crc:08x}" for crc in sorted(told - {0}))
        return piece._replace(state=State.DAMAGED, why=f"CRC-32: expected {expected}, found {piece.crc:08x}")
    if told:
        return piece._replace(state=State.UNPROVEN, why="no checksum was computed when it was written")
    if cut:
        return piece._replace(state=State.UNPROVEN, why="the file ends before its checksum")
    return piece._replace(state=State.DAMAGED, why="its checksum is damaged")


def _too_dear() -> LimitError:
    return LimitError("the file is made so that looking for its records takes many times its size")
