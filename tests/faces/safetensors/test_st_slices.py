"""get_slice: NumPy's indexing on the whole tensor is what a part must equal, whatever is read for it."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorio.safetensors import SafetensorError, _gather, safe_open
from tensorio.safetensors._file import File
from tensorio.safetensors._gather import gathered
from tensorio.safetensors._index import checked
from tensorio.safetensors.numpy import save_file

DURING = "Error during slicing "
BACKENDS = ["mmap", "pread"]
SHAPES = [(), (7,), (10, 5), (3, 4, 6), (2, 3, 2, 5), (0, 3), (4, 0, 2), (1, 1)]


@pytest.fixture(scope="module")
def tensors() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    return {f"{shape}": rng.integers(-999, 999, shape).astype(np.int16) for shape in SHAPES}


@pytest.fixture(scope="module")
def path(tensors: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slices") / "m.safetensors"
    save_file(tensors, path)
    return path


def bounds(n: int) -> Any:
    return st.one_of(st.none(), st.integers(-n - 2, n))


@st.composite
def indexes(draw: Any, shape: tuple[int, ...]) -> Any:
    """An index that NumPy takes for this shape: no bound behind the end, no list as the whole."""
    items: list[Any] = []
    dim = 0
    while dim < len(shape) and draw(st.integers(0, 5)):
        n = shape[dim]
        kinds = ["slice", "slice", "array", "mask", "mask2", "list"] + (["int", "int", "np.int"] if n else [])
        kind = draw(st.sampled_from(kinds))
        if kind == "slice":
            step = draw(st.sampled_from([None, 1, 2, 3, -1, -2, 7]))
            items.append(slice(draw(bounds(n)), draw(bounds(n)), step))
        elif kind in ("int", "np.int"):
            number = draw(st.integers(-n, n - 1))
            items.append(np.int64(number) if kind == "np.int" else number)
        elif kind == "mask":
            items.append(np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), bool))
        elif kind == "mask2" and dim + 1 < len(shape):
            items.append(np.random.default_rng(draw(st.integers(0, 99))).random(shape[dim : dim + 2]) < 0.5)
            dim += 1
        else:
            several = draw(st.lists(st.integers(-n, n - 1), max_size=4)) if n else []
            items.append(several if kind == "list" else np.array(several, np.int64))
        dim += 1
    for extra in draw(st.lists(st.sampled_from([None, Ellipsis, True]), max_size=2, unique=True)):
        # Bounds are drawn for the first dimensions: an ellipsis before them must stand for none.
        first = len(items) if extra is Ellipsis and dim < len(shape) else 0
        items.insert(draw(st.integers(first, len(items))), extra)
    return items[0] if len(items) == 1 and not isinstance(items[0], list) else tuple(items)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_parts_are_what_numpy_takes_of_the_whole(
    data: st.DataObject, shape: tuple[int, ...], backend: str, path: Path, tensors: dict[str, Any]
) -> None:
    index = data.draw(indexes(shape))
    whole = tensors[str(shape)]
    try:
        want = np.asarray(whole[index])
    except IndexError:  # arrays that do not broadcast
        want = None
    with safe_open(path, "np", backend=backend) as f:
        part = f.get_slice(str(shape))
        if want is None:
            with pytest.raises(SafetensorError):
                part[index]
            return
        got = part[index]
    assert isinstance(got, np.ndarray)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert got.tolist() == want.tolist()
    assert got.flags.writeable
    assert got.flags.c_contiguous


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_dtype_of_numpy_is_sliced(backend: str, tmp_path: Path) -> None:
    import ml_dtypes

    kinds = [np.bool_, np.uint8, np.int16, np.uint32, np.int64, np.float16, np.float64, np.complex64,
             ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu]  # fmt: skip
    whole = {np.dtype(k).name: np.arange(24).reshape(4, 6).astype(k) for k in kinds}
    save_file(whole, tmp_path / "m")
    with safe_open(tmp_path / "m", "np", backend=backend) as f:
        for name, array in whole.items():
            got = f.get_slice(name)[::-2, [0, 3]]
            assert got.dtype == array.dtype
            assert got.tobytes() == array[::-2, [0, 3]].tobytes()


# ------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("index", "message"),
    [
        ((slice(2, None), -6), "Invalid index -6 for dimension 1 of size 5"),
        ([0, 1], "Non empty lists are not implemented"),
        (
            (slice(2, None), 20),
            f"{DURING}[2:, 20] with shape [10, 5]: index 20 out of bounds for tensor dimension #1 of size 5",
        ),
        (
            slice(None, 20),
            f"{DURING}[:20] with shape [10, 5]: index 19 out of bounds for tensor dimension #0 of size 10",
        ),
        (
            slice(11, None),
            f"{DURING}[11:] with shape [10, 5]: index 11 out of bounds for tensor dimension #0 of size 10",
        ),
        (
            (0, 0, 0),
            f"{DURING}[0, 0, 0] with shape [10, 5]: more slicing indexes than dimensions in tensor",
        ),
        ((..., ...), "Only one ellipsis (...) is allowed in slice index"),
        (slice(None, None, 0), "Slice step must be a positive integer, got 0"),
        (1.5, "Unsupported slice index at position 0: expected slice, int, or ellipsis"),
        ((0, "x"), "Unsupported slice index at position 1: expected slice, int, or ellipsis"),
    ],
)
def test_what_is_refused_is_said_in_the_words_of_the_reference(
    index: Any, message: str, backend: str, path: Path
) -> None:
    with safe_open(path, "np", backend=backend) as f, pytest.raises(SafetensorError) as caught:
        f.get_slice("(10, 5)")[index]
    assert str(caught.value) == message
    assert isinstance(caught.value, IndexError)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "index", [np.array([10]), np.array([-11]), np.zeros(9, bool), np.zeros((10, 4), bool), (np.zeros(3, int), [0, 1])]
)
def test_arrays_that_do_not_fit_are_index_errors(index: Any, backend: str, path: Path) -> None:
    with safe_open(path, "np", backend=backend) as f, pytest.raises(SafetensorError) as caught:
        f.get_slice("(10, 5)")[index]
    assert isinstance(caught.value, IndexError)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slice_iterates_over_its_first_dimension(backend: str, path: Path, tensors: dict[str, Any]) -> None:
    with safe_open(path, "np", backend=backend) as f:
        rows = list(f.get_slice("(10, 5)"))
    assert np.array_equal(rows, tensors["(10, 5)"])


# -------------------------------------------------------------------- what is read


class Counted:
    """Reads of an array in memory, which are written down."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.raw = array.tobytes()
        self.reads: list[tuple[int, int]] = []

    def __call__(self, offset: int, out: memoryview) -> None:
        assert out.nbytes
        assert 0 <= offset <= offset + out.nbytes <= len(self.raw)
        out[:] = self.raw[offset : offset + out.nbytes]
        self.reads.append((offset, out.nbytes))

    @property
    def nbytes(self) -> int:
        return sum(n for _, n in self.reads)


