"""Bus errors of mapped files, in child processes: one clear line, and everything else as without a guard."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.plain_build,
    pytest.mark.skipif(not hasattr(signal, "SIGBUS"), reason="this system has no SIGBUS"),
]

MAKE = """
import faulthandler, mmap, os, resource, signal, sys
import numpy as np
import tensorio

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
path = sys.argv[1]
tensorio.save({"x": np.zeros(1 << 20, "u1"), "y": np.ones(1 << 20, "u1")}, path, durable=False)
"""
FAULT = """
y = tensorio.open(path)["y"]
os.truncate(path, 1 << 20)
print("before", flush=True)
y[-1]
print("after", flush=True)
"""


def run(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    return subprocess.run(
        [sys.executable, "-c", MAKE + code, str(path)], env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def told(done: subprocess.CompletedProcess[str], path: Path) -> bool:
    lines = [line for line in done.stderr.splitlines() if line.startswith("tensorio: ")]
    assert len(lines) <= 1
    if lines:
        assert str(path) in lines[0]
        assert "cut short" in lines[0]
        assert "mmap=False" in lines[0]
        assert re.search(r"was at offset \d+ of \d+ bytes is gone", lines[0])
    return bool(lines)


def test_without_a_guard_nothing_is_said(path: Path) -> None:
    done = run(FAULT, path)
    assert done.returncode == -signal.SIGBUS
    assert done.stdout == "before\n"
    assert done.stderr == ""


@pytest.mark.parametrize("first", ["guard", "file"])
def test_guard_names_the_file_and_the_process_ends_as_it_would(first: str, path: Path) -> None:
    code = FAULT.replace('print("before"', 'tensorio.guard()\nprint("before"') if first == "file" else (
        "tensorio.guard()" + FAULT
    )  # fmt: skip
    done = run(code, path)
    assert done.returncode == -signal.SIGBUS
    assert done.stdout == "before\n"
    assert told(done, path)


@pytest.mark.parametrize(
    "order", ["faulthandler.enable(); tensorio.guard()", "tensorio.guard(); faulthandler.enable()"]
)
def test_guard_and_faulthandler_both_speak(order: str, path: Path) -> None:
    done = run(order + FAULT, path)
    assert done.returncode == -signal.SIGBUS
    assert told(done, path)
    assert "Fatal Python error: Bus error" in done.stderr
    assert "most recent call first" in done.stderr
    assert done.stderr.count("Fatal Python error") == 1


@pytest.mark.parametrize("between", ["pass", "faulthandler.disable()"])
def test_guard_that_comes_back_speaks_once(between: str, path: Path) -> None:
    """Handlers that have each other for the one before must not go round in circles."""
    code = f"g = tensorio.guard(); faulthandler.enable(); g.close(); {between}; tensorio.guard()"
    done = run(code + FAULT, path)
    assert done.returncode == -signal.SIGBUS
    assert told(done, path)
    assert done.stderr.count("Fatal Python error") == (between == "pass")


def test_guard_that_is_closed_is_silent_behind_a_later_handler(path: Path) -> None:
    done = run("g = tensorio.guard(); faulthandler.enable(); g.close()" + FAULT, path)
    assert done.returncode == -signal.SIGBUS
    assert not told(done, path)
    assert done.stderr.count("Fatal Python error") == 1


def test_writable_mapping_is_known_too(path: Path) -> None:
    done = run("tensorio.guard()" + FAULT.replace("open(path)", "open(path, writable=True)"), path)
    assert done.returncode == -signal.SIGBUS
    assert told(done, path)


def test_views_keep_the_file_known_after_close(path: Path) -> None:
    code = "tensorio.guard()" + FAULT.replace(
        'y = tensorio.open(path)["y"]', 'c = tensorio.open(path)\ny = c["y"]\nc.close()\ndel c'
    )
    assert told(run(code, path), path)


def test_guard_leaves_with_its_block(path: Path) -> None:
    done = run("with tensorio.guard(): pass\n" + FAULT, path)
    assert done.returncode == -signal.SIGBUS
    assert done.stderr == ""


def test_guards_nest(path: Path) -> None:
    done = run("g = tensorio.guard()\nwith tensorio.guard(): pass\n" + FAULT, path)
    assert told(done, path)
    done = run("g = tensorio.guard()\nwith tensorio.guard(): pass\ng.close()\ng.close()\n" + FAULT, path)
    assert not told(done, path)


def test_fault_of_somebody_else_is_not_ours(path: Path) -> None:
    code = """
