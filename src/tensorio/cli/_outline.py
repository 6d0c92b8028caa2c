"""The saved object as an indented outline: chains joined, numbered modules of equal structure folded into one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tensorio.cli._survey import Entry, labels_of
from tensorio.cli._text import shown

__all__ = ["Line", "Node", "lines", "outline"]

LABEL_MAX = 80
RUNS_MAX = 3  # runs of numbers that a folded label names
NUMBER_DIGITS = 9  # a longer number is a name


class Node:
    """One level of a name.

    Attributes
    ----------
    entry : Entry or None
        What is here itself: a tensor, a value, an object that was not made.
    children : dict of str to Node
    alike : int
        Key of its structure; equal for nodes of the same names, dtypes and shapes all the way down.
    tensors, nbytes : int
        Of everything at and below it.
    """

    __slots__ = ("alike", "children", "entry", "nbytes", "tensors")

    def __init__(self) -> None:
        self.entry: Entry | None = None
        self.children: dict[str, Node] = {}
        self.alike = self.tensors = self.nbytes = 0


class Line(NamedTuple):
    """One line of an outline.

    Attributes
    ----------
    rails : tuple of bool
        Per level, from the outermost: whether more siblings follow below.
    label : str
        Ready to print.
    node : Node
        Of folded ones, the first.
    times : int
        How many modules of equal structure it stands for.
    tensors, nbytes : int
        Of everything that the line stands for.
    """

    rails: tuple[bool, ...]
    label: str
    node: Node
    times: int
    tensors: int
    nbytes: int


def outline(entries: Iterable[Entry], strange: set[str]) -> Node:
    """Arrange entries by the levels of their names.

    Parameters
    ----------
    strange : set of str
        Names of tensors that must not be folded with others: they share bytes.
    """
    root = Node()
    for entry in entries:
        node = root
        for label in labels_of(entry.path):
            node = node.children.setdefault(label, Node())
        node = _free(root, node, entry)
        node.entry = entry
    _sum_up(root, {}, strange)
    return root


def _free(root: Node, node: Node, entry: Entry) -> Node:
    """The node itself, or a sibling under another name if two entries have the same levels."""
    if node.entry is None:
        return node
    number = 2
    while (label := f"{'.'.join(labels_of(entry.path))}#{number}") in root.children:
        number += 1
    return root.children.setdefault(label, Node())


def _sum_up(node: Node, known: dict[object, int], strange: set[str]) -> None:
    """Fill in totals and keys of structure from the leaves up; at most `LEVELS_MAX` deep."""
    info = node.entry.tensor if node.entry is not None else None
    if info is not None:
        node.tensors, node.nbytes = 1, info.nbytes
    for child in node.children.values():
        _sum_up(child, known, strange)
        node.tensors += child.tensors
        node.nbytes += child.nbytes
    if len(node.children) > 1 and all(map(_is_number, node.children)):
        node.children = dict(sorted(node.children.items(), key=lambda item: int(item[0])))
    own = _own_key(node.entry, strange)
    key = own, tuple((label, child.alike) for label, child in node.children.items())
    node.alike = known.setdefault(key, len(known))


def _own_key(entry: Entry | None, strange: set[str]) -> object:
    if entry is None:
        return None
    if entry.tensor is None:
        return entry.kind, entry.text if entry.kind == "refused" else None
    info = entry.tensor
    return info.fqn if info.fqn in strange else (info.dtype, info.shape, info.contiguous, info.flags)


def _is_number(label: str) -> bool:
    return label.isascii() and label.isdecimal() and len(label) <= NUMBER_DIGITS


# --------------------------------------------------------------------------- lines


def lines(root: Node, *, fold: bool) -> Iterator[Line]:
    """Yield the outline's lines from top to bottom."""
    if root.entry is not None:
        yield Line((), "(the object itself)", root, 1, 1, root.nbytes)
    yield from _below(root, (), fold)


def _below(node: Node, rails: tuple[bool, ...], fold: bool) -> Iterator[Line]:
    groups = _groups(node, fold)
    for i, group in enumerate(groups):
        yield from _group(group, (*rails, i < len(groups) - 1), fold)


def _group(group: list[tuple[str, Node]], rails: tuple[bool, ...], fold: bool) -> Iterator[Line]:
    """The line of one node (or several alike), joined with the only thing below it, and what is below that."""
    label, times = _label(group), len(group)
    tensors, nbytes = sum(n.tensors for _, n in group), sum(n.nbytes for _, n in group)
    node = group[0][1]
    while node.entry is None and len(below := _groups(node, fold)) == 1:
        (inner,) = below
        label, times, node = f"{label}.{_label(inner)}", times * len(inner), inner[0][1]
    yield Line(rails, label, node, times, tensors, nbytes)
    yield from _below(node, rails, fold)


def _groups(node: Node, fold: bool) -> list[list[tuple[str, Node]]]:
    """The children, those together that differ in nothing but their number."""
    groups: dict[object, list[tuple[str, Node]]] = {}
    for label, child in node.children.items():
        key = child.alike if fold and _is_number(label) else label
        groups.setdefault(key, []).append((label, child))
    return list(groups.values())


def _label(group: list[tuple[str, Node]]) -> str:
    if len(group) == 1:
        return shown(group[0][0], LABEL_MAX) or "''"
    runs = list(_runs(sorted(int(label) for label, _ in group)))
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:RUNS_MAX]]
    return f"{{{','.join(texts)}{',...' if len(runs) > RUNS_MAX else ''}}}"


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    first = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last
