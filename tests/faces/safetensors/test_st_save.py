"""Saving: by value, whatever the layout; what the reference refuses is refused in its words."""

from __future__ import annotations

import io
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio
from tensorio.safetensors import SafetensorError, TensorSpec, safe_open, serialize
from tensorio.safetensors.numpy import _flatten, load, load_file, save, save_file

BASE = np.arange(24, dtype=np.float32).reshape(4, 6)

VIEWS = {
    "fortran": np.asfortranarray(BASE),
    "transposed": BASE.T,
    "strided": BASE[::2, 1::2],
    "reversed": BASE[::-1, ::-1],
    "broadcast": np.broadcast_to(BASE[:1], (3, 6)),
    "swapped": BASE.astype(">f4"),
    "scalar": np.array(3.5),
    "empty": np.zeros((3, 0), np.int16),
    "field": np.zeros(5, [("a", "f4"), ("b", "i2")])["b"],
}


@pytest.mark.parametrize("name", VIEWS)
def test_arrays_of_any_layout_are_saved_by_value(name: str, tmp_path: Path) -> None:
    array = VIEWS[name]
    save_file({"x": array}, tmp_path / "m")
    kept: list[Any] = []
    for got in (load_file(tmp_path / "m"), load(save({"x": array})), load(serialize(_flatten({"x": array}, kept)))):
        assert got["x"].shape == array.shape
        assert got["x"].dtype == array.dtype.newbyteorder("=")
        assert got["x"].tolist() == array.tolist()


def test_types_of_ml_dtypes_are_saved_and_come_back(tmp_path: Path) -> None:
    import ml_dtypes

    names = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
    arrays = {n: np.arange(1, 9).astype(getattr(ml_dtypes, n)) for n in names}
    save_file(arrays, tmp_path / "m")
    for got in (load_file(tmp_path / "m"), load_file(tmp_path / "m", backend="pread"), load(save(arrays))):
        for name, array in arrays.items():
            assert got[name].dtype == array.dtype
            assert got[name].tobytes() == array.tobytes()


def test_a_tensor_called_as_the_notes_are_is_refused(tmp_path: Path) -> None:
    for act in (lambda d: save(d), lambda d: save_file(d, tmp_path / "m")):
        with pytest.raises(SafetensorError, match=r"^Error while serializing: .*__metadata__"):
            act({"__metadata__": BASE})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("metadata", [None, {}, {"b": "2", "a": "1"}])
def test_a_file_without_tensors_is_valid(metadata: Any, tmp_path: Path) -> None:
    save_file({}, tmp_path / "m", metadata)
    with safe_open(tmp_path / "m", "np") as f:
        assert f.metadata() == metadata
        assert f.keys() == []
        assert f.get_tensors() == {}


def test_notes_are_written_in_order(tmp_path: Path) -> None:
    data = save({"x": BASE}, {"b": "2", "a": "1", "c": "3"})
    assert data[8:].startswith(b'{"__metadata__":{"a":"1","b":"2","c":"3"},"x"')


@pytest.mark.parametrize("dtype", ["complex128", "object", "U3", "datetime64[s]", "longdouble"])
def test_other_dtypes_are_named(dtype: str) -> None:
    array = np.zeros(2, dtype)
    with pytest.raises(SafetensorError, match=re.escape(f'Unknown dtype "{array.dtype}"')) as caught:
        save({"x": array})
    assert isinstance(caught.value, tensorio.UnsupportedError)
    assert "'x'" in str(caught.value)


def test_other_things_than_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^Expected a dict of \[str, numpy.ndarray\] but received <class 'list'>"):
        save([1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^Key `x` is invalid, expected numpy.ndarray but received <class 'dict'>"):
        save({"x": {"y": BASE}})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="not an instance of 'str'"):
        save({1: BASE})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=r"json.dumps"):
        save({"x": BASE}, {"epoch": 3})  # type: ignore[dict-item]


# ------------------------------------------------------------------------------- where to


