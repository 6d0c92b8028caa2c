"""Memory for snapshots: bounded, and used again, so that its pages are there when the next one is taken."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

from tensorio import _core, _host
from tensorio.storage.reading import HUGE_PAGE, arena, in_threads, readers
from tensorio.system import memory

__all__ = ["Buffer", "Buffers", "private"]

# Not in the mmap module of any Python yet; the number of all Linux architectures (asm-generic/mman-common.h).
POPULATE_WRITE = 23
STEP = 32 << 20


class Buffer:
    """One piece of memory for one snapshot at a time.

    Attributes
    ----------
    view : memoryview
        Writable.
    address : int
    made_by : callable
        What `Buffers` had it of.
    beside : int
        Bytes of other memory that are held as long as it is lent.
    """

    made_by: Callable[[int], Buffer]
    beside = 0

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.address = _core.address(view)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return len(self.view)

    def populate(self) -> None:
        """Have all pages in memory now, not at the first copy."""
        in_threads(_populate, [self.view[at : at + STEP] for at in range(0, len(self.view), STEP)], readers())


def _populate(piece: memoryview) -> None:
    if os.name != "posix" or _host.advise(piece, POPULATE_WRITE):
        piece[::4096] = bytes(len(range(0, len(piece), 4096)))


def private(nbytes: int) -> Buffer:
    """Return a new buffer in huge pages of this process."""
    return Buffer(arena(nbytes, touched=0))


class Buffers:
    """Lends buffers; all of them together stay below a bound.

    Parameters
    ----------
    max_memory : int, optional
        In bytes; at most half of the memory that is available, and never more than there is.
    """

    def __init__(self, max_memory: int | None = None) -> None:
        self._max = max_memory
        self._free: list[Buffer] = []
        self._lent: weakref.WeakSet[Buffer] = weakref.WeakSet()  # one that an interrupt loses is nobody's any more
        self._lock = threading.RLock()  # entered by itself: an interrupt may come within `Condition.__enter__`
        self._changed = threading.Condition(self._lock)

    @property
    def held(self) -> int:
        """Bytes of all buffers, lent or free, and of what is held beside them."""
        return self.lent + sum(b.nbytes for b in self._free)

    @property
    def lent(self) -> int:
        """Bytes of those that are lent, and of what is held beside them."""
        return sum(b.nbytes + b.beside for b in self._lent)

    def lend(
        self,
        nbytes: int,
        make: Callable[[int], Buffer] = private,
        *,
        beside: int = 0,
        waiting: Callable[[], object] = int,
    ) -> Buffer | None:
        """Return a buffer of at least so many bytes, waiting until others come back; None if there can't be one.

        Parameters
        ----------
        nbytes : int
        make : callable
            ``make(nbytes)`` returns a new buffer; only those that it made are used again.
        beside : int
            Bytes of other memory that count as well until the buffer comes back, as far as they are more than what
            the size of the buffer was rounded up by.
        waiting : callable
            Called before it waits; may raise.
        """
        need = -(-max(nbytes, 1) // HUGE_PAGE) * HUGE_PAGE
        beside = max(beside - (need - nbytes), 0)
        with self._lock:
            while True:
                room = self._bound() - beside
                fitting = [b for b in self._free if b.nbytes >= nbytes and b.made_by is make]
                fitting = [b for b in fitting if self.lent + b.nbytes <= room]
                found = min(fitting, key=lambda b: b.nbytes, default=None)
                if found is not None or self.lent + need <= room:
                    break
                if need > room:
                    return None
                waiting()
                self._changed.wait()
            size = need if found is None else found.nbytes
            if found is not None:
                self._free.remove(found)
            self._free.sort(key=lambda b: b.nbytes)
            while self.held + size > room and self._free:
                del self._free[0]
            if found is None:
                found = make(need)
                found.made_by = make
            found.beside = beside
            self._lent.add(found)
            return found

    def _bound(self) -> int:
        there = memory.available() + self.held
        return there // 2 if self._max is None else min(self._max, there)

    def give_back(self, buffer: Buffer) -> None:
        """Take a buffer that is no longer read."""
        with self._lock:
            self._lent.discard(buffer)
            self._free.append(buffer)
            self._changed.notify_all()

    def drop(self) -> None:
        """Let go of what is free; the system has its memory back."""
        with self._lock:
            self._free.clear()
