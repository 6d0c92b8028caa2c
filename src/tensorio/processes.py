"""What the system says of processes and of the memory they may take.

Linux tells in ``/proc`` and ``/sys/fs/cgroup``; elsewhere the answers are "don't know", never an error.

References
----------
proc_pid_stat(5), fields 3 and 22; pid_namespaces(7); Documentation/admin-guide/cgroup-v1/memory.rst and
cgroup-v2.rst, "Memory Interface Files".
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

__all__ = ["boot_id", "free_memory", "is_running", "mappers", "pid_namespace", "start_time"]

PLENTY = 1 << 62  # bytes; where nothing tells
_GROUPS = "/sys/fs/cgroup"


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


# ------------------------------------------------------------------------ memory


def free_memory() -> int:
    """Return the bytes that this process may still take: of the machine, and of every control group it is in."""
    return min([_available(), *_left_in_groups()])


def _available() -> int:
    with contextlib.suppress(OSError), open("/proc/meminfo", "rb") as f:
        for line in f:
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) * 1024
    return PLENTY


def _left_in_groups() -> Iterator[int]:
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as f:
        for line in f.read().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" and not controllers:
                yield from _left(_GROUPS, path, "memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                yield from _left(f"{_GROUPS}/memory", path, *names)


def _left(root: str, path: str, limit: str, used: str, cache: str) -> Iterator[int]:
    """What is left in a group and in those around it; in a container, the outermost that can be seen is its own."""
    while True:
        folder = root + path.rstrip("/")
        with contextlib.suppress(OSError, ValueError):  # no such file: not seen from here; "max": no limit
            most = int(_text(f"{folder}/{limit}"))
            free = most - int(_text(f"{folder}/{used}")) + _reclaimable(f"{folder}/memory.stat", cache)
            yield max(0, free)
        if path in ("", "/"):
            return
        path = path.rpartition("/")[0] or "/"


def _reclaimable(stat: str, field: str) -> int:
    """Bytes of file pages that the system drops first when the group is full."""
    return next((int(line.split()[1]) for line in _text(stat).splitlines() if line.startswith(field + " ")), 0)


def _text(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as f:
        return f.read()
