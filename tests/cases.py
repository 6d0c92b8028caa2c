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
import warnings
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


# --------------------------------------------------------------- other zip archives

SCRIPT_MODULE = hexfile.name("__torch__.some", "Module") + b")\x81"


def script_object(attributes: Mapping[str, bytes], cls: bytes = SCRIPT_MODULE) -> bytes:
    """A pickled object of a script module's class."""
    return cls + hexfile.mapping(attributes) + b"b"


def script_records(module: bytes, storages: Mapping[str, bytes], constants: bytes = b")",
                   others: Mapping[str, bytes] | None = None) -> list[hexfile.Rec]:  # fmt: skip
    """The records of a TorchScript file, in torch's order; storages by folder and key."""
    parts = {key: raw for key, raw in storages.items() if key.startswith("data/")}
    parts["data.pkl"] = hexfile.pickled(module)
    parts["code/__torch__/some.py"] = b"class Module(Module):\n  pass\n" * 9
    parts.update((key, raw) for key, raw in storages.items() if not key.startswith("data/"))
    parts["constants.pkl"] = hexfile.pickled(constants)
    parts.update(others or {})
    parts.update({"version": b"3\n", "byteorder": b"little", ".data/serialization_id": b"0" * 40})
    return [hexfile.Rec(f"m/{name}", raw, method=8 if name.endswith(".py") else 0) for name, raw in parts.items()]


def pt2_entry(record: str, dtype: int, shape: tuple[int, ...], offset: int = 0, steps: tuple[int, ...] | None = None, /,
              **changes: Any) -> dict[str, Any]:  # fmt: skip
    """One tensor of a ``*_config.json``; `changes` replace fields, of the entry or of its ``tensor_meta``."""
    steps = hexfile.c_strides(shape) if steps is None else steps
    meta = {
        "dtype": dtype, "sizes": [{"as_int": n} for n in shape], "requires_grad": False,
        "device": {"type": "cpu", "index": None}, "strides": [{"as_int": n} for n in steps],
        "storage_offset": {"as_int": offset}, "layout": 7,
    }  # fmt: skip
    entry: dict[str, Any] = {"path_name": record, "is_param": False, "use_pickle": False, "tensor_meta": meta}
    for key, value in changes.items():
        (entry if key in entry else meta)[key] = value
    return entry


def pt2_records(weights: Any, constants: Any = None, raw: Mapping[str, bytes] | None = None, prefix: str = "m/",
                others: Mapping[str, bytes] | None = None) -> list[hexfile.Rec]:  # fmt: skip
    """The records of a ``.pt2``; configurations are dicts of entries, or bytes."""
    parts: dict[str, bytes] = {f"data/{name}": data for name, data in (raw or {}).items()}
    for what, config in (("weights", weights), ("constants", constants)):
        if config is not None:
            text = config if isinstance(config, bytes) else json.dumps({"config": config}).encode()
            parts[f"data/{what}/model_{what}_config.json"] = text
    parts.update(others or {})
    parts.update({"models/model.json": b"{}", "archive_format": b"pt2", "archive_version": b"0",
                  ".data/version": b"6\n", "byteorder": b"little"})  # fmt: skip
    return [hexfile.Rec(prefix + name, data) for name, data in parts.items()]


def package_records(pickles: Mapping[str, bytes], storages: Mapping[str, bytes],
                    others: Mapping[str, bytes] | None = None) -> list[hexfile.Rec]:  # fmt: skip
    """The records of a torch.package archive."""
    parts = {f".data/{key}.storage": raw for key, raw in storages.items()}
    parts.update((name, hexfile.pickled(body, 3)) for name, body in pickles.items())
    parts.update(others or {})
    parts.update({".data/extern_modules": b"torch\n", ".data/version": b"6\n", "byteorder": b"little"})
    return [hexfile.Rec(f"p/{name}", data) for name, data in parts.items()]


