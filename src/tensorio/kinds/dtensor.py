"""One process's piece of a tensor that is spread over many (``torch.distributed.tensor``).

No process group is made or asked for: this is what the file says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tensorio.kinds._base import Shape, Tensor, TensorKind

__all__ = ["DTensor", "Mesh", "Partial", "Replicate", "Shard", "StridedShard"]


@dataclass(frozen=True, slots=True)
class Shard:
    """A placement: split along one dimension, over the processes of a mesh dimension.

    Attributes
    ----------
    dim : int
    """

    dim: int


@dataclass(frozen=True, slots=True)
class StridedShard:
    """A placement: split along a dimension that a later mesh dimension splits first, into `split_factor` pieces.

    Attributes
    ----------
    dim, split_factor : int
    """

    dim: int
    split_factor: int


@dataclass(frozen=True, slots=True)
class Replicate:
    """A placement: whole on every process of a mesh dimension."""


@dataclass(frozen=True, slots=True)
class Partial:
    """A placement: still to be reduced over the processes of a mesh dimension.

    Attributes
    ----------
    reduce_op : str
        ``"sum"``, ``"avg"``, ...
    """

    reduce_op: str


@dataclass(frozen=True, slots=True)
class Mesh:
    """The processes that a `DTensor` is spread over, as a grid.

    Attributes
    ----------
    device_type : str
        ``"cpu"``, ``"cuda"``, ...
    shape : tuple of int
    dim_names : tuple of str or None
    ranks : tuple of int or None
        Their numbers, in C order; None if the file does not say.
    coordinate : tuple of int or None
        Where in the grid the process stands that saved the file.
    """

    device_type: str
    shape: Shape
    dim_names: tuple[str, ...] | None = None
    ranks: tuple[int, ...] | None = None
    coordinate: Shape | None = None


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class DTensor(TensorKind):
    """One process's piece of a tensor that is spread over many (``torch.distributed.tensor``).

    Attributes
    ----------
    local : ndarray or TensorKind
        The piece.
    shape : tuple of int
        Of the whole tensor.
    dtype : str
        torch's name of the element type.
    placements : tuple
        How it is spread over each dimension of the mesh: `Shard`, `StridedShard`,
        `Replicate`, `Partial`, or `Opaque` for anything else.
    mesh : Mesh
    """

    local: Tensor
    shape: Shape
    dtype: str
    placements: tuple[object, ...]
    mesh: Mesh

    PARTS: ClassVar[tuple[str, ...]] = ("local",)

    def _shown(self) -> str:
        return f" {self.dtype} {self.shape} {self.placements}"
