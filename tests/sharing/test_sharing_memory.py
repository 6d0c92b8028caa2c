"""However many processes have a checkpoint, its weights are in memory once: PSS, out of /proc/PID/smaps.

A page that N processes have mapped counts 1/N in the PSS of each: the sum over the processes is
what the machine holds for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio
from sharers import PAGE, Stranger, Worker, ending, usage

pytestmark = [
    pytest.mark.plain_build,
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),  # Python 3.12 on: forking beside threads
    pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs Linux's /proc"),
]

MIB = 1 << 20
WORKERS = 4
TENSORS = {f"layers.{i}.weight": np.arange(i, i + MIB, dtype=np.float32) for i in range(8)}  # 32 MiB
NBYTES = sum(a.nbytes for a in TENSORS.values())

Start = Callable[[Path, bool], tuple[Any, list[Any]]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("sharing") / "model.safetensors"
    tensorio.save(TENSORS, path, durable=False)
    return path


def forked(path: Path, writable: bool) -> tuple[Any, list[Any]]:
    checkpoint = tensorio.open(path, writable=writable)
    return checkpoint, [Worker("fork", checkpoint) for _ in range(WORKERS)]


def spawned(path: Path, writable: bool) -> tuple[Any, list[Any]]:
    checkpoint = tensorio.open(path, writable=writable)
    return checkpoint, [Worker("spawn", checkpoint) for _ in range(WORKERS)]


def strangers_to_a_file(path: Path, writable: bool) -> tuple[Any, list[Any]]:
    publication = tensorio.publish(path, "model")
    assert publication.kind == "file"
    return publication, [Stranger("model", writable=writable) for _ in range(WORKERS)]


def strangers_to_memory(path: Path, writable: bool) -> tuple[Any, list[Any]]:
    publication = tensorio.publish({**tensorio.load(path)}, "model")
    assert publication.kind == "memory"
    return publication, [Stranger("model", writable=writable) for _ in range(WORKERS)]


def strangers_to_kept(path: Path, writable: bool) -> tuple[Any, list[Any]]:
    publication = tensorio.publish({**tensorio.load(path)}, "model", persistent=True)
    assert publication.kind == "kept"
    return publication, [Stranger("model", writable=writable) for _ in range(WORKERS)]


def spawned_of_a_publication(path: Path, writable: bool) -> tuple[Any, list[Any]]:
    publication = tensorio.publish({**tensorio.load(path)})
    with publication.open(writable=writable) as checkpoint:
        return publication, [Worker("spawn", checkpoint) for _ in range(WORKERS)]


WAYS = [forked, spawned, strangers_to_a_file, strangers_to_memory, strangers_to_kept, spawned_of_a_publication]


def inode_of(held: Any, path: Path) -> int:
    return os.fstat(held.fileno()).st_ino if isinstance(held, tensorio.Publication) else path.stat().st_ino


@pytest.mark.parametrize("writable", [False, True], ids=["read_only", "copy_on_write"])
@pytest.mark.parametrize("start", WAYS, ids=lambda f: f.__name__)
def test_weights_are_in_memory_once(start: Start, writable: bool, plain: Path) -> None:
    held, workers = start(plain, writable)
    inode = inode_of(held, plain)
    with held, ending(*workers):
        sums = {worker.ask("touch") for worker in workers}
        uses = [usage(pid, inode) for pid in (*(w.pid for w in workers), os.getpid())]
        assert sums == {sum(int(a.view(np.uint8)[::PAGE].astype(int).sum()) for a in TENSORS.values())}
        assert all(use.rss >= NBYTES for use in uses[:-1])
        assert abs(sum(use.pss for use in uses) - NBYTES) <= 256 * 1024  # headers; rounding, mapping by mapping
        assert sum(use.private_dirty + use.anonymous for use in uses) == 0
        if writable:
            a_write_is_the_writers_own(workers, inode, plain)


def a_write_is_the_writers_own(workers: list[Any], inode: int, path: Path) -> None:
    before = path.read_bytes()
    workers[1].ask("write", "layers.3.weight", 77.0)
    assert [w.ask("value", "layers.3.weight") for w in workers] == [3.0, 77.0, 3.0, 3.0]
    assert [usage(w.pid, inode).anonymous for w in workers] == [0, PAGE, 0, 0]
    assert path.read_bytes() == before


def test_read_only_arrays_of_an_attached_checkpoint_refuse_writing() -> None:
    with tensorio.publish(TENSORS) as publication, publication.open() as checkpoint:
        with pytest.raises(ValueError, match="read-only"):
            checkpoint["layers.0.weight"][0] = 1


def test_publishing_costs_one_copy_and_nothing_beside_it(in_child: Any, tmp_path: Path) -> None:
    """The tensors are streamed: what the publisher has besides them and the segment stays small."""
    path = tmp_path / "model.pt"
    tensorio.save(TENSORS, path, durable=False)

    def anonymous() -> int:
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("RssAnon"))

    def work() -> int:
        with tensorio.publish(path):
            pass  # imports
        most = before = anonymous()

        def look(done: int, total: int) -> None:
            nonlocal most
            most = max(most, anonymous())

        with tensorio.open(path, writable=True) as checkpoint:  # may hold changes: laid out in memory
            checkpoint["layers.0.weight"][0] = 5
            with tensorio.publish(checkpoint, progress=look) as publication:
                assert publication.kind == "memory"
                assert publication.open()["layers.0.weight"][0] == 5
        return most - before

    assert in_child(work) < 4 * MIB
