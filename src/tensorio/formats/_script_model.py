"""TorchScript of torch 1.0 to 1.2: what ``model.json`` says of parameters and buffers.

It is the JSON form of ``ModelDef`` in ``caffe2/proto/torch.proto`` of that
time, in which integers are strings and fields of value zero may be missing::

    {"protoVersion": "1", "tensors": [TENSOR...], "mainModule": MODULE}
    MODULE  {"parameters": [{"name", "tensorId", "isBuffer"}...], "submodules": [MODULE with "name"...]}
    TENSOR  {"dims", "strides", "offset", "dataType", "requiresGrad", "data": {"key": "tensors/0"}}

Checked against files of torch 1.0 to 1.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensorio.errors import HeaderError, LimitError, UnsupportedError, error_context, escaped
from tensorio.formats._pt2_config import Payload, View
from tensorio.formats._strict_json import FIXED, PER_BYTE, parse
from tensorio.tensors import PARAMETER, REQUIRES_GRAD

__all__ = ["payloads"]

VERSIONS = ("1", "2", "3", "4", "5", "6")  # 1.0 writes 1, 1.2 writes 2; none of them changed the fields that are read
# Source: ``at::ScalarType`` to ``TensorProto::DataType`` in ``torch/csrc/jit/export.cpp`` of 1.2.
DTYPES = {
    "FLOAT": "float32", "DOUBLE": "float64", "FLOAT16": "float16", "INT64": "int64", "INT32": "int32",
    "INT16": "int16", "INT8": "int8", "UINT8": "uint8", "BYTE": "uint8", "BOOL": "bool",
}  # fmt: skip
MAX_RANK = 64  # NumPy's


def payloads(data: bytes | memoryview) -> Iterator[tuple[str, Payload]]:
    """Yield the names of a model's parameters and buffers, and what the file says of each.

    Raises
    ------
    HeaderError, LimitError, UnsupportedError
        Every field that is used is checked.
    """
    model = parse(data)
    tensors = _get(model, "tensors", list, [])
    room = FIXED + PER_BYTE * len(data)  # for names, which are longer than what they are made of
    stack = [("", _get(model, "mainModule", dict))]
    while stack:
        prefix, module = stack.pop()
        for entry in _get(module, "parameters", list, []):
            name = prefix + _get(entry, "name", str)
            room -= len(name) + 64
            with error_context(record=name):
                number = _natural(_get(entry, "tensorId", str, "0"), "tensorId")
                if number >= len(tensors):
                    raise HeaderError(f"tensorId: expected less than {len(tensors)}, found {number}")
                yield name, _payload(tensors[number], not _get(entry, "isBuffer", bool, False))
        below = [(f"{prefix}{_get(m, 'name', str)}.", m) for m in _get(module, "submodules", list, [])]
        room -= sum(len(name) + 64 for name, _ in below)
        if room < 0:
            raise LimitError("model.json: the names of its tensors are much longer than the file")
        stack.extend(reversed(below))


def _payload(entry: Any, parameter: bool) -> Payload:
    kind = _get(entry, "dataType", str)
    if kind not in DTYPES:
        raise UnsupportedError(f"expected a known dataType, found {escaped(kind)}")
    sizes, strides = (tuple(_natural(n, key) for n in _get(entry, key, list, [])) for key in ("dims", "strides"))
    if len(sizes) != len(strides):
        raise HeaderError(f"dims has {len(sizes)} entries and strides {len(strides)}")
    if len(sizes) > MAX_RANK:
        raise LimitError(f"tensor of {len(sizes)} dimensions; at most {MAX_RANK} are read")
    flags = PARAMETER * parameter + REQUIRES_GRAD * _get(entry, "requiresGrad", bool, False)
    view = View(sizes, strides, _natural(_get(entry, "offset", str, "0"), "offset"))
    return Payload(_get(_get(entry, "data", dict), "key", str), False, DTYPES[kind], flags, view)


def _get(entry: Any, key: str, kind: type, missing: Any = None) -> Any:
    """A field of an object; `missing` if it is not there, an error if that is None."""
    if type(entry) is not dict:
        raise HeaderError(f"expected an object with a key {key!r}, found {type(entry).__name__}")
    value = entry.get(key, missing)
    if type(value) is not kind:
        raise HeaderError(f"{key}: expected {kind.__name__}, found {type(value).__name__}")
    return value


def _natural(text: Any, key: str) -> int:
    if type(text) is not str or not text.isdecimal() or not text.isascii() or len(text) > 19 or int(text) >> 63:
        raise HeaderError(f"{key}: expected 0 to 2^63 - 1 as a string, found {escaped(str(text))}")
    return int(text)
