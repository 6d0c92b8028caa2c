"""Sparse tensors of all of torch's layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tensorio.errors import HeaderError, UnsupportedError, escaped
from tensorio.kinds._base import INDEX_DTYPES, Describe, Shape, Tensor, TensorKind, described, product, same

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

__all__ = ["SparseTensor"]


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class SparseTensor(TensorKind):
    """A sparse tensor of any of torch's layouts.

    Attributes
    ----------
    layout : {"coo", "csr", "csc", "bsr", "bsc"}
    shape : tuple of int
        Logical shape: batch dimensions (compressed layouts only), the sparse
        dimensions (two, but for COO), then the dense dimensions of each value.
    indices : ndarray
        COO: int64, (sparse dimensions, elements), in any order, with repetitions
        unless coalesced. Compressed layouts: the column (CSR, BSR) or row (CSC,
        BSC) of each element, (batch..., elements); of each block where there
        are blocks.
    values : ndarray
        (batch..., elements, dense...); for BSR and BSC each element is a block:
        (batch..., elements, block rows, block columns, dense...).
    compressed : ndarray or None
        Compressed layouts: (batch..., rows or columns + 1), at which element
        each row (CSR, BSR) or column (CSC, BSC) starts. None for COO.
    is_coalesced : bool or None
        COO: whether the indices are sorted and unique, if the file says so.
    """

    layout: str
    shape: Shape
    indices: Tensor
    values: Tensor
    compressed: Tensor | None = None
    is_coalesced: bool | None = None

    PARTS: ClassVar[tuple[str, ...]] = ("compressed", "indices", "values")

    def dense(self) -> Array:
        """Return the tensor as an array, with zeros where it has no elements.

        Elements with the same index are added in the order they are stored in,
        each sum rounded to the tensor's type, as torch does.

        Returns
        -------
        ndarray
            Newly allocated: as many bytes as `shape` has elements of the values'
            type, however few are stored. (Pages that hold only zeros take no
            memory until they are written.) Beside it, about 24 bytes per stored
            element while it works.

        Raises
        ------
        HeaderError
            An index outside the shape, parts that do not fit.
        LimitError
            A shape that no array can have.
        MemoryError
        """
        from tensorio.kinds import _dense

        self.check()
        return _dense.compressed(self) if self.layout != "coo" else _dense.coo(self)

    def check(self, describe: Describe = described) -> None:
        """See `TensorKind.check`."""
        if self.layout == "coo":
            self._check_coo(describe)
        elif self.layout in ("csr", "csc", "bsr", "bsc"):
            self._check_compressed(describe)
        else:
            raise UnsupportedError(f"sparse layout {escaped(self.layout)}: expected coo, csr, csc, bsr or bsc")

    def _check_coo(self, describe: Describe) -> None:
        dtype, index_shape, index_strides = describe(self.indices)
        if dtype not in INDEX_DTYPES or len(index_shape) != 2:
            raise HeaderError(f"sparse tensor: expected indices as 2-D int64, found {len(index_shape)}-D {dtype}")
        sparse, count = index_shape
        if sparse > len(self.shape):
            raise HeaderError(f"sparse tensor: {sparse} rows of indices for {len(self.shape)} dimensions")
        _, value_shape, value_strides = describe(self.values)
        same("values of a COO tensor", value_shape, (count, *self.shape[sparse:]))
        stored = (sparse and index_strides[1]) or value_strides[0]
        if not stored and 0 not in self.shape and count > max(1, product(self.shape[:sparse])):
            raise HeaderError(f"sparse tensor: {count} elements that share their bytes, in a tensor of fewer")

    def _check_compressed(self, describe: Describe) -> None:
        if self.compressed is None:
            raise HeaderError(f"sparse tensor: {self.layout} without compressed indices")
        dtypes, (pointers, plain, values) = zip(
            *((d, s) for d, s, _ in map(describe, (self.compressed, self.indices, self.values))), strict=True
        )
        if not set(dtypes[:2]) <= set(INDEX_DTYPES) or not pointers or not plain:
            raise HeaderError(f"sparse tensor: expected indices as int64 or int32, found {dtypes[0]} and {dtypes[1]}")
        batch = len(pointers) - 1
        block = values[batch + 1 : batch + 3] if self.layout[0] == "b" else (1, 1)
        sizes = self.shape[batch : batch + 2]
        if len(sizes) != 2 or len(block) != 2 or 0 in block or any(n % b for n, b in zip(sizes, block, strict=True)):
            raise HeaderError(
                f"sparse tensor: shape {self.shape} is not made of {batch} batch dimensions and {block} blocks"
            )
        rows, columns = (n // b for n, b in zip(sizes, block, strict=True))
        major = rows if self.layout.endswith("sr") else columns
        head, count = self.shape[:batch], plain[-1]
        same("compressed indices", pointers, (*head, major + 1))
        same("plain indices", plain, (*head, count))
        tail = (*block, *self.shape[batch + 2 :]) if self.layout[0] == "b" else self.shape[batch + 2 :]
        same(f"values of a {self.layout.upper()} tensor", values, (*head, count, *tail))
        if count > rows * columns:
            raise HeaderError(
                f"sparse tensor: {count} elements, of which no two may have one place, in {rows} x {columns}"
            )

    def _shown(self) -> str:
        return f" {self.layout} {self.shape}"
