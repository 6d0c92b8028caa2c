"""The bytes of parts of tensors, as sources of a plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensorio._unpickler import Leaf
from tensorio.checkpoint._weave import Strand, weave, zeros
from tensorio.dtypes import BY_NAME, c_strides
from tensorio.errors import UnsupportedError
from tensorio.formats._base import SaveOptions
from tensorio.formats._items import Items, c_order
from tensorio.plan import PIECE, SMALL
from tensorio.storage.base import LazyStorage
from tensorio.tensors import CONJ, NEG, PARAMETER, REQUIRES_GRAD
from tensorio.tp._cuts import rows_of

if TYPE_CHECKING:
    from tensorio.checkpoint._checkpoint import Checkpoint
    from tensorio.formats._base import Format
    from tensorio.plan import Buffer, LaidOut, Source
    from tensorio.tensors import TensorInfo
    from tensorio.tp import Cut

__all__ = ["Piece", "piece_of", "plan_pieces", "woven"]


class Piece(NamedTuple):
    """A tensor to be written.

    Attributes
    ----------
    fqn, dtype : str
    shape : tuple of int
    nbytes : int
    flags : int
        As in `TensorInfo`, for formats that have a place for them.
    source : Source
        Its elements in C order.
    key : hashable
        Equal for pieces that are the same bytes.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    flags: int
    source: Source
    key: Hashable


def piece_of(checkpoint: Checkpoint, info: TensorInfo, cut: Cut) -> Piece:
    """Return what a cut leaves of a tensor; its bytes stay where they are until they are written."""
    if len(info.chunks) != 1:
        raise UnsupportedError("cutting a tensor of several chunks is not available in this version", record=info.fqn)
    bits = BY_NAME[info.dtype].bits
    chunk = info.chunks[0]
    if info.contiguous and not info.flags & (CONJ | NEG):
        rows = rows_of(cut, info.fqn, info.shape, bits)
        storage = checkpoint._storage(chunk.extent.storage)
        strands = [Strand(storage, chunk.extent.offset + lo, rows.nbytes, hi - lo) for lo, hi in rows.spans]
        if rows.pad:
            strands.append(Strand(None, 0, 0, rows.pad))
        return woven(info._replace(shape=cut.shape), strands, rows.height)
    nbytes = prod(cut.shape) * bits // 8
    key = (info.dtype, info.shape, chunk, info.flags & (CONJ | NEG), cut)
    return Piece(info.fqn, info.dtype, cut.shape, nbytes, info.flags, partial(_strided, checkpoint, info, cut), key)


def woven(info: TensorInfo, strands: list[Strand], count: int) -> Piece:
    """Return a tensor of `count` rows that are made of one run of every strand."""
    strands = _merged(strands) if count == 1 else [strand for strand in strands if strand.nbytes]
    key = (info.dtype, info.shape, count, *((id(s.storage), *s[1:]) for s in strands))
    return Piece(info.fqn, info.dtype, info.shape, info.nbytes, info.flags, _source(strands, count), key)


def _merged(strands: list[Strand]) -> list[Strand]:
    """Runs that follow each other as one; those of nothing go."""
    out: list[Strand] = []
    for strand in strands:
        last = out[-1] if out else Strand(None, 0, 0, 0)
        if last.storage is strand.storage is not None and last.offset + last.nbytes == strand.offset:
            out[-1] = last._replace(nbytes=last.nbytes + strand.nbytes)
        elif strand.nbytes:
            out.append(strand)
    return out


def _source(strands: list[Strand], count: int) -> Source:
    """Small runs by address, to be packed with their neighbours; the rest when its turn comes."""
    if not strands or count == 0:
        return b""
    first = strands[0]
    lone = len(strands) == 1 and count == 1 and first.nbytes <= SMALL
    if lone and first.storage is not None and not isinstance(first.storage, LazyStorage):
        return first.storage.view_for(first.offset, first.nbytes)[first.offset : first.offset + first.nbytes]
    return partial(weave, strands, count)


# ------------------------------------------------------------------ tensors not in C order


