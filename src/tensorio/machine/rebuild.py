"""The rare kinds of the pickle machine: NumPy's own pickles, conjugated tensors.

Called by the compiled machine with arguments that come from the file; each
checks all of them before anything is made.
"""

from __future__ import annotations

import math
import re
import sys
from typing import Any

import numpy as np

from tensorio.dtypes import c_strides, numpy_dtype, of_numpy
from tensorio.errors import HeaderError, LimitError, UnsupportedError, escaped

__all__ = [
    "lazy_bits",
    "np_dtype",
    "np_dtype_state",
    "np_empty",
    "np_has_objects",
    "np_layout",
    "np_made",
    "np_nbytes",
    "np_reconstruct",
    "np_scalar",
    "np_state",
    "np_transposed",
]

# One letter of a plain type, or O for arrays of Python objects, and its width in bytes.
# Not M and m: NumPy (2.4) crashes on a state without a unit, and one with a unit is refused below.
_TYPE = re.compile(r"(?:[biufcSUV?]\d{0,9}|O8?)\Z")
_ORDERS = ("<", ">", "|", "=")
_MAX_NESTED = 64  # arrays of objects in one another
_MAX_ELEMENT = 1 << 20  # bytes of one string or void element


def lazy_bits(array: Any, conj: bool, neg: bool) -> Any:
    """Return the values of an array whose conjugation or negation torch left undone (a copy).

    What an expanded tensor says many times is computed once.
    """
    once = array[tuple(slice(0, 1) if step == 0 else slice(None) for step in array.strides)]
    try:
        if conj:
            once = np.conj(once)
        if neg:
            once = np.negative(once)
        return once if once.shape == array.shape else np.broadcast_to(once, array.shape)
    except TypeError:
        raise UnsupportedError(f"a tensor of {array.dtype} whose negation or conjugation was left undone") from None


def np_dtype(args: tuple[Any, ...]) -> np.dtype[Any]:
    """Answer ``numpy.dtype(letter, align, copy)`` with a fresh dtype; or, of a type of ml_dtypes, with the only one."""
    if 1 <= len(args) <= 3 and getattr(args[0], "kind_name", "") == "np_type":
        return numpy_dtype(args[0].name)
    letter = _word(args[0]) if 1 <= len(args) <= 3 else None
    if type(letter) is not str or not _TYPE.match(letter):
        raise UnsupportedError(f"NumPy dtype {escaped(letter)} in a pickle: expected a plain type")
    try:
        dtype: np.dtype[Any] = np.dtype(letter, False, True)
    except TypeError:
        raise UnsupportedError(f"NumPy dtype {escaped(letter)} in a pickle: NumPy has no such type") from None
    if dtype.itemsize > _MAX_ELEMENT:
        raise UnsupportedError(f"NumPy dtype of {dtype.itemsize} bytes per element")
    return dtype


def np_dtype_state(dtype: np.dtype[Any], state: Any) -> None:
    """Set the byte order of a dtype made by `np_dtype`; fields, shapes and metadata are refused."""
    if type(state) is not tuple or len(state) not in (5, 8, 9) or not _is_int(state[0]) or state[0] not in (3, 4):
        raise HeaderError("NumPy dtype in a pickle: expected a state of 5, 8 or 9 parts")
    order = _word(state[1])
    if type(order) is not str or order not in _ORDERS:
        raise HeaderError("NumPy dtype in a pickle: expected a byte order")
    if any(part is not None for part in (*state[2:5], *state[8:])):
        raise UnsupportedError("NumPy dtype with fields, a shape or a unit in a pickle")
    if not all(_is_int(part) for part in state[5:8]):
        raise HeaderError("NumPy dtype in a pickle: expected size, alignment and flags as ints")
    if dtype.isbuiltin == 2:  # a type of ml_dtypes, which everybody shares
        if order == (">" if sys.byteorder == "little" else "<"):
            raise UnsupportedError(f"NumPy dtype {dtype.name} of the other byte order in a pickle")
        return
    flags = 63 if dtype.hasobject else 0
    # Element size and alignment are the type's own (-1), or a string's width.
    size = (dtype.itemsize, 4 if dtype.kind == "U" else 1) if dtype.kind in "SUV" else (-1, -1)
    dtype.__setstate__((3, order, None, None, None, *size, flags))  # type: ignore[attr-defined]


def np_reconstruct(args: tuple[Any, ...]) -> np.ndarray[Any, Any]:
    """Answer ``_reconstruct(ndarray, (0,), b"b")`` with an empty array."""
    cls, shape, _ = args if len(args) == 3 else (None, None, None)
    if getattr(cls, "kind_name", "") != "np_ndarray" or type(shape) is not tuple or list(map(type, shape)) != [int]:
        raise HeaderError("NumPy array in a pickle: expected the arguments (ndarray, (0,), b'b')")
    return np_empty()


def np_empty() -> np.ndarray[Any, Any]:
    """Return an array to be filled by `np_state`."""
    return np.empty(0, np.int8)


