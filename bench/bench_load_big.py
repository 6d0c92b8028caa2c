"""Load a file of few large tensors: as views, whatever the size; into memory, as fast as memory is written."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import peers
import tensorio
from inputs import BIG_TENSORS, Array, Checkpoints, evict, few, size_of, touch
from race import Entry, Race, Table

FEW_MS = 5.0
COLD = os.environ.get("TENSORIO_BENCH_COLD") == "1"

suffixes = pytest.mark.parametrize("suffix", [".safetensors", ".pt"])


@suffixes
def test_as_views(race: Race, table: Table, big: Checkpoints, work: Path, suffix: str) -> None:
    path = big.path(suffix)
    small = few(work, "small", max(big.nbytes >> 10, BIG_TENSORS << 14))
    small_path = small.path(suffix)
    ours = Entry("load", lambda: tensorio.load(path), check=big.check)
    less = f"the same, of {size_of(small.nbytes)}"
    act = f"{size_of(big.nbytes)} {suffix} as views"
    race(act, ours, [
        Entry(less, lambda: tensorio.load(small_path), check=small.check),
        Entry("safetensors.torch", lambda: peers.safetensors_torch(path), needs="safetensors", check=big.check)
        if suffix == ".safetensors"
        else Entry("torch.load(mmap=True)", lambda: peers.torch_load(path, True), needs="torch", check=big.check),
    ])  # fmt: skip
    table.bound(act, "load", ours.best("cpu") * 1e3, FEW_MS, "ms")
    # A page of the mapping that is touched is a page fault; the rest is the interpreter's memory.
    pages = BIG_TENSORS if suffix == ".pt" else 0
    table.bound(act, "page faults", _faults(lambda: tensorio.load(path)), pages + 50, "")


def _faults(act: Callable[[], object]) -> int:
    """Page faults of an act that was done before, so that its memory is there; the least of several."""
    counts = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        held = act()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        del held
    return min(counts)


@suffixes
def test_into_memory(race: Race, big: Checkpoints, suffix: str) -> None:
    """`mmap=False`: all of the file into one block of fresh memory."""
    path = big.path(suffix)

    def check_bytes(data: memoryview) -> None:
        assert np.array_equal(np.frombuffer(data, np.uint8), np.memmap(path, np.uint8, "r"))

    others = [Entry("pread, huge pages, same threads", lambda: peers.pread(path), 1, "wall", check=check_bytes)]
    if suffix == ".safetensors":
        others.append(Entry("safetensors.numpy", lambda: peers.safetensors_numpy(path), None, "wall", "safetensors"))
    else:
        others.append(Entry("torch.load", lambda: peers.torch_load(path), None, "wall", "torch"))
    race(
        f"{size_of(big.nbytes)} {suffix} into memory",
        Entry("load(mmap=False)", lambda: tensorio.load(path, mmap=False)),
        others,
        check=big.check,
        rounds=11,
        nbytes=big.nbytes,
    )


def test_into_memory_numpy_file(race: Race, big: Checkpoints, work: Path) -> None:
    """The same bytes as one array in a ``.npy``."""
    path, npy = big.safetensors, work / "big.npy"
    whole = np.concatenate([a.reshape(-1) for a in big.arrays.values()])
    np.save(npy, whole)

    def check_whole(array: Array) -> None:
        assert np.array_equal(array, whole)

    try:
        race(
            f"{size_of(big.nbytes)} into memory",
            Entry("load(mmap=False)", lambda: tensorio.load(path, mmap=False), check=big.check),
            [Entry("numpy.load of a .npy", lambda: np.load(npy), None, "wall", check=check_whole)],
            rounds=5,
            nbytes=big.nbytes,
        )
    finally:
        npy.unlink()


@suffixes
def test_every_page_of_views(race: Race, big: Checkpoints, suffix: str) -> None:
    """Views whose pages are all read: touched data against touched data."""
    path = big.path(suffix)
    sums = {touch(big.arrays)}

    def check(total: int) -> None:
        assert total in sums

    def touched(load: Callable[[], Any]) -> Callable[[], int]:
        return lambda: touch(load())

    if suffix == ".safetensors":
        others = [
            Entry("safetensors.torch", touched(lambda: peers.safetensors_torch(path)), needs="safetensors"),
            Entry("safetensors.numpy", touched(lambda: peers.safetensors_numpy(path)), needs="safetensors"),
        ]
    else:
        others = [
            Entry("torch.load(mmap=True)", touched(lambda: peers.torch_load(path, True)), needs="torch"),
            Entry("torch.load", touched(lambda: peers.torch_load(path)), needs="torch"),
        ]
    race(
        f"{size_of(big.nbytes)} {suffix}, one byte of every page",
        Entry("load", touched(lambda: tensorio.load(path))),
        others,
        check=check,
        rounds=7,
        nbytes=big.nbytes,
    )


@pytest.mark.skipif(not COLD, reason="empties the page cache of its files: TENSORIO_BENCH_COLD=1 asks for it")
@suffixes
def test_every_page_of_a_cold_file(race: Race, big: Checkpoints, suffix: str) -> None:
    """The same from the disk; what is measured is the disk and the kernel's readahead."""
    path = big.path(suffix)
    if suffix == ".safetensors":
        peer = Entry("safetensors.torch", lambda: touch(peers.safetensors_torch(path)), None, "wall", "safetensors")
    else:
        peer = Entry("torch.load(mmap=True)", lambda: touch(peers.torch_load(path, True)), None, "wall", "torch")
    race(
        f"{size_of(big.nbytes)} {suffix}, one byte of every page, cold",
        Entry("load", lambda: touch(tensorio.load(path))),
        [
            peer,
            Entry("load(mmap=False)", lambda: touch(tensorio.load(path, mmap=False)), clock="wall"),
            Entry("pread, huge pages, same threads", lambda: len(peers.pread(path)), clock="wall"),
        ],
        before=lambda: evict(path),
        rounds=5,
        nbytes=big.nbytes,
    )
