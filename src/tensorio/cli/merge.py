"""``tensorio merge``: tensors of several files in one, by name."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import click

from tensorio.cli._options import format_option, key_option, size_option
from tensorio.cli._target import target_format
from tensorio.cli._text import Cell, Sheet, console, cut_middle, shown, size, some, spelled
from tensorio.errors import DecryptionError, TensorIOError, TensorNotFoundError, escaped

if TYPE_CHECKING:
    from tensorio.checkpoint._merge import Merged

__all__ = ["command"]

SCHEMA = 1
SHOWN_MAX = 20  # names listed of each kind
# Arguments of the function that are options here.
OPTIONS = ("on_conflict", "format", "max_shard_size")
LABEL_MAX = 30  # columns of a file's name beside its bar


@click.command("merge", short_help="Put adapters onto a base, by name, in one file.")
@click.argument("base", metavar="BASE", type=click.Path())
@click.argument("adapters", metavar="[ADAPTER]...", nargs=-1, type=click.Path())
@click.option("-o", "--output", "target", metavar="DST", required=True, type=click.Path(), help="What to write.")
@click.option("--on-conflict", type=click.Choice(("replace", "keep", "error")), default="replace", show_default=True,
              help="Which tensor of a name counts: the later one, the earlier one, or none.")  # fmt: skip
@click.option("--strip-prefix", metavar="TEXT", default="", help="Take this off the names of the adapters' tensors.")
@click.option("--add-prefix", metavar="TEXT", default="", help="Put this before the names of the adapters' tensors.")
@format_option
@size_option
@key_option(help="Where the key of BASE and of each ADAPTER is, if they are encrypted; DST is not.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def command(
    base: str, adapters: tuple[str, ...], target: str, on_conflict: str, strip_prefix: str, add_prefix: str,
    format_: str | None, max_shard_size: str | None, as_json: bool, key: Any,
) -> None:  # fmt: skip
    """Write the tensors of BASE and of each ADAPTER to one checkpoint; of two of one name, the later one.

    Bytes are copied as they are: nothing is computed, the products of LoRA's
    pairs are not added to the weights. Names of PEFT adapters begin with
    base_model.model.; --strip-prefix takes that off. DST appears whole or not
    at all; with --max-shard-size it is a folder, or a file in one that gives
    the files their names.
    """
    import tensorio
    from tensorio.cli._progress import bar

    _, limit = target_format(target, format_, max_shard_size, "--output")
    start = time.perf_counter()
    try:
        if strip_prefix:
            _require_prefix(adapters, strip_prefix, key)
        with bar(cut_middle(shown(os.path.basename(target)), LABEL_MAX)) as progress:
            report = tensorio.merge(
                base, *adapters, dst=target, on_conflict=on_conflict, format=format_, max_shard_size=limit, key=key,
                progress=progress, rename=lambda name: add_prefix + name.removeprefix(strip_prefix),
            )  # fmt: skip
    except TensorIOError as error:
        error.message = spelled(error.message, *OPTIONS)
        raise
    if as_json:
        found = {key: getattr(report, key) for key in ("added", "replaced", "kept", "dropped")}
        click.echo(json.dumps({"schema": SCHEMA, "path": target, "nbytes": report.nbytes, **found}, indent=1))
    else:
        console().print(_sheet(report, target, time.perf_counter() - start))


def _require_prefix(adapters: tuple[str, ...], prefix: str, key: Any) -> None:
    """Raise if no tensor's name begins so: all would be put beside the base, and nothing in its place."""
    import tensorio

    names: list[str] = []
    for adapter in adapters:
        try:
            with tensorio.open(adapter, key=key) as checkpoint:
                names += checkpoint
        except DecryptionError:
            return  # merging them says more
    if names and not any(name.startswith(prefix) for name in names):
        raise TensorNotFoundError(
            f"no tensor of the adapters begins with --strip-prefix {escaped(prefix)}; the first is {escaped(names[0])}"
        )


def _sheet(report: Merged, target: str, seconds: float) -> Sheet:
    sheet = Sheet("<<")
    sheet.add(Cell(shown(target), "bold"), f"{size(report.nbytes)} in {seconds:.2f} s")
    for title, found in (("added", report.added), ("replaced", report.replaced), ("kept as they were", report.kept)):
        _list(sheet, f"  {title}: {some(len(found), 'tensor')}", found)
    _list(sheet, f"  dropped, since they are no tensors: {some(len(report.dropped), 'value')}", report.dropped)
    return sheet


def _list(sheet: Sheet, title: str, found: tuple[str, ...]) -> None:
    if found:
        sheet.add(title)
        for name in found[:SHOWN_MAX]:
            sheet.add(Cell(f"    {shown(name) or '(the object itself)'}", "dim"))
        if len(found) > SHOWN_MAX:
            sheet.add(Cell(f"    ... and {len(found) - SHOWN_MAX:,} more", "dim"))
