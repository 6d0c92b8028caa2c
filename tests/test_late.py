"""What comes late to a folder that is replaced, while the process that replaces it is killed or fails."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import tensorio
from tensorio import _host
from tensorio.writing import carrying, folders, late, output
from tensorio.writing.temporaries import clean_stale

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="folders are exchanged on Linux only")


def save(seed: int, folder: Path) -> None:
    tensorio.save({f"w{i}": np.full(100, seed, "f4") for i in range(7)}, folder, max_shard_size=900)


def seed_in(folder: Path) -> set[int]:
    files = [safetensors.numpy.load_file(path) for path in folder.glob("*.safetensors")]
    return {int(array[0]) for held in files for array in held.values()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "m"
    save(1, folder)
    for name in ("config.json", "gone.json", "same.json"):
        (folder / name).write_text("old")
    return folder


def come_late(folder: Path) -> None:
    (folder / "late.json").write_text("late")
    (folder / "runs" / "later").mkdir(parents=True)
    (folder / "runs" / "later" / "events").write_text("late")
    (folder / "new.json").write_text("late")
    os.replace(folder / "new.json", folder / "config.json")
    (folder / "gone.json").unlink()


def killed(folder: Path, before: Callable[[], object], *, exchanged: bool = True) -> None:
    """Save in a process that is killed when the names are exchanged, or just before that."""
    pid = os.fork()
    if pid == 0:
        try:
            real = _host.exchange

            def exchange(a: str, b: str) -> int:
                before()
                if exchanged:
                    assert real(a, b) == 0
                os.kill(os.getpid(), signal.SIGKILL)
                return 0

            _host.exchange = exchange
            save(2, folder)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def assert_brought_over(folder: Path) -> None:
    assert (folder / "late.json").read_text() == "late"
    assert (folder / "runs" / "later" / "events").read_text() == "late"
    assert (folder / "config.json").read_text() == "late"
    assert (folder / "same.json").read_text() == "old"
    assert not (folder / "gone.json").exists()
    assert os.listdir(folder.parent) == ["m"]


def test_a_kill_behind_the_exchange_loses_nothing(folder: Path) -> None:
    killed(folder, lambda: come_late(folder))
    assert seed_in(folder) == {2}
    assert not (folder / "late.json").exists()
    save(3, folder)
    assert_brought_over(folder)
    assert seed_in(folder) == {3}


def test_whoever_cleans_brings_it_over(folder: Path) -> None:
    killed(folder, lambda: come_late(folder))
    assert len(clean_stale(str(folder.parent))) == 1
    assert_brought_over(folder)
    assert seed_in(folder) == {2}


def test_a_kill_before_the_exchange_brings_nothing_over(folder: Path) -> None:
    killed(folder, lambda: come_late(folder), exchanged=False)
    clean_stale(str(folder.parent))
    assert_brought_over(folder)
    assert seed_in(folder) == {1}


def test_what_was_written_since_then_stays(folder: Path) -> None:
    killed(folder, lambda: come_late(folder))
    for name in ("config.json", "late.json", "gone.json"):
        (folder / "mine.json").write_text("mine")
        os.replace(folder / "mine.json", folder / name)
    save(3, folder)
    assert {(folder / name).read_text() for name in ("config.json", "late.json", "gone.json")} == {"mine"}
    assert (folder / "runs" / "later" / "events").read_text() == "late"
    assert os.listdir(folder.parent) == ["m"]


def test_what_can_not_be_brought_over_yet_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(folder, lambda: come_late(folder))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(late, "carry_late", full)
        assert clean_stale(str(folder.parent)) == []
    clean_stale(str(folder.parent))
    assert_brought_over(folder)


def test_a_folder_that_somebody_removed_stays_removed(folder: Path) -> None:
    killed(folder, lambda: come_late(folder))
    os.rename(folder, folder.parent / "elsewhere")
    clean_stale(str(folder.parent))
    assert os.listdir(folder.parent) == ["elsewhere"]


@pytest.mark.parametrize("text", [b"", b"[]", b'{"name": "m"', b'{"name": "m", "staged": 1, "left": [], "carried": 5}'])
def test_a_note_that_says_nothing_is_litter(text: bytes, folder: Path) -> None:
    killed(folder, lambda: None, exchanged=False)
    (note,) = folder.parent.glob(".*.late")
    note.write_bytes(text)
    clean_stale(str(folder.parent))
    assert os.listdir(folder.parent) == ["m"]
    assert seed_in(folder) == {1}


def test_a_note_without_its_folder_is_litter(folder: Path) -> None:
    killed(folder, lambda: None, exchanged=False)
    (note,) = folder.parent.glob(".*.late")
    os.rename(str(note)[: -len(".late")], folder.parent / "elsewhere")
    clean_stale(str(folder.parent))
    assert sorted(os.listdir(folder.parent)) == ["elsewhere", "m"]


def test_what_was_brought_over_goes_back_if_the_rest_can_not_be(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new folder is removed then, with all in it."""
    exchange, replace = _host.exchange, os.replace
    late_names = ["a.json", "b.json", "c.json"]

    def come(a: str, b: str) -> int:
        for name in late_names:
            if not (folder / name).exists():
                (folder / name).write_text("late")
        return exchange(a, b)

    done = []

    def failing(source: Any, target: Any) -> None:
        if os.path.basename(target) in late_names and target.startswith(f"{folder}/"):
            done.append(target)
            if len(done) == 2:
                raise OSError(errno.EIO, os.strerror(errno.EIO), target)
        replace(source, target)

    monkeypatch.setattr(_host, "exchange", come)
    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="Input/output"):
        save(2, folder)
    assert [(folder / name).read_text() for name in late_names] == ["late"] * 3
    assert seed_in(folder) == {1}
    assert os.listdir(folder.parent) == ["m"]


