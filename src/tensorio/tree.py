"""The tree: what was saved, with a leaf at each tensor.

Walks are iterative and bounded, since a tree from a file may be deep, shared a
thousandfold or contain itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

from tensorio._unpickler import Leaf
from tensorio.errors import LimitError
from tensorio.values import Opaque

__all__ = ["Path", "fqns", "is_leaf", "leaves", "prune"]

Path = tuple[object, ...]


def is_leaf(obj: object) -> bool:
    """Tell whether a node stands for a tensor."""
    return isinstance(obj, Leaf)


def _children(node: object) -> Iterator[tuple[object, object]]:
    """Keys and values of a container; nothing for anything else."""
    if isinstance(node, dict):
        return iter(node.items())
    if isinstance(node, list | tuple):
        return iter(enumerate(node))
    if type(node) is Opaque:
        return iter([("args", node.args), ("state", node.state), ("items", node.items)])
    return iter(())


def leaves(root: object, budget: int) -> Iterator[tuple[Path, Any]]:
    """Yield path and value of everything that is no container, in saved order.

    Goes through shared containers each time, but not into a container that is
    open already. `budget` bounds the nodes visited.
    """
    if not isinstance(root, dict | list | tuple | Opaque):
        yield (), root
        return
    path: list[object] = []
    stack = [(_children(root), id(root))]
    open_ids = {id(root)}
    while stack:
        children, ident = stack[-1]
        step = next(children, None)
        if step is None:
            stack.pop()
            open_ids.discard(ident)
            if path:
                path.pop()
            continue
        key, child = step
        budget -= 1
        if budget < 0:
            raise LimitError("the saved object is shared so often within itself that its names can't be listed")
        if not isinstance(child, dict | list | tuple | Opaque):
            yield (*path, key), child
        elif id(child) not in open_ids:
            path.append(key)
            stack.append((_children(child), id(child)))
            open_ids.add(id(child))


def fqns(root: object, budget: int) -> list[tuple[str, Path, int]]:
    """Name every tensor of a tree.

    Parameters
    ----------
    root : object
    budget : int
        How many nodes may be visited; linear in the file's size.

    Returns
    -------
    list of (fqn, keys, row)
        In saved order. Keys are joined with dots, as DCP does; the root is
        ``""``; a name that is taken gets ``#2``, ``#3``, ... One row may have
        several names: the tensor was saved under each.
    """
    out: list[tuple[str, Path, int]] = []
    taken: dict[str, int] = {}
    for path, leaf in leaves(root, budget):
        if not is_leaf(leaf):
            continue
        name = base = ".".join([str(key) for key in path])
        while name in taken:
            taken[base] += 1
            name = f"{base}#{taken[base]}"
        taken[name] = 1
        out.append((name, path, leaf.row))
    return out


def prune(root: Any, paths: Iterable[Path]) -> Any:
    """Return the part of a tree that leads to `paths`: dicts keep their type, lists and tuples their order."""
    wanted: dict[object, Any] = OrderedDict()
    for path in paths:
        node = wanted
        for key in path:
            node = node.setdefault(key, OrderedDict())
    return _pruned(root, wanted)


def _pruned(node: Any, wanted: dict[object, Any]) -> Any:
    if not wanted:
        return node
    if isinstance(node, dict):
        copy: Any = OrderedDict() if isinstance(node, OrderedDict) else {}
        copy.update((key, _pruned(child, wanted[key])) for key, child in node.items() if key in wanted)
        return copy
    parts = (_pruned(node[key], wanted[key]) for key in sorted(wanted))  # type: ignore[type-var]
    return tuple(parts) if isinstance(node, tuple) else list(parts)
