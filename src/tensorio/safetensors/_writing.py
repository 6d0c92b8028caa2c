"""Tensors as files and bytes: descriptions by address, plans, and where they go."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from tensorio import _core, _host
from tensorio.dtypes import BY_NAME
from tensorio.errors import TensorIOError, UnsupportedError
from tensorio.formats import safetensors as _format
from tensorio.formats._base import SaveOptions
from tensorio.plan import FlatPlan
from tensorio.safetensors._errors import (
    SAVING,
    SafetensorMismatchError,
    SafetensorUnsupportedError,
    explained,
    rejected,
)
from tensorio.safetensors._file import CODES, of_buffer
from tensorio.writing.output import write_plan

__all__ = ["TensorSpec", "bytes_of", "deserialize", "plan_of", "serialize", "serialize_file", "unknown_dtype", "write"]

Metadata = Mapping[str, str]

# What a TensorSpec may be told -> canonical name.
_NAMES = {
    name: name
    for name in (
        "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32",
        "float64", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
        "float8_e8m0fnu", "float4_e2m1fn_x2", "complex64",
    )
}  # fmt: skip


def unknown_dtype(name: object) -> SafetensorUnsupportedError:
    """Return the error for an element type that the format does not have."""
    return SafetensorUnsupportedError(f'Unknown dtype "{name}". Supported dtypes: {", ".join(_NAMES)}')


class TensorSpec:
    """A tensor to be written, by its address.

    Parameters
    ----------
    dtype : str
        E.g. ``"float32"``, ``"bfloat16"``.
    shape : sequence of int
        In elements; for ``"float4_e2m1fn_x2"`` in bytes of two each, the last dimension is doubled.
    data_ptr : int
        Address of the first element; they lie in C order, little-endian. Whoever
        calls keeps the memory until the file is written.
    data_len : int
        Bytes.
    """

    __slots__ = ("_data_len", "_data_ptr", "_name", "_shape")

    def __init__(self, *, dtype: str, shape: Sequence[int], data_ptr: int, data_len: int) -> None:
        if dtype not in _NAMES:
            raise unknown_dtype(dtype)
        dims = [_unsigned(n) for n in shape]
        self._name = dtype
        if dtype == "float4_e2m1fn_x2":
            self._name = "float4_e2m1fn"
            dims[-1:] = [2 * n for n in dims[-1:]]
        self._shape = dims
        self._data_ptr = _unsigned(data_ptr)
        self._data_len = _unsigned(data_len)

    @property
    def dtype(self) -> str:
        """What the format calls the elements, e.g. ``"F32"``."""
        return CODES[self._name]

    @property
    def shape(self) -> list[int]:
        """The shape in elements, as it will be written."""
        return list(self._shape)

    @property
    def data_ptr(self) -> int:
        """Address of the first element."""
        return self._data_ptr

    @property
    def data_len(self) -> int:
        """Size in bytes."""
        return self._data_len

    def __repr__(self) -> str:
        return (
            f"TensorSpec(dtype={self.dtype!r}, shape={self._shape}, data_ptr={self._data_ptr}, "
            f"data_len={self._data_len})"
        )


def _unsigned(number: Any) -> int:
    value = operator.index(number)
    if not 0 <= value < 1 << 64:
        raise OverflowError(f"expected a number from 0 to 2**64 - 1, found {value}")
    return value


def serialize(tensor_dict: dict[str, Any], metadata: Metadata | None = None) -> bytes:
    """Return a file with tensors that lie in memory, as bytes.

    Parameters
    ----------
    tensor_dict : dict of str to TensorSpec
        Or to the form of older releases: a dict of ``dtype``, ``shape`` and
        ``data``, a buffer.
    metadata : mapping of str to str, optional
        Notes; written sorted by key.

    Raises
    ------
    SafetensorError
        A size that does not fit its shape, a name that can't be written.
    TypeError
        Something else than names, specs and text.

    Notes
    -----
    Releases the GIL while it copies.
    """
    return bytes_of(_plan_specs(tensor_dict, metadata))


def serialize_file(tensor_dict: dict[str, Any], filename: Any, metadata: Metadata | None = None) -> None:
    """Write a file with tensors that lie in memory; see `serialize` and `write`."""
    write(_plan_specs(tensor_dict, metadata), filename)


def _plan_specs(tensor_dict: dict[str, Any], metadata: Metadata | None) -> FlatPlan:
    from tensorio.formats._items import Items

    if not isinstance(tensor_dict, dict):
        raise TypeError(f"argument 'tensor_dict': '{type(tensor_dict).__name__}' object is not an instance of 'dict'")
    items = Items()
    for name, value in tensor_dict.items():
        require_name(name)
        if isinstance(value, TensorSpec):
            _require_size(name, value)
            items.add(name, value._name, tuple(value._shape)).add_memory(value._data_ptr, value._data_len)
        elif isinstance(value, dict) and "data" in value:
            data = memoryview(value["data"]).cast("B")
            spec = TensorSpec(dtype=value["dtype"], shape=value["shape"], data_ptr=0, data_len=data.nbytes)
            _require_size(name, spec, held=True)
            items.add(name, spec._name, tuple(spec._shape)).add(data, data.nbytes)
        else:
            raise TypeError(
                f"argument 'tensor_dict': '{type(value).__name__}' object is not an instance of 'TensorSpec'"
            )
    return planned(lambda: _format.plan_items(items, SaveOptions(metadata=checked_metadata(metadata))))


def _require_size(name: str, spec: TensorSpec, held: bool = False) -> None:
    bits = prod(spec._shape) * BY_NAME[spec._name].bits
    wrong = ""
    if bits != 8 * spec._data_len:
        wrong = f"expected {bits / 8:g} bytes, found {spec._data_len}"
    elif spec._data_len and not spec._data_ptr and not held:
        wrong = "expected the address of the bytes, found 0"
    if wrong:
        error = SafetensorMismatchError(
            f"{SAVING}: invalid shape, data type, or offset for tensor (TensorInvalidInfo): {wrong}", record=name
        )
        error.code = "TensorInvalidInfo"
        raise error


def require_name(name: object) -> None:
    """Raise for a name that is no text."""
    if not isinstance(name, str):
        raise TypeError(f"argument 'tensor_dict': '{type(name).__name__}' object is not an instance of 'str'")


def checked_metadata(metadata: Metadata | None) -> dict[str, str] | None:
    """Return notes as a dict; all are text."""
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping):
        raise TypeError(f"argument 'metadata': expected a mapping of str to str, found {type(metadata).__name__}")
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(
                f"argument 'metadata': expected str to str, found {key!r}: {type(value).__name__}; "
                "write other values as text, e.g. with json.dumps"
            )
    return dict(metadata)


def plan_of(tensors: Mapping[str, Any], metadata: Metadata | None) -> FlatPlan:
    """Lay out a file of arrays or tensors.

    Parameters
    ----------
    tensors : mapping of str to array
        NumPy arrays or torch tensors; other than C order and foreign byte order
        are copied, lazy conjugates and negatives resolved.
    metadata : mapping of str to str, optional
    """
    for name in tensors:
        require_name(name)
    options = SaveOptions(metadata=checked_metadata(metadata))
    return planned(lambda: _format.plan(tensors, options), tensors)


def planned(make: Callable[[], FlatPlan], tensors: Mapping[str, Any] | None = None) -> FlatPlan:
    """Call what lays out a file; its errors in this face's words."""
    try:
        return make()
    except UnsupportedError as error:
        dtype = str(getattr((tensors or {}).get(error.record or ""), "dtype", "")).removeprefix("torch.")
        if not dtype or dtype in _NAMES:
            raise explained(error, SAVING) from error
        refused = unknown_dtype(dtype)
        refused.record = error.record
        raise refused from error
    except TensorIOError as error:
        raise explained(error, SAVING) from error


