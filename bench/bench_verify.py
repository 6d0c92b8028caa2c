"""Compare a file with its checksums, at the speed of reading; and what saving costs that lets it be compared.

Cold: with ``TENSORIO_BENCH_COLD=1``, see ``bench_cold.py``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import peers
import tensorio
from inputs import Checkpoints, evict, size_of
from race import Entry, Race

COLD = os.environ.get("TENSORIO_BENCH_COLD") == "1"
# Verifying at the speed of reading, less what starts and stops at the ends of a file.
OF_READING = 1 / 0.9
BLOCK = 512 << 10
STRETCH = 32 << 20  # bytes that a thread reads in a row


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
            Entry("pread, as many threads", lambda: _read(path), OF_READING, "wall", check=lambda total: None),
            Entry("reading the mapping (NumPy sum)", lambda: _sum(path), check=lambda total: None),
        ],
        check=check,
        rounds=7,
        nbytes=big.nbytes,
    )


def test_verify_cold(race: Race, big: Checkpoints, quick: bool) -> None:
    if not (COLD or quick):
        pytest.skip("empties the page cache of its files: TENSORIO_BENCH_COLD=1 asks for it")
    path = big.pt

    def check(report: tensorio.Report) -> None:
        assert report.ok

    race(
        f"verify {size_of(big.nbytes)} .pt, cold",
        Entry("verify", lambda: tensorio.verify(path)),
        [Entry("pread, as many threads", lambda: _read(path), OF_READING, "wall", check=lambda total: None)],
        check=check,
        before=lambda: evict(path),
        rounds=5,
        nbytes=big.nbytes,
    )


def test_verify_by_sha256(race: Race, big: Checkpoints, target: Path) -> None:
    """Digests of tensors by all cores; a manifest of one file by one."""
    path, listed = target.with_suffix(".safetensors"), big.safetensors
    tensorio.save(big.arrays, path, digests=True, durable=False)
    tensorio.write_manifest(listed, durable=False)

    def check(report: tensorio.Report) -> None:
        assert report.ok
        assert report.unchecked == 0

    peers_here = [Entry("verify (manifest)", lambda: tensorio.verify(listed), None, "wall")]
    if shutil.which("sha256sum") is not None:
        peers_here.append(Entry("sha256sum --check", lambda: _check_sums(listed), None, "wall", check=lambda _: None))
    try:
        race(
            f"verify {size_of(big.nbytes)} .safetensors by SHA-256",
            Entry("verify (digests)", lambda: tensorio.verify(path)),
            peers_here,
            check=check,
            rounds=5,
            nbytes=big.nbytes,
        )
    finally:
        listed.with_name(f"{listed.name}.sha256").unlink()


@pytest.mark.parametrize("option", ["manifest", "digests", "readback"])
def test_save_for_verify(race: Race, big: Checkpoints, target: Path, option: str) -> None:
    """What each option adds to a save."""
    path = target.with_suffix(".safetensors")
    options: dict[str, Any] = {option: True}

    def check(saved: tensorio.Saved) -> None:
        big.check_file(path)

    race(
        f"save {size_of(big.nbytes)} .safetensors, {option}=True",
        Entry(f"save({option}=True)", lambda: tensorio.save(big.arrays, path, durable=False, **options)),
        [Entry("save", lambda: tensorio.save(big.arrays, path, durable=False), None, "wall")],
        check=check,
        rounds=5,
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


def _check_sums(path: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--status", f"{path.name}.sha256"], cwd=path.parent, check=True)


def _read(path: Path) -> int:
    """Read a file by as many threads as there are cores, each into one buffer, and look at nothing."""
    size = path.stat().st_size
    fd = os.open(path, os.O_RDONLY)

    def read(start: int) -> int:
        buffer = bytearray(BLOCK)
        return sum(os.preadv(fd, [buffer], at) for at in range(start, min(start + STRETCH, size), BLOCK))

    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            total = sum(pool.map(read, range(0, size, STRETCH)))
    finally:
        os.close(fd)
    assert total == size
    return total


def _sum(path: Path) -> int:
    data = np.memmap(path, np.uint8, "r")
    return int(data[: len(data) // 8 * 8].view(np.uint64).sum())
