"""Take tensors out of a tree and leave everything else as it was: the same objects, shared as they were."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from tensorio.kinds import TensorKind
from tensorio.tree import is_leaf
from tensorio.values import Opaque

__all__ = ["without"]


class _Gone:
    """Stands for a tensor that is taken out."""


GONE = _Gone()


def without(root: Any, rows: set[int]) -> Any:
    """Take the tensors of some rows out of a tree, in place.

    Entries of dicts and attributes of objects go. Items of lists and tuples
    become None, so that the others keep their places. A tensor of several parts
    goes if one of them does.

    Parameters
    ----------
    root : object
    rows : set of int

    Returns
    -------
    object
        `root` itself, as a rule; another object if it was a tuple or a tensor of
        several parts; None if it was one of the tensors.

    Notes
    -----
    Visits each object once, however often it is shared and whatever contains
    itself; nothing recurses.
    """
    removal = _Removal(rows)
    removal.visit(root)
    while removal.todo:
        removal.mend(removal.todo.pop())
    result = removal.value(root)
    return None if result is GONE else result


class _Removal:
    """One pass over a tree.

    Attributes
    ----------
    todo : list
        Objects that can be changed, and still may have to be.
    """

    def __init__(self, rows: set[int]) -> None:
        self.rows = rows
        self.todo: list[Any] = []
        self._seen: set[int] = set()
        # By id: what an object that can't be changed became, and the object, so that its id stays its own.
        self._became: dict[int, tuple[Any, Any]] = {}

    def value(self, node: Any) -> Any:
        """What stands for a node that was visited."""
        if is_leaf(node):
            return GONE if node.row in self.rows else node
        found = self._became.get(id(node))
        return node if found is None else found[0]

    def visit(self, node: Any) -> None:
        """Note objects that can be changed; make those anew that can't be, innermost first."""
        stack = [node]
        while stack:
            top = stack[-1]
            if not _is_fixed(top):
                if _is_changeable(top) and id(top) not in self._seen:
                    self._seen.add(id(top))
                    self.todo.append(top)
                stack.pop()
            elif id(top) in self._became:
                stack.pop()
            else:
                inner = [part for part in _parts(top) if _is_fixed(part) and id(part) not in self._became]
                if inner:
                    stack.extend(inner)
                else:
                    self._became[id(top)] = self._remade(top), top
                    stack.pop()
                    stack.extend(part for part in _parts(top) if _is_changeable(part))

    def _remade(self, node: Any) -> Any:
        parts = list(_parts(node))
        values = [self.value(part) for part in parts]
        if all(a is b for a, b in zip(parts, values, strict=True)):
            return node
        if isinstance(node, TensorKind):
            return GONE if GONE in values else node.replaced(dict(zip(node.parts(), values, strict=True)))
        return tuple.__new__(type(node), (None if value is GONE else value for value in values))

    def mend(self, node: Any) -> None:
        """Change one object in place."""
        if type(node) is Opaque:
            for name in ("args", "kwargs", "state", "items"):
                self.visit(getattr(node, name))
                value = self.value(getattr(node, name))
                setattr(node, name, None if value is GONE else value)
            return
        if isinstance(node, dict):
            self._mend_dict(node)
        elif isinstance(node, list | deque):
            for i, old in enumerate(node):
                self.visit(old)
                value = self.value(old)
                if value is not old:
                    node[i] = None if value is GONE else value
        attributes = getattr(node, "__dict__", None)
        if type(attributes) is dict:
            self._mend_dict(attributes)

    def _mend_dict(self, node: dict[Any, Any]) -> None:
        for key, old in list(node.items()):
            self.visit(old)
            value = self.value(old)
            if value is GONE:
                del node[key]
            elif value is not old:
                node[key] = value


def _is_fixed(node: Any) -> bool:
    """Whether an object has parts and can't be changed."""
    return isinstance(node, tuple | TensorKind)


def _is_changeable(node: Any) -> bool:
    return isinstance(node, dict | list | deque | Opaque) or (hasattr(node, "__dict__") and not isinstance(node, type))


def _parts(node: Any) -> Iterator[Any]:
    return iter(node.parts().values() if isinstance(node, TensorKind) else node)
