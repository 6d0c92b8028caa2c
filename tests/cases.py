"""Checkpoints with known contents, for tests and benches.

A case is a function marked by `case`; it returns the file's bytes and the tensors that
must come out of it. `cases_of` lists them by format.
"""

from __future__ import annotations

import gc
import io
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hexfile
import oldfiles

Array = np.ndarray[Any, Any]

REPO = Path(__file__).resolve().parents[1]


def shared_folder() -> Path | None:
    """The folder of files by other tools: ``TENSORIO_SHARED``, or ``shared`` beside the repository."""
    folder = Path(os.environ.get("TENSORIO_SHARED") or REPO.parent / "shared")
    return folder if (folder / "corpus" / "manifest.json").is_file() else None


def corpus_entries() -> list[dict[str, Any]]:
    """The corpus manifest's entries; none if there is no corpus."""
    shared = shared_folder()
    if shared is None:
        return []
    entries: list[dict[str, Any]] = json.loads((shared / "corpus" / "manifest.json").read_text())
    return entries


@dataclass(frozen=True)
class Case:
    """A file and what is in it.

    Attributes
    ----------
    format : str
    suffix : str
    data : bytes
        The whole file.
    tensors : mapping of str to ndarray
        By full dotted name, in the order of the file.
    """

    format: str
    suffix: str
    data: bytes
    tensors: Mapping[str, Array]


CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    """Register a case under its function's name, which begins with its format's."""
    CASES[make.__name__] = make
    return make


def cases_of(format: str) -> list[str]:
    """Names of the cases of one format; none is made yet."""
    return [name for name in CASES if name.startswith(f"{format}_")]


# ------------------------------------------------------------------- tensors

# Every element type with an array type of its own, and a few values of it.
DTYPES: dict[str, Any] = {
    "bool": np.bool_, "uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32, "uint64": np.uint64,
    "int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64, "float16": np.float16,
    "float32": np.float32, "float64": np.float64, "complex64": np.complex64, "complex128": np.complex128,
    "bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz, "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip

# safetensors code -> name and bits; the codes without an array type are raw bytes.
ST_CODES = {
    "BOOL": ("bool", 8), "U8": ("uint8", 8), "I8": ("int8", 8), "U16": ("uint16", 16), "I16": ("int16", 16),
    "U32": ("uint32", 32), "I32": ("int32", 32), "U64": ("uint64", 64), "I64": ("int64", 64),
    "F16": ("float16", 16), "BF16": ("bfloat16", 16), "F32": ("float32", 32), "F64": ("float64", 64),
    "C64": ("complex64", 64), "F8_E4M3": ("float8_e4m3fn", 8), "F8_E5M2": ("float8_e5m2", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8), "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8), "F8_E8M0": ("float8_e8m0fnu", 8),
    "F4": ("float4_e2m1fn", 4), "F6_E2M3": ("float6_e2m3fn", 6), "F6_E3M2": ("float6_e3m2fn", 6),
}  # fmt: skip

# torch storage class -> name.
TORCH_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}  # fmt: skip


def array(dtype: str, shape: tuple[int, ...] = (2, 3), seed: int = 0) -> Array:
    """A small array of any element type, with bytes that differ from element to element."""
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape, dtype=np.int64))
    kind = np.dtype(DTYPES[dtype])
    if dtype == "bool":
        return rng.integers(0, 2, count).astype(np.bool_).reshape(shape)
    if kind.kind in "iu":
        return np.frombuffer(rng.bytes(count * kind.itemsize), kind).reshape(shape)
    if kind.kind == "c":
        return (rng.standard_normal(count) + 1j * rng.standard_normal(count)).astype(kind).reshape(shape)
    return rng.standard_normal(count).astype(np.float32).astype(kind).reshape(shape)


def state_dict(count: int, shape: tuple[int, ...] = (4, 8), dtype: str = "float32") -> dict[str, Array]:
    """Names and arrays of a model of `count` tensors."""
    return {f"layers.{i}.weight": array(dtype, shape, i) for i in range(count)}


