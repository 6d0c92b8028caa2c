"""What a scan says: findings, files, a verdict."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from tensorio.allowlist import ALLOWED
from tensorio.dangers import danger, python3_name

__all__ = ["GROUPS", "Finding", "ScanReport", "ScannedFile", "judge_for", "verdict_of"]

# From the best to the worst; the verdict is that of the worst finding.
GROUPS = ("data", "harmless", "allowed", "unknown", "unreadable", "dangerous")
_VERDICTS = {"unknown": "unknown", "unreadable": "unreadable", "dangerous": "dangerous"}

_OUTSIDE = "could run code in a loader that imports it"
_PATTERN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*\.([^\W\d]\w*|\*)")

Judge = Callable[[str, str], tuple[str, str]]


@dataclass(frozen=True)
class Finding:
    """A name that a pickle refers to, or a part that could not be judged by its names.

    Attributes
    ----------
    file : str
        Path of the file; below a folder, relative to it.
    record : str
        Where in the file: the record of an archive, records of records joined by " > "; "" for the file itself.
    offset : int or None
        Of the first mention, in bytes from the start of the record (unpacked, if it is packed).
    module, name : str
        As the pickle spells them, cut at 256 characters; "" if it is not about a name.
    group : str
        "data": selects a function of tensorio's own that makes tensors or plain values. "harmless": kept as inert
        data without being asked. "allowed": accepted by the caller. "unknown": anything else. "dangerous": known to
        run code, or to lead there. "unreadable": a part that could not be read to its end.
    reason : str
    how : str
        What the pickle does with the name, as far as that can be seen.
    count : int
        How often it is mentioned in the record.
    """

    file: str
    record: str
    offset: int | None
    module: str
    name: str
    group: str
    reason: str
    how: str = ""
    count: int = 1


@dataclass(frozen=True)
class ScannedFile:
    """A file that was looked into.

    Attributes
    ----------
    path : str
        Below a folder, relative to it.
    what : str
        What it is.
    nbytes : int
    verdict : str
        See `ScanReport`.
    """

    path: str
    what: str
    nbytes: int
    verdict: str


@dataclass(frozen=True)
class ScanReport:
    """What `tensorio.scan` found.

    Attributes
    ----------
    path : str
    verdict : str
        "clean": every pickle was read to its end and names nothing but data. "unknown": there are other names.
        "unreadable": something could not be read to its end. "dangerous": there is a name known to run code.
    findings : tuple of Finding
        The worst first, then by file, record and offset.
    notes : tuple of str
        What else is worth knowing, in one line each.
    files : tuple of ScannedFile
    """

    path: str
    verdict: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    files: tuple[ScannedFile, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is unknown, unreadable or dangerous."""
        return self.verdict == "clean"

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain dicts and lists, ready for `json.dumps`; copies: yes."""
        return asdict(self)

    def __str__(self) -> str:
        counts = {g: sum(f.group == g for f in self.findings) for g in reversed(GROUPS)}
        said = ", ".join(f"{n} {g}" for g, n in counts.items() if n)
        return f"{self.path}: {self.verdict}" + (f" ({said})" if said else "")


def verdict_of(groups: Iterable[str]) -> str:
    """Return the verdict over findings of these groups."""
    worst = max(groups, key=GROUPS.index, default="data")
    return _VERDICTS.get(worst, "clean")


def judge_for(allow: Iterable[str | type]) -> Callable[[bool], Judge]:
    """Return what makes a function that tells (group, reason) of a name, for pickles of TorchScript and for others.

    Parameters
    ----------
    allow : iterable of str or type
        Names that the caller accepts: ``"module.name"``, or ``"module.*"`` for all below a module; or classes.

    Raises
    ------
    ValueError
        Something in `allow` is no such name.
    """
    patterns = [f"{a.__module__}.{a.__qualname__}" if isinstance(a, type) else a for a in allow]
    for pattern in patterns:
        if not isinstance(pattern, str) or _PATTERN.fullmatch(pattern) is None:
            raise ValueError(f"allow= takes names like 'package.module.Class' or 'package.*', not {pattern!r}")
    exact = {p for p in patterns if not p.endswith(".*")}
    below = tuple(p[:-1] for p in patterns if p.endswith(".*"))

    def allowed(full: str) -> bool:
        return full in exact or full.startswith(below) if below else full in exact

    return lambda script: lambda module, name: _judge(module, name, script, allowed)


def _judge(module: str, name: str, script: bool, allowed: Callable[[str], bool]) -> tuple[str, str]:
    entry = ALLOWED.get((module, name)) or ALLOWED.get(python3_name(module, name))
    if entry is not None:
        return "harmless" if entry.kind == "inert" else "data", entry.why
    reason = danger(module, name)
    if reason is not None:
        return "dangerous", reason
    if script and (module == "__torch__" or module.startswith("__torch__.")):
        return "harmless", "a class of the archive's own, kept as data"
    if allowed(f"{module}.{name}"):
        return "allowed", "accepted by the caller"
    return "unknown", _OUTSIDE
