"""What a file will hold, decided before its first byte is written.

A plan knows its total size and yields its bytes in file order, in pieces that
stay in the CPU's cache between being checksummed and being written. It does no
I/O, so that ``b"".join(plan.pieces())`` is the file.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Protocol

from tensorio import _core

__all__ = ["PIECE", "SMALL", "Buffer", "CheckedPlan", "FlatPlan", "LaidOut", "Payloads", "Plan", "Source", "pieces_of"]

Buffer = bytes | bytearray | memoryview
Source = Buffer | Callable[[], Iterator[Buffer]]

# Bytes checksummed and then written at a time: fits the second-level cache of
# current CPUs (1-2 MiB), and is large enough that a write(2) per piece is free.
# Pieces end at multiples of it in the file: the kernel keeps what one write(2)
# brings in the largest aligned blocks ("folios") that lie within it, and to
# write half of such a block in each of two calls makes a save a third slower.
PIECE = 1 << 20
# Payloads up to this many bytes are joined with their neighbours: a copy is cheaper than a call.
SMALL = 64 << 10


class Payloads:
    """The payloads of a plan, as columns.

    Attributes
    ----------
    sizes : array of int64
        In bytes.
    addresses : array of int64
        Of payloads that lie in memory, which `keep` holds; 0 for the others.
    makers : dict of int to callable
        For the others, by number: yields the bytes in order. Called when their
        turn comes, so that what must be made is made one at a time.
    keep : list
        Objects whose memory the addresses point into.
    """

    __slots__ = ("addresses", "keep", "makers", "sizes")

    def __init__(self) -> None:
        self.sizes = array("q")
        self.addresses = array("q")
        self.makers: dict[int, Callable[[], Iterator[Buffer]]] = {}
        self.keep: list[object] = []

    def __len__(self) -> int:
        return len(self.sizes)

    def __getstate__(self) -> tuple[None, dict[str, object]]:
        """Addresses mean nothing to another process, unless somebody saw to it and took what keeps them."""
        if self.keep:
            raise TypeError("payloads in the memory of this process can't be passed to another")
        return None, {name: getattr(self, name) for name in self.__slots__}

    def add_memory(self, address: int, nbytes: int) -> None:
        """Append a payload that lies in memory."""
        self.addresses.append(address)
        self.sizes.append(nbytes)

    def add(self, source: Source, nbytes: int) -> None:
        """Append a payload: a buffer, or a function that yields its bytes."""
        if callable(source):
            self.makers[len(self.sizes)] = source
            self.add_memory(0, nbytes)
        else:
            self.keep.append(source)
            self.add_memory(_core.address(source) if nbytes else 0, nbytes)

    def select(self, order: list[int]) -> Payloads:
        """Return the payloads in another order."""
        out = Payloads()
        out.sizes = array("q", [self.sizes[i] for i in order])
        out.addresses = array("q", [self.addresses[i] for i in order])
        if self.makers:
            out.makers = {new: self.makers[i] for new, i in enumerate(order) if i in self.makers}
        out.keep = self.keep
        return out

    def pieces(self, i: int, at: int = 0) -> Iterator[Buffer]:
        """Yield one payload, which will start at byte `at` of a file, in pieces of at most `PIECE` bytes."""
        maker = self.makers.get(i)
        yield from pieces_of(self._memory(i) if maker is None else maker, self.sizes[i], at)

    def _memory(self, i: int) -> memoryview:
        # Whoever is given a piece may keep it: it keeps the objects.
        return _core.memory(self.addresses[i], self.sizes[i], self.keep)


class Plan(Protocol):
    """The layout of one file.

    Attributes
    ----------
    nbytes : int
        Size of the file in bytes.
    """

    @property
    def nbytes(self) -> int: ...

    def pieces(self) -> Iterator[Buffer]:
        """Yield the bytes of the file, in order."""
        ...


class LaidOut(Plan, Protocol):
    """A plan whose tensors are known one by one.

    Attributes
    ----------
    payloads : Payloads
        Of the tensors.
    left_out : int
        Bytes of storages that no tensor reaches, and that are not in the plan.
    """

    payloads: Payloads
    left_out: int


class FlatPlan:
    """A header, then payloads back to back."""

    left_out = 0

    def __init__(self, head: bytes, payloads: Payloads) -> None:
        self.head = head
        self.payloads = payloads
        self.nbytes = len(head) + sum(payloads.sizes)

    def pieces(self) -> Iterator[Buffer]:
        """Yield the header and the payloads; small neighbours are joined."""
        yield self.head
        payloads, i, at = self.payloads, 0, len(self.head)
        while i < len(payloads):
            joined, after = _core.gather(payloads.addresses, payloads.sizes, i, PIECE, SMALL)
            if after > i:
                yield joined
                i, at = after, at + len(joined)
                continue
            yield from payloads.pieces(i, at)
            i, at = i + 1, at + payloads.sizes[i]


class CheckedPlan:
    """Another plan, and at its end a look whether what it was made of is still what it was.

    Parameters
    ----------
    plan : Plan
    check : callable
        Raises if not; called when the last byte was yielded, before the file is given its name.
    """

    def __init__(self, plan: Plan, check: Callable[[], object]) -> None:
        self._plan = plan
        self._check = check

    @property
    def nbytes(self) -> int:
        """As of the plan."""
        return self._plan.nbytes

    def pieces(self) -> Iterator[Buffer]:
        """Yield the bytes of the plan."""
        yield from self._plan.pieces()
        self._check()


def pieces_of(source: Source, nbytes: int, at: int = 0) -> Iterator[Buffer]:
    """Yield a source's bytes in pieces of at most `PIECE`, and check that they are as many as planned.

    Parameters
    ----------
    at : int
        Where in a file the first byte will be; pieces end at multiples of `PIECE` there.
    """
    total = 0
    for buffer in source() if callable(source) else (source,):
        view = memoryview(buffer).cast("B")
        start = 0
        while start < len(view):
            end = start + PIECE - (at + total + start) % PIECE
            yield view[start:end]
            start = end
        total += len(view)
    if total != nbytes:
        raise ValueError(f"a payload has {total} bytes, planned were {nbytes}")
