"""Beside the reference: the same bytes written, the same values read, the same files refused."""

from __future__ import annotations

import importlib
import inspect
import json
import random
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

safetensors = pytest.importorskip("safetensors", reason="safetensors is the oracle")
import safetensors.numpy  # noqa: E402, F811

import tensorio  # noqa: E402
import tensorio.safetensors  # noqa: E402
from tensorio.safetensors import SafetensorError, TensorSpec, deserialize, numpy, safe_open, serialize  # noqa: E402

DTYPES = ["bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32",
          "float64", "complex64"]  # fmt: skip
Array = np.ndarray[Any, Any]


def some_arrays(rng: random.Random) -> dict[str, Array]:
    """A dict of arrays of all sorts, as the format has them."""
    out = {}
    for _ in range(rng.randrange(7)):
        shape = [rng.choice((0, 1, 2, 3, 5)) for _ in range(rng.randrange(4))]
        raw = np.frombuffer(rng.randbytes(8 * int(np.prod(shape)) + 8), np.uint8)
        dtype = np.dtype(rng.choice(DTYPES))
        kind = np.uint8 if dtype.kind == "b" else dtype
        array = raw[: int(np.prod(shape)) * dtype.itemsize].view(kind).reshape(shape)
        name = rng.choice(["w", "b", "a.b.c", "ä", '"', "\u2028", "", "\x7f", "\x1f"]) + str(rng.randrange(4))
        out[name] = np.asarray(array % 2 == 1) if dtype.kind == "b" else array
    return out


@pytest.mark.parametrize("seed", range(60))
def test_files_are_the_reference_s_to_the_byte(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    arrays = some_arrays(rng)
    metadata = rng.choice([None, {"format": "np"}, {"k\n": "ü"}]) if arrays else None
    want = safetensors.numpy.save(arrays, metadata)
    assert numpy.save(arrays, metadata) == want
    numpy.save_file(arrays, tmp_path / "m", metadata)
    assert (tmp_path / "m").read_bytes() == want
    got = numpy.load(want)
    assert list(got) == [name for name, _ in deserialize(want)]
    for name, array in safetensors.numpy.load(want).items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape)
        assert got[name].tobytes() == array.tobytes()
        assert got[name].flags.writeable
        assert got[name].flags.aligned


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_loaded_files_are_the_reference_s(backend: str, tmp_path: Path) -> None:
    for seed in range(30):
        arrays = some_arrays(random.Random(seed))
        path = tmp_path / str(seed)
        safetensors.numpy.save_file(arrays, path)
        with safe_open(path, "np", backend=backend) as f, safetensors.safe_open(path, "np") as g:
            assert f.keys() == g.keys()
            assert f.metadata() == g.metadata()
            assert sorted(f.offset_keys()) == sorted(g.offset_keys())
            for name in f:
                mine, theirs = f.get_tensor(name), g.get_tensor(name)
                assert (mine.dtype, mine.shape, mine.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())
                assert f.get_slice(name).get_shape() == g.get_slice(name).get_shape()
                assert f.get_slice(name).get_dtype() == g.get_slice(name).get_dtype()
        assert numpy.load_file(path, backend=backend).keys() == safetensors.numpy.load_file(path).keys()


def test_tensors_come_by_offset_whatever_the_header_s_order(tmp_path: Path) -> None:
    header = {
        "z": {"dtype": "U8", "shape": [2], "data_offsets": [4, 6]},
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "m": {"dtype": "U8", "shape": [1], "data_offsets": [6, 7]},
    }
    data = framed(json.dumps(header).encode(), b"1234567")
    (tmp_path / "m").write_bytes(data)
    for backend in ("mmap", "pread"):
        with safe_open(tmp_path / "m", "np", backend=backend) as f:
            assert f.keys() == ["a", "m", "z"]
            assert f.offset_keys() == list(f.get_tensors()) == ["a", "z", "m"]
    assert list(numpy.load(data)) == list(safetensors.numpy.load_file(tmp_path / "m")) == ["a", "z", "m"]


