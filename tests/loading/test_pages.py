"""Pages of mapped files: huge ones for payloads and not for headers, in steps, and let go."""

from __future__ import annotations

import errno
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hexfile
import tensorio
from cold import evicted
from tensorio import _host
from tensorio.storage.files import FileStorage
from tensorio.storage.opening import open_storage
from tensorio.system import paging

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs Linux's /proc")

MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "x.safetensors"
    tensorio.save({"a": np.arange(24 * MIB // 4, dtype="i4"), "b": np.ones(24 * MIB, "u1")}, path, durable=False)
    yield path
    path.unlink()


def flags_of(path: Path) -> set[str]:
    """The kernel's two-letter flags of the mapping of a file."""
    mine = False
    with open("/proc/self/smaps") as f:
        for line in f:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                mine = line.rstrip().endswith(str(path))
            elif mine and line.startswith("VmFlags:"):
                return set(line.split()[1:])
    raise AssertionError("not mapped")


def in_page_tables(path: Path, row: str = "Rss") -> int:
    """Bytes of the mappings of a file that this process has in its page tables; as huge pages: "FilePmdMapped"."""
    mine, total = False, 0
    with open("/proc/self/smaps") as f:
        for line in f:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                mine = line.rstrip().endswith(str(path))
            elif mine and line.startswith(f"{row}:"):
                total += int(line.split()[1]) << 10
    return total


def file_storage(path: Path) -> FileStorage:
    storage, _, _ = open_storage(path)
    assert isinstance(storage, FileStorage)
    return storage


needs_huge_pages = pytest.mark.skipif(
    not os.path.exists("/sys/kernel/mm/transparent_hugepage"), reason="this kernel has no transparent huge pages"
)


@needs_huge_pages
@pytest.mark.parametrize("options", [{}, {"writable": True}, {"mmap": True}], ids=str)
def test_payload_is_mapped_with_huge_pages_wanted(options: dict[str, Any], path: Path) -> None:
    with tensorio.open(path, **options) as checkpoint:
        assert "hg" not in flags_of(path)  # the header alone was looked at
        assert "rr" not in flags_of(path)
        held = checkpoint["a"]
        assert "hg" in flags_of(path)
    assert "hg" in flags_of(path)
    del held


@needs_huge_pages
def test_scattered_headers_are_read_without_reading_around_them(path: Path) -> None:
    storage = file_storage(path)
    with storage.scattered():
        assert "rr" in flags_of(path)
    storage.lease()
    with storage.scattered():
        assert {"rr", "nh"} <= flags_of(path)
        assert "hg" not in flags_of(path)
    assert "hg" in flags_of(path)
    assert not {"rr", "nh"} & flags_of(path)
    storage.close()


def test_random_access_reads_nothing_around(path: Path) -> None:
    with tensorio.open(path, mmap="random") as checkpoint:
        held = checkpoint["a"]
        assert "rr" in flags_of(path)
        assert "hg" not in flags_of(path)
        with checkpoint._opened.storages[0].scattered():
            pass
        assert "rr" in flags_of(path)
        assert checkpoint.loading.endswith("nothing read around what is looked at")
        if evicted(path) == 0:
            for i in range(0, 6 << 20, 1 << 20):
                assert held[i] == i
            fd = os.open(path, os.O_RDONLY)
            assert _host.cached(fd, 0, path.stat().st_size) <= 8 * mmap.PAGESIZE
            os.close(fd)
    del held
    tree = tensorio.load(path, mmap="random")
    assert "rr" in flags_of(path)
    del tree


@pytest.mark.plain_build
def test_open_of_many_cold_records_reads_a_page_or_so_of_each(tmp_path: Path) -> None:
    """A hundred records of 1 MiB: huge pages around each header would be all of the file."""
    path = tmp_path / "x.pt"
    tensorio.save({str(i): np.full(1 << 18, i, "f4") for i in range(100)}, path, durable=False)
    if evicted(path) != 0:
        pytest.skip("this system does not let a file go from its page cache, or does not tell")
    with tensorio.open(path) as checkpoint:
        arrays = dict(checkpoint)
        fd = os.open(path, os.O_RDONLY)
        cached = _host.cached(fd, 0, path.stat().st_size)
        os.close(fd)
        assert len(arrays) == 100
        # The name and offset of each record; the archive's directory; what the disk reads around those.
        assert cached < path.stat().st_size // 4


@pytest.mark.plain_build
def test_inspect_of_a_huge_sparse_file_maps_next_to_nothing(tmp_path: Path, in_child: Any) -> None:
    size, count = 100 << 30, 1000
    part = size // count
    path = tmp_path / "x.safetensors"
    head = hexfile.st_file({f"t{i:04}": hexfile.st_entry("U8", [part], i * part, (i + 1) * part) for i in range(count)})
    path.write_bytes(head)
    os.truncate(path, len(head) + part * count)

    def look() -> tuple[int, int]:
        with tensorio.open(path) as checkpoint:
            arrays = dict(checkpoint)
            return in_page_tables(path), len(arrays)

    resident, tensors = in_child(look)
    assert tensors == count
    assert resident <= 4 * MIB


@pytest.mark.plain_build
@needs_huge_pages
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_cold_payload_comes_in_huge_pages(suffix: str, tmp_path: Path) -> None:
    """As much of it as of a mapping that was never looked at before it was advised, wherever the headers are."""
    path = tmp_path / f"x{suffix}"
    tensorio.save({str(i): np.ones(12 * MIB, "u1") for i in range(8)}, path, durable=False)
    if evicted(path) != 0:
        pytest.skip("this system does not let a file go from its page cache, or does not tell")
    with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as plain:
        _host.advise(plain, mmap.MADV_HUGEPAGE)
        assert plain[:: mmap.PAGESIZE]
        can = in_page_tables(path, "FilePmdMapped")
    if can < 64 * MIB or evicted(path) != 0:
        pytest.skip("this filesystem has no huge pages")
    with tensorio.open(path) as checkpoint:
        arrays = dict(checkpoint)
        assert sum(int(a[:: mmap.PAGESIZE].sum()) for a in arrays.values()) >= 96 * MIB // mmap.PAGESIZE
        assert in_page_tables(path, "FilePmdMapped") >= can - 8 * MIB  # those around the headers at the ends are small


@pytest.mark.plain_build
def test_headers_of_a_cold_file_are_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensorio.save({"a": np.ones(64 * MIB, "u1")}, path, durable=False)
    if evicted(path) != 0:
        pytest.skip("this system does not let a file go from its page cache, or does not tell")
    with tensorio.open(path) as checkpoint, open(path, "rb") as f:
        assert checkpoint["a"].shape == (64 * MIB,)
        assert _host.cached(f.fileno(), 0, path.stat().st_size) <= 2 * MIB


# ------------------------------------------------------------------------ populating


def test_populate_maps_a_range_in_steps(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "STEP", 4 * MIB)
    storage = file_storage(path)
    seen: list[tuple[int, int]] = []
    storage.populate(8 * MIB, 18 * MIB, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(n * MIB, 18 * MIB) for n in (4, 8, 12, 16, 18)]
    assert 18 * MIB <= in_page_tables(path) < 30 * MIB
    storage.close()


def test_populate_stops_when_told_to(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "STEP", 4 * MIB)
    storage = file_storage(path)
    seen: list[int] = []
    storage.populate(0, storage.nbytes, progress=lambda done, _: seen.append(done), cancelled=lambda: len(seen) >= 2)
    assert seen == [4 * MIB, 8 * MIB]
    storage.close()


@pytest.mark.parametrize("populating", [True, False], ids=["populate", "touch"])
def test_populate_of_a_file_that_shrank_is_an_error(
    populating: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not populating:
        monkeypatch.setattr(_host, "advise", lambda view, advice: errno.EINVAL)
    storage = file_storage(path)
    os.truncate(path, 10 * MIB)
    with pytest.raises(tensorio.FormatError, match=r"changed while it was read: .* found 10485760 bytes"):
        storage.populate(0, storage.nbytes)
    storage.close()


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOSYS])
def test_populate_touches_pages_where_the_kernel_can_not(
    error: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = file_storage(path)
    monkeypatch.setattr(_host, "advise", lambda view, advice: error)
    storage.populate(0, storage.nbytes)
    assert in_page_tables(path) >= storage.nbytes // mmap.PAGESIZE * mmap.PAGESIZE
    storage.close()


def test_populate_passes_errors_of_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = file_storage(path)
    monkeypatch.setattr(_host, "advise", lambda view, advice: errno.EIO)
    with pytest.raises(OSError) as caught:
        storage.populate(0, 100)
    assert caught.value.errno == errno.EIO
    storage.close()


def test_populate_of_writable_pages_keeps_what_was_written(path: Path) -> None:
    with tensorio.open(path, writable=True) as checkpoint:
        a = checkpoint["a"]
        a[:100] = 7
        checkpoint.prefetch(wait=True)
        checkpoint._opened.storages[0].release(0, 1 << 20)
        assert (a[:100] == 7).all()
        assert a[100] == 100


# ------------------------------------------------------------------------- unchanged


def test_check_unchanged(path: Path) -> None:
    with tensorio.open(path) as checkpoint:
        checkpoint.check_unchanged()
        other = path.with_name("new")
        other.write_bytes(b"x")
        kept = path.with_name("kept")
        os.link(path, kept)
        os.replace(other, path)
        checkpoint.check_unchanged()  # the file it has is as it was
        os.truncate(kept, 5)
        with pytest.raises(tensorio.FormatError, match="changed") as caught:
            checkpoint.check_unchanged()
        assert caught.value.path == str(path)
    kept.unlink()
    with pytest.raises(ValueError, match="closed"):
        checkpoint.check_unchanged()
