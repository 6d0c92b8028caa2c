"""``tensorio verify``: recompute checksums, name what is bad."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import click

from tensorio.cli._key import key_option
from tensorio.cli._text import Cell, Sheet, complain, console, cut_middle, printable, shown, size, some
from tensorio.errors import TensorIOError

if TYPE_CHECKING:
    from tensorio.checkpoint._verify import Report

__all__ = ["command"]

BAD_FILE, WRONG_USE = 1, 2
LABEL_MAX = 30  # columns of a file's name beside its bar
SPEED_NBYTES = 16 << 20  # below that, a speed is noise


@click.command("verify", short_help="Recompute a file's checksums.")
@click.argument("paths", nargs=-1, required=True, type=click.Path(), metavar="PATH...")
@key_option()
@click.pass_context
def command(ctx: click.Context, paths: tuple[str, ...], key: Any) -> None:
    """Check the structure of each PATH and recompute every checksum it has.

    Names each bad record with the offset of its bytes in the file, and says how
    many bytes no checksum covers: all of a .safetensors file, which has none,
    so that only its structure can be wrong. Of what is encrypted, the tag of
    every chunk is checked, with --key.
    """
    out = console()
    worst = 0
    for path in paths:
        try:
            report, seconds = _checked(path, key)
        except TensorIOError as error:
            complain(error)
            worst = max(worst, BAD_FILE)
        except OSError as error:
            complain(error)
            worst = max(worst, WRONG_USE)
        else:
            out.print(_sheet(path, report, seconds))
            worst = max(worst, 0 if report.ok else BAD_FILE)
    ctx.exit(worst)


def _checked(path: str, key: Any) -> tuple[Report, float]:
    import tensorio
    from tensorio.cli._progress import bar

    with bar(cut_middle(shown(os.path.basename(path)), LABEL_MAX)) as progress:
        start = time.perf_counter()
        report = tensorio.verify(path, key=key, progress=progress)
        return report, time.perf_counter() - start


def _sheet(path: str, report: Report, seconds: float) -> Sheet:
    sheet = Sheet("<<")
    sheet.add(Cell(shown(path), "bold"), _verdict(report))
    for problem in report.problems:
        at = f" at byte {problem.offset}" if problem.offset is not None else ""
        sheet.add(Cell(f"  bad record {shown(problem.record)}{at}: {printable(problem.message)}", "red"))
    if report.checked:
        speed = f", {size(report.checked / seconds)}/s" if report.checked >= SPEED_NBYTES else ""
        right = ", all right" if report.ok else ""
        sheet.add(f"  {size(report.checked)} in {some(report.records, 'record')} checked{right}{speed}")
    sheet.add(Cell(f"  not covered: {_not_covered(report)}", "dim"))
    return sheet


def _verdict(report: Report) -> Cell:
    if not report.ok:
        return Cell(f"BAD: {some(len(report.problems), 'record')}", "bold red")
    if not report.checked:
        return Cell("ok as far as can be told", "yellow")
    return Cell("ok", "bold green")


def _not_covered(report: Report) -> str:
    if report.format == "safetensors" and not report.checked:
        return f"{size(report.unchecked)}, all payload: the format has no checksums; the structure is valid"
    payload = f"{size(report.unchecked)} of payload without a checksum, and " if report.unchecked else ""
    return f"{payload}headers and the padding between records (the structure is valid)"