# --------------------------------------------------------------------- files


def safetensors_bytes(tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file of some arrays in the given order."""
    codes = {name: code for code, (name, _) in ST_CODES.items()}
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    payload = bytearray()
    for name, a in tensors.items():
        begin = len(payload)
        payload += a.tobytes()
        header[name] = hexfile.st_entry(codes[a.dtype.name], a.shape, begin, len(payload))
    return hexfile.st_file(header, bytes(payload))


def torch_bytes(obj: Any) -> bytes:
    """What ``torch.save`` makes of an object whose arrays become tensors."""
    torch = pytest.importorskip("torch", reason="the file is made by torch.save")

    buffer = io.BytesIO()
    torch.save(as_torch(obj), buffer)
    return buffer.getvalue()


def as_torch(obj: Any) -> Any:
    """The same tree with torch tensors at the arrays."""
    torch = pytest.importorskip("torch", reason="the tree is of torch tensors")

    if isinstance(obj, np.ndarray):
        name = obj.dtype.name
        if name in ("bfloat16",) or name.startswith("float8"):
            return torch.from_numpy(obj.view(f"u{obj.itemsize}").copy()).view(getattr(torch, name))
        return torch.from_numpy(obj.copy())
    if isinstance(obj, dict):
        return type(obj)((k, as_torch(v)) for k, v in obj.items())
    if isinstance(obj, list | tuple):
        return type(obj)(as_torch(v) for v in obj)
    return obj


def plain_torch_bytes(tensors: Mapping[str, Array], **options: Any) -> bytes:
    """A torch file of a flat dict, assembled by hand: no torch needed."""
    classes = {name: cls for cls, name in TORCH_STORAGES.items()}
    items = {
        name: hexfile.tensor(str(i), a.size, a.shape, cls=classes[a.dtype.name])
        for i, (name, a) in enumerate(tensors.items())
    }
    raw = {str(i): a.tobytes() for i, a in enumerate(tensors.values())}
    return hexfile.torch_file(hexfile.pickled(hexfile.mapping(items)), raw, **options)


# --------------------------------------------------------------------- cases


@case
def safetensors_small() -> Case:
    """Several types, a scalar, an empty tensor, metadata."""
    tensors = {
        "b": array("float64", (2, 2)), "a.weight": array("float32", (3, 5)), "a.bias": array("bfloat16", (5,)),
        "scalar": array("int64", ()), "none": array("float32", (0, 4)), "mask": array("bool", (3,)),
    }  # fmt: skip
    return Case("safetensors", ".safetensors", safetensors_bytes(tensors, {"made": "here"}), tensors)


@case
def safetensors_unaligned() -> Case:
    """A header whose length is odd: no tensor is at a multiple of its size."""
    a, b = array("float64", (3,)), array("int16", (2, 2))
    header = {"x": hexfile.st_entry("F64", (3,), 0, 24), "y": hexfile.st_entry("I16", (2, 2), 24, 32)}
    raw = json.dumps(header).encode()
    raw += b" " * (1 - len(raw) % 2)
    return Case("safetensors", ".safetensors", hexfile.st_file(raw, a.tobytes() + b.tobytes(), pad=1), {"x": a, "y": b})


@case
def safetensors_empty() -> Case:
    """No tensor at all."""
    return Case("safetensors", ".safetensors", hexfile.st_file({}), {})


@case
def torch_zip_small() -> Case:
    """A nested object with tied tensors, written by torch itself."""
    w = array("float32", (3, 4))
    model, steps = {"w": w, "b": array("bfloat16", (4,))}, [array("int64", ()), array("float64", (2,))]
    obj: dict[str, Any] = {"model": model, "steps": steps, "lr": 0.5, "name": "x"}
    tensors = {"model.w": w, "model.b": obj["model"]["b"], "steps.0": obj["steps"][0], "steps.1": obj["steps"][1]}
    return Case("torch_zip", ".pt", torch_bytes(obj), tensors)


@case
def torch_zip_by_hand() -> Case:
    """A flat dict without memo opcodes and without the records of today."""
    tensors = {"a": array("float32", (2, 3)), "b": array("int64", (5,)), "c": array("uint8", (1,))}
    return Case("torch_zip", ".pt", plain_torch_bytes(tensors, modern=False, byteorder=None), tensors)


@case
def torch_zip_deflated() -> Case:
    """Repacked by a zip tool: compressed, unaligned."""
    import zipfile

    tensors = {"a": array("float32", (40, 30)), "b": array("int64", (7,))}
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(plain_torch_bytes(tensors))) as source, zipfile.ZipFile(out, "w") as target:
        for info in source.infolist():
            packed = zipfile.ZIP_DEFLATED if "/data/" in info.filename else zipfile.ZIP_STORED
            target.writestr(info.filename, source.read(info), packed)
    return Case("torch_zip", ".pt", out.getvalue(), tensors)


@case
def torch_zip_big_endian() -> Case:
    """Storages in the other byte order."""
    tensors = {"a": array("float32", (2, 3)), "b": array("int16", (5,)), "c": array("uint8", (3,))}
    foreign = {k: np.frombuffer(a.byteswap().tobytes(), a.dtype).reshape(a.shape) for k, a in tensors.items()}
    return Case("torch_zip", ".pt", plain_torch_bytes(foreign, byteorder="big"), tensors)


# ------------------------------------------------------------------- mutation


def truncations(data: bytes) -> Iterator[bytes]:
    """Every shorter prefix."""
    for n in range(len(data)):
        yield data[:n]


def frame(length: int) -> bytes:
    """The length field of a safetensors file."""
    return struct.pack("<Q", length)


def open_descriptors() -> int:
    """Descriptors this process has open, once garbage of earlier tests is gone."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


# ------------------------------------------------------ torch before zip, pickles


@case
def torch_legacy_small() -> Case:
    """A nested object with a tied tensor, written by torch itself."""
    torch = pytest.importorskip("torch", reason="the file is made by torch.save")
    w = array("float32", (3, 4))
    tensors = {"model.w": w, "model.b": array("float16", (4,)), "steps.0": array("int64", ()), "half.0": w[:, :2]}
    first = as_torch(w)
    obj = {"model": {"w": first, "b": as_torch(tensors["model.b"])}, "steps": [as_torch(tensors["steps.0"]), 5],
           "half": [first[:, :2]], "lr": 0.5}  # fmt: skip
    out = io.BytesIO()
    torch.save(obj, out, _use_new_zipfile_serialization=False)
    return Case("torch_legacy", ".pth", out.getvalue(), tensors)


@case
def torch_legacy_by_hand() -> Case:
    """A flat dict without memo opcodes, keys that are no numbers, storages in another order than they are mentioned."""
    tensors = {"a": array("float32", (2, 3)), "b": array("int64", (5,)), "c": array("uint8", (3,))}
    body = hexfile.mapping(
        {
            "a": oldfiles.old_tensor("x", 6, (2, 3)),
            "b": oldfiles.old_tensor("7", 5, (5,), cls="LongStorage"),
            "c": oldfiles.old_tensor("0", 3, (3,), cls="ByteStorage"),
        }
    )
    raw = {"0": tensors["c"].tobytes(), "7": tensors["b"].tobytes(), "x": tensors["a"].tobytes()}
    data = oldfiles.legacy_file(body, raw, itemsize={"0": 1, "7": 8, "x": 4})
    return Case("torch_legacy", ".pt", data, tensors)


@case
def torch_legacy_views() -> Case:
    """Storages that are parts of one root, as torch 0.1 to 0.3 wrote them."""
    root = array("float32", (16,))
    tensors = {"a": root[:6].reshape(2, 3), "b": root[4:12], "c": root[13:15]}
    body = hexfile.mapping(
        {
            "a": oldfiles.old_tensor("9", 16, (2, 3), part=oldfiles.view("1", 0, 8)),
            "b": oldfiles.old_tensor("9", 16, (8,), part=oldfiles.view("2", 4, 8)),
            "c": oldfiles.old_tensor("9", 16, (2,), offset=1, part=oldfiles.view("3", 12, 4), location="cuda:1"),
        }
    )
    return Case("torch_legacy", ".pth.tar", oldfiles.legacy_file(body, {"9": root.tobytes()}), tensors)


@case
def torch_tar_by_hand() -> Case:
    """Tensors that share a storage, and a storage by itself."""
    w = array("float32", (12,))
    tensors = {"w": w.reshape(3, 4), "part": w[2:8:2], "n": array("int64", (3,))}
    storages = oldfiles.tar_storages([(100, "FloatStorage", 12, w.tobytes()),
                                      (200, "LongStorage", 3, tensors["n"].tobytes())])  # fmt: skip
    table = oldfiles.tar_tensors([(1, 100, "FloatTensor", (3, 4), (4, 1), 0), (2, 100, "FloatTensor", (3,), (2,), 2)])
    body = hexfile.mapping({"w": oldfiles.tar_id(1), "part": oldfiles.tar_id(2), "n": oldfiles.tar_id(200)})
    return Case("torch_tar", ".t7", oldfiles.torch_tar(body, storages, table), tensors)


@case
def torch_tar_views() -> Case:
    """Storages inside others, and members in another order."""
    root = array("float64", (8,))
    storages = oldfiles.tar_storages(
        [(5, "DoubleStorage", 8, root.tobytes())], b"](" + hexfile.numbers([6, 5, 2, 4]) + b"e"
    )
    table = oldfiles.tar_tensors([(1, 6, "DoubleTensor", (2, 2), (1, 2), 0)])
    parts = {
        "storages": storages,
        "tensors": table,
        "pickle": hexfile.pickled(hexfile.mapping({"t": oldfiles.tar_id(1)})),
    }
    data = oldfiles.tar_file(*(oldfiles.tar_member(name, part) for name, part in parts.items()))
    return Case("torch_tar", ".pt", data, {"t": root[2:6].reshape(2, 2).T})


@case
def torch_tar_time_stamps() -> Case:
    """Extended headers in front of the members, as Python's tarfile writes them."""
    a = array("uint8", (5,))
    line = oldfiles.pax_header(oldfiles.pax_line("mtime", "1487716561.25"))
    parts = {
        "sys_info": oldfiles.INFO,
        "pickle": hexfile.pickled(hexfile.mapping({"a": oldfiles.tar_id(1)})),
        "tensors": oldfiles.tar_tensors([(1, 2, "ByteTensor", (5,), (1,), 0)]),
        "storages": oldfiles.tar_storages([(2, "ByteStorage", 5, a.tobytes())]),
    }
    data = oldfiles.tar_file(*(line + oldfiles.tar_member(name, part) for name, part in parts.items()))
    return Case("torch_tar", ".pth", data, {"a": a})


def pickle_bytes(obj: Any, protocol: int) -> bytes:
    """A plain pickle."""
    import pickle

    return pickle.dumps(obj, protocol)


@case
def pickle_small() -> Case:
    """Nested containers of arrays, in C order and in Fortran's, of today's default protocol."""
    tensors = {"a.w": array("float32", (20, 30)), "a.b": array("int64", ()), "c.0": array("float64", (3, 4))}
    obj = {"a": {"w": tensors["a.w"], "b": tensors["a.b"]}, "c": [np.asfortranarray(tensors["c.0"])], "lr": 0.5}
    return Case("pickle", ".dat", pickle_bytes(obj, 4), tensors)


@case
def pickle_protocol_3() -> Case:
    """The first protocol that has bytes."""
    tensors = {"x": array("uint16", (70,)), "y": array("bool", (2, 3)), "z": array("complex64", (1,))}
    return Case("pickle", ".dat", pickle_bytes(tensors, 3), tensors)


@case
def pickle_protocol_5() -> Case:
    """Arrays in one list, and one array at the top level of another file's making: by ``_frombuffer``."""
    tensors = {"0": array("float16", (9, 9)), "1": array("int8", (300,))}
    return Case("pickle", ".dat", pickle_bytes(list(tensors.values()), 5), tensors)
