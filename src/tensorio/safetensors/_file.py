"""A safetensors file that is open: names, places, and reading of ranges."""

from __future__ import annotations

import errno
import operator
import os
from typing import TYPE_CHECKING

from tensorio import _host
from tensorio.checkpoint._loading import settle
from tensorio.dtypes import DTYPES
from tensorio.encryption._opening import refuse_without_key
from tensorio.errors import FormatError, TruncatedError, UnsupportedError
from tensorio.formats import safetensors as _format
from tensorio.formats._base import OpenOptions
from tensorio.safetensors._errors import LOADING, OPENING, rejected, translated
from tensorio.storage.base import MemoryStorage, Storage
from tensorio.storage.files import FileStorage, storage_of
from tensorio.storage.opening import open_storage
from tensorio.storage.reading import arena, read_into
from tensorio.tensors import ROW

if TYPE_CHECKING:
    from tensorio._arrays import Lease

__all__ = ["CODES", "File", "of_buffer", "opened"]

# Canonical name -> what the format calls it; and the same by code in `tensorio.dtypes`.
CODES = {name: code for code, name in _format.DTYPES.items()}
_CODE_OF = [CODES.get(d.name, "") for d in DTYPES]

# Reads of more bytes than this are worth several threads.
PARALLEL_FROM = 16 << 20


class File:
    """An open safetensors file.

    Parameters
    ----------
    storage : Storage
    name : str
        For messages.
    path : str or None
        If it can be opened again.

    Attributes
    ----------
    table : Table
        In header order; offsets count from the start of the storage.
    metadata : dict of str to str or None
    opened : Opened
        The same, as the format has it.
    index : dict of str to int
        The row of each name.
    """

    __slots__ = ("_order", "_sorted", "index", "metadata", "name", "opened", "path", "storage", "table")

    def __init__(self, storage: Storage, name: str, path: str | None) -> None:
        self.storage, self.name, self.path = storage, name, path
        try:
            self.opened = _format.open_stored(storage, OpenOptions())
        except FormatError:
            refuse_without_key(storage)  # what it begins with is no length
            raise
        self.table = self.opened.table
        self.metadata = self.opened.metadata
        self.index = self.table.index
        self._order: list[int] | None = None
        self._sorted: list[str] | None = None

    @property
    def order(self) -> list[int]:
        """Rows by offset; tensors without bytes stay where the header has them among each other."""
        if self._order is None:
            offsets = self.table.rows[5::ROW].tolist()
            self._order = sorted(range(len(offsets)), key=offsets.__getitem__)
        return self._order

    @property
    def in_order(self) -> bool:
        """Whether the header has the tensors by offset, as in files that the reference wrote."""
        offsets = self.table.rows[5::ROW]
        return all(map(operator.le, offsets, offsets[1:]))

    def keys(self) -> list[str]:
        """Return the names, sorted; a new list."""
        if self._sorted is None:
            self._sorted = sorted(self.table.names)
        return self._sorted.copy()

    def offset_keys(self) -> list[str]:
        """Return the names in the order of their bytes."""
        names = self.table.names
        return [names[i] for i in self.order]

    def extent(self, row: int) -> tuple[int, int]:
        """Return offset and nbytes of a tensor."""
        cells = self.table.rows
        return cells[row * ROW + 5], cells[row * ROW + 6]

    def dtype(self, row: int) -> int:
        """Return the code in `tensorio.dtypes` of a tensor's elements."""
        return self.table.rows[row * ROW]

    def code(self, row: int) -> str:
        """Return what the format calls a tensor's elements, e.g. ``"BF16"``."""
        return _CODE_OF[self.table.rows[row * ROW]]

    def shape(self, row: int) -> tuple[int, ...]:
        """Return the shape of a tensor as the header has it."""
        cells = self.table.rows
        at = cells[row * ROW + 3]
        return tuple(self.table.dims[at : at + cells[row * ROW + 2]])

    def bring(self, row: int | None = None) -> None:
        """On a disk where page faults are dear, read a tensor, or all of them, before it is looked at."""
        if self.storage.ahead:
            self.storage.read_ahead(*((0, self.storage.nbytes) if row is None else self.extent(row)))

    def private(self) -> Lease | None:
        """Return a new private copy-on-write mapping of the file; None if it is not a mapped file."""
        storage = self.storage
        if not isinstance(storage, FileStorage) or not storage.mapped:
            return None
        fd, start = storage.fileno()
        mapping = storage_of(os.dup(fd), self.name, start=start, writable=True)
        if mapping.nbytes < storage.nbytes:
            raise TruncatedError(
                f"the file has become {storage.nbytes - mapping.nbytes} bytes too short while it was open",
                path=self.name,
            )
        lease = mapping.lease()
        mapping.close()  # the lease keeps the mapping, and nothing else is needed
        return lease

    def read(self, offset: int, out: memoryview) -> None:
        """Fill memory from the file's bytes at `offset`; releases the GIL. What has over 16 MiB must be zeroed."""
        storage = self.storage
        try:
            if isinstance(storage, FileStorage):
                with storage.lent() as (fd, start):
                    _read(fd, start + offset, out)
            else:
                _host.copy(out, storage.view()[offset : offset + len(out)])
        except TruncatedError as error:
            error.path = self.name
            raise translated(error, f"Could not read from file: {error.message}") from error


