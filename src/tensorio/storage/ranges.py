"""Files within files: a run of bytes of another storage, as a storage of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tensorio.storage.base import Storage
from tensorio.storage.files import FileStorage
from tensorio.storage.reading import pread_full

if TYPE_CHECKING:
    from tensorio._arrays import Lease

__all__ = ["RangeStorage", "pieces_read", "place_of", "places_of"]

PIECE = 512 << 10  # bytes of a file that are read at a time: they fit the cache


class RangeStorage(Storage):
    """A run of bytes of another storage, which owns them.

    Parameters
    ----------
    whole : Storage
        A range of a range counts from the outermost.
    offset, nbytes : int
        Must lie inside it.

    Attributes
    ----------
    whole : Storage
        Never a range itself.
    offset : int
        Of the first byte in `whole`.
    """

    def __init__(self, whole: Storage, offset: int, nbytes: int) -> None:
        super().__init__()
        inner = whole if isinstance(whole, RangeStorage) else None
        self.whole: Storage = whole if inner is None else inner.whole
        self.offset: int = offset if inner is None else inner.offset + offset
        self.nbytes = nbytes
        self.writable = whole.writable

    @property
    def mapped(self) -> bool:  # type: ignore[override]
        return self.whole.mapped

    def view(self) -> memoryview:
        return self.whole.view_for(self.offset, self.nbytes)[self.offset : self.offset + self.nbytes]

    def view_for(self, offset: int, nbytes: int) -> memoryview:
        whole = self.whole.view_for(self.offset + offset, nbytes)
        return whole[self.offset : self.offset + self.nbytes]

    def lease(self) -> Lease:
        """Return a lease of the range; not kept, since the whole may yet be read into memory."""
        from tensorio._arrays import Lease

        return Lease(self.view(), self.writable)

    def stream(self, offset: int, nbytes: int) -> Iterator[memoryview]:
        return self.whole.stream(self.offset + offset, nbytes)

    @property
    def ahead(self) -> bool:  # type: ignore[override]
        return self.whole.ahead

    def read_ahead(self, offset: int, nbytes: int) -> None:
        self.whole.read_ahead(self.offset + offset, nbytes)

    def bring(self, offset: int, nbytes: int) -> Iterator[int]:
        return self.whole.bring(self.offset + offset, nbytes)

    def release(self, offset: int, nbytes: int) -> None:
        self.whole.release(self.offset + offset, nbytes)

    def check_unchanged(self) -> None:
        self.whole.check_unchanged()

    def beneath(self, offset: int, nbytes: int) -> tuple[Storage, int, int] | None:
        return self.whole.beneath(self.offset + offset, nbytes)

    def evict(self, offset: int, nbytes: int) -> None:
        self.whole.evict(self.offset + offset, nbytes)

    @contextlib.contextmanager
    def scattered(self) -> Iterator[None]:
        with self.whole.scattered():
            yield


def place_of(storage: Storage, offset: int = 0) -> tuple[Storage, int]:
    """Return the storage that owns the bytes of a storage, and where in it `offset` is."""
    return (storage.whole, storage.offset + offset) if isinstance(storage, RangeStorage) else (storage, offset)


def places_of(storage: Storage, offset: int, nbytes: int) -> Iterator[tuple[Storage, int, int]]:
    """Yield where a range is, (owner of the bytes, offset, bytes); then what that is made from, down to a file."""
    below: tuple[Storage, int, int] | None = storage, offset, nbytes
    while below is not None:
        owner, offset = place_of(below[0], below[1])
        yield owner, offset, below[2]
        below = owner.beneath(offset, below[2])


def pieces_read(storage: Storage, offset: int, nbytes: int) -> Iterator[memoryview]:
    """Yield a range in pieces, each good until the next one is asked for; read from the file, where it is mapped.

    For what is copied anyhow: where the disk fails, or the file was cut short, looking at the mapping would end the
    process.

    Raises
    ------
    OSError, TruncatedError, ValueError
        When gone through; the last if the storage is closed.
    """
    owner, begin = place_of(storage, offset)
    if not isinstance(owner, FileStorage) or owner.in_memory:
        yield from storage.stream(offset, nbytes)
        return
    scratch = memoryview(bytearray(min(PIECE, nbytes)))
    with owner.lent() as (fd, start):
        for at in range(begin, begin + nbytes, PIECE):
            piece = scratch[: min(PIECE, begin + nbytes - at)]
            pread_full(fd, start + at, piece)
            yield piece
