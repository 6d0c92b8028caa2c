"""Which process an id means, and who has a file mapped."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tensorio.system import processes

pytestmark = [
    pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs Linux's /proc"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),  # Python 3.12 on: forking beside threads
]


def test_start_tells_processes_apart() -> None:
    me = processes.start_time(os.getpid())
    assert me > 0
    assert processes.start_time(os.getppid()) <= me
    assert processes.is_running(os.getpid(), me)
    assert not processes.is_running(os.getpid(), me + 1)  # the same id, another process


def test_process_that_has_ended_is_gone_though_nobody_has_noticed_yet() -> None:
    """A zombie has an id and a start time, but nothing open."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    start = time.monotonic()
    while processes.start_time(pid) and time.monotonic() - start < 10:
        time.sleep(0.01)
    assert processes.start_time(pid) == 0
    assert not processes.is_running(pid, 1)
    os.waitpid(pid, 0)
    assert processes.start_time(pid) == 0


def test_name_of_the_program_may_be_anything(tmp_path: Path) -> None:
    program = tmp_path / "a) Z 1 (b c"
    program.symlink_to(sys.executable)
    code = "import sys; print('here', flush=True); sys.stdin.read()"
    process = subprocess.Popen([program, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        start = processes.start_time(process.pid)
        assert processes.start_time(os.getpid()) <= start
        assert processes.is_running(process.pid, start)
        process.kill()


def test_where_nobody_tells_a_process_is_asked_by_a_signal_that_does_nothing() -> None:
    assert processes.is_running(os.getpid(), 0)
    assert processes.is_running(1, 0)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert not processes.is_running(pid, 0)


def test_boot_and_namespace_stay_the_same() -> None:
    assert len(processes.boot_id()) == 36
    assert processes.boot_id() == processes.boot_id()
    assert processes.pid_namespace() > 0


def test_mappers_are_those_that_have_the_file_mapped(tmp_path: Path) -> None:
    path = tmp_path / "file with a blank"
    path.write_bytes(bytes(5000))
    file = (path.stat().st_dev, path.stat().st_ino)
    assert processes.mappers([file]) == {file: []}
    with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ):
        assert processes.mappers([file, (0, 1)]) == {file: [os.getpid()], (0, 1): []}
    assert processes.mappers([]) == {}
