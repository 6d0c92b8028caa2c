"""Table rows as DLPack capsules, taken by NumPy and torch."""

from __future__ import annotations

import gc
import threading
import weakref
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio
from tensorio import _dlpack
from tensorio._arrays import Lease
from tensorio.dtypes import BY_NAME, DTYPES, c_strides, numpy_dtype

torch = pytest.importorskip("torch", reason="torch is what takes the capsules")
from_dlpack = torch.utils.dlpack.from_dlpack


def code(name: str) -> int:
    return BY_NAME[name].code


def taken(data: bytearray, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> Any:
    lease = Lease(data, True)
    return from_dlpack(_dlpack.capsule(lease, code(dtype), shape, strides, offset, len(data) - offset))


@pytest.mark.parametrize("name", [d.name for d in DTYPES if _dlpack.has_dtype(d.code) and not d.packed])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_torch_sees_the_bytes_in_their_type(name: str) -> None:
    size = BY_NAME[name].itemsize
    data = bytearray(range(1, 1 + 6 * size)) if name != "bool" else bytearray([0, 1, 1, 0, 1, 0])
    tensor = taken(data, name, (2, 3), c_strides((2, 3), size))
    assert tensor.dtype is getattr(torch, name)
    assert tensor.shape == (2, 3)
    assert tensor.stride() == (3, 1)
    assert tensor.untyped_storage().nbytes() == len(data)
    assert bytes(tensor.untyped_storage()) == bytes(data)


def test_types_that_dlpack_lacks_are_said() -> None:
    assert not _dlpack.has_dtype(code("bits8"))
    with pytest.raises(tensorio.UnsupportedError, match="bits8"):
        _dlpack.capsule(Lease(bytearray(4), True), code("bits8"), (4,), (1,), 0, 4)


def test_4_bit_numbers_come_as_bytes_of_two() -> None:
    tensor = taken(bytearray(range(6)), "float4_e2m1fn", (3, 4), (0, 0))
    assert tensor.dtype is torch.float4_e2m1fn_x2
    assert tensor.shape == (3, 2)
    assert tensor.stride() == (2, 1)
    with pytest.raises(tensorio.UnsupportedError, match="odd"):
        taken(bytearray(8), "float4_e2m1fn", (4, 3), (0, 0))
    with pytest.raises(tensorio.UnsupportedError, match="odd"):
        taken(bytearray(1), "float4_e2m1fn", (), ())


def test_strides_and_offset() -> None:
    data = bytearray(np.arange(20, dtype="<i4").tobytes())
    tensor = taken(data, "int32", (2, 3), (4, 16), 8)
    assert tensor.tolist() == [[2, 6, 10], [3, 7, 11]]
    tensor[0, 0] = -1
    assert np.frombuffer(data, "<i4")[2] == -1  # it is the same memory


def test_scalars_and_empty_tensors() -> None:
    assert taken(bytearray(np.float64(2.5).tobytes()), "float64", (), ()).item() == 2.5
    empty = taken(bytearray(4), "float32", (0, 3), (12, 4), 4)
    assert empty.shape == (0, 3)
    assert empty.untyped_storage().nbytes() == 0


def test_an_extent_outside_its_storage_is_refused() -> None:
    lease = Lease(bytearray(16), True)
    for offset, nbytes in ((-1, 4), (0, -4), (8, 9), (17, 0), (1 << 62, 1 << 62)):
        with pytest.raises(tensorio.HeaderError, match="outside its storage"):
            _dlpack.capsule(lease, code("float32"), (1,), (4,), offset, nbytes)
    with pytest.raises(ValueError, match="dtype code"):
        _dlpack.capsule(lease, 63, (1,), (4,), 0, 4)
    with pytest.raises(ValueError, match="65 dimensions"):
        _dlpack.capsule(lease, code("uint8"), (1,) * 65, (1,) * 65, 0, 1)


class Held(bytearray):
    """A buffer that can be watched."""


def test_memory_lives_as_long_as_the_last_tensor() -> None:
    data = Held(16)
    watch = weakref.ref(data)
    lease = Lease(data, True)
    first = from_dlpack(_dlpack.capsule(lease, code("uint8"), (8,), (1,), 0, 8))
    second = from_dlpack(_dlpack.capsule(lease, code("uint8"), (8,), (1,), 8, 8))
    del data, lease
    gc.collect()
    assert watch() is not None
    view = second[2:]
    del first, second
    gc.collect()
    assert watch() is not None
    thread = threading.Thread(target=lambda held: held.clear(), args=([view],))
    del view
    thread.start()
    thread.join()
    del thread
    gc.collect()
    assert watch() is None


def test_a_capsule_that_nobody_takes_lets_go() -> None:
    data = Held(4)
    watch = weakref.ref(data)
    capsule = _dlpack.capsule(Lease(data, True), code("uint8"), (4,), (1,), 0, 4)
    del data
    assert watch() is not None
    del capsule
    assert watch() is None


def test_a_consumer_that_fails_leaks_nothing() -> None:
    data = Held(4)
    watch = weakref.ref(data)

    def refuse(capsule: object) -> object:
        raise RuntimeError("no")

    dims = array("q", [4, 1])
    rows = array("q", [code("uint8"), 0, 1, 0, 0, 0, 4, 1, 0])
    with pytest.raises(RuntimeError, match="no"):
        _dlpack.tensors(rows, dims, [Lease(data, True)], refuse)
    del data
    gc.collect()
    assert watch() is None


def test_all_rows_of_a_file_as_tensors(tmp_path: Path) -> None:
    want = {
        f"w{i}": np.full((i % 3, 2), i, numpy_dtype(name)) for i, name in enumerate(("float32", "bfloat16", "int8"))
    }
    tensorio.save(want, tmp_path / "m.safetensors")
    with tensorio.open(tmp_path / "m.safetensors", writable=True) as checkpoint:
        table = checkpoint._table
        lease = checkpoint._storage(0).lease()
        made = dict(zip(table.names, _dlpack.tensors(table.rows, table.dims, [lease], from_dlpack), strict=True))
        one = from_dlpack(_dlpack.tensor_row(table.rows, table.dims, table.row_of("w2"), lease))
        with pytest.raises(IndexError):
            _dlpack.tensor_row(table.rows, table.dims, 3, lease)
    assert made.keys() == want.keys()
    for name, tensor in made.items():
        assert tensor.view(torch.uint8).numpy().tobytes() == want[name].tobytes()
        assert tuple(tensor.shape) == want[name].shape
    assert torch.equal(one, made["w2"])
    assert one.untyped_storage().nbytes() == made["w2"].nbytes


def test_a_consumer_that_fails_leaves_nothing_and_frees_nothing_twice() -> None:
    data = bytearray(64)
    for _ in range(100):
        lease = Lease(data, True)
        with pytest.raises(RuntimeError, match="overflow"):
            from_dlpack(_dlpack.capsule(lease, code("float32"), (1 << 62, 1 << 62), (0, 0), 0, 4))
        with pytest.raises(ZeroDivisionError):
            _dlpack.tensors(array("q", [code("uint8"), 0, 1, 0, 0, 0, 64, 1, 0]), array("q", [64, 1]), [lease],
                            lambda capsule: 1 // 0)  # fmt: skip
        del lease
    gc.collect()
    data.append(0)  # which no buffer is open over any more


def test_tensors_without_bytes_have_no_address() -> None:
    tensor = taken(bytearray(8), "float32", (0, 3), (12, 4), 8)
    assert (tensor.shape, tensor.untyped_storage().nbytes()) == ((0, 3), 0)
    assert tensor.untyped_storage().data_ptr() == 0
