"""Zip archives, for every format that is one: reading records, laying out new ones."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from tensorio import _core
from tensorio.errors import ChecksumError, HeaderError, LimitError, error_context
from tensorio.formats._base import StoredRecord
from tensorio.plan import PIECE, SMALL
from tensorio.storage.ranges import pieces_read
from tensorio.storage.reading import arena

if TYPE_CHECKING:
    from array import array

    from tensorio.plan import Buffer, Payloads
    from tensorio.storage.base import Storage

__all__ = ["Archive", "Inflation", "ZipPlan"]

# Payloads up to this size share a page with their local header, as a rule, and that page is read anyway: their
# checksum costs nothing but the arithmetic, so that it is always checked.
CHECKED_ON_OPEN = 4096

# From this size on (bytes), pages of local headers are let go behind the reader: the kernel maps 16 for each touched.
LET_GO_FROM = 32 << 20

# What one deflated record may unpack to: deflate itself reaches 1032:1 (zlib's own figure); a tensor's record of
# more than this many bytes per stored byte is a bomb.
MAX_RATIO = 1100
MAX_INFLATED = 1 << 36  # bytes


class Archive:
    """The records of one archive, checked; no payload over `CHECKED_ON_OPEN` bytes was touched.

    Parameters
    ----------
    storage : Storage
    tolerate : callable, optional
        Is given the error of a record whose checksum differs, and tells whether to go on.

    Attributes
    ----------
    rows : bytearray
        For the ``_core.zip_`` functions.
    """

    def __init__(self, storage: Storage, tolerate: Callable[[ChecksumError], bool] | None = None) -> None:
        self.storage = storage
        self._tolerate = tolerate
        mapped = storage.mapped and storage.nbytes > LET_GO_FROM
        with storage.scattered():
            self.rows, _, _ = _core.zip_read(storage.view(), mapped)
            bad = _core.zip_check_small(storage.view(), self.rows, CHECKED_ON_OPEN, mapped)
        if bad is not None:
            self.fail_checksum(*bad)

    def fail_checksum(self, record: int, expected: int, actual: int) -> None:
        """Raise the error for a record whose bytes changed."""
        name = self.name(record)
        error = ChecksumError(
            f"CRC-32 of the record: expected {expected:08x}, found {actual:08x}: its bytes changed since it was "
            "written; get the file again or go back to an older one",
            expected=expected, actual=actual, record=name, offset=_core.zip_record(self.rows, record)[0],
        )  # fmt: skip
        if self._tolerate is None or not self._tolerate(error):
            raise error

    def names(self, inner: str) -> tuple[array[int], dict[str, int], dict[str, int]]:
        """Return record numbers by name: "0", "1", ... below the folder `inner`, others below it, all others."""
        return _core.zip_names(self.storage.view(), self.rows, inner)

    def records(self, folders: tuple[str, ...] = ("",)) -> list[StoredRecord]:
        """Return all records in directory order.

        Parameters
        ----------
        folders : tuple of str
            What the names of those begin with that tensors may be in.
        """
        return [
            StoredRecord(name, 0, offset, compressed, crc or None, size, method != 0, name.startswith(folders))
            for name, offset, compressed, size, crc, method in _core.zip_records(self.storage.view(), self.rows)
        ]

    def place(self, record: int) -> tuple[Storage, int, int]:
        """Return where a record's bytes are as they are stored: the storage, offset, bytes."""
        offset, compressed, *_ = _core.zip_record(self.rows, record)
        return self.storage, offset, compressed

    def read(self, record: int, limit: int | None = None) -> memoryview | bytes:
        """Return one record's bytes: a view if stored, unpacked and checked if deflated.

        Parameters
        ----------
        limit : int, optional
            Most bytes to unpack to.
        """
        offset, compressed, size, crc, method, _ = _core.zip_record(self.rows, record)
        if method == 0:
            return self.storage.view()[offset : offset + compressed]
        if size > min(compressed * MAX_RATIO + 64, MAX_INFLATED if limit is None else limit):
            raise LimitError(
                f"deflated record of {compressed} bytes that unpacks to {size}", record=self.name(record), offset=offset
            )
        data = self._inflate(compressed, size, record, offset)
        actual = _core.crc32(data)
        if crc not in (0, actual):
            self.fail_checksum(record, crc, actual)
        return data

    def checked(self, record: int, limit: int | None = None) -> memoryview | bytes:
        """Like `read`, and the CRC of a stored record is checked, too."""
        data = self.read(record, limit)
        _, _, _, crc, method, _ = _core.zip_record(self.rows, record)
        if method == 0 and crc != 0 and (actual := _core.crc32(data)) != crc:
            self.fail_checksum(record, crc, actual)
        return data

    def check(self, record: int) -> None:
        """Check the CRC of a record of any size, in flat memory."""
        offset, compressed, size, crc, method, _ = _core.zip_record(self.rows, record)
        packed = pieces_read(self.storage, offset, compressed)
        actual = 0
        with error_context(record=self.name(record)):
            for data in Inflation(packed, size, offset) if method else packed:
                actual = _core.crc32(data, actual)
        if crc not in (0, actual):
            self.fail_checksum(record, crc, actual)

    def _inflate(self, compressed: int, size: int, record: int, offset: int) -> memoryview:
        out = arena(size)
        unpacked = Inflation(pieces_read(self.storage, offset, compressed), size, offset)
        done = 0
        try:
            for piece in unpacked:
                if done + len(piece) > size:
                    break
                out[done : done + len(piece)] = piece
                done += len(piece)
            if unpacked.size != size or not unpacked.ended or unpacked.taken != compressed:
                raise HeaderError(
                    f"deflated record: expected {size} bytes and the end of the stream, found other at {done} bytes",
                    offset=offset,
                )
        except HeaderError as error:  # not of a file that was cut short: the names are behind its new end
            error.record = self.name(record)
            raise
        return out

    def name(self, record: int) -> str:
        """Return the full name of a record, by its place in the directory."""
        return _core.zip_name(self.storage.view(), self.rows, record)


