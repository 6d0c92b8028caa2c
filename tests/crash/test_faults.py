"""Whatever system call of a save fails, and however: the old checkpoint or the new one, whole, and no litter."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import shim
from writers import PEERS, WRITERS

pytestmark = [
    pytest.mark.plain_build,
    pytest.mark.skipif(shim.built() is None, reason="needs Linux and a C compiler, for a library that lets calls fail"),
]


# Each takes a way of its own to the disk; of the others, a run of every day tries four ways of ten.
DISTINCT = {"save .safetensors", "save, manifest", "shard", "save, several files", "save, several files in place"}
LONG = int(os.environ.get("TENSORIO_CRASH", "50")) > 50


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", WRITERS)
def test_every_call_of_a_save_may_fail(name: str, memory_disk: Path) -> None:
    all_ways = LONG or name in DISTINCT
    found = json.loads(shim.run("faults.py", name, memory_disk / "trials", *([] if all_ways else ["few"])))
    assert not found["wrong"], "\n".join(found["wrong"][:40])
    assert found["trials"] == (10 if all_ways else 4) * found["calls"]
    calls = set(found["touched"])
    assert {"open", "write", "rename", "killed"} <= calls
    assert not WRITERS[name].durable or "fsync" in calls
    assert found["ends"]["raised, old"] > found["calls"]
    assert found["ends"]["killed, old"] > 0


def test_trials_can_tell_a_save_that_is_not_atomic(memory_disk: Path) -> None:
    """The same trials, of a writer that writes over the old file."""
    assert not PEERS["torch.save"].promises
    found = json.loads(shim.run("faults.py", "torch.save", memory_disk / "trials"))
    assert any("unreadable" in complaint for complaint in found["wrong"])
