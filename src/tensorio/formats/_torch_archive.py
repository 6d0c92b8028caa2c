"""Archives by torch's own writer: records in one folder, side records, pickles that refer to records."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorio import _core
from tensorio.errors import HeaderError, UnsafePickleError, UnsupportedError, error_context, escaped
from tensorio.formats._base import naming_budget
from tensorio.formats._decoded import Decoded
from tensorio.formats._zip import Archive
from tensorio.pickles import Records, Rules
from tensorio.tensors import ROW, Table

if TYPE_CHECKING:
    from tensorio._arrays import Lease
    from tensorio.formats._base import OpenOptions
    from tensorio.pickles import Loaded
    from tensorio.storage.base import Storage

__all__ = ["MAX_PICKLE", "Pickled", "Pickles", "TorchArchive", "joined_refusal"]

VERSIONS = range(1, 11)  # what torch's reader takes
# What a pickle may unpack to if it is deflated: real ones are far below 1% of this.
MAX_PICKLE = 64 << 20
FEW = 8  # pickles that are each given all records
MAX_NOTE = 1 << 20  # bytes of a text beside the tensors


class TorchArchive:
    """The records of an archive that torch's writer made.

    Parameters
    ----------
    writer : str
        What writes such archives, for messages.
    folder : str
        Names below it are kept apart; see `tensorio._core.zip_names`.

    Attributes
    ----------
    prefix : str
        The folder that all records are in; empty if they are in none.
    numbers, keys, others : array of int64, dict, dict
        Record numbers by name: "0", "1", ... below `folder`, others below it,
        and the full names of all others.
    swapped : bool
        Whether its elements are in the other byte order.
    """

    def __init__(self, storage: Storage, options: OpenOptions, writer: str, folder: str = "") -> None:
        self.storage = storage
        self.options = options
        self.archive = Archive(storage, options.tolerate)
        self._writer = writer
        self.prefix = self.find_prefix()
        self.numbers, self.keys, self.others = self.archive.names(self.full(folder) if folder else "")

    def full(self, name: str) -> str:
        """Return the full name of a record."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def find_prefix(self) -> str:
        """Return the folder that the first record is in."""
        if not self.archive.rows:
            raise HeaderError(f"expected the records of {self._writer}, found an empty zip archive")
        name = self.archive.name(0)
        prefix, slash, _ = name.partition("/")
        if not slash:
            raise HeaderError(
                f"expected records in one folder, as {self._writer} writes them, found {escaped(name)} at the top: "
                "this is some other kind of zip archive"
            )
        return prefix

    def require(self, name: str) -> int:
        """Return the number of the record called `name` in the archive's folder."""
        record = self.others.get(self.full(name))
        if record is None:
            raise HeaderError(
                f"expected a record {escaped(self.full(name))}, found none: this zip archive was not written by "
                f"{self._writer}"
            )
        return record

    def text(self, name: str) -> str | None:
        """Return the contents of a small side record; None if there is none."""
        record = self.others.get(self.full(name))
        if record is None:
            return None
        with error_context(record=self.full(name)):
            data = bytes(self.archive.checked(record, 64))
            if len(data) > 64 or not data.isascii():
                raise HeaderError(f"expected a short ASCII text, found {len(data)} bytes")
            return data.decode("ascii")

    def notes(self, folder: str) -> dict[str, str]:
        """Return the contents of the records below a folder, which are text, by their names there."""
        start = self.full(folder)
        found = {}
        for name, record in self.others.items():
            if name.startswith(start) and name != start and self.size(record) <= MAX_NOTE:
                with error_context(record=name):
                    found[name[len(start) :]] = bytes(self.archive.checked(record, MAX_NOTE)).decode("utf-8", "replace")
        return found

    def check_version(self, name: str = "version") -> None:
        """Refuse a version that torch's reader refuses."""
        text = self.text(name)
        if text is None:
            return  # torch always writes one; other writers forget it, and nothing depends on it
        if not text.strip().isdecimal() or int(text) not in VERSIONS:
            raise UnsupportedError(f"expected a version from 1 to 10, found {escaped(text)}", record=self.full(name))

    def is_swapped(self) -> bool:
        """Whether the elements are big-endian."""
        text = self.text("byteorder")
        if text is None:
            return False  # so it is in files before 2.1
        if text not in ("little", "big"):
            raise HeaderError(f"expected 'little' or 'big', found {escaped(text)}", record=self.full("byteorder"))
        return text == "big"

    def size(self, record: int) -> int:
        """Return the bytes of a record, unpacked."""
        return _core.zip_record(self.archive.rows, record)[2]

    def extents(self, swapped: bool) -> array[int]:
        """(storage, offset, nbytes) per record; storage -1 where the bytes are not raw: deflated, or swapped."""
        extents = _core.zip_extents(self.archive.rows)
        if swapped:
            for i in range(0, len(extents), 3):
                extents[i], extents[i + 1] = -1, 0
        return extents

    def decoded(self, swapped: bool, first: int = 1) -> Decoded:
        """Return the storages of records that are not raw."""
        archive, writable = self.archive, self.options.writable
        return Decoded(self.size, archive.read, archive.place, swapped=swapped, writable=writable, first=first)