def bytes_of(plan: FlatPlan) -> bytes:
    """Return a planned file as bytes; copies: once, the GIL released."""
    return _core.join(plan.pieces(), plan.nbytes)


def write(plan: FlatPlan, filename: Any) -> None:
    """Write a planned file.

    Parameters
    ----------
    filename : str, bytes, os.PathLike or writable binary file object
        A path appears whole or not at all: written beside it and renamed, with
        the mode that the process's umask or the old file gives. Not synced to
        disk, as the reference does not; `tensorio.save` does that.
    """
    with rejected(SAVING, os.fsdecode(filename) if isinstance(filename, str | bytes) else None):
        write_plan(plan, filename, durable=False)


def deserialize(bytes: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the tensors of a file in memory, as copies of their bytes.

    Parameters
    ----------
    bytes : buffer
        The whole file.

    Returns
    -------
    list of (str, dict)
        By offset; ``{"shape": [2, 3], "dtype": "F32", "data": bytearray(...)}``.
    """
    file = of_buffer(bytes)
    data = file.storage.view()
    out = []
    for row in file.order:
        offset, nbytes = file.extent(row)
        raw = bytearray(nbytes)
        _host.copy(raw, data[offset : offset + nbytes])
        out.append((file.table.names[row], {"shape": list(file.shape(row)), "dtype": file.code(row), "data": raw}))
    return out
