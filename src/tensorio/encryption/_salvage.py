"""What is left of a damaged file, or of tensors, that are encrypted: the chunks that are there and fit their tags."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tensorio.encryption._chunks import TAG, Chunks
from tensorio.encryption._header import FILE, HEADER, Header, unlock
from tensorio.encryption._opening import head_of
from tensorio.encryption._storage import DecryptedStorage
from tensorio.errors import FormatError, HeaderError
from tensorio.storage.base import MemoryStorage
from tensorio.storage.reading import arena, in_threads, readers

if TYPE_CHECKING:
    from tensorio.encryption._keys import KeySource
    from tensorio.formats._base import Opened, OpenOptions
    from tensorio.storage.base import Storage

__all__ = ["Hole", "Salvaged", "salvaged", "salvaged_tensors"]


class Hole(NamedTuple):
    """Bytes of the plaintext that can't be had, zeros in their place."""

    begin: int
    end: int
    why: str


class Salvaged(NamedTuple):
    """The plaintext of a file, as far as it can be had.

    Attributes
    ----------
    storage : Storage
        In memory; ends where the chunks do that are there.
    holes : list of Hole
        In order.
    whole : bool
        Whether it is the file that was encrypted.
    """

    storage: Storage
    holes: list[Hole]
    whole: bool


def salvaged(storage: Storage, key: KeySource) -> Salvaged:
    """Decrypt all chunks of a file that fit their tags, with all cores.

    Raises
    ------
    DecryptionError
        Not with this key; or the header, without which nothing is decrypted, was changed.
    OSError
        There is not enough memory.
    """
    header = Header.read(head_of(storage))
    if header.kind != FILE:
        raise HeaderError("encrypted: expected the header of a file, found one of tensors", offset=8)
    chunks = Chunks(header, unlock(header, key.key(header.key_id)), header.nbytes, HEADER)
    there = storage.nbytes - HEADER
    count = chunks.count if there >= chunks.stored else there // (chunks.size + TAG)
    nbytes = chunks.plain(count - 1).stop if count else 0
    plain = arena(nbytes)
    holes: list[Hole] = []

    def fill(run: range) -> None:
        for i in run:
            place, target = chunks.place(i), chunks.plain(i)
            begin, size = HEADER + place.start, place.stop - place.start
            stored = bytes(storage.view_for(begin, size)[begin : begin + size])  # read twice: nobody may change them
            try:
                chunks.open(i, memoryview(stored), plain[target])
            except FormatError as error:
                holes.append(Hole(target.start, target.stop, error.message))

    in_threads(fill, chunks.runs(range(count)), readers())
    whole = not holes and there == chunks.stored
    return Salvaged(MemoryStorage(plain.toreadonly()), sorted(holes), whole)


def salvaged_tensors(opened: Opened, options: OpenOptions) -> dict[str, str]:
    """Show the encrypted tensors of a safetensors file as what they were, even if the end of the file is missing.

    Returns
    -------
    dict of str to str
        Each of them, and what is wrong with it; nothing if its chunks fit their tags.

    Raises
    ------
    See `tensorio.encryption._tensors.opened_tensors`.
    """
    from tensorio.encryption._tensors import opened_tensors

    first = len(opened.storages)
    ends = {info.fqn: info.chunks[0].extent for info in map(opened.table.info, range(len(opened.table)))}
    nbytes = opened.storages[0].nbytes
    opened_tensors(opened, options)
    found = {}
    for row, name in enumerate(opened.table.names):
        at = opened.table.storage_of(row)
        if at >= first:
            cut = ends[name].offset + ends[name].nbytes > nbytes
            found[name] = "cut off" if cut else _wrong(opened.storages[at])
    return found


def _wrong(storage: Storage) -> str:
    assert isinstance(storage, DecryptedStorage)
    return next((error.message for _, damaged in storage.check() for _, error in damaged), "")
