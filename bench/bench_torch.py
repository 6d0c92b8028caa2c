"""Files of many small torch tensors, by the faces of torch's own functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import peers
from inputs import Checkpoints
from race import Entry, Race

torch = pytest.importorskip("torch")

import tensorio.torch  # noqa: E402  # needs torch


def _floor(many: Checkpoints, at_most: float | None = 2) -> Entry:
    """As many bare tensors of these shapes: no file, no names, no checks."""
    shapes = [a.shape for a in many.arrays.values()]

    def check(tensors: list[Any]) -> None:
        assert [tuple(t.shape) for t in tensors] == shapes

    return Entry(
        "floor: [torch.empty(...) for ...]",
        lambda: [torch.empty(shape) for shape in shapes],
        at_most=at_most,
        check=check,
    )


def test_load_of_a_torch_file(race: Race, many: Checkpoints) -> None:
    path = many.pt
    race(
        f"{len(many.arrays):,} tensors of a .pt for torch",
        Entry("tensorio.torch.load", lambda: tensorio.torch.load(path)),
        [
            _floor(many),
            Entry("torch.load", lambda: peers.torch_load(path), at_most=1 / 50),
            Entry("torch.load(mmap=True)", lambda: peers.torch_load(path, True), at_most=1 / 50),
        ],
        check=many.check,
        rounds=8,
    )


def test_load_file_of_a_safetensors_file(race: Race, many: Checkpoints) -> None:
    path = many.safetensors
    race(
        f"{len(many.arrays):,} tensors of a .safetensors for torch, by load_file",
        Entry("tensorio.torch.load_file", lambda: tensorio.torch.load_file(path)),
        [
            _floor(many),
            Entry("safetensors.torch", lambda: peers.safetensors_torch(path), at_most=1 / 12, needs="safetensors"),
        ],
        check=many.check,
        rounds=8,
    )


def test_load_of_a_legacy_file(race: Race, many: Checkpoints, tmp_path: Path) -> None:
    path = tmp_path / "legacy.pt"
    torch.save(many.tensors, path, _use_new_zipfile_serialization=False)
    race(
        f"{len(many.arrays):,} tensors of a legacy file for torch",
        Entry("tensorio.torch.load", lambda: tensorio.torch.load(path)),
        [_floor(many, None), Entry("torch.load", lambda: peers.torch_load(path), at_most=1 / 12)],
        check=many.check,
        rounds=5,
    )


def test_save_of_torch_tensors(race: Race, many: Checkpoints, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.pt", tmp_path / "theirs.pt"
    race(
        f"save {len(many.arrays):,} torch tensors, as torch.save does",
        Entry(
            "tensorio.torch.save",
            lambda: tensorio.torch.save(many.tensors, ours),
            check=lambda _: many.check_file(ours),
        ),
        [
            Entry(
                "torch.save",
                lambda: peers.torch_save(many.tensors, theirs),
                at_most=1 / 4,
                check=lambda _: many.check_file(theirs),
            )
        ],
        rounds=5,
    )
