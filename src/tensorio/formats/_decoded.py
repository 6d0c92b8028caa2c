"""Records whose bytes are not raw in their file: storages made on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tensorio.dtypes import DTYPES
from tensorio.storage.base import LazyStorage
from tensorio.tensors import ROW

if TYPE_CHECKING:
    from array import array

    from tensorio.storage.base import Storage

__all__ = ["BIG_ENDIAN_HOST", "Decoded", "byteswapped"]

# Whether storages of formats that are little-endian always are not raw here.
BIG_ENDIAN_HOST = sys.byteorder == "big"


class Decoded:
    """Storages of records that are not raw, by record and unit of swapping.

    Parameters
    ----------
    size : callable
        ``size(record)`` returns the bytes of a record once it is decoded.
    read : callable
        ``read(record)`` returns them.
    source : callable
        ``source(record)`` returns where it is: a storage, offset, bytes.
    swapped : bool
        Whether they are in the other byte order.
    writable : bool
        Whether arrays over them may be written to.
    first : int
        Storage index of the first of them.

    Attributes
    ----------
    storages : list of Storage
        Those that were asked for; none of them is filled before it is looked at.
    """

    def __init__(
        self,
        size: Callable[[int], int],
        read: Callable[[int], memoryview | bytes],
        source: Callable[[int], tuple[Storage, int, int]],
        *,
        swapped: bool,
        writable: bool,
        first: int = 1,
    ) -> None:
        self.storages: list[Storage] = []
        self._size = size
        self._read = read
        self._source = source
        self._swapped = swapped
        self._writable = writable
        self._first = first
        self._index: dict[tuple[int, int], int] = {}

    def index(self, record: int, dtype: int) -> int:
        """Return the storage index for a record seen as elements of `dtype`."""
        swap = DTYPES[dtype].swap if self._swapped else 1
        found = self._index.get((record, swap))
        if found is None:
            found = self._index[record, swap] = self._first + len(self.storages)
            self.storages.append(self._storage(record, swap))
        return found

    def place(self, rows: array[int], numbers: Sequence[int] | None = None) -> None:
        """Give each row in a record that is not raw a storage; the pickle machine left ``-1 - record`` for one.

        Parameters
        ----------
        rows : array of int64
            Of a `Table`; changed in place.
        numbers : sequence of int, optional
            Numbers of the records here, by those that the pickle machine was told.
        """
        for at in range(4, len(rows), ROW):  # the storage column; the dtype is four before
            if rows[at] < 0:
                record = -1 - rows[at]
                rows[at] = self.index(record if numbers is None else numbers[record], rows[at - 4])

    def lease(self, record: int, dtype: int) -> Any:
        """Return what the pickle machine asks for."""
        return self.storages[self.index(record, dtype) - self._first].lease()

    def _storage(self, record: int, swap: int) -> Storage:
        def make() -> memoryview | bytes | bytearray:
            data = self._read(record)
            if swap > 1:
                data = byteswapped(data, swap)
            return bytearray(data) if self._writable else data

        return LazyStorage(self._size(record), make, writable=self._writable, source=self._source(record))


def byteswapped(data: memoryview | bytes, unit: int) -> memoryview:
    """Return a copy with the bytes of each `unit` bytes reversed."""
    import numpy as np

    return memoryview(np.frombuffer(data, f"u{unit}").byteswap().view(np.uint8))  # type: ignore[arg-type]
