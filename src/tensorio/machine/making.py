"""Objects of classes that the caller allowed; what runs of each class is in `tensorio.allowing`."""

from __future__ import annotations

import contextlib
import copyreg
import enum
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import FunctionType, MemberDescriptorType
from typing import Any

from tensorio.errors import HeaderError, TensorIOError, UnsafePickleError, escaped
from tensorio.values import Opaque

__all__ = [
    "Getattr", "Scope", "Zone", "appender", "call", "make", "name_of", "reconstruct", "set_state", "setter",
]  # fmt: skip

Args = tuple[Any, ...]
Check = Callable[[object], None]

# Built-in types that a class may be made from.
_BASES: tuple[type, ...] = (
    OrderedDict, Counter, defaultdict, dict, deque, list, tuple, set, frozenset, int, float, complex, str, bytes,
    bytearray, BaseException, object,
)  # fmt: skip
_SEALED: tuple[type, ...] = (int, float, str, bytes, tuple)  # by their __new__, from one value of their own
_MAX_FLAGS = 1 << 64  # a combination that is not a member yet is kept by its class


def name_of(cls: type) -> tuple[str, str]:
    """Return module and qualified name, as pickles have them."""
    return str(type.__dict__["__module__"].__get__(cls)), cls.__qualname__


# ---------------------------------------------------- names by parts: getattr


class _Part:
    """Stands for a name that leads to an allowed class, and for nothing else."""

    name: tuple[str, str]
    opaque: bool

    @classmethod
    def refuse(cls, args: Args) -> Opaque:
        if cls.opaque:
            return Opaque(*cls.name, args)
        name = ".".join(cls.name)
        raise UnsafePickleError(
            f"the pickle uses {escaped(name)} for more than to find an allowed class", globals=[name]
        )


class Scope(_Part):
    """Stands for a class that was not allowed, but holds one that was."""


class Getattr(_Part):
    """Stands for ``getattr`` in a pickle: finds allowed classes in others, and members of an ``Enum``."""

    found: dict[tuple[type, str], type]

    @classmethod
    def answer(cls, args: Args) -> Any:
        owner, name = args if len(args) == 2 else (None, None)
        if type(name) is str and isinstance(owner, type):
            if (owner, name) in cls.found:
                return cls.found[owner, name]
            if issubclass(owner, enum.Enum) and name in owner.__members__:
                return owner.__members__[name]
        return cls.refuse(args)


class Zone:
    """Stands for ``ZoneInfo._unpickle``: the zone of a name that this system knows."""


# -------------------------------------------------------------------- making


@contextlib.contextmanager
def _own_code(cls: type, what: str) -> Iterator[None]:
    """Turn an exception of a class's own code into ours."""
    try:
        yield
    except (TensorIOError, MemoryError):
        raise
    except Exception as error:
        try:
            text = str(error)
        except Exception:
            text = ""
        raise HeaderError(
            f"allowed class {escaped('.'.join(name_of(cls)))}: {what} raised {type(error).__name__}: {escaped(text)}"
        ) from error


def _wrong(cls: type, what: str) -> HeaderError:
    return HeaderError(f"allowed class {escaped('.'.join(name_of(cls)))} in a pickle: {what}")


def _base(cls: type) -> type:
    """Return the built-in type that objects of the class have the layout of, as far as we know it."""
    while cls not in _BASES:
        assert cls.__base__ is not None
        cls = cls.__base__
    return cls


def _written(cls: type, *names: str) -> bool:
    """Whether the class, or one that it inherits from, defines one of the methods in Python."""
    return any(isinstance(c.__dict__.get(name), FunctionType) for c in cls.__mro__ for name in names)


def _is_namedtuple(cls: type) -> bool:
    fields = getattr(cls, "_fields", None)
    return issubclass(cls, tuple) and type(fields) is tuple and all(type(f) is str for f in fields)


def _namedtuple(cls: Any, values: Args) -> Any:
    if len(values) != len(cls._fields):
        raise _wrong(cls, f"expected {len(cls._fields)} fields, found {len(values)}")
    return tuple.__new__(cls, values)


def _member(cls: Any, value: Any, check: Check) -> Any:
    """Look up a member of an ``Enum`` by its value."""
    found = None
    if type(value) in (list, dict, set, bytearray):
        with _own_code(cls, "comparing its values"):
            members = cls._member_map_.values()
            found = next((m for m in members if type(m._value_) is type(value) and m._value_ == value), None)
    else:
        check(value)
        found = cls._value2member_map_.get(value)
    flags = found is None and issubclass(cls, enum.Flag) and type(value) is int and abs(value) < _MAX_FLAGS
    if flags and getattr(getattr(cls._missing_, "__func__", None), "__module__", "") == "enum":
        with _own_code(cls, "Flag"):
            return cls(value)
    if found is None:
        raise _wrong(cls, f"no member has the value {escaped(repr(value) if type(value) in (int, str) else '')}")
    return found


