"""Plain values of the standard library in pickles: rebuilt as themselves, whoever wrote them, and never more.

Pickles are written by `pickle.dumps`, or by hand where this Python writes them
otherwise; the oracle is `pickle.loads` of the same bytes. Arguments that no
Python writes are given to the functions of `tensorio.machine.calls` directly.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import decimal
import math
import pathlib
import pickle
import subprocess
import sys
import types
import uuid
import zoneinfo
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorio
from hexfile import annotated, name, number, numbers, pickled, text, torch_file
from tensorio import HeaderError, LimitError, Opaque, UnsafePickleError, UnsupportedError
from tensorio.allowlist import ALLOWED
from tensorio.machine.calls import CALLS, STATES, is_key
from tensorio.pickles import Unbuilt

utc = datetime.timezone.utc


def read(data: bytes, **options: Any) -> Any:
    """Load a pickle as the object of a torch file."""
    return tensorio.load(torch_file(data), **options)


def shown(value: Any) -> Any:
    """Types and contents all the way down; paths without the power to touch files."""
    if isinstance(value, pathlib.PurePath):
        return "path", isinstance(value, pathlib.PureWindowsPath), str(value)
    if isinstance(value, defaultdict):
        return defaultdict, value.default_factory, [(shown(k), shown(v)) for k, v in value.items()]
    if isinstance(value, dict):
        return type(value), [(shown(k), shown(v)) for k, v in value.items()]
    if isinstance(value, deque):
        return deque, value.maxlen, [shown(v) for v in value]
    if isinstance(value, list | tuple):
        return type(value), [shown(v) for v in value]
    if isinstance(value, set | frozenset):
        return type(value), sorted(repr(shown(v)) for v in value)
    if isinstance(value, types.SimpleNamespace | argparse.Namespace):
        return type(value), shown(vars(value))
    if isinstance(value, UserDict | UserList):
        return type(value), shown(value.data)
    return type(value), repr(value)


VALUES = {
    "date": datetime.date(2024, 2, 29),
    "date_first_last": [datetime.date.min, datetime.date.max],
    "datetime": datetime.datetime(2024, 12, 31, 23, 59, 58, 999_999),
    "datetime_fold": datetime.datetime(2024, 1, 2, fold=1),
    "datetime_utc": datetime.datetime(1970, 1, 1, tzinfo=utc),
    "datetime_zone": datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=-3), "name")),
    "time": datetime.time(1, 2, 3, 4),
    "time_fold_zone": datetime.time(23, 59, fold=1, tzinfo=utc),
    "timedelta": [datetime.timedelta(1, 2, 3), datetime.timedelta.min, datetime.timedelta.max],
    "timezone": [utc, datetime.timezone(datetime.timedelta(minutes=1)), datetime.timezone.max],
    "decimal": [Decimal(t) for t in ("1.50", "-0", "1E+400", "12345678901234567890.1", ".5", "-1e-999999")],
    "decimal_not_a_number": [Decimal(t) for t in ("NaN", "-NaN12", "sNaN", "Infinity", "-inf")],
    "fraction": [Fraction(1, 3), Fraction(-7), Fraction(10**200, 3)],
    "uuid": [uuid.UUID(int=0), uuid.UUID(int=(1 << 128) - 1), uuid.uuid4()],
    "uuid_is_safe": [uuid.UUID(int=5, is_safe=safe) for safe in uuid.SafeUUID],
    "safe_uuid": list(uuid.SafeUUID),
    "path": [pathlib.PurePosixPath("/a/b.pt"), pathlib.Path("runs") / "1", pathlib.Path()],
    "path_windows": [pathlib.PureWindowsPath("c:\\a\\b"), pathlib.PureWindowsPath("\\\\host\\share\\x")],
    "range": [range(3), range(0), range(10, -10, -3), range(1 << 70)],
    "slice": [slice(3), slice(None), slice(1, None, -2), slice("a", "b")],
    "complex": [1j, complex(math.inf, -0.0)],
    "deque": [deque(), deque([1, [2]]), deque([1, 2, 3], 3), deque(maxlen=0)],
    "defaultdict": [defaultdict(f, {"a": 1}) for f in (None, list, int, float, str, dict, set, tuple, bool)],
    "defaultdict_factories": [defaultdict(f) for f in (OrderedDict, Counter, deque, defaultdict, bytes, frozenset)],
    "defaultdict_nested": defaultdict(dict, {"a": defaultdict(list, {1: [2]})}),
    "ordered_dict": OrderedDict([("b", 1), ("a", OrderedDict())]),
    "counter": Counter("hello"),
    "user_dict": UserDict({"a": {1: 2}}),
    "user_list": UserList([1, [2]]),
    "frozenset": [frozenset(), frozenset([1, "a", (2, None)]), frozenset([frozenset([1])])],
    "set": {1.5, "a", frozenset()},
    "simple_namespace": types.SimpleNamespace(lr=1e-3, inner=types.SimpleNamespace(), name="x"),
    "namespace": argparse.Namespace(lr=0.1, path=pathlib.Path("a"), none=None, **{"dashed-name": [1]}),
    "namespace_empty": argparse.Namespace(),
    "types": [int, float, str, bool, bytes, bytearray, complex, list, tuple, dict, set, frozenset, object],
    "types_of_collections": [Counter, deque, defaultdict],
    "ellipsis": (..., slice(None)),
    "keys": {datetime.date(1, 1, 1): 1, uuid.UUID(int=1): 2, pathlib.PurePath("x"): 3, Decimal("1.5"): 4,
             Fraction(1, 3): 5, frozenset([1]): 6, datetime.timedelta(1): 7, (datetime.time(1), range(3)): 8},
}  # fmt: skip


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_value_reads_like_the_standard_library(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert shown(read(data)) == shown(pickle.loads(data))  # before protocol 4, the fold of a time is not written


@pytest.mark.parametrize("protocol", range(6))
def test_value_that_occurs_twice_is_one_object(protocol: int) -> None:
    one, two = uuid.UUID(int=3), argparse.Namespace(a=[1])
    got = read(pickle.dumps([one, two, (one,), {"a": two}, one], protocol))
    assert got[0] == one
    assert got[0] is got[2][0] is got[4]
    assert got[1] is got[3]["a"]


def test_namespace_that_holds_itself_reads() -> None:
    value = argparse.Namespace(a=1)
    value.me = value
    got = read(pickle.dumps(value, 2))
    assert got.me is got


datetimes = st.datetimes(timezones=st.none() | st.just(utc) | st.timedeltas(
    datetime.timedelta(hours=-23), datetime.timedelta(hours=23)).map(datetime.timezone))  # fmt: skip
random_values = st.recursive(
    datetimes | st.dates() | st.times() | st.timedeltas() | st.decimals() | st.fractions() | st.uuids()
    | st.complex_numbers() | st.builds(range, st.integers(), st.integers(), st.integers(1, 9)) | st.none()
    | st.builds(slice, st.integers() | st.none(), st.integers()),
    lambda inner: st.lists(inner, max_size=3).map(deque) | st.lists(inner, max_size=3)
    | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3).map(lambda d: types.SimpleNamespace(**d))
    | st.dictionaries(st.dates(), inner, max_size=3).map(lambda d: defaultdict(list, d)),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(random_values, st.integers(0, 5))
def test_random_values_read_like_the_standard_library(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert shown(read(data)) == shown(pickle.loads(data))


# ------------------------------------------- as other versions of Python write them


def call(module: str, attribute: str, arguments: bytes, version: int = 2) -> bytes:
    """A pickle of one call with a tuple of arguments."""
    return pickled(name(module, attribute) + b"(" + arguments + b"tR", version)


ELSEWHERE = {
    "python2_datetime": call("datetime", "datetime", annotated('"U" 0a 07 df 0c 1f 17 3b 3a 0f 42 3f')),
    "python2_datetime_ascii": call("datetime", "datetime", annotated('"U" 0a 07 01 02 03 04 05 06 00 00 07')),
    "python2_date": call("datetime", "date", annotated('"U" 04 07 e8 01 02')),
    "python2_time": call("datetime", "time", annotated('"U" 06 01 02 03 00 ff 7f')),
    "python2_xrange": call("__builtin__", "xrange", number(1) + number(9) + number(2)),
    "python2_long": call("__builtin__", "xrange", annotated("8a 01 05 8a 02 ff 00 8a 01 01")),
    "python2_deque": call("collections", "deque", b"](" + number(1) + number(2) + b"e" + number(5)),
    "python2_deque_without_bound": call("collections", "deque", b"](" + number(1) + b"e"),
    "python2_uuid": annotated('"ccopy_reg\\n_reconstructor\\n(cuuid\\nUUID\\nc__builtin__\\nobject\\nNtR"'
                              '"(dS\'int\'\\nL77L\\nsb."'),
    "python2_namespace": annotated('"ccopy_reg\\n_reconstructor\\n(cargparse\\nNamespace\\nc__builtin__\\nobject\\nNtR"'
                                   '"(dS\'lr\'\\nF0.5\\nsb."'),
    "python2_types": annotated('"(c__builtin__\\nlong\\nc__builtin__\\nunicode\\nc__builtin__\\nint\\nt."'),
    "python2_user_dict": annotated('80 02 "cUserDict\\nIterableUserDict\\n)" 81 "}U" 04 "data}sb."'),
    "python3_7_uuid": pickled(name("uuid", "UUID") + b")\x81}(" + text("int") + number(9) + text("is_safe")
                              + name("uuid", "SafeUUID") + annotated("4a ff ff ff ff 85 52") + b"ub"),
    "python3_10_fraction": call("fractions", "Fraction", text("-22/7")),
    "python3_10_fraction_whole": call("fractions", "Fraction", text("3")),
    "newobj_as_a_call": call("copy_reg", "__newobj__", name("argparse", "Namespace")),
    "newobj_ex_as_a_call": call("copyreg", "__newobj_ex__", name("types", "SimpleNamespace") + b")}"),
    "object_in_a_dict": pickled(b"}" + text("a") + name("__builtin__", "dict") + b")Rs"),
}  # fmt: skip


@pytest.mark.parametrize("data", ELSEWHERE.values(), ids=ELSEWHERE.keys())
def test_value_of_another_python_reads_like_the_standard_library(data: bytes) -> None:
    assert shown(read(data)) == shown(pickle.loads(data, encoding="latin-1"))


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8"])
def test_bytes_of_a_date_may_have_been_read_as_text(encoding: str) -> None:
    written = annotated("07 c3 a9 02 03 04 05 00 c2 80")  # valid as UTF-8, too; month with the fold's bit
    got = CALLS["datetime"]((bytes([*written[:2], 0x81, *written[3:]]).decode("latin-1"),), str)
    assert got == datetime.datetime(0x7C3, 1, 2, 3, 4, 5, 0xC280, fold=1)
    assert CALLS["time"]((b"\x01\x02\x03\x00\xc3\xa9".decode(encoding),), str) == datetime.time(1, 2, 3, 0xC3A9)


@pytest.mark.parametrize(("module", "cls", "windows"), [
    ("pathlib", "PosixPath", False), ("pathlib", "WindowsPath", True), ("pathlib", "PureWindowsPath", True),
    ("pathlib._local", "PosixPath", False), ("pathlib._local", "WindowsPath", True),
    ("pathlib._local", "PurePosixPath", False),
])  # fmt: skip
def test_paths_of_every_system_become_pure_ones(module: str, cls: str, windows: bool) -> None:
    got = read(call(module, cls, text("a") + text("b")))
    assert got == (pathlib.PureWindowsPath("a/b") if windows else pathlib.PurePosixPath("a/b"))
    assert not hasattr(got, "open")


def test_named_results_of_torch_become_tuples(tmp_path: Any) -> None:
    import torch

    want = torch.max(torch.arange(6.0).reshape(2, 3), 1)
    torch.save({"a": want}, tmp_path / "a.pt")
    got = tensorio.load(tmp_path / "a.pt")["a"]
    assert type(got) is tuple
    assert [part.tolist() for part in got] == [part.tolist() for part in want]


def test_named_results_of_torch_are_all_known() -> None:
    import torch

    there = {cls.__name__ for cls in torch.return_types.all_return_types}
    assert {n for n in there if not n.startswith("_")} <= {n for m, n in ALLOWED if m == "torch.return_types"}


# -------------------------------------------------------- what stays inert


def test_namespace_of_unknown_things_keeps_them() -> None:
    data = pickled(name("argparse", "Namespace") + b")\x81}" + text("net") + name("made.up", "Net") + b")\x81sb")
    with pytest.raises(UnsafePickleError) as caught:
        read(data)
    assert caught.value.globals == ("made.up.Net",)
    assert read(data, unknown="opaque").net.name == "Net"


@pytest.mark.parametrize("make", [datetime.datetime(2024, 1, 2).replace, datetime.time(1).replace], ids=["dt", "time"])
def test_date_in_a_zone_of_this_system_is_refused_or_inert(make: Any) -> None:
    data = pickle.dumps(make(tzinfo=zoneinfo.ZoneInfo("UTC")), 4)
    with pytest.raises(UnsafePickleError, match="getattr"):
        read(data)
    got = read(data, unknown="opaque")
    assert type(got) is Opaque
    assert got.module == "datetime"
    assert len(got.args[0]) in (6, 10)


def test_defaultdict_with_a_function_as_factory_is_refused_or_inert() -> None:
    data = pickle.dumps(defaultdict(math.sqrt, {"a": [1]}), 2)
    with pytest.raises(UnsafePickleError, match="sqrt"):
        read(data)
    got = read(data, unknown="opaque")
    assert type(got) is Opaque
    assert got.args[0].name == "sqrt"
    assert got.items == [("a", [1])]


def test_defaultdict_with_a_date_as_factory_is_inert() -> None:
    got = read(pickle.dumps(defaultdict(datetime.date), 2))
    assert type(got) is Opaque


def test_slice_of_more_than_plain_values_is_inert() -> None:
    got = read(pickle.dumps(slice([1], None), 2))
    assert type(got) is Opaque
    assert got.args == ([1], None, None)


def test_object_without_contents_is_inert() -> None:
    assert type(read(pickle.dumps(object(), 2))) is Opaque
    assert type(read(pickle.dumps(object(), 0))) is Opaque


@pytest.mark.parametrize("cls", [datetime.datetime, uuid.UUID, pathlib.Path, OrderedDict])
def test_harmless_name_by_itself_is_inert(cls: type) -> None:
    got = read(pickle.dumps([cls], 2))[0]
    assert type(got) is Opaque
    assert (got.module, got.name, got.args) == (cls.__module__, cls.__name__, None)


@pytest.mark.parametrize("data", [b")\x81", b")\x81\x85"], ids=["alone", "in_a_tuple"])
def test_uuid_that_never_gets_its_number_is_refused(data: bytes) -> None:
    with pytest.raises(HeaderError, match="state"):
        read(pickled(name("uuid", "UUID") + data))


@pytest.mark.parametrize("value", [ChainMap({}), iter([1]), NotImplemented], ids=["ChainMap", "iter", "NotImplemented"])
def test_other_things_of_the_standard_library_are_refused(value: Any) -> None:
    with pytest.raises(UnsafePickleError):
        read(pickle.dumps(value, 2))


# ------------------------------------------------------------------ refused


def check(key: object) -> None:
    hash(key)


long = "1" * 4301
WRONG = {
    "date_short": ("date", (b"\x07\xe8\x01",)),
    "date_month_13": ("date", (b"\x07\xe8\x0d\x01",)),
    "date_year_0": ("date", (b"\0\0\x01\x01",)),
    "date_february_30": ("date", (b"\x07\xe8\x02\x1e",)),
    "date_three_ints": ("date", (2024, 1, 2)),
    "date_nothing": ("date", ()),
    "date_text_above_latin_1": ("date", ("\u0101\u0102\u0103\u0104",)),
    "date_long_text": ("date", ("a" * 5,)),
    "datetime_hour_25": ("datetime", (b"\x07\xe8\x01\x01\x19\0\0\0\0\0",)),
    "datetime_microseconds": ("datetime", (b"\x07\xe8\x01\x01\0\0\0\xff\xff\xff",)),
    "datetime_zone_int": ("datetime", (b"\x07\xe8\x01\x01\0\0\0\0\0\0", 5)),
    "datetime_three": ("datetime", (b"\x07\xe8\x01\x01\0\0\0\0\0\0", None, None)),
    "time_second_60": ("time", (b"\0\0\x3c\0\0\0",)),
    "timedelta_float": ("timedelta", (1.5, 0, 0)),
    "timedelta_overflow": ("timedelta", (10**9, 0, 0)),
    "timedelta_far_overflow": ("timedelta", (1 << 2000, 0, 0)),
    "timedelta_two": ("timedelta", (1, 2)),
    "timezone_one_day": ("timezone", (datetime.timedelta(1),)),
    "timezone_name": ("timezone", (datetime.timedelta(0), 5)),
    "timezone_int": ("timezone", (5,)),
    "decimal_int": ("decimal", (5,)),
    "decimal_word": ("decimal", ("five",)),
    "decimal_space": ("decimal", (" 1",)),
    "decimal_underscore": ("decimal", ("1_0",)),
    "decimal_newline": ("decimal", ("1\n",)),
    "decimal_other_digits": ("decimal", ("\u0661",)),
    "decimal_long": ("decimal", (long,)),
    "decimal_exponent": ("decimal", ("10e999999999999999999",)),
    "decimal_exponent_of_19_digits": ("decimal", ("1e1000000000000000000",)),
    "decimal_long_nan": ("decimal", ("nan" + "1" * 4298,)),
    "fraction_by_0": ("fraction", (1, 0)),
    "fraction_text_by_0": ("fraction", ("1/0",)),
    "fraction_float": ("fraction", (0.5, 1)),
    "fraction_decimal_text": ("fraction", ("1e9999999",)),
    "fraction_long": ("fraction", (long,)),
    "fraction_one_int": ("fraction", (1,)),
    "range_step_0": ("range", (0, 1, 0)),
    "range_floats": ("range", (0.0, 1.0, 1.0)),
    "range_two": ("range", (0, 1)),
    "slice_two": ("slice", (0, 1)),
    "int_text": ("int", ("5",)),
    "int_float": ("int", (5.5,)),
    "float_text": ("float", ("1" * 10,)),
    "str_int": ("str", (5,)),
    "str_bytes": ("str", (b"a", "latin-1")),
    "bool_list": ("bool", ([],)),
    "list_int": ("list", (5,)),
    "list_str": ("list", ("abc",)),
    "tuple_dict": ("tuple", ({},)),
    "dict_pairs": ("dict", ([(1, 2)],)),
    "object_arguments": ("object", (1,)),
    "ellipsis": ("ellipsis", ()),
    "path_bytes": ("posix_path", (b"a",)),
    "path_int": ("windows_path", (5,)),
    "path_long": ("posix_path", ("a" * 20_000, "a" * 20_000)),
    "uuid_arguments": ("uuid", ("00000000-0000-0000-0000-000000000000",)),
    "safe_uuid_false": ("safe_uuid", (False,)),
    "safe_uuid_2": ("safe_uuid", (2,)),
    "safe_uuid_nothing": ("safe_uuid", ()),
    "deque_int": ("deque", (5,)),
    "deque_negative": ("deque", ((), -1)),
    "deque_bool": ("deque", ((), True)),
    "deque_bound_of_64_bits": ("deque", ((), 1 << 63)),
    "deque_three": ("deque", ((), 1, 1)),
    "defaultdict_two": ("defaultdict", (None, {})),
    "user_dict_arguments": ("user_dict", ({},)),
    "user_list_arguments": ("user_list", ([],)),
    "simple_namespace_arguments": ("simple_namespace", ({},)),
    "namespace_arguments": ("namespace", (1,)),
    "fields_list": ("fields", ([1], {})),
    "fields_one": ("fields", ((1,),)),
    "reconstructor_two": ("reconstructor", (Opaque("a", "b"), Opaque("a", "b"))),
    "newobj_nothing": ("newobj", ()),
    "newobj_ex_list": ("newobj_ex", (Opaque("a", "b"), [], {})),
    "newobj_ex_two": ("newobj_ex", (Opaque("a", "b"), ())),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "args"), WRONG.values(), ids=WRONG.keys())
def test_arguments_that_no_python_writes_are_refused(kind: str, args: tuple[Any, ...]) -> None:
    with pytest.raises((HeaderError, LimitError)) as caught:
        CALLS[kind](args, check)
    assert len(str(caught.value)) < 500


odd = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.binary(max_size=12)
    | st.lists(st.integers(), max_size=3) | st.tuples(st.integers(), st.text()) | st.just({})
    | st.sampled_from([Opaque("a", "b"), datetime.timedelta(1), utc, Decimal(1), uuid.UUID(int=1), int])
)  # fmt: skip


@pytest.mark.parametrize("kind", sorted(CALLS))
@settings(max_examples=60, deadline=None)
@given(args=st.lists(odd, max_size=4).map(tuple))
def test_any_arguments_end_well(kind: str, args: tuple[Any, ...]) -> None:
    def plain(key: object) -> None:
        if not (isinstance(key, int | str | float | bytes | None) or is_key(key)):
            raise HeaderError("a key")

    with contextlib.suppress(HeaderError, LimitError, UnsupportedError):
        CALLS[kind](args, plain)


def test_numbers_are_no_sizes() -> None:
    """None of these allocates what it names, or counts up to it."""
    assert len(CALLS["deque"](((), (1 << 63) - 1), check)) == 0
    assert CALLS["range"]((0, 1 << 2000, 1), check)[-1] == (1 << 2000) - 1
    assert CALLS["decimal"](("1e999999999999",), check) == Decimal("1e999999999999")


def test_a_decimal_is_read_the_same_in_any_context() -> None:
    with decimal.localcontext() as context:
        context.prec = 1
        context.traps[decimal.InvalidOperation] = False
        assert str(CALLS["decimal"](("1.2345",), check)) == "1.2345"
        with pytest.raises(HeaderError):
            CALLS["decimal"](("10e999999999999999999",), check)


STATES_WRONG = {
    "uuid_negative": ("uuid", {"int": -1}),
    "uuid_of_129_bits": ("uuid", {"int": 1 << 128}),
    "uuid_text": ("uuid", {"int": "5"}),
    "uuid_bool": ("uuid", {"int": True}),
    "uuid_hex": ("uuid", {"hex": "0" * 32}),
    "uuid_more": ("uuid", {"int": 1, "bytes": b""}),
    "uuid_is_safe": ("uuid", {"int": 1, "is_safe": 7}),
    "uuid_is_safe_list": ("uuid", {"int": 1, "is_safe": []}),
    "uuid_int": ("uuid", 1),
    "namespace_list": ("namespace", [("a", 1)]),
    "namespace_int_name": ("namespace", {1: 2}),
    "namespace_class": ("namespace", {"__class__": 1}),
    "namespace_dict": ("namespace", {"__dict__": {}}),
    "namespace_dunder": ("namespace", {"__made_up__": 1}),
    "namespace_method": ("namespace", {"_get_kwargs": 1}),
    "namespace_slots": ("namespace", (None, {"a": 1})),
    "simple_namespace_dunder": ("simple_namespace", {"__reduce__": 1}),
    "simple_namespace_none": ("simple_namespace", None),
    "user_dict_list": ("user_dict", {"data": []}),
    "user_dict_more": ("user_dict", {"data": {}, "get": 1}),
    "user_list_tuple": ("user_list", {"data": ()}),
    "user_list_nothing": ("user_list", {}),
}


@pytest.mark.parametrize(("kind", "state"), STATES_WRONG.values(), ids=STATES_WRONG.keys())
def test_states_that_no_python_writes_are_refused(kind: str, state: Any) -> None:
    made = CALLS[kind]((), check)
    with pytest.raises(HeaderError):
        STATES[made.kind if type(made) is Unbuilt else type(made)](made, state, check)


def test_state_of_a_uuid_gives_another_object() -> None:
    made = CALLS["uuid"]((), check)
    assert type(made) is Unbuilt
    assert STATES["uuid"](made, {"int": 5}, check) == uuid.UUID(int=5)


@pytest.mark.parametrize("value", [Decimal("sNaN"), Opaque("a", "b"), [], argparse.Namespace(), object()], ids=type)
def test_values_that_have_no_cheap_hash_are_no_keys(value: Any) -> None:
    assert not is_key(value)


def test_a_chain_of_calls_for_other_classes_is_refused() -> None:
    """Each would give up one of the arguments, and copy the others."""
    again = name("copyreg", "__newobj__") + b"\x94"
    data = b"\x80\x04" + again + b"(" + b"h\x00" * 1000 + b"tR."
    with pytest.raises(HeaderError, match="copyreg"):
        read(data)


@pytest.mark.plain_build
def test_importing_tensorio_loads_none_of_their_modules() -> None:
    code = "import sys, tensorio; print([m for m in sys.argv[1:] if m in sys.modules])"
    lazy = ["datetime", "decimal", "fractions", "uuid", "argparse", "zoneinfo", "pathlib"]
    done = subprocess.run([sys.executable, "-S", "-c", code, *lazy], capture_output=True, text=True, check=True,
                          env={"PYTHONPATH": ":".join(p for p in sys.path if p)})  # fmt: skip
    assert done.stdout == "[]\n"


def test_list_of_a_python2_set_is_checked() -> None:
    got = read(call("__builtin__", "set", b"](" + numbers([1, 2]) + b"e"))
    assert got == {(1, 2)}
