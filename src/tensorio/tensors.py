"""The table of tensors: what every format translates its header into.

A tensor is a logical box tiled by chunks; a chunk is an extent of bytes in one
storage. Tables are packed (``array('q')`` columns, see ``csrc/table.h``); the
objects below are made when asked for.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import NamedTuple

from tensorio.dtypes import BY_NAME, DTYPES, c_strides
from tensorio.errors import TensorNotFoundError

__all__ = [
    "CONJ",
    "NEG",
    "PARAMETER",
    "REQUIRES_GRAD",
    "Chunk",
    "Extent",
    "Infos",
    "Table",
    "TensorInfo",
    "first_duplicate",
]

REQUIRES_GRAD, PARAMETER, CONJ, NEG = 1, 2, 4, 8  # TIO_ROW_ bits of csrc/table.h

ROW = 9  # fields of tio_row
CHUNK_ROW = 4  # fields of tio_chunk_row


class Extent(NamedTuple):
    """A run of bytes in one storage.

    Attributes
    ----------
    storage : int
        Index into the checkpoint's storages.
    offset, nbytes : int
        In bytes, from the start of the storage.
    """

    storage: int
    offset: int
    nbytes: int


class Chunk(NamedTuple):
    """A rectangular piece of one tensor.

    Attributes
    ----------
    offsets, shape : tuple of int
        Where the piece lies in the tensor, in elements.
    strides : tuple of int
        Bytes between neighbouring elements along each dimension.
    extent : Extent
        Its bytes; ``extent.offset`` is that of the element ``[0, 0, ...]``.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    extent: Extent


class TensorInfo(NamedTuple):
    """What is known of a tensor without touching its bytes.

    Attributes
    ----------
    fqn : str
        Full dotted name.
    dtype : str
        Canonical name of the element type, e.g. ``"bfloat16"``.
    shape : tuple of int
        Logical shape in elements.
    chunks : tuple of Chunk
        The pieces that tile it; one in an ordinary file.
    flags : int
        `REQUIRES_GRAD`, `PARAMETER`, `CONJ`, `NEG` bits (torch files only).
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    flags: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements when stored contiguously."""
        return self.numel * BY_NAME[self.dtype].bits // 8

    @property
    def packed(self) -> bool:
        """Whether several elements share a byte; the array is then raw uint8."""
        return BY_NAME[self.dtype].packed

    @property
    def contiguous(self) -> bool:
        """Whether the bytes of the only chunk are the elements in C order."""
        if len(self.chunks) != 1:
            return False
        if self.packed or self.numel == 0:
            return True
        want = c_strides(self.shape, BY_NAME[self.dtype].itemsize)
        have = self.chunks[0].strides
        return all(n == 1 or w == h for n, w, h in zip(self.shape, want, have, strict=True))


def first_duplicate(names: Iterable[str]) -> str:
    """Return the first name that occurred before; there must be one."""
    seen: set[str] = set()
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]


class Table:
    """Packed rows of tensors, chunks and dimensions, plus the tensors' names.

    Attributes
    ----------
    names : list of str
        One fqn per row; empty until the format has named them.
    rows, chunks, dims : array of int64
        See ``csrc/table.h``.
    """

    __slots__ = ("_index", "chunks", "dims", "names", "rows")

    def __init__(self, names: list[str], rows: array[int], dims: array[int], chunks: array[int] | None = None) -> None:
        self.names = names
        self.rows = rows
        self.dims = dims
        self.chunks = array("q") if chunks is None else chunks
        self._index: dict[str, int] | None = None

    def __len__(self) -> int:
        return len(self.rows) // ROW

    @property
    def index(self) -> dict[str, int]:
        """The row of each fqn (built on first use, O(tensors))."""
        if self._index is None:
            self._index = dict(zip(self.names, range(len(self.names)), strict=True))
        return self._index

    def row_of(self, fqn: object) -> int:
        """Return the row number of `fqn`, or raise `TensorNotFoundError`."""
        found = self.index.get(fqn)  # type: ignore[call-overload]
        if found is None:
            raise TensorNotFoundError.among(fqn, self.names)
        return int(found)

    def flags(self, row: int) -> int:
        """Return the flags of one row."""
        return self.rows[row * ROW + 1]

    def storage_of(self, row: int) -> int:
        """Return the storage index of a row of one chunk."""
        return self.rows[row * ROW + 4]

    def extent_of(self, row: int) -> tuple[int, int]:
        """Return offset and bytes of a row of one chunk, in its storage."""
        return self.rows[row * ROW + 5], self.rows[row * ROW + 6]

    def chunk_count(self, row: int) -> int:
        """Return the number of chunks of one row."""
        return self.rows[row * ROW + 7]

    def info(self, row: int, fqn: str | None = None) -> TensorInfo:
        """Unpack one row."""
        name = self.names[row] if fqn is None else fqn
        dtype, flags, rank, dims, storage, offset, nbytes, chunks, chunk = self.rows[row * ROW : (row + 1) * ROW]
        shape = tuple(self.dims[dims : dims + rank])
        if chunks == 1:
            strides = tuple(self.dims[dims + rank : dims + 2 * rank])
            pieces: tuple[Chunk, ...] = (Chunk((0,) * rank, shape, strides, Extent(storage, offset, nbytes)),)
        else:
            pieces = tuple(self._chunk(c, rank) for c in range(chunk, chunk + chunks))
        return TensorInfo(name, DTYPES[dtype].name, shape, pieces, flags)

    def _chunk(self, row: int, rank: int) -> Chunk:
        storage, offset, nbytes, dims = self.chunks[row * CHUNK_ROW : (row + 1) * CHUNK_ROW]
        offsets, shape, strides = (tuple(self.dims[dims + k * rank : dims + (k + 1) * rank]) for k in range(3))
        return Chunk(offsets, shape, strides, Extent(storage, offset, nbytes))


class Infos(Mapping[str, TensorInfo]):
    """Read-only mapping of fqn to `TensorInfo`, unpacked on access."""

    __slots__ = ("_table",)

    def __init__(self, table: Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table.index)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.index)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._table.index

    def __getitem__(self, fqn: str) -> TensorInfo:
        return self._table.info(self._table.row_of(fqn), fqn)

    def __repr__(self) -> str:
        return f"<infos of {len(self)} tensors>"
