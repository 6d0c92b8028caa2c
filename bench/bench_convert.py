"""Convert a file of few large tensors: a copy of its bytes under another header."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import peers
import tensorio
from inputs import Checkpoints, size_of
from race import Entry, Race

TARGET = 1.1


@pytest.mark.skipif(shutil.which("cp") is None, reason="no cp")
@pytest.mark.parametrize(("old", "new"), [(".pt", ".safetensors"), (".safetensors", ".pt")])
def test_convert(race: Race, big: Checkpoints, target: Path, old: str, new: str) -> None:
    source, path = big.path(old), target.with_suffix(new)
    copy = target.with_name(f"target-copy{old}")

    def convert() -> Path:
        tensorio.convert(source, path, durable=False)
        return path

    def cp(*options: str) -> Callable[[], Path]:
        def run() -> Path:
            peers.copy(source, copy, *options)
            return copy

        return run

    def remove() -> None:
        path.unlink(missing_ok=True)
        copy.unlink(missing_ok=True)

    race(
        f"convert {size_of(big.nbytes)}, {old} to {new}",
        Entry("convert(durable=False)", convert),
        [
            Entry("cp", cp(), TARGET, "wall"),
            Entry("cp --reflink=never", cp("--reflink=never"), TARGET, "wall"),
        ],
        check=big.check_file,
        before=remove,
        rounds=7,
        nbytes=big.nbytes,
    )
