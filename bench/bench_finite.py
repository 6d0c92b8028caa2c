"""Look for NaN and infinity: beside reading the same memory, and beside other ways to look."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio
from inputs import Sizes, size_of
from race import Entry, Race
from tensorio import _core

# Of wall time: all cores together are not slower than one that takes a checksum at the speed of reading memory.
OVER_READING = 1.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_finite(race: Race, sizes: Sizes, dtype: str) -> None:
    """One tensor, all cores, against one pass over memory."""
    values = np.ones(sizes.big // 4, np.float32)
    array = values if dtype == "float32" else values.view(np.uint16)  # 1.0 is 0x3f80 and 0 in halves
    if dtype == "bfloat16":
        import ml_dtypes

        array = array.view(ml_dtypes.bfloat16)
    peers = [
        Entry("reading (_core.crc32)", lambda: _core.crc32(values) and [], OVER_READING, "wall"),
        Entry("reading (zlib.crc32)", lambda: zlib.crc32(values) and []),
    ]
    if dtype == "float32":
        peers.append(Entry("numpy.isfinite().all()", lambda: [] if np.isfinite(array).all() else [0], 1))
    peers.append(Entry("torch.isfinite().all()", _by_torch(values, dtype), 0.5, needs="torch"))

    def check(found: Any) -> None:
        assert found == []

    race(
        f"check_finite of {size_of(sizes.big)} of {dtype}",
        Entry("check_finite", lambda: tensorio.check_finite([array])),
        peers,
        check=check,
        rounds=7,
        nbytes=sizes.big,
    )


def _by_torch(values: np.ndarray, dtype: str) -> Callable[[], Any]:
    try:
        import torch
    except ImportError:
        return list
    tensor = torch.from_numpy(values)
    if dtype == "bfloat16":
        tensor = tensor.view(torch.bfloat16)
    return lambda: [] if bool(torch.isfinite(tensor).all()) else [0]


def test_finite_many(race: Race, sizes: Sizes) -> None:
    """Many small tensors: what it costs is the tensors."""
    arrays = _small(sizes)
    race(
        f"check_finite of {sizes.tensors:,} arrays",
        Entry("check_finite", lambda: tensorio.check_finite(arrays)),
        [Entry("numpy.isfinite().all() of each", lambda: _each_by_numpy(arrays), 1)],
        check=_nothing,
        rounds=7,
    )


def test_finite_many_of_torch(race: Race, sizes: Sizes) -> None:
    """The same of torch's, each of whose attributes costs about 0.1 us."""
    torch = pytest.importorskip("torch")
    tensors = {name: torch.from_numpy(array) for name, array in _small(sizes).items()}
    race(
        f"check_finite of {sizes.tensors:,} torch tensors",
        Entry("check_finite", lambda: tensorio.check_finite(tensors)),
        [
            Entry(
                "torch.isfinite().all() of each", lambda: [n for n, t in tensors.items() if not t.isfinite().all()], 0.5
            )
        ],
        check=_nothing,
        rounds=7,
    )


def test_finite_many_of_a_file(race: Race, sizes: Sizes, tmp_path: Path) -> None:
    """The same in an opened file: no arrays are made."""
    tensorio.save(_small(sizes), tmp_path / "m.safetensors")
    with tensorio.open(tmp_path / "m.safetensors") as checkpoint:
        race(
            f"check_finite of a checkpoint of {sizes.tensors:,} tensors",
            Entry("check_finite", lambda: tensorio.check_finite(checkpoint)),
            [Entry("numpy.isfinite().all() of each", lambda: _each_by_numpy(checkpoint), 0.5)],
            check=_nothing,
            rounds=7,
        )


def _small(sizes: Sizes) -> dict[str, np.ndarray]:
    return {f"layers.{i}.weight": np.ones(64, np.float32) for i in range(sizes.tensors)}


def _each_by_numpy(tensors: Mapping[str, np.ndarray]) -> list[str]:
    return [name for name, array in tensors.items() if not np.isfinite(array).all()]


def _nothing(found: Any) -> None:
    assert found == []


def test_finite_finds_one(sizes: Sizes) -> None:
    """What the time is spent for."""
    values = np.ones(sizes.crc // 4, np.float32)
    values[-2] = np.nan
    assert tensorio.check_finite({"w": values}) == [tensorio.NonFinite("w", len(values) - 2, 1, 0)]
