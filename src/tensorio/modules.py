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
# What naming the tensors of a module may cost, in bytes: a module may be shared many times within another.
BUDGET = 128 << 20
VISIT = 128

# What can't be a tensor of a TorchScript module.
_PLAIN = (str, bytes, int, float, complex, list, tuple, dict, set, frozenset, Opaque, type(None))
# Where the packed weights of quantised layers have their tensors.
_PACKED = {"_packed_params": (0,), "_packed_weight": (0, 1, 0)}
# Copies of what is in _parameters, in the state of recurrent layers.
_REPEATED = ("_flat_weights",)


class Parts(NamedTuple):
    """What a pickled module holds: steps to it from the module, name, value.

    Attributes
    ----------
    own : list
        What ``state_dict()`` has of the module itself, in its order.
    modules : list
        The modules in it.
    rest : list
        Everything else.
    """

    own: list[tuple[Path, str, Any]]
    modules: list[tuple[Path, str, Any]]
    rest: list[tuple[Path, str, Any]]


def is_module(node: object) -> bool:
    """Tell whether part of a tree is a pickled module of torch or a TorchScript module."""
    return type(node) is Opaque and _attributes(node)[0] is not None


def _attributes(node: Opaque) -> tuple[dict[Any, Any] | None, Path]:
    """Return the ``__dict__`` of a pickled module and the steps to it; None if it is no module."""
    if _is_script(node):
        return (node.state if isinstance(node.state, dict) else None), ("state",)
    if _has_modules(node.state):
        return node.state, ("state",)  # type: ignore[return-value]
    if node.args and _has_modules(node.args[0]):  # torch.fx: reduce_graph_module(dict, imports)
        return node.args[0], ("args", 0)  # type: ignore[return-value]
    return (_quantised_convolution(node.state) if _is_quantised(node) else None), ()


def _is_script(node: Opaque) -> bool:
    """Whether an object is of a class in TorchScript; those below ``torch.classes`` are in C++, and no modules."""
    named = f"{node.module}."
    return named.startswith(f"{SCRIPT}.") and not named.startswith(f"{SCRIPT}.torch.classes.")


def _has_modules(state: object) -> bool:
    return isinstance(state, dict) and all(isinstance(state.get(n), dict) for n in ("_parameters", "_modules"))


def _parts(node: Opaque) -> Parts:
    """Return what a pickled module holds; `is_module` must be true for it."""
    state, steps = _attributes(node)
    assert state is not None
    if not steps:
        return _convolution_parts(node, state)
    if _is_script(node):
        parts = _script_parts(state)
    else:
        parts = _eager_parts(node, state, steps)
    parts.rest.extend(_outside(node, steps))
    return parts


def _script_parts(state: dict[Any, Any]) -> Parts:
    """The attributes of a TorchScript module: whether a tensor is a parameter is in its code only."""
    parts = Parts([], [], [])
    for name, value in state.items():
        kind = parts.modules if is_module(value) else parts.rest if isinstance(value, _PLAIN) else parts.own
        kind.append((("state", name), str(name), value))
    return parts


