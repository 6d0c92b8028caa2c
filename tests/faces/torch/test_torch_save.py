"""`tensorio.torch.save` against `torch.save`: the same bytes, files that appear whole or not at all."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import stat
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorio.torch
from alike import differences, quietly
from tensorio import _served
from tensorio.errors import UnsupportedError
from tensorio.torch import _save, load, load_file, save, save_file

torch_load, torch_save = torch.serialization.load, torch.serialization.save
BASE = torch.arange(60, dtype=torch.float32)


def records(data: bytes) -> dict[str, bytes]:
    """A file's records, but for the id, which depends on the writer."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("serialization_id")}


def written(save: Any, obj: Any, **words: Any) -> bytes:
    out = io.BytesIO()
    quietly(save, obj, out, **words)
    return out.getvalue()


OBJECTS = {
    "state dict": lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).state_dict(),
    "module": lambda: torch.nn.Linear(3, 4),
    "optimizer": lambda: torch.optim.Adam(torch.nn.Linear(3, 4).parameters()).state_dict(),
    "arrays": lambda: {"a": np.arange(3), "s": np.float32(2), "t": BASE},
    "views": lambda: [BASE, BASE[3:], BASE.view(6, 10).t(), torch.nn.Parameter(BASE)],
    "special": lambda: [torch.eye(3).to_sparse(), quietly(torch.quantize_per_tensor, BASE, 0.5, 3, torch.qint8),
                        torch.empty(3, device="meta"), torch.tensor([1j]).conj(), BASE.untyped_storage().clone()],
    "plain": lambda: [1, 2.5, "x", b"y", None, {1}, slice(1, 2), torch.Size([1]), torch.float16,
                      torch.device("cuda:1")],
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECTS)
def test_bytes_are_those_of_torch(name: str) -> None:
    obj = OBJECTS[name]()
    served = _served.calls.get("torch.save", [0, 0])[0]
    ours, theirs = written(save, obj), written(torch_save, obj)
    assert records(ours) == records(theirs)
    assert len(ours) == len(theirs)
    assert _served.calls["torch.save"][0] == served + 1


OTHER_WAYS = [{"pickle_protocol": 4}, {"_use_new_zipfile_serialization": False}, {"_disable_byteorder_record": True}]


@pytest.mark.parametrize("words", OTHER_WAYS, ids=lambda words: next(iter(words)))
def test_other_ways_are_torchs(words: dict[str, Any], tmp_path: Path) -> None:
    passed = _served.passed_on.get("torch.save", 0)
    save({"a": BASE}, tmp_path / "m.pt", **words)
    (tmp_path / "theirs").mkdir()
    torch_save({"a": BASE}, tmp_path / "theirs" / "m.pt", **words)
    assert not differences(*(torch_load(tmp_path / name, weights_only=False) for name in ("m.pt", "theirs/m.pt")))
    assert _served.passed_on["torch.save"] == passed + 1
    assert sorted(os.listdir(tmp_path)) == ["m.pt", "theirs"]
    if "_use_new_zipfile_serialization" not in words:
        assert records((tmp_path / "m.pt").read_bytes()) == records((tmp_path / "theirs" / "m.pt").read_bytes())


def test_settings_of_torch() -> None:
    config = torch.utils.serialization.config.save
    before = config.storage_alignment
    try:
        config.storage_alignment = 4096
        assert records(written(save, BASE)) == records(written(torch_save, BASE))
    finally:
        config.storage_alignment = before
    torch.serialization.set_crc32_options(False)
    try:
        with pytest.raises(zipfile.BadZipFile):
            records(written(save, BASE))
    finally:
        torch.serialization.set_crc32_options(True)
    with torch.serialization.skip_data():
        skipped = written(save, BASE)
    assert torch.equal(torch_load(io.BytesIO(skipped)), torch.zeros(60))


