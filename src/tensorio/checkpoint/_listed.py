"""Compare files with the digests that a manifest has of them."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from tensorio.checkpoint._checks import SMALL, Work, has_sha256, sha256_of, tasks_of
from tensorio.checkpoint._sums import Manifest, files_below
from tensorio.errors import ChecksumError, FormatError, TensorIOError, TruncatedError
from tensorio.storage.files import FileStorage
from tensorio.storage.opening import open_storage
from tensorio.storage.reading import unreadable

if TYPE_CHECKING:
    from tensorio.checkpoint._report import Report
    from tensorio.storage.base import Storage

    Advance = Callable[[int], None]
    TensorsIn = Callable[[Storage, int, int], tuple[str, ...]]

__all__ = ["Listed", "wrong_digest"]


class _Line(NamedTuple):
    """A file that a manifest names, as it was when the list was gone through."""

    path: str
    digest: str
    nbytes: int
    file: FileStorage | None  # if it is open


class Listed:
    """The files that a manifest names.

    Parameters
    ----------
    manifest : Manifest
    files : sequence of FileStorage
        Those that are open: they count, whatever has their names by now.
    report : Report
        Is told what there is to be compared.

    Attributes
    ----------
    opened : set of int
        Which of `files` the manifest names, by id.
    """

    def __init__(self, manifest: Manifest, files: Sequence[FileStorage], report: Report) -> None:
        self._lines: list[_Line] = []
        self._bad: list[tuple[int, _Line, str | TensorIOError]] = []  # with their place among the lines
        own = _inode(manifest.path)
        report.manifest = manifest.path
        report.covered = tuple(self._look(manifest, own, files, report))
        report.hashed = sum(line.nbytes for line in self._lines)
        if manifest.whole:
            report.unnamed = tuple(
                name for name in files_below(manifest.folder) if name not in manifest.digests
                and not (own is not None and _inode(os.path.join(manifest.folder, name)) == own)
            )  # fmt: skip
        self.opened = {id(line.file) for line in self._lines if line.file is not None}

    def _look(
        self, manifest: Manifest, own: tuple[int, int] | None, files: Sequence[FileStorage], report: Report
    ) -> Iterator[str]:
        """Note what there is by each name; yield those that are to be compared."""
        known: dict[object, FileStorage] = {os.path.abspath(file.name): file for file in files}
        known |= {(file.identity.device, file.identity.inode): file for file in files}
        prefix = os.path.join(manifest.folder, "")
        for name, digest in manifest.digests.items():
            path = prefix + name
            try:
                now = os.stat(path)
            except OSError as error:
                self._bad.append((len(self._lines), _Line(path, digest, 0, None), _not_there(error)))
                continue
            inode = now.st_dev, now.st_ino
            if inode == own:
                report.notes += (f"{manifest.path} names itself: no list can have its own digest",)
            elif not stat.S_ISREG(now.st_mode):
                problem = FormatError("the manifest names something that is no regular file")
                self._bad.append((len(self._lines), _Line(path, digest, 0, None), problem))
            else:
                file = known.get(inode) or known.get(os.path.abspath(path)) if known else None
                self._lines.append(_Line(path, digest, now.st_size if file is None else file.nbytes, file))
                yield name

    def add_to(self, work: Work) -> None:
        """Have each file compared with its digest."""
        lines = self._lines
        for numbers in tasks_of([line.nbytes for line in lines]):
            size = sum(line.nbytes for line in lines[numbers.start : numbers.stop])
            work.add(size, partial(self._compare, numbers))

    def _compare(self, numbers: range, advance: Advance) -> None:
        done = 0
        for number in numbers:
            line = self._lines[number]
            if line.file is None and line.nbytes <= SMALL and has_sha256(line.path, line.digest):
                done += line.nbytes
            elif (found := _sha256_of(line, advance)) != line.digest:
                self._bad.append((number, line, found))
        advance(done)

    def problems(self, tensors_in: TensorsIn) -> Iterator[TensorIOError]:
        """Yield what is wrong, in the manifest's order, when the work is done.

        Parameters
        ----------
        tensors_in : callable
            Returns the names of the tensors that have bytes in a range of a storage.
        """
        for _, line, found in sorted(self._bad, key=lambda entry: entry[0]):
            yield _about(line, found, tensors_in)


def _about(line: _Line, found: str | TensorIOError, tensors_in: TensorsIn) -> TensorIOError:
    """The problem with a file: it has another digest, or it can't be read."""
    path, digest, nbytes, file = line
    if file is not None and _inode(path) != (file.identity.device, file.identity.inode):
        return FormatError("the file was replaced while it was verified: verify it again", path=path)
    if isinstance(found, TensorIOError):
        problem = found
    else:
        problem = wrong_digest(f"the file's {nbytes} bytes", digest, found)
        problem.offset, problem.nbytes = 0, nbytes
    problem.path = path
    if file is not None:
        problem.tensors = tensors_in(file, problem.offset or 0, problem.nbytes or 0)
    return problem


def _sha256_of(line: _Line, advance: Advance) -> str | TensorIOError:
    """The digest of a file: as it is open, or opened for that; or why it can't be had."""
    try:
        if line.file is not None:
            return sha256_of(line.file, 0, line.nbytes, advance)
        storage, _, _ = open_storage(line.path, local=True)
        try:
            if storage.nbytes < line.nbytes:
                raise TruncatedError(
                    f"the file was cut short while it was verified: expected {line.nbytes} bytes, "
                    f"found {storage.nbytes}",
                    offset=storage.nbytes,
                )
            digest = sha256_of(storage, 0, storage.nbytes, advance)
            storage.check_unchanged()
            return digest
        finally:
            storage.close()
    except OSError as error:
        return _not_there(error)
    except TensorIOError as error:
        return error


def _not_there(error: OSError) -> TensorIOError:
    """The problem with a file that the manifest names and that the system does not show."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
        return TruncatedError("the manifest names a file that is not there")
    return unreadable(error)


def _inode(path: str) -> tuple[int, int] | None:
    """What tells a file from all others; None if it is not there, or not to be seen."""
    with contextlib.suppress(OSError):
        now = os.stat(path)
        return now.st_dev, now.st_ino
    return None


def wrong_digest(what: str, expected: str | None, actual: str) -> ChecksumError:
    """Return the problem of bytes that have another SHA-256 than is written of them."""
    assert expected is not None
    return ChecksumError(
        f"SHA-256 of {what}: expected {expected[:16]}..., found {actual[:16]}...",
        expected=int(expected, 16), actual=int(actual, 16),
    )  # fmt: skip
