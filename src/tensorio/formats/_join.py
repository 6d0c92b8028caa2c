"""Several opened files as one: rows in one table, storages in one list, trees side by side."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tensorio import _core, formats
from tensorio._unpickler import Leaf
from tensorio.errors import LimitError, TensorIOError, UnsafePickleError, UnsupportedError
from tensorio.formats._base import NAMES_FIXED, Opened, OpenOptions
from tensorio.formats._torch_archive import joined_refusal
from tensorio.storage.base import LazyStorage
from tensorio.storage.ranges import RangeStorage
from tensorio.tensors import ROW, Table

if TYPE_CHECKING:
    from tensorio.formats._base import StoredRecord
    from tensorio.formats._zip import Archive
    from tensorio.storage.base import Storage

__all__ = ["Joined", "member_context", "member_storage"]

_DIMS, _STORAGE, _OFFSET = 3, 4, 5  # fields of a row, csrc/table.h


class Joined:
    """The parts of a file that are files themselves.

    Parameters
    ----------
    storage : Storage
        The file; members that are not packed are ranges of it, and their rows count from its start.
    options : OpenOptions
        As the file's own reader was given them.

    Attributes
    ----------
    rows, dims : array of int64
        Of all parts so far, numbered from ``options.first_row`` and ``options.first_dim``; the reader may append
        rows of its own.
    storages : list of Storage
        Begins with the file.
    metadata : dict of str to str
        Notes of the parts, below their names.
    """

    def __init__(self, storage: Storage, options: OpenOptions) -> None:
        self.rows = array("q")
        self.dims = array("q")
        self.storages: list[Storage] = [storage]
        self.metadata: dict[str, str] = {}
        self._indexes = {id(storage): 0}
        self._options = options
        self._parts: list[tuple[str, Opened, int]] = []
        self._refused: list[UnsafePickleError] = []

    def add(self, name: str, storage: Storage, options: OpenOptions) -> Any:
        """Open a member and append it; return its tree.

        Parameters
        ----------
        name : str
            What to call it in messages and notes.
        options : OpenOptions
            From `OpenOptions.within`.

        Notes
        -----
        A member that names what is not allowed is kept for `finish`, which
        raises one error for all of them.
        """
        numbered = replace(options, first_row=self._next_row, first_dim=self._next_dim)
        with member_context(name):
            try:
                opened = formats.of_storage(storage, None, name).open(storage, numbered)
            except UnsafePickleError as error:
                error.record = _within(name, error.record)
                self._refused.append(error)
                return None
            return self.append(name, opened)

    def append(self, name: str, opened: Opened) -> Any:
        """Append what was opened already; return its tree.

        Parameters
        ----------
        opened : Opened
            If it is not flat, its rows are numbered from the next on.
        """
        first_row = self._next_row
        rows = self._shifted(opened, self._next_dim if opened.flat else 0)
        self.rows.extend(rows)
        self.dims.extend(opened.table.dims)
        self._parts.append((name, opened, first_row))
        self.metadata.update((f"{name}.{key}", value) for key, value in (opened.metadata or {}).items())
        if opened.flat:
            return {fqn: Leaf(first_row + i) for i, fqn in enumerate(opened.table.names)}
        return opened.tree

    @property
    def _next_row(self) -> int:
        return self._options.first_row + len(self.rows) // ROW

    @property
    def _next_dim(self) -> int:
        return self._options.first_dim + len(self.dims)

    def _place(self, storage: Storage) -> tuple[int, int]:
        """The index of a part's storage among all, and where it begins in it."""
        start = 0
        if isinstance(storage, RangeStorage):
            part, whole = storage, self.storages[0]
            if isinstance(whole, RangeStorage) and part.whole is whole.whole:
                return 0, part.offset - whole.offset
            storage, start = part.whole, part.offset
        index = self._indexes.setdefault(id(storage), len(self.storages))
        if index == len(self.storages):
            self.storages.append(storage)
        return index, start

    def _shifted(self, opened: Opened, dims: int) -> array[int]:
        """A part's rows as rows of the whole."""
        if len(opened.table.chunks):
            raise UnsupportedError("a checkpoint of several files within a file is not read in this version")
        places = [self._place(storage) for storage in opened.storages]
        rows = opened.table.rows[:]
        for at in range(0, len(rows), ROW):
            index, start = places[rows[at + _STORAGE]]
            rows[at + _DIMS] += dims
            rows[at + _STORAGE] = index
            rows[at + _OFFSET] += start
        return rows

    def row(self, leaf: Leaf) -> array[int]:
        """Return the row that a leaf of a part stands for."""
        at = (leaf.row - self._options.first_row) * ROW
        return self.rows[at : at + ROW]

    def finish(self) -> None:
        """Raise the error for all names that were refused, if any were."""
        if self._refused:
            raise joined_refusal(self._refused)

    def table(self) -> Table:
        """Return the rows of all parts as a table."""
        return Table([], self.rows, self.dims)

    @property
    def budget(self) -> int:
        """Bytes that naming the tensors of all parts may cost."""
        return NAMES_FIXED + sum(max(0, opened.budget - NAMES_FIXED) for _, opened, _ in self._parts)

    def fill(self, wanted: set[int] | None) -> list[Any]:
        """Return the parts' trees with arrays at their tensors, in the order in which they were added."""
        return [_filled(opened, first_row, wanted) for _, opened, first_row in self._parts]

    def records(self) -> Iterator[StoredRecord]:
        """Yield the records of the parts, as records of the whole."""
        for name, opened, _ in self._parts:
            places = [self._place(storage) for storage in opened.storages]
            for record in opened.records():
                index, start = places[record.storage]
                yield record._replace(name=_within(name, record.name), storage=index, offset=record.offset + start)


def _filled(opened: Opened, first_row: int, wanted: set[int] | None) -> Any:
    if opened.fill is not None:
        return opened.fill(wanted)
    from tensorio import _arrays

    table = opened.table
    arrays = _arrays.views(table.rows, table.dims, [storage.lease() for storage in opened.storages])
    return {fqn: array if wanted is None or first_row + i in wanted else Leaf(first_row + i)
            for i, (fqn, array) in enumerate(zip(table.names, arrays, strict=True))}  # fmt: skip


@contextmanager
def member_context(name: str) -> Iterator[None]:
    """Name the member in an error that rises through; offsets count from its start."""
    try:
        yield
    except TensorIOError as error:
        error.record = _within(name, error.record)
        raise


def _within(name: str, record: str | None) -> str:
    return name if record is None else f"{name}: {record}"


def member_storage(archive: Archive, record: int, options: OpenOptions) -> Storage:
    """Return the bytes of a record as a storage of its own: a range of the archive, or memory made on first use.

    Parameters
    ----------
    options : OpenOptions
        From `OpenOptions.within`; what is unpacked is taken from its room.
    """
    offset, compressed, size, _, method, _ = _core.zip_record(archive.rows, record)
    if method == 0:
        return RangeStorage(archive.storage, offset, compressed)
    options.room.unpacked -= size
    if options.room.unpacked < 0:
        raise LimitError(
            "members that unpack to far more bytes than the file has; unpack the archive first",
            record=archive.name(record),
        )
    return LazyStorage(
        size, lambda: archive.read(record), writable=options.writable, source=(archive.storage, offset, compressed)
    )
