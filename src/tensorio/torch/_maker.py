"""torch tensors, while the pickle machine reads: what most checkpoints hold, at about a microsecond each.

One torch storage per storage of the file, so that what shared before it was
saved shares again, and everything else is independent. A tensor that covers
its whole storage brings it along, as one DLPack capsule; the others are set
over it. What is not here (sparse, quantized, subclasses, ...) ends the run with
`NotPlain`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tensorio.dtypes import DTYPES
from tensorio.machine.calls import CALLS
from tensorio.machine.stdlib import TYPES as PLAIN_TYPES
from tensorio.pickles import NotPlain
from tensorio.torch._tensors import CODES, FROM_DLPACK, TAKEN, TYPES, bytes_of
from tensorio.values import TorchDType, TorchTag

if TYPE_CHECKING:
    from tensorio._arrays import Lease
    from tensorio.torch._places import Places

__all__ = ["TorchMaker", "set_bits"]

_C: Any = torch._C
Check = Callable[[object], None]

_SCHEMES = (
    "per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric",
    "per_channel_affine_float_qparams",
)  # fmt: skip


def _size(args: tuple[Any, ...], check: Check) -> torch.Size:
    return torch.Size(CALLS["size"](args, check))


def _device(args: tuple[Any, ...], check: Check) -> torch.device:
    found = CALLS["device"](args, check)
    return torch.device(found.type) if found.index is None else torch.device(found.type, found.index)


def _values() -> dict[Any, Any]:
    """What torch's own rules let a pickle name, and that stands for itself."""
    dtypes = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    return {
        **{TorchDType(name): value for name, value in dtypes.items()},
        **{TorchTag(f"torch.{name}"): getattr(torch, name) for name in _SCHEMES if hasattr(torch, name)},
        **{PLAIN_TYPES[kind]: PLAIN_TYPES[kind] for kind in ("bytearray", "bytes", "complex", "counter", "set")},
    }


_VALUES = _values()
_CALLS: dict[str, Callable[[tuple[Any, ...], Check], Any]] = {
    **{kind: CALLS[kind] for kind in ("bytearray", "bytes", "complex", "counter", "encode", "ordered_dict", "set")},
    "size": _size,
    "device": _device,
}
assert _CALLS.keys() <= CALLS.keys()
assert (OrderedDict, Counter) == (PLAIN_TYPES["ordered_dict"], PLAIN_TYPES["counter"])


class TorchMaker:
    """See `tensorio.pickles.Maker`.

    Parameters
    ----------
    places : Places
        Where storages go.
    """

    consumer = staticmethod(FROM_DLPACK)
    taken = bytes(d.code in TAKEN for d in DTYPES)
    values = _VALUES
    dtypes = {dtype: DTYPES[code] for dtype, code in CODES.items()}  # noqa: RUF012  # a table, like the others
    calls = _CALLS

    def __init__(self, places: Places) -> None:
        self._places = places

    def moves(self, location: object) -> bool:
        return self._places.moves(location)

    def base(self, lease: Lease, offset: int, nbytes: int, itemsize: int, location: object) -> torch.Tensor:
        found = bytes_of(lease, offset, nbytes)
        if location is not None:
            return self._places.moved(found, location)
        return found if found.data_ptr() % max(itemsize, 8) == 0 else found.clone()

    def view(
        self, base: torch.Tensor, dtype: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> torch.Tensor:
        if TYPES[dtype] is None:
            raise NotPlain("a type that this release of torch lacks")
        empty = torch.empty(0, dtype=TYPES[dtype], device=base.device)
        return empty.set_(base.untyped_storage(), offset, shape, strides)

    def parameter(self, tensor: Any, requires_grad: bool) -> torch.nn.Parameter:
        if type(tensor) is not torch.Tensor:
            raise NotPlain("a parameter of a tensor of some other sort")
        return torch.Tensor._make_subclass(torch.nn.Parameter, tensor, requires_grad)

    def set_bits(self, tensor: torch.Tensor, conj: bool, neg: bool) -> None:
        set_bits(tensor, conj, neg)


def set_bits(tensor: torch.Tensor, conj: bool, neg: bool) -> None:
    """Mark a tensor as conjugated, negated or both."""
    _C._set_tensor_metadata(tensor, {name: True for name, bit in (("conj", conj), ("neg", neg)) if bit})
