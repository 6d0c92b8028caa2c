"""Numbers, dates and ranges of the standard library that pickles hold; see `tensorio.machine.stdlib`."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from tensorio.errors import HeaderError, LimitError, escaped
from tensorio.values import Opaque

__all__ = ["CALLS", "KEYS", "is_key", "latin_bytes", "types_are"]

Args = tuple[Any, ...]
Check = Callable[[object], None]

MAX_DIGITS = 4300  # of a number as text: CPython's own limit (sys.int_info.default_max_str_digits)

_DECIMAL = re.compile(r"[-+]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d{1,18})?|inf(?:inity)?|s?nan\d*)\Z", re.A | re.I)
_FRACTION = re.compile(r"[-+]?\d+(?:/\d+)?\Z", re.A)

# Types made here that may be keys; those of modules that are not loaded yet are added with the first value.
KEYS: set[type] = {frozenset, range}


def is_key(value: object) -> bool:
    """Tell whether a value made here may be hashed: cheaply, but not all of these hashes are salted."""
    return type(value) in KEYS and getattr(value, "is_snan", bool)() is False


def latin_bytes(data: object, length: int, what: str) -> bytes:
    """Bytes of a known length, which Python 2 wrote as a string: read as Latin-1, or as UTF-8 where it was such."""
    if type(data) is str and len(data) <= length:
        for codec in ("latin-1", "utf-8"):
            try:
                found = data.encode(codec)
            except UnicodeEncodeError:
                continue
            if len(found) == length:
                return found
    if type(data) is not bytes or len(data) != length:
        raise HeaderError(f"pickle: {what}: expected {length} bytes")
    return data


def types_are(args: Args, *wanted: tuple[type, ...]) -> bool:
    """Whether there is one argument of exactly one of these types for each place."""
    return len(args) == len(wanted) and all(type(arg) in types for arg, types in zip(args, wanted, strict=True))


# -------------------------------------------------------------------- dates


def make_date(args: Args, check: Check) -> Any:
    """``date(4 bytes)``."""
    import datetime

    if len(args) != 1:
        raise HeaderError("pickle: date(): expected 4 bytes")
    data = latin_bytes(args[0], 4, "date()")
    return _dated(datetime.date, data[0] << 8 | data[1], *data[2:])


def make_datetime(args: Args, check: Check) -> Any:
    """``datetime(10 bytes[, tzinfo])``; one whose time zone is `Opaque` is, too."""
    import datetime

    if not 1 <= len(args) <= 2:
        raise HeaderError("pickle: datetime(): expected 10 bytes and a time zone")
    data = latin_bytes(args[0], 10, "datetime()")
    if isinstance(args[-1], Opaque):
        return Opaque("datetime", "datetime", args)
    year, fold, month = data[0] << 8 | data[1], data[2] >> 7, data[2] & 0x7F
    clock = (*data[3:7], int.from_bytes(data[7:], "big"))
    return _dated(datetime.datetime, year, month, *clock, _zone(args[1:]), fold=fold)


def make_time(args: Args, check: Check) -> Any:
    """``time(6 bytes[, tzinfo])``; one whose time zone is `Opaque` is, too."""
    import datetime

    if not 1 <= len(args) <= 2:
        raise HeaderError("pickle: time(): expected 6 bytes and a time zone")
    data = latin_bytes(args[0], 6, "time()")
    if isinstance(args[-1], Opaque):
        return Opaque("datetime", "time", args)
    clock = (data[0] & 0x7F, *data[1:3], int.from_bytes(data[3:], "big"))
    return _dated(datetime.time, *clock, _zone(args[1:]), fold=data[0] >> 7)


def make_timedelta(args: Args, check: Check) -> Any:
    """``timedelta(days, seconds, microseconds)``."""
    import datetime

    if not types_are(args, (int,), (int,), (int,)):
        raise HeaderError("pickle: timedelta(): expected three ints")
    return _dated(datetime.timedelta, *args)


def make_timezone(args: Args, check: Check) -> Any:
    """``timezone(timedelta[, name])``."""
    import datetime

    if not types_are(args[:1], (datetime.timedelta,)) or not (len(args) == 1 or types_are(args[1:], (str,))):
        raise HeaderError("pickle: timezone(): expected a timedelta and a name")
    return _dated(datetime.timezone, *args)


def _zone(args: Args) -> Any:
    import datetime

    if args and args[0] is not None and not isinstance(args[0], datetime.tzinfo):
        raise HeaderError("pickle: expected a time zone behind the bytes of a date or time")
    return args[0] if args else None


def _dated(cls: type, *parts: Any, **more: Any) -> Any:
    """Make a date from its parts, so that `datetime` checks each."""
    try:
        made = cls(*parts, **more)
    except (ValueError, OverflowError) as error:
        raise HeaderError(f"pickle: {cls.__name__}(): {error}") from None
    KEYS.add(cls)
    return made


# ------------------------------------------------------------------ numbers


def make_decimal(args: Args, check: Check) -> Any:
    """``Decimal(text)``."""
    import decimal

    if not types_are(args, (str,)) or len(args[0]) > MAX_DIGITS or not _DECIMAL.match(args[0]):
        raise HeaderError(f"pickle: Decimal(): expected a number as text of at most {MAX_DIGITS} digits")
    try:
        made = decimal.Decimal(args[0])
    except decimal.DecimalException:
        made = decimal.Decimal("nan")  # as it also is where the caller's context does not trap the error
    if made.is_nan() and "n" not in args[0].lower().replace("infinity", ""):
        raise HeaderError(f"pickle: Decimal(): {escaped(args[0])} is out of range")
    KEYS.add(decimal.Decimal)
    return made


def make_fraction(args: Args, check: Check) -> Any:
    """``Fraction(numerator, denominator)``, or a text ``"n/d"``, as Python before 3.11 wrote it."""
    from fractions import Fraction

    text = types_are(args, (str,)) and len(args[0]) <= MAX_DIGITS and _FRACTION.match(args[0]) is not None
    if not text and not types_are(args, (int,), (int,)):
        raise HeaderError("pickle: Fraction(): expected two ints, or a text 'n/d'")
    try:
        made = Fraction(*args)
    except ZeroDivisionError:
        raise HeaderError("pickle: Fraction(): the denominator is 0") from None
    except ValueError:  # sys.set_int_max_str_digits() is lower
        raise LimitError("pickle: Fraction(): more digits than this interpreter converts") from None
    KEYS.add(Fraction)
    return made


def make_bool(args: Args, check: Check) -> bool:
    """``bool(int)`` or ``bool()``."""
    return bool(_same(args, "bool", (bool, int)))


def make_int(args: Args, check: Check) -> int:
    """``int(int)`` or ``int()``; never a text."""
    return int(_same(args, "int", (int, bool)))


def make_float(args: Args, check: Check) -> float:
    """``float(float)`` or ``float()``; never a text."""
    return float(_same(args, "float", (float,)))


def make_str(args: Args, check: Check) -> str:
    """``str(str)`` or ``str()``."""
    return str(_same(args, "str", (str,), ""))


def make_list(args: Args, check: Check) -> list[Any]:
    """``list(list)`` or ``list()``."""
    return list(_same(args, "list", (list, tuple), ()))


def make_tuple(args: Args, check: Check) -> tuple[Any, ...]:
    """``tuple(list)`` or ``tuple()``."""
    return tuple(_same(args, "tuple", (list, tuple), ()))


def make_dict(args: Args, check: Check) -> dict[Any, Any]:
    """``dict(dict)`` or ``dict()``; the keys of a dict were checked when they were set."""
    return dict(_same(args, "dict", (dict, OrderedDict), ()))


def _same(args: Args, name: str, types: tuple[type, ...], nothing: Any = 0) -> Any:
    if args and not types_are(args, types):
        raise HeaderError(f"pickle: {name}(): expected nothing, or one argument of type {types[0].__name__}")
    return args[0] if args else nothing


def make_object(args: Args, check: Check) -> Opaque:
    """``object()``: nothing is known of it but that it is one."""
    if args:
        raise HeaderError("pickle: object(): expected no arguments")
    return Opaque("builtins", "object", ())


def make_range(args: Args, check: Check) -> range:
    """``range(start, stop, step)``."""
    if not types_are(args, (int,), (int,), (int,)) or args[2] == 0:
        raise HeaderError("pickle: range(): expected three ints, the last one not 0")
    return range(*args)


def make_slice(args: Args, check: Check) -> slice | Opaque:
    """``slice(start, stop, step)``; one of anything but plain values is kept as `Opaque`."""
    if len(args) != 3:
        raise HeaderError("pickle: slice(): expected start, stop and step")
    plain = all(part is None or type(part) in (int, bool, float, str) for part in args)
    return slice(*args) if plain else Opaque("builtins", "slice", args)


def make_ellipsis(args: Args, check: Check) -> Any:
    """``...``, which is no class."""
    raise HeaderError("pickle: Ellipsis can't be called")


# By `tensorio.allowlist.Entry.kind`.
CALLS: dict[str, Callable[[Args, Check], Any]] = {
    "bool": make_bool,
    "date": make_date,
    "datetime": make_datetime,
    "decimal": make_decimal,
    "dict": make_dict,
    "ellipsis": make_ellipsis,
    "float": make_float,
    "fraction": make_fraction,
    "int": make_int,
    "list": make_list,
    "object": make_object,
    "range": make_range,
    "slice": make_slice,
    "str": make_str,
    "time": make_time,
    "timedelta": make_timedelta,
    "timezone": make_timezone,
    "tuple": make_tuple,
}
