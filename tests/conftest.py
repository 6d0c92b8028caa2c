"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import pickle
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cases

Child = Callable[..., Any]


def pytest_configure() -> None:
    """Have Ctrl-C heard in the tests' processes: a shell that starts us in the background has it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Leave what is there by now, modules of torch most of all, out of every collection of garbage that follows."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what can't be told while a sanitizer shadows the memory, or has to be loaded before Python is."""
    if os.environ.get("TENSORIO_SANITIZED"):
        reason = "measures what a sanitizer changes, or starts an interpreter without it"
        for item in items:
            if item.get_closest_marker("plain_build"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of checkpoints written by other tools; the test is skipped where there is none."""
    folder = cases.shared_folder()
    if folder is None:
        pytest.skip("no shared corpus: set TENSORIO_SHARED, or put it beside the repository as 'shared'")
    return folder


@pytest.fixture(scope="session")
def corpus(shared: Path) -> Path:
    """The corpus of checkpoints found in public repositories."""
    return shared / "corpus"


@pytest.fixture
def in_child() -> Child:
    """Run ``in_child(function, *arguments, wall=, memory=, file_size=, cpu=)`` in a forked child.

    Returns what the function returned, or raises what it raised. The child may be denied
    memory (bytes beyond what it has), file size (bytes) and CPU time (seconds); a crash or
    a child that takes longer than `wall` seconds fails the test.
    """
    return _in_child


def _in_child(function: Callable[..., Any], *arguments: Any, wall: float = 60, memory: int | None = None,
              file_size: int | None = None, cpu: int | None = None) -> Any:  # fmt: skip
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: forking with threads; the child starts none
        pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _child(function, arguments, write_end, memory, file_size, cpu)
    os.close(write_end)
    try:
        return _answer(pid, read_end, wall)
    finally:
        os.close(read_end)


def _child(function: Callable[..., Any], arguments: tuple[Any, ...], pipe: int, memory: int | None,
           file_size: int | None, cpu: int | None) -> None:  # fmt: skip
    """The child's side; never returns."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, (_virtual_bytes() + memory,) * 2)
        if file_size is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
        if cpu is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
        try:
            answer = (True, function(*arguments))
        except BaseException as error:
            answer = (False, error)
        with os.fdopen(pipe, "wb") as out:
            out.write(pickle.dumps(answer))
        os._exit(0)
    finally:
        os._exit(99)


def _answer(pid: int, pipe: int, wall: float) -> Any:
    data, end = b"", time.monotonic() + wall
    while True:
        if not select.select([pipe], [], [], max(0, end - time.monotonic()))[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pytest.fail(f"the child did not end within {wall} s")
        piece = os.read(pipe, 1 << 16)
        if not piece:
            break
        data += piece
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        pytest.fail(f"the child died of {signal.Signals(os.WTERMSIG(status)).name}")
    assert data, f"the child gave no answer; its status is {os.WEXITSTATUS(status)}"
    good, value = pickle.loads(data)
    if not good:
        raise value
    return value


def _virtual_bytes() -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmSize"))
