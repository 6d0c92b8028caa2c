"""Cut the power of a disk: ``power.py FOLDER FILESYSTEM CUTS SEED WRITER...``, over the shim, as root.

Each round has a new image on a loop device. A process saves to it, and FS_IOC_SHUTDOWN ends the filesystem: nothing
that is not on the disk by then gets there. Mounted again, the disk shows what a computer would find that starts after
a power cut: right after a save that returned, and before CUTS of its system calls, fresh and over an old checkpoint.
Prints a list of rounds by writer as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shim import CUT, LOG_FLUSHED, LOG_LOST, Shim
from states import NEW, OLD, Scene
from writers import UNSYNCED, WRITERS, Writer


class Filesystem(NamedTuple):
    """How to make one in an image, and how to mount it."""

    make: tuple[str, ...]
    mount: str
    size: int  # MiB


FILESYSTEMS = {
    "ext4": Filesystem(("mkfs.ext4", "-F", "-q", "-E", "nodiscard"), "loop", 48),
    "ext4 noauto_da_alloc": Filesystem(("mkfs.ext4", "-F", "-q", "-E", "nodiscard"), "loop,noauto_da_alloc", 48),
    "ext4 data=writeback": Filesystem(
        ("mkfs.ext4", "-F", "-q", "-E", "nodiscard"), "loop,data=writeback,noauto_da_alloc", 48
    ),
    "xfs": Filesystem(("mkfs.xfs", "-f", "-q", "-K"), "loop", 320),
}
FLAGS = {"log flushed": LOG_FLUSHED, "log lost": LOG_LOST}


def why_not(name: str) -> str:
    """Why a filesystem can't be made and mounted here; empty if it can."""
    tool = FILESYSTEMS[name].make[0]
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root, to mount disks"
    if shutil.which(tool) is None or shutil.which("losetup") is None:
        return f"needs {tool} and losetup"
    kind = name.split()[0]
    if kind not in Path("/proc/filesystems").read_text().split():
        return f"the kernel has no {kind}"
    if subprocess.run(["losetup", "-f"], capture_output=True).returncode:
        return "needs a loop device"
    return ""


class Disk:
    """An image with a filesystem, mounted and not."""

    def __init__(self, folder: Path, kind: Filesystem) -> None:
        self._image, self.mountpoint, self._kind = folder / "image", folder / "disk", kind
        self.mountpoint.mkdir(exist_ok=True)
        with open(self._image, "wb") as f:
            f.truncate(kind.size << 20)
        subprocess.run([*kind.make, str(self._image)], check=True, capture_output=True)

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Path]:
        subprocess.run(["mount", "-o", self._kind.mount, self._image, self.mountpoint], check=True)
        try:
            yield self.mountpoint
        finally:
            subprocess.run(["umount", self.mountpoint], check=True)
            # Else the next mount finds the filesystem that is still going down.
            end = time.monotonic() + 30
            while subprocess.run(["losetup", "-j", self._image], capture_output=True).stdout:
                assert time.monotonic() < end, "the loop device stays"
                time.sleep(0.01)

    def remove(self) -> None:
        self._image.unlink()


class Round(NamedTuple):
    """One power cut: of the save as a whole (call 0: right after it returned), or before one of its calls."""

    fresh: bool
    flag: int
    call: int


def play(scene: Scene, shim: Shim, disk: Disk, round: Round) -> dict[str, object]:
    """Save, cut the power, mount again; whether the save had returned, and what is there."""
    with disk.mounted():
        scene.reset(round.fresh)
        subprocess.run(["sync", "-f", disk.mountpoint], check=True)  # this disk alone
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                shim.arm(scene.work, round.call, CUT, False, round.flag)
                scene.write()
                os.write(write_end, b"!")
                shim.cut()
            finally:
                os._exit(1)
        os.close(write_end)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), "the power was not cut"
        assert os.WTERMSIG(status) == signal.SIGKILL
        with os.fdopen(read_end, "rb") as pipe:
            returned = bool(pipe.read())
    with disk.mounted():
        state = scene.state()
        # The next save finds its way through whatever is left there.
        scene.work.mkdir(exist_ok=True)
        scene.write()
        left = [*scene.litter(), *([] if scene.state() == NEW else ["a checkpoint that is not the new one"])]
    before = "nothing" if round.fresh else OLD
    right = (NEW,) if returned else (before, NEW)
    return {**round._asdict(), "returned": returned, "state": state, "right": state in right, "left": left}


def rounds_of(folder: Path, filesystem: Filesystem, writer: Writer, cuts: int, seed: int) -> list[dict[str, object]]:
    (folder / "disk" / "work").mkdir(parents=True)
    scene = Scene(writer, folder, 200_000, disk=folder / "disk")
    shim, chance, rounds = Shim(), random.Random(seed), []
    shim.arm(scene.work)
    scene.write()
    calls = shim.count()
    shim.disarm()
    shutil.rmtree(scene.work)
    for flag in FLAGS.values():
        for fresh in (True, False):
            for call in [0] + [chance.randint(1, calls) for _ in range(cuts)]:
                disk = Disk(folder, filesystem)
                rounds.append(play(scene, shim, disk, Round(fresh, flag, call)))
                disk.remove()
    return rounds


def main() -> None:
    folder, filesystem, cuts, seed = Path(sys.argv[1]), FILESYSTEMS[sys.argv[2]], int(sys.argv[3]), int(sys.argv[4])
    writers = WRITERS | UNSYNCED
    found = {
        name: rounds_of(folder / str(i), filesystem, writers[name], cuts, seed) for i, name in enumerate(sys.argv[5:])
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
