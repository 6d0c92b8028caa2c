"""Saves are all or nothing: whatever fails, the old file is as it was and nothing is left beside it."""

from __future__ import annotations

import errno
import io
import os
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import tensorio
from tensorio import _host
from tensorio.writing import output

SMALL = {"x": np.arange(6, dtype="f4").reshape(2, 3), "y": np.arange(5, dtype="u1")}
LARGE = {"w": np.arange(1 << 20, dtype="f4")}
SUFFIXES = [".safetensors", ".pt"]


class Planned:
    """A plan by hand: pieces, and an error after them if wanted."""

    def __init__(self, *pieces: bytes, nbytes: int | None = None, error: BaseException | None = None) -> None:
        self.nbytes = sum(map(len, pieces)) if nbytes is None else nbytes
        self.keep: list[object] = []
        self._pieces = pieces
        self._error = error

    def pieces(self) -> Iterator[bytes]:
        yield from self._pieces
        if self._error is not None:
            raise self._error


@pytest.fixture(params=SUFFIXES)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A good checkpoint at a path."""
    path = tmp_path / f"model{request.param}"
    tensorio.save(SMALL, path)
    return path


def check(tree: Any, want: Any) -> None:
    assert {k: v.tobytes() for k, v in tree.items()} == {k: v.tobytes() for k, v in want.items()}


def alone(path: Path) -> bool:
    return [p.name for p in path.parent.iterdir()] == [path.name]


# ------------------------------------------------------------------ all of it


@pytest.mark.parametrize("durable", [True, False])
def test_save_replaces_the_whole_file(target: Path, durable: bool) -> None:
    old = os.stat(target).st_ino
    tensorio.save(LARGE, target, durable=durable)
    check(tensorio.load(target), LARGE)
    assert alone(target)
    assert os.stat(target).st_ino != old


@pytest.mark.parametrize("kind", [str, lambda p: p, os.fsencode], ids=["str", "path", "bytes"])
def test_save_takes_every_kind_of_path(kind: Any, target: Path) -> None:
    tensorio.save(LARGE, kind(target))
    check(tensorio.load(target), LARGE)


def test_save_into_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tensorio.save(SMALL, "x.safetensors")
    check(tensorio.load("x.safetensors"), SMALL)


@pytest.mark.parametrize("length", [200, 240, 255])
def test_save_under_a_long_name(length: int, tmp_path: Path) -> None:
    path = tmp_path / ("n" * (length - 12) + ".safetensors")
    tensorio.save(SMALL, path)
    assert alone(path)


def test_save_under_a_long_name_of_wide_characters(tmp_path: Path) -> None:
    path = tmp_path / ("\u20ac" * 81 + ".safetensors")
    tensorio.save(SMALL, path)
    assert alone(path)


def test_save_over_the_file_its_arrays_are_views_of(target: Path) -> None:
    """The rename leaves the old bytes to those who mapped them."""
    tree = tensorio.load(target)
    tensorio.save({**tree, "more": np.ones(3)}, target)
    check(tree, SMALL)
    check(tensorio.load(target), {**SMALL, "more": np.ones(3)})


def test_mappings_of_the_old_file_stay_valid(target: Path) -> None:
    with tensorio.open(target) as old:
        before = old["x"]
        tensorio.save(LARGE, target)
        check(old, SMALL)
        assert before.tolist() == SMALL["x"].tolist()


def test_progress_counts_every_byte(target: Path) -> None:
    calls: list[tuple[int, int]] = []
    tensorio.save(LARGE, target, progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert len(calls) > 3
    assert calls[-1] == (target.stat().st_size,) * 2


# ------------------------------------------------------------------- or nothing


@pytest.mark.parametrize(
    "error", [RuntimeError("stop"), KeyboardInterrupt(), MemoryError(), OSError(errno.EIO, "x")], ids=repr
)
def test_error_while_writing_leaves_the_old_file(error: BaseException, target: Path) -> None:
    before = target.read_bytes()
    with pytest.raises(type(error)):
        output.write_plan(Planned(b"half", nbytes=100, error=error), target)
    assert target.read_bytes() == before
    assert alone(target)


@pytest.mark.parametrize("call", ["fsync", "replace", "fchmod", "write", "dup"])
def test_error_of_any_system_call_leaves_the_old_file(call: str, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = target.read_bytes()

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError) as caught:
        tensorio.save(LARGE, target)
    monkeypatch.undo()
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(target)
    assert target.read_bytes() == before
    assert alone(target)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_filesystem_without_preallocation_is_written_all_the_same(
    number: int, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_host, "reserve", lambda fd, nbytes: number)
    tensorio.save(LARGE, target)
    check(tensorio.load(target), LARGE)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_refused_preallocation_says_what_is_needed(number: int, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = target.read_bytes()
    monkeypatch.setattr(_host, "reserve", lambda fd, nbytes: number)
    with pytest.raises(OSError, match=r"\d bytes are needed") as caught:
        tensorio.save(LARGE, target)
    assert (caught.value.errno, caught.value.filename) == (number, str(target))
    assert ("are free" in str(caught.value)) == (number == errno.ENOSPC)
    assert target.read_bytes() == before
    assert alone(target)


def test_preallocation_that_signals_keep_interrupting_is_done_without(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def interrupted(fd: int, nbytes: int) -> int:
        calls.append(nbytes)
        return errno.EINTR

    monkeypatch.setattr(_host, "reserve", interrupted)
    tensorio.save(LARGE, target)
    assert 1 < len(calls) < 10
    check(tensorio.load(target), LARGE)


def test_preallocation_writes_nothing(tmp_path: Path) -> None:
    """A file that is reserved and not written is of the full length, in blocks of its own, and reads as zeros."""
    with open(tmp_path / "file", "w+b") as f:
        if _host.reserve(f.fileno(), 1 << 20):
            pytest.skip("the filesystem does not reserve")
        assert os.fstat(f.fileno()).st_size == 1 << 20
        assert os.fstat(f.fileno()).st_blocks * 512 >= 1 << 20
        assert f.read() == bytes(1 << 20)


def test_refused_write_says_how_far_it_came(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = os.write, iter(range(100))

    def write(fd: int, data: Any) -> int:
        if next(count) == 0:
            return real(fd, data[:7])
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match=r"7 of \d+ bytes were written") as caught:
        tensorio.save(LARGE, target)
    assert (caught.value.errno, caught.value.filename) == (errno.EDQUOT, str(target))


def test_write_that_takes_nothing_ends(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda fd, data: 0)
    with pytest.raises(OSError, match="took no more after 0 of"):
        tensorio.save(LARGE, target)


@pytest.mark.parametrize("done", [True, False])
def test_interrupted_rename_is_done_once(done: bool, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may have renamed before the signal came, or not."""
    real, calls = os.replace, []

    def replace(a: str, b: str) -> None:
        calls.append(a)
        if len(calls) > 1:
            return real(a, b)
        if done:
            real(a, b)
        raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))

    monkeypatch.setattr(os, "replace", replace)
    tensorio.save(LARGE, target)
    monkeypatch.undo()
    assert len(calls) == (1 if done else 2)
    check(tensorio.load(target), LARGE)
    assert alone(target)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP])
