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

CUTS = 1 if int(os.environ.get("TENSORIO_CRASH", "50")) <= 50 else 20  # a cell of the table

pytestmark = [
    pytest.mark.plain_build,
    pytest.mark.timeout(120 + 300 * CUTS),
    pytest.mark.skipif(shim.built() is None, reason="needs Linux and a C compiler, for a library that cuts the power"),
]


def cut(folder: Path, filesystem: str, writer: str, cuts: int) -> list[dict[str, Any]]:
    if why := why_not(filesystem):
        pytest.skip(why)
    rounds: list[dict[str, Any]] = json.loads(shim.run("power.py", folder, filesystem, writer, cuts, 1))
    assert len(rounds) == 2 * len(FLAGS) * (1 + cuts)
    return rounds


@pytest.mark.parametrize("filesystem", FILESYSTEMS)
@pytest.mark.parametrize("writer", ["save .safetensors", "shard"])
def test_save_survives_power_cuts(filesystem: str, writer: str, tmp_path: Path) -> None:
    rounds = cut(tmp_path, filesystem, writer, CUTS)
    assert [r for r in rounds if not r["right"]] == []
    assert [r for r in rounds if r["left"]] == []
    assert sum(r["returned"] for r in rounds) >= 2 * len(FLAGS)


def test_cuts_take_what_was_not_synced(tmp_path: Path) -> None:
    """The same cuts with ``durable=False``. What is lost is up to the kernel, but never was it nothing."""
    rounds = [r for r in cut(tmp_path, "ext4 noauto_da_alloc", "save durable=False", 0) if r["returned"]]
    if all(r["state"] == "new" for r in rounds):
        pytest.skip("this kernel wrote everything down by itself, so that the cuts prove little")
