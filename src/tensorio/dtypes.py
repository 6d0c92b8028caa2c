"""The element types tensorio knows: one table of facts, no NumPy needed to read it.

A `DType` row names a type as NumPy or ml_dtypes do, and says how many bits an
element has, in units of how many bytes it is swapped, and which NumPy type
shows it. Each format keeps its own table from its codes to these names.

Rows are addressed by `code` in packed tables; codes are private to the running
process and may change between versions.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

__all__ = ["BY_NAME", "DTYPES", "DType", "c_strides", "numpy_dtype", "numpy_dtypes", "of_numpy"]


class DType(NamedTuple):
    """One element type.

    Attributes
    ----------
    code : int
        Row number in `DTYPES`.
    name : str
        Canonical name, e.g. ``"bfloat16"``.
    bits : int
        Bits per element; less than 8 only for packed types.
    swap : int
        Size in bytes of the units whose bytes are reversed for the foreign
        byte order (half an element for complex types, 1 for none).
    numpy : str
        The NumPy type of an array of it: a NumPy name, ``"ml_dtypes:NAME"``, or
        ``"complex32"`` (a pair of float16 fields, since NumPy has no such type).
    """

    code: int
    name: str
    bits: int
    swap: int
    numpy: str

    @property
    def itemsize(self) -> int:
        """Bytes per array element (1 for packed types)."""
        return max(1, self.bits // 8)

    @property
    def packed(self) -> bool:
        """Whether several elements share a byte."""
        return self.bits % 8 != 0


def _plain(names: str) -> list[tuple[str, int, int, str]]:
    """Rows for NumPy's own numbers, the width being the digits of the name."""
    widths = ((name, int(name.lstrip("abcdefghijklmnopqrstuvwxyz"))) for name in names.split())
    return [(name, bits, bits // 8, name) for name, bits in widths]


# Packed and NumPy-less types are shown as raw bytes (the last column).
_ROWS: list[tuple[str, int, int, str]] = [
    ("bool", 8, 1, "bool"),
    *_plain("uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64"),
    ("complex64", 64, 4, "complex64"),
    ("complex128", 128, 8, "complex128"),
    ("complex32", 32, 2, "complex32"),
    ("bfloat16", 16, 2, "ml_dtypes:bfloat16"),
    ("float8_e4m3fn", 8, 1, "ml_dtypes:float8_e4m3fn"),
    ("float8_e5m2", 8, 1, "ml_dtypes:float8_e5m2"),
    ("float8_e4m3fnuz", 8, 1, "ml_dtypes:float8_e4m3fnuz"),
    ("float8_e5m2fnuz", 8, 1, "ml_dtypes:float8_e5m2fnuz"),
    ("float8_e8m0fnu", 8, 1, "ml_dtypes:float8_e8m0fnu"),
    # safetensors, sub-byte: the shape counts elements, the bytes hold several.
    ("float4_e2m1fn", 4, 1, "uint8"),
    ("float6_e2m3fn", 6, 1, "uint8"),
    ("float6_e3m2fn", 6, 1, "uint8"),
    # torch: the shape counts bytes, each of which holds what the name says.
    ("float4_e2m1fn_x2", 8, 1, "uint8"),
    ("bits8", 8, 1, "uint8"),
    ("bits1x8", 8, 1, "uint8"),
    ("bits2x4", 8, 1, "uint8"),
    ("bits4x2", 8, 1, "uint8"),
    ("bits16", 16, 2, "uint16"),
]

DTYPES: tuple[DType, ...] = tuple(DType(code, *row) for code, row in enumerate(_ROWS))
BY_NAME: dict[str, DType] = {d.name: d for d in DTYPES}


@cache
def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """Return the NumPy dtype of arrays of the type called `name` (imports NumPy)."""
    import numpy as np

    spec = BY_NAME[name].numpy
    if spec == "complex32":
        return np.dtype([("real", "f2"), ("imag", "f2")])
    if spec.startswith("ml_dtypes:"):
        import ml_dtypes

        shown: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, spec.partition(":")[2]))
        return shown
    return np.dtype(spec)


@lru_cache(maxsize=1)
def numpy_dtypes() -> tuple[np.dtype[np.generic], ...]:
    """Return the NumPy dtypes of all rows, indexed by code (imports NumPy and ml_dtypes)."""
    return tuple(numpy_dtype(d.name) for d in DTYPES)


@cache
def of_numpy(dtype: np.dtype[np.generic]) -> DType | None:
    """Return the row that shows as `dtype` in native byte order, or None if there is none."""
    if dtype.isnative is False:
        return of_numpy(dtype.newbyteorder("="))
    if dtype == numpy_dtype("complex32"):
        return BY_NAME["complex32"]
    row = BY_NAME.get(dtype.name)
    return row if row is not None and numpy_dtype(row.name) == dtype else None


def c_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides in bytes of a C-contiguous array of `shape`."""
    strides, step = [], itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))
