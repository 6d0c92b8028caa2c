"""Kill saves at random moments: ``kills.py WRITER FOLDER COUNT BYTES SEED``; prints counts as a JSON object.

Two checkpoints take turns in replacing each other, each save in a process that is killed with SIGKILL some time
between its start and a little after its usual end.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from states import NEW, OLD, Scene
from writers import PEERS, WRITERS

LONGER = 1.2  # the moments reach beyond the usual end


def usual_seconds(scene: Scene) -> float:
    """How long a save takes here, in a forked process as the killed ones are."""
    longest = 0.0
    for version in (scene.new, scene.old):
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            scene.write(version)
            os._exit(0)
        os.waitpid(pid, 0)
        longest = max(longest, time.monotonic() - began)
    return longest


def kill_one(scene: Scene, version: str, wait: float) -> bool:
    """Start a save and kill it; whether it had said that it was done."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            scene.write(scene.new if version == NEW else scene.old)
            os.write(write_end, b"!")
            signal.pause()
        finally:
            os._exit(1)
    os.close(write_end)
    time.sleep(wait)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with os.fdopen(read_end, "rb") as pipe:
        return bool(pipe.read())


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    count, nbytes, seed = map(int, sys.argv[3:])
    writer = (WRITERS | PEERS)[name]
    scene, chance = Scene(writer, folder, nbytes), random.Random(seed)
    scene.reset()
    seconds = usual_seconds(scene)
    counts: Counter[str] = Counter({"kills": 0, "before": 0, "after": 0, "neither": 0, "litter": 0, "lost": 0})
    before = OLD
    for _ in range(count):
        wanted = NEW if before == OLD else OLD
        done = kill_one(scene, wanted, chance.uniform(0, LONGER * seconds))
        state = scene.state()
        counts["kills"] += 1
        counts["litter"] += bool(scene.litter())
        counts["lost"] += done and state != wanted
        counts["before" if state == before else "after" if state == wanted else "neither"] += 1
        if state not in (OLD, NEW):
            scene.reset()
            state = OLD
        before = state
    scene.write()
    counts["litter at the end"] = len(scene.litter())
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
