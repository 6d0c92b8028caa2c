"""Other threads go on while bytes are moved: a clock that ticks beside each act."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tensorio
from clock import TICKS, Clock, assert_others_go_on
from cold import evicted
from tensorio import _core, _host
from tensorio.storage import reading

pytestmark = pytest.mark.plain_build

MIB = 1 << 20
NBYTES = 512 * MIB


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("gil") / "x.safetensors"
    tensors = {f"t{i}": np.full(NBYTES // 8, i, "u1") for i in range(8)}
    tensorio.save(tensors, path, durable=False)
    yield path
    path.unlink()


def test_clock_notices_a_call_that_keeps_the_lock() -> None:
    """The test of the tests: a slice assignment between memoryviews lets nobody else run."""
    source, target = bytearray(256 * MIB), memoryview(bytearray(256 * MIB))
    seen = []
    for _ in range(3):  # a busy machine may take the processor from this thread as the slice ends
        with Clock() as clock:
            target[:] = source
        seen.append(clock.seen)
    assert min(seen) < TICKS


def test_load_into_memory(path: Path) -> None:
    assert_others_go_on(lambda: tensorio.load(path, mmap=False))


def test_read_into(path: Path) -> None:
    with tensorio.open(path) as checkpoint:
        out = {name: np.empty(array.shape, array.dtype) for name, array in checkpoint.items()}
        assert_others_go_on(lambda: checkpoint.read_into(out, threads=1))


def test_read_into_from_memory(path: Path) -> None:
    with tensorio.open(path, mmap=False) as checkpoint:
        out = {name: np.empty(array.shape, array.dtype) for name, array in checkpoint.items()}
        assert_others_go_on(lambda: checkpoint.read_into(out, threads=1))


def test_read_of_one_tensor(path: Path) -> None:
    with tensorio.open(path) as checkpoint:
        assert_others_go_on(lambda: [checkpoint.read(name) for name in checkpoint])


def test_populate_of_fresh_memory() -> None:
    """The system call behind prefetching, where it has most to do: memory that is to be made."""
    if not hasattr(os, "posix_fadvise"):
        pytest.skip("needs Linux")
    populate_write = 23

    def act() -> object:
        block = reading.arena(NBYTES)
        assert _host.advise(block, populate_write) in (0, 22)
        _core.touch(block)
        return block

    assert_others_go_on(act)


def test_prefetch_of_a_cold_file(path: Path) -> None:
    def act() -> None:
        evicted(path)
        with tensorio.open(path) as checkpoint:
            checkpoint.prefetch(wait=True)

    if not hasattr(os, "posix_fadvise"):
        pytest.skip("needs Linux")
    assert_others_go_on(act)


def test_copy(path: Path) -> None:
    source, target = bytearray(256 * MIB), bytearray(256 * MIB)
    assert_others_go_on(lambda: [_host.copy(target, source) for _ in range(2)])


def test_writable_copy_of_the_callers_bytes(path: Path) -> None:
    data = path.read_bytes()
    assert_others_go_on(lambda: tensorio.load(data, writable=True))


def test_four_threads_load_at_once(path: Path) -> None:
    """Each gets its own memory, and the same bytes."""
    results: list[int] = []

    def load() -> None:
        tree = tensorio.load(path, mmap=False)
        results.append(sum(int(array[-1]) for array in tree.values()))

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [sum(range(8))] * 4