def test_filesystem_without_rename_says_what_to_do(number: int, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="save to another filesystem") as caught:
        tensorio.save(LARGE, target)
    monkeypatch.undo()
    assert (caught.value.errno, caught.value.filename) == (number, str(target))
    assert alone(target)


def test_folder_that_can_not_be_synced_is_said_and_the_new_file_is_there(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="is in place, but a power cut may take it back") as caught:
        tensorio.save(LARGE, target)
    monkeypatch.undo()
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(target))
    check(tensorio.load(target), LARGE)
    assert alone(target)


def test_short_writes_are_continued(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data[: max(1, len(data) // 2)])))
    tensorio.save(LARGE, target)
    monkeypatch.undo()
    check(tensorio.load(target), LARGE)


@pytest.mark.parametrize("nbytes", [3, 5])
def test_plan_that_does_not_keep_its_promise_writes_nothing(nbytes: int, target: Path) -> None:
    before = target.read_bytes()
    with pytest.raises(ValueError, match="promised"):
        output.write_plan(Planned(b"four", nbytes=nbytes), target)
    assert target.read_bytes() == before
    assert alone(target)


def test_object_that_can_not_be_saved_leaves_the_old_file(target: Path) -> None:
    before = target.read_bytes()
    with pytest.raises((tensorio.TensorIOError, TypeError)):
        tensorio.save({"x": (i for i in range(3))}, target)
    assert target.read_bytes() == before
    assert alone(target)


def test_progress_that_raises_leaves_the_old_file(target: Path) -> None:
    before = target.read_bytes()

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tensorio.save(LARGE, target, progress=stop)
    assert target.read_bytes() == before
    assert alone(target)


def _save_large(path: Path) -> None:
    tensorio.save(LARGE, path)


def test_full_disk_is_said_with_number_and_name(target: Path, in_child: Any) -> None:
    """A limit on the size of files stands for the full disk: the system refuses the bytes."""
    before = target.read_bytes()
    with pytest.raises(OSError) as caught:
        in_child(_save_large, target, file_size=1 << 20)
    assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
    assert caught.value.filename == str(target)
    assert target.read_bytes() == before
    assert alone(target)


def _save_and_die(path: Path, after: int) -> None:
    def die(done: int, total: int) -> None:
        if done >= after:
            os._exit(99)

    tensorio.save(LARGE, path, progress=die)


@pytest.mark.parametrize("after", [1, 1 << 20, 4 << 20])
def test_process_that_dies_while_saving_leaves_the_old_file(after: int, target: Path) -> None:
    before = target.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: forking with threads; the child starts none
        pid = os.fork()
    if pid == 0:
        try:
            _save_and_die(target, after)
        finally:
            os._exit(98)
    _, status = os.waitpid(pid, 0)
    assert os.WEXITSTATUS(status) == 99
    assert target.read_bytes() == before
    tensorio.save(LARGE, target)  # what the dead one left is in nobody's way
    check(tensorio.load(target), LARGE)


# --------------------------------------------------------------- mode and place


def test_mode_of_a_new_file_is_the_umasks(tmp_path: Path) -> None:
    for mask in (0o022, 0o027, 0o077, 0o000):
        path = tmp_path / f"{mask:o}.safetensors"
        before = os.umask(mask)
        try:
            tensorio.save(SMALL, path)
        finally:
            os.umask(before)
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o444])
def test_mode_of_the_replaced_file_is_kept(mode: int, target: Path) -> None:
    target.chmod(mode)
    tensorio.save(LARGE, target)
    assert stat.S_IMODE(target.stat().st_mode) == mode


def test_what_replaces_a_private_file_is_private_while_it_is_written(target: Path) -> None:
    target.chmod(0o600)
    modes: list[int] = []

    def look(done: int, total: int) -> None:
        modes.extend(stat.S_IMODE(f.stat().st_mode) for f in target.parent.iterdir() if f != target)

    tensorio.save(LARGE, target, progress=look)
    assert modes
    assert not any(mode & 0o077 for mode in modes)
    with output.replacing(target) as beside:
        assert stat.S_IMODE(Path(beside).parent.stat().st_mode) == 0o700
        Path(beside).write_bytes(b"")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_owner_of_the_replaced_file_is_kept(target: Path) -> None:
    os.chown(target, 1234, 2345)
    tensorio.save(LARGE, target)
    assert (target.stat().st_uid, target.stat().st_gid) == (1234, 2345)


def test_link_stays_a_link_and_its_file_is_replaced(target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "links"
    folder.mkdir()
    link = folder / f"latest{target.suffix}"
    link.symlink_to(f"../{target.name}")
    tensorio.save(LARGE, link)
    assert link.is_symlink()
    assert os.readlink(link) == f"../{target.name}"
    check(tensorio.load(target), LARGE)
    assert list(folder.iterdir()) == [link]


def test_link_to_nowhere_makes_its_file(tmp_path: Path) -> None:
    link = tmp_path / "link.safetensors"
    link.symlink_to("real.safetensors")
    tensorio.save(SMALL, link)
    assert link.is_symlink()
    check(tensorio.load(tmp_path / "real.safetensors"), SMALL)


def test_hard_link_keeps_the_old_bytes(target: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    os.link(target, other)
    before = other.read_bytes()
    tensorio.save(LARGE, target)
    assert other.read_bytes() == before


def test_special_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe.safetensors"
    os.mkfifo(path)
    link = tmp_path / "null.safetensors"
    link.symlink_to("/dev/null")
    for place in (path, link):
        with pytest.raises(tensorio.UnsupportedError, match="regular file"):
            tensorio.save(SMALL, place)
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["null.safetensors", "pipe.safetensors"]


def test_folder_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "folder.safetensors"
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        tensorio.save(SMALL, path)
    assert path.is_dir()
    assert alone(path)


def test_missing_folder_is_said_with_the_name_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "no" / "where.safetensors"
    with pytest.raises(FileNotFoundError) as caught:
        tensorio.save(SMALL, path)
    assert caught.value.filename == str(path)


def test_descriptors_are_closed(target: Path) -> None:
    before = cases.open_descriptors()
    for _ in range(3):
        tensorio.save(LARGE, target)
        with pytest.raises(RuntimeError):
            output.write_plan(Planned(b"x", nbytes=9, error=RuntimeError()), target)
    assert cases.open_descriptors() == before


def test_durable_syncs_file_then_name_then_folder(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def sync(fd: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else f"file of {os.fstat(fd).st_size}")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", sync)

    def rename(a: str, b: str) -> None:
        calls.append("rename")
        replace(a, b)

    monkeypatch.setattr(os, "replace", rename)
    tensorio.save(LARGE, target)
    assert calls == [f"file of {target.stat().st_size}", "rename", "folder"]
    calls.clear()
    tensorio.save(LARGE, target, durable=False)
    assert calls == ["rename"]


# ----------------------------------------------------------------- file objects


class Short(io.RawIOBase):
    """A raw stream that takes a little at a time."""

    def __init__(self, most: int) -> None:
        self.data = bytearray()
        self.most = most

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        piece = bytes(data[: self.most])
        self.data += piece
        return len(piece)


class Wrapper:
    """An object that says nothing about how much it took."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.flushed = 0

    def write(self, data: Any) -> None:
        self.data += data

    def flush(self) -> None:
        self.flushed += 1


def expected(format: str) -> bytes:
    out = io.BytesIO()
    tensorio.save(LARGE, out, format=format)
    return out.getvalue()


@pytest.mark.parametrize("format", ["safetensors", "torch_zip"])
def test_file_objects_of_every_manner_get_all_bytes(format: str, tmp_path: Path) -> None:
    want = expected(format)
    check(tensorio.load(want), LARGE)
    short, wrapper = Short(1000), Wrapper()
    tensorio.save(LARGE, short, format=format)
    tensorio.save(LARGE, wrapper, format=format)
    with open(tmp_path / "file", "wb") as f:
        f.write(b"12345")
        tensorio.save(LARGE, f, format=format)
    assert short.data == wrapper.data == want
    assert wrapper.flushed == 1
    assert (tmp_path / "file").read_bytes() == b"12345" + want


def test_file_object_that_takes_nothing_is_an_error() -> None:
    with pytest.raises(OSError, match="took no bytes"):
        tensorio.save(SMALL, Short(0), format="safetensors")


def test_file_object_needs_a_format() -> None:
    with pytest.raises(ValueError, match="format="):
        tensorio.save(SMALL, io.BytesIO())


@pytest.mark.parametrize("target", [None, 3, [], {}], ids=repr)
def test_other_targets_are_type_errors(target: Any) -> None:
    with pytest.raises(TypeError, match="expected a path"):
        tensorio.save(SMALL, target, format="safetensors")


def test_unknown_suffix_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises((ValueError, tensorio.TensorIOError), match=r"\.safetensors"):
        tensorio.save(SMALL, tmp_path / "model.xyz")
    assert list(tmp_path.iterdir()) == []


def test_state_dict_of_many_tensors_round_trips(tmp_path: Path) -> None:
    tensors = cases.state_dict(3000, (3, 5))
    for suffix in SUFFIXES:
        path = tmp_path / f"many{suffix}"
        tensorio.save(tensors, path, durable=False)
        check(tensorio.load(path, verify=True), tensors)
