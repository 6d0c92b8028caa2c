"""Problems name the tensors whose bytes they are about: raw, packed, within others, encrypted, in every format."""

from __future__ import annotations

import errno
import io
import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import hexfile
import tensorio
from tensorio import formats
from tensorio.checkpoint import _checks
from tensorio.checkpoint._sums import write_sums

NAMES = [name for format in formats.names() for name in cases.cases_of(format)]
KEY = bytes(range(32))


def repacked(data: bytes, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """The same members by zipfile."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", method) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    return out.getvalue()


def in_zip(name: str, data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, data)
    return out.getvalue()


def with_bytes(path: Path, **options: Any) -> list[str]:
    """Names of the tensors that have any."""
    with tensorio.open(path, **options) as checkpoint:
        return sorted(fqn for fqn, info in checkpoint.infos.items() if info.nbytes)


def check_whole_file(path: Path, **options: Any) -> None:
    """A file that is another one as a whole: all tensors may have changed."""
    write_sums(f"{path}.sha256", {path.name: "0" * 64})
    (problem,) = tensorio.verify(path, **options).problems
    assert sorted(problem.tensors) == with_bytes(path, **options)
    assert problem.tensors


@pytest.mark.parametrize("name", NAMES)
def test_file_of_another_digest(tmp_path: Path, name: str) -> None:
    case = cases.CASES[name]()
    path = tmp_path / f"m{case.suffix}"
    makes: list[Callable[[bytes], bytes]] = [lambda data: data]
    if zipfile.is_zipfile(io.BytesIO(case.data)):
        makes.append(repacked)
    if not name.startswith(("archive", "pickle", "plain")):  # which are not looked for in archives
        makes += [lambda data: in_zip(path.name, data), lambda data: hexfile.tarred({path.name: data})]
    for make in makes:
        path.write_bytes(make(case.data))
        if with_bytes(path):
            check_whole_file(path)


@pytest.mark.parametrize("chosen", [None, "**"], ids=["file", "tensors"])
def test_encrypted_file_of_another_digest(tmp_path: Path, chosen: str | None) -> None:
    tensorio.save({"a": np.ones(3000), "b": np.ones(3)}, tmp_path / "m.safetensors")
    tensorio.encrypt(tmp_path / "m.safetensors", tmp_path / "e.safetensors", key=KEY, tensors=chosen)
    check_whole_file(tmp_path / "e.safetensors", key=KEY)
    if chosen:
        check_whole_file(tmp_path / "e.safetensors")


@pytest.fixture
def no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read of more than a header fails."""
    preadv = os.preadv

    def failing(fd: int, buffers: Sequence[Any], offset: int) -> int:
        if sum(map(len, buffers)) > 1000:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    monkeypatch.setattr(_checks, "_is_here", lambda *arguments: False)


def noise(n: int) -> Any:
    return np.random.default_rng(n).standard_normal(n)


@pytest.mark.usefixtures("no_reads")
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_each_bad_record_names_its_own(tmp_path: Path, method: int) -> None:
    """What the records of a zip have, stored or deflated."""
    whole = noise(5000)
    tensorio.save({"x": {"whole": whole, "half": whole[:2500]}, "y": noise(3000)}, tmp_path / "m.pt")
    (tmp_path / "m.pt").write_bytes(repacked((tmp_path / "m.pt").read_bytes(), method))
    problems = tensorio.verify(tmp_path / "m.pt").problems
    assert {p.record: p.tensors for p in problems} == {"m/data/0": ("x.whole", "x.half"), "m/data/1": ("y",)}


def test_bad_member_of_an_archive_names_the_tensors_of_its_checkpoint(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    for name in "pq":
        tensorio.save({name: noise(9000), f"{name}2": noise(7000)}, tmp_path / f"{name}.safetensors")
    with zipfile.ZipFile(tmp_path / "m.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in "pq":
            archive.write(tmp_path / f"{name}.safetensors", f"{name}.safetensors")
    with tensorio.open(tmp_path / "m.zip") as checkpoint:
        request.getfixturevalue("no_reads")  # of what opening it has read
        problems = checkpoint.verify().problems
    got = {p.record: p.tensors for p in problems}
    assert got.keys() == {"p.safetensors", "q.safetensors"}
    for name in "pq":
        assert sorted(fqn.rpartition(".")[2] for fqn in got[f"{name}.safetensors"]) == [name, f"{name}2"]


def test_bad_chunks_of_what_is_encrypted(tmp_path: Path) -> None:
    """Of a folder of two files: the file, the chunk, and all tensors that are in it."""
    arrays = {f"t{i}": np.full(100, i, "f4") for i in range(40)}
    tensorio.save(arrays, tmp_path / "m", max_shard_size=8000)
    tensorio.encrypt(tmp_path / "m", tmp_path / "e", key=KEY, chunk_size=4096)
    assert tensorio.verify(tmp_path / "e", key=KEY).ok
    bad = sorted((tmp_path / "e").glob("model-*.safetensors"))[1]
    data = bytearray(bad.read_bytes())
    data[-100] ^= 1
    bad.write_bytes(data)
    (problem,) = tensorio.verify(tmp_path / "e", key=KEY, manifest=False).problems
    assert problem.path == str(bad)
    assert problem.tensors == ("t37", "t38", "t39")
    assert problem.offset is not None
    assert problem.nbytes is not None
    assert problem.offset <= len(data) - 100 < problem.offset + problem.nbytes <= len(data)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_chunk_that_cannot_be_read(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {f"t{i}": noise(1000) for i in range(4)}
    tensorio.save(arrays, tmp_path / f"m{suffix}")
    path = tmp_path / f"e{suffix}"
    tensorio.encrypt(tmp_path / f"m{suffix}", path, key=KEY, chunk_size=4096)
    at = path.stat().st_size - 9000
    preadv = os.preadv

    def failing(fd: int, buffers: Sequence[Any], offset: int) -> int:
        if offset <= at < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, offset)

    with tensorio.open(path, key=KEY, mmap=True) as checkpoint:
        monkeypatch.setattr(os, "preadv", failing)
        (problem,) = checkpoint.verify().problems
    assert "Input/output error" in str(problem)
    assert problem.offset is not None
    assert problem.nbytes is not None
    assert problem.offset <= at < problem.offset + problem.nbytes
    assert set(problem.tensors) < set(arrays)
    assert problem.tensors


# ------------------------------------------------------------------- what nobody reads


def test_bytes_behind_the_end_of_what_is_packed(tmp_path: Path) -> None:
    """Bytes of a member, and none of what unpacks from it: `load` refuses them, so they are no whole file."""
    tensorio.save({"a": noise(3000), "b": noise(3000)}, tmp_path / "m.pt")
    with zipfile.ZipFile(tmp_path / "m.pt") as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    size = len(hexfile.deflate(content["m/data/1"])) + 6
    path, records, gap = tmp_path / "packed.pt", [], b""
    for name, data in content.items():
        sizes = {"csize": size} if name == "m/data/1" else {}
        records.append(hexfile.Rec(name, data, 8, descriptor=False, local=sizes, central=sizes, gap=gap))
        gap = b"behind" if sizes else b""
    path.write_bytes(hexfile.zip_file(records))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    with pytest.raises(tensorio.HeaderError):
        tensorio.load(path)
    (problem,) = tensorio.verify(path).problems
    assert isinstance(problem, tensorio.HeaderError)
    assert (problem.record, problem.tensors) == ("m/data/1", ("b",))
    assert f"expected {size} packed bytes, found the end after {size - 6}" in str(problem)
