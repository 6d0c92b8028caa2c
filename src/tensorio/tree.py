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

MAX_DEPTH = 10_000  # levels; real ones have less than 20
NODE_COST = 64  # bytes; what a step of a walk makes


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
    open already.

    Parameters
    ----------
    root : object
    budget : int
        Bytes that the walk may cost, counted as `NODE_COST` a node and 8 a key
        of each path.

    Raises
    ------
    LimitError
        Over the budget, or deeper than `MAX_DEPTH`.
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
        budget -= NODE_COST
        if not isinstance(child, dict | list | tuple | Opaque):
            budget -= 8 * len(path)
            yield (*path, key), child
        elif id(child) not in open_ids:
            path.append(key)
            stack.append((_children(child), id(child)))
            open_ids.add(id(child))
            if len(path) > MAX_DEPTH:
                raise LimitError(f"the saved object has over {MAX_DEPTH} levels")
        if budget < 0:
            raise LimitError("the saved object is shared so often within itself that its parts can't be listed")


def fqns(root: object, budget: int) -> list[tuple[str, Path, int]]:
    """Name every tensor of a tree.

    Parameters
    ----------
    root : object
    budget : int
        Bytes that the names may take, and the walk may cost; see `leaves`.

    Returns
    -------
    list of (fqn, keys, row)
        In saved order. Keys are joined with dots, as DCP does; the root is
        ``""``; a name that is taken gets ``#2``, ``#3``, ... One row may have
        several names: the tensor was saved under each.
    """
    if isinstance(root, dict) and all(type(key) is str and is_leaf(child) for key, child in root.items()):
        return [(key, (key,), child.row) for key, child in root.items()]  # most files: one level, no budget needed
    out: list[tuple[str, Path, int]] = []
    taken: dict[str, int] = {}
    left = budget
    for path, leaf in leaves(root, budget):
        if not is_leaf(leaf):
            continue
        name = base = ".".join([str(key) for key in path])
        left -= len(name)
        if left < 0:
            raise LimitError("the names of the saved tensors take far more room than the object itself")
        while name in taken:
            taken[base] += 1
            name = f"{base}#{taken[base]}"
        taken[name] = 1
        out.append((name, path, leaf.row))
    return out


def prune(root: Any, paths: Iterable[Path]) -> Any:
    """Return the part of a tree that leads to `paths`: dicts keep their type, lists and tuples their order."""
    wanted: dict[object, Any] = {}
    for path in paths:
        node = wanted
        for key in path:
            node = node.setdefault(key, {})
    out: list[Any] = [root]
    todo: list[tuple[Any, Any, Any, dict[object, Any]]] = [(out, 0, root, wanted)]
    tuples: list[tuple[Any, Any, list[Any]]] = []
    while todo:
        holder, place, tree, keys = todo.pop()
        if not keys or type(tree) is Opaque:
            holder[place] = tree
        elif isinstance(tree, dict):
            copy: Any = OrderedDict() if isinstance(tree, OrderedDict) else {}
            holder[place] = copy
            copy.update((key, None) for key in tree if key in keys)
            todo.extend((copy, key, tree[key], keys[key]) for key in copy)
        else:
            part: list[Any] = [None] * len(keys)
            holder[place] = part
            todo.extend((part, i, tree[key], keys[key]) for i, key in enumerate(sorted(keys)))  # type: ignore[type-var]
            if isinstance(tree, tuple):
                tuples.append((holder, place, part))
    for holder, place, part in reversed(tuples):  # inner ones were met later
        holder[place] = tuple(part)
    return out[0]
