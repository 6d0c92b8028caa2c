"""From the arguments of torch's rebuild functions to tensors that NumPy has no array for.

Called by the compiled pickle machine with arguments that come from the file,
storages already turned into tensors. Each function checks type, count and
shape of all that it keeps; no tensor's data is read, but for the sizes of
nested ones where arrays are made anyway.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from tensorio.errors import HeaderError, LimitError, UnsupportedError, escaped
from tensorio.kinds._base import (
    QUANTIZED,
    JaggedTensor,
    MetaTensor,
    NestedTensor,
    QuantizedTensor,
    SubclassTensor,
    TensorKind,
)
from tensorio.kinds.sparse import SparseTensor
from tensorio.machine.rebuild_dtensor import dtensor
from tensorio.machine.script_calls import sparse_arguments
from tensorio.values import Device, Opaque, TorchDType, TorchTag

__all__ = ["KINDS", "Facts"]

Args = tuple[Any, ...]

MAX_RANK = 64  # dimensions, as of every tensor that is read
LAYOUTS = frozenset(
    f"torch.{name}"
    for name in ("strided", "jagged", "_mkldnn", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
)
# Classes of torch's own that add nothing to a tensor.
PLAIN = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
DTENSORS = {("torch.distributed.tensor", "DTensor"), ("torch.distributed.tensor._api", "DTensor"),
            ("torch.distributed._tensor.api", "DTensor"), ("torch.distributed._tensor", "DTensor")}  # fmt: skip
NJT = "torch.nested._internal.nested_tensor.NestedTensor"
# Storage class -> quantized type.
QSTORAGES = {
    "QInt8Storage": "qint8", "QUInt8Storage": "quint8", "QInt32Storage": "qint32", "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
}  # fmt: skip


class Facts(Protocol):
    """What the machine knows of the tensors it made."""

    def is_tensor(self, obj: object) -> bool:
        """Tell whether an object is a plain tensor: an array or a leaf."""

    def describe(self, tensor: Any) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Return dtype name, shape and strides in bytes."""


def _count(args: Args, what: str, *counts: int) -> None:
    if len(args) not in counts:
        raise HeaderError(f"pickle: expected {counts[0]} arguments to rebuild {what}, found {len(args)}")


def _wrong(what: str, expected: str) -> HeaderError:
    return HeaderError(f"pickle: {what}: expected {expected}")


def _tensors(facts: Facts, what: str, *parts: object) -> None:
    if not all(facts.is_tensor(part) for part in parts):
        raise _wrong(what, "tensors")


def _ints(what: str, value: object) -> tuple[int, ...]:
    """Return a size or stride as a tuple."""
    if not isinstance(value, tuple | list) or not all(type(n) is int and 0 <= n < 1 << 63 for n in value):
        raise _wrong(what, "a tuple of ints from 0 to 2^63 - 1")
    if len(value) > MAX_RANK:
        raise LimitError(f"pickle: {what}: {len(value)} dimensions; at most {MAX_RANK} are read")
    return tuple(value)


def _bool(what: str, value: object) -> bool:
    if type(value) is not bool:
        raise _wrong(what, "a bool as requires_grad")
    return value


def sparse(args: Args, facts: Facts) -> SparseTensor:
    """``(layout, (indices, values, size[, is_coalesced]))`` or ``(layout, (compressed, plain, values, size))``."""
    if args and type(args[0]) is int:
        args, requires_grad = sparse_arguments(args)
        return replace(sparse(args, facts), requires_grad=requires_grad)
    _count(args, "a sparse tensor", 2)
    layout, data = args
    if type(layout) is not TorchTag or type(data) is not tuple:
        raise _wrong("a sparse tensor", "a layout and a tuple")
    name = layout.removeprefix("torch.sparse_")
    if name == "coo":
        _count(data, "a sparse tensor of layout coo", 4, 3)
        indices, values, size, *flag = data
        _tensors(facts, "a sparse tensor", indices, values)
        coalesced = flag[0] if flag else None
        if coalesced is not None and type(coalesced) is not bool:
            raise _wrong("a sparse tensor", "a bool as is_coalesced")
        made = SparseTensor(name, _ints("a sparse tensor's size", size), indices, values, None, coalesced)
    else:
        _count(data, f"a sparse tensor of layout {escaped(name)}", 4)
        pointers, plain, values, size = data
        _tensors(facts, "a sparse tensor", pointers, plain, values)
        made = SparseTensor(name, _ints("a sparse tensor's size", size), plain, values, pointers)
    made.check(facts.describe)
    return made


