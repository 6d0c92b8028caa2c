"""A real disk where every request has its price: FUSE, and a server of one file that waits before it answers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fusefile
import tensorio

pytestmark = [
    pytest.mark.plain_build,
    pytest.mark.skipif(not os.access("/dev/fuse", os.W_OK) or os.geteuid() != 0, reason="mounting needs root and FUSE"),
]

MIB = 1 << 20
WAIT = 0.01  # seconds for each request
TENSORS = {f"t{i}": np.full(4 * MIB, i, "u1") for i in range(6)}


class Far:
    """A file behind the server."""

    def __init__(self, path: Path, log: Path) -> None:
        self.path, self._log = path, log

    def reads(self) -> list[tuple[int, int]]:
        """Offset and bytes of each request so far."""
        lines = self._log.read_text().splitlines()
        return [(int(at), int(n)) for at, n in map(str.split, lines)]


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Far]:
    path = tmp_path / "model.safetensors"
    tensorio.save(TENSORS, path, durable=False)
    with fusefile.served(path, tmp_path, WAIT) as found:
        if found is None:
            pytest.skip("this system does not let us mount")
        yield Far(*found)


def same(tree: Any) -> bool:
    return {k: v.tobytes() for k, v in tree.items()} == {k: v.tobytes() for k, v in TENSORS.items()}


def test_kind_of_disk_is_recognised(far: Far) -> None:
    with tensorio.open(far.path) as checkpoint:
        assert checkpoint.loading.startswith("read ahead: fuse.onefile at ")
        assert str(far.path.parent) in checkpoint.loading
    with tensorio.open(far.path, mmap=True) as checkpoint:
        assert checkpoint.loading == "mapped: fuse.onefile"


WAYS: dict[str, Callable[[Path], Any]] = {
    "load": tensorio.load,
    "memory": lambda p: tensorio.load(p, mmap=False),
    "tree": lambda p: tensorio.open(p).tree(),
    "prefetch": lambda p: _prefetched(p),
}


def _prefetched(path: Path) -> Any:
    checkpoint = tensorio.open(path)
    checkpoint.prefetch(wait=True)
    return checkpoint


@pytest.mark.parametrize("way", WAYS)
def test_requests_overlap(way: str, far: Far) -> None:
    """One after the other, they would take as many waits as there are requests."""
    start = time.perf_counter()
    tree = WAYS[way](far.path)
    took = time.perf_counter() - start
    assert same(tree)
    reads = far.reads()
    assert sum(n for _, n in reads) < far.path.stat().st_size * 1.2  # none twice
    assert took < 0.7 * WAIT * len(reads)
    del tree


def test_tensor_is_there_before_its_array_is(far: Far) -> None:
    with tensorio.open(far.path) as checkpoint:
        array = checkpoint["t3"]
        count = len(far.reads())
        assert (array == 3).all()
        assert len(far.reads()) == count
        assert sum(n for _, n in far.reads()) < far.path.stat().st_size


def test_second_reader_shares_the_page_cache(far: Far) -> None:
    with tensorio.open(far.path) as first, tensorio.open(far.path) as second:
        assert same(first.tree())
        count = len(far.reads())
        assert same(second.tree())
        assert len(far.reads()) <= count + 2
