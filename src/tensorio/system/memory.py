"""How much memory may be taken: the system's, and that of the container the process is in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path  # slow to import, and this module comes with `import tensorio`

__all__ = ["available"]

NO_LIMIT = 1 << 62  # bytes; kernels write very large numbers or "max" where there is none

# Where the two versions of control groups keep limit, use, and what can be taken back of it (a key of memory.stat).
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available(root: Path | None = None) -> int:
    """Return the bytes that new memory may take before the system ends this process or others.

    Parameters
    ----------
    root : pathlib.Path, optional
        Where ``/proc`` and what it refers to are, if not where they always are.

    Returns
    -------
    int
        The least of what the system has (``MemAvailable``) and what is left to each control group that the process
        is in, version 1 or 2, and to those above it; very many where nothing tells. Page cache that can be taken
        back counts as left.

    Notes
    -----
    About ten small reads of files of the kernel's: 0.1 ms.
    """
    if root is None:
        from pathlib import Path

        root = Path("/")
    return max(0, min(_of_system(root), *(_left(folder, names) for folder, names in _groups(root)), NO_LIMIT))


def _of_system(root: Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return NO_LIMIT


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return []


def _groups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The folders of the process' control groups for memory, innermost first."""
    mounts = list(_mounts(root))
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            version, names = "cgroup2", _V2
        elif "memory" in controllers.split(","):
            version, names = "cgroup", _V1
        else:
            continue
        for kind, inside, mount in mounts:
            if kind != version or (kind == "cgroup" and not (mount / _V1[0]).exists()):
                continue
            # In a container, the mount may be a part of the tree that the path is in; or the path the whole of it.
            within = path.removeprefix(inside).strip("/") if path.startswith(inside) else ""
            folder = mount / within
            while True:
                yield folder, names
                if folder == mount:
                    break
                folder = folder.parent


def _mounts(root: Path) -> Iterator[tuple[str, str, Path]]:
    """Type, part of the tree, and place of each mount of control groups."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, behind = line.partition(" - ")
        kind = behind.split(" ", 1)[0]
        if kind in ("cgroup", "cgroup2"):
            fields = before.split(" ")
            yield kind, fields[3].rstrip("/"), root / fields[4].lstrip("/")


def _left(folder: Path, names: tuple[str, str, str]) -> int:
    """What one group may still take."""
    limit, used, reclaimable = names
    try:
        most = (folder / limit).read_text().strip()
        if most == "max":
            return NO_LIMIT
        spare = next((int(v) for k, v in map(str.split, _lines(folder / "memory.stat")) if k == reclaimable), 0)
        return int(most) - int((folder / used).read_text()) + spare
    except (OSError, ValueError):
        return NO_LIMIT  # the root has no limit and no files of it
