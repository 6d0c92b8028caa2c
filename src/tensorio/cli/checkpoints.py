"""``tensorio checkpoints``: the steps of a training run, and which of them are whole."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tensorio.cli._text import Cell, Sheet, console, printable, shown, size, some
from tensorio.errors import TensorIOError

if TYPE_CHECKING:
    from tensorio.manager._manager import CheckpointManager
    from tensorio.manager._note import StepInfo

__all__ = ["command"]

BAD_FILE = 1
METRICS_MAX = 60  # columns
UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


class Row(NamedTuple):
    """A step: what its note says, and what is wrong with it."""

    step: int
    info: StepInfo | None
    pinned: bool
    problem: str | None


@click.command("checkpoints", short_help="List the checkpoints of a training run.")
@click.argument("folder", type=click.Path(), metavar="FOLDER")
@click.option("--verify", "deep", is_flag=True, help="Recompute all checksums, not only compare sizes.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@click.pass_context
def command(ctx: click.Context, folder: str, deep: bool, as_json: bool) -> None:
    """List the steps that a CheckpointManager saved to FOLDER (or an fsspec address).

    For each: size, age, metrics, whether it is pinned, and whether its files are
    all there and of their sizes. Exit code 1 if one is not.

    \b
    With --json, one object:
      {"schema": 1, "folder": ..., "latest_valid": step or null, "verified": true
       if checksums were recomputed, "steps": [{"step", "nbytes", "time" (seconds
       since 1970), "metrics", "pinned", "valid", "problem" (or null)}, ...]}
    """  # noqa: D301  (click wants the backspace itself)
    from tensorio.manager._manager import CheckpointManager

    if "://" not in folder:
        os.stat(folder)  # a name that was mistyped is not a run without checkpoints
    manager = CheckpointManager(folder)
    if not as_json and not manager.steps():
        click.echo(f"{shown(folder)}: no checkpoints")
        return
    rows = list(_rows(manager, deep))
    if as_json:
        click.echo(json.dumps(_object(folder, rows, deep), indent=1))
    else:
        console().print(_sheet(rows, deep))
    ctx.exit(BAD_FILE if any(row.problem for row in rows) else 0)


def _rows(manager: CheckpointManager, deep: bool) -> Iterator[Row]:
    for step in manager.steps():
        info, problem = None, None
        try:
            info = manager.info(step)
            manager.check(step, deep=deep)
        except FileNotFoundError as error:
            if step not in manager.steps():
                continue  # removed since, by who trains
            problem = str(error)
        except (TensorIOError, OSError) as error:
            problem = str(error)
        yield Row(step, info, manager.pinned(step), problem)


def _object(folder: str, rows: list[Row], deep: bool) -> dict[str, Any]:
    steps = [
        {
            "step": row.step,
            "nbytes": None if row.info is None else row.info.nbytes,
            "time": None if row.info is None else row.info.time,
            "metrics": {} if row.info is None else {n: _finite(v) for n, v in row.info.metrics.items()},
            "pinned": row.pinned,
            "valid": row.problem is None,
            "problem": row.problem,
        }
        for row in rows
    ]
    valid = max((row.step for row in rows if row.problem is None), default=None)
    return {"schema": 1, "folder": folder, "latest_valid": valid, "verified": deep, "steps": steps}


def _finite(value: Any) -> Any:
    """A metric in JSON: NaN and infinity are strings."""
    return value if not isinstance(value, float) or abs(value) < float("inf") else repr(value)


def _sheet(rows: list[Row], deep: bool) -> Sheet:
    sheet = Sheet("<>><<")
    for row in rows:
        mark = Cell(" pinned", "cyan") if row.pinned else Cell()
        if row.info is None:
            sheet.add(
                Cell(str(row.step), "bold"), "", "", mark, Cell(f"BAD: {printable(row.problem or '')}", "bold red")
            )
            continue
        good = Cell("ok" if deep else "whole by its sizes", "green")
        state = good if row.problem is None else Cell(f"BAD: {printable(row.problem)}", "bold red")
        sheet.add(Cell(str(row.step), "bold"), size(row.info.nbytes), _age(row.info.time), mark, state)
        if row.info.metrics:
            metrics = ", ".join(f"{shown(n, 30)} {_number(v)}" for n, v in row.info.metrics.items())
            sheet.add(Cell(f"  {metrics}", "dim"))
    bad = sum(row.problem is not None for row in rows)
    sheet.add(f"{some(len(rows), 'checkpoint')}, {bad} of them bad" if bad else some(len(rows), "checkpoint"))
    return sheet


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else shown(value, METRICS_MAX)


def _age(then: float) -> str:
    """How long ago, in the largest unit that it has one of."""
    seconds = max(time.time() - then, 0)
    for length, unit in UNITS:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "now"
