"""Every protocol that Python ever wrote, and Python 2's spellings: compared with what `pickle` itself makes of them."""

from __future__ import annotations

import collections
import math
import pickle
import types
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hexfile
import tensorio
from tensorio import HeaderError, LimitError, Opaque, TruncatedError, UnsafePickleError


def read(data: bytes, **options: Any) -> Any:
    """Load a pickle as the object of a torch file."""
    return tensorio.load(hexfile.torch_file(data), **options)


PLAIN: list[Any] = [
    None, True, False, 0, 1, -1, 255, 65536, 2**31, -(2**63), 2**200, 1.5, -0.0, 1e300, math.inf, "", "a",
    "é\n\\\U0001f600", b"", b"\x00\xff'\"", bytes(300), bytearray(b"abc"), (), (1,), (1, 2, 3, 4), [], [1, [2, []]], {},
    {"a": 1, 2: "b", (1, 2): 3}, {1, 2}, frozenset([3]), collections.OrderedDict([("z", 1), ("a", 2)]),
    collections.Counter("aab"), complex(1, -2),
]  # fmt: skip


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_value_of_every_protocol(value: Any, protocol: int) -> None:
    got = read(pickle.dumps(value, protocol))
    assert got == value
    assert type(got) is type(value)
    assert repr(got) == repr(value)


@pytest.mark.parametrize("protocol", range(6))
def test_shared_and_recursive_objects_of_every_protocol(protocol: int) -> None:
    inner: list[Any] = [1]
    inner.append(inner)
    got = read(pickle.dumps({"a": inner, "b": inner}, protocol))
    assert got["a"] is got["b"]
    assert got["a"][1] is got["a"]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("dtype", ["f4", ">f8", "i2", "?", "c8", "U3", "S2", "O"])
def test_numpy_array_of_every_protocol(protocol: int, dtype: str) -> None:
    array = np.array([[1, 0, 3], [4, 5, 6]]).astype(dtype)
    for value in (array, np.asfortranarray(array), array[:, :0], array[0]):
        data = pickle.dumps({"x": value}, protocol)
        got, want = read(data)["x"], pickle.loads(data)["x"]
        assert got.dtype == want.dtype.newbyteorder("=")  # NumPy swaps in some protocols
        assert got.shape == value.shape
        assert got.flags.f_contiguous == want.flags.f_contiguous
        assert np.array_equal(got, value)


plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner), st.tuples(inner, inner), st.dictionaries(st.text() | st.integers(-(2**60), 2**60), inner)
    ),
    max_leaves=20,
)


@given(value=plain, protocol=st.integers(0, 5))
@settings(max_examples=400, deadline=None)
def test_any_plain_tree_of_any_protocol(value: Any, protocol: int) -> None:
    try:
        "".join(str(value)).encode()
    except UnicodeEncodeError:
        return  # a lone surrogate: not read, since nothing that prints names could show it
    assert read(pickle.dumps(value, protocol)) == value


# ------------------------------------------------------------------- protocol 0

TEXT = {
    "int": b"I17\n.",
    "int_negative": b"I-5\n.",
    "int_false": b"I00\n.",
    "int_true": b"I01\n.",
    "long": b"L-123456789012345678901234567890L\n.",
    "long_without_its_letter": b"L5\n.",
    "float": b"F1.5e-3\n.",
    "float_inf": b"F-inf\n.",
    "string": b"S'it\\'s\\n\\x41\\\\'\np0\n.",
    "string_in_double_quotes": b'S"it\'s"\n.',
    "unicode": b"Va\\u00e9\\u000a\n.",
    "dict": b"(S'a'\nI1\nS'b'\nI2\nd.",
    "list": b"(I1\nI2\nlp0\n.",
    "get_put": b"(lp7\nI1\nag7\n0.",
    "tuple": b"(I1\n(ttp1\n.",
}


@pytest.mark.parametrize("data", TEXT.values(), ids=TEXT.keys())
def test_text_opcode_reads_as_pickle_reads_it(data: bytes) -> None:
    want = pickle.loads(data)  # plain values that this test wrote itself
    got = read(data)
    assert got == want
    assert type(got) is type(want)


def test_characters_that_narrow_python_2_wrote_as_halves() -> None:
    assert read(b"V\\ud83d\\ude00\n.") == "\U0001f600"


