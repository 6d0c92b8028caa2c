"""Steps that are saved, listed, restored, pinned, removed and rolled back; what damage does to them."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio
from steps import restored
from tensorio.manager import _local, _note, _reader
from tensorio.manager._note import decode, encoded
from tensorio.manager._retention import Best

Manager = tensorio.CheckpointManager


def state(step: int) -> dict[str, Any]:
    return {"w": np.full((4, 5), step, np.float32), "step": step, "lr": 0.1}


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    with Manager(tmp_path / "run", keep=None) as made:
        yield made


def filled(manager: Manager, *steps: int) -> Manager:
    for step in steps:
        manager.save(step, state(step), metrics={"loss": 1 / (step + 1)})
    return manager


def litter(manager: Manager) -> list[str]:
    """What is in the folder beside steps and the lock."""
    return [name for name in os.listdir(manager.folder) if not name.startswith("step-") and name != ".lock"]


# ------------------------------------------------------------------ the plain way


def test_what_was_saved_comes_back(manager: Manager) -> None:
    info = manager.save(1000, state(1000), metrics={"loss": np.float32(0.25), "split": "dev"})
    assert manager.steps() == [1000]
    assert manager.latest() == 1000
    assert Path(manager.path(1000)).name == "step-00001000"
    found = restored(manager)
    np.testing.assert_array_equal(found.value["w"], state(1000)["w"])
    assert found.value["step"] == found.step == 1000
    assert found.metrics == {"loss": 0.25, "split": "dev"}
    assert found.skipped == ()
    assert manager.info(1000) == info == found.info
    assert info.version == tensorio.__version__
    assert info.nbytes == (Path(manager.path(1000)) / "checkpoint.pt").stat().st_size
    assert litter(manager) == []


def test_an_empty_folder_has_nothing(tmp_path: Path) -> None:
    manager = Manager(tmp_path / "none")
    assert manager.steps() == []
    assert manager.latest() is None
    assert manager.latest_valid() is None
    assert manager.restore() is None
    assert not (tmp_path / "none").exists()  # looking makes nothing


def test_several_items_have_files_of_their_own(manager: Manager) -> None:
    items = {"model.safetensors": {"w": np.ones(3)}, "training": {"step": 5, "m": np.zeros(2)}}
    manager.save(5, items=items)
    assert sorted(os.listdir(manager.path(5))) == ["model.safetensors", "step.json", "training.pt"]
    found = restored(manager, 5)
    assert set(found.value) == set(items)
    assert found.value["training"]["step"] == 5
    assert tensorio.identify(os.path.join(manager.path(5), "model.safetensors")) == "safetensors"


def test_an_item_of_several_shards_is_a_folder_and_checked_as_a_file_is(tmp_path: Path) -> None:
    tensors = {f"w{i}": np.full(300, i, np.float32) for i in range(4)}
    with Manager(tmp_path, max_shard_size=2000, format="safetensors") as manager:
        info = manager.save(1, tensors)
        assert info.items == {"checkpoint": "checkpoint"}
        assert len(info.files) == 5  # four shards and the index
        assert {name: array[0] for name, array in restored(manager).value.items()} == {f"w{i}": i for i in range(4)}
        (Path(manager.path(1)) / info.files[2].name).unlink()
        with pytest.raises(FileNotFoundError):
            manager.check(1)


@pytest.mark.parametrize(("format", "suffix"), [("pt", ".bin"), ("bin", ".bin"), (".safetensors", ".safetensors")])
@pytest.mark.parametrize("block", [True, False])
def test_shards_are_of_the_managers_format(format: str, suffix: str, block: bool, tmp_path: Path) -> None:
    tensors = {f"w{i}": np.full(300, i, np.float32) for i in range(4)}
    with Manager(tmp_path, max_shard_size=2000, format=format) as manager:
        manager.save(1, tensors, block=block)
        manager.save(2, items={"model": tensors, "other.safetensors": tensors}, block=block)
        manager.wait()
        shards = [Path(file.name) for file in manager.info(1).files if not file.name.endswith(".json")]
        assert [path.suffix for path in shards] == [suffix] * 4
        found = {path.suffix for file in manager.info(2).files if (path := Path(file.name)).parent != Path()}
        assert found == {suffix, ".json"}
        for value in [restored(manager, 1).value, *restored(manager, 2).value.values()]:
            assert {name: array[0] for name, array in value.items()} == {f"w{i}": i for i in range(4)}


def test_a_manifest_covers_all_sharded_items_of_a_step(tmp_path: Path) -> None:
    tensors = {f"w{i}": np.full(300, i, np.float32) for i in range(4)}
    with Manager(tmp_path, max_shard_size=2000, manifest=True) as manager:
        manager.save(1, items={"a.safetensors": tensors, "b.safetensors": tensors})
    check = ["sha256sum", "-c", "checkpoint.sha256"]
    found = subprocess.run(check, cwd=manager.path(1), capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count(": OK") == 10  # twice four shards and an index


@pytest.mark.parametrize("format", ["pt", "safetensors"])
def test_shards_come_back_as_torch_tensors(format: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import tensorio.torch

    tensors = {f"w{i}": torch.full((300,), i) for i in range(4)}
    with Manager(tmp_path, max_shard_size=2500, format=format) as manager:
        manager.save(1, items={"folder": tensors, "named.safetensors": tensors, "named.pt": tensors})
        value = restored(manager, load=tensorio.torch.load).value
    assert len(value) == 3
    for found in value.values():
        assert {name: tensor.tolist() for name, tensor in found.items()} == {n: t.tolist() for n, t in tensors.items()}


def test_a_loader_that_takes_no_folders_says_nothing_of_a_step(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import safetensors.torch

    with Manager(tmp_path, max_shard_size=2000, format="safetensors") as manager:
        tensors = {f"w{i}": np.full(300, i, np.float32) for i in range(4)}
        for step, item in enumerate(["folder", "named.safetensors"]):
            manager.save(step, items={item: tensors})
            for load in (torch.load, safetensors.torch.load_file):
                with pytest.raises(IsADirectoryError, match=r"max_shard_size=.*tensorio.torch.load"):
                    manager.restore(load=load)


def test_warnings_are_of_the_line_that_called(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(manager, 1, 2)
    damage_flip(manager, 2)
    for call in (manager.restore, manager.latest_valid):
        with pytest.warns(UserWarning, match="passed over: step 2") as caught:
            call()
        assert [warning.filename for warning in caught] == [__file__]

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    manager._policy = manager._policy.__class__(1, None, None)
    monkeypatch.setattr(_local.LocalSteps, "remove", fail)
    with pytest.warns(UserWarning, match="not removed") as caught:
        manager.save(3, state(3))
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("format", ["npz", "foo", "", "torch_zip"])
def test_a_format_that_nobody_can_write_is_refused_before_the_first_step(format: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"format=.*safetensors, pt"):
        Manager(tmp_path, format=format)


def test_one_item_of_the_name_that_a_single_object_has_comes_back_as_an_item(manager: Manager) -> None:
    manager.save(1, items={"checkpoint": state(1)})
    manager.save(2, state(2))
    manager.save(3, items={"model": state(3)})
    assert set(restored(manager, 1).value) == {"checkpoint"}
    assert restored(manager, 1).value["checkpoint"]["step"] == 1
    assert restored(manager, 2).value["step"] == 2
    assert restored(manager, 3).value["model"]["step"] == 3
    assert [manager.info(step).several for step in (1, 2, 3)] == [True, False, True]


def test_a_note_that_does_not_say_whether_there_were_items_goes_by_the_name(manager: Manager) -> None:
    """As notes were before it did."""
    manager.save(1, state(1))
    manager.save(2, items={"model": state(2)})
    for step in (1, 2):
        path = Path(manager.path(step)) / "step.json"
        text = path.read_bytes().partition(b', "check"')[0]
        shorter = text.replace(b' "several": false,\n', b"").replace(b' "several": true,\n', b"")
        assert len(shorter) < len(text)
        path.write_bytes(shorter + b', "check": "%08x"\n}\n' % zlib.crc32(shorter))
    assert restored(manager, 1).value["step"] == 1
    assert restored(manager, 2).value["model"]["step"] == 2


@pytest.mark.parametrize(
    "items", [{}, {"": 1}, {"../x": 1}, {".x": 1}, {"step.json": 1}, {"a": 1, "a.pt": 2}, {"\udc80": 1}]
)
def test_names_of_items_that_are_no_file_names_are_refused(manager: Manager, items: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="items="):
        manager.save(1, items=items)
    assert manager.steps() == []


def test_torch_tensors_by_a_loader_of_ones_own(manager: Manager) -> None:
    torch = pytest.importorskip("torch")
    from tensorio import torch as face

    manager.save(1, {"w": torch.arange(5)})
    assert torch.equal(restored(manager, load=face.load).value["w"], torch.arange(5))


def test_a_step_is_not_overwritten_unless_asked(manager: Manager) -> None:
    filled(manager, 1)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        manager.save(1, state(7))
    manager.save(1, state(7), overwrite=True)
    assert restored(manager, 1).value["step"] == 7
    assert litter(manager) == []


@pytest.mark.parametrize("name", ["\udc80", "loss\ud800"])
def test_names_of_metrics_that_a_note_can_not_have_are_refused(manager: Manager, name: str) -> None:
    """JSON has no place for half a surrogate pair: such a note could not be read again."""
    with pytest.raises(ValueError, match="metric"):
        manager.save(1, state(1), metrics={name: 1})
    assert manager.steps() == []


@pytest.mark.parametrize("step", [-1, 10**18, 1.5, "1"])
def test_what_is_no_step_is_refused(manager: Manager, step: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        manager.save(step, state(1))


def test_nothing_but_steps_is_listed(manager: Manager) -> None:
    filled(manager, 3)
    folder = Path(manager.folder)
    for name in ("step-4", "step-000000005", "step-00000006.tmp", "astep-00000007", "step-0000000x", "notes"):
        (folder / name).mkdir()
    assert manager.steps() == [3]
    assert Manager(folder).path(10**9) == str(folder / "step-1000000000")


# ------------------------------------------------------------------ what stays


def test_older_steps_go_by_the_rules(tmp_path: Path) -> None:
    with Manager(tmp_path, keep=2, every=40, best=("loss", "min", 1)) as manager:
        for step, loss in ((10, 3), (20, 1), (30, 2), (40, 5), (50, 4), (60, 9), (70, 8)):
            manager.save(step, state(step), metrics={"loss": loss}, pin=step == 30)
        assert manager.steps() == [20, 30, 40, 60, 70]
        assert [step for step in manager.steps() if manager.pinned(step)] == [30]
        manager.unpin(30)
        manager.pin(60)
        manager.save(80, state(80), metrics={"loss": 7})
        assert manager.steps() == [20, 40, 60, 70, 80]
        assert litter(manager) == []
    with Manager(tmp_path, keep=1, best=Best("loss")) as again:  # metrics are read from the notes
        again.save(90, state(90))
        assert again.steps() == [20, 60, 90]


def test_an_array_of_a_removed_step_stays_valid(tmp_path: Path) -> None:
    with Manager(tmp_path, keep=1) as manager:
        filled(manager, 1)
        found = restored(manager)
        filled(manager, 2)
        assert manager.steps() == [2]
        assert found.value["w"].sum() == 20


def test_what_is_not_there_can_be_neither_pinned_nor_restored(manager: Manager) -> None:
    acts: list[Callable[[int], object]] = [
        manager.pin, manager.unpin, manager.remove, manager.restore, manager.rollback,
    ]  # fmt: skip
    for act in acts:
        with pytest.raises(FileNotFoundError, match="no such step"):
            act(5)


def test_a_pinned_step_that_is_overwritten_stays_pinned(manager: Manager) -> None:
    manager.save(1, state(1), pin=True)
    manager.save(1, state(7), overwrite=True)
    assert manager.pinned(1)
    assert restored(manager, 1).value["step"] == 7
    manager.unpin(1)
    manager.save(1, state(8), overwrite=True)
    assert not manager.pinned(1)


def test_deltas_are_refused(tmp_path: Path) -> None:
    """Each is to be in the folder of its base, and each step has its own, which may be removed without the others."""
    with Manager(tmp_path, format="safetensors") as manager:
        manager.save(1, {"w": np.ones(3)})
        for block in (True, False):
            with pytest.raises(tensorio.errors.UnsupportedError, match="base= is for files of one folder"):
                manager.save(2, {"w": np.ones(3)}, base=manager.path(1) + "/checkpoint.safetensors", block=block)
        assert manager.steps() == [1]
    with pytest.raises(tensorio.errors.UnsupportedError, match="base="):
        Manager(tmp_path, base="x.safetensors").save(1, {"w": np.ones(3)})


def test_rolling_back_takes_newer_ones_away(manager: Manager) -> None:
    filled(manager, 1, 2, 3, 4)
    assert manager.rollback(2) == [4, 3]
    assert manager.steps() == [1, 2]
    filled(manager, 3)
    assert manager.rollback(2, aside=True) == [3]
    filled(manager, 3)
    manager.rollback(2, aside=True)
    assert sorted(litter(manager)) == ["aside-step-00000003", "aside-step-00000003-2"]
    assert manager.rollback(2) == []


def test_rolling_back_to_a_damaged_step_or_over_a_pinned_one_is_refused(manager: Manager) -> None:
    filled(manager, 1, 2, 3)
    manager.pin(3)
    with pytest.raises(ValueError, match="pinned"):
        manager.rollback(2)
    manager.unpin(3)
    damage_flip(manager, 2)
    with pytest.raises(tensorio.ChecksumError):
        manager.rollback(2)
    assert manager.steps() == [1, 2, 3]


# ------------------------------------------------------------------ damage


def file_of(manager: Manager, step: int) -> Path:
    return Path(manager.path(step)) / "checkpoint.pt"


def damage_flip(manager: Manager, step: int) -> None:
    data = bytearray(file_of(manager, step).read_bytes())
    data[len(data) // 2] ^= 1
    file_of(manager, step).write_bytes(data)


def damage_cut(manager: Manager, step: int) -> None:
    os.truncate(file_of(manager, step), 100)


def damage_delete(manager: Manager, step: int) -> None:
    file_of(manager, step).unlink()


def damage_note(manager: Manager, step: int) -> None:
    path = Path(manager.path(step)) / "step.json"
    path.write_bytes(path.read_bytes().replace(b'"loss": 0', b'"loss": 1'))


def damage_no_note(manager: Manager, step: int) -> None:
    (Path(manager.path(step)) / "step.json").unlink()


def damage_fifo(manager: Manager, step: int) -> None:
    file_of(manager, step).unlink()
    os.mkfifo(file_of(manager, step))


DAMAGES = [damage_flip, damage_cut, damage_delete, damage_note, damage_no_note, damage_fifo]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_steps_are_passed_over_with_the_reason(manager: Manager, damage: Callable[..., None]) -> None:
    filled(manager, 1, 2, 3)
    damage(manager, 3)
    with pytest.warns(UserWarning, match="passed over: step 3"):
        valid = manager.latest_valid()
    assert valid is not None
    assert valid.step == 2
    assert [skipped.step for skipped in valid.skipped] == [3]
    assert str(valid.skipped[0]).startswith("step 3: ")
    with pytest.warns(UserWarning, match="step 3"):
        assert restored(manager).value["step"] == 2
    for act in (manager.restore, manager.check):
        with pytest.raises((tensorio.TensorIOError, OSError)):
            act(3)


def test_if_none_is_whole_it_is_an_error_and_no_fresh_start(manager: Manager) -> None:
    filled(manager, 1, 2)
    damage_flip(manager, 1)
    damage_cut(manager, 2)
    with (
        pytest.warns(UserWarning, match="passed over"),
        pytest.raises(tensorio.FormatError, match="none of 2 checkpoints is whole"),
    ):
        manager.restore()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM, errno.EACCES, errno.ESTALE])
def test_an_error_that_says_nothing_of_the_step_is_no_damage(manager: Manager, code: int) -> None:
    """An older step would be restored, and the newer ones, whole as they are, be rolled back."""
    filled(manager, 1, 2)

    def load(path: str) -> Any:
        if path.startswith(manager.path(2)):
            raise OSError(code, os.strerror(code), path)
        return tensorio.load(path)

    with pytest.raises(OSError, match="step-00000002") as raised:
        manager.restore(load=load)
    assert raised.value.errno == code


def test_sizes_alone_do_not_show_a_changed_byte(manager: Manager) -> None:
    filled(manager, 1)
    damage_flip(manager, 1)
    assert manager.latest_valid(deep=False) is not None


def test_every_changed_byte_of_a_step_is_found(manager: Manager) -> None:
    manager.save(1, items={"m.safetensors": {"w": np.zeros(2, np.uint8)}})
    for path in (Path(manager.path(1)) / "m.safetensors", Path(manager.path(1)) / "step.json"):
        good = path.read_bytes()
        for at in range(len(good)):
            path.write_bytes(good[:at] + bytes([good[at] ^ 0x20]) + good[at + 1 :])
            with pytest.raises(tensorio.FormatError):
                manager.check(1)
        for length in range(0, len(good), 7):
            path.write_bytes(good[:length])
            with pytest.raises(tensorio.FormatError):
                manager.check(1)
        path.write_bytes(good)
    manager.check(1)


def test_a_note_that_leads_elsewhere_is_refused(manager: Manager) -> None:
    info = filled(manager, 1).info(1)
    for name in ("../other", "/etc/passwd", "a/../../b", "", "a\\b", "a\0b", "."):
        text = encoded(type(info)(1, 0.0, items={"checkpoint": name}))
        with pytest.raises(tensorio.HeaderError, match="leads elsewhere"):
            decode(text, "step.json")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.1, 3, "text", True])
def test_metrics_come_back(manager: Manager, value: Any) -> None:
    manager.save(1, state(1), metrics={"m": value})
    assert repr(manager.info(1).metrics["m"]) == repr(value)
    json.loads((Path(manager.path(1)) / "step.json").read_text())


def test_nan_is_refused_when_saving_and_passed_over_when_restoring(tmp_path: Path) -> None:
    bad = {"w": np.array([1.0, np.nan])}
    with Manager(tmp_path, finite=True) as manager:
        filled(manager, 1)
        with pytest.raises(tensorio.NonFiniteError, match="'w'"):
            manager.save(2, bad)
        assert manager.steps() == [1]
        assert litter(manager) == []
        manager.save(2, bad, check_finite=False)
        with pytest.warns(UserWarning, match="NaN"):
            assert restored(manager, check_finite=True).step == 1
        assert restored(manager).step == 2


def test_a_step_removed_while_it_was_looked_at_is_no_damage(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(manager, 1, 2)
    check = type(manager._steps).check

    def vanishing(self: Any, step: int, *, deep: bool) -> None:
        if step == 2:
            shutil.rmtree(self.path(2))
        check(self, step, deep=deep)

    monkeypatch.setattr(type(manager._steps), "check", vanishing)
    valid = manager.latest_valid()
    assert valid is not None
    assert (valid.step, valid.skipped) == (1, ())


def test_a_closed_manager_saves_nothing_and_still_reads(tmp_path: Path) -> None:
    manager = filled(Manager(tmp_path), 1)
    manager.close()
    with pytest.raises(ValueError, match="closed"):
        manager.save(2, state(2))
    assert manager.steps() == [1]
    manager.close()


# -------------------------------------------------------- what must not stop a long run


def test_a_file_that_is_called_as_a_step_is_none_and_stops_no_rule(tmp_path: Path) -> None:
    (tmp_path / "step-00000009").write_text("mine")
    with Manager(tmp_path, keep=1) as manager:
        filled(manager, 1, 10, 11)
        assert manager.steps() == [11]
        assert manager.restore(11)
    assert (tmp_path / "step-00000009").read_text() == "mine"


def test_a_step_that_is_a_link_to_a_folder_is_one(tmp_path: Path) -> None:
    with Manager(tmp_path / "run", keep=None) as manager:
        filled(manager, 1)
        shutil.move(manager.path(1), tmp_path / "other disk")
        os.symlink(tmp_path / "other disk", manager.path(1))
        assert restored(manager).step == 1


def test_a_step_that_can_not_be_read_stays_and_the_others_go_by_the_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = _local.read_note

    def reading(folder: str) -> Any:
        if folder.endswith("2"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), folder)
        return real(folder)

    with Manager(tmp_path, keep=None, best=("loss", "min", 1)) as manager:
        filled(manager, 1, 2, 3)
    monkeypatch.setattr(_local, "read_note", reading)
    with Manager(tmp_path, keep=1, best=("loss", "max", 1)) as manager:
        with pytest.warns(UserWarning, match="old checkpoints are not removed: step 2.*Input/output"):
            filled(manager, 4)
        assert manager.steps() == [1, 2, 4]


def saved(manager: Manager, step: int, block: bool) -> Any:
    return manager.save(step, state(step)) if block else manager.save(step, state(step), block=False).result()


@pytest.mark.parametrize("error", [OSError(errno.EIO, "no"), RuntimeError("what a client of a store raises")], ids=repr)
@pytest.mark.parametrize("block", [True, False])
def test_what_can_not_be_removed_fails_no_save_and_keeps_no_other(
    error: Exception, block: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Manager(tmp_path, keep=None) as manager:
        filled(manager, 1, 2, 3)
    real = _local.LocalSteps.remove

    def remove(self: Any, step: int) -> None:
        if step == 1:
            raise error
        real(self, step)

    monkeypatch.setattr(_local.LocalSteps, "remove", remove)
    with Manager(tmp_path, keep=1) as manager:
        with pytest.warns(UserWarning, match="old checkpoints are not removed: step 1"):
            assert saved(manager, 4, block).step == 4
        assert manager.steps() == [1, 4]


def test_steps_that_go_while_a_reader_looks_are_no_fresh_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was listed is gone when it is read; that the next one is there by then is what counts."""
    with Manager(tmp_path, keep=1) as writer:
        filled(writer, 1)
        real = _local.read_note
        goes_on = iter([2, 3])

        def reading(folder: str) -> Any:
            step = next(goes_on, None)
            if step is not None:
                with monkeypatch.context() as undone:
                    undone.setattr(_local, "read_note", real)
                    filled(writer, step)
            return real(folder)

        monkeypatch.setattr(_local, "read_note", reading)
        found = Manager(tmp_path).restore()
        assert found is not None
        assert found.step == 3
        assert found.skipped == ()


