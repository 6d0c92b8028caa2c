"""Compare a checkpoint with every checksum there is of it, and say what none covers.

Three sorts, from the narrowest to the widest: digests of tensors among a file's
notes, checksums of a container's records, a manifest of whole files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tensorio.checkpoint._checks import Work, crc_jobs, sha256_of
from tensorio.checkpoint._listed import Listed, wrong_digest
from tensorio.checkpoint._options import reading_options
from tensorio.checkpoint._report import Report
from tensorio.checkpoint._several import INDEX_SUFFIX, place_of_several
from tensorio.checkpoint._sums import INSIDE, Manifest, find_sums
from tensorio.checkpoint._whose import Whose
from tensorio.encryption._storage import DecryptedStorage
from tensorio.errors import (
    ChecksumError,
    DecryptionError,
    HeaderError,
    TensorIOError,
    TruncatedError,
    UnsupportedError,
)
from tensorio.storage.files import FileStorage
from tensorio.storage.ranges import place_of, places_of

if TYPE_CHECKING:
    from tensorio.checkpoint._checkpoint import Checkpoint
    from tensorio.formats._base import Opened, StoredRecord
    from tensorio.storage.base import Storage

    Progress = Callable[[int, int], object]
    Advance = Callable[[int], None]

__all__ = ["Report", "check_verify", "verify_names", "verify_opened", "verify_path"]


def check_verify(verify: object) -> None:
    """Raise if `verify` is none of what `tensorio.open` takes."""
    if verify not in (True, False, "require"):
        raise ValueError(f"verify= is True, False or 'require', not {verify!r}")


def verify_path(
    path: Any, manifest: Any = None, require: bool = False, progress: Progress | None = None, key: Any = None
) -> Report:
    """Open and verify; see `tensorio.verify`. A folder that is no checkpoint is compared with its manifest alone."""
    from tensorio.checkpoint._checkpoint import open_checkpoint

    place = os.fsdecode(path) if isinstance(path, str | os.PathLike) else None
    several, options = place_of_several(path), reading_options(False, "opaque", (), False, key=key)
    try:
        checkpoint = open_checkpoint(path, **options)
    except (TensorIOError, OSError) as error:
        if several is None or not (os.path.exists(several) or os.path.isfile(several + INDEX_SUFFIX)):
            raise
        if key is None and isinstance(error, DecryptionError):
            raise  # of the caller's, not of the files
        return _verify_unopened(several, error, manifest, options, require, progress)
    with checkpoint:
        place = place if several == place and place is not None and os.path.isdir(place) else manifest_place(checkpoint)
        return verify_opened(checkpoint._opened, checkpoint._name, progress, place, manifest, require)


def _verify_unopened(
    path: str, error: TensorIOError | OSError, manifest: Any, options: dict[str, Any], require: bool,
    progress: Progress | None,
) -> Report:  # fmt: skip
    """Verify a folder, or what an index names, that can't be opened as one checkpoint; `error` says why."""
    if isinstance(error, IsADirectoryError) and error.filename == path:  # nothing in it says what the checkpoint is
        report = verify_names(path, path, manifest, progress)
        if report.manifest is None:
            raise error
        return report
    from tensorio.checkpoint._apart import verify_apart

    report = verify_apart(path, error, manifest, options, progress)
    _require(report, require)
    return report


def verify_names(path: str, name: str, manifest: Any = None, progress: Progress | None = None) -> Report:
    """Compare a file, or those of a folder, with the manifest alone; called `name` in messages."""
    report = Report(name, "")
    found = _manifest(path, manifest, report)
    _Verification(report, [], found, progress).run()
    return report


def manifest_place(checkpoint: Checkpoint) -> str | None:
    """Return where to look for a manifest: the file, or the folder of several, whatever named them."""
    files = checkpoint.files
    if checkpoint.path is not None and files and checkpoint.path not in files:
        return os.path.dirname(files[0]) or os.curdir
    return checkpoint.path


