"""Open a file of many small tensors: what it costs is the header, and an object per tensor."""

from __future__ import annotations

import importlib
import mmap
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import peers
import tensorio
from inputs import Checkpoints
from race import Entry, Race

suffixes = pytest.mark.parametrize("suffix", [".safetensors", ".pt"])


def _floor(checkpoints: Checkpoints, path: Path) -> Entry:
    """Arrays over a mapping, from tuples that are known: no parsing, no names, no checks."""
    with path.open("rb") as f:
        mapping = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
    infos = tensorio.open(path).infos
    known = [(a.shape, a.dtype, infos[name].chunks[0].extent.offset) for name, a in checkpoints.arrays.items()]
    names = list(checkpoints.arrays)
    return Entry(
        "floor: [np.ndarray(...) for ...]",
        lambda: [np.ndarray(shape, dtype, mapping, offset) for shape, dtype, offset in known],
        at_most=2,
        check=lambda arrays: checkpoints.check(dict(zip(names, arrays, strict=True))),
    )


def test_every_array_of_a_safetensors_file(race: Race, many: Checkpoints) -> None:
    path = many.safetensors
    race(
        f"{len(many.arrays):,} tensors of a .safetensors as arrays",
        Entry("load", lambda: tensorio.load(path)),
        [
            _floor(many, path),
            Entry("safetensors.numpy", lambda: peers.safetensors_numpy(path), at_most=1 / 6, needs="safetensors"),
        ],
        check=many.check,
    )


def test_every_torch_tensor_of_a_safetensors_file(race: Race, many: Checkpoints) -> None:
    pytest.importorskip("torch")
    path = many.safetensors
    name, load = _torch_loader()
    race(
        f"{len(many.arrays):,} tensors of a .safetensors for torch",
        Entry(name, lambda: load(path)),
        [Entry("safetensors.torch", lambda: peers.safetensors_torch(path), at_most=1 / 12, needs="safetensors")],
        check=many.check,
    )


def test_every_array_of_a_torch_file(race: Race, many: Checkpoints) -> None:
    path = many.pt
    race(
        f"{len(many.arrays):,} tensors of a .pt as arrays",
        Entry("load", lambda: tensorio.load(path)),
        [
            _floor(many, path),
            Entry("torch.load", lambda: peers.torch_load(path), at_most=1 / 50, needs="torch"),
            Entry("torch.load(mmap=True)", lambda: peers.torch_load(path, True), at_most=1 / 50, needs="torch"),
        ],
        check=many.check,
        rounds=10,
    )


@suffixes
def test_names(race: Race, many: Checkpoints, suffix: str) -> None:
    """What is in the file, no array."""
    path = many.path(suffix)

    def check(names: Iterable[str]) -> None:
        assert sorted(names) == sorted(many.arrays)

    if suffix == ".pt":
        peer = Entry("torch.load(mmap=True)", lambda: list(peers.torch_load(path, True)), needs="torch")
    else:
        peer = Entry("safetensors.safe_open", lambda: peers.safetensors_names(path), needs="safetensors")
    race(
        f"{len(many.arrays):,} names of a {suffix}",
        Entry("open", lambda: _names(path)),
        [peer],
        check=check,
        rounds=8,
    )


@suffixes
def test_one_by_one(race: Race, many: Checkpoints, suffix: str) -> None:
    """Every array of a `Checkpoint`, asked for by its name."""
    path = many.path(suffix)
    if suffix == ".pt":
        peer = Entry("torch.load(mmap=True)", lambda: peers.torch_load(path, True), needs="torch")
    else:
        peer = Entry("safetensors.safe_open, NumPy", lambda: peers.safetensors_one_by_one(path), needs="safetensors")
    race(
        f"{len(many.arrays):,} tensors of a {suffix}, one by one",
        Entry("open, [name] each", lambda: _one_by_one(path)),
        [peer],
        check=many.check,
        rounds=8,
    )


def _names(path: Path) -> list[str]:
    with tensorio.open(path) as checkpoint:
        return list(checkpoint)


def _one_by_one(path: Path) -> dict[str, Any]:
    with tensorio.open(path) as checkpoint:
        return {name: checkpoint[name] for name in checkpoint}


def _torch_loader() -> tuple[str, Callable[[Path], dict[str, Any]]]:
    if find_spec("tensorio.torch") is not None:
        return "tensorio.torch.load_file", importlib.import_module("tensorio.torch").load_file
    return "load, torch.from_numpy", _from_numpy


def _from_numpy(path: Path) -> dict[str, Any]:
    from torch import from_numpy

    return {name: from_numpy(array) for name, array in tensorio.load(path, writable=True).items()}
