"""Recompute checksums of parts of storages, by several threads."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from tensorio import _core, _host
from tensorio.errors import HeaderError, TensorIOError, TruncatedError, error_context
from tensorio.formats._zip import Inflation
from tensorio.storage.base import MemoryStorage
from tensorio.storage.files import FileStorage
from tensorio.storage.opening import read_small
from tensorio.storage.ranges import place_of
from tensorio.storage.reading import PAGE, in_threads, pread_full, readers, scratch, unreadable
from tensorio.system import paging

if TYPE_CHECKING:
    from tensorio.formats._base import StoredRecord
    from tensorio.storage.base import Storage

    Progress = Callable[[int, int], object]
    # A piece of a record that one thread checks: the record's number, offset, bytes.
    _Part = tuple[int, int, int]

__all__ = ["SMALL", "Work", "crc_jobs", "has_sha256", "pieces_of", "sha256_of", "tasks_of"]

# Bytes of a stored record that one thread checks at a time.
PART = 32 << 20
# Up to this many bytes, a record that is in memory is looked at in one piece, and a file is read by one call.
SMALL = 64 << 10
# Bytes of a file that are read at a time: they fit the cache. And that are brought into memory at a time.
PIECE, WINDOW = 512 << 10, 8 << 20
# Bytes of small records, or files, that make one task, and what one costs beside its bytes, in bytes checked in that
# time.
TASK = 4 << 20
PART_COST = 16 << 10


class Work:
    """Jobs for several threads, and how many bytes of them are done.

    A job is called with a function that it tells the bytes it has done.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._jobs: list[tuple[int, Callable[[Callable[[int], None]], None]]] = []
        self._progress = progress
        self._lock = threading.Lock()
        self.done = 0

    def add(self, nbytes: int, job: Callable[[Callable[[int], None]], None]) -> None:
        """Append a job."""
        self._jobs.append((nbytes, job))

    def run(self) -> None:
        """Do all jobs: the large ones first, since one of them can't be shared."""
        total = sum(nbytes for nbytes, _ in self._jobs)

        def advance(nbytes: int) -> None:
            with self._lock:
                self.done += nbytes
                if self._progress is not None:
                    self._progress(self.done, total)

        jobs = sorted(self._jobs, key=lambda job: -max(job[0], PART))  # parts of one file in order: a disk likes that
        in_threads(lambda job: job[1](advance), jobs, readers())


def pieces_of(storage: Storage, offset: int, nbytes: int) -> Iterator[memoryview]:
    """Yield a range in pieces, each good until the next one is asked for.

    Those of a mapping are looked at once they are in memory, and read where the system can't bring them there: where
    the disk fails, or the file was cut short, looking at them would end the process.

    Raises
    ------
    TensorIOError
        When gone through: the system does not give some of the bytes; it names them, by their place in the file.
    """
    owner, begin = place_of(storage, offset)
    if not isinstance(owner, FileStorage) or owner.in_memory:
        try:
            if nbytes <= SMALL:
                yield storage.view_for(offset, nbytes)[offset : offset + nbytes]
            else:
                yield from storage.stream(offset, nbytes)
        except OSError as error:
            raise unreadable(error, begin, nbytes) from error
        return
    for window in range(begin, begin + nbytes, WINDOW):
        end = min(window + WINDOW, begin + nbytes)
        if nbytes <= SMALL or not _is_here(owner, window, end):  # one call for a small one, not three
            for at in range(window, end, PIECE):
                yield _read(owner, at, scratch("checked", min(PIECE, end - at), PIECE))
        else:
            yield from owner.stream(window, end - window)


def _is_here(file: FileStorage, begin: int, end: int) -> bool:
    """Have a range in memory; whether it is, so that looking at it can't fail, as far as the system tells."""
    next(file.stream(begin, 0), None)  # no bytes, but huge pages from here on
    piece = file.view()[begin:end]
    with contextlib.suppress(OSError, TensorIOError):  # said again, and of which bytes, by who reads them
        file.read_ahead(begin, end - begin)
        if _tells(file) and _host.resident(piece) >= end - begin:
            return True
        return os.name == "posix" and _host.advise(piece, paging.POPULATE_READ) == 0
    return False


def _tells(file: FileStorage) -> bool:
    """Whether mincore(2) tells of a file's pages, and does not say of all that they are here: it is no stranger's."""
    return os.name == "posix" and os.geteuid() in (0, os.fstat(file.fileno()[0]).st_uid)


def _read(file: FileStorage, offset: int, out: memoryview) -> memoryview:
    with file.lent() as (fd, start):
        try:
            pread_full(fd, start + offset, out)
        except TruncatedError as error:
            error.nbytes = start + offset + len(out) - (error.offset or 0)
            error.offset = offset + len(out) - error.nbytes
            raise
        except OSError as error:
            begin = start + offset
            pages = [0, *range(PAGE - begin % PAGE, len(out), PAGE)]  # what a disk gives or does not give
            first = next((at for at in pages if not _is_read(fd, begin + at, out[: PAGE - (begin + at) % PAGE])), 0)
            raise unreadable(error, offset + first, len(out) - first) from error
    return out


def _is_read(fd: int, offset: int, out: memoryview) -> bool:
    try:
        pread_full(fd, offset, out)
    except TruncatedError:
        pass  # the last page
    except OSError:
        return False
    return True


def sha256_of(storage: Storage, offset: int, nbytes: int, advance: Callable[[int], object]) -> str:
    """Return the SHA-256 of a range as hex digits."""
    from hashlib import sha256

    state = sha256()
    for at in range(offset, offset + nbytes, PART):
        step = min(PART, offset + nbytes - at)
        for piece in pieces_of(storage, at, step):
            state.update(piece)
        advance(step)
    return state.hexdigest()


