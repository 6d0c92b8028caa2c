"""The table at the end of a run, and the file that keeps it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from race import Bound, Entry, Row, Table, median

BENCH = Path(__file__).resolve().parent
PACKAGES = ("numpy", "torch", "safetensors", "zlib-ng", "isal", "fastsafetensors", "runai-model-streamer", "tensorizer",
            "pytest-benchmark")  # fmt: skip


def machine(folder: Path) -> str:
    """Say in one line what the figures were taken on."""
    parts = [f"{_cpu_model()}, {os.cpu_count()} cores", f"{platform.system()} {platform.release()}"]
    parts.append(f"{_filesystem(folder)} for the files")
    parts.append(f"Python {platform.python_version()}")
    parts += [f"{name} {found}" for name in PACKAGES if (found := _version(name))]
    return ", ".join(parts)


def load() -> str:
    """Say how busy the machine is."""
    return f"load {os.getloadavg()[0]:.1f}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _cpu_model() -> str:
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return platform.machine()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    name = facts.get("model name", platform.machine())
    return f"{name} (family {facts.get('cpu family', '?')}, model {facts.get('model', '?')})"


def _filesystem(folder: Path) -> str:
    """The type of the filesystem that a folder is on, by the longest mount point above it."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "an unknown filesystem"
    path = str(folder.resolve()) + "/"
    above = [(len(m[1]), m[2]) for m in mounts if path.startswith(m[1].rstrip("/") + "/")]
    return max(above)[1] if above else "an unknown filesystem"


# ------------------------------------------------------------------------ table

HEAD = ("", "cpu", "wall", "ours:its cpu", "wall", "target", "met")
# The acts in the order in which one meets them.
SECTIONS = (
    "bench_open",
    "bench_torch",
    "bench_load_big",
    "bench_cold",
    "bench_save",
    "bench_convert",
    "bench_shard",
    "bench_verify",
    "bench_crc32",
    "bench_memory",
)

Cells = tuple[str, ...]


def lines(table: Table, judged: bool = True) -> Iterator[str]:
    """The table of ratios: acts, and below each what ours and every peer cost."""
    cells = [HEAD, *_cells(sorted(table.rows, key=_place), judged)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(HEAD))]
    for i, row in enumerate(cells):
        padded = [c.rjust(w) if 0 < at < 5 else c.ljust(w) for at, (c, w) in enumerate(zip(row, widths, strict=True))]
        yield "  ".join(padded).rstrip()
        if i == 0:
            yield "  ".join("-" * w for w in widths)


def _place(row: Row | Bound) -> int:
    return SECTIONS.index(row.section) if row.section in SECTIONS else len(SECTIONS)


def _cells(rows: Iterable[Row | Bound], judged: bool) -> Iterator[Cells]:
    blank = ("",) * (len(HEAD) - 1)
    act = ""
    for row in rows:
        if row.act != act:
            act = row.act
            yield (act, *blank)
            if isinstance(row, Row):
                yield (f"  {row.ours.name}  [tensorio]", *_times(row.ours), "", "", "", "")
        line = _row(row) if isinstance(row, Row) else _bound(row)
        yield line if judged else (*line[:-1], "")


def _times(entry: Entry) -> Cells:
    return duration(entry.best("cpu")), duration(entry.best("wall"))


def _row(row: Row) -> Cells:
    peer = row.peer
    if not peer.cpu:
        return (f"  {peer.name}", "not", "installed", "", "", "", "")
    target = "" if peer.at_most is None else f"{row.clock} <= {ratio(peer.at_most)}"
    return (f"  {peer.name}", *_times(peer), ratio(row.ratio("cpu")), ratio(row.ratio("wall")), target, row.verdict)


def _bound(row: Bound) -> Cells:
    limit = "" if row.limit is None else f"<= {row.limit:.3g} {row.unit}"
    number = f"{row.value:.2f}" if row.value < 10 else f"{row.value:.0f}"
    return (f"  {row.what}", number, row.unit, "", "", limit, row.verdict)


def ratio(value: float | None) -> str:
    """Write a ratio; a small one as a fraction, the way targets are put."""
    if value is None:
        return ""
    return f"1/{1 / value:.3g}" if value < 0.5 else f"{value:.2f}"


def duration(seconds: float) -> str:
    """Write a time in the unit that suits it."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def detail_lines(table: Table) -> Iterator[str]:
    """Min and median of each implementation, by both clocks, and bytes per second where bytes move."""
    for act, entries, nbytes in table.details:
        yield act
        for entry in entries:
            rate = f"  {nbytes / entry.best('wall') / (1 << 30):6.2f} GiB/s" if nbytes else ""
            times = "  ".join(
                f"{clock} {duration(min(t)):>8} median {duration(median(t)):>8}"
                for clock, t in (("cpu", entry.cpu), ("wall", entry.wall))
            )
            yield f"    {entry.name:36}  {times}{rate}  {len(entry.cpu)} rounds"


# ------------------------------------------------------------------------- file


def write(table: Table, machine_line: str) -> Path:
    """Keep a run in ``bench/results``, under its time and commit."""
    now = datetime.datetime.now(datetime.timezone.utc)
    commit = _commit()
    folder = BENCH / "results"
    folder.mkdir(exist_ok=True)
    path = folder / f"{now:%Y%m%dT%H%M%S}-{commit or 'unknown'}.json"
    data = {
        "machine": machine_line,
        "commit": commit,
        "time": now.isoformat(timespec="seconds"),
        "rows": [_row_json(row) if isinstance(row, Row) else vars(row) | {"met": row.verdict} for row in table.rows],
        "costs": [
            {"act": act, "nbytes": nbytes, "entries": [_entry_json(entry) for entry in entries]}
            for act, entries, nbytes in table.details
        ],
    }
    path.write_text(json.dumps(data, indent=1))
    return path


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "act": row.act, "ours": row.ours.name, "peer": row.peer.name, "clock": row.clock, "cpu": row.ratio("cpu"),
        "wall": row.ratio("wall"), "at_most": row.peer.at_most, "met": row.verdict,
    }  # fmt: skip


def _entry_json(entry: Entry) -> dict[str, Any]:
    return {"name": entry.name, "cpu": entry.cpu, "wall": entry.wall}


def _commit() -> str:
    command = ["git", "-C", str(BENCH), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def missed(rows: Iterable[Row | Bound]) -> int:
    """How many targets were not met."""
    return sum(row.verdict == "NO" for row in rows)
