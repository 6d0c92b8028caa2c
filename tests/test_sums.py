"""Manifests: sha256sum accepts ours, and we read its."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import tensorio
from tensorio.checkpoint import _checks
from tensorio.checkpoint._sums import find_sums, read_sums, write_sums
from tensorio.cli import cli
from tensorio.sums import sums_of, sums_text

HELLO = hashlib.sha256(b"hello").hexdigest()
OTHER = hashlib.sha256(b"other").hexdigest()
NAMES = ["plain", "two words", " blank first", "*star", "\\", "a\\nb", "line\nfeed", "ends in feed\n", "\\\\x", "é",
         "return\r", "a\rb", "\udcff", "SHA256 (x) = y", "#hash", "x.sha256"]  # fmt: skip

needs_sha256sum = pytest.mark.skipif(shutil.which("sha256sum") is None, reason="sha256sum is not here")


def sha256sum(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["sha256sum", *arguments], cwd=cwd, capture_output=True, check=False)


def folder_of(tmp_path: Path, names: list[str]) -> Path:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(os.fsencode(name))
    return tmp_path


# ------------------------------------------------------------------------ the text


@needs_sha256sum
@pytest.mark.skipif(os.name != "posix", reason="such names are POSIX'")
def test_sha256sum_accepts_any_name(tmp_path: Path) -> None:
    folder_of(tmp_path, NAMES)
    write_sums(str(tmp_path / "list"), {n: hashlib.sha256(os.fsencode(n)).hexdigest() for n in NAMES})
    done = sha256sum("--check", "--strict", "list", cwd=tmp_path)
    assert done.returncode == 0, done
    assert done.stdout.count(b": OK") == len(NAMES)


@needs_sha256sum
@pytest.mark.parametrize("how", [[], ["--binary"], ["--tag"]], ids=str)
def test_what_sha256sum_writes_is_read(tmp_path: Path, how: list[str]) -> None:
    folder_of(tmp_path, NAMES)
    (tmp_path / "list").write_bytes(sha256sum(*how, "--", *NAMES, cwd=tmp_path).stdout)
    assert read_sums(str(tmp_path / "list")) == {n: hashlib.sha256(os.fsencode(n)).hexdigest() for n in NAMES}


def test_text_goes_there_and_back() -> None:
    digests = dict.fromkeys(NAMES, HELLO)
    assert sums_of(sums_text(digests)) == digests


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("abc  x\n", "line 1: expected the 64 hex digits"),
        (f"{HELLO}  x\n{HELLO} x\n", "line 2: expected the 64 hex digits"),
        (f"{HELLO}  x\n{OTHER}  x\n", "line 2: the name 'x' occurs twice, with two digests"),
        (f"\\{HELLO}  a\\b\n", "line 1: expected the 64 hex digits"),
        (f"{HELLO}\n", "line 1: expected the 64 hex digits"),
    ],
)  # fmt: skip
def test_other_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(tensorio.HeaderError, match=message):
        sums_of(text)


@pytest.mark.parametrize("name", ["../x", "a/../x", "/etc/passwd", "./../x"])
def test_names_that_lead_out_of_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    write_sums(str(tmp_path / "list"), {name: HELLO})
    with pytest.raises(tensorio.HeaderError, match="below the folder"):
        read_sums(str(tmp_path / "list"))


def test_comments_empty_lines_and_a_leading_dot_are_read(tmp_path: Path) -> None:
    (tmp_path / "list").write_text(f"# a note\n\n{HELLO.upper()}  ./a/b\n")
    assert read_sums(str(tmp_path / "list")) == {"a/b": HELLO}


def test_a_digest_alone_is_of_the_file_it_is_named_after(tmp_path: Path) -> None:
    (tmp_path / "x.bin.sha256").write_text(f"{HELLO}\n")
    assert read_sums(str(tmp_path / "x.bin.sha256")) == {"x.bin": HELLO}


def test_a_list_of_any_length_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "list").open("wb") as f:
        f.truncate(1 << 30)
    with pytest.raises(tensorio.LimitError):
        read_sums(str(tmp_path / "list"))


@needs_sha256sum
@pytest.mark.parametrize(
    "line",
    [
        f"{HELLO}  x\r\n", f"\\{HELLO}  x\r\n", f"  {HELLO}  x\n", f"\t{HELLO} *x\n", f"{HELLO.upper()}  x\n",
        f"SHA256 (x) = {HELLO}\r\n", f"SHA256(x)= {HELLO}\n", f"SHA256 (x) ={HELLO}\n", f"{HELLO}  x\n{HELLO}  x\n",
        f"\r\n{HELLO}  x\r\n\r\n",
    ],
    ids=ascii,
)  # fmt: skip
def test_what_sha256sum_accepts_is_read(tmp_path: Path, line: str) -> None:
    (tmp_path / "x").write_bytes(b"hello")
    (tmp_path / "list").write_bytes(line.encode())
    assert sha256sum("--check", "list", cwd=tmp_path).returncode == 0
    assert read_sums(str(tmp_path / "list")) == {"x": HELLO}


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "list").write_text(f"\ufeff{HELLO}  x\n", encoding="utf-8")
    assert read_sums(str(tmp_path / "list")) == {"x": HELLO}
    (tmp_path / "x.sha256").write_text(f"\ufeff{HELLO}\r\n", encoding="utf-8")
    assert read_sums(str(tmp_path / "x.sha256")) == {"x": HELLO}


# ------------------------------------------------------------------ which one is used


def test_the_nearest_manifest_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"hello")
    assert find_sums(str(path)) is None
    for i, name in enumerate(["SHA256SUMS", "checkpoint.sha256", "x.sha256"]):
        write_sums(str(tmp_path / name), {"x": HELLO if i % 2 else OTHER})
        found = find_sums(str(path))
        assert found is not None
        assert Path(found.path).name == name
    (tmp_path / "x.sha256").unlink()
    write_sums(str(tmp_path / "checkpoint.sha256"), {"y": HELLO})
    found = find_sums(str(path))
    assert found is not None
    assert Path(found.path).name == "SHA256SUMS"


def test_a_manifest_beside_a_file_that_does_not_name_it_is_told_and_passed_by(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"hello")
    write_sums(str(tmp_path / "x.sha256"), {"y": HELLO})
    told: list[tensorio.TensorIOError] = []
    assert find_sums(str(tmp_path / "x"), refuse=told.append) is None
    write_sums(str(tmp_path / "SHA256SUMS"), {"x": HELLO})
    found = find_sums(str(tmp_path / "x"), refuse=told.append)
    assert found is not None
    assert Path(found.path).name == "SHA256SUMS"
    assert ["expected a line for 'x'" in str(error) for error in told] == [True, True]


@pytest.mark.parametrize("name", ["/data/runs/x", "../x", "dist/x", "./x"])
def test_the_only_name_of_the_list_beside_a_file_may_have_any_folder(tmp_path: Path, name: str) -> None:
    """As of ``sha256sum /data/runs/x > /data/runs/x.sha256``."""
    (tmp_path / "x.sha256").write_text(f"{HELLO}  {name}\n")
    assert read_sums(str(tmp_path / "x.sha256")) == {"x": HELLO}
    (tmp_path / "x.sha256").write_text(f"{HELLO}  {name}\n{HELLO}  y\n")
    assert read_sums(str(tmp_path / "x.sha256"), lambda error: None).get("y") == HELLO


# ------------------------------------------------------------------------- writing one


@needs_sha256sum
def test_manifest_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    tensorio.save({"w": np.arange(100_000)}, path)
    assert tensorio.write_manifest(path) == str(path) + ".sha256"
    assert (tmp_path / "m.pt.sha256").read_bytes() == sha256sum("m.pt", cwd=tmp_path).stdout
    assert tensorio.verify(path, require=True).covered == ("m.pt",)


@needs_sha256sum
def test_manifest_of_a_folder_names_all_files_that_count(tmp_path: Path) -> None:
    names = ["a.safetensors", "config.json", "sub/b.bin", ".metadata"]
    folder_of(tmp_path, [*names, ".git/HEAD", ".x.tensorio-1-0.tmp", "SHA256SUMS"])
    (tmp_path / "link").symlink_to("config.json")
    (tmp_path / "dangling").symlink_to("nowhere")
    written = tensorio.write_manifest(tmp_path)
    assert sorted(read_sums(written)) == sorted([*names, "link"])
    assert sha256sum("--check", "--strict", "checkpoint.sha256", cwd=tmp_path).returncode == 0
    assert tensorio.write_manifest(tmp_path) == written  # and does not name itself
    assert sorted(read_sums(written)) == sorted([*names, "link"])


@needs_sha256sum
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model.safetensors", ""])
@pytest.mark.parametrize("by", ["api", "command"])
def test_manifest_of_a_checkpoint_in_several_files(
    tmp_path: Path, name: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its index, and the file that it would be, stand for its folder, to write and to verify."""
    tensorio.save({f"t{i}": np.full(100, i) for i in range(10)}, tmp_path / "m", max_shard_size=2000)
    (tmp_path / "m" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "m")
    path = Path(name)
    if by == "api":
        assert os.path.samefile(tensorio.write_manifest(path), "checkpoint.sha256")
    else:
        assert CliRunner().invoke(cli, ["manifest", str(path)]).exit_code == 0
    (listed,) = tmp_path.rglob("*.sha256")
    done = sha256sum("--check", "--strict", "checkpoint.sha256", cwd=tmp_path / "m")
    assert done.returncode == 0, done
    assert sorted(read_sums(str(listed))) == sorted(p.name for p in (tmp_path / "m").iterdir() if p != listed)
    for other in (tmp_path / "m", tmp_path / "m" / "model.safetensors.index.json", path):
        report = tensorio.verify(other, require=True)
        assert report.ok
        assert len(report.covered) == 6 + 1
        assert report.manifest is not None
        assert os.path.samefile(report.manifest, listed)
    shard = sorted((tmp_path / "m").glob("model-*"))[2]
    assert tensorio.verify(shard, require=True).covered == (shard.name,)
    shard.unlink()
    if name:
        with pytest.raises(FileNotFoundError, match=shard.name):
            tensorio.write_manifest(path)


def test_manifest_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        tensorio.write_manifest(tmp_path / "none")
    assert error.value.filename == str(tmp_path / "none")
    assert not list(tmp_path.iterdir())


def test_folder_that_cannot_be_read_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of(tmp_path, ["a", "sub/b"])
    scandir = os.scandir

    def failing(path: str) -> object:
        if os.path.basename(path) == "sub":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)
    with pytest.raises(PermissionError):
        tensorio.write_manifest(tmp_path)


def test_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of(tmp_path, ["a"])

    def failing(*arguments: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    monkeypatch.setattr(_checks, "_is_here", lambda *arguments: False)
    with pytest.raises(OSError, match="Input/output error") as error:
        tensorio.write_manifest(tmp_path)
    assert (error.value.errno, error.value.filename) == (5, str(tmp_path / "a"))


def test_progress_of_a_manifest(tmp_path: Path) -> None:
    folder_of(tmp_path, ["a", "bb", "ccc"])
    seen: list[tuple[int, int]] = []
    tensorio.write_manifest(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (6, 6)
