"""Which tensors some bytes are of."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from tensorio.errors import TensorIOError
from tensorio.storage.ranges import places_of
from tensorio.tree import fqns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensorio.formats._base import Opened
    from tensorio.storage.base import Storage

__all__ = ["Whose"]


class Whose:
    """The names of tensors by the bytes they have.

    Those of what is packed or encrypted, too: the bytes in the file that it is made from.
    Made once for all that is bad, and looked up by bisection: a file may have as many bad records as tensors.
    """

    def __init__(self, opened: Opened, storages: Sequence[Storage]) -> None:
        self._names = _named(opened)
        spans: dict[int, list[tuple[int, int, int]]] = {}  # by the owner's id: start, end, number of the name
        for i, (fqn, row) in enumerate(self._names):
            for storage, offset, nbytes in (chunk.extent for chunk in opened.table.info(row, fqn).chunks):
                if nbytes:
                    for owner, start, size in places_of(storages[storage], offset, nbytes):
                        spans.setdefault(id(owner), []).append((start, start + size, i))
        self._spans = {owner: sorted(found) for owner, found in spans.items()}
        # How far the spans up to each one reach: where that is not into a range, none before has bytes in it.
        self._reach = {
            owner: list(accumulate((end for _, end, _ in found), max)) for owner, found in self._spans.items()
        }

    def names(self, owner: Storage, offset: int, nbytes: int) -> tuple[str, ...]:
        """Return the tensors that have bytes in a range of a storage, in saved order."""
        if not nbytes or id(owner) not in self._spans:
            return ()
        spans, reach = self._spans[id(owner)], self._reach[id(owner)]
        at = bisect_left(spans, (offset + nbytes,)) - 1
        found = set()
        while at >= 0 and reach[at] > offset:
            _, end, number = spans[at]
            if end > offset:
                found.add(number)
            at -= 1
        return tuple(self._names[number][0] for number in sorted(found))


def _named(opened: Opened) -> list[tuple[str, int]]:
    """Names and rows of all tensors; none if there are more of them than naming may cost."""
    if opened.flat:
        return list(zip(opened.table.names, range(len(opened.table)), strict=True))
    try:
        return [(fqn, row) for fqn, _, row in fqns(opened.tree, opened.budget)]
    except TensorIOError:
        return []
