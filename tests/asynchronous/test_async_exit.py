"""The end of a program, and its children: no save is lost without a word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tensorio

pytestmark = pytest.mark.plain_build

# A save that is still being written when the program's last line is done.
BEGIN = """
import os, sys, time
import numpy as np, tensorio
path = sys.argv[1]
slowly = lambda done, total: time.sleep(0.2)
obj = {"x": np.arange(1000)}
"""


def run(code: str, path: Path, *, status: int = 0) -> str:
    """Run a program; what it says on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": ":".join(p for p in sys.path if p)},
    )
    assert done.returncode == status, done.stderr
    return done.stderr


def assert_written(path: Path) -> None:
    assert np.array_equal(tensorio.load(path)["x"], np.arange(1000))
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("tensorio.save_async(obj, path, progress=slowly)", 0),
        ("tensorio.AsyncSaver().save(obj, path, progress=slowly)", 0),
        ("tensorio.save_async(obj, path, progress=slowly); sys.exit(3)", 3),
        ("tensorio.save_async(obj, path, progress=slowly); 1 / 0", 1),
        ("[tensorio.save_async({'x': np.arange(i)}, path, progress=slowly) for i in (1, 10, 1000)]", 0),
    ],
)
def test_the_end_waits_for_what_is_pending(tmp_path: Path, code: str, status: int) -> None:
    run(code, tmp_path / "x.pt", status=status)
    assert_written(tmp_path / "x.pt")


LATER = "import atexit; atexit.register(lambda: tensorio.save_async(obj, path, progress=slowly))"


def test_a_save_by_a_handler_of_the_end(tmp_path: Path) -> None:
    """Nobody waits for threads any more, and from Python 3.12 on none can be started."""
    run(LATER, tmp_path / "x.pt")
    assert_written(tmp_path / "x.pt")
    assert "nobody looked" in run(LATER, tmp_path / "missing" / "x.pt")


def test_a_save_by_a_handler_that_comes_after_ours(tmp_path: Path) -> None:
    begin = "import atexit; from tensorio.asynchronous._saver import _finish as finish; atexit.unregister(finish)"
    late = f"tensorio.AsyncSaver()\n{begin}\n{LATER}\natexit.register(finish)"
    run(late, tmp_path / "x.pt")
    assert_written(tmp_path / "x.pt")
    assert "nobody looked" in run(late, tmp_path / "missing" / "x.pt")


def test_a_save_from_a_daemon_thread(tmp_path: Path) -> None:
    run(
        "import threading\n"
        "t = threading.Thread(target=lambda: tensorio.save_async(obj, path, progress=slowly), daemon=True)\n"
        "t.start(); t.join()",
        tmp_path / "x.pt",
    )
    assert_written(tmp_path / "x.pt")


def test_a_handler_of_the_end_saves_finite_numbers(tmp_path: Path) -> None:
    """Large enough for several threads, of which no pool takes work any more."""
    run(
        "import atexit; obj['y'] = np.zeros(3 << 20, np.float32)\n"
        "atexit.register(lambda: tensorio.save(obj, path, check_finite=True, durable=False))",
        tmp_path / "x.pt",
    )
    assert_written(tmp_path / "x.pt")


def test_a_handler_of_the_end_saves_a_delta(tmp_path: Path) -> None:
    base = tmp_path / "base.safetensors"
    tensorio.save({"x": np.arange(1000), "y": np.zeros(3)}, base)
    run(
        "import atexit; obj['y'] = np.ones(3); base = os.path.join(os.path.dirname(path), 'base.safetensors')\n"
        "atexit.register(lambda: tensorio.save(obj, path, base=base))",
        tmp_path / "x.safetensors",
    )
    assert np.array_equal(tensorio.load(tmp_path / "x.safetensors")["y"], np.ones(3))
    assert tensorio.delta_chain(tmp_path / "x.safetensors")[-1] == str(base)


def test_a_step_of_a_manager_that_nobody_closed(tmp_path: Path) -> None:
    """The end waits for it, when no pool of threads takes work any more; nor does what is left to the end complain."""
    said = run(
        "import builtins; builtins.kept = manager = tensorio.CheckpointManager(path)\n"
        "manager.save(1, items={'a': obj, 'b.safetensors': obj}, block=False, progress=slowly)",
        tmp_path / "run",
    )
    assert said == ""
    assert sorted(p.name for p in tmp_path.glob("run/*")) == [".lock", "step-00000001"]
    tensorio.CheckpointManager(tmp_path / "run").check(1)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux (memfd_create)")
@pytest.mark.parametrize("used", ["", "saver.save(obj, path).result()", "saver.save(obj, path); saver.close()"])
def test_a_saver_that_is_there_to_the_very_end_says_nothing(tmp_path: Path, used: str) -> None:
    begin = "import builtins; builtins.kept = saver = tensorio.AsyncSaver(processes=True)\n"
    assert run(begin + used, tmp_path / "x.pt") == ""


def test_a_failure_that_nobody_looked_at_is_printed(tmp_path: Path) -> None:
    said = run("tensorio.save_async(obj, path)", tmp_path / "missing" / "x.pt")
    assert "missing/x.pt failed, and nobody looked at its future" in said
    assert "FileNotFoundError" in said


def test_a_failure_that_somebody_looked_at_is_not(tmp_path: Path) -> None:
    assert run("tensorio.save_async(obj, path).exception()", tmp_path / "missing" / "x.pt") == ""


def test_ctrl_c_in_the_loop_loses_nothing(tmp_path: Path) -> None:
    said = run(
        "import signal; tensorio.save_async(obj, path, progress=slowly); os.kill(os.getpid(), signal.SIGINT)\n"
        "time.sleep(60)",
        tmp_path / "x.pt",
        status=-signal.SIGINT,
    )
    assert "KeyboardInterrupt" in said
    assert_written(tmp_path / "x.pt")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_begins_with_nothing(tmp_path: Path) -> None:
    """It neither waits for its parent's saves nor writes them, and can save for itself."""
    run(
        """
saver = tensorio.AsyncSaver()
saver.save(obj, path, progress=slowly)
tensorio.save_async({"x": np.zeros(1)}, path + ".other.pt").result()
pid = os.fork()
if pid == 0:
    assert saver.pending == 0
    saver.wait()
    saver.save({"x": np.arange(1000)}, path + ".child.pt").result()
    tensorio.save_async({"x": np.arange(1000)}, path + ".child2.pt").result()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert saver.pending == 1
for name in (".other.pt", ".child.pt", ".child2.pt"):
    os.unlink(path + name)
""".replace("slowly", "lambda done, total: time.sleep(2)"),
        tmp_path / "x.pt",
    )
    assert_written(tmp_path / "x.pt")
