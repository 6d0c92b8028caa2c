"""Steps at addresses that fsspec knows: in memory, in files, and where operations fail."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio
from steps import assert_whole_after_the_third, restored

fsspec = pytest.importorskip("fsspec")
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402

Manager = tensorio.CheckpointManager


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(50, step, np.float32), "step": step}


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield f"memory://run-{tmp_path.name}" if request.param == "memory" else f"file://{tmp_path}/run"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def names(url: str, step: int) -> list[str]:
    fs, root = fsspec.core.url_to_fs(url)
    return sorted(os.path.basename(name) for name in fs.ls(f"{root}/step-{step:08d}", detail=False))


def test_the_life_of_a_run(url: str) -> None:
    with Manager(url, keep=2, best=("loss", "min", 1)) as manager:
        assert manager.restore() is None
        for step in range(1, 6):
            manager.save(step, state(step), metrics={"loss": abs(step - 2)}, pin=step == 1)
        assert manager.steps() == [1, 2, 4, 5]
        assert manager.pinned(1)
        manager.unpin(1)
        manager.save(6, items={"model.safetensors": {"w": np.ones(3)}, "rest": {"a": 1}})
        assert manager.steps() == [2, 5, 6]
        assert set(restored(manager).value) == {"model.safetensors", "rest"}
        assert restored(manager, 5).value["step"] == 5
        assert (restored(manager, 5).value["w"] == 5).all()
        assert names(url, 5) == ["checkpoint.pt", "step.json"]
        assert len(manager.info(5).files[0].sha256 or "") == 64
        with pytest.raises(FileExistsError):
            manager.save(5, state(7))
        manager.save(5, state(7), overwrite=True)
        assert restored(manager, 5).value["step"] == 7
        assert manager.rollback(2) == [6, 5]
        assert manager.steps() == [2]
        with pytest.raises(tensorio.UnsupportedError, match="aside"):
            manager.save(3, state(3))
            manager.rollback(2, aside=True)


def test_in_the_background(url: str) -> None:
    with Manager(url) as manager:
        manager.save(1, state(1), block=False).result(60)
        assert restored(manager).step == 1


def test_a_step_without_a_whole_note_is_none(url: str) -> None:
    fs, root = fsspec.core.url_to_fs(url)
    with Manager(url) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2))
        note = f"{root}/step-00000002/step.json"
        fs.pipe_file(note, fs.cat_file(note)[:-9])
        assert manager.steps() == [1]
        fs.rm_file(note)
        assert manager.steps() == [1]
        assert restored(manager).step == 1
        manager.save(2, state(2))
        assert manager.steps() == [1, 2]


@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_damaged_steps_are_passed_over(url: str, damage: str) -> None:
    fs, root = fsspec.core.url_to_fs(url)
    with Manager(url) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2))
        path = f"{root}/step-00000002/checkpoint.pt"
        data = fs.cat_file(path)
        if damage == "flip":
            fs.pipe_file(path, data[:200] + bytes([data[200] ^ 1]) + data[201:])
        elif damage == "cut":
            fs.pipe_file(path, data[:-5])
        else:
            fs.rm_file(path)
        with pytest.warns(UserWarning, match="passed over: step 2"):
            valid = manager.latest_valid()
        assert valid is not None
        assert valid.step == 1
        if damage != "flip":
            with pytest.warns(UserWarning, match="passed over: step 2"):
                manager.latest_valid(deep=False)


class Failing(MemoryFileSystem):  # type: ignore[misc]
    """Memory whose k-th operation fails, and all behind it if it is gone for good."""

    protocol = "failing"
    left = 0
    sticky = False
    hit = False

    @classmethod
    def turn(cls) -> None:
        cls.left -= 1
        if cls.left == 0 or (cls.sticky and cls.left < 0):
            cls.hit = True
            raise OSError(5, "the store is not there (injected)")

    def ls(self, *arguments: Any, **options: Any) -> Any:
        self.turn()
        return super().ls(*arguments, **options)

    def put_file(self, *arguments: Any, **options: Any) -> Any:
        self.turn()
        return super().put_file(*arguments, **options)

    def cat_file(self, *arguments: Any, **options: Any) -> Any:
        self.turn()
        return super().cat_file(*arguments, **options)

    def rm_file(self, *arguments: Any, **options: Any) -> Any:
        self.turn()
        return super().rm_file(*arguments, **options)

    def rm(self, *arguments: Any, **options: Any) -> Any:
        self.turn()
        return super().rm(*arguments, **options)


@pytest.mark.parametrize("sticky", [False, True], ids=["once", "from_then_on"])
@pytest.mark.filterwarnings("ignore:old checkpoints are not removed")
def test_an_operation_that_fails_leaves_old_steps_or_the_new_one(sticky: bool, tmp_path: Path) -> None:
    fsspec.register_implementation("failing", Failing, clobber=True)
    for k in range(1, 100):
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]
        Failing.left = 0
        manager = Manager(f"failing://run-{k}", keep=2)
        for step in (1, 2):
            manager.save(step, state(step))
        Failing.left, Failing.sticky, Failing.hit = k, sticky, False
        saved = True
        try:
            manager.save(3, state(3))
        except OSError:
            saved = False
        hit, Failing.left, Failing.sticky = Failing.hit, 0, False
        assert_whole_after_the_third(manager, saved)
        manager.save(4, state(4))
        if not hit:
            return
    raise AssertionError("operations never stopped being made")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_leaves_what_is_pending_to_its_parent(url: str) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hold(done: int, total: int) -> None:
        begun.set()
        assert go_on.wait(60)

    with Manager(url) as manager:
        manager.save(1, state(1), block=False, progress=hold)
        manager.save(2, state(2), block=False)
        assert begun.wait(60)
        child = os.fork()
        if child == 0:
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
        go_on.set()
        manager.wait()
        assert manager.steps() == [1, 2]