@case
def torchscript_small() -> Case:
    """A linear layer in a container, by torch itself."""
    torch = pytest.importorskip("torch", reason="the file is made by torch.jit.save")
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: there is a newer way
        module = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(3, 2)))
        torch.jit.save(module, out)
    tensors = {name: t.detach().numpy() for name, t in module.state_dict().items()}
    return Case("torchscript", ".pt", out.getvalue(), tensors)


@case
def torchscript_by_hand() -> Case:
    """Attributes of several kinds, an object in a list, constants."""
    tensors = {"w": array("float32", (2, 3)), "many.0.b": array("int64", (4,)), "constants.0": array("float64", (2,))}
    inner = script_object({"b": hexfile.tensor("1", 4, (4,), cls="LongStorage"), "training": b"\x89"})
    tagged = hexfile.name("torch.jit._pickle", "restore_type_tag") + b"(](" + inner + b"e" + hexfile.text("List[X]")
    module = script_object({"w": hexfile.tensor("0", 6, (2, 3)), "many": tagged + b"tR", "k": hexfile.number(3)})
    constants = b"(" + hexfile.tensor("0", 2, (2,), cls="DoubleStorage") + b"t"
    raw = {"data/0": tensors["w"].tobytes(), "data/1": tensors["many.0.b"].tobytes(),
           "constants/0": tensors["constants.0"].tobytes()}  # fmt: skip
    return Case("torchscript", ".pt", hexfile.zip_file(script_records(module, raw, constants)), tensors)


@case
def torchscript_until_1_2() -> Case:
    """Parameters and buffers of modules, as torch 1.0 to 1.2 told them in JSON; attributes in a pickle beside it."""
    tensors = {"w": array("float32", (2, 3)), "in.b": array("int64", ()), "in.on.v": array("float16", (2,))}

    def attributes(model: dict[str, Any]) -> None:
        inner = model["mainModule"]["submodules"][0]["submodules"][0]
        del inner["parameters"]
        inner["attributes"] = [{"name": "v", "type": "Tensor", "id": "1"}]

    pickle = b"(K\x05" + hexfile.name("torch.jit._pickle", "build_tensor_from_id") + b"(K\x02tRt"
    return Case("torchscript", ".pt", model_json(tensors, attributes, hexfile.pickled(pickle)), tensors)


def model_json(
    tensors: Mapping[str, Array], change: Callable[[dict[str, Any]], Any] | None = None, attributes: bytes = b""
) -> bytes:
    """A script file of torch 1.0; `change` is given what its JSON holds."""
    kinds = {"float32": "FLOAT", "int64": "INT64", "float16": "FLOAT16"}
    told = [
        {"dims": [str(n) for n in a.shape], "strides": [str(n) for n in hexfile.c_strides(a.shape)], "offset": "0",
         "requiresGrad": i == 0, "dataType": kinds[a.dtype.name], "data": {"key": f"tensors/{i}"}, "device": "cpu"}
        for i, a in enumerate(tensors.values())
    ]  # fmt: skip
    main: dict[str, Any] = {"name": "m", "parameters": [], "submodules": []}
    for i, name in enumerate(tensors):
        *path, last = name.split(".")
        node = main
        for part in path:
            below = node["submodules"]
            if not below or below[-1]["name"] != part:
                below.append({"name": part, "parameters": [], "submodules": []})
            node = below[-1]
        node["parameters"].append({"name": last, "tensorId": str(i), "isBuffer": i > 0})
    model: dict[str, Any] = {"protoVersion": "1", "mainModule": main, "tensors": told}
    if change is not None:
        change(model)
    parts = {"version": b"1\n", "code/m.py": b"pass", "model.json": json.dumps(model).encode()}
    parts.update({f"tensors/{i}": a.tobytes() for i, a in enumerate(tensors.values())})
    parts.update({"attributes.pkl": attributes} if attributes else {})
    return hexfile.zip_file([hexfile.Rec(f"m/{name}", data) for name, data in parts.items()])


