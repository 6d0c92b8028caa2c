"""Build `shim.c`, start Python over it, and set what it does to this process."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHORT, KILL, CUT = -1, -2, -3  # as in shim.c: what can be done to a call, other than an errno
LOG_FLUSHED, LOG_LOST = 1, 2  # flags of a cut: FS_GOING_FLAGS_LOGFLUSH, FS_GOING_FLAGS_NOLOGFLUSH of xfs_fs.h


@functools.cache
def built() -> Path | None:
    """The library, made once for this run of tests; None where there is nothing to make it with."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        return None
    library = Path(tempfile.mkdtemp(prefix="tensorio-shim-")) / "shim.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(HERE / "shim.c"), "-ldl"]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:  # another C library than glibc has other names
        return None
    return library


def run(script: str, *arguments: object, preload: bool = True, timeout: float | None = None) -> str:
    """Run a script of this folder, over the shim or not; what it printed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}  # Python 3.12 warns of forks
    if preload:
        environment |= {"LD_PRELOAD": str(built()), "TENSORIO_SHIM": str(built())}
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


class Shim:
    """The library that was loaded into this process before all others."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["TENSORIO_SHIM"])
        self._library.shim_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_int]
        self._library.shim_count.restype = ctypes.c_long
        self._library.shim_fired.restype = ctypes.c_char_p

    def arm(self, folder: Path, call: int = 0, how: int = 0, sticky: bool = False, flag: int = 0) -> None:
        """Count the calls on files in a folder from now on, and do something to the one of a number (from 1)."""
        self._library.shim_arm(os.fsencode(folder), call, how, sticky, flag)

    def disarm(self) -> None:
        self._library.shim_disarm()

    def cut(self) -> None:
        """Cut the power now, with the flag of `arm`; this process ends, too."""
        self._library.shim_cut()

    def count(self) -> int:
        """How many calls there were."""
        return int(self._library.shim_count())

    def fired(self) -> str:
        """The call that something was done to; empty if there were fewer."""
        return str(self._library.shim_fired().decode())
