"""Saves that are killed at random moments; ``TENSORIO_CRASH=1000`` for a long run, `make crash` for the table."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import shim
from writers import WRITERS

KILLS = int(os.environ.get("TENSORIO_CRASH", "50"))

pytestmark = [pytest.mark.plain_build, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")]


@pytest.mark.timeout(60 + KILLS * 5)
@pytest.mark.parametrize("name", ["save .safetensors", "save .pt", "shard"])
def test_killed_saves_leave_the_one_before_or_the_one_after(name: str, tmp_path: Path) -> None:
    assert name in WRITERS
    counts = json.loads(shim.run("kills.py", name, tmp_path / "trials", KILLS, 2_000_000, 1, preload=False))
    assert counts["kills"] == KILLS
    assert counts["neither"] == counts["lost"] == counts["litter at the end"] == 0, counts
    assert counts["before"] + counts["after"] == KILLS
