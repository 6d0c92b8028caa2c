"""What is found in one file, within budgets that keep time and memory linear in its size."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial

from tensorio.dangers import danger_when_called
from tensorio.scanning._found import NAMES_MAX, Ref, Walk
from tensorio.scanning._report import Finding, Judge
from tensorio.scanning._walk import TOO_MANY, walk
from tensorio.storage.base import Storage
from tensorio.storage.files import FileStorage

__all__ = ["DEPTH_MAX", "Blob", "Collector", "Trust"]

DEPTH_MAX = 8  # archives and packed bytes inside each other
WINDOW = 8 << 20  # bytes between two times that pages are let go

# Per file, whatever its size, and per byte of it: an honest pickle has a few bytes per opcode, and packs 20 to 1.
OPCODES_MIN, OPCODES_PER_BYTE = 1_000_000, 4
UNPACKED_MIN, UNPACKED_PER_BYTE = 256 << 20, 32
SWEPT_MIN, SWEPT_PER_BYTE, SWEPT_MAX = 16 << 20, 2, 4 << 30
UNPACKED_AT_ONCE = 128 << 20  # bytes; half of it one level further in, and so on
TAILS_MIN, TAILS_PER_BYTE = 64 << 20, 128  # bytes at the ends of archives, where their end records are looked for
MATCHES_MAX = 100_000
UNKNOWN_MIN = 8  # characters of an unknown name that is no chance: once in hundreds of GB of random bytes
MESSAGES_MAX = 1000

_USES = {"BUILD": "state set by BUILD", "result called": "result called"}

# The second line of GLOBAL and INST, from the end of the first; and the first, behind whatever stands in front of it.
_WORD_MAX = 120
_WORD = rb"([A-Za-z_][\w.]{1,%d})" % _WORD_MAX
_SECOND_LINE = re.compile(rb"\n" + _WORD + rb"\n")
_FIRST_LINE = re.compile(rb"[ci]([A-Za-z_][\w.]*)$")
# Two short texts before a STACK_GLOBAL.
_MEMO = rb"(?:\x94|q.|r.{4})?"
_TEXT = rb"(?:\x8c.|X.\0\0\0)" + _WORD
_STACKED = re.compile(_TEXT + _MEMO + _TEXT + _MEMO + rb"\x93", re.DOTALL)
_NOT_ZERO = re.compile(rb"[^\0]")


class Trust(IntEnum):
    """How sure it is that bytes are a pickle.

    Numbers of a tensor may look like one for a few opcodes: they count as one only if it makes sense.
    """

    UNLIKELY = 0
    MAYBE = 1
    SURE = 2


@dataclass(frozen=True)
class Blob:
    """Bytes to be looked into.

    Attributes
    ----------
    view : memoryview
    record : str
        Where they are, for findings.
    base : int or None
        Offset of the first one in the file; None if they were unpacked.
    origin : int
        What offsets in findings count from: offset of the first one in its record.
    depth : int
        Archives around it.
    trust : Trust
    script : bool
        Whether it belongs to a TorchScript archive.
    """

    view: memoryview
    record: str = ""
    base: int | None = 0
    origin: int = 0
    depth: int = 0
    trust: Trust = Trust.MAYBE
    script: bool = False

    def part(self, begin: int, end: int | None = None, trust: Trust | None = None) -> Blob:
        """Return a part of it, which belongs to the same record."""
        base = None if self.base is None else self.base + begin
        return replace(self, view=self.view[begin:end], base=base, origin=self.origin + begin,
                       trust=self.trust if trust is None else trust)  # fmt: skip

    def inside(self, name: str, view: memoryview, trust: Trust, begin: int | None = None) -> Blob:
        """Return what is in it, as a record of its own; `begin` is where, if it is not packed."""
        base = None if self.base is None or begin is None else self.base + begin
        record = f"{self.record} > {name}" if self.record else name
        return replace(self, view=view, record=record, base=base, origin=0, depth=self.depth + 1, trust=trust)


class Collector:
    """Findings of one file.

    Parameters
    ----------
    file : str
        What findings call it.
    storage : Storage
    judges : callable
        See `tensorio.scanning._report.judge_for`.
    look : callable
        Looks into a `Blob`: how the parts of this package reach each other.
    """

    def __init__(self, file: str, storage: Storage, judges: Callable[[bool], Judge],
                 look: Callable[[Collector, Blob], None]) -> None:  # fmt: skip
        self.file = file
        self.look = partial(look, self)
        self.what = ""
        self.findings: dict[tuple[str, str, str, str], Finding] = {}
        self.messages: list[Finding] = []
        self.notes: list[str] = []
        self.scattered = storage.scattered
        self._mapped = storage if isinstance(storage, FileStorage) else None
        self._judges = judges
        nbytes = storage.nbytes
        self.opcodes = OPCODES_MIN + OPCODES_PER_BYTE * nbytes
        self.unpacked = UNPACKED_MIN + UNPACKED_PER_BYTE * nbytes
        self.tails = TAILS_MIN + TAILS_PER_BYTE * nbytes
        self.swept = min(SWEPT_MIN + SWEPT_PER_BYTE * nbytes, SWEPT_MAX)

    # ------------------------------------------------------------------ saying

    def say(self, group: str, blob: Blob, offset: int | None, reason: str) -> None:
        """Note what is not about a name; `offset` counts from the start of `blob`."""
        place = None if offset is None else blob.origin + offset
        finding = Finding(self.file, blob.record, place, "", "", group, reason)
        if finding in self.messages[-4:]:
            return
        if len(self.messages) < MESSAGES_MAX:
            self.messages.append(finding)
        elif group == "unreadable":
            self.messages[-1] = replace(finding, reason="there is more that could not be read")

    def unreadable(self, blob: Blob, offset: int | None, why: str) -> None:
        """Note a part that could not be read to its end."""
        self.say("unreadable", blob, offset, why)

    def note(self, blob: Blob, text: str) -> None:
        """Note what is worth knowing and no finding."""
        if len(self.notes) < MESSAGES_MAX:
            self.notes.append(f"{self.file}{f' > {blob.record}' if blob.record else ''}: {text}")

    def refer(self, blob: Blob, ref: Ref, how: str) -> None:
        """Note a name; `ref` counts from the start of `blob`."""
        key = (blob.record, ref.module, ref.name, ref.group)
        seen = self.findings.get(key)
        if seen is not None:
            joined = how if how == seen.how else ", ".join(dict.fromkeys([*seen.how.split(", "), *how.split(", ")]))
            self.findings[key] = replace(seen, count=seen.count + ref.count, how=joined)
        elif len(self.findings) < NAMES_MAX * (2 if ref.group == "dangerous" else 1):
            self.findings[key] = Finding(self.file, blob.record, blob.origin + ref.offset, ref.module, ref.name,
                                         ref.group, ref.reason, how, ref.count)  # fmt: skip
        else:
            self.unreadable(blob, ref.offset, f"over {NAMES_MAX} different names; not all are listed")

    def report(self, blob: Blob, found: Walk) -> None:
        """Note all that a walk found; offsets count from the start of `blob`."""
        for ref in found.refs:
            danger = danger_when_called(ref.module, ref.name, ref.uses)
            if danger is not None:
                ref.group, ref.reason = "dangerous", danger
            used = ", ".join(sorted(_USES.get(use, f"called by {use}") for use in ref.uses)) or "only named"
            late = found.error is not None and ref.offset > found.error[0]
            self.refer(blob, ref, f"{used}, behind an error" if late else used)
        for offset, what in found.odd:
            self.say("unknown", blob, offset, what)
        if found.unlisted:
            self.unreadable(blob, found.start, f"over {NAMES_MAX} different names; not all are listed")
        if found.error is not None:
            offset, why = found.error
            self.unreadable(blob, offset, f"could not be read to the end: {why}")

    def all(self) -> list[Finding]:
        """Return the findings as they came."""
        return [*self.findings.values(), *self.messages]

    # ------------------------------------------------------------------ reading

    def walk(self, blob: Blob, start: int, *, keys: bool = False) -> Walk:
        """Walk the pickle at `start` of `blob`, within the file's budget."""
        if self.opcodes <= 0:
            self.unreadable(blob, start, TOO_MANY)
            return Walk(start, at=start, error=(start, TOO_MANY))
        done = start

        def go_on(opcodes: int, at: int) -> bool:
            nonlocal done
            self.opcodes -= opcodes
            if at - done >= WINDOW:
                self.let_go(blob, done, at)
                done = at
            return self.opcodes > 0

        found = walk(blob.view, start, self._judges(blob.script), go_on, keys)
        self.opcodes -= min(found.at - start, 1 << 16)
        return found

    def sweep(self, blob: Blob, begin: int, end: int | None = None) -> None:
        """Look for names in bytes that can't be walked, or that no pickle covers."""
        end = len(blob.view) if end is None else end
        stop = min(end, begin + max(self.swept, 0))
        judge = self._judges(blob.script)
        found = 0
        for piece, at in self.pieces(blob, begin, stop):
            for place, module, name in _names_in(piece, judge):
                found += 1
                if found > MATCHES_MAX:
                    self.unreadable(blob, at + place, f"over {MATCHES_MAX} names; no more were searched for")
                    return
                group, reason = judge(module, name)
                self.refer(blob, Ref(module, name, group, reason, at + place, 1), "found by a search")
        self.swept -= stop - begin
        if stop < end:
            self.unreadable(blob, stop, f"the last {end - stop} bytes were not searched")

    def pieces(self, blob: Blob, begin: int, end: int, overlap: int = 512) -> Iterator[tuple[memoryview, int]]:
        """Yield windows of a range, which overlap a little, with their offsets; memory stays flat."""
        for at in range(begin, end, WINDOW):
            yield blob.view[at : min(at + WINDOW + overlap, end)], at
            self.let_go(blob, at, min(at + WINDOW, end))

    def let_go(self, blob: Blob, begin: int, end: int) -> None:
        """Unmap pages that were read."""
        if self._mapped is not None and blob.base is not None:
            self._mapped.release(blob.base + begin, end - begin)

    def only_zeros(self, blob: Blob, begin: int) -> bool:
        """Tell whether nothing but a little padding is left."""
        return len(blob.view) - begin <= WINDOW and _NOT_ZERO.search(blob.view, begin) is None


