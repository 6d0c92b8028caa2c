"""What the JSON configurations of a ``.pt2`` say of tensors: names, types, and where their elements are.

Source: ``PayloadConfig``, ``PayloadMeta`` and ``TensorMeta`` of ``torch/_export/serde/schema.py``, torch 2.13; numbers
of dtypes and layouts from its ``ScalarType`` and ``Layout``.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

from tensorio.dtypes import DType
from tensorio.errors import HeaderError, LimitError, UnsupportedError, error_context, escaped
from tensorio.formats._strict_json import parse
from tensorio.tensors import PARAMETER, REQUIRES_GRAD

__all__ = ["Payload", "Rows", "View", "payloads", "views"]

DTYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64",
    9: "complex32", 10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16", 28: "uint16", 29: "float8_e4m3fn",
    30: "float8_e5m2", 31: "float8_e4m3fnuz", 32: "float8_e5m2fnuz", 33: "float8_e8m0fnu", 34: "uint32", 35: "uint64",
}  # fmt: skip
STRIDED = 7
LAYOUTS = {1: "sparse COO", 2: "sparse CSR", 3: "sparse CSC", 4: "sparse BSR", 5: "sparse BSC", 6: "mkldnn"}
MAX_RANK = 64  # NumPy's


class View(NamedTuple):
    """Where a tensor's elements are in its storage.

    Attributes
    ----------
    sizes, strides : tuple of int
        In elements.
    offset : int
        In elements.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Payload(NamedTuple):
    """What is known of one name.

    Attributes
    ----------
    record : str
        Name of its record in the configuration's folder.
    pickled : bool
        Whether the record is a file of its own.
    dtype : str
    flags : int
        Bits of `tensorio.tensors`.
    view : View or None
        None if it is pickled.
    """

    record: str
    pickled: bool
    dtype: str = ""
    flags: int = 0
    view: View | None = None


def payloads(data: bytes | memoryview) -> Iterator[tuple[str, Payload]]:
    """Yield the names of a ``*_config.json`` in order, and what it says of each; every field is checked."""
    for fqn, entry in _field(parse(data), "config", dict).items():
        with error_context(record=fqn):
            record = _field(entry, "path_name", str)
            if "/" in record or "\\" in record:
                raise HeaderError(f"path_name: expected the name of a record, found {escaped(record)}")
            if _field(entry, "use_pickle", bool):
                yield fqn, Payload(record, True)
            else:
                yield fqn, _raw(record, entry)


def _raw(record: str, entry: dict[str, Any]) -> Payload:
    meta = _field(entry, "tensor_meta", dict)
    layout = _field(meta, "layout", int)
    if layout != STRIDED:
        raise UnsupportedError(
            f"expected layout {STRIDED} (strided), found {layout} ({LAYOUTS.get(layout, 'unknown')})"
        )
    code = _field(meta, "dtype", int)
    if code not in DTYPES:
        raise UnsupportedError(f"expected a known dtype, found number {code}")
    flags = PARAMETER * _field(entry, "is_param", bool) + REQUIRES_GRAD * _field(meta, "requires_grad", bool)
    sizes, strides = (tuple(_int(n, f"an element of {key}") for n in _field(meta, key, list))
                      for key in ("sizes", "strides"))  # fmt: skip
    view = _view(sizes, strides, _int(_field(meta, "storage_offset", dict), "storage_offset"))
    return Payload(record, False, DTYPES[code], flags, view)


def _view(sizes: tuple[int, ...], strides: tuple[int, ...], offset: int) -> View:
    if len(sizes) != len(strides):
        raise HeaderError(f"sizes has {len(sizes)} dimensions and strides {len(strides)}")
    if len(sizes) > MAX_RANK:
        raise LimitError(f"tensor of {len(sizes)} dimensions; at most {MAX_RANK} are read")
    return View(sizes, strides, offset)


def views(data: bytes | memoryview) -> Iterator[tuple[str, str, View]]:
    """Yield name, record and view of each weight of a compiled program's ``weights_config.json``."""
    for fqn, entry in _typed(parse(data), "weights_config", dict).items():
        with error_context(record=fqn):
            if type(entry) is not list or len(entry) != 4:
                raise HeaderError("expected [record, shape, stride, offset]")
            record, offset = _typed(entry[0], "record", str), _natural(entry[3], "offset")
            sizes, strides = (tuple(_natural(n, key) for n in _typed(part, key, list))
                              for key, part in (("shape", entry[1]), ("stride", entry[2])))  # fmt: skip
            yield fqn, record, _view(sizes, strides, offset)


def _field(entry: Any, key: str, kind: type) -> Any:
    if type(entry) is not dict or key not in entry:
        raise HeaderError(f"expected an object with a key {key!r}, found none")
    return _typed(entry[key], key, kind)


def _typed(value: Any, key: str, kind: type) -> Any:
    if type(value) is not kind:
        raise HeaderError(f"{key}: expected {kind.__name__}, found {type(value).__name__}")
    return value


def _int(entry: Any, key: str) -> int:
    """An integer as the schema spells it: ``{"as_int": n}``."""
    if type(entry) is dict and "as_expr" in entry:
        raise UnsupportedError(f"{key} is an expression, whose value only a run of the program has")
    return _natural(_field(entry, "as_int", int), key)


def _natural(value: Any, key: str) -> int:
    if not 0 <= _typed(value, key, int) < 1 << 63:
        raise HeaderError(f"{key}: expected 0 to 2^63 - 1, found {escaped(value)}")
    return int(value)


class Rows:
    """Rows of a table, each proven inside its storage.

    Attributes
    ----------
    rows, dims : array of int64
        See ``csrc/table.h``.
    """

    def __init__(self) -> None:
        self.rows = array("q")
        self.dims = array("q")

    def add(self, dtype: DType, flags: int, view: View, storage: int, start: int, room: int) -> None:
        """Append a tensor.

        Parameters
        ----------
        storage, start, room : int
            Index of a storage, and the bytes of it that the view is of.

        Raises
        ------
        HeaderError
            The tensor leaves them.
        """
        strides = [stride * dtype.itemsize for stride in view.strides]
        offset = nbytes = 0
        if 0 not in view.sizes:
            offset = view.offset * dtype.itemsize
            nbytes = dtype.itemsize + sum((n - 1) * step for n, step in zip(view.sizes, strides, strict=True))
            if offset + nbytes > room:
                raise HeaderError(
                    f"the tensor leaves its storage: expected at most {room} bytes, found a view of {escaped(nbytes)} "
                    f"bytes at {escaped(offset)}"
                )
        self.rows.extend((dtype.code, flags, len(strides), len(self.dims), storage, start + offset, nbytes, 1, 0))
        self.dims.extend(view.sizes)
        self.dims.extend(step if step >> 63 == 0 else 0 for step in strides)  # those are never stepped along
