"""What tests of managers ask of the steps that are there."""

from __future__ import annotations

from typing import Any

import tensorio


def restored(manager: tensorio.CheckpointManager, *arguments: Any, **options: Any) -> Any:
    """What `restore` finds, which is something."""
    found = manager.restore(*arguments, **options)
    assert found is not None
    return found


def assert_whole_after_the_third(manager: tensorio.CheckpointManager, saved: bool) -> None:
    """Of steps 1 and 2 and a third that may have failed, what is listed is whole, and a good one is the last."""
    steps = manager.steps()
    assert {2} <= set(steps) <= {1, 2, 3}
    assert saved <= (3 in steps)
    assert 1 in steps or 3 in steps
    for step in steps:
        manager.check(step)
    assert restored(manager).step == max(steps)
