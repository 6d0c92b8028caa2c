"""safetensors files as dicts of JAX arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from tensorio.safetensors import _by_numpy, numpy, safe_open

__all__ = ["load", "load_file", "numpy", "safe_open", "save", "save_file"]

Metadata = Mapping[str, str] | None


def save(tensors: Mapping[str, Any], metadata: Metadata = None) -> bytes:
    """Return a file of tensors as bytes; see `tensorio.safetensors.numpy.save`."""
    return _by_numpy.save("flax", tensors, _to_numpy, metadata)


def save_file(tensors: Mapping[str, Any], filename: Any, metadata: Metadata = None) -> None:
    """Write a file of tensors; see `tensorio.safetensors.numpy.save_file`."""
    _by_numpy.save_file("flax", tensors, _to_numpy, filename, metadata)


def load(data: Any) -> dict[str, Any]:
    """Return the tensors of a file in memory as JAX arrays."""
    return _by_numpy.load("flax", data)


def load_file(filename: Any, *, backend: str = "mmap") -> dict[str, Any]:
    """Return the tensors of a file as JAX arrays, without a copy where JAX takes the memory as it is.

    Notes
    -----
    64-bit types become 32-bit ones unless ``jax_enable_x64`` is set: that is JAX's rule for all arrays.
    """
    return _by_numpy.load_file("flax", filename, backend)


def _to_numpy(array: Any) -> np.ndarray[Any, Any]:
    return np.asarray(array)


def _np2jnp(numpy_dict: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Return a dict of NumPy arrays as one of JAX arrays."""
    return {name: jnp.asarray(array) for name, array in numpy_dict.items()}


def _jnp2np(jnp_dict: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return a dict of JAX arrays as one of NumPy arrays."""
    return {name: _to_numpy(array) for name, array in jnp_dict.items()}
