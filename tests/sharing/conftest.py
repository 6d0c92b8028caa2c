"""A registry of their own for these tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the names of one test, in memory as the real one; this process's and its children's."""
    if os.name != "posix":
        pytest.skip("names need a POSIX system")
    parent = "/dev/shm" if os.path.isdir("/dev/shm") else None
    folder = Path(tempfile.mkdtemp(prefix="tensorio-test-", dir=parent))
    monkeypatch.setenv("TENSORIO_REGISTRY", str(folder))
    yield folder
    shutil.rmtree(folder)
