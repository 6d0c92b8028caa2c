"""Values of a saved object that are no tensors, in short and ready to print.

Nothing here calls a method of a value from a file beyond what its builtin type has.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from tensorio.cli._text import shown
from tensorio.tree import children, is_leaf
from tensorio.values import Device, Opaque, TorchDType

__all__ = ["is_simple", "value_text"]

TEXT_MAX = 60  # characters of a value
ITEMS_MAX = 4  # items of a list

_PLAIN = (bool, int, float, complex, type(None))


def is_simple(node: object) -> bool:
    """Tell whether a node is shown as one value: no container, an empty one, or a list of plain values."""
    if isinstance(node, dict | list | tuple) and not node:
        return True
    if isinstance(node, Opaque):
        return node.args is None and node.state is None and not node.items
    if type(node) in (list, tuple):
        return all(children(item) is None and not is_leaf(item) for item in node)  # type: ignore[attr-defined]
    return children(node) is None


def value_text(value: object) -> str:
    """Return a value in at most about `TEXT_MAX` characters of harmless text."""
    return _text(value, nested=False)


def _text(value: object, nested: bool) -> str:
    if isinstance(value, TorchDType):
        return f"dtype {shown(str(value), TEXT_MAX)}"
    if isinstance(value, str):
        return f"'{shown(str(value), TEXT_MAX)}'"
    if isinstance(value, _PLAIN):
        return shown(repr(value), TEXT_MAX)
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(value):,} bytes"
    if isinstance(value, Device):
        return f"device {shown(value.type, 20)}{'' if value.index is None else f':{value.index}'}"
    if isinstance(value, Opaque):
        return f"<{shown(f'{value.module}.{value.name}', 120)}>"
    if isinstance(value, list | tuple | set | frozenset):
        return _items(value, nested)
    return _other(value)


def _items(value: list[object] | tuple[object, ...] | set[object] | frozenset[object], nested: bool) -> str:
    name = "" if type(value) in (list, tuple) else f"{type(value).__name__} "
    left, right = ("(", ")") if type(value) is tuple else ("{", "}") if isinstance(value, set | frozenset) else "[]"
    if nested:
        return f"{name}{left}{'...' if value else ''}{right}"
    text = f"{name}{left}{', '.join(_first(value))}{right}"
    return text if len(value) <= ITEMS_MAX else f"{text[:-1]}, ...{right} {len(value):,} items"


def _first(items: Iterable[object]) -> list[str]:
    return [_text(item, nested=True)[: TEXT_MAX // 2] for item in islice(items, ITEMS_MAX)]


def _other(value: object) -> str:
    """A dict, or an object that the pickle machine made by itself: an array of NumPy's, a dtype."""
    if isinstance(value, dict):
        return f"dict of {len(value):,}" if value else "{}"
    kind = type(value)
    if kind.__module__ == "numpy" and hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"numpy {shown(value.dtype, 40)} {shown(list(value.shape), 40)}"
    if kind.__module__.startswith("tensorio."):
        return shown(repr(value), TEXT_MAX)
    return f"<{shown(kind.__name__, TEXT_MAX)}>"
