"""NaN and infinity in tensors: which ones have any, how many, and where the first one is."""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from typing import Any, NamedTuple

from tensorio import _core
from tensorio.arraylike import as_numpy, is_tensor
from tensorio.checkpoint._checkpoint import Checkpoint, open_checkpoint
from tensorio.checkpoint._options import reading_options
from tensorio.dtypes import DTYPES
from tensorio.errors import NonFiniteError, TensorIOError, escaped
from tensorio.storage.reading import in_threads, readers
from tensorio.tree import leaves, name_of

__all__ = ["NonFinite", "check_finite", "require_finite"]

# Bytes that one thread looks at a time; below the second number, threads cost more than they save.
PART = 16 << 20
THREADS_FROM = 8 << 20
# Bytes of short runs that make one task, and what a run costs beside its bytes, in bytes looked at in that time.
TASK = 4 << 20
RUN_COST = 1 << 10
NAMED = 3  # tensors that an error describes
NO_NUMBERS = "OSUTMm"  # NumPy's kinds: objects, texts, bytes, dates and times


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


# The same by dtype code, for C: width, mask and pattern; three zeros for a type that has neither NaN nor infinity.
_COLUMNS = array("Q")
for _dtype in DTYPES:
    _COLUMNS.extend(_KINDS[_dtype.name][:3] if _dtype.name in _KINDS else (0, 0, 0))


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


def check_finite(source: Any, *, key: Any = None) -> list[NonFinite]:
    """Find NaN and infinity in the tensors of an object, a checkpoint or a file.

    Parameters
    ----------
    source : object
        What `tensorio.save` takes; a `Checkpoint`; or what `tensorio.open` takes: a
        str, os.PathLike, bytes or binary file object.
    key
        See `tensorio.open`, for a file.

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
    infinity (integers, packed 4- and 6-bit floats) are passed over, and so are
    dates, texts, and what arrays of objects hold. Records (structured arrays) are
    looked at field by field; indices count records. Tensors on other devices are
    looked at there.
    """
    if isinstance(source, str | os.PathLike | bytes | bytearray) or (
        hasattr(source, "read") and hasattr(source, "seek")
    ):
        with open_checkpoint(source, **reading_options(False, "opaque", (), False, key=key)) as checkpoint:
            return check_finite(checkpoint)
    if isinstance(source, Checkpoint):
        return _in_checkpoint(source)
    found = list(leaves(source, sys.maxsize))
    return _in_objects([leaf for _, leaf in found], lambda i: name_of(found[i][0]))


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


def _in_checkpoint(checkpoint: Checkpoint) -> list[NonFinite]:
    """Look where the bytes are mapped, and make arrays of what is not in C order only."""
    from tensorio import _arrays

    table = checkpoint._table
    names, rows = list(table.index), array("q", table.index.values())
    leases = []

    def lease(storage: int) -> Any:
        held = checkpoint._storage(storage)
        if held.ahead or checkpoint._prefetches:  # which want to know of each tensor
            return None
        try:
            leases.append(held.lease())
        except TensorIOError:
            return None  # asking for the tensor raises it, with the tensor's name
        return leases[-1]

    places = _arrays.places(table.rows, table.dims, rows, lease)
    return _among(places, leases, names.__getitem__, lambda i: checkpoint[names[i]])


def _in_objects(objects: list[Any], name: Callable[[int], str]) -> list[NonFinite]:
    """Look at those that are tensors."""
    from tensorio import _source

    torch = sys.modules.get("torch")
    places = _source.places(objects, None if torch is None else torch.Tensor)
    return _among(places, objects, name, objects.__getitem__)


def _among(
    places: array[int], owners: Any, name: Callable[[int], str], tensor: Callable[[int], Any]
) -> list[NonFinite]:
    """Look at all of them: what lies in memory as it is with all cores, the others as they come."""
    found: dict[int, NonFinite] = {}
    if -1 in (codes := places[::3]):
        for i, code in enumerate(codes):
            if code < 0 and is_tensor(one := tensor(i)) and (bad := _elsewhere(name(i), one)) is not None:
                found[i] = bad
    for i, *match in _searched(places, owners):
        found[i] = _joined(_counted(name(i), *match), found.get(i))
    return [found[i] for i in sorted(found)]


