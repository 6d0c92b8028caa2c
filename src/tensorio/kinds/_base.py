"""Tensors that NumPy has no array for: quantized, nested, without data, of unknown classes.

Each is a small frozen dataclass around plain tensors. These are NumPy arrays;
in the skeleton of an opened checkpoint they are leaves, until it is asked for
the tensor. Making one touches no data and needs no NumPy. What the parts say
of each other is proven by `check` when a file is read, and again before an
array is computed from them.

What each holds is what torch saves of it: see the rebuild functions of
``torch/_utils.py``, release 2.13. Sparse tensors are in `tensorio.kinds.sparse`, one
process's piece of a tensor in `tensorio.kinds.dtensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from tensorio.errors import HeaderError, TensorMismatchError, escaped

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

__all__ = ["JaggedTensor", "MetaTensor", "NestedTensor", "QuantizedTensor", "SubclassTensor", "TensorKind"]

Tensor = Any  # ndarray, or Leaf in the skeleton of an opened checkpoint
Shape = tuple[int, ...]
Describe = Callable[[Tensor], tuple[str, Shape, Shape]]  # dtype name, shape, strides in bytes
K = TypeVar("K", bound="TensorKind")

INDEX_DTYPES = ("int64", "int32")
# Quantized type -> type of the array it is in, and bits of an element.
QUANTIZED = {
    "qint8": ("int8", 8), "quint8": ("uint8", 8), "qint32": ("int32", 32), "quint4x2": ("uint8", 4),
    "quint2x4": ("uint8", 2),
}  # fmt: skip


def described(tensor: Tensor) -> tuple[str, Shape, Shape]:
    """Describe an array: dtype name, shape, strides in bytes."""
    from tensorio.dtypes import of_numpy

    if not hasattr(tensor, "strides"):
        raise TensorMismatchError(f"expected an array as a part of a tensor, found {type(tensor).__name__}")
    row = of_numpy(tensor.dtype)
    return "" if row is None else row.name, tensor.shape, tensor.strides


@dataclass(frozen=True, eq=False, slots=True, repr=False, kw_only=True)
class TensorKind:
    """Base of the tensors that NumPy has no array for.

    Frozen; compared by identity, as arrays have no single answer to ``==``.

    Attributes
    ----------
    requires_grad : bool
        Whether torch was to compute gradients for it, where the file says so.
    parameter : bool
        Whether it was a ``torch.nn.Parameter``.
    """

    requires_grad: bool = False
    parameter: bool = False

    PARTS: ClassVar[tuple[str, ...]] = ()

    def parts(self) -> dict[str, object]:
        """Return the tensors it is made of by name, in a fixed order.

        Returns
        -------
        dict of str to object
            Arrays or leaves, other kinds, or containers of these; the names are
            those of attributes.
        """
        found = ((name, getattr(self, name)) for name in self.PARTS)
        return {name: part for name, part in found if not _is_plain(part)}

    def replaced(self: K, parts: Mapping[str, object]) -> K:
        """Return a copy with other parts, which are not looked at.

        Parameters
        ----------
        parts : mapping of str to object
            Some of `parts`, by name.
        """
        return replace(self, **parts)  # type: ignore[arg-type]  # the caller's parts are of the fields' types

    def as_parameter(self: K, requires_grad: bool) -> K:
        """Return a copy that is a ``torch.nn.Parameter``, over the same parts.

        Parameters
        ----------
        requires_grad : bool
        """
        return replace(self, requires_grad=requires_grad, parameter=True)

    def check(self, describe: Describe = described) -> None:
        """Prove that types and shapes of the parts fit each other; their values are not read.

        Parameters
        ----------
        describe : callable
            Answers dtype name, shape and strides (in bytes) of a part.

        Raises
        ------
        HeaderError
        """

    def __repr__(self) -> str:
        return f"<{type(self).__name__}{self._shown()}>"

    def _shown(self) -> str:
        return ""


def _is_plain(part: object) -> bool:
    """Tell whether a part is no tensor: nothing, a number or several."""
    return part is None or all(isinstance(n, int | float) for n in (part if type(part) is tuple else (part,)))


def same(what: str, found: Shape, expected: Shape) -> None:
    """Refuse a shape that is not the expected one."""
    if tuple(found) != tuple(expected):
        raise HeaderError(f"{what}: expected shape {tuple(expected)}, found {tuple(found)}")


def product(shape: Shape) -> int:
    """Return the number of elements of a shape."""
    out = 1
    for n in shape:
        out *= n
    return out


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class QuantizedTensor(TensorKind):
    """A tensor of small integers that stand for real numbers: ``(values - zero_point) * scale``.

    Attributes
    ----------
    values : ndarray
        The integers, int8, uint8 or int32, of any strides. For ``quint4x2`` and
        ``quint2x4``: flat uint8, with 2 or 4 integers in a byte, the first in its
        lowest bits.
    dtype : str
        ``"qint8"``, ``"quint8"``, ``"qint32"``, ``"quint4x2"`` or ``"quint2x4"``.
    shape : tuple of int
        Logical shape.
    scheme : str
        ``"per_tensor_affine"``, or ``"per_channel_affine"``. With zero points of a
        floating type the latter is what torch calls
        ``per_channel_affine_float_qparams``.
    scale : float, or ndarray or tuple of float
        One; or one per index along `axis`.
    zero_point : int, or ndarray or tuple of int
        Like `scale`.
    axis : int or None
        The dimension along which `scale` and `zero_point` run.
    """

    values: Tensor
    dtype: str
    shape: Shape
    scheme: str
    scale: Tensor
    zero_point: Tensor
    axis: int | None = None

    PARTS: ClassVar[tuple[str, ...]] = ("values", "scale", "zero_point")

    def dequantize(self) -> Array:
        """Return the real numbers as float32, bit for bit those of torch.

        Returns
        -------
        ndarray
            Newly allocated, 4 bytes an element; as much again while it works.

        Raises
        ------
        HeaderError
            Parts that do not fit each other.
        """
        from tensorio.kinds import _dense

        self.check()
        return _dense.dequantized(self)

    def check(self, describe: Describe = described) -> None:
        """See `TensorKind.check`."""
        kind, bits = QUANTIZED.get(self.dtype, ("", 0))
        dtype, shape, _ = describe(self.values)
        if dtype != kind:
            raise HeaderError(f"quantized tensor of {escaped(self.dtype)}: found values of {dtype}")
        if bits < 8:
            need = -(-product(self.shape) * bits // 8)
            if len(shape) != 1 or shape[0] < need:
                raise HeaderError(f"quantized tensor: expected {need} bytes of {self.dtype}, found shape {shape}")
        else:
            same("values of a quantized tensor", shape, self.shape)
        if self.axis is None:
            if not isinstance(self.scale, float) or type(self.zero_point) is not int:
                raise HeaderError("quantized tensor: expected a float and an int as scale and zero point")
            return
        if type(self.axis) is not int or not 0 <= self.axis < len(self.shape):
            raise HeaderError(f"quantized tensor: axis {self.axis} of {len(self.shape)} dimensions")
        for name, part, kinds in (
            ("scale", self.scale, ("float64", "float32")),
            ("zero_point", self.zero_point, ("int64", "int32", "float64", "float32")),
        ):
            dtype, shape = (kinds[0], (len(part),)) if type(part) is tuple else describe(part)[:2]
            same(f"{name} of a quantized tensor", shape, (self.shape[self.axis],))
            if dtype not in kinds:
                raise HeaderError(f"{name} of a quantized tensor: expected {kinds[0]}, found {dtype}")

    def _shown(self) -> str:
        return f" {self.dtype} {self.shape}"


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class NestedTensor(TensorKind):
    """A list of tensors of unlike sizes in one buffer: torch's nested tensor of strided layout.

    Attributes
    ----------
    buffer : ndarray
        All elements, flat.
    sizes, strides : ndarray of int64
        (tensors, dimensions), in elements; those of a list of none are scalars.
    offsets : ndarray of int64, or tuple of int
        Where in the buffer each tensor starts, in elements.
    """

    buffer: Tensor
    sizes: Tensor
    strides: Tensor
    offsets: Tensor

    PARTS: ClassVar[tuple[str, ...]] = ("buffer", "sizes", "strides", "offsets")

    def unbind(self) -> list[Array]:
        """Return the tensors.

        Returns
        -------
        list of ndarray
            Views of `buffer`.

        Raises
        ------
        HeaderError
            A tensor that leaves the buffer, parts that do not fit each other.
        """
        from tensorio.kinds import _dense

        self.check()
        return _dense.unbound(self)

    def check(self, describe: Describe = described) -> None:
        """See `TensorKind.check`."""
        _, room, steps = describe(self.buffer)
        if len(room) != 1 or (room[0] > 1 and not steps[0]):
            raise HeaderError("nested tensor: expected a flat buffer, each element with bytes of its own")
        count = len(self.offsets) if type(self.offsets) is tuple else _count(describe, self.offsets, "offsets")
        _, sizes, steps = describe(self.sizes)
        same("strides of a nested tensor", describe(self.strides)[1], sizes)
        if count == 0 and len(sizes) < 2:
            return  # how torch has an empty list
        if len(sizes) != 2 or sizes[0] != count:
            raise HeaderError(f"nested tensor: expected sizes of {count} tensors, found shape {sizes}")
        for part in (self.sizes, self.strides):
            dtype, _, steps = describe(part)
            if dtype != "int64" or (count > 1 and sizes[1] and not steps[0]):
                raise HeaderError("nested tensor: expected sizes and strides as int64, each with bytes of its own")

    def _shown(self) -> str:
        return ""


def _count(describe: Describe, tensor: Tensor, what: str) -> int:
    """Return the length of a flat tensor of indices."""
    dtype, shape, strides = describe(tensor)
    if dtype not in INDEX_DTYPES or len(shape) != 1 or (shape[0] > 1 and not strides[0]):
        raise HeaderError(f"nested tensor: expected {what} as flat int64, found {dtype} of shape {shape}")
    return shape[0]


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class JaggedTensor(TensorKind):
    """A list of tensors that differ in one size, end to end in one: torch's nested tensor of jagged layout.

    Attributes
    ----------
    values : ndarray
        The tensors, one after the other along dimension ``ragged_idx - 1``.
    offsets : ndarray of int64
        (tensors + 1,), where each starts and the last one ends.
    lengths : ndarray of int64 or None
        How long each is; None: up to the next.
    ragged_idx : int
        The dimension of unlike sizes, counted with the list itself as dimension 0.
    """

    values: Tensor
    offsets: Tensor
    lengths: Tensor | None = None
    ragged_idx: int = 1

    PARTS: ClassVar[tuple[str, ...]] = ("values", "offsets", "lengths")

    def unbind(self) -> list[Array]:
        """Return the tensors.

        Returns
        -------
        list of ndarray
            Views of `values`.

        Raises
        ------
        HeaderError
            Offsets outside the values, parts that do not fit each other.
        """
        from tensorio.kinds import _dense

        self.check()
        return _dense.split(self)

    def check(self, describe: Describe = described) -> None:
        """See `TensorKind.check`."""
        rank = len(describe(self.values)[1])
        if type(self.ragged_idx) is not int or not 1 <= self.ragged_idx <= rank:
            raise HeaderError(f"jagged tensor: ragged dimension {self.ragged_idx} of {rank + 1}")
        count = _count(describe, self.offsets, "offsets")
        if count < 1 or (self.lengths is not None and _count(describe, self.lengths, "lengths") != count - 1):
            raise HeaderError(f"jagged tensor: {count} offsets do not fit the lengths")


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class MetaTensor(TensorKind):
    """A tensor without data: torch's meta device.

    Attributes
    ----------
    dtype : str
        torch's name of the element type, e.g. ``"bfloat16"``.
    shape : tuple of int
    strides : tuple of int
        In elements.
    """

    dtype: str
    shape: Shape
    strides: Shape

    def _shown(self) -> str:
        return f" {self.dtype} {self.shape}"


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class SubclassTensor(TensorKind):
    """A tensor of a class that is not torch's own: nothing of the class was run.

    Attributes
    ----------
    tensor : ndarray or TensorKind
        What it would be made from; a `MetaTensor` for classes that wrap other
        tensors, which are then in `state`.
    module, name : str
        What the file calls its class.
    state : object
        Its attributes, as a dict or whatever else the class saved; None if none.
    """

    tensor: Tensor
    module: str
    name: str
    state: object = None

    PARTS: ClassVar[tuple[str, ...]] = ("tensor", "state")

    def _shown(self) -> str:
        return f" {escaped(f'{self.module}.{self.name}')}"