def taken(array: np.ndarray[Any, Any], index: Any) -> tuple[np.ndarray[Any, Any], Counted]:
    read = Counted(array)
    got = gathered(read, 0, array.shape, array.dtype, checked(index, array.shape))
    assert got.tobytes() == np.asarray(array[index]).tobytes()
    return got, read


BIG = np.arange(1 << 20, dtype=np.int32).reshape(64, 128, 128)  # 4 MiB; 64 KiB per first coordinate


@pytest.mark.parametrize("index", [5, slice(3, 9), (7, slice(2, 30)), (7, 9), (7, 9, slice(4, 100)), (1, 2, 3), ...])
def test_one_run_of_bytes_is_one_read_of_just_them(index: Any) -> None:
    got, read = taken(BIG, index)
    assert read.reads == [(read.reads[0][0], got.nbytes)]


@pytest.mark.parametrize(
    ("index", "most"),
    [
        ((slice(None), slice(0, 8)), 64 * 8 * 512),  # 4 KiB of every 64: gaps too wide to read over
        ((slice(None), 5), 64 * 512),
        ((slice(None, None, 16), slice(None), slice(0, 2)), 4 * (1 << 16)),  # rows of 512 bytes: read as a whole
        ((np.array([1, 60]),), 2 * (1 << 16)),
        ((np.array([60, 1]), slice(None), 3), 2 * (1 << 16)),
        ((slice(None), slice(None), 0), BIG.nbytes),
    ],
)
def test_gaps_are_read_over_only_if_they_are_small(index: Any, most: int) -> None:
    _, read = taken(BIG, index)
    assert read.nbytes <= most
    spans = sorted(read.reads)
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))  # nothing twice