def framed(header: bytes, payload: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + payload


# ---------------------------------------------------------------------------- verdicts

PIECES = [b"{", b"}", b"[", b"]", b",", b":", b'"', b"0", b"1", b"9", b"-", b"e", b".", b" ", b"\t", b"\\u0041", b"\\",
          b"null", b"true", b'"F32"', b'"F4"', b'"F64"', b'"dtype"', b'"shape"', b'"data_offsets"', b'"__metadata__"',
          b"18446744073709551616", b"4", b"8", b"\xff", b"\xc3\xa4", b"\x00"]  # fmt: skip


def mutated(rng: random.Random) -> bytes:
    header = bytearray(
        json.dumps(
            {
                "__metadata__": {"format": "np"},
                "a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
                "b": {"dtype": "U8", "shape": [3], "data_offsets": [8, 11], "x": [1, {}]},
            }
        ).encode()
    )
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(header))
        what = rng.randrange(4)
        if what == 0:
            header[at] = rng.randrange(256)
        elif what == 1:
            header[at:at] = rng.choice(PIECES)
        elif what == 2:
            del header[at : at + rng.randrange(1, 6)]
        else:
            header[at : at + 1] = rng.choice(PIECES)
    data = framed(bytes(header), b"\1" * 11)
    if rng.random() < 0.1:
        data = data[: rng.randrange(len(data))] if rng.random() < 0.5 else data + b"\0"
    return data


def test_changed_headers_get_the_verdict_of_the_reference() -> None:
    """But for names that occur twice, which are refused here."""
    accepted = refused = 0
    for seed in range(6000):
        data = mutated(random.Random(seed))
        try:
            want: Any = {name: bytes(view["data"]) for name, view in safetensors.deserialize(data)}
        except safetensors.SafetensorError as error:
            want = error
        try:
            got: Any = {name: bytes(view["data"]) for name, view in deserialize(data)}
        except SafetensorError as error:
            got = error
        if "duplicate" in str(got):
            continue
        assert isinstance(got, Exception) == isinstance(want, Exception), (seed, data, got, want)
        if isinstance(got, Exception):
            refused += 1
        else:
            accepted += 1
            assert got == want
    assert accepted > 100
    assert refused > 3000


def one(entry: dict[str, Any], payload: bytes) -> bytes:
    return framed(json.dumps({"a": entry}).encode(), payload)


