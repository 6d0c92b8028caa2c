"""Deflate streams a piece at a time, against zlib in one step."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
