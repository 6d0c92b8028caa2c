"""Verification: what is wrong, where, whose bytes these are, and what nothing covers."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import fusefile
import tensorio
from tensorio.checkpoint import _checks
from tensorio.checkpoint._checks import PART
from tensorio.checkpoint._sums import write_sums
from tensorio.cli import cli

TENSORS = {"a": np.arange(5000.0), "b": np.arange(7000.0), "c": np.arange(9000.0)}


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as f:
        f.seek(offset)
        (byte,) = f.read(1)
        f.seek(offset)
        f.write(bytes([byte ^ 1]))


def extent(path: Path, fqn: str) -> tuple[int, int]:
    with tensorio.open(path) as checkpoint:
        _, offset, nbytes = checkpoint.infos[fqn].chunks[0].extent
        return offset, nbytes


# ---------------------------------------------------------------- what is it about


def test_problem_names_the_tensors_of_a_record(tmp_path: Path) -> None:
    """Views of one storage are in one record; names are those of the nested tree."""
    torch = pytest.importorskip("torch")
    whole = torch.arange(10_000.0)
    path = tmp_path / "m.pt"
    torch.save({"model": {"whole": whole, "head": whole[:10], "tail": whole[-10:].view(2, 5)}, "o": [whole * 2]}, path)
    offset, nbytes = extent(path, "model.whole")
    flip(path, offset + nbytes - 1)
    (problem,) = tensorio.verify(path).problems
    assert isinstance(problem, tensorio.ChecksumError)
    assert (problem.path, problem.record) == (str(path), "m/data/0")
    assert (problem.offset, problem.nbytes) == (offset, nbytes)
    assert problem.tensors == ("model.whole", "model.head", "model.tail")
    assert "tensors 'model.whole', 'model.head' and 1 more" in str(problem)


def test_every_bad_record_is_found_with_its_own_bytes(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    tensorio.save(TENSORS, path)
    for fqn in "ac":
        flip(path, extent(path, fqn)[0] + 17)
    problems = tensorio.verify(path).problems
    assert [p.tensors for p in problems] == [("a",), ("c",)]
    assert [(p.offset, p.nbytes) for p in problems] == [extent(path, "a"), extent(path, "c")]


def test_naming_of_many_problems_looks_at_each_tensor_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorio.tensors import Table

    path = tmp_path / "m.safetensors"
    tensorio.save({f"t{i}": np.full(4, i) for i in range(300)}, path, digests=True)
    first, _ = extent(path, "t0")
    content = path.read_bytes()
    path.write_bytes(content[:first] + bytes(byte ^ 1 for byte in content[first:]))
    looks = 0
    info = Table.info

    def counted(*arguments: Any) -> Any:
        nonlocal looks
        looks += 1
        return info(*arguments)

    monkeypatch.setattr(Table, "info", counted)
    problems = tensorio.verify(path).problems
    assert sorted(p.tensors for p in problems) == sorted((f"t{i}",) for i in range(300))
    assert looks < 10 * 300


@pytest.mark.parametrize("place", [0, PART - 1, PART, PART + 1000])
def test_records_of_several_parts(tmp_path: Path, place: int) -> None:
    path = tmp_path / "m.pt"
    tensorio.save({"w": np.arange((PART + 4096) // 8)}, path, durable=False)
    assert tensorio.verify(path).ok
    flip(path, extent(path, "w")[0] + place)
    (problem,) = tensorio.verify(path).problems
    assert problem.tensors == ("w",)


def test_problem_inside_a_file_inside_an_archive(tmp_path: Path) -> None:
    import tarfile

    tensorio.save(TENSORS, tmp_path / "m.safetensors")
    with tarfile.open(tmp_path / "m.tar", "w") as tar:
        tar.add(tmp_path / "m.safetensors", "m.safetensors")
    tensorio.write_manifest(tmp_path / "m.tar")
    assert tensorio.verify(tmp_path / "m.tar", require=True).ok
    flip(tmp_path / "m.tar", (tmp_path / "m.tar").stat().st_size // 2)
    assert not tensorio.verify(tmp_path / "m.tar").ok


# --------------------------------------------------------------------- not covered


def test_what_nothing_covers_is_counted_and_refused_on_request(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensorio.save(TENSORS, path)
    report = tensorio.verify(path)
    assert report.ok
    assert report.unchecked == sum(a.nbytes for a in TENSORS.values())
    report = tensorio.verify(path, require=True)
    (problem,) = report.problems
    assert str(report.unchecked) in str(problem)
    acts: list[Any] = [tensorio.load, tensorio.open, lambda p, verify: tensorio.load(p, names=["a"], verify=verify)]
    for act in acts:
        act(path, verify=True)
        with pytest.raises(tensorio.ChecksumError, match="every payload byte"):
            act(path, verify="require")
    tensorio.write_manifest(path)
    for act in acts:
        act(path, verify="require")
    assert tensorio.verify(path, require=True).ok
    assert not tensorio.verify(path, manifest=False, require=True).ok


def test_records_without_crc_are_not_covered(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "m.pt"
    old = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(1000)}, path)
    finally:
        torch.serialization.set_crc32_options(old)
    assert not tensorio.verify(path, require=True).ok
    tensorio.write_manifest(path)
    assert tensorio.verify(path, require=True).ok


def test_buffers_have_no_manifest() -> None:
    import io

    out = io.BytesIO()
    tensorio.save(TENSORS, out, format="safetensors")
    assert tensorio.verify(out.getvalue()).manifest is None
    with pytest.raises(tensorio.ChecksumError):
        tensorio.load(out.getvalue(), verify="require")


@pytest.mark.parametrize("value", ["yes", 2, None])
def test_other_values_of_verify_are_refused(tmp_path: Path, value: Any) -> None:
    tensorio.save(TENSORS, tmp_path / "m.pt")
    with pytest.raises(ValueError, match="verify="):
        tensorio.open(tmp_path / "m.pt", verify=value)


# ------------------------------------------------------------------------ manifests


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("mmap", [True, False])
def test_manifest_finds_any_changed_byte(tmp_path: Path, suffix: str, mmap: bool) -> None:
    """Of payload, header, padding."""
    path = tmp_path / f"m{suffix}"
    tensorio.save({"w": np.arange(700)}, path, manifest=True)
    good = path.read_bytes()
    for offset in range(0, len(good), 97):
        path.write_bytes(good)
        flip(path, offset)
        with pytest.raises(tensorio.FormatError):
            tensorio.load(path, mmap=mmap, verify=True)
    path.write_bytes(good)
    tensorio.load(path, mmap=mmap, verify=True)


def test_another_manifest_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    tensorio.save(TENSORS, path, manifest=True)
    other = tmp_path / "elsewhere" / "list"
    other.parent.mkdir()
    write_sums(str(other), {"m.pt": "0" * 64})
    (problem,) = tensorio.verify(path, manifest=other).problems
    assert "SHA-256 of the file's" in str(problem)
    assert tensorio.verify(path).ok
    with pytest.raises(FileNotFoundError):
        tensorio.verify(path, manifest=tmp_path / "none")
    write_sums(str(other), {"n.pt": "0" * 64})
    with pytest.raises(tensorio.HeaderError, match=r"expected a line for 'm\.pt'"):
        tensorio.verify(path, manifest=other)


def test_file_in_a_folder_with_a_manifest(tmp_path: Path) -> None:
    tensorio.save(TENSORS, tmp_path / "m.safetensors")
    (tmp_path / "config.json").write_text("{}")
    tensorio.write_manifest(tmp_path)
    (tmp_path / "config.json").write_text("[]")  # not of this file
    report = tensorio.verify(tmp_path / "m.safetensors", require=True)
    assert report.ok
    assert report.covered == ("m.safetensors",)
    flip(tmp_path / "m.safetensors", 3000)
    (problem,) = tensorio.verify(tmp_path / "m.safetensors").problems
    assert problem.tensors == ("a", "b", "c")
    assert (problem.offset, problem.nbytes) == (0, (tmp_path / "m.safetensors").stat().st_size)


def test_folder_that_is_no_checkpoint_is_compared_with_its_manifest(tmp_path: Path) -> None:
    for name in ("weights.bin", "notes.txt", "gone.txt", "sub/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode() * 1000)
    with pytest.raises(IsADirectoryError):
        tensorio.verify(tmp_path)
    tensorio.write_manifest(tmp_path)
    report = tensorio.verify(tmp_path)
    assert report.ok
    assert (report.format, report.unnamed) == ("", ())
    assert report.covered == ("gone.txt", "notes.txt", "weights.bin", "sub/x")
    flip(tmp_path / "sub" / "x", 77)
    (tmp_path / "gone.txt").unlink()
    (tmp_path / "new.txt").touch()
    report = tensorio.verify(tmp_path)
    assert report.unnamed == ("new.txt",)
    missing, changed = report.problems
    assert isinstance(missing, tensorio.TruncatedError)
    assert missing.path == str(tmp_path / "gone.txt")
    assert isinstance(changed, tensorio.ChecksumError)
    assert changed.path == str(tmp_path / "sub/x")
    assert [line.count("\n") for line in report.lines()] == [0] * 4


def test_file_that_was_replaced_meanwhile_is_not_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    tensorio.save(TENSORS, path, manifest=True)
    with tensorio.open(path) as checkpoint:
        assert checkpoint.verify(require=True).ok
        tensorio.save({"w": np.ones(3)}, path, manifest=True)
        (problem,) = checkpoint.verify().problems
    assert not isinstance(problem, tensorio.ChecksumError)
    assert "replaced while it was verified" in str(problem)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_what_a_manifest_names_and_is_no_file_is_a_problem_among_others(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "bad").write_bytes(b"hello")
    names = ("fifo", "folder", "loop", "bad")
    write_sums(str(tmp_path / "checkpoint.sha256"), dict.fromkeys(names, "0" * 64))
    problems = tensorio.verify(tmp_path).problems
    assert sorted(os.path.basename(problem.path or "") for problem in problems) == sorted(names)
    assert [type(problem) for problem in problems].count(tensorio.ChecksumError) == 1
    assert sum("no regular file" in str(problem) for problem in problems) == 2


def test_manifest_of_another_file_alone_does_not_cover_the_checkpoint(tmp_path: Path) -> None:
    tensorio.save({"w": np.ones(5)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    digest = hashlib.sha256(b"{}").hexdigest()
    write_sums(str(tmp_path / "checkpoint.sha256"), {"config.json": digest})
    report = tensorio.verify(tmp_path)
    assert report.problems == []
    assert (report.covered, report.unnamed) == (("config.json",), ("model.safetensors",))
    assert report.unchecked == 40


def test_manifest_of_what_has_no_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(tensorio.UnsupportedError, match="manifest="):
        tensorio.verify(b"\x02\0\0\0\0\0\0\0{}", manifest=tmp_path / "list")


def test_progress_counts_every_sort_of_check(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensorio.save(TENSORS, path, digests=True, manifest=True)
    seen: list[tuple[int, int]] = []
    report = tensorio.verify(path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (report.checked + report.hashed,) * 2
    assert seen == sorted(seen)


# ------------------------------------------------------------- lists by other hands

HEX = "0" * 64
FOREIGN = [
    b"\xff\xfeS\0H\0A\0", b"<html>404</html>\n", b"d41d8cd98f00b204e9800998ecf8427e  m.pt\n", b"\0" * 1000,
    f"{HEX}  ../../etc/passwd\n".encode(), f"{HEX}  /etc/passwd\n".encode(),
    f"{HEX}  m.pt\n{'1' * 64}  m.pt\n".encode(),
]  # fmt: skip


@pytest.mark.parametrize("content", FOREIGN, ids=ascii)
@pytest.mark.parametrize("name", ["SHA256SUMS", "m.pt.sha256"])
def test_list_that_is_none_is_told_and_nothing_else(tmp_path: Path, name: str, content: bytes) -> None:
    tensorio.save(TENSORS, tmp_path / "m.pt")
    (tmp_path / name).write_bytes(content)
    report = tensorio.verify(tmp_path / "m.pt")
    assert report.ok, report.problems
    assert report.manifest is None
    (note,) = report.notes
    assert name in note
    assert note in list(report.lines())
    assert "\n" not in note
    tensorio.load(tmp_path / "m.pt", verify=True)
    with pytest.raises(tensorio.HeaderError):
        tensorio.verify(tmp_path / "m.pt", manifest=tmp_path / name)
    answer = run("verify", tmp_path / "m.pt")
    assert answer.exit_code == 0
    assert "note:" in answer.stdout
    assert json.loads(run("verify", "--json", tmp_path / "m.pt").stdout)["paths"][0]["notes"] == [note]


def test_lines_that_are_none_are_told_and_the_others_compared(tmp_path: Path) -> None:
    """A list that is signed by gpg --clearsign: ``sha256sum -c`` warns of such lines."""
    tensorio.save(TENSORS, tmp_path / "model.safetensors")
    digest = hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    text = f"-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA512\n\n{digest}  model.safetensors\n{HEX}  /x\n"
    (tmp_path / "SHA256SUMS").write_text(text)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        report = tensorio.verify(path, require=True)
        assert report.ok
        assert report.covered == ("model.safetensors",)
        assert "one of 3 such lines" in report.notes[0]
    flip(tmp_path / "model.safetensors", 3000)
    assert not tensorio.verify(tmp_path).ok


def test_damaged_list_of_ours_is_a_problem_among_others(tmp_path: Path) -> None:
    tensorio.save(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    listed = Path(tensorio.write_manifest(tmp_path))
    listed.write_text(listed.read_text().replace("  config", " config"))
    flip(tmp_path / "model.safetensors", 3000)
    torn, changed = tensorio.verify(tmp_path).problems
    assert (torn.path, changed.path) == (str(listed), str(tmp_path / "model.safetensors"))


def test_list_that_names_itself(tmp_path: Path) -> None:
    """As of ``sha256sum * > SHA256SUMS``: the digest is that of an empty file."""
    (tmp_path / "x").write_bytes(b"x")
    text = f"{hashlib.sha256(b'x').hexdigest()}  x\n{hashlib.sha256().hexdigest()}  SHA256SUMS\n"
    (tmp_path / "SHA256SUMS").write_text(text)
    report = tensorio.verify(tmp_path)
    assert report.ok
    assert report.covered == ("x",)
    assert "itself" in report.notes[0]


# ------------------------------------------------------------- what can't be read


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int], None]:
    """Lets reads of a page of a file fail, as a disk does."""
    bad: dict[tuple[int, int], list[int]] = {}
    preadv = os.preadv

    def failing(fd: int, buffers: Sequence[Any], offset: int) -> int:
        now = os.fstat(fd)
        for at in bad.get((now.st_dev, now.st_ino), []):
            if offset <= at < offset + sum(map(len, buffers)):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, offset)

    def damage(path: Path, offset: int) -> None:
        bad.setdefault((path.stat().st_dev, path.stat().st_ino), []).append(offset)

    monkeypatch.setattr(os, "preadv", failing)
    monkeypatch.setattr(_checks, "_is_here", lambda *arguments: False)  # as it is where the disk fails
    return damage


@pytest.mark.parametrize("deflated", [False, True])
def test_record_that_cannot_be_read_is_a_problem_among_others(
    tmp_path: Path, broken: Callable[[Path, int], None], deflated: bool
) -> None:
    path = tmp_path / "m.pt"
    tensorio.save(TENSORS, path)
    places = {fqn: extent(path, fqn) for fqn in TENSORS}
    if deflated:
        path, places = repacked(path)
    flip(path, places["c"][0] + 20)
    at = (places["b"][0] + 4096) // 4096 * 4096 + 5
    broken(path, at)
    unread, changed = sorted(tensorio.verify(path).problems, key=lambda problem: problem.offset or 0)
    assert (unread.record, unread.tensors) == ("m/data/1", ("b",))
    assert "Input/output error" in str(unread)
    assert "EIO" in str(unread)
    assert isinstance(unread.__cause__, OSError)
    assert unread.offset is not None
    assert unread.nbytes is not None
    assert unread.offset <= at < unread.offset + min(4096, unread.nbytes)
    assert changed.tensors == ("c",)
    with pytest.raises(tensorio.TensorIOError):
        tensorio.load(path, verify=True)


def repacked(path: Path) -> tuple[Path, dict[str, tuple[int, int]]]:
    """The same file by zipfile, deflated; where the records of its tensors are."""
    packed = path.with_name("packed.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    with zipfile.ZipFile(packed) as new:
        infos = [new.getinfo(f"m/data/{i}") for i in range(3)]
        places = [(i.header_offset + 30 + len(i.filename), i.compress_size) for i in infos]
    return packed, dict(zip("abc", places, strict=True))


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_disk_that_fails(tmp_path: Path, suffix: str) -> None:
    """A real one, as far as the kernel knows: looking at a mapping of it would end the process."""
    path = tmp_path / f"m{suffix}"
    arrays = {fqn: np.random.default_rng(i).integers(0, 99, 3 << 20, dtype=np.uint8) for i, fqn in enumerate("abc")}
    tensorio.save(arrays, path, digests=suffix != ".pt")
    at = extent(path, "b")[0] + (1 << 20) + 17
    flip(path, extent(path, "c")[0] + 5)
    with fusefile.served(path, tmp_path, 0, at) as found:
        if found is None:
            pytest.skip("no FUSE here, or not for this user")
        script = f"""