class Inflation:
    """Bytes of a raw deflate stream, unpacked a piece at a time: memory stays flat whatever they unpack to.

    Parameters
    ----------
    packed : iterable of buffer
        Gone through up to the end of the stream.
    most : int
        Bytes to unpack to; one more tells that there are more.
    offset : int
        Of the first packed byte, for messages.

    Attributes
    ----------
    size : int
        Bytes unpacked so far.
    taken : int
        Packed bytes of the stream so far.
    ended : bool
        Whether its end was met.

    Raises
    ------
    HeaderError
        When gone through: what is packed is no deflate stream.
    """

    def __init__(self, packed: Iterable[Buffer], most: int, offset: int) -> None:
        self._packed = packed
        self._most = most
        self._offset = offset
        self.size = 0
        self.taken = 0
        self.ended = False

    def __iter__(self) -> Iterator[bytes]:
        unpacker = zlib.decompressobj(-15)
        try:
            for piece in self._packed:
                waiting: Buffer = piece
                self.taken += len(piece)
                while self.size <= self._most:
                    data = unpacker.decompress(waiting, min(PIECE, self._most - self.size + 1))
                    waiting = unpacker.unconsumed_tail
                    self.size += len(data)
                    if unpacker.eof:
                        self.ended = True
                        self.taken -= len(unpacker.unused_data)
                    if data:
                        yield data
                    if self.ended or not (data or waiting):
                        break  # done, or it asks for more
                if self.ended or self.size > self._most:
                    return
        except zlib.error as error:
            raise HeaderError(f"deflated record: {error}", offset=self._offset) from None


class ZipPlan:
    """An archive of stored records, laid out as torch.save does.

    Parameters
    ----------
    head, tail : list of (str, bytes)
        Full name and payload of the records before and behind the numbered ones.
    folder : str
        What the names of the numbered records begin with.
    payloads : Payloads
        Of the records ``folder0``, ``folder1``, ...
    align : int
        Payloads start at multiples of this, in bytes.
    last : callable, optional
        Makes the payload of the last record (of the size planned) from the CRCs
        of all before it that are not empty.

    Attributes
    ----------
    left_out : int
        Bytes of storages that are not in it because no tensor reaches them.
    """

    left_out = 0

    def __init__(
        self,
        head: list[tuple[str, bytes]],
        folder: str,
        payloads: Payloads,
        tail: list[tuple[str, bytes]],
        align: int,
        last: Callable[[list[int]], bytes] | None = None,
    ) -> None:
        self.payloads = payloads
        self._head = head
        self._tail = tail
        self._last = last
        sized = [[(name.encode(), len(data)) for name, data in records] for records in (head, tail)]
        self._placed, self._names, self._directory = _core.zip_place(
            sized[0], folder.encode(), payloads.sizes, sized[1], align
        )
        self.nbytes = self._directory + _core.zip_tail_size(self._placed)

    def data_offset(self, record: int) -> int:
        """Return where a record's payload starts, in bytes."""
        return _core.zip_placed(self._placed, record)[1]

    def pieces(self) -> Iterator[Buffer]:
        """Yield the archive; CRCs are computed just before the bytes go out, while they are in the cache."""
        for i, (_, data) in enumerate(self._head):
            yield _core.zip_pack(self._placed, self._names, i, data)
        yield from self._numbered(len(self._head))
        first = len(self._head) + len(self.payloads)
        for i, (_, data) in enumerate(self._tail, first):
            if self._last is not None and i == first + len(self._tail) - 1:
                data = self._last(_core.zip_crcs(self._placed, i))
            yield _core.zip_pack(self._placed, self._names, i, data)
        yield _core.zip_tail(self._placed, self._names, self._directory)

    def _numbered(self, start: int) -> Iterator[Buffer]:
        payloads, i = self.payloads, 0
        while i < len(payloads):
            joined, after = _core.zip_gather(
                self._placed, self._names, start, payloads.addresses, payloads.sizes, i, PIECE, SMALL
            )
            if after > i:
                yield joined
                i = after
                continue
            yield _core.zip_local(self._placed, self._names, start + i)
            crc = 0
            for piece in payloads.pieces(i, self.data_offset(start + i)):
                crc = _core.crc32(piece, crc)
                yield piece
            yield _core.zip_descriptor(self._placed, start + i, crc)
            i += 1
