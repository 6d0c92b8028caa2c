"""Tensors that NumPy has no array for, as small frozen dataclasses around plain ones."""

from tensorio.kinds._base import JaggedTensor, MetaTensor, NestedTensor, QuantizedTensor, SubclassTensor, TensorKind
from tensorio.kinds.dtensor import DTensor
from tensorio.kinds.sparse import SparseTensor

__all__ = [
    "DTensor",
    "JaggedTensor",
    "MetaTensor",
    "NestedTensor",
    "QuantizedTensor",
    "SparseTensor",
    "SubclassTensor",
    "TensorKind",
]
