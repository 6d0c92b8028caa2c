"""Runs a flow with the original packages and under the drop-in, at once, each reading what the other wrote."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import tensorio

FLOWS = Path(__file__).parent / "flows"
SRC = Path(tensorio.__file__).resolve().parents[1]
LIMIT = 240  # seconds


@dataclass
class Side:
    """One of the two processes and what it left."""

    folder: Path
    found: dict[str, Any]
    line: str

    def files(self) -> dict[str, Path]:
        return {str(p.relative_to(self.folder)): p for p in sorted(self.folder.rglob("*")) if p.is_file()}

    def served(self) -> dict[str, int]:
        """Of the line at exit: name to times."""
        served = self.line.partition("; ")[0].removeprefix("tensorio: served ")
        return {name: int(times) for times, name in re.findall(r"(\d+) ([\w.]+)", re.sub(r"\([^)]*\)", "", served))}

    def passed_on(self) -> dict[str, int]:
        left = self.line.partition("; passed on to torch: ")[2]
        return {name: int(times) for times, name in re.findall(r"(\d+) ([\w.]+(?:\([^)]*\))?)", left)}


def run(flow: str, folder: Path, *packages: str) -> tuple[Side, Side]:
    """Run ``flows/<flow>_flow.py`` on both sides: the original's and ours.

    The test is skipped where one of `packages` is missing.
    """
    missing = [name for name in ("torch", "safetensors", *packages) if find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: 'make users' installs them")
    names = ("original", "ours")
    folders = [folder / name for name in names]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | {
        "PYTHONPATH": str(SRC),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "home"),
        "TMPDIR": str(folder),
        "TQDM_DISABLE": "1",
        "PYTHONHASHSEED": "0",  # peft writes a set into its configuration
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    commands = [
        [sys.executable, *before, str(FLOWS / "run.py"), flow, str(folders[i]), str(folders[1 - i])]
        for i, before in enumerate(([], ["-m", "tensorio.dropin"]))
    ]
    lines = _run_at_once(commands, env, [folder / f"{name}.err" for name in names])
    found = [json.loads(where.with_suffix(".json").read_text()) for where in folders]
    return Side(folders[0], found[0], lines[0]), Side(folders[1], found[1], lines[1])


def _run_at_once(commands: list[list[str]], env: dict[str, str], logs: list[Path]) -> list[str]:
    """Run both; the last line that each wrote to standard error. The first that fails ends the other."""
    processes = []
    for command, log in zip(commands, logs, strict=True):
        with log.open("wb") as f:
            processes.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=f))
    end = time.monotonic() + LIMIT
    try:
        while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
            assert time.monotonic() < end, f"no end after {LIMIT} s"
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, command, log in zip(processes, commands, logs, strict=True):
        assert process.returncode in (0, -9), f"{' '.join(command)}\n{log.read_text()[-6000:]}"
    assert not any(p.returncode for p in processes)
    return [log.read_text().strip().rpartition("\n")[2] for log in logs]


def assert_same(original: Side, ours: Side) -> None:
    """Both found the same in what either wrote."""
    expected = original.found["own"]
    for side in (original, ours):
        for what in ("own", "other"):
            different = [name for name in expected if side.found[what].get(name) != expected[name]]
            assert not different, f"{side.folder.name} read {different} otherwise from {what} files"
            assert side.found[what].keys() == expected.keys()
    assert original.found["written"] == ours.found["written"]


def assert_same_files(original: Side, ours: Side, *apart: str) -> None:
    """Both wrote the same files; `apart` are names whose contents say when and where they were written."""
    there, here = original.files(), ours.files()
    assert there.keys() == here.keys()
    for name in there:
        if Path(name).name not in apart:
            assert contents(here[name]) == contents(there[name]), name


def contents(path: Path) -> Any:
    """A file by what counts in it."""
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        size = int.from_bytes(data[:8], "little")
        # The order in which the original writes the notes changes from run to run.
        return json.loads(data[8 : 8 + size]), data[8 + size :]
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = {name.partition("/")[2]: name for name in archive.namelist()}
            names.pop(".data/serialization_id", None)  # a hash of the rest, by the original's C++ library
            return {short: archive.read(name) for short, name in names.items()}
    return data
