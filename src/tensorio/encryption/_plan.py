"""The plan of an encrypted file, and of a decrypted one: chunks made a few at a time, by several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from tensorio.encryption._ahead import in_order
from tensorio.encryption._chunks import RUN, Chunks, stored_size
from tensorio.encryption._header import FILE, HEADER, new_header
from tensorio.encryption._storage import DecryptedStorage
from tensorio.storage.reading import readers

if TYPE_CHECKING:
    from tensorio.encryption._header import Header
    from tensorio.plan import Buffer
    from tensorio.storage.base import Storage

__all__ = ["MadePlan", "copied_plan", "encrypted_plan", "sealed"]


class MadePlan:
    """A file of known size whose bytes are made as they are written.

    Parameters
    ----------
    nbytes : int
    make : callable
        Yields them, in order.
    """

    def __init__(self, nbytes: int, make: Callable[[], Iterator[Buffer]]) -> None:
        self.nbytes = nbytes
        self._make = make

    def pieces(self) -> Iterator[Buffer]:
        """Yield the bytes of the file, in order."""
        return self._make()


def copied_plan(storage: Storage) -> MadePlan:
    """Plan a file of the bytes of a storage: of one that decrypts, the plaintext."""
    return MadePlan(storage.nbytes, partial(storage.stream, 0, storage.nbytes))


def encrypted_plan(storage: Storage, key: bytes, *, key_id: str, chunk: int) -> MadePlan:
    """Plan a file that has the bytes of a storage, encrypted."""
    header, secrets = new_header(key, FILE, storage.nbytes, chunk=chunk, key_id=key_id)
    chunks = Chunks(header, secrets, storage.nbytes, HEADER)
    return MadePlan(HEADER + stored_size(storage.nbytes, chunk), partial(_file, header, chunks, storage))


def _file(header: Header, chunks: Chunks, storage: Storage) -> Iterator[Buffer]:
    yield header.raw
    yield from sealed(chunks, storage, 0)


def sealed(chunks: Chunks, storage: Storage, offset: int) -> Iterator[Buffer]:
    """Yield the chunks of a payload that lies in a storage, encrypted.

    Parameters
    ----------
    offset : int
        Of the payload's first byte in the storage.
    """

    def seal(run: range) -> bytes:
        begin = chunks.plain(run.start).start
        plain = _plain(storage, offset + begin, chunks.plain(run.stop - 1).stop - begin)
        pieces = [chunks.seal(i, plain[chunks.plain(i).start - begin : chunks.plain(i).stop - begin]) for i in run]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    passed = begin = offset
    runs = chunks.runs(range(chunks.count))
    for run, piece in zip(runs, in_order(seal, runs, readers()), strict=True):
        yield piece
        passed = offset + chunks.plain(run.stop - 1).stop
        if passed - begin >= 8 * RUN:
            storage.release(begin, passed - begin)
            begin = passed
    storage.release(begin, passed - begin)


def _plain(storage: Storage, offset: int, nbytes: int) -> memoryview:
    """Bytes of a storage, for a reader in any thread that comes by once."""
    if isinstance(storage, DecryptedStorage):
        return storage.read(offset, nbytes)
    return storage.view_for(offset, nbytes)[offset : offset + nbytes]
