"""What a save can do for later checks: digests, a manifest, and a look at what the disk has."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio
from tensorio.checkpoint import _watched

TENSORS = {"b": np.arange(70_000, dtype="f4").reshape(100, 700), "a.w": np.arange(5, dtype="u1"),
           "odd": np.arange(100_000, dtype="i8")[::2], "empty": np.zeros((0, 3)), "x\ny\\": np.ones(3)}  # fmt: skip
SUFFIXES = [".safetensors", ".pt"]


@pytest.fixture(params=SUFFIXES)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / f"model{request.param}"


def names_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---------------------------------------------------------------------------- digests


def test_digests_are_those_of_hashlib_and_safetensors_reads_on(tmp_path: Path) -> None:
    reference = pytest.importorskip("safetensors")
    from safetensors.numpy import load_file

    path = tmp_path / "m.safetensors"
    tensorio.save(TENSORS, path, digests=True, metadata={"format": "np"})
    with reference.safe_open(path, "np") as f:
        notes = f.metadata()
    assert notes["format"] == "np"
    want = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in TENSORS.items()}
    lines = notes["tensorio.sha256"].splitlines()
    assert sorted(lines) == sorted(f"\\{want[n]}  x\\ny\\\\" if n.startswith("x") else f"{want[n]}  {n}" for n in want)
    assert {k: v.tobytes() for k, v in load_file(path).items()} == {k: v.tobytes() for k, v in TENSORS.items()}
    report = tensorio.verify(path, require=True)
    assert report.ok
    assert report.checked == sum(a.nbytes for a in TENSORS.values())
    assert report.unchecked == 0


def test_without_digests_the_bytes_are_as_ever(tmp_path: Path) -> None:
    tensorio.save(TENSORS, tmp_path / "a.safetensors")
    tensorio.save(TENSORS, tmp_path / "b.safetensors", digests=False, manifest=True, readback=True)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_digests_name_the_tensor_that_changed(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensorio.save(TENSORS, path, digests=True)
    with tensorio.open(path) as checkpoint:
        extent = checkpoint.infos["b"].chunks[0].extent
    with path.open("r+b") as f:
        f.seek(extent.offset + 1000)
        f.write(b"\xff")
    (problem,) = tensorio.verify(path).problems
    assert isinstance(problem, tensorio.ChecksumError)
    assert (problem.path, problem.record, problem.tensors) == (str(path), "b", ("b",))
    assert (problem.offset, problem.nbytes) == (extent.offset, extent.nbytes)
    for act in (tensorio.load, tensorio.open):
        with pytest.raises(tensorio.ChecksumError, match="'b'"):
            act(path, verify=True)


def test_digests_are_not_taken_along_to_other_tensors(tmp_path: Path) -> None:
    first, second, third = (tmp_path / f"{i}.safetensors" for i in range(3))
    tensorio.save({"w": np.ones(3)}, first, digests=True, metadata={"k": "v"})
    with tensorio.open(first) as checkpoint:
        tensorio.save({"w": np.zeros(3)}, second, metadata=checkpoint.metadata)
    tensorio.convert(first, third, rename={"w": "v"})
    for path in (second, third):
        with tensorio.open(path) as checkpoint:
            assert checkpoint.metadata == {"k": "v"}
        assert tensorio.verify(path).ok


def test_notes_that_are_no_digests_are_refused(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.numpy").save_file
    save_file({"w": np.ones(3)}, tmp_path / "m.safetensors", metadata={"tensorio.sha256": "nonsense"})
    assert tensorio.load(tmp_path / "m.safetensors")["w"].sum() == 3
    with pytest.raises(tensorio.HeaderError, match=r"tensorio\.sha256.*line 1"):
        tensorio.verify(tmp_path / "m.safetensors")


def test_torch_files_have_no_place_for_digests(tmp_path: Path) -> None:
    with pytest.raises(tensorio.UnsupportedError, match="manifest=True"):
        tensorio.save(TENSORS, tmp_path / "m.pt", digests=True)
    assert names_in(tmp_path) == []


def test_digests_of_many_tensors(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    many = {f"layers.{i}.w": np.full(8, i, "i4") for i in range(3000)}
    tensorio.save(many, path, digests=True)
    assert tensorio.verify(path, require=True).ok


# --------------------------------------------------------------------------- manifest


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="sha256sum is not here")
def test_manifest_is_what_sha256sum_writes(target: Path) -> None:
    tensorio.save({"w": np.arange(3_000_000, dtype="f4"), **TENSORS}, target, manifest=True)
    beside = target.parent / f"{target.name}.sha256"
    want = subprocess.run(["sha256sum", target.name], cwd=target.parent, capture_output=True, check=True).stdout
    assert beside.read_bytes() == want
    assert subprocess.run(["sha256sum", "-c", beside.name], cwd=target.parent, check=False).returncode == 0
    report = tensorio.verify(target)
    assert report.ok
    assert (report.manifest, report.covered, report.unchecked) == (str(beside), (target.name,), 0)
    assert report.hashed == target.stat().st_size


def test_manifest_through_a_link_and_with_a_new_file(target: Path) -> None:
    real = target.parent / "real"
    real.mkdir()
    target.symlink_to(real / target.name)
    for value in range(2):
        tensorio.save({"w": np.full(9, value)}, target, manifest=True)
        assert target.is_symlink()
        assert tensorio.verify(target, require=True).manifest == f"{target}.sha256"
        assert names_in(real) == [target.name]


def test_manifest_of_the_file_behind_a_link_does_not_outlive_it(target: Path) -> None:
    link = target.parent / f"latest{target.suffix}"
    link.symlink_to(target.name)
    for options in ({}, {"manifest": True}):
        tensorio.save(TENSORS, target, manifest=True)
        tensorio.save({"w": np.ones(3)}, link, **options)
        assert tensorio.verify(target).ok
        assert tensorio.verify(link).ok


def test_failed_save_through_a_link_leaves_both_manifests(target: Path) -> None:
    link = target.parent / f"latest{target.suffix}"
    link.symlink_to(target.name)
    tensorio.save(TENSORS, target, manifest=True)
    tensorio.save(TENSORS, link, manifest=True)
    tensorio.write_manifest(target)
    before = {name: (target.parent / name).read_bytes() for name in names_in(target.parent)}

    def stop(done: int, total: int) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        tensorio.save({"w": np.ones(3)}, link, progress=stop)
    assert {name: (target.parent / name).read_bytes() for name in names_in(target.parent)} == before
    assert len(before) == 4


def test_old_manifest_does_not_outlive_its_file(target: Path) -> None:
    tensorio.save(TENSORS, target, manifest=True)
    tensorio.save({"w": np.ones(3)}, target)
    assert names_in(target.parent) == [target.name]


def encrypt(path: Path) -> None:
    pytest.importorskip("cryptography", reason="needs the extra crypt")
    tensorio.encrypt(path, path, key=bytes(32))
    assert names_in(path.parent) == [path.name]
    tensorio.write_manifest(path)
    tensorio.decrypt(path, path, key=bytes(32))


def recover(path: Path) -> None:
    shutil.copy(path, path.parent / f"damaged{path.suffix}")
    tensorio.recover(path.parent / f"damaged{path.suffix}", path)
    (path.parent / f"damaged{path.suffix}").unlink()


def unshard(path: Path) -> None:
    tensorio.shard(path, path.parent / "ranks", tp=1, rules=[("**", "replicate")])
    tensorio.unshard(path.parent / "ranks", path)
    shutil.rmtree(path.parent / "ranks")


def save_file(path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra torch")
    import tensorio.torch

    tensorio.torch.save_file({"w": torch.ones(3)}, path)


REPLACE = [
    pytest.param(lambda path: tensorio.strip(path, path), id="strip"),
    pytest.param(lambda path: tensorio.merge(path, dst=path), id="merge"),
    pytest.param(lambda path: tensorio.convert(path, path), id="convert"),
    *(pytest.param(act, id=act.__name__) for act in (recover, unshard, encrypt, save_file)),
]


@pytest.mark.parametrize("replace", REPLACE)
def test_old_manifest_goes_with_its_file_whatever_replaces_it(replace: Any, target: Path) -> None:
    tensorio.save(TENSORS, target, manifest=True)
    replace(target)
    assert names_in(target.parent) == [target.name]


def test_manifest_of_other_files_stays(target: Path) -> None:
    other = target.parent / f"{target.name}.sha256"
    other.write_text(f"{'0' * 64}  elsewhere\n")
    tensorio.save(TENSORS, target)
    assert other.read_text() == f"{'0' * 64}  elsewhere\n"


@pytest.mark.parametrize("durable", [True, False])
def test_manifest_that_is_there_is_true_at_every_moment(
    target: Path, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at around each rename and removal."""
    beside = target.parent / f"{target.name}.sha256"
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        assert not beside.exists() or beside.read_text().split()[0] == sha256(target)

    def watched(act: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            look()
            try:
                return act(*arguments, **keywords)
            finally:
                look()

        return call

    tensorio.save(TENSORS, target, manifest=True)
    for name in ("replace", "unlink", "fsync"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    tensorio.save({"w": np.ones(3)}, target, manifest=True, durable=durable)
    assert looks >= 6
    assert tensorio.verify(target, require=True).ok


@pytest.mark.skipif(os.name != "posix", reason="folders are synced on POSIX systems only")
@pytest.mark.parametrize("failing", ["replace", "fsync"])
def test_failed_save_leaves_a_manifest_that_is_true(
    target: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the new file has its name, and behind that."""
    tensorio.save(TENSORS, target, manifest=True)
    old = sha256(target)
    act = getattr(os, failing)

    def fail(what: Any, *more: Any) -> None:
        if failing == "fsync" and not stat.S_ISDIR(os.fstat(what).st_mode):
            act(what)
            return
        monkeypatch.undo()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="Input/output"):
        tensorio.save({"w": np.ones(3)}, target, manifest=True)
    beside = target.parent / f"{target.name}.sha256"
    if failing == "replace":  # the old file is there, and what belongs to it
        assert sha256(target) == old
        assert names_in(target.parent) == [target.name, beside.name]
    assert not beside.exists() or beside.read_text().split()[0] == sha256(target)


def test_convert_removes_an_old_manifest(tmp_path: Path) -> None:
    tensorio.save(TENSORS, tmp_path / "a.pt")
    tensorio.save({"w": np.ones(3)}, tmp_path / "b.safetensors", manifest=True)
    tensorio.convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert names_in(tmp_path) == ["a.pt", "b.safetensors"]


def test_error_of_the_save_ends_the_hashing_thread(target: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        tensorio.save({"w": np.ones(5 << 20)}, target, manifest=True, progress=stop)
    assert names_in(target.parent) == []


@pytest.mark.parametrize("option", ["manifest", "readback"])
def test_file_objects_have_no_name_to_put_it_beside(option: str) -> None:
    with pytest.raises(tensorio.UnsupportedError, match="path"):
        tensorio.save(TENSORS, io.BytesIO(), format="safetensors", **{option: True})


# --------------------------------------------------------------------------- read-back


@pytest.mark.skipif(os.name != "posix", reason="writes where fsync was asked for")
@pytest.mark.parametrize("offset", [0, 300_000, _watched.BLOCK - 1, _watched.BLOCK, _watched.BLOCK + 4_000_000])
def test_readback_finds_what_the_disk_changed(target: Path, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensorio.save(TENSORS, target, manifest=True)
    before = {name: (target.parent / name).read_bytes() for name in names_in(target.parent)}
    fsync = os.fsync

    def damaging(fd: int) -> None:
        (byte,) = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([byte ^ 1]), offset)
        fsync(fd)
        monkeypatch.undo()

    monkeypatch.setattr(os, "fsync", damaging)
    new = {"w": np.arange(10 << 20, dtype="f4")}
    with pytest.raises(tensorio.ChecksumError, match="the disk has other bytes") as caught:
        tensorio.save(new, target, readback=True, manifest=True)
    error = caught.value
    assert error.path == str(target)
    assert error.offset is not None
    assert error.nbytes is not None
    assert error.offset <= offset < error.offset + error.nbytes
    assert error.nbytes <= _watched.BLOCK
    assert {name: (target.parent / name).read_bytes() for name in names_in(target.parent)} == before
    tensorio.save(new, target, readback=True, manifest=True)
    assert tensorio.verify(target, require=True).ok


def test_readback_of_a_good_disk(target: Path) -> None:
    tensorio.save({"w": np.arange(10 << 20, dtype="f4")}, target, readback=True, durable=False)
    tensorio.save({}, target, readback=True, manifest=True)
    assert tensorio.verify(target).ok


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux")
def test_readback_lets_go_of_the_pages_first(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared is read from the disk, where the filesystem has one."""
    from tensorio import _host

    cached: list[int] = []
    pread_full = _watched.pread_full

    def reading(fd: int, offset: int, out: memoryview) -> None:
        if offset == 0:
            cached.append(_host.cached(fd, 0, 1 << 20))
        pread_full(fd, offset, out)

    monkeypatch.setattr(_watched, "pread_full", reading)
    tensorio.save({"w": np.arange(1 << 20, dtype="f4")}, target, readback=True)
    if cached[0] < 0 or _is_memory(target):
        pytest.skip("nothing tells what is in the page cache, or the files are nowhere else")
    assert cached == [0]


def _is_memory(path: Path) -> bool:
    with tensorio.open(path) as checkpoint:
        return "tmpfs" in checkpoint.loading


# ------------------------------------------------------------------------ several files


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="sha256sum is not here")
@pytest.mark.parametrize("named", ["folder", "file"])
@pytest.mark.parametrize("most", [300_000, 10_000_000], ids=["several", "one"])
def test_several_files_have_a_manifest_in_their_folder(tmp_path: Path, named: str, most: int) -> None:
    """Beside files of others, and in the place of an old set."""
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    target = folder if named == "folder" else folder / "model.safetensors"
    tensors = {name: array for name, array in TENSORS.items() if "\n" not in name}
    for _ in range(3):
        tensors["b"] = tensors["b"] + 1
        tensorio.save(tensors, target, max_shard_size=most, manifest=True, readback=True, digests=True)
        command = ["sha256sum", "--check", "--strict", "--quiet", "checkpoint.sha256"]
        assert subprocess.run(command, cwd=folder, check=False).returncode == 0
        report = tensorio.verify(folder, require=True)
        assert report.ok
        assert set(report.covered) == set(names_in(folder)) - {"config.json", "checkpoint.sha256"}
    for index in folder.glob("*.index.json"):
        assert tensorio.verify(index, require=True).ok
    bad = next(p for p in folder.iterdir() if p.name.endswith(".safetensors"))
    with bad.open("r+b") as f:
        f.seek(-1, os.SEEK_END)
        f.write(b"\xee")
    assert {problem.path for problem in tensorio.verify(folder).problems} == {str(bad)}
    with pytest.raises(tensorio.ChecksumError):
        tensorio.load(folder, verify=True)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux")
def test_readback_of_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensorio.save({"a": np.ones(4), "b": np.ones(4)}, tmp_path / "set", max_shard_size=40, manifest=True)
    before = {name: (tmp_path / "set" / name).read_bytes() for name in names_in(tmp_path / "set")}
    check = _watched.Watched.check

    def damaged(self: _watched.Watched, fd: int) -> None:
        with open(f"/proc/self/fd/{fd}", "r+b") as f:
            f.seek(-1, os.SEEK_END)
            f.write(b"\xee")
        check(self, fd)

    monkeypatch.setattr(_watched.Watched, "check", damaged)
    with pytest.raises(tensorio.ChecksumError, match="the disk has other bytes"):
        tensorio.save({"a": np.ones(3), "b": np.ones(5)}, tmp_path / "set", max_shard_size=40, readback=True)
    assert {name: (tmp_path / "set" / name).read_bytes() for name in names_in(tmp_path / "set")} == before
    assert names_in(tmp_path) == ["set"]


def test_report_as_json(target: Path) -> None:
    tensorio.save(TENSORS, target, manifest=True)
    fields = json.loads(json.dumps(tensorio.verify(target).as_dict()))
    assert fields["ok"] is True
    assert fields["covered"] == [target.name]
