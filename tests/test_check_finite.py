"""NaN and infinity: what is found in every type, and what saves, loads and refuses."""

from __future__ import annotations

import contextlib
import gc
import io
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tensorio
from tensorio import NonFinite
from tensorio.checkpoint import _finite
from tensorio.dtypes import DTYPES, numpy_dtype

torch = pytest.importorskip("torch")

FLOATS = ["float16", "float32", "float64", *(f"ml_dtypes:{d.name}" for d in DTYPES if d.numpy.startswith("ml_dtypes"))]
EVERY_BYTE = np.arange(256, dtype=np.uint8)


def counted(array: np.ndarray) -> tuple[int, int, int] | None:
    """First index, NaNs and infinities, as NumPy sees them."""
    with np.errstate(invalid="ignore"):
        bad = ~np.isfinite(array)
        if not bad.any():
            return None
        return int(np.flatnonzero(bad)[0]), int(np.isnan(array).sum()), int(np.isinf(array).sum())


def found(source: Any) -> dict[str, tuple[int, int, int]]:
    return {bad.name: (bad.first, bad.nan, bad.infinite) for bad in tensorio.check_finite(source)}


@pytest.mark.parametrize("name", [n.rpartition(":")[2] for n in FLOATS])
def test_every_value_of_a_type_is_told_as_numpy_tells_it(name: str) -> None:
    """All bit patterns of the 8- and 16-bit types, a sample of the wider ones."""
    dtype = numpy_dtype(name)
    if dtype.itemsize == 1:
        bits = EVERY_BYTE
    elif dtype.itemsize == 2:
        bits = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    else:
        exponents = np.arange(1 << 16, dtype=np.uint16)
        wide = np.zeros((1 << 16, dtype.itemsize // 2), np.uint16)
        wide[:, -1] = exponents
        wide[1::2, 0] = 1
        bits = wide.reshape(-1).view(np.uint8)
    values = bits.view(dtype)
    assert found({"w": values}).get("w") == counted(values)
    for start in range(0, 256, 37):
        assert found({"w": values[start:]}).get("w") == counted(values[start:])


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_parts_of_complex_numbers_count_singly(dtype: str) -> None:
    values = np.zeros(9, dtype)
    values[4] = complex(0, np.nan)
    values[7] = complex(np.inf, -np.inf)
    assert found([values]) == {"0": (4, 1, 2)}


def test_half_complex_numbers_are_looked_at() -> None:
    halves = np.zeros(6, np.float16)
    halves[3] = np.inf
    assert found({"c": halves.view(numpy_dtype("complex32"))}) == {"c": (1, 0, 1)}


def test_half_complex_numbers_of_the_foreign_byte_order_are_looked_at() -> None:
    values = np.zeros(3, numpy_dtype("complex32").newbyteorder())
    values["imag"][1] = np.nan
    assert found({"c": values}) == {"c": (1, 1, 0)}


def test_integers_and_booleans_are_passed_over() -> None:
    assert tensorio.check_finite({"i": np.full(100, -1, np.int64), "b": np.ones(100, bool)}) == []


@pytest.mark.parametrize("change", [
    lambda a: a[:, ::2], lambda a: a.T, lambda a: a[::-1], lambda a: a.astype(a.dtype.newbyteorder()),
    lambda a: np.broadcast_to(a, (3, *a.shape)), lambda a: a[5, 6], lambda a: a[:0],
], ids=["strided", "transposed", "backwards", "foreign", "broadcast", "scalar", "empty"])  # fmt: skip
def test_arrays_are_looked_at_however_they_lie(change: Any) -> None:
    values = np.zeros((50, 40), np.float32)
    values[5, 6] = np.nan
    values[20, 30] = np.inf
    array = np.asarray(change(values))
    assert found({"w": array}).get("w") == counted(array)


def test_a_large_strided_array_is_counted_over_its_pieces() -> None:
    values = np.zeros((3000, 400), np.float32)
    values[1, 2] = values[2999, 398] = np.nan
    assert found([values[:, ::2]]) == {"0": (1 * 200 + 1, 2, 0)}


def test_parts_of_a_long_tensor_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_finite, "PART", 4096)
    monkeypatch.setattr(_finite, "TASK", 8192)
    monkeypatch.setattr(_finite, "THREADS_FROM", 0)
    values = np.zeros(10_000, np.float32)
    values[[3000, 3001, 9999]] = np.nan, np.inf, -np.inf
    many = {f"t{i}": np.full(3, np.nan if i % 7 == 0 else 1.0) for i in range(50)}
    assert found({"long": values, **many}) == {
        "long": (3000, 1, 2),
        **{f"t{i}": (0, 3, 0) for i in range(0, 50, 7)},
    }


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_torch_tensors_of_all_sorts() -> None:
    nan = float("nan")
    sparse = torch.eye(4).mul(nan).to_sparse()
    tensors = {
        "plain": torch.tensor([1.0, nan]),
        "bf16": torch.tensor([1.0, 2.0, float("inf")], dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.tensor([nan, nan])),
        "strided": torch.tensor([[1.0, nan], [2.0, 3.0]]).T,
        "float8": torch.tensor([1.0, nan]).to(torch.float8_e4m3fn),
        "conj": torch.tensor([1 + 1j, complex(0, nan)]).conj(),
        "sparse": sparse,
        "csr": torch.tensor([[1.0, nan]]).to_sparse_csr(),
        "fine": torch.ones(5),
        "meta": torch.ones(3, device="meta"),
        "ints": torch.ones(3, dtype=torch.int32),
    }
    assert found(tensors) == {
        "plain": (1, 1, 0), "bf16": (2, 0, 1), "parameter": (0, 2, 0), "strided": (2, 1, 0), "float8": (1, 1, 0),
        "conj": (1, 1, 0), "sparse": (0, 16, 0), "csr": (1, 1, 0),
    }  # fmt: skip


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_files_and_checkpoints(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"m.{suffix}"
    tensorio.save({"a": np.ones(3, np.float32), "b": np.array([1, np.nan, np.inf]), "c": np.arange(3)}, path)
    want = [NonFinite("b", 1, 1, 1)]
    assert tensorio.check_finite(path) == want
    assert tensorio.check_finite(path.read_bytes()) == want
    assert tensorio.check_finite(io.BytesIO(path.read_bytes())) == want
    with tensorio.open(path) as checkpoint:
        assert tensorio.check_finite(checkpoint) == want


def test_a_save_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    tensorio.save({"w": np.ones(2)}, path)
    before = path.read_bytes()
    with pytest.raises(tensorio.NonFiniteError, match=r"'model\.w'.*1 NaN, 0 infinite, the first at index 1") as caught:
        tensorio.save({"model": {"w": np.array([0, np.nan])}}, path, check_finite=True)
    assert caught.value.found == (NonFinite("model.w", 1, 1, 0),)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    tensorio.save({"w": np.zeros(2)}, path, check_finite=True)
    assert isinstance(caught.value, ValueError)


def test_a_load_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    tensorio.save({"good": np.ones(2), "bad": np.array([np.inf])}, path)
    with pytest.raises(tensorio.NonFiniteError, match="'bad'") as caught:
        tensorio.load(path, check_finite=True)
    assert caught.value.path == str(path)
    assert tensorio.load(path, names=["good"], check_finite=True)["good"].sum() == 2


def test_the_message_names_a_few_and_counts_the_rest(tmp_path: Path) -> None:
    with pytest.raises(tensorio.NonFiniteError, match="and 7 more tensors") as caught:
        tensorio.save({f"{i}": np.array([np.nan]) for i in range(10)}, tmp_path / "m.pt", check_finite=True)
    assert len(str(caught.value)) <= 500
    assert len(caught.value.found) == 10


def test_bfloat16_without_ml_dtypes_being_asked_for_is_known() -> None:
    assert found([np.array([1, np.nan], ml_dtypes.bfloat16)]) == {"0": (1, 1, 0)}


@pytest.mark.parametrize("change", [
    lambda a: a, lambda a: a[:, ::2], lambda a: a.T, lambda a: a.astype(a.dtype.newbyteorder()), lambda a: a[5, 6],
    lambda a: a[:0],
], ids=["plain", "strided", "transposed", "foreign", "scalar", "empty"])  # fmt: skip
@pytest.mark.parametrize("dtype", [np.longdouble, ml_dtypes.float8_e3m4, ml_dtypes.float8_e4m3])
def test_types_that_no_file_has_are_looked_at(dtype: Any, change: Any) -> None:
    values = np.zeros((50, 40), dtype)
    values[5, 6] = np.nan
    values[20, 30] = np.inf
    values[21, 30] = -np.inf if dtype is np.longdouble else 1
    array = np.asarray(change(values))
    assert found({"w": array}).get("w") == counted(array)


def test_a_long_array_of_longdouble_is_counted_over_its_pieces() -> None:
    values = np.zeros((2000, 100), np.longdouble)
    values[0, 7] = values[1999, 99] = np.nan
    values[1000, 3] = -np.inf
    assert found([values]) == {"0": counted(values)}


def test_parts_of_complex_longdoubles_count_singly() -> None:
    values = np.zeros(9, np.clongdouble)
    values[4] = complex(0, np.nan)
    values[7] = complex(np.inf, -np.inf)
    assert found([values]) == {"0": (4, 1, 2)}


def test_records_are_looked_at_field_by_field() -> None:
    inner = np.dtype([("c", np.complex64), ("text", "S3")])
    records = np.zeros((4, 5), [("id", np.int32), ("x", ">f4"), ("many", np.float64, (2, 3)), ("inner", inner)])
    assert found([records]) == {}
    records["id"] = -1
    records["many"][2, 1, 1, 2] = np.nan
    assert found([records]) == {"0": (11, 1, 0)}
    records["x"][3, 3] = np.inf
    records["x"][1, 4] = np.nan
    records["inner"]["c"][0, 3] = complex(np.nan, -np.inf)
    fields = [records["x"], records["many"], records["inner"]["c"].copy().view(np.float32)]
    nan, infinite = (sum(int(tell(field).sum()) for field in fields) for tell in (np.isnan, np.isinf))
    assert found([records]) == {"0": (3, nan, infinite)} == {"0": (3, 3, 2)}
    assert found({"part": records[2:, ::2]}) == {}
    assert found({"none": records[:0], "one": records[0, 3]}) == {}  # a scalar record is no array
    assert found({"one": np.asarray(records[0, 3])}) == {"one": (0, 1, 1)}


def test_dates_texts_and_objects_are_passed_over() -> None:
    values = {
        "dates": np.array(["NaT"], "M8[s]"), "times": np.array(["NaT"], "m8[s]"), "text": np.array(["nan"]),
        "bytes": np.array([b"nan"]), "objects": np.array([float("nan")], object), "void": np.zeros(3, "V5"),
        "nothing": np.zeros(3, "V0"), "int4": np.zeros(3, ml_dtypes.int4), "no fields": np.zeros(3, []),
        "long text": np.array(["nan", "-inf" * 40], np.dtypes.StringDType()),
    }  # fmt: skip
    assert tensorio.check_finite(values) == []


def test_many_small_tensors_of_all_types_are_found_in_order() -> None:
    many: dict[str, np.ndarray] = {}
    for i in range(2000):
        dtype = numpy_dtype(FLOATS[i % len(FLOATS)].rpartition(":")[2])
        many[f"layer.{i}"] = np.ones(i % 70 + 1, dtype)
        if i % 13 == 0:
            many[f"layer.{i}"][-(i % 5) - 1 :][:1] = np.nan
    want = {name: c for name, array in many.items() if (c := counted(array)) is not None}
    assert len(want) > 100
    assert list(found(many).items()) == list(want.items())
    nested = {"model": [many, (many, 1, "text", None)]}
    assert list(found(nested)) == [f"model.{part}.{name}" for part in ("0", "1.0") for name in want]


def test_tensors_of_other_libraries_are_looked_at() -> None:
    class Foreign:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

    values = np.array([1, np.nan, np.inf, 0], np.float32)
    subclass = values.view(np.recarray)
    source = {"a": Foreign(values), "b": Foreign(values[:1]), "c": Foreign(values[::2]), "d": subclass}
    assert found(source) == {"a": (1, 1, 1), "c": (1, 0, 1), "d": (1, 1, 1)}


def test_a_torch_tensor_whose_storage_was_cut_is_refused() -> None:
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(40)
    with pytest.raises(tensorio.UnsupportedError, match="larger than its storage"):
        tensorio.check_finite({"fine": torch.ones(3), "cut": tensor})


class Wrapper(torch.Tensor):
    """Has no memory of its own, as DTensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)  # type: ignore[no-any-return]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = func(*[arg.inner if isinstance(arg, Wrapper) else arg for arg in args], **(kwargs or {}))
        return Wrapper(plain) if plain.dim() and plain.is_floating_point() else plain


def test_a_tensor_around_others_is_asked_what_it_has(tmp_path: Path) -> None:
    values = torch.ones(300)
    values[200], values[7:9] = float("nan"), float("inf")
    source = {"w": Wrapper(values), "fine": Wrapper(torch.ones(4, 5)), "none": Wrapper(torch.ones(0))}
    assert source["w"].data_ptr() == 0
    assert found(source) == {"w": (7, 1, 2)}
    with pytest.raises(tensorio.UnsupportedError, match=r"memory of its own.*'w'"):
        tensorio.save(source, tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())


def test_tensors_of_a_file_are_found_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tied, strided and lazily conjugated ones, too; no array is made of those in C order."""
    nan, path = float("nan"), tmp_path / "m.pt"
    plain = torch.ones(3, 4)
    plain[1, 2] = nan
    base = torch.arange(40.0).reshape(5, 8)
    base[2, 2] = float("inf")
    lazy = torch.tensor([1 + 1j, complex(nan, 0)])
    assert not lazy.conj().imag.isnan().any()
    torch.save(
        {
            "plain": plain, "tied": plain, "row": plain[1], "one": plain[1:2, 2:3], "none": plain[:0],
            "scalar": plain[1, 2], "transposed": plain.T, "column": base[:, 2], "conj": lazy.conj(),
            "imag": lazy.clone().conj().imag, "ints": base.int(), "deep": [{"x": base[2:, :]}],
            "expanded": torch.tensor([nan]).expand(3),
        },
        path,
    )  # fmt: skip
    want = {
        "plain": (6, 1, 0), "tied": (6, 1, 0), "row": (2, 1, 0), "one": (0, 1, 0), "scalar": (0, 1, 0),
        "transposed": (7, 1, 0), "column": (2, 0, 1), "conj": (1, 1, 0), "deep.0.x": (2, 0, 1), "expanded": (0, 3, 0),
    }  # fmt: skip
    loaded = torch.load(path, weights_only=True)
    assert {name: counted(loaded[name].resolve_conj().resolve_neg().numpy()) for name in loaded if name != "deep"} == {
        name: want.get(name) for name in loaded if name != "deep"
    }
    made: list[str] = []
    get = tensorio.Checkpoint.__getitem__
    monkeypatch.setattr(tensorio.Checkpoint, "__getitem__", lambda self, name: made.append(name) or get(self, name))
    assert found(path) == want
    assert sorted(made) == ["column", "conj", "expanded", "imag", "transposed"]


def test_several_files_and_packed_types(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    many = {f"t{i:02}": np.full(100, np.nan if i % 7 == 3 else 1, np.float32) for i in range(30)}
    tensorio.save(many, path, max_shard_size=2000)
    folder = tmp_path
    assert len(list(folder.glob("*.safetensors"))) > 3
    want = {name: (0, 100, 0) for i, name in enumerate(many) if i % 7 == 3}
    assert found(folder) == want
    header = (
        b'{"p":{"dtype":"F4","shape":[2,4],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'
    )
    header += b" " * (-len(header) % 8)
    raw = len(header).to_bytes(8, "little") + header + b"\xff" * 4 + np.array([np.nan], "<f4").tobytes()
    assert found(raw) == {"w": (0, 1, 0)}


def test_while_a_checkpoint_is_prefetched_it_learns_what_was_used(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensorio.save({f"t{i}": np.full(1 << 18, np.nan if i == 3 else 1, np.float32) for i in range(6)}, path)
    with tensorio.open(path) as checkpoint, checkpoint.prefetch() as ahead:
        assert found(checkpoint) == {"t3": (0, 1 << 18, 0)}
        ahead.wait()


def test_a_closed_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensorio.save({"w": np.ones(3)}, path)
    checkpoint = tensorio.open(path)
    checkpoint.close()
    with pytest.raises(ValueError, match="closed"):
        tensorio.check_finite(checkpoint)


def test_memory_stays_while_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever closes the checkpoint meanwhile."""
    file = io.BytesIO()
    tensorio.save({"w": np.array([1, np.nan])}, file, format="safetensors")
    data = bytearray(file.getvalue())
    search = _finite._searched

    def closed_meanwhile(*args: Any) -> Any:
        checkpoint.close()
        with pytest.raises(BufferError):
            data.clear()
        return search(*args)

    monkeypatch.setattr(_finite, "_searched", closed_meanwhile)
    checkpoint = tensorio.open(data)
    assert found(checkpoint) == {"w": (1, 1, 0)}
    data.clear()


def test_memory_stays_while_threads_look_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a second Ctrl-C."""
    threads: list[Any] = []

    def interrupted(work: Any, *_: Any) -> None:
        threads.append(work)
        raise KeyboardInterrupt

    monkeypatch.setattr(_finite, "THREADS_FROM", 0)
    monkeypatch.setattr(_finite, "in_threads", interrupted)
    values, file = np.ones(1000), io.BytesIO()
    tensorio.save({"w": values}, file, format="safetensors")
    data = bytearray(file.getvalue())
    for source in ([values], data):
        with contextlib.suppress(KeyboardInterrupt):
            tensorio.check_finite(source)
    gone = weakref.ref(values)
    del values, source
    gc.collect()
    assert gone() is not None
    with pytest.raises(BufferError):
        data.clear()
    threads.clear()
    gc.collect()
    assert gone() is None
    data.clear()


def test_an_error_names_the_tensor_and_the_file(tmp_path: Path) -> None:
    """A shape that NumPy can't count, though nothing of it is stored."""
    header = b'{"w":{"dtype":"F32","shape":[0,%d,%d],"data_offsets":[0,0]}}' % (1 << 40, 1 << 40)
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(tensorio.LimitError) as caught:
        tensorio.check_finite(path)
    assert caught.value.record == "w"
    assert caught.value.path == str(path)
