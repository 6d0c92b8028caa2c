"""safetensors files as dicts of MLX arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from tensorio.dtypes import numpy_dtype
from tensorio.safetensors import _by_numpy, numpy, safe_open

__all__ = ["load", "load_file", "numpy", "safe_open", "save", "save_file"]

Metadata = Mapping[str, str] | None


def save(tensors: Mapping[str, Any], metadata: Metadata = None) -> bytes:
    """Return a file of tensors as bytes; see `tensorio.safetensors.numpy.save`."""
    return _by_numpy.save("mlx", tensors, _to_numpy, metadata)


def save_file(tensors: Mapping[str, Any], filename: Any, metadata: Metadata = None) -> None:
    """Write a file of tensors; see `tensorio.safetensors.numpy.save_file`."""
    _by_numpy.save_file("mlx", tensors, _to_numpy, filename, metadata)


def load(data: Any) -> dict[str, Any]:
    """Return the tensors of a file in memory as MLX arrays."""
    return _by_numpy.load("mlx", data)


def load_file(filename: Any, *, backend: str = "mmap") -> dict[str, Any]:
    """Return the tensors of a file as MLX arrays."""
    return _by_numpy.load_file("mlx", filename, backend)


def _to_numpy(array: Any) -> np.ndarray[Any, Any]:
    if array.dtype == mx.bfloat16:  # which MLX does not hand to NumPy
        return np.array(array.view(mx.uint16)).view(numpy_dtype("bfloat16"))
    return np.array(array)


def _np2mx(numpy_dict: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Return a dict of NumPy arrays as one of MLX arrays."""
    return {name: mx.array(array) for name, array in numpy_dict.items()}


def _mx2np(mx_dict: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return a dict of MLX arrays as one of NumPy arrays."""
    return {name: _to_numpy(array) for name, array in mx_dict.items()}
