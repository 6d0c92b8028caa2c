"""Steps in a folder: each is a folder of its own, with the files and a note in it.

::

    run/                      .lock        who writes
      step-00001000/          checkpoint.pt   step.json   pinned (empty, if it is)
      step-00002000/          ...
      .step-....tmp           being written, or being removed

A step is there if its folder has its name. It gets it by one rename when all of
it is on disk, and loses it by one rename before its first file goes: so that a
listing has nothing that is half there.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator

from tensorio.manager._lock import WriterLock
from tensorio.manager._note import PINNED, StepInfo, check_files, read_note
from tensorio.plan import FlatPlan, Payloads
from tensorio.writing.folders import put_back_all, staged_folder
from tensorio.writing.output import naming, sync_folder, write_plan
from tensorio.writing.temporaries import clean_stale, temporary_name

__all__ = ["STEPS_MAX", "LocalSteps", "name_of_step", "step_of_name"]

STEPS_MAX = 10**18
_DIGITS = 8  # of a step's name: enough that names sort as numbers do


def name_of_step(step: int) -> str:
    """Return ``step-00001000``."""
    return f"step-{step:0{_DIGITS}d}"


def step_of_name(name: str) -> int | None:
    """Return the number of a step's name; None if it is something else, or spelled otherwise than we do."""
    found = re.fullmatch(r"step-([0-9]{8,18})", name)
    step = None if found is None else int(found[1])
    return step if step is not None and name == name_of_step(step) else None


class LocalSteps:
    """The steps in a folder."""

    sha256 = False  # a CRC-32 is enough against what disks do, at the speed of memory

    def __init__(self, folder: str, *, lock: bool, durable: bool) -> None:
        self.place = os.path.abspath(folder)  # wherever the current folder will be
        self._durable = durable
        self._lock = WriterLock(self.place) if lock else None
        self._cleaned = False

    def path(self, step: int) -> str:
        """Return the folder of a step."""
        return os.path.join(self.place, name_of_step(step))

    def prepare_writing(self) -> None:
        """Make the folder, take the lock, and remove what killed writers left."""
        os.makedirs(self.place, exist_ok=True)
        if self._lock is not None:
            self._lock.acquire()
        if not self._cleaned:
            put_back_all(self.place, lambda name: step_of_name(name) is not None)
            clean_stale(self.place)
            self._cleaned = True

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock is not None:
            self._lock.release()

    # --------------------------------------------------------------- reading

    def numbers(self) -> list[int]:
        """Return the steps that are there, in order; a file of such a name is none."""
        try:
            with os.scandir(self.place) as entries:
                names = [entry.name for entry in entries if step_of_name(entry.name) is not None and entry.is_dir()]
        except FileNotFoundError:
            return []
        return sorted(step for name in names if (step := step_of_name(name)) is not None)

    def info(self, step: int) -> StepInfo:
        """Return what a step's note says."""
        return read_note(self.path(step))

    def pinned(self, step: int) -> bool:
        """Tell whether a step stays, whatever the rules say."""
        return os.path.exists(os.path.join(self.path(step), PINNED))

    def check(self, step: int, *, deep: bool) -> None:
        """Raise unless a step is whole; see `check_files`."""
        check_files(self.path(step), self.info(step), deep=deep)

    @contextlib.contextmanager
    def fetched(self, step: int) -> Iterator[str]:
        """Yield the folder of a step, to open its files."""
        yield self.path(step)

    # --------------------------------------------------------------- writing

    @contextlib.contextmanager
    def staged(self, step: int, *, overwrite: bool) -> Iterator[str]:
        """Yield an empty folder that becomes the step at the end."""
        replaceable = (lambda _: True) if overwrite else None
        with staged_folder(self.path(step), replaceable=replaceable, durable=self._durable) as staging:
            yield staging

    def pin(self, step: int, pinned: bool) -> None:
        """Let a step stay, or not any longer."""
        folder = self.path(step)
        mark = os.path.join(folder, PINNED)
        if pinned:
            write_plan(FlatPlan(b"", Payloads()), mark, durable=self._durable)
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(mark)
            if self._durable:
                sync_folder(folder)

    def remove(self, step: int) -> None:
        """Take a step away: its name first, so that nobody finds half of it."""
        aside = temporary_name(self.place, name_of_step(step))
        with naming(self.path(step)):
            os.rename(self.path(step), aside)
        shutil.rmtree(aside, ignore_errors=True)  # what is left of it, the next writer cleans

    def put_aside(self, step: int) -> str:
        """Give a step's folder a name that is no step's; return its path."""
        n, aside = 1, os.path.join(self.place, f"aside-{name_of_step(step)}")
        while os.path.lexists(aside if n == 1 else f"{aside}-{n}"):
            n += 1
        aside = aside if n == 1 else f"{aside}-{n}"
        with naming(self.path(step)):
            os.rename(self.path(step), aside)
        return aside

    def settle(self) -> None:
        """Sync the folder's names to disk."""
        if self._durable:
            sync_folder(self.place)
