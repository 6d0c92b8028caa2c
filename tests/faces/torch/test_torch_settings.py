"""`torch.utils.serialization.config`: what the user set there holds for `tensorio.torch`, too."""

from __future__ import annotations

import io
import pickle
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.serialization import config

from alike import quietly
from tensorio import _served
from tensorio.torch import _settings, load, save

torch_load, torch_save = torch.serialization.load, torch.serialization.save
VALUES = torch.arange(2000.0)


@pytest.fixture
def mapped() -> Iterator[None]:
    config.load.mmap = True
    try:
        yield
    finally:
        config.load.mmap = False


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch_save({"w": VALUES, "s": quietly(VALUES.storage)}, tmp_path / "m.pt")
    return tmp_path / "m.pt"


def first_written(make: Any, file: Path) -> float:
    """What a write to a loaded tensor leaves in the file."""
    make(file)["w"][0] = 7
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ours says that elements changed
        return float(torch_load(file, mmap=False)["w"][0])


@pytest.mark.usefixtures("mapped")
@pytest.mark.parametrize("make", [torch_load, load], ids=["theirs", "ours"])
def test_mappings_by_default(make: Any, file: Path) -> None:
    assert first_written(make, file) == 0
    with torch.serialization.set_default_mmap_options(torch.serialization.MAP_SHARED):
        assert first_written(make, file) == 7
    assert torch.equal(make(file, mmap=False)["w"][1:], VALUES[1:])
    with pytest.raises(ValueError, match="file path"):
        make(io.BytesIO(file.read_bytes()))
    assert torch.equal(make(io.BytesIO(file.read_bytes()), mmap=False)["w"][1:], VALUES[1:])


@pytest.mark.usefixtures("mapped")
@pytest.mark.parametrize("zip", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("make", [torch_load, load], ids=["theirs", "ours"])
def test_what_torch_makes_of_bytes_in_memory_is_not_mapped(make: Any, zip: bool, file: Path) -> None:
    torch_save([torch.eye(3).to_sparse()], file, _use_new_zipfile_serialization=zip)
    for source in (file, io.BytesIO(file.read_bytes())):
        assert torch.equal(make(source, mmap=False)[0].to_dense(), torch.eye(3))
    torch_save([torch.nn.ReLU()], file, _use_new_zipfile_serialization=zip)
    with pytest.raises(pickle.UnpicklingError, match="ReLU"):
        make(io.BytesIO(file.read_bytes()), mmap=False)


def test_no_mapping_by_default_is_shared(file: Path) -> None:
    with torch.serialization.set_default_mmap_options(torch.serialization.MAP_SHARED):
        assert first_written(load, file) == first_written(torch_load, file) == 0


@pytest.mark.parametrize("checked", [False, True])
def test_offsets_that_are_computed(checked: bool, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1" if checked else "0")
    config.load.calculate_storage_offsets = True
    try:
        for found in (load(file), load(file, mmap=True), load(file, mmap=False)):
            assert torch.equal(found["w"], VALUES)
            assert found["s"].data_ptr() == found["w"].data_ptr()
    finally:
        config.load.calculate_storage_offsets = False


def test_a_release_without_settings(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.serialization, "get_crc32_options")
    monkeypatch.delattr(torch.utils, "serialization")
    monkeypatch.setitem(sys.modules, "torch.utils.serialization", None)
    assert _settings.setting("save", "storage_alignment", 64) == 64
    served = _served.calls.get("torch.save", [0, 0])[0]
    save({"w": VALUES}, tmp_path / "n.pt")
    assert _served.calls["torch.save"][0] == served + 1
    monkeypatch.undo()  # torch's own needs them
    assert torch.equal(load(tmp_path / "n.pt")["w"], VALUES)
