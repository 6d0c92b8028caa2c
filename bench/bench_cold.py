"""Load from a cold disk, against reading the file in large blocks; and every loader there is, in its own process.

Cold: dropped from the page cache and asked for, page by page, whether it is gone. ``TENSORIO_BENCH_COLD=1`` asks for
it; without, only that the benches work is tested, at a small size.
"""

from __future__ import annotations

import mmap
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import loaders
import pytest

import peers
import tensorio
from inputs import Checkpoints, evict, size_of, touch
from race import Entry, Race, Row, Table

COLD = os.environ.get("TENSORIO_BENCH_COLD") == "1"
BLOCK = "16M"
# A disk's speed, less what starts and stops at the ends of a file.
OF_THE_DISK = 1 / 0.95
MIB = 1 << 20
ROUNDS = 5
THREADS = 4
PROCESS_ROUNDS = 3  # ten loaders, most of which import torch first


@pytest.fixture(autouse=True)
def _asked_for(quick: bool) -> None:
    if not (COLD or quick):
        pytest.skip("empties the page cache of its files: TENSORIO_BENCH_COLD=1 asks for it")


def dd(path: Path) -> int:
    """Read a file in large blocks, one after the other."""
    subprocess.run(["dd", f"if={path}", "of=/dev/null", f"bs={BLOCK}"], check=True, stderr=subprocess.DEVNULL)
    return 0


def prefetched(path: Path) -> int:
    with tensorio.open(path) as checkpoint:
        checkpoint.prefetch(wait=True)
        return touch(dict(checkpoint))


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_cold(race: Race, big: Checkpoints, suffix: str) -> None:
    """Into page cache and page tables, every page touched; and into memory of its own."""
    path = big.path(suffix)
    want = touch(big.arrays)

    def check(total: int) -> None:
        assert total == want

    race(
        f"{size_of(big.nbytes)} {suffix}, cold, every page touched",
        Entry("open, prefetch", lambda: prefetched(path), check=check),
        [
            Entry(f"dd bs={BLOCK}", lambda: dd(path), OF_THE_DISK, "wall"),
            Entry("load", lambda: touch(tensorio.load(path)), None, "wall", check=check),
        ],
        before=lambda: evict(path),
        rounds=ROUNDS,
        nbytes=big.nbytes,
    )


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_cold_into_memory(race: Race, big: Checkpoints, suffix: str) -> None:
    path = big.path(suffix)
    race(
        f"{size_of(big.nbytes)} {suffix}, cold, into memory",
        Entry("load(mmap=False)", lambda: tensorio.load(path, mmap=False), check=big.check),
        [
            Entry(f"dd bs={BLOCK}", lambda: dd(path), OF_THE_DISK, "wall"),
            Entry("pread, huge pages, same threads", lambda: len(peers.pread(path)), 1, "wall"),
        ],
        before=lambda: evict(path),
        rounds=ROUNDS,
        nbytes=big.nbytes,
    )


def test_into_buffers(race: Race, big: Checkpoints) -> None:
    """Warm, into the caller's arrays, whose pages are there already."""
    import numpy as np

    path = big.safetensors
    out = {name: np.zeros(a.shape, a.dtype) for name, a in big.arrays.items()}
    flat = {name: np.zeros(a.shape, a.dtype) for name, a in big.arrays.items()}

    def ours() -> object:
        with tensorio.open(path) as checkpoint:
            checkpoint.read_into(out)
        return out

    def copied() -> object:
        with tensorio.open(path) as checkpoint:
            for name, target in flat.items():
                checkpoint.read(name, out=target)
        return flat

    race(
        f"{size_of(big.nbytes)} .safetensors, warm, into arrays",
        Entry("read_into", ours),
        [Entry("read(out=), one by one", copied, None, "wall")],
        check=big.check,
        rounds=ROUNDS,
    )


def test_four_threads_at_once(race: Race, big: Checkpoints) -> None:
    """Warm; each thread reads its quarter of the tensors by itself. It costs no more; idle cores make it quicker."""
    import numpy as np

    path = big.safetensors
    out = {name: np.zeros(a.shape, a.dtype) for name, a in big.arrays.items()}
    names = list(out)
    quarters = [{name: out[name] for name in names[i::THREADS]} for i in range(THREADS)]

    def read(quarter: dict[str, object]) -> None:
        with tensorio.open(path) as checkpoint:
            checkpoint.read_into(quarter, threads=1)

    def at_once() -> object:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(read, quarters))
        return out

    def in_turn() -> object:
        for quarter in quarters:
            read(quarter)
        return out

    race(
        f"{size_of(big.nbytes)} .safetensors, warm, into arrays, a thread per quarter",
        Entry("at once", at_once),
        [Entry("one after the other", in_turn, 1.1)],
        check=big.check,
        rounds=ROUNDS,
    )


@pytest.mark.parametrize("state", ["warm", "cold"])
def test_each_in_its_own_process(
    race: Race, table: Table, big: Checkpoints, work: Path, state: str, quick: bool
) -> None:
    """Load and touch every page; CPU, wall, peak of memory and own share of it. What is not installed is listed."""
    act = f"{size_of(big.nbytes)} in a fresh process, {state}, every page touched"
    entries = {name: Entry(name, lambda: None, needs=loader.needs) for name, loader in loaders.LOADERS.items()}
    paths = {name: _file_for(loader, big, work) for name, loader in loaders.LOADERS.items() if loader.installed}
    memory: dict[str, list[tuple[float, float]]] = {name: [] for name in paths}
    want = touch(big.arrays)

    def act_once() -> None:
        for _ in range(1 if quick else PROCESS_ROUNDS):
            for name, path in paths.items():
                _set(state, path)
                _take_and_give_back(2 * big.nbytes)
                found = loaders.do(name, path)
                assert found["total"] == want, name
                entries[name].cpu.append(found["cpu"])
                entries[name].wall.append(found["wall"])
                memory[name].append((found["peak"], found["share"]))

    race.once(act_once)
    first, *others = entries.values()
    table.rows += [Row(table.section, act, first, peer) for peer in others]
    table.details.append((act, [e for e in entries.values() if e.cpu], big.nbytes))
    for name, found in memory.items():
        for i, what in enumerate(("peak", "own share")):
            value = min(row[i] for row in found) / big.nbytes
            table.bound(f"{act}: memory", f"{name}, {what}", value, None, "of the file")


def _file_for(loader: loaders.Loader, big: Checkpoints, work: Path) -> Path:
    """The tensors in the format of a loader, and a small file beside it for its first steps."""
    target = work / f"big{loader.suffix}"
    warm_up = work / f"warm-up{loader.suffix}"
    if not warm_up.exists():
        few = {name: a[:8] for name, a in list(big.arrays.items())[:4]}
        small = Checkpoints(work, "warm-up", few)
        _written(loader.suffix, small, warm_up)
    if not target.exists():
        _written(loader.suffix, big, target)
    return target


def _written(suffix: str, tensors: Checkpoints, target: Path) -> None:
    if suffix == ".tensors":
        loaders.make_tensorizer(tensors.safetensors, target)
    else:
        assert tensors.path(suffix) == target


def _take_and_give_back(nbytes: int) -> None:
    """Have the machine's free memory in use for a moment.

    The host of a virtual one takes free memory back, and giving it again costs more than a copy: whoever came first
    would pay for it.
    """
    with mmap.mmap(-1, nbytes) as block:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            block.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, nbytes, mmap.PAGESIZE):
            block[at] = 1


def _set(state: str, path: Path) -> None:
    acts: dict[str, Callable[[Path], object]] = {"cold": evict, "warm": dd}
    acts[state](path)