@pytest.mark.skipif(os.name != "posix", reason="modes and links are POSIX's")
def test_new_files_have_the_mode_of_the_process_and_replaced_ones_keep_theirs(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        save_file({"x": BASE}, tmp_path / "m")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "m").stat().st_mode) == 0o640
    (tmp_path / "m").chmod(0o604)
    (tmp_path / "link").symlink_to("m")
    save_file({"y": BASE}, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert stat.S_IMODE((tmp_path / "m").stat().st_mode) == 0o604
    assert list(load_file(tmp_path / "m")) == ["y"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "m"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(SafetensorError, match="FIFO"):
        save_file({"x": BASE}, tmp_path / "fifo")
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)
    with pytest.raises(IsADirectoryError):
        save_file({"x": BASE}, tmp_path)
    with pytest.raises(FileNotFoundError):
        save_file({"x": BASE}, tmp_path / "no" / "m")


def test_file_objects_and_all_kinds_of_paths_are_targets(tmp_path: Path) -> None:
    want = save({"x": BASE})
    out = io.BytesIO()
    save_file({"x": BASE}, out)
    assert out.getvalue() == want
    with (tmp_path / "a").open("wb") as f:
        save_file({"x": BASE}, f)
    for target in (str(tmp_path / "b"), os.fsencode(tmp_path / "c"), tmp_path / "d"):
        save_file({"x": BASE}, target)
    assert [(tmp_path / n).read_bytes() for n in "abcd"] == [want] * 4


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    save_file({"x": BASE}, tmp_path / "m")
    with pytest.raises(SafetensorError):
        save_file({"x": BASE, "y": np.zeros(2, complex)}, tmp_path / "m")
    assert load_file(tmp_path / "m")["x"].tolist() == BASE.tolist()
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


# --------------------------------------------------------------------------------- torch


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def st(torch: Any) -> Any:
    import tensorio.safetensors.torch as module

    return module


@pytest.fixture
def reference() -> Any:
    pytest.importorskip("safetensors")
    import safetensors.torch as module

    return module


TORCH_DTYPES = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64",
    "bfloat16", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float4_e2m1fn_x2",
]  # fmt: skip


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("shape", [(), (3, 2), (0, 2)], ids=str)
def test_every_torch_dtype_round_trips_beside_the_reference(
    dtype: str, shape: tuple[int, ...], torch: Any, st: Any, reference: Any, tmp_path: Path
) -> None:
    kind = getattr(torch, dtype, None)
    if kind is None or (dtype.startswith("float4") and not shape):
        pytest.skip(f"this torch has no {dtype} of shape {shape}")
    count = int(np.prod(shape)) * kind.itemsize
    raw = torch.arange(1, count + 1, dtype=torch.uint8) % (2 if dtype == "bool" else 255)
    tensor = raw.view(kind).reshape(shape)
    want = reference.save({"x": tensor}, {"format": "pt"})
    assert st.save({"x": tensor}, {"format": "pt"}) == want
    st.save_file({"x": tensor}, tmp_path / "m", {"format": "pt"})
    assert (tmp_path / "m").read_bytes() == want
    loads = [st.load(want), st.load_file(tmp_path / "m"), st.load_file(tmp_path / "m", backend="pread"),
             reference.load_file(tmp_path / "m")]  # fmt: skip
    for got in loads:
        assert got["x"].dtype == kind
        assert got["x"].shape == tensor.shape
        assert got["x"].untyped_storage().nbytes() == count
        assert bytes(got["x"].untyped_storage()) == raw.numpy().tobytes()


def test_lazy_conjugates_and_negatives_are_saved_by_value(torch: Any, st: Any) -> None:
    x = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    assert x.conj().is_conj()
    got = st.load(st.save({"conj": x.conj(), "imag": torch.view_as_real(x)[:, 1].contiguous()}))
    assert torch.equal(got["conj"], x.conj().resolve_conj())
    assert got["imag"].tolist() == [2.0, -4.0]
    one = torch._neg_view(torch.ones(3))
    assert one.is_neg()
    assert st.load(st.save({"x": one}))["x"].tolist() == [-1.0] * 3
    kept: list[Any] = []
    assert st.load(serialize(st._flatten_as_ptr({"x": one}, kept)))["x"].tolist() == [-1.0] * 3


