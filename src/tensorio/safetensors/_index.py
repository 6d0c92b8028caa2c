"""Indexes as NumPy has them, checked against a shape and brought into one form.

The rules are NumPy's, but for what users of the format rely on to be refused: a
bound behind the end of its dimension, and a list where an index is expected (a
list within a tuple is an index like any other).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorio.safetensors._errors import SafetensorIndexError

__all__ = ["checked"]

Shape = tuple[int, ...]


def checked(index: Any, shape: Shape) -> tuple[Any, ...]:
    """Return an index as a tuple of one item per dimension (None and flags besides), or say what is wrong with it.

    Parameters
    ----------
    index : object
        What stands between the brackets.
    shape : tuple of int

    Returns
    -------
    tuple
        Of int (may be negative), slice (with bounds), None, bool, and arrays of
        integers or bool; an ellipsis only where it stands for no dimension.

    Raises
    ------
    SafetensorIndexError
    """
    given = index if type(index) is tuple else (index,)
    if len(given) <= len(shape) and all(map(_is_simple, given, shape)):
        return given + (slice(None),) * (len(shape) - len(given))
    if isinstance(index, list) and index:
        raise SafetensorIndexError("Non empty lists are not implemented")
    items = [_plain(item, i) for i, item in enumerate(index if isinstance(index, tuple) else (index,))]
    used = sum(_dims(item) for item in items)
    if used > len(shape):
        raise SafetensorIndexError(_during(items, shape, "more slicing indexes than dimensions in tensor"))
    if sum(item is Ellipsis for item in items) > 1:
        raise SafetensorIndexError("Only one ellipsis (...) is allowed in slice index")
    at = next((i for i, item in enumerate(items) if item is Ellipsis), None)
    rest = [slice(None)] * (len(shape) - used)
    if at is not None and rest:  # one that stands for no dimension stays: between arrays, it still parts them
        items[at : at + 1], rest = rest, []
    dim = 0
    for i, item in enumerate(items):
        if isinstance(item, int) and not isinstance(item, bool):
            _check_number(item, dim, items, shape)
        elif isinstance(item, slice):
            items[i] = _bounded(item, dim, items, shape)
        dim += _dims(item)
    return (*items, *rest)


def _is_simple(item: Any, size: int) -> bool:
    """Whether an item is an int or a slice of ints within its dimension, as nearly all are."""
    if type(item) is slice:
        start, stop, step = item.start, item.stop, item.step
        return (
            (start is None or (type(start) is int and start <= size))
            and (stop is None or (type(stop) is int and stop <= size))
            and (step is None or (type(step) is int and step != 0))
        )
    return type(item) is int and -size <= item < size


def _plain(item: Any, position: int) -> Any:
    """One item as int, bool, slice, None, Ellipsis or array."""
    if item is None or item is Ellipsis or isinstance(item, slice | bool):
        return item
    if isinstance(item, np.bool_):
        return bool(item)
    if hasattr(type(item), "__index__") and not getattr(item, "shape", ()):
        try:
            return operator.index(item)
        except TypeError:
            pass  # an array of no dimensions that is no integer
    if isinstance(item, Sequence | np.ndarray) or hasattr(item, "__array__"):
        array = item if isinstance(item, str | bytes) else np.asarray(item)
        if isinstance(array, np.ndarray):
            if array.size == 0 and not isinstance(item, np.ndarray):
                return array.astype(np.intp)
            if array.dtype.kind in "iub":
                return array
    raise SafetensorIndexError(f"Unsupported slice index at position {position}: expected slice, int, or ellipsis")


def _dims(item: Any) -> int:
    """How many dimensions of the tensor an item is for."""
    if isinstance(item, np.ndarray) and item.dtype.kind == "b":
        return item.ndim
    return 0 if item is None or item is Ellipsis or isinstance(item, bool) else 1


def _check_number(number: int, dim: int, items: list[Any], shape: Shape) -> None:
    if number < -shape[dim]:
        raise SafetensorIndexError(f"Invalid index {number} for dimension {dim} of size {shape[dim]}")
    if number >= shape[dim]:
        raise _behind(number, dim, items, shape)


def _bounded(item: slice, dim: int, items: list[Any], shape: Shape) -> slice:
    """A slice of plain ints, none of which is behind the end."""
    try:
        start, stop, step = (None if v is None else operator.index(v) for v in (item.start, item.stop, item.step))
    except TypeError as error:
        raise SafetensorIndexError(f"slice bounds of dimension {dim}: {error}") from None
    if step == 0:
        raise SafetensorIndexError("Slice step must be a positive integer, got 0")
    if start is not None and start > shape[dim]:
        raise _behind(start, dim, items, shape)
    if stop is not None and stop > shape[dim]:
        raise _behind(stop - 1, dim, items, shape)
    return slice(start, stop, step)


def _behind(number: int, dim: int, items: list[Any], shape: Shape) -> SafetensorIndexError:
    what = f"index {number} out of bounds for tensor dimension #{dim} of size {shape[dim]}"
    return SafetensorIndexError(_during(items, shape, what))


def _during(items: list[Any], shape: Shape, what: str) -> str:
    return f"Error during slicing [{', '.join(map(_shown, items))}] with shape {list(shape)}: {what}"


def _shown(item: Any) -> str:
    if isinstance(item, slice):
        start, stop = ("" if v is None else str(v) for v in (item.start, item.stop))
        return f"{start}:{stop}" + ("" if item.step is None else f":{item.step}")
    if isinstance(item, np.ndarray):
        return f"array of shape {list(item.shape)}"
    return "..." if item is Ellipsis else str(item)
