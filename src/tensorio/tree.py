"""The tree: what was saved, with a leaf at each tensor.

Walks are iterative and bounded, since a tree from a file may be deep, shared a
thousandfold or contain itself.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

from tensorio import modules
from tensorio._unpickler import Leaf
from tensorio.arraylike import is_tensor
from tensorio.errors import LimitError
from tensorio.kinds import TensorKind
from tensorio.values import Device, Opaque, Size

__all__ = [
    "Path",
    "Step",
    "children",
    "filled",
    "fqns",
    "is_kind",
    "is_leaf",
    "leaves",
    "name_of",
    "prune",
]

Path = tuple[object, ...]

MAX_NESTED = 64  # levels within one tensor; real ones have 3
MAX_DEPTH = 10_000  # levels; real ones have less than 20
NODE_COST = 64  # bytes; what a step of a walk makes

_PLAIN = (str, bytes, bytearray, int, float, complex, type, Enum, Size, Device)  # have nothing inside


# Types with nothing inside, looked up before any other question is asked; NumPy's and torch's are added when first met.
_INNERMOST: set[type] = {Leaf, type(None), bool, str, bytes, int, float}
_THEIRS = ("numpy", "torch", "torch.nn.parameter")  # modules of the types that live as long as the process


class Step(str):
    """A key that names leave out: a step from an opaque object to its attributes."""

    __slots__ = ()


_STATE = Step("state")


def is_leaf(obj: object) -> bool:
    """Tell whether a node stands for a tensor."""
    return isinstance(obj, Leaf)


def is_kind(obj: object) -> bool:
    """Tell whether a node is a tensor that NumPy has no array for; its parts are leaves."""
    return isinstance(obj, TensorKind)


def name_of(path: Path) -> str:
    """Return the full dotted name of what is at the end of a path."""
    return ".".join([str(key) for key in path if type(key) is not Step])


def children(node: object) -> Iterator[tuple[Path, object]] | None:
    """Return the keys to, and values of, what is directly inside a node; None if it is no container.

    An opaque object's attributes count as its own: the step to its state is not
    in their names, as it is not in those of a module's state dict.
    """
    if isinstance(node, dict):
        return (((key,), child) for key, child in node.items())
    if isinstance(node, list | tuple | deque) and not isinstance(node, Size | Device):
        return (((key,), child) for key, child in enumerate(node))
    if type(node) in _INNERMOST or isinstance(node, _PLAIN):
        return None
    if type(node) is Opaque:
        return _opaque_children(node)
    if is_tensor(node):  # some have attributes
        if type(node).__module__ in _THEIRS:
            _INNERMOST.add(type(node))
        return None
    if isinstance(node, TensorKind):
        parts = node.parts()
        return (((key,), child) for key, child in parts.items()) if parts else None
    return _object_children(node)


def _module_children(node: object) -> Iterator[tuple[Path, object]]:
    """Those of a pickled module, so that its tensors get the names of its state dict."""
    for steps, name, child in modules.module_children(node):
        yield (*(Step(step) for step in steps[:-1]), steps[-1] if name == str(steps[-1]) else name), child


def _opaque_children(node: Opaque) -> Iterator[tuple[Path, object]]:
    if modules.is_module(node):
        yield from _module_children(node)
        return
    state_key = _STATE if isinstance(node.state, dict | Opaque) else "state"
    for key, part in (("args", node.args), ("kwargs", node.kwargs), (state_key, node.state), ("items", node.items)):
        if part is not None and not (isinstance(part, tuple | list) and not part):  # arrays can't be compared
            yield (key,), part


def _object_children(node: object) -> Iterator[tuple[Path, object]] | None:
    """The attributes of an object of an allowed class, or a namespace."""
    if modules.is_module(node):
        return _module_children(node)
    try:
        held = object.__getattribute__(node, "__dict__")
    except AttributeError:
        return None
    return (((key,), child) for key, child in held.items()) if type(held) is dict and held else None


def leaves(root: object, budget: int, *, kinds: bool = False) -> Iterator[tuple[Path, Any]]:
    """Yield path and value of everything that is no container, in saved order.

    Goes through shared containers each time, but not into a container that is
    open already.

    Parameters
    ----------
    root : object
    budget : int
        Bytes that the walk may cost, counted as `NODE_COST` a node and 8 a key
        of each path.
    kinds : bool
        Whether to yield tensors that NumPy has no array for, too, each before its
        parts.

    Raises
    ------
    LimitError
        Over the budget, or deeper than `MAX_DEPTH`.
    """
    inside = children(root)
    if inside is None:
        yield (), root
        return
    if kinds and is_kind(root):
        yield (), root
    path: list[object] = []
    stack = [(inside, id(root), 0)]
    open_ids = {id(root)}
    while stack:
        inner, ident, taken = stack[-1]
        for keys, child in inner:
            budget -= NODE_COST
            if type(child) in _INNERMOST or (inside := children(child)) is None:
                budget -= 8 * len(path)
                yield (*path, *keys), child
            elif id(child) not in open_ids:
                path.extend(keys)
                if kinds and is_kind(child):
                    yield tuple(path), child
                stack.append((inside, id(child), len(keys)))
                open_ids.add(id(child))
                if len(stack) > MAX_DEPTH:
                    raise LimitError(f"the saved object has over {MAX_DEPTH} levels")
            if budget < 0:
                raise LimitError("the saved object is shared so often within itself that its parts can't be listed")
            if stack[-1][0] is not inner:
                break
        else:
            stack.pop()
            open_ids.discard(ident)
            del path[len(path) - taken :]


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
        name = base = name_of(path)
        left -= len(name)
        if left < 0:
            raise LimitError("the names of the saved tensors take far more room than the object itself")
        while name in taken:
            taken[base] += 1
            name = f"{base}#{taken[base]}"
        taken[name] = 1
        out.append((name, path, leaf.row))
    return out


def filled(node: Any, make: Callable[[int], Any], depth: int = 0) -> Any:
    """Return a kind of tensor with what `make` returns for each row in the place of its leaves.

    Raises
    ------
    LimitError
        Over `MAX_NESTED` levels of tensors and containers in it.
    """
    if depth > MAX_NESTED:
        raise LimitError(f"a tensor of over {MAX_NESTED} tensors in one another")
    if is_leaf(node):
        return make(node.row)
    if is_kind(node):
        return node.replaced({key: filled(part, make, depth + 1) for key, part in node.parts().items()})
    if isinstance(node, dict):
        return {key: filled(part, make, depth + 1) for key, part in node.items()}
    if type(node) in (list, tuple):
        return type(node)([filled(part, make, depth + 1) for part in node])
    return node


def prune(root: Any, paths: Iterable[Path]) -> Any:
    """Return the part of a tree that leads to `paths`: dicts keep their type, lists and tuples their order."""
    wanted: dict[object, Any] = {}
    for path in paths:
        node = wanted
        for key in path:
            node = node.setdefault(key, {})
    out: list[Any] = [root]
    todo: list[tuple[Any, Any, Any, dict[Any, Any]]] = [(out, 0, root, wanted)]
    tuples: list[tuple[Any, Any, list[Any]]] = []
    while todo:
        holder, place, tree, keys = todo.pop()
        if not keys or not isinstance(tree, dict | list | tuple):
            holder[place] = tree
        elif isinstance(tree, dict):
            copy: Any = OrderedDict() if isinstance(tree, OrderedDict) else {}
            holder[place] = copy
            copy.update((key, None) for key in tree if key in keys)
            todo.extend((copy, key, tree[key], keys[key]) for key in copy)
            if isinstance(tree, OrderedDict):
                copy.__dict__.update(vars(tree))  # the versions that torch notes on a state dict
        else:
            part: list[Any] = [None] * len(keys)
            holder[place] = part
            todo.extend((part, i, tree[key], keys[key]) for i, key in enumerate(sorted(keys)))
            if isinstance(tree, tuple):
                tuples.append((holder, place, part))
    for holder, place, part in reversed(tuples):  # inner ones were met later
        holder[place] = tuple(part)
    return out[0]
