"""A rank's slices straight from a file that is not cut: views, and only of the rank's bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tensorio
from tensorio.errors import TensorMismatchError, TensorNotFoundError, UnsupportedError
from tensorio.tensors import TensorInfo

Array = np.ndarray[Any, Any]
RULES = {
    "rows": 0,
    "columns": 1,
    "fused": "0 sections=2,1,1",
    "padded": "0 pad_to=1",
    "all": "replicate",
    "first": "rank0",
    "none": "skip",
}


def in_fresh_process(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", code, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


@pytest.fixture
def tensors() -> dict[str, Array]:
    rng = np.random.default_rng(1)
    return {
        "rows": rng.standard_normal((8, 6)).astype(ml_dtypes.bfloat16),
        "columns": rng.standard_normal((6, 8)).astype("f4"),
        "fused": rng.standard_normal((8, 3)).astype("f4"),
        "padded": rng.standard_normal((5, 3)).astype("f4"),
        "all": np.arange(4.0),
        "first": np.arange(3, dtype="i2"),
        "none": np.arange(2),
    }


@pytest.fixture
def path(tensors: dict[str, Array], tmp_path: Path) -> Path:
    tensorio.save(tensors, tmp_path / "x.safetensors", metadata={"a": "b"})
    return tmp_path / "x.safetensors"


def test_slices_are_views_of_the_mapping_wherever_they_can_be(path: Path, tensors: dict[str, Array]) -> None:
    with tensorio.open(path) as checkpoint, tensorio.ranked(checkpoint, 1, tp=2, rules=RULES) as view:
        for name, part in (
            ("rows", tensors["rows"][4:]),
            ("columns", tensors["columns"][:, 4:]),
            ("all", tensors["all"]),
        ):
            assert np.shares_memory(view[name], checkpoint[name]), name
            np.testing.assert_array_equal(view[name], part)
            assert not view[name].flags.writeable
        q, k, v = np.split(tensors["fused"], [4, 6])
        np.testing.assert_array_equal(view["fused"], np.concatenate([q[2:], k[1:], v[1:]]))
        np.testing.assert_array_equal(view["padded"], np.concatenate([tensors["padded"][3:], np.zeros((1, 3))]))
        assert set(view) == set(tensors) - {"first", "none"}
        assert len(view) == 5
        assert "first" not in view
        assert repr(view).startswith("<rank 1 of 2 of <Checkpoint ")


def test_infos_say_where_the_pieces_lie(path: Path, tensors: dict[str, Array]) -> None:
    data = path.read_bytes()
    for rank in range(2):
        with tensorio.ranked(path, rank, tp=2, rules=RULES) as view:
            assert view.metadata == {"a": "b"}
            assert view.nbytes == sum(array.nbytes for array in view.values())
            for name, info in view.infos.items():
                assert isinstance(info, TensorInfo)
                assert (info.shape, info.dtype) == (view[name].shape, view[name].dtype.name)
                built = np.zeros(info.shape, view[name].dtype)  # what no chunk covers is padding
                for chunk in info.chunks:
                    assert chunk.extent.offset + chunk.extent.nbytes <= len(data)
                    raw = np.frombuffer(data, "u1", chunk.extent.nbytes, chunk.extent.offset)
                    piece = np.ndarray(chunk.shape, built.dtype, raw.tobytes(), 0, chunk.strides)
                    built[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.shape, strict=True))] = piece
                assert built.tobytes() == view[name].tobytes(), name


def test_names_the_rank_does_not_have(path: Path) -> None:
    with tensorio.ranked(path, 1, tp=2, rules=RULES) as view:
        with pytest.raises(TensorNotFoundError, match="rank 1 has nothing of 'first'"):
            view["first"]
        with pytest.raises(TensorNotFoundError, match="no tensor named 'row'; near names: 'rows'"):
            view["row"]
        assert view.get("none") is None


def test_read_into_fills_arrays_that_fit(path: Path, tensors: dict[str, Array]) -> None:
    with tensorio.ranked(path, 0, tp=2, rules=RULES) as view:
        out = {name: np.empty(array.shape, array.dtype) for name, array in view.items()}
        view.read_into(out)
        assert all(out[name].tobytes() == view[name].tobytes() for name in view)
        steps: list[tuple[int, int]] = []
        view.read_into(out, progress=lambda *step: steps.append(step), threads=2)
        assert steps[-1] == (view.nbytes, view.nbytes)
        some = {"rows": np.zeros((4, 6), ml_dtypes.bfloat16)}
        view.read_into(some)
        np.testing.assert_array_equal(some["rows"], tensors["rows"][:4])


def test_read_into_arrays_that_do_not_fit_writes_to_none(path: Path) -> None:
    with tensorio.ranked(path, 0, tp=2, rules=RULES) as view:
        fits = np.zeros((4, 6), ml_dtypes.bfloat16)
        for bad in (np.zeros((6, 8), "f4"), np.zeros((6, 4), "f8")):
            with pytest.raises(TensorMismatchError, match=r"expected \(6, 4\) float32"):
                view.read_into({"rows": fits, "columns": bad})
        with pytest.raises(TensorNotFoundError):
            view.read_into({"rows": fits, "none": fits})
        locked = np.zeros((6, 4), "f4")
        locked.flags.writeable = False
        with pytest.raises(TensorMismatchError, match="read-only"):
            view.read_into({"rows": fits, "columns": locked})
        assert not fits.any()


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("source", ["mapped", "memory", "torch"])
def test_read_into_is_what_the_views_show(
    source: str, order: str, path: Path, tensors: dict[str, Array], tmp_path: Path
) -> None:
    if source == "torch":
        tensorio.save(tensors, tmp_path / "x.pt")
    place = {"mapped": path, "memory": path.read_bytes(), "torch": tmp_path / "x.pt"}[source]
    for rank in range(4):
        rules = {"{rows,all}": 0, "columns": 1, "fused": "0 heads=4,2,2", "padded": "0 pad_to=1", "*": "rank0"}
        with tensorio.ranked(place, rank, tp=4, rules=rules) as view:
            out = {name: np.full(array.shape, 1, array.dtype, order) for name, array in view.items()}  # type: ignore[call-overload]
            view.read_into(out)
            for name, array in view.items():
                assert out[name].tobytes() == array.tobytes(), name


def test_arrays_outlive_the_view_and_the_checkpoint_may_be_the_callers(path: Path, tensors: dict[str, Array]) -> None:
    with tensorio.ranked(path, 0, tp=2, rules=RULES) as view:
        array = view["rows"]
    np.testing.assert_array_equal(array, tensors["rows"][:4])
    with pytest.raises(ValueError, match="closed"):
        view["rows"]
    with tensorio.open(path) as checkpoint:
        with tensorio.ranked(checkpoint, 0, tp=2, rules=RULES):
            pass
        assert checkpoint["rows"].shape == (8, 6)


def test_rules_that_fail_leave_no_descriptor_open(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    for rules, rank, error in (({"rows": 0}, 0, TensorMismatchError), (RULES, 2, ValueError), (RULES, -1, ValueError)):
        with pytest.raises(error):
            tensorio.ranked(path, rank, tp=2, rules=rules)
    assert len(os.listdir("/proc/self/fd") if before else []) == before


def test_prefetch_is_harmless(path: Path) -> None:
    with tensorio.ranked(path, 0, tp=2, rules=RULES) as view:
        view.prefetch()
        view.prefetch(["rows"])
        with pytest.raises(TensorNotFoundError):
            view.prefetch(["none"])


# ------------------------------------------------------------------- kinds of tensors


def test_views_of_a_torch_file_keep_strides_and_lazy_bits(tmp_path: Path) -> None:
    z = torch.randn(4, 6, dtype=torch.complex64)
    torch.save(
        {"t": torch.arange(24.0).reshape(6, 4).T, "conj": z.conj(), "neg": z.clone().conj().imag}, tmp_path / "x.pt"
    )
    for rank in range(2):
        with tensorio.ranked(tmp_path / "x.pt", rank, tp=2, rules={"**": 1}) as view:
            part = slice(3 * rank, 3 * rank + 3)
            np.testing.assert_array_equal(view["t"], np.arange(24.0).reshape(6, 4).T[:, part])
            np.testing.assert_array_equal(view["conj"], z.conj().resolve_conj().numpy()[:, part])
            np.testing.assert_array_equal(view["neg"], z.conj().imag.resolve_neg().numpy()[:, part])
            assert view["t"].strides == (4, 16)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3"])
def test_packed_tensors_are_cut_between_bytes(dtype: str, dim: int, tmp_path: Path) -> None:
    """Elements of 4 and 6 bits, written by hand: the oracle cuts them as digits of one long number."""
    bits = int(dtype[1])
    shape = (4, 2, 8)
    digits = np.random.default_rng(0).integers(0, 2, (*shape, bits), dtype="u1")
    payload = np.packbits(digits.reshape(-1), bitorder="little").tobytes()
    header = f'{{"x":{{"dtype":"{dtype}","shape":[4,2,8],"data_offsets":[0,{len(payload)}]}}}}'.encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + payload)
    for rank in range(2):
        with tensorio.ranked(path, rank, tp=2, rules={"x": dim}) as view:
            part = np.split(digits, 2, axis=dim)[rank]
            assert view.infos["x"].shape == part.shape[:-1]
            assert view["x"].tobytes() == np.packbits(part.reshape(-1), bitorder="little").tobytes()
            assert view["x"].shape == (*part.shape[:2], part.shape[2] * bits // 8)


def test_packed_tensor_is_not_cut_inside_a_byte(tmp_path: Path) -> None:
    header = b'{"x":{"dtype":"F4","shape":[2,6],"data_offsets":[0,6]}}'
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"123456")
    with (
        tensorio.ranked(path, 0, tp=2, rules={"x": 1}) as view,
        pytest.raises(UnsupportedError, match="4 bits share bytes"),
    ):
        view["x"]
    with pytest.raises(UnsupportedError, match="cut along another dimension"):
        tensorio.shard(path, tmp_path / "ranks", tp=2, rules={"x": 1})
    assert list(tmp_path.iterdir()) == [path]


def sparse() -> torch.Tensor:
    return torch.eye(4).to_sparse()


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [sparse, quantized])
def test_parts_of_sparse_and_quantized_tensors_are_not_cut(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"m": {"special": make(), "scales": torch.ones(4)}}, path)
    with pytest.raises(
        UnsupportedError, match=r"a part of a \w+Tensor can't be cut: 'm\.special' is no plain tensor"
    ) as caught:
        tensorio.ranked(path, 0, tp=2, rules={"m.special.*": 0, "m.scales": 0})
    assert caught.value.record is not None
    assert caught.value.record.startswith("m.special.")
    with tensorio.ranked(path, 1, tp=2, rules={"m.special.**": "skip", "m.scales": 0}) as view:
        assert list(view) == ["m.scales"]
        assert view["m.scales"].shape == (2,)


# ----------------------------------------------------------------- only the rank's bytes

MIB = 1 << 20

GUARDED = """
import ctypes, mmap, sys
import numpy as np
import tensorio

