"""Files that are not in the page cache."""

from __future__ import annotations

import os
from pathlib import Path

from tensorio import _host


def evicted(path: Path) -> int:
    """Drop a file from the page cache; bytes that stayed, or a number below 0 if the system does not tell."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return _host.cached(fd, 0, path.stat().st_size)
    finally:
        os.close(fd)
