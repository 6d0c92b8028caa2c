"""A reader that comes by once: order, bytes, and how little of the file is resident at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import tensorio
from tensorio import _host
from tensorio.checkpoint import _passing, _prefetch

MIB = 1 << 20
COUNT = 48


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "x.safetensors"
    tensorio.save({f"t{i}": np.full(8 * MIB, i, "u1") for i in range(COUNT)}, path, durable=False)
    yield path
    path.unlink()


def resident() -> int:
    """Bytes of files in this process' page tables."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith("RssFile"))


@pytest.mark.plain_build
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc")
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_resident_memory_stays_within_the_window(suffix: str, path: Path, tmp_path: Path, in_child: Any) -> None:
    if suffix == ".pt":
        other = tmp_path / "x.pt"
        tensorio.convert(path, other, durable=False)
    else:
        other = path

    def read() -> tuple[int, int, int]:
        with tensorio.open(other) as checkpoint:
            before, most, total = resident(), 0, 0
            for _, array in checkpoint.stream(window=64 * MIB):
                total += int(array.sum(dtype="i8"))
                most = max(most, resident() - before)
            return total, most, resident() - before

    total, most, left = in_child(read)
    assert total == 8 * MIB * sum(range(COUNT))
    assert most < (64 + 32 + 32 + 32) * MIB, "of 384"  # the window, a step beyond it, what is behind, slack
    assert left < 40 * MIB


@pytest.mark.plain_build
def test_what_was_read_is_dropped_from_the_cache_if_asked(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        if _host.cached(fd, 0, path.stat().st_size) < 0:
            pytest.skip("this system does not tell what is in its page cache")
        with tensorio.open(path) as checkpoint:
            for _, array in checkpoint.stream(evict=True):
                array.sum()
        assert _host.cached(fd, 0, path.stat().st_size) < path.stat().st_size // 4
    finally:
        os.close(fd)


def test_order_is_that_of_the_file(tmp_path: Path) -> None:
    arrays = {"z": np.zeros(10), "a": np.ones(10), "m": np.full(10, 2.0)}
    path = tmp_path / "x.pt"
    tensorio.save({"model": arrays, "tied": arrays["a"]}, path, durable=False)
    with tensorio.open(path) as checkpoint:
        offsets = {name: checkpoint.infos[name].chunks[0].extent.offset for name in checkpoint}
        names = [name for name, _ in checkpoint.stream()]
        assert [offsets[name] for name in names] == sorted(offsets.values())
        assert sorted(names) == sorted(checkpoint)
        some = dict(checkpoint.stream(["model.m", "model.z"]))
        assert list(some) == sorted(some, key=offsets.__getitem__)
        assert (some["model.m"] == 2).all()


def test_arrays_that_are_kept_stay_right(path: Path) -> None:
    with tensorio.open(path) as checkpoint:
        kept = dict(checkpoint.stream())
    assert all(int(kept[f"t{i}"][-1]) == i and int(kept[f"t{i}"][0]) == i for i in range(COUNT))


def test_writable_pages_keep_what_was_written(path: Path) -> None:
    with tensorio.open(path, writable=True) as checkpoint:
        kept = {}
        for name, array in checkpoint.stream():
            array[:10] = 99
            kept[name] = array
        assert all((array[:10] == 99).all() for array in kept.values())


@pytest.mark.parametrize("name", list(cases.CASES))
def test_every_kind_of_file_streams(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_passing, "BEHIND", 1)
    monkeypatch.setattr(_prefetch, "LEAST", 1)
    case = cases.CASES[name]()
    with tensorio.open(case.data) as checkpoint:
        streamed = {k: v.tobytes() for k, v in checkpoint.stream()}
        assert streamed == {k: v.tobytes() for k, v in checkpoint.items()}


def test_stream_that_is_left_stops_reading_ahead(path: Path) -> None:
    with tensorio.open(path) as checkpoint:
        stream = checkpoint.stream(window=64 * MIB)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        (ahead,) = checkpoint._prefetches
        assert not ahead.wait(20)
        assert not ahead.done


def test_closed_checkpoint_streams_nothing(path: Path) -> None:
    checkpoint = tensorio.open(path)
    stream = checkpoint.stream()
    checkpoint.close()
    with pytest.raises(ValueError, match="closed"):
        next(stream)