def verify_opened(
    opened: Opened,
    name: str,
    progress: Progress | None = None,
    path: str | None = None,
    manifest: Any = None,
    require: bool = False,
) -> Report:
    """Check what is open, with all cores; see `tensorio.verify`.

    Parameters
    ----------
    name : str
        What to call it in messages.
    path : str or None
        Where to look for a manifest.
    """
    report = Report(name, opened.format)
    verification = _Verification(report, opened.storages, _manifest(path, manifest, report), progress)
    verification.add_records(opened)
    verification.run()
    _require(report, require)
    return report


def _require(report: Report, require: bool) -> None:
    if require and report.unchecked:
        report.problems.append(
            ChecksumError(
                f"expected a checksum for every payload byte, found none for {report.unchecked} of them: save with "
                "digests=True or manifest=True, or write a manifest",
                path=report.path,
            )
        )


def _manifest(path: str | None, manifest: Any, report: Report) -> Manifest | None:
    """Find the manifest; what is not understood of others than the given one is told in the report."""
    if manifest is False:
        return None
    if path is None or "://" in path:
        if manifest is not None:
            raise UnsupportedError("manifest= needs the path of a file or folder on this host")
        return None

    def refuse(error: TensorIOError) -> None:
        if os.path.basename(error.path or "") == INSIDE:  # nobody else's
            report.problems.append(error)
        else:
            report.notes += (str(error),)

    return find_sums(path, None if manifest is None else os.fsdecode(os.fspath(manifest)), refuse)


