"""What a file will hold, decided before its first byte is written.

A plan knows its total size and yields its bytes in file order, in pieces that
stay in the CPU's cache between being checksummed and being written. It does no
I/O, so that ``b"".join(plan.pieces())`` is the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

__all__ = ["PIECE", "Buffer", "FlatPlan", "Plan", "Record", "Source", "pieces_of"]

Buffer = bytes | bytearray | memoryview
Source = Buffer | Callable[[], Iterator[Buffer]]

# Bytes checksummed and then written at a time: fits the second-level cache of
# current CPUs (1-2 MiB), and is large enough that a write(2) per piece is free.
PIECE = 512 << 10


class Record(NamedTuple):
    """One payload of a plan.

    Attributes
    ----------
    name : str
        In the container's spelling.
    nbytes : int
        Size in bytes.
    source : buffer or callable
        The bytes, or a function that yields them in order; called when their
        turn comes, so that what must be made is made one at a time.
    """

    name: str
    nbytes: int
    source: Source


class Plan(Protocol):
    """The layout of one file.

    Attributes
    ----------
    nbytes : int
        Size of the file in bytes.
    keep : list
        Objects whose memory the sources point into.
    """

    @property
    def nbytes(self) -> int: ...
    @property
    def keep(self) -> list[object]: ...
    def pieces(self) -> Iterator[Buffer]:
        """Yield the bytes of the file, in order."""
        ...


class FlatPlan:
    """A header, then payloads back to back."""

    def __init__(self, head: bytes, records: Sequence[Record], keep: list[object]) -> None:
        self.head = head
        self.records = records
        self.keep = keep
        self.nbytes = len(head) + sum(r.nbytes for r in records)

    def pieces(self) -> Iterator[Buffer]:
        """Yield the header and the payloads; small neighbours are joined."""
        waiting: list[Buffer] = [self.head]
        size = len(self.head)
        for record in self.records:
            if record.nbytes <= PIECE // 8:
                waiting.extend(pieces_of(record))
                size += record.nbytes
                if size < PIECE:
                    continue
                yield b"".join(waiting)
                waiting, size = [], 0
                continue
            if waiting:
                yield b"".join(waiting)
                waiting, size = [], 0
            yield from pieces_of(record)
        if waiting:
            yield b"".join(waiting)


def pieces_of(record: Record) -> Iterator[Buffer]:
    """Yield a record's bytes in pieces of at most `PIECE`, and check that they are as many as planned."""
    total = 0
    for buffer in record.source() if callable(record.source) else (record.source,):
        flat = buffer if isinstance(buffer, bytes) else memoryview(buffer).cast("B")
        total += len(flat)
        if len(flat) <= PIECE:
            yield flat
            continue
        view = memoryview(flat)
        for at in range(0, len(view), PIECE):
            yield view[at : at + PIECE]
    if total != record.nbytes:
        raise ValueError(f"record {record.name!r} has {total} bytes, planned were {record.nbytes}")
