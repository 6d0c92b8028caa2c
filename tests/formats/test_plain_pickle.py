"""What is peculiar to plain pickles: how they are told, arrays of all spellings, joblib's and torch's ways."""

from __future__ import annotations

import collections
import io
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import hexfile
import tensorio
from judging import attempt
from tensorio import HeaderError, TruncatedError, UnknownFormatError, UnsafePickleError, UnsupportedError, _unpickler

PROTOCOLS = range(6)
ARRAYS = {
    **{dtype: cases.array(dtype, (3, 5)) for dtype in cases.DTYPES},
    "scalar": np.array(2.5),
    "empty": np.zeros((0, 3), "f4"),
    "one": np.arange(1),
    "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "strided": np.arange(40)[::3],
    "reversed": np.arange(5)[::-1],
    "transposed": np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
    "big": np.arange(100_000, dtype="i2"),
    "other_order": np.arange(5, dtype=">i4"),
    "other_order_complex": np.array([1 + 2j, 3], dtype=">c8"),
    "rank_5": np.zeros((1, 2, 1, 2, 1)),
}


def equal(got: Any, want: Any) -> bool:
    """Values and shape, and the type in native byte order."""
    native = want.astype(want.dtype.newbyteorder("="))
    same = got.tolist() == native.tolist() if native.dtype.hasobject else got.tobytes() == native.tobytes()
    return got.dtype == native.dtype and got.shape == native.shape and same


# --------------------------------------------------------------------------- NumPy


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("kind", ARRAYS)
def test_array_of_every_protocol_is_a_tensor(kind: str, protocol: int) -> None:
    want = ARRAYS[kind]
    data = pickle.dumps({"x": want, "same": want}, protocol)
    tree = tensorio.load(data, format="pickle")
    assert equal(tree["x"], want)
    assert tree["x"] is tree["same"]
    with tensorio.open(data, format="pickle") as checkpoint:
        assert list(checkpoint) == ["x", "same"]
        assert equal(checkpoint["x"], want)
        info = checkpoint.infos["x"]
        assert (info.dtype, info.shape) == (want.dtype.newbyteorder("=").name, want.shape)
        strides = pickle.loads(data)["x"].strides
        if want.size and want.ndim:
            assert checkpoint["x"].strides == tree["x"].strides == strides


