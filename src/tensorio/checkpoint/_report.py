"""What a verification found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tensorio.errors import ChecksumError, TensorIOError

__all__ = ["Report"]


@dataclass
class Report:
    """What `tensorio.verify` found.

    Attributes
    ----------
    path, format : str
        `format` is empty for a folder that is no checkpoint, of which only the manifest was checked.
    records : int
        Records that hold payload.
    checked : int
        Bytes of records that were compared with a checksum: a CRC-32 of the format, a digest of a tensor.
    unchecked : int
        Payload bytes that nothing covers: no checksum, no digest, no manifest.
    problems : list of TensorIOError
        One per bad record, file of the manifest, or missing file; each has ``.path``, ``.record``, ``.offset`` and
        ``.nbytes`` of the bytes in doubt (None if not known), and ``.tensors``, the names of those that have some of
        them.
    manifest : str or None
        Path of the list of SHA-256 digests that was used.
    hashed : int
        Bytes of whole files that were compared with the manifest.
    covered : tuple of str
        Names of the files that the manifest covers, among those that were looked at.
    unnamed : tuple of str
        Files of the folder that its manifest does not name.
    notes : tuple of str
        What is no problem and should be known: a list of digests by other hands that was found and can't be used.
    """

    path: str
    format: str
    records: int = 0
    checked: int = 0
    unchecked: int = 0
    problems: list[TensorIOError] = field(default_factory=list)
    manifest: str | None = None
    hashed: int = 0
    covered: tuple[str, ...] = ()
    unnamed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; what has no checksum can't be."""
        return not self.problems

    def raise_first(self) -> None:
        """Raise the first problem, if there is one."""
        if self.problems:
            raise self.problems[0]

    def __str__(self) -> str:
        state = "ok" if self.ok else f"{len(self.problems)} problems"
        files = f", {self.hashed} bytes of {len(self.covered)} files by manifest" if self.manifest else ""
        rest = f", {self.unchecked} bytes have no checksum" if self.unchecked else ""
        return f"{self.path}: {state}: {self.checked} bytes of {self.records} records checked{files}{rest}"

    def lines(self) -> Iterator[str]:
        """Yield the summary, and a line for each problem, each file that the manifest does not name, and each note."""
        yield str(self)
        for problem in self.problems:
            yield str(problem)
        for name in self.unnamed:
            yield f"not named in the manifest: {name}"
        yield from self.notes

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        return {
            "path": self.path, "format": self.format, "ok": self.ok, "records": self.records, "checked": self.checked,
            "unchecked": self.unchecked, "manifest": self.manifest, "hashed": self.hashed,
            "covered": list(self.covered), "unnamed": list(self.unnamed), "notes": list(self.notes),
            "problems": [_fields(problem) for problem in self.problems],
        }  # fmt: skip


def _fields(problem: TensorIOError) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "kind": type(problem).__name__, "message": problem.message, "path": problem.path, "record": problem.record,
        "offset": problem.offset, "nbytes": problem.nbytes, "tensors": list(problem.tensors),
    }  # fmt: skip
    if isinstance(problem, ChecksumError) and (problem.expected or problem.actual):
        fields |= {"expected": f"{problem.expected:x}", "actual": f"{problem.actual:x}"}
    return fields
