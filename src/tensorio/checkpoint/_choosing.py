"""Which tensors are meant, by patterns over their names, and the part of an object that has them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tensorio.arraylike import is_tensor
from tensorio.errors import TensorMismatchError, TensorNotFoundError, escaped
from tensorio.kinds import TensorKind
from tensorio.tp._patterns import Pattern
from tensorio.tree import Path, prune

__all__ = ["Choice", "chosen_part", "like", "part_of"]


class Choice:
    """Patterns for what is wanted, and for what is not.

    Parameters
    ----------
    include : str or iterable of str, optional
        Patterns, as `tensorio.tp` has them; all tensors if not given.
    exclude : str or iterable of str, optional
        The same, for tensors to leave out of those.

    Raises
    ------
    ValueError
        A pattern means nothing.
    """

    def __init__(self, include: str | Iterable[str] | None, exclude: str | Iterable[str] | None) -> None:
        self._include = None if include is None else _patterns("include", include)
        self._exclude = () if exclude is None else _patterns("exclude", exclude)

    @property
    def everything(self) -> bool:
        """Whether no pattern was given."""
        return self._include is None and not self._exclude

    @property
    def only(self) -> bool:
        """Whether it says what is wanted, so that what is no tensor is not."""
        return self._include is not None

    def of(self, names: Iterable[str]) -> set[str]:
        """Return the names that are chosen.

        Raises
        ------
        TensorNotFoundError
            A pattern of `include` fits no name.
        TensorMismatchError
            Nothing is left.
        """
        names = list(names)
        wanted = set(names)
        if self._include is not None:
            wanted = set()
            for pattern in self._include:
                found = {name for name in names if pattern.fits(name)}
                if not found:
                    raise TensorNotFoundError(
                        f"include={escaped(pattern.text)} fits none of {len(names)} tensors; * stays within a level of "
                        "a name, ** goes over any number of them"
                    )
                wanted |= found
        wanted = {name for name in wanted if not any(pattern.fits(name) for pattern in self._exclude)}
        if names and not wanted:
            raise TensorMismatchError("include= and exclude= leave no tensor")
        return wanted


def _patterns(option: str, given: str | Iterable[str]) -> tuple[Pattern, ...]:
    texts = (given,) if isinstance(given, str) else tuple(given)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{option}= is a pattern or several")
    return tuple(map(Pattern, texts))


# ---------------------------------------------------------------------------- objects


def chosen_part(obj: Any, choice: Choice) -> Any:
    """Return the part of an object with the chosen tensors; containers on the way are made anew, the rest is shared.

    Parameters
    ----------
    obj : object
        Tensors in nested mappings, lists and tuples, named as `tensorio.open` names them.
    choice : Choice
        With ``include``, what is no tensor is left out, too.

    Raises
    ------
    TensorMismatchError
        No mapping, list or tuple.
    """
    if choice.everything:
        return obj
    if _inside(obj) is None:
        raise TensorMismatchError(f"include= and exclude= choose out of mappings and lists, found {type(obj).__name__}")
    found = [(".".join(map(str, path)), path) for path in _tensors(obj)]
    wanted = choice.of(name for name, _ in found)
    return part_of(obj, [(path, name in wanted) for name, path in found], choice.only)


def part_of(tree: Any, paths: Iterable[tuple[Path, bool]], only: bool) -> Any:
    """Return a tree with those of its tensors that are wanted.

    Parameters
    ----------
    tree : object
    paths : iterable of (path, bool)
        Where its tensors are, and whether each is wanted. A tensor that has several parts is kept or left out whole:
        with any of them.
    only : bool
        Whether to leave out all that does not lead to a tensor.
    """
    paths = list(paths)
    if only:
        return prune(tree, [path for path, wanted in paths if wanted])
    out: dict[Any, Any] = {}
    for path, wanted in paths:
        if not wanted:
            node = out
            for key in path:
                node = node.setdefault(key, {})
    return _without(tree, out)


def _without(node: Any, out: dict[Any, Any]) -> Any:
    """A container without what `out` leads to; what has no inside of its own goes whole."""
    inside = _inside(node)
    if inside is None:
        return node
    kept = []
    for key, child in inside:
        if key not in out:
            kept.append((key, child))
        elif out[key] and _inside(child) is not None:
            kept.append((key, _without(child, out[key])))
    if isinstance(node, Mapping):
        return like(node, kept)
    return tuple(child for _, child in kept) if isinstance(node, tuple) else [child for _, child in kept]


def like(node: Mapping[Any, Any], items: Iterable[tuple[Any, Any]]) -> Any:
    """Return a dict of the same sort with other items."""
    if not isinstance(node, OrderedDict):
        return dict(items)
    copy = OrderedDict(items)
    copy.__dict__.update(vars(node))  # the versions that torch notes on a state dict
    return copy


def _inside(node: Any) -> Iterator[tuple[Any, Any]] | None:
    """Keys and values of a container that tensors may be chosen out of; None for anything else."""
    if hasattr(node, "shape") or isinstance(node, TensorKind):
        return None
    if isinstance(node, Mapping):
        return iter(node.items())
    return iter(enumerate(node)) if isinstance(node, list | tuple) else None


def _tensors(root: Any) -> Iterator[Path]:
    """The paths of an object's tensors; cycles are left to whoever writes it."""
    stack: list[tuple[Path, Any, frozenset[int]]] = [((), root, frozenset({id(root)}))]
    while stack:
        path, node, above = stack.pop()
        inside = _inside(node)
        if inside is None:
            if is_tensor(node) or isinstance(node, TensorKind):
                yield path
            continue
        children = [((*path, key), child, above | {id(child)}) for key, child in inside if id(child) not in above]
        stack.extend(reversed(children))
