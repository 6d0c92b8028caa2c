"""Checkpoints of several files with an index, as Hugging Face lays them out, opened as one.

The oracle is what safetensors and torch read of each file.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import cases
import tensorio
import tensorio.torch
from tensorio.errors import ChecksumError, FormatError, HeaderError, TruncatedError
from tensorio.torch import _files

Array = np.ndarray[Any, Any]
KINDS = {"model.safetensors": safetensors.torch.save_file, "pytorch_model.bin": torch.save}


def tensors_of(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "embed": torch.randn(13, 6),
        "up": torch.randn(8, 6).to(torch.bfloat16),
        "down": torch.randn(6, 8).to(torch.float16),
        "ids": torch.arange(7),
        "step": torch.tensor(3),
        "none": torch.empty(0, 4),
    }


def write(folder: Path, name: str, tensors: dict[str, torch.Tensor], parts: int = 3) -> Path:
    """A set of files and their index, each file by its own tool."""
    folder.mkdir(exist_ok=True)
    stem, suffix = os.path.splitext(name)
    held = [list(tensors)[i::parts] for i in range(parts)]
    where = {}
    for i, names in enumerate(held):
        file = f"{stem}-{i + 1:05d}-of-{parts:05d}{suffix}"
        KINDS[name]({n: tensors[n].clone() for n in names}, folder / file)
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
    (folder / f"{name}.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(kind: str, tmp_path: Path) -> Path:
    return write(tmp_path / "model", kind, tensors_of())


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def check(found: Any, want: dict[str, torch.Tensor]) -> None:
    assert {n: (a.tobytes(), a.shape) for n, a in found.items()} == {
        n: (raw(t), tuple(t.shape)) for n, t in want.items()
    }


def shard(folder: Path, number: int) -> Path:
    return sorted(p for p in folder.iterdir() if "-of-" in p.name)[number - 1]


def change_index(folder: Path, change: Callable[[Any], Any]) -> None:
    (path,) = folder.glob("*.index.json")
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def command_line(*arguments: str) -> str:
    for extra in ("click", "rich"):
        pytest.importorskip(extra, reason="the extra 'cli' is not installed")
    from click.testing import CliRunner

    from tensorio.cli import cli

    return CliRunner().invoke(cli, arguments).stdout


# ------------------------------------------------------------------------ every function


def test_folder_index_and_missing_file_are_the_checkpoint(folder: Path, kind: str) -> None:
    for path in (folder, str(folder) + "/", folder / f"{kind}.index.json", folder / kind):
        check(tensorio.load(path), tensors_of())
        with tensorio.open(path) as checkpoint:
            check(checkpoint, tensors_of())
            check(checkpoint.tree(), tensors_of())
            assert checkpoint.path == str(path)
            assert sorted(checkpoint.files) == sorted(map(str, folder.glob("*-of-*")))
            assert list(checkpoint.paths.values()) == [(name,) for name in checkpoint]


@pytest.mark.parametrize("options", [{"mmap": False}, {"writable": True}, {"verify": True}, {"mmap": "random"}])
def test_ways_of_loading(folder: Path, options: dict[str, Any]) -> None:
    check(tensorio.load(folder, **options), tensors_of())


def test_some_tensors(folder: Path) -> None:
    found = tensorio.load(folder, names=["ids", "embed"])
    check(found, {name: tensors_of()[name] for name in ("ids", "embed")})


def test_identify(folder: Path, kind: str) -> None:
    want = "safetensors" if kind.endswith(".safetensors") else "torch_zip"
    assert tensorio.identify(folder) == tensorio.identify(folder / f"{kind}.index.json") == want


def test_bytes_moved(folder: Path) -> None:
    want = tensors_of()
    with tensorio.open(folder) as checkpoint:
        out = {name: np.empty_like(array) for name, array in checkpoint.items()}
        checkpoint.read_into(out)
        check(out, want)
        with checkpoint.prefetch(["ids", "embed", "down"]) as ahead:
            assert ahead.wait()
        check(dict(checkpoint.stream()), want)
        assert [name for name, _ in checkpoint.stream()] == list(checkpoint)  # file by file
        checkpoint.check_unchanged()
        kept = checkpoint["embed"]
    assert kept.tobytes() == raw(want["embed"])  # views outlive the checkpoint
    with pytest.raises(ValueError, match="closed"):
        checkpoint["embed"]


def test_change_of_any_file_is_seen(folder: Path) -> None:
    with tensorio.open(folder) as checkpoint:
        os.utime(shard(folder, 3), ns=(1, 1))
        with pytest.raises(FormatError, match="changed"):
            checkpoint.check_unchanged()


def test_convert_to_one_file_and_back_to_torch(folder: Path, tmp_path: Path) -> None:
    tensorio.convert(folder, tmp_path / "one.safetensors")
    assert {n: raw(t) for n, t in safetensors.torch.load_file(tmp_path / "one.safetensors").items()} == {
        n: raw(t) for n, t in tensors_of().items()
    }
    tensorio.convert(folder, tmp_path / "one.pt")
    assert {n: raw(t) for n, t in torch.load(tmp_path / "one.pt").items()} == {
        n: raw(t) for n, t in tensors_of().items()
    }


def test_verify_names_the_file(tmp_path: Path) -> None:
    tensors = {**tensors_of(), "up": torch.randn(1000, 100)}
    folder = write(tmp_path / "model", "pytorch_model.bin", tensors)
    report = tensorio.verify(folder)
    assert report.ok
    assert report.checked > sum(t.nbytes for t in tensors.values())
    data = shard(folder, 2).read_bytes()
    at = data.index(raw(tensors["up"]))
    shard(folder, 2).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    (problem,) = tensorio.verify(folder).problems
    assert isinstance(problem, ChecksumError)
    assert problem.offset == data.index(raw(tensors["up"]))
    assert shard(folder, 2).name in str(problem)
    with pytest.raises(ChecksumError, match=shard(folder, 2).name):
        tensorio.open(folder, verify=True)


def test_publish(folder: Path) -> None:
    with tensorio.publish(folder) as publication, tensorio.attach(publication) as attached:
        check(attached, tensors_of())


def test_inspect_counts_all_files(folder: Path) -> None:
    facts = json.loads(command_line("inspect", str(folder), "--json"))
    assert facts["file_nbytes"] == sum(p.stat().st_size for p in folder.glob("*-of-*"))
    assert sorted(facts["files"]) == sorted(map(str, folder.glob("*-of-*")))
    assert facts["stored"]["nbytes"] == facts["stored"]["reached"] == sum(t.nbytes for t in tensors_of().values())
    text = command_line("inspect", str(folder))
    assert "in 3 files" in text
    assert "unpacked" not in text


# ---------------------------------------------------------------------- other processes


def test_pickled_checkpoint_opens_the_same_files(folder: Path) -> None:
    with tensorio.open(folder) as checkpoint:
        pickled = pickle.dumps(checkpoint)
        with pickle.loads(pickled) as again:
            check(again, tensors_of())
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.apply(total_bytes, (checkpoint,)) == sum(t.nbytes for t in tensors_of().values())
    file = shard(folder, 3)
    file.write_bytes(file.read_bytes())
    with pytest.raises(FormatError, match="replaced since the checkpoint was pickled"):
        pickle.loads(pickled)


def total_bytes(checkpoint: tensorio.Checkpoint) -> int:
    return sum(len(array.tobytes()) for array in checkpoint.values())


# ---------------------------------------------------------------------- what a folder is


def test_order_of_what_is_taken_of_a_folder(tmp_path: Path) -> None:
    """That of transformers: safetensors first, and one file before several."""
    folder = tmp_path / "model"
    write(folder, "pytorch_model.bin", tensors_of(1))
    torch.save(tensors_of(2), folder / "pytorch_model.bin")
    check(tensorio.load(folder), tensors_of(2))
    write(folder, "model.safetensors", tensors_of(3))
    check(tensorio.load(folder), tensors_of(3))
    safetensors.torch.save_file(tensors_of(4), folder / "model.safetensors")
    check(tensorio.load(folder), tensors_of(4))
    check(tensorio.load(folder / "model.safetensors.index.json"), tensors_of(3))


def test_index_of_another_name_is_taken_if_it_is_the_only_one(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "model.safetensors", tensors_of())
    index = folder / "model.safetensors.index.json"
    index.rename(folder / "diffusion.safetensors.index.json")
    check(tensorio.load(folder), tensors_of())
    (folder / "other.safetensors.index.json").write_text("{}")
    with pytest.raises(IsADirectoryError, match="one of 2 indexes: give the path of one"):
        tensorio.load(folder)


def test_folder_of_nothing_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for read in (tensorio.open, tensorio.load, tensorio.identify, tensorio.verify):
        with pytest.raises(IsADirectoryError, match="none of model"):
            read(tmp_path)


def test_index_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert tensorio.load(tmp_path) == {}
    with tensorio.open(tmp_path) as checkpoint:
        assert len(checkpoint) == 0


def test_links_of_the_hub_cache_are_followed(folder: Path, kind: str, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        (snapshot / file.name).symlink_to(os.path.relpath(file, snapshot))
    check(tensorio.load(snapshot), tensors_of())


# --------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "name", ["../x", "/etc/hostname", "..", ".", "", "a\\b", "file:///etc/passwd", 3, None, ["x"], "x" * 300, "a\nb"]
)
def test_names_that_lead_elsewhere_are_refused(folder: Path, name: Any) -> None:
    change_index(folder, lambda index: index["weight_map"].update(step=name))
    with pytest.raises(HeaderError, match="weight_map"):
        tensorio.load(folder)


def test_index_that_names_itself_or_a_folder_is_refused(folder: Path, kind: str) -> None:
    change_index(folder, lambda index: index["weight_map"].update(step=f"{kind}.index.json"))
    with pytest.raises(FormatError):
        tensorio.load(folder)
    write(folder / "deeper", kind, tensors_of())
    change_index(folder, lambda index: index["weight_map"].update(step="deeper"))
    with pytest.raises(IsADirectoryError):
        tensorio.load(folder)


def test_missing_files_are_counted(folder: Path) -> None:
    gone = [shard(folder, 3), shard(folder, 1)]
    for file in gone:
        file.unlink()
    with pytest.raises(TruncatedError, match=f"2 of 3 files are not there: '{gone[1].name}', '{gone[0].name}'"):
        tensorio.load(folder)


def test_file_of_more_than_tensors_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "pytorch_model.bin", tensors_of())
    torch.save({"up": torch.zeros(3), "lr": 0.1}, shard(folder, 2))
    with pytest.raises(HeaderError, match=r"found 'lr' \(float\)"):
        tensorio.load(folder)
    torch.save([torch.zeros(3)], shard(folder, 2))
    with pytest.raises(HeaderError, match="expected a dict of tensors"):
        tensorio.load(folder)


# ------------------------------------------------------------------ replaced meanwhile


def test_set_replaced_while_it_is_opened_is_opened_again(
    folder: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files are of one save, whenever the folder is exchanged."""
    from tensorio.checkpoint import _index

    write(tmp_path / "new", kind, tensors_of(1))
    real, opened = _index.open_single, []

    def open_single(path: Any, **options: Any) -> Any:
        if len(opened) == 1:  # one file of the old set is open
            os.rename(folder, tmp_path / "old")
            os.rename(tmp_path / "new", folder)
        opened.append(path)
        return real(path, **options)

    monkeypatch.setattr(_index, "open_single", open_single)
    check(tensorio.load(folder), tensors_of(1))
    assert len(opened) == 6


