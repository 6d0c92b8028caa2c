"""CRC-32: every variant this CPU has, against zlib, over every length, offset and split."""

from __future__ import annotations

import random
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorio import _core

DATA = random.Random(1).randbytes(70_000)
# Around the widths that the variants work in: 8, 16, 64, 256 bytes, 4 KiB.
LENGTHS = sorted(
    {*range(300), 511, 512, 513, 1023, 1024, 1025, 4095, 4096, 4097, 32_767, 32_768, 32_769, 65_536, 69_900}
)

variants = pytest.mark.parametrize("variant", _core.crc32_variants())


def test_crc32_has_a_portable_variant_first() -> None:
    names = _core.crc32_variants()
    assert names
    assert len(set(names)) == len(names)
    assert "slice" in names[0] or "portable" in names[0] or "table" in names[0]


def test_crc32_of_unknown_variant_is_an_error() -> None:
    with pytest.raises(ValueError, match="no CRC-32 variant"):
        _core.crc32_with("no such", b"")


@variants
def test_crc32_known_values(variant: str) -> None:
    assert _core.crc32_with(variant, b"") == 0
    assert _core.crc32_with(variant, b"123456789") == 0xCBF43926
    assert _core.crc32_with(variant, bytes(1 << 20)) == zlib.crc32(bytes(1 << 20))
    assert _core.crc32_with(variant, b"\xff" * 99_999) == zlib.crc32(b"\xff" * 99_999)


@variants
def test_crc32_of_every_length_equals_zlib(variant: str) -> None:
    for n in LENGTHS:
        assert _core.crc32_with(variant, DATA[:n]) == zlib.crc32(DATA[:n]), n


@variants
def test_crc32_at_every_alignment_equals_zlib(variant: str) -> None:
    view = memoryview(DATA)
    for start in range(70):
        for n in (0, 1, 15, 16, 63, 64, 65, 255, 1000, 5000):
            assert _core.crc32_with(variant, view[start : start + n]) == zlib.crc32(view[start : start + n]), (start, n)


@variants
@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 5000), max_size=6), st.integers(0, 0xFFFFFFFF))
def test_crc32_over_split_buffers_equals_zlib(variant: str, cuts: list[int], start: int) -> None:
    ours = theirs = start
    at = 0
    for n in cuts:
        piece = DATA[at : at + n]
        ours = _core.crc32_with(variant, piece, ours)
        theirs = zlib.crc32(piece, theirs)
        at += n
    assert ours == theirs


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=3000), st.binary(max_size=3000))
def test_crc32_combine_joins_two_checksums(a: bytes, b: bytes) -> None:
    assert _core.crc32_combine(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


@pytest.mark.parametrize("length", [0, 1, (1 << 31) - 1, 1 << 32, (1 << 32) + 5, 1 << 40])
def test_crc32_combine_over_long_lengths_is_repeated_combining(length: int) -> None:
    """Zeros double cheaply: the checksum of 2n zeros is that of n zeros twice."""
    want, have, step, step_crc = zlib.crc32(b"abc"), length, 1, zlib.crc32(b"\0")
    zeros, total = 0, 0
    while have:
        if have & 1:
            zeros = _core.crc32_combine(zeros, step_crc, step)
            total += step
        step_crc = _core.crc32_combine(step_crc, step_crc, step)
        step *= 2
        have >>= 1
    assert total == length
    got = _core.crc32_combine(want, zeros, length)
    if length == 1:
        assert got == zlib.crc32(b"abc\0")
    # Appending in two halves is appending at once.
    half = length // 2
    assert (
        _core.crc32_combine(_core.crc32_combine(want, _zeros(half), half), _zeros(length - half), length - half) == got
    )


def _zeros(n: int) -> int:
    crc, step, step_crc = 0, 1, zlib.crc32(b"\0")
    while n:
        if n & 1:
            crc = _core.crc32_combine(crc, step_crc, step)
        step_crc = _core.crc32_combine(step_crc, step_crc, step)
        step *= 2
        n >>= 1
    return crc


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview], ids=lambda f: f.__name__)
def test_crc32_takes_any_contiguous_buffer(make: type) -> None:
    assert _core.crc32(make(DATA)) == zlib.crc32(DATA)


def test_crc32_refuses_what_is_no_contiguous_buffer() -> None:
    wrongs: list[Any] = ["text", 3, None, memoryview(DATA)[::2]]
    for wrong in wrongs:
        with pytest.raises((TypeError, BufferError)):
            _core.crc32(wrong)
