"""How an attempt at a hostile file may end, and how many are made.

Counts are those of a run in CI; ``TENSORIO_HOSTILE=100`` (`make hostile-long`) makes them a hundred times as large.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import tensorio

SCALE = int(os.environ.get("TENSORIO_HOSTILE", "1"))
LONG = SCALE > 1
SECONDS = 0.5  # of CPU for one file: a thousand times what one takes
LARGEST = 1 << 20  # bytes of an array that are all looked at
NODES = 10_000  # of a tree that are looked at: shared parts make some trees endless


def picture(tree: Any) -> list[Any]:
    """All of a tree, comparable: types, shapes and bytes of its arrays, its keys and plain values, in order.

    Of large arrays, the first and the last element: both ends of what they claim.
    """
    out: list[Any] = []
    stack, seen = [tree], set()
    while stack and len(out) < NODES:
        node = stack.pop()
        if isinstance(node, np.ndarray):
            ends = (node,) if node.nbytes <= LARGEST else (node[(0,) * node.ndim], node[(-1,) * node.ndim])
            out.append((node.dtype.str, node.shape, *(end.tobytes() for end in ends)))
            continue
        parts = list(inside(node))
        if not parts:
            out.append(repr(node)[:200])
        elif id(node) not in seen:
            seen.add(id(node))
            out.append((type(node).__name__, len(parts)))
            stack.extend(reversed(parts))
    return out


def inside(node: Any) -> Iterator[Any]:
    """What is in a container, an inert object or a tensor of parts."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from (key, value)
    elif isinstance(node, list | tuple):
        yield from node
    elif isinstance(node, tensorio.Opaque):
        yield from (node.module, node.name, node.args, node.state, node.items)
    elif hasattr(node, "parts"):
        yield from node.parts().values()


def attempt(source: Any, act: Any = tensorio.load, **options: Any) -> Any:
    """A picture of what is in a file; or our error, fit to print; in time (promises P2, P4, P5)."""
    start = time.process_time()
    try:
        made = act(source, **options)
        return picture(dict(made) if act is tensorio.open else made)
    except tensorio.TensorIOError as error:
        message = str(error)
        assert 10 < len(message) <= 500, message
        assert message.isprintable(), message
        return error
    finally:
        taken = time.process_time() - start
        assert taken < SECONDS, f"{taken:.1f} s"


def verdict(outcome: Any) -> Any:
    """What must be the same however the bytes are read."""
    if isinstance(outcome, tensorio.TensorIOError):
        return type(outcome), outcome.message, outcome.record, outcome.offset
    return outcome


def same_by_every_way(data: bytes, path: Path, outcome: Any, **options: Any) -> None:
    """The bytes in a file, mapped and read, end as they did (promise P6)."""
    path.write_bytes(data)
    for more in ({}, {"mmap": False}):
        assert verdict(attempt(path, **options, **more)) == verdict(outcome)