@case
def torchscript_frozen() -> Case:
    """All weights are constants, in storages that are called as the lite interpreter's are."""
    tensors = {"constants.0": array("float16", (3, 2)), "constants.2": array("uint8", (5,))}
    constants = (
        b"(" + hexfile.tensor("0.storage", 6, (3, 2), cls="HalfStorage") + hexfile.number(7)
        + hexfile.tensor("1.storage", 5, (5,), cls="ByteStorage") + b"t"
    )  # fmt: skip
    raw = {f"constants/{i}.storage": t.tobytes() for i, t in enumerate(tensors.values())}
    return Case("torchscript", ".ptl", hexfile.zip_file(script_records(script_object({}), raw, constants)), tensors)


@case
def torch_export_small() -> Case:
    """Weights that are tied, strided and of no elements, and a constant."""
    base = array("float32", (12,))
    tensors = {"l.weight": base.reshape(3, 4), "tied": base.reshape(3, 4), "t": base.reshape(3, 4).T[1:],
               "none": array("bfloat16", (0, 2)), "step": array("int64", ())}  # fmt: skip
    weights = {
        "l.weight": pt2_entry("weight_0", 7, (3, 4), is_param=True, requires_grad=True),
        "tied": pt2_entry("weight_0", 7, (3, 4)),
        "t": pt2_entry("weight_0", 7, (3, 3), 1, (1, 4)),
        "none": pt2_entry("weight_1", 13, (0, 2)),
    }
    raw = {"weights/weight_0": base.tobytes(), "weights/weight_1": b"", "constants/tensor_0": tensors["step"].tobytes()}
    records = pt2_records(weights, {"step": pt2_entry("tensor_0", 5, ())}, raw)
    return Case("torch_export", ".pt2", hexfile.zip_file(records), tensors)


@case
def torch_export_pickled() -> Case:
    """A weight that is a file of its own, beside one that is not, in an archive without a folder."""
    tensors = {"a": array("float32", (2, 2)), "b": array("uint8", (3,))}
    nested = hexfile.torch_file(hexfile.pickled(hexfile.tensor("0", 4, (2, 2))), {"0": tensors["a"].tobytes()})
    weights = {"a": pt2_entry("weight_0", 7, (2, 2), use_pickle=True), "b": pt2_entry("weight_1", 1, (3,))}
    raw = {"weights/weight_0": nested, "weights/weight_1": tensors["b"].tobytes()}
    return Case("torch_export", ".pt2", hexfile.zip_file(pt2_records(weights, {}, raw, prefix="")), tensors)


@case
def torch_export_until_2_6() -> Case:
    """Files of torch.save in an archive by Python's zipfile."""
    import zipfile

    tensors = {"w": array("float64", (2,)), "c": array("int32", (3,))}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("version", "7.3")
        archive.writestr("serialized_exported_program.json", "{}")
        archive.writestr("serialized_state_dict.pt", plain_torch_bytes({"w": tensors["w"]}))
        archive.writestr("serialized_constants.pt", plain_torch_bytes({"c": tensors["c"]}))
    return Case("torch_export", ".pt2", out.getvalue(), tensors)


@case
def torch_package_small() -> Case:
    """Two pickles that share a storage, by torch itself."""
    torch = pytest.importorskip("torch", reason="the file is made by torch.package")
    from torch.package import PackageExporter

    w = array("float32", (3, 4))
    shared = as_torch(w)
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: it uses a storage class of its past
        with PackageExporter(out) as package:
            package.save_pickle("nets", "a.pkl", {"w": shared, "n": 5})
            package.save_pickle("nets.deep", "b.pkl", [shared[1], torch.arange(3)])
            package.save_text("nets", "note.txt", "a note")
    tensors = {"nets/a.pkl.w": w, "nets/deep/b.pkl.0": w[1], "nets/deep/b.pkl.1": np.arange(3)}
    return Case("torch_package", ".pt", out.getvalue(), tensors)


