"""A progress bar in bytes, on stderr, if that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tensorio.cli._text import console, size

__all__ = ["bar"]


@contextmanager
def bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar while the block runs.

    Parameters
    ----------
    label : str
        Ready to print.

    Yields
    ------
    callable
        For the library's ``progress=``: called as ``(done, total)`` in bytes.
    """
    out = console(err=True)
    if not out.is_terminal:
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Speed(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{size(task.finished_speed or task.speed or 0)}/s")

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        Speed(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=out, transient=True) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