import tensorio
for problem in tensorio.verify({str(found[0])!r}).problems:
    print(type(problem.__cause__).__name__, *problem.tensors, problem.offset, problem.nbytes)
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    (unread, changed) = sorted((line.split() for line in done.stdout.splitlines()), key=lambda fields: fields[1])
    assert unread[:2] == ["OSError", "b"]
    assert int(unread[2]) // 4096 == at // 4096
    assert changed[:2] == ["NoneType", "c"]


@pytest.mark.parametrize("kind", ["digests", "manifest"])
def test_bytes_of_a_safetensors_that_cannot_be_read(
    tmp_path: Path, broken: Callable[[Path, int], None], kind: str
) -> None:
    path = tmp_path / "m.safetensors"
    tensorio.save(TENSORS, path, **{kind: True})
    offset, _ = extent(path, "c")
    broken(path, offset + 5000)
    (problem,) = tensorio.verify(path).problems
    assert problem.tensors == ("c",)
    assert problem.path == str(path)
    assert "Input/output error" in str(problem)
    assert problem.offset is not None
    assert problem.offset <= offset + 5000 < problem.offset + 4096


@pytest.mark.parametrize("nbytes", [100, _checks.SMALL, _checks.SMALL + 1])
def test_file_of_many_that_cannot_be_read_or_is_gone(
    tmp_path: Path, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bad", "closed", "gone", "good", "short"):
        (tmp_path / name).write_bytes((name.encode() * nbytes)[:nbytes])
    tensorio.write_manifest(tmp_path)
    flip(tmp_path / "bad", 9)
    opening = os.open

    def later(path: str, flags: int, *arguments: Any) -> int:
        """What happens between the first look at a file and the reading of it."""
        if path.endswith("gone"):
            Path(path).unlink(missing_ok=True)
        if path.endswith("closed"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        if path.endswith("short"):
            os.truncate(path, 10)
        return opening(path, flags, *arguments)

    monkeypatch.setattr(os, "open", later)
    report = tensorio.verify(tmp_path)
    assert [os.path.basename(problem.path or "") for problem in report.problems] == ["bad", "closed", "gone", "short"]
    bad, closed, gone, short = report.problems
    assert isinstance(bad, tensorio.ChecksumError)
    assert (bad.offset, bad.nbytes) == (0, nbytes)
    assert "EACCES" in str(closed)
    assert isinstance(gone, tensorio.TruncatedError)
    assert isinstance(short, tensorio.TruncatedError)
    assert f"expected {nbytes} bytes, found 10" in str(short)
    assert "good" in report.covered


def test_many_small_files_cost_few_calls_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(1000):
        (tmp_path / f"f{i:04d}").write_bytes(b"%d" % i)
    tensorio.write_manifest(tmp_path)
    flip(tmp_path / "f0777", 0)
    (tmp_path / "f0333").unlink()
    calls: dict[str, int] = {}

    def counted(name: str) -> None:
        call = getattr(os, name)

        def counting(*arguments: Any, **options: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return call(*arguments, **options)

        monkeypatch.setattr(os, name, counting)

    for name in ("stat", "fstat", "open", "read", "preadv"):
        counted(name)
    report = tensorio.verify(tmp_path)
    assert [problem.path for problem in report.problems] == [str(tmp_path / f"f{i:04d}") for i in (333, 777)]
    assert (len(report.covered), report.unnamed) == (999, ())
    assert sum(calls.values()) < 3 * 1000 + 100, calls


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_file_that_shrank_under_an_open_checkpoint(tmp_path: Path, suffix: str) -> None:
    """Looking at the mapping behind the end would end the process."""
    path = tmp_path / f"m{suffix}"
    tensorio.save({"a": np.ones(50_000), "b": np.ones(60_000)}, path)
    script = f"""
import os, tensorio
checkpoint = tensorio.open({str(path)!r})
os.truncate({str(path)!r}, 450_000)
for problem in checkpoint.verify().problems:
    print(type(problem).__name__, *problem.tensors)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "TruncatedError b\n"), done


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint in five files and what else is beside them."""
    tensorio.save({f"t{i}": np.arange(500) + i for i in range(5)}, tmp_path / "m", max_shard_size=4500)
    (tmp_path / "m" / "config.json").write_text("{}")
    return tmp_path / "m"


def shard(folder: Path, number: int) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[number]


def problems_of(report: tensorio.Report) -> list[tuple[str, str]]:
    return [(type(problem).__name__, os.path.basename(problem.path or "")) for problem in report.problems]


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("index", [False, True])
def test_files_of_a_folder_that_cannot_be_opened_as_one(folder: Path, listed: bool, index: bool) -> None:
    """One header is gone, one file is missing, one is cut short: the others are compared all the same."""
    if listed:
        tensorio.write_manifest(folder)
    with shard(folder, 0).open("r+b") as f:
        f.write(b"\xff" * 8)
    os.truncate(shard(folder, 3), 2000)
    names = [shard(folder, i).name for i in range(5)]
    shard(folder, 1).unlink()
    flip(folder / names[2], 3000)
    report = tensorio.verify(folder / "model.safetensors.index.json" if index else folder)
    found = problems_of(report)
    assert {name for _, name in found} == {names[0], names[1], names[3], *([names[2]] if listed else [])}
    assert found.count(("TruncatedError", names[1])) == 1
    assert report.records == 2
    assert report.unchecked == (0 if listed else 2 * 4000)
    with pytest.raises(tensorio.FormatError):
        tensorio.load(folder, verify=True)
    answer = run("verify", "--json", folder)
    assert answer.exit_code == 1
    assert len(json.loads(answer.stdout)["paths"][0]["problems"]) == len(found)
    assert names[4] not in run("verify", folder).stdout


def test_files_that_are_right_and_an_index_that_is_not(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text(text.replace('"t3"', '"t33"'))
    assert problems_of(tensorio.verify(folder)) == [("HeaderError", index.name)]
    index.write_text(text[:50])
    assert problems_of(tensorio.verify(folder)) == [("HeaderError", index.name)]
    index.write_text(text)
    report = tensorio.verify(folder, require=True)
    assert problems_of(report) == [("ChecksumError", "m")]


def test_loading_compares_the_index_too(folder: Path) -> None:
    tensorio.write_manifest(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text() + " ")
    for path in (folder, index):
        tensorio.load(path)
        for act in (tensorio.load, tensorio.open):
            with pytest.raises(tensorio.ChecksumError, match="index"):
                act(path, verify=True)


def test_shard_of_another_save_is_not_named(folder: Path) -> None:
    tensorio.write_manifest(folder)
    (folder / "model-00006-of-00006.safetensors").write_bytes(shard(folder, 0).read_bytes())
    report = tensorio.verify(folder)
    assert report.ok
    assert report.unnamed == ("model-00006-of-00006.safetensors",)


@pytest.mark.parametrize("listed", [False, True])
def test_folder_where_a_file_should_be(folder: Path, listed: bool) -> None:
    """The folder's own kind is known: what is wrong is one file of it."""
    broken = shard(folder, 2)
    broken.unlink()
    if listed:
        tensorio.write_manifest(folder)
    broken.mkdir()
    (problem,) = tensorio.verify(folder).problems
    assert problem.path == str(broken)
    assert "EISDIR" in str(problem)
    with pytest.raises(IsADirectoryError):
        tensorio.load(folder)


@pytest.mark.skipif(os.name != "posix", reason="such links are POSIX'")
@pytest.mark.parametrize("target", ["nowhere", "model.safetensors.index.json"])
def test_index_that_is_a_link_to_nothing(folder: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    folder = Path(folder.name)
    index = folder / "model.safetensors.index.json"
    tensorio.write_manifest(folder)
    flip(shard(folder, 1), 5)
    index.unlink()
    index.symlink_to(target)
    report = tensorio.verify(folder)
    assert [problem.path for problem in report.problems] == [str(shard(folder, 1)), str(index)]
    Path(folder / "checkpoint.sha256").unlink()
    (problem,) = tensorio.verify(folder).problems
    assert problem.path == str(index)
    assert isinstance(problem.__cause__, OSError)


def test_what_is_not_there_at_all(tmp_path: Path) -> None:
    for name in ("none", "none.safetensors.index.json"):
        with pytest.raises(FileNotFoundError):
            tensorio.verify(tmp_path / name)


def test_error_of_progress_is_nobodys_damage(tmp_path: Path) -> None:
    tensorio.save(TENSORS, tmp_path / "m.pt", manifest=True)

    def progress(done: int, total: int) -> None:
        raise BrokenPipeError("the reader of the bar went away")

    with pytest.raises(BrokenPipeError):
        tensorio.verify(tmp_path / "m.pt", progress=progress)


# ----------------------------------------------------------------------- command line


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def test_command_says_where_and_whose(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    tensorio.save(TENSORS, path)
    assert run("manifest", path).exit_code == 0
    result = run("verify", "--require", path)
    assert result.exit_code == 0
    assert "1 file compared with" in result.stdout
    assert "not covered: nothing" in result.stdout
    flip(path, extent(path, "b")[0])
    result = run("verify", path)
    assert result.exit_code == 1
    assert "BAD: 2 problems" in result.stdout
    assert "(tensors: b)" in result.stdout
    assert "(tensors: a, b, c)" in result.stdout


def test_command_requires_and_takes_another_manifest(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensorio.save(TENSORS, path)
    assert run("verify", path).exit_code == 0
    assert run("verify", "--require", path).exit_code == 1
    tensorio.write_manifest(path)
    (tmp_path / "m.safetensors.sha256").rename(tmp_path / "list")
    assert run("verify", "--require", "--manifest", tmp_path / "list", path).exit_code == 0
    assert run("verify", "--manifest", tmp_path / "none", path).exit_code == 2


def test_command_does_not_say_that_all_is_covered_where_a_file_is_not_named(tmp_path: Path) -> None:
    """The CRC-32 of its records covers the payload of the other file, and not its header."""
    for name in "ab":
        tensorio.save({name: np.ones(500)}, tmp_path / f"{name}.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {name: f"{name}.bin" for name in "ab"}}))
    tensorio.write_manifest(tmp_path)
    assert "not covered: nothing" in CliRunner().invoke(cli, ["verify", str(tmp_path)]).stdout
    lines = (tmp_path / "checkpoint.sha256").read_text().splitlines(keepends=True)
    (tmp_path / "checkpoint.sha256").write_text("".join(line for line in lines if "b.bin\n" not in line[-7:]))
    done = CliRunner().invoke(cli, ["verify", str(tmp_path)])
    assert done.exit_code == 0
    assert "not named in the manifest: b.bin" in done.stdout
    assert "not covered: what the manifest does not name, but for the payload" in done.stdout


def test_command_answers_in_json(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.pt", tmp_path / "bad.pt"
    for path in (good, bad):
        tensorio.save(TENSORS, path)
    flip(bad, extent(bad, "b")[0])
    result = run("verify", "--json", good, bad, tmp_path / "none")
    answer = json.loads(result.stdout)
    assert result.exit_code == answer["exit_code"] == 2
    assert [entry.get("ok") for entry in answer["paths"]] == [True, False, None]
    (problem,) = answer["paths"][1]["problems"]
    assert (problem["tensors"], problem["kind"]) == (["b"], "ChecksumError")
    assert (problem["offset"], problem["nbytes"]) == extent(bad, "b")
    assert "none" in answer["paths"][2]["error"]


def test_command_writes_the_manifest_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    (tmp_path / "y").write_bytes(b"y")
    result = run("manifest", tmp_path)
    assert "2 files" in result.stdout
    assert run("verify", tmp_path).exit_code == 0
    (tmp_path / "z").touch()
    assert "not named in the manifest: z" in run("verify", tmp_path).stdout