def test_gaps_of_a_stepped_slice_are_bounded_whatever_the_step() -> None:
    array = np.arange(1 << 18, dtype=np.int64)  # 2 MiB
    for step in (2, 3, 100, 2047, 2049, 2050, 5000, 1 << 17):
        got, read = taken(array, slice(None, None, step))
        allowed = got.nbytes + (len(got) * _gather.GAP if step * 8 - 8 <= _gather.GAP else 0)
        assert read.nbytes <= min(allowed, array.nbytes)


def test_reads_with_gaps_take_a_bounded_amount_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gather, "WINDOW", 8192)
    for index in ((slice(None), slice(None), 0), slice(None, None, -3), (np.arange(0, 64, 2), slice(None, None, 2))):
        _, read = taken(BIG, index)
        assert max(n for _, n in read.reads) <= max(8192, BIG[0].nbytes)


def test_an_empty_selection_reads_nothing() -> None:
    for index in (slice(5, 5), slice(9, 2), np.array([], int), (slice(None), slice(0, 0)), np.zeros(64, bool)):
        got, read = taken(BIG, index)
        assert got.size == 0
        assert read.reads == []


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The ranges that open files are asked for."""
    found: list[tuple[int, int]] = []
    true_read = File.read

    def read(self: File, offset: int, out: memoryview) -> None:
        found.append((offset, out.nbytes))
        true_read(self, offset, out)

    monkeypatch.setattr(File, "read", read)
    return found


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_pread_reads_what_a_slice_needs_and_no_more(
    framework: str, tmp_path: Path, reads: list[tuple[int, int]]
) -> None:
    if framework == "pt":
        pytest.importorskip("torch")
    save_file({"w": BIG, "other": np.ones(1000)}, tmp_path / "m")
    with safe_open(tmp_path / "m", framework, backend="pread") as f:
        part = f.get_slice("w")
        assert part.get_shape() == [64, 128, 128]
        assert reads == []
        got = part[3:5]
    assert np.array_equal(np.asarray(got), BIG[3:5])
    assert sum(n for _, n in reads) == math.prod((2, 128, 128)) * 4


# --------------------------------------------------------------------------- torch


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "index", [2, (slice(None), 1), slice(1, 3), ..., (..., -1), slice(None, None, 2), (None, 1), slice(-3, None), ()]
)
def test_parts_of_torch_tensors_are_what_torch_takes_of_the_whole(
    index: Any, backend: str, path: Path, tensors: dict[str, Any]
) -> None:
    torch = pytest.importorskip("torch")
    want = torch.from_numpy(tensors["(10, 5)"].copy())[index]
    with safe_open(path, "pt", backend=backend) as f:
        got = f.get_slice("(10, 5)")[index]
    assert got.shape == want.shape
    assert torch.equal(got, want)


def test_parts_of_mapped_torch_tensors_follow_torch_in_all(path: Path) -> None:
    torch = pytest.importorskip("torch")
    with safe_open(path, "pt") as f:
        part = f.get_slice("(10, 5)")
        assert part[:20].shape == (10, 5)  # torch cuts bounds
        assert part[torch.tensor([True] * 3 + [False] * 7)].shape == (3, 5)
        view, whole = part[2:4], f.get_tensor("(10, 5)")
    whole[2] = 77
    assert view[0].tolist() == [77] * 5  # a view of the handle's mapping, as the reference gives


@pytest.mark.parametrize("backend", BACKENDS)
def test_torch_slices_bfloat16_and_packed_types(backend: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from tensorio.safetensors.torch import save_file as save_torch

    whole = {"b": torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)}
    if hasattr(torch, "float4_e2m1fn_x2"):
        whole["f4"] = torch.arange(24, dtype=torch.uint8).reshape(4, 6).view(torch.float4_e2m1fn_x2)
    save_torch(whole, tmp_path / "m")
    with safe_open(tmp_path / "m", "pt", backend=backend) as f:
        for name, tensor in whole.items():
            got = f.get_slice(name)[1:3]
            assert got.dtype == tensor.dtype
            assert torch.equal(got.view(torch.uint8), tensor[1:3].view(torch.uint8))
