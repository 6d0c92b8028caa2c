"""Whole pickled modules of torch: their parameters and buffers by name, as ``state_dict()`` gives them.

A pickled ``torch.nn.Module`` is an `Opaque` whose state is the module's
``__dict__``: ``_parameters``, ``_buffers`` and ``_modules`` are dicts by name.
A TorchScript module (``__torch__.*``) is one whose state has its tensors and
modules directly. Nothing of either is run.

Source: ``Module.state_dict`` and ``_save_to_state_dict`` of
``torch/nn/modules/module.py``, torch 2.13; the quantised classes of
``torch/ao/nn/quantized/modules``.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

from tensorio.errors import HeaderError, LimitError, escaped
from tensorio.values import Opaque

__all__ = ["find", "is_module", "module_children", "state_dict"]

Path = tuple[object, ...]

SCRIPT = "__torch__"  # what TorchScript puts before a class's name
MAX_DEPTH = 10_000  # levels of modules in one another; real ones have less than 20
# Steps that naming tensors may take, beyond some for each thing in a module: one may be in others many times.
SHARED_STEPS = 100_000
OWN_STEPS = 4
PREFIX_STEP = 64  # characters that are put before a name and cost as much as another name

# What can't be a tensor of a TorchScript module.
_PLAIN = (str, bytes, int, float, complex, list, tuple, dict, set, frozenset, Opaque, type(None))
# Where the packed weights of quantised layers have their tensors.
_PACKED = {"_packed_params": (0,), "_packed_weight": (0, 1, 0)}
# Copies of what is in _parameters, in the state of recurrent layers.
_REPEATED = ("_flat_weights",)


class Member(NamedTuple):
    """Something that a pickled module holds.

    Attributes
    ----------
    steps : tuple
        That lead from the module to it; empty if it is made of numbers.
    name : str
    value : object
    group : {"own", "module", "skipped", "rest"}
        Whether it is in the module's state dict, is a module inside it, would be
        either but for its value, or is something else.
    """

    steps: Path
    name: str
    value: Any
    group: str


def is_module(node: object) -> bool:
    """Tell whether part of a tree is a pickled module of torch or a TorchScript module."""
    return _attributes(node)[0] is not None


def _attributes(node: object) -> tuple[dict[Any, Any] | None, Path]:
    """Return the ``__dict__`` of a pickled module and the steps to it; None if it is no module."""
    if type(node) is not Opaque:  # an object of an allowed class
        held = _instance_dict(node)
        return (held if _has_modules(held) else None), ()
    if _is_script(node):
        return (node.state if isinstance(node.state, dict) else None), ("state",)
    if _has_modules(node.state):
        return node.state, ("state",)  # type: ignore[return-value]
    if node.args and _has_modules(node.args[0]):  # torch.fx: reduce_graph_module(dict, imports)
        return node.args[0], ("args", 0)  # type: ignore[return-value]
    return (_convolution(node.state) if _is_quantised(node) else None), ("state",)


def _instance_dict(node: object) -> dict[Any, Any] | None:
    try:
        held = object.__getattribute__(node, "__dict__")
    except AttributeError:
        return None
    return held if type(held) is dict else None


def _is_script(node: Opaque) -> bool:
    """Whether an object is of a class in TorchScript; those below ``torch.classes`` are in C++, and no modules."""
    named = f"{node.module}."
    return named.startswith(f"{SCRIPT}.") and not named.startswith(f"{SCRIPT}.torch.classes.")


def _has_modules(state: object) -> bool:
    return isinstance(state, dict) and all(isinstance(state.get(n), dict) for n in ("_parameters", "_modules"))


def _members(node: Any) -> Iterator[Member]:
    """Yield all that a pickled module holds: what is in its state dict, then modules, then the rest.

    Nothing is gone through ahead of what is yielded, so that whoever counts what is yielded
    has counted the cost.
    """
    state, steps = _attributes(node)
    assert state is not None
    if type(node) is not Opaque:
        yield from _eager_members(node, state, steps)
    elif _is_script(node):
        yield from _script_members(state)
    elif _has_modules(state):
        yield from _eager_members(node, state, steps)
    else:
        yield from _convolution_members(state)
    if type(node) is Opaque:
        yield from _outside(node, steps)


def _script_members(state: dict[Any, Any]) -> Iterator[Member]:
    """The attributes of a TorchScript module: whether a tensor is a parameter is in its code only."""
    for name, value in state.items():
        if not isinstance(value, _PLAIN):
            yield Member(("state", name), str(name), value, "own")
    for name, value in state.items():
        if isinstance(value, _PLAIN):
            yield Member(("state", name), str(name), value, "module" if is_module(value) else "skipped")


def _eager_members(node: Any, state: dict[Any, Any], steps: Path) -> Iterator[Member]:
    passing = state.get("_non_persistent_buffers_set")  # since torch 1.6
    passing = passing if isinstance(passing, set | frozenset) else ()
    for group in ("_parameters", "_buffers"):
        held = state.get(group)
        for name, value in held.items() if isinstance(held, dict) else ():
            kept = value is not None and not (group == "_buffers" and name in passing)
            yield Member((*steps, group, name), str(name), _tensor(value), "own" if kept else "skipped")
    packed = list(_quantised(node, state, steps))
    yield from packed
    for name, value in state["_modules"].items():
        yield Member((*steps, "_modules", name), str(name), value, "module" if is_module(value) else "skipped")
    taken = ["_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *_REPEATED]
    taken += [str(member.steps[len(steps)]) for member in packed if member.steps]
    for name, value in state.items():
        yield Member((*steps, name), str(name), value, "rest" if name not in taken else "taken")


def _outside(node: Opaque, steps: Path) -> Iterator[Member]:
    """What a module has besides its attributes; real ones have nothing."""
    for i, part in enumerate(node.args or ()):
        if steps != ("args", i):
            yield Member(("args", i), f"args.{i}", part, "rest")
    for name, more in (("kwargs", node.kwargs), ("state", node.state), ("items", node.items)):
        if more and steps != (name,):
            yield Member((name,), name, more, "rest")


def _tensor(value: Any) -> Any:
    """What torch before 0.4 wrapped as a ``Variable`` or ``Parameter``."""
    wrapped = type(value) is Opaque and value.module.startswith("torch.") and value.name in ("Parameter", "Variable")
    return value.args[0] if wrapped and value.args else value


# --------------------------------------------------------- quantised modules


def _is_quantised(node: object) -> bool:
    return type(node) is Opaque and node.module.startswith("torch.") and ".quantized." in node.module


def _convolution(state: object) -> dict[Any, Any] | None:
    """(ten settings, weight, bias, scale, zero point, training): what ``_ConvNd.__getstate__`` returns."""
    return dict(enumerate(state)) if type(state) is tuple and len(state) == 15 else None


def _convolution_members(state: dict[Any, Any]) -> Iterator[Member]:
    yield Member(("state", 10), "weight", state[10], "own")
    yield Member(("state", 11), "bias", state[11], "own")
    for name, value in _scale(state[12], state[13]).items():
        yield Member((), name, value, "own")
    for i in (*range(10), 12, 13, 14):
        yield Member(("state", i), f"state.{i}", state[i], "rest")


def _quantised(node: object, state: dict[Any, Any], steps: Path) -> Iterator[Member]:
    """What quantised layers add to their state dict from plain attributes."""
    if not _is_quantised(node):
        return
    if "_packed_params" in state["_modules"] and "scale" in state:
        for name, value in _scale(state["scale"], state.get("zero_point")).items():
            yield Member((), name, value, "own")
    for name, inner in _PACKED.items():
        held = state.get(name)
        if type(held) is Opaque and held.name == "ScriptObject":
            held = held.state
            for step in inner:
                held = held[step] if isinstance(held, tuple | list) and len(held) > step else None
            yield Member((), "dtype", state.get("dtype"), "own")
            yield Member((*steps, name, "state", *inner), name, held, "own")


def _scale(scale: Any, zero_point: Any) -> dict[str, Any]:
    """Numbers as the tensors that torch makes of them."""
    import numpy as np

    if type(scale) not in (int, float) or type(zero_point) is not int or not -(1 << 63) <= zero_point < 1 << 63:
        return {}
    return {"scale": np.array(scale, np.float32), "zero_point": np.array(zero_point, np.int64)}


# ------------------------------------------------------------------ the trees


def module_children(node: Any) -> Iterator[tuple[Path, str, Any]]:
    """Yield everything that a pickled module holds, named so that tensors get the names of its state dict.

    Parameters
    ----------
    node : object
        `is_module` must be true for it.

    Yields
    ------
    steps : tuple
        That lead from the module to the value: attributes of an `Opaque`, keys,
        and attributes of an object of an allowed class.
    name : str
        What it adds to a tensor's name: the names of parameters, buffers and
        modules first, then those of other attributes.
    value : object
    """
    return ((m.steps, m.name, m.value) for m in _members(node) if m.steps and m.group != "taken")


def _inside(node: object) -> Iterator[tuple[object, object]]:
    """Keys and values of what a tree may have as a container; nothing for anything else."""
    if isinstance(node, dict):
        return iter(node.items())
    if isinstance(node, list | tuple | deque):
        return iter(enumerate(node))
    if type(node) is Opaque:
        return iter([("args", node.args), ("kwargs", node.kwargs), ("state", node.state), ("items", node.items)])
    held = None if isinstance(node, Enum) else _instance_dict(node)
    return iter((held or {}).items())


def find(root: object) -> list[tuple[Path, Any]]:
    """Return the pickled modules in a tree that are in no other one, with the keys that lead to each.

    Goes into each container once, so that the cost is that of the tree.
    """
    if is_module(root):
        return [((), root)]
    found: list[tuple[Path, Any]] = []
    seen = {id(root)}
    stack: list[tuple[Any, Any]] = [(_inside(root), None)]  # with its key, and that of what it is in, and so on
    while stack:
        inner, keys = stack[-1]
        step = next(inner, None)
        if step is None:
            stack.pop()
        elif id(step[1]) not in seen and not isinstance(step[1], str | bytes | int | float):
            seen.add(id(step[1]))
            if is_module(step[1]):
                found.append((_path((step[0], keys)), step[1]))
            else:
                stack.append((_inside(step[1]), (step[0], keys)))
    return found


def _path(keys: Any) -> Path:
    path = []
    while keys is not None:
        key, keys = keys
        path.append(key)
    return tuple(reversed(path))


def state_dict(obj: Any) -> OrderedDict[str, Any]:
    """Return the parameters and buffers of a pickled ``torch.nn.Module``, as its ``state_dict()`` would.

    Parameters
    ----------
    obj : object
        What `load` returned with ``unknown="opaque"``: a module, or nested dicts
        and lists that hold exactly one (in ``{"epoch": 3, "model": module}``, that
        of ``"model"``).

    Returns
    -------
    OrderedDict of str to ndarray
        Names and order are those of torch; the arrays are those of `obj`.

    Raises
    ------
    TypeError
        There is no module in `obj`.
    ValueError
        There are several; the message names them.
    HeaderError
        Names that are not strings, or occur twice; a module that contains
        itself.
    LimitError
        Modules are shared so often within each other that their tensors have
        many times more names than there are tensors.

    Notes
    -----
    The module's own code is not run: what it adds by ``get_extra_state()``, by
    hooks or by a ``state_dict`` of its own is missing. TorchScript does not
    write down which of a module's tensors are parameters and buffers: all
    tensors that are attributes count.
    """
    found = find(obj)
    if not found:
        raise TypeError(
            f"expected a pickled torch.nn.Module, opened with unknown='opaque', found none in {type(obj).__name__}"
        )
    if len(found) > 1:
        shown = ", ".join("".join(f"[{escaped(key)}]" for key in path[:8]) for path, _ in found[:4])
        raise ValueError(
            f"expected one pickled module, found {len(found)}: {shown}; pass one of them, e.g. state_dict(obj[...])"
        )
    return _collected(found[0][1])


def _size(module: Any, seen: set[int]) -> int:
    """How much a module holds that was not counted before."""
    state = _attributes(module)[0] or {}
    parts = [state, *(state.get(name) for name in ("_parameters", "_buffers", "_modules"))]
    new = [part for part in parts if isinstance(part, dict) and id(part) not in seen]
    seen.update(map(id, new))
    return sum(map(len, new))


def _collected(module: Any) -> OrderedDict[str, Any]:
    out: OrderedDict[str, Any] = OrderedDict()
    stack = [("", module, _members(module))]
    open_ids = {id(module)}
    seen: set[int] = set()
    left = SHARED_STEPS + OWN_STEPS * _size(module, seen)
    while stack:
        prefix, node, members = stack[-1]
        member = next(members, None)
        if member is None or member.group in ("rest", "taken"):
            stack.pop()
            open_ids.discard(id(node))
            continue
        left -= 1 + len(prefix) // PREFIX_STEP
        if left < 0:
            raise LimitError("a pickled module is shared so often within itself that its tensors can't be named")
        if member.group == "skipped":
            continue
        name = prefix + member.name
        if member.steps and type(member.steps[-1]) is not str and not _is_quantised(node):
            raise HeaderError(f"a pickled module: expected a str as name, found {escaped(member.name)}")
        if member.group == "module":
            if id(member.value) in open_ids or len(stack) > MAX_DEPTH:
                raise HeaderError(f"a pickled module that contains itself, or over {MAX_DEPTH} levels of them")
            stack.append((f"{name}.", member.value, _members(member.value)))
            open_ids.add(id(member.value))
            left += OWN_STEPS * _size(member.value, seen)
        elif name in out:
            raise HeaderError(f"a pickled module: the name {escaped(name)} occurs twice")
        else:
            out[name] = member.value
    return out
