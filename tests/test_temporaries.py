"""What killed processes leave is removed by the next save to that name; what a process still holds never is."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio
from tensorio.system import disks
from tensorio.writing import temporaries

NAME = "model.safetensors"
TENSORS = {"w": np.arange(9)}
HOLD = """
import sys
from tensorio.writing import temporaries
made = getattr(temporaries, sys.argv[1])
with made(sys.argv[2], sys.argv[3], 0o700) as found:
    print(found[1] if isinstance(found, tuple) else found, flush=True)
    sys.stdin.read()
"""
KINDS = pytest.mark.parametrize("made", ["made_file", "made_folder"])

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Windows does not let open files be removed")


@contextlib.contextmanager
def held(made: str, folder: Path, name: str = NAME) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that has a temporary, and the path of it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, made, str(folder), name],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        path = Path(process.stdout.readline().rstrip("\n"))
        assert path.exists()
        yield process, path
    finally:
        process.kill()
        process.communicate()


def killed(made: str, folder: Path, name: str = NAME) -> Path:
    """What a process leaves that is killed."""
    with held(made, folder, name) as (process, path):
        if path.is_dir():
            (path / "part").write_bytes(b"half")
            (path / "deeper").mkdir()
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert path.exists()
    return path


def other_host(path: Path, start: str = "7") -> Path:
    """The same litter under the name that another host, or this one before it was started anew, would give it."""
    pid, _, _, random = path.name.rpartition(".tensorio-")[2].split("-")
    renamed = path.with_name(f".{NAME}.tensorio-{pid}-{start}-0badcafe.f00d-{random}")
    path.rename(renamed)
    return renamed


@pytest.fixture
def shared_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk pass for one that other hosts write to."""
    monkeypatch.setattr(temporaries, "disk_of", lambda device, fd: disks.Disk("nfs4", "/"))


@KINDS
def test_next_save_removes_what_a_killed_one_left(made: str, tmp_path: Path) -> None:
    killed(made, tmp_path)
    tensorio.save(TENSORS, tmp_path / NAME)
    assert [p.name for p in tmp_path.iterdir()] == [NAME]


@KINDS
def test_what_a_process_holds_stays(made: str, tmp_path: Path) -> None:
    with held(made, tmp_path) as (_, path):
        tensorio.save(TENSORS, tmp_path / NAME)
        assert temporaries.clean_stale(str(tmp_path)) == []
        assert path.exists()


@KINDS
def test_what_a_process_holds_stays_whatever_its_name_says(made: str, tmp_path: Path) -> None:
    """On one host the lock decides: the namespaces of containers know each other's processes under other ids."""
    with held(made, tmp_path) as (_, path):
        path = other_host(path)
        assert temporaries.clean_stale(str(tmp_path), NAME) == []
        assert path.exists()


@KINDS
def test_lock_alone_decides_where_all_share_one_system(made: str, tmp_path: Path) -> None:
    path = other_host(killed(made, tmp_path))
    with open(path if path.is_file() else __file__) as f:
        if not disks.disk_of(path.stat().st_dev, f.fileno()).local:
            pytest.skip("the folder for temporary files may be shared with other hosts")
    assert temporaries.clean_stale(str(tmp_path), NAME) == [str(path)]
    assert list(tmp_path.iterdir()) == []


@KINDS
@pytest.mark.usefixtures("shared_disk")
def test_on_a_shared_disk_what_other_hosts_left_stays(made: str, tmp_path: Path) -> None:
    path = other_host(killed(made, tmp_path))
    assert temporaries.clean_stale(str(tmp_path), NAME) == []
    assert path.exists()


@KINDS
@pytest.mark.usefixtures("shared_disk")
def test_on_a_shared_disk_what_this_host_left_goes(made: str, tmp_path: Path) -> None:
    path = killed(made, tmp_path)
    assert temporaries.clean_stale(str(tmp_path), NAME) == [str(path)]


@KINDS
def test_without_locks_the_name_decides(made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temporaries, "_lock", lambda fd: None)
    dead = killed(made, tmp_path)
    foreign = other_host(killed(made, tmp_path))
    with held(made, tmp_path) as (_, path):
        assert temporaries.clean_stale(str(tmp_path), NAME) == [str(dead)]
        assert path.exists()
        assert foreign.exists()


@pytest.mark.usefixtures("shared_disk")
def test_process_id_given_to_another_process_does_not_keep_litter(tmp_path: Path) -> None:
    path = Path(temporaries.temporary_name(str(tmp_path), NAME))
    pid, start, host, random = path.name.rpartition(".tensorio-")[2].split("-")
    path.touch()
    assert temporaries.clean_stale(str(tmp_path), NAME) == []  # this process, which is there
    path.rename(path.with_name(f".{NAME}.tensorio-{pid}-{int(start, 16) - 1:x}-{host}-{random}"))
    assert len(temporaries.clean_stale(str(tmp_path), NAME)) == 1


