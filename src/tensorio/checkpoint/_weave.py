"""Rows of bytes put together out of runs of other rows, a piece at a time.

A cut of a tensor in C order takes the same runs of bytes out of each of its
rows; the whole tensor is woven out of the rows of all ranks' parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensorio.plan import PIECE
from tensorio.storage.base import LazyStorage, Storage

if TYPE_CHECKING:
    from tensorio.plan import Buffer

__all__ = ["Strand", "weave", "zeros"]

# Pages of a mapping are let go once so many bytes of rows are behind.
WINDOW = 8 << 20


class Strand(NamedTuple):
    """A run of bytes of each row.

    Attributes
    ----------
    storage : Storage or None
        Where it is; None for zeros.
    offset : int
        Of the run in the first row.
    stride : int
        Bytes from row to row.
    nbytes : int
        Of the run.
    """

    storage: Storage | None
    offset: int
    stride: int
    nbytes: int


def weave(strands: list[Strand], count: int) -> Iterator[Buffer]:
    """Yield `count` rows, each made of one run of every strand; memory stays flat where the bytes are mapped."""
    if count == 1 or all(strand.storage is None for strand in strands):
        for strand in strands:
            yield from _stream(strand) if count == 1 else zeros(strand.nbytes * count)
        return
    width = sum(strand.nbytes for strand in strands)
    step = max(PIECE // width, 1) if width else count
    with ExitStack() as stack:
        runs = [_Run(strand, count, stack) for strand in strands]
        for start in range(0, count if width else 0, step):
            stop = min(start + step, count)
            if width <= PIECE:
                yield _joined([run.rows(start, stop) for run in runs], stop - start, width)
                for run in runs:
                    run.release(stop)
            else:
                for run in runs:
                    yield from run.row(start)


def zeros(nbytes: int) -> Iterator[Buffer]:
    """Yield so many zeros."""
    block = bytes(min(nbytes, PIECE))
    for at in range(0, nbytes, PIECE):
        yield block if nbytes - at >= PIECE else block[: nbytes - at]


def _stream(strand: Strand) -> Iterator[Buffer]:
    if strand.storage is None:
        return zeros(strand.nbytes)
    return strand.storage.stream(strand.offset, strand.nbytes)


def _joined(blocks: list[Any], count: int, width: int) -> Buffer:
    """Blocks of rows side by side, in new memory."""
    out = np.empty((count, width), np.uint8)
    at = 0
    for block in blocks:
        out[:, at : at + block.shape[1]] = block
        at += block.shape[1]
    return out.reshape(-1).data


class _Run:
    """The runs of one strand, as a matrix of bytes."""

    def __init__(self, strand: Strand, count: int, stack: ExitStack) -> None:
        self._strand = strand
        self._released = 0
        span = (count - 1) * strand.stride + strand.nbytes
        if strand.storage is None or not strand.nbytes:
            self._matrix = np.broadcast_to(np.uint8(0), (count, strand.nbytes))
            return
        view = stack.enter_context(_held(strand.storage, strand.offset, span))
        flat = np.frombuffer(view, np.uint8)
        self._matrix = np.lib.stride_tricks.as_strided(
            flat, (count, strand.nbytes), (strand.stride, 1), writeable=False
        )

    def rows(self, start: int, stop: int) -> Any:
        """The runs of some rows, as an array of two dimensions; copies: no."""
        return self._matrix[start:stop]

    def row(self, i: int) -> Iterator[Buffer]:
        """The run of one row, for a reader that comes by once."""
        storage = self._strand.storage
        if storage is None or isinstance(storage, LazyStorage):
            yield from zeros(self._strand.nbytes) if storage is None else (self._matrix[i].data,)
        else:
            yield from storage.stream(self._strand.offset + i * self._strand.stride, self._strand.nbytes)

    def release(self, stop: int) -> None:
        """Let go of the pages in front of a row, a window at a time."""
        strand = self._strand
        if (stop - self._released) * strand.stride < WINDOW:
            return
        if strand.storage is not None:
            at, nbytes = self._released * strand.stride, (stop - self._released) * strand.stride
            strand.storage.release(strand.offset + at, min(nbytes, strand.storage.nbytes - strand.offset - at))
        self._released = stop


@contextmanager
def _held(storage: Storage, offset: int, nbytes: int) -> Iterator[memoryview]:
    """A range in one piece; what is made on use is let go behind it."""
    if isinstance(storage, LazyStorage):
        made = storage.stream(offset, nbytes)
        yield next(made)
        for _ in made:
            pass
    else:
        yield storage.view_for(offset, nbytes)[offset : offset + nbytes]
