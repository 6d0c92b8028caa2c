"""Files that change while they are mapped, and saves to the path of what was loaded."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio

SUFFIXES = pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
OLD = {"w": np.arange(1 << 16, dtype="f4"), "v": np.ones(9)}
NEW = {"w": np.zeros(1 << 17, dtype="f4"), "v": np.ones(5)}


def same(found: Any, want: dict[str, Any]) -> bool:
    return set(found) == set(want) and all(np.array_equal(found[name], want[name]) for name in want)


@SUFFIXES
@pytest.mark.parametrize("mmap", [True, False])
def test_what_was_loaded_may_be_saved_to_its_own_path_again_and_again(suffix: str, mmap: bool, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    tensorio.save(OLD, path)
    first = tensorio.load(path, mmap=mmap)
    tree = first
    for step in range(5):
        tensorio.save(tree, path)
        tree = tensorio.load(path, mmap=mmap)
        assert same(tree, OLD), step
        assert same(first, OLD), step
    tensorio.save(NEW, path)
    assert same(first, OLD)
    assert same(tree, OLD)
    assert same(tensorio.load(path), NEW)


@SUFFIXES
def test_source_of_a_conversion_may_be_its_target(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    tensorio.save(OLD, path)
    mapped = tensorio.load(path)
    tensorio.convert(path, path)
    assert same(mapped, OLD)
    assert same(tensorio.load(path), OLD)


@SUFFIXES
@pytest.mark.parametrize("how", ["rename", "unlink"])
def test_mapping_outlives_the_name_of_its_file(how: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    tensorio.save(OLD, path)
    with tensorio.open(path) as checkpoint:
        if how == "rename":
            tensorio.save(NEW, tmp_path / f"other{suffix}")
            os.replace(tmp_path / f"other{suffix}", path)
        else:
            path.unlink()
        assert same(checkpoint, OLD)


def _read_behind_the_end(path: Path) -> float:
    with tensorio.guard():
        array = tensorio.load(path)["w"]
        os.truncate(path, 4096)
        return float(array[-1])


@SUFFIXES
def test_file_cut_short_in_place_ends_the_reader_with_a_bus_error(suffix: str, tmp_path: Path) -> None:
    """What no rename protects from: somebody writes over the mapped file itself. The reader dies."""
    path = tmp_path / f"model{suffix}"
    tensorio.save(OLD, path)
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()  # nobody wants to read of what is expected
        os.close(2)
        os.open(os.devnull, os.O_WRONLY)
        _read_behind_the_end(path)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGBUS
    tensorio.save(NEW, path)
    assert same(tensorio.load(path), NEW)