@pytest.mark.parametrize("looking", ["restore", "restore one", "latest_valid"])
@pytest.mark.parametrize("moment", ["check_files", "load"])
def test_a_step_that_is_replaced_while_it_is_read_is_read_again(
    looking: str, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Manager(tmp_path) as writer:
        writer.save(1, {"w": np.zeros(100)}, metrics={"loss": math.nan})
        left = iter([1])

        def replaced() -> None:
            if next(left, None):
                writer.save(1, {"w": np.ones(200)}, metrics={"loss": 1.0}, overwrite=True)

        def check_files(*arguments: Any, **options: Any) -> None:
            if moment == "check_files":
                replaced()
            real(*arguments, **options)

        def load(path: str) -> Any:
            if moment == "load":
                replaced()
            return tensorio.load(path)

        real = _note.check_files
        for module in (_local, _reader):
            monkeypatch.setattr(module, "check_files", check_files)
        manager = Manager(tmp_path)
        if looking == "latest_valid":
            valid = manager.latest_valid()
            assert valid is not None
            assert valid.skipped == ()
            assert math.isnan(valid.info.metrics["loss"]) == (moment == "load")  # nothing is loaded, nothing replaced
            return
        found = manager.restore(load=load) if looking == "restore" else manager.restore(1, load=load)
        assert found is not None
        assert found.skipped == ()
        assert found.metrics == {"loss": 1.0}
        assert found.value["w"].tolist() == [1.0] * 200


def test_a_step_with_nan_in_its_metrics_is_read_once(manager: Manager) -> None:
    manager.save(1, state(1), metrics={"loss": math.nan})
    calls = []
    restored(manager, load=lambda path: calls.append(path))
    assert len(calls) == 1


def test_a_step_moved_aside_by_a_killed_writer_comes_back_with_the_next_save(tmp_path: Path) -> None:
    """Where names can't be exchanged, an overwritten step has no name between two renames."""
    with Manager(tmp_path, keep=None) as manager:
        filled(manager, 1, 2)
        shutil.copytree(manager.path(2), tmp_path / ".step-00000002.tensorio.old")
        os.rename(manager.path(1), tmp_path / ".step-00000001.tensorio.old")
    with Manager(tmp_path, keep=None) as manager:
        filled(manager, 3)
        assert manager.steps() == [1, 2, 3]
        manager.check(1)
        assert litter(manager) == []
