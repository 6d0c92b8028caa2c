"""``tensorio scan``: which names the pickles in files refer to, and what such names can do."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from typing import TYPE_CHECKING

import click

from tensorio.cli._text import Cell, Sheet, complain, console, cut_middle, printable, shown, some
from tensorio.errors import TensorIOError

if TYPE_CHECKING:
    from tensorio.scanning._report import Finding, ScanReport

__all__ = ["command"]

SCHEMA = 1
BAD, WRONG_USE, UNKNOWN = 1, 2, 3
EXIT_CODES = {"clean": 0, "unknown": UNKNOWN, "unreadable": BAD, "dangerous": BAD}
# The exit code of several paths is the first of these that one of them has.
WORST_FIRST = (BAD, WRONG_USE, UNKNOWN, 0)
ROWS = 40  # shown of each group if nobody says otherwise
LABEL_MAX = 30  # columns of a path beside its bar
NAME_MAX, RECORD_MAX, REASON_MAX = 120, 80, 300

_STYLES = {"dangerous": "bold red", "unreadable": "red", "unknown": "yellow", "allowed": "cyan"}
_VERDICTS = {
    "clean": Cell("clean: names nothing but data", "bold green"),
    "unknown": Cell("UNKNOWN: names that are not known to be harmless", "bold yellow"),
    "unreadable": Cell("UNREADABLE: not all of it could be read", "bold red"),
    "dangerous": Cell("DANGEROUS: names that can run code", "bold red"),
}
_QUIET = ("allowed", "harmless", "data")  # named without their places


@click.command("scan", short_help="List what the pickles in files could run.")
@click.argument("paths", nargs=-1, required=True, type=click.Path(), metavar="PATH...")
@click.option("--allow", multiple=True, metavar="NAME",
              help="Accept an unknown name, 'package.module.Class', or all below a module, 'package.*'; repeatable.",
              )  # fmt: skip
@click.option("--limit", type=click.IntRange(min=0), default=ROWS, show_default=True, metavar="ROWS",
              help="Most rows of each group; 0 shows all.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
@click.pass_context
def command(ctx: click.Context, paths: tuple[str, ...], allow: tuple[str, ...], limit: int, as_json: bool) -> None:
    """List every name that the pickles in each PATH (a file, or a folder and all below it) refer to, and say what
    such names can do. Nothing is run, imported or unpickled.

    Looks into torch files of all ages, plain pickles, .npy and .npz, zip and tar archives, gzip, bzip2, xz and zlib
    data, and into archives inside archives. An archive or pickle that is damaged or made to mislead is looked into as
    far as it goes, and never called clean.

    \b
      dangerous    known to run code, or to lead there
      unreadable   a part that could not be read to its end
      unknown      anything else: could run code in a loader that imports it
      allowed      unknown, and accepted with --allow
      harmless     kept as inert data by tensorio without being asked
      data         selects a function of tensorio's own that makes tensors
                   and plain values

    \b
    Exit codes
      0    nothing dangerous, unreadable or unknown
      1    something dangerous or unreadable
      2    wrong use, or a PATH that can't be opened (and none with 1)
      3    names that are unknown, and nothing worse

    \b
    --json prints one object (all rows, whatever --limit says):
      schema     1; grows by new keys only
      exit_code
      paths      [{path, verdict, findings, notes, files}], or
                 [{path, error}] for one that can't be opened
      findings   [{file, record, offset, module, name, group, reason, how,
                 count}]; offset is in bytes from the start of the record
      files      [{path, what, nbytes, verdict}]
    """  # noqa: D301  (click wants the backspace itself)
    _check_names(allow)
    out = None if as_json else console()
    answers: list[str] = []
    codes = {0}
    for path in paths:
        try:
            report = _scanned(path, allow)
        except (OSError, TensorIOError) as error:
            complain(error)
            codes.add(WRONG_USE)
            answers.append(json.dumps({"path": path, "error": printable(str(error))}))
            continue
        codes.add(EXIT_CODES[report.verdict])
        if out is None:
            answers.append("\n".join(_json_lines(report)))
        else:
            out.print(_sheet(report, limit or None))
    code = next(c for c in WORST_FIRST if c in codes)
    if out is None:
        body = ",\n".join(answers)
        click.echo(f'{{"schema": {SCHEMA}, "exit_code": {code}, "paths": [\n{body}\n]}}')
    ctx.exit(code)


def _check_names(allow: Iterable[str]) -> None:
    from tensorio.scanning._report import judge_for

    try:
        judge_for(allow)
    except ValueError as error:
        raise click.BadParameter(str(error).replace("allow=", "it", 1), param_hint="--allow") from None


def _scanned(path: str, allow: Iterable[str]) -> ScanReport:
    import tensorio
    from tensorio.cli._progress import bar

    with bar(cut_middle(shown(os.path.basename(path)), LABEL_MAX)) as progress:
        return tensorio.scan(path, allow=allow, progress=progress)


# ------------------------------------------------------------------ for machines


def _json_lines(report: ScanReport) -> Iterator[str]:
    whole = report.as_dict()
    yield f'{{"path": {json.dumps(whole["path"])}, "verdict": {json.dumps(whole["verdict"])},'
    for key in ("findings", "notes", "files"):
        items = ",\n".join(json.dumps(item) for item in whole[key])
        yield f'"{key}": [\n{items}\n]' + ("}" if key == "files" else ",")


# ------------------------------------------------------------------ for people


def _sheet(report: ScanReport, most: int | None) -> Sheet:
    sheet = Sheet("<<<")
    sheet.add(Cell(shown(report.path), "bold"), _VERDICTS[report.verdict])
    several = len(report.files) != 1
    if several:
        sheet.add(f"  {some(len(report.files), 'file')}")
    else:
        sheet.add(f"  {shown(report.files[0].what)}")
    for group, findings in groupby(report.findings, lambda f: f.group):
        listed = list(findings)
        if group in _QUIET:
            _add_quietly(sheet, group, listed, most)
        else:
            _add_group(sheet, group, listed, most, several)
    for note in islice(report.notes, most):
        sheet.add(Cell(f"  note: {shown(note, REASON_MAX)}", "dim"))
    if most is not None and len(report.notes) > most:
        sheet.add(Cell(f"  ... and {some(len(report.notes) - most, 'more note')}; --limit 0 shows all", "dim"))
    return sheet


def _add_group(sheet: Sheet, group: str, findings: list[Finding], most: int | None, several: bool) -> None:
    """Add a row per finding, those of one reason under that reason."""
    rows = sorted(islice(findings, most), key=lambda f: f.reason) if group != "unreadable" else findings[:most]
    style = _STYLES[group]
    for reason, same in groupby(rows, lambda f: f.reason):
        sheet.add(Cell(f"  {group}: {printable(reason[:REASON_MAX])}", style))
        for finding in same:
            name = f"{finding.module}.{finding.name}" if finding.module or finding.name else ""
            text = f"    {shown(name, NAME_MAX)}" if name else "    at"
            sheet.add(Cell(text, style), Cell(shown(finding.how)), Cell(_place(finding, several), "dim"))
    if most is not None and len(findings) > most:
        sheet.add(Cell(f"  ... and {some(len(findings) - most, 'more')[:-1]} {group}; --limit 0 shows all", "dim"))


def _add_quietly(sheet: Sheet, group: str, findings: list[Finding], most: int | None) -> None:
    names = list(dict.fromkeys(f"{f.module}.{f.name}" for f in findings))
    text = ", ".join(shown(name, NAME_MAX) for name in islice(names, most))
    rest = f" and {len(names) - most:,} more" if most is not None and len(names) > most else ""
    sheet.add(Cell(f"  {group}: {text}{rest}", _STYLES.get(group, "")))


def _place(finding: Finding, several: bool) -> str:
    """Where it is, and how often."""
    parts = [finding.file] if several else []
    where = " > ".join(shown(part, RECORD_MAX) for part in [*parts, finding.record] if part)
    at = "" if finding.offset is None else f"byte {finding.offset}"
    times = f" (x{finding.count:,})" if finding.count > 1 else ""
    return ", ".join(part for part in (where, at) if part) + times
