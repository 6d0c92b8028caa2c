"""Plain values of the standard library that pickles hold: dates, paths, numbers, containers, namespaces.

Each is rebuilt as itself by a function that checks all of its arguments, which
come from the file. Costs are linear in the arguments: no number in a file is
taken as a size, and texts of numbers are short, since their conversion is not
linear. Modules that few pickles need are imported when one does.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from tensorio.errors import HeaderError, LimitError, escaped
from tensorio.machine import scalars
from tensorio.machine.making import reconstruct
from tensorio.machine.scalars import KEYS, types_are
from tensorio.pickles import Unbuilt
from tensorio.values import Opaque

__all__ = ["CALLS", "STATES", "TYPES", "Redirect", "tag"]

Args = tuple[Any, ...]
Check = Callable[[object], None]

MAX_PATH = 32_768  # characters: what Windows takes; Linux takes 4096


class Redirect(NamedTuple):
    """What `copyreg`'s functions answer: another class of the pickle is to be made, as by the opcode NEWOBJ_EX."""

    callee: Any
    args: Args
    kwargs: dict[Any, Any] | None = None


# Classes that stand in a tree as themselves, by `tensorio.allowlist.Entry.kind`: tags such as a defaultdict's factory.
TYPES: dict[str, type] = {
    "bool": bool, "bytearray": bytearray, "bytes": bytes, "complex": complex, "counter": Counter,
    "defaultdict": defaultdict, "deque": deque, "dict": dict, "float": float, "frozenset": frozenset, "int": int,
    "list": list, "object": object, "ordered_dict": OrderedDict, "set": set, "str": str, "tuple": tuple,
}  # fmt: skip


def kind_of(value: object) -> str:
    """Return the kind of a harmless name that stands in an argument by itself; ``""`` for anything else."""
    kind = getattr(value, "kind_name", "") if type(value).__name__ == "_Global" else ""
    return kind if type(kind) is str else ""


def tag(value: object) -> type | None:
    """Return the class that an argument stands for: a plain type, or one that the caller allowed."""
    return value if isinstance(value, type) else TYPES.get(kind_of(value))


# ----------------------------------------------------------- paths and UUIDs


def make_posix_path(args: Args, check: Check) -> Any:
    """``PosixPath(part, ...)``, as a path that can't touch files."""
    from pathlib import PurePosixPath

    return _path(PurePosixPath, args)


def make_windows_path(args: Args, check: Check) -> Any:
    """``WindowsPath(part, ...)``, as a path that can't touch files."""
    from pathlib import PureWindowsPath

    return _path(PureWindowsPath, args)


def _path(cls: type, args: Args) -> Any:
    if any(type(part) is not str for part in args):
        raise HeaderError("pickle: a path: expected its parts as strings")
    if sum(map(len, args)) > MAX_PATH:
        raise LimitError(f"pickle: a path of over {MAX_PATH} characters")
    KEYS.add(cls)
    return cls(*args)


def make_uuid(args: Args, check: Check) -> Unbuilt:
    """``UUID.__new__(UUID)``; the number comes with the state."""
    if args:
        raise HeaderError("pickle: UUID(): expected no arguments")
    return Unbuilt("uuid")


def fill_uuid(made: Any, state: Any, check: Check) -> Any:
    """``{"int": n[, "is_safe": n]}``."""
    import uuid

    if type(state) is not dict or not {"int"} <= state.keys() <= {"int", "is_safe"}:
        raise HeaderError("pickle: UUID: expected a state of 'int' and 'is_safe'")
    number, safe = state["int"], state.get("is_safe", uuid.SafeUUID.unknown)
    if type(number) is not int or not 0 <= number < 1 << 128:
        raise HeaderError("pickle: UUID: expected an int below 2^128")
    KEYS.add(uuid.UUID)
    return uuid.UUID(int=number, is_safe=safe if type(safe) is uuid.SafeUUID else make_safe_uuid((safe,), check))


def make_safe_uuid(args: Args, check: Check) -> Any:
    """``SafeUUID(0)``, ``SafeUUID(-1)`` or ``SafeUUID(None)``."""
    import uuid

    for member in uuid.SafeUUID:
        if len(args) == 1 and type(args[0]) is type(member.value) and args[0] == member.value:
            return member
    raise HeaderError("pickle: SafeUUID(): expected 0, -1 or None")


# --------------------------------------------------- containers and namespaces


def make_deque(args: Args, check: Check) -> deque[Any]:
    """``deque([list[, maxlen]])``; the bound is a number, nothing is allocated for it."""
    items, maxlen = (*args, None, None)[:2] if args else ((), None)
    bound = maxlen is None or (type(maxlen) is int and 0 <= maxlen < 1 << 63)
    if len(args) > 2 or type(items) not in (list, tuple) or not bound:
        raise HeaderError("pickle: deque(): expected a list and its greatest length")
    return deque(items, maxlen)


