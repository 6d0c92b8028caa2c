"""What other modules took by ``from ... import`` before it was replaced: found in their globals and bound anew."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NamedTuple

__all__ = ["Binding", "Pairs", "rebind", "restore"]

# id of an object -> (the object, what takes its place). By identity: what is looked through need not be hashable.
Pairs = dict[int, tuple[object, object]]


class Binding(NamedTuple):
    """A name in a module's globals that was bound anew."""

    namespace: dict[str, Any]
    name: str
    old: object
    new: object


def rebind(pairs: Pairs, leave: tuple[str, ...]) -> list[Binding]:
    """Bind every global that is one of `pairs` to its replacement.

    Parameters
    ----------
    pairs : dict
    leave : tuple of str
        Packages whose modules keep what they have: those that call the originals.

    Returns
    -------
    list of Binding
        For `restore`.
    """
    done = []
    for module_name, module in list(sys.modules.items()):
        # Straight from the dictionary: attributes of lazy modules would import what they stand for.
        if not isinstance(module, ModuleType) or module_name.split(".")[0] in leave:
            continue
        namespace = module.__dict__
        for name, value in list(namespace.items()):
            pair = pairs.get(id(value))
            if pair is not None:
                namespace[name] = pair[1]
                done.append(Binding(namespace, name, *pair))
    return done


def restore(bindings: list[Binding]) -> None:
    """Undo `rebind`, where the name has not been bound to something else since."""
    for binding in bindings:
        if binding.namespace.get(binding.name) is binding.new:
            binding.namespace[binding.name] = binding.old
