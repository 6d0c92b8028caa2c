"""``tensorio verify``: compare with checksums, name what is bad."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import click

from tensorio.cli._options import key_option
from tensorio.cli._text import Cell, Sheet, complain, console, cut_middle, printable, shown, size, some
from tensorio.errors import TensorIOError

if TYPE_CHECKING:
    from tensorio.checkpoint._report import Report

__all__ = ["command"]

BAD_FILE, WRONG_USE = 1, 2
SCHEMA = 1
UNNAMED_MAX = 20  # files listed that a manifest does not name
TENSORS_MAX = 3  # named for each problem
LABEL_MAX = 30  # columns of a file's name beside its bar
SPEED_NBYTES = 16 << 20  # below that, a speed is noise


@click.command("verify", short_help="Compare a checkpoint with its checksums.")
@click.argument("paths", nargs=-1, required=True, type=click.Path(), metavar="PATH...")
@click.option(
    "--manifest",
    type=click.Path(),
    metavar="FILE",
    help="List of SHA-256 digests to use; by default the one beside a file or in a folder, if there is one.",
)
@click.option("--require", is_flag=True, help="Payload that no checksum covers is a problem.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@key_option()
@click.pass_context
def command(
    ctx: click.Context, paths: tuple[str, ...], manifest: str | None, require: bool, as_json: bool, key: Any
) -> None:
    """Check the structure of each PATH and compare it with every checksum there is of it.

    \b
    These are
      the CRC-32 of each record of a .pt;
      digests of tensors in a .safetensors, where they were asked for;
      a manifest of SHA-256 digests: FILE.sha256 beside a file,
      checkpoint.sha256 or SHA256SUMS in a folder;
      the tag of every chunk of what is encrypted, with --key.

    Names each bad record and file, the bytes, and the tensors they are of, and
    says how many bytes nothing covers.

    JSON: {"schema": 1, "exit_code": ..., "paths": [...]}, each path with the
    fields of `tensorio.Report`, or with "path" and "error".
    """  # noqa: D301  (click wants the backspace itself)
    out = None if as_json else console()
    answers: list[dict[str, Any]] = []
    worst = 0
    for path in paths:
        try:
            report, seconds = _checked(path, manifest, require, key)
        except (TensorIOError, OSError) as error:
            complain(error)
            worst = max(worst, BAD_FILE if isinstance(error, TensorIOError) else WRONG_USE)
            answers.append({"path": path, "error": str(error)})
            continue
        worst = max(worst, 0 if report.ok else BAD_FILE)
        if out is None:
            answers.append(report.as_dict())
        else:
            out.print(_sheet(path, report, seconds))
    if as_json:
        click.echo(json.dumps({"schema": SCHEMA, "exit_code": worst, "paths": answers}))
    ctx.exit(worst)


def _checked(path: str, manifest: str | None, require: bool, key: Any) -> tuple[Report, float]:
    import tensorio
    from tensorio.cli._progress import bar

    with bar(cut_middle(shown(os.path.basename(path)), LABEL_MAX)) as progress:
        start = time.perf_counter()
        report = tensorio.verify(path, manifest=manifest, require=require, key=key, progress=progress)
        return report, time.perf_counter() - start


def _sheet(path: str, report: Report, seconds: float) -> Sheet:
    sheet = Sheet("<<")
    sheet.add(Cell(shown(path), "bold"), _verdict(report))
    for problem in report.problems:
        sheet.add(Cell(f"  {_problem(problem, report)}", "red"))
    done = report.checked + report.hashed
    speed = f", {size(done / seconds)}/s" if done >= SPEED_NBYTES else ""
    right = ", all right" if report.ok else ""
    if report.checked:
        sheet.add(f"  {size(report.checked)} in {some(report.records, 'record')} checked{right}{speed}")
        speed = ""
    if report.manifest is not None:
        files = some(len(report.covered), "file")
        sheet.add(f"  {size(report.hashed)} in {files} compared with {shown(report.manifest)}{right}{speed}")
    for name in report.unnamed[:UNNAMED_MAX]:
        sheet.add(Cell(f"  not named in the manifest: {shown(name)}", "yellow"))
    if len(report.unnamed) > UNNAMED_MAX:
        sheet.add(Cell(f"  ... and {len(report.unnamed) - UNNAMED_MAX:,} more", "yellow"))
    for note in report.notes:
        sheet.add(Cell(f"  note: {printable(note)}", "yellow"))
    if report.format:
        sheet.add(Cell(f"  not covered: {_not_covered(report)}", "dim"))
    return sheet


def _problem(problem: TensorIOError, report: Report) -> str:
    """What is wrong, where, and whose bytes these are."""
    what = "" if problem.path in (None, report.path) else f"{shown(problem.path)}: "
    if problem.record is not None:
        what += f"bad record {shown(problem.record)}"
    elif problem.offset is not None:
        what += "bad file"
    at = "" if problem.offset is None else f" at byte {problem.offset}"
    text = f"{what}{at}: " if what and not what.endswith(": ") else what
    names = ", ".join(shown(fqn) for fqn in problem.tensors[:TENSORS_MAX])
    more = f" and {len(problem.tensors) - TENSORS_MAX:,} more" if len(problem.tensors) > TENSORS_MAX else ""
    whose = f" (tensors: {names}{more})" if names and problem.tensors != (problem.record,) else ""
    return f"{text}{printable(problem.message)}{whose}"


def _verdict(report: Report) -> Cell:
    if not report.ok:
        noun = "record" if all(problem.record is not None for problem in report.problems) else "problem"
        return Cell(f"BAD: {some(len(report.problems), noun)}", "bold red")
    if not report.checked and not report.hashed:
        return Cell("ok as far as can be told", "yellow")
    return Cell("ok", "bold green")


def _not_covered(report: Report) -> str:
    if report.hashed and not report.unchecked:
        return "what the manifest does not name, but for the payload" if report.unnamed else "nothing"
    if report.format == "safetensors" and not report.checked:
        return (f"{size(report.unchecked)}, all payload: no checksum in the file, no manifest beside it; "
                "the structure is valid")  # fmt: skip
    payload = f"{size(report.unchecked)} of payload without a checksum, and " if report.unchecked else ""
    return f"{payload}headers and the padding between records (the structure is valid)"
