"""``tensorio inspect``: what is in a file, without its payload."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from tensorio.cli._options import key_option

if TYPE_CHECKING:
    from tensorio.checkpoint._checkpoint import Checkpoint
    from tensorio.cli._survey import Survey

__all__ = ["command"]

ROWS, SECTION_ROWS = 200, 24  # shown of the tensors, and of each list below them, if nobody says otherwise
DEPTH = 2
MODULES_MAX = 12  # rows of the table by module before one level less is shown


@click.command("inspect", short_help="Show what is in a file, without its payload.")
@click.argument("path", type=click.Path())
@click.option("--flat", is_flag=True, help="One row per tensor, in the file's order, instead of a tree.")
@click.option("--no-fold", is_flag=True, help="In the tree, show each of the modules that differ only in their number.")
@click.option("--limit", type=click.IntRange(min=0), metavar="ROWS",
              help="Most rows of each list; 0 shows all.  [default: 200, and 24 below the tensors]")  # fmt: skip
@click.option("--depth", type=click.IntRange(min=1), metavar="N",
              help="Levels of the names in the totals by module.  [default: 2, or 1 if that is long]")  # fmt: skip
@key_option()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def command(
    path: str, flat: bool, no_fold: bool, limit: int | None, depth: int | None, key: Any, as_json: bool
) -> None:
    """Show the tensors of PATH: names, dtypes, shapes, bytes and offsets in the file; totals; what shares bytes;
    bytes that no tensor reaches; notes and other values.

    No payload is read, and no object of a pickle is made: classes that are not
    harmless are listed, not run. Any size opens at once. On a terminal, long
    names are cut in their middle; into a pipe, everything goes whole.

    In the tree, {0-31} stands for 32 modules that differ only in their number;
    bytes are of all of them, offsets and values of the first.

    \b
    --json prints one object (all rows, whatever --limit says):
      schema        1; grows by new keys only
      path, format, file_nbytes, files
      metadata      object of strings
      total         {tensors, numel, nbytes}; tied tensors count once per name
      by_dtype      dtype -> {tensors, numel, nbytes}
      by_module     prefix -> {tensors, numel, nbytes}; numbers are "*"
      stored        {records, nbytes, reached, unreached, other_records,
                    other_nbytes, partly: [{record, offset, nbytes, reached,
                    fqns}]}
      tied, overlapping   lists of lists of names
      refused       class -> how often it occurs
      values        how many leaves of the object are no tensors
      loading       how tensorio loads it from where it is, and why
      tensors       [{fqn, dtype, shape, nbytes, numel, packed, contiguous,
                    flags, chunks: [{offsets, shape, strides, storage, offset,
                    nbytes}]}]; offset is in bytes from the start of the file
                    where storage is 0, else of a record unpacked on first use
                    (of several files, storages are counted on)
      others        [{path, type, text}]: values and refused objects, in short
    """  # noqa: D301  (click wants the backspace itself)
    import tensorio
    from tensorio.cli._survey import survey

    with _no_garbage(), tensorio.open(path, unknown="opaque", key=key) as checkpoint:
        facts = survey(checkpoint)
        if as_json:
            from tensorio.cli._json import json_lines

            _print_lines(json_lines(checkpoint, facts, path, _depth(facts, depth)))
        else:
            _draw(checkpoint, facts, path, flat=flat, fold=not no_fold, limit=limit, depth=_depth(facts, depth))


def _print_lines(lines: Iterator[str]) -> None:
    while piece := list(islice(lines, 1000)):
        click.echo("\n".join(piece))


def _depth(facts: Survey, depth: int | None) -> int:
    """The levels asked for, or as many as leave the table short."""
    from tensorio.cli._survey import module_of

    if depth is not None:
        return depth
    modules = set()
    for entry in facts.tensors:
        modules.add(module_of(entry.path, DEPTH))
        if len(modules) > MODULES_MAX:
            return 1
    return DEPTH


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Keep the collector from walking a million live objects over and over: a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _draw(
    checkpoint: Checkpoint, facts: Survey, path: str, *, flat: bool, fold: bool, limit: int | None, depth: int
) -> None:
    """Print everything for people."""
    from tensorio.cli import _view
    from tensorio.cli._text import console

    out = console()
    ascii_only = out.options.ascii_only
    rows, section_rows = (ROWS, SECTION_ROWS) if limit is None else (limit or None, limit or None)
    out.print(_view.heading(checkpoint, facts, path))
    out.print(_view.flat(facts, rows) if flat else _view.tree(facts, rows, fold=fold, ascii_only=ascii_only))
    for section in _view.sections(checkpoint, facts, depth, section_rows, flat=flat, ascii_only=ascii_only):
        out.print()
        out.print(section)
