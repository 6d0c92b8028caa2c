"""Arrays out of the tensors that NumPy has no array for.

Imported when one is asked for. What the parts say of each other was proven by
their `check`; what is proven here are the values of indices, before they are
used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorio.dtypes import numpy_dtype
from tensorio.errors import HeaderError, LimitError, UnsupportedError
from tensorio.kinds._base import QUANTIZED, JaggedTensor, NestedTensor, QuantizedTensor, product
from tensorio.kinds.sparse import SparseTensor

__all__ = ["compressed", "coo", "dequantized", "prove_inside", "split", "unbound"]

Array = np.ndarray[Any, Any]

MAX_RANK = 64  # NumPy's NPY_MAXDIMS

# ----------------------------------------------------------------------- sparse


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Zeros of a shape that comes from a file."""
    if len(shape) > MAX_RANK or product(tuple(max(n, 1) for n in shape)) * dtype.itemsize >> 63:
        raise LimitError(f"a tensor of {len(shape)} dimensions and {product(shape)} elements; NumPy has no such arrays")
    return np.zeros(shape, dtype)


def _values(kind: SparseTensor) -> tuple[Array, int]:
    """The values in a type that can be added; and how many dimensions that took."""
    values: Array = kind.values
    if values.dtype == numpy_dtype("complex32"):  # as pairs of its halves
        return np.ascontiguousarray(values).view(np.float16).reshape(*values.shape, 2), 1
    if values.dtype.name == "float8_e8m0fnu":
        raise UnsupportedError("a sparse tensor of float8_e8m0fnu, which has no zero")
    return values, 0


def _finish(out: Array, halves: int) -> Array:
    return out.view(numpy_dtype("complex32"))[..., 0] if halves else out


def _inside(what: str, indices: Array, bound: int) -> None:
    """Prove indices inside their dimension."""
    if indices.size:
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= bound:
            raise HeaderError(f"sparse tensor: {what} {low if low < 0 else high} in a dimension of size {bound}")


def _add(out: Array, at: tuple[Array, ...], order: Array, values: Array) -> None:
    """Add values in turn; to zero, so that minus zero becomes zero as it does in torch.

    `order` numbers the places: where it only grows, no place comes twice.
    """
    with np.errstate(all="ignore"):
        if (order[1:] > order[:-1]).all():
            out[at] += values
        else:
            np.add.at(out, at, values)


def coo(kind: SparseTensor) -> Array:
    """See `SparseTensor.dense`."""
    values, halves = _values(kind)
    indices: Array = kind.indices
    out = _zeros((*kind.shape, *values.shape[values.ndim - halves :]), values.dtype)
    sparse, count = indices.shape
    if not out.size:
        if count and 0 in kind.shape[:sparse]:
            raise _nowhere(kind, count)
        return _finish(out, halves)
    at = np.zeros(count, np.int64)
    for row, size in zip(indices, kind.shape, strict=False):
        _inside("index", row, size)
        at *= size
        at += row
    _add(out.reshape(-1, *out.shape[sparse:]), (at,), at, values)
    return _finish(out, halves)


def _nowhere(kind: SparseTensor, count: int) -> HeaderError:
    return HeaderError(f"sparse tensor: {count} elements in a tensor of shape {kind.shape}, which has no room for any")


