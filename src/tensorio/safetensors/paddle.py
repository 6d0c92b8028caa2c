"""safetensors files as dicts of Paddle tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle

from tensorio.dtypes import numpy_dtype
from tensorio.formats.safetensors import DTYPES as _CODES
from tensorio.safetensors import TensorSpec, _by_numpy, deserialize, numpy, safe_open, serialize, serialize_file

__all__ = [
    "TensorSpec",
    "deserialize",
    "load",
    "load_file",
    "numpy",
    "safe_open",
    "save",
    "save_file",
    "serialize",
    "serialize_file",
]

Metadata = Mapping[str, str] | None


def save(tensors: Mapping[str, Any], metadata: Metadata = None) -> bytes:
    """Return a file of tensors as bytes; see `tensorio.safetensors.numpy.save`."""
    return _by_numpy.save("paddle", tensors, _to_numpy, metadata)


def save_file(tensors: Mapping[str, Any], filename: Any, metadata: Metadata = None) -> None:
    """Write a file of tensors; see `tensorio.safetensors.numpy.save_file`."""
    _by_numpy.save_file("paddle", tensors, _to_numpy, filename, metadata)


def load(data: Any, device: Any = "cpu") -> dict[str, Any]:
    """Return the tensors of a file in memory as Paddle's, on a device."""
    return _by_numpy.load("paddle", data, device)


def load_file(filename: Any, device: Any = "cpu", *, backend: str = "mmap") -> dict[str, Any]:
    """Return the tensors of a file as Paddle's, on a device."""
    return _by_numpy.load_file("paddle", filename, backend, device)


def _to_numpy(tensor: Any) -> np.ndarray[Any, Any]:
    tensor = tensor.detach().cpu()
    name = str(tensor.dtype).rpartition(".")[2]
    if name == "bfloat16" or name.startswith("float8"):  # which Paddle hands to NumPy as integers
        raw = tensor.view("uint16" if name == "bfloat16" else "uint8").numpy()
        return np.asarray(raw).view(numpy_dtype(name))
    return np.asarray(tensor.numpy())


def _paddle2np(paddle_dict: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return a dict of tensors as one of NumPy arrays."""
    return {name: _to_numpy(tensor) for name, tensor in paddle_dict.items()}


def _np2paddle(numpy_dict: Mapping[str, np.ndarray[Any, Any]], device: str = "cpu") -> dict[str, Any]:
    """Return a dict of NumPy arrays as one of tensors."""
    return {name: paddle.to_tensor(array, place=device) for name, array in numpy_dict.items()}


def _getdtype(dtype_str: str) -> Any:
    """Return Paddle's type for a format code."""
    return getattr(paddle, _CODES[dtype_str])
