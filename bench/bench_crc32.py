"""CRC-32 of a buffer: in a call, in the cache, and at the speed of reading memory."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest

from inputs import Sizes, size_of
from race import Entry, Race
from tensorio import _core

LARGE = -1  # stands for the size of a large buffer in this run
CACHED = 256 << 10
# Faster implementations, as distribution, module.
FASTER = (("zlib-ng", "zlib_ng.zlib_ng"), ("ISA-L", "isal.isal_zlib"))
TARGETS = {CACHED: 1.0, LARGE: 1 / 0.95}


@pytest.mark.parametrize("nbytes", [64, 4 << 10, CACHED, LARGE], ids=["64B", "4KiB", "256KiB", "large"])
def test_crc32(race: Race, sizes: Sizes, nbytes: int) -> None:
    length = sizes.crc if nbytes == LARGE else nbytes
    data = np.random.default_rng(0).bytes(length)
    right = zlib.crc32(data)

    def check(value: int) -> None:
        assert value == right

    # partial: its call is the cheapest there is, and 64 bytes take less than a Python function.
    others = [Entry("zlib", partial(zlib.crc32, data))]
    for name, module in FASTER:
        crc32 = _function(module)
        others.append(Entry(name, partial(crc32, data), TARGETS.get(nbytes), needs=module.split(".")[0]))
    race(
        f"crc32 of {size_of(length)}",
        Entry("_core.crc32", partial(_core.crc32, data)),
        others,
        check=check,
        rounds=30 if nbytes == LARGE else 15,
        loops=max(1, min(20_000, (64 << 20) // length)) if nbytes != LARGE else 1,
        nbytes=length,
    )


def _function(module: str) -> Callable[[bytes], int]:
    """`crc32` of a module; if it is not installed, the race leaves it out."""
    if find_spec(module.split(".")[0]) is None:
        return zlib.crc32
    found: Callable[[bytes], int] = importlib.import_module(module).crc32
    return found
