"""Ctrl-C behind every call of a save in the background: nothing waits for ever afterwards, and no memory is lost."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import tensorio
from tensorio import asynchronous
from tensorio.manager import _background

SECONDS = 20
OURS = (os.path.dirname(asynchronous.__file__), _background.__file__)


def interrupted(act: Callable[[], object], at: int) -> bool:
    """Raise KeyboardInterrupt behind one of the calls within a call, where Python looks for signals.

    Returns
    -------
    bool
        Whether there are so many.
    """
    left = at

    def is_ours(frame: FrameType | None) -> bool:
        return frame is not None and frame.f_code.co_filename.startswith(OURS)

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal left
        if is_ours(frame.f_back if event == "return" else frame) and event in ("return", "c_return"):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def state() -> dict[str, Any]:
    return {"w": np.ones(1000, np.float32)}


def test_a_saver_goes_on(tmp_path: Path) -> None:
    saver, at = tensorio.AsyncSaver(max_memory=4 << 20), 1
    while interrupted(lambda: saver.save(state(), tmp_path / "x.pt", durable=False), at):
        saver.wait(SECONDS)
        gc.collect()
        assert saver._buffers.lent == 0, at
        at += 1
    assert at > 50
    saver.save(state(), tmp_path / "x.pt").result(SECONDS)
    saver.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_manager_goes_on(tmp_path: Path) -> None:
    with tensorio.CheckpointManager(tmp_path, keep=2, durable=False) as manager:

        def save(step: int) -> None:
            manager.save(step, items={"a": state(), "b": state()}, block=False)

        at = 1
        while interrupted(partial(save, at), at):
            manager.wait()
            gc.collect()
            left = {name for name in os.listdir(tmp_path) if not name.startswith("step-")} - {".lock"}
            assert not left, at
            at += 1
        assert at > 50
        manager.wait()
        assert manager.latest() == at
