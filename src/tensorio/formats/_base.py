"""What a format is: the interface that `tensorio.formats` and the checkpoint layer rely on.

A format is one module of this package. It translates between the bytes of its
headers and the table of tensors, and knows nothing of other formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tensorio import allowing
from tensorio.errors import ChecksumError, LimitError
from tensorio.pickles import SPARE, Maker, Rules
from tensorio.storage.base import Storage
from tensorio.tensors import Table

if TYPE_CHECKING:
    from tensorio.encryption._keys import KeySource
    from tensorio.plan import LaidOut

__all__ = [
    "DELTA_KEY",
    "Format",
    "IncompleteError",
    "OpenOptions",
    "Opened",
    "Room",
    "SaveOptions",
    "StoredRecord",
    "naming_budget",
]

DELTA_KEY = "tensorio.delta"  # in the notes of a file that refers to another for some of its tensors

# What naming the tensors of a tree may cost, in bytes: this much, and so much per byte of its pickles (half of promise
# P3).
NAMES_FIXED = 24 << 20
NAMES_PER_BYTE = 16

# Files within files: real ones are two deep, of a few dozen members, and seldom packed.
MAX_DEPTH = 4
# Bytes of memory for members that must be unpacked before they can be read: this many, and never more than the most.
UNPACKED, UNPACKED_PER_BYTE, UNPACKED_MOST = 64 << 20, 32, 4 << 30
MEMBERS = 1 << 16


def naming_budget(pickled: int) -> int:
    """Return the bytes that naming the tensors may cost; see `tensorio.tree`.

    Parameters
    ----------
    pickled : int
        Bytes of the pickles that the tree was made of.
    """
    return NAMES_FIXED + NAMES_PER_BYTE * pickled


class IncompleteError(Exception):
    """What was asked for is in several files, of which `Format.load` knows one."""


class StoredRecord(NamedTuple):
    """A named byte range of a container, for `verify` and `inspect`.

    Attributes
    ----------
    name : str
    storage : int
    offset, nbytes : int
        Of the bytes as they are in the file.
    crc32 : int or None
        What the container says; None if it says nothing.
    size : int
        Bytes once unpacked (equal to `nbytes` unless deflated).
    deflated : bool
    payload : bool
        Whether tensors may be in it; False for the notes and programs beside them.
    sha256 : str or None
        Hex digits of the bytes' digest, where the file has one.
    """

    name: str
    storage: int
    offset: int
    nbytes: int
    crc32: int | None
    size: int
    deflated: bool = False
    payload: bool = True
    sha256: str | None = None


@dataclass
class Room:
    """What the files within one file may still take, all of them together.

    Attributes
    ----------
    unpacked : int
        Bytes for members that must be unpacked.
    members : int
        How many may be opened.
    """

    unpacked: int = 0
    members: int = 0


@dataclass(frozen=True)
class OpenOptions:
    """How a file is to be read; see `tensorio.open`.

    Attributes
    ----------
    first_row, first_dim : int
        Numbers of the first row and the first cell of its pool of dimensions,
        for a file that is a part of another.
    own : str
        What the names of the file's own classes begin with; see `tensorio.pickles.Rules`.
    depth : int
        How many files this one is within.
    spare : int
        Bytes that its pickles may cost, all of them together, besides what they may cost per byte.
    room : Room
        Shared by all that is within one file.
    maker : Maker or None
        Makes the tensors of what is loaded (not opened), if they are not to be arrays.
    key : KeySource or None
        What to decrypt with.
    tolerate : callable or None
        Is given the error of a record whose checksum differs, and tells whether to go on (files of torch's only).
    """

    unknown: str = "error"
    encoding: str | None = None
    allow: tuple[type, ...] = ()
    strict: bool = False
    writable: bool = False
    first_row: int = 0
    first_dim: int = 0
    own: str = ""
    depth: int = 0
    spare: int = SPARE
    room: Room = field(default_factory=Room, compare=False)
    maker: Maker | None = None
    key: KeySource | None = None
    tolerate: Callable[[ChecksumError], bool] | None = None

    def rules(self, own: str = "", legacy: bool = False) -> Rules:
        """How the file's pickles are to be read; see `tensorio.pickles.Rules`."""
        allowed = allowing.table(self.allow, opaque=self.unknown == "opaque")
        return Rules(self.unknown, self.encoding, allowed, own or self.own, legacy, self.spare, self.maker)

    def within(self, parts: int, nbytes: int) -> OpenOptions:
        """Return the options for each of so many parts of a file of so many bytes."""
        if self.depth >= MAX_DEPTH:
            raise LimitError(f"files within files: over {MAX_DEPTH} levels; unpack the outer ones first")
        room = self.room
        if not self.depth:
            room = Room(min(UNPACKED + UNPACKED_PER_BYTE * nbytes, UNPACKED_MOST), MEMBERS)
        room.members -= parts
        if room.members < 0:
            raise LimitError("files within files: too many of them; unpack the outer one first")
        return replace(self, depth=self.depth + 1, spare=self.spare // max(parts, 1), room=room)


@dataclass
class Opened:
    """What a format makes of a file, without touching its payload.

    Attributes
    ----------
    format : str
    table : Table
        Rows of all tensors; named if `tree` is None.
    storages : list of Storage
        By the storage index of the rows.
    metadata : dict or None
        Free string-to-string notes; None if the file has no place or no word for them.
    tree : object
        Skeleton of what was saved, with `Leaf` at the tensors; None for flat formats.
    flat : bool
        Whether there is no tree: names to tensors, and nothing else.
    budget : int
        Bytes that naming the tree's tensors may cost; see `tensorio.tree`.
    records : callable
        Yields a `StoredRecord` per byte range of the container that holds payload.
    payloads : callable or None
        The same for the files within an archive, whose own records are whole files; None: as `records`.
    fill : callable or None
        ``fill(wanted)`` returns the tree with arrays at its tensors (at those
        whose row is in the set `wanted`, if it is not None).
    skipped : tuple of str
        Names of members that hold nothing that tensorio reads, where the file is an archive of others.
    bases : tuple of str
        Paths of further files that its tensors are in.
    """

    format: str
    table: Table
    storages: list[Storage]
    metadata: dict[str, str] | None = None
    tree: object = None
    flat: bool = True
    budget: int = 0
    records: Callable[[], Iterator[StoredRecord]] = field(default=lambda: iter(()))
    payloads: Callable[[], Iterator[StoredRecord]] | None = None
    fill: Callable[[set[int] | None], Any] | None = None
    skipped: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()


@dataclass(frozen=True)
class SaveOptions:
    """How a file is to be written; see `tensorio.save`.

    Attributes
    ----------
    fetch : callable or None
        Is given a torch storage or contiguous tensor on another device, and returns something whose ``data_ptr()`` is
        the address of a copy of its bytes, or stands for it until the payloads are given other addresses.
    """

    metadata: dict[str, str] | None = None
    align: int | None = None
    compact: bool = False
    name: str | None = None  # the target's file name, None for a file object
    digests: bool = False  # a SHA-256 of each tensor among the notes
    exact: bool = False  # what torch.save would write, NumPy arrays included: nothing is taken for a tensor
    fetch: Callable[[Any], Any] | None = None


class Format(Protocol):
    """One module of this package."""

    NAME: str
    SUFFIXES: tuple[str, ...]  # of the files it writes
    OPENED_BY_SUFFIX: tuple[str, ...]  # that alone make it try a file it does not recognise

    def recognises(self, head: bytes, storage: Storage) -> bool:
        """Tell cheaply, from the first bytes if they say enough, whether the file is meant to be of this format."""
        ...

    def open(self, storage: Storage, options: OpenOptions) -> Opened:
        """Read the header."""
        ...

    def load(self, storage: Storage, options: OpenOptions) -> object:
        """Return what was saved, with arrays at the tensors; the short way past `Opened`."""
        ...

    def plan(self, obj: object, options: SaveOptions) -> LaidOut:
        """Lay out a file that holds `obj` (arrays, torch tensors, and what the format can hold besides)."""
        ...
