"""What the reference readers make of a file that tensorio takes: the same values, or a refusal of theirs.

Runs in a process of its own: readers that were not made for hostile files may take it down.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

import tensorio
from judge import Broken
from tensorio.values import Device, Size, TorchDType

PAIRS = 20_000  # of values that are compared
PLAIN = int | str | bytes | bytearray | None


def torch_refuses(data: bytes, format: str | None) -> bool | None:
    """Compare with ``torch.load(weights_only=True)``; True if that refuses, None if there is no torch."""
    try:
        import torch
    except ImportError:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            theirs = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        except Exception:
            return True
        try:
            compare(tensorio.load(data, format=format), theirs, torch)
        except Broken:
            again = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
            if bits_of(theirs, torch) != bits_of(again, torch):
                return True  # of two minds: no reference
            raise
    return False


def bits_of(tree: Any, torch: Any) -> list[bytes]:
    """The bytes of the tensors in a tree of dicts, lists and tuples, by the way they are met."""
    out, stack, seen = [], [tree], set()
    while stack and len(seen) < PAIRS:
        x = stack.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, torch.Tensor) and x.layout == torch.strided and 0 < x.numel() < 1 << 20:
            out.append(x.detach().clone().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(x, dict):
            stack += x.values()
        elif isinstance(x, list | tuple):
            stack += x
    return out


def compare(ours: Any, theirs: Any, torch: Any) -> None:
    """Walk two trees side by side."""
    stack = [(ours, theirs, "")]
    seen = set()
    while stack and len(seen) < PAIRS:
        a, b, where = stack.pop()
        if (id(a), id(b)) in seen:
            continue
        seen.add((id(a), id(b)))
        if isinstance(b, torch.Tensor):
            compare_tensor(a, b, where, torch)
        elif isinstance(b, dict):
            agree(isinstance(a, dict) and len(a) == len(b), a, b, where)
            for (ka, va), (kb, vb) in zip(a.items(), b.items(), strict=True):
                stack += [(ka, kb, where + ".key"), (va, vb, f"{where}[{kb!r:.40}]")]
        elif isinstance(b, torch.Size):
            agree(isinstance(a, Size) and tuple(a) == tuple(b), a, b, where)
        elif isinstance(b, list | tuple):
            agree(isinstance(a, list | tuple) and len(a) == len(b), a, b, where)
            stack += [(x, y, f"{where}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True))]
        else:
            compare_plain(a, b, where, torch)


def compare_plain(a: Any, b: Any, where: str, torch: Any) -> None:
    if isinstance(b, torch.dtype):
        agree(isinstance(a, TorchDType) and f"torch.{a}" == str(b), a, b, where)
    elif isinstance(b, torch.device):
        agree(isinstance(a, Device) and (a.type, a.index) == (b.type, b.index), a, b, where)
    elif isinstance(b, float | complex):
        agree(type(a) is type(b) and repr(a) == repr(b), a, b, where)
    elif isinstance(b, set | frozenset):
        agree(type(a) is type(b) and len(a) == len(b), a, b, where)
        agree(a == b or not all(isinstance(item, PLAIN) for item in b), a, b, where)
    elif isinstance(b, PLAIN):
        agree(type(a) is type(b) and a == b, a, b, where)


def compare_tensor(a: Any, b: Any, where: str, torch: Any) -> None:
    if not isinstance(a, np.ndarray) or b.layout != torch.strided or b.is_quantized or b.is_meta:
        return  # kinds that have no array of one block
    b = b.detach().resolve_conj().resolve_neg()
    agree(a.shape == tuple(b.shape), a.shape, b.shape, where)
    agree(a.nbytes == b.numel() * b.element_size(), a.dtype, b.dtype, where)
    if 0 < a.nbytes <= 1 << 20:
        raw = b.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        agree(np.ascontiguousarray(a).tobytes() == raw, a, b, where)


def agree(condition: bool, a: Any, b: Any, where: str) -> None:
    if not condition:
        raise Broken(
            "differs", f"from torch at {where[-200:]}: {type(a).__name__} {a!r:.100}, {type(b).__name__} {b!r:.100}"
        )


def safetensors_differs(data: bytes) -> Iterator[str]:
    """Where the reference's verdict or values are not ours; nothing without it."""
    try:
        from safetensors import SafetensorError, deserialize
    except ImportError:
        return
    try:
        theirs = {name: (tuple(t["shape"]), bytes(t["data"])) for name, t in deserialize(data)}
    except SafetensorError as error:
        theirs, refusal = None, str(error)
    try:
        ours = {name: (a.nbytes, a.tobytes()) for name, a in tensorio.load(data, format="safetensors").items()}
    except tensorio.LimitError:
        return  # ours alone: rank, memory
    except tensorio.TensorIOError as error:
        if theirs is not None and "twice" not in str(error) and "duplicate" not in str(error):
            yield f"refused: {error}; the reference takes it"
        return
    if theirs is None:
        yield f"taken; the reference refuses it: {refusal[:200]}"
    elif {name: raw for name, (_, raw) in ours.items()} != {name: raw for name, (_, raw) in theirs.items()}:
        yield "other tensors than the reference's"