def quantized(args: Args, facts: Facts) -> QuantizedTensor:
    """``(values, quantizer, requires_grad, storage class, (offset, size, stride))``.

    For types of less than a byte, `values` are all bytes of the storage.
    """
    values, quantizer, requires_grad, storage, (offset, size, stride) = args
    _tensors(facts, "a quantized tensor", values)
    dtype = QSTORAGES.get(storage)
    if dtype is None:
        raise HeaderError(f"pickle: a quantized tensor: expected a quantized storage, found {escaped(storage)}")
    shape, steps = _ints("a quantized tensor's size", size), _ints("a quantized tensor's stride", stride)
    if QUANTIZED[dtype][1] < 8 and (type(offset) is not int or offset or not _in_order(shape, steps)):
        raise UnsupportedError(f"a {dtype} tensor whose elements are not all of its storage in order")
    scheme, scale, zero_point, axis = _quantizer(quantizer, facts)
    grad = _bool("a quantized tensor", requires_grad)
    made = QuantizedTensor(values, dtype, shape, scheme, scale, zero_point, axis, requires_grad=grad)
    made.check(facts.describe)
    return made


def _in_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Tell whether strides are those of elements in C order."""
    if len(shape) != len(stride):
        raise HeaderError(f"pickle: size has {len(shape)} dimensions and stride {len(stride)}")
    step = 1
    for n, found in zip(reversed(shape), reversed(stride), strict=True):
        if n > 1 and found != step and 0 not in shape:
            return False
        step *= n
    return True


def _quantizer(quantizer: object, facts: Facts) -> tuple[str, Any, Any, int | None]:
    """Return scheme, scale, zero point and axis."""
    if type(quantizer) is not tuple or not quantizer or type(quantizer[0]) is not TorchTag:
        raise _wrong("a quantized tensor", "a tuple that begins with a scheme")
    scheme = quantizer[0].removeprefix("torch.")
    if scheme == "per_tensor_affine":
        _count(quantizer, "a quantizer of one scale", 3)
        _, scale, zero_point = quantizer
        return scheme, _number(float, scale), _number(int, zero_point), None
    if scheme in ("per_channel_affine", "per_channel_affine_float_qparams"):
        _count(quantizer, "a quantizer of many scales", 4)
        _, scales, zero_points, axis = quantizer
        exact = int if scheme == "per_channel_affine" else float
        return "per_channel_affine", _numbers(float, scales, facts), _numbers(exact, zero_points, facts), axis
    raise UnsupportedError(f"a quantized tensor of scheme {escaped(scheme)}")


def _number(kind: type[int] | type[float], value: object) -> int | float:
    if type(value) is not kind or not (kind is float or -(1 << 63) <= value < 1 << 63):
        raise _wrong("a quantizer", "a float as scale, and an int below 2^63 as zero point")
    return value


def _numbers(kind: type[int] | type[float], value: object, facts: Facts) -> object:
    """Return a tensor of scales or zero points, or the tuple of a list of them, as old releases wrote."""
    if facts.is_tensor(value):
        return value
    if not isinstance(value, list | tuple):
        raise _wrong("a quantizer", "tensors or lists of scales and zero points")
    return tuple(_number(kind, n) for n in value)


def nested(args: Args, facts: Facts) -> NestedTensor:
    """``(buffer, sizes, strides, offsets)``; the offsets as a list up to release 2.0."""
    _count(args, "a nested tensor", 4)
    buffer, sizes, strides, offsets = args
    if isinstance(offsets, list | tuple):
        offsets = tuple(_number(int, n) for n in offsets)
        _tensors(facts, "a nested tensor", buffer, sizes, strides)
    else:
        _tensors(facts, "a nested tensor", *args)
    made = NestedTensor(buffer, sizes, strides, offsets)
    made.check(facts.describe)
    numpy = sys.modules.get("numpy")
    if numpy is not None and all(type(part) is numpy.ndarray for part in made.parts().values()):
        from tensorio.kinds import _dense

        _dense.prove_inside(made)  # at once, as long as nobody asked for headers only: they are a header of sorts
    return made


def jagged(args: Args, facts: Facts) -> JaggedTensor:
    """``({"values": ..., "offsets": ..., "lengths": ..., "_ragged_idx": ..., ...},)``."""
    _count(args, "a jagged tensor", 1)
    (words,) = args
    if type(words) is not dict:
        raise _wrong("a jagged tensor", "a dict of arguments")
    values, offsets, lengths = (words.get(name) for name in ("values", "offsets", "lengths"))
    _tensors(facts, "a jagged tensor", values, offsets, *(() if lengths is None else (lengths,)))
    grad = _bool("a jagged tensor", words.get("requires_grad", False))
    made = JaggedTensor(values, offsets, lengths, words.get("_ragged_idx", 1), requires_grad=grad)
    made.check(facts.describe)
    return made


def from_class(args: Args, facts: Facts) -> JaggedTensor:
    """``(class, (values, offsets), state)``: a jagged tensor as torch 2.3 to 2.5 save it."""
    cls, parts, state = args
    if type(cls) is not TorchTag or cls != NJT:
        raise HeaderError(f"pickle: expected a function, found {type(cls).__name__}")
    _count(parts, "a jagged tensor", 2)
    if type(state) is not dict:
        raise _wrong("a jagged tensor", "a dict of attributes")
    words = {"lengths": state.get("_lengths"), "_ragged_idx": state.get("_ragged_idx", 1)}
    return jagged(({"values": parts[0], "offsets": parts[1], **words},), facts)


def meta(args: Args, facts: Facts) -> MetaTensor:
    """``(dtype, size, stride, requires_grad)``."""
    _count(args, "a tensor without data", 4)
    dtype, size, stride, requires_grad = args
    if type(dtype) is not TorchDType:
        raise _wrong("a tensor without data", "a dtype")
    shape, strides = _ints("a size", size), _ints("a stride", stride)
    if len(shape) != len(strides):
        raise HeaderError(f"pickle: size has {len(shape)} dimensions and stride {len(strides)}")
    grad = _bool("a tensor without data", requires_grad)
    return MetaTensor(str(dtype), shape, strides, requires_grad=grad)


def wrapper_subclass(args: Args, facts: Facts) -> SubclassTensor:
    """``(class, dtype, size, stride, offset, layout, device, requires_grad)``."""
    _count(args, "a tensor subclass", 8)
    cls, dtype, size, stride, offset, layout, device, requires_grad = args
    module, name = _class(cls)
    if type(cls) is TorchTag and cls in PLAIN:
        raise HeaderError(f"pickle: a tensor of class {cls} that wraps others: expected a storage")
    if type(offset) is not int or type(layout) is not TorchTag or type(device) not in (Device, str):
        raise _wrong("a tensor subclass", "an offset, a layout and a device")
    return SubclassTensor(meta((dtype, size, stride, requires_grad), facts), module, name)


def _class(cls: object) -> tuple[str, str]:
    """Return module and name of a class that was not called."""
    if isinstance(cls, type):  # one that the caller allowed
        return cls.__module__, cls.__qualname__
    if type(cls) is TorchTag:
        module, _, name = cls.rpartition(".")
        return module, name
    if type(cls) is Opaque and cls.args is None:
        return cls.module, cls.name
    raise _wrong("a tensor subclass", "a class")


def from_type(args: Args, facts: Facts) -> object:
    """``(tensor, class, state)``: a tensor of a subclass, or a plain one with attributes, which are dropped."""
    _count(args, "a tensor of some type", 3)
    made, cls, state = args
    if type(made) is Opaque:
        module, name = _class(cls)
        kept = Opaque(module, name, (made,))
        kept.state = state
        return kept
    if not facts.is_tensor(made) and not isinstance(made, TensorKind):
        raise _wrong("a tensor subclass", "a tensor to make it of")
    if type(cls) is TorchTag and (cls in PLAIN or (cls == NJT and type(made) is JaggedTensor)):
        _plain_state(state)
        return made
    module, name = _class(cls)
    if type(made) is SubclassTensor:
        if made.state is not None or (made.module, made.name) != (module, name):
            raise HeaderError("pickle: a tensor subclass made of another")
        made = made.tensor
    piece = dtensor(made, state, facts) if (module, name) in DTENSORS else None
    return SubclassTensor(made, module, name, state) if piece is None else piece


def _plain_state(state: object) -> None:
    """Check attributes that are dropped: what would change the class itself is no attribute."""
    for part in state if type(state) is tuple else (state,):
        if part is not None and type(part) is not dict:
            raise _wrong("a tensor with attributes", "a dict of them")
        for name in part or ():
            if type(name) is not str or not name.isidentifier() or (name.startswith("__") and name.endswith("__")):
                raise HeaderError(f"pickle: attribute {escaped(name)} of a tensor")


def device_tensor(args: Args, facts: Facts) -> object:
    """``(tensor, dtype, device, requires_grad)``: a device's tensor, which was fetched to be saved."""
    _count(args, "a device's tensor", 4)
    _tensors(facts, "a device's tensor", args[0])
    return args[0]


