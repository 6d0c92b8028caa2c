"""Save what changed since a base: all is read twice, and almost nothing written."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import tensorio
from inputs import Checkpoints, size_of
from race import Entry, Race


def test_save_delta(race: Race, big: Checkpoints, target: Path) -> None:
    base, path = target.with_name("target-base.safetensors"), target.with_suffix(".safetensors")
    tensorio.save(big.arrays, base, durable=False)
    name = next(iter(big.arrays))
    state = {**big.arrays, name: big.arrays[name] + 1}
    stored = [array for key, array in state.items() if key != name]

    def check(saved: tensorio.Saved) -> None:
        assert saved.unchanged == sum(array.nbytes for array in stored)

    def compare() -> bool:
        with tensorio.open(base) as checkpoint:
            return all(np.array_equal(checkpoint[key], array) for key, array in state.items() if key != name)

    def check_equal(equal: object) -> None:
        assert equal

    def check_none(saved: object) -> None:
        assert isinstance(saved, tensorio.Saved)

    race(
        f"save {size_of(big.nbytes)} with base=, one tensor changed",
        Entry("save(base=)", lambda: tensorio.save(state, path, base=base, durable=False)),
        [
            Entry("numpy.array_equal, one thread", compare, check=check_equal),
            Entry("save, whole", lambda: tensorio.save(state, path, durable=False), check=check_none),
        ],
        check=check,
        rounds=5,
        nbytes=big.nbytes,
    )