def _eager_parts(node: Opaque, state: dict[Any, Any], steps: Path) -> Parts:
    parts = Parts([], [], [])
    passing = state.get("_non_persistent_buffers_set")  # since torch 1.6
    passing = passing if isinstance(passing, set | frozenset | list | tuple) else ()
    for group in ("_parameters", "_buffers"):
        held = state.get(group)
        for name, value in held.items() if isinstance(held, dict) else ():
            kept = value is not None and not (group == "_buffers" and name in passing)
            (parts.own if kept else parts.rest).append(((*steps, group, name), _name(name), _tensor(value)))
    for name, value in state["_modules"].items():
        if value is not None:
            (parts.modules if is_module(value) else parts.rest).append(((*steps, "_modules", name), _name(name), value))
    packed = list(_quantised(node, state))
    parts.own.extend(packed)
    taken = ["_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *_REPEATED]
    taken += [str(path[1]) for path, _, _ in packed if path]
    parts.rest.extend(((*steps, name), str(name), value) for name, value in state.items() if name not in taken)
    return parts


def _outside(node: Opaque, steps: Path) -> list[tuple[Path, str, Any]]:
    """What a module has besides its attributes; real ones have nothing."""
    found: list[tuple[Path, str, Any]] = []
    if node.args:
        places = [((("args", i)), f"args.{i}", arg) for i, arg in enumerate(node.args)]
        found += [place for place in places if place[0] != steps]
    for name, part in (("kwargs", node.kwargs), ("state", node.state), ("items", node.items)):
        if part and steps != (name,):
            found.append(((name,), name, part))
    return found


def _name(name: object) -> str:
    if type(name) is not str:
        raise HeaderError(f"a pickled module: expected names of its parameters and modules, found {escaped(name)}")
    return name


def _tensor(value: Any) -> Any:
    """What torch before 0.4 wrapped as a ``Variable`` or ``Parameter``."""
    wrapped = type(value) is Opaque and value.module.startswith("torch.") and value.name in ("Parameter", "Variable")
    return value.args[0] if wrapped and value.args else value


# --------------------------------------------------------- quantised modules


def _is_quantised(node: Opaque) -> bool:
    return node.module.startswith("torch.") and ".quantized." in node.module


def _quantised_convolution(state: object) -> dict[Any, Any] | None:
    """(ten settings, weight, bias, scale, zero point, training): what ``_ConvNd.__getstate__`` returns."""
    return dict(enumerate(state)) if type(state) is tuple and len(state) == 15 else None


def _convolution_parts(node: Opaque, state: dict[Any, Any]) -> Parts:
    own: list[tuple[Path, str, Any]] = [(("state", 10), "weight", state[10]), (("state", 11), "bias", state[11])]
    own += [((), name, value) for name, value in _scale(state[12], state[13]).items()]
    rest: list[tuple[Path, str, Any]] = [(("state", i), f"state.{i}", state[i]) for i in state if i not in (10, 11)]
    return Parts(own, [], [*rest, *_outside(node, ("state",))])


def _quantised(node: Opaque, state: dict[Any, Any]) -> Iterator[tuple[Path, str, Any]]:
    """What quantised layers add to their state dict from plain attributes."""
    if not _is_quantised(node):
        return
    if "_packed_params" in state["_modules"] and "scale" in state:
        for name, value in _scale(state["scale"], state.get("zero_point")).items():
            yield (), name, value
    for name, steps in _PACKED.items():
        held = state.get(name)
        if type(held) is Opaque and held.name == "ScriptObject":
            held = held.state
            for step in steps:
                held = held[step] if isinstance(held, tuple | list) and len(held) > step else None
            yield (), "dtype", state.get("dtype")
            yield ("state", name, "state", *steps), name, held


def _scale(scale: Any, zero_point: Any) -> dict[str, Any]:
    """Numbers as the tensors that torch makes of them."""
    import numpy as np

    if type(scale) not in (int, float) or type(zero_point) is not int or not -(1 << 63) <= zero_point < 1 << 63:
        return {}
    return {"scale": np.array(scale, np.float32), "zero_point": np.array(zero_point, np.int64)}


# ------------------------------------------------------------------ the trees


def module_children(node: Opaque) -> Iterator[tuple[Path, str, Any]]:
    """Yield everything that a pickled module holds, named so that tensors get the names of its state dict.

    Parameters
    ----------
    node : Opaque
        `is_module` must be true for it.

    Yields
    ------
    steps : tuple
        That lead from the module to the value.
    name : str
        What it adds to a tensor's name: the names of parameters, buffers and
        modules first, then those of other attributes.
    value : object

    Raises
    ------
    HeaderError
        Names that are not strings.
    """
    parts = _parts(node)
    yield from (part for part in parts.own if part[0])
    yield from parts.modules
    yield from parts.rest


def _inside(node: object) -> Iterator[tuple[object, object]]:
    """Keys and values of what a tree may have as a container; nothing for anything else."""
    if isinstance(node, dict):
        return iter(node.items())
    if isinstance(node, list | tuple | deque):
        return iter(enumerate(node))
    if type(node) is Opaque:
        return iter([("args", node.args), ("kwargs", node.kwargs), ("state", node.state), ("items", node.items)])
    if isinstance(node, Enum | type):
        return iter(())
    try:
        held = object.__getattribute__(node, "__dict__")
    except AttributeError:
        return iter(())
    return iter(held.items() if type(held) is dict else ())


def find(root: object) -> list[tuple[Path, Opaque]]:
    """Return the pickled modules in a tree that are in no other one, with the keys that lead to each.

    Goes into each container once, so that the cost is that of the tree.
    """
    if is_module(root):
        return [((), root)]  # type: ignore[list-item]
    found: list[tuple[Path, Opaque]] = []
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
        Modules are shared so often within each other that naming their tensors
        takes over 128 MiB.

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


def _collected(module: Opaque) -> OrderedDict[str, Any]:
    out: OrderedDict[str, Any] = OrderedDict()
    stack: list[tuple[str, Any, Iterator[tuple[Path, str, Any]]]] = [("", module, iter([((), "", module)]))]
    open_ids: set[int] = set()
    budget = BUDGET
    while stack:
        prefix, parent, modules = stack[-1]
        step = next(modules, None)
        if step is None:
            stack.pop()
            open_ids.discard(id(parent))
            continue
        _, name, node = step
        if id(node) in open_ids or len(stack) > MAX_DEPTH:
            raise HeaderError(f"a pickled module that contains itself, or over {MAX_DEPTH} levels of them")
        prefix = f"{prefix}{name}." if len(stack) > 1 else ""
        parts = _parts(node)
        budget -= VISIT + len(prefix) * (1 + len(parts.own))
        if budget < 0:
            raise LimitError("a pickled module is shared so often within itself that its tensors can't be named")
        for _, own, value in parts.own:
            if prefix + own in out:
                raise HeaderError(f"a pickled module: the name {escaped(prefix + own)} occurs twice")
            out[prefix + own] = value
        stack.append((prefix, node, iter(parts.modules)))
        open_ids.add(id(node))
    return out
