"""Checkpoints saved in several files: packing and names as huggingface_hub has them, all files visible or none.

The oracle of the packing is huggingface_hub where it is installed, and its rules by hand; safetensors and torch read
each file.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

import tensorio
import tensorio.torch
from tensorio import _host
from tensorio.checkpoint._packing import Entry, entries_of, nbytes_of, split
from tensorio.checkpoint._sums import INSIDE as SUMS
from tensorio.checkpoint._sums import SUFFIX
from tensorio.errors import TensorMismatchError, UnsupportedError
from tensorio.writing import carrying, folders
from tensorio.writing.temporaries import clean_stale

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="folders are exchanged on Linux only")


def tensors_of(seed: int = 0, count: int = 7) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {f"layers.{i}.w": torch.randn(25, 4) for i in range(count)}  # 400 bytes each


def raw(tensors: Any) -> dict[str, bytes]:
    return {n: t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for n, t in tensors.items()}


def check(folder: Path, want: dict[str, torch.Tensor]) -> None:
    assert {n: a.tobytes() for n, a in tensorio.load(folder).items()} == raw(want)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def numbered(count: int, stem: str = "model", suffix: str = ".safetensors") -> list[str]:
    return [f"{stem}-{i + 1:05d}-of-{count:05d}{suffix}" for i in range(count)]


INDEX = "model.safetensors.index.json"


# ------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (7, 7), ("7", 7), ("7B", 7), ("5GB", 5 * 10**9), ("5gb", 5 * 10**9), ("1.5MB", 1_500_000), ("2 KB", 2000),
        ("2KiB", 2048), ("1TB", 10**12), (" 3MiB ", 3 << 20),
    ],
)  # fmt: skip
def test_sizes(text: Any, nbytes: int) -> None:
    assert nbytes_of(text) == nbytes


@pytest.mark.parametrize("text", [0, -1, "", "GB", "5XB", "5 G", "1e9", True, 0.1, "0.0001KB", None])
def test_sizes_that_are_none(text: Any) -> None:
    with pytest.raises(ValueError, match="max_shard_size"):
        nbytes_of(text)


# ------------------------------------------------------------------------------- packing


def test_files_are_filled_in_order() -> None:
    """The example of huggingface_hub's documentation."""
    sizes = [6, 6, 2, 6, 2, 2]
    parts, total = split([Entry(str(i), n) for i, n in enumerate(sizes)], 10)
    assert parts == [["0"], ["1", "2"], ["3", "4", "5"]]
    assert total == sum(sizes)


def test_larger_tensor_has_a_file_to_itself_and_the_one_before_goes_on() -> None:
    parts, _ = split([Entry("a", 4), Entry("big", 11), Entry("b", 6), Entry("c", 1)], 10)
    assert parts == [["big"], ["a", "b"], ["c"]]


def test_tied_tensors_are_together_and_count_once() -> None:
    parts, total = split([Entry("a", 6, "s"), Entry("b", 6), Entry("c", 6, "s"), Entry("d", 2)], 10)
    assert parts == [["a", "c"], ["b", "d"]]
    assert total == 14


def test_nothing_is_one_file() -> None:
    assert split([], 10) == ([[]], 0)


@pytest.mark.parametrize("seed", range(20))
def test_packing_is_that_of_huggingface_hub(seed: int) -> None:
    hub = pytest.importorskip("huggingface_hub")
    rng = np.random.default_rng(seed)
    kept = [torch.zeros(int(n), dtype=torch.uint8) for n in rng.integers(0, 200, 6)]
    tensors = {}
    for i in range(40):
        tied = rng.random() < 0.2
        tensors[f"t{i}"] = kept[rng.integers(6)] if tied else torch.zeros(int(rng.integers(0, 150)), dtype=torch.uint8)
    want = hub.split_torch_state_dict_into_shards(tensors, max_shard_size=300)
    parts, total = split(entries_of(tensors), 300)
    assert parts == list(want.filename_to_tensors.values())
    assert total == want.metadata["total_size"]


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_files_are_those_of_huggingface_hub(kind: str, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    flat = kind == "safetensors"
    tensors = {**tensors_of(), "big": torch.randn(30, 10), "ids": torch.arange(9), "half": torch.randn(7).half()}
    (tmp_path / "want").mkdir()
    hub.save_torch_state_dict(tensors, tmp_path / "want", max_shard_size=900, safe_serialization=flat)
    tensorio.save(
        tensors, tmp_path / "found", max_shard_size=900, format=None if flat else "torch_zip",
        metadata={"format": "pt"} if flat else None,
    )  # fmt: skip
    assert names(tmp_path / "found") == names(tmp_path / "want")
    for name in names(tmp_path / "want"):
        found, want = (tmp_path / folder / name for folder in ("found", "want"))
        if flat or name.endswith(".json"):
            assert found.read_bytes() == want.read_bytes(), name
        else:
            assert records(found) == records(want), name


def records(file: Path) -> dict[str, bytes]:
    """All of a torch file but the number that is each writer's own."""
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("serialization_id")}


