"""What is peculiar to safetensors: every type, packed elements, alignment, `strict`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cases
import tensorio
from hexfile import st_entry, st_file


@pytest.mark.parametrize("code", cases.ST_CODES)
def test_every_dtype_reads(code: str) -> None:
    name, bits = cases.ST_CODES[code]
    nbytes = 24 * bits // 8
    raw = bytes(range(1, nbytes + 1)) if code != "BOOL" else bytes([0, 1] * 12)
    data = st_file({"x": st_entry(code, [3, 8], 0, nbytes)}, raw)
    with tensorio.open(data) as checkpoint:
        info, array = checkpoint.infos["x"], checkpoint["x"]
        assert (info.dtype, info.shape, info.nbytes, info.packed) == (name, (3, 8), nbytes, bits < 8)
        assert array.tobytes() == tensorio.load(data)["x"].tobytes() == raw
        if bits < 8:
            assert (array.dtype, array.shape) == (np.dtype("u1"), (3, bits))  # 8 elements in `bits` bytes
        else:
            assert (array.dtype.name, array.shape) == (name, (3, 8))


@pytest.mark.parametrize("code", ["F4", "F6_E2M3", "F6_E3M2"])
@pytest.mark.parametrize("shape", [[8], [2, 8], [8, 1], [4, 2], [0], [2, 0], [8, 3]])
def test_packed_arrays_hold_the_bytes_whatever_their_shape(code: str, shape: list[int]) -> None:
    bits = cases.ST_CODES[code][1] * int(np.prod(shape))
    raw = bytes(range(bits // 8))
    data = st_file({"x": st_entry(code, shape, 0, bits // 8)}, raw)
    array = tensorio.load(data)["x"]
    assert array.dtype == np.uint8
    assert array.tobytes() == raw
    with tensorio.open(data) as checkpoint:
        assert checkpoint.infos["x"].shape == tuple(shape)


def test_packed_scalar_needs_whole_bytes() -> None:
    with pytest.raises(tensorio.HeaderError, match="byte"):
        tensorio.load(st_file({"x": st_entry("F4", [], 0, 0)}))


def test_tensors_may_lie_at_any_byte() -> None:
    want = cases.array("float64", (5,))
    for shift in range(8):
        header = {"pad": st_entry("U8", [shift], 0, shift), "x": st_entry("F64", [5], shift, shift + 40)}
        data = st_file(header, bytes(shift) + want.tobytes())
        for array in (tensorio.load(data)["x"], tensorio.load(data, mmap=False)["x"], tensorio.open(data)["x"]):
            assert array.tolist() == want.tolist()
            assert (array + 1).tolist() == (want + 1).tolist()
            assert array.flags.aligned == (array.ctypes.data % 8 == 0)


def test_header_may_be_padded_to_a_page() -> None:
    """As writers do whose payload is to start at a page."""
    data = st_file({"x": st_entry("U8", [4], 0, 4)}, b"1234", pad=4096)
    assert tensorio.load(data)["x"].tobytes() == b"1234"
    raw = b" \n\t\r" * 1000 + b'{"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    assert tensorio.load(st_file(raw, b"1234"))["x"].tobytes() == b"1234"


def test_order_is_that_of_the_header() -> None:
    data = st_file(
        {"z": st_entry("U8", [2], 2, 4), "a": st_entry("U8", [2], 0, 2), "m": st_entry("U8", [0], 2, 2)}, b"1234"
    )
    assert list(tensorio.load(data)) == list(tensorio.open(data)) == ["z", "a", "m"]


def test_empty_tensors_share_a_place() -> None:
    header = {n: st_entry("F32", [0, 3], 4, 4) for n in "abc"} | {
        "x": st_entry("F32", [], 0, 4),
        "y": st_entry("F32", [1], 4, 8),
    }
    tree = tensorio.load(st_file(header, bytes(8)))
    assert [tree[n].shape for n in "abc"] == [(0, 3)] * 3


@pytest.mark.parametrize("name", ["", " ", "a/b", "..", "\0", "a" * 10_000, "\U0001f600", "__meta__"])
def test_names_may_be_any_text(name: str) -> None:
    assert list(tensorio.load(st_file({name: st_entry("U8", [1], 0, 1)}, b"x"))) == [name]


def test_fields_of_tomorrow_are_ignored() -> None:
    data = st_file({"x": {**st_entry("U8", [1], 0, 1), "future": {"a": [1, 2.5, None]}}}, b"x")
    assert tensorio.load(data)["x"].tolist() == [120]


@pytest.mark.parametrize(
    ("metadata", "want"), [(None, {}), ({}, {}), ({"a": "", "": "b", "\u00e9": "\n\0"},) * 2], ids=str
)
def test_metadata_reads(metadata: Any, want: dict[str, str]) -> None:
    with tensorio.open(st_file({"__metadata__": metadata})) as checkpoint:
        assert checkpoint.metadata == want
        assert len(checkpoint) == 0


def test_header_at_the_limit_is_read_and_over_it_refused() -> None:
    raw = b"{}" + b" " * (100_000_000 - 2)
    assert tensorio.load(st_file(raw)) == {}
    with pytest.raises(tensorio.TensorIOError):
        tensorio.load(st_file(raw + b" ", pad=1), format="safetensors")


def test_dimensions_up_to_numpys_limit() -> None:
    assert tensorio.load(st_file({"x": st_entry("U8", [1] * 64, 0, 1)}, b"x"))["x"].ndim == 64
    with pytest.raises(tensorio.LimitError, match="dimension"):
        tensorio.load(st_file({"x": st_entry("U8", [1] * 65, 0, 1)}, b"x"))


# ----------------------------------------------------------------------- strict

LOOSE: dict[str, bytes] = {
    "space": st_file('{ "x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
    "order_of_fields": st_file('{"x":{"shape":[1],"dtype":"U8","data_offsets":[0,1]}}', b"x"),
    "order_of_tensors": st_file({"b": st_entry("U8", [1], 0, 1), "a": st_entry("U8", [1], 1, 2)}, b"xy"),
    "narrow_before_wide": st_file({"a": st_entry("U8", [8], 0, 8), "b": st_entry("F64", [1], 8, 16)}, bytes(16)),
    "extra_field": st_file('{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"n":1}}', b"x"),
    "length_not_a_multiple_of_8": st_file({"x": st_entry("U8", [1], 0, 1)}, b"x", pad=5),
    "more_padding": st_file({"x": st_entry("U8", [1], 0, 1)}, b"x", pad=4096),
    "padding_of_newlines": st_file(b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}\n\n\n', b"x"),
    "escaped_slash": st_file('{"x\\/y":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
    "escaped_letter": st_file('{"\\u0078":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
    "metadata_behind": st_file('{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"__metadata__":{"a":"b"}}', b"x"),
    "metadata_null": st_file('{"__metadata__":null,"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
}  # fmt: skip


@pytest.mark.parametrize("data", LOOSE.values(), ids=LOOSE.keys())
def test_strict_refuses_what_the_reference_would_not_write(data: bytes) -> None:
    assert len(tensorio.load(data)) >= 1
    for read in (tensorio.load, tensorio.open):
        with pytest.raises(tensorio.HeaderError, match="strict"):
            read(data, strict=True)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {}], ids=str)
def test_strict_accepts_what_the_reference_writes(metadata: Any) -> None:
    reference = pytest.importorskip("safetensors.numpy")
    tensors = {
        "b": np.zeros((2, 2), "f8"),
        "a": np.ones(3, "f4"),
        'c\n"\u00e9': np.ones(3, "u1"),
        "d": np.zeros((0,), "i2"),
        "e": np.zeros((), "f4"),
        "f": np.ones(5, "?"),
    }
    data = reference.save(tensors, metadata)
    for source in (tensorio.load(data, strict=True), tensorio.open(data, strict=True)):
        assert {k: v.tobytes() for k, v in source.items()} == {k: v.tobytes() for k, v in tensors.items()}


def test_strict_accepts_what_we_write(tmp_path: Any) -> None:
    for metadata in (None, {}, {"b": "1", "a": "2"}):
        tensorio.save({"x": np.ones(3, "f4"), "y": np.ones(2, "f8")}, tmp_path / "x.safetensors", metadata=metadata)
        assert list(tensorio.load(tmp_path / "x.safetensors", strict=True)) == ["y", "x"]
