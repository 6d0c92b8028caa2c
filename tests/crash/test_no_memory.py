"""Memory that runs out at the N-th request: MemoryError, or it works; never a crash, never litter or a broken file."""

from __future__ import annotations

import gc
import os
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio
from tensorio import _unpickler

testcapi = pytest.importorskip("_testcapi", reason="needs the module that CPython is tested with")

ENOUGH = 40  # times in a row that nothing was denied: the act makes no more requests
LIST = [1, 2**70, 0.5, None, (1, 2, 3, 4), "text", {1, 2}, b"bytes"]
BASE = np.arange(60.0)
TENSORS = {"w": BASE, "v": np.ones((3, 4), "i4"), "more": {"x": np.zeros(2, ">u2"), "part": BASE[4:9]}, "list": LIST}
TENSORS |= {f"n{i}": np.full(2, i) for i in range(12)}  # so many that lists made of them grow
FLAT = {name: array for name, array in TENSORS.items() if isinstance(array, np.ndarray)}
# What CPython and NumPy make of a request that was denied, here and there, instead of MemoryError.
ORDINARY = (MemoryError, SystemError, RuntimeError, TypeError)

pytestmark = [
    pytest.mark.plain_build,
    # Closures of Python itself, none of ours about, don't live through it on 3.12 and 3.13.
    pytest.mark.skipif(
        sys.version_info >= (3, 12) or not hasattr(testcapi, "set_nomemory"),
        reason="this Python can't deny itself memory",
    ),
]


def _open(path: Path) -> None:
    with tensorio.open(path) as checkpoint:
        {name: array.sum() for name, array in checkpoint.items()}


def _load(path: Path) -> None:
    tensorio.load(path)


def _save(path: Path) -> None:
    tensorio.save(TENSORS if path.suffix == ".pt" else FLAT, path)


def _each(act: Callable[[Path], None], path: Path, requests: int) -> tuple[int, list[str]]:
    """Deny the N-th request for memory and some behind it, for N after N until the act makes fewer; what was wrong."""
    _quiet()
    act(path)
    gc.disable()
    good, files, denied, worked, wrong = path.read_bytes(), _files(), 0, 0, []
    for n in range(1, 100_000):
        try:
            # Not all that follow: CPython 3.11 never gets out of an except clause while it has no memory at all.
            testcapi.set_nomemory(n, n + requests)
            try:
                act(path)
            finally:
                testcapi.remove_mem_hooks()
        except Exception as error:
            denied, worked = denied + 1, 0
            if not isinstance(error, ORDINARY):
                wrong.append(f"{n}: {type(error).__name__}: {error}")
        else:
            worked += 1
            if worked == ENOUGH:
                break
        if path.read_bytes() != good:
            wrong.append(f"{n}: the file is another")
        if requests < 10 and os.listdir(path.parent) != [path.name]:
            wrong.append(f"{n}: left {os.listdir(path.parent)}")
        if requests == 1 and _files() != files and gc.collect() >= 0 and _files() != files:
            wrong.append(f"{n}: left a file open")
            files = _files()
    if os.listdir(path.parent) != [path.name]:  # a file that there was no memory to remove, the next save does
        wrong.append(f"left {os.listdir(path.parent)}")
    return denied, wrong


def _quiet() -> None:
    """Have nobody told of generators that are closed without memory: CPython writes hundreds of lines."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


def _files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


@pytest.mark.parametrize("requests", [1, 3, 10])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("act", [_open, _load, _save], ids=["open", "load", "save"])
def test_memory_may_run_out_anywhere(
    act: Callable[[Path], None], suffix: str, requests: int, memory_disk: Path, in_child: Any
) -> None:
    path = memory_disk / f"model{suffix}"
    _save(path)
    denied, wrong = in_child(_each, act, path, requests, wall=60)
    assert wrong == []
    assert denied > 100


def _lists_left(act: Callable[[], Any]) -> int:
    """Deny each request of an act in turn; how many of the lists that it made stay for ever."""
    act()
    _quiet()
    worked = n = 0
    while worked < ENOUGH:
        n += 1
        try:
            testcapi.set_nomemory(n, n + 1)
            try:
                act()
            finally:
                testcapi.remove_mem_hooks()
            worked += 1
        except ORDINARY:
            worked = 0
    gc.collect()
    return sum(type(held) is list and len(held) == 1 and held[0] == "marker" for held in gc.get_objects())


@pytest.mark.parametrize("op", ["appends", "append", "tuple", "setitems"])
def test_items_of_a_list_that_can_not_grow_are_let_go(op: str, in_child: Any) -> None:
    many: Any = [["marker"] for _ in range(100)]
    if op == "append":
        raw = pickle.dumps(None, 2)[:2] + b"]" + b"](X\x06\x00\x00\x00markerea" * 100 + b"."
    else:
        raw = pickle.dumps(dict(enumerate(many)) if op == "setitems" else tuple(many) if op == "tuple" else many, 2)
    loads = partial(_unpickler.loads, raw)
    assert pickle.loads(raw) == loads().obj
    del many
    assert in_child(_lists_left, loads) == 0


def _empty_tuples_left() -> int:
    raw = b"\x80\x02" + b"N" * 256 + b"(t" + b"0" * 256 + b"."  # one more than the stack has room for
    _quiet()
    for turn in range(40):
        if turn == 20:  # Cython keeps what each line that raised is called, and that has empty tuples, too
            before = sys.getrefcount(())
        for n in range(1, 21):
            try:
                testcapi.set_nomemory(n, n + 1)
                try:
                    _unpickler.loads(raw)
                finally:
                    testcapi.remove_mem_hooks()
            except (tensorio.TensorIOError, *ORDINARY):
                pass
    gc.collect()
    return sys.getrefcount(()) - before


def test_a_tuple_that_the_stack_has_no_room_for_is_let_go(in_child: Any) -> None:
    assert in_child(_empty_tuples_left) < 10
