"""Which elements of a tensor are a rank's: arithmetic on shapes, no bytes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import pairwise
from math import lcm, prod
from typing import NamedTuple

from tensorio.errors import TensorMismatchError, UnsupportedError, escaped
from tensorio.tp._rules import Rule

__all__ = ["Cut", "Home", "Rows", "cut_of", "homes_of", "rows_of"]

Span = tuple[int, int]


class Cut(NamedTuple):
    """What one rank has of one tensor.

    Attributes
    ----------
    dim : int
        Dimension that is cut; -1 if the tensor is whole.
    spans : tuple of (int, int)
        Elements along it, from and to, in the order in which they follow each other.
    pad : int
        Zeros behind them, in elements along `dim`.
    shape : tuple of int
        Of the rank's tensor.
    """

    dim: int
    spans: tuple[Span, ...]
    pad: int
    shape: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.dim < 0


def cut_of(rule: Rule, fqn: str, shape: tuple[int, ...], rank: int, tp: int) -> Cut | None:
    """Return what a rank has of a tensor; None if it has nothing of it.

    Parameters
    ----------
    rule : Rule
    fqn : str
        For messages.
    shape : tuple of int
        Of the whole tensor, in elements.
    rank, tp : int
        Number of the rank, and of all ranks.

    Raises
    ------
    TensorMismatchError
        The tensor has no such dimension, or it can't be cut into so many parts.
    """
    if not 0 <= rank < tp:
        raise ValueError(f"expected a rank from 0 to {tp - 1}, found {rank}")
    if rule.action == "skip" or (rule.action == "rank0" and rank):
        return None
    if rule.action != "cut":
        return Cut(-1, (), 0, shape)
    dim = rule.dim + len(shape) if rule.dim < 0 else rule.dim
    if not 0 <= dim < len(shape):
        raise _mismatch(rule, fqn, f"there is no dimension {rule.dim} in a tensor of shape {list(shape)}")
    size = shape[dim]
    spans, pad = _padded(rule, size, rank, tp) if rule.pad_to else (_sections(rule, fqn, size, rank, tp), 0)
    length = sum(hi - lo for lo, hi in spans) + pad
    return Cut(dim, spans, pad, (*shape[:dim], length, *shape[dim + 1 :]))


def _padded(rule: Rule, size: int, rank: int, tp: int) -> tuple[tuple[Span, ...], int]:
    multiple = lcm(rule.pad_to, tp)
    part = -(-size // multiple) * multiple // tp
    lo, hi = min(rank * part, size), min((rank + 1) * part, size)
    return ((lo, hi),) if lo < hi else (), part - (hi - lo)


def _sections(rule: Rule, fqn: str, size: int, rank: int, tp: int) -> tuple[Span, ...]:
    ratios = rule.sections or rule.heads or (1,)
    if size % sum(ratios):
        what = f"sections of {_text(ratios)}" if rule.sections else f"{_text(ratios)} heads"
        raise _mismatch(rule, fqn, f"{size} elements along dimension {rule.dim} are not {what}")
    unit = size // sum(ratios)
    spans: list[Span] = []
    at = 0
    for i, ratio in enumerate(ratios):
        length = ratio * unit
        lo, hi = _part(rule, fqn, length, rule.heads[i] if rule.heads else 0, rank, tp)
        if spans and spans[-1][1] == at + lo:
            spans[-1] = (spans[-1][0], at + hi)
        elif lo < hi:
            spans.append((at + lo, at + hi))
        at += length
    return tuple(spans)


def _part(rule: Rule, fqn: str, length: int, heads: int, rank: int, tp: int) -> Span:
    """A rank's part of one section."""
    if not heads:
        if length % tp:
            raise _mismatch(
                rule, fqn, f"{length} elements along dimension {rule.dim} can't be cut into {tp} equal parts"
            )
        return rank * length // tp, (rank + 1) * length // tp
    if length % heads:
        raise _mismatch(rule, fqn, f"{length} elements along dimension {rule.dim} are not {heads} heads")
    head = length // heads
    if heads % tp == 0:
        return rank * heads // tp * head, (rank + 1) * heads // tp * head
    if tp % heads:
        raise _mismatch(rule, fqn, f"{heads} heads can be neither cut into {tp} equal parts nor repeated on {tp} ranks")
    first = rank // (tp // heads) * head
    return first, first + head


def _text(numbers: tuple[int, ...]) -> str:
    return f"{' + '.join(map(str, numbers[:8]))}{' + ...' if len(numbers) > 8 else ''}"


def _mismatch(rule: Rule, fqn: str, what: str) -> TensorMismatchError:
    return TensorMismatchError(f"rule {escaped(rule.pattern)}: {what}", record=fqn)


# ------------------------------------------------------------------------ whose is what


class Home(NamedTuple):
    """Who has a run of a row.

    Attributes
    ----------
    lo, hi : int
        Where it is in the row of the whole tensor.
    places : tuple of (int, int)
        Ranks that have it, and where in their rows it begins; several where a tensor or heads of it are repeated.
    """

    lo: int
    hi: int
    places: tuple[tuple[int, int], ...]


def homes_of(spans: Mapping[int, tuple[Span, ...]]) -> list[Home]:
    """Return the runs of a row in order, out of what each rank has of it."""
    edges = sorted({edge for runs in spans.values() for run in runs for edge in run})
    found: dict[Span, list[tuple[int, int]]] = {}
    for rank, runs in spans.items():
        at = 0
        for lo, hi in runs:
            inner = edges[bisect_left(edges, lo) : bisect_left(edges, hi) + 1]
            for start, stop in pairwise(inner):  # a run may be two of another rank
                found.setdefault((start, stop), []).append((rank, at + start - lo))
            at += hi - lo
    return [Home(lo, hi, tuple(places)) for (lo, hi), places in sorted(found.items())]


# ------------------------------------------------------------------------------- bytes


class Rows(NamedTuple):
    """A cut of a tensor in C order, in bytes: the same runs of each of so many rows.

    Attributes
    ----------
    height : int
        How many rows.
    nbytes : int
        Of a row of the whole tensor.
    spans : tuple of (int, int)
        Bytes of each row that are taken, in order.
    pad : int
        Bytes of zeros behind them.
    """

    height: int
    nbytes: int
    spans: tuple[Span, ...]
    pad: int


def rows_of(cut: Cut, fqn: str, shape: tuple[int, ...], bits: int) -> Rows:
    """Return a cut in bytes.

    Parameters
    ----------
    shape : tuple of int
        Of the whole tensor.
    bits : int
        Per element.

    Raises
    ------
    UnsupportedError
        Elements share bytes, and the cut is inside one.
    """
    if cut.whole:
        nbytes = prod(shape) * bits // 8
        return Rows(1, nbytes, ((0, nbytes),), 0)
    step = prod(shape[cut.dim + 1 :]) * bits
    edges = [shape[cut.dim], cut.pad, *(edge for span in cut.spans for edge in span)]
    if any(edge * step % 8 for edge in edges):
        raise UnsupportedError(
            f"cut along dimension {cut.dim}: elements of {bits} bits share bytes, and a cut is inside of one; "
            "cut along another dimension", record=fqn,
        )  # fmt: skip
    spans = tuple((lo * step // 8, hi * step // 8) for lo, hi in cut.spans)
    return Rows(prod(shape[: cut.dim]), shape[cut.dim] * step // 8, spans, cut.pad * step // 8)
