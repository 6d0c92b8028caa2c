"""Put tensors where other processes can map them; map them there; pass them on."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio
from inputs import Checkpoints, size_of
from race import Entry, Race

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's memfd")


@pytest.fixture(autouse=True)
def _names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORIO_REGISTRY", str(tmp_path / "names"))


@pytest.fixture
def in_memory() -> Iterator[Path]:
    path = Path("/dev/shm") / f"tensorio-bench-{os.getpid()}.pt"
    yield path
    path.unlink(missing_ok=True)


def by_hand(tensors: dict[str, Any]) -> shared_memory.SharedMemory:
    """Make a block of shared memory, and copy every tensor to its place: the least that has to be done."""
    block = shared_memory.SharedMemory(create=True, size=sum(a.nbytes for a in tensors.values()))
    at = 0
    for array in tensors.values():
        view: Any = np.ndarray(array.shape, array.dtype, block.buf, at)
        view[...] = array
        at += array.nbytes
        del view
    return block


def test_publish(race: Race, big: Checkpoints, in_memory: Path) -> None:
    """Out of memory into a sealed segment, with checksums; the file is what one would do without."""
    tensors = dict(big.arrays)
    made: list[Any] = []

    def ours() -> int:
        made.append(tensorio.publish(tensors))
        return int(made[-1].nbytes)

    def file() -> int:
        tensorio.save(tensors, in_memory, durable=False)
        return in_memory.stat().st_size

    def copied() -> int:
        made.append(by_hand(tensors))
        return int(made[-1].size)

    def check(nbytes: int) -> None:
        assert big.nbytes <= nbytes < big.nbytes + (1 << 20)

    def free() -> None:
        """Give the memory of the run before back, untimed."""
        in_memory.unlink(missing_ok=True)
        while made:
            one = made.pop()
            one.close()
            if isinstance(one, shared_memory.SharedMemory):
                one.unlink()

    others = [Entry("save to /dev/shm", file, 1.1), Entry("copy to shared_memory", copied)]
    race(f"publish {size_of(big.nbytes)} of arrays", Entry("publish", ours), others, check=check, before=free)
    free()


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_attach(race: Race, many: Checkpoints, kind: str) -> None:
    """All arrays of a published name, and of the file that it could be read from."""
    source: Any = many.pt if kind == "file" else dict(many.arrays)

    def ours() -> Any:
        with tensorio.attach("bench") as checkpoint:
            return checkpoint.tree()

    def opened() -> Any:
        with tensorio.open(many.pt) as checkpoint:
            return checkpoint.tree()

    with tensorio.publish(source, "bench") as publication:
        assert publication.kind == kind
        race(
            f"attach to a {kind}, {len(many.arrays)} arrays"
            if kind == "file"
            else f"attach, {len(many.arrays)} arrays",
            Entry("attach", ours),
            [Entry("open", opened, 1.2)],
            check=many.check,
        )


def test_pass_on(race: Race, big: Checkpoints) -> None:
    """What a process that is spawned has to be sent and to take in."""
    with tensorio.publish(dict(big.arrays)) as publication, publication.open() as checkpoint:
        arrays = dict(checkpoint)
        race(
            f"{size_of(big.nbytes)} through a pickle",
            Entry("Checkpoint", lambda: dict(pickle.loads(pickle.dumps(checkpoint)))),
            [Entry("arrays", lambda: pickle.loads(pickle.dumps(arrays, 5)), 1 / 10)],
            check=big.check,
        )
