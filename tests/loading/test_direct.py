"""Reading a file into memory: past the page cache where it is cold, through it where it is warm, and the same bytes."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio
from cold import evicted
from tensorio import _core, _host
from tensorio.storage import files, reading
from tensorio.storage.files import FileStorage
from tensorio.storage.opening import open_storage
from tensorio.system.disks import Disk

pytestmark = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT")

SIZES = [65 << 10, (1 << 20) + 1, (3 << 20) - 4097, 4 << 20]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces and limits of the size of small files, on a disk where direct reads are wanted."""
    monkeypatch.setattr(reading, "DIRECT_FROM", 1)
    monkeypatch.setattr(reading, "READ_PIECE", 256 << 10)
    monkeypatch.setattr(files, "disk_of", lambda device, fd: Disk("ext4", "/"))


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Offset and bytes of what is read past the cache."""
    seen: list[tuple[int, int]] = []
    real = reading._Direct.read

    def read(self: reading._Direct, at: int, nbytes: int) -> int:
        n = real(self, at, nbytes)
        if n:
            seen.append((at, n))
        return n

    monkeypatch.setattr(reading._Direct, "read", read)
    return seen


def make(path: Path, nbytes: int) -> bytes:
    data = np.random.default_rng(nbytes).bytes(nbytes)
    path.write_bytes(data)
    return data


def chill(path: Path) -> None:
    """Have the file out of the page cache, or skip the test."""
    if evicted(path):
        pytest.skip("this system does not let a file go from its page cache, or does not tell")
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this filesystem has no direct reads")


def read(source: Any) -> bytes:
    opened, _, _ = open_storage(source)
    assert isinstance(opened, FileStorage)
    try:
        opened.read_all()
        return bytes(opened.view())
    finally:
        opened.close()


@pytest.mark.parametrize("nbytes", SIZES)
def test_cold_file_is_read_past_the_cache(nbytes: int, tmp_path: Path, direct: list[tuple[int, int]]) -> None:
    data = make(tmp_path / "x", nbytes)
    chill(tmp_path / "x")
    assert read(tmp_path / "x") == data
    ends = files.HEAD + files.TAIL + 2 * reading.READ_PIECE if nbytes >= 2 << 20 else 4096  # read for the headers
    assert sum(n for _, n in direct) > nbytes - ends
    fd = os.open(tmp_path / "x", os.O_RDONLY)
    cached = _host.cached(fd, 0, nbytes)
    os.close(fd)
    assert cached <= max(ends, 64 << 10)


def flags_at(address: int) -> list[str]:
    """What the kernel says of the mapping that has an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= address < int(match[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


def test_no_child_gets_memory_that_is_being_read_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork during a direct read may else leave the bytes with the child: open(2)."""
    data = make(tmp_path / "x", 4 << 20)
    chill(tmp_path / "x")
    meanwhile: list[bool] = []
    real = reading._Direct.read

    def read(self: reading._Direct, at: int, nbytes: int) -> int:
        meanwhile.append("dc" in flags_at(_core.address(self._out)))
        return real(self, at, nbytes)

    monkeypatch.setattr(reading._Direct, "read", read)
    opened, _, _ = open_storage(tmp_path / "x")
    assert isinstance(opened, FileStorage)
    opened.read_all()
    assert meanwhile
    assert all(meanwhile)
    assert flags_at(_core.address(opened.view()))
    assert "dc" not in flags_at(_core.address(opened.view()))
    assert bytes(opened.view()) == data
    opened.close()


@pytest.mark.parametrize("nbytes", SIZES)
def test_warm_file_is_read_from_the_cache(nbytes: int, tmp_path: Path, direct: list[tuple[int, int]]) -> None:
    data = make(tmp_path / "x", nbytes)
    assert read(tmp_path / "x") == data
    assert direct == []


def test_what_is_cached_of_a_cold_file_comes_from_the_cache(tmp_path: Path, direct: list[tuple[int, int]]) -> None:
    """Bytes that were written and are not on the disk yet, among others."""
    data = bytearray(make(tmp_path / "x", 4 << 20))
    chill(tmp_path / "x")
    with open(tmp_path / "x", "r+b") as f:
        f.seek(1 << 20)
        f.write(b"new" * 100_000)
    data[1 << 20 : (1 << 20) + 300_000] = b"new" * 100_000
    assert read(tmp_path / "x") == bytes(data)
    assert direct
    assert sum(n for _, n in direct) < len(data)


@pytest.mark.parametrize("skip", [512, 4096, 7, 100_000])
def test_file_object_that_stands_in_its_middle(skip: int, tmp_path: Path) -> None:
    data = make(tmp_path / "x", 2 << 20)
    chill(tmp_path / "x")
    with open(tmp_path / "x", "rb") as f:
        f.seek(skip)
        assert read(f) == data[skip:]


def test_holes_stay_holes(tmp_path: Path) -> None:
    with open(tmp_path / "x", "wb") as f:
        f.write(b"head" * 1000)
        f.seek(3 << 20)
        f.write(b"tail" * 100_000)
    chill(tmp_path / "x")
    assert read(tmp_path / "x") == (tmp_path / "x").read_bytes()


REFUSALS: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "open": lambda m: m.setattr(reading.os, "O_DIRECT", 1 << 30),
    "align": lambda m: m.setattr(_host, "direct_alignment", lambda fd: (0, 0)),
    "silent": lambda m: m.setattr(_host, "direct_alignment", lambda fd: None),
    "memory": lambda m: m.setattr(_host, "direct_alignment", lambda fd: (1 << 40, 512)),
    "unknown": lambda m: m.setattr(_host, "cached", lambda fd, at, n: -1),
}


@pytest.mark.parametrize("how", REFUSALS)
def test_what_the_system_refuses_is_read_the_other_way(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make(tmp_path / "x", (1 << 20) + 5)
    chill(tmp_path / "x")
    REFUSALS[how](monkeypatch)
    assert read(tmp_path / "x") == data


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP, errno.EIO])
def test_direct_reads_that_fail_fall_back(error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make(tmp_path / "x", (2 << 20) + 5)
    chill(tmp_path / "x")
    real = os.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        if fd in direct_fds():
            raise OSError(error, os.strerror(error))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert read(tmp_path / "x") == data


def direct_fds() -> set[int]:
    """Descriptors of this process that are open for direct reads."""
    found = set()
    for name in os.listdir("/proc/self/fdinfo"):
        try:
            with open(f"/proc/self/fdinfo/{name}") as f:
                flags = next(int(line.split()[1], 8) for line in f if line.startswith("flags:"))
        except OSError:
            continue
        if flags & os.O_DIRECT:
            found.add(int(name))
    return found


def test_short_direct_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make(tmp_path / "x", 2 << 20)
    chill(tmp_path / "x")
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, out, at: real(fd, [out[0][:4096]], at))
    assert read(tmp_path / "x") == data


def test_descriptors_are_closed(tmp_path: Path) -> None:
    make(tmp_path / "x", 2 << 20)
    chill(tmp_path / "x")
    before = len(os.listdir("/proc/self/fd"))
    read(tmp_path / "x")
    assert len(os.listdir("/proc/self/fd")) == before


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    make(tmp_path / "x", (2 << 20) + 5)
    chill(tmp_path / "x")
    opened, _, _ = open_storage(tmp_path / "x")
    assert isinstance(opened, FileStorage)
    seen: list[tuple[int, int]] = []
    opened.read_all(lambda done, total: seen.append((done, total)))
    opened.close()
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == ((2 << 20) + 5,) * 2


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    path = tmp_path / "x.safetensors"
    tensorio.save({"a": np.arange(8 << 20, dtype="f4")}, path, durable=False)
    return path


def test_cold_load_gives_the_tensors(tree: Path, direct: list[tuple[int, int]]) -> None:
    chill(tree)
    assert np.array_equal(tensorio.load(tree, mmap=False)["a"], np.arange(8 << 20, dtype="f4"))
    assert direct  # all but what the disk read around the header


@pytest.mark.parametrize("threads", [1, 3, 30])
def test_first_error_ends_the_work_of_all_threads(threads: int) -> None:
    done: list[int] = []

    def work(job: int) -> None:
        if job == 5:
            raise OSError(errno.EIO, "broken")
        done.append(job)

    with pytest.raises(OSError, match="broken"):
        reading.in_threads(work, range(1000), threads)
    assert len(done) < 1000


def test_every_job_is_done_once() -> None:
    done: list[int] = []
    reading.in_threads(done.append, range(1000), 4)
    assert sorted(done) == list(range(1000))
