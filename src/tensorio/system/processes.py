"""What the system says of processes: which one an id means, and who has a file mapped.

Linux tells in ``/proc``; elsewhere the answers are "don't know", never an error.

References
----------
proc_pid_stat(5), fields 3 and 22; proc_pid_maps(5); pid_namespaces(7).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

__all__ = ["boot_id", "is_running", "mappers", "pid_namespace", "start_time"]


def start_time(pid: int) -> int:
    """Return when a process was started, in clock ticks since the machine was; 0 if there is none, or nobody tells.

    A process id may be given to another process once its own is gone; id and
    start together name one process for as long as the machine runs. One that
    has ended and waits for its parent to notice counts as gone.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            text = f.read()
    except OSError:
        return 0
    fields = text[text.rfind(b")") + 2 :].split()  # the command's name, in front, may hold anything
    return 0 if fields[0] in b"ZX" else int(fields[19])


def is_running(pid: int, start: int) -> bool:
    """Tell whether the process that started at `start` is still there."""
    if start:
        return start_time(pid) == start
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def boot_id() -> str:
    """Return what differs from one start of the machine to the next; empty where nobody tells."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", "rb") as f:
        return f.read(64).decode("ascii", "replace").strip()
    return ""


def pid_namespace() -> int:
    """Return the number of the namespace that this process's ids are from; 0 where nobody tells."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def mappers(files: Iterable[tuple[int, int]]) -> dict[tuple[int, int], list[int]]:
    """Find the processes that have files mapped, as far as this user may look.

    Parameters
    ----------
    files : iterable of (device, inode)

    Returns
    -------
    dict of (device, inode) to list of int
        Process ids, ascending.

    Notes
    -----
    Reads ``/proc/PID/maps`` of every process: milliseconds for each.
    """
    found: dict[tuple[int, int], list[int]] = {file: [] for file in files}
    words = {b"%02x:%02x %d" % (os.major(device), os.minor(device), inode): (device, inode) for device, inode in found}
    pids = sorted(int(name) for name in _listed("/proc") if name.isdecimal()) if words else []
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as f:
            here = {b" ".join(line.split(None, 5)[3:5]) for line in f}
            for word in here & words.keys():
                found[words[word]].append(pid)
    return found


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
