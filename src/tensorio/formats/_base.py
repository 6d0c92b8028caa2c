"""What a format is: the interface that `tensorio.formats` and the checkpoint layer rely on.

A format is one module of this package. It translates between the bytes of its
headers and the table of tensors, and knows nothing of other formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tensorio import allowing
from tensorio.pickles import Rules
from tensorio.storage import Storage
from tensorio.tensors import Table

if TYPE_CHECKING:
    from tensorio.plan import Plan

__all__ = ["Format", "OpenOptions", "Opened", "SaveOptions", "StoredRecord"]


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
    """

    name: str
    storage: int
    offset: int
    nbytes: int
    crc32: int | None
    size: int
    deflated: bool = False


@dataclass(frozen=True)
class OpenOptions:
    """How a file is to be read; see `tensorio.open`.

    Attributes
    ----------
    first_row, first_dim : int
        Numbers of the first row and the first cell of its pool of dimensions,
        for a file that is a part of another.
    """

    unknown: str = "error"
    encoding: str | None = None
    allow: tuple[type, ...] = ()
    strict: bool = False
    writable: bool = False
    first_row: int = 0
    first_dim: int = 0

    def rules(self, own: str = "", legacy: bool = False) -> Rules:
        """How the file's pickles are to be read; see `tensorio.pickles.Rules`."""
        allowed = allowing.table(self.allow, opaque=self.unknown == "opaque")
        return Rules(self.unknown, self.encoding, allowed, own, legacy)


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
    fill : callable or None
        ``fill(wanted)`` returns the tree with arrays at its tensors (at those
        whose row is in the set `wanted`, if it is not None).
    """

    format: str
    table: Table
    storages: list[Storage]
    metadata: dict[str, str] | None = None
    tree: object = None
    flat: bool = True
    budget: int = 0
    records: Callable[[], Iterator[StoredRecord]] = field(default=lambda: iter(()))
    fill: Callable[[set[int] | None], Any] | None = None


@dataclass(frozen=True)
class SaveOptions:
    """How a file is to be written; see `tensorio.save`."""

    metadata: dict[str, str] | None = None
    align: int | None = None
    compact: bool = False
    name: str | None = None  # the target's file name, None for a file object


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

    def plan(self, obj: object, options: SaveOptions) -> Plan:
        """Lay out a file that holds `obj` (arrays, torch tensors, and what the format can hold besides)."""
        ...