def call(cls: Any, args: Args, check: Check) -> Any:
    """Answer the opcode REDUCE: what calling the class would return.

    Parameters
    ----------
    cls : type
        From `table`.
    args : tuple
    check : callable
        The pickle machine's rule for what may be hashed.

    Raises
    ------
    HeaderError
        Arguments that objects of this class are not pickled with, or an error
        in the class's own code.
    UnsafePickleError
        ``getattr`` of anything but what `table` says.
    """
    if issubclass(cls, Getattr):
        return cls.answer(args)
    if issubclass(cls, Scope):
        return cls.refuse(args)
    if cls is Zone:
        return _zone(args)
    if issubclass(cls, enum.Enum):
        if len(args) != 1:
            raise _wrong(cls, "expected a member's value")
        return _member(cls, args[0], check)
    base = _base(cls)
    if base in _BUILT_IN and cls.__reduce__ is base.__reduce__ and cls.__reduce_ex__ is base.__reduce_ex__:
        return _built_in(cls, base, args, check)
    if not _written(cls, "__reduce__", "__reduce_ex__") and cls not in copyreg.dispatch_table:
        raise _wrong(cls, "it is called, but has no __reduce__ that says so")
    with _own_code(cls, "its constructor"):
        return cls(*args)


def _zone(args: Args) -> Any:
    from zoneinfo import ZoneInfo

    if not 1 <= len(args) <= 2 or type(args[0]) is not str:
        raise HeaderError("allowed class 'zoneinfo.ZoneInfo' in a pickle: expected a name")
    with _own_code(ZoneInfo, "its constructor"):
        return ZoneInfo(args[0])


# Types whose own __reduce__ has them called, and what with.
_BUILT_IN: dict[type, Callable[[Args], bool]] = {
    OrderedDict: lambda args: not args,
    Counter: lambda args: [type(a) for a in args] in ([], [dict]),
    defaultdict: lambda args: len(args) <= 1 and all(a is None or isinstance(a, type) for a in args),
    deque: lambda args: len(args) <= 2 and all(type(a) in (list, tuple) for a in args[:1])
    and all(a is None or (type(a) is int and 0 <= a < 1 << 63) for a in args[1:]),
    set: lambda args: [type(a) for a in args] in ([], [list]),
    frozenset: lambda args: [type(a) for a in args] in ([], [list]),
    bytearray: lambda args: [type(a) for a in args] in ([], [bytes])
    or ([type(a) for a in args] == [str, str] and args[1] in ("latin-1", "latin1")),
    BaseException: lambda args: True,
}  # fmt: skip


def _built_in(cls: Any, base: Any, args: Args, check: Check) -> Any:
    """Make an object as its built-in base would, past the class's own ``__new__`` and ``__init__``."""
    if not _BUILT_IN[base](args):
        raise _wrong(cls, f"expected the arguments of a {base.__name__}")
    if base in (set, frozenset):
        for element in args[0] if args else ():
            check(element)
    with _own_code(cls, f"{base.__name__}()"):
        if base in (frozenset, BaseException):
            return base.__new__(cls, *args)
        made = base.__new__(cls)
        if base is Counter:
            dict.update(made, *args)
        elif base is not OrderedDict:
            base.__init__(made, *args)
        return made


def make(cls: Any, args: Args, kwargs: dict[str, Any] | None, check: Check) -> Any:
    """Answer the opcodes NEWOBJ and NEWOBJ_EX: what ``cls.__new__(cls, *args, **kwargs)`` would return.

    Parameters
    ----------
    cls : type
        From `table`.
    args : tuple
    kwargs : dict or None
    check : callable
        The pickle machine's rule for what may be hashed.

    Raises
    ------
    HeaderError
        Arguments that objects of this class are not pickled with, or an error
        in the class's own code.
    """
    if issubclass(cls, Scope):
        return cls.refuse(args)
    _require_instances(cls)
    if _is_namedtuple(cls) and not kwargs:
        return _namedtuple(cls, args)
    base = _base(cls)
    if _written(cls, "__getnewargs__", "__getnewargs_ex__"):
        if kwargs and not all(type(name) is str for name in kwargs):
            raise _wrong(cls, "expected arguments by name")
        if _new_is_written(cls):
            with _own_code(cls, "its __new__"):
                return cls.__new__(cls, *args, **(kwargs or {}))
        if base is object:  # whose __new__ takes them and does nothing with them
            args, kwargs = (), None
    if kwargs or not _fits(base, args):
        raise _wrong(cls, "arguments that nothing says it is pickled with")
    with _own_code(cls, f"{base.__name__}.__new__"):
        return base.__new__(cls, *args)


