"""Look for NaN and infinity: beside reading the same memory, and beside other ways to look."""

from __future__ import annotations

import zlib
from collections.abc import Callable
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
    arrays = {f"layers.{i}.weight": np.ones(64, np.float32) for i in range(sizes.tensors)}

    def check(found: Any) -> None:
        assert found == []

    race(
        f"check_finite of {sizes.tensors:,} tensors",
        Entry("check_finite", lambda: tensorio.check_finite(arrays)),
        [Entry("numpy.isfinite().all() of each", lambda: [n for n, a in arrays.items() if not np.isfinite(a).all()])],
        check=check,
        rounds=7,
    )


def test_finite_finds_one(sizes: Sizes) -> None:
    """What the time is spent for."""
    values = np.ones(sizes.crc // 4, np.float32)
    values[-2] = np.nan
    assert tensorio.check_finite({"w": values}) == [tensorio.NonFinite("w", len(values) - 2, 1, 0)]
