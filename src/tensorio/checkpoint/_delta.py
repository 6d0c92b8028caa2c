"""Deltas: ``.safetensors`` files with the tensors that changed since another file, their base, and a note on the rest.

The note is the value of ``tensorio.delta`` in the file's metadata, JSON::

    {"version": 1,
     "base": "step-100.safetensors",          a file in the same folder; it may be a delta itself
     "fingerprint": "9f86d0...",              of the base, see `fingerprint`
     "unchanged": {"wte.weight": "8c736521", ...}}

"unchanged" has the tensors that are as they are in the base, each with the
CRC-32 of its bytes. Tensors of the base that are neither there nor in the file
are gone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorio import formats
from tensorio.checkpoint._loading import settle
from tensorio.checkpoint._manifest import is_plain_name
from tensorio.encryption._header import is_encrypted
from tensorio.encryption._opening import head_of, refuse_without_key, unlocked
from tensorio.errors import (
    ChecksumError,
    DecryptionError,
    FormatError,
    HeaderError,
    LimitError,
    TruncatedError,
    UnsupportedError,
    error_context,
    escaped,
)
from tensorio.formats._base import DELTA_KEY, Opened, StoredRecord
from tensorio.formats._digests import digests_in
from tensorio.formats._strict_json import parse
from tensorio.storage.opening import open_storage
from tensorio.tensors import ROW, Table

if TYPE_CHECKING:
    from tensorio.formats._base import OpenOptions
    from tensorio.storage.base import Storage

__all__ = ["CHAIN_MAX", "Note", "fingerprint", "is_delta", "with_bases"]

# Files of a chain; each is opened when the last one is. A save every hour, and a whole one every other day.
CHAIN_MAX = 64
# What is looked at of the payload: so many tensors, spread over the file, and so many bytes of each in three places.
SAMPLED, WINDOW = 1024, 64
_DIMS, _STORAGE = 3, 4  # fields of a row, csrc/table.h


class Note(NamedTuple):
    """What a delta says of its base.

    Attributes
    ----------
    base : str
        Name of a file in the same folder.
    fingerprint : str
        Of that file.
    unchanged : dict of str to int
        Tensors of the base that are this file's, too, and the CRC-32 of their bytes.
    """

    base: str
    fingerprint: str
    unchanged: dict[str, int]

    def text(self) -> str:
        """The value of `DELTA_KEY`."""
        sums = {name: f"{crc:08x}" for name, crc in self.unchanged.items()}
        note = {"version": 1, "base": self.base, "fingerprint": self.fingerprint, "unchanged": sums}
        return json.dumps(note, separators=(",", ":"))


def is_delta(opened: Opened) -> bool:
    """Tell whether a file refers to another for some of its tensors."""
    return opened.format == "safetensors" and DELTA_KEY in (opened.metadata or {})


def _note_of(metadata: Mapping[str, str]) -> Note:
    """Read the note of a delta, which may be from a stranger.

    Raises
    ------
    HeaderError
        It is none.
    UnsupportedError
        A later version's.
    """
    note = parse(metadata[DELTA_KEY].encode())
    if isinstance(note, dict) and type(version := note.get("version")) is int and version != 1:
        raise UnsupportedError(f"{DELTA_KEY}: version {str(version)[:20]} is not known here, only 1 is")
    fields = {"version", "base", "fingerprint", "unchanged"}
    if not isinstance(note, dict) or set(note) != fields or type(note["version"]) is not int:
        raise HeaderError(f"{DELTA_KEY}: expected version, base, fingerprint and unchanged")
    base, mark, sums = note["base"], note["fingerprint"], note["unchanged"]
    if not is_plain_name(base):
        raise HeaderError(f"{DELTA_KEY}: expected the name of a file in the same folder, found {escaped(base)}")
    if not _is_hex(mark, 64) or not isinstance(sums, dict) or not all(_is_hex(crc, 8) for crc in sums.values()):
        raise HeaderError(f"{DELTA_KEY}: expected checksums in hexadecimal digits")
    return Note(base, mark, {name: int(crc, 16) for name, crc in sums.items()})


def _is_hex(text: object, digits: int) -> bool:
    return isinstance(text, str) and len(text) == digits and re.fullmatch("[0-9a-f]+", text) is not None


def fingerprint(storage: Storage, table: Table) -> str:
    """Return what a file is told by when a delta of it is opened: SHA-256 in hexadecimal digits.

    Over its size, its header, and bytes out of its payload: 64 from the start,
    the middle and the end of each of at most 1,024 tensors. Two steps of a
    training run have the same size and header.

    Parameters
    ----------
    storage : Storage
        Of a ``.safetensors`` file.
    table : Table
        Of what is in it.
    """

    def part(offset: int, nbytes: int) -> memoryview:
        return storage.view_for(offset, nbytes)[offset : offset + nbytes]

    digest = hashlib.sha256(storage.nbytes.to_bytes(8, "little"))
    digest.update(part(0, 8 + int.from_bytes(part(0, 8), "little")))
    extents = [extent for row in range(len(table)) if (extent := table.extent_of(row))[1]]
    for i in range(min(len(extents), SAMPLED)):
        offset, nbytes = extents[i * len(extents) // min(len(extents), SAMPLED)]
        for at in (0, max(nbytes - WINDOW, 0) // 2, max(nbytes - WINDOW, 0)):
            digest.update(part(offset + at, min(WINDOW, nbytes - at)))
    return digest.hexdigest()


# ------------------------------------------------------------------------- opening


class _Link(NamedTuple):
    """An opened file of a chain."""

    path: str
    opened: Opened
    note: Note | None


def with_bases(opened: Opened, path: str | None, mmap: bool | str, options: OpenOptions) -> Opened:
    """Return a delta together with the files it refers to.

    Parameters
    ----------
    opened : Opened
        Its storage is the caller's to close if this fails; those of the bases are closed.
    path : str or None
    mmap, options
        How the bases are to be read: with a key, all of them are encrypted.

    Raises
    ------
    TruncatedError
        A base is not there.
    ChecksumError
        A base is not the file that it was when the delta was saved.
    FormatError
        A note is wrong, or the chain is longer than `CHAIN_MAX`.
    DecryptionError
        A base is encrypted, and there is no key or not the right one; or it is not, although there is a key.
    UnsupportedError
        There is no path to find the base by; or single tensors of a file are encrypted.
    """
    _require_whole(opened)
    note = _note_of(opened.metadata or {})
    if path is None:
        raise UnsupportedError(
            f"it has only what changed since {escaped(note.base)}; open it by its path, with that file beside it"
        )
    chain = [_Link(path, opened, note)]
    try:
        while (last := chain[-1]).note is not None:
            if len(chain) >= CHAIN_MAX:
                raise LimitError(f"a delta of over {CHAIN_MAX} files, one on the other")
            if last.note.base in {os.path.basename(link.path) for link in chain}:
                raise HeaderError(f"{DELTA_KEY}: the chain of bases leads back to {escaped(last.note.base)}")
            chain.append(_base_of(last.path, last.note, mmap, options))
        return _joined(chain)
    except BaseException:
        for link in chain[1:]:
            link.opened.storages[0].close()
        raise


def _base_of(path: str, note: Note, mmap: bool | str, options: OpenOptions) -> _Link:
    """Open the base of a delta, and make sure that it is the one."""
    beside = _beside(path, note.base)
    try:
        storage, _, _ = open_storage(beside, writable=options.writable, local=True)
    except FileNotFoundError:
        raise TruncatedError(
            f"the rest of its tensors is in {escaped(note.base)}, which is not there; put that file back beside it",
            path=path,
        ) from None
    try:
        with error_context(path=beside):
            storage, base = _opened_base(storage, note, options)
            inner = _note_of(base.metadata or {}) if is_delta(base) else None
            _require_same(path, note, fingerprint(storage, base.table))
            settle(storage, mmap, None, whole=False)
            storage.check_unchanged()
    except FormatError as error:
        storage.close()
        if not isinstance(error, ChecksumError | DecryptionError):
            _require_same(path, note, "")
        raise
    except BaseException:
        storage.close()
        raise
    return _Link(beside, base, inner)


def _opened_base(storage: Storage, note: Note, options: OpenOptions) -> tuple[Storage, Opened]:
    """Open a base, and decrypt it if the delta was encrypted; its fingerprint does not prove every byte of it."""
    if options.key is None:
        refuse_without_key(storage)
    elif not is_encrypted(head_of(storage)):
        raise DecryptionError(
            f"its delta is encrypted, but {escaped(note.base)} is not: it may have been replaced; encrypt it with the "
            "same key, under the same name"
        )
    storage, options = unlocked(storage, options)
    base = formats.get("safetensors").open(storage, options)
    _require_whole(base)
    return storage, base


def _require_whole(opened: Opened) -> None:
    """Refuse files of a chain whose tensors are not all in the bytes of the file."""
    if len(opened.storages) != 1:
        raise UnsupportedError(
            "single tensors of a delta, or of its base, can't be encrypted: convert it to a whole file first, or "
            "encrypt all of each file"
        )


def _beside(path: str, name: str) -> str:
    """A file in the folder of another; if that is a link, perhaps of the file it leads to."""
    found = os.path.join(os.path.dirname(path), name)
    if not os.path.lexists(found) and os.path.islink(path):
        return os.path.join(os.path.dirname(os.path.realpath(path)), name)
    return found


def _require_same(path: str, note: Note, found: str) -> None:
    if found != note.fingerprint:
        raise ChecksumError(
            f"its base {escaped(note.base)} is another file than when it was saved: fingerprint "
            f"{note.fingerprint[:12]}... expected, {found[:12] or 'none'} found; put that file back beside it",
            path=path, expected=int(note.fingerprint, 16), actual=int(found or "0", 16),
        )  # fmt: skip


def _joined(chain: list[_Link]) -> Opened:
    """One table over the files of a chain, the delta first."""
    places: dict[str, tuple[int, int]] = {}  # number of the file, row in its table
    for number, (path, opened, note) in reversed(list(enumerate(chain))):
        unchanged = () if note is None else note.unchanged
        with error_context(path=path):
            missing = next((name for name in unchanged if name not in places), None)
            if missing is not None:
                raise HeaderError(f"{DELTA_KEY}: the base has no such tensor", record=missing)
            twice = next((name for name in unchanged if name in opened.table.index), None)
            if twice is not None:
                raise HeaderError(f"{DELTA_KEY}: says of a tensor of the file that it is in the base", record=twice)
        places = {name: places[name] for name in unchanged} | {n: (number, i) for n, i in opened.table.index.items()}
    storages = [link.opened.storages[0] for link in chain]
    newest = chain[0].opened
    sums = chain[0].note.unchanged if chain[0].note is not None else {}
    table = _table([link.opened.table for link in chain], places)
    notes = [link.opened.metadata for link in chain]
    metadata = {key: text for key, text in (newest.metadata or {}).items() if key != DELTA_KEY}
    return Opened(
        newest.format, table, storages, metadata or None, bases=tuple(link.path for link in chain[1:]),
        records=lambda: _records(table, sums, notes),
    )  # fmt: skip


def _table(tables: list[Table], places: dict[str, tuple[int, int]]) -> Table:
    """The rows of several tables as one, in the order in which one file would have them."""
    rows, dims = array("q"), array("q")
    starts = []
    for table in tables:
        starts.append(len(dims))
        dims.extend(table.dims)
    rank = formats.get("safetensors").rank_of  # type: ignore[attr-defined]
    codes = {name: tables[number].rows[row * ROW] for name, (number, row) in places.items()}
    names = sorted(places, key=lambda name: (rank(codes[name]), name))
    for name in names:
        number, row = places[name]
        fields = tables[number].rows[row * ROW : (row + 1) * ROW]
        fields[_DIMS] += starts[number]
        fields[_STORAGE] = number
        rows.extend(fields)
    return Table(names, rows, dims)


def _records(
    table: Table, sums: Mapping[str, int], notes: Sequence[Mapping[str, str] | None]
) -> Iterator[StoredRecord]:
    digests = [digests_in(metadata) for metadata in notes]
    for name, row in table.index.items():
        offset, nbytes = table.extent_of(row)
        number = table.storage_of(row)
        crc, digest = sums.get(name), digests[number].get(name)
        yield StoredRecord(name, number, offset, nbytes, crc, nbytes, sha256=digest)


def close_all(storages: list[Storage]) -> None:
    """Close every storage."""
    for storage in storages:
        storage.close()


def options_of(options: OpenOptions) -> dict[str, Any]:
    """The arguments of `open_checkpoint` that options were made of."""
    return {key: getattr(options, key) for key in ("unknown", "encoding", "allow", "strict", "writable", "key")}
