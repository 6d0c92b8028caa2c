"""The safetensors header in C: what it hands out, and where it points when it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hexfile
from hexfile import st_entry, st_file
from tensorio import HeaderError, LimitError, TensorIOError, TruncatedError, UnsupportedError, _core
from tensorio.tensors import ROW

CODES = bytes(range(len(_core.st_dtypes())))  # each dtype its own number


def read(data: bytes) -> Any:
    return _core.st_read(data, CODES)


def test_header_reads_names_rows_and_offsets() -> None:
    data = st_file({"__metadata__": {"k": "v"}, "a": st_entry("F32", [2, 3], 0, 24), "b": st_entry("U8", [], 24, 25)},
                   bytes(25))  # fmt: skip
    names, rows, dims, metadata, start = read(data)
    assert names == ["a", "b"]
    assert metadata == [("k", "v")]
    assert start == 8 + int.from_bytes(data[:8], "little")
    order = [name for name, _ in _core.st_dtypes()]
    a, b = rows[:ROW].tolist(), rows[ROW:].tolist()
    assert a[0] == order.index("F32")
    assert b[0] == order.index("U8")
    assert (a[2], a[5], a[6], b[2], b[5], b[6]) == (2, start, 24, 0, start + 24, 1)
    assert dims.tolist()[:4] == [2, 3, 12, 4]


@pytest.mark.parametrize(
    ("header", "metadata"),
    [
        ("{}", None),
        ('{"__metadata__":null}', None),
        ('{"__metadata__":{}}', []),
        ('{"\\u005f_metadata__":{"a":"b"}}', [("a", "b")]),
    ],
)
def test_header_tells_no_metadata_from_empty_metadata(header: str, metadata: Any) -> None:
    assert read(st_file(header))[3] == metadata


@pytest.mark.parametrize("space", [" ", "\n", "\t", "\r", " \n\t\r "])
def test_header_takes_white_space_where_json_does(space: str) -> None:
    s = space
    tokens = [
        "{",
        '"a"',
        ":",
        "{",
        '"dtype"',
        ":",
        '"U8"',
        ",",
        '"shape"',
        ":",
        "[",
        "1",
        "]",
        ",",
        '"data_offsets"',
        ":",
    ]
    header = s + s.join([*tokens, "[", "0", ",", "1", "]", "}", "}"]) + s
    assert read(st_file(header, b"x", pad=1))[0] == ["a"]


ESCAPES = {r"\"\\\/\b\f\n\r\t": '"\\/\b\f\n\r\t', r"\u0041\u00e9\u20ac": "A\u00e9\u20ac", r"\ud83d\ude00": "\U0001f600",
           r"\u0000": "\0", "\u00e9\U0001f600\x7f": "\u00e9\U0001f600\x7f", "": ""}  # fmt: skip


@pytest.mark.parametrize(("written", "name"), ESCAPES.items(), ids=[ascii(k) for k in ESCAPES])
def test_header_names_are_unescaped(written: str, name: str) -> None:
    assert read(st_file(f'{{"{written}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}}}'))[0] == [name]


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])), st.lists(st.integers(0, 5), max_size=5), max_size=5
    )
)
def test_header_by_json_dumps_reads_back(shapes: dict[str, list[int]]) -> None:
    shapes.pop("__metadata__", None)
    header, at = {}, 0
    for name, shape in shapes.items():
        n = 1
        for d in shape:
            n *= d
        header[name] = st_entry("I16", shape, at, at + 2 * n)
        at += 2 * n
    for ascii_only in (True, False):
        data = st_file(json.dumps(header, ensure_ascii=ascii_only), bytes(at))
        assert read(data)[0] == list(shapes)


def caret(source: str, payload: bytes = b"") -> tuple[bytes, int]:
    """A header with ``^`` in front of the byte at fault."""
    at = source.index("^")
    return st_file(source.replace("^", "", 1), payload, pad=1), 8 + at


BAD: dict[str, tuple[str, Any]] = {
    "nothing": ("^", TensorIOError),
    "no_object": ("^[]", HeaderError),
    "no_colon": ('{"a"^ 1}', HeaderError),
    "no_quote": ("{^a:1}", HeaderError),
    "single_quotes": ("{^'a':1}", HeaderError),
    "garbage_behind": ("{}^x", HeaderError),
    "second_object": ("{}^{}", HeaderError),
    "control_character": ('{"a^\x01":1}', HeaderError),
    "bad_escape": ('{"a^\\x41":1}', HeaderError),
    "trailing_comma": ('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},^}', HeaderError),
    "leading_zero": ('{"a":{"dtype":"U8","shape":[0^1],"data_offsets":[0,1]}}', HeaderError),
    "negative": ('{"a":{"dtype":"U8","shape":[^-1],"data_offsets":[0,1]}}', HeaderError),
    "float": ('{"a":{"dtype":"U8","shape":[^1.0],"data_offsets":[0,1]}}', HeaderError),
    "text_for_number": ('{"a":{"dtype":"U8","shape":[^"1"],"data_offsets":[0,1]}}', HeaderError),
    "dtype_number": ('{"a":{"dtype":^1,"shape":[1],"data_offsets":[0,1]}}', HeaderError),
    "dtype_unknown": ('{"a":{"dtype":^"X9","shape":[1],"data_offsets":[0,1]}}', (HeaderError, UnsupportedError)),
    "metadata_number": ('{"__metadata__":{"a":^1}}', HeaderError),
    "metadata_list": ('{"__metadata__":^[]}', HeaderError),
}  # fmt: skip


@pytest.mark.parametrize(("source", "kind"), BAD.values(), ids=BAD.keys())
def test_header_that_is_wrong_is_refused_near_its_byte(source: str, kind: Any) -> None:
    data, at = caret(source, b"x")
    with pytest.raises(kind) as caught:
        read(data)
    assert abs(caught.value.offset - at) <= 1, f"at {caught.value.offset}, expected {at}"


def test_header_faults_between_tensors_name_the_tensor() -> None:
    data = st_file({"good": st_entry("U8", [1], 0, 1), "bad": st_entry("U8", [1], 2, 3)}, b"123")
    with pytest.raises(HeaderError) as caught:
        read(data)
    assert caught.value.record == "bad"
    assert data[caught.value.offset :].startswith((b"bad", b'"bad'))


def test_header_cut_anywhere_is_truncated() -> None:
    data = st_file({"a": st_entry("F32", [1], 0, 4)}, b"1234")
    for n in range(len(data)):
        with pytest.raises(TruncatedError):
            read(data[:n])


@pytest.mark.parametrize("depth", [126, 127, 128, 5000])
def test_header_depth_limit_is_the_references(depth: int) -> None:
    """127 nested containers, the top object among them."""
    inner = "[" * (depth - 2) + "]" * (depth - 2)
    data = st_file(f'{{"a":{{"x":{inner},"dtype":"U8","shape":[0],"data_offsets":[0,0]}}}}')
    if depth <= 127:
        assert read(data)[0] == ["a"]
    else:
        with pytest.raises((LimitError, HeaderError)):
            read(data)


def test_writer_is_byte_for_byte_what_json_would_be() -> None:
    names, shapes = ["a", '\u00e9"\\\n\x01\x7f/'], [[2, 3], []]
    codes = [name for name, _ in _core.st_dtypes()]
    got = _core.st_header(names, [codes.index("F32"), codes.index("I64")], shapes, [24, 8], [("k", "v")])
    want = {"__metadata__": {"k": "v"}, "a": st_entry("F32", [2, 3], 0, 24), names[1]: st_entry("I64", [], 24, 32)}
    text = json.dumps(want, separators=(",", ":"), ensure_ascii=False)
    assert got == hexfile.st_file(text)
    assert len(got) % 8 == 0


def test_writer_refuses_a_header_no_reader_takes() -> None:
    with pytest.raises(LimitError, match="100000000"):
        _core.st_header(["x" * 99_999_990], [0], [[0]], [0])


def test_writer_refuses_65_dimensions() -> None:
    with pytest.raises(LimitError, match="65 dimensions"):
        _core.st_header(["x"], [0], [[1] * 65], [8])


def test_dtypes_are_all_22_with_their_bits() -> None:
    import cases

    assert dict(_core.st_dtypes()) == {code: bits for code, (_, bits) in cases.ST_CODES.items()}
