"""Classes that the caller allowed: how their objects are made, and which of their code runs.

Nothing is looked up by a file's word: a name of the pickle is compared with the
module and qualified name of each class that was given. What then runs of it:

====================================  ====================================================================
class                                 its objects are made
====================================  ====================================================================
``Enum``                              looked up by value or name among the members; a combination of flags
                                      by ``Flag`` itself. Neither ``__new__`` nor ``_missing_`` runs
``namedtuple``, ``NamedTuple``        by ``tuple.__new__``
dataclass, plain class                by ``object.__new__``; ``__init__`` and ``__post_init__`` don't run
subclass of a built-in type           by that type's ``__new__`` (and, filled by its own methods, not by
                                      the class's), from a plain value of that type
class with ``__getnewargs__``         by its own ``__new__``, if it has one: it asked for these arguments
class with ``__reduce__``             **by calling it**: it asked to be called (also if it is registered
                                      with ``copyreg``). A class that did not ask is never called
====================================  ====================================================================

Its state goes straight into ``__dict__`` and ``__slots__``, past properties and
``__setattr__``, unless the class has a ``__setstate__`` written in Python: then
that runs. Objects made without ``__init__`` may have a ``__del__``, which runs
when they go. Functions can't be allowed, nor can classes of the standard library
that do more than hold data.

An exception in the class's own code becomes a `HeaderError` that names both.
"""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Iterable, Iterator
from contextvars import ContextVar

from tensorio.allowlist import ALLOWED
from tensorio.machine.making import Getattr, Scope, Zone, appender, call, make, name_of, reconstruct, set_state, setter

__all__ = ["allow", "appender", "call", "current", "make", "reconstruct", "set_state", "setter", "table"]

_given: ContextVar[tuple[type, ...]] = ContextVar("tensorio.allow", default=())


@contextlib.contextmanager
def allow(*classes: type) -> Iterator[None]:
    """Allow classes of the caller's own in pickles, for all of tensorio within the ``with`` block.

    Parameters
    ----------
    *classes : type
        See `tensorio.open` about ``allow=``; they add to those allowed already.

    Raises
    ------
    TypeError
        Something is no class.
    ValueError
        A class that may not be allowed.

    Notes
    -----
    Held by a context variable: other threads and tasks don't see it. What
    runs of an allowed class is in the documentation of ``tensorio.allowing``.
    """
    table(classes)
    token = _given.set((*_given.get(), *classes))
    try:
        yield
    finally:
        _given.reset(token)


def current() -> tuple[type, ...]:
    """Return the classes that `allow` allows here."""
    return _given.get()


def table(classes: Iterable[type], *, opaque: bool = False) -> dict[tuple[str, str], type]:
    """Return the classes by the names that pickles have for them: exactly module and qualified name.

    A later class hides an earlier one of the same name. A class inside another
    brings ``builtins.getattr`` and the outer class as names: this is how
    pickles before protocol 4 spell it. They lead to the class, and nowhere else.

    Parameters
    ----------
    classes : iterable of type
    opaque : bool
        Whether what those names are used for besides becomes `Opaque`; else it
        is refused.

    Raises
    ------
    TypeError
        Something is no class.
    ValueError
        A class that may not be allowed.
    """
    found: dict[tuple[str, str], type] = {}
    for cls in classes:
        if not isinstance(cls, type):
            raise TypeError(f"allow= takes classes, not {cls!r}: no file can make tensorio call a function")
        module, name = name_of(cls)
        if (module, name) not in ALLOWED:  # else it is read as it is
            _require_data(cls)
            found[module, name] = cls
    return {**_spelled_by_parts(found, opaque), **found} if found else {}


def _require_data(cls: type) -> None:
    """Refuse classes that are known to do more than hold data."""
    module, name = name_of(cls)
    if issubclass(cls, type):
        raise ValueError(f"allow= can't take {module}.{name}: its objects are classes")
    standard = module.partition(".")[0] in sys.stdlib_module_names
    if standard and not issubclass(cls, enum.Enum) and (module, name) != ("zoneinfo", "ZoneInfo"):
        raise ValueError(
            f"allow= can't take {module}.{name}: classes of the standard library do more than hold data "
            "(those that hold data only are read without it)"
        )


def _spelled_by_parts(classes: dict[tuple[str, str], type], opaque: bool) -> dict[tuple[str, str], type]:
    scopes: dict[tuple[str, str], type] = {}
    found: dict[tuple[type, str], type] = {}
    for (module, path), cls in classes.items():
        parts = path.split(".") if "<locals>" not in path else []
        for i in range(1, len(parts)):
            outer, inner = (module, ".".join(parts[:i])), (module, ".".join(parts[: i + 1]))
            for key in (outer, inner):
                if key not in classes and key not in scopes:
                    scopes[key] = type("Scope", (Scope,), {"name": key, "opaque": opaque})
            found[{**scopes, **classes}[outer], parts[i]] = {**scopes, **classes}[inner]
        if (module, path) == ("zoneinfo", "ZoneInfo"):
            found[cls, "_unpickle"] = scopes[module, f"{path}._unpickle"] = Zone
    if found or any(issubclass(cls, enum.Enum) for cls in classes.values()):
        for module in ("builtins", "__builtin__"):
            name = (module, "getattr")
            scopes[name] = type("Getattr", (Getattr,), {"name": name, "opaque": opaque, "found": found})
    return scopes
