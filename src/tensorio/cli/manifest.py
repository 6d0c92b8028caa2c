"""``tensorio manifest``: write down the SHA-256 of files that are there."""

from __future__ import annotations

import os
import time

import click

from tensorio.cli._text import Cell, Sheet, console, cut_middle, shown, some

__all__ = ["command"]

LABEL_MAX = 30  # columns of a file's name beside its bar


@click.command("manifest", short_help="Write the SHA-256 of a file or folder, for verify.")
@click.argument("paths", nargs=-1, required=True, type=click.Path(), metavar="PATH...")
def command(paths: tuple[str, ...]) -> None:
    """Write the SHA-256 of each PATH: of a file to PATH.sha256, of a folder's files to checkpoint.sha256 inside.

    The index of a checkpoint in several files (*.index.json) stands for its folder.
    `tensorio verify` finds the list there, and `sha256sum -c` takes it. One that
    is there already is replaced. Say what the files are when you know that they
    are right: just after they were written, or checked.
    """
    import tensorio
    from tensorio.cli._progress import bar

    out = console()
    for path in paths:
        start = time.perf_counter()
        with bar(cut_middle(shown(os.path.basename(path)), LABEL_MAX)) as progress:
            written = tensorio.write_manifest(path, progress=progress)
        with open(written, "rb") as lines:
            files = some(sum(1 for _ in lines), "file")
        sheet = Sheet("<<")
        sheet.add(Cell(shown(written), "bold"), f"{files} in {time.perf_counter() - start:.2f} s")
        out.print(sheet)
