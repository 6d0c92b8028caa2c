"""Classes that the caller allowed: what is made, what of them runs, and what never does.

Every class below that could tell of a call does so in `ran`. The oracle is the
object that the test pickled.
"""

from __future__ import annotations

import collections
import contextvars
import copyreg
import dataclasses
import datetime
import enum
import functools
import io
import operator
import os
import pickle
import subprocess
import threading
import types
import typing
import zoneinfo
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio
from hexfile import name, number, numbers, pickled, text, torch_file
from tensorio import HeaderError, LimitError, Opaque, UnsafePickleError, allowing

ran: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    ran.clear()


def read(data: bytes, **options: Any) -> Any:
    """Load a pickle as the object of a torch file."""
    return tensorio.load(torch_file(data), **options)


class Noisy:
    """A plain class whose every door rings."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Noisy:
        ran.append("__new__")
        return object.__new__(cls)

    def __init__(self, *args: Any) -> None:
        ran.append("__init__")
        self.a = 1

    def __setattr__(self, key: str, value: Any) -> None:
        ran.append("__setattr__")
        object.__setattr__(self, key, value)

    def __getattribute__(self, key: str) -> Any:
        ran.append("__getattribute__")
        return object.__getattribute__(self, key)

    def __eq__(self, other: object) -> bool:
        ran.append("__eq__")
        return True

    def __hash__(self) -> int:
        ran.append("__hash__")
        return 0

    @property
    def guarded(self) -> int:
        return 1

    @guarded.setter
    def guarded(self, value: int) -> None:
        ran.append("setter")


@dataclasses.dataclass
class Config:
    lr: float
    layers: list[int]

    def __post_init__(self) -> None:
        ran.append("__post_init__")


@dataclasses.dataclass(frozen=True)
class Frozen:
    lr: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    lr: float
    name: str = "x"


class Slots:
    __slots__ = ("__mangled", "a", "b")

    def __init__(self) -> None:
        self.a = 1
        self.__mangled = 3


class SlotsAndDict(Slots):
    def __init__(self) -> None:
        super().__init__()
        self.c = 2


class Color(enum.Enum):
    RED = 1
    PAIR = (1, "a")
    LISTED = [1, [2]]
    TEXT = "text"
    NOTHING = None

    @classmethod
    def _missing_(cls, value: object) -> Any:
        ran.append("_missing_")
        return cls.RED


class Number(enum.IntEnum):
    ONE = 1


class Bits(enum.Flag):
    A = 1
    B = 2


class IntBits(enum.IntFlag):
    A = 1
    B = 2


class OwnBits(enum.Flag):
    A = 1
    B = 2

    @classmethod
    def _missing_(cls, value: object) -> Any:
        ran.append("_missing_")
        return cls.A


class Noted(enum.Enum):
    A = (1, "one")
    B = (2, "two")

    def __new__(cls, value: int, note: str) -> Noted:
        made = object.__new__(cls)
        made._value_ = value
        made.note = note  # type: ignore[attr-defined]
        return made


Point = collections.namedtuple("Point", "x y")


class Typed(typing.NamedTuple):
    a: int
    b: str = "b"


class ListOf(list[Any]):
    def append(self, item: Any) -> None:
        ran.append("append")

    def extend(self, items: Any) -> None:
        ran.append("extend")

    def __init__(self, *args: Any) -> None:
        ran.append("__init__")
        list.__init__(self, *args)


class DictOf(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        ran.append("__setitem__")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        ran.append("__init__")
        dict.__init__(self, *args, **kwargs)


class OrderedOf(collections.OrderedDict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        ran.append("__setitem__")
        super().__setitem__(key, value)


class DefaultOf(collections.defaultdict[Any, Any]):
    def __init__(self, *args: Any) -> None:
        ran.append("__init__")
        super().__init__(*args)


class CounterOf(collections.Counter[Any]):
    def __init__(self, *args: Any) -> None:
        ran.append("__init__")
        super().__init__(*args)


class DequeOf(collections.deque[Any]):
    def __init__(self, *args: Any) -> None:
        ran.append("__init__")
        super().__init__(*args)


class TextOf(str):
    def __new__(cls, value: str = "") -> TextOf:
        ran.append("__new__")
        return str.__new__(cls, value)


class IntOf(int):
    pass


class FloatOf(float):
    pass


class BytesOf(bytes):
    pass


class ComplexOf(complex):
    pass


class TupleOf(tuple[Any, ...]):
    pass


class SetOf(set[Any]):
    pass


class FrozenSetOf(frozenset[Any]):
    pass


class ByteArrayOf(bytearray):
    pass


class Fault(ValueError):
    def __init__(self, *args: Any) -> None:
        ran.append("__init__")
        super().__init__(*args)


class WithSetState:
    def __init__(self, a: int) -> None:
        self.a = a

    def __getstate__(self) -> Any:
        return [self.a]

    def __setstate__(self, state: Any) -> None:
        ran.append("__setstate__")
        self.a = state[0]


class WithNewArgs:
    def __new__(cls, a: int, *, b: int) -> WithNewArgs:
        ran.append("__new__")
        made = object.__new__(cls)
        made.a, made.b = a, b  # type: ignore[attr-defined]
        return made

    def __getnewargs_ex__(self) -> Any:
        return (self.a,), {"b": self.b}  # type: ignore[attr-defined]


class WithReduce:
    def __init__(self, a: int) -> None:
        ran.append("__init__")
        self.a = a

    def __reduce__(self) -> Any:
        return WithReduce, (self.a,)


class Registered:
    def __init__(self, a: int) -> None:
        ran.append("__init__")
        self.a = a


class Raises:
    def __setstate__(self, state: Any) -> None:
        raise KeyError("text of the class " + "x" * 500)


class Outer:
    class Inner:
        def __init__(self) -> None:
            self.a = 1

        class Innermost(enum.Enum):
            A = 1

    class Mode(enum.Enum):
        FAST = "fast"


def shown(value: Any) -> Any:
    """Type, contents and attributes, read past the classes' own doors."""
    cls = type(value)
    base = next(c for c in (dict, list, tuple, set, frozenset, collections.deque, object) if issubclass(cls, c))
    if isinstance(value, enum.Enum) or (cls.__module__ == "builtins" and base is object):
        return cls, value
    if base is dict:
        inner: Any = [(shown(k), shown(v)) for k, v in dict.items(value)]
    elif base is object:
        plain = next((c for c in (str, int, float, bytes, complex, bytearray) if issubclass(cls, c)), None)
        inner = plain(value) if plain else getattr(value, "args", None)
    else:
        inner = [shown(v) for v in base.__iter__(value)]  # type: ignore[attr-defined]
    held = vars(value) if hasattr(value, "__dict__") else {}
    names = copyreg._slotnames(cls)  # type: ignore[attr-defined]
    slots = [(n, object.__getattribute__(value, n)) for n in names if hasattr(value, n)]
    return cls, inner, [(n, shown(v)) for n, v in held.items()], slots