PAGE = mmap.PAGESIZE
rules = {"rows": 0, "columns": 1, "deep": "1 sections=1,1", "padded": "0 pad_to=1"}
libc = ctypes.CDLL(None, use_errno=True)
checkpoint = tensorio.open(sys.argv[1])
view = tensorio.ranked(checkpoint, 1, tp=4, rules=rules)
whole = checkpoint["columns"]
base = whole.ctypes.data - checkpoint.infos["columns"].chunks[0].extent.offset
size = checkpoint._opened.storages[0].nbytes
wanted = np.zeros(-(-size // PAGE), bool)
for name, info in view.infos.items():
    for chunk in info.chunks:
        rows = np.zeros(1, np.int64)
        for n, stride in zip(chunk.shape[:-1], chunk.strides[:-1]):
            rows = (rows[:, None] + np.arange(n) * stride).reshape(-1)
        run = chunk.shape[-1] * chunk.strides[-1]
        for start in np.unique(rows) + chunk.extent.offset:
            wanted[start // PAGE : (start + run - 1) // PAGE + 1] = True
for page in np.flatnonzero(~wanted):
    assert libc.mprotect(ctypes.c_void_p(base + int(page) * PAGE), PAGE, 0) == 0
out = {name: np.empty(info.shape, "f4") for name, info in view.infos.items()}
view.read_into(out)
print(int(wanted.sum()), len(wanted), *(float(array.sum()) for array in out.values()))
"""


@pytest.mark.plain_build
@pytest.mark.skipif(sys.platform != "linux", reason="takes away the permission to read pages, by mprotect(2)")
def test_no_page_is_touched_that_has_none_of_the_ranks_bytes(tmp_path: Path) -> None:
    """All other pages of the mapping are made unreadable: touching one would kill the process."""
    tensors = {
        "rows": np.full((512, 1024), 2, "f4"), "columns": np.ones((64, 16384), "f4"),
        "deep": np.ones((4, 256, 1024), "f4"), "padded": np.ones((1023, 256), "f4"),
    }  # fmt: skip
    path = tmp_path / "x.safetensors"
    tensorio.save(tensors, path)
    done = in_fresh_process(GUARDED, path)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    pages, of, *sums = map(float, done.stdout.split())
    assert pages < of * 0.3
    assert sorted(sums) == sorted([128 * 1024 * 2.0, 64 * 4096.0, 4 * 64 * 1024.0, 256 * 256.0])
