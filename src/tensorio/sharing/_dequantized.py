"""A checkpoint whose quantized tensors are those that they stand for."""

from __future__ import annotations

import copy
from array import array
from functools import partial
from typing import Any

from tensorio._unpickler import Leaf
from tensorio.checkpoint._checkpoint import Checkpoint
from tensorio.dtypes import BY_NAME, c_strides
from tensorio.errors import LimitError
from tensorio.formats._base import Opened
from tensorio.kinds import QuantizedTensor
from tensorio.kinds._base import product
from tensorio.storage.base import LazyStorage
from tensorio.tensors import PARAMETER, REQUIRES_GRAD, ROW, Table
from tensorio.tree import filled

__all__ = ["dequantized"]

_FLOAT = BY_NAME["float32"]


def dequantized(checkpoint: Checkpoint) -> Checkpoint | None:
    """Return a checkpoint with a float32 tensor, made when its turn comes, for each quantized one.

    None if it has none. The checkpoint given must stay open. Goes into dicts,
    lists and tuples.
    """
    opened = checkpoint._opened
    if opened.flat:
        return None
    builder = _Builder(checkpoint)
    try:
        tree = builder.rebuilt(opened.tree)
    except RecursionError:
        raise LimitError("the saved object has too many levels to be written again") from None
    if not builder.made:
        return None
    table = Table([], builder.rows, builder.dims)
    whole = Opened(opened.format, table, builder.storages, opened.metadata, tree, False, opened.budget)
    return Checkpoint(whole, None, checkpoint._name, checkpoint._arguments)


class _Builder:
    """The rows of a checkpoint, and those of what its quantized tensors stand for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        opened = checkpoint._opened
        self._checkpoint = checkpoint
        self.rows, self.dims = array("q", opened.table.rows), array("q", opened.table.dims)
        self.storages = list(opened.storages)
        self.made = 0
        self._known: dict[int, Any] = {}

    def rebuilt(self, node: Any) -> Any:
        """A copy of a tree, with containers that are shared shared again."""
        found = self._known.get(id(node))
        if found is not None:
            return found
        if isinstance(node, QuantizedTensor):
            return self._keep(node, self._leaf(node))
        if isinstance(node, dict):
            new = self._keep(node, copy.copy(node))
            for key, child in node.items():
                new[key] = self.rebuilt(child)
            return new
        if type(node) is list:
            new = self._keep(node, [])
            new.extend(self.rebuilt(child) for child in node)
            return new
        if type(node) is tuple:
            return self._keep(node, tuple([self.rebuilt(child) for child in node]))
        return node

    def _keep(self, node: Any, new: Any) -> Any:
        self._known[id(node)] = new
        return new

    def _leaf(self, kind: QuantizedTensor) -> Leaf:
        shape, nbytes = tuple(kind.shape), _FLOAT.itemsize * product(kind.shape)
        flags = REQUIRES_GRAD * kind.requires_grad | PARAMETER * kind.parameter
        row = [_FLOAT.code, flags, len(shape), len(self.dims), len(self.storages), 0, nbytes, 1, 0]
        self.dims.extend((*shape, *c_strides(shape, _FLOAT.itemsize)))
        self.rows.extend(row)
        self.storages.append(LazyStorage(nbytes, partial(self._bytes, kind)))
        self.made += 1
        return Leaf(len(self.rows) // ROW - 1)

    def _bytes(self, kind: QuantizedTensor) -> memoryview:
        checkpoint = self._checkpoint
        whole: QuantizedTensor = filled(kind, lambda row: checkpoint._tensor(checkpoint._opened.table, row))
        out = whole.dequantize()
        return memoryview(out.reshape(-1).view("u1")) if out.size else memoryview(b"")  # type: ignore[arg-type]
