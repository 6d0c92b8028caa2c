"""What a save left behind: the old checkpoint or the new one, whole, or something else; and what is beside it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

from writers import Version, Writer, digest, versions

OLD, NEW, NOTHING, UNREADABLE, OTHER = "old", "new", "nothing", "unreadable", "other"


class Scene:
    """A folder where a writer replaces the old checkpoint by the new one, and what both are when whole.

    Parameters
    ----------
    folder : Path
        A new one, for all that is needed.
    disk : Path, optional
        Where the checkpoint is to be, if that is another place.
    """

    def __init__(self, writer: Writer, folder: Path, nbytes: int = 600_000, disk: Path | None = None) -> None:
        inputs, self._kept = folder / "inputs", folder / "kept"
        inputs.mkdir(parents=True)
        self.writer = writer
        self.work = folder / "work" if disk is None else disk / "work"
        self.target = self.work / writer.target
        self.old, self.new = versions(inputs, nbytes)
        self._digests = {}
        for name, version in ((OLD, self.old), (NEW, self.new)):
            place = self._kept / name / writer.target
            place.parent.mkdir(parents=True)
            writer.write(version, place)
            found = writer.read(place)
            self._digests[digest(found)] = name
            if place.is_file():
                assert digest(found) == digest(version.arrays), "the writer does not write what it is given"
        assert len(self._digests) == 2

    def reset(self, fresh: bool = False) -> None:
        """Have the old checkpoint at the target and nothing else; nothing at all if `fresh`."""
        shutil.rmtree(self.work, ignore_errors=True)
        if fresh:
            self.work.mkdir()
        else:
            shutil.copytree(self._kept / OLD, self.work)

    def write(self, version: Version | None = None) -> None:
        """Save a checkpoint to the target: the new one, if not said otherwise."""
        self.writer.write(version or self.new, self.target)

    def state(self) -> str:
        """Which checkpoint is at the target, read by the reference tools, all bytes compared."""
        if not os.path.lexists(self.target / self.writer.shows):
            return NOTHING
        try:
            return self._digests.get(digest(self.writer.read(self.target)), OTHER)
        except Exception:
            return UNREADABLE

    def litter(self) -> list[str]:
        """What is beside the target, and temporaries in it."""
        known = {self.writer.target, self.writer.beside}
        beside = {name for name in os.listdir(self.work) if name not in known}
        return sorted(beside | {str(path.relative_to(self.work)) for path in self.work.rglob(".*.tensorio-*")})


class Outcome(NamedTuple):
    """How a save ended, as its process tells."""

    returned: bool
    errno: int | None = None
    filename: str | None = None
    said: str = ""


def attempt(scene: Scene) -> Outcome:
    """Save, and tell what came of it."""
    try:
        scene.write()
    except OSError as error:
        return Outcome(False, error.errno, error.filename, f"{type(error).__name__}: {error}")
    except BaseException as error:
        return Outcome(False, said=f"{type(error).__name__}: {error}")
    return Outcome(True)
