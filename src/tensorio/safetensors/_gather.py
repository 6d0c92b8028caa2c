"""Parts of a tensor by reading only their bytes.

An index selects, along each dimension, some coordinates; what it selects is
read into an array of just these, and the index, now in terms of that array, is
NumPy's to apply. Runs of bytes with small gaps between them are read with one
call, the gaps included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

__all__ = ["gathered"]

Read = Callable[[int, memoryview], None]
Selected = range | np.ndarray[Any, Any]  # coordinates along one dimension, ascending, each once

# Bytes between two runs that are cheaper to read than another call is (measured: about 4 us a call, 5 GB/s).
GAP = 16 << 10
# Bytes read at a time where there are gaps: they stay in the CPU's cache until what is selected is taken out.
WINDOW = 512 << 10


def gathered(
    read: Read, offset: int, shape: Sequence[int], dtype: np.dtype[Any], index: tuple[Any, ...]
) -> np.ndarray[Any, Any]:
    """Return ``array[index]`` for an array whose bytes are read by ``read(offset, out)``.

    Parameters
    ----------
    read : callable
        Fills memory from the bytes at an offset.
    offset : int
        Of the array's first byte; it lies in C order.
    shape, dtype
        Of the array.
    index : tuple
        See `_index.checked`.

    Returns
    -------
    ndarray
        New, writable, in C order; of no dimensions for a single element.

    Raises
    ------
    IndexError
        NumPy's, for arrays of coordinates out of bounds or masks that do not fit.

    Notes
    -----
    Reads the bytes that are selected and gaps of at most `GAP` bytes between them.
    """
    run = _one_run(index, shape, dtype.itemsize)
    if run is not None:
        begin, kept = run
        array = np.zeros(kept, dtype)
        if array.size:
            read(offset + begin, _bytes_of(array))
        return array
    try:
        selected, rebased = _selections(index, tuple(shape))
    except IndexError:
        # NumPy's words for it; or no error, where nothing is selected at all.
        return np.zeros(np.broadcast_to(np.zeros((), np.uint8), shape)[index].shape, dtype)
    box = np.zeros([len(s) for s in selected], dtype)
    if box.size:
        _Box(read, shape, dtype, selected).fill(0, offset, box)
    return np.array(box[rebased], order="C", copy=None)


def _one_run(index: tuple[Any, ...], shape: Sequence[int], itemsize: int) -> tuple[int, list[int]] | None:
    """The first byte and the shape of what is selected, if it is one run of bytes, as parts mostly are."""
    kept: list[int] = []
    begin, stride, whole = 0, itemsize, True
    if len(index) != len(shape):
        return None
    for item, size in zip(reversed(index), reversed(shape), strict=True):
        if type(item) is slice:
            first, last, step = item.indices(size)
            count = max(last - first, 0) if step == 1 else len(range(first, last, step))
            kept.append(count)
        elif type(item) is int:
            first, count, step = item % size, 1, 1
        else:
            return None
        if count > 1 and (step != 1 or not whole):
            return None
        whole = whole and count == size  # a part of this dimension: one of each dimension outside it, or gaps
        begin += first * stride
        stride *= size
    return begin, kept[::-1]


def _selections(index: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[list[Selected], tuple[Any, ...]]:
    """The coordinates that an index needs along each dimension, and the index in terms of their positions."""
    selected: list[Selected] = []
    rebased: list[Any] = []
    for item in index:
        if item is None or item is Ellipsis or isinstance(item, bool):
            rebased.append(item)
        elif isinstance(item, np.ndarray):
            for coordinates in _coordinates(item, shape, len(selected)):
                unique = np.unique(coordinates)
                selected.append(unique)
                rebased.append(np.searchsorted(unique, coordinates))
        elif isinstance(item, slice):
            steps = range(*item.indices(shape[len(selected)]))
            selected.append(steps if steps.step > 0 else steps[::-1])
            rebased.append(slice(None, None, 1 if steps.step > 0 else -1))
        else:
            at = item % shape[len(selected)]
            selected.append(range(at, at + 1))
            rebased.append(0)
    return selected, tuple(rebased)


def _coordinates(array: np.ndarray[Any, Any], shape: tuple[int, ...], dim: int) -> tuple[np.ndarray[Any, Any], ...]:
    """The coordinates, none negative, of an array of them or of a mask."""
    if array.dtype.kind == "b":
        if array.shape != shape[dim : dim + array.ndim]:
            raise IndexError
        return array.nonzero()
    size = shape[dim]
    if array.size and (int(array.min()) < -size or int(array.max()) >= size):
        raise IndexError
    signed = array.astype(np.intp)
    return (np.where(signed < 0, signed + size, signed),)


class _Box:
    """Reads what is selected of one array, dimension by dimension.

    Per dimension k, for the part of the box inside one coordinate of the
    dimensions before it: `span` is the bytes from its first to its last, `lead`
    the bytes before its first, `dense` whether it is one run, `close` whether
    no gap in it is over `GAP`.
    """

    def __init__(self, read: Read, shape: Sequence[int], dtype: np.dtype[Any], selected: list[Selected]) -> None:
        rank = len(shape)
        self.read, self.dtype, self.selected = read, dtype, selected
        self.run = bytearray()
        self.strides = [dtype.itemsize * prod(shape[k + 1 :]) for k in range(rank)]
        self.span, self.lead = [dtype.itemsize] * (rank + 1), [0] * (rank + 1)
        self.dense, self.close = [True] * (rank + 1), [True] * (rank + 1)
        nbytes = dtype.itemsize
        for k in range(rank - 1, -1, -1):
            coordinates, stride = selected[k], self.strides[k]
            nbytes *= len(coordinates)
            self.lead[k] = int(coordinates[0]) * stride + self.lead[k + 1]
            self.span[k] = int(coordinates[-1] - coordinates[0]) * stride + self.span[k + 1]
            self.dense[k] = self.span[k] == nbytes
            self.close[k] = self.close[k + 1] and _widest(coordinates) * stride - self.span[k + 1] <= GAP

    def fill(self, k: int, offset: int, out: np.ndarray[Any, Any]) -> None:
        """Read the part of the box from dimension `k` on; `offset` is that of the coordinates before it."""
        if self.dense[k]:
            self.read(offset + self.lead[k], _bytes_of(out))
        elif self.close[k] and self.span[k] <= WINDOW:
            self._window(k, offset, self.selected[k], out)
        elif self.close[k + 1] and self.span[k + 1] <= WINDOW:
            for begin, end in self._chunks(k):
                if end - begin == 1 and self.dense[k + 1]:
                    at = offset + int(self.selected[k][begin]) * self.strides[k] + self.lead[k + 1]
                    self.read(at, _bytes_of(out[begin:end]))
                else:
                    self._window(k, offset, self.selected[k][begin:end], out[begin:end])
        else:
            for i, coordinate in enumerate(self.selected[k]):
                self.fill(k + 1, offset + int(coordinate) * self.strides[k], out[i, ...])

    def _chunks(self, k: int) -> list[tuple[int, int]]:
        """Runs of coordinates along `k` that one read may take."""
        coordinates = np.asarray(self.selected[k])
        stride, span = self.strides[k], self.span[k + 1]
        most = max((WINDOW - span) // stride, 0)  # coordinates from the first to the last of one read
        far = np.flatnonzero(np.diff(coordinates) * stride - span > GAP) + 1
        chunks: list[tuple[int, int]] = []
        for begin, end in zip([0, *far.tolist()], [*far.tolist(), len(coordinates)], strict=True):
            while begin < end:
                after = min(end, int(np.searchsorted(coordinates, coordinates[begin] + most, "right")))
                chunks.append((begin, after))
                begin = after
        return chunks

    def _window(self, k: int, offset: int, coordinates: Selected, out: np.ndarray[Any, Any]) -> None:
        """Read one run with its gaps, and take from it what is selected."""
        parts = [coordinates, *self.selected[k + 1 :]]
        extents = [int(c[-1] - c[0]) + 1 for c in parts]
        span = int(coordinates[-1] - coordinates[0]) * self.strides[k] + self.span[k + 1]
        if len(self.run) < span:
            self.run = bytearray(span)
        self.read(offset + int(coordinates[0]) * self.strides[k] + self.lead[k + 1], memoryview(self.run)[:span])
        array = np.ndarray(extents, self.dtype, self.run, 0, self.strides[k:])
        if all(isinstance(c, range) for c in parts):
            out[...] = array[tuple(slice(None, None, c.step) for c in parts if isinstance(c, range))]
        else:
            out[...] = array[np.ix_(*[np.asarray(c) - int(c[0]) for c in parts])]


def _widest(coordinates: Selected) -> int:
    """The largest step between neighbours; 0 for a single coordinate."""
    if len(coordinates) < 2:
        return 0
    return coordinates.step if isinstance(coordinates, range) else int(np.diff(coordinates).max())


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
