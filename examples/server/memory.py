"""What the workers of a server have in memory, out of /proc/PID/smaps (Linux).

PSS is the proportional set size: of a page that N processes have mapped, each counts 1/N. Its
sum over the workers is what the machine holds for them; the sum of RSS counts shared pages N times.
"""

from __future__ import annotations

import contextlib
import os
from typing import TypedDict

MIB = 1 << 20


class Row(TypedDict):
    """One worker, in bytes: all of its memory, and of that the weights."""

    pid: int
    rss: int
    pss: int
    weights_pss: int
    weights_private: int


def workers() -> list[int]:
    """Return the processes that have this one's parent."""
    parent, found = os.getppid(), []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdecimal():
                with open(f"/proc/{name}/stat", "rb") as f:
                    if int(f.read().rpartition(b")")[2].split()[1]) == parent:
                        found.append(int(name))
    return sorted(found)


def of_workers(inode: int) -> list[Row]:
    """Return a row for each worker; `inode` is that of the weights."""
    rows = []
    for pid in workers():
        with contextlib.suppress(OSError):  # it has ended
            rows.append(_row(pid, inode))
    return rows


def _row(pid: int, inode: int) -> Row:
    row: Row = {"pid": pid, "rss": 0, "pss": 0, "weights_pss": 0, "weights_private": 0}
    ours = False
    with open(f"/proc/{pid}/smaps", "rb") as f:
        for line in f:
            words = line.split()
            if not words[0].endswith(b":"):
                ours = bool(inode) and int(words[4]) == inode
            elif words[0] in (b"Rss:", b"Pss:", b"Private_Dirty:"):
                nbytes = int(words[1]) * 1024
                if words[0] == b"Rss:":
                    row["rss"] += nbytes
                elif words[0] == b"Pss:":
                    row["pss"] += nbytes
                    row["weights_pss"] += nbytes * ours
                else:
                    row["weights_private"] += nbytes * ours
    return row


def table(rows: list[Row]) -> str:
    """Return the rows as text, with their sums, in MiB."""
    keys = ("rss", "pss", "weights_pss", "weights_private")
    lines = [f"{'worker':>8}" + "".join(f"{key.replace('_', ' '):>17}" for key in keys)]
    for row in rows:
        lines.append(f"{row['pid']:>8}" + "".join(f"{row[key] / MIB:>17.1f}" for key in keys))
    lines.append(f"{'sum':>8}" + "".join(f"{sum(row[key] for row in rows) / MIB:>17.1f}" for key in keys))
    return "\n".join(lines) + "\n"
