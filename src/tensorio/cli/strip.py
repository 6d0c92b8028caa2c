"""``tensorio strip``: the weights of a training checkpoint, without the rest."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import click

from tensorio.cli._options import format_option, key_option, size_option
from tensorio.cli._target import target_format
from tensorio.cli._text import Cell, Sheet, console, cut_middle, shown, size, some, spelled
from tensorio.errors import TensorIOError

if TYPE_CHECKING:
    from tensorio.checkpoint._strip import Stripped

__all__ = ["command"]

SCHEMA = 1
SHOWN_MAX = 40  # entries listed
LABEL_MAX = 30  # columns of a file's name beside its bar
# Arguments of the function that are options here.
OPTIONS = ("keep", "include", "exclude", "flat", "format", "max_shard_size")


@click.command("strip", short_help="Write the weights of a training checkpoint, without the rest.")
@click.argument("source", metavar="SRC", type=click.Path())
@click.argument("target", metavar="DST", type=click.Path())
@click.option("--keep", metavar="KEY", help="Key of the entry with the weights, such as ema; found if not given.")
@click.option("--include", multiple=True, metavar="PATTERN", help="Keep these tensors instead, by their names.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Do not keep these tensors.")
@click.option("--flat", is_flag=True, help="Leave out the key above the weights; .safetensors always does.")
@format_option
@size_option
@click.option("--dry-run", is_flag=True, help="Write nothing; say what would be left out.")
@key_option(help="Where the key of SRC is, if it is encrypted; DST is not.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def command(
    source: str, target: str, as_json: bool, format_: str | None, max_shard_size: str | None,
    include: tuple[str, ...], exclude: tuple[str, ...], **options: Any,
) -> None:  # fmt: skip
    """Write what inference needs of SRC to DST: no optimizer, no schedule, no RNG state, no second copy of the weights.

    The weights are below state_dict, model_state_dict, model, module and the
    like, or side by side with the rest. In patterns, * stands for any
    characters but a dot, ** for any number of levels. DST may be SRC; it
    appears whole or not at all.
    """
    import tensorio
    from tensorio.cli._progress import bar

    _, limit = target_format(target, format_, max_shard_size)
    start = time.perf_counter()
    try:
        with bar(cut_middle(shown(os.path.basename(target)), LABEL_MAX)) as progress:
            report = tensorio.strip(source, target, include=include or None, exclude=exclude or None, format=format_,
                                    max_shard_size=limit, progress=progress, **options)  # fmt: skip
    except TensorIOError as error:
        error.message = spelled(error.message, *OPTIONS)
        raise
    except ValueError as error:
        raise click.UsageError(spelled(str(error), *OPTIONS)) from None
    if as_json:
        click.echo(json.dumps(_facts(report, source, target, not options["dry_run"]), indent=1))
    else:
        console().print(_sheet(report, target, time.perf_counter() - start, written=not options["dry_run"]))


def _facts(report: Stripped, source: str, target: str, written: bool) -> dict[str, Any]:
    return {
        "schema": SCHEMA, "source": source, "target": target, "written": written, "entry": report.entry,
        "kept": report.kept, "dropped": report.dropped, "dropped_nbytes": report.dropped_nbytes,
        "nbytes": report.nbytes,
    }  # fmt: skip


def _sheet(report: Stripped, target: str, seconds: float, *, written: bool) -> Sheet:
    sheet = Sheet("<<")
    sheet.add(Cell(shown(target), "bold"), f"{size(report.nbytes)} in {seconds:.2f} s" if written else
              f"{size(report.nbytes)} would be written")  # fmt: skip
    where = "" if report.entry is None else f", of {shown(report.entry)}"
    sheet.add(f"  kept: {some(len(report.kept), 'tensor')}{where}")
    if not report.dropped:
        sheet.add(Cell("  nothing was left out", "dim"))
        return sheet
    sheet.add(Cell(f"  left out: {size(report.dropped_nbytes)} of tensors", "yellow"))
    for i, (key, nbytes) in enumerate(report.dropped.items()):
        if i == SHOWN_MAX:
            sheet.add(Cell(f"    ... and {len(report.dropped) - SHOWN_MAX:,} more", "dim"))
            break
        sheet.add(f"    {shown(key)}", Cell(size(nbytes) if nbytes else "", "dim"))
    return sheet
