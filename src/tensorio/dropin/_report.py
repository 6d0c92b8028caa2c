"""What was served, over all processes of a program: one line at its exit.

Each process keeps its counts in a file of its own in one folder, written anew
with every act, so that a process that is killed has said what it did. The
process that called `begin` adds them up when it exits, and removes the folder.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorio import _served

if TYPE_CHECKING:
    from typing import Literal, TextIO

__all__ = ["VARIABLE", "begin", "end", "folder", "join", "line"]

# Of the environment: the folder where each process keeps its counts.
VARIABLE = "TENSORIO_DROPIN_REPORT"


class _Report:
    """The state of this process."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.file: Path | None = None  # this process's counts, once there are any
        self.owner: int | None = None  # the process that writes the line
        self.stream: TextIO | None = None
        self.lock = threading.Lock()


_state = _Report()
_hooks: list[str] = []  # those that are set for good, once


def folder() -> str | None:
    """The folder of the counts, if they are kept."""
    return None if _state.folder is None else str(_state.folder)


def begin(stream: TextIO | Literal[False] | None) -> None:
    """Keep counts from now on and write the line at exit: to `stream`, or None: to ``sys.stderr`` as it is then.

    With False, no line is written here. Nor where the environment names a folder: a parent writes the line then.
    """
    if _state.folder is None:
        join(os.environ.get(VARIABLE))
    if stream is False:
        return
    _state.stream = stream
    if _state.folder is None:
        try:
            made = tempfile.mkdtemp(prefix="tensorio-dropin-")
        except OSError as error:  # a container that can't be written to: no reason to serve nothing
            warnings.warn(
                f"tensorio.dropin: there will be no line at exit, for there is no place for its counts: {error}",
                RuntimeWarning, stacklevel=3,
            )  # fmt: skip
            return
        _state.folder, _state.owner = Path(made), os.getpid()
        _listen()
        atexit.register(_write_line)


def join(path: str | None) -> None:
    """Keep counts in the folder of the process that writes the line, if there is one."""
    if path and Path(path).is_dir():
        _state.folder, _state.owner = Path(path), None
        _listen()


def end() -> None:
    """Keep no counts, write no line."""
    _served.tell(None)
    atexit.unregister(_write_line)
    if _state.owner == os.getpid() and _state.folder is not None:
        shutil.rmtree(_state.folder, ignore_errors=True)
    _state.folder = _state.file = _state.owner = _state.stream = None


def _listen() -> None:
    _served.tell(_write_counts)
    if not _hooks and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forked)
        _hooks.append("fork")


def _forked() -> None:
    """A forked child starts to count for itself; its parent's counts are its parent's."""
    _state.lock = threading.Lock()
    if _state.folder is not None:
        _state.file = None
        _served.calls.clear()
        _served.passed_on.clear()


def _write_counts() -> None:
    """Overwrite this process's file. Opened each time: a descriptor kept here could be closed, and its number reused.

    Counts only grow, and so does the text: there is nothing of the old one left behind it.
    """
    with _state.lock, contextlib.suppress(OSError):  # the program has ended before us; a disk is full
        if _state.folder is None:
            return
        if _state.file is None:
            handle, name = tempfile.mkstemp(prefix=f"{os.getpid()}-", dir=_state.folder)
            os.close(handle)
            _state.file = Path(name)
        text = json.dumps([_served.calls, _served.passed_on])
        with _state.file.open("r+b", buffering=0) as f:
            f.write(text.encode())


def _counts() -> tuple[dict[str, list[int]], dict[str, int]]:
    """The sums over this process and all that wrote into the folder."""
    calls = {name: list(entry) for name, entry in _served.calls.items()}
    passed_on = dict(_served.passed_on)
    for path in sorted(_state.folder.iterdir()) if _state.folder is not None and _state.folder.is_dir() else []:
        if path == _state.file:
            continue
        try:
            more: Any = json.loads(path.read_bytes())
        except (OSError, ValueError):  # killed before its first word
            continue
        for name, (times, nbytes) in more[0].items():
            entry = calls.setdefault(name, [0, 0])
            entry[0] += times
            entry[1] += nbytes
        for name, times in more[1].items():
            passed_on[name] = passed_on.get(name, 0) + times
    return calls, passed_on


def line(calls: dict[str, list[int]], passed_on: dict[str, int]) -> str:
    """What is written at exit, e.g. ``tensorio: served 12 safetensors.safe_open, 1 torch.load (1.2 GB)``.

    Parameters
    ----------
    calls : dict
        Name to times and bytes.
    passed_on : dict
        Name to times.
    """
    served = [
        f"{times} {name}" + (f" ({_size(nbytes)})" if nbytes else "") for name, (times, nbytes) in sorted(calls.items())
    ]
    left = [f"{times} {name}" for name, times in sorted(passed_on.items())]
    text = "tensorio: served " + (", ".join(served) or "nothing")
    return text + (f"; passed on to torch: {', '.join(left)}" if left else "")


def _size(nbytes: int) -> str:
    """Decimal, as in ``1.2 GB``."""
    if nbytes < 1000:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"


def _write_line() -> None:
    if _state.owner != os.getpid():
        return  # a forked child that ends as a program would
    text = line(*_counts())
    stream = _state.stream if _state.stream is not None else sys.stderr
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none: print() would take stdout then
        stream.write(text + "\n")
        stream.flush()
    end()
