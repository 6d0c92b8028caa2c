"""What a callback asks of the saver whose thread it runs on: answered, or refused, and never waited for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio
from gates import SECONDS, held_up

MIB = 1 << 20
pytestmark = pytest.mark.timeout(SECONDS)


def numbered(i: int) -> dict[str, Any]:
    return {"x": np.full(1000, i)}


def caught(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None


def in_callback(saver: tensorio.AsyncSaver, folder: Path, call: Callable[[Future[Any]], object]) -> list[Any]:
    """What came of a call by the callback of a save behind which another one waits; the error, if it raised one."""
    found: list[Any] = []
    with held_up(saver, folder):
        first = saver.save(numbered(1), folder / "1.safetensors", durable=False)
        second = saver.save(numbered(2), folder / "2.safetensors", durable=False)
        first.add_done_callback(lambda _: found.append(caught(lambda: call(second))))
    second.result(SECONDS)
    assert len(found) == 1
    return found


CALLS: dict[str, Callable[[tensorio.AsyncSaver, Future[Any]], object]] = {
    "wait": lambda saver, _: saver.wait(),
    "close": lambda saver, _: saver.close(),
    "with": lambda saver, _: saver.__exit__(None, None, None),
    "result": lambda _, later: later.result(),
    "exception": lambda _, later: later.exception(),
}


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_what_would_wait_for_its_own_thread_is_refused(name: str, processes: bool, tmp_path: Path) -> None:
    with tensorio.AsyncSaver(processes=processes) as saver:
        (error,) = in_callback(saver, tmp_path, lambda later: CALLS[name](saver, later))
        assert isinstance(error, RuntimeError)
        assert "callback" in str(error)
        saver.save(numbered(3), tmp_path / "3.safetensors").result(SECONDS)  # it is not closed
    assert all((tmp_path / f"{i}.safetensors").exists() for i in (1, 2, 3))


def test_a_future_that_is_done_is_asked_in_a_callback(tmp_path: Path) -> None:
    found: list[Any] = []
    with tensorio.AsyncSaver() as saver:
        earlier = saver.save(numbered(0), tmp_path / "0.safetensors")
        earlier.result(SECONDS)
        (error,) = in_callback(saver, tmp_path, lambda _: found.append(earlier.result()))
    assert error is None
    assert found[0].path == str(tmp_path / "0.safetensors")


def test_progress_may_not_wait_either(tmp_path: Path) -> None:
    with tensorio.AsyncSaver() as saver:
        future = saver.save(numbered(1), tmp_path / "x.safetensors", progress=lambda *_: saver.wait())
        assert isinstance(future.exception(SECONDS), RuntimeError)


def test_a_save_in_a_callback_is_written(tmp_path: Path) -> None:
    with tensorio.AsyncSaver() as saver:
        (error,) = in_callback(saver, tmp_path, lambda _: saver.save(numbered(3), tmp_path / "3.safetensors"))
        saver.wait()
    assert error is None
    assert (tmp_path / "3.safetensors").exists()


@pytest.mark.parametrize("count", [1, 100 * MIB])
def test_a_save_in_a_callback_that_has_no_memory_is_refused(count: int, tmp_path: Path) -> None:
    """Only its own thread could make room for it, or write what comes before it."""
    with tensorio.AsyncSaver(max_memory=4 * MIB) as saver:
        found: list[Any] = []
        with held_up(saver, tmp_path):
            first = saver.save(numbered(1), tmp_path / "1.safetensors")
            first.add_done_callback(
                lambda _: found.append(
                    caught(lambda: [saver.save({"x": np.zeros(count, "u1")}, tmp_path / f"y{i}.pt") for i in range(3)])
                )
            )
        saver.wait()
        assert isinstance(found[0], RuntimeError)
        assert "max_memory" in str(found[0])
        saver.save(numbered(2), tmp_path / "2.safetensors").result(SECONDS)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ValueError])
def test_what_a_callback_raises_does_not_end_the_writing(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise error

    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_type))
    with tensorio.AsyncSaver() as saver:
        with held_up(saver, tmp_path):
            saver.save(numbered(1), tmp_path / "1.safetensors").add_done_callback(fail)
            second = saver.save(numbered(2), tmp_path / "2.safetensors")
        second.result(SECONDS)
        saver.wait(SECONDS)
    assert told == ([] if error is ValueError else [error])  # concurrent.futures logs the others itself


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_future_of_the_parent_is_not_waited_for_in_a_child(tmp_path: Path) -> None:
    with tensorio.AsyncSaver() as saver, held_up(saver, tmp_path):
        future = saver.save(numbered(1), tmp_path / "1.safetensors")
        pid = os.fork()
        if pid == 0:
            error = caught(future.result)
            os._exit(0 if isinstance(error, RuntimeError) and "fork" in str(error) else 1)
        assert os.waitpid(pid, 0)[1] == 0
    assert future.result(SECONDS)


@pytest.mark.parametrize("name", ["wait", "close", "save", "rollback", "result"])
def test_a_manager_is_not_waited_for_in_a_callback(name: str, tmp_path: Path) -> None:
    calls: dict[str, Callable[[], object]] = {
        "wait": lambda: manager.wait(),
        "close": lambda: manager.close(),
        "save": lambda: manager.save(9, numbered(9)),
        "rollback": lambda: manager.rollback(1),
        "result": lambda: later.result(),
    }
    found: list[Any] = []
    asked, go_on = threading.Event(), threading.Event()

    def call(_: object) -> None:
        found.append(caught(calls[name]))
        asked.set()

    def hold(done: int, total: int) -> None:
        assert go_on.wait(SECONDS)

    with tensorio.CheckpointManager(tmp_path, durable=False) as manager:
        manager.save(1, numbered(1), block=False, progress=hold).add_done_callback(call)
        later = manager.save(2, numbered(2), block=False)
        go_on.set()
        assert asked.wait(SECONDS)
        manager.wait()
        manager.save(3, numbered(3))
        assert manager.steps() == [1, 2, 3]
    assert isinstance(found[0], RuntimeError)


def test_a_manager_saves_in_the_background_in_a_callback(tmp_path: Path) -> None:
    done, go_on = threading.Event(), threading.Event()

    def again(_: object) -> None:
        manager.save(2, numbered(2), block=False)
        done.set()

    with tensorio.CheckpointManager(tmp_path) as manager:
        first = manager.save(1, numbered(1), block=False, progress=lambda *_: go_on.wait(SECONDS))
        first.add_done_callback(again)
        go_on.set()
        assert done.wait(SECONDS)
        manager.wait()
        assert manager.steps() == [1, 2]
