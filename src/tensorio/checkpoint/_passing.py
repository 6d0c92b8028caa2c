"""A reader that comes by each tensor once: the next ones are brought in, those behind it let go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tensorio.storage.reading import HUGE_PAGE

if TYPE_CHECKING:
    import numpy as np

    from tensorio.checkpoint._checkpoint import Checkpoint
    from tensorio.storage.base import Storage

__all__ = ["in_passing"]

WINDOW = 128 << 20  # bytes ahead of the reader if nobody says otherwise
BEHIND = 32 << 20  # bytes behind it before they are let go


def in_passing(
    checkpoint: Checkpoint, fqns: Iterable[str] | None, window: int | None, evict: bool
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield tensors in the file's order; see `Checkpoint.stream`."""
    order = _in_file_order(checkpoint, fqns)
    behind: dict[int, tuple[Storage, int, int]] = {}
    with checkpoint.prefetch(order, window=WINDOW if window is None else window):
        for fqn in order:
            yield fqn, checkpoint[fqn]
            for chunk in checkpoint.infos[fqn].chunks:
                _, offset, nbytes = chunk.extent
                storage = checkpoint._storage(chunk.extent.storage)
                _, begin, end = behind.get(id(storage), (storage, offset, offset))
                end = max(end, offset + nbytes)
                if end - begin >= BEHIND:
                    # Up to a whole huge page, of which the next tensor may have a part.
                    begin, passed = max(end // HUGE_PAGE * HUGE_PAGE, begin), begin
                    _let_go(storage, passed, begin - passed, evict)
                behind[id(storage)] = storage, begin, end
    for storage, begin, end in behind.values():
        _let_go(storage, begin, end - begin, evict)


def _in_file_order(checkpoint: Checkpoint, fqns: Iterable[str] | None) -> list[str]:
    infos = checkpoint.infos
    names = list(checkpoint if fqns is None else fqns)
    first = {
        name: min(((c.extent.storage, c.extent.offset) for c in infos[name].chunks), default=(0, 0)) for name in names
    }
    return sorted(names, key=first.__getitem__)


def _let_go(storage: Storage, offset: int, nbytes: int, evict: bool) -> None:
    storage.release(offset, nbytes)
    if evict:
        storage.evict(offset, nbytes)
