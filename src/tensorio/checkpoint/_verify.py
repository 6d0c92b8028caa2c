"""Recompute the checksums that a file has, and say what they don't cover."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from os import cpu_count
from typing import TYPE_CHECKING, NamedTuple

from tensorio import _core
from tensorio.errors import ChecksumError, HeaderError, TensorIOError, error_context
from tensorio.formats._zip import Inflation

if TYPE_CHECKING:
    from tensorio.formats._base import Opened, StoredRecord
    from tensorio.storage import Storage

    Progress = Callable[[int, int], object]

__all__ = ["Report", "verify_opened"]

# Bytes of a stored record that one thread checks at a time.
PART = 32 << 20
# Up to this many bytes, a record is looked at in one piece.
SMALL = 64 << 10
# Bytes of small records that make one task, and what a record costs beside its bytes, in bytes checked in that time.
TASK = 4 << 20
PART_COST = 16 << 10


@dataclass
class Report:
    """What `tensorio.verify` found.

    Attributes
    ----------
    path, format : str
    records : int
        Records that hold payload.
    checked : int
        Bytes in the file whose checksum was recomputed.
    unchecked : int
        Payload bytes for which the file has no checksum.
    problems : list of TensorIOError
        One per bad record, with its name and byte offset.
    """

    path: str
    format: str
    records: int = 0
    checked: int = 0
    unchecked: int = 0
    problems: list[TensorIOError] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; what has no checksum can't be."""
        return not self.problems

    def raise_first(self) -> None:
        """Raise the first problem, if there is one."""
        if self.problems:
            raise self.problems[0]

    def __str__(self) -> str:
        state = "ok" if self.ok else f"{len(self.problems)} bad records"
        rest = f", {self.unchecked} bytes have no checksum" if self.unchecked else ""
        return f"{self.path}: {state}: {self.checked} bytes of {self.records} records checked{rest}"


def verify_opened(opened: Opened, name: str, progress: Progress | None = None) -> Report:
    """Check every record with all cores; see `tensorio.verify`."""
    from tensorio.encryption._verify import check_tags

    report = Report(name, opened.format)
    records = list(opened.records())
    report.records = len(records)
    report.unchecked = sum(r.nbytes for r in records if r.crc32 is None)
    due = [r for r in records if r.crc32 is not None]
    tasks = list(_tasks(part for i, record in enumerate(due) for part in _parts(i, record)))
    total = sum(r.nbytes for r in due)
    actual: list[int | TensorIOError] = [0] * len(due)
    with ThreadPoolExecutor(cpu_count() or 1) as pool:
        results = pool.map(lambda task: [_checksum(opened.storages, due[part.record], part) for part in task], tasks)
        for task, crcs in zip(tasks, results, strict=True):
            for part, crc in zip(task, crcs, strict=True):
                actual[part.record] = _joined(actual[part.record], crc, part.nbytes)
                report.checked += part.nbytes
            if progress is not None:
                progress(report.checked, total)
    for record, found in zip(due, actual, strict=True):
        problem = found if isinstance(found, TensorIOError) else _compare(record, found)
        if problem is not None:
            report.problems.append(problem)
    sealed, damaged = check_tags(opened, records, progress)
    report.checked += sealed
    report.unchecked -= sealed
    report.problems += damaged
    for problem in report.problems:
        problem.path = name
    return report


class _Part(NamedTuple):
    """A piece of a record that one thread checks."""

    record: int
    offset: int
    nbytes: int


def _parts(i: int, record: StoredRecord) -> Iterator[_Part]:
    """Cut a stored record for several threads; a deflated one can only be read from its start."""
    if record.deflated or record.nbytes <= PART:
        yield _Part(i, record.offset, record.nbytes)
        return
    end = record.offset + record.nbytes
    for at in range(record.offset, end, PART):
        yield _Part(i, at, min(PART, end - at))


def _tasks(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """Put small parts together, so that handing work to a thread costs little beside the work."""
    task: list[_Part] = []
    size = 0
    for part in parts:
        task.append(part)
        size += part.nbytes + PART_COST
        if size >= TASK:
            yield task
            task, size = [], 0
    if task:
        yield task


def _joined(before: int | TensorIOError, crc: int | TensorIOError, nbytes: int) -> int | TensorIOError:
    if isinstance(before, TensorIOError) or isinstance(crc, TensorIOError):
        return crc
    return _core.crc32_combine(before, crc, nbytes)


def _checksum(storages: list[Storage], record: StoredRecord, part: _Part) -> int | TensorIOError:
    """The CRC-32 of a part of a record, or of all its unpacked bytes, or why it can't be had."""
    storage = storages[record.storage]
    if not record.deflated:
        if part.nbytes <= SMALL:
            view = storage.view_for(part.offset, part.nbytes)
            return _core.crc32(view[part.offset : part.offset + part.nbytes])
        crc = 0
        for piece in storage.stream(part.offset, part.nbytes):
            crc = _core.crc32(piece, crc)
        return crc
    try:
        with error_context(record=record.name):
            return _inflated_checksum(storage.view()[record.offset : record.offset + record.nbytes], record)
    except TensorIOError as error:
        return error


def _inflated_checksum(raw: memoryview, record: StoredRecord) -> int:
    unpacked = Inflation([raw], record.size, record.offset)
    crc = 0
    for piece in unpacked:
        crc = _core.crc32(piece, crc)
    if unpacked.size != record.size or not unpacked.ended:
        raise HeaderError(f"deflated record: expected {record.size} bytes, found {unpacked.size}", offset=record.offset)
    return crc


def _compare(record: StoredRecord, actual: int) -> TensorIOError | None:
    expected = record.crc32
    if expected is None or expected == actual:
        return None
    return ChecksumError(
        f"CRC-32 of the record's {record.size} bytes: expected {expected:08x}, found {actual:08x}",
        expected=expected, actual=actual, record=record.name, offset=record.offset,
    )  # fmt: skip
