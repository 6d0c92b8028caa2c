"""`AsyncSaver`: order, bounds, failures, cancelling."""

from __future__ import annotations

import concurrent.futures
import io
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio
from clock import assert_others_go_on
from gates import SECONDS, held_up
from tensorio.asynchronous._buffers import Buffers
from tensorio.errors import TensorMismatchError
from tensorio.storage.reading import HUGE_PAGE

MIB = 1 << 20


def number(path: Path) -> int:
    return int(tensorio.load(path)["x"][0])


def numbered(i: int) -> dict[str, Any]:
    return {"x": np.full(1000, i)}


# ---------------------------------------------------------------- order


def test_saves_to_one_path_keep_their_order(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with tensorio.AsyncSaver() as saver:
        with held_up(saver, tmp_path):
            futures = [saver.save(numbered(i), path, durable=False) for i in range(20)]
            assert saver.pending == 21
            assert not path.exists()
        finished = []
        for i, future in enumerate(futures):
            future.add_done_callback(lambda _, i=i: finished.append(i))
        saver.wait()
        assert saver.pending == 0
    assert finished == sorted(finished)
    assert number(path) == 19


def test_save_async_shares_one_saver(tmp_path: Path) -> None:
    futures = [tensorio.save_async(numbered(i), tmp_path / "x.pt") for i in range(3)]
    done, _ = concurrent.futures.wait(futures, SECONDS)
    assert done == set(futures)
    assert number(tmp_path / "x.pt") == 2


def test_the_thread_ends_when_there_is_nothing_to_write(tmp_path: Path) -> None:
    with tensorio.AsyncSaver() as saver:
        for i in range(3):
            saver.save(numbered(i), tmp_path / "x.pt", durable=False)
            saver.wait()
    for thread in threading.enumerate():
        if thread.name == "tensorio-save":
            thread.join(SECONDS)
            assert not thread.is_alive()


def test_a_relative_path_counts_from_where_the_call_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    with tensorio.AsyncSaver() as saver, held_up(saver, tmp_path):
        future = saver.save(numbered(1), "x.pt")
        monkeypatch.chdir(tmp_path / "there")
    assert future.result().path == str(tmp_path / "x.pt")
    assert number(tmp_path / "x.pt") == 1


def test_a_file_object(tmp_path: Path) -> None:
    target = io.BytesIO()
    with tensorio.AsyncSaver() as saver:
        assert saver.save(numbered(5), target, format="safetensors").result().path is None
    assert tensorio.load(target.getvalue())["x"][0] == 5


def test_progress_is_told_by_the_thread_that_writes(tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []

    def progress(done: int, total: int) -> None:
        told.append((done, total, threading.current_thread().name))

    with tensorio.AsyncSaver() as saver:
        nbytes = saver.save(numbered(5), tmp_path / "x.pt", progress=progress).result().nbytes
    assert told[-1] == (nbytes, nbytes, "tensorio-save")


# ---------------------------------------------------------------- when an earlier one is not written


def test_busy_skip(tmp_path: Path) -> None:
    with tensorio.AsyncSaver(when_busy="skip") as saver:
        with held_up(saver, tmp_path):
            skipped = saver.save(numbered(1), tmp_path / "x.pt")
            assert skipped.cancelled()
            assert concurrent.futures.wait([skipped], SECONDS).done == {skipped}
        saver.wait()
        assert not (tmp_path / "x.pt").exists()
        assert not saver.save(numbered(2), tmp_path / "x.pt").cancelled()
    assert number(tmp_path / "x.pt") == 2


def test_busy_error(tmp_path: Path) -> None:
    with (
        tensorio.AsyncSaver(when_busy="error") as saver,
        held_up(saver, tmp_path),
        pytest.raises(BlockingIOError, match=r"still being written.*x\.pt"),
    ):
        saver.save(numbered(1), tmp_path / "x.pt")


def test_a_save_waits_until_memory_has_room_for_it(tmp_path: Path) -> None:
    """One huge page holds one snapshot; the third can't be taken before the first is written."""
    begun = threading.Event()
    with tensorio.AsyncSaver(max_memory=2 * HUGE_PAGE) as saver:
        with held_up(saver, tmp_path) as go_on:
            saver.save(numbered(1), tmp_path / "x.pt")

            def third() -> None:
                begun.set()
                saver.save(numbered(2), tmp_path / "x.pt")

            thread = threading.Thread(target=third)
            thread.start()
            assert begun.wait(SECONDS)
            thread.join(0.05)
            assert thread.is_alive()
            assert saver.pending == 2
            go_on.set()
            thread.join(SECONDS)
            assert not thread.is_alive()
        assert saver._buffers.held <= 2 * HUGE_PAGE
    assert number(tmp_path / "x.pt") == 2


def test_what_is_larger_than_the_bound_is_written_at_once(tmp_path: Path) -> None:
    with tensorio.AsyncSaver(max_memory=HUGE_PAGE) as saver:
        saver.save(numbered(1), tmp_path / "x.pt")
        big = {"x": np.full(HUGE_PAGE, 2)}
        with pytest.warns(RuntimeWarning, match=r"more than max_memory") as caught:
            future = saver.save(big, tmp_path / "x.pt")
        assert [warning.filename for warning in caught] == [__file__]
        assert future.done()
        assert number(tmp_path / "x.pt") == 2
        assert saver._buffers.held <= HUGE_PAGE


def test_what_is_pickled_counts_until_it_is_written(tmp_path: Path) -> None:
    """Two tensors fit, and one with a text of that size does not fit beside another."""
    text = {"x": np.full(10, 1), "text": "a" * (3 * HUGE_PAGE)}
    with tensorio.AsyncSaver(max_memory=5 * HUGE_PAGE) as saver:
        with held_up(saver, tmp_path):
            saver.save(text, tmp_path / "1.pt")
            assert 4 * HUGE_PAGE < saver._buffers.held <= 5 * HUGE_PAGE
        saver.wait()
        assert saver._buffers.held <= 2 * HUGE_PAGE
        with pytest.warns(RuntimeWarning, match=r"more than max_memory"):
            saver.save({**text, "more": "b" * (3 * HUGE_PAGE)}, tmp_path / "2.pt")
    assert len(tensorio.load(tmp_path / "1.pt")["text"]) == 3 * HUGE_PAGE
    assert len(tensorio.load(tmp_path / "2.pt")["more"]) == 3 * HUGE_PAGE


def test_what_is_held_beside_a_buffer_counts() -> None:
    buffers = Buffers(4 * HUGE_PAGE)
    first = buffers.lend(HUGE_PAGE, beside=HUGE_PAGE)
    assert first is not None
    assert buffers.held == 2 * HUGE_PAGE
    assert buffers.lend(HUGE_PAGE, beside=4 * HUGE_PAGE) is None
    buffers.give_back(first)
    assert buffers.held == HUGE_PAGE
    # The free one fits, and not with so much beside it: nothing else does either, until it is gone.
    other = buffers.lend(HUGE_PAGE // 2, beside=4 * HUGE_PAGE - HUGE_PAGE // 2)
    assert other is first
    assert buffers.held == 4 * HUGE_PAGE


def test_reserve(tmp_path: Path) -> None:
    with tensorio.AsyncSaver(max_memory=8 * MIB) as saver:
        saver.reserve(5 * MIB)
        assert saver._buffers.held == 6 * MIB
        saver.save(numbered(1), tmp_path / "x.pt").result()
        assert saver._buffers.held == 6 * MIB
        with pytest.raises(OSError, match="max_memory"):
            saver.reserve(9 * MIB)


# ---------------------------------------------------------------- buffers


def test_buffers_are_used_again() -> None:
    buffers = Buffers(8 * HUGE_PAGE)
    first = buffers.lend(HUGE_PAGE)
    assert first is not None
    buffers.give_back(first)
    assert buffers.lend(HUGE_PAGE - 5) is first
    second = buffers.lend(1)
    assert second is not None
    assert second is not first
    assert buffers.held == 2 * HUGE_PAGE


def test_free_buffers_make_room_for_a_larger_one() -> None:
    buffers = Buffers(3 * HUGE_PAGE)
    lent = [buffers.lend(1) for _ in range(3)]
    for buffer in lent:
        assert buffer is not None
        buffers.give_back(buffer)
    assert buffers.held == 3 * HUGE_PAGE
    large = buffers.lend(2 * HUGE_PAGE)
    assert large is not None
    assert large.nbytes == 2 * HUGE_PAGE
    assert buffers.held == 3 * HUGE_PAGE
    assert buffers.lend(4 * HUGE_PAGE) is None


def test_the_bound_is_half_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorio.system import memory

    monkeypatch.setattr(memory, "available", lambda: 8 * HUGE_PAGE)
    assert Buffers().lend(5 * HUGE_PAGE) is None
    assert Buffers().lend(4 * HUGE_PAGE) is not None
    assert Buffers(100 * HUGE_PAGE).lend(9 * HUGE_PAGE) is None


# ---------------------------------------------------------------- failures


def test_what_cannot_be_saved_is_refused_by_the_call(tmp_path: Path) -> None:
    with tensorio.AsyncSaver() as saver:
        with pytest.raises(TensorMismatchError):
            saver.save({"x": "no tensor"}, tmp_path / "x.safetensors")
        with pytest.raises(TypeError, match="colour="):
            saver.save(numbered(1), tmp_path / "x.pt", colour="red")
        with pytest.raises(ValueError, match="suffix"):
            saver.save(numbered(1), tmp_path / "x.nothing")
        assert saver.pending == 0
        assert saver._buffers.held == 0


def notes(error: BaseException) -> str:
    return " ".join(getattr(error, "__notes__", [str(error)]))


def test_a_failure_that_is_looked_at_is_not_raised_again(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "x.pt"
    with tensorio.AsyncSaver() as saver:
        future = saver.save(numbered(1), path)
        with pytest.raises(FileNotFoundError) as caught:
            future.result(SECONDS)
        assert caught.value.filename == str(path)
        saver.save(numbered(2), tmp_path / "x.pt")
    assert number(tmp_path / "x.pt") == 2


def test_a_failure_surfaces_on_the_next_call(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "x.pt"
    with tensorio.AsyncSaver() as saver:
        concurrent.futures.wait([saver.save(numbered(1), path)], SECONDS)
        with pytest.raises(FileNotFoundError) as caught:
            saver.save(numbered(2), tmp_path / "x.pt")
        assert str(path) in notes(caught.value)
        assert not (tmp_path / "x.pt").exists()
        saver.save(numbered(3), tmp_path / "x.pt")
    assert number(tmp_path / "x.pt") == 3


def test_a_failure_surfaces_on_wait_and_close(tmp_path: Path) -> None:
    saver = tensorio.AsyncSaver()
    saver.save(numbered(1), tmp_path / "missing" / "x.pt")
    with pytest.raises(FileNotFoundError):
        saver.wait()
    saver.save(numbered(1), tmp_path / "missing" / "x.pt")
    with pytest.raises(FileNotFoundError):
        saver.close()
    saver.close()
    with pytest.raises(ValueError, match="closed"):
        saver.save(numbered(1), tmp_path / "x.pt")


def test_an_error_of_the_block_is_not_hidden(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tensorio.asynchronous import _future

    with pytest.raises(KeyError, match="mine"), tensorio.AsyncSaver() as saver:
        saver.save(numbered(1), tmp_path / "missing" / "x.pt")
        raise KeyError("mine")
    _future.print_unseen()
    said = capsys.readouterr().err
    assert "missing/x.pt failed, and nobody looked" in said
    assert "FileNotFoundError" in said
    _future.print_unseen()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [StopIteration, KeyboardInterrupt, SystemExit])
def test_whatever_progress_raises_is_told(tmp_path: Path, error: type[BaseException]) -> None:
    def progress(done: int, total: int) -> None:
        raise error

    with tensorio.AsyncSaver() as saver:
        future = saver.save(numbered(1), tmp_path / "x.pt", progress=progress)
        assert isinstance(future.exception(SECONDS), error)
        saver.save(numbered(2), tmp_path / "y.pt").result()
    assert [p.name for p in tmp_path.iterdir()] == ["y.pt"]


def test_an_interrupted_copy_gives_its_buffer_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorio.asynchronous import _snapshot

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with tensorio.AsyncSaver(max_memory=HUGE_PAGE) as saver:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(_snapshot, "in_threads", interrupt)
            saver.save(numbered(1), tmp_path / "x.pt")
        assert saver.pending == 0
        saver.save(numbered(2), tmp_path / "x.pt").result()
    assert number(tmp_path / "x.pt") == 2


def test_a_wait_that_takes_too_long(tmp_path: Path) -> None:
    with tensorio.AsyncSaver() as saver, held_up(saver, tmp_path):
        with pytest.raises(TimeoutError, match="1 saves"):
            saver.wait(0.01)
        assert saver.pending == 1


# ---------------------------------------------------------------- cancelling


def test_cancelling_frees_the_buffer_at_once(tmp_path: Path) -> None:
    with tensorio.AsyncSaver() as saver:
        with held_up(saver, tmp_path):
            lent = saver._buffers.lent
            future = saver.save(numbered(1), tmp_path / "x.pt")
            assert saver._buffers.lent > lent
            assert future.cancel()
            assert saver._buffers.lent == lent
            assert saver.pending == 1
            assert concurrent.futures.wait([future], SECONDS).done == {future}
        saver.wait()
    assert not (tmp_path / "x.pt").exists()


def test_what_is_being_written_cannot_be_cancelled(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hold(done: int, total: int) -> None:
        begun.set()
        assert go_on.wait(SECONDS)

    with tensorio.AsyncSaver() as saver:
        future = saver.save(numbered(1), tmp_path / "x.pt", progress=hold)
        assert begun.wait(SECONDS)
        assert not future.cancel()
        go_on.set()
    assert number(tmp_path / "x.pt") == 1


# ---------------------------------------------------------------- words


def test_words_that_are_not_known() -> None:
    with pytest.raises(ValueError, match="when_busy"):
        tensorio.AsyncSaver(when_busy="never")
    with pytest.raises(ValueError, match="max_memory"):
        tensorio.AsyncSaver(max_memory=-1)


# ---------------------------------------------------------------- others go on


@pytest.mark.plain_build
def test_other_threads_go_on_while_a_snapshot_is_taken_and_written(tmp_path: Path) -> None:
    obj = {f"t{i}": np.full(64 * MIB, i, "u1") for i in range(6)}
    with tensorio.AsyncSaver() as saver:
        futures = []
        assert_others_go_on(lambda: futures.append(saver.save(obj, tmp_path / "x.pt", durable=False)))
        saver.wait()
        saver.save(obj, tmp_path / "x.pt", durable=False)
        assert_others_go_on(lambda: saver.wait() or saver.save(obj, tmp_path / "x.pt", durable=False).result())
