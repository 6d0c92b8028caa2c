"""Deflate streams a piece at a time, against zlib in one step."""

from __future__ import annotations

import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tensorio
from tensorio.errors import HeaderError
from tensorio.formats._zip import Inflation
from tensorio.plan import PIECE


def deflated(data: bytes, level: int = 6) -> bytes:
    packer = zlib.compressobj(level, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


def pieces(data: bytes, step: int) -> list[memoryview]:
    return [memoryview(data)[at : at + step] for at in range(0, len(data), step)]


@given(st.binary(max_size=500), st.integers(0, 40), st.integers(1, 60), st.integers(-50, 50), st.binary(max_size=20),
       st.sampled_from([0, 6]))  # fmt: skip
def test_unpacked_up_to_one_byte_more_than_the_most(
    data: bytes, times: int, step: int, beyond: int, behind: bytes, level: int
) -> None:
    data = data * times
    packed = deflated(data, level)
    most = max(len(data) + beyond, 0)
    stream = Inflation(pieces(packed + behind, step), most, 0)
    got = b"".join(stream)
    assert got == data[: most + 1]
    assert stream.size == len(got)
    if most >= len(data):
        assert stream.ended
        assert stream.taken == len(packed)


@given(st.binary(min_size=1, max_size=300), st.integers(1, 60), st.data())
def test_stream_that_is_cut_off_does_not_end(data: bytes, step: int, draw: st.DataObject) -> None:
    packed = deflated(data)
    cut = packed[: draw.draw(st.integers(0, len(packed) - 1))]
    stream = Inflation(pieces(cut, step), len(data), 0)
    got = b"".join(stream)
    assert data.startswith(got)
    assert not stream.ended
    assert stream.taken == len(cut)


def test_pieces_are_bounded_whatever_the_stream_unpacks_to() -> None:
    stream = Inflation([memoryview(deflated(bytes(5 * PIECE + 7)))], 5 * PIECE + 7, 0)
    assert [len(piece) for piece in stream] == [PIECE] * 5 + [7]
    assert stream.ended


def test_bomb_is_left_after_one_byte_too_many() -> None:
    stream = Inflation([memoryview(deflated(bytes(50 * PIECE)))], 1000, 0)
    assert b"".join(stream) == bytes(1001)
    assert not stream.ended


def test_what_is_no_deflate_stream_is_an_error_with_its_place() -> None:
    with pytest.raises(HeaderError, match="deflated record: ") as caught:
        list(Inflation([memoryview(b"\xff" * 20)], 100, 77))
    assert caught.value.offset == 77


@pytest.mark.parametrize("suffix", [".pt", ".zip"])
@pytest.mark.parametrize("writable", [False, True])
def test_file_that_shrank_before_a_record_is_unpacked(tmp_path: Path, suffix: str, writable: bool) -> None:
    """Looking at the mapping behind the end would end the process."""
    tensorio.save({"a": np.random.default_rng(0).random(50_000)}, tmp_path / "m.pt")
    path = tmp_path / f"packed{suffix}"
    with zipfile.ZipFile(tmp_path / "m.pt") as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        if suffix == ".zip":
            new.write(tmp_path / "m.pt", "m.pt")
        for name in old.namelist() if suffix == ".pt" else ():
            new.writestr(name, old.read(name))
    script = f"""
import os, tensorio
checkpoint = tensorio.open({str(path)!r}, mmap=True, writable={writable})
for storage in checkpoint._opened.storages:
    if hasattr(storage, "_data"):
        storage._data = None  # opening an archive may have unpacked it
os.truncate({str(path)!r}, 5000)
try:
    for fqn in checkpoint:
        checkpoint[fqn].sum()
except tensorio.TruncatedError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    assert done.stdout.startswith("the file ends")
    assert str(path) in done.stdout