def _require_instances(cls: Any) -> None:
    if issubclass(cls, _Part | enum.Enum) or cls is Zone or cls in _BASES:
        raise _wrong(cls, "it has no objects that are made this way")


def _new_is_written(cls: Any) -> bool:
    """Whether ``__new__`` is the class's own: a namedtuple's is written in Python, too."""
    return any(isinstance(c.__dict__.get("__new__"), staticmethod) and "_fields" not in c.__dict__ for c in cls.__mro__)


def _fits(base: type, args: Args) -> bool:
    """Whether these are what the built-in type's ``__getnewargs__`` gives."""
    types = [type(arg) for arg in args]
    if base is complex:
        return types in ([], [float, float])
    return not args or (base in _SEALED and types == [base])


def reconstruct(cls: Any, base: Any, state: Any, check: Check) -> Any:
    """Answer ``copyreg._reconstructor(cls, base, state)``: how protocols 0 and 1 make an object.

    Parameters
    ----------
    cls : type
        From `table`.
    base : type or None
        The built-in type that the pickle says it is a subclass of.
    state : object
        The value as that type.
    check : callable
        The pickle machine's rule for what may be hashed.

    Raises
    ------
    HeaderError
        The class has another base, or the state is no value of it.
    """
    if base is object:
        return make(cls, (), None, check)
    if issubclass(cls, Scope):
        return cls.refuse((state,))
    _require_instances(cls)
    if base is None or base not in _BASES or not issubclass(cls, base) or type(state) is not base:
        raise _wrong(cls, "expected its built-in base and a value of it")
    if _is_namedtuple(cls) and base is tuple:
        return _namedtuple(cls, state)
    with _own_code(cls, f"{base.__name__}.__new__"):
        if base in (dict, list):
            made = base.__new__(cls)
            (dict.update if base is dict else list.extend)(made, state)
            return made
        if base in (*_SEALED, complex):
            return base.__new__(cls, state)
    raise _wrong(cls, f"{base.__name__} is not made this way")


# --------------------------------------------------------------------- state


def set_state(obj: Any, state: Any) -> None:
    """Answer the opcode BUILD on an object of an allowed class.

    Runs the class's ``__setstate__`` if it is written in Python. Else `state` is
    a dict for ``__dict__``, or a tuple of that and a dict for ``__slots__``.

    Raises
    ------
    HeaderError
        No such state, or an error in the class's own code.
    """
    cls = type(obj)
    if issubclass(cls, enum.Enum | type):
        raise _wrong(cls, "it is shared with the rest of the program and takes no state")
    if _written(cls, "__setstate__"):
        with _own_code(cls, "its __setstate__"):
            obj.__setstate__(state)
        return
    attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    for part in (attributes, slots):
        if part is not None and (type(part) is not dict or not all(type(name) is str for name in part)):
            raise _wrong(cls, "expected a dict of attributes, or a tuple of that and a dict of slots")
    if attributes:
        try:
            found = object.__getattribute__(obj, "__dict__")
        except AttributeError:
            found = None
        if type(found) is not dict:
            raise _wrong(cls, "it has no attributes besides its slots")
        found.update(attributes)
    for name, value in (slots or {}).items():
        _slot(cls, name).__set__(obj, value)


def _slot(cls: type, name: str) -> Any:
    """Find a slot by its name; no property is one."""
    for c in cls.__mro__:
        found = c.__dict__.get(name)
        if isinstance(found, MemberDescriptorType) and "__slots__" in c.__dict__:
            return found
        if found is not None:
            break
    raise _wrong(cls, f"it has no slot {escaped(name)}")


def setter(obj: object) -> Callable[[Any, Any, Any], None] | None:
    """Return what the opcode SETITEMS puts pairs into `obj` with: its built-in base's, never its own.

    Returns
    -------
    callable or None
        ``setter(obj, key, value)``; None if it is no mapping. Keys are to be
        checked before.
    """
    base = _base(type(obj))
    if base is OrderedDict:
        return OrderedDict.__setitem__
    return dict.__setitem__ if issubclass(base, dict) else None


def appender(obj: object) -> Callable[[Any, Any], None] | None:
    """Return what the opcode APPENDS puts items into `obj` with: its built-in base's, never its own.

    Returns
    -------
    callable or None
        ``appender(obj, item)``; None if it is no list.
    """
    base = _base(type(obj))
    return list.append if base is list else deque.append if base is deque else None