def test_set_replaced_for_ever_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorio.checkpoint import _index

    real = _index.open_single
    (index,) = folder.glob("*.index.json")

    def open_single(path: Any, **options: Any) -> Any:
        index.write_bytes(index.read_bytes() + b" ")
        return real(path, **options)

    monkeypatch.setattr(_index, "open_single", open_single)
    with pytest.raises(FormatError, match="replaced 10 times"):
        tensorio.load(folder)


# ------------------------------------------------------------------------ many files


def test_files_of_other_tools() -> None:
    shared = cases.shared_folder()
    if shared is None:
        pytest.skip("no folder of files by other tools")
    samples = shared / "samples" / "hf_dirs"
    for name in ("sharded_safetensors", "sharded_bin", "single_bin", "single_safetensors"):
        found = tensorio.load(samples / name)
        for expected in samples.glob("exp__*.npy"):
            fqn = expected.stem.removeprefix("exp__")
            if fqn in found:
                assert found[fqn].tobytes() == np.load(expected).tobytes(), fqn


def test_broken_folders_of_other_tools_are_refused() -> None:
    shared = cases.shared_folder()
    if shared is None:
        pytest.skip("no folder of files by other tools")
    fine = {"index_no_metadata", "index_total_size_wrong"}
    for folder in (shared / "samples" / "hf_dirs" / "broken").iterdir():
        if folder.name in fine:
            assert len(tensorio.load(folder)) == 5
        else:
            with pytest.raises((FormatError, OSError)):
                tensorio.load(folder)


