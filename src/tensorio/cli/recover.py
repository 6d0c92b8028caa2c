"""``tensorio recover``: save what is left of a damaged file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from tensorio.cli._options import format_option, key_option, unknown_option
from tensorio.cli._target import target_format
from tensorio.cli._text import Cell, Sheet, console, cut_middle, printable, shown, size, some, spelled
from tensorio.errors import TensorIOError

if TYPE_CHECKING:
    from tensorio.checkpoint._recover import Loss, Recovery

__all__ = ["command"]

SOMETHING_LOST = 1
SHOWN_MAX = 20  # names listed of each kind
LABEL_MAX = 30  # columns of a file's name beside its bar
SCHEMA = 1
# Arguments of the function that are options here.
OPTIONS = ("unknown", "raw")


@click.command("recover", short_help="Save what is left of a damaged file.")
@click.argument("source", metavar="SRC", type=click.Path())
@click.argument("target", metavar="DST", type=click.Path())
@format_option
@click.option("--raw", is_flag=True, help="If the description of the tensors is lost, save their bytes.")
@click.option("--keep-damaged", is_flag=True, help="Save tensors whose checksum is wrong, too.")
@unknown_option
@key_option(help="Where the key of SRC is, if it is encrypted; DST is not.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@click.pass_context
def command(ctx: click.Context, source: str, target: str, format_: str | None, raw: bool, keep_damaged: bool,
            unknown: str, as_json: bool, key: Any) -> None:  # fmt: skip
    """Save every tensor of SRC that is whole to DST, and say what is lost.

    SRC is a .pt that was cut off or has holes (its directory may be gone), or a
    .safetensors that was cut short. It is only read. DST appears whole or not
    at all: lost tensors are left out of their dicts, and are None in lists;
    everything else is as it was.

    \b
    Exit codes
      0  every tensor was saved
      1  something is lost or damaged (or nothing could be saved: then there is no DST)
      2  wrong use
    """  # noqa: D301  (click wants the backspace itself)
    import tensorio
    from tensorio.cli._progress import bar

    target_format(target, format_)
    start = time.perf_counter()
    try:
        with bar(cut_middle(shown(os.path.basename(source)), LABEL_MAX)) as progress:
            report = tensorio.recover(source, target, format=format_, raw=raw, keep_damaged=keep_damaged,
                                      unknown=unknown, key=key, progress=progress)  # fmt: skip
    except TensorIOError as error:
        error.message = spelled(error.message, *OPTIONS)
        raise
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="DST") from None
    if as_json:
        for line in _json_lines(report, target):
            click.echo(line)
    else:
        console().print(_sheet(report, target, time.perf_counter() - start))
    ctx.exit(0 if report.ok else SOMETHING_LOST)


def _sheet(report: Recovery, target: str, seconds: float) -> Sheet:
    sheet = Sheet("<<")
    sheet.add(Cell(shown(report.path), "bold"), _verdict(report))
    nbytes = os.path.getsize(target)
    what = "bytes of records, without shapes and types" if report.raw else "tensors"
    sheet.add(f"  saved {len(report.saved):,} {what} ({size(report.saved_nbytes)}) to {shown(target)}: "
              f"{size(nbytes)} in {seconds:.2f} s")  # fmt: skip
    _list_losses(sheet, "lost", report.lost, "red", f" ({size(report.lost_nbytes)})")
    _list_losses(sheet, "saved although damaged", report.damaged, "yellow", "")
    if report.not_proven:
        reasons = sorted(set(report.not_proven.values()))
        sheet.add(Cell(f"  not proven by a checksum: {some(len(report.not_proven), 'tensor')}: "
                       f"{printable(reasons[0])}", "dim" if len(reasons) == 1 else "yellow"))  # fmt: skip
        if len(reasons) > 1:
            _list(sheet, report.not_proven)
    if report.dropped:
        sheet.add(Cell(f"  dropped, since DST can't hold {'it' if len(report.dropped) == 1 else 'them'}: "
                       f"{some(len(report.dropped), 'value')}", "yellow"))  # fmt: skip
    return sheet


def _verdict(report: Recovery) -> Cell:
    if report.healthy:
        return Cell("nothing is wrong with it", "bold green")
    if report.ok:
        return Cell("every tensor was saved", "bold green")
    if report.lost:
        return Cell(f"LOST: {some(len(report.lost), 'tensor')}", "bold red")
    return Cell(f"DAMAGED: {some(len(report.damaged), 'tensor')}", "bold yellow")


def _list_losses(sheet: Sheet, title: str, losses: Mapping[str, Loss], style: str, more: str) -> None:
    if losses:
        sheet.add(Cell(f"  {title}: {some(len(losses), 'tensor')}{more}", style))
        _list(sheet, {name: _where(loss) for name, loss in losses.items()})


def _where(loss: Loss) -> str:
    if loss.offset is None:
        return loss.reason
    return f"bytes {loss.offset:,} to {loss.offset + loss.nbytes:,}: {loss.reason}"


def _list(sheet: Sheet, reasons: Mapping[str, str]) -> None:
    for i, (name, reason) in enumerate(reasons.items()):
        if i == SHOWN_MAX:
            sheet.add(Cell(f"    ... and {len(reasons) - SHOWN_MAX:,} more", "dim"))
            break
        sheet.add(f"    {shown(name) or '(the object itself)'}", Cell(printable(reason), "dim"))


def _json_lines(report: Recovery, target: str) -> Iterator[str]:
    """The report as one JSON object, ASCII only."""
    head: dict[str, Any] = {
        "schema": SCHEMA, "path": report.path, "target": target, "format": report.format, "healthy": report.healthy,
        "raw": report.raw, "saved_nbytes": report.saved_nbytes, "lost_nbytes": report.lost_nbytes,
        "saved": list(report.saved), "not_proven": dict(report.not_proven),
        "lost": {name: loss._asdict() for name, loss in report.lost.items()},
        "damaged": {name: loss._asdict() for name, loss in report.damaged.items()},
        "dropped": list(report.dropped),
    }  # fmt: skip
    yield "{"
    for i, (key, value) in enumerate(head.items()):
        yield f"{json.dumps(key)}: {json.dumps(value)}{',' if i < len(head) - 1 else ''}"
    yield "}"
