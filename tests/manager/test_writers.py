"""Two who write, many who read, and writers that die or fail at every step."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio
from steps import assert_whole_after_the_third, restored

Manager = tensorio.CheckpointManager


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(100, step, np.float32), "step": step}


def test_a_second_writer_is_refused_and_told_who_the_first_is(tmp_path: Path) -> None:
    first, second = Manager(tmp_path), Manager(tmp_path)
    first.save(1, state(1))
    acts: list[Callable[[], object]] = [
        lambda: second.save(2, state(2)), lambda: second.pin(1), lambda: second.rollback(1),
    ]  # fmt: skip
    for act in acts:
        with pytest.raises(tensorio.LockedError, match=f"process {os.getpid()} on {os.uname().nodename}"):
            act()
    assert restored(second).step == 1  # reading takes no lock
    first.close()
    second.save(2, state(2))
    second.close()
    assert Manager(tmp_path).steps() == [1, 2]


def test_without_locks_two_may_write(tmp_path: Path) -> None:
    with Manager(tmp_path, lock=False) as first, Manager(tmp_path, lock=False) as second:
        first.save(1, state(1))
        second.save(2, state(2))
        assert first.steps() == [1, 2]
    assert not (tmp_path / ".lock").exists()


def kill_at(folder: Path, place: str) -> None:
    """Let another process save steps 1 and 2, of which 1 stays, and kill it where it calls something."""
    code = """
import os, signal, sys, numpy as np, tensorio
from tensorio.manager import _draft, _local
manager = tensorio.CheckpointManager(sys.argv[1], keep=1)
manager.save(1, {"w": np.ones(10)})
die = lambda *arguments, **options: os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "note":
    _draft.write_note = die
else:
    _local.shutil.rmtree = die
manager.save(2, {"w": np.ones(10)})
"""
    path = ":".join(p for p in sys.path if p)
    done = subprocess.run([sys.executable, "-c", code, str(folder), place], env={"PYTHONPATH": path}, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert [name for name in os.listdir(folder) if name.endswith(".tmp")]


def test_a_writer_killed_while_it_saves_leaves_the_step_before(tmp_path: Path) -> None:
    kill_at(tmp_path, "note")
    with Manager(tmp_path) as manager:
        assert manager.steps() == [1]
        assert restored(manager).step == 1
        manager.save(2, state(2))  # it holds no lock
        assert manager.steps() == [1, 2]


def test_a_writer_killed_while_it_removes_leaves_no_half_of_a_step(tmp_path: Path) -> None:
    kill_at(tmp_path, "remove")
    with Manager(tmp_path) as manager:
        assert manager.steps() == [2]
        assert restored(manager).step == 2
        manager.save(3, state(3))
        assert sorted(os.listdir(tmp_path)) == [".lock", "step-00000002", "step-00000003"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    manager = Manager(tmp_path)
    manager.save(1, state(1))
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:  # lives until it is let go of
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    try:
        manager.close()
        with Manager(tmp_path) as other:
            other.save(2, state(2))
    finally:
        os.close(write_end)
        os.waitpid(child, 0)
        os.close(read_end)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_lock_goes_though_a_child_has_its_descriptor(tmp_path: Path) -> None:
    """One that was forked and has run no line of Python yet, or never does: a copy of the descriptor stands for it."""
    manager = Manager(tmp_path)
    manager.save(1, state(1))
    inside = os.stat(tmp_path / ".lock")
    [held] = [fd for fd in map(int, os.listdir("/dev/fd")) if _is_on(fd, inside)]
    copy = os.dup(held)
    try:
        manager.close()
        with Manager(tmp_path) as other:
            other.save(2, state(2))
    finally:
        os.close(copy)


def test_a_folder_that_was_removed_and_made_again_is_locked_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Manager(folder) as first:
        first.save(1, state(1))
        shutil.rmtree(folder)
        first.save(2, state(2))
        with pytest.raises(tensorio.LockedError):
            Manager(folder).save(3, state(3))
        assert first.steps() == [2]


def _is_on(fd: int, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), file)
    except OSError:
        return False


def test_a_manager_that_nobody_has_any_more_lets_go_of_the_lock(tmp_path: Path) -> None:
    manager = Manager(tmp_path)
    manager.save(1, state(1))
    del manager
    gc.collect()
    with Manager(tmp_path) as other:
        other.save(2, state(2))


def test_readers_see_whole_steps_only(tmp_path: Path) -> None:
    """Every step of a listing can be checked, unless it is gone again; every restore is whole."""
    done = threading.Event()
    wrong: list[object] = []

    def look(manager: Manager) -> None:
        for step in manager.steps():
            try:
                manager.check(step)
            except FileNotFoundError:
                if step in manager.steps():
                    wrong.append(step)
        found = manager.restore()
        if found is not None and not (found.value["w"] == found.step).all():
            wrong.append(found)

    def read() -> None:
        manager = Manager(tmp_path)
        try:
            while not done.is_set():
                look(manager)
        except Exception as error:  # of whatever kind: it is shown
            wrong.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    with Manager(tmp_path, keep=2, durable=False) as manager:
        for step in range(30):
            manager.save(step, state(step))
    done.set()
    for reader in readers:
        reader.join()
    assert wrong == []


CALLS = ["rename", "replace", "fsync", "mkdir", "open", "write", "unlink", "listdir", "stat"]


class Failing:
    """A function of `os` that fails at its k-th call, once or from then on."""

    def __init__(self, name: str, at: int, sticky: bool) -> None:
        self.real, self.left, self.sticky, self.hit = getattr(os, name), at, sticky, False

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left == 0 or (self.sticky and self.left < 0):
            self.hit = True
            raise OSError(5, "Input/output error (injected)")
        return self.real(*arguments, **options)


@pytest.mark.parametrize("sticky", [False, True], ids=["once", "from_then_on"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.filterwarnings("ignore:old checkpoints are not removed")
def test_a_call_that_fails_leaves_old_steps_or_the_new_one(tmp_path: Path, call: str, sticky: bool) -> None:
    """For every k: steps that are listed are whole, and those of before are there unless the new one is."""
    for k in range(1, 100):
        folder = tmp_path / str(k)
        with Manager(folder, keep=2) as manager:
            for step in (1, 2):
                manager.save(step, state(step))
            failing = Failing(call, k, sticky)
            saved = True
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, call, failing)
                try:
                    manager.save(3, state(3))
                except OSError:
                    saved = False
            assert_whole_after_the_third(manager, saved)
            manager.save(4, state(4))  # and training goes on
        shutil.rmtree(folder)
        if not failing.hit:
            return
    raise AssertionError("the call never stopped being made")