tensorio.guard()
held = tensorio.open(path)
with open(path + ".other", "w+b") as f:
    f.truncate(1 << 20)
    other = mmap.mmap(f.fileno(), 1 << 20)
    f.truncate(0)
other[5]
"""
    done = run(code, path)
    assert done.returncode == -signal.SIGBUS
    assert done.stderr == ""


def test_mapping_that_is_gone_is_forgotten(path: Path) -> None:
    """Another file's mapping may get its address."""
    code = """
tensorio.guard()
for _ in range(20):
    held = tensorio.open(path)["y"]
    del held
    with open(path + ".other", "w+b") as f:
        f.truncate(os.path.getsize(path))
        other = mmap.mmap(f.fileno(), 0)
        f.truncate(0)
    if _ < 19:
        other.close()
other[5]
"""
    done = run(code, path)
    assert done.returncode == -signal.SIGBUS
    assert done.stderr == ""


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), signal.SIGBUS)", "signal.raise_signal(signal.SIGBUS)"])
def test_signal_that_was_sent_ends_the_process_in_silence(how: str, path: Path) -> None:
    done = run(f"tensorio.guard()\nheld = tensorio.open(path)['x']\n{how}\nprint('after')", path)
    assert done.returncode == -signal.SIGBUS
    assert (done.stdout, done.stderr) == ("", "")


def test_handler_of_the_program_is_the_one_that_is_asked(path: Path) -> None:
    code = """
signal.signal(signal.SIGBUS, lambda *_: print("mine", flush=True))
with tensorio.guard():
    os.kill(os.getpid(), signal.SIGBUS)
    print("went on", flush=True)
os.kill(os.getpid(), signal.SIGBUS)
"""
    done = run(code, path)
    assert done.returncode == 0
    assert done.stdout.count("mine") == 2
    assert "went on" in done.stdout
    assert done.stderr == ""


def test_handler_that_was_installed_later_is_left_alone(path: Path) -> None:
    code = """
with tensorio.guard():
    signal.signal(signal.SIGBUS, lambda *_: print("mine", flush=True))
os.kill(os.getpid(), signal.SIGBUS)
"""
    done = run(code, path)
    assert (done.returncode, done.stdout) == (0, "mine\n")


def test_importing_and_opening_install_nothing(path: Path) -> None:
    code = """
held = tensorio.open(path)["x"]
print(signal.getsignal(signal.SIGBUS) == signal.SIG_DFL)
with open("/proc/self/status") as f:
    caught = next(int(line.split()[1], 16) for line in f if line.startswith("SigCgt"))
print(caught >> (signal.SIGBUS - 1) & 1)
"""
    if not os.path.exists("/proc/self/status"):
        pytest.skip("needs Linux's /proc")
    assert run(code, path).stdout == "True\n0\n"


def test_more_mappings_than_the_table_has_room_for(path: Path) -> None:
    """Those beyond are not told about; nothing else changes, and there is room again when they are gone."""
    code = """
from tensorio import _host
tensorio.guard()
with open(path, "rb") as f:
    many = [_host.Mapping(f.fileno(), 10, False, b"x") for _ in range(5000)]
held = tensorio.open(path)
assert held["y"].all()
del held, many
"""
    done = run(code + FAULT, path)
    assert done.returncode == -signal.SIGBUS, done.stderr
    assert any(line.startswith("tensorio: ") for line in done.stderr.splitlines())


def test_name_that_is_too_long_keeps_its_end(path: Path) -> None:
    deep = path.parent / ("d" * 120) / ("e" * 120) / "model.safetensors"
    deep.parent.mkdir(parents=True)
    done = run("tensorio.guard()" + FAULT, deep)
    assert done.returncode == -signal.SIGBUS
    line = next(line for line in done.stderr.splitlines() if line.startswith("tensorio: "))
    assert "e/model.safetensors: the file was cut short" in line