class _Verification:
    """The jobs of one verification, and what they find."""

    def __init__(
        self, report: Report, storages: Sequence[Storage], manifest: Manifest | None, progress: Progress | None
    ) -> None:
        self.report = report
        self.storages = storages
        self.files = _files(storages)
        self.work = Work(progress)
        self.progress = progress
        self.opened: Opened | None = None
        self.whose: Whose | None = None  # made when something is bad
        self.judges: list[Callable[[], Iterator[TensorIOError]]] = []  # called when the work is done
        self.records: list[StoredRecord] = []
        self.manifest = manifest
        self.covered: set[int] = set()  # of `files`, by id; those that the manifest names

    def run(self) -> None:
        """Do all jobs, and fill the report."""
        report = self.report
        if self.manifest is not None:
            listed = Listed(self.manifest, self.files, report)
            listed.add_to(self.work)
            self.covered = listed.opened
            self.judges.append(partial(listed.problems, self.tensors_in))
        self.work.run()
        for judge in self.judges:
            report.problems.extend(judge())
        if self.opened is not None:
            self.check_tags(self.opened)
        bare = [r for r in self.records if r.crc32 is None and r.sha256 is None and not self.is_covered(r)]
        report.unchecked = sum(record.nbytes for record in bare)

    def check_tags(self, opened: Opened) -> None:
        """Check the tag of every chunk of what is encrypted."""
        from tensorio.encryption._verify import check_tags

        def locate(problem: TensorIOError, storage: Storage, offset: int, nbytes: int) -> None:
            problem.path = self.file_of(storage)
            problem.tensors = self.tensors_in(storage, offset, nbytes)

        sealed, damaged = check_tags(opened, self.records, locate, self.progress)
        self.report.checked += sealed
        self.report.problems.extend(damaged)

    def file_of(self, storage: Storage) -> str:
        """What to call the file that bytes are in; where there is one only, as the report does."""
        names = [owner.name for owner, _, _ in places_of(storage, 0, 0) if isinstance(owner, FileStorage)]
        return names[0] if names and len(self.files) > 1 else self.report.path

    def is_covered(self, record: StoredRecord) -> bool:
        """Whether a record's bytes are in a file of the manifest, or in chunks with a tag."""
        owners = [owner for owner, _, _ in places_of(self.storages[record.storage], 0, 0)]
        if any(isinstance(owner, DecryptedStorage) or id(owner) in self.covered for owner in owners):
            return True
        return len(self.files) == 1 and bool(self.covered)  # made of those of the file

    # ------------------------------------------------------------------ records

    def add_records(self, opened: Opened) -> None:
        """Compare each record with its CRC-32 and its digest."""
        self.opened = opened
        if self.add_shrunk() and opened.format != "safetensors":
            return  # the names of records are in the file, and it is mapped: what is gone of it must not be looked at
        self.records = list(opened.records())
        self.report.records = len(self.records)
        summed = [record for record in self.records if record.crc32 is not None]
        crcs = crc_jobs(self.work, self.storages, summed)
        hashed = [record for record in self.records if record.sha256 is not None]
        digests: list[str | TensorIOError] = [""] * len(hashed)

        def job(i: int, advance: Advance) -> None:
            record = hashed[i]
            try:
                digests[i] = sha256_of(self.storages[record.storage], record.offset, record.nbytes, advance)
            except TensorIOError as error:
                digests[i] = error

        for i, record in enumerate(hashed):
            self.work.add(record.nbytes, partial(job, i))
        self.report.checked = sum(r.nbytes for r in self.records if r.crc32 is not None or r.sha256 is not None)

        def judge() -> Iterator[TensorIOError]:
            bad: list[tuple[StoredRecord, TensorIOError]] = []
            for record, crc in zip(summed, crcs(), strict=True):
                if isinstance(crc, TensorIOError):
                    bad.append((record, crc))
                elif crc != record.crc32:
                    bad.append((record, _wrong_crc(record, crc)))
            for record, digest in zip(hashed, digests, strict=True):
                if isinstance(digest, TensorIOError):
                    bad.append((record, digest))
                elif digest != record.sha256:
                    bad.append((record, wrong_digest(f"the tensor's {record.nbytes} bytes", record.sha256, digest)))
            for record, problem in bad:
                sealed = isinstance(place_of(self.storages[record.storage])[0], DecryptedStorage)
                if not sealed or isinstance(problem, ChecksumError | HeaderError):  # else `check_tags` says it
                    yield self.located(problem, record)

        self.judges.append(judge)

    def add_shrunk(self) -> bool:
        """Tell of files that were cut short since they were opened; whether there are any."""
        short = [(file, size) for file in self.files if (size := _size_of(file)) < file.nbytes]

        def judge() -> Iterator[TensorIOError]:
            for file, size in short:
                problem = TruncatedError(
                    f"the file was cut short since it was opened: expected {file.nbytes} bytes, found {size}",
                    path=file.name, offset=size,
                )  # fmt: skip
                problem.nbytes = file.nbytes - size
                problem.tensors = self.tensors_in(file, size, problem.nbytes)
                yield problem

        self.judges.append(judge)
        return bool(short)

    def located(self, problem: TensorIOError, record: StoredRecord) -> TensorIOError:
        """Say of a problem which bytes of which file it is about, and whose they are."""
        owner, offset = place_of(self.storages[record.storage], record.offset)
        problem.path = self.file_of(owner)
        problem.record = problem.record or record.name
        if problem.offset is None:
            problem.offset = offset
        if problem.nbytes is None:
            problem.nbytes, inside = record.nbytes, (offset, record.nbytes)
        else:
            inside = problem.offset, problem.nbytes  # a part of it that can't be read
        problem.tensors = self.tensors_in(owner, *inside)
        return problem

    def tensors_in(self, owner: Storage, offset: int, nbytes: int) -> tuple[str, ...]:
        """Names of the tensors that have bytes in a range of a storage."""
        if self.opened is None:
            return ()
        if self.whose is None:
            self.whose = Whose(self.opened, self.storages)
        return self.whose.names(owner, offset, nbytes)


def _files(storages: Sequence[Storage]) -> list[FileStorage]:
    """The files that the bytes are in."""
    owners = {id(owner): owner for storage in storages for owner, _, _ in places_of(storage, 0, 0)}
    return [owner for owner in owners.values() if isinstance(owner, FileStorage)]


def _size_of(file: FileStorage) -> int:
    """Bytes that a file has now; those that it had, if it was read into memory."""
    fd, start = file.fileno()
    return file.nbytes if file.in_memory else max(os.fstat(fd).st_size - start, 0)


def _wrong_crc(record: StoredRecord, actual: int) -> ChecksumError:
    expected = record.crc32
    assert expected is not None
    return ChecksumError(
        f"CRC-32 of the record's {record.size} bytes: expected {expected:08x}, found {actual:08x}",
        expected=expected, actual=actual,
    )  # fmt: skip