def make_defaultdict(args: Args, check: Check) -> defaultdict[Any, Any] | Opaque:
    """``defaultdict(type)``; one whose factory is anything but a plain type is kept as `Opaque`."""
    if len(args) > 1:
        raise HeaderError("pickle: defaultdict(): expected a factory only")
    factory = tag(args[0]) if args and args[0] is not None else None
    if args and args[0] is not None and factory is None:
        return Opaque("collections", "defaultdict", args)
    return defaultdict(factory)


def make_user_dict(args: Args, check: Check) -> UserDict[Any, Any]:
    """``UserDict.__new__(UserDict)``; its dict comes with the state."""
    if args:
        raise HeaderError("pickle: UserDict(): expected no arguments")
    return UserDict()


def make_user_list(args: Args, check: Check) -> UserList[Any]:
    """``UserList.__new__(UserList)``; its list comes with the state."""
    if args:
        raise HeaderError("pickle: UserList(): expected no arguments")
    return UserList()


def fill_user(made: Any, state: Any, check: Check) -> Any:
    """``{"data": dict or list}``."""
    if type(state) is not dict or state.keys() != {"data"} or type(state["data"]) is not type(made.data):
        raise HeaderError(f"pickle: {type(made).__name__}: expected a state of 'data'")
    made.data = state["data"]
    return made


def make_simple_namespace(args: Args, check: Check) -> SimpleNamespace:
    """``SimpleNamespace()``; its attributes come with the state."""
    if args:
        raise HeaderError("pickle: SimpleNamespace(): expected no arguments")
    return SimpleNamespace()


def make_namespace(args: Args, check: Check) -> Any:
    """``argparse.Namespace.__new__(Namespace)``; its attributes come with the state."""
    from argparse import Namespace

    if args:
        raise HeaderError("pickle: Namespace(): expected no arguments")
    STATES[Namespace] = set_attributes
    return Namespace()


def set_attributes(made: Any, state: Any, check: Check) -> Any:
    """Set the attributes of a namespace; none may hide one of its methods."""
    if type(state) is not dict:
        raise HeaderError(f"pickle: {type(made).__name__}: expected a dict of attributes")
    for name in state:
        if type(name) is not str or hasattr(type(made), name) or (name.startswith("__") and name.endswith("__")):
            raise HeaderError(f"pickle: {type(made).__name__}: attribute {escaped(name)}")
    vars(made).update(state)
    return made


def make_fields(args: Args, check: Check) -> tuple[Any, ...]:
    """``torch.return_types.max((values, indices), {})``: the tuple without the names."""
    if not types_are(args, (tuple,), (dict,)):
        raise HeaderError("pickle: a named result of torch: expected a tuple and a dict")
    return args[0]  # type: ignore[no-any-return]


# ------------------------------------------------------------------- copyreg


def reconstructor(args: Args, check: Check) -> Any:
    """``_reconstructor(class, base, state)``: how protocols 0 and 1 make an object."""
    if len(args) != 3:
        raise HeaderError("pickle: _reconstructor(): expected a class, its base and the base's state")
    cls, base, state = args
    if isinstance(cls, type) and cls not in TYPES.values():
        return reconstruct(cls, tag(base), state, check)
    return _redirect(cls, () if tag(base) is object else (state,))


def newobj(args: Args, check: Check) -> Redirect:
    """``__newobj__(class, *args)``: what the opcode NEWOBJ stands for."""
    if not args:
        raise HeaderError("pickle: __newobj__(): expected a class")
    return _redirect(args[0], args[1:])


def newobj_ex(args: Args, check: Check) -> Redirect:
    """``__newobj_ex__(class, args, kwargs)``: what the opcode NEWOBJ_EX stands for."""
    if not types_are(args[1:], (tuple,), (dict,)):
        raise HeaderError("pickle: __newobj_ex__(): expected a class, a tuple and a dict")
    return _redirect(args[0], args[1], args[2] or None)


def _redirect(cls: Any, args: Args, kwargs: dict[Any, Any] | None = None) -> Redirect:
    if kind_of(cls) in ("reconstructor", "newobj", "newobj_ex"):  # or the answer could be another, and so on
        raise HeaderError("pickle: copyreg: expected a class")
    return Redirect(cls, args, kwargs)


# What is made of a state: by the type of the object that gets it, or by the kind of an `Unbuilt`. Returns that object,
# or the one in its place.
STATES: dict[type | str, Callable[[Any, Any, Check], Any]] = {
    SimpleNamespace: set_attributes,
    UserDict: fill_user,
    UserList: fill_user,
    "uuid": fill_uuid,
}

# By `tensorio.allowlist.Entry.kind`.
CALLS: dict[str, Callable[[Args, Check], Any]] = {
    **scalars.CALLS,
    "defaultdict": make_defaultdict,
    "deque": make_deque,
    "fields": make_fields,
    "namespace": make_namespace,
    "newobj": newobj,
    "newobj_ex": newobj_ex,
    "posix_path": make_posix_path,
    "reconstructor": reconstructor,
    "safe_uuid": make_safe_uuid,
    "simple_namespace": make_simple_namespace,
    "user_dict": make_user_dict,
    "user_list": make_user_list,
    "uuid": make_uuid,
    "windows_path": make_windows_path,
}
