"""Steps that are written while training goes on."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio
from steps import restored
from tensorio.manager import _draft

Manager = tensorio.CheckpointManager


def test_a_step_is_what_the_object_was_when_save_returned(tmp_path: Path) -> None:
    with Manager(tmp_path, keep=2) as manager:
        state = {"w": np.zeros(1000), "step": 0}
        futures = []
        for step in range(1, 5):
            state["w"] += 1
            state["step"] = step
            futures.append(manager.save(step, state, metrics={"loss": 1 / step}, block=False))
        state["w"] += 100
        manager.wait()
        assert [future.result().step for future in futures] == [1, 2, 3, 4]
        assert manager.steps() == [3, 4]
        found = restored(manager)
        assert found.value["step"] == 4
        assert (found.value["w"] == 4).all()
        assert manager.info(4) == futures[-1].result()
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-00000003", "step-00000004"]


def test_several_items_become_one_step(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        items = {"model.safetensors": {"w": np.ones(5)}, "training": {"step": 1}}
        manager.save(1, items=items, block=False).result(60)
        assert set(restored(manager).value) == set(items)


def test_nothing_is_listed_before_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, go_on = threading.Event(), threading.Event()
    write_note = _draft.write_note

    def slow(*arguments: Any, **options: Any) -> None:
        written.set()
        assert go_on.wait(60)
        write_note(*arguments, **options)

    monkeypatch.setattr(_draft, "write_note", slow)
    with Manager(tmp_path) as manager:
        future, write = held_up(manager, 1)  # or a file written before `save` returns is published by that
        assert manager.steps() == []
        write.set()
        assert written.wait(60)
        assert manager.steps() == []
        go_on.set()
        future.result(60)
        assert manager.steps() == [1]


def failing(*arguments: Any, **options: Any) -> None:
    raise OSError(28, "No space left on device (injected)")


def test_a_failure_is_raised_by_the_future(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Manager(tmp_path) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(_draft, "write_note", failing)
            future = manager.save(1, {"w": np.ones(5)}, block=False)
            with pytest.raises(OSError, match="injected"):
                future.result(60)
        assert os.listdir(tmp_path) == [".lock"]
        manager.save(1, {"w": np.ones(5)})  # it was looked at: the next call is one of its own
        assert manager.steps() == [1]


@pytest.mark.parametrize("call", ["save", "background", "wait", "close", "rollback"])
def test_a_failure_that_nobody_looked_at_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    manager = Manager(tmp_path)
    manager.save(1, {"w": np.ones(5)})
    with monkeypatch.context() as patch:
        patch.setattr(_draft, "write_note", failing)
        future = manager.save(2, {"w": np.ones(5)}, block=False)
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        assert done.wait(60)
    acts = {
        "save": lambda: manager.save(3, {}), "background": lambda: manager.save(3, {}, block=False),
        "wait": manager.wait, "close": manager.close, "rollback": lambda: manager.rollback(1),
    }  # fmt: skip
    with pytest.raises(OSError, match="injected"):
        acts[call]()
    assert manager.steps() == [1]
    manager.close()  # it was told once


def held_up(manager: Manager, step: int, error: Exception | None = None) -> tuple[Any, threading.Event]:
    """Save a step whose writing has begun, and ends (with an error, if one is given) when the event is set."""
    begun, go_on = threading.Event(), threading.Event()

    def hold(done: int, total: int) -> None:
        begun.set()
        assert go_on.wait(60)
        if error is not None:
            raise error

    future = manager.save(step, {"w": np.ones(5)}, block=False, progress=hold)
    assert begun.wait(60)
    return future, go_on


@pytest.mark.parametrize("call", ["wait", "close"])
def test_a_failure_behind_which_others_were_asked_for_is_raised(tmp_path: Path, call: str) -> None:
    manager = Manager(tmp_path)
    _, go_on = held_up(manager, 1, OSError(28, "No space left on device (injected)"))
    manager.save(2, {"w": np.ones(5)}, block=False)
    go_on.set()
    with pytest.raises(OSError, match="injected"):
        getattr(manager, call)()
    assert manager.steps() == [2]
    manager.close()


def test_each_of_several_failures_is_raised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_draft, "write_note", failing)
    manager = Manager(tmp_path)
    _, go_on = held_up(manager, 1, OSError(5, "Input/output error (injected)"))
    manager.save(2, {"w": np.ones(5)}, block=False)
    go_on.set()
    for message in ("Input/output", "No space"):
        with pytest.raises(OSError, match=message):
            manager.wait()
    manager.close()


def test_what_went_wrong_in_the_block_is_raised_and_not_what_did_in_the_background(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Manager(tmp_path) as manager:
        future, go_on = held_up(manager, 1, OSError(5, "Input/output error (injected)"))
        go_on.set()
        raise KeyboardInterrupt
    with pytest.raises(OSError, match="injected"):  # it is not forgotten
        future.result(60)
    with Manager(tmp_path) as other:
        other.save(1, {"w": np.ones(5)})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_leaves_what_is_pending_to_its_parent(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        first, go_on = held_up(manager, 1)
        second = manager.save(2, {"w": np.ones(5)}, block=False)
        before = sorted(os.listdir(tmp_path))
        child = os.fork()
        if child == 0:  # as a loader's worker: what it has no use for is let go of
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
        after = sorted(os.listdir(tmp_path))
        go_on.set()
        assert after == before
        assert [first.result(60).step, second.result(60).step] == [1, 2]
        assert manager.steps() == [1, 2]


def test_what_can_not_be_saved_is_told_at_once(tmp_path: Path) -> None:
    with Manager(tmp_path, finite=True) as manager:
        with pytest.raises(tensorio.NonFiniteError):
            manager.save(1, {"w": np.array([np.nan])}, block=False)
        with pytest.raises(tensorio.NonFiniteError):
            manager.save(1, items={"a": {"w": np.ones(3)}, "b": {"w": np.array([np.nan])}}, block=False)
        manager.wait()
        assert os.listdir(tmp_path) == [".lock"]


def test_an_interrupted_close_keeps_the_lock_as_long_as_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    manager = Manager(tmp_path)
    future = manager.save(1, {"w": np.zeros(3)}, block=False, progress=lambda *_: go_on.wait(60))

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tensorio.AsyncSaver, "_wait_for_writes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            manager.close()
    with pytest.raises(tensorio.LockedError):
        Manager(tmp_path).save(2, {"w": np.zeros(3)})
    go_on.set()
    manager.close()
    assert future.result().step == 1
    with Manager(tmp_path) as other:
        other.save(2, {"w": np.zeros(3)})
        assert other.steps() == [1, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_forked_while_a_step_is_removed_is_told_who_writes(tmp_path: Path) -> None:
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with manager._turn:
            held.set()
            go_on.wait(60)

    with Manager(tmp_path) as manager:
        manager.save(1, {"w": np.zeros(3)})
        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(60)
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)
            try:
                manager.save(2, {"w": np.zeros(3)})
            except tensorio.LockedError:
                os._exit(0)
            finally:
                os._exit(1)
        go_on.set()
        thread.join()
        assert os.waitpid(pid, 0)[1] == 0
        assert manager.steps() == [1]
