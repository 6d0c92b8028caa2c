"""``tensorio demo``: the main job, shown and measured on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import click

from tensorio.cli._text import console, parse_size, size, some

if TYPE_CHECKING:
    from rich.table import Table

    from tensorio.cli._memory import Meter
    from tensorio.cli._workers import Crew

__all__ = ["command"]

SIZE, SIZE_MIN = "512MiB", 1 << 20
WORKERS, WORKERS_MAX = 4, 64
TERMINATED = 143  # 128 + SIGTERM, as shells report it
# Room on disk, in model sizes: the .pt, the .safetensors, and some air.
DISK = 2.1
# Share of the free memory that the copying workers may take together.
MEMORY = 0.6


class Step(NamedTuple):
    """One row of the result.

    Attributes
    ----------
    what : str
    wall, cpu : float
        Seconds; CPU summed over the processes.
    touched : int
        Bytes read or written, summed over the processes.
    pss : list of int or None
        Memory of each process in bytes, beyond what it had before.
    """

    what: str
    wall: float
    cpu: float
    touched: int
    pss: list[int | None]


@click.command("demo", short_help="Show and measure the main job in a temporary folder.")
@click.option("--size", "nbytes", callback=parse_size, default=SIZE, show_default=True, help="Of the made-up model.")
@click.option("--workers", type=click.IntRange(1, WORKERS_MAX), default=WORKERS, show_default=True,
              help="Processes that open the file at once.")  # fmt: skip
@click.option("--dir", "folder", type=click.Path(), help="Where to make the temporary folder.  [default: the system's]")
def command(nbytes: int, workers: int, folder: str | None) -> None:
    """Save a made-up transformer as .pt, open it by mmap, convert it to .safetensors, and let several processes
    read all of it at once: mapped, and for comparison each with a copy of its own.

    Needs twice the size on disk; removes everything at the end. Memory is PSS:
    a page that N processes share counts 1/N in each, so that the sum is what
    the machine holds.
    """
    if nbytes < SIZE_MIN:
        raise click.BadParameter(f"at least {size(SIZE_MIN)}", param_hint="--size")
    room = shutil.disk_usage(folder or tempfile.gettempdir()).free
    if room < nbytes * DISK:
        raise click.UsageError(f"needs {size(nbytes * DISK)} on disk and {size(room)} are free; give --size or --dir")
    out = console()
    with _terminable(), tempfile.TemporaryDirectory(prefix="tensorio-demo-", dir=folder) as where:
        steps, notes = _show(where, nbytes, workers)
    out.print(_table(steps))
    for note in notes:
        out.print(note)


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that the temporary folder goes away."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(TERMINATED)

    old = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def _show(where: str, nbytes: int, workers: int) -> tuple[list[Step], list[str]]:
    """Go through all steps; return their rows and what is to be said about them."""
    from tensorio.cli._workers import WorkerError

    torch_file, flat_file = os.path.join(where, "model.pt"), os.path.join(where, "model.safetensors")
    with _saying("saving a model, opening and converting it"):
        steps = [_save(torch_file, nbytes), _open(torch_file), _convert(torch_file, flat_file)]
    try:
        with _saying(f"{some(workers, 'worker')} map the same file and read all of it"):
            mapped = _run(torch_file, workers, copy=False)
        copies = min(workers, _copies_that_fit(os.path.getsize(torch_file)))
        with _saying(f"{some(copies, 'worker')} read() it into memory of their own"):
            copied = _run(torch_file, copies, copy=True) if copies else None
    except WorkerError as error:
        raise click.ClickException(str(error)) from None
    steps.append(_crew_step(f"{some(workers, 'worker')} map it", mapped))
    if copied is not None:
        steps.append(_crew_step(f"{some(copies, 'worker')} copy it", copied))
    return steps, list(_notes(mapped, copied, workers))


@contextmanager
def _saying(what: str) -> Iterator[None]:
    """Tell on stderr what is going on, if that is a terminal."""
    out = console(err=True)
    if not out.is_terminal:
        yield
        return
    with out.status(what):
        yield


# --------------------------------------------------------------------------- steps


def _save(path: str, nbytes: int) -> Step:
    import tensorio
    from tensorio.cli._memory import Meter
    from tensorio.cli._model import layout, scratch_file, state_dict

    specs = layout(nbytes)
    scratch = path + ".scratch"
    scratch_file(scratch, max(spec.nbytes for spec in specs))
    state = state_dict(specs, scratch)
    tensorio.save({}, path, durable=False)  # imports what there is to import
    with Meter() as meter:
        tensorio.save(state, path, durable=False)
    state.clear()
    os.unlink(scratch)
    return _step(f"save {some(len(specs), 'tensor')} as .pt", meter, os.path.getsize(path))


def _open(path: str) -> Step:
    import tensorio
    from tensorio import _unpickler  # noqa: F401  (imported before the clock runs)
    from tensorio.cli._memory import Meter

    with Meter() as meter:
        checkpoint = tensorio.open(path)
        arrays = [checkpoint[name] for name in checkpoint]
    header = os.path.getsize(path) - sum(array.nbytes for array in arrays)
    del arrays
    checkpoint.close()
    return _step("open it by mmap", meter, header)


def _convert(source: str, target: str) -> Step:
    import tensorio
    from tensorio.cli._memory import Meter

    with Meter() as meter:
        tensorio.convert(source, target, durable=False)
    return _step("convert to .safetensors", meter, os.path.getsize(target))


def _step(what: str, meter: Meter, touched: int) -> Step:
    return Step(what, meter.wall, meter.cpu, touched, [meter.grown])


def _run(path: str, count: int, *, copy: bool) -> Crew:
    from tensorio.cli._workers import WorkerError, run_workers

    crew = run_workers(path, count, copy=copy)
    if len(crew.crc32) != 1:
        raise WorkerError("the workers read different bytes from the same file")
    return crew


def _copies_that_fit(nbytes: int) -> int:
    """How many copies of the file the machine's free memory holds without harm."""
    try:
        with open("/proc/meminfo", "rb") as f:
            free = next(int(line.split()[1]) * 1024 for line in f if line.startswith(b"MemAvailable:"))
    except (OSError, StopIteration):
        return WORKERS_MAX
    return int(free * MEMORY) // nbytes