def with_attributes(value: Any, **more: Any) -> Any:
    vars(value).update(more)
    return value


MADE = {
    "dataclass": lambda: Config(0.5, [1, 2]),
    "dataclass_frozen": lambda: Frozen(0.5),
    "dict_and_slots": SlotsAndDict,
    "enum": lambda: [Color.RED, Color.PAIR, Color.TEXT, Color.NOTHING, Number.ONE, Noted.B],
    "enum_of_a_list": lambda: Color.LISTED,
    "flags": lambda: [Bits.A, Bits.A | Bits.B, Bits(0), IntBits.A | IntBits.B],
    "namedtuple": lambda: [Point(1, [2]), Typed(1)],
    "list": lambda: with_attributes(ListOf([1, 2]), note="x"),
    "dict": lambda: with_attributes(dict_of(a=1, b=[2]), note="x"),
    "ordered_dict": lambda: with_attributes(OrderedOf(a=1, b=2), note="x"),
    "defaultdict": lambda: DefaultOf(list, {"a": [1]}),
    "counter": lambda: CounterOf("hello"),
    "deque": lambda: [DequeOf([1, 2]), DequeOf([1, 2], 2)],
    "text": lambda: TextOf("abc"),
    "numbers": lambda: [IntOf(5), FloatOf(0.5), ComplexOf(1j)],
    "bytes": lambda: [BytesOf(b"abc"), ByteArrayOf(b"abc"), ByteArrayOf()],
    "tuple": lambda: with_attributes(TupleOf((1, 2)), note="x"),
    "sets": lambda: [SetOf([1]), FrozenSetOf([1, "a"])],
    "exception": lambda: with_attributes(Fault("a", 1), note="x"),
    "nested_class": Outer.Inner,
    "nested_enum": lambda: [Outer.Mode.FAST, Outer.Inner.Innermost.A],
    "set_state": lambda: WithSetState(5),
    "inside_each_other": lambda: Config(0.5, [Config(1.0, []), Point(Color.RED, TextOf("a"))]),  # type: ignore[list-item]
    "not_a_constructor_at_all": lambda: functools.reduce(lambda inner, _: Config(0.0, [inner]), range(50), []),  # type: ignore[list-item, arg-type, return-value]
}  # fmt: skip


