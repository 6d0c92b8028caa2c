"""The walk over what is left of a torch zip: which payload is whose, when the storages' names and sizes are known.

A name is not covered by any checksum. It is believed if two places agree on it:
the local header, the central directory, and the order in which torch writes
storages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from tensorio._core import ZIP_ALIGN, ZIP_ALIGN_MAX
from tensorio.formats._salvage import Damaged
from tensorio.formats._salvage_parts import (
    CENTRAL,
    LOCAL,
    MASKED,
    Directory,
    Entry,
    Header,
    Piece,
    State,
    descriptor_size,
)

if TYPE_CHECKING:
    Progress = Callable[[int], object]

__all__ = ["Walk"]

PICKLE = "data.pkl"
FOLDER = "data/"
ALIGNMENT, BYTEORDER = ".storage_alignment", "byteorder"
SIDE = (".format_version", ALIGNMENT, BYTEORDER, "version", ".data/serialization_id")
SIDE_MAX = 4096  # bytes between the payload of a side record and its end
TEXT_MAX = 64  # bytes of side records that are kept
LOCAL_SIZE, NARROW = 30, 16  # bytes of a local header and of a descriptor
# What torch may have been told to align payloads to; 64 if it was not.
ALIGNS = (ZIP_ALIGN, *(1 << i for i in range(16) if 1 << i != ZIP_ALIGN))
# From how many records with unexpected names on the archive has no order of torch's, if they are the most.
UNORDERED = 3
# How many records in order outweigh one with an unexpected name.
OUTWEIGH = 8


class Order:
    """The orders in which torch has written storages: as the pickle mentions them (since 2.7), and by name.

    Parameters
    ----------
    sizes : dict of str to int
        Bytes of each storage, as the pickle mentions them.
    beside : int
        Bytes that the shortest record takes beside its payload and its key.
    """

    def __init__(self, sizes: dict[str, int], beside: int) -> None:
        keys = list(sizes)
        by_name = sorted(keys)
        self._keys = [keys] if by_name == keys else [keys, by_name]
        self._places = [dict(zip(keys, range(len(keys)), strict=True)) for keys in self._keys]
        self._before = [_sums([sizes[key] + len(key) + beside for key in keys]) for keys in self._keys]
        self._last = [-1] * len(self._keys)
        self.confirmed = 0

    @property
    def started(self) -> bool:
        """Whether any storage was met."""
        return max(self._last) >= 0

    def expected(self) -> list[str]:
        """Return the keys that may come next."""
        return list(dict.fromkeys(keys[last + 1] for keys, last in zip(self._keys, self._last, strict=True)
                                  if last + 1 < len(keys)))  # fmt: skip

    def before(self, key: str) -> list[str]:
        """Return the keys that may stand in front of another one."""
        places = [(keys, places[key]) for keys, places in zip(self._keys, self._places, strict=True)]
        return list(dict.fromkeys(keys[place - 1] for keys, place in places if place))

    def fits(self, key: str, room: int | None) -> bool:
        """Tell whether `key` may come now: next; or, behind a gap of `room` bytes, those left out being in the gap."""
        return any(self._fits(i, key, room) for i in range(len(self._keys)))

    def _fits(self, i: int, key: str, room: int | None) -> bool:
        place, due = self._places[i][key], self._last[i] + 1
        if room is None:
            return place == due
        return place >= due and self._before[i][place] - self._before[i][due] <= room

    def ahead(self) -> list[list[str]]:
        """Return the keys that are still to come, in each order that may be the file's."""
        return [keys[last + 1 :] for keys, last in zip(self._keys, self._last, strict=True)]

    def follow(self, i: int, key: str) -> None:
        """Go on behind `key` in the order of this number, which is the file's."""
        self._keys, self._places, self._before = [self._keys[i]], [self._places[i]], [self._before[i]]
        self._last = [self._places[0][key]]
        self.confirmed += 1

    def take(self, key: str, room: int | None) -> None:
        """Go on behind `key`; one that does not fit counts as the one that was due."""
        good = [i for i in range(len(self._keys)) if self._fits(i, key, room)]
        if not good:
            self._last = [min(last + 1, len(keys) - 1) for last, keys in zip(self._last, self._keys, strict=True)]
            return
        self.confirmed += 1
        self._keys = [self._keys[i] for i in good]
        self._places = [self._places[i] for i in good]
        self._before = [self._before[i] for i in good]
        self._last = [places[key] for places in self._places]


def _rank(reading: Reading, piece: Piece) -> tuple[bool, bool, bool, bool]:
    """The better of two readings of one place ranks higher."""
    return piece.state is State.PROVEN, reading.confirmed, piece.whole, piece.end is not None


