"""Save while training goes on: how long the loop stands still, and how much its steps slow down meanwhile."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import peers
import tensorio
from inputs import Checkpoints, size_of
from race import Entry, Race, Table
from tensorio.storage.reading import readers

suffixes = pytest.mark.parametrize("suffix", [".safetensors", ".pt"])


class Pending:
    """Saves that were begun: waited for, and their files removed, before anything else is timed."""

    def __init__(self, folder: Path, saver: tensorio.AsyncSaver) -> None:
        self.folder = folder
        self.saver = saver
        self._futures: list[Future[Any]] = []

    def begin(self, save: Callable[[], Future[Any]]) -> Future[Any]:
        future = save()
        self._futures.append(future)
        return future

    def finish(self) -> None:
        for future in self._futures:
            future.result()
        self._futures.clear()
        for path in self.folder.glob("target*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture
def pending(work: Path, big: Checkpoints) -> Iterator[Pending]:
    with tensorio.AsyncSaver() as saver:
        saver.reserve(big.nbytes + (1 << 20))
        made = Pending(work, saver)
        yield made
        made.finish()


@suffixes
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, that there is one process only
def test_stall(race: Race, big: Checkpoints, target: Path, pending: Pending, suffix: str) -> None:
    """What the loop waits for; all buffers have their pages, as from the second save on."""
    pytest.importorskip("torch")
    path, folder = target.with_suffix(suffix), target.with_name("target-folder")
    arrays = list(big.arrays.values())
    copied = np.zeros(big.nbytes, np.uint8)

    def check_copied(_: object) -> None:
        assert np.array_equal(copied, np.concatenate([a.reshape(-1).view(np.uint8) for a in arrays]))

    def check_written(future: Future[Any]) -> None:
        big.check_file(Path(future.result().path))

    def check_folder(future: Future[Any]) -> None:
        future.result()
        assert sum(p.stat().st_size for p in folder.iterdir()) >= big.nbytes

    with ThreadPoolExecutor(readers()) as pool:
        list(pool.map(time.sleep, [0.01] * readers()))
        race(
            f"stall of a save of {size_of(big.nbytes)}, {suffix}",
            Entry(
                "save_async",
                lambda: pending.begin(lambda: pending.saver.save(big.tensors, path, durable=False)),
                check=check_written,
            ),
            [
                Entry(
                    f"copy in memory, {readers()} threads",
                    lambda: peers.copy_in_threads(arrays, copied, pool),
                    1.05,
                    "wall",
                    check=check_copied,
                ),
                Entry(
                    "torch.distributed.checkpoint.async_save",
                    lambda: pending.begin(lambda: peers.torch_async_save(big.tensors, folder)),
                    None,
                    "wall",
                    "torch",
                    check=check_folder,
                ),
                Entry(
                    "torch.save",
                    lambda: peers.torch_save(big.tensors, target.with_name("target-peer.pt")),
                    None,
                    "wall",
                    "torch",
                    check=lambda _: None,
                ),
            ],
            before=pending.finish,
            rounds=5,
            nbytes=big.nbytes,
        )
        pending.finish()


def test_stall_many(race: Race, many: Checkpoints, target: Path, pending: Pending) -> None:
    """Small tensors: what it costs is the objects."""
    pytest.importorskip("torch")
    race(
        f"stall of a save of {len(many.tensors):,} tensors, .pt",
        Entry(
            "save_async",
            lambda: pending.begin(lambda: pending.saver.save(many.tensors, target.with_suffix(".pt"), durable=False)),
            check=lambda future: many.check_file(Path(future.result().path)),
        ),
        [
            Entry(
                "torch.save",
                lambda: peers.torch_save(many.tensors, target.with_name("target-peer.pt")),
                None,
                "wall",
                "torch",
                check=lambda _: None,
            )
        ],
        before=pending.finish,
        rounds=5,
    )


def test_steps_meanwhile(table: Table, big: Checkpoints, target: Path, pending: Pending, quick: bool) -> None:
    """Steps of NumPy while nothing is written, and while a save is: one thread of the loop, one that writes."""
    table.section = __name__
    side = 128 if quick else 1024
    matrix = np.ones((side, side), np.float32) / side

    def step() -> float:
        start = time.perf_counter()
        np.matmul(matrix, matrix)
        return time.perf_counter() - start

    for _ in range(5):
        step()
    alone = sorted(step() for _ in range(20 if quick else 100))
    future = pending.begin(lambda: pending.saver.save(big.tensors, target.with_suffix(".pt"), durable=False))
    beside = [step()]
    while not future.done():
        beside.append(step())
    beside.sort()
    act = f"a step of a loop while {size_of(big.nbytes)} are written"
    table.bound(act, "alone, median", alone[len(alone) // 2] * 1000, None, "ms")
    table.bound(act, "meanwhile, median", beside[len(beside) // 2] * 1000, None, "ms")
