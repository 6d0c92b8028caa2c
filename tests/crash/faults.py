"""Let every system call of a save fail, in every way, one after another: ``faults.py WRITER FOLDER [few]``.

Over the shim, each trial is a forked process that overwrites a good checkpoint. Prints one JSON object: how many trials
there were, how they ended, and those that broke the promise.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from shim import KILL, SHORT, Shim
from states import NEW, OLD, Outcome, Scene, attempt
from writers import PEERS, WRITERS

ERRNOS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG)
# A disk stays full or broken; a signal that never stops coming is none.
ONCE = (*ERRNOS, errno.EINTR, errno.EAGAIN, SHORT, KILL)
WAYS = [(how, False) for how in ONCE] + [(how, True) for how in (errno.ENOSPC, errno.EIO)]
FEW = [(errno.ENOSPC, False), (errno.EINTR, False), (KILL, False), (errno.EIO, True)]


class Trial(NamedTuple):
    """One save, and the call of it that something was done to."""

    call: int
    how: int
    sticky: bool

    def __str__(self) -> str:
        name = {SHORT: "short", KILL: "KILL"}.get(self.how) or errno.errorcode[self.how]
        return f"call {self.call} {name}{' and on' if self.sticky else ''}"


def run_trial(scene: Scene, shim: Shim, trial: Trial) -> tuple[Outcome | None, str]:
    """Save in a forked process; how it ended (None: it was killed) and the call that was touched."""
    scene.reset()
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read_end)
            shim.arm(scene.work, trial.call, trial.how, trial.sticky)
            outcome = attempt(scene)
            shim.disarm()
            os.write(write_end, json.dumps([outcome, shim.fired()]).encode())
            os._exit(0)
        finally:
            os._exit(99)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return None, "killed"
    assert os.WEXITSTATUS(status) == 0, f"{trial}: the process ended with {status}"
    outcome, fired = json.loads(answer)
    return Outcome(*outcome), fired


def complaints(scene: Scene, trial: Trial, outcome: Outcome | None, fired: str) -> tuple[str, list[str]]:
    """What is at the target now, and in what the promise was broken."""
    state, litter, wrong = scene.state(), scene.litter(), []
    if state not in (OLD, NEW):
        wrong.append(f"the checkpoint is {state}")
    if outcome is not None and outcome.returned and state != NEW:
        wrong.append("it returned, and the checkpoint is not the new one")
    if outcome is not None and not outcome.returned:
        wrong += _what_is_wrong_with(scene, trial, outcome)
    if litter:
        if outcome is not None and fired not in ("unlink", "rmdir"):
            wrong.append(f"left {litter}")
        scene.write()
        if scene.litter():
            wrong.append(f"the next save did not remove {scene.litter()}")
    return state, wrong


def _what_is_wrong_with(scene: Scene, trial: Trial, outcome: Outcome) -> list[str]:
    wrong = []
    if outcome.errno is None:
        wrong.append(f"not an OSError with errno: {outcome.said}")
    elif outcome.errno != trial.how:
        wrong.append(f"another errno: {outcome.said}")
    if outcome.errno and not (outcome.filename or "").startswith(str(scene.target)):
        wrong.append(f"another path: {outcome.said}")
    if trial.how == SHORT:
        wrong.append(f"a short write is no error: {outcome.said}")
    if "\n" in outcome.said or len(outcome.said) > 500:
        wrong.append(f"not one line: {outcome.said}")
    return wrong


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    ways = FEW if sys.argv[3:] == ["few"] else WAYS
    writer = (WRITERS | PEERS)[name]
    scene, shim = Scene(writer, folder), Shim()
    scene.reset()
    shim.arm(scene.work)
    scene.write()
    calls = shim.count()
    shim.disarm()
    ends: Counter[str] = Counter()
    touched: Counter[str] = Counter()
    wrong = []
    for call in range(1, calls + 1):
        for how, sticky in ways:
            trial = Trial(call, how, sticky)
            outcome, fired = run_trial(scene, shim, trial)
            state, complained = complaints(scene, trial, outcome, fired)
            ended = "killed" if outcome is None else "returned" if outcome.returned else "raised"
            ends[f"{ended}, {state}"] += 1
            touched[fired] += 1
            wrong += [f"{trial} ({fired}): {complaint}" for complaint in complained]
    print(json.dumps({"calls": calls, "trials": sum(ends.values()), "ends": ends, "touched": touched, "wrong": wrong}))


if __name__ == "__main__":
    main()
