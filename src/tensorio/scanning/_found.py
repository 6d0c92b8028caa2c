"""What a walk through a pickle finds: names, and what can't be judged by a name."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tensorio.allowlist import ALLOWED
from tensorio.dtypes import BY_NAME

__all__ = ["NAMES_MAX", "TEXT_KEPT", "Named", "Ref", "Walk", "itemsize", "plausible"]

NAMES_MAX = 20_000  # different names that are listed
TEXT_KEPT = 256  # characters of a name that are kept

_DOTTED = re.compile(r"[^\W\d][\w-]*(\.[^\W\d][\w-]*)*")


@dataclass
class Ref:
    """A name that a pickle refers to.

    Attributes
    ----------
    module, name : str
        As the pickle spells them, cut at `TEXT_KEPT` characters.
    group, reason : str
        What it is; see `tensorio.scanning._report.judge`.
    offset : int
        Of the first opcode that names it, in bytes from the start of the data.
    count : int
        How many opcodes name it.
    uses : set of str
        Opcodes that call it or set a state.
    """

    module: str
    name: str
    group: str
    reason: str
    offset: int
    count: int = 0
    uses: set[str] = field(default_factory=set)


@dataclass
class Walk:
    """What one pickle refers to.

    Attributes
    ----------
    start : int
        First byte.
    end : int or None
        First byte behind STOP; None if it was not reached.
    at : int
        Where the walk ended.
    error : (int, str) or None
        Where a loader would have given up first, and why.
    refs : list of Ref
        Every different name.
    odd : list of (int, str)
        Offset of what can't be judged by a name, and what it is.
    storages : dict of str to int
        Storage key to bytes, -1 if not known.
    value : int, tuple or None
        The pickled object, if it is an int or a short tuple: of texts, ints and the numbers of names in `refs`.
    inner : list of (int, int, bool)
        Offset and size of bytes that may be a pickle or archive of their own, and whether they are loaded as such;
        size -1 where there are too many.
    nested : list of Walk
        Pickles that are loaded in the middle of it (arrays of objects that joblib wrote).
    unlisted : int
        Names beyond `NAMES_MAX`.
    """

    start: int
    end: int | None = None
    at: int = 0
    error: tuple[int, str] | None = None
    refs: list[Ref] = field(default_factory=list)
    odd: list[tuple[int, str]] = field(default_factory=list)
    storages: dict[str, int] = field(default_factory=dict)
    value: object = None
    inner: list[tuple[int, int, bool]] = field(default_factory=list)
    nested: list[Walk] = field(default_factory=list)
    unlisted: int = 0


@dataclass(frozen=True)
class Named:
    """A name inside a tuple: its number in `Walk.refs`."""

    number: int


def itemsize(ref: Ref) -> int:
    """Return the bytes per element of a storage class; 0 if it is none that we know."""
    entry = ALLOWED.get((ref.module, ref.name))
    dtype = BY_NAME.get(entry.dtype) if entry is not None else None
    return dtype.bits // 8 if dtype is not None else 0


def plausible(ref: Ref) -> bool:
    """Tell whether a name may be one: the bytes of a tensor seldom spell what Python can look up."""
    module = ref.module.partition("\0")[0]
    return _DOTTED.fullmatch(module) is not None and _DOTTED.fullmatch(ref.name) is not None
