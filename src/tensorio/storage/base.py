"""What a storage is: bytes with a lifetime. Those in memory, and those made on first use."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tensorio.errors import FormatError

if TYPE_CHECKING:
    from tensorio._arrays import Lease

    Buffer = bytes | bytearray | memoryview

__all__ = ["LazyStorage", "MemoryStorage", "Storage"]


class Storage:
    """Bytes with a lifetime; knows no dtype.

    Attributes
    ----------
    nbytes : int
        Size in bytes.
    writable : bool
        Whether arrays over it may be written to (the file never changes).
    mapped : bool
        Whether its pages are those of a file and can be let go and come back.
    used : int or None
        First byte behind what a format read, if more of its kind may follow; None: all bytes are one file.
    ahead : bool
        Whether bytes are to be asked for by `read_ahead` before they are looked at, since a page fault is dear.
    how : str
        How its bytes come into memory, for `Checkpoint.loading`.
    """

    nbytes: int = 0
    writable: bool = False
    mapped: bool = False
    used: int | None = None
    ahead: bool = False
    how: str = "in memory as given"

    def __init__(self) -> None:
        self._lease: Lease | None = None
        self._lock = threading.Lock()

    def view(self) -> memoryview:
        """Return all bytes as a flat view; copies: no."""
        raise NotImplementedError

    def view_for(self, offset: int, nbytes: int) -> memoryview:
        """Return all bytes as a flat view, of which the caller looks at one range only; copies: no."""
        return self.view()

    def lease(self) -> Lease:
        """Return the object that arrays over this storage keep as their base."""
        if self._lease is None:
            from tensorio._arrays import Lease

            with self._lock:
                if self._lease is None:
                    self._before_use()
                    self._lease = Lease(self.view(), self.writable)
        return self._lease

    def lease_for(self, offset: int, nbytes: int) -> Lease:
        """Return a lease of all bytes, for an array over one range only."""
        self.read_ahead(offset, nbytes)
        return self.lease()

    def _before_use(self) -> None:
        """Called when the headers are read and the first array is to be made."""

    def stream(self, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Yield a range in pieces, for a reader that comes by once: memory stays flat where the bytes are mapped."""
        yield self.view_for(offset, nbytes)[offset : offset + nbytes]

    def read_ahead(self, offset: int, nbytes: int) -> None:
        """Bring a range into the page cache by large reads, unless it was before; returns when it is there."""

    def bring(self, offset: int, nbytes: int) -> Iterator[int]:
        """Bring a range into memory, a step at a time; yields the bytes of each step."""
        yield nbytes

    def release(self, offset: int, nbytes: int) -> None:
        """Unmap the pages of a range that was read; they come back from the page cache if touched again."""

    def check_unchanged(self) -> None:
        """Raise if the bytes are those of a file that was written to or resized since it was opened."""

    def beneath(self, offset: int, nbytes: int) -> tuple[Storage, int, int] | None:
        """Return the range of another storage that a range is made from: packed, or encrypted; None for own bytes."""
        return None

    def evict(self, offset: int, nbytes: int) -> None:
        """Drop whole pages of a range from the page cache, unless others have them mapped."""

    @contextlib.contextmanager
    def scattered(self) -> Iterator[None]:
        """While small headers are read all over the file, spare the system reading ahead around each."""
        yield

    def close(self) -> None:
        """Let go of the bytes; views handed out stay valid until they are gone themselves."""
        self._lease = None


class MemoryStorage(Storage):
    """A buffer in memory: the caller's own, or one that a format made."""

    def __init__(self, data: Buffer, *, writable: bool = False) -> None:
        super().__init__()
        self._data: memoryview | None = memoryview(data).cast("B")
        self.nbytes = self._data.nbytes
        self.writable = writable

    def view(self) -> memoryview:
        if self._data is None:
            raise ValueError("the checkpoint is closed")
        return self._data

    def close(self) -> None:
        super().close()
        self._data = None


class LazyStorage(Storage):
    """Bytes that are not raw in their file, made by `make` on first use.

    Parameters
    ----------
    nbytes : int
        What `make` must return; it was bounded when the header was read.
    make : callable
        Returns the bytes; called at most once at a time.
    source : (Storage, int, int), optional
        The range of another storage that all of it is made from: that, offset, bytes.
    """

    def __init__(
        self,
        nbytes: int,
        make: Callable[[], Buffer],
        *,
        writable: bool = False,
        source: tuple[Storage, int, int] | None = None,
    ) -> None:
        super().__init__()
        self.nbytes = nbytes
        self.writable = writable
        self._make = make
        self._source = source
        self._data: memoryview | None = None
        self._making = threading.Lock()

    def view(self) -> memoryview:
        with self._making:
            if self._data is None:
                data = memoryview(self._make()).cast("B")
                if data.nbytes != self.nbytes:
                    raise FormatError(f"expected {self.nbytes} bytes after decoding, found {data.nbytes}")
                self._data = data
            return self._data

    def beneath(self, offset: int, nbytes: int) -> tuple[Storage, int, int] | None:
        return self._source

    def bring(self, offset: int, nbytes: int) -> Iterator[int]:
        self.view()
        yield nbytes

    def stream(self, offset: int, nbytes: int) -> Iterator[memoryview]:
        yield self.view()[offset : offset + nbytes]
        if self._lease is None:
            self._data = None  # made for this reader alone, and can be made again

    def close(self) -> None:
        super().close()
        self._data = None
