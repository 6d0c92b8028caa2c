"""The airlock takes any contiguous buffer, lets go of it, and never writes to it."""

from __future__ import annotations

import array
import contextlib
import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hexfile
from hexfile import Rec, st_entry
from tensorio import _core

ZIP = hexfile.zip_file([Rec("a/x", b"123")])
ST = hexfile.st_file({"a": st_entry("U8", [3], 0, 3)}, b"123")
CODES = bytes(range(22))


def mapped(data: bytes) -> Any:
    block = mmap.mmap(-1, len(data))
    block[:] = data
    return block


KINDS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "bytearray": bytearray,
    "memoryview": memoryview,
    "mmap": mapped,
    "array": lambda b: array.array("B", b),
    "ndarray": lambda b: np.frombuffer(b, np.uint8),
    "ctypes": lambda b: (ctypes.c_ubyte * len(b)).from_buffer_copy(b),
    "read_only_view": lambda b: memoryview(bytearray(b)).toreadonly(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_buffer_reads_alike(kind: str) -> None:
    assert _core.st_read(KINDS[kind](ST), CODES)[0] == ["a"]
    rows, *_ = _core.zip_read(KINDS[kind](ZIP))
    assert _core.zip_records(KINDS[kind](ZIP), rows)[0][0] == "a/x"
    assert _core.crc32(KINDS[kind](b"123456789")) == 0xCBF43926
    assert _core.address(KINDS[kind](ST)) > 0


@pytest.mark.parametrize("call", [lambda b: _core.st_read(b, CODES), _core.zip_read, _core.crc32, _core.address],
                         ids=["st_read", "zip_read", "crc32", "address"])  # fmt: skip
def test_buffer_is_let_go_after_the_call(call: Callable[[Any], Any]) -> None:
    for data in (bytearray(ST), bytearray(ZIP), bytearray(b"neither"), bytearray()):
        with contextlib.suppress(ValueError):
            call(data)
        data.append(0)  # would raise BufferError if somebody held it


@pytest.mark.parametrize(
    "wrong", ["text", 3, None, [1, 2], memoryview(b"abcd")[::2]], ids=lambda value: type(value).__name__
)
@pytest.mark.parametrize("call", [lambda b: _core.st_read(b, CODES), _core.zip_read, _core.crc32, _core.address],
                         ids=["st_read", "zip_read", "crc32", "address"])  # fmt: skip
def test_what_is_no_buffer_is_a_type_error(call: Callable[[Any], Any], wrong: Any) -> None:
    with pytest.raises((TypeError, BufferError)):
        call(wrong)


def test_buffer_is_not_written_to() -> None:
    for data, call in ((bytearray(ST), lambda b: _core.st_read(b, CODES)), (bytearray(ZIP), _core.zip_read)):
        before = bytes(data)
        call(data)
        assert data == before


def test_reads_stop_at_the_end_of_the_buffer() -> None:
    """The last page behind the buffer may not be touched: it is not there."""
    page = mmap.PAGESIZE
    block = mmap.mmap(-1, 2 * page)
    libc = ctypes.CDLL(None, use_errno=True)
    address = _core.address(block)
    assert libc.mprotect(ctypes.c_void_p(address + page), ctypes.c_size_t(page), 0) == 0
    view = memoryview(block)
    try:
        for data in (ZIP, ST, b"", b"PK\x03\x04", b"\x08\0\0\0\0\0\0\0{}", ZIP[:-1], ST[:-1]):
            start = page - len(data)
            view[start:page] = data
            for call in (lambda b: _core.st_read(b, CODES), _core.zip_read, _core.crc32):
                for cut in range(0, len(data) + 1, 3):
                    with contextlib.suppress(ValueError):
                        call(view[start + cut : page])
    finally:
        libc.mprotect(ctypes.c_void_p(address + page), ctypes.c_size_t(page), 3)


def test_join_is_what_bytes_join_is() -> None:
    pieces = [b"a", bytearray(b"bc" * 40_000), memoryview(b""), b"d" * 7]
    assert _core.join(iter(pieces), sum(map(len, pieces))) == b"".join(pieces)
    assert _core.join([], 0) == b""


@pytest.mark.parametrize("nbytes", [0, 2, 4])
def test_join_refuses_other_sizes_than_promised(nbytes: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        _core.join([b"ab", b"c"], nbytes)
