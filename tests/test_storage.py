"""Everything a user may call a path; how long bytes live; what is left open; files that change."""

from __future__ import annotations

import array
import bz2
import errno
import gc
import gzip
import io
import mmap
import os
import pathlib
import pickle
import runpy
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import hexfile
import tensorio
from tensorio import formats
from tensorio.storage import reading
from tensorio.storage.base import LazyStorage, MemoryStorage
from tensorio.storage.files import FileStorage, storage_of
from tensorio.storage.opening import open_storage
from tensorio.storage.reading import arena
from tensorio.system import memory

CASE = cases.CASES["safetensors_small"]()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(CASE.data)
    return path


def check(tree: Any) -> None:
    assert {k: v.tobytes() for k, v in tree.items()} == {k: v.tobytes() for k, v in CASE.tensors.items()}


# ----------------------------------------------------------------------- kinds


class Plain:
    """An os.PathLike of one's own."""

    def __init__(self, path: str | bytes) -> None:
        self.path = path

    def __fspath__(self) -> str | bytes:
        return self.path


PATHS: dict[str, Callable[[Path], Any]] = {
    "str": str, "path": lambda p: p, "pure_path": lambda p: pathlib.PurePath(p), "path_like": lambda p: Plain(str(p)),
    "path_like_of_bytes": lambda p: Plain(os.fsencode(p)),
}  # fmt: skip

OBJECTS: dict[str, Callable[[Path], Any]] = {
    "file": lambda p: p.open("rb"), "unbuffered_file": lambda p: p.open("rb", buffering=0),
    "file_for_update": lambda p: p.open("r+b"), "bytes_io": lambda p: io.BytesIO(p.read_bytes()),
    "gzip_file": lambda p: gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(p.read_bytes()))),
    "bz2_file": lambda p: bz2.BZ2File(io.BytesIO(bz2.compress(p.read_bytes()))),
    "spooled": lambda p: _spooled(p.read_bytes()), "mmap": lambda p: _mapped(p),
}  # fmt: skip

BUFFERS: dict[str, Callable[[Path], Any]] = {
    "bytes": lambda p: p.read_bytes(), "bytearray": lambda p: bytearray(p.read_bytes()),
    "memoryview": lambda p: memoryview(p.read_bytes()), "array": lambda p: array.array("B", p.read_bytes()),
    "ndarray": lambda p: np.frombuffer(p.read_bytes(), np.uint8),
}  # fmt: skip


def _spooled(data: bytes) -> Any:
    f = tempfile.SpooledTemporaryFile()  # noqa: SIM115
    f.write(data)
    f.seek(0)
    return f


def _mapped(path: Path) -> mmap.mmap:
    with open(path, "rb") as f:
        return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)


@pytest.mark.parametrize("options", [{}, {"mmap": False}, {"writable": True}], ids=str)
@pytest.mark.parametrize("kind", [*PATHS, *OBJECTS, *BUFFERS])
def test_every_kind_of_path_reads(kind: str, options: dict[str, Any], path: Path) -> None:
    make = {**PATHS, **OBJECTS, **BUFFERS}[kind]
    for read in (tensorio.load, tensorio.open):
        source = make(path)
        try:
            check(read(source, **options))
        finally:
            if hasattr(source, "close"):
                gc.collect()
                source.close()


def test_bytes_as_a_path_are_the_file_itself(path: Path) -> None:
    """``bytes`` are contents, never a name."""
    with pytest.raises(tensorio.FormatError):
        tensorio.load(os.fsencode(path))


@pytest.mark.parametrize("kind", [k for k in OBJECTS if k != "mmap"])
def test_file_object_counts_from_its_position(kind: str, path: Path) -> None:
    path.write_bytes(b"a header of some other kind, of odd length" + CASE.data)
    for read in (tensorio.load, tensorio.open):
        with OBJECTS[kind](path) as f:
            f.seek(42)
            check(read(f))


@pytest.mark.parametrize("mmap", [True, False])
def test_file_object_reads_on_behind_what_was_read(mmap: bool, tmp_path: Path) -> None:
    path, rest = tmp_path / "two.pkl", bytes(range(256)) * 100
    path.write_bytes(pickle.dumps({"a": 1}, 2) + rest)
    with open(path, "rb") as f:
        f.peek(1)  # what is buffered is no reason to look for the rest elsewhere
        assert tensorio.load(f, format="pickle", mmap=mmap) == {"a": 1}
        assert f.tell() == path.stat().st_size - len(rest)
        assert f.read() == rest