class Unsavable:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    "bad", [lambda: 1, Unsavable(), [BASE, BASE.view(torch.int32)]], ids=["name", "error", "types"]
)
def test_a_failed_save_leaves_the_old_file(bad: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    save(BASE, path)
    before = path.read_bytes()
    with pytest.raises((pickle.PicklingError, ZeroDivisionError, RuntimeError, AttributeError)) as ours:
        save(bad, path)
    with pytest.raises(type(ours.value)) as theirs:
        torch_save(bad, io.BytesIO())
    assert str(ours.value) == str(theirs.value)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["m.pt"]


@pytest.mark.parametrize("words", [{}, {"_use_new_zipfile_serialization": False}], ids=["ours", "passed on"])
def test_saving_over_what_is_mapped(words: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    save(torch.ones(10_000), path)
    path.chmod(0o640)
    found = load(path)
    save([found, torch.zeros(5)], path, **words)
    assert found.sum() == 10_000
    assert load(path)[0].sum() == 10_000
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_objects_that_are_written_to(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "m.gz", "wb") as packed:
        save(BASE, packed)
    with gzip.open(tmp_path / "m.gz", "rb") as f:
        assert torch.equal(torch_load(f), BASE)
    with (tmp_path / "m").open("w+b") as f:
        f.write(b"head")
        save(BASE, f)
        f.seek(4)
        assert torch.equal(torch_load(f), BASE)
    with pytest.raises(AttributeError, match="'write'"):
        save(BASE, object())


def test_a_file_that_is_no_file() -> None:
    save(BASE, "/dev/null")


@pytest.mark.skipif(os.name != "posix", reason="needs modes")
def test_nobody_else_reaches_what_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []

    def watched(obj: Any, f: str, *words: Any) -> None:
        modes.append(os.stat(Path(f).parent).st_mode & 0o777)
        torch_save(obj, f, *words)

    monkeypatch.setattr(_save, "torch_save", watched)
    old = os.umask(0)
    try:
        save(BASE, tmp_path / "m.pt", pickle_protocol=4)
    finally:
        os.umask(old)
    assert modes == [0o700]
    assert (tmp_path / "m.pt").stat().st_mode & 0o777 == 0o666


def test_flat_files(tmp_path: Path) -> None:
    tensors = {"a.b": BASE, "c": torch.ones(2, 3, dtype=torch.bfloat16)}
    for name in ("m.safetensors", "m.pt"):
        save_file(tensors, tmp_path / name)
        found = load_file(tmp_path / name)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[key], tensors[key]) for key in tensors)
        assert all(t.device.type == "meta" for t in load_file(tmp_path / name, "meta").values())
    save_file(tensors, tmp_path / "m.safetensors", {"note": "x"})
    with tensorio.open(tmp_path / "m.safetensors") as checkpoint:
        assert checkpoint.metadata == {"note": "x"}
    with pytest.raises(ValueError, match="suffix"):
        save_file(tensors, tmp_path / "m.unknown")


def test_special_objects_as_flat_files(tmp_path: Path) -> None:
    obj = {"a": BASE, "s": torch.eye(3).to_sparse(), "l": torch.sparse_coo}
    for zip in (True, False):
        torch_save(obj, tmp_path / "m.pt", _use_new_zipfile_serialization=zip)
        found = load_file(tmp_path / "m.pt")
        assert list(found) == ["a", "s"]
        assert torch.equal(found["a"], BASE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without CUDA")
def test_a_device_by_number(tmp_path: Path) -> None:
    torch_save({"a": BASE}, tmp_path / "m.pt")
    with pytest.raises(RuntimeError, match="device"):
        load_file(tmp_path / "m.pt", 0)


def test_no_name_is_given_twice(tmp_path: Path) -> None:
    save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(2), "a.b#2": torch.ones(3)}, tmp_path / "m.pt")
    found = load_file(tmp_path / "m.pt")
    assert {name: len(tensor) for name, tensor in found.items()} == {"a.b": 1, "a.b#2": 2, "a.b#2#2": 3}
    with tensorio.open(tmp_path / "m.pt") as checkpoint:
        assert list(checkpoint.keys()) == list(found)


def test_flat_files_are_of_tensors(tmp_path: Path) -> None:
    for name in ("m.safetensors", "m.pt"):
        with pytest.raises(UnsupportedError, match="expected tensors only"):
            save_file({"a": BASE, "n": 3}, tmp_path / name)  # type: ignore[dict-item]
        assert not (tmp_path / name).exists()


def test_names_in_nested_objects(tmp_path: Path) -> None:
    obj = {"m": {"w": BASE, "l": [BASE[1:], {"p": torch.nn.Parameter(BASE)}]}, "m.w": torch.ones(1), "n": 3}
    save(obj, tmp_path / "m.pt")
    found = load_file(tmp_path / "m.pt")
    assert list(found) == ["m.w", "m.l.0", "m.l.1.p", "m.w#2"]
    assert list(found) == list(tensorio.open(tmp_path / "m.pt"))
    found["m.w"][1] = 100
    assert found["m.l.0"][0] == 100
    save(BASE, tmp_path / "m.pt")
    assert list(load_file(tmp_path / "m.pt")) == [""]


def test_scripts_by_name(tmp_path: Path) -> None:
    model = quietly(lambda: torch.jit.script(torch.nn.Linear(2, 3)))
    quietly(torch.jit.save, model, tmp_path / "m.pt")
    found = load_file(tmp_path / "m.pt")
    assert torch.equal(found["weight"], model.weight)
    assert found["weight"].requires_grad