BAD = {
    "HeaderTooSmall": b"1234567",
    "HeaderTooLarge": b"\xff" * 8 + b"{}",
    "InvalidHeaderLength": b"\x08" + bytes(7) + b"{}",
    "InvalidHeader": framed(b'{"\xff":1}'),
    "InvalidHeaderDeserialization": framed(b"{1}"),
    "InvalidOffset": one({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, bytes(8)),
    "TensorInvalidInfo": one({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, bytes(4)),
    "ValidationOverflow": one({"dtype": "F32", "shape": [1 << 32, 1 << 32], "data_offsets": [0, 4]}, bytes(4)),
    "MisalignedSlice": one({"dtype": "F4", "shape": [1], "data_offsets": [0, 1]}, bytes(1)),
    "MetadataIncompleteBuffer": framed(b"{}", b"x"),
}


@pytest.mark.parametrize("code", BAD)
def test_errors_have_the_sentence_and_the_code_that_callers_look_for(code: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(BAD[code])
    with pytest.raises(safetensors.SafetensorError) as theirs:
        safetensors.safe_open(path, "np")
    sentence = re.sub(r" at line .*|: (key must|invalid utf-8).*", "", str(theirs.value))
    with pytest.raises(SafetensorError) as ours:
        safe_open(path, "np")
    assert str(ours.value).startswith(f"{sentence} ({code})")
    assert ours.value.code == code
    assert ours.value.path == str(path)
    assert "bad.safetensors" in str(ours.value)
    assert isinstance(ours.value, tensorio.FormatError)
    with pytest.raises(SafetensorError, match=f"^Error while deserializing: .*{code}"):
        numpy.load(BAD[code])


def test_a_name_that_occurs_twice_is_refused() -> None:
    entry = '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    data = framed(f"{{{entry},{entry}}}".encode(), b"1")
    assert [name for name, _ in safetensors.deserialize(data)] == ["a"]
    with pytest.raises(SafetensorError, match="duplicate tensor name"):
        deserialize(data)


@pytest.mark.parametrize("metadata", ["null", "{}"])
def test_files_of_other_writers_open(metadata: str, tmp_path: Path) -> None:
    entry = '"a":{"data_offsets":[0,4],"shape":[1],"dtype":"F32","extra":{"x":[]}}'
    data = framed(f' \t\r\n{{"__metadata__":{metadata},{entry}}} '.encode(), b"1234")
    (tmp_path / "m").write_bytes(data)
    with safe_open(tmp_path / "m", "np") as f, safetensors.safe_open(tmp_path / "m", "np") as g:
        assert f.metadata() == g.metadata() == json.loads(metadata)
        assert f.get_tensor("a").tobytes() == b"1234"
        assert f.get_tensor("a").flags.aligned


# --------------------------------------------------------------------------- serialize


def spec(array: Array, **changes: Any) -> TensorSpec:
    options = {"dtype": array.dtype.name, "shape": array.shape, "data_ptr": array.ctypes.data, "data_len": array.nbytes}
    return TensorSpec(**{**options, **changes})


def test_serialize_is_the_reference_s() -> None:
    a, b = np.arange(6, dtype=np.int32), np.ones((2, 2), np.float16)
    theirs = {
        k: safetensors.TensorSpec(dtype=v.dtype.name, shape=v.shape, data_ptr=v.ctypes.data, data_len=v.nbytes)
        for k, v in {"a": a, "b": b}.items()
    }
    want = safetensors.serialize(theirs, {"k": "v"})
    assert serialize({"a": spec(a), "b": spec(b)}, {"k": "v"}) == want
    assert (
        serialize({"b": {"dtype": "float16", "shape": [2, 2], "data": b.tobytes()}, "a": spec(a)}, {"k": "v"}) == want
    )
    mine, other = deserialize(want), safetensors.deserialize(want)
    assert sorted(mine) == sorted(other)
    assert all(isinstance(view["data"], bytearray) for _, view in mine)


def test_a_spec_says_what_it_is_and_does_not_change() -> None:
    a = np.zeros((2, 3), np.float32)
    mine = spec(a)
    theirs = safetensors.TensorSpec(dtype="float32", shape=(2, 3), data_ptr=a.ctypes.data, data_len=24)
    assert repr(mine) == repr(theirs)
    assert (mine.dtype, mine.shape, mine.data_ptr, mine.data_len) == ("F32", [2, 3], a.ctypes.data, 24)
    assert mine != spec(a)
    with pytest.raises(AttributeError):
        mine.shape = [1]  # type: ignore[misc]
    assert TensorSpec(dtype="float4_e2m1fn_x2", shape=[2, 2], data_ptr=1, data_len=4).shape == [2, 4]
    with pytest.raises(TypeError):
        TensorSpec("float32", [1], 1, 4)  # type: ignore[misc]
    with pytest.raises(
        SafetensorError, match=r'^Unknown dtype "nonsense"\. Supported dtypes: bool, int8, uint8, int16'
    ):
        spec(a, dtype="nonsense")


@pytest.mark.parametrize("changes", [{"data_len": 23}, {"shape": (7,)}, {"data_ptr": 0}])
def test_a_spec_that_does_not_fit_is_refused_when_written(changes: dict[str, Any]) -> None:
    a = np.zeros((2, 3), np.float32)
    message = "^Error while serializing: invalid shape, data type, or offset for tensor"
    with pytest.raises(SafetensorError, match=message):
        serialize({"a": spec(a, **changes)})


@pytest.mark.parametrize(
    "arguments",
    [([1],), ({1: None},), ({"a": 1},), ({"a": {"dtype": "float32", "shape": [1], "data_ptr": 0, "data_len": 0}},),
     ({}, {"a": 1}), ({}, {1: "a"})],
)  # fmt: skip
def test_other_things_are_type_errors_as_in_the_reference(arguments: tuple[Any, ...]) -> None:
    for module in (safetensors, tensorio.safetensors):
        with pytest.raises(TypeError):
            module.serialize(*arguments)


def parameters(function: Any) -> list[tuple[str, Any]]:
    return [(p.name, p.kind) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("module", ["", ".numpy", ".torch"])
def test_arguments_have_the_names_of_the_reference(module: str) -> None:
    if module == ".torch":
        pytest.importorskip("torch")
    theirs, ours = (importlib.import_module(root + module) for root in ("safetensors", "tensorio.safetensors"))
    for name, function in vars(theirs).items():
        if inspect.isfunction(function) and function.__module__ == theirs.__name__:
            assert (name, parameters(getattr(ours, name))) == (name, parameters(function))
