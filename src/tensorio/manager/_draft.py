"""A step that is being written: its folder has no name yet."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from tensorio.manager._local import LocalSteps
from tensorio.manager._note import PINNED, StepInfo, described, write_note
from tensorio.manager._remote import RemoteSteps
from tensorio.plan import FlatPlan, Payloads
from tensorio.writing.output import write_plan

__all__ = ["Draft"]


class Draft:
    """The folder of a step to be, which either becomes it or is dropped.

    Attributes
    ----------
    folder : str
        Where its files are written.
    """

    def __init__(
        self,
        steps: LocalSteps | RemoteSteps,
        info: StepInfo,
        *,
        overwrite: bool,
        pin: bool,
        durable: bool,
        then: Callable[[StepInfo], None],
    ) -> None:
        self._steps, self._info = steps, info
        self._pin, self._overwrite, self._durable, self._then = pin, overwrite, durable, then
        self._stack = ExitStack()
        self.folder = self._stack.enter_context(steps.staged(info.step, overwrite=overwrite))

    def publish(self) -> StepInfo:
        """Add the note and give the folder its name; return what the note says."""
        try:
            info = replace(self._info, files=described(self.folder, sha256=self._steps.sha256))
            write_note(self.folder, info, durable=self._durable)
            if self._pin or (self._overwrite and self._steps.pinned(info.step)):
                write_plan(FlatPlan(b"", Payloads()), os.path.join(self.folder, PINNED), durable=self._durable)
        except BaseException as error:
            self.drop(error)
            raise
        self._stack.close()
        self._then(info)
        return info

    def drop(self, error: BaseException) -> None:
        """Remove the folder, because of an error that is raised elsewhere."""
        try:
            self._stack.__exit__(type(error), error, error.__traceback__)
        except BaseException as raised:
            if raised is not error:
                raise