# --------------------------------------------------------------------------- what is written


def test_safetensors_files_and_index(tmp_path: Path) -> None:
    saved = tensorio.save(tensors_of(), tmp_path / "m", max_shard_size=900, metadata={"format": "pt"})
    assert names(tmp_path / "m") == [*numbered(4), INDEX]
    assert saved.path == str(tmp_path / "m")
    assert saved.files == tuple(str(tmp_path / "m" / name) for name in numbered(4))
    assert saved.nbytes == sum(p.stat().st_size for p in (tmp_path / "m").iterdir())
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    assert index["metadata"] == {"total_size": 2800}
    found = {}
    for name in numbered(4):
        with safetensors.safe_open(tmp_path / "m" / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert all(index["weight_map"][key] == name for key in file.keys())  # noqa: SIM118
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert raw(found) == raw(tensors_of())
    assert list(index["weight_map"]) == list(tensors_of())
    check(tmp_path / "m", tensors_of())


def test_torch_files_and_index(tmp_path: Path) -> None:
    tensorio.save(tensors_of(), tmp_path / "m", max_shard_size="0.9KB", format="torch_zip")
    files = numbered(4, "pytorch_model", ".bin")
    assert names(tmp_path / "m") == [*files, "pytorch_model.bin.index.json"]
    found: dict[str, torch.Tensor] = {}
    for name in files:
        found |= torch.load(tmp_path / "m" / name)
    assert raw(found) == raw(tensors_of())
    check(tmp_path / "m", tensors_of())


def test_one_file_has_no_index(tmp_path: Path) -> None:
    saved = tensorio.save(tensors_of(), tmp_path / "m", max_shard_size="5GB")
    assert names(tmp_path / "m") == ["model.safetensors"]
    assert saved.files == (str(tmp_path / "m" / "model.safetensors"),)
    assert raw(safetensors.torch.load_file(tmp_path / "m" / "model.safetensors")) == raw(tensors_of())


def test_name_of_a_file_gives_the_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    tensorio.save(tensors_of(), tmp_path / "adapter.safetensors", max_shard_size=900)
    assert names(tmp_path) == [*numbered(4, "adapter"), "adapter.safetensors.index.json", "config.json"]
    check(tmp_path / "adapter.safetensors", tensors_of())


def test_name_of_a_file_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    tensorio.save(tensors_of(), tmp_path / "new" / "weights.pt", max_shard_size=900)
    assert names(tmp_path / "new") == [*numbered(4, "weights", ".pt"), "weights.pt.index.json"]
    check(tmp_path / "new", tensors_of())


def test_arrays_and_a_checkpoint_can_be_saved(tmp_path: Path) -> None:
    arrays = {name: tensor.numpy() for name, tensor in tensors_of().items()}
    tensorio.save(arrays, tmp_path / "a", max_shard_size=900)
    with tensorio.open(tmp_path / "a") as checkpoint:
        tensorio.save(checkpoint, tmp_path / "b", max_shard_size=1300)
    assert names(tmp_path / "b") == [*numbered(3), INDEX]
    check(tmp_path / "b", tensors_of())


def test_tied_tensors_share_their_bytes_in_torch_files(tmp_path: Path) -> None:
    tensors = tensors_of()
    tensors["tied"] = tensors["layers.0.w"]
    tensorio.save(tensors, tmp_path / "m", max_shard_size=900, format="torch_zip")
    first = torch.load(tmp_path / "m" / numbered(4, "pytorch_model", ".bin")[0])
    assert first["tied"].data_ptr() == first["layers.0.w"].data_ptr()


def test_progress_counts_all_files(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    saved = tensorio.save(tensors_of(), tmp_path / "m", max_shard_size=900, progress=lambda *at: seen.append(at))
    assert seen[-1] == (saved.nbytes, saved.nbytes)


@pytest.mark.parametrize("obj", [{"a": {"b": np.zeros(3)}}, {"a": 1}, {1: np.zeros(3)}, [np.zeros(3)]])
@pytest.mark.parametrize("format", ["safetensors", "torch_zip"])
def test_what_is_no_flat_dict_is_refused(obj: Any, format: str, tmp_path: Path) -> None:
    with pytest.raises(TensorMismatchError, match=r"max_shard_size= is for a (flat )?dict of names to tensors, found"):
        tensorio.save(obj, tmp_path / "m", max_shard_size=900, format=format)
    assert names(tmp_path) == []


def test_targets_that_are_no_folder(tmp_path: Path) -> None:
    for target in (io.BytesIO(), "memory://bucket/model"):
        with pytest.raises(UnsupportedError, match="needs the path of a folder"):
            tensorio.save(tensors_of(), target, max_shard_size=900)
    with pytest.raises(FileNotFoundError):
        tensorio.save(tensors_of(), tmp_path / "a" / "b", max_shard_size=900)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        tensorio.save(tensors_of(), tmp_path / "file", max_shard_size=900)
    assert names(tmp_path) == ["file"]


# -------------------------------------------------------------------------------- convert


def test_folder_without_a_limit_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="is a folder; name a file in it, or say max_shard_size= to save several files"
    ):
        tensorio.save({"x": np.ones(2)}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_files_of_a_folder_can_be_read_one_by_one(tmp_path: Path) -> None:
    saved = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(4)}
    with pytest.raises(IsADirectoryError, match="expected a checkpoint file, found a folder"):
        tensorio.torch.load(tmp_path)
    tensorio.save(saved, tmp_path, max_shard_size=8)
    with tensorio.open(tmp_path) as checkpoint:
        state = {name: tensor for file in checkpoint.files for name, tensor in tensorio.torch.load_file(file).items()}
    assert state.keys() == saved.keys()
    assert all(torch.equal(state[name], saved[name]) for name in saved)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_convert_writes_several_files(suffix: str, tmp_path: Path) -> None:
    source = tmp_path / f"one{suffix}"
    tensorio.save(tensors_of(), source)
    for format in ("safetensors", "torch_zip"):
        assert tensorio.convert(source, tmp_path / format, format=format, max_shard_size=900) == []
        assert len(names(tmp_path / format)) == 5
        check(tmp_path / format, tensors_of())


def test_convert_renames_and_lists_what_is_dropped(tmp_path: Path) -> None:
    torch.save({"model": tensors_of(), "step": 3}, tmp_path / "one.pt")
    dropped = tensorio.convert(
        tmp_path / "one.pt", tmp_path / "m", max_shard_size=900, rename=lambda name: name.removeprefix("model.")
    )
    assert dropped == ["step"]
    check(tmp_path / "m", tensors_of())


def test_convert_writes_what_save_writes(tmp_path: Path) -> None:
    tensorio.save(tensors_of(), tmp_path / "one.safetensors")
    tensorio.convert(tmp_path / "one.safetensors", tmp_path / "a", max_shard_size=900)
    tensorio.save(tensors_of(), tmp_path / "b", max_shard_size=900)
    for name in names(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_convert_into_its_own_source(tmp_path: Path) -> None:
    tensorio.save(tensors_of(), tmp_path / "m", max_shard_size=900)
    tensorio.convert(tmp_path / "m", tmp_path / "m", max_shard_size=1300)
    assert names(tmp_path / "m") == [*numbered(3), INDEX]
    check(tmp_path / "m", tensors_of())


def test_command_line(tmp_path: Path) -> None:
    for extra in ("click", "rich"):
        pytest.importorskip(extra, reason="the extra 'cli' is not installed")
    from click.testing import CliRunner

    from tensorio.cli import cli

    tensorio.save(tensors_of(), tmp_path / "one.safetensors")
    arguments = ["convert", str(tmp_path / "one.safetensors"), str(tmp_path / "m"), "--max-shard-size"]
    result = CliRunner().invoke(cli, [*arguments, "900B"])
    assert result.exit_code == 0, result.output
    assert "in 4 files" in result.output
    check(tmp_path / "m", tensors_of())
    result = CliRunner().invoke(cli, [*arguments, "many"])
    assert result.exit_code == 2
    assert "--max-shard-size" in result.output
    result = CliRunner().invoke(cli, ["convert", str(tmp_path / "one.safetensors"), "s3://a/b", arguments[-1], "900B"])
    assert result.exit_code == 2
    assert "Invalid value for DST: --max-shard-size needs the path of a folder" in result.output


# ------------------------------------------------------------- over an earlier checkpoint


def by_exchange(path: Path) -> Path:
    return path


def in_place(path: Path) -> Path:
    return path / "model.safetensors"


WAYS = pytest.mark.parametrize("way", [pytest.param(by_exchange, marks=LINUX), in_place])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An earlier checkpoint with what others keep beside it."""
    folder = tmp_path / "m"
    tensorio.save(tensors_of(1), folder, max_shard_size=1300)
    (folder / "config.json").write_text("{}")
    os.chmod(folder / "config.json", 0o640)
    os.utime(folder / "config.json", ns=(1, 1))
    (folder / "runs" / "deep").mkdir(parents=True)
    os.chmod(folder / "runs", 0o750)
    (folder / "runs" / "deep" / "events").write_bytes(b"events")
    (folder / "latest").symlink_to("runs/deep")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "model-00001-of-00002.gguf").write_bytes(b"another format's")
    (folder / "model_ema.safetensors").write_bytes(b"another model")
    return folder


OTHERS = sorted(["config.json", "runs", "latest", "dangling", "model-00001-of-00002.gguf", "model_ema.safetensors"])


@WAYS
def test_what_is_not_the_checkpoints_stays(way: Callable[[Path], Path], folder: Path) -> None:
    inodes = {path: os.lstat(path).st_ino for path in folder.rglob("*") if path.is_file() or path.is_symlink()}
    old = set(tensorio.open(folder).files)
    tensorio.save(tensors_of(2), way(folder), max_shard_size=900)
    check(folder, tensors_of(2))
    assert names(folder) == sorted([*OTHERS, *numbered(4), INDEX])
    for path, inode in inodes.items():
        if str(path) not in old and path.name != INDEX and not path.is_symlink():
            assert path.stat().st_ino == inode, path  # no byte was copied
    assert stat.S_IMODE((folder / "config.json").stat().st_mode) == 0o640
    assert (folder / "config.json").stat().st_mtime_ns == 1
    assert stat.S_IMODE((folder / "runs").stat().st_mode) == 0o750
    assert os.readlink(folder / "latest") == "runs/deep"
    assert os.readlink(folder / "dangling") == "nowhere"
    assert names(folder.parent) == ["m"]


@WAYS
@pytest.mark.parametrize("sizes", [(900, "5GB"), ("5GB", 900), (900, 1300), (900, 900)])
def test_nothing_of_the_old_set_remains(way: Callable[[Path], Path], sizes: Any, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    tensorio.save(tensors_of(1), folder, max_shard_size=sizes[0])
    saved = tensorio.save(tensors_of(2), way(folder), max_shard_size=sizes[1])
    check(folder, tensors_of(2))
    several = [INDEX] if sizes[1] != "5GB" else []
    assert names(folder) == sorted([*(os.path.basename(file) for file in saved.files), *several])


def test_files_get_names_of_their_own_where_the_usual_ones_are_taken(tmp_path: Path) -> None:
    target = tmp_path / "m" / "model.safetensors"
    tensorio.save(tensors_of(1), target, max_shard_size=900)
    with tensorio.open(target) as old:
        kept = old["layers.3.w"]
        saved = tensorio.save(tensors_of(2), target, max_shard_size=900)
        assert kept.tobytes() == raw(tensors_of(1))["layers.3.w"]
    assert all(os.path.basename(file) not in numbered(4) for file in saved.files)
    check(tmp_path / "m", tensors_of(2))
    again = tensorio.save(tensors_of(3), target, max_shard_size=900)
    assert [os.path.basename(file) for file in again.files] == numbered(4)
    assert names(tmp_path / "m") == [*numbered(4), INDEX]


@LINUX
def test_files_named_by_an_old_index_go(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / numbered(3)[0]).rename(folder / "part-one.safetensors")
    named = {n: "part-one.safetensors" if f == numbered(3)[0] else f for n, f in index["weight_map"].items()}
    named["x"] = "config.json"  # which is no file of tensors, whatever the index says
    (folder / INDEX).write_text(json.dumps({"weight_map": named}))
    tensorio.save(tensors_of(2), folder, max_shard_size=900)
    assert names(folder) == sorted([*OTHERS, *numbered(4), INDEX])


def test_stale_checksums_go(folder: Path) -> None:
    for name in ("checkpoint.sha256", f"{numbered(3)[0]}.sha256", "config.json.sha256"):
        (folder / name).write_text("")
    tensorio.save(tensors_of(2), folder, max_shard_size=900)
    assert names(folder) == sorted([*OTHERS, "config.json.sha256", *numbered(4), INDEX])


def is_untrue(folder: Path) -> bool:
    """Whether there are sums, and other files than they say."""
    sums = [folder / SUMS, folder / f"model.safetensors{SUFFIX}"]
    return any(not tensorio.verify(folder, manifest=path, require=True).ok for path in sums if path.exists())


@WAYS
@pytest.mark.parametrize(("before", "after"), [(900, 900), (10**6, 10**6), (900, 10**6), (10**6, 900)])
@pytest.mark.parametrize("manifest", [False, True])
def test_sums_are_true_or_gone_after_every_step(
    way: Callable[[Path], Path], before: int, after: int, manifest: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A process that is killed between two of them would leave files that pass for damaged ones."""
    folder, untrue = tmp_path / "m", []
    tensorio.save(tensors_of(1), folder, max_shard_size=before, manifest=True)
    if before > after:
        tensorio.write_manifest(folder / "model.safetensors")
    for module, name in ((os, "replace"), (os, "unlink"), (_host, "exchange")):
        real = getattr(module, name)

        def call(*args: Any, real: Callable[..., Any] = real, **options: Any) -> Any:
            answer = real(*args, **options)
            untrue.append(is_untrue(folder))
            return answer

        monkeypatch.setattr(module, name, call)
    tensorio.save(tensors_of(2), way(folder), max_shard_size=after, manifest=manifest)
    assert untrue
    assert not any(untrue)
    assert (folder / SUMS).exists() is manifest
    check(folder, tensors_of(2))


def test_sums_are_put_back_if_the_index_cant_be_renamed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensorio.write_manifest(folder)
    before, real = names(folder), os.replace

    def replace(source: str, target: str) -> None:
        if os.path.basename(target) == INDEX:
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="Input/output"):
        tensorio.save(tensors_of(2), in_place(folder), max_shard_size=900)
    assert names(folder) == before
    assert tensorio.verify(folder, require=True).ok


@WAYS
def test_modes_are_kept(way: Callable[[Path], Path], folder: Path) -> None:
    os.chmod(folder, 0o711)
    for file in folder.glob("model*"):
        os.chmod(file, 0o600)
    tensorio.save(tensors_of(2), way(folder), max_shard_size=900)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o711
    assert {stat.S_IMODE((folder / name).stat().st_mode) for name in [*numbered(4), INDEX]} == {0o600}


@WAYS
def test_old_file_may_be_a_link_to_nowhere(way: Callable[[Path], Path], tmp_path: Path) -> None:
    """As in a folder made of links into a cache that was emptied."""
    folder = tmp_path / "m"
    folder.mkdir()
    for name in (INDEX, *numbered(2)):
        (folder / name).symlink_to("../blobs/gone")
    tensorio.save(tensors_of(2), way(folder), max_shard_size=900)
    check(folder, tensors_of(2))
    assert names(folder) == sorted([*numbered(4), INDEX])


def _save_as_another_user(folder: Path) -> list[str]:
    if os.getuid() == 0:
        for path in [folder.parent, folder, *folder.rglob("*")]:
            os.chown(path, 1234, 1234)
        os.setgid(1234)
        os.setuid(1234)
    try:
        tensorio.save(tensors_of(2), folder, max_shard_size=900)
    except PermissionError:
        return names(folder.parent)
    return [*names(folder.parent), "saved"]


@LINUX
def test_folder_that_may_not_be_written_to_is_not_replaced(in_child: Any) -> None:
    """What is in it could not be removed then."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:  # other users may not look into ours
        os.chmod(place, 0o755)
        folder = Path(place) / "within" / "m"
        folder.parent.mkdir()
        tensorio.save(tensors_of(1), folder, max_shard_size=900)
        before = names(folder)
        os.chmod(folder, 0o555)
        assert in_child(_save_as_another_user, folder) == ["m"]
        assert names(folder) == before
        check(folder, tensors_of(1))


@LINUX
def test_folder_within_may_be_read_only(in_child: Any) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:  # other users may not look into ours
        os.chmod(place, 0o755)
        folder = Path(place) / "within" / "m"
        folder.parent.mkdir()
        tensorio.save(tensors_of(1), folder, max_shard_size=900)
        (folder / "runs" / "deep").mkdir(parents=True)
        (folder / "runs" / "deep" / "events").write_text("events")
        for within in (folder / "runs" / "deep", folder / "runs"):
            os.chmod(within, 0o555)
        assert in_child(_save_as_another_user, folder) == ["m", "saved"]
        assert (folder / "runs" / "deep" / "events").read_text() == "events"
        assert stat.S_IMODE((folder / "runs" / "deep").stat().st_mode) == 0o555
        check(folder, tensors_of(2))


def test_new_folder_has_the_modes_of_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        tensorio.save(tensors_of(), tmp_path / "m", max_shard_size=900)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "m").stat().st_mode) == 0o750
    assert {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "m").iterdir()} == {0o640}


@WAYS
def test_link_to_the_folder_stays(way: Callable[[Path], Path], folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("m")
    tensorio.save(tensors_of(2), way(tmp_path / "link"), max_shard_size=900)
    assert os.readlink(tmp_path / "link") == "m"
    check(folder, tensors_of(2))


def test_folder_of_this_process_is_not_exchanged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    inode = folder.stat().st_ino
    tensorio.save(tensors_of(2), ".", max_shard_size=900)
    assert folder.stat().st_ino == inode
    check(Path(), tensors_of(2))


def test_format_that_readers_would_not_take_is_refused(tmp_path: Path) -> None:
    tensorio.save(tensors_of(1), tmp_path / "m", max_shard_size=900)
    with pytest.raises(FileExistsError, match="which readers take before"):
        tensorio.save(tensors_of(2), tmp_path / "m", max_shard_size=900, format="torch_zip")
    check(tmp_path / "m", tensors_of(1))
    tensorio.save(tensors_of(2), tmp_path / "m" / "pytorch_model.bin", max_shard_size=900)
    check(tmp_path / "m" / "pytorch_model.bin", tensors_of(2))


# ---------------------------------------------------------------- where folders can't be exchanged


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV, errno.EBUSY, errno.EPERM])
def test_without_exchange_the_index_is_renamed_last(code: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_host, "exchange", lambda a, b: code)
    inode = folder.stat().st_ino
    for seed in (2, 3):
        saved = tensorio.save(tensors_of(seed), folder, max_shard_size=900)
        check(folder, tensors_of(seed))
        assert names(folder) == sorted([*OTHERS, *(os.path.basename(file) for file in saved.files), INDEX])
    assert folder.stat().st_ino == inode
    assert names(folder.parent) == ["m"]


@LINUX
def test_failure_of_the_exchange_leaves_the_old(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_host, "exchange", lambda a, b: errno.EIO)
    before = names(folder)
    with pytest.raises(OSError, match="m'") as caught:
        tensorio.save(tensors_of(2), folder, max_shard_size=900)
    assert caught.value.errno == errno.EIO
    assert names(folder) == before
    assert names(folder.parent) == ["m"]
    check(folder, tensors_of(1))


@pytest.mark.parametrize("why", ["many", "large"])
def test_what_is_too_much_to_carry_stays_where_it_is(why: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "many":
        monkeypatch.setattr(carrying, "MOST", 3)
    else:
        monkeypatch.setattr(carrying, "COPIED_MOST", 1)
        monkeypatch.setattr(os, "link", refusing(errno.EPERM))
    inode = folder.stat().st_ino
    tensorio.save(tensors_of(2), folder, max_shard_size=900)
    assert folder.stat().st_ino == inode
    assert names(folder) == sorted([*OTHERS, *numbered(4), INDEX])
    check(folder, tensors_of(2))


@LINUX
def test_files_are_copied_where_there_are_no_links(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refusing(errno.EPERM))
    inode = folder.stat().st_ino
    tensorio.save(tensors_of(2), folder, max_shard_size=900)
    assert folder.stat().st_ino != inode
    assert names(folder) == sorted([*OTHERS, *numbered(4), INDEX])
    assert (folder / "runs" / "deep" / "events").read_bytes() == b"events"
    assert stat.S_IMODE((folder / "config.json").stat().st_mode) == 0o640
    assert os.readlink(folder / "latest") == "runs/deep"


def refusing(code: int) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return call


@LINUX
def test_mount_point_is_written_into(tmp_path: Path) -> None:
    """Another folder of the same filesystem, mounted: it can be neither exchanged nor renamed into from outside."""
    folder, real = tmp_path / "m", tmp_path / "real"
    folder.mkdir()
    real.mkdir()
    mounted = subprocess.run(["mount", "--bind", real, folder], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        for seed in (1, 2):
            tensorio.save(tensors_of(seed), folder, max_shard_size=900)
            check(folder, tensors_of(seed))
        assert len(names(real)) == 5
    finally:
        subprocess.run(["umount", folder], check=True)
    assert names(tmp_path) == ["m", "real"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_parent_that_may_not_be_written_to(folder: Path) -> None:
    os.chmod(folder.parent, 0o500)
    try:
        tensorio.save(tensors_of(2), folder, max_shard_size=900)
    finally:
        os.chmod(folder.parent, 0o700)
    check(folder, tensors_of(2))


def test_parent_that_refuses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, for any user."""
    real = os.mkdir

    def mkdir(path: Any, *args: Any, **options: Any) -> None:
        if os.path.dirname(path) == str(folder.parent):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        real(path, *args, **options)

    monkeypatch.setattr(os, "mkdir", mkdir)
    tensorio.save(tensors_of(2), folder, max_shard_size=900)
    assert names(folder) == sorted([*OTHERS, *numbered(4), INDEX])
    check(folder, tensors_of(2))
    with pytest.raises(PermissionError):
        tensorio.save(tensors_of(2), folder.parent / "new", max_shard_size=900)


# ---------------------------------------------------------------------- others at the same time


@LINUX
def test_what_changes_in_the_folder_meanwhile_is_brought_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = _host.exchange

    def exchange(a: str, b: str) -> int:
        if not (folder / "late.json").exists():
            (folder / "late.json").write_text("late")
            (folder / "new.json").write_text('{"new": 1}')
            os.replace(folder / "new.json", folder / "config.json")
            (folder / "runs" / "later").mkdir()
            (folder / "runs" / "later" / "events").write_text("later")
            (folder / "model_ema.safetensors").unlink()
        return real(a, b)

    monkeypatch.setattr(_host, "exchange", exchange)
    tensorio.save(tensors_of(2), folder, max_shard_size=900)
    check(folder, tensors_of(2))
    assert (folder / "late.json").read_text() == "late"
    assert (folder / "config.json").read_text() == '{"new": 1}'
    assert (folder / "runs" / "later" / "events").read_text() == "later"
    assert not (folder / "model_ema.safetensors").exists()
    assert names(folder.parent) == ["m"]


@LINUX
def test_folder_that_was_exchanged_is_nobodys_litter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the name of a temporary then, and what came late is still to be brought over."""
    real, cleaned = _host.exchange, []

    def exchange(a: str, b: str) -> int:
        (folder / "late.json").write_text("late")
        code = real(a, b)
        cleaned.append(clean_stale(str(folder.parent)))  # as another process does that saves there
        return code

    monkeypatch.setattr(_host, "exchange", exchange)
    tensorio.save(tensors_of(2), folder, max_shard_size=900)
    assert cleaned == [[]]
    assert (folder / "late.json").read_text() == "late"
    assert names(folder.parent) == ["m"]


@LINUX
def test_what_cant_be_brought_over_undoes_the_exchange(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "carry_late", refusing(errno.EIO))
    before = names(folder)
    with pytest.raises(OSError, match="Input/output"):
        tensorio.save(tensors_of(2), folder, max_shard_size=900)
    assert names(folder) == before
    check(folder, tensors_of(1))


@LINUX
def test_readers_of_the_old_keep_it(folder: Path) -> None:
    with tensorio.open(folder) as old:
        tensorio.save(tensors_of(2), folder, max_shard_size=900)
        assert {n: a.tobytes() for n, a in old.items()} == raw(tensors_of(1))


# ------------------------------------------------------------------------ failures on the way


class Stop(Exception):
    """Ends a save at a step."""


def steps(monkeypatch: pytest.MonkeyPatch, stop: int) -> Iterator[None]:
    """Let the calls that change names be counted, and the given one fail."""
    count = 0
    for module, name in ((os, "rename"), (os, "replace"), (_host, "exchange")):
        real = getattr(module, name)

        def call(*args: Any, real: Callable[..., Any] = real) -> Any:
            nonlocal count
            count += 1
            if count == stop:
                raise Stop
            return real(*args)

        monkeypatch.setattr(module, name, call)
    yield


@WAYS
@pytest.mark.parametrize("stop", range(1, 8))
def test_failure_at_any_rename_leaves_old_or_new(
    way: Callable[[Path], Path], stop: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = names(folder)
    list(steps(monkeypatch, stop))
    try:
        tensorio.save(tensors_of(2), way(folder), max_shard_size=900)
    except Stop:
        monkeypatch.undo()
        check(folder, tensors_of(1))
        assert names(folder) == before
    else:
        monkeypatch.undo()
        assert stop > 2
        check(folder, tensors_of(2))
    assert names(folder.parent) == ["m"]


@pytest.mark.parametrize("way", [by_exchange, in_place])
def test_failure_while_writing_leaves_no_trace(way: Callable[[Path], Path], folder: Path) -> None:
    def progress(done: int, total: int) -> None:
        if done * 2 > total:
            raise Stop

    before = names(folder)
    with pytest.raises(Stop):
        tensorio.save(tensors_of(2), way(folder), max_shard_size=900, progress=progress)
    assert names(folder) == before
    assert names(folder.parent) == ["m"]
    check(folder, tensors_of(1))


@WAYS
def test_what_killed_saves_left_goes(
    way: Callable[[Path], Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporaries beside and within, and files that came to their names before the index did."""
    before = names(folder)
    code = (
        "import os, sys, tensorio, numpy as np\n"
        "def kill(done, total):\n"
        "    if done * 2 > total: os.kill(os.getpid(), 9)\n"
        "tensorio.save({str(i): np.zeros(100, 'f4') for i in range(9)}, sys.argv[1], max_shard_size=900, progress=kill)"
    )
    for target in (by_exchange(folder), in_place(folder)):
        ended = subprocess.run([sys.executable, "-c", code, target], check=False)
        assert ended.returncode == -9
        check(folder, tensors_of(1))
    assert len(names(folder)) + len(names(folder.parent)) > len(before) + 1
    (folder / numbered(9)[0]).write_bytes(b"half")
    tensorio.save(tensors_of(2), way(folder), max_shard_size=900)
    assert [name for name in names(folder) if name not in OTHERS] == [*numbered(4), INDEX]
    check(folder, tensors_of(2))
    if way is by_exchange:
        assert names(folder.parent) == ["m"]


@WAYS
def test_error_names_the_file_that_was_to_be(
    way: Callable[[Path], Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "write", refusing(errno.ENOSPC))
    with pytest.raises(OSError, match=r"of [0-9]+ bytes") as caught:
        tensorio.save(tensors_of(2), way(folder), max_shard_size=900)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(folder / numbered(4)[0]))
    monkeypatch.undo()
    check(folder, tensors_of(1))


# ------------------------------------------------------------------- two renames, where there is no exchange


def test_folder_moved_aside_by_a_killed_process_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "ranks"
    tensorio.save(tensors_of(1), tmp_path / "one.safetensors")
    options: dict[str, Any] = {"tp": 1, "rules": {}, "default": "replicate", "overwrite": True}
    tensorio.shard(tmp_path / "one.safetensors", target, **options)
    before = names(target)
    monkeypatch.setattr(_host, "exchange", lambda a, b: errno.ENOSYS)
    tensorio.shard(tmp_path / "one.safetensors", target, **options)
    assert names(tmp_path) == ["one.safetensors", "ranks"]
    os.rename(target, tmp_path / ".ranks.tensorio.old")  # where a kill between the two renames leaves it
    with pytest.raises(FileExistsError):
        tensorio.shard(tmp_path / "one.safetensors", target, **{**options, "overwrite": False})
    assert names(target) == before
    os.mkdir(tmp_path / ".ranks.tensorio.old")  # and behind the second
    tensorio.shard(tmp_path / "one.safetensors", target, **options)
    assert names(tmp_path) == ["one.safetensors", "ranks"]


@pytest.mark.parametrize("sizes", [(900, 900), (10**6, 10**6)])
def test_two_saves_into_one_folder_are_in_one_manifest(sizes: tuple[int, int], tmp_path: Path) -> None:
    for seed, name in enumerate(("a.safetensors", "b.safetensors", "a.safetensors")):
        tensorio.save(tensors_of(seed), tmp_path / name, max_shard_size=sizes[seed % 2], manifest=True)
    named = [line.split("  ")[1] for line in (tmp_path / SUMS).read_text().splitlines()]
    assert sorted(named) == sorted(set(names(tmp_path)) - {SUMS})
    found = subprocess.run(["sha256sum", "-c", SUMS], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