def test_packed_records_of_several_files(tmp_path: Path) -> None:
    """Storages that are made when touched keep their places behind those of the files before."""
    folder = write(tmp_path / "model", "pytorch_model.bin", tensors_of())
    for file in (shard(folder, 1), shard(folder, 2)):
        with zipfile.ZipFile(file) as plain:
            records = {name: plain.read(name) for name in plain.namelist()}
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
            for name, data in records.items():
                packed.writestr(name, data)
    check(tensorio.load(folder), tensors_of())
    assert tensorio.verify(folder).ok
    text = command_line("inspect", str(folder), "--flat")
    assert [line.split()[0] for line in text.splitlines() if "unpacked on use" in line] == [
        "embed",
        "ids",
        "up",
        "step",
    ]


def test_torch_tensors_of_all_files(folder: Path, kind: str) -> None:
    want = tensors_of()
    (index,) = folder.glob("*.index.json")
    for path in (folder, str(folder), index, folder / kind):
        for load in (tensorio.torch.load, tensorio.torch.load_file):
            found = load(path)
            assert {fqn: (t.dtype, raw(t)) for fqn, t in found.items()} == {
                fqn: (t.dtype, raw(t)) for fqn, t in want.items()
            }


def test_torch_tensors_are_of_one_save(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody puts other files there once the first one is loaded."""
    want, real = tensors_of(1), _files.load_file

    def load_file(*args: Any, **options: Any) -> Any:
        found = real(*args, **options)
        if not os.path.isdir(args[0]) and (folder / "first").exists():
            (folder / "first").unlink()
            shutil.rmtree(folder)
            write(folder, kind, want, parts=2)
        return found

    (folder / "first").touch()
    monkeypatch.setattr(_files, "load_file", load_file)
    assert {fqn: raw(t) for fqn, t in load_file(folder).items()} == {fqn: raw(t) for fqn, t in want.items()}


def test_torch_refuses_an_index_that_does_not_fit(folder: Path) -> None:
    change_index(folder, lambda index: index["weight_map"].pop("ids"))
    for load in (tensorio.torch.load, tensorio.torch.load_file):
        with pytest.raises(HeaderError, match="does not name") as caught:
            load(folder)
        assert isinstance(caught.value, tensorio.torch.LoadError)