BAD_TEXT = {
    "int_without_digits": (b"I\n.", HeaderError, "decimal number"),
    "int_with_spaces": (b"I 1 \n.", HeaderError, "decimal number"),
    "int_with_underscore": (b"I1_0\n.", HeaderError, "decimal number"),
    "int_of_many_digits": (b"I" + b"1" * 700 + b"\n.", LimitError, "700 characters"),
    "long_of_a_million_digits": (b"L" + b"1" * 1_000_000 + b"L\n.", LimitError, "1000001 characters"),
    "float_word": (b"Fnone\n.", HeaderError, "a number"),
    "float_hexadecimal": (b"F0x1p3\n.", HeaderError, "a number"),
    "string_not_quoted": (b"Sabc\n.", HeaderError, "quoted"),
    "string_of_one_quote": (b"S'\n.", HeaderError, "quoted"),
    "string_quotes_differ": (b"S'abc\"\n.", HeaderError, "quoted"),
    "string_unknown_escape": (b"S'a\\u0041'\n.", HeaderError, "escape"),
    "string_half_escape": (b"S'\\x4'\n.", HeaderError, "escape"),
    "unicode_half_escape": (b"V\\u12\n.", HeaderError, "raw-unicode-escape"),
    "unicode_lone_half": (b"V\\ud83d\n.", HeaderError, "raw-unicode-escape"),
    "get_of_nothing": (b"g5\n.", HeaderError, "never set"),
    "get_negative": (b"Ng-1\n.", HeaderError, "memo slot"),
    "put_giant": (b"Np99999999999\n.", LimitError, "memo slot"),
    "put_of_nothing": (b"p0\n.", HeaderError, "too few"),
    "dict_odd": (b"(I1\nd.", HeaderError, "pairs"),
    "dict_key_twice": (b"(I1\nNI1\nNd.", HeaderError, "twice"),
    "line_without_end": (b"I12", TruncatedError, "runs past the end"),
    "persistent_id": (b"Pabc\n.", HeaderError, "no such tensor"),
    "obj_of_nothing": (b"(o.", HeaderError, "class behind the mark"),
    "binstring_negative": (b"T\xff\xff\xff\xff.", HeaderError, "negative length"),
}