def _read(fd: int, offset: int, out: memoryview) -> None:
    """Fill `out`: where it is large, with threads; it is zeroed then."""
    if len(out) < PARALLEL_FROM and hasattr(os, "preadv"):
        while len(out):
            done = os.preadv(fd, [out], offset)
            if done == len(out):
                return
            if not done:
                break
            offset, out = offset + done, out[done:]
    missing = offset + len(out) - os.fstat(fd).st_size
    if missing > 0:
        raise TruncatedError(f"the file has become {missing} bytes too short while it was open", offset=offset)
    read_into(fd, offset, out)


def of_buffer(data: object, *, copied: bool = False) -> File:
    """Open the content of a file in memory.

    Parameters
    ----------
    data : bytes or another buffer
    copied : bool
        Copy it into writable memory first; other threads go on meanwhile.

    Raises
    ------
    TypeError
        Not a buffer.
    """
    try:
        source = memoryview(data).cast("B")  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"expected bytes or another buffer, found {type(data).__name__}") from None
    with rejected(LOADING, f"<{type(data).__name__} of {source.nbytes} bytes>"):
        if not copied:
            return File(MemoryStorage(source), "", None)
        copy = arena(source.nbytes)
        _host.copy(copy, source)
        return File(MemoryStorage(copy, writable=True), "", None)


def opened(source: object, *, writable: bool) -> File:
    """Open a path, a buffer or a binary file object.

    Parameters
    ----------
    source : str, os.PathLike, buffer or seekable binary file object
        See `tensorio.open`.
    writable : bool
        Map private copy-on-write pages.

    Raises
    ------
    SafetensorError
        Not a safetensors file, or not a regular file.
    OSError
        From the system; `FileNotFoundError` with the text that callers know.
    """
    try:
        storage, path, name = open_storage(source, writable=writable, local=True)
    except FileNotFoundError as error:
        # str() of an OSError with errno and file name has another form; the number alone leaves the text as it is.
        plain = FileNotFoundError(f"No such file or directory: {os.fsdecode(source)}")  # type: ignore[arg-type]
        plain.errno = errno.ENOENT
        raise plain from error
    except UnsupportedError as error:
        raise translated(error, f"{OPENING}: {error.message}") from error
    try:
        with rejected(OPENING, name):
            file = File(storage, name, path)
    except BaseException:
        storage.close()  # whoever keeps the error would keep the file open
        raise
    settle(storage, "auto", None, whole=False)
    return file
