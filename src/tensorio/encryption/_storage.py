"""What is encrypted, as a storage: chunks are decrypted into memory on first use, and proven before they are seen."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tensorio.encryption._ahead import in_order
from tensorio.encryption._chunks import RUN, Chunks
from tensorio.encryption._opening import HOW
from tensorio.errors import DecryptionError, FormatError, TensorIOError, escaped
from tensorio.storage.base import Storage
from tensorio.storage.files import FileStorage
from tensorio.storage.reading import arena, in_threads, pread_full, readers, scratch, unreadable
from tensorio.system import memory

if TYPE_CHECKING:
    from tensorio._arrays import Lease
    from tensorio.storage.files import Identity

__all__ = ["DecryptedStorage", "LockedStorage", "without_key"]

SMALL = 256 << 10  # bytes that are not worth pages of their own
STEP = 32 << 20
SCRATCH = RUN + RUN // 128  # a run of the smallest chunks with their tags


class DecryptedStorage(Storage):
    """The plaintext of chunks in another storage.

    Parameters
    ----------
    stored : Storage
        What the chunks are in.
    start : int
        Byte offset of the first of them.
    chunks : Chunks
    writable : bool
        Whether arrays over the plaintext may be written to.
    owner : bool
        Whether `stored` is closed with this one.

    Notes
    -----
    The plaintext is private memory of the process; pages of what is not used are not taken. `view` and `lease`
    decrypt all of it, `view_for` and `lease_for` the chunks of a range, by several threads.
    """

    ahead = True

    def __init__(
        self, stored: Storage, start: int, chunks: Chunks, *, writable: bool = False, owner: bool = True
    ) -> None:
        super().__init__()
        self.nbytes = chunks.nbytes
        self.writable = writable
        self.chunks = chunks
        self.how = "decrypted on first use, into memory of this process"
        self._stored: Storage | None = stored
        self._start = start
        self._owner = owner
        self._plain: memoryview | None = None
        self._here = bytearray(0)  # for each chunk, whether it was decrypted
        self._filling = threading.Lock()

    @property
    def identity(self) -> Identity | None:
        """That of the file, as far as there is one."""
        return getattr(self._source(), "identity", None)

    # ------------------------------------------------------------------ memory

    def view(self) -> memoryview:
        return self.view_for(0, self.nbytes)

    def view_for(self, offset: int, nbytes: int) -> memoryview:
        self._bring(offset, nbytes)
        plain = self._plain
        if plain is None:
            plain = self._memory()
        return plain if self.writable else plain.toreadonly()

    def lease(self) -> Lease:
        return self.lease_for(0, self.nbytes)

    def lease_for(self, offset: int, nbytes: int) -> Lease:
        view = self.view_for(offset, nbytes)
        if self._lease is None:
            from tensorio._arrays import Lease

            with self._lock:
                if self._lease is None:
                    self._lease = Lease(view, self.writable)
        return self._lease

    def read_ahead(self, offset: int, nbytes: int) -> None:
        self._bring(offset, nbytes)

    def bring(self, offset: int, nbytes: int) -> Iterator[int]:
        for at in range(offset, offset + nbytes, STEP):
            step = min(STEP, offset + nbytes - at)
            self._bring(at, step)
            yield step

    def _bring(self, offset: int, nbytes: int) -> None:
        """Decrypt the chunks of a range that were not decrypted before."""
        source, numbers = self._source(), self.chunks.covering(offset, nbytes)
        with self._filling:
            plain = self._memory()
            missing = [i for i in numbers if not self._here[i]]
            if not missing:
                return
            _require(len(missing) * min(self.chunks.size, self.nbytes))
            in_threads(lambda run: self._fill(source, run, plain), self.chunks.runs(missing), readers())

    def _memory(self) -> memoryview:
        if self._plain is None:
            self._here = bytearray(self.chunks.count)
            small = self.nbytes <= SMALL
            self._plain = memoryview(bytearray(self.nbytes)) if small else arena(self.nbytes, touched=0)
        return self._plain

    def _fill(self, source: Storage, run: range, plain: memoryview) -> None:
        stored = self._ciphertext(source, run)
        for i, piece in zip(run, stored, strict=True):
            self.chunks.open(i, piece, plain[self.chunks.plain(i)])
            self._here[i] = 1

    def _ciphertext(self, source: Storage, run: range) -> list[memoryview]:
        """The stored bytes of some chunks in a row.

        Those of a file are copied: they are read twice to be decrypted, and nobody may change them in between.
        """
        places = [self.chunks.place(i) for i in run]
        first, nbytes = places[0].start, places[-1].stop - places[0].start
        if isinstance(source, FileStorage) and not source.in_memory:
            view = scratch("stored", nbytes, SCRATCH)
            with source.lent() as (fd, begin):
                pread_full(fd, begin + self._start + first, view)
        else:
            begin = self._start + first
            view = source.view_for(begin, nbytes)[begin : begin + nbytes]
        return [view[place.start - first : place.stop - first] for place in places]

    # ------------------------------------------------------------------ passing by

    def stream(self, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Yield a range in pieces; what was not decrypted before is not kept."""
        source, end = self._source(), offset + nbytes
        runs = self.chunks.runs(self.chunks.covering(offset, nbytes))
        for run, plain in zip(runs, in_order(lambda run: self._passing(source, run), runs, readers()), strict=True):
            begin = self.chunks.plain(run.start).start
            yield plain[max(offset - begin, 0) : end - begin]

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return a copy of a range, by this thread; no chunk is kept."""
        source, chunks = self._source(), self.chunks.covering(offset, nbytes)
        begin = self.chunks.plain(chunks.start).start
        return self._passing(source, chunks)[offset - begin : offset - begin + nbytes]

    def _passing(self, source: Storage, run: range) -> memoryview:
        """The plaintext of some chunks in a row."""
        if not run:
            return memoryview(b"")
        first, end = self.chunks.plain(run.start).start, self.chunks.plain(run.stop - 1).stop
        if self._plain is not None and all(self._here[i] for i in run):
            return self._plain[first:end].toreadonly()
        out = memoryview(bytearray(end - first))
        for i, piece in zip(run, self._ciphertext(source, run), strict=True):
            place = self.chunks.plain(i)
            self.chunks.open(i, piece, out[place.start - first : place.stop - first])
        return out.toreadonly()

    def check(self) -> Iterator[tuple[int, list[tuple[int, TensorIOError]]]]:
        """Check the tags of all chunks; yield how many bytes were checked, and (offset, error) of what is damaged."""
        source = self._source()
        runs = self.chunks.runs(range(self.chunks.count))
        for run, damaged in zip(runs, in_order(lambda run: self._damaged(source, run), runs, readers()), strict=True):
            yield self.chunks.plain(run.stop - 1).stop - self.chunks.plain(run.start).start, damaged

    def _damaged(self, source: Storage, run: range) -> list[tuple[int, TensorIOError]]:
        out: list[tuple[int, TensorIOError]] = []
        plain = scratch("plain", min(self.chunks.size, self.nbytes), SCRATCH)
        try:
            stored = self._ciphertext(source, run)
        except (OSError, TensorIOError) as error:
            if len(run) > 1:
                return [found for i in run for found in self._damaged(source, range(i, i + 1))]
            place = self.chunks.place(run.start)
            begin, nbytes = self._start + place.start, place.stop - place.start
            problem = unreadable(error, begin, nbytes) if isinstance(error, OSError) else error
            return [(self.chunks.plain(run.start).start, problem)]
        for i, piece in zip(run, stored, strict=True):
            place = self.chunks.plain(i)
            try:
                self.chunks.open(i, piece, plain[: place.stop - place.start])
            except FormatError as error:
                error.nbytes = len(piece)
                out.append((place.start, error))
        return out

    # ------------------------------------------------------------------ lifetime

    def beneath(self, offset: int, nbytes: int) -> tuple[Storage, int, int] | None:
        source, run = self._source(), self.chunks.covering(offset, nbytes)
        if not run:
            return source, self._start, 0
        begin = self.chunks.place(run.start).start
        return source, self._start + begin, self.chunks.place(run.stop - 1).stop - begin

    def evict(self, offset: int, nbytes: int) -> None:
        run = self.chunks.covering(offset, nbytes)
        if run:
            begin = self._start + self.chunks.place(run.start).start
            self._source().evict(begin, self._start + self.chunks.place(run.stop - 1).stop - begin)

    def check_unchanged(self) -> None:
        self._source().check_unchanged()

    def close(self) -> None:
        super().close()
        stored, self._stored = self._stored, None
        self._plain = None  # arrays handed out keep it
        if self._owner and stored is not None:
            stored.close()

    def _source(self) -> Storage:
        if self._stored is None:
            raise ValueError("the checkpoint is closed")
        return self._stored


class LockedStorage(Storage):
    """The plaintext of a tensor that nobody gave the key for, and where it is encrypted."""

    ahead = True

    def __init__(
        self, nbytes: int, name: str, key_id: str, source: tuple[Storage, int, int], *, writable: bool = False
    ) -> None:
        super().__init__()
        self.nbytes = nbytes
        self.writable = writable
        self._source = source
        self._name = name
        self._key_id = key_id

    def view(self) -> memoryview:
        raise without_key("the tensor", self._key_id, self._name)

    def beneath(self, offset: int, nbytes: int) -> tuple[Storage, int, int] | None:
        return self._source

    def view_for(self, offset: int, nbytes: int) -> memoryview:
        return self.view()

    def lease(self) -> Lease:
        raise without_key("the tensor", self._key_id, self._name)

    def lease_for(self, offset: int, nbytes: int) -> Lease:
        return self.lease()

    def read_ahead(self, offset: int, nbytes: int) -> None:
        self.view()


def without_key(what: str, key_id: str, record: str | None = None) -> DecryptionError:
    """Return the error for something that nobody gave the key for."""
    key = f"the key called {escaped(key_id)}" if key_id else "a key"
    how = f"'env:NAME', 'file:PATH' or its 32 bytes, {HOW}"
    return DecryptionError(f"{what} is encrypted: expected {key} to read it with: {how}", record=record, key_id=key_id)


def _require(nbytes: int) -> None:
    """Refuse what there is no memory for, since the system would end the process instead."""
    if nbytes > STEP and nbytes > (available := memory.available()):
        raise OSError(errno.ENOMEM, f"decrypting needs {nbytes} bytes of memory and {available} are available")