def compressed(kind: SparseTensor) -> Array:
    """See `SparseTensor.dense`."""
    values, halves = _values(kind)
    pointers, plain = kind.compressed, kind.indices
    assert pointers is not None
    batch, count = pointers.ndim - 1, plain.shape[-1]
    out = _zeros((*kind.shape, *values.shape[values.ndim - halves :]), values.dtype)
    if not out.size:
        if plain.size and 0 in kind.shape[: batch + 2]:
            raise _nowhere(kind, count)
        return _finish(out, halves)
    block = values.shape[batch + 1 : batch + 3] if kind.layout[0] == "b" else (1, 1)
    rows, columns = (n // b for n, b in zip(kind.shape[batch : batch + 2], block, strict=True))
    by_row = kind.layout.endswith("sr")
    majors, minors = (rows, columns) if by_row else (columns, rows)
    lists = product(kind.shape[:batch])
    _inside("plain index", plain, minors)
    steps = _steps(pointers.reshape(lists, majors + 1), count)
    which = np.repeat(np.arange(lists), count)
    major = np.repeat(np.tile(np.arange(majors), lists), steps.reshape(-1))
    minor = plain.reshape(-1)
    tail = out.shape[batch + 2 :]
    if kind.layout[0] == "b":
        view = out.reshape(lists, rows, block[0], columns, block[1], *tail).swapaxes(2, 3)
        values = values.reshape(lists * count, *block, *tail)
    else:
        view = out.reshape(lists, rows, columns, *tail)
        values = values.reshape(lists * count, *tail)
    place = (which, major, minor) if by_row else (which, minor, major)
    _add(view, place, (which * majors + major) * minors + minor, values)
    return _finish(out, halves)


def _steps(pointers: Array, count: int) -> Array:
    """How many elements each row (or column) has, proven to be `count` in each list."""
    steps = np.diff(pointers, axis=1)
    if (pointers[:, 0] != 0).any() or (pointers[:, -1] != count).any() or (steps < 0).any():
        raise HeaderError(f"sparse tensor: expected compressed indices that grow from 0 to {count} elements")
    return steps


# -------------------------------------------------------------------- quantized


def dequantized(kind: QuantizedTensor) -> Array:
    """See `QuantizedTensor.dequantize`.

    Each rounding is that of torch's kernels (release 2.13): with one scale,
    the difference of integers and the scale become float32; with many, the
    integers become float32 at once, and are multiplied by a float64.
    """
    values = np.atleast_1d(_integers(kind))
    scale, zero = np.asarray(kind.scale), np.asarray(kind.zero_point)
    if kind.axis is not None:
        along = [1] * len(kind.shape)
        along[kind.axis] = kind.shape[kind.axis]
        scale, zero = scale.reshape(along), zero.reshape(along)
    with np.errstate(all="ignore"):
        if kind.axis is None:
            whole = values.astype(np.int32)
            whole -= zero.astype(np.int32)
            out = whole.astype(np.float32)
        else:
            out = values.astype(np.float32)
            out -= zero.astype(np.float32)
        if kind.axis is None or zero.dtype.kind == "f":
            out *= scale.astype(np.float32)
        else:
            np.multiply(out, scale, out=out, dtype=np.float64, casting="same_kind")
    return out.reshape(kind.shape)


def _integers(kind: QuantizedTensor) -> Array:
    """The integers of a quantized tensor in its shape."""
    values: Array = kind.values
    _, bits = QUANTIZED[kind.dtype]
    if bits >= 8:
        return values
    count = product(kind.shape)
    parts = values[: -(-count * bits // 8), None] >> np.arange(0, 8, bits, dtype=np.uint8)
    parts &= np.uint8((1 << bits) - 1)
    return parts.reshape(-1)[:count].reshape(kind.shape)


# ----------------------------------------------------------------------- nested


def unbound(kind: NestedTensor) -> list[Array]:
    """See `NestedTensor.unbind`."""
    buffer: Array = kind.buffer
    offsets = prove_inside(kind)
    places = zip(offsets.tolist(), kind.sizes.tolist(), kind.strides.tolist(), strict=True) if len(offsets) else ()
    return [_view(buffer[offset:], size, stride) for offset, size, stride in places]


def prove_inside(kind: NestedTensor) -> Array:
    """Prove that each tensor of a nested one lies in the buffer, and return their offsets.

    A buffer has bytes of its own, so that sums of its positions can't overflow.
    """
    offsets = np.asarray(kind.offsets, np.int64)
    room, count = kind.buffer.size, len(offsets)
    if not count:
        return offsets
    reach, bad, empty = np.ones(count, np.int64), offsets < 0, np.zeros(count, bool)
    for size, step in zip(kind.sizes.T, kind.strides.T, strict=True):
        steps = np.maximum(size - 1, 0)
        bad |= (size < 0) | (step < 0)
        empty |= size == 0
        fits = step <= room // np.maximum(steps, 1)
        reach += np.where(fits & ~bad, steps * np.where(fits, step, 0), np.where(steps > 0, room, 0))
        np.minimum(reach, room + 1, out=reach)
    reach[empty] = 0
    bad |= (reach > room) | (offsets > room - np.minimum(reach, room))
    if bad.any():
        i = int(bad.argmax())
        raise HeaderError(f"nested tensor: tensor {i} of shape {kind.sizes[i].tolist()} at {offsets[i]} leaves the "
                          f"buffer of {room} elements")  # fmt: skip
    return offsets


def _view(flat: Array, size: list[int], stride: list[int]) -> Array:
    """A strided view, which was proven to lie inside."""
    if product(tuple(max(n, 1) for n in size)) * flat.itemsize >> 63:
        raise LimitError("a nested tensor of over 2^63 - 1 bytes; NumPy has no such arrays")
    steps = [step * flat.strides[0] if n > 1 and 0 not in size else 0 for n, step in zip(size, stride, strict=True)]
    return np.lib.stride_tricks.as_strided(flat, size, steps, writeable=flat.flags.writeable)


def split(kind: JaggedTensor) -> list[Array]:
    """See `JaggedTensor.unbind`."""
    values: Array = kind.values
    axis = kind.ragged_idx - 1
    starts = kind.offsets.tolist()
    if kind.lengths is None:
        ends = starts[1:]
    else:
        ends = [start + length for start, length in zip(starts, kind.lengths.tolist(), strict=False)]
    out = []
    for i, (start, end) in enumerate(zip(starts, ends, strict=False)):
        if not 0 <= start <= end <= values.shape[axis]:
            raise HeaderError(
                f"jagged tensor: tensor {i} from {start} to {end} of a dimension of size {values.shape[axis]}"
            )
        out.append(values[(slice(None),) * axis + (slice(start, end),)])
    return out
