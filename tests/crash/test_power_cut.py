"""Power cuts: a save that returned is whole and new, one that did not is old or new; on the disks that are common.

``TENSORIO_CRASH=1000`` cuts before more of the calls. The table is in docs/durability.md.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import shim
from power import FILESYSTEMS, FLAGS, why_not
from writers import UNSYNCED

LONG = int(os.environ.get("TENSORIO_CRASH", "50")) > 50
CUTS = 20 if LONG else 1  # a cell of the table
# A file, and the ways of a folder: made, exchanged, or written into.
WRITERS = ["save .safetensors", "save, several files", "save, several files in place"]
MORE = ["save, manifest", "shard", "convert, several files", "CheckpointManager"]

pytestmark = [
    pytest.mark.plain_build,
    pytest.mark.timeout(120 + 2000 * LONG),
    pytest.mark.skipif(shim.built() is None, reason="needs Linux and a C compiler, for a library that cuts the power"),
]


def cut(folder: Path, filesystem: str, writers: list[str], cuts: int) -> dict[str, list[dict[str, Any]]]:
    if why := why_not(filesystem):
        pytest.skip(why)
    found: dict[str, list[dict[str, Any]]] = json.loads(shim.run("power.py", folder, filesystem, cuts, 1, *writers))
    assert list(found) == writers
    assert {len(rounds) for rounds in found.values()} == {2 * len(FLAGS) * (1 + cuts)}
    return found


@pytest.mark.parametrize("filesystem", FILESYSTEMS)
def test_saves_survive_power_cuts(filesystem: str, tmp_path: Path) -> None:
    found = cut(tmp_path, filesystem, WRITERS + MORE * LONG, CUTS)
    for writer, rounds in found.items():
        assert [(writer, r) for r in rounds if not r["right"] or r["left"]] == []
        assert sum(r["returned"] for r in rounds) >= 2 * len(FLAGS)


def test_cuts_take_what_was_not_synced(tmp_path: Path) -> None:
    """The same cuts with ``durable=False``. What is lost is up to the kernel, but never was it nothing."""
    found = cut(tmp_path, "ext4 noauto_da_alloc", list(UNSYNCED), 0)
    for writer, rounds in found.items():
        if all(r["state"] == "new" for r in rounds if r["returned"]):
            pytest.skip(f"{writer}: this kernel wrote everything down by itself, so that the cuts prove little")