def dict_of(**items: Any) -> DictOf:
    made = DictOf()
    dict.update(made, items)
    return made


# What runs of a class whose objects say that it is to.
RUNS = {"set_state": ["__setstate__"]}
CLASSES = (
    Noisy, Config, Frozen, FrozenSlots, Slots, SlotsAndDict, Color, Number, Bits, IntBits, OwnBits, Noted, Point,
    Typed, ListOf, DictOf, OrderedOf, DefaultOf, CounterOf, DequeOf, TextOf, IntOf, FloatOf, BytesOf, ComplexOf,
    TupleOf, SetOf, FrozenSetOf, ByteArrayOf, Fault, WithSetState, WithNewArgs, WithReduce, Registered, Raises,
    Outer.Inner, Outer.Mode, Outer.Inner.Innermost,
)  # fmt: skip


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("case", MADE)
def test_object_of_an_allowed_class_reads_as_it_was(case: str, protocol: int) -> None:
    value = MADE[case]()
    if protocol < 2 and case == "dict_and_slots":
        pytest.skip("slots need protocol 2")
    data = pickle.dumps(value, protocol)
    want = shown(value)
    ran.clear()
    got = read(data, allow=CLASSES)
    assert ran == RUNS.get(case, [])
    assert shown(got) == want


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("value", [Slots(), FrozenSlots(0.5)], ids=["Slots", "FrozenSlots"])
def test_slots_are_filled(value: Any, protocol: int) -> None:
    got = read(pickle.dumps(value, protocol), allow=CLASSES)
    assert shown(got) == shown(value)


@pytest.mark.parametrize("protocol", range(6))
def test_no_door_of_a_plain_class_rings(protocol: int) -> None:
    value = Noisy()
    data = pickle.dumps([value, value], protocol)
    ran.clear()
    got = read(data, allow=[Noisy])
    assert ran == []
    assert type(got[0]) is Noisy
    assert got[0] is got[1]
    assert vars(got[0]) == {"a": 1}


def test_own_flags_are_never_combined_by_the_class() -> None:
    with pytest.raises(HeaderError, match="no member"):
        read(pickle.dumps(Bits.A | Bits.B, 2).replace(b"\nBits\n", b"\nOwnBits\n"), allow=CLASSES)
    assert ran == []


def test_missing_member_is_refused_by_value() -> None:
    with pytest.raises(HeaderError, match="Color' in a pickle: no member has the value '77'"):
        read(pickled(name(__name__, "Color") + number(77) + b"\x85R"), allow=CLASSES)
    assert ran == []


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_class_that_asks_for_arguments_gets_them(protocol: int) -> None:
    data = pickle.dumps(WithNewArgs(1, b=2), protocol)
    if protocol < 4:  # functools.partial(getattr(WithNewArgs, "__new__"), ...), which stays refused
        with pytest.raises(UnsafePickleError, match="getattr"):
            read(data, allow=CLASSES)
        return
    ran.clear()
    assert vars(read(data, allow=CLASSES)) == {"a": 1, "b": 2}
    assert ran == ["__new__"]


def test_class_that_asks_to_be_called_is_called() -> None:
    data = pickle.dumps(WithReduce(5), 2)
    ran.clear()
    assert read(data, allow=CLASSES).a == 5
    assert ran == ["__init__"]


def test_class_that_was_registered_to_be_called_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickled(name(__name__, "Registered") + number(5) + b"\x85R")
    with pytest.raises(HeaderError, match="no __reduce__"):
        read(data, allow=CLASSES)
    assert ran == []
    monkeypatch.setitem(copyreg.dispatch_table, Registered, lambda obj: (Registered, (obj.a,)))
    assert read(data, allow=CLASSES).a == 5
    assert ran == ["__init__"]


