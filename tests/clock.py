"""A clock that ticks beside an act: whether other threads go on meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

TICK = 0.0005  # seconds
# An act that held Python's lock would let the clock tick once or twice, however long it takes.
TICKS = 8


class Clock:
    """Ticks in a thread of its own for as long as it is given Python's lock."""

    def __enter__(self) -> Clock:
        self.ticks = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        while self.ticks == 0:
            time.sleep(TICK)
        self.ticks = 0
        return self

    def _run(self) -> None:
        while not self._stop.is_set():
            time.sleep(TICK)
            self.ticks += 1

    def __exit__(self, *exc: object) -> None:
        self.seen = self.ticks
        self._stop.set()
        self._thread.join()


def assert_others_go_on(act: Callable[[], object]) -> None:
    """The act takes long enough for many ticks, and there are."""
    for _ in range(3):
        start = time.perf_counter()
        with Clock() as clock:
            held = act()
        took = time.perf_counter() - start
        del held
        if clock.seen >= TICKS:
            return
    pytest.fail(f"{clock.seen} ticks of {TICK} s in {took:.3f} s")
