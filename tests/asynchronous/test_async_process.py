"""`processes=True`: another process writes, and what was handed over outlives this one."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio
from gates import SECONDS, held_up
from tensorio.asynchronous import _saver
from tensorio.checkpoint._saving import SaveJob
from tensorio.errors import UnsupportedError
from tensorio.plan import Payloads

pytestmark = [
    pytest.mark.plain_build,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux (memfd_create)"),
]


@pytest.fixture
def saver() -> Iterator[tensorio.AsyncSaver]:
    with tensorio.AsyncSaver(processes=True) as saver:
        yield saver


def arrays() -> dict[str, Any]:
    base = np.arange(50_000, dtype="f4")
    return {"a": base, "b": base[5:77], "c": base[::2], "e": np.empty(0), "n": [np.full(i, i) for i in range(40)]}


def pid_of(saver: tensorio.AsyncSaver) -> int:
    assert saver._writer is not None
    assert saver._writer._process is not None
    return saver._writer._process.pid


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_the_file_is_that_of_a_save(saver: tensorio.AsyncSaver, tmp_path: Path, name: str) -> None:
    obj = arrays()
    (tmp_path / "at once").mkdir()
    tensorio.save(obj, tmp_path / "at once" / name)
    with held_up(saver, tmp_path):
        future = saver.save(obj, tmp_path / name)
        obj["a"][:] = 0
    want = (tmp_path / "at once" / name).read_bytes()
    assert (tmp_path / name).exists() or future.result()
    assert future.result().nbytes == len(want)
    assert (tmp_path / name).read_bytes() == want


def test_one_process_writes_all(saver: tensorio.AsyncSaver, tmp_path: Path) -> None:
    pids = set()
    for i in range(5):
        saver.save({"x": np.full(100, i)}, tmp_path / "x.pt").result()
        pids.add(pid_of(saver))
    assert len(pids) == 1
    assert pids != {os.getpid()}
    assert tensorio.load(tmp_path / "x.pt")["x"][0] == 4
    assert saver._buffers.held == 2 << 20


def test_the_process_ends_with_the_saver(tmp_path: Path) -> None:
    with tensorio.AsyncSaver(processes=True) as saver:
        saver.save({"x": np.zeros(1)}, tmp_path / "x.pt").result()
        pid = pid_of(saver)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_errors_come_back_as_they_are(saver: tensorio.AsyncSaver, tmp_path: Path) -> None:
    path = tmp_path / "missing" / "x.pt"
    with pytest.raises(FileNotFoundError) as caught:
        saver.save({"x": np.zeros(1)}, path).result()
    assert caught.value.filename == str(path)
    os.mkfifo(tmp_path / "fifo.pt")
    with pytest.raises(UnsupportedError, match="FIFO"):
        saver.save({"x": np.zeros(1)}, tmp_path / "fifo.pt").result()


def test_progress_is_called_here(saver: tensorio.AsyncSaver, tmp_path: Path) -> None:
    told = []
    nbytes = saver.save(arrays(), tmp_path / "x.pt", progress=lambda *now: told.append((os.getpid(), *now))).result()
    assert told[-1] == (os.getpid(), nbytes.nbytes, nbytes.nbytes)


def test_progress_can_stop_it(saver: tensorio.AsyncSaver, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        saver.save(arrays(), tmp_path / "x.pt", progress=stop).result()
    assert list(tmp_path.iterdir()) == []
    saver.save(arrays(), tmp_path / "x.pt").result()


def test_a_file_object_is_written_to_here(saver: tensorio.AsyncSaver) -> None:
    target = io.BytesIO()
    told = []
    saver.save({"x": np.arange(3)}, target, format="torch_zip", progress=lambda done, total: told.append(done)).result()
    assert np.array_equal(tensorio.load(target.getvalue())["x"], np.arange(3))
    assert told[-1] == len(target.getvalue())


def test_what_cannot_be_passed_on_is_written_here(
    saver: tensorio.AsyncSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = _saver.prepare

    def prepare_here(*arguments: Any) -> SaveJob:
        job = prepare(*arguments)
        return SaveJob(job.payloads, job.nbytes, lambda: job.write())

    monkeypatch.setattr(_saver, "prepare", prepare_here)
    saver.save({"x": np.arange(3)}, tmp_path / "x.pt").result()
    assert np.array_equal(tensorio.load(tmp_path / "x.pt")["x"], np.arange(3))
    assert saver._writer is not None
    assert saver._writer._process is None


def test_payloads_of_this_process_are_not_passed_on() -> None:
    import pickle

    payloads = Payloads()
    payloads.add(b"abc", 3)
    with pytest.raises(TypeError, match="memory of this process"):
        pickle.dumps(payloads)


def test_a_killed_process_is_an_error_and_another_one_is_started(saver: tensorio.AsyncSaver, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    saver.save({"x": np.zeros(1)}, path).result()
    killed = pid_of(saver)

    def kill(done: int, total: int) -> None:
        os.kill(killed, signal.SIGKILL)

    future = saver.save({"x": np.ones(1)}, path, progress=kill)
    with pytest.raises(ChildProcessError, match=r"signal 9.*x\.pt"):
        future.result(SECONDS)
    assert tensorio.load(path)["x"][0] == 0
    saver.save({"x": np.full(1, 2.0)}, path).result()
    assert tensorio.load(path)["x"][0] == 2
    assert pid_of(saver) != killed


def test_a_process_that_is_asked_to_end_leaves_nothing(saver: tensorio.AsyncSaver, tmp_path: Path) -> None:
    saver.save({"x": np.zeros(1)}, tmp_path / "y.pt").result()
    ended = pid_of(saver)
    once: list[int] = []

    def end(done: int, total: int) -> None:
        if not once:
            once.append(done)
            os.kill(ended, signal.SIGTERM)

    with pytest.raises(ChildProcessError, match="status 1"):
        saver.save({"x": np.ones(1 << 20)}, tmp_path / "x.pt", progress=end).result(SECONDS)
    assert [p.name for p in tmp_path.iterdir()] == ["y.pt"]


def test_what_was_handed_over_outlives_a_killed_parent(tmp_path: Path) -> None:
    """Old file or new one, whole, and nothing beside it."""
    code = """
import os, signal, sys, numpy as np, tensorio
saver = tensorio.AsyncSaver(processes=True)
saver.save({"x": np.zeros(1)}, sys.argv[1], durable=False).result()
saver.save({"x": np.full(32 << 20, 1, "u1")}, sys.argv[1], durable=False)
print(saver._writer._process.pid, flush=True)
sys.stdin.read(1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "x.pt"
    environment = {**os.environ, "PYTHONPATH": ":".join(p for p in sys.path if p)}
    for wait in (0.0, 0.02, 0.1):
        with subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        ) as parent:
            assert parent.stdout is not None
            writer = int(parent.stdout.readline())
            time.sleep(wait)
            parent.communicate(b"\n", timeout=SECONDS)
        assert parent.returncode == -signal.SIGKILL
        end = time.monotonic() + SECONDS
        while is_running(writer):
            assert time.monotonic() < end, "the process that writes did not end"
            time.sleep(0.01)
        assert tensorio.verify(path).ok
        assert [p.name for p in tmp_path.iterdir()] == ["x.pt"]


def is_running(pid: int) -> bool:
    """Whether a process of somebody else's is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(UnsupportedError, match="processes=False"):
        tensorio.AsyncSaver(processes=True)
