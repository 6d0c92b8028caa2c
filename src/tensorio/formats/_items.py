"""The user's objects as tensors to be written: NumPy, torch, and anything that speaks DLPack.

torch is looked up in ``sys.modules`` and never imported: an object can't be a
torch tensor before somebody else imported torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tensorio.dtypes import BY_NAME, DTYPES
from tensorio.errors import TensorMismatchError, UnsupportedError, escaped
from tensorio.formats._base import Item
from tensorio.plan import PIECE

if TYPE_CHECKING:
    import numpy as np

__all__ = ["as_numpy", "c_order", "is_foreign_tensor", "is_tensor", "item_of", "items_of"]


def is_tensor(obj: object) -> bool:
    """Tell whether an object is written as a tensor."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(obj, numpy.ndarray):
        return True
    if torch is not None and isinstance(obj, torch.Tensor):
        return True
    return is_foreign_tensor(obj)


def is_foreign_tensor(obj: object) -> bool:
    """Tell whether an object of some other array library is written as a tensor."""
    return hasattr(type(obj), "__dlpack__")


def items_of(obj: object, keep: list[object]) -> Iterator[Item]:
    """Yield the tensors of a mapping, nested ones under dotted names.

    Parameters
    ----------
    obj : mapping
        Names to tensors, or to further mappings or sequences.
    keep : list
        Receives the objects whose memory the items point into.

    Raises
    ------
    TensorMismatchError
        Something that is not a tensor, or two tensors under one name.
    """
    if not isinstance(obj, Mapping):
        raise TensorMismatchError(f"expected a mapping of names to tensors, found {type(obj).__name__}")
    others: list[str] = []
    seen: set[str] = set()
    for name, leaf in _leaves(obj):
        if not is_tensor(leaf):
            others.append(f"{escaped(name)} ({type(leaf).__name__})")
            continue
        if name in seen:
            raise TensorMismatchError(f"two tensors have the name {escaped(name)}")
        seen.add(name)
        yield item_of(name, leaf, keep)
    if others:
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        raise TensorMismatchError(
            f"this format holds tensors only; found {', '.join(others[:5])}{more}; drop them or save as .pt"
        )


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
        nested = _children(child)
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
    return None


def item_of(name: str, tensor: Any, keep: list[object]) -> Item:
    """Describe one tensor; its bytes stay where they are if they are in C order, else they are copied when written."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _torch_item(name, tensor, keep)
    import numpy as np

    array = tensor if isinstance(tensor, np.ndarray) else as_numpy(tensor)
    return _numpy_item(name, array, keep)


def as_numpy(obj: Any) -> np.ndarray[Any, Any]:
    """Return the array of an object of some other array library; copies: no, if that library can avoid it."""
    import numpy as np

    return np.asarray(obj) if hasattr(obj, "__array__") else np.from_dlpack(obj)


def _numpy_item(name: str, array: np.ndarray[Any, Any], keep: list[object]) -> Item:
    from tensorio import _arrays

    code, contiguous, shape, nbytes, memory = _arrays.describe(array)
    if code < 0:
        if array.dtype.isnative is False:
            native = array.astype(array.dtype.newbyteorder("="))
            return _numpy_item(name, native, keep)
        raise UnsupportedError(f"NumPy dtype {array.dtype} is not a tensor's", record=name)
    keep.append(array)
    source = memory if contiguous else (lambda: c_order(array))
    return Item(name, DTYPES[code].name, shape, nbytes, source)


def c_order(array: np.ndarray[Any, Any], finish: Callable[[Any], Any] | None = None) -> Iterator[memoryview]:
    """Yield the elements of a strided array in C order, a piece at a time.

    Parameters
    ----------
    array : ndarray
    finish : callable, optional
        Applied to each piece, e.g. ``np.conj``.
    """
    import numpy as np

    if array.nbytes <= PIECE or array.ndim == 0:
        piece = np.ascontiguousarray(array if finish is None else finish(array))
        yield memoryview(piece.reshape(-1).view(np.uint8)) if piece.size else memoryview(b"")
        return
    step = PIECE * len(array) // array.nbytes
    for start in range(0, len(array), max(step, 1)):
        yield from c_order(array[start] if step == 0 else array[start : start + step], finish)


def _torch_item(name: str, tensor: Any, keep: list[object]) -> Item:
    from tensorio import _arrays

    if str(tensor.layout) != "torch.strided" or tensor.is_quantized or tensor.is_nested:
        raise UnsupportedError(f"a torch tensor of layout {tensor.layout} is not one array; save as .pt", record=name)
    if tensor.device.type == "meta":
        raise UnsupportedError("a meta tensor has no data to save", record=name)
    dtype = str(tensor.dtype).partition(".")[2]
    if dtype not in BY_NAME:
        raise UnsupportedError(f"torch dtype {dtype} is not known here", record=name)
    plain = tensor.detach()
    if plain.device.type != "cpu":
        plain = plain.cpu()
    # Lazy conjugates and negatives are views of other bytes than their values.
    if plain.is_conj():
        plain = plain.resolve_conj()
    if plain.is_neg():
        plain = plain.resolve_neg()
    if not plain.is_contiguous():
        plain = plain.contiguous()
    keep.append(plain)
    nbytes = plain.nbytes
    return Item(name, dtype, tuple(plain.shape), nbytes, _arrays.memory(plain.data_ptr(), nbytes) if nbytes else b"")