def _sums(values: list[int]) -> list[int]:
    out = [0]
    for value in values:
        out.append(out[-1] + value)
    return out


class Source(Enum):
    """Who says which record begins at a place."""

    HEADER = 1
    DIRECTORY = 2
    ORDER = 3


class Reading(NamedTuple):
    """One way to read what is at a place: as the record of `key`; `confirmed` if two sources say so."""

    source: Source
    key: str
    start: int
    deflated: bool
    later: bool
    crcs: tuple[int, ...]
    confirmed: bool
    size: int | None = None  # if the source says


class Doubt(NamedTuple):
    """A payload that is proven, under a name that nothing else confirms, where one of `due` was expected."""

    key: str
    due: list[str]
    piece: Piece


class Walk:
    """One walk, or several, over a file.

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
    pieces : dict of str to Piece
        By key.
    texts : dict of str to bytes
        Contents of the side records.
    central : int or None
        Where the central directory was met.
    """

    def __init__(
        self, archive: Damaged, prefix: str, sizes: dict[str, int], pickle: Piece, directory: Directory | None
    ) -> None:
        self.archive = archive
        self.prefix = prefix
        self.folder = f"{prefix}/{FOLDER}"
        self.sizes = sizes
        self.directory = directory
        self.pieces: dict[str, Piece] = {}
        self.texts: dict[str, bytes] = {}
        self.central: int | None = None
        self._pickle = pickle
        self._proven = 0
        self._aligns = [align for align in ALIGNS if pickle.start % align == 0]
        self._restart()

    def _restart(self) -> None:
        self._order = Order(self.sizes, LOCAL_SIZE + len(self.folder.encode()))
        self._doubts: list[Doubt] = []
        self._misfits = 0
        self._linked = True  # whether what comes next follows the record that came before it in torch's order
        self._displaced = False  # whether the records are not where torch would have put them

    @property
    def proven(self) -> bool:
        """Whether nothing is left to look for."""
        return self._proven == len(self.sizes)

    @property
    def _unordered(self) -> bool:
        """Whether the records that don't come as torch orders them are the most."""
        odd = len(self._doubts) + self._misfits
        return odd >= UNORDERED and odd > self._order.confirmed

    @property
    def align(self) -> int | None:
        """What torch put payloads at multiples of; None if the records are not laid out by torch."""
        return self._aligns[0] if self._aligns else None

    def _learn(self, at: int, start: int, key: str) -> None:
        """Keep to the alignments that put the payload of a record at `at` where it is."""
        self._aligns = [align for align in self._aligns if self._placed(at, key, align) == start]

    # ---------------------------------------------------------------- the walk

    def run(self, progress: Progress | None = None) -> None:
        """Go through the file once; each byte of a payload is read once, or a few times where records are damaged."""
        self._restart()
        at: int | None = 0
        while at is not None and at < self.archive.nbytes:
            if self.archive.has(CENTRAL, at):
                self.central = at
                if self.proven:
                    break
            after = self._step(at, None)
            at = self._search(at) if after is None or after <= at else after
            if progress is not None and at is not None:
                progress(at)
        self._settle_doubts()

    def _search(self, lost: int) -> int | None:
        """The thread is lost: find it again, and return where the record behind that place begins.

        The directory knows the places of all records; so does torch's layout, which leaves no choice. Where both are
        of no help, a header will do whose record may come now.
        """
        for at in () if self.directory is None else self.directory.beyond(lost):
            after = self._step(at, lost)
            if after is not None and after > at:
                self._displaced = False
                return after
        if self._linked and self.align is not None and not self._displaced:
            places = [lost] if self._order.started else self._first_places(self.align)
            for place in places:
                after = self._leap(place, lost, self.align)
                if after is not None:
                    return after
            self._displaced = self._order.started
        for at in self.archive.signatures(LOCAL, lost + 1):
            after = self._step(at, lost)
            if after is not None and after > at:
                return after
        return None

    def _first_places(self, align: int) -> list[int]:
        """Where the header of the first storage may be: behind the pickle and the side records of three times."""
        byteorders = ([(BYTEORDER, 6)], [(BYTEORDER, 3)])
        recent = [(".format_version", 1), (ALIGNMENT, len(str(align)))]
        places = []
        for records in (*(recent + record for record in byteorders), *byteorders, []):
            at = self._pickle.end or 0
            for name, size in records:
                at = self._start_of(at, f"{self.prefix}/{name}", size, align) + size + NARROW
            places.append(at)
        return places

    def _leap(self, place: int, lost: int, align: int) -> int | None:
        """Go to the next record that is where torch puts it if the storage that is due has its header at `place`.

        Each place takes more bytes than looking at it takes steps, so that all of this takes time linear in the gap.
        """
        for i, keys in enumerate(self._order.ahead()):
            at = place
            for key in keys:
                start, size = self._placed(at, key, align), self.sizes[key]
                if at > lost:
                    header = self.archive.header(at)
                    named = header is not None and self._key(header.name) == key and header.start == start
                    reading = Reading(Source.ORDER, key, start, False, size > 0, (), True)
                    unnamed = header is None and size > 0 and self._order.started
                    piece = self._judged(reading) if named or unnamed else None
                    if piece is not None and (named or piece.state is State.PROVEN):
                        self._order.follow(i, key)
                        self._note(key, piece)
                        self._look_back(at, lost, key)
                        return self._behind(reading, piece)
                at = start + size + descriptor_size(at, size)
                if at >= self.archive.nbytes:
                    break
        return None

    def _step(self, at: int, lost: int | None) -> int | None:
        """Take the record at `at`; where the next one begins, or None if there is none here that can be relied on.

        Parameters
        ----------
        lost : int or None
            Where the thread was lost, if it was.
        """
        header = self.archive.header(at)
        entry = None if self.directory is None else self.directory.entries.get(at)
        room = None if lost is None else at - lost
        best: tuple[Reading, Piece] | None = None
        for reading in self._readings(at, header, entry, room):
            if reading.source is Source.ORDER and best is not None and best[1].state is State.PROVEN:
                break  # under another name
            piece = self._judged(reading)
            if self._accepts(reading, piece, lost is not None) and (
                best is None or _rank(reading, piece) > _rank(*best)
            ):
                best = reading, piece
                if reading.confirmed and piece.state is State.PROVEN:
                    break
        if best is not None:
            if best[0].source is Source.HEADER and header is not None:
                self._learn(at, header.start, best[0].key)
            after = self._take(*best, room)
            if lost is not None and best[0].confirmed:
                self._look_back(at, lost, best[0].key)
            return after
        if header is None or self._key(header.name) is not None:
            return None
        return self._pass(header, lost is not None)

    def _readings(self, at: int, header: Header | None, entry: Entry | None, room: int | None) -> Iterator[Reading]:
        """Yield the ways to read what is at `at`, the likeliest first."""
        named = None if header is None else self._key(header.name)
        listed = None if entry is None else self._key(entry.name)
        aligned = header is not None and (room is None or self.align is None or header.start % self.align == 0)
        if named is not None and header is not None and (aligned or named == listed):
            crcs = () if header.later else (header.crc,)
            if named == listed and entry is not None:
                crcs = (*crcs, entry.crc)
            yield Reading(Source.HEADER, named, header.start, header.deflated, header.later, crcs,
                          named == listed or self._order.fits(named, room),
                          None if header.later else header.size)  # fmt: skip
        if listed is not None and entry is not None:
            assert self.directory is not None
            start = self.directory.start(entry) if header is None else header.start
            confirmed = self._order.fits(listed, room) or (named is None and self._unordered)
            yield Reading(
                Source.DIRECTORY, listed, start, entry.deflated, entry.later, (entry.crc,), confirmed, entry.size
            )
        side = header is not None and self._is_side(header.name)
        if room is None and self._linked and self.align is not None and not side:
            for key in self._order.expected():
                if listed in (None, key):
                    start = self._placed(at, key, self.align)
                    crcs = () if entry is None or listed is None else (entry.crc,)
                    yield Reading(Source.ORDER, key, start, False, self.sizes[key] > 0, crcs, True)

    def _key(self, name: str) -> str | None:
        """The storage whose record has this name."""
        key = name[len(self.folder) :]
        return key if key in self.sizes and name.startswith(self.folder) else None

    def _is_side(self, name: str) -> bool:
        return name.startswith(self.prefix) and name[len(self.prefix) + 1 :] in (*SIDE, PICKLE)

    def _placed(self, at: int, key: str, align: int) -> int:
        """Where torch puts the payload of a record whose header is at `at`."""
        return self._start_of(at, self.folder + key, self.sizes[key], align)

    @staticmethod
    def _start_of(at: int, name: str, size: int, align: int) -> int:
        start = at + LOCAL_SIZE + len(name.encode()) + 4
        if size >= MASKED or at >= MASKED:
            start += 4 + (16 if size >= MASKED else 0) + (8 if at >= MASKED else 0)
        return -(-start // align) * align

    def _look_back(self, at: int, lost: int, key: str) -> None:
        """The record in front of a gap's end may have lost no more than its header: take it by its descriptor."""
        told, due = self.archive.before(at, lost), self._order.before(key)
        if told is None or len(due) != 1 or due[0] in self.pieces or self.sizes[due[0]] != told[1]:
            return
        piece = Piece(self.folder + due[0], told[0], told[1], told[1], False, State.DAMAGED)
        piece = self.archive.judge(piece, True, ())
        if piece.state is State.PROVEN and (self.align is None or piece.start % self.align == 0):
            self._note(due[0], piece)

    # --------------------------------------------------------------- judgement

    def _judged(self, reading: Reading) -> Piece:
        size = self.sizes[reading.key]
        piece = Piece(self.folder + reading.key, reading.start, size, size, reading.deflated, State.DAMAGED)
        if reading.size not in (None, size):
            return piece._replace(why=f"its header says {reading.size} bytes, and the pickle {size}")
        return self.archive.judge(piece, reading.later, reading.crcs)

    def _accepts(self, reading: Reading, piece: Piece, searching: bool) -> bool:
        """Whether a reading can be relied on, whatever the state of the payload is."""
        by_itself = piece.state is State.PROVEN and piece.size > 0
        if not reading.confirmed:
            return by_itself and (not searching or self._unordered)
        if piece.state is State.CUT:
            return reading.source is Source.HEADER and not searching
        if reading.source is Source.HEADER and not searching:
            return True
        return piece.end is not None or by_itself

    def _take(self, reading: Reading, piece: Piece, room: int | None) -> int:
        """Note a payload; return where the next record should begin."""
        key = reading.key
        self._linked = reading.confirmed
        if reading.confirmed:
            if self._displaced and piece.state is State.PROVEN:
                piece = piece._replace(state=State.UNPROVEN, why="it is not where torch would have put it")
            self._note(key, piece)
        elif piece.state is State.PROVEN:
            self._doubts.append(Doubt(key, self._order.expected() if room is None else [], piece))
        self._misfits += reading.confirmed and not self._order.fits(key, room)
        self._order.take(key, room)
        return self._behind(reading, piece)

    def _behind(self, reading: Reading, piece: Piece) -> int:
        """Where the record behind a payload begins, by what stands there or by what should."""
        if piece.end is not None:
            return piece.end
        return piece.start + piece.compressed + (descriptor_size(piece.start, piece.compressed) if reading.later else 0)

    def _note(self, key: str, piece: Piece) -> None:
        old = self.pieces.get(key)
        if old is not None and State.PROVEN in (old.state, piece.state) and old.state is not piece.state:
            piece = old if old.state is State.PROVEN else piece
        elif old is not None and piece.state is State.PROVEN and (old.crc, old.size) != (piece.crc, piece.size):
            piece = old._replace(state=State.DAMAGED, why="two records of different contents have its name")
        elif old is not None:
            piece = old
        self.pieces[key] = piece
        self._proven += (piece.state is State.PROVEN) - (old is not None and old.state is State.PROVEN)

    def _settle_doubts(self) -> None:
        """Decide about payloads that are proven under an unexpected name: it may be damaged, or there is no order."""
        unordered = self._unordered
        ordered = self._order.confirmed >= OUTWEIGH * len(self._doubts)
        for key, due, piece in self._doubts:
            missing = [other for other in due if other not in self.pieces and self.sizes[other] == piece.size]
            own = self.pieces.get(key)
            # Where the real one is elsewhere and of other contents, this is no copy of it: the name is damaged.
            misnamed = own is not None and own.state is State.PROVEN and own.crc != piece.crc
            if ordered and misnamed and len(missing) == 1:
                self._note(missing[0], piece._replace(record=self.folder + missing[0]))
            elif own is None:
                why = "nothing confirms the name in its header"
                self._note(key, piece._replace(state=State.UNPROVEN if unordered else State.DAMAGED, why=why))

    # ----------------------------------------------------------- other records

    def _pass(self, header: Header, searching: bool) -> int | None:
        """Go past a record that is no storage; None if nothing tells where it ends."""
        prefix, _, name = header.name.partition("/")
        if header.start == self._pickle.start:
            return self._pickle.end or self._pickle.start + self._pickle.compressed + NARROW
        side = prefix == self.prefix and name in SIDE
        if searching and (not side or self._order.started):
            return None
        piece = self.archive.whole(header, end=header.start + SIDE_MAX if side else None)
        if piece is None or piece.state is State.CUT:
            return None
        self._linked &= side
        if side and piece.size <= TEXT_MAX and not piece.deflated and piece.whole:
            text = bytes(self.archive.view[piece.start : piece.start + piece.size])
            self.texts.setdefault(name, text)
            if name == ALIGNMENT and text.isdigit() and 1 <= int(text) <= ZIP_ALIGN_MAX and not self._order.started:
                self._aligns = [int(text)] if self._pickle.start % int(text) == 0 else []
        return None if searching else piece.end  # it may be one of an archive inside a payload