@pytest.mark.parametrize(
    "name", ["sparse", "strided", "meta", "shared", "view", "conj", "no_dict", "no_tensor", "type"]
)
def test_torch_tensors_that_are_refused(name: str, torch: Any, st: Any, reference: Any) -> None:
    """By classes that the reference's are, and with words that it has."""
    base = torch.zeros(4, 4)
    cases: dict[str, Any] = {
        "sparse": {"x": torch.zeros(2, 2).to_sparse(), "y": base},
        "strided": {"x": base.T},
        "meta": {"x": torch.zeros(2, device="meta")},
        "shared": {"x": base, "y": base},
        "view": {"x": base[:2], "y": base[1:], "z": torch.zeros(2)},
        "conj": {"x": (c := torch.zeros(2, dtype=torch.complex64)), "y": c.conj()},
        "no_dict": [base],
        "no_tensor": {"x": np.zeros(2)},
        "type": {1: base},
    }
    with pytest.raises(Exception) as theirs:
        reference.save(cases[name])
    with pytest.raises(type(theirs.value)) as ours:
        st.save(cases[name])
    words = " ".join(str(theirs.value).split())
    assert words.split("`")[0][:40] in " ".join(str(ours.value).split())


def test_a_complex128_tensor_is_refused_by_name(torch: Any, st: Any) -> None:
    with pytest.raises(SafetensorError, match=r'^Unknown dtype "complex128"'):
        st.save({"x": torch.zeros(2, dtype=torch.complex128)})


def test_parts_of_a_storage_that_do_not_overlap_are_saved(torch: Any, st: Any) -> None:
    base = torch.arange(10.0)
    got = st.load(st.save({"a": base[:5], "b": base[5:]}))
    assert torch.equal(got["b"], base[5:])
    assert st._find_shared_tensors({"a": base, "b": base[:2], "c": base[6:]}) == [{"a", "b", "c"}]


def test_a_model_keeps_one_name_per_tensor_and_notes_the_others(torch: Any, st: Any, tmp_path: Path) -> None:
    class Tied(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(3, 3)
            self.b = self.a

    model, other = Tied(), Tied()
    st.save_model(model, tmp_path / "m", {"format": "pt"})
    with safe_open(tmp_path / "m", "pt") as f:
        assert f.keys() == ["a.bias", "a.weight"]
        assert f.metadata() == {"b.bias": "a.bias", "b.weight": "a.weight", "format": "pt"}
    assert st.load_model(other, tmp_path / "m") == (set(), [])  # of these types, as callers of the reference know them
    assert torch.equal(other.b.weight, model.a.weight)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.bias", "0.weight"'):
        st.load_model(torch.nn.Sequential(torch.nn.Linear(3, 3)), tmp_path / "m")
    missing, unexpected = st.load_model(torch.nn.Sequential(torch.nn.Linear(3, 3)), tmp_path / "m", strict=False)
    assert (sorted(missing), sorted(unexpected)) == (["0.bias", "0.weight"], ["a.bias", "a.weight"])


def test_a_model_with_a_name_that_can_t_be_is_an_error_of_this_package(torch: Any, st: Any, tmp_path: Path) -> None:
    class Odd(torch.nn.Module):  # type: ignore[misc, name-defined]
        def state_dict(self) -> dict[str, Any]:
            return {"__metadata__": torch.zeros(2)}

    with pytest.raises(SafetensorError, match="__metadata__") as caught:
        st.save_model(Odd(), tmp_path / "m")
    assert "force_contiguous" not in str(caught.value)


def test_notes_that_are_no_mapping_are_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"^argument 'metadata': expected a mapping"):
        save({"x": BASE}, [("a", "b")])  # type: ignore[arg-type]


def test_private_helpers_of_older_releases_work(torch: Any, st: Any) -> None:
    x = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    assert st._tobytes(x, "x") == bytes(x.untyped_storage())
    assert serialize(st._flatten({"x": x})) == st.save({"x": x})
    assert st._TYPES["BF16"] is torch.bfloat16
    assert st._SIZE[torch.float64] == 8
    assert st._getdtype("F8_E4M3") is torch.float8_e4m3fn
    from tensorio.safetensors import deserialize

    assert torch.equal(st._view2torch(deserialize(st.save({"x": x})))["x"], x)


def test_saving_by_address_releases_the_gil(tmp_path: Path) -> None:
    """Two threads that write at once: each sees the other running between its own begin and end."""
    import threading
    import time

    array = np.zeros(24 << 20, np.uint8)
    specs = {"x": TensorSpec(dtype="uint8", shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes)}
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    seen = False
    try:
        time.sleep(0.01)
        for _ in range(50):  # where all cores are busy, the other thread may be late
            begin = time.monotonic()
            data = serialize(specs)
            end = time.monotonic()
            assert len(data) > array.nbytes
            seen = any(begin < t < end for t in ticks)
            if seen:
                break
    finally:
        stop.set()
        thread.join()
    assert sys.getswitchinterval() < 0.01
    assert seen
