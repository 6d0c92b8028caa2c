"""A snapshot: the bytes of a save that is laid out, copied at once, by all cores.

The columns of the payloads then hold addresses of the copy. What shared bytes before does so in the copy: bytes are
copied once, however many payloads they are in, and the file is the one that would have been written at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensorio import _host
from tensorio.asynchronous._devices import PROMISED
from tensorio.storage.reading import READ_PIECE, in_threads, readers

if TYPE_CHECKING:
    from tensorio.asynchronous._buffers import Buffer
    from tensorio.asynchronous._devices import Fetch
    from tensorio.plan import Buffer as Bytes
    from tensorio.plan import Payloads

    Column = np.ndarray[Any, np.dtype[np.int64]]
    Mask = np.ndarray[Any, np.dtype[np.bool_]]
    Maker = Callable[[], Iterator[Bytes]]

__all__ = ["Snapshot"]

LINE = 64  # bytes of a cache line: copies keep their place in it


class _Made(NamedTuple):
    maker: Maker
    offset: int
    nbytes: int


class Snapshot:
    """What is to be copied, and where to.

    Parameters
    ----------
    payloads : sequence of Payloads
    fetch : Fetch, optional
        What was promised while they were laid out.

    Attributes
    ----------
    nbytes : int
        Of the buffer that it takes.
    """

    def __init__(self, payloads: Sequence[Payloads], fetch: Fetch | None = None) -> None:
        self._payloads = payloads
        self._fetch = fetch
        self._places = _joined([p.addresses for p in payloads])
        sizes = _joined([p.sizes for p in payloads])
        self._moved = np.flatnonzero((self._places != 0) & (sizes != 0))
        self._find_runs(self._places[self._moved], sizes[self._moved])
        self._makers = list(self._place_makers())

    def _find_runs(self, begins: Column, sizes: Column) -> None:
        """Join what overlaps or touches; lay the runs out one behind the other."""
        order = np.argsort(begins, kind="stable")
        begins, ends = begins[order], (begins + sizes)[order]
        reached = np.maximum.accumulate(ends) if len(ends) else ends
        first = np.ones(len(begins), bool)
        first[1:] = begins[1:] > reached[:-1]
        heads = np.flatnonzero(first)
        self._starts = begins[heads]
        self._sizes = reached[np.append(heads[1:], len(begins)) - 1] - self._starts if len(heads) else self._starts
        rooms = -(-(self._sizes + LINE) // LINE) * LINE
        self._offsets = np.cumsum(rooms) - rooms + self._starts % LINE
        self.nbytes = int(rooms.sum())

    def _place_makers(self) -> Iterator[_Made]:
        for payloads in self._payloads:
            for i, maker in payloads.makers.items():
                yield _Made(maker, self.nbytes, payloads.sizes[i])
                self.nbytes += -(-payloads.sizes[i] // LINE) * LINE

    def take(self, buffer: Buffer) -> None:
        """Copy everything to a buffer, and let the payloads be read there."""
        here = self._starts < PROMISED
        fetched = self._start_to_fetch(buffer, ~here)
        try:
            self._copy(buffer, here)
        finally:
            fetched()
        self._readdress(buffer)

    def _start_to_fetch(self, buffer: Buffer, there: Mask) -> Callable[[], object]:
        if self._fetch is None or not there.any():
            return int
        offsets = zip(self._starts[there].tolist(), self._offsets[there].tolist(), strict=True)
        return self._fetch.start(buffer, dict(offsets))

    def _copy(self, buffer: Buffer, here: Mask) -> None:
        places = self._offsets[here] + buffer.address
        targets, sources, sizes = _pieces(places, self._starts[here], self._sizes[here])
        jobs: list[Callable[[], object]] = [partial(_make, made, buffer) for made in self._makers]
        jobs += [partial(_host.copy_runs, targets, sources, sizes, i, j) for i, j in _shares(sizes)]
        in_threads(lambda job: job(), jobs, readers())

    def _readdress(self, buffer: Buffer) -> None:
        old = self._places[self._moved]
        run = np.searchsorted(self._starts, old, "right") - 1
        places = self._places.copy()
        places[self._moved] = old - self._starts[run] + self._offsets[run] + buffer.address
        made, at = iter(self._makers), 0
        for payloads in self._payloads:
            payloads.addresses = array("q", places[at : at + len(payloads)].tobytes())
            for i in payloads.makers:
                payloads.addresses[i] = buffer.address + next(made).offset if payloads.sizes[i] else 0
            payloads.makers = {}
            payloads.keep = [buffer]
            at += len(payloads)


def _joined(columns: list[array[int]]) -> Column:
    return np.concatenate([np.frombuffer(c, np.int64) for c in columns if len(c)] or [np.empty(0, np.int64)])


def _pieces(targets: Column, sources: Column, sizes: Column) -> tuple[array[int], array[int], array[int]]:
    """Cut long runs, so that several threads share one."""
    counts = -(-sizes // READ_PIECE)
    at = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * READ_PIECE
    left = np.minimum(np.repeat(sizes, counts) - at, READ_PIECE)
    columns = (np.repeat(targets, counts) + at, np.repeat(sources, counts) + at, left)
    return tuple(array("q", c.astype(np.int64).tobytes()) for c in columns)  # type: ignore[return-value]


def _shares(sizes: array[int]) -> Iterator[tuple[int, int]]:
    """Runs that are copied by one call: as many small ones as make a large one."""
    turns = np.cumsum(np.frombuffer(sizes, np.int64)) // READ_PIECE if len(sizes) else np.empty(0, np.int64)
    ends = [0, *(np.flatnonzero(np.diff(turns)) + 1).tolist(), len(sizes)]
    return ((i, j) for i, j in pairwise(ends) if i < j)


def _make(made: _Made, buffer: Buffer) -> None:
    """Run a maker now: its array is the user's to change when this returns."""
    at, end = made.offset, made.offset + made.nbytes
    for piece in made.maker():
        view = memoryview(piece).cast("B")
        if at + len(view) > end:
            break
        _host.copy(buffer.view[at : at + len(view)], view)
        at += len(view)
    else:
        if at == end:
            return
    raise ValueError(f"a payload has other bytes than the {made.nbytes} that were planned")