@case
def torch_package_by_hand() -> Case:
    """Keys of storages as numbers and as text, source text that is left alone."""
    tensors = {"r/x.pkl": array("int16", (2, 2)), "y.a": array("float32", (3,))}
    number = hexfile.storage("ShortStorage", "0", 4).replace(hexfile.text("0"), hexfile.number(0), 1)
    pickles = {
        "r/x.pkl": hexfile.tensor("0", 4, (2, 2), cls="ShortStorage").replace(
            hexfile.storage("ShortStorage", "0", 4), number
        ),
        "y": hexfile.mapping({"a": hexfile.tensor("1", 3, (3,))}),
    }
    raw = {str(i): t.tobytes() for i, t in enumerate(tensors.values())}
    records = package_records(pickles, raw, {"r/m.py": b"x = 1\n", "r/data.bin": b"\x80\x02 no pickle"})
    return Case("torch_package", ".pt", hexfile.zip_file(records), tensors)


@case
def torch_package_of_1_8() -> Case:
    """Storages are in another folder, under keys alone."""
    tensors = {"r/x.pkl.a": array("float32", (3,)), "r/x.pkl.b": array("int64", (2,))}
    pickle = hexfile.mapping({"a": hexfile.tensor("93920861399136", 3, (3,)),
                              "b": hexfile.tensor("7", 2, (2,), cls="LongStorage")})  # fmt: skip
    parts = {
        "r/x.pkl": hexfile.pickled(pickle, 3), "r/m.py": b"x = 1\n",
        **dict(zip(("data/93920861399136", "data/7"), (t.tobytes() for t in tensors.values()), strict=True)),
        "extern_modules": b"torch\n", "version": b"2\n",
    }  # fmt: skip
    records = [hexfile.Rec(f"p/{name}", raw) for name, raw in parts.items()]
    return Case("torch_package", ".pt", hexfile.zip_file(records), tensors)


@case
def torch_package_deflated() -> Case:
    """Repacked by a zip tool."""
    w = array("float32", (300,))
    records = package_records({"a.pkl": hexfile.mapping({"w": hexfile.tensor("0", 300, (300,))})}, {"0": w.tobytes()})
    for record in records:
        record.method = 8
    return Case("torch_package", ".pt", hexfile.zip_file(records), {"a.pkl.w": w})


@case
def archive_small() -> Case:
    """Two checkpoints and a note, stored."""
    tensors = {"policy.pth.w": array("float32", (2, 3)), "st/model.safetensors.x": array("int64", (3,)),
               "st/model.safetensors.y": array("uint8", (2,))}  # fmt: skip
    second = {"x": tensors["st/model.safetensors.x"], "y": tensors["st/model.safetensors.y"]}
    members = {"policy.pth": plain_torch_bytes({"w": tensors["policy.pth.w"]}), "data": b'{"lr": 1}',
               "st/model.safetensors": safetensors_bytes(second)}  # fmt: skip
    return Case("archive", ".zip", hexfile.zip_file([hexfile.Rec(*m) for m in members.items()], align=1), tensors)


@case
def archive_deflated() -> Case:
    """Packed members, one of them an archive again."""
    tensors = {"a.pt.w": array("float32", (30,)), "deep/b.zip.c.safetensors.t": array("int16", (4, 2))}
    inner = hexfile.zip_file([hexfile.Rec("c.safetensors", safetensors_bytes({"t": [*tensors.values()][1]}))], align=8)
    members = {"a.pt": plain_torch_bytes({"w": tensors["a.pt.w"]}), "deep/b.zip": inner, "readme.txt": b"hello" * 20}
    return Case("archive", ".zip", hexfile.zip_file([hexfile.Rec(*m, method=8) for m in members.items()]), tensors)


@case
def archive_tar() -> Case:
    """A tar file, closed by two blocks of zeros and no more."""
    tensors = {"run/a.pt.w": array("float32", (2, 3)), "run/b.safetensors.t": array("int16", (4,))}
    members = {"run/notes.txt": b"nothing", "run/a.pt": plain_torch_bytes({"w": tensors["run/a.pt.w"]}),
               "run/b.safetensors": safetensors_bytes({"t": tensors["run/b.safetensors.t"]})}  # fmt: skip
    data = hexfile.tarred(members).rstrip(b"\0")
    return Case("archive", ".tar", data + b"\0" * (-len(data) % 512 + 1024), tensors)
