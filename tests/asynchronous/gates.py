"""A saver whose writer waits until it is told to go on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import tensorio

SECONDS = 60  # a test that waits longer has failed


@contextlib.contextmanager
def held_up(saver: tensorio.AsyncSaver, folder: Path) -> Iterator[threading.Event]:
    """Have the writer of a saver begin a small save, and hold it until the event is set or the block ends."""
    begun, go_on = threading.Event(), threading.Event()

    def hold(done: int, total: int) -> None:
        begun.set()
        assert go_on.wait(SECONDS)

    future = saver.save({"x": np.zeros(1, "u1")}, folder / "gate.safetensors", durable=False, progress=hold)
    assert begun.wait(SECONDS)
    try:
        yield go_on
    finally:
        go_on.set()
        future.result(SECONDS)
