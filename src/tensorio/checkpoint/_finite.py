"""NaN and infinity in tensors: which ones have any, how many, and where the first one is."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from tensorio import _core
from tensorio.arraylike import as_numpy, is_tensor
from tensorio.checkpoint._checkpoint import Checkpoint, open_checkpoint
from tensorio.errors import NonFiniteError, escaped
from tensorio.storage.reading import in_threads, readers
from tensorio.tree import leaves, name_of

__all__ = ["NonFinite", "check_finite", "require_finite"]

# Bytes that one thread looks at a time; below the second number, threads cost more than they save.
PART = 16 << 20
THREADS_FROM = 8 << 20
# Bytes of short runs that make one task, and what a run costs beside its bytes, in bytes looked at in that time.
TASK = 4 << 20
RUN_COST = 16 << 10
NAMED = 3  # tensors that an error describes


class _Kind(NamedTuple):
    """When an element of a floating point type is not finite, and when it is infinite: ``bits & mask == pattern``."""

    width: int  # bytes
    mask: int
    pattern: int
    infinity: tuple[int, int] | None  # mask and pattern; None if the type has only NaN
    parts: int = 1  # 2: complex


def _ieee(width: int, exponent: int, parts: int = 1) -> _Kind:
    """The exponent is all ones: infinity if all other bits but the sign are zero, else NaN (IEEE 754, 3.4)."""
    return _Kind(width, exponent, exponent, ((1 << 8 * width - 1) - 1, exponent), parts)


# float8: OCP 8-bit Floating Point Specification 1.0, table 1; the fnuz types have one NaN, the pattern of -0;
# e8m0: OCP Microscaling Formats 1.0, 5.4.1.
_KINDS = {
    "float16": _ieee(2, 0x7C00),
    "bfloat16": _ieee(2, 0x7F80),
    "float32": _ieee(4, 0x7F80_0000),
    "float64": _ieee(8, 0x7FF0_0000_0000_0000),
    "complex32": _ieee(2, 0x7C00, 2),
    "complex64": _ieee(4, 0x7F80_0000, 2),
    "complex128": _ieee(8, 0x7FF0_0000_0000_0000, 2),
    "float8_e5m2": _ieee(1, 0x7C),
    "float8_e4m3fn": _Kind(1, 0x7F, 0x7F, None),
    "float8_e4m3fnuz": _Kind(1, 0xFF, 0x80, None),
    "float8_e5m2fnuz": _Kind(1, 0xFF, 0x80, None),
    "float8_e8m0fnu": _Kind(1, 0xFF, 0xFF, None),
}


@dataclass(frozen=True)
class NonFinite:
    """A tensor with elements that are not finite.

    Attributes
    ----------
    name : str
        Its full dotted name.
    first : int
        Index of the first such element, in C order.
    nan, infinite : int
        How many there are of each; the two parts of a complex number count singly.
    """

    name: str
    first: int
    nan: int
    infinite: int

    def __str__(self) -> str:
        return f"{escaped(self.name)} ({self.nan} NaN, {self.infinite} infinite, the first at index {self.first})"


class _Run(NamedTuple):
    """Elements in one piece of memory; an element of a complex type is two."""

    tensor: int
    name: str
    start: int  # number of the first within its tensor
    address: int
    numel: int
    kind: _Kind
    keep: object


def check_finite(source: Any) -> list[NonFinite]:
    """Find NaN and infinity in the tensors of an object, a checkpoint or a file.

    Parameters
    ----------
    source : object
        What `tensorio.save` takes; a `Checkpoint`; or what `tensorio.open` takes: a
        str, os.PathLike, bytes or binary file object.

    Returns
    -------
    list of NonFinite
        One for each tensor that has any, in order; empty if all is finite.

    Raises
    ------
    See `tensorio.open`, for a file.

    Notes
    -----
    At the speed of reading memory, with all cores; copies: no, except for
    tensors that are not contiguous, a piece at a time. Types without NaN and
    infinity (integers, packed 4- and 6-bit floats) are passed over. Tensors on
    other devices are looked at there.
    """
    if isinstance(source, str | os.PathLike | bytes | bytearray) or (
        hasattr(source, "read") and hasattr(source, "seek")
    ):
        with open_checkpoint(source, unknown="opaque") as checkpoint:
            return check_finite(checkpoint)
    if isinstance(source, Checkpoint):
        return _among((name, source[name]) for name in source)
    return _among((name_of(path), leaf) for path, leaf in leaves(source, sys.maxsize) if is_tensor(leaf))


def require_finite(source: Any, refusal: str) -> None:
    """Raise if something in `source` is not finite.

    Parameters
    ----------
    refusal : str
        What is not done because of it, for the message.

    Raises
    ------
    NonFiniteError
        With all of the tensors in ``.found``.
    """
    found = check_finite(source)
    if found:
        more = f" and {len(found) - NAMED} more tensors" if len(found) > NAMED else ""
        named = ", ".join(map(str, found[:NAMED]))
        raise NonFiniteError(f"expected finite numbers, found {named}{more}; {refusal}", found=found)


def _among(tensors: Iterable[tuple[str, Any]]) -> list[NonFinite]:
    """Look at all of them: what lies in memory as it is with all cores, the others as they come."""
    found: dict[int, NonFinite] = {}
    runs: list[_Run] = []
    for i, (name, tensor) in enumerate(tensors):
        in_place = _in_place(i, name, tensor)
        if in_place is not None:
            runs += in_place
        else:
            bad = _elsewhere(name, tensor)
            if bad is not None:
                found[i] = bad
    for run, first in _searched(runs):
        if first < run.numel:
            found[run.tensor] = _joined(_counted(run, first), found.get(run.tensor))
    return [found[i] for i in sorted(found)]


def _in_place(i: int, name: str, tensor: Any) -> list[_Run] | None:
    """The elements of a tensor where they are; None if they are not in this memory, in C order."""
    from tensorio import _source
    from tensorio.dtypes import DTYPES

    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        described = _source.describe_torch(tensor)
    else:
        tensor = as_numpy(tensor)
        described = _source.describe_array(tensor)
    if described is None or described[0] < 0 or not described[4]:
        return None
    kind = _KINDS.get(DTYPES[described[0]].name)
    return [] if kind is None else list(_cut(_Run(i, name, 0, described[3], described[2] // kind.width, kind, tensor)))


def _cut(run: _Run) -> Iterator[_Run]:
    """Cut what is long for several threads."""
    step = PART // run.kind.width
    for start in range(0, run.numel, step):
        address = run.address + start * run.kind.width
        yield run._replace(start=run.start + start, address=address, numel=min(step, run.numel - start))


def _searched(runs: list[_Run]) -> Iterator[tuple[_Run, int]]:
    """Each run with the index of its first match."""

    def search(task: list[_Run]) -> list[tuple[_Run, int]]:
        return [(r, _core.match_find(r.address, r.numel, r.kind.width, r.kind.mask, r.kind.pattern)) for r in task]

    if sum(run.numel * run.kind.width for run in runs) < THREADS_FROM:
        yield from search(runs)
        return
    tasks = list(_tasks(runs))
    searched: list[list[tuple[_Run, int]]] = [[] for _ in tasks]

    def look(number: int) -> None:
        searched[number] = search(tasks[number])

    in_threads(look, range(len(tasks)), readers())  # not by a pool, which takes no work at the end of a program
    yield from chain.from_iterable(searched)


def _tasks(runs: list[_Run]) -> Iterator[list[_Run]]:
    """Put short runs together, so that handing work to a thread costs little beside the work."""
    task: list[_Run] = []
    nbytes = 0
    for run in runs:
        task.append(run)
        nbytes += run.numel * run.kind.width + RUN_COST
        if nbytes >= TASK:
            yield task
            task, nbytes = [], 0
    if task:
        yield task


def _counted(run: _Run, first: int) -> NonFinite:
    """What is in a run whose first match is known."""
    kind = run.kind
    address, count = run.address + first * kind.width, run.numel - first
    both = _core.match_count(address, count, kind.width, kind.mask, kind.pattern)
    infinite = 0 if kind.infinity is None else _core.match_count(address, count, kind.width, *kind.infinity)
    return NonFinite(run.name, (run.start + first) // kind.parts, both - infinite, infinite)


def _joined(later: NonFinite, earlier: NonFinite | None) -> NonFinite:
    """Those of two parts of one tensor."""
    if earlier is None:
        return later
    return NonFinite(earlier.name, earlier.first, earlier.nan + later.nan, earlier.infinite + later.infinite)


def _elsewhere(name: str, tensor: Any) -> NonFinite | None:
    """What is in a tensor that is not in C order in this memory."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _in_torch(name, tensor, torch)
    return _in_pieces(name, as_numpy(tensor))