def test_a_sync_that_fails_behind_the_exchange_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = _host.exchange
    came: list[int] = []

    def exchange(a: str, b: str) -> int:
        if not came:
            come_late(folder)
        came.append(1)
        return real(a, b)

    def sync(place: str) -> None:
        if came:
            raise OSError(errno.EIO, os.strerror(errno.EIO), place)

    monkeypatch.setattr(_host, "exchange", exchange)
    monkeypatch.setattr(folders, "sync_folder", sync)
    with pytest.raises(OSError, match="Input/output"):
        save(2, folder)
    assert_brought_over(folder)
    assert seed_in(folder) == {1}


def test_what_is_visible_stays_if_the_rest_can_not_be_brought_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(folder, lambda: come_late(folder))
    real = os.replace

    def failing(source: Any, target: Any) -> None:
        if os.path.basename(target) != "config.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO), target)
        real(source, target)

    walk = carrying._walk
    with monkeypatch.context() as patch:
        patch.setattr(carrying, "_walk", lambda *args: iter(sorted(walk(*args))))
        patch.setattr(os, "replace", failing)
        assert clean_stale(str(folder.parent)) == []
    assert (folder / "config.json").exists()
    clean_stale(str(folder.parent))
    assert_brought_over(folder)


@pytest.mark.parametrize("kill", [False, True])
def test_every_folder_that_something_came_to_is_synced(
    kill: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    if kill:
        killed(folder, lambda: come_late(folder))
        monkeypatch.setattr(output, "sync_folder", synced.append)
        clean_stale(str(folder.parent))
    else:
        real = _host.exchange
        monkeypatch.setattr(_host, "exchange", lambda a, b: (come_late(folder), synced.clear(), real(a, b))[-1])
        monkeypatch.setattr(folders, "sync_folder", synced.append)
        save(2, folder)
    assert_brought_over(folder)
    assert set(synced) == {str(folder), str(folder / "runs"), str(folder / "runs" / "later")}


@pytest.mark.parametrize("kill", [False, True])
def test_a_folder_that_comes_late_keeps_its_mode(kill: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def come() -> None:
        come_late(folder)
        (folder / "runs").chmod(0o700)

    if kill:
        killed(folder, come)
        clean_stale(str(folder.parent))
    else:
        real = _host.exchange
        monkeypatch.setattr(_host, "exchange", lambda a, b: (come(), real(a, b))[-1])
        save(2, folder)
    assert_brought_over(folder)
    assert stat.S_IMODE((folder / "runs").stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "runs" / "later").stat().st_mode) == 0o777 & ~umask()


def umask() -> int:
    old = os.umask(0)
    os.umask(old)
    return old


@pytest.mark.parametrize("name", ["../beside", "/beside", "runs/../../beside", "", ".."])
def test_a_note_leads_nowhere_else(name: str, folder: Path) -> None:
    killed(folder, lambda: come_late(folder))
    beside = folder.parent / "beside"
    beside.write_text("beside")
    (note,) = folder.parent.glob(".*.late")
    fields = json.loads(note.read_text())
    found = beside.stat()
    path = str(beside) if name == "/beside" else name
    fields["carried"][path] = [found.st_ino, found.st_size, found.st_mtime_ns]
    note.write_text(json.dumps(fields))
    clean_stale(str(folder.parent))
    assert beside.read_text() == "beside"
    assert seed_in(folder) == {2}


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs root, to be several users")
def test_a_note_of_somebody_else_is_not_obeyed(folder: Path) -> None:
    killed(folder, lambda: come_late(folder))
    (note,) = folder.parent.glob(".*.late")
    os.chown(note, 12345, 12345)
    assert clean_stale(str(folder.parent)) == []
    assert not (folder / "late.json").exists()
    os.chown(note, 0, 0)
    clean_stale(str(folder.parent))
    assert_brought_over(folder)


def test_an_interrupt_right_behind_the_exchange_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = _host.exchange
    came: list[int] = []

    def exchange(a: str, b: str) -> int:
        if came:
            return real(a, b)
        come_late(folder)
        came.append(real(a, b))
        raise KeyboardInterrupt

    monkeypatch.setattr(_host, "exchange", exchange)
    with pytest.raises(KeyboardInterrupt):
        save(2, folder)
    assert_brought_over(folder)
    assert seed_in(folder) == {1}