def _searched(places: array[int], owners: Any) -> Iterable[tuple[int, int, int, int, int]]:
    """The runs with a match, in order; see `_core.match_runs`. The memory is that of the `owners`."""
    runs, ends, nbytes = _core.match_cut(places, _COLUMNS, PART, TASK, RUN_COST)
    if nbytes < THREADS_FROM:
        return _core.match_runs(runs, _COLUMNS, 0, ends[-1]) if ends else ()
    searched: list[list[tuple[int, int, int, int, int]]] = [[] for _ in ends]

    def search(task: int, owners: Any = owners) -> None:  # held by the threads, which a second Ctrl-C leaves behind
        searched[task] = _core.match_runs(runs, _COLUMNS, ends[task - 1] if task else 0, ends[task])

    in_threads(search, range(len(ends)), readers())  # not by a pool, which takes no work at the end of a program
    return chain.from_iterable(searched)


def _counted(name: str, code: int, address: int, nbytes: int, start: int) -> NonFinite:
    """What is in a run from its first match on."""
    kind = _KINDS[DTYPES[code].name]
    count = nbytes // kind.width
    both = _core.match_count(address, count, kind.width, kind.mask, kind.pattern)
    infinite = 0 if kind.infinity is None else _core.match_count(address, count, kind.width, *kind.infinity)
    return NonFinite(name, start // (kind.width * kind.parts), both - infinite, infinite)


def _joined(later: NonFinite, earlier: NonFinite | None) -> NonFinite:
    """Those of two parts of one tensor."""
    if earlier is None:
        return later
    return NonFinite(earlier.name, earlier.first, earlier.nan + later.nan, earlier.infinite + later.infinite)


def _elsewhere(name: str, tensor: Any) -> NonFinite | None:
    """What is in a tensor that is not known to be in C order in this memory."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _in_torch(name, tensor, torch)
    return _in_array(name, as_numpy(tensor))


def _in_array(name: str, values: Any) -> NonFinite | None:
    """An array of any sort: of another library, with gaps, in the foreign byte order, of a type of NumPy's own."""
    from tensorio import _source
    from tensorio.dtypes import of_numpy
    from tensorio.formats._items import c_order, native

    places = _source.places([values])
    if places[0] >= 0:
        return _at(name, values, places)
    row = of_numpy(values.dtype)
    if row is None:
        return _in_fields(name, values) if values.dtype.names else _by_numpy(name, values)
    found: NonFinite | None = None
    if row.name in _KINDS:
        start = 0
        for piece in c_order(values, native):
            found = _at(name, piece, array("q", [row.code, _core.address(piece), len(piece)]), start, found)
            start += len(piece)
    return found


def _at(name: str, owner: Any, places: array[int], start: int = 0, found: NonFinite | None = None) -> NonFinite | None:
    """Add what is in elements that lie in C order, the first of them `start` bytes behind the first of the tensor."""
    for _, code, address, nbytes, at in _searched(places, owner):
        found = _joined(_counted(name, code, address, nbytes, start + at), found)
    return found


def _in_fields(name: str, records: Any) -> NonFinite | None:
    """An array of records; each field may have several elements for each."""
    found = [
        replace(bad, first=bad.first // (values.size // records.size))
        for values in map(records.__getitem__, records.dtype.names)
        if values.size and (bad := _in_array(name, values)) is not None
    ]
    found.sort(key=lambda bad: bad.first)
    return reduce(lambda earlier, later: _joined(later, earlier), found) if found else None


def _by_numpy(name: str, values: Any) -> NonFinite | None:
    """Numbers of a type that no file has, like longdouble: as NumPy tells."""
    import numpy as np

    from tensorio.formats._items import c_order, native

    if values.dtype.kind in NO_NUMBERS or not values.nbytes:
        return None
    found: NonFinite | None = None
    start = 0
    for piece in c_order(values, native):
        numbers = np.frombuffer(piece, np.uint8).view(values.dtype.newbyteorder("="))
        parts = numbers.view(numbers.real.dtype) if numbers.dtype.kind == "c" else numbers
        try:
            finite = np.isfinite(numbers)
        except TypeError:  # integers of other packages
            return None
        if not finite.all():
            bad = NonFinite(name, start + int(finite.argmin()), int(np.isnan(parts).sum()), int(np.isinf(parts).sum()))
            found = _joined(bad, found)
        start += len(numbers)
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
    around_others = tensor.is_cpu and tensor.numel() and not tensor.data_ptr()
    # Of 1-byte types, torch can tell little.
    if not around_others and (tensor.is_cpu or tensor.dtype.itemsize == 1):
        found = _in_objects([tensor.cpu().resolve_conj().resolve_neg().contiguous()], lambda _: name)
        return found[0] if found else None
    parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    nan, infinite = int(parts.isnan().sum()), int(parts.isinf().sum())
    if not nan + infinite:
        return None
    first = int((~torch.isfinite(tensor)).flatten().to(torch.uint8).argmax())
    return NonFinite(name, first, nan, infinite)
