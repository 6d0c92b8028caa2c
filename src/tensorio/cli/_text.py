"""Text for terminals: escapes, sizes, columns.

Whatever comes from a file goes through `shown` before it is printed, and is
never read as rich markup.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import click

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.segment import Segment

__all__ = [
    "Cell",
    "Sheet",
    "complain",
    "console",
    "cut_middle",
    "elements",
    "parse_size",
    "percent",
    "printable",
    "shape_text",
    "shown",
    "size",
    "some",
    "spelled",
]

NAME_MAX = 240  # characters of a name that are shown
SHAPE_MAX = 36
# Wider than any line: output that is no terminal is not cut.
UNLIMITED = 1 << 20
GAP = 2  # blanks between columns
NAME_MIN = 12  # columns that a name keeps in a narrow terminal
NAME_USUAL = 72  # in a pipe, longer names push their own line to the right and no other

# Values of arguments that messages advise.
_ADVISED = ("opaque", "replicate")
# Directions of text that would reorder a line (Unicode 16, UAX 9: right-to-left letters and digits).
_BACKWARDS = {"R", "AL", "AN"}


# ------------------------------------------------------------------- text of files


def shown(text: object, limit: int = NAME_MAX) -> str:
    r"""Return text from a file as it may be printed.

    Control characters, invisible ones, those that turn the direction of a line,
    and backslashes become ``\x..`` and the like; everything is cut at `limit`
    characters before it is looked at.
    """
    raw = str(text)
    cut = printable(raw[:limit].replace("\\", "\\\\"))
    return cut if len(raw) <= limit else cut + "..."


def printable(text: str) -> str:
    """Return a text whose backslashes stand for themselves, or were put there by an escape."""
    return text if text.isascii() and text.isprintable() else "".join(map(_harmless, text))


def _harmless(char: str) -> str:
    if char.isascii():
        return char if char.isprintable() else f"\\x{ord(char):02x}"
    from unicodedata import bidirectional

    if char.isprintable() and bidirectional(char) not in _BACKWARDS:
        return char
    return char.encode("unicode_escape").decode("ascii")


def spelled(message: str, *arguments: str) -> str:
    """Return a message with arguments of a function called what the options of the command are.

    keep= is --keep, unknown='opaque' is --unknown opaque, raw=True is --raw; what a user wrote keeps its quotes.
    """

    def option(found: re.Match[str]) -> str:
        name, value, more = found.groups()
        return f"--{name.replace('_', '-')}" + (f" {value or ''}" if value or more else "")

    return re.sub(rf"\b({'|'.join(arguments)})=(?:'({'|'.join(_ADVISED)})'|True\b|(?=([^\s,;)])?))", option, message)


def complain(problem: object) -> None:
    """Print one line on stderr."""
    if isinstance(problem, OSError) and problem.strerror is not None:
        name = "" if problem.filename is None else f": {shown(os.fsdecode(problem.filename))}"
        problem = f"{problem.strerror}{name}"
    click.echo(f"tensorio: {printable(str(problem))}", err=True)


# ------------------------------------------------------------------------- numbers


def size(nbytes: float) -> str:
    """Return a size in bytes for people: ``1.5 KiB``."""
    return f"{nbytes:.0f} B" if nbytes < 1024 else _scaled(nbytes, 1024, ("KiB", "MiB", "GiB", "TiB", "PiB"), ".1f")


def elements(count: float) -> str:
    """Return a number of elements for people: ``6.74 G``."""
    return f"{count:.0f}" if count < 10_000 else _scaled(count, 1000, ("K", "M", "G", "T", "P"), ".3g")


def _scaled(number: float, step: int, units: Sequence[str], form: str) -> str:
    """A number in the largest unit that leaves something in front of the point (999.95 would show as 1000.0)."""
    number /= step
    power = 0
    while number >= 999.5 and power < len(units) - 1:
        number /= step
        power += 1
    return f"{number:{form}} {units[power]}"


def percent(part: int, whole: int) -> str:
    """Return a share: ``12.5%``."""
    return f"{100 * part / whole:.1f}%" if whole else ""


def some(count: int, noun: str) -> str:
    """Return a number with its noun: ``1 tensor``, ``1,204 tensors``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape in brackets, cut if it has very many dimensions."""
    return cut_middle(f"[{', '.join(map(str, shape[:NAME_MAX]))}]", SHAPE_MAX)


def parse_size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Read a size in bytes from the command line: ``512MiB``, ``1GB``, ``4096``."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*(?:([kmgt])(i?)b?|b)?", value.strip(), re.IGNORECASE)
    if match is None:
        raise click.BadParameter(f"{value!r} is no size; write it like 512MiB or 1GB", ctx, param)
    number, unit, binary = match.groups()
    power = " kmgt".index((unit or " ").lower())
    return int(float(number) * (1024 if binary else 1000) ** power)


# ------------------------------------------------------------------------- console


def console(*, err: bool = False) -> Console:
    """Return a console for stdout (or stderr) that never reads markup and does not cut what goes into a pipe."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError(errno.EPIPE, "the reader of the output is gone")

    stream = sys.stderr if err else sys.stdout
    if not (stream.encoding or "").lower().startswith("utf") and hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")
    made = Plain(stderr=err, highlight=False, markup=False, emoji=False, soft_wrap=False)
    if not made.is_terminal:
        made.width = UNLIMITED
    return made