@pytest.mark.parametrize("options", [{}, {"mmap": False}], ids=str)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_arrays_are_read_only_unless_asked_otherwise(protocol: int, options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps({"a": np.arange(3), "b": np.arange(3, dtype=">i2")}, protocol))
    before = path.read_bytes()
    for writable in (False, True):
        with tensorio.open(path, writable=writable, **options) as checkpoint:
            arrays = [*checkpoint.values(), *tensorio.load(path, writable=writable, **options).values()]
            arrays += checkpoint.tree().values()
        for array in arrays:
            assert array.flags.writeable == writable
            if writable:
                array[...] = 7
    assert path.read_bytes() == before


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_arrays_are_views_of_the_file(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "x.pkl"
    want = {"a": np.arange(1000, dtype="u2"), "b": np.asfortranarray(np.ones((30, 40), "f4"))}
    path.write_bytes(pickle.dumps(want, protocol))
    with tensorio.open(path) as checkpoint:
        for name, array in want.items():
            extent = checkpoint.infos[name].chunks[0].extent
            assert extent.storage == 0
            assert path.read_bytes()[extent.offset : extent.offset + extent.nbytes] == array.tobytes("A")
            got = checkpoint[name]
            assert not got.flags.owndata
            assert got.flags.aligned == (got.__array_interface__["data"][0] % got.itemsize == 0)
        report = checkpoint.verify()
        assert (report.ok, report.records, report.unchecked) == (True, 2, 2000 + 4800)


def test_arrays_that_are_no_tensors_are_values() -> None:
    want = {"text": np.array(["a", "bc"]), "raw": np.array([b"x", b"yz"]), "objects": np.array([1, "x", None], object)}
    for protocol in PROTOCOLS:
        data = pickle.dumps(want, protocol)
        with tensorio.open(data, format="pickle") as checkpoint:
            assert len(checkpoint) == 0
        tree = tensorio.load(data, format="pickle")
        assert all(equal(tree[k], a) for k, a in want.items())


def test_scalars_and_plain_values_are_themselves() -> None:
    want = {"f": np.float32(2.5), "i": np.int64(-3), "b": np.bool_(True), "n": [1, 2.5, None, "x", b"y" * 300],
            "o": collections.OrderedDict(a=1), "t": (1, (2,)), "s": {1, 2}, "big": bytearray(b"z" * 1000)}  # fmt: skip
    for protocol in PROTOCOLS:
        assert repr(tensorio.load(pickle.dumps(want, protocol), format="pickle")) == repr(want)


def test_matrix_and_memmap_are_arrays(tmp_path: Path) -> None:
    """Subclasses whose data is all there is to them."""
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix([[1, 2], [3, 4]])
    mapped = np.memmap(tmp_path / "raw", "f4", "w+", shape=(3,))
    for protocol in PROTOCOLS:
        tree = tensorio.load(pickle.dumps({"a": matrix, "b": mapped}, protocol), format="pickle")
        assert type(tree["a"]) is type(tree["b"]) is np.ndarray
        assert tree["a"].tolist() == [[1, 2], [3, 4]]
        assert tree["b"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("protocol", [2, 4])
def test_names_select_arrays(protocol: int) -> None:
    data = pickle.dumps({"a": np.arange(3), "b": {"x": np.arange(4), "y": np.arange(5)}, "c": 1}, protocol)
    tree = tensorio.load(data, names=["b.y"])
    assert list(tree) == ["b"]
    assert list(tree["b"]) == ["y"]
    assert tree["b"]["y"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_converts_to_safetensors_and_to_zip(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "x.pkl"
    want = {"w": np.arange(6.0).reshape(2, 3), "b": np.arange(3, dtype=">f4")}
    path.write_bytes(pickle.dumps({**want, "note": "x"}, protocol))
    for suffix, dropped in ((".safetensors", ["note"]), (".pt", [])):
        assert tensorio.convert(path, tmp_path / f"y{suffix}") == dropped
        with tensorio.open(tmp_path / f"y{suffix}", strict=True) as checkpoint:
            assert {k: a.tolist() for k, a in checkpoint.items()} == {k: a.tolist() for k, a in want.items()}


# -------------------------------------------------------------------- how it is told


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("obj", [np.arange(3), {"a": np.arange(3)}, [np.float64(1)], (np.arange(2), 1)], ids=str)
def test_pickle_of_arrays_is_told_by_content(obj: Any, protocol: int, tmp_path: Path) -> None:
    data = pickle.dumps(obj, protocol)
    path = tmp_path / "model.pt"
    path.write_bytes(data)
    for source in (data, io.BytesIO(data), path):
        assert tensorio.identify(source) == "pickle"


@pytest.mark.parametrize("protocol", [0, 1, 2, 4])
@pytest.mark.parametrize("suffix", [".pkl", ".pickle", ".p", ".joblib", ".sav", ".PKL"])
def test_pickle_of_anything_is_told_by_name(suffix: str, protocol: int, tmp_path: Path) -> None:
    path = tmp_path / f"values{suffix}"
    path.write_bytes(pickle.dumps({"a": 1}, protocol))
    assert tensorio.identify(path) == "pickle"
    assert tensorio.load(path) == {"a": 1}


def test_pickle_without_arrays_is_no_checkpoint_unless_asked_for(tmp_path: Path) -> None:
    """Bytes that begin like a pickle may be anything: a torch file whose magic number was lost, for one."""
    for data in (pickle.dumps({"a": 1}, 4), pickle.dumps([1, 2], 2), pickle.dumps(7, 3)):
        path = tmp_path / "model.pt"
        path.write_bytes(data)
        for source in (data, path):
            with pytest.raises(UnknownFormatError, match="format='pickle'"):
                tensorio.load(source)
            assert tensorio.load(source, format="pickle") == pickle.loads(data)


@pytest.mark.parametrize(("data", "words"), [(b"\x1f\x8b\x08" + bytes(20), "gzip"), (b"x\x9c" + bytes(20), "zlib"),
                                             (b"BZh9" + bytes(20), "bzip2"), (b"ZF0x10" + bytes(20), "joblib"),
                                             (b"", "empty"), (b"<html>", "HTML")])  # fmt: skip
def test_packed_file_under_a_pickles_name_says_what_it_is(data: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pkl"
    path.write_bytes(data)
    with pytest.raises(UnknownFormatError, match=words):
        tensorio.load(path)


def test_file_that_is_no_pickle_under_its_name_says_where(tmp_path: Path) -> None:
    path = tmp_path / "x.pkl"
    path.write_bytes(b"a = 1")
    with pytest.raises(HeaderError, match="opcode 0x61"):
        tensorio.load(path)


# ----------------------------------------------------------------- several in a stream


def test_pickles_of_one_stream_load_in_turn_as_with_pickle(tmp_path: Path) -> None:
    objects = [{"a": np.arange(3)}, [np.ones(400)], 5, np.zeros(0)]
    path = tmp_path / "x.pkl"
    path.write_bytes(b"".join(pickle.dumps(obj, 2 + i % 3) for i, obj in enumerate(objects)) + b"TAIL")
    for opened in (path.open, lambda mode: io.BytesIO(path.read_bytes())):
        with opened("rb") as f:
            for obj in objects:
                assert str(tensorio.load(f, format="pickle")) == str(obj)
            assert f.read() == b"TAIL"
    assert str(tensorio.load(path)) == str(objects[0])
    with pytest.raises(HeaderError, match="strict"):
        tensorio.load(path, strict=True)


# --------------------------------------------------------------------------- hostile


@pytest.mark.parametrize("unknown", ["error", "opaque"])
def test_names_that_are_not_allowed_run_nothing(unknown: str, tmp_path: Path) -> None:
    flag = tmp_path / "flag"

    class Touch:
        def __reduce__(self) -> Any:
            return Path.touch, (flag,)

    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps({"a": np.arange(3), "x": Touch()}))
    if unknown == "error":
        with pytest.raises(UnsafePickleError):
            tensorio.load(path)
    else:
        assert tensorio.load(path, unknown="opaque")["a"].tolist() == [0, 1, 2]
    assert not flag.exists()


def changed(**parts: Any) -> bytes:
    """A pickle of one array with parts of its state replaced."""
    dtype = hexfile.name("numpy", "dtype") + hexfile.text("f4") + b"\x89\x88\x87R(K\3" + hexfile.text("<")
    dtype += b"NNN" + hexfile.number(-1) * 2 + b"K\0tb"
    truth: dict[str, bytes] = {"version": b"K\1", "shape": hexfile.numbers([3]), "dtype": dtype, "order": b"\x89",
                               "data": b"B" + struct.pack("<I", 12) + bytes(12)} | parts  # fmt: skip
    made = hexfile.name("numpy.core.multiarray", "_reconstruct") + hexfile.name("numpy", "ndarray")
    made += hexfile.numbers([0]) + b"C\1b\x87R"
    return hexfile.pickled(made + b"(" + b"".join(truth.values()) + b"tb", 3)


@pytest.mark.parametrize(
    "parts",
    [
        {"shape": hexfile.numbers([4])}, {"shape": hexfile.numbers([2])}, {"shape": hexfile.numbers([-3])},
        {"shape": hexfile.numbers([1 << 62, 1 << 62])}, {"shape": hexfile.numbers([0, 1 << 63])},
        {"shape": b"K\3"}, {"shape": hexfile.numbers([1] * 65)}, {"dtype": hexfile.text("f4")}, {"order": b"N"},
        {"data": b"N"}, {"data": b"C\3abc"}, {"data": hexfile.text("\u0100" * 12)}, {"version": b"K\2"},
        {"data": b"B" + struct.pack("<I", 13) + bytes(13)}, {"version": b""},
    ],
    ids=lambda p: str(p)[:40],
)  # fmt: skip
def test_state_that_does_not_fit_is_refused(parts: dict[str, bytes]) -> None:
    assert tensorio.load(changed()).tolist() == [0, 0, 0]
    for read in (tensorio.load, tensorio.open):
        with pytest.raises((HeaderError, UnsupportedError)):
            read(changed(**parts))


def test_truncation_and_flips_give_an_error_or_a_result() -> None:
    data = pickle.dumps({"a": np.arange(5, dtype="f4"), "b": [np.zeros((2, 2)), "x"]}, 4)
    for n in range(len(data)):
        with pytest.raises(tensorio.FormatError):
            tensorio.load(data[:n], format="pickle")
    for at in range(len(data)):
        for flip in (1, 0x80, 0xFF):
            other = bytearray(data)
            other[at] ^= flip
            attempt(bytes(other), format="pickle")


def test_array_cut_short_says_where(tmp_path: Path) -> None:
    data = pickle.dumps(np.arange(1000), 4)
    with pytest.raises(TruncatedError, match="runs past the end"):
        tensorio.load(data[:-100])


def test_nothing_writes_it(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="read only"):
        tensorio.save({"a": np.ones(3)}, tmp_path / "x.pkl", format="pickle")
    with pytest.raises(ValueError, match=r"suffix '\.pkl'"):
        tensorio.save({"a": np.ones(3)}, tmp_path / "x.pkl")


# --------------------------------------------------------------------------- joblib


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_joblib_files_equal_what_joblib_loads(protocol: int, tmp_path: Path) -> None:
    joblib = pytest.importorskip("joblib", reason="the file is made by joblib")
    w = np.arange(12.0).reshape(3, 4)
    obj = {"w": w, "same": w, "f": np.asfortranarray(w), "n": [np.arange(7, dtype="u1"), np.zeros(0), np.array(3)],
           "other": np.arange(4, dtype=">i4"), "text": np.array(["a", "bc"]), "lr": 0.5}  # fmt: skip
    path = tmp_path / "x.joblib"
    joblib.dump(obj, path, protocol=protocol)
    want, got = joblib.load(path), tensorio.load(path)
    assert list(got) == list(want)
    for key in set(want) - {"n", "lr"}:
        assert equal(got[key], want[key]), key
    assert all(equal(a, b) for a, b in zip(got["n"], want["n"], strict=True))
    with tensorio.open(path.read_bytes()) as checkpoint:
        assert checkpoint.format == "pickle"
        assert list(checkpoint) == ["w", "same", "f", "n.0", "n.1", "n.2", "other"]
        extent = checkpoint.infos["w"].chunks[0].extent
        assert path.read_bytes()[extent.offset : extent.offset + extent.nbytes] == w.tobytes()
        assert checkpoint["f"].flags.f_contiguous


def test_joblib_arrays_of_objects_are_values(tmp_path: Path) -> None:
    joblib = pytest.importorskip("joblib", reason="the file is made by joblib")
    path = tmp_path / "x.joblib"
    joblib.dump([np.array([1, "abc", {"a": np.arange(2)}], object), np.arange(3)], path)
    objects, after = tensorio.load(path)
    assert list(objects[:2]) == [1, "abc"]
    assert objects[2]["a"].tolist() == [0, 1]
    assert after.tolist() == [0, 1, 2]


def test_an_error_in_a_pickle_within_a_pickle_does_not_hold_the_buffer() -> None:
    """For as long as somebody looks at it."""
    joblib = pytest.importorskip("joblib", reason="the file is made by joblib")
    file = io.BytesIO()
    joblib.dump(np.array(["x"], object), file)
    raw = file.getvalue()
    data = bytearray(raw[: raw.rindex(b"\x80")] + b"\x80\x02ccollections\nOrderedDict\n(I1\ntR.")
    with pytest.raises(tensorio.HeaderError, match="expected a list of pairs") as caught:
        _unpickler.loads(data, own_storage=0)
    data.extend(b"more")
    assert caught.value.offset == len(data) - len(b"R.more")


def test_joblib_file_cut_short_or_changed_gives_an_error_or_a_result(tmp_path: Path) -> None:
    joblib = pytest.importorskip("joblib", reason="the file is made by joblib")
    path = tmp_path / "x.joblib"
    joblib.dump([np.arange(3, dtype="i2"), np.array([None, 1], object)], path)
    data = path.read_bytes()
    for n in range(len(data)):
        with pytest.raises(tensorio.FormatError):
            tensorio.load(data[:n], format="pickle")
    for at in range(len(data)):
        other = bytearray(data)
        other[at] ^= 0x41
        attempt(bytes(other), format="pickle")


# ---------------------------------------------------------------------------- torch


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_torch_tensors_pickled_without_torch_save_equal_what_pickle_loads(protocol: int, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    w = torch.arange(12.0).reshape(3, 4)
    obj = {"w": w, "part": w[1:, ::2], "half": torch.ones(3).half(), "new": torch.arange(4).to(torch.uint16),
           "empty": torch.zeros(0), "p": torch.nn.Parameter(torch.ones(2)), "note": "x"}  # fmt: skip
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps(obj, protocol))
    tree = tensorio.load(path)
    assert list(tree) == list(obj)
    for key in set(obj) - {"note"}:
        assert tree[key].tolist() == obj[key].tolist(), key
        assert tree[key].dtype.name == str(obj[key].dtype).removeprefix("torch."), key
    with tensorio.open(path) as checkpoint:
        assert set(checkpoint) == set(obj) - {"note"}
        extent = checkpoint.infos["w"].chunks[0].extent
        if protocol > 2:
            assert extent.storage == 0
            assert path.read_bytes()[extent.offset : extent.offset + 48] == w.numpy().tobytes()
        assert checkpoint["w"].tolist() == w.tolist()
        assert checkpoint.infos["p"].flags == tensorio.tensors.PARAMETER | tensorio.tensors.REQUIRES_GRAD


def loaded_from(data: bytes) -> bytes:
    """A pickle that has torch read a string of bytes."""
    call = hexfile.name("torch.storage", "_load_from_bytes") + b"B" + struct.pack("<I", len(data)) + data + b"\x85R"
    args = b"K\0" + hexfile.numbers([4]) + hexfile.numbers([1]) + b"\x89" + hexfile.HOOKS
    return hexfile.pickled(hexfile.name("torch._utils", "_rebuild_tensor_v2") + b"(" + call + args + b"tR", 3)


def test_nested_file_must_be_one_storage() -> None:
    import oldfiles

    raw = {"0": np.arange(4, dtype="<f4").tobytes()}
    good = oldfiles.legacy_file(oldfiles.old_storage(), raw)
    assert tensorio.load(loaded_from(good)).tolist() == [0, 1, 2, 3]
    two = oldfiles.legacy_file(b"]" + oldfiles.old_storage() + b"a", raw)
    for data in (two, good[:-1], good[:40], b"", b"x", oldfiles.legacy_file(b"N"), pickle.dumps(np.arange(3)),
                 oldfiles.legacy_file(hexfile.name("os", "system"), {}), loaded_from(good)):  # fmt: skip
        for read in (tensorio.load, tensorio.open):
            with pytest.raises((tensorio.FormatError, UnsupportedError, UnsafePickleError)):
                read(loaded_from(data))


def test_storages_of_two_nested_files_are_two() -> None:
    torch = pytest.importorskip("torch")
    w = torch.arange(3.0)
    tree = tensorio.load(pickle.dumps({"a": w, "b": w.clone(), "c": w}))
    assert tree["a"] is tree["c"]
    assert not np.shares_memory(tree["a"], tree["b"])
