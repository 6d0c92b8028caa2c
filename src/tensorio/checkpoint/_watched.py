"""Files whose bytes are noted while they are written: for a manifest, and to be compared with what the disk has."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tensorio import _core
from tensorio.checkpoint._sums import SUFFIX, read_sums, write_sums
from tensorio.errors import ChecksumError, TensorIOError, UnsupportedError
from tensorio.storage.files import FileStorage
from tensorio.storage.opening import open_storage
from tensorio.storage.reading import in_threads, pread_full, readers
from tensorio.writing.output import naming, write_plan

if TYPE_CHECKING:
    from tensorio.plan import Buffer, Plan

    Progress = Callable[[int, int], object]

__all__ = ["Watched", "write_file"]

# Bytes that are noted, and compared, together; where they differ, this is how exactly it is known.
BLOCK = 32 << 20
READ = 8 << 20  # bytes read at a time
# Pieces that are handed to the hashing thread together, and how many such batches may wait for it.
BATCH, WAITING = 512 << 10, 16


class Watched:
    """Another plan, whose bytes are noted as they are written.

    Parameters
    ----------
    plan : Plan
    hashed : bool
        Whether to compute the SHA-256 of the file, in a thread of its own.
    compared : bool
        Whether to keep a CRC-32 per 32 MiB, so that `check` can compare the file.
    """

    def __init__(self, plan: Plan, *, hashed: bool = False, compared: bool = False) -> None:
        self._plan = plan
        self._hashed = hashed
        self._compared = compared
        self._crcs: list[int] = []
        self._filled = BLOCK
        self.sha256 = ""  # hex digits, once all pieces were yielded

    @property
    def nbytes(self) -> int:
        """As of the plan."""
        return self._plan.nbytes

    def pieces(self) -> Iterator[Buffer]:
        """Yield the bytes of the plan."""
        self._crcs, self._filled = [], BLOCK
        with _Hasher() if self._hashed else contextlib.nullcontext() as hasher:
            for piece in self._plan.pieces():
                if hasher is not None:
                    hasher.add(piece)
                if self._compared:
                    self._note(memoryview(piece).cast("B"))
                yield piece
            if hasher is not None:
                self.sha256 = hasher.finish()

    def _note(self, piece: memoryview) -> None:
        while len(piece):
            if self._filled == BLOCK:
                self._crcs.append(0)
                self._filled = 0
            now = piece[: BLOCK - self._filled]
            self._crcs[-1] = _core.crc32(now, self._crcs[-1])
            self._filled += len(now)
            piece = piece[len(now) :]

    def check(self, fd: int) -> None:
        """Read the file back, from the disk where the system lets go of its pages, and compare.

        Raises
        ------
        ChecksumError
            What is there is not what was written; it names the bytes.
        """
        os.fsync(fd)  # pages that are not on disk yet would be kept, and compared with themselves
        found = [0] * len(self._crcs)
        here = threading.local()

        def read(block: int) -> None:
            if not hasattr(here, "buffer"):
                here.buffer = memoryview(bytearray(READ))
            start, end = block * BLOCK, min(block * BLOCK + BLOCK, self.nbytes)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_DONTNEED)
            for at in range(start, end, READ):
                piece = here.buffer[: min(READ, end - at)]
                pread_full(fd, at, piece)
                found[block] = _core.crc32(piece, found[block])

        in_threads(read, range(len(found)), readers())
        for block, (want, got) in enumerate(zip(self._crcs, found, strict=True)):
            if want != got:
                start, end = block * BLOCK, min(block * BLOCK + BLOCK, self.nbytes)
                problem = ChecksumError(
                    f"the disk has other bytes than were written: CRC-32 of {end - start} bytes: expected {want:08x}, "
                    f"found {got:08x}; nothing was replaced",
                    expected=want, actual=got, offset=start,
                )  # fmt: skip
                problem.nbytes = end - start
                raise problem

    def check_path(self, path: str) -> None:
        """Read back a file that has its path already; see `check`."""
        storage, _, _ = open_storage(path, local=True)
        try:
            assert isinstance(storage, FileStorage)
            with naming(path), _named(path):
                self.check(storage.fileno()[0])
        finally:
            storage.close()


class _Hasher:
    """The SHA-256 of bytes, computed by a thread of its own while the other one is at the next bytes."""

    def __init__(self) -> None:
        from hashlib import sha256

        self._state = sha256()
        self._queue: queue.Queue[list[Buffer] | None] = queue.Queue(WAITING)
        self._batch: list[Buffer] = []
        self._size = 0
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Hasher:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def add(self, piece: Buffer) -> None:
        """Hash some bytes; they must not change any more."""
        self._batch.append(piece)
        self._size += len(piece)
        if self._size >= BATCH:
            self._queue.put(self._batch)
            self._batch, self._size = [], 0

    def finish(self) -> str:
        """Return the digest of all, in hex digits."""
        self._queue.put(self._batch)
        self._queue.put(None)
        self._thread.join()
        if self._failed is not None:
            raise self._failed
        return self._state.hexdigest()

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            try:
                for piece in batch:
                    self._state.update(piece)
            except BaseException as error:  # the other one must not wait for room in the queue for ever
                self._failed = error


def write_file(
    plan: Plan,
    target: Any,
    *,
    manifest: bool = False,
    readback: bool = False,
    durable: bool = True,
    progress: Progress | None = None,
) -> None:
    """Write a plan; see `tensorio.writing.output.write_plan`, and `tensorio.save` for `manifest` and `readback`.

    A manifest beside the old file, or beside the file that a link leads to, goes just
    before that file does, and a new one appears behind the new file: one that is there
    is true, whenever one looks.
    """
    if not isinstance(target, str | bytes | os.PathLike):
        if manifest or readback:
            raise UnsupportedError("manifest= and readback= need a path, not a file object")
        write_plan(plan, target, durable=durable, progress=progress)
        return
    path = os.fsdecode(os.fspath(target))
    watched = Watched(plan, hashed=manifest, compared=readback)
    old = [_OldSums(path, manifest)]
    if os.path.islink(path):
        old.append(_OldSums(os.path.realpath(path), False))

    def check(fd: int) -> None:
        if readback:
            with naming(path), _named(path):
                watched.check(fd)
        for sums in old:
            sums.remove()

    try:
        write_plan(watched, target, durable=durable, progress=progress, check=check)
    except BaseException:
        for sums in old:
            sums.restore(durable)
        raise
    if manifest:
        write_sums(path + SUFFIX, {os.path.basename(path): watched.sha256}, durable=durable)


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    try:
        yield
    except TensorIOError as error:
        error.path = path
        raise


class _OldSums:
    """The manifest beside a file that is replaced.

    Parameters
    ----------
    file : str
        Path of the file.
    replaced : bool
        Whether it goes in any case; else only if it is a manifest of this file alone.
    """

    def __init__(self, file: str, replaced: bool) -> None:
        self._file = file
        self._path = file + SUFFIX
        self._digests: dict[str, str] | None = None
        self._removed = False
        if os.path.lexists(self._path):
            self._old = _identity(file)
            with contextlib.suppress(TensorIOError, OSError):
                self._digests = read_sums(self._path)
        self._due = self._digests is not None and (replaced or self._digests.keys() == {os.path.basename(file)})

    def remove(self) -> None:
        """Remove it, if it would not be true any more."""
        if self._due:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            self._removed = True

    def restore(self, durable: bool) -> None:
        """Put it back, if the old file has its name still."""
        if self._removed and self._digests is not None and _identity(self._file) == self._old:
            with contextlib.suppress(OSError):
                write_sums(self._path, self._digests, durable=durable)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
