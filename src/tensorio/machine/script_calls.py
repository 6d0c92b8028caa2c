"""What the functions of ``torch.jit._pickle`` stand for: TorchScript writes them around lists and dicts.

They restore static types, of which plain data has none: each returns what it was given. Called by the compiled pickle
machine with arguments that come from the file, like those of `tensorio.machine.calls`.
Source: ``torch/jit/_pickle.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorio.errors import HeaderError
from tensorio.values import Opaque, TorchTag

__all__ = ["SCRIPT_CALLS", "SCRIPT_NAMES", "SCRIPT_STORAGES", "sparse_arguments"]

Args = tuple[Any, ...]
Check = Callable[[object], None]


def script_list(args: Args, check: Check) -> list[Any]:
    """``build_intlist([...])`` and its kin."""
    if len(args) != 1 or type(args[0]) is not list:
        raise HeaderError("pickle: torch.jit._pickle.build_...list(): expected a list")
    return args[0]


def script_typed(args: Args, check: Check) -> Any:
    """``restore_type_tag(value, "Dict[str, Tensor]")``."""
    if len(args) != 2 or type(args[0]) not in (list, dict) or type(args[1]) is not str:
        raise HeaderError("pickle: torch.jit._pickle.restore_type_tag(): expected a list or dict, and its type")
    return args[0]


def script_tensor(args: Args, check: Check) -> Any:
    """``build_tensor_from_id(n)``: a tensor of a table beside the pickle, which the files of torch 1.1 and 1.2 have."""
    if len(args) != 1 or type(args[0]) is not int or args[0] < 0:
        raise HeaderError("pickle: torch.jit._pickle.build_tensor_from_id(): expected the number of a tensor")
    return Opaque("torch.jit._pickle", "build_tensor_from_id", args)


def sparse_arguments(args: Args) -> tuple[Args, bool]:
    """Arguments of ``_rebuild_sparse_tensor`` as TorchScript orders them, in the order of ``torch.save``.

    ``(layout, size, requires_grad, indices, values, hooks)``, for CSR with two tensors of indices; the layout is a
    number, and hooks are never saved.

    Returns
    -------
    args : tuple
        ``(layout, (indices..., values, size))``.
    requires_grad : bool
    """
    layout = _SPARSE_LAYOUTS.get(args[0])
    end = 5 if layout == "torch.sparse_coo" else 6
    if layout is None or not end <= len(args) <= end + 1 or type(args[2]) is not bool:
        raise HeaderError("pickle: a sparse tensor of TorchScript: expected a layout, a size, a bool and tensors")
    return (TorchTag(layout), (*args[3:end], args[1])), args[2]


_SPARSE_LAYOUTS = {1: "torch.sparse_coo", 2: "torch.sparse_csr"}  # c10::Layout; its writer has no others

# By `tensorio.allowlist.Entry.kind`.
SCRIPT_CALLS: dict[str, Callable[[Args, Check], Any]] = {
    "script_list": script_list,
    "script_tensor": script_tensor,
    "script_typed": script_typed,
}

# Name in ``torch.jit._pickle``: kind, and why it is harmless.
SCRIPT_NAMES: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("build_intlist", "build_doublelist", "build_boollist", "build_tensorlist"),
        ("script_list", "returns the list that it is given"),
    ),
    "restore_type_tag": ("script_typed", "returns the list or dict that it is given"),
    "build_tensor_from_id": ("script_tensor", "keeps the number that it is given"),
}

# Storage classes that TorchScript names in ``torch`` though Python has none of them: element types by c10's names.
SCRIPT_STORAGES: dict[str, str] = {
    "ComplexHalf": "complex32", "UInt16": "uint16", "UInt32": "uint32", "UInt64": "uint64",
    "Float8_e5m2": "float8_e5m2", "Float8_e4m3fn": "float8_e4m3fn", "Float8_e5m2fnuz": "float8_e5m2fnuz",
    "Float8_e4m3fnuz": "float8_e4m3fnuz", "Float8_e8m0fnu": "float8_e8m0fnu", "Float4_e2m1fn_x2": "float4_e2m1fn_x2",
    "Bits1x8": "bits1x8", "Bits2x4": "bits2x4", "Bits4x2": "bits4x2", "Bits8": "bits8", "Bits16": "bits16",
}  # fmt: skip
