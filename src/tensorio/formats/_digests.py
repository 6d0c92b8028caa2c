"""A SHA-256 of each tensor, kept in the notes of a file that has no checksums of its own.

The note "tensorio.sha256" is a list as ``sha256sum`` writes them
(`tensorio.sums`), with the tensors' names in the place of file names. The digest
is that of the tensor's bytes as they are in the file: the elements in C order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tensorio.errors import HeaderError
from tensorio.plan import FlatPlan
from tensorio.storage.reading import in_threads, readers
from tensorio.sums import sums_of, sums_text

if TYPE_CHECKING:
    from tensorio.plan import Buffer, Payloads

__all__ = ["KEY", "DigestedPlan", "digest_note", "digests_in", "without_digests"]

KEY = "tensorio.sha256"
_UNKNOWN = "0" * 64  # what stands for a digest until it is known: of the same length
# Bytes of small payloads that make one task for a thread, and what one costs beside them, in bytes hashed meanwhile.
TASK, EACH = 4 << 20, 8 << 10


class DigestedPlan(FlatPlan):
    """A plan whose header has the digests of its payloads, which are read when the first byte is asked for.

    Until then the payloads may be put elsewhere: into a snapshot.

    Parameters
    ----------
    head : callable
        ``head(note)`` returns the header with a note, of one length for all notes of these names.
    names : sequence of str
        Of the payloads.
    """

    def __init__(self, head: Callable[[str], bytes], names: Sequence[str], payloads: Payloads) -> None:
        super().__init__(head(sums_text(dict.fromkeys(names, _UNKNOWN))), payloads)
        self._head, self._names = head, names

    def pieces(self) -> Iterator[Buffer]:
        """Hash the payloads; yield the header and them."""
        self.head = self._head(digest_note(self._names, self.payloads))
        yield from super().pieces()


def digest_note(names: Sequence[str], payloads: Payloads) -> str:
    """Hash each payload, with all cores; return the note."""
    from hashlib import sha256

    digests = [""] * len(payloads)

    def work(task: range) -> None:
        for i in task:
            state = sha256()
            for piece in payloads.pieces(i):
                state.update(piece)
            digests[i] = state.hexdigest()

    in_threads(work, _tasks(payloads), readers())
    return sums_text(dict(zip(names, digests, strict=True)))


def _tasks(payloads: Payloads) -> list[range]:
    """Runs of payloads for one thread each: the large ones first, since one of them can't be shared."""
    tasks, first, size = [], 0, 0
    for i, nbytes in enumerate(payloads.sizes):
        size += nbytes + EACH
        if size >= TASK:
            tasks.append((size, range(first, i + 1)))
            first, size = i + 1, 0
    tasks.append((size, range(first, len(payloads))))
    return [task for _, task in sorted(tasks, key=lambda task: -task[0])]


def digests_in(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Return the digests by tensor; empty if the notes have none.

    Raises
    ------
    HeaderError
        The note is not a list of digests.
    """
    try:
        return sums_of((metadata or {}).get(KEY, ""))
    except HeaderError as error:
        error.message = f"metadata key '{KEY}': {error.message}"
        raise


def without_digests(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    """Return notes for other tensors than those they were written for; None if nothing else is in them."""
    if metadata is None or KEY not in metadata:
        return None if metadata is None else dict(metadata)
    return {key: value for key, value in metadata.items() if key != KEY} or None
