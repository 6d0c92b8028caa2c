"""The loops of the examples, killed at random moments: they end bit for bit as if they had been left alone."""

from __future__ import annotations

import contextlib
import os
import random
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

LOOPS = Path(__file__).resolve().parents[2] / "examples" / "training"
PATIENCE = 120  # seconds for what takes a few, on a busy machine

# Imports a loop once (torch takes seconds), and forks for each run: a line in are its arguments, lines out are the
# process and then how it ended.
DRIVER = """
import importlib, os, sys, traceback
loop = importlib.import_module(sys.argv[1])
loop.Training().advance()  # what is imported with the first step is, too
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        try:
            sys.argv = [loop.__name__, *line.split()]
            sys.stdout = sys.stderr
            loop.main()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
LOOPS_KILLED = {
    "numpy_loop": ("--steps 3000 --save-every 50", [""] * 4),
    # Every other time, checkpoints are written in the background.
    "torch_loop": ("--steps 150 --save-every 5", ["--background", "", "--background"]),
}


class Runs:
    """Runs of a loop, one after the other."""

    def __init__(self, loop: str) -> None:
        path = ":".join([str(LOOPS), *(p for p in sys.path if p)])
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, loop], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, *arguments: object) -> int:
        """Begin one; return its process."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, arguments)) + "\n")
        self.process.stdin.flush()
        return self.line()

    def line(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def finish(self, *arguments: object) -> None:
        self.start(*arguments)
        assert self.line() == 0

    def kill(self, chance: random.Random, folder: Path, *arguments: object) -> bool:
        """Kill one a moment after it has saved a step; tell whether it had not ended by itself."""
        manager = tensorio.CheckpointManager(folder)
        before, deadline = manager.latest(), time.monotonic() + PATIENCE
        pid = self.start(folder, *arguments)
        while manager.latest() == before and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(chance.random() * 0.03)
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(pid, signal.SIGKILL)
        return self.line() == -signal.SIGKILL


@pytest.fixture(params=LOOPS_KILLED)
def loop(request: pytest.FixtureRequest) -> str:
    if request.param == "torch_loop":
        pytest.importorskip("torch")
    return str(request.param)


@pytest.fixture
def runs(loop: str) -> Iterator[Runs]:
    made = Runs(loop)
    yield made
    made.process.kill()
    made.process.communicate()


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit, of equal types."""
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and a == b


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_loop_killed_at_random_ends_as_if_it_was_not(loop: str, runs: Runs, tmp_path: Path) -> None:
    options, killed_runs = LOOPS_KILLED[loop]
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    runs.finish(alone, options)
    chance = random.Random(loop)
    kills = sum(runs.kill(chance, killed, options, more) for more in killed_runs)
    assert kills >= 2, "the loop ended before it could be killed"
    runs.finish(killed, options)
    ours, theirs = (tensorio.CheckpointManager(folder).restore() for folder in (alone, killed))
    assert ours is not None
    assert theirs is not None
    assert ours.step == theirs.step
    assert ours.metrics == theirs.metrics
    assert same(ours.value, theirs.value)