def device_from_numpy(args: Args, facts: Facts) -> object:
    """``(array, dtype, device, requires_grad)``: the same as a pickled array."""
    _count(args, "a device's tensor", 4)
    numpy = sys.modules.get("numpy")
    if not facts.is_tensor(args[0]) and (numpy is None or type(args[0]) is not numpy.ndarray):
        raise _wrong("a device's tensor", "an array")
    return args[0]


def get_layout(args: Args, facts: Facts) -> TorchTag:
    """``("torch.strided",)``."""
    if len(args) != 1 or type(args[0]) is not str or args[0] not in LAYOUTS:
        raise _wrong("a layout", "its name")
    return TorchTag(args[0])


# By `tensorio.allowlist.Entry.kind`; "from_class" and "from_type" are called by the machine for "rebuild_from_type".
KINDS: dict[str, Callable[[Args, Facts], object]] = {
    "device_from_numpy": device_from_numpy,
    "device_tensor": device_tensor,
    "from_class": from_class,
    "from_type": from_type,
    "get_layout": get_layout,
    "rebuild_meta": meta,
    "rebuild_nested": nested,
    "rebuild_njt": jagged,
    "rebuild_qtensor": quantized,
    "rebuild_sparse": sparse,
    "rebuild_wrapper_subclass": wrapper_subclass,
}
