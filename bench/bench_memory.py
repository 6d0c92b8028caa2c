"""What acts need of memory, in fresh processes; limits are asserted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import child
import inputs
from inputs import Checkpoints, Sizes, size_of
from race import Race, Table

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is read")

MIB = 1 << 20
HOLE_TENSORS = 1000
ACT = "peak of memory, beyond what was there"
SHARED = "memory of all workers together"


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_save(race: Race, table: Table, sizes: Sizes, target: Path, suffix: str) -> None:
    path = target.with_suffix(suffix)
    found = race.once(lambda: child.do("save", path, sizes.big))
    table.bound(ACT, f"save {size_of(sizes.big)}, {suffix}", found["growth"] / MIB, 32)
    assert path.stat().st_size >= sizes.big


@pytest.mark.parametrize(("old", "new"), [(".pt", ".safetensors"), (".safetensors", ".pt")])
def test_convert(race: Race, table: Table, big: Checkpoints, target: Path, old: str, new: str) -> None:
    path = target.with_suffix(new)
    source = big.path(old)
    found = race.once(lambda: child.do("convert", source, path))
    big.check_file(path)
    table.bound(ACT, f"convert {size_of(big.nbytes)}, {old} to {new}", found["growth"] / MIB, 64)


def test_verify(race: Race, table: Table, big: Checkpoints) -> None:
    found = race.once(lambda: child.do("verify", big.pt))
    table.bound(ACT, f"verify {size_of(big.nbytes)} .pt", found["growth"] / MIB, 64)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_load_as_views(race: Race, table: Table, big: Checkpoints, suffix: str) -> None:
    """Pages that the kernel maps around the ones that were read count, too."""
    path = big.path(suffix)
    found = race.once(lambda: child.do("load", path))
    table.bound(ACT, f"load {size_of(big.nbytes)} {suffix} as views", found["growth"] / MIB, 64)


def test_inspect(race: Race, table: Table, sizes: Sizes, target: Path) -> None:
    pytest.importorskip("click")
    path = target.with_suffix(".safetensors")
    inputs.hole(path, HOLE_TENSORS, sizes.hole)
    found = race.once(lambda: child.do("inspect", path))
    assert found["tensors"] == HOLE_TENSORS
    table.bound(ACT, f"tensorio inspect, {size_of(sizes.hole)} of holes", found["growth"] / MIB, 60)


@pytest.mark.parametrize("loader", ["load", "torch.load(mmap=True)", "safetensors.numpy"])
def test_workers_on_one_file(
    race: Race, table: Table, sizes: Sizes, big: Checkpoints, loader: str, quick: bool
) -> None:
    """Processes that load the same file and read all of it; one copy of the weights is the least there is."""
    if loader != "load":
        pytest.importorskip(loader.partition(".")[0])
        if quick:
            pytest.skip("a peer's memory is no test of ours")
    path = big.path(".pt" if loader.startswith("torch") else ".safetensors")

    def act() -> int:
        with child.Workers(sizes.workers, loader, path) as workers:
            return workers.growth()

    grown = race.once(act)
    # The rest is each worker's own: a dict, arrays and 2 MiB of page tables per GiB (which the kernel doesn't count).
    slack = sizes.workers * 2 * MIB
    limit = (big.nbytes + slack) / big.nbytes if loader == "load" else None
    table.bound(SHARED, f"{loader}, {sizes.workers} workers", grown / big.nbytes, limit, "copies")
