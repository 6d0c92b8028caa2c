"""``tensorio publish``, ``published`` and ``unpublish``: one copy of a checkpoint for all processes of the host."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from tensorio.cli._options import key_option, unknown_option
from tensorio.cli._text import Cell, Sheet, console, cut_middle, shown, size, some

if TYPE_CHECKING:
    from tensorio.sharing._attach import Published
    from tensorio.sharing._publication import Publication

__all__ = ["commands"]

LABEL_MAX = 30  # columns of a file's name beside its bar
SCHEMA = 1
WORDS = {"file": "its own file, mapped as it is", "memory": "sealed memory", "kept": "a file in memory"}
PAGES = {"small": "", "transparent": ", in transparent huge pages", "reserved": ", in reserved huge pages"}


@click.command("publish", short_help="Share a file's tensors with all processes of the host.")
@click.argument("source", metavar="PATH", type=click.Path())
@click.argument("name", metavar="NAME")
@click.option("--persistent", is_flag=True, help="Return at once, and keep it until it is unpublished.")
@click.option("--replace", is_flag=True, help="Take the name if it is in use; its readers keep what they have.")
@click.option("--huge-pages", is_flag=True, help="Lay it out in huge pages, as far as there are any.")
@click.option("--dequantize", is_flag=True, help="Share quantized tensors as float32.")
@click.option("--mode", default="600", metavar="OCTAL", help="Who may attach to a persistent name (640, 644).")
@unknown_option
@key_option(help="Where the key of PATH is, if it is encrypted; what is published is not.")
def publish(source: str, name: str, persistent: bool, replace: bool, huge_pages: bool, dequantize: bool, mode: str,
            unknown: str, key: Any) -> None:  # fmt: skip
    """Publish the tensors of PATH under NAME, for tensorio.attach(NAME) in other processes.

    A file that can be mapped as it is gets a name and nothing else. All else is
    laid out once, in memory that nobody can change. Holds the name until it is
    interrupted or terminated, unless it is persistent.
    """
    import tensorio
    from tensorio.cli._progress import bar

    start = time.perf_counter()
    with _until_told_to_end() as told:
        try:
            with bar(cut_middle(shown(os.path.basename(source)), LABEL_MAX)) as progress:
                publication = tensorio.publish(
                    source, name, persistent=persistent, replace=replace, huge_pages=huge_pages, dequantize=dequantize,
                    mode=_mode(mode), unknown=unknown, key=key, progress=progress,
                )  # fmt: skip
        except ValueError as error:
            if isinstance(error, tensorio.TensorIOError):
                raise
            raise click.UsageError(str(error)) from None
        told.calmly()
        with publication:
            console().print(_sheet(publication, name, persistent, time.perf_counter() - start))
            if not persistent:
                told.wait()


def _mode(text: str) -> int:
    try:
        return int(text, 8)
    except ValueError:
        raise click.BadParameter(f"expected three octal digits, found {text!r}", param_hint="--mode") from None


class _Told(threading.Event):
    """Set when the process is asked to end, by either signal: an interruption, until there is something to end with."""

    _calm = False

    def calmly(self) -> None:
        """Only be set from now on."""
        self._calm = True

    def hear(self, *_: object) -> None:
        self.set()
        if not self._calm:
            raise KeyboardInterrupt


@contextlib.contextmanager
def _until_told_to_end() -> Iterator[_Told]:
    """Give what is set when the process is asked to end."""
    told = _Told()
    old = {number: signal.signal(number, told.hear) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield told
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _sheet(publication: Publication, name: str, persistent: bool, seconds: float) -> Sheet:
    sheet = Sheet("<<")
    sheet.add(Cell(shown(name), "bold"), f"{publication.format}, {size(publication.nbytes)} in {seconds:.2f} s")
    sheet.add(f"  in {WORDS[publication.kind]}{PAGES[publication.pages]}")
    for note in publication.dropped:
        sheet.add(Cell(f"  dropped: {shown(note)}", "yellow"))
    until = "until it is unpublished" if persistent else f"as long as process {os.getpid()} runs"
    sheet.add(Cell(f"  attach with tensorio.attach({name!r}), {until}", "dim"))
    return sheet


@click.command("published", short_help="List what this user shares.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def published(as_json: bool) -> None:
    """List the names that this user has published, and who holds and reads them."""
    import tensorio

    names = tensorio.published()
    if as_json:
        click.echo(json.dumps({"schema": SCHEMA, "published": [entry._asdict() for entry in names]}, indent=2))
        return
    if not names:
        click.echo("nothing is published")
        return
    console().print(_table(names))


def _table(names: list[Published]) -> Sheet:
    sheet = Sheet("<<><<")
    for entry in names:
        state = Cell(_owners(entry)) if entry.alive else Cell("GONE: its owner has ended", "bold red")
        where = entry.path if entry.path is not None else WORDS[entry.kind]
        sheet.add(Cell(shown(entry.name), "bold"), entry.format, size(entry.nbytes), state, Cell(shown(where), "dim"))
    return sheet


def _owners(entry: Published) -> str:
    held = "kept" if entry.persistent else f"process {', '.join(map(str, entry.owners[:3])) or '?'}"
    return f"{held}, {some(len(entry.readers), 'reader')}"


@click.command("unpublish", short_help="Withdraw a published name.")
@click.argument("name", metavar="NAME")
def unpublish(name: str) -> None:
    """Withdraw NAME, whoever published it. Who is attached stays attached."""
    import tensorio

    try:
        tensorio.unpublish(name)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="NAME") from None


commands = (publish, published, unpublish)