def _crew_step(what: str, crew: Crew) -> Step:
    return Step(what, crew.wall, crew.cpu, crew.nbytes, crew.pss)


# -------------------------------------------------------------------------- report


def _table(steps: list[Step]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("step")
    for heading in ("wall", "CPU", "bytes\ntouched", "PSS per\nworker", "PSS\ntotal"):
        table.add_column(heading, justify="right", no_wrap=True)
    for step in steps:
        total = _total(step.pss)
        each = size(total / len(step.pss)) if total is not None and len(step.pss) > 1 else ""
        table.add_row(step.what, _seconds(step.wall), _seconds(step.cpu), size(step.touched), each,
                      "n/a" if total is None else size(total))  # fmt: skip
    return table


def _total(shares: list[int | None]) -> int | None:
    """The sum, if all are known."""
    known = [share for share in shares if share is not None]
    return sum(known) if len(known) == len(shares) else None


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"


def _notes(mapped: Crew, copied: Crew | None, workers: int) -> Iterator[str]:
    yield ("Opening reads headers only; the workers read every byte. Files are in the page cache (warm); "
           "starting the processes is not counted.")  # fmt: skip
    yield "Pages of a mapped file are page cache: the system takes them back when it needs to. Copies stay."
    together = _total(mapped.pss)
    if together is None:
        yield "Memory is not shown: only Linux has PSS (/proc/self/smaps_rollup)."
    if copied is None:
        yield "Not even one copy fits into the free memory, so the copying load was left out."
        return
    if len(copied.pss) < workers:
        yield f"Only {len(copied.pss)} of {workers} copies fit into the free memory."
    copies = _total(copied.pss)
    if together is not None and copies is not None:
        yield f"The workers hold {size(together)} when they map the file, {size(copies)} when each copies it."
    if mapped.crc32 == copied.crc32:
        yield f"All of them read the same bytes (CRC-32 {next(iter(mapped.crc32)):08x})."
