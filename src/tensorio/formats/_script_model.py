"""TorchScript of torch 1.0 to 1.2: what ``model.json`` says of parameters and buffers.

It is the JSON form of ``ModelDef`` in ``caffe2/proto/torch.proto`` of that
time, in which integers are strings and fields of value zero may be missing::

    {"protoVersion": "1", "tensors": [TENSOR...], "mainModule": MODULE}
    MODULE  {"parameters": [{"name", "tensorId", "isBuffer"}...], "attributes": [{"name", "type", "id"}...],
             "submodules": [MODULE with "name"...]}
    TENSOR  {"dims", "strides", "offset", "dataType", "requiresGrad", "data": {"key": "tensors/0"}}

Since 1.1, buffers are attributes; the pickle ``attributes.pkl`` is a tuple of
their values, in which a tensor is its number. Checked against files of torch
1.0 to 1.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensorio.errors import HeaderError, LimitError, UnsupportedError, error_context, escaped
from tensorio.formats._pt2_config import Payload, View
from tensorio.formats._strict_json import FIXED, PER_BYTE, parse
from tensorio.tensors import PARAMETER, REQUIRES_GRAD
from tensorio.values import Opaque

__all__ = ["payloads"]

FROM_ID = ("torch.jit._pickle", "build_tensor_from_id")
# Source: ``at::ScalarType`` to ``TensorProto::DataType`` in ``torch/csrc/jit/export.cpp`` of 1.2.
DTYPES = {
    "FLOAT": "float32", "DOUBLE": "float64", "FLOAT16": "float16", "INT64": "int64", "INT32": "int32",
    "INT16": "int16", "INT8": "int8", "UINT8": "uint8", "BYTE": "uint8", "BOOL": "bool",
}  # fmt: skip
MAX_RANK = 64  # NumPy's
STEP = 64  # what each name costs beside its text, in bytes


def payloads(data: bytes | memoryview, attributes: object = ()) -> Iterator[tuple[str, Payload]]:
    """Yield the names of a model's tensors, and what the file says of each.

    Parameters
    ----------
    data : buffer
        ``model.json``.
    attributes : object
        What ``attributes.pkl`` holds, with an `Opaque` of the name `FROM_ID` for each tensor.

    Raises
    ------
    HeaderError, LimitError, UnsupportedError
        Every field that is used is checked.
    """
    model = parse(data)
    tensors = _get(model, "tensors", list, [])
    room = FIXED + PER_BYTE * len(data)  # for names, which are longer than what they are made of
    for name, number, parameter in _numbers(_get(model, "mainModule", dict), attributes):
        room -= len(name) + STEP
        if room < 0:
            raise LimitError("model.json: the names of its tensors are much longer than the file")
        if number is None:
            continue
        with error_context(record=name):
            if number >= len(tensors):
                raise HeaderError(f"tensorId: expected less than {len(tensors)}, found {escaped(number)}")
            yield name, _payload(tensors[number], parameter)


def _numbers(main: dict[str, Any], attributes: object) -> Iterator[tuple[str, int | None, bool]]:
    """Yield the name of every tensor, its number, and whether it is a parameter; of all else passed, just the name."""
    stack = [("", main)]
    while stack:
        prefix, module = stack.pop()
        for entry in _get(module, "parameters", list, []):
            name = prefix + _get(entry, "name", str)
            with error_context(record=name):
                number = _natural(_get(entry, "tensorId", str, "0"), "tensorId")
                yield name, number, not _get(entry, "isBuffer", bool, False)
        for entry in _get(module, "attributes", list, []):
            name = prefix + _get(entry, "name", str)
            with error_context(record=name):
                number = _natural(_get(entry, "id", str, "0"), "id")
                if type(attributes) is not tuple or number >= len(attributes):
                    raise HeaderError(f"id: expected the number of an attribute, found {number}")
                yield from ((n, i, False) for n, i in _within(name, attributes[number]))
        below = [(f"{prefix}{_get(m, 'name', str)}.", m) for m in _get(module, "submodules", list, [])]
        for name, _ in below:
            yield name, None, False
        stack.extend(reversed(below))


def _within(name: str, value: object) -> Iterator[tuple[str, int | None]]:
    """Yield the tensors of an attribute: itself, or what is in its lists and dicts."""
    stack = [(name, value)]
    while stack:
        name, value = stack.pop()
        number: int | None = None
        if type(value) is Opaque and (value.module, value.name) == FROM_ID:
            first = value.args[0] if value.args else None
            if type(first) is not int or first < 0:
                raise HeaderError(f"{'.'.join(FROM_ID)}: expected the number of a tensor")
            number = first
        elif isinstance(value, dict):
            stack.extend((f"{name}.{key}", v) for key, v in reversed(value.items()) if isinstance(key, str | int))
        elif isinstance(value, list | tuple):
            stack.extend((f"{name}.{i}", v) for i, v in reversed([*enumerate(value)]))
        yield name, number


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