def test_only_what_was_to_get_the_name_goes(tmp_path: Path) -> None:
    other = killed("made_file", tmp_path, "optimizer.pt")
    mine = killed("made_file", tmp_path)
    assert temporaries.clean_stale(str(tmp_path), NAME) == [str(mine)]
    assert temporaries.clean_stale(str(tmp_path)) == [str(other)]


def test_files_of_the_user_stay(tmp_path: Path) -> None:
    names = [f".{NAME}.tmp", f".{NAME}.tensorio-1-1-1.tmp", f".{NAME}.tensorio-x-1-1-1.tmp", f"{NAME}.tmp", ".tmp",
             f".{NAME}.tensorio-1-1-host-0", ".other.tensorio-.tmp"]  # fmt: skip
    for name in names:
        (tmp_path / name).touch()
    assert temporaries.clean_stale(str(tmp_path)) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names)


def test_links_and_pipes_of_such_names_are_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"x")
    Path(temporaries.temporary_name(str(tmp_path), NAME)).symlink_to(precious)
    os.mkfifo(temporaries.temporary_name(str(tmp_path), NAME))
    assert temporaries.clean_stale(str(tmp_path)) == []
    assert precious.read_bytes() == b"x"


@KINDS
def test_one_that_is_taken_for_litter_as_it_is_made_is_made_again(
    made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between making and locking, somebody may clean."""
    real, cleaned = temporaries._lock, []

    def lock(fd: int) -> bool | None:
        if not cleaned:
            cleaned.append(None)
            cleaned.extend(temporaries.clean_stale(str(tmp_path), NAME))
        return real(fd)

    monkeypatch.setattr(temporaries, "_lock", lock)
    with getattr(temporaries, made)(str(tmp_path), NAME, 0o700) as found:
        path = found[1] if isinstance(found, tuple) else found
        assert os.path.exists(path)
        assert len(cleaned) == 2
        assert cleaned[1] != path
    assert {os.path.basename(path)} >= set(os.listdir(tmp_path))


@pytest.mark.parametrize("length", [1, 150, 151, 255])
def test_every_file_name_has_a_temporary(length: int, tmp_path: Path) -> None:
    name = "n" * length
    killed("made_file", tmp_path, name)
    assert len(temporaries.clean_stale(str(tmp_path), name)) == 1


def test_temporaries_of_forked_processes_are_theirs(tmp_path: Path, in_child: Any) -> None:
    mine = temporaries.temporary_name(str(tmp_path), NAME)
    theirs = in_child(temporaries.temporary_name, str(tmp_path), NAME)
    pids = [int(path.rpartition(".tensorio-")[2].split("-")[0]) for path in (mine, theirs)]
    assert pids[0] == os.getpid()
    assert pids[1] not in (0, os.getpid())


def test_large_folder_is_not_looked_through_for_every_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many saves into one folder stay linear in their number."""
    looks: list[str] = []
    real = os.listdir

    def listdir(folder: Any) -> list[str]:
        looks.append(folder)
        return real(folder)

    monkeypatch.setattr(os, "listdir", listdir)
    monkeypatch.setattr(temporaries, "_MANY", 0)
    monkeypatch.setattr(temporaries, "_SHARE", 1e9)
    monkeypatch.setattr(temporaries, "_rest", {})
    for i in range(5):
        tensorio.save(TENSORS, tmp_path / f"{i}.safetensors")
    assert len(looks) == 1
    temporaries.clean_stale(str(tmp_path))  # who asks outright is served
    assert len(looks) == 2


@pytest.mark.parametrize("final", [None, "elsewhere"])
def test_errors_in_a_temporary_folder_name_what_was_to_be(final: str | None, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        with temporaries.made_folder(str(tmp_path), NAME, 0o700, final and str(tmp_path / final)) as path:
            os.stat(os.path.join(path, "part"))
    assert caught.value.filename == str(tmp_path / (final or NAME) / "part")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "made"), [("open", "made_file"), ("mkdir", "made_folder"), ("open", "made_folder")])
def test_an_interrupt_right_behind_the_making_leaves_nothing(
    name: str, made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(os, name)

    def interrupted(path: Any, *arguments: Any, **options: Any) -> Any:
        found = real(path, *arguments, **options)
        if "tensorio-" not in str(path):
            return found
        if name == "open":
            os.close(found)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, name, interrupted)
    with pytest.raises(KeyboardInterrupt), getattr(temporaries, made)(str(tmp_path), "m", 0o700):
        pass
    assert os.listdir(tmp_path) == []