class Pickled(NamedTuple):
    """A pickle of an archive.

    Attributes
    ----------
    name : str
        Full name of its record.
    record : int
    keys : dict of str to int
        The record of each storage key that it may mention.
    rules : Rules
    """

    name: str
    record: int
    keys: dict[str, int]
    rules: Rules


class _Known(NamedTuple):
    """The records that one pickle is run with, and the archive's numbers of them."""

    records: Records
    numbers: list[int] | range


class Pickles:
    """Pickles of one archive, as one table.

    Parameters
    ----------
    files : TorchArchive
    parts : list of Pickled
    swapped : bool
        Whether the elements are in the other byte order.
    """

    def __init__(self, files: TorchArchive, parts: list[Pickled], swapped: bool) -> None:
        self._files = files
        self._parts = parts
        self._swapped = swapped
        self._extents = files.extents(swapped)
        self._first = [files.options.first_row] * len(parts)  # until they have been counted
        self._known: list[_Known | None] = [None] * len(parts)

    def open(self) -> tuple[list[Any], Table, list[Storage]]:
        """Run all; their objects, with `Leaf` at the tensors, the table, and the storages."""
        options = self._files.options
        rows, dims = array("q"), array("q")
        objects = []
        refused: list[UnsafePickleError] = []
        decoded = self._files.decoded(self._swapped)
        for i in range(len(self._parts)):
            self._first[i] = options.first_row + len(rows) // ROW
            try:
                loaded = self._run(i, None, first_dim=options.first_dim + len(dims))
            except UnsafePickleError as error:
                refused.append(error)
                continue
            decoded.place(loaded.rows, self._known_of(i).numbers)
            objects.append(loaded.obj)
            rows.extend(loaded.rows)
            dims.extend(loaded.dims)
        if refused:
            raise joined_refusal(refused)
        return objects, Table([], rows, dims), [self._files.storage, *decoded.storages]

    def fill(self, wanted: set[int] | None) -> list[Any]:
        """Run all once more; their objects, with arrays at the tensors."""
        leases, decoded = [self._files.storage.lease()], self._files.decoded(self._swapped)
        return [self._run(i, leases, decoded, wanted).obj for i in range(len(self._parts))]

    def budget(self) -> int:
        """Bytes that naming the tensors may cost."""
        return naming_budget(sum(self._files.size(part.record) for part in self._parts))

    def _run(self, i: int, leases: list[Any] | None, decoded: Decoded | None = None, wanted: set[int] | None = None,
             first_dim: int = 0) -> Loaded:  # fmt: skip
        from tensorio import _unpickler

        def decode(record: int, dtype: int) -> Lease:
            assert decoded is not None
            lease: Lease = decoded.lease(known.numbers[record], dtype)
            return lease

        part = self._parts[i]
        with error_context(record=part.name):
            known = self._known_of(i)
            return _unpickler.loads(
                self._bytes(i), known.records, leases=leases, decode=decode, wanted=wanted, rules=part.rules,
                first_row=self._first[i], first_dim=first_dim,
            )  # fmt: skip

    def _bytes(self, i: int) -> memoryview | bytes:
        return self._files.archive.checked(self._parts[i].record, MAX_PICKLE)

    def _known_of(self, i: int) -> _Known:
        """The archive's records, as a pickle is run with them.

        The machine's cost depends on how many it is given: of many pickles,
        each is given those that it mentions.
        """
        known = self._known[i]
        if known is None:
            part = self._parts[i]
            if len(self._parts) <= FEW:
                records = Records(array("q"), part.keys, self._extents)
                known = _Known(records, range(len(self._extents) // 3))
            else:
                known = self._mentioned(i)
            self._known[i] = known
        return known

    def _mentioned(self, i: int) -> _Known:
        from tensorio import _unpickler

        part = self._parts[i]
        loaded = _unpickler.loads(self._bytes(i), None, rules=part.rules)
        keys = [storage.key for storage in loaded.mentioned if storage.key in part.keys]
        numbers = [part.keys[key] for key in keys]
        extents = array("q", [cell for n in numbers for cell in self._extents[3 * n : 3 * n + 3]])
        return _Known(Records(array("q"), {key: n for n, key in enumerate(keys)}, extents), numbers)


def joined_refusal(refused: list[UnsafePickleError]) -> UnsafePickleError:
    """Return the first error, with the names of all."""
    first = refused[0]
    names = tuple(dict.fromkeys(name for error in refused for name in error.globals))
    if len(names) > len(first.globals):
        first.message += f"; {len(names) - len(first.globals)} more names are refused in other records (see .globals)"
        first.globals = names
    return first
