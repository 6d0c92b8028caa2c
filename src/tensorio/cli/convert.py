"""``tensorio convert``: the same tensors in another format."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import click

from tensorio.cli._key import key_option
from tensorio.cli._text import Cell, Sheet, console, cut_middle, shown, size, some
from tensorio.errors import UnsafePickleError
from tensorio.formats import names

__all__ = ["command"]

DROPPED_MAX = 20  # names listed of what was dropped
LABEL_MAX = 30  # columns of a file's name beside its bar
SPEED_NBYTES = 16 << 20  # below that, a speed is noise


@click.command("convert", short_help="Write a file again in another format.")
@click.argument("source", metavar="SRC", type=click.Path())
@click.argument("target", metavar="DST", type=click.Path())
@click.option("--format", "format_", type=click.Choice(names()), help="Of DST; by its suffix if not given.")
@click.option("--unknown", type=click.Choice(("error", "opaque")), default="error", show_default=True,
              help="Objects of classes that are not harmless: refuse the file, or keep them as data.")  # fmt: skip
@key_option(help="Where the key of SRC is, if it is encrypted; DST is not.")
def command(source: str, target: str, format_: str | None, unknown: str, key: Any) -> None:
    """Write the tensors of SRC to DST, straight from the mapping: under 64 MiB of memory, whatever the size.

    DST appears whole or not at all. Lists what its format can't hold and what
    was dropped for that: values that are not tensors.
    """
    import tensorio
    from tensorio import formats
    from tensorio.cli._progress import bar

    try:
        chosen = formats.for_target(target, format_)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="DST") from None
    start = time.perf_counter()
    try:
        with bar(cut_middle(shown(os.path.basename(target)), LABEL_MAX)) as progress:
            dropped = tensorio.convert(source, target, format=format_, unknown=unknown, key=key, progress=progress)
    except UnsafePickleError as error:
        error.message = error.message.replace("unknown='opaque'", "--unknown opaque")  # what it is called here
        raise
    console().print(_sheet(target, chosen.NAME, dropped, time.perf_counter() - start))


def _sheet(target: str, format_: str, dropped: list[str], seconds: float) -> Sheet:
    nbytes = os.path.getsize(target)
    speed = f", {size(nbytes / seconds)}/s" if nbytes >= SPEED_NBYTES else ""
    sheet = Sheet("<<")
    sheet.add(Cell(shown(target), "bold"), f"{format_}, {size(nbytes)} in {seconds:.2f} s{speed}")
    if not dropped:
        sheet.add(Cell("  nothing was dropped", "dim"))
        return sheet
    sheet.add(Cell(f"  dropped, since {format_} can't hold {'it' if len(dropped) == 1 else 'them'}: "
                   f"{some(len(dropped), 'value')}", "yellow"))  # fmt: skip
    groups = list(_grouped(dropped))
    for name, count in groups[:DROPPED_MAX]:
        sheet.add(f"    {shown(name) or '(the object itself)'}", Cell(f"x{count:,}" if count > 1 else "", "dim"))
    if len(groups) > DROPPED_MAX:
        sheet.add(Cell(f"    ... and {len(groups) - DROPPED_MAX:,} more", "dim"))
    return sheet


def _grouped(names: list[str]) -> Iterator[tuple[str, int]]:
    """Yield the names, neighbours that differ in their last number as one ending in ``*``."""
    for name, group in groupby(names, lambda name: re.sub(r"(?<=\.)[0-9]+$", "*", name)):
        members = list(group)
        yield (name, len(members)) if len(members) > 1 else (members[0], 1)
