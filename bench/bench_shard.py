"""Cut a file for a tensor-parallel group: a copy of its bytes into several files; read one rank's part of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import peers
import tensorio
from inputs import Array, Checkpoints, size_of
from race import Entry, Race

TP = 4
ROW = 4096  # elements, of 4 bytes: as in a model of a hidden size of 8192 in 16 bits
TARGET = 1.2
RULES = {"columns.*": 1, "rows.*": 0}


@pytest.fixture(scope="module")
def model(big: Checkpoints, work: Path) -> Checkpoints:
    """A third of the bytes are cut along dimension 1, as in the layers of a llama."""
    kinds = [("columns", "rows", "rows")[i % 3] for i in range(len(big.arrays))]
    arrays = {
        f"{kind}.{i}": a.reshape(-1, ROW) for i, (kind, a) in enumerate(zip(kinds, big.arrays.values(), strict=True))
    }
    return Checkpoints(work, "model", arrays)


def part(name: str, array: Array, rank: int) -> Array:
    return np.array_split(array, TP, axis=RULES[name.partition(".")[0] + ".*"])[rank]


def copying(model: Checkpoints, target: Path) -> Entry:
    copy = target.with_name("target-copy.safetensors")

    def cp() -> Path:
        peers.copy(model.safetensors, copy, "--reflink=never")
        return copy

    return Entry("cp --reflink=never", cp, TARGET, "wall", check=model.check_file)


@pytest.mark.skipif(shutil.which("cp") is None, reason="no cp")
def test_shard(race: Race, model: Checkpoints, target: Path, work: Path) -> None:
    ranks = work / "ranks"

    def shard() -> Path:
        tensorio.shard(model.safetensors, ranks, tp=TP, rules=RULES, durable=False)
        return ranks

    def check(folder: Path) -> None:
        for rank in range(TP):
            found = tensorio.load(folder / f"model-rank-{rank}-part-0.safetensors")
            assert found.keys() == model.arrays.keys()
            assert all(np.array_equal(found[name], part(name, a, rank)) for name, a in model.arrays.items())

    def remove() -> None:
        shutil.rmtree(ranks, ignore_errors=True)
        for file in target.parent.glob("target*"):
            file.unlink()

    race(
        f"shard {size_of(model.nbytes)} for {TP} ranks",
        Entry("shard(durable=False)", shard, check=check),
        [copying(model, target)],
        before=remove,
        rounds=7,
        nbytes=model.nbytes,
    )
    remove()


@pytest.mark.skipif(shutil.which("cp") is None, reason="no cp")
def test_unshard(race: Race, model: Checkpoints, target: Path, work: Path) -> None:
    ranks, back = work / "ranks", target.with_suffix(".safetensors")
    tensorio.shard(model.safetensors, ranks, tp=TP, rules=RULES)

    def unshard() -> Path:
        tensorio.unshard(ranks, back, durable=False)
        return back

    def remove() -> None:
        for file in target.parent.glob("target*"):
            file.unlink()

    race(
        f"put {size_of(model.nbytes)} of {TP} ranks together again",
        Entry("unshard(durable=False)", unshard, check=model.check_file),
        [copying(model, target)],
        before=remove,
        rounds=7,
        nbytes=model.nbytes,
    )
    shutil.rmtree(ranks)


def test_rank_of_a_file_that_is_not_cut(race: Race, model: Checkpoints) -> None:
    path, rank = model.safetensors, 1
    shapes = {name: part(name, a, rank).shape for name, a in model.arrays.items()}

    def ours() -> dict[str, Array]:
        with tensorio.ranked(path, rank, tp=TP, rules=RULES) as view:
            out = {name: np.empty(shape, np.float32) for name, shape in shapes.items()}
            view.read_into(out)
            return out

    def theirs() -> dict[str, Any]:
        from safetensors import safe_open

        out = {}
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                whole = file.get_slice(name)
                step = whole.get_shape()[RULES[name.partition(".")[0] + ".*"]] // TP
                lo, hi = rank * step, (rank + 1) * step
                out[name] = whole[lo:hi] if name.startswith("rows") else whole[:, lo:hi]
        return out

    def check(result: dict[str, Array]) -> None:
        assert all(np.array_equal(result[name], part(name, a, rank)) for name, a in model.arrays.items())

    race(
        f"a rank's {size_of(model.nbytes // TP)} of {size_of(model.nbytes)}",
        Entry("ranked().read_into", ours, check=check),
        [Entry("safe_open().get_slice", theirs, 1.0, needs="safetensors", check=check)],
        rounds=9, nbytes=model.nbytes // TP,
    )  # fmt: skip