def test_file_object_may_be_closed_and_its_file_gone(path: Path) -> None:
    with open(path, "rb") as f:
        tree = tensorio.load(f)
    path.unlink()
    check(tree)


def test_file_object_that_was_written_is_flushed_first(tmp_path: Path) -> None:
    with open(tmp_path / "x", "w+b") as f:
        f.write(CASE.data)
        f.seek(0)
        check(tensorio.load(f))


def test_file_object_at_its_end_is_an_empty_file(path: Path) -> None:
    with open(path, "rb") as f:
        f.seek(0, os.SEEK_END)
        with pytest.raises(tensorio.UnknownFormatError, match="empty"):
            tensorio.load(f)


def test_file_object_behind_its_end_is_truncated(path: Path) -> None:
    with open(path, "rb") as f:
        f.seek(1 << 20)
        with pytest.raises(tensorio.TruncatedError):
            tensorio.load(f)


def test_text_file_is_refused_with_advice(path: Path) -> None:
    with open(path, encoding="latin-1") as f, pytest.raises(tensorio.UnsupportedError, match="'rb'"):
        tensorio.load(f)
    with pytest.raises(tensorio.UnsupportedError, match="'rb'"):
        tensorio.load(io.StringIO("{}"))


def test_pipe_is_refused_not_waited_for() -> None:
    read_end, write_end = os.pipe()
    with (
        os.fdopen(read_end, "rb") as f,
        os.fdopen(write_end, "wb"),
        pytest.raises(tensorio.UnsupportedError, match="seekable"),
    ):
        tensorio.load(f)


def test_buffer_of_several_dimensions_is_read_as_bytes() -> None:
    data = hexfile.st_file({"x": hexfile.st_entry("U8", [8], 0, 8)}, b"12345678")
    assert tensorio.load(np.frombuffer(data, "u4").reshape(2, -1))["x"].tobytes() == b"12345678"


def test_buffer_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises((TypeError, ValueError, BufferError)):
        tensorio.load(memoryview(CASE.data + CASE.data)[::2])


def test_file_name_with_odd_characters_reads(tmp_path: Path) -> None:
    for name in ("a b.pt", "\u00e4.pt", "new\nline.pt", os.fsdecode(b"\xff\xfe.pt"), "-", "#1?x=%20"):
        path = tmp_path / name
        path.write_bytes(CASE.data)
        check(tensorio.load(path))
        path.write_bytes(b"x")
        with pytest.raises(tensorio.UnknownFormatError) as caught:
            tensorio.load(path)
        assert str(caught.value).isprintable()


def test_path_relative_to_the_working_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    check(tensorio.load(path.name))
    with pytest.raises(FileNotFoundError) as caught:
        tensorio.load("nothing.pt")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, "nothing.pt")