@pytest.mark.parametrize(("data", "kind", "words"), BAD_TEXT.values(), ids=BAD_TEXT.keys())
def test_text_opcode_that_is_wrong_is_refused(data: bytes, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        read(data)
    assert caught.value.offset is not None  # type: ignore[attr-defined]


# --------------------------------------------------------------------- Python 2


@pytest.mark.parametrize(
    ("name", "want"),
    [
        (b"c__builtin__\nset\n((lI1\natR", {1}),
        (b"c__builtin__\nbytearray\n(tR", bytearray()),
        (b"ccollections\nOrderedDict\n(tR", {}),
    ],
)  # fmt: skip
def test_names_of_python_2_are_mapped(name: bytes, want: Any) -> None:
    assert read(name + b".") == want


@pytest.mark.parametrize(
    ("encoding", "want"), [(None, b"\xe9"), ("latin1", "é"), ("bytes", b"\xe9"), ("cp1251", "й")]
)  # fmt: skip
def test_strings_of_python_2_in_the_encoding_asked_for(encoding: str | None, want: Any) -> None:
    for data in (b"U\x01\xe9.", b"T\x01\x00\x00\x00\xe9.", b"S'\\xe9'\n."):
        assert read(data, encoding=encoding) == want


def test_strings_of_python_2_are_text_where_they_are_utf_8() -> None:
    assert read(b"U\x02\xc3\xa9.") == "é"
    with pytest.raises(HeaderError, match="encoding='latin1'"):
        read(b"U\x01\xe9.", encoding="utf-8")


def test_an_encoding_that_there_is_not_is_wrong_use() -> None:
    for name in ("no-such", "hex", "zlib"):
        with pytest.raises(ValueError, match="encoding="):
            read(b"N.", encoding=name)


def test_numpy_array_that_python_2_wrote() -> None:
    raw = b"".join(n.to_bytes(8, "little") for n in (200, 0xA9C3, 2, 3, 4, 5, 6, 7))  # 0xC3 0xA9 is text in UTF-8, too
    for spelled in (b"U" + bytes([len(raw)]) + raw, b"T" + len(raw).to_bytes(4, "little") + raw):
        data = (
            b"\x80\x02cnumpy.core.multiarray\n_reconstruct\nq\x00cnumpy\nndarray\nq\x01K\x00\x85U\x01b\x87R(K\x01K\x08\x85"
            b"cnumpy\ndtype\nq\x02U\x02i8K\x00K\x01\x87R(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
            + spelled + b"tb."
        )  # fmt: skip
        for encoding in (None, "latin1", "bytes"):
            assert read(data, encoding=encoding).tobytes() == raw


# -------------------------------------------------------------- objects, opaque


class Point:
    """A class that no reader of these pickles may touch."""

    def __init__(self, x: int) -> None:
        self.x = x


class Slots:
    __slots__ = ("a",)


class Named:
    def __new__(cls, *args: Any, **kwargs: Any) -> Named:
        return object.__new__(cls)

    def __getnewargs_ex__(self) -> tuple[tuple[int, ...], dict[str, int]]:
        return (1,), {"key": 2}


@pytest.mark.parametrize("protocol", range(6))
def test_object_of_an_unknown_class_is_listed_or_kept(protocol: int) -> None:
    data = pickle.dumps({"p": Point(3)}, protocol)
    with pytest.raises(UnsafePickleError) as caught:
        read(data)
    assert any(name.endswith(".Point") for name in caught.value.globals)
    got = read(data, unknown="opaque")["p"]
    assert isinstance(got, Opaque)
    assert got.state == {"x": 3}
    assert got.name == "Point"


def test_named_arguments_are_kept() -> None:
    for protocol in (2, 4, 5):
        got = read(pickle.dumps(Named(), protocol), unknown="opaque")
        shown = (got.args, got.kwargs) if protocol > 2 else (got.args, None)
        assert shown == (((1,), {"key": 2}) if protocol > 2 else (got.args, None))


@pytest.mark.parametrize(
    "data", [b"(I7\nios\nsystem\n.", b"(cos\nsystem\nI7\no.", b"\x80\x02\x82\x05.", b"\x84\x01\x02\x03\x04."]
)
def test_instances_and_extensions_are_names_like_any_other(data: bytes) -> None:
    with pytest.raises(UnsafePickleError):
        read(data)
    assert isinstance(read(data, unknown="opaque"), Opaque)


def test_instance_arguments_are_kept() -> None:
    assert read(b"(I7\nI8\nios\nsystem\n.", unknown="opaque").args == (7, 8)
    assert read(b"(cos\nsystem\nI7\nI8\no.", unknown="opaque").args == (7, 8)


# ------------------------------------------------- bytes of a plain pickle, in place


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_bytes_come_out_of_whatever_holds_them() -> None:
    raw = bytes(range(200))
    value: Any = {
        "namespace": types.SimpleNamespace(a=raw, b=[raw]), "deque": collections.deque([raw, (raw,)]),
        "tuple": (1, (raw, [raw])), "attributes": collections.OrderedDict(x=raw), "user": collections.UserDict(k=raw),
        "objects": np.array([raw, None, [raw]], dtype=object), "class": collections.OrderedDict, "pair": (raw, raw),
    }  # fmt: skip
    value["attributes"].note = raw
    for protocol in (3, 4, 5):
        got = tensorio.load(pickle.dumps(value, protocol), format="pickle")
        assert got["namespace"] == value["namespace"]
        assert got["deque"] == value["deque"]
        assert got["tuple"] == value["tuple"]
        assert got["attributes"] == value["attributes"]
        assert got["attributes"].note == raw
        assert got["user"] == value["user"]
        assert got["objects"].tolist() == value["objects"].tolist()
        assert (got["class"].module, got["class"].name) == ("collections", "OrderedDict")
        assert got["pair"] == (raw, raw)


def test_bytes_are_given_to_classes_that_were_allowed() -> None:
    for protocol in (3, 4, 5):
        data = pickle.dumps({"h": Holder((bytes(300), [bytes(300)]))}, protocol)
        assert tensorio.load(data, format="pickle", allow=[Holder])["h"].value == (bytes(300), [bytes(300)])
        assert tensorio.load(data, format="pickle", unknown="opaque")["h"].state["value"] == (bytes(300), [bytes(300)])
