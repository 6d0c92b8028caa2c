r"""Lists of SHA-256 digests as text, in the format of ``sha256sum``: one line each.

::

    <64 hex digits>  <name>

A name with a backslash, a line feed or a carriage return in it is escaped (``\\``,
``\n``, ``\r``), and its line begins with a backslash. Read as well: ``*`` in front of
the name, as of files in binary mode; lines of the form ``SHA256 (name) = digits``; blanks
in front of a line, and a carriage return at its end.

Source: the manual of GNU coreutils, "md5sum invocation"; checked against ``sha256sum -c``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from tensorio.errors import HeaderError, escaped

__all__ = ["INSIDE", "OTHERS", "SUFFIX", "is_manifest", "is_sha256", "sums_of", "sums_text"]

SUFFIX = ".sha256"  # of the manifest beside a file
INSIDE = "checkpoint.sha256"  # the name of a folder's
OTHERS = ("SHA256SUMS",)  # names of such lists by other hands

_DIGEST = re.compile(r"[0-9a-fA-F]{64}\Z")
_LINE = re.compile(
    r"[ \t]*(\\?)(?:([0-9a-fA-F]{64}) [ *](.*)|SHA256 ?\((.*)\)[ \t]*=[ \t]*([0-9a-fA-F]{64}))\Z", re.DOTALL
)
# As nearly all lines are: taken together, a list of many is read in a tenth of the time.
_PLAIN = re.compile(r"^([0-9a-f]{64}) [ *]([^\r\n]+)$", re.MULTILINE)
# A carriage return at the end of a line is taken for part of it by ``sha256sum -c``.
_ESCAPED = frozenset("\\\n\r")


def is_manifest(name: str) -> bool:
    """Whether a file is such a list, by its name."""
    return name.endswith(SUFFIX) or name in OTHERS


def is_sha256(text: str) -> bool:
    """Whether a text is a digest in hex digits."""
    return _DIGEST.match(text) is not None


def sums_text(digests: Mapping[str, str]) -> str:
    """Return the lines for names and their digests, in the order of the mapping."""
    return "".join(_line(name, digest) for name, digest in digests.items())


def _line(name: str, digest: str) -> str:
    if not _ESCAPED.intersection(name):
        return f"{digest}  {name}\n"
    return "\\{}  {}\n".format(digest, name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r"))


def sums_of(text: str, refuse: Callable[[HeaderError], object] | None = None) -> dict[str, str]:
    """Return the digests of a list, in lower case, by name; empty lines and those that begin with ``#`` are skipped.

    Parameters
    ----------
    text : str
    refuse : callable, optional
        Is given the error of each line that is not understood, and the list is read on without it; else it is raised.

    Raises
    ------
    HeaderError
        Not such a line; a name that occurs twice, with two digests. The message has the number of the line.
    """
    plain = {name: digest for digest, name in _PLAIN.findall(text)}
    if len(plain) == text.count("\n") + (not text.endswith("\n")):
        return plain  # as many names as lines
    found: dict[str, str] = {}
    twice: set[str] = set()
    for number, line in enumerate(text.split("\n"), 1):
        try:
            entry = _entry(line.removesuffix("\r"))
            if entry is not None and found.setdefault(*entry) != entry[1]:
                twice.add(entry[0])
                raise HeaderError(f"the name {escaped(entry[0])} occurs twice, with two digests")
        except HeaderError as error:
            error = HeaderError(f"line {number}: {error.message}")
            if refuse is None:
                raise error from None
            refuse(error)
    return {name: digest for name, digest in found.items() if name not in twice}


def _entry(line: str) -> tuple[str, str] | None:
    """The name of a line and its digest; None if it is empty or a comment."""
    if not line or line.startswith("#"):
        return None
    match = _LINE.match(line)
    name = None if match is None else _name(match)
    if match is None or name is None:
        raise HeaderError(f"expected the 64 hex digits of a SHA-256, two blanks and a name, found {escaped(line)}")
    return name, (match[2] or match[5]).lower()


def _name(match: re.Match[str]) -> str | None:
    """The name of a line, without escapes; None if there is an escape that is none."""
    name = match[3] if match[2] else match[4]
    if not match[1]:
        return name
    if re.fullmatch(r"(?:[^\\]|\\[\\nr])*", name, re.DOTALL) is None:
        return None
    return re.sub(r"\\(.)", lambda found: {"n": "\n", "r": "\r"}.get(found[1], found[1]), name)