def _strided(checkpoint: Checkpoint, info: TensorInfo, cut: Cut) -> Iterator[Buffer]:
    """A part of a strided view in C order; conjugation and negation are done a piece at a time, too."""
    from tensorio.machine.rebuild import lazy_bits

    table = checkpoint._table
    plain = checkpoint._plain(table, table.row_of(info.fqn))
    conj, neg = bool(info.flags & CONJ), bool(info.flags & NEG)
    finish = partial(lazy_bits, conj=conj, neg=neg) if conj or neg else None
    if cut.whole:
        yield from c_order(plain, finish)
    else:
        yield from _gathered(plain, cut.dim, cut, finish)


def _gathered(array: Any, dim: int, cut: Cut, finish: Callable[[Any], Any] | None) -> Iterator[Buffer]:
    if dim == 0:
        for lo, hi in cut.spans:
            yield from c_order(array[lo:hi], finish)
        yield from zeros(cut.pad * prod(array.shape[1:]) * array.itemsize)
        return
    length = sum(hi - lo for lo, hi in cut.spans) + cut.pad
    nbytes = length * array.itemsize * prod(n for i, n in enumerate(array.shape) if i != dim)
    if nbytes <= PIECE:
        parts = [array[(*[slice(None)] * dim, slice(lo, hi))] for lo, hi in cut.spans]
        parts.append(np.zeros((*array.shape[:dim], cut.pad, *array.shape[dim + 1 :]), array.dtype))
        yield from c_order(np.concatenate(parts, axis=dim), finish)
        return
    step = PIECE * len(array) // nbytes
    for start in range(0, len(array), max(step, 1)):
        if step == 0:
            yield from _gathered(array[start], dim - 1, cut, finish)
        else:
            yield from _gathered(array[start : start + step], dim, cut, finish)


# ---------------------------------------------------------------------------- plans


def plan_pieces(pieces: list[Piece], target: Format, metadata: dict[str, str] | None, name: str) -> LaidOut:
    """Lay out a file of tensors.

    Parameters
    ----------
    pieces : list of Piece
    target : Format
        Those that hold names and tensors only repeat what is tied.
    metadata : dict of str to str or None
        Left out where the format has no place for it.
    name : str
        Of the file.
    """
    if hasattr(target, "plan_tree"):
        return _plan_tree(pieces, target, name)
    items = Items()
    for piece in pieces:
        items.add(piece.fqn, piece.dtype, piece.shape).add(piece.source, piece.nbytes)
    return target.plan_items(items, SaveOptions(metadata=metadata, name=name))  # type: ignore[attr-defined,no-any-return]


def _plan_tree(pieces: list[Piece], target: Any, name: str) -> LaidOut:
    spaces: dict[Hashable, int] = {}
    sources: list[Source] = []
    for piece in pieces:
        if spaces.setdefault(piece.key, len(sources)) == len(sources):
            sources.append(piece.source)

    def leaf(obj: Any) -> tuple[Any, ...]:
        piece = pieces[obj.row]
        dtype, shape = BY_NAME[piece.dtype], piece.shape
        if dtype.packed:
            dtype, shape = _unpacked(piece)
        flags = piece.flags & (PARAMETER | REQUIRES_GRAD)
        return dtype.code, spaces[piece.key], 0, piece.nbytes, shape, c_strides(shape, dtype.itemsize), flags

    def source(space: int, lo: int, nbytes: int) -> Source:
        return sources[space] if nbytes else b""

    tree = {piece.fqn: Leaf(i) for i, piece in enumerate(pieces)}
    return target.plan_tree(tree, leaf, source, SaveOptions(name=name))  # type: ignore[no-any-return]


def _unpacked(piece: Piece) -> tuple[Any, tuple[int, ...]]:
    """A tensor of two 4-bit numbers per byte, in torch's own terms."""
    if piece.dtype != "float4_e2m1fn" or not piece.shape or piece.shape[-1] % 2:
        raise UnsupportedError(
            f"torch files have no dtype for {piece.dtype} of shape {list(piece.shape)}", record=piece.fqn
        )
    return BY_NAME["float4_e2m1fn_x2"], (*piece.shape[:-1], piece.shape[-1] // 2)
