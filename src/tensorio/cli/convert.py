"""``tensorio convert``: the same tensors in another format."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import click

from tensorio.cli._options import format_option, key_option, size_option, unknown_option
from tensorio.cli._target import target_format
from tensorio.cli._text import Cell, Sheet, console, cut_middle, shown, size, some, spelled
from tensorio.errors import TensorIOError

__all__ = ["command"]

DROPPED_MAX = 20  # names listed of what was dropped
LABEL_MAX = 30  # columns of a file's name beside its bar
# Arguments of the function that are options here.
OPTIONS = ("format", "unknown", "max_shard_size", "include", "exclude", "compact")
SPEED_NBYTES = 16 << 20  # below that, a speed is noise


@click.command("convert", short_help="Write a file again in another format.")
@click.argument("source", metavar="SRC", type=click.Path())
@click.argument("target", metavar="DST", type=click.Path())
@format_option
@unknown_option
@size_option
@click.option("--include", multiple=True, metavar="PATTERN", help="Write only these tensors, by their names.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Do not write these tensors.")
@click.option("--compact", is_flag=True, help="Write strided views without their holes.")
@key_option(help="Where the key of SRC is, if it is encrypted; DST is not.")
def command(source: str, target: str, format_: str | None, unknown: str, max_shard_size: str | None,
            include: tuple[str, ...], exclude: tuple[str, ...], compact: bool, key: Any) -> None:  # fmt: skip
    """Write the tensors of SRC to DST, straight from the mapping: under 64 MiB of memory, whatever the size.

    DST appears whole or not at all. With --max-shard-size it is a folder, or a
    file in one that gives the files their names. Lists what its format can't
    hold and what was dropped for that: values that are not tensors. In
    patterns, * stands for any characters but a dot, ** for any number of
    levels: **.lora_*.**
    """
    import tensorio
    from tensorio.cli._progress import bar

    chosen, limit = target_format(target, format_, max_shard_size)
    start = time.perf_counter()
    try:
        with bar(cut_middle(shown(os.path.basename(target)), LABEL_MAX)) as progress:
            dropped = tensorio.convert(
                source, target, format=format_, include=include or None, exclude=exclude or None, compact=compact,
                unknown=unknown, max_shard_size=limit, key=key, progress=progress,
            )  # fmt: skip
    except TensorIOError as error:
        error.message = spelled(error.message, *OPTIONS)
        raise
    except ValueError as error:
        raise click.UsageError(spelled(str(error), *OPTIONS)) from None
    console().print(_sheet(target, chosen.NAME, dropped, time.perf_counter() - start))


def _sheet(target: str, format_: str, dropped: list[str], seconds: float) -> Sheet:
    files = _files(target)
    nbytes = sum(map(os.path.getsize, files))
    speed = f", {size(nbytes / seconds)}/s" if nbytes >= SPEED_NBYTES else ""
    sheet = Sheet("<<")
    several = f" in {len(files)} files" if len(files) > 1 else ""
    sheet.add(Cell(shown(target), "bold"), f"{format_}, {size(nbytes)}{several} in {seconds:.2f} s{speed}")
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


def _files(target: str) -> tuple[str, ...]:
    """The files of tensors that were written."""
    import tensorio

    if os.path.isfile(target):
        return (target,)
    with tensorio.open(target, unknown="opaque") as checkpoint:
        return checkpoint.files


def _grouped(names: list[str]) -> Iterator[tuple[str, int]]:
    """Yield the names, neighbours that differ in their last number as one ending in ``*``."""
    for name, group in groupby(names, lambda name: re.sub(r"(?<=\.)[0-9]+$", "*", name)):
        members = list(group)
        yield (name, len(members)) if len(members) > 1 else (members[0], 1)
