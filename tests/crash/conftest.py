"""Disks for the campaigns."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def memory_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder where a sync costs nothing: what happens to it is decided by the shim, hundreds of times."""
    if not SHARED_MEMORY.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="tensorio-crash-") as folder:
        yield Path(folder)
