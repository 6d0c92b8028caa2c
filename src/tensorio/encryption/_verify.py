"""Check the tag of every chunk of what is encrypted, and say which tensors the damaged ones are of."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tensorio.encryption._storage import DecryptedStorage

if TYPE_CHECKING:
    from tensorio.errors import TensorIOError
    from tensorio.formats._base import Opened, StoredRecord
    from tensorio.storage.base import Storage

    Progress = Callable[[int, int], object]

__all__ = ["check_tags"]

PROBLEMS_MAX = 1000  # damaged chunks that are listed; there is no more to learn from the next ones


def check_tags(
    opened: Opened,
    records: Sequence[StoredRecord],
    locate: Callable[[TensorIOError, Storage, int, int], object],
    progress: Progress | None = None,
) -> tuple[int, list[TensorIOError]]:
    """Check all chunks of an opened checkpoint with all cores.

    Parameters
    ----------
    opened : Opened
    records : sequence of StoredRecord
    locate : callable
        ``locate(problem, storage, offset, nbytes)`` is told of which plaintext each problem is.
    progress : callable, optional

    Returns
    -------
    checked : int
        Bytes of records that have no checksum and are covered by tags.
    problems : list of TensorIOError
        One per damaged chunk, or one that can't be read, each with the tensor that is in it, or the first
        of them; at most 1,000.
    """
    sealed = {i: s for i, s in enumerate(opened.storages) if isinstance(s, DecryptedStorage)}
    total, done = sum(s.nbytes for s in sealed.values()), 0
    problems: list[TensorIOError] = []
    for i, storage in sealed.items():
        within = sorted((r.offset, r.offset + r.nbytes, r.name) for r in records if r.storage == i and r.nbytes)
        for nbytes, damaged in storage.check():
            done += nbytes
            for begin, error in damaged:
                error.record = error.record or _record_at(within, begin, begin + storage.chunks.size)
                locate(error, storage, begin, min(storage.chunks.size, storage.nbytes - begin))
                problems.append(error)
            if progress is not None:
                progress(done, total)
            if len(problems) >= PROBLEMS_MAX:
                break
    checked = sum(r.nbytes for r in records if r.storage in sealed and r.crc32 is None and r.sha256 is None)
    return checked, problems[:PROBLEMS_MAX]


def _record_at(within: list[tuple[int, int, str]], begin: int, end: int) -> str | None:
    """The first record that a range has bytes of; None if it is in the header."""
    at = bisect_right(within, (begin, begin, "")) - 1
    for first, last, name in within[max(at, 0) : at + 2]:
        if first < end and begin < last:
            return name
    return None