@pytest.mark.parametrize("cls", [Noisy, Config, Slots, WithSetState, Outer.Inner, TextOf, IntOf, TupleOf, Point],
                         ids=lambda cls: cls.__name__)  # fmt: skip
def test_class_that_does_not_ask_is_never_called(cls: type) -> None:
    with pytest.raises(HeaderError, match="no __reduce__"):
        allowing.call(cls, (5,), hash)
    assert ran == []


def test_error_of_the_class_names_it() -> None:
    with pytest.raises(HeaderError, match=r"Raises'.*__setstate__ raised KeyError.*text of the class") as caught:
        read(pickled(name(__name__, "Raises") + b")\x81" + number(5) + b"b"), allow=[Raises])
    assert isinstance(caught.value.__cause__, KeyError)
    assert len(str(caught.value)) < 500
    assert caught.value.offset is not None


ODD = {
    "arguments_of_a_plain_class": name(__name__, "Config") + number(5) + b"\x85\x81",
    "arguments_by_name": name(__name__, "Config") + b")}" + text("lr") + number(5) + b"s\x92",
    "text_of_an_int": name(__name__, "TextOf") + number(5) + b"\x85\x81",
    "int_of_a_text": name(__name__, "IntOf") + text("1" * 100) + b"\x85\x81",
    "bytes_of_a_size": name(__name__, "BytesOf") + number(1 << 30) + b"\x85\x81",
    "bytearray_of_a_size": name(__name__, "ByteArrayOf") + number(1 << 30) + b"\x85R",
    "tuple_of_an_int": name(__name__, "TupleOf") + number(5) + b"\x85\x81",
    "list_of_a_list": name(__name__, "ListOf") + b"]\x85\x81",
    "too_few_fields": name(__name__, "Point") + number(5) + b"\x85\x81",
    "too_many_fields": name(__name__, "Point") + numbers([1, 2, 3]) + b"\x81",
    "set_of_lists": name(__name__, "SetOf") + b"](]e\x85R",
    "set_of_a_number": name(__name__, "SetOf") + number(1 << 30) + b"\x85R",
    "counter_of_a_text": name(__name__, "CounterOf") + text("abc") + b"\x85R",
    "deque_of_a_negative": name(__name__, "DequeOf") + b")\x4a\xff\xff\xff\xff\x86R",
    "defaultdict_of_a_number": name(__name__, "DefaultOf") + number(5) + b"\x85R",
    "enum_without_a_value": name(__name__, "Color") + b")R",
    "enum_made_new": name(__name__, "Color") + b")\x81",
    "enum_of_an_object": name(__name__, "Color") + name(__name__, "Config") + b")\x81\x85R",
    "enum_with_a_state": name(__name__, "Color") + number(1) + b"\x85R}" + text("_value_") + number(2) + b"sb",
    "class_with_a_state": name(__name__, "Config") + b"}" + text("lr") + number(2) + b"sb",
    "flags_of_many_bits": name(__name__, "IntBits") + number(1 << 70) + b"\x85R",
    "state_int": name(__name__, "Config") + b")\x81" + number(5) + b"b",
    "state_of_int_names": name(__name__, "Config") + b")\x81}" + number(5) + number(5) + b"sb",
    "state_of_three": name(__name__, "Config") + b")\x81NNN\x87b",
    "slot_that_is_a_property": name(__name__, "Noisy") + b")\x81N}" + text("guarded") + number(5) + b"s\x86b",
    "slot_that_is_a_method": name(__name__, "Slots") + b")\x81N}" + text("__init__") + number(5) + b"s\x86b",
    "slot_that_is_not_there": name(__name__, "Slots") + b")\x81N}" + text("z") + number(5) + b"s\x86b",
    "slot_class": name(__name__, "Slots") + b")\x81N}" + text("__class__") + number(5) + b"s\x86b",
    "attributes_of_a_class_of_slots": name(__name__, "Slots") + b")\x81}" + text("z") + number(5) + b"sb",
    "items_in_a_plain_object": name(__name__, "Config") + b")\x81" + number(1) + number(5) + b"s",
    "append_to_a_dict": name(__name__, "DictOf") + b")\x81" + number(1) + b"a",
    "key_that_is_an_object": name(__name__, "DictOf") + b")\x81" + name(__name__, "Noisy") + b")\x81Ns",
    "reconstructed_with_another_base": name("copyreg", "_reconstructor") + name(__name__, "DictOf")
    + name("builtins", "list") + b"]\x87R",
    "reconstructed_of_another_type": name("copyreg", "_reconstructor") + name(__name__, "TextOf")
    + name("builtins", "str") + number(5) + b"\x87R",
    "reconstructed_with_an_unknown_base": name("copyreg", "_reconstructor") + name(__name__, "DictOf")
    + name("datetime", "date") + b"}\x87R",
    "reconstructed_enum": name("copyreg", "_reconstructor") + name(__name__, "Number") + name("builtins", "int")
    + number(1) + b"\x87R",
}  # fmt: skip


