"""safetensors files as dicts of TensorFlow tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tensorio.safetensors import _by_numpy, numpy, safe_open

__all__ = ["load", "load_file", "numpy", "safe_open", "save", "save_file"]

Metadata = Mapping[str, str] | None


def save(tensors: Mapping[str, Any], metadata: Metadata = None) -> bytes:
    """Return a file of tensors as bytes; see `tensorio.safetensors.numpy.save`."""
    return _by_numpy.save("tensorflow", tensors, _to_numpy, metadata)


def save_file(tensors: Mapping[str, Any], filename: Any, metadata: Metadata = None) -> None:
    """Write a file of tensors; see `tensorio.safetensors.numpy.save_file`."""
    _by_numpy.save_file("tensorflow", tensors, _to_numpy, filename, metadata)


def load(data: Any) -> dict[str, Any]:
    """Return the tensors of a file in memory as TensorFlow's."""
    return _by_numpy.load("tensorflow", data)


def load_file(filename: Any, *, backend: str = "mmap") -> dict[str, Any]:
    """Return the tensors of a file as TensorFlow's."""
    return _by_numpy.load_file("tensorflow", filename, backend)


def _to_numpy(tensor: Any) -> np.ndarray[Any, Any]:
    return np.asarray(tensor.numpy())


def _np2tf(numpy_dict: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Return a dict of NumPy arrays as one of tensors."""
    return {name: tf.convert_to_tensor(array) for name, array in numpy_dict.items()}


def _tf2np(tf_dict: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return a dict of tensors as one of NumPy arrays."""
    return {name: _to_numpy(tensor) for name, tensor in tf_dict.items()}