def has_sha256(path: str, digest: str) -> bool:
    """Whether a file of up to `SMALL` bytes is there, can be read in one go, and has this SHA-256 in hex digits."""
    from hashlib import sha256

    try:
        data = read_small(path, SMALL + 1)
    except OSError:
        return False
    return len(data) <= SMALL and sha256(data).hexdigest() == digest


def crc_jobs(
    work: Work, storages: Sequence[Storage], records: Sequence[StoredRecord]
) -> Callable[[], Iterator[int | TensorIOError]]:
    """Have the CRC-32 of each record computed.

    Returns
    -------
    callable
        Once the work is done, yields for each record the CRC-32 of its bytes (unpacked, if it is deflated), or why it
        can't be had.
    """
    parts = _parts(records)
    sizes = [nbytes for _, _, nbytes in parts]
    found: list[int | TensorIOError] = [0] * len(parts)

    def job(numbers: range, advance: Callable[[int], None]) -> None:
        task = parts[numbers.start : numbers.stop]
        together = _in_memory(storages, records, task)
        for i, (number, offset, nbytes) in zip(numbers, task, strict=True):
            if together is None or records[number].deflated:
                found[i] = _checksum(storages, records[number], offset, nbytes)
            else:
                found[i] = _core.crc32(together.view[offset - together.begin : offset - together.begin + nbytes])
        if together is not None:
            together.storage.release(together.begin, len(together.view))
        advance(sum(sizes[numbers.start : numbers.stop]))

    for numbers in tasks_of(sizes):
        work.add(sum(sizes[numbers.start : numbers.stop]), partial(job, numbers))

    def results() -> Iterator[int | TensorIOError]:
        if len(parts) == len(records):
            return iter(found)
        whole: list[int | TensorIOError] = [0] * len(records)
        for (number, _, nbytes), crc in zip(parts, found, strict=True):
            whole[number] = _joined(whole[number], crc, nbytes)
        return iter(whole)

    return results


class _Together(NamedTuple):
    """The bytes of a storage, from `begin` on, that several small parts are in."""

    storage: Storage
    begin: int
    view: memoryview


def _parts(records: Sequence[StoredRecord]) -> list[_Part]:
    """Cut large records for several threads; a deflated one can only be read from its start."""
    parts: list[_Part] = []
    for number, record in enumerate(records):
        if record.nbytes <= PART or record.deflated:
            parts.append((number, record.offset, record.nbytes))
            continue
        end = record.offset + record.nbytes
        parts += [(number, at, min(PART, end - at)) for at in range(record.offset, end, PART)]
    return parts


def _in_memory(storages: Sequence[Storage], records: Sequence[StoredRecord], task: Sequence[_Part]) -> _Together | None:
    """Where small parts lie together; None if they don't, or can't be looked at in safety.

    The system is asked once for all of them.
    """
    numbers = {records[number].storage for number, _, _ in task}
    begin = min(offset for _, offset, _ in task)
    size = max(offset + nbytes for _, offset, nbytes in task) - begin
    if len(task) == 1 or len(numbers) > 1:
        return None
    storage = storages[numbers.pop()]
    owner, at = place_of(storage, begin)
    if isinstance(owner, FileStorage):
        safe = owner.in_memory or (size <= WINDOW and _is_here(owner, at, at + size))
    else:
        safe = isinstance(owner, MemoryStorage)
    return _Together(storage, begin, storage.view_for(begin, size)[begin : begin + size]) if safe else None


def tasks_of(sizes: Sequence[int]) -> Iterator[range]:
    """Put small jobs together, so that handing work to a thread costs little beside the work.

    Parameters
    ----------
    sizes : sequence of int
        Bytes of each.

    Yields
    ------
    range
        Numbers of jobs that follow each other.
    """
    first, cost = 0, 0
    for number, nbytes in enumerate(sizes):
        cost += nbytes + PART_COST
        if cost >= TASK:
            yield range(first, number + 1)
            first, cost = number + 1, 0
    if first < len(sizes):
        yield range(first, len(sizes))


def _joined(before: int | TensorIOError, crc: int | TensorIOError, nbytes: int) -> int | TensorIOError:
    if isinstance(before, TensorIOError):
        return before
    if isinstance(crc, TensorIOError):
        return crc
    return _core.crc32_combine(before, crc, nbytes)


def _checksum(storages: Sequence[Storage], record: StoredRecord, offset: int, nbytes: int) -> int | TensorIOError:
    """The CRC-32 of a part of a record, or of all its unpacked bytes, or why it can't be had."""
    try:
        with error_context(record=record.name):
            packed = pieces_of(storages[record.storage], offset, nbytes)
            if record.deflated:
                return _inflated_checksum(packed, record)
            crc = 0
            for piece in packed:
                crc = _core.crc32(piece, crc)
            return crc
    except TensorIOError as error:
        return error


def _inflated_checksum(packed: Iterator[memoryview], record: StoredRecord) -> int:
    unpacked = Inflation(packed, record.size, record.offset)
    crc = 0
    for piece in unpacked:
        crc = _core.crc32(piece, crc)
    if unpacked.size != record.size or not unpacked.ended:
        raise HeaderError(f"deflated record: expected {record.size} bytes, found {unpacked.size}", offset=record.offset)
    if unpacked.taken != record.nbytes:
        raise HeaderError(
            f"deflated record: expected {record.nbytes} packed bytes, found the end after {unpacked.taken}",
            offset=record.offset,
        )
    return crc