@pytest.mark.parametrize("body", ODD.values(), ids=ODD.keys())
def test_pickle_that_no_object_of_the_class_has_is_refused(body: bytes) -> None:
    with pytest.raises((HeaderError, LimitError)):
        read(pickled(body), allow=CLASSES)
    assert ran == []
    assert Color.RED.value == 1
    assert not hasattr(Config, "lr")


# ---------------------------------------------------------------- what is allowed


@pytest.mark.parametrize("what", [os.system, len, lambda: 1, "a.B", functools.partial(int), types, list[int], 5],
                         ids=lambda what: type(what).__name__)  # fmt: skip
def test_what_is_no_class_is_a_type_error(what: Any) -> None:
    with pytest.raises(TypeError, match="allow= takes classes"):
        tensorio.open(b"", allow=[what])
    with pytest.raises(TypeError), tensorio.allow(what):
        pass


@pytest.mark.parametrize("cls", [
    subprocess.Popen, io.FileIO, types.FunctionType, types.CodeType, functools.partial, operator.attrgetter, map,
    property, threading.Thread, pickle.Unpickler, contextvars.Context, enum.EnumMeta, Exception,
], ids=lambda cls: cls.__name__)  # fmt: skip
def test_classes_that_do_more_than_hold_data_are_refused(cls: type) -> None:
    with pytest.raises(ValueError, match=f"can't take {cls.__module__}.{cls.__qualname__}"):
        tensorio.load(b"", allow=[cls])


def test_classes_that_make_classes_are_refused() -> None:
    with pytest.raises(ValueError, match="classes"):
        tensorio.load(b"", allow=[type("Meta", (type,), {})])


def test_plain_types_may_be_allowed_and_stay_what_they_are() -> None:
    assert allowing.table([dict, datetime.datetime, Path, collections.OrderedDict, np.ndarray]) == {}


def test_names_are_exact() -> None:
    assert allowing.table([Config]) == {(__name__, "Config"): Config}
    for module, attribute in [(__name__, "Config.__init__"), (__name__, "config"), ("other", "Config")]:
        with pytest.raises(UnsafePickleError) as caught:
            read(pickled(name(module, attribute) + b")\x81"), allow=[Config])
        assert caught.value.globals == (f"{module}.{attribute}",)


def test_later_class_of_the_same_name_counts() -> None:
    again = dataclasses.make_dataclass("Config", ["lr"])
    again.__module__ = __name__
    assert allowing.table([Config, again]) == {(__name__, "Config"): again}


def test_functions_of_an_allowed_class_s_module_stay_refused() -> None:
    with pytest.raises(UnsafePickleError, match="dict_of"):
        read(pickled(name(__name__, "dict_of") + b")R"), allow=CLASSES)
    assert ran == []


@pytest.mark.parametrize(("owner", "attribute"), [
    (name(__name__, "Config"), "__init__"), (name(__name__, "Outer.Inner"), "__class__"),
    (name(__name__, "Color"), "_missing_"), (name(__name__, "Outer"), "__dict__"), (b"]", "append"),
    (text("a"), "format"), (name("builtins", "dict"), "fromkeys"), (name("os", ""), "system"),
])  # fmt: skip
@pytest.mark.parametrize("unknown", ["error", "opaque"])
def test_getattr_leads_to_allowed_classes_only(owner: bytes, attribute: str, unknown: str) -> None:
    data = pickled(name("builtins", "getattr") + owner + text(attribute) + b"\x86R")
    if unknown == "error":
        with pytest.raises(UnsafePickleError):
            read(data, allow=CLASSES)
    else:
        got = read(data, allow=CLASSES, unknown="opaque")
        assert type(got) is Opaque
        assert (got.name, got.args[1]) == ("getattr", attribute)


