"""From a path to a report: one file, or all files of a folder."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tensorio.errors import TensorIOError
from tensorio.scanning._collect import Blob, Collector, Trust
from tensorio.scanning._look import look
from tensorio.scanning._report import GROUPS, Finding, Judge, ScannedFile, ScanReport, judge_for, verdict_of
from tensorio.scanning._zips import trust_of_name
from tensorio.storage.base import Storage
from tensorio.storage.files import FileStorage
from tensorio.storage.opening import open_storage

__all__ = ["scan_path"]

Judges = Callable[[bool], Judge]
Progress = Callable[[int, int], object]


def scan_path(path: Any, *, allow: Iterable[str | type] = (), progress: Progress | None = None) -> ScanReport:
    """Scan a file or a folder; see `tensorio.scan`."""
    judges = judge_for(allow)
    if isinstance(path, str | os.PathLike) and os.path.isdir(path):
        return _scan_folder(os.fsdecode(os.fspath(path)), judges, progress)
    storage, _, name = open_storage(path)
    try:
        collector = _scan_storage(storage, name, judges)
        if progress is not None:
            progress(storage.nbytes, storage.nbytes)
        return _report(name, [(collector, storage.nbytes)], [])
    finally:
        storage.close()


def _scan_storage(storage: Storage, name: str, judges: Judges) -> Collector:
    """Look into one open file."""
    collector = Collector(name, storage, judges, look)
    trust = trust_of_name(os.path.basename(name))
    whole = Blob(storage.view(), trust=Trust.SURE if trust is Trust.SURE else Trust.MAYBE)
    collector.look(whole)
    if isinstance(storage, FileStorage):
        try:
            storage.check_unchanged()
        except TensorIOError as error:
            collector.unreadable(whole, None, error.message)
    return collector


def _report(path: str, scanned: list[tuple[Collector, int]], notes: list[str]) -> ScanReport:
    files, findings = [], []
    for collector, nbytes in scanned:
        found = collector.all()
        files.append(ScannedFile(collector.file, collector.what or "not a pickle and no archive", nbytes,
                                 verdict_of(f.group for f in found)))  # fmt: skip
        findings += found
        notes += collector.notes
    findings.sort(key=_order)
    return ScanReport(path, verdict_of(f.group for f in findings), tuple(findings), tuple(notes), tuple(files))


def _order(finding: Finding) -> tuple[int, str, str, int]:
    return -GROUPS.index(finding.group), finding.file, finding.record, finding.offset or 0


# ------------------------------------------------------------------------- folders


def _scan_folder(root: str, judges: Judges, progress: Progress | None) -> ScanReport:
    notes: list[str] = []
    extra: list[Finding] = []
    paths = list(_regular_files(root, notes, extra))
    total = sum(size for _, size in paths)
    files: list[ScannedFile] = []
    done, findings = 0, extra
    for relative, size in paths:
        one = _scan_member(root, relative, judges)
        files += one.files
        findings += one.findings
        notes += one.notes
        done += size
        if progress is not None:
            progress(done, total)
    ordered = tuple(sorted(findings, key=_order))
    return ScanReport(root, verdict_of(f.group for f in ordered), ordered, tuple(notes), tuple(files))


def _scan_member(root: str, relative: str, judges: Judges) -> ScanReport:
    """Scan one file of a folder; that it can't be opened is a finding."""
    try:
        storage, _, _ = open_storage(os.path.join(root, relative))
    except (OSError, TensorIOError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        finding = Finding(relative, "", None, "", "", "unreadable", f"can't be opened: {why}")
        return ScanReport(relative, "unreadable", (finding,), (), (ScannedFile(relative, "?", 0, "unreadable"),))
    try:
        return _report(relative, [(_scan_storage(storage, relative, judges), storage.nbytes)], [])
    finally:
        storage.close()


def _regular_files(root: str, notes: list[str], findings: list[Finding]) -> Iterator[tuple[str, int]]:
    """Yield (path below `root`, size) of the regular files, sorted; links are not followed."""
    inside = os.path.realpath(root)
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        with os.scandir(os.path.join(root, folder)) as entries:
            listed = sorted(entries, key=lambda e: e.name)
        for entry in listed:
            relative = os.path.join(folder, entry.name)
            if entry.is_symlink():
                _say_link(inside, entry.path, relative, notes, findings)
            elif entry.is_dir(follow_symlinks=False):
                waiting.append(relative)
            elif entry.is_file(follow_symlinks=False):
                yield relative, entry.stat(follow_symlinks=False).st_size
            else:
                notes.append(f"{relative}: not a regular file; skipped")


def _say_link(inside: str, path: str, relative: str, notes: list[str], findings: list[Finding]) -> None:
    """Note a link: what it leads to is scanned if it is in the folder; if not, it was not looked at."""
    target = os.path.realpath(path)
    try:
        mode = os.stat(target).st_mode
    except OSError:
        notes.append(f"{relative}: a link to nothing; skipped")
        return
    within = os.path.commonpath([inside, target]) == inside
    if within or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        notes.append(f"{relative}: a link; not followed")
    else:
        reason = "a link that leads out of the folder is not followed: scan what it leads to"
        findings.append(Finding(relative, "", None, "", "", "unreadable", reason))
