"""Whether two loaded objects are the same in all that torch shows, sharing of storages included."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def differences(a: Any, b: Any) -> list[str]:
    """What differs, as paths and words; empty if nothing does."""
    found: list[str] = []
    stack, seen = [("", a, b)], set()
    while stack:
        path, x, y = stack.pop()
        if (id(x), id(y)) in seen:
            continue
        seen.add((id(x), id(y)))
        if type(x) is not type(y):
            found.append(f"{path}: {type(x).__name__} and {type(y).__name__}")
        elif isinstance(x, torch.Tensor):
            if facts(x) != facts(y):
                found.append(f"{path}: {facts(x)!r:.300} and {facts(y)!r:.300}")
            stack.append((f"{path}.__dict__", dict(x.__dict__), dict(y.__dict__)))
        elif isinstance(x, torch.storage.TypedStorage):
            if (x.dtype, bytes(x.untyped())) != (y.dtype, bytes(y.untyped())):
                found.append(f"{path}: storages differ")
        elif isinstance(x, np.ndarray):
            if x.dtype != y.dtype or x.shape != y.shape or x.tobytes() != y.tobytes():
                found.append(f"{path}: arrays differ")
        elif isinstance(x, dict):
            if list(map(repr, x)) != list(map(repr, y)):
                found.append(f"{path}: keys {list(x)!r:.200} and {list(y)!r:.200}")
            stack.extend((f"{path}.{key}", x[key], y[key]) for key in x if key in y)
            stack.append((f"{path}.__dict__", getattr(x, "__dict__", {}), getattr(y, "__dict__", {})))
        elif isinstance(x, list | tuple):
            if len(x) != len(y):
                found.append(f"{path}: {len(x)} and {len(y)} items")
            stack.extend((f"{path}.{i}", m, n) for i, (m, n) in enumerate(zip(x, y, strict=False)))
        elif hasattr(x, "__dict__") and not isinstance(x, type):
            stack.append((f"{path}.__dict__", x.__dict__, y.__dict__))
        elif not (x == y or (x != x and y != y)):
            found.append(f"{path}: {x!r:.100} and {y!r:.100}")
    if not found and sharing(a) != sharing(b):
        found.append(f"sharing: {sharing(a)} and {sharing(b)}")
    return found


def facts(t: torch.Tensor) -> list[Any]:
    """All that makes a tensor, as plain values."""
    out: list[Any] = [type(t), t.dtype, str(t.device), t.layout, tuple(t.shape) if not t.is_nested else None,
                      t.requires_grad, t.is_leaf]  # fmt: skip
    if t.device.type == "meta" or type(t) not in (torch.Tensor, torch.nn.Parameter):
        return out
    if t.is_nested:
        return [*out, *(facts(part) for part in t.detach().unbind())]
    if t.layout is torch.sparse_coo:
        return [*out, t.is_coalesced(), *facts(t.detach()._indices()), *facts(t.detach()._values())]
    if t.layout is not torch.strided:
        rows = t.layout in (torch.sparse_csr, torch.sparse_bsr)
        parts = (t.crow_indices(), t.col_indices()) if rows else (t.ccol_indices(), t.row_indices())
        return [*out, *(facts(part) for part in (*parts, t.detach().values()))]
    out += [t.stride(), t.storage_offset(), t.is_conj(), t.is_neg(), t.untyped_storage().nbytes(), content(t)]
    if t.is_quantized:
        out.append(t.qscheme())
        if t.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            out += [t.q_scale(), t.q_zero_point()]
        else:
            out += [content(t.q_per_channel_scales()), content(t.q_per_channel_zero_points()), t.q_per_channel_axis()]
    return out


def content(t: torch.Tensor) -> bytes:
    """The bytes of a tensor's storage."""
    storage = t.untyped_storage()
    return bytes(torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).numpy())


def sharing(root: Any) -> list[int]:
    """For each tensor in order, the number of the first that is in the same storage; empty ones are by themselves."""
    first: dict[int, int] = {}
    out = []
    for i, tensor in enumerate(tensors(root)):
        plain = tensor.layout is torch.strided and tensor.device.type != "meta" and not tensor.is_nested
        storage = tensor.untyped_storage() if plain and type(tensor) in (torch.Tensor, torch.nn.Parameter) else None
        out.append(i if storage is None or not storage.nbytes() else first.setdefault(storage._cdata, i))
    return out


def tensors(root: Any) -> Iterator[torch.Tensor]:
    """The tensors of an object, in order, each object once."""
    stack, seen = [root], set()
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        if isinstance(node, torch.Tensor):
            yield node
        elif isinstance(node, dict):
            seen.add(id(node))
            stack.extend(reversed(list(node.values())))
        elif isinstance(node, list | tuple):
            seen.add(id(node))
            stack.extend(reversed(node))


def quietly(function: Any, *args: Any, **kwargs: Any) -> Any:
    """What a function returns, whatever it warns of: torch warns of types that it calls prototypes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)
