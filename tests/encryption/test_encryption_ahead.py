"""Chunks made by several threads: in order, a few ahead, at the end of a program, and no longer than asked for."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tensorio.encryption._ahead import in_order

pytestmark = pytest.mark.plain_build

BEGIN = """
import atexit, os, sys, threading, time
import numpy as np, tensorio
from tensorio.encryption import _plan, _storage
_plan.readers = _storage.readers = lambda: 4  # however few cores there are
folder, key = sys.argv[1], bytes(32)
path = os.path.join(folder, "m.safetensors")
tensorio.save({"x": np.arange(1 << 20)}, path)

def act():
    tensorio.encrypt(path, f"{path}.enc", key=key)
    assert tensorio.load(f"{path}.enc", key=key)["x"][-1] == (1 << 20) - 1
    assert tensorio.verify(f"{path}.enc", key=key).ok
    tensorio.decrypt(f"{path}.enc", f"{path}.back", key=key)
"""
LATER = """
def late():
    threading.main_thread().join()
    act()
threading.Thread(target=late).start()
"""


@pytest.mark.parametrize(
    "code", ["atexit.register(act)", LATER], ids=["handler of the end", "thread after the main one"]
)
def test_files_are_encrypted_and_read_at_the_end_of_a_program(code: str, tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="needs the extra crypt")
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": ":".join(p for p in sys.path if p)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "m.safetensors.back").read_bytes() == (tmp_path / "m.safetensors").read_bytes()


def square(i: int) -> int:
    time.sleep(np.random.default_rng(i).random() / 1000)
    return i * i


@pytest.mark.parametrize("count", [0, 1, 2, 3, 100])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_are_in_the_order_of_the_jobs(count: int, threads: int) -> None:
    assert list(in_order(square, range(count), threads)) == [i * i for i in range(count)]


def test_threads_are_a_few_jobs_ahead_and_no_more() -> None:
    begun: list[int] = []
    results = in_order(lambda i: begun.append(i) or i, range(1000), 3)
    for given in range(100):
        assert next(results) == given
        assert len(begun) <= given + 1 + 2 * 3
    results.close()  # type: ignore[attr-defined]
    assert len(begun) < 200


def test_the_first_error_in_order_is_raised_and_nothing_works_on() -> None:
    working = threading.Semaphore(0)

    def work(i: int) -> int:
        if i == 5:
            raise StopIteration("five")
        working.release()
        time.sleep(0.001)
        working.acquire()
        return i

    got = []
    with pytest.raises(RuntimeError, match="StopIteration"):  # as for any generator
        for i in in_order(work, range(100), 4):
            got.append(i)
    assert got == [0, 1, 2, 3, 4]
    assert not working.acquire(blocking=False)
    assert not [thread for thread in threading.enumerate() if "_help" in thread.name]


def test_what_was_made_ahead_of_an_error_is_not_kept() -> None:
    kept: list[weakref.ref[np.ndarray]] = []

    def work(i: int) -> np.ndarray:
        if i == 5:
            raise ValueError("five")
        made = np.zeros(i + 1)
        kept.append(weakref.ref(made))
        return made

    gc.disable()
    try:
        with pytest.raises(ValueError, match="five"):
            for made in in_order(work, range(100), 4):
                del made
        assert not [ref for ref in kept if ref() is not None]
    finally:
        gc.enable()


def test_where_no_thread_starts_the_caller_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert list(in_order(square, range(20), 4)) == [i * i for i in range(20)]


def test_closing_waits_for_what_is_being_made() -> None:
    """Whoever closes is about to close the file that it is made from."""
    busy = set()

    def work(i: int) -> int:
        busy.add(i)
        time.sleep(0.01)
        busy.discard(i)
        return i

    results: Iterator[int] = in_order(work, range(100), 4)
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]
    assert not busy


ENDED = """
from tensorio.encryption._ahead import in_order

results = in_order(abs, range(50), 4)
assert next(results) == 0
"""
HALF = """
import gc, os, sys, threading, time
from tensorio.encryption._ahead import in_order

go = []
def work(i):
    while i > 3 and not go:
        time.sleep(0.001)
    return i

results = in_order(work, range(50), 4)
assert next(results) == 0
while len(threading.enumerate()) < 5:
    time.sleep(0.001)
"""
FORKED = """
def child(act):
    pid = os.fork()
    if not pid:
        go.append(1)
        os._exit(act())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
assert child(lambda: results.close() or 3) == 3
assert child(lambda: list(results) == list(range(1, 50))) == 1
go.append(1)
assert list(results) == list(range(1, 50))
"""
COLLECTED = """
class Cycle:
    pass

def work(i):
    if i == 1:
        while not go:
            time.sleep(0.001)
        gc.collect()
        go.append(2)
    return i

gc.disable()
cycle = Cycle()
cycle.results, cycle.itself = in_order(work, range(50), 4), cycle
assert next(cycle.results) == 0
while len(threading.enumerate()) < 9:
    time.sleep(0.001)
del cycle
go.append(1)
while 2 not in go or len(threading.enumerate()) > 5:
    time.sleep(0.001)
results.close()
"""


@pytest.mark.parametrize(
    "code",
    [
        ENDED,
        pytest.param(HALF + FORKED, marks=pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")),
        HALF + COLLECTED,
    ],
    ids=["end of the program", "child made by fork", "collected by a thread of its own"],
)
def test_nobody_waits_for_threads_that_are_no_more(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": ":".join(p for p in sys.path if p)},
    )
    assert (done.returncode, done.stderr) == (0, "")
