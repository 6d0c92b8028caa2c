"""Tensors brought in ahead of use: order, window, cancelling, errors."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import tensorio
from tensorio.checkpoint import _prefetch
from tensorio.storage.files import FileStorage
from tensorio.system import paging

KIB = 1 << 10
LAYERS = 10
STEP = 64 * KIB


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and steps of the size of small files."""
    for module in (paging, _prefetch):
        monkeypatch.setattr(module, "STEP", STEP)
    monkeypatch.setattr(_prefetch, "LEAST", STEP)


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Offset and bytes of what is brought in, in order."""
    seen: list[tuple[int, int]] = []
    real = FileStorage.bring

    def bring(self: FileStorage, offset: int, nbytes: int) -> Iterator[int]:
        seen.append((offset, nbytes))
        return real(self, offset, nbytes)

    monkeypatch.setattr(FileStorage, "bring", bring)
    return seen


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[tensorio.Checkpoint]:
    path = tmp_path / "model.safetensors"
    tensorio.save({f"layers.{i}": np.full(STEP, i, "u1") for i in range(LAYERS)}, path, durable=False)
    with tensorio.open(path) as opened:
        yield opened


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.002)


def places(checkpoint: tensorio.Checkpoint, numbers: Any) -> list[tuple[int, int]]:
    extents = [checkpoint.infos[f"layers.{i}"].chunks[0].extent for i in numbers]
    return [(e.offset, e.nbytes) for e in extents]


def test_all_is_brought_in_and_told(checkpoint: tensorio.Checkpoint, brought: list[tuple[int, int]]) -> None:
    seen: list[tuple[int, int]] = []
    ahead = checkpoint.prefetch(wait=True, progress=lambda done, total: seen.append((done, total)))
    assert ahead.done
    assert brought == places(checkpoint, range(LAYERS))
    assert seen == [(STEP * (i + 1), STEP * LAYERS) for i in range(LAYERS)]
    assert ahead.position == ahead.total == STEP * LAYERS
    assert ahead.wait()


def test_order_is_that_of_the_names(checkpoint: tensorio.Checkpoint, brought: list[tuple[int, int]]) -> None:
    order = [7, 3, 9, 0]
    checkpoint.prefetch([f"layers.{i}" for i in order], wait=True)
    assert brought == places(checkpoint, order)


def test_neighbours_are_brought_in_together(
    checkpoint: tensorio.Checkpoint, brought: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_prefetch, "STEP", 4 * STEP)
    checkpoint.prefetch([f"layers.{i}" for i in (2, 3, 4, 8)], wait=True)
    (first, _), (other, _) = places(checkpoint, (2, 8))
    assert brought == [(first, 3 * STEP), (other, STEP)]


def test_window_waits_for_the_consumer(checkpoint: tensorio.Checkpoint, brought: list[tuple[int, int]]) -> None:
    """Layered loading: three layers ahead, and no more, however slow the consumer is."""
    with checkpoint.prefetch(window=3 * STEP) as ahead:
        assert not ahead.wait(20)
        assert ahead.position == 3 * STEP
        for i in range(LAYERS):
            assert checkpoint[f"layers.{i}"][0] == i
            until(lambda i=i: ahead.position == min(i + 3, LAYERS) * STEP)  # type: ignore[misc]
            ahead.wait(20)
            assert len(brought) == min(i + 3, LAYERS)
        assert ahead.done


def test_advance_by_hand(checkpoint: tensorio.Checkpoint) -> None:
    """For those who made all arrays at the beginning."""
    arrays = dict(checkpoint)
    with checkpoint.prefetch(window=2 * STEP) as ahead:
        assert not ahead.wait(20)
        ahead.advance("no such tensor")
        ahead.advance("layers.0")
        assert ahead.position == 2 * STEP
        ahead.advance("layers.5")
        until(lambda: ahead.position == 7 * STEP)
        ahead.advance("layers.1")  # never back
        assert not ahead.wait(20)
        assert ahead.position == 7 * STEP
    assert len(arrays) == LAYERS


def test_window_follows_the_memory_that_is_left(
    checkpoint: tensorio.Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorio.system.memory.available", lambda: 16 * STEP)
    assert checkpoint.prefetch().window == 4 * STEP
    assert checkpoint.prefetch(window=100 * STEP).window == 4 * STEP
    assert checkpoint.prefetch(window=2 * STEP).window == 2 * STEP


def test_tied_tensors_are_brought_in_once(tmp_path: Path, brought: list[tuple[int, int]]) -> None:
    path = tmp_path / "tied.pt"
    x = np.ones(STEP, "u1")
    tensorio.save({"a": x, "b": x}, path, durable=False)
    with tensorio.open(path) as opened:
        assert opened.prefetch(wait=True).total == STEP
    assert len(brought) == 1


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "tensorio-prefetch"]


@pytest.mark.parametrize("how", ["cancel", "leave", "close", "forget"])
def test_thread_ends(how: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensorio.save({"a": np.ones(4 * STEP, "u1"), "b": np.ones(STEP, "u1")}, path, durable=False)
    until(lambda: not threads())
    opened = tensorio.open(path)
    ahead = opened.prefetch(window=STEP)
    ahead.wait(20)
    assert not ahead.ended
    assert len(threads()) == 1
    if how == "cancel":
        ahead.cancel()
    elif how == "leave":
        with ahead:
            pass
    elif how == "close":
        opened.close()
    else:
        del opened
        gc.collect()
    until(lambda: not threads())
    assert ahead.ended
    assert not ahead.done
    assert not ahead.wait(20)


def test_close_in_the_middle_is_no_error(checkpoint: tensorio.Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go_on = threading.Event(), threading.Event()
    real = FileStorage.bring

    def bring(self: FileStorage, offset: int, nbytes: int) -> Iterator[int]:
        entered.set()
        go_on.wait(20)
        return real(self, offset, nbytes)

    monkeypatch.setattr(FileStorage, "bring", bring)
    ahead = checkpoint.prefetch()
    assert entered.wait(20)
    checkpoint.close()
    go_on.set()
    assert not ahead.wait(20)


def test_file_that_shrank_is_an_error_of_wait(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensorio.save({"a": np.ones(8 * STEP, "u1")}, path, durable=False)
    with tensorio.open(path) as opened:
        os.truncate(path, STEP)
        with pytest.raises(tensorio.FormatError, match="changed while it was read") as caught:
            opened.prefetch().wait(20)
        assert caught.value.path == str(path)


def test_error_of_progress_ends_it(checkpoint: tensorio.Checkpoint) -> None:
    def progress(done: int, total: int) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        checkpoint.prefetch(progress=progress).wait(20)


def test_unknown_name_is_an_error_at_once(checkpoint: tensorio.Checkpoint) -> None:
    with pytest.raises(tensorio.TensorNotFoundError):
        checkpoint.prefetch(["layers.0", "layer.1"])


@pytest.mark.parametrize("name", ["torch_zip_deflated", "torch_legacy_small", "archive_deflated", "safetensors_empty"])
@pytest.mark.parametrize("options", [{}, {"mmap": False}], ids=str)
def test_every_kind_of_storage_is_brought_in(name: str, options: dict[str, Any]) -> None:
    case = cases.CASES[name]()
    with tensorio.open(case.data, **options) as opened:
        assert opened.prefetch(wait=True).done
        assert {k: v.tobytes() for k, v in opened.items()} == {k: v.tobytes() for k, v in case.tensors.items()}


def test_child_of_a_fork_does_not_wait_for_a_thread_it_has_not(checkpoint: tensorio.Checkpoint, in_child: Any) -> None:
    ahead = checkpoint.prefetch(window=STEP)
    ahead.wait(20)

    def child() -> bool:
        return ahead.wait()

    assert in_child(child, wall=20) is False
    ahead.cancel()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_child_process_does_not_wait_for_a_thread_it_does_not_have(checkpoint: tensorio.Checkpoint) -> None:
    ahead = checkpoint.prefetch(window=STEP, wait=True)
    assert not ahead.ended
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with ahead._state:
            held.set()
            release.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    pid = os.fork()
    if not pid:
        signal.alarm(10)
        ahead.wait()
        os._exit(0 if checkpoint["layers.5"][0] == 5 else 1)
    release.set()
    holder.join()
    assert os.waitpid(pid, 0)[1] == 0
    ahead.cancel()