class Cell(NamedTuple):
    """One cell of a `Sheet`.

    Attributes
    ----------
    text : str
        Harmless already.
    style : str
        As rich spells styles.
    guide : str
        Drawn dim in front of the text: the lines of a tree.
    """

    text: str = ""
    style: str = ""
    guide: str = ""


class Sheet:
    """Lines in columns, whose first one is cut in its middle if a terminal is narrow.

    The last cell of a row with fewer cells than columns runs on to the right and
    counts for no column's width. If it is the only one it is prose, and wraps.

    Parameters
    ----------
    columns : str
        One of ``<`` and ``>`` per column: flush left or right.
    """

    def __init__(self, columns: str) -> None:
        self.columns = columns
        self.rows: list[tuple[Cell, ...]] = []

    def add(self, *cells: Cell | str) -> None:
        """Append a row."""
        self.rows.append(tuple(Cell(cell) if isinstance(cell, str) else cell for cell in cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        widths = self._widths(options.max_width)
        for row in self.rows:
            if len(row) == 1 < len(self.columns) and _width(row[0].text) > options.max_width:
                style = console.get_style(row[0].style) if row[0].style else None
                yield Segment(_wrapped(row[0].text, options.max_width), style)
            else:
                yield from self._line(row, widths, options.max_width, console)
            yield Segment.line()

    def _widths(self, room: int) -> list[int]:
        """The columns' widths, where the first one gets what the others leave of `room`."""
        widths = [0] * len(self.columns)
        for row in self.rows:
            counted = row if len(row) == len(self.columns) else row[:-1]
            for i, cell in enumerate(counted):
                width = _width(cell.guide) + _width(cell.text)
                if i or room < UNLIMITED or width <= NAME_USUAL:
                    widths[i] = max(widths[i], width)
        others = sum(GAP + w for w in widths[1:] if w)
        widths[0] = min(widths[0], max(room - others, NAME_MIN))
        return widths

    def _line(self, row: tuple[Cell, ...], widths: list[int], room: int, console: Console) -> Iterator[Segment]:
        from rich.segment import Segment

        at = end = 0  # columns printed, and where the column begins
        for i, cell in enumerate(row):
            runs_on = i == len(row) - 1 and len(row) < len(self.columns)
            space = room - end if runs_on or room == UNLIMITED else widths[i]
            text = cut_middle(cell.text, max(space - _width(cell.guide), 1)) if i == 0 or runs_on else cell.text
            width = _width(cell.guide) + _width(text)
            start = end if runs_on or self.columns[i] == "<" else end + widths[i] - width
            start = max(start, at + GAP) if at else start
            if width:
                yield Segment(" " * (start - at))
                if cell.guide:
                    yield Segment(cell.guide, console.get_style("dim"))
                yield Segment(text, console.get_style(cell.style) if cell.style else None)
                at = start + width
            end += widths[i] + (GAP if widths[i] else 0)


def _wrapped(text: str, width: int) -> str:
    """A text in lines of at most `width` characters, those below the first one indented a bit more than it is."""
    indent = " " * (len(text) - len(text.lstrip()) + GAP)
    return textwrap.fill(text, width, subsequent_indent=indent, break_on_hyphens=False)


def _width(text: str) -> int:
    """Columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def cut_middle(text: str, width: int) -> str:
    """Cut a text to `width` columns, keeping its two ends."""
    if _width(text) <= width:
        return text
    if width <= 5:
        return _head(text, width)
    tail = (width - 3) * 2 // 3
    return f"{_head(text, width - 3 - tail)}...{_head(text[::-1], tail)[::-1]}"


def _head(text: str, width: int) -> str:
    """The longest beginning of a text that takes at most `width` columns."""
    if text.isascii():
        return text[:width]
    while _width(text) > width:
        text = text[: len(text) - max(1, (_width(text) - width) // 2)]
    return text
