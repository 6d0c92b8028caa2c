"""Rows of tables as torch tensors: values, storages, lifetime, types that take a way around."""

from __future__ import annotations

import gc
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tensorio import UnsupportedError, _dlpack, formats
from tensorio.dtypes import DTYPES, c_strides
from tensorio.formats._base import Opened, OpenOptions
from tensorio.storage.base import MemoryStorage
from tensorio.storage.opening import open_storage
from tensorio.tensors import Table
from tensorio.torch import _tensors

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def opened(path: Path) -> Opened:
    storage, _, name = open_storage(path, writable=True)
    return formats.of_storage(storage, None, name).open(storage, OpenOptions(writable=True))


def table(code: int, shape: tuple[int, ...], nbytes: int, offset: int = 0) -> Table:
    strides = c_strides(shape, DTYPES[code].itemsize)
    return Table(["x"], array("q", [code, 0, len(shape), 0, 0, offset, nbytes, 1, 0]), array("q", [*shape, *strides]))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    names = [name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)]
    tensors = {}
    for name in names:
        tensor = torch.arange(24, dtype=torch.uint8).view(torch.uint8)
        try:
            tensors[name] = tensor.view(getattr(torch, name)).reshape(3, -1).clone()
            save_file({name: tensors[name]}, path)
        except (RuntimeError, KeyError, TypeError, NotImplementedError):
            tensors.pop(name, None)
    tensors["none"], tensors["one"] = torch.empty(0, 3), torch.tensor(2.5)
    save_file(tensors, path)
    return path


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    facts = [(t.dtype, t.shape, t.stride(), bytes(t.contiguous().untyped_storage())) for t in (a, b)]
    return facts[0] == facts[1]


def test_tensors_are_those_of_the_reference(file: Path) -> None:
    ours, theirs = _tensors.tensors_of(opened(file)), load_file(file)
    assert len(ours) > 15
    assert {name: same(ours[name], theirs[name]) for name in theirs} == dict.fromkeys(ours, True)
    assert not any(tensor.requires_grad for tensor in ours.values())


def test_each_has_a_storage_of_its_own_bytes(file: Path) -> None:
    ours = _tensors.tensors_of(opened(file))
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in ours.values())
    assert len({t.untyped_storage()._cdata for t in ours.values()}) == len(ours)


def test_writes_stay_in_memory(file: Path) -> None:
    before = file.read_bytes()
    tensor = _tensors.tensors_of(opened(file))["float32"]
    tensor.fill_(7)
    assert tensor.unique().tolist() == [7]
    assert file.read_bytes() == before
    assert not (_tensors.tensors_of(opened(file))["float32"] == 7).any()


def test_a_tensor_outlives_what_it_came_from(file: Path) -> None:
    held = opened(file)
    tensor = _tensors.tensors_of(held)["int64"]
    want = load_file(file)["int64"]
    held.storages[0].close()
    del held
    gc.collect()
    assert torch.equal(tensor, want)


def test_read_only_storages_are_refused(file: Path) -> None:
    storage, _, name = open_storage(file)
    with pytest.raises(ValueError, match="writable"):
        _tensors.tensors_of(formats.of_storage(storage, None, name).open(storage, OpenOptions()))


@pytest.mark.parametrize("row", [d for d in DTYPES if _tensors.TYPES[d.code] is not None and not d.packed],
                         ids=lambda d: d.name)  # fmt: skip
@pytest.mark.parametrize("taken", [True, False], ids=["dlpack", "around"])
def test_every_type_by_both_ways(row: Any, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if taken and row.code not in _tensors.TAKEN:
        pytest.skip("DLPack has no such type")
    if not taken:
        monkeypatch.setattr(_tensors, "TAKEN", frozenset())
    data = bytearray(range(80)) if row.name != "bool" else bytearray(b"\0\1" * 40)
    storage = MemoryStorage(data, writable=True)
    tensor = _tensors.tensor_of(table(row.code, (2, 2), 4 * row.itemsize, 16), 0, storage.lease())
    assert tensor.dtype is getattr(torch, row.name)
    assert (tensor.shape, tensor.stride(), tensor.storage_offset()) == ((2, 2), (2, 1), 0)
    assert bytes(tensor.untyped_storage()) == bytes(data[16 : 16 + 4 * row.itemsize])


def test_types_without_a_counterpart_are_said() -> None:
    code = next(d.code for d in DTYPES if d.name == "float6_e2m3fn")
    storage = MemoryStorage(bytearray(3), writable=True)
    with pytest.raises(UnsupportedError, match="float6_e2m3fn"):
        _tensors.tensor_of(table(code, (4,), 3), 0, storage.lease())
    assert not _dlpack.has_dtype(code)


def test_the_cpu_gets_them_as_they_are(file: Path) -> None:
    tensors = _tensors.tensors_of(opened(file))
    assert _tensors.to_device(tensors, "cpu") is tensors
    assert _tensors.to_device({"x": tensors["float32"]}, "meta")["x"].is_meta
