"""Names of tensors in nested objects: joined by dots, told apart, bounded."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

import hexfile
import tensorio
from tensorio import LimitError, Opaque
from tensorio.tree import fqns, leaves, prune

# Leaves are made by the pickle machine only: one per row of this file.
FILE = hexfile.torch_file(hexfile.pickled(b"](" + hexfile.tensor() * 5000 + b"e"), {"0": bytes(16)})
LEAVES: list[Any] = tensorio.open(FILE)._opened.tree  # type: ignore[assignment]


def leaf(row: int) -> Any:
    return LEAVES[row]


def named(root: Any, budget: int = 1_000_000) -> list[tuple[str, tuple[object, ...], int]]:
    return fqns(root, budget)


def test_names_join_keys_with_dots_in_saved_order() -> None:
    root = {"b": {"w": leaf(0), "n": 3}, "a": [leaf(1), (leaf(2), None)], 7: leaf(3), None: leaf(4)}
    assert named(root) == [("b.w", ("b", "w"), 0), ("a.0", ("a", 0), 1), ("a.1.0", ("a", 1, 0), 2), ("7", (7,), 3),
                           ("None", (None,), 4)]  # fmt: skip


def test_name_of_the_root_is_empty() -> None:
    assert named(leaf(5)) == [("", (), 5)]
    assert named(3) == []
    assert named({}) == []
    assert named([]) == []


def test_names_that_are_taken_get_numbers() -> None:
    root = OrderedDict([("a.b", leaf(0)), ("a", {"b": leaf(1)}), (1, leaf(2)), ("1", leaf(3))])
    assert [(n, p) for n, p, _ in named(root)] == [
        ("a.b", ("a.b",)),
        ("a.b#2", ("a", "b")),
        ("1", (1,)),
        ("1#2", ("1",)),
    ]


def test_names_that_look_numbered_are_taken_too() -> None:
    root = {"x": leaf(0), "x#2": leaf(1), "y": {"": leaf(2)}}
    names = [n for n, _, _ in named(root)]
    assert names == ["x", "x#2", "y."]
    many = {"x#2": leaf(0), "x": leaf(1)}
    both = OrderedDict([("a", many), ("a.x", leaf(2)), ("a.x#2", leaf(3))])
    names = [n for n, _, _ in named(both)]
    assert len(set(names)) == 4
    assert names[:2] == ["a.x#2", "a.x"]


def test_names_stay_fast_when_all_collide() -> None:
    root = {i: {"x": leaf(i)} for i in range(5000)}
    same = [OrderedDict([("1", leaf(0)), (1, leaf(1))]) for _ in range(2000)]
    assert len({n for n, _, _ in named(same, 1_000_000)}) == 4000
    assert len(named(root, 1_000_000)) == 5000


def test_tied_leaf_is_named_at_each_place() -> None:
    tied = leaf(4)
    assert named({"a": tied, "b": [tied]}) == [("a", ("a",), 4), ("b.0", ("b", 0), 4)]


def test_shared_container_is_named_at_each_place() -> None:
    shared = {"w": leaf(0)}
    assert [n for n, _, _ in named({"a": shared, "b": shared})] == ["a.w", "b.w"]


def test_container_within_itself_is_gone_into_once() -> None:
    loop: dict[str, Any] = {"w": leaf(0)}
    loop["self"] = loop
    loop["list"] = [loop, leaf(1)]
    assert [n for n, _, _ in named(loop)] == ["w", "list.1"]


def test_opaque_objects_show_their_parts() -> None:
    opaque = Opaque("m", "C", (leaf(0),))
    opaque.state = {"w": leaf(1)}
    opaque.items.append(leaf(2))
    assert [n for n, _, _ in named({"o": opaque})] == ["o.args.0", "o.w", "o.items.0"]


def test_budget_bounds_the_walk() -> None:
    root: Any = leaf(0)
    for _ in range(60):
        root = [root, root]
    with pytest.raises(LimitError, match="shared so often"):
        named(root, 1_000_000)


def test_walk_goes_deeper_than_python_recurses() -> None:
    root: Any = leaf(0)
    for _ in range(5000):
        root = [root]
    ((name, path, _),) = named(root)
    assert len(path) == 5000
    assert name == ".".join(["0"] * 5000)


def test_leaves_come_with_paths_in_saved_order() -> None:
    root = {"a": 1, "b": [2, {"c": 3}], "e": [], "s": {4}}
    assert list(leaves(root, 10_000)) == [(("a",), 1), (("b", 0), 2), (("b", 1, "c"), 3), (("s",), {4})]
    assert list(leaves(5, 10_000)) == [((), 5)]


def test_prune_keeps_what_leads_to_the_paths() -> None:
    root = OrderedDict([("a", [1, 2, 3]), ("b", {"c": (4, 5), "d": 6}), ("e", 7)])
    got = prune(root, [("b", "c", 1), ("a", 0), ("a", 2)])
    assert got == OrderedDict([("a", [1, 3]), ("b", {"c": (5,)})])
    assert type(got) is OrderedDict
    assert type(got["b"]) is dict
    assert type(got["b"]["c"]) is tuple
    assert prune({"a": 1, "b": 2}, [("b",), ("a",)]) == {"a": 1, "b": 2}
    assert list(prune({"a": 1, "b": 2}, [("b",), ("a",)])) == ["a", "b"]
    assert prune(3, [()]) == 3


def test_prune_of_nothing_drops_everything() -> None:
    assert prune({"a": 1}, []) in ({}, {"a": 1}, None)


@pytest.mark.parametrize("size", [0, 3])
def test_state_of_an_opaque_object_may_be_an_array(size: int) -> None:
    """An array of a NumPy pickle, in the place where a dict is as a rule."""
    state = pickle.dumps(np.arange(size), 2)[2:-1]
    data = hexfile.torch_file(hexfile.pickled(hexfile.name("m", "C") + b")\x81" + state + b"b"), {"0": bytes(16)})
    with tensorio.open(data, unknown="opaque") as checkpoint:
        assert len(checkpoint.infos) == len(checkpoint.paths)
        assert checkpoint.tree().state.shape == (size,)
    assert tensorio.load(data, unknown="opaque").state.shape == (size,)
