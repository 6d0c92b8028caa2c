"""The drop-in face: every act of a user of safetensors, on ours and on theirs, by the same calls."""

from __future__ import annotations

import importlib
import io
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio
from inputs import Checkpoints, size_of, touch
from race import Entry, Race

OURS, THEIRS = "tensorio.safetensors", "safetensors"

frameworks = pytest.mark.parametrize("framework", ["np", "pt"])
backends = pytest.mark.parametrize("backend", ["mmap", "pread"])

Act = Callable[[Any, Any], Any]


def both(framework: str, act: Act, goal: float | None = None) -> tuple[Entry, list[Entry]]:
    """The same act with both packages: ``act(package, its module for the framework)``."""
    if framework == "pt":
        pytest.importorskip("torch")
    name = {"np": "numpy", "pt": "torch"}[framework]
    ours = importlib.import_module(OURS), importlib.import_module(f"{OURS}.{name}")
    entries = [Entry(OURS, lambda: act(*ours))]
    pytest.importorskip(THEIRS)
    theirs = importlib.import_module(THEIRS), importlib.import_module(f"{THEIRS}.{name}")
    entries.append(Entry(THEIRS, lambda: act(*theirs), goal))
    return entries[0], entries[1:]


def floor(framework: str, checkpoints: Checkpoints, path: Path) -> Entry:
    """As many bare arrays or tensors over a mapping, from tuples that are known."""
    infos = tensorio.open(path).infos
    with path.open("rb") as f:
        mapping = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
    known = [(a.shape, a.dtype, infos[name].chunks[0].extent.offset) for name, a in checkpoints.arrays.items()]
    if framework == "np":
        return Entry(
            "floor: [np.ndarray(...) for ...]", lambda: [np.ndarray(*k[:2], mapping, k[2]) for k in known], 2, check=len
        )
    import torch

    arrays = [np.ndarray(shape, dtype, mapping, offset) for shape, dtype, offset in known]
    return Entry("floor: [torch.from_numpy(a) for ...]", lambda: [torch.from_numpy(a) for a in arrays], 2, check=len)


def test_names(race: Race, many: Checkpoints) -> None:
    path = many.safetensors
    race(
        f"safe_open, keys() of {len(many.arrays):,}",
        *both("np", lambda package, _: package.safe_open(path, "np").keys()),
        check=lambda names: _same(names, sorted(many.arrays)),
    )


@frameworks
@backends
def test_load_file(race: Race, many: Checkpoints, framework: str, backend: str) -> None:
    path = many.safetensors
    goal = {"np": 1 / 6, "pt": 1 / 12}[framework] if backend == "mmap" else 1
    ours, others = both(framework, lambda _, module: module.load_file(path, backend=backend), goal)
    if backend == "mmap":
        others.append(floor(framework, many, path))
    race(f"load_file of {len(many.arrays):,}, {framework}, {backend}", ours, others, check=many.check)


@frameworks
@backends
def test_get_tensor(race: Race, many: Checkpoints, framework: str, backend: str) -> None:
    path = many.safetensors

    def act(package: Any, _: Any) -> Mapping[str, Any]:
        with package.safe_open(path, framework, backend=backend) as f:
            return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118

    race(
        f"safe_open, get_tensor of {len(many.arrays):,}, {framework}, {backend}",
        *both(framework, act),
        check=many.check,
        rounds=8,
    )


@frameworks
def test_load_bytes(race: Race, many: Checkpoints, framework: str) -> None:
    data = many.safetensors.read_bytes()
    race(
        f"load(bytes) of {len(many.arrays):,}, {framework}",
        *both(framework, lambda _, module: module.load(data)),
        check=many.check,
    )


@frameworks
@backends
def test_get_slice(race: Race, many: Checkpoints, framework: str, backend: str) -> None:
    path = many.safetensors

    def act(package: Any, _: Any) -> Mapping[str, Any]:
        with package.safe_open(path, framework, backend=backend) as f:
            return {name: f.get_slice(name)[1:3] for name in f.keys()}  # noqa: SIM118

    race(
        f"get_slice(...)[1:3] of {len(many.arrays):,}, {framework}, {backend}",
        *both(framework, act),
        check=lambda parts: _check_parts(parts, many, slice(1, 3)),
        rounds=8,
    )


def test_shapes(race: Race, many: Checkpoints) -> None:
    path = many.safetensors

    def act(package: Any, _: Any) -> list[Any]:
        f = package.safe_open(path, "np")
        return [(part.get_shape(), part.get_dtype()) for part in map(f.get_slice, f.offset_keys())]

    race(
        f"get_shape(), get_dtype() of {len(many.arrays):,}",
        *both("np", act),
        check=lambda found: _same(found[0][0], list(next(iter(many.arrays.values())).shape)),
        rounds=8,
    )


CUTS: dict[str, Any] = {
    "[:64]": slice(0, 64),
    "[:, :64]": (slice(None), slice(0, 64)),
    "[::2, ::2]": (slice(None, None, 2), slice(None, None, 2)),
    "[:, 5]": (slice(None), 5),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("where", ["np, mmap", "np, pread", "pt, pread"])
def test_cuts_of_large_tensors(race: Race, big: Checkpoints, where: str, cut: str) -> None:
    path, index = big.safetensors, CUTS[cut]
    framework, backend = where.split(", ")
    names = list(big.arrays)[:4]

    def act(package: Any, _: Any) -> Mapping[str, Any]:
        with package.safe_open(path, framework, backend=backend) as f:
            return {name: np.asarray(f.get_slice(name)[index]) for name in names}

    race(
        f"get_slice{cut} of 4 large, {where}",
        *both(framework, act, 1),
        check=lambda parts: _check_parts(parts, big, index),
        rounds=5,
    )


@frameworks
@backends
def test_load_big(race: Race, big: Checkpoints, framework: str, backend: str) -> None:
    """To the last page, so that nobody wins by being lazy."""
    path = big.safetensors

    def act(_: Any, module: Any) -> int:
        return touch(module.load_file(path, backend=backend))

    race(
        f"load_file of {size_of(big.nbytes)}, every page touched, {framework}, {backend}",
        *both(framework, act, 1),
        rounds=5,
        nbytes=big.nbytes,
    )


@frameworks
@pytest.mark.parametrize("to", ["file", "bytes"])
def test_save_many(race: Race, many: Checkpoints, target: Path, framework: str, to: str) -> None:
    obj = many.arrays if framework == "np" else many.tensors
    path = target.with_suffix(".safetensors")

    def act(_: Any, module: Any) -> Any:
        if to == "bytes":
            return module.save(obj)
        module.save_file(obj, path)
        return path

    race(
        f"save {len(many.arrays):,} to {to}, {framework}",
        *both(framework, act),
        check=lambda made: many.check(tensorio.load(made)),
        before=lambda: path.unlink(missing_ok=True),
        rounds=8,
    )


def test_save_big_to_bytes(race: Race, big: Checkpoints) -> None:
    race(
        f"save {size_of(big.nbytes)} to bytes, np",
        *both("np", lambda _, module: module.save(big.arrays), 1),
        check=lambda made: big.check(tensorio.load(io.BytesIO(made))),
        rounds=4,
        nbytes=big.nbytes,
    )


def _check_parts(parts: Mapping[str, Any], of: Checkpoints, index: Any) -> None:
    for name, part in parts.items():
        assert np.array_equal(np.asarray(part), of.arrays[name][index]), name


def _same(got: Any, want: Any) -> None:
    assert got == want