def np_state(
    array: np.ndarray[Any, Any], state: Any, unfilled: dict[int, Any], nested: dict[int, tuple[Any, int]]
) -> None:
    """Fill an array made by `np_reconstruct`, once the state is proven to fit its bytes.

    Parameters
    ----------
    unfilled : dict
        By id, the arrays that are still to be filled.
    nested : dict
        By id, (array of objects, levels of such arrays in it): NumPy frees them recursively,
        and a thread's stack ends after some thousand.
    """
    if type(state) is not tuple or len(state) != 5 or not _is_int(state[0]) or state[0] != 1:
        raise HeaderError("NumPy array in a pickle: expected a state (1, shape, dtype, order, data)")
    _, shape, dtype, fortran, data = state
    _check_layout(shape, dtype, fortran)
    numel = math.prod(shape)
    want = numel if dtype.hasobject else numel * dtype.itemsize
    if dtype.hasobject:
        fits = type(data) is list and len(data) == want
    else:
        data = _bytes_of(data)
        fits = len(data) == want and math.prod(n for n in shape if n) * dtype.itemsize < 1 << 63
    if not fits:
        raise HeaderError(f"NumPy array in a pickle: expected {want} bytes of data for shape {str(shape)[:80]}")
    if dtype.hasobject:
        inner = [part for part in data if type(part) is np.ndarray]
        if any(part is array or id(part) in unfilled for part in inner):
            raise UnsupportedError("NumPy array of objects in a pickle: it holds an array that has no contents yet")
        depth = 1 + max([nested[id(part)][1] for part in inner if id(part) in nested], default=0)
        if depth > _MAX_NESTED:
            raise LimitError(f"NumPy arrays of objects in one another: over {_MAX_NESTED} levels")
        nested[id(array)] = (array, depth)
    array.__setstate__((1, shape, dtype, bool(fortran), data))  # type: ignore[arg-type]


def _check_layout(shape: Any, dtype: Any, fortran: Any) -> None:
    if type(shape) is not tuple or len(shape) > 64 or not all(_is_int(n) and 0 <= n < 1 << 63 for n in shape):
        raise HeaderError("NumPy array in a pickle: expected a shape of non-negative ints")
    if not isinstance(dtype, np.dtype):
        raise HeaderError(f"NumPy array in a pickle: expected a dtype, found {type(dtype).__name__}")
    if type(fortran) not in (bool, int):
        raise HeaderError("NumPy array in a pickle: expected an order (bool)")


def np_has_objects(shape: Any, dtype: Any) -> bool:
    """Tell whether an array is one of Python objects; its shape and dtype are checked."""
    _check_layout(shape, dtype, False)
    return bool(dtype.hasobject)


def np_nbytes(shape: Any, dtype: Any) -> int:
    """Return the bytes of an array of a plain dtype."""
    nbytes: int = math.prod(shape) * dtype.itemsize
    if nbytes >= 1 << 63:
        raise HeaderError("NumPy array in a pickle: over 2^63 - 1 bytes")
    return nbytes


def np_transposed(array: Any, axes: Any) -> Any:
    """Return a view with its axes in another order."""
    return array.transpose(_order_of(axes, array.ndim))


def _order_of(axes: Any, rank: int) -> tuple[int, ...]:
    if type(axes) is not tuple or not all(map(_is_int, axes)) or sorted(axes) != list(range(rank)):
        raise HeaderError("NumPy array in a pickle: expected its axes in some order")
    return axes


def np_layout(
    shape: Any, dtype: Any, fortran: Any, nbytes: int, axes: Any = None
) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
    """Return (dtype code, shape, strides in bytes) of an array of `nbytes`; None if it is no plain tensor."""
    _check_layout(shape, dtype, fortran)
    row = None if dtype.hasobject or not dtype.isnative else of_numpy(dtype)
    if row is None:
        return None
    want = math.prod(shape) * dtype.itemsize
    if want != nbytes:
        raise HeaderError(f"NumPy array in a pickle: expected {want} bytes of data for shape {str(shape)[:80]}")
    strides = c_strides(shape[::-1] if fortran else shape, dtype.itemsize)
    if any(step >= 1 << 63 for step in strides):  # no element is there to be reached by them
        return None
    strides = strides[::-1] if fortran else strides
    if axes is not None:
        order = _order_of(axes, len(shape))
        shape, strides = tuple(shape[axis] for axis in order), tuple(strides[axis] for axis in order)
    return row.code, shape, strides


def np_made(array: Any) -> tuple[tuple[int, Any, tuple[int, ...]] | None, Any]:
    """Return what `np_layout` does of an array in memory, and its bytes in native order, flat (a view or a copy)."""
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    fortran = native.flags.f_contiguous and not native.flags.c_contiguous
    layout = np_layout(native.shape, native.dtype, fortran, native.nbytes)
    return layout, None if layout is None else native.reshape(-1, order="F" if fortran else "C").view(np.uint8)


def np_scalar(args: tuple[Any, ...]) -> Any:
    """Answer ``scalar(dtype, bytes)``."""
    if len(args) != 2 or not isinstance(args[0], np.dtype) or args[0].hasobject or args[0].itemsize == 0:
        raise HeaderError("NumPy scalar in a pickle: expected a plain dtype and bytes")
    dtype, data = args[0], _bytes_of(args[1])
    if len(data) != dtype.itemsize:
        raise HeaderError(f"NumPy scalar in a pickle: expected {dtype.itemsize} bytes")
    try:
        return np.frombuffer(data, dtype)[0]
    except (ValueError, SystemError):  # characters above U+10FFFF
        raise HeaderError("NumPy scalar in a pickle: its bytes are no value of its type") from None


def _is_int(value: object) -> bool:
    """Exactly an int: whatever else the file put there may compare in ways of its own."""
    return type(value) is int


def _word(value: object) -> object:
    """A word as text, which Python 2's is not if it was asked for as bytes."""
    return value.decode("latin-1") if type(value) is bytes else value


def _bytes_of(data: object) -> bytes:
    """Bytes, which protocol 5 writes as a bytearray, and Python 2 as text of characters below U+0100."""
    if type(data) is bytearray:
        return bytes(data)
    if type(data) is str and all(c < "\u0100" for c in data):
        return data.encode("latin-1")
    if type(data) is not bytes:
        raise HeaderError(f"NumPy data in a pickle: expected bytes, found {type(data).__name__}")
    return data