def test_getattr_is_refused_without_a_class_that_needs_it() -> None:
    with pytest.raises(UnsafePickleError, match="getattr"):
        read(pickle.dumps(Outer.Mode.FAST, 2), allow=[Config])


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("unknown", ["error", "opaque"])
def test_outer_class_of_an_allowed_one_is_not_allowed(protocol: int, unknown: str) -> None:
    data = pickle.dumps([Outer(), Outer.Mode.FAST], protocol)
    if unknown == "error":
        with pytest.raises(UnsafePickleError, match="Outer"):
            read(data, allow=[Outer.Mode])
    else:
        outer, mode = read(data, allow=[Outer.Mode], unknown="opaque")
        assert type(outer) is Opaque
        assert mode is Outer.Mode.FAST


def test_time_zones_of_this_system_can_be_allowed() -> None:
    value = datetime.datetime(2024, 7, 1, tzinfo=zoneinfo.ZoneInfo("UTC"))
    for protocol in range(6):
        got = read(pickle.dumps(value, protocol), allow=[zoneinfo.ZoneInfo])
        assert got == value
        assert got.tzinfo is value.tzinfo


def test_time_zone_that_is_a_path_is_refused() -> None:
    data = name("builtins", "getattr") + name("zoneinfo", "ZoneInfo") + text("_unpickle") + b"\x86R"
    with pytest.raises(HeaderError, match="ZoneInfo"):
        read(pickled(data + text("../../etc/passwd") + b"\x88\x86R"), allow=[zoneinfo.ZoneInfo])


# ------------------------------------------------------------------- the door


def test_allow_holds_within_its_block() -> None:
    data = pickle.dumps([Config(1.0, []), Point(1, 2)], 2)
    with tensorio.allow(Config):
        with tensorio.allow(Point):
            assert read(data)[1] == Point(1, 2)
        with pytest.raises(UnsafePickleError, match="Point"):
            read(data)
        assert read(data, allow=[Point])[0].lr == 1.0
    with pytest.raises(UnsafePickleError, match="Config"):
        read(data)


def test_allow_ends_with_an_error_in_its_block() -> None:
    with pytest.raises(KeyError), tensorio.allow(Config):
        raise KeyError
    assert allowing.current() == ()


def test_allow_of_one_thread_is_not_that_of_another() -> None:
    seen: list[tuple[type, ...]] = []
    with tensorio.allow(Config):
        thread = threading.Thread(target=lambda: seen.append(allowing.current()))
        thread.start()
        thread.join()
    assert seen == [()]


def torch_object(value: Any, tmp_path: Path) -> Path:
    import torch

    path = tmp_path / "a.pt"
    torch.save(value, path)
    return path


def test_open_keeps_what_was_allowed(tmp_path: Path) -> None:
    import torch

    path = torch_object({"w": torch.arange(3.0), "config": Config(1.0, [])}, tmp_path)
    with tensorio.allow(Config), tensorio.open(path) as checkpoint:
        pass
    with tensorio.allow(Config):
        checkpoint = tensorio.open(path)
    with checkpoint:
        assert checkpoint.tree()["config"] == Config(1.0, [])
        again = pickle.loads(pickle.dumps(checkpoint))
    with again:
        assert again.tree()["config"] == Config(1.0, [])
        assert again["w"].tolist() == [0, 1, 2]


def test_tensors_inside_objects_are_arrays(tmp_path: Path) -> None:
    import torch

    path = torch_object(Point(torch.arange(3.0), Config(0.0, [torch.ones(1)])), tmp_path)  # type: ignore[list-item]
    got = tensorio.load(path, allow=[Point, Config])
    assert got.x.tolist() == [0, 1, 2]
    assert got.y.layers[0].tolist() == [1]


def test_convert_takes_allowed_classes(tmp_path: Path) -> None:
    import torch

    path = torch_object({"w": torch.arange(3.0), "config": Config(1.0, [])}, tmp_path)
    dropped = tensorio.convert(path, tmp_path / "a.safetensors", allow=[Config])
    assert dropped == ["config.lr"]
    assert tensorio.load(tmp_path / "a.safetensors")["w"].tolist() == [0, 1, 2]
