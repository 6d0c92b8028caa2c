"""What is left of the storages of a torch zip, when their names and sizes are known.

A checksum proves what a payload is, but not whose: names are covered by none.
So a storage is looked for where torch has put it, or where the directory says
it is. In an archive that torch did not lay out and whose directory is gone, what
is in order may well be right, and is said not to be proven. What is found
elsewhere counts as damaged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tensorio.formats._salvage_layout import (
    BYTEORDER,
    FOLDERS,
    TEXT_MAX,
    Layout,
    Place,
    find_layout,
    read_front,
)
from tensorio.formats._salvage_parts import LOCAL, Directory, Header, Piece, State

if TYPE_CHECKING:
    from tensorio.formats._salvage import Damaged

    Progress = Callable[[int], object]

__all__ = ["Storages"]


class Storages:
    """The storages of one file.

    Parameters
    ----------
    archive : Damaged
    prefix : str
        The folder of all records.
    sizes : dict of str to int
        Bytes of each storage, as the pickle mentions them.
    pickle : Piece
        Its record.
    directory : Directory or None

    Attributes
    ----------
    folder : str
        What the names of their records begin with.
    pieces : dict of str to Piece
        By key, those that were found.
    texts : dict of str to bytes
        Contents of the side records.
    """

    def __init__(
        self,
        archive: Damaged,
        prefix: str,
        sizes: dict[str, int],
        pickle: Piece,
        directory: Directory | None,
        progress: Progress,
    ) -> None:
        self.pieces: dict[str, Piece] = {}
        self._archive = archive
        self._sizes = sizes
        self._directory = directory
        self._progress = progress
        self._listed = {} if directory is None else {entry.name: entry for entry in directory.entries.values()}
        front = read_front(archive, prefix, pickle)
        self.texts = front.texts
        self._read_listed_text(f"{prefix}/{BYTEORDER}")
        layouts = find_layout(archive, prefix, sizes, pickle, front, directory)
        self.folder = layouts[0].folder if layouts else f"{prefix}/{FOLDERS[0]}"
        if layouts:
            self._take_placed(layouts)
        elif directory is not None:
            self._take_listed(directory)
        if not all(key in self.pieces and self.pieces[key].whole for key in sizes):
            self._take_met(not layouts and directory is None)

    def _read_listed_text(self, name: str) -> None:
        """A side record that only the directory leads to."""
        entry = self._listed.get(name)
        if self._directory is None or entry is None or BYTEORDER in self.texts or entry.size > TEXT_MAX:
            return
        piece = self._archive.listed(self._directory, entry)
        if piece.whole and not piece.deflated:
            self.texts[BYTEORDER] = bytes(self._archive.view[piece.start : piece.start + piece.size])

    def _key(self, name: str) -> str | None:
        """The storage whose record has this name."""
        key = name[len(self.folder) :]
        return key if key in self._sizes and name.startswith(self.folder) else None

    # ----------------------------------------------------------- by torch's layout

    def _take_placed(self, layouts: list[Layout]) -> None:
        """Look at the place of each storage, whatever is left of its header."""
        misnamed: dict[str, str] = {}
        rivals = self._rivals(layouts)
        for place in layouts[0].places(self._sizes):
            header = self._archive.header(place.at)
            named = None if header is None else self._key(header.name)
            piece = self._judged(place)
            if named is not None and named != place.key:
                misnamed[place.key] = named
            elif named is None and piece.size and place.start in rivals:
                piece = piece._replace(state=State.DAMAGED, why="its header is damaged, and it may be another's")
            self.pieces[place.key] = piece
            self._progress(min(place.start, self._archive.nbytes))
        for key, named in misnamed.items():
            self._settle(key, named)

    def _rivals(self, layouts: list[Layout]) -> set[int]:
        """Where layouts that are as likely as the first one have payloads of other storages."""
        if len(layouts) == 1:
            return set()
        keys = {place.start: place.key for place in layouts[0].places(self._sizes)}
        return {
            place.start for layout in layouts[1:] for place in layout.places(self._sizes)
            if keys.get(place.start, place.key) != place.key
        }  # fmt: skip

    def _judged(self, place: Place) -> Piece:
        size = self._sizes[place.key]
        piece = Piece(self.folder + place.key, place.start, size, size, False, State.DAMAGED)
        entry = None if self._directory is None else self._directory.entries.get(place.at)
        known = entry is not None and entry.name == piece.record and entry.size == size
        return self._archive.judge(piece, size > 0, (entry.crc,) if known and entry is not None else ())

    def _settle(self, key: str, named: str) -> None:
        """A header in the place of one storage has the name of another: either is damaged, or all of it a copy."""
        piece, own = self.pieces[key], self.pieces.get(named)
        if piece.state is not State.PROVEN or not piece.size:
            return
        entry = self._listed.get(piece.record)
        if (entry is not None and entry.crc == piece.crc) or (
            own is not None and own.state is State.PROVEN and own.crc != piece.crc
        ):
            return  # it is no copy: the name is damaged
        why = f"its header has the name of another record, {self.folder}{named}"
        self.pieces[key] = piece._replace(state=State.DAMAGED, why=why)

    # ------------------------------------------------------------ by the directory

    def _take_listed(self, directory: Directory) -> None:
        """Look where the directory says that each storage is."""
        for entry in directory.entries.values():
            key = self._key(entry.name)
            if key is None:
                continue
            piece = self._archive.listed(directory, entry)
            if piece.size != self._sizes[key]:
                why = f"the directory says {piece.size} bytes, and the pickle {self._sizes[key]}"
                piece = piece._replace(state=State.DAMAGED, why=why)
            elif piece.state is State.PROVEN and not self._agrees(entry.at, entry.name):
                piece = piece._replace(state=State.UNPROVEN, why="nothing confirms the name that the directory gives")
            old = self.pieces.get(key)
            if old is not None and (old.crc, old.size) != (piece.crc, piece.size):
                piece = old._replace(state=State.DAMAGED, why="two records of different contents have its name")
            self.pieces[key] = piece
            self._progress(entry.at)

    def _agrees(self, at: int, name: str) -> bool:
        header = self._archive.header(at)
        return header is not None and header.name == name

    # --------------------------------------------------------------- by their headers

    def _take_met(self, in_order: bool) -> None:
        """Go from header to header, and to the next one there is behind damage, for storages that are not found yet.

        Parameters
        ----------
        in_order : bool
            Whether nothing else was looked at before.
        """
        at: int | None = 0
        while at is not None and at < self._archive.nbytes:
            header = self._archive.header(at)
            after = None if header is None else self._met(header, in_order)
            if after is None or after <= at:
                in_order = False
                after = next(self._archive.signatures(LOCAL, at + 4), None)
            at = after
            self._progress(self._archive.nbytes if at is None else at)

    def _met(self, header: Header, in_order: bool) -> int | None:
        """Take the record of a header; return where it ends, or None if nothing tells."""
        key = self._key(header.name)
        if key is None:
            piece = self._archive.whole(header)
            return None if piece is None or piece.state is State.CUT else piece.end
        size = self._sizes[key]
        old = self.pieces.get(key)
        if old is not None and old.start == header.start:
            return old.end
        if not header.later and header.size != size:
            return None
        piece = Piece(header.name, header.start, size, size, header.deflated, State.DAMAGED)
        piece = self._archive.judge(piece, header.later, () if header.later else (header.crc,))
        if piece.state is State.PROVEN:
            state = State.UNPROVEN if in_order else State.DAMAGED  # it may be of an archive inside a payload
            why = "nothing confirms the name in its header" if in_order else "its record is in an unexpected place"
            self._note(key, piece._replace(state=state, why=why))
        elif old is None and in_order:
            self.pieces[key] = piece
        return None if piece.state is State.CUT and not in_order else piece.end

    def _note(self, key: str, piece: Piece) -> None:
        old = self.pieces.get(key)
        if old is None or not old.whole:
            self.pieces[key] = piece
        elif (old.crc, old.size) != (piece.crc, piece.size) and old.state is State.UNPROVEN:
            self.pieces[key] = old._replace(state=State.DAMAGED, why="two records of different contents have its name")
