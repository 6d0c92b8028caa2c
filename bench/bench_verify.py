"""Recompute every checksum of a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import peers
import tensorio
from inputs import Checkpoints, size_of
from race import Entry, Race


def test_verify(race: Race, big: Checkpoints) -> None:
    path = big.pt

    def check(report: tensorio.Report) -> None:
        assert report.ok
        assert report.checked >= big.nbytes

    def check_none(bad: object) -> None:
        assert bad is None

    race(
        f"verify {size_of(big.nbytes)} .pt",
        Entry("verify", lambda: tensorio.verify(path)),
        [
            Entry("zipfile.testzip", lambda: peers.testzip(path), check=check_none),
            Entry("reading the mapping (NumPy sum)", lambda: _sum(path), check=lambda total: None),
        ],
        check=check,
        rounds=7,
        nbytes=big.nbytes,
    )


def test_verify_many(race: Race, many: Checkpoints) -> None:
    """Many small records: what it costs is the records."""
    path = many.pt

    def check(report: tensorio.Report) -> None:
        assert report.ok
        assert report.checked >= many.nbytes

    def check_none(bad: object) -> None:
        assert bad is None

    race(
        f"verify {len(many.arrays):,} tensors of a .pt",
        Entry("verify", lambda: tensorio.verify(path)),
        [Entry("zipfile.testzip", lambda: peers.testzip(path), check=check_none)],
        check=check,
        rounds=5,
    )


def test_verify_finds_a_changed_byte(race: Race, big: Checkpoints, target: Path) -> None:
    """What the time is spent for."""
    path = target.with_suffix(".pt")
    small = {"w": np.zeros(1 << 20, np.uint8)}
    tensorio.save(small, path, durable=False)
    offset = tensorio.open(path).infos["w"].chunks[0].extent.offset
    with path.open("r+b") as f:
        f.seek(offset + 1000)
        f.write(b"\1")
    assert not race.once(lambda: tensorio.verify(path)).ok


def _sum(path: Path) -> int:
    data = np.memmap(path, np.uint8, "r")
    return int(data[: len(data) // 8 * 8].view(np.uint64).sum())
