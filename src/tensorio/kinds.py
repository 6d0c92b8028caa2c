"""Tensors that NumPy has no array for."""

from __future__ import annotations

__all__ = ["TensorKind"]


class TensorKind:
    """Base of all kinds."""
