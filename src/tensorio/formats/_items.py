"""The user's objects as tensors to be written, for formats that hold names and tensors only.

Needs NumPy: imported when something is written, not with the formats.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from tensorio import _source
from tensorio.arraylike import as_numpy, is_tensor
from tensorio.dtypes import BY_NAME, DTYPES, of_numpy
from tensorio.errors import TensorMismatchError, UnsupportedError, escaped
from tensorio.kinds import TensorKind
from tensorio.plan import PIECE, Payloads
from tensorio.tensors import first_duplicate

Fetch = Callable[[Any], Any]

__all__ = ["Items", "c_order", "items_of", "native"]


class Items:
    """Tensors to be written, by name, wherever their bytes are now; as columns.

    Attributes
    ----------
    names : list of str
    dtypes : list of str
        Canonical names.
    shapes : list of tuple of int
        Logical shapes.
    payloads : Payloads
        The elements of each in C order.
    """

    __slots__ = ("dtypes", "names", "payloads", "shapes")

    def __init__(self) -> None:
        self.names: list[str] = []
        self.dtypes: list[str] = []
        self.shapes: list[tuple[int, ...]] = []
        self.payloads = Payloads()

    def add(self, name: str, dtype: str, shape: tuple[int, ...]) -> Payloads:
        """Append a tensor; its payload is to be added to what this returns."""
        self.names.append(name)
        self.dtypes.append(dtype)
        self.shapes.append(shape)
        return self.payloads


def items_of(obj: object, fetch: Fetch | None = None) -> Items:
    """Return the tensors of a mapping, nested ones under dotted names.

    Parameters
    ----------
    obj : mapping
        Names to tensors, or to further mappings or sequences.
    fetch : callable, optional
        See `SaveOptions`.

    Raises
    ------
    TensorMismatchError
        Something that is not a tensor, or two tensors under one name.
    """
    if not isinstance(obj, Mapping):
        raise TensorMismatchError(f"expected a mapping of names to tensors, found {type(obj).__name__}")
    others: list[str] = []
    items = Items()
    for name, leaf in _leaves(obj):
        if not _add(items, name, leaf, fetch):
            others.append(f"{escaped(name)} ({type(leaf).__name__})")
    if others:
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        raise TensorMismatchError(
            f"this format holds tensors only; found {', '.join(others[:5])}{more}; drop them or save as .pt"
        )
    if len(set(items.names)) != len(items.names):
        raise TensorMismatchError(f"two tensors have the name {escaped(first_duplicate(items.names))}")
    return items


def _leaves(root: Mapping[Any, object]) -> Iterator[tuple[str, object]]:
    """Walk nested mappings and sequences in order; cycles end in an error."""
    stack: list[tuple[str, Iterator[tuple[Any, object]], int]] = [("", iter(root.items()), id(root))]
    open_ids = {id(root)}
    while stack:
        prefix, children, ident = stack[-1]
        step = next(children, None)
        if step is None:
            stack.pop()
            open_ids.discard(ident)
            continue
        name = f"{prefix}.{step[0]}" if prefix else str(step[0])
        child = step[1]
        tensor = hasattr(child, "shape") and not isinstance(child, TensorKind)
        nested = None if tensor else _children(child)  # tensors first: asking for a Mapping is slow
        if nested is None:
            yield name, child
        elif id(child) in open_ids:
            raise TensorMismatchError(f"{escaped(name)} contains itself")
        else:
            stack.append((name, nested, id(child)))
            open_ids.add(id(child))


def _children(obj: object) -> Iterator[tuple[Any, object]] | None:
    if isinstance(obj, Mapping):
        return iter(obj.items())
    if isinstance(obj, list | tuple):
        return iter(enumerate(obj))
    if isinstance(obj, TensorKind):
        return iter(obj.parts().items())
    return None


def _add(items: Items, name: str, tensor: Any, fetch: Fetch | None) -> bool:
    """Append one tensor, whose bytes stay where they are if they are in C order; False for anything else."""
    if type(tensor) is np.ndarray:
        _add_numpy(items, name, tensor)
        return True
    if not is_tensor(tensor):
        return False
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        _add_torch(items, name, tensor, fetch)
    else:
        _add_numpy(items, name, tensor if isinstance(tensor, np.ndarray) else as_numpy(tensor))
    return True


def _add_numpy(items: Items, name: str, array: np.ndarray[Any, Any]) -> None:
    code, shape, nbytes, address, in_order = _source.describe_array(array)
    if code < 0:
        row = of_numpy(array.dtype)
        if row is None:
            raise UnsupportedError(f"NumPy dtype {array.dtype} is not a tensor's", record=name)
        code, in_order = row.code, False
    payloads = items.add(name, DTYPES[code].name, shape)
    if in_order:
        payloads.keep.append(array)
        payloads.add_memory(address, nbytes)
    else:
        payloads.add(partial(c_order, array, native), array.nbytes)


def native(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array in native byte order; copies: only if it is not."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def c_order(array: np.ndarray[Any, Any], finish: Callable[[Any], Any] | None = None) -> Iterator[memoryview]:
    """Yield the elements of a strided array in C order, a piece at a time.

    Parameters
    ----------
    array : ndarray
    finish : callable, optional
        Applied to each piece, e.g. ``np.conj``.
    """
    if array.nbytes <= PIECE or array.ndim == 0:
        piece = np.ascontiguousarray(array if finish is None else finish(array))
        yield memoryview(piece.reshape(-1).view(np.uint8)) if piece.size else memoryview(b"")  # type: ignore[arg-type]
        return
    step = PIECE * len(array) // array.nbytes
    for start in range(0, len(array), max(step, 1)):
        yield from c_order(array[start] if step == 0 else array[start : start + step], finish)


def _add_torch(items: Items, name: str, tensor: Any, fetch: Fetch | None) -> None:
    described = _source.describe_torch(tensor)
    if described is not None and not described[4]:
        code, shape, nbytes, _, _ = described
        items.add(name, DTYPES[code].name, shape).add(partial(_torch_pieces, tensor.detach()), nbytes)
        return
    if described is None:
        tensor = _plain_torch(name, tensor, fetch is None)
        if fetch is not None and not tensor.is_cpu:
            dtype = BY_NAME[str(tensor.dtype).partition(".")[2]].name
            items.add(name, dtype, tuple(tensor.shape)).add_memory(fetch(tensor).data_ptr(), tensor.nbytes)
            return
        described = _source.describe_torch(tensor)
    if described is None:
        kind = type(tensor).__name__
        raise UnsupportedError(f"a {kind} has no memory of its own; save the tensors that it is made of", record=name)
    code, shape, nbytes, address, _ = described
    payloads = items.add(name, DTYPES[code].name, shape)
    payloads.keep.append((tensor, tensor.untyped_storage()))  # a tensor may be given other memory (`.data =`)
    payloads.add_memory(address, nbytes)


def _torch_pieces(tensor: Any) -> Iterator[memoryview]:
    """Yield the elements of a strided tensor in C order, a piece at a time: no copy of all of it is ever there."""
    if tensor.nbytes <= PIECE or not tensor.dim():
        # Lazy conjugates and negatives are views of other bytes than their values.
        plain = tensor.resolve_conj().resolve_neg().contiguous()
        yield memoryview(plain.reshape(-1).view(sys.modules["torch"].uint8).numpy())
        return
    step = PIECE * len(tensor) // tensor.nbytes
    for start in range(0, len(tensor), max(step, 1)):
        yield from _torch_pieces(tensor[start] if step == 0 else tensor[start : start + step])


def _plain_torch(name: str, tensor: Any, here: bool) -> Any:
    """Return a contiguous tensor of the same values (`here`: in memory), or say why there is none."""
    if str(tensor.layout) != "torch.strided" or tensor.is_quantized or tensor.is_nested:
        raise UnsupportedError(f"a torch tensor of layout {tensor.layout} is not one array; save as .pt", record=name)
    if tensor.device.type == "meta":
        raise UnsupportedError("a meta tensor has no data to save", record=name)
    if str(tensor.dtype).partition(".")[2] not in BY_NAME:
        raise UnsupportedError(f"torch dtype {tensor.dtype} is not known here", record=name)
    # Lazy conjugates and negatives are views of other bytes than their values.
    plain = tensor.detach().cpu() if here else tensor.detach()
    return plain.resolve_conj().resolve_neg().contiguous()