def _in_pieces(name: str, array: Any) -> NonFinite | None:
    """An array with gaps, or in the foreign byte order: a piece at a time."""
    import numpy as np

    from tensorio.dtypes import of_numpy
    from tensorio.formats._items import c_order, native

    row = of_numpy(array.dtype)
    kind = None if row is None else _KINDS.get(row.name)
    if kind is None:
        return None
    start = 0
    found: NonFinite | None = None
    for piece in c_order(array, native):
        held = np.frombuffer(piece, np.uint8)
        run = _Run(0, name, start, held.ctypes.data, len(held) // kind.width, kind, held)
        start += run.numel
        [(_, first)] = _searched([run])
        if first < run.numel:
            found = _joined(_counted(run, first), found)
    return found


def _in_torch(name: str, tensor: Any, torch: Any) -> NonFinite | None:
    """A tensor of torch's that is on another device, strided otherwise, sparse or made of several."""
    tensor = tensor.detach()
    if tensor.device.type == "meta" or tensor.is_quantized:
        return None
    if tensor.layout != torch.strided or tensor.is_nested:
        tensor = tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    if tensor.is_cpu or tensor.dtype.itemsize == 1:  # of 1-byte types, torch can tell little
        found = _among([(name, tensor.cpu().resolve_conj().resolve_neg().contiguous())])
        return found[0] if found else None
    parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    nan, infinite = int(parts.isnan().sum()), int(parts.isinf().sum())
    if not nan + infinite:
        return None
    first = int((~torch.isfinite(tensor)).flatten().to(torch.uint8).argmax())
    return NonFinite(name, first, nan, infinite)
