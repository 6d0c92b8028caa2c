"""safetensors files as dicts of NumPy arrays.

bfloat16 and the 8-bit floats are ml_dtypes' types; 4- and 6-bit floats are raw
bytes, their last dimension counting bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tensorio import _arrays, _served
from tensorio.dtypes import BY_NAME, numpy_dtype
from tensorio.formats.safetensors import DTYPES as _CODES
from tensorio.safetensors import TensorSpec, deserialize, safe_open, serialize, serialize_file
from tensorio.safetensors._devices import backend_of
from tensorio.safetensors._errors import LOADING, rejected
from tensorio.safetensors._file import of_buffer, opened
from tensorio.safetensors._readers import NumpyReader, aligned
from tensorio.safetensors._writing import bytes_of, plan_of, write

# Those of the package itself are here because callers import them from here, too.
__all__ = [
    "TensorSpec",
    "deserialize",
    "load",
    "load_file",
    "safe_open",
    "save",
    "save_file",
    "serialize",
    "serialize_file",
]

Array = np.ndarray[Any, Any]

# Format code -> NumPy type, for those that NumPy can show an element at a time.
_TYPES: dict[str, np.dtype[Any]] = {
    code: numpy_dtype(name) for code, name in _CODES.items() if not BY_NAME[name].packed
}


def save(tensor_dict: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a file of arrays as bytes.

    Parameters
    ----------
    tensor_dict : mapping of str to ndarray
        Of any strides and byte order: stored in C order, little-endian.
    metadata : mapping of str to str, optional
        Notes; written sorted by key.

    Raises
    ------
    SafetensorError
        An element type or a name that the format does not have.

    Notes
    -----
    Copies once, releasing the GIL.
    """
    plan = plan_of(_arrays_of(tensor_dict), metadata)
    _served.count("safetensors.numpy.save", plan.nbytes)
    return bytes_of(plan)


def save_file(tensor_dict: Mapping[str, Array], filename: Any, metadata: Mapping[str, str] | None = None) -> None:
    """Write a file of arrays.

    Parameters
    ----------
    tensor_dict, metadata
        See `save`.
    filename : str, bytes, os.PathLike or writable binary file object
        A path appears whole or not at all; links are followed, the mode is the
        process's or the old file's. Not synced to disk.
    """
    plan = plan_of(_arrays_of(tensor_dict), metadata)
    write(plan, filename)
    _served.count("safetensors.numpy.save_file", plan.nbytes)


def load(data: Any) -> dict[str, Array]:
    """Return the arrays of a file in memory.

    Parameters
    ----------
    data : bytes or another buffer

    Returns
    -------
    dict of str to ndarray
        By offset; writable views of one copy of `data`.
    """
    file = of_buffer(data, copied=True)
    table = file.table
    with rejected(LOADING):
        arrays = aligned(_arrays.views(table.rows, table.dims, [file.storage.lease()]))
    _served.count("safetensors.numpy.load", file.storage.nbytes)
    return {table.names[row]: arrays[row] for row in file.order}


def load_file(filename: Any, *, backend: str = "mmap") -> dict[str, Array]:
    """Return the arrays of a file.

    Parameters
    ----------
    filename : str, os.PathLike, buffer or seekable binary file object
    backend : {"mmap", "pread"}
        ``"mmap"``: views of a private copy-on-write mapping; ``"pread"``: read into memory.

    Returns
    -------
    dict of str to ndarray
        By offset; writable, the file never changes. With ``"mmap"`` no payload
        byte is read before it is looked at, but for arrays that would not be
        aligned, which are copied; the mapping lives as long as the arrays.
    """
    mapped = backend_of(backend) == "mmap"
    file = opened(filename, writable=False)
    _served.count("safetensors.numpy.load_file", file.storage.nbytes)
    return NumpyReader(file, mapped=mapped).tensors()


def _arrays_of(tensors: Any) -> dict[str, Any]:
    """Check that all values are arrays of any library; scalars become arrays."""
    if not isinstance(tensors, Mapping):
        raise ValueError(f"Expected a dict of [str, numpy.ndarray] but received {type(tensors)}")
    out = {}
    for name, value in tensors.items():
        if not isinstance(value, np.ndarray):
            if not hasattr(value, "dtype") and not hasattr(type(value), "__dlpack__"):
                raise ValueError(f"Key `{name}` is invalid, expected numpy.ndarray but received {type(value)}")
            value = np.asarray(value)
        out[name] = value
    return out


def _getdtype(dtype_str: str) -> np.dtype[Any]:
    """Return the NumPy type of a format code."""
    return _TYPES[dtype_str]


def _view2np(safeview: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Array]:
    """Return what `deserialize` gives, as arrays over its buffers."""
    return {
        name: np.frombuffer(view["data"], _getdtype(view["dtype"])).reshape(view["shape"]) for name, view in safeview
    }


def _flatten(tensor_dict: Mapping[str, Array], keep_alive_buffer: list[Any] | None = None) -> dict[str, Any]:
    """Describe arrays for `serialize`; copies of those not in C order, little-endian, go into `keep_alive_buffer`.

    Without that list, as in older releases: descriptions that hold the bytes.
    """
    if keep_alive_buffer is None:
        return {
            name: {"dtype": array.dtype.name, "shape": array.shape, "data": _tobytes(array)}
            for name, array in tensor_dict.items()
        }
    out = {}
    for name, array in tensor_dict.items():
        flat = _plain(array)
        keep_alive_buffer.append(flat)
        address = flat.__array_interface__["data"][0] if flat.size else 0
        out[name] = TensorSpec(dtype=flat.dtype.name, shape=array.shape, data_ptr=address, data_len=flat.nbytes)
    return out


def _plain(array: Array) -> Array:
    """Return the array in C order, little-endian; itself, if it is."""
    if not _is_little_endian(array):
        array = array.astype(array.dtype.newbyteorder("<"))
    return np.asarray(array, order="C")


def _tobytes(tensor: Array) -> bytes:
    """Return an array's bytes in C order, little-endian."""
    return _plain(tensor).tobytes()


def _is_little_endian(tensor: Array) -> bool:
    """Tell whether an array's bytes are in the format's order, or have none."""
    order = tensor.dtype.byteorder
    if order not in "=|<>":
        raise ValueError(f"Unexpected byte order {order}")
    return order in "|<" or (order == "=" and sys.byteorder == "little")
