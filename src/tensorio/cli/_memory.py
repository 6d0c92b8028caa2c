"""Time, CPU and memory of this process, for ``tensorio demo``.

Memory is PSS, the proportional set size: a page that N processes have mapped
counts 1/N in each, so that the sum over processes is what the machine holds.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType

__all__ = ["Meter", "pss"]

SAMPLE_SECONDS = 0.02


def pss() -> int | None:
    """Return the proportional set size of this process in bytes; None where the system does not tell (only Linux does).

    References
    ----------
    Linux, Documentation/filesystems/proc.rst: smaps, smaps_rollup (since 4.14).
    """
    for name in ("smaps_rollup", "smaps"):
        try:
            with open(f"/proc/self/{name}", "rb") as f:
                return sum(int(line.split()[1]) * 1024 for line in f if line.startswith(b"Pss:"))
        except OSError:
            continue
    return None


class Meter:
    """Measures the block it is the context of.

    Attributes
    ----------
    wall, cpu : float
        Seconds; CPU of all threads.
    grown : int or None
        Most PSS during the block beyond that before it, in bytes, looked at
        every `SAMPLE_SECONDS`; None where there is no PSS.
    """

    wall = cpu = 0.0
    grown: int | None = None

    def __enter__(self) -> Meter:
        self._stop = threading.Event()
        self._before = pss()
        self._most = self._before or 0
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        if self._before is not None:
            self._watcher.start()
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.wall, self.cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        self._stop.set()
        if self._before is not None:
            self._watcher.join()
            self.grown = max(0, max(self._most, pss() or 0) - self._before)

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._most = max(self._most, pss() or 0)