def test_link_is_followed(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.pt"
    link.symlink_to(path.name)
    check(tensorio.load(link))


def test_folder_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        tensorio.load(tmp_path)
    assert caught.value.filename == str(tmp_path)


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_special_file_is_named_for_what_it_is(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path = Path("/dev/zero")
    before = cases.open_descriptors()
    with pytest.raises(tensorio.UnsupportedError, match="FIFO" if kind == "fifo" else "device") as caught:
        tensorio.load(path)
    assert caught.value.path == str(path)
    assert cases.open_descriptors() == before


# -------------------------------------------------------------------- lifetime


def test_mapping_is_shared_and_read_only(path: Path) -> None:
    def mapping() -> str:
        with open("/proc/self/maps") as f:
            return next(line.split()[1] for line in f if str(path) in line)

    tree = tensorio.load(path)
    assert mapping() == "r--s"
    del tree
    gc.collect()
    tree = tensorio.load(path, writable=True)
    assert mapping() == "rw-p"
    check(tree)


def test_mapping_goes_with_its_last_view(path: Path) -> None:
    def mapped() -> bool:
        with open("/proc/self/maps") as f:
            return str(path) in f.read()

    checkpoint = tensorio.open(path)
    view = checkpoint["a.weight"][1:]
    checkpoint.close()
    del checkpoint
    gc.collect()
    assert mapped()
    assert view.tobytes() == CASE.tensors["a.weight"][1:].tobytes()
    del view
    gc.collect()
    assert not mapped()


def test_memory_mode_keeps_no_mapping_of_the_file(path: Path) -> None:
    tree = tensorio.load(path, mmap=False)
    with open("/proc/self/maps") as f:
        assert str(path) not in f.read()
    path.write_bytes(b"gone")
    check(tree)


def test_views_of_one_file_share_its_pages(path: Path) -> None:
    a, b = tensorio.load(path, writable=True), tensorio.load(path, writable=True)
    a["a.weight"][0, 0] = 77
    assert b["a.weight"].tobytes() == CASE.tensors["a.weight"].tobytes()  # copy-on-write: the other keeps its own
    assert path.read_bytes() == CASE.data


def test_buffer_is_held_not_copied() -> None:
    data = bytearray(CASE.data)
    tree = tensorio.load(data)
    with pytest.raises(BufferError):
        data.append(0)  # a view is alive
    del tree
    gc.collect()
    data.append(0)


def test_writable_buffer_is_copied() -> None:
    data = bytearray(CASE.data)
    tree = tensorio.load(data, writable=True)
    tree["a.weight"][...] = 0
    assert data == CASE.data


def test_old_views_keep_the_old_file_when_it_is_replaced(path: Path) -> None:
    tree = tensorio.load(path)
    other = path.with_name("new")
    other.write_bytes(cases.safetensors_bytes({"x": np.zeros(9)}))
    os.replace(other, path)
    check(tree)
    assert list(tensorio.load(path)) == ["x"]


# ---------------------------------------------------------------- files that change


def test_file_truncated_while_it_is_read_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process cuts the file between the header and the payload."""
    real = reading._pread
    cut: list[int] = []

    def pread(fd: int, offset: int, out: memoryview) -> int:
        if not cut:
            cut.append(1)
            os.truncate(path, len(CASE.data) - 10)
        return real(fd, offset, out)

    monkeypatch.setattr(reading, "_pread", pread)
    with pytest.raises(tensorio.TruncatedError, match="too early") as caught:
        tensorio.load(path, mmap=False)
    assert caught.value.path == str(path)


@pytest.mark.parametrize("change", ["grown", "touched"])
@pytest.mark.parametrize("read", [tensorio.load, tensorio.open])
def test_file_written_to_while_it_is_opened_is_an_error(
    change: str, read: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FileStorage.check_unchanged

    def check_unchanged(self: FileStorage) -> None:
        if change == "grown":
            with open(path, "ab") as f:
                f.write(b"more")
        else:
            os.utime(path, ns=(5, 5))
        real(self)

    monkeypatch.setattr(FileStorage, "check_unchanged", check_unchanged)
    gc.collect()
    before = cases.open_descriptors()
    with pytest.raises(tensorio.FormatError, match="changed while it was read"):
        read(path)
    gc.collect()
    assert cases.open_descriptors() == before


def test_short_reads_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = reading._pread
    monkeypatch.setattr(reading, "_pread", lambda fd, offset, out: real(fd, offset, out[: max(1, len(out) // 3)]))
    check(tensorio.load(path, mmap=False))


def test_read_error_passes_with_its_number(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pread(fd: int, offset: int, out: memoryview) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(reading, "_pread", pread)
    with pytest.raises(OSError) as caught:
        tensorio.load(path, mmap=False)
    assert caught.value.errno == errno.EIO


def test_file_larger_than_memory_is_refused_up_front(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = cases.safetensors_bytes({"x": np.ones(1 << 20, "f4")})
    path.write_bytes(big)
    monkeypatch.setattr(memory, "available", lambda: 1 << 20)
    with pytest.raises(OSError, match="mmap=True") as caught:
        tensorio.load(path, mmap=False)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOMEM, str(path))


def test_sparse_file_is_read_without_its_holes(tmp_path: Path, in_child: Any) -> None:
    """Four GiB of hole cost no memory and no time."""
    size = 1 << 32
    path = tmp_path / "sparse.safetensors"
    head = hexfile.st_file({"x": hexfile.st_entry("U8", [size], 0, size)})
    path.write_bytes(head)
    os.truncate(path, len(head) + size)
    with open(path, "r+b") as f:
        f.seek(len(head) + size - 5)
        f.write(b"hello")

    def read() -> tuple[bytes, int, int]:
        x = tensorio.load(path, mmap=False)["x"]
        with open("/proc/self/status") as f:
            rss = next(int(line.split()[1]) for line in f if line.startswith("VmRSS"))
        return x[-5:].tobytes(), int(x[: 1 << 16].sum()), rss

    tail, total, rss = in_child(read, wall=20)
    assert (tail, total) == (b"hello", 0)
    assert rss < 1 << 20  # KiB


# ------------------------------------------------------------------------ pieces


@pytest.mark.parametrize("platform", ["darwin", "freebsd14", "win32"])
def test_linux_flags_are_for_linux(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same number makes failing disks read as zeros on macOS, and is an error on FreeBSD."""
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.delattr(mmap, "MAP_NORESERVE", raising=False)
    assert runpy.run_path(reading.__file__)["NORESERVE"] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("nbytes", [1, 4 << 20])
def test_child_process_writes_to_memory_of_its_own(nbytes: int) -> None:
    block = arena(nbytes)
    pid = os.fork()
    if not pid:
        block[0] = 7
        os._exit(0)
    os.waitpid(pid, 0)
    assert block[0] == 0


@pytest.mark.parametrize("nbytes", [0, 1, 4095, (2 << 20) - 1, 2 << 20, (5 << 20) + 7])
def test_arena_is_zeroed_writable_and_of_the_size_asked_for(nbytes: int) -> None:
    block = arena(nbytes)
    assert len(block) == nbytes
    assert not block.readonly
    assert not any(block[:100])
    assert not any(block[-100:])
    if nbytes >= 2 << 20:
        from tensorio import _core

        assert _core.address(block) % (2 << 20) == 0


def test_read_all_of_many_pieces_equals_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "READ_PIECE", 1000)
    data = np.random.default_rng(0).bytes(12_345)
    (tmp_path / "x").write_bytes(data)
    seen: list[tuple[int, int]] = []
    with open(tmp_path / "x", "rb") as f:
        f.seek(7)
        opened, path, _ = open_storage(f)
    assert isinstance(opened, FileStorage)
    assert path is None
    opened.read_all(lambda done, total: seen.append((done, total)))
    assert bytes(opened.view()) == data[7:]
    assert len(seen) == 13
    assert seen[-1] == (12_338, 12_338)


def test_lazy_storage_is_made_once() -> None:
    calls = []
    lazy = LazyStorage(3, lambda: calls.append(1) or b"abc")  # type: ignore[func-returns-value]
    assert calls == []
    assert bytes(lazy.view()) == b"abc"
    assert bytes(lazy.view()) == b"abc"
    assert calls == [1]


def test_lazy_storage_of_other_size_is_an_error() -> None:
    with pytest.raises(tensorio.FormatError, match="expected 4 bytes"):
        LazyStorage(4, lambda: b"abc").view()


def test_closed_storage_gives_no_view() -> None:
    memory = MemoryStorage(b"abc")
    memory.close()
    with pytest.raises(ValueError, match="closed"):
        memory.view()


def test_descriptor_is_not_inherited(path: Path) -> None:
    opened, _, _ = open_storage(path)
    assert isinstance(opened, FileStorage)
    assert not os.get_inheritable(opened.fileno()[0])
    assert stat.S_ISREG(os.fstat(opened.fileno()[0]).st_mode)
    opened.close()


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("mmap", [False, True])
def test_empty_file_is_refused_alike_in_every_way(writable: bool, mmap: bool, tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    for format in formats.names():
        with pytest.raises(tensorio.FormatError):
            tensorio.load(path, format=format, writable=writable, mmap=mmap)


def test_lent_descriptor_stays_the_files_while_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    storage = storage_of(os.open(tmp_path / "x", os.O_RDONLY), "x", start=2)
    with storage.lent() as (fd, start):
        storage.close()
        with open(tmp_path / "other", "w+b") as other:  # would get the number, were it free
            assert other.fileno() != fd
        assert os.pread(fd, 4, start) == b"2345"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(ValueError, match="closed"), storage.lent():
        pass
