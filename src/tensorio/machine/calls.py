"""What a pickle's harmless names stand for: functions of our own, each of which checks all of its arguments.

Called by the compiled pickle machine with arguments that come from the file.
`check` is its rule for what may be hashed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from tensorio.errors import HeaderError
from tensorio.machine import stdlib
from tensorio.machine.scalars import is_key
from tensorio.machine.script_calls import SCRIPT_CALLS
from tensorio.machine.stdlib import STATES, TYPES, Redirect
from tensorio.values import Device, Size

__all__ = ["CALLS", "DICTS", "LISTS", "STATES", "TYPES", "Redirect", "is_key"]

Args = tuple[Any, ...]
Check = Callable[[object], None]


def ordered_dict(args: Args, check: Check) -> OrderedDict[Any, Any]:
    """``OrderedDict()``, or ``OrderedDict([[key, value], ...])``, as Python 2 wrote it."""
    if not args:
        return OrderedDict()
    if len(args) != 1 or type(args[0]) is not list:
        raise HeaderError("pickle: OrderedDict(): expected a list of pairs")
    out: OrderedDict[Any, Any] = OrderedDict()
    for pair in args[0]:
        if type(pair) not in (list, tuple) or len(pair) != 2:
            raise HeaderError("pickle: OrderedDict(): expected a list of pairs")
        check(pair[0])
        if pair[0] in out:
            raise HeaderError("pickle: OrderedDict(): a key that occurs twice")
        out[pair[0]] = pair[1]
    return out


def counter(args: Args, check: Check) -> Counter[Any]:
    """``Counter({key: count, ...})``; the dict's keys were checked when they were set."""
    out: Counter[Any] = Counter()
    if len(args) > 1 or (args and type(args[0]) is not dict):
        raise HeaderError("pickle: Counter(): expected a dict")
    dict.update(out, *args)
    return out


def _elements(args: Args, check: Check) -> list[Any]:
    if len(args) > 1 or (args and type(args[0]) not in (list, tuple)):
        raise HeaderError("pickle: set(): expected a list")
    elements = list(args[0]) if args else []
    for element in elements:
        check(element)
    return elements


def make_set(args: Args, check: Check) -> set[Any]:
    """``set([element, ...])``."""
    return set(_elements(args, check))


def make_frozenset(args: Args, check: Check) -> frozenset[Any]:
    """``frozenset([element, ...])``."""
    return frozenset(_elements(args, check))


def size(args: Args, check: Check) -> Size:
    """``torch.Size((int, ...))``."""
    if len(args) != 1 or type(args[0]) not in (tuple, list) or not all(type(n) is int for n in args[0]):
        raise HeaderError("pickle: torch.Size(): expected a tuple of ints")
    return Size(args[0])


def device(args: Args, check: Check) -> Device:
    """``torch.device("cuda", 1)`` or ``torch.device("cuda:1")``."""
    if not 1 <= len(args) <= 2 or type(args[0]) is not str or not (len(args) == 1 or type(args[1]) is int):
        raise HeaderError("pickle: torch.device(): expected a word and an int")
    if len(args) == 2:
        return Device(args[0], args[1])
    word, _, index = args[0].partition(":")
    return Device(word, int(index)) if index.isdecimal() and len(index) < 6 else Device(args[0])


def encode(args: Args, check: Check) -> bytes:
    """``_codecs.encode(text, "latin1")``: how protocol 2 spells bytes."""
    if list(map(type, args)) != [str, str] or args[1] not in ("latin1", "latin-1"):
        raise HeaderError("pickle: _codecs.encode(): expected a string and 'latin1'")
    try:
        return bytes(args[0].encode("latin-1"))
    except UnicodeEncodeError:
        raise HeaderError("pickle: _codecs.encode(): expected characters below U+0100") from None


def make_bytes(args: Args, check: Check) -> bytes:
    """``bytes()``: how protocol 2 spells no bytes."""
    if args:
        raise HeaderError("pickle: bytes(): expected no arguments")
    return b""


def make_bytearray(args: Args, check: Check) -> bytearray:
    """``bytearray(bytes)``, ``bytearray(text, "latin-1")`` or ``bytearray()``; never a size."""
    if not args:
        return bytearray()
    if type(args[0]) is bytes and len(args) == 1:
        return bytearray(args[0])
    if type(args[0]) is str:
        return bytearray(encode(args, check))
    raise HeaderError("pickle: bytearray(): expected bytes")


def make_complex(args: Args, check: Check) -> complex:
    """``complex(float, float)``."""
    if list(map(type, args)) != [float, float]:
        raise HeaderError("pickle: complex(): expected two floats")
    return complex(*args)


# Types made here that APPENDS and SETITEMS go to, besides list and dict.
LISTS = (deque,)
DICTS = (OrderedDict, Counter, defaultdict)

# By `tensorio.allowlist.Entry.kind`.
CALLS: dict[str, Callable[[Args, Check], Any]] = {
    **stdlib.CALLS,
    **SCRIPT_CALLS,
    "bytearray": make_bytearray,
    "bytes": make_bytes,
    "complex": make_complex,
    "counter": counter,
    "device": device,
    "encode": encode,
    "frozenset": make_frozenset,
    "ordered_dict": ordered_dict,
    "set": make_set,
    "size": size,
}
