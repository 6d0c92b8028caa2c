"""Errors are one short line, say where, survive pickling, and can't be used to paint a terminal."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorio
from tensorio.errors import TensorIOError, error_context, escaped

ALL = [tensorio.TensorIOError, tensorio.FormatError, tensorio.UnknownFormatError, tensorio.TruncatedError,
       tensorio.HeaderError, tensorio.ChecksumError, tensorio.LimitError, tensorio.UnsupportedError,
       tensorio.UnsafePickleError, tensorio.TensorNotFoundError, tensorio.TensorMismatchError]  # fmt: skip

each = pytest.mark.parametrize("kind", ALL, ids=lambda k: k.__name__)
anything = st.text() | st.text(st.characters(categories=["Cc", "Cf", "Zl", "Zp", "Cs"]))


@each
def test_error_says_message_then_place(kind: Any) -> None:
    error = kind("expected 3, found 4", path="m.pt", record="archive/data/0", offset=17)
    assert str(error) == "expected 3, found 4 (file 'm.pt', record 'archive/data/0', byte offset 17)"
    assert (error.message, error.path, error.record, error.offset) == (
        "expected 3, found 4",
        "m.pt",
        "archive/data/0",
        17,
    )


@each
def test_error_without_a_place_is_its_message(kind: Any) -> None:
    assert str(kind("short")) == "short"
    assert str(kind("at the start", offset=0)) == "at the start (byte offset 0)"


@each
@settings(max_examples=60, deadline=None)
@given(message=st.text(max_size=2000), path=anything, record=anything, offset=st.integers(0, (1 << 64) - 1))
def test_error_is_one_printable_line_of_500_characters(
    kind: Any, message: str, path: str, record: str, offset: int
) -> None:
    error = kind(message.encode("unicode_escape").decode(), path=path * 300, record=record * 300, offset=offset)
    assert len(str(error)) <= 500
    assert str(error).isascii()
    assert str(error).isprintable()
    assert f"byte offset {offset}" in str(error)


@each
def test_error_survives_pickling_and_copying(kind: Any) -> None:
    error = kind("what", path="p", record="r", offset=3)
    if kind is tensorio.ChecksumError:
        error.expected, error.actual = 5, 6
    if kind is tensorio.UnsafePickleError:
        error.globals = ("a.b",)
    error.note = "of the caller's own"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is kind
        assert str(again) == str(error)
        assert vars(again) == vars(error)
    assert str(copy.copy(error)) == str(copy.deepcopy(error)) == str(error)


def test_error_of_a_users_subclass_survives_pickling() -> None:
    error = Mine("what", 3)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is Mine
    assert again.extra == 3
    assert str(again) == "what"


class Mine(tensorio.FormatError):
    """With a constructor that the base class does not know."""

    def __init__(self, message: str, extra: int) -> None:
        super().__init__(message)
        self.extra = extra


def test_checksum_error_carries_both_values() -> None:
    error = tensorio.ChecksumError("differs", expected=1, actual=2, record="r", offset=9)
    assert (error.expected, error.actual, error.record, error.offset) == (1, 2, "r", 9)


def test_not_found_error_is_no_repr_of_its_message() -> None:
    """KeyError shows the repr of its argument; this one shows the line."""
    assert str(tensorio.TensorNotFoundError("no tensor named 'x'")) == "no tensor named 'x'"


def test_not_found_error_suggests_near_names() -> None:
    names = [f"layers.{i}.weight" for i in range(100)]
    error = tensorio.TensorNotFoundError.among("layers.3.weights", names)
    assert "'layers.3.weight'" in str(error)
    assert "near" not in str(tensorio.TensorNotFoundError.among("zzz", names))


@pytest.mark.parametrize("key", [3, None, ("a",), "\x1b[31m" * 100, "x" * 10_000])
def test_not_found_error_takes_any_key(key: object) -> None:
    error = tensorio.TensorNotFoundError.among(key, ["a", "\x1b[31m" * 99])
    assert len(str(error)) <= 500
    assert str(error).isprintable()


# ---------------------------------------------------------------------- context


def test_context_adds_what_is_not_known() -> None:
    with pytest.raises(TensorIOError) as caught, error_context(path="outer"), error_context(record="r"):
        raise tensorio.HeaderError("x", offset=5)
    assert (caught.value.path, caught.value.record, caught.value.offset) == ("outer", "r", 5)


def test_context_keeps_what_is_known_already() -> None:
    with (
        pytest.raises(TensorIOError) as caught,
        error_context(path="outer", record="outer"),
        error_context(path="inner"),
    ):
        raise tensorio.HeaderError("x", record="own")
    assert (caught.value.path, caught.value.record) == ("inner", "own")


@pytest.mark.parametrize(
    "error", [OSError(2, "no", "f"), MemoryError(), KeyboardInterrupt(), ValueError("x")], ids=repr
)
def test_context_lets_others_pass_untouched(error: BaseException) -> None:
    before = vars(error).copy()
    with pytest.raises(type(error)) as caught, error_context(path="p", record="r"):
        raise error
    assert caught.value is error
    assert vars(error) == before


# ---------------------------------------------------------------------- escaping


@given(anything)
def test_escaped_text_is_quoted_ascii_of_80_characters(text: str) -> None:
    shown = escaped(text * 7)
    assert shown.isascii()
    assert shown.isprintable()
    assert shown[0] == shown[-1] == "'"
    assert len(shown) <= 80 + 2 + 3


@given(st.binary())
def test_escaped_bytes_are_quoted_ascii(raw: bytes) -> None:
    for value in (raw, bytearray(raw), memoryview(raw)):
        assert escaped(value).isascii()
        assert escaped(value).isprintable()


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters="\\"), max_size=80))
def test_escaped_plain_text_is_itself(text: str) -> None:
    assert escaped(text) == f"'{text}'"


def test_escaped_long_text_costs_its_beginning_only() -> None:
    assert escaped("\u20ac" * 50_000_000) == "'" + "\\u20ac" * 13 + "\\u...'"