def _names_in(piece: memoryview, judge: Judge) -> Iterator[tuple[int, str, str]]:
    """Yield (offset, module, name) of what looks like an opcode that names something, in a window of `WINDOW` bytes."""
    for match in _SECOND_LINE.finditer(piece, 0, WINDOW + _WORD_MAX):
        first = bytes(piece[max(0, match.start() - _WORD_MAX) : match.start()])
        modules = _modules_at_end(first)
        name = match[1].decode("ascii")
        known = next((m for m in modules if judge(m, name)[0] != "unknown"), None)
        module = known or (modules[0] if modules and len(modules[0]) + len(name) >= UNKNOWN_MIN else "")
        if module and match.start() < WINDOW:
            yield match.start() - len(module) - 1, module, name
    for match in _STACKED.finditer(piece):
        if match.start() < WINDOW:
            yield match.start(), match[1].decode("ascii"), match[2].decode("ascii")


def _modules_at_end(line: bytes) -> list[str]:
    """What may be the module's name: all behind a "c" or "i", the longest first."""
    out: list[str] = []
    found = _FIRST_LINE.search(line)
    while found is not None and len(out) < 16:
        out.append(found[1].decode("ascii"))
        found = _FIRST_LINE.search(line, found.start() + 1)
    return [module for module in out if len(module) > 1]
