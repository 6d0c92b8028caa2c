"""`StepReader`: what is there, what is whole, and how to have it back; takes no lock."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any, TypeVar

from tensorio import _api
from tensorio.checkpoint._finite import require_finite
from tensorio.checkpoint._several import place_of_several
from tensorio.errors import FormatError
from tensorio.manager._finding import Restored, ValidStep, newest
from tensorio.manager._local import LocalSteps
from tensorio.manager._note import StepInfo, check_files
from tensorio.manager._remote import RemoteSteps

__all__ = ["StepReader"]

Found = TypeVar("Found")
# What functions that load a file say of a folder, and of nothing.
_NO_FILE, _NOTHING = {errno.EISDIR, errno.ENODEV, None}, {errno.ENOENT, None}
_TRIES = 3  # at a step that is replaced while it is read


class StepReader:
    """The half of a `CheckpointManager` that only reads.

    Parameters
    ----------
    steps : LocalSteps or RemoteSteps
    """

    def __init__(self, steps: LocalSteps | RemoteSteps) -> None:
        self._steps = steps

    @property
    def folder(self) -> str:
        """Where the steps are: an absolute path, or the address."""
        return self._steps.place

    def steps(self) -> list[int]:
        """Return the steps that are there, oldest first."""
        return self._steps.numbers()

    def latest(self) -> int | None:
        """Return the highest step, unchecked; None if there is none."""
        return max(self.steps(), default=None)

    def path(self, step: int) -> str:
        """Return the folder (or address) of a step, whether or not it is there.

        Parameters
        ----------
        step : int
        """
        return self._steps.path(step)

    def info(self, step: int) -> StepInfo:
        """Return what was noted of a step: time, metrics, files.

        Parameters
        ----------
        step : int

        Raises
        ------
        FormatError
            The note is damaged.
        FileNotFoundError
            There is no such step.
        """
        return self._steps.info(step)

    def pinned(self, step: int) -> bool:
        """Tell whether a step is pinned.

        Parameters
        ----------
        step : int
        """
        return self._steps.pinned(step)

    def check(self, step: int, *, deep: bool = True) -> None:
        """Raise unless all files of a step are there and of their sizes; with `deep`, of their checksums.

        Parameters
        ----------
        step : int
        deep : bool
            Recompute all checksums.

        Raises
        ------
        FormatError
            A file is shorter or longer than it was, or has other bytes.
        OSError
            A file is missing, or can't be read.

        Notes
        -----
        `deep` reads all bytes, with all cores; at an address, it fetches them.
        """
        self._steps.check(step, deep=deep)

    def latest_valid(self, *, deep: bool = True) -> ValidStep | None:
        """Return the newest step that is whole, with the reasons why newer ones are not; None if there is no step.

        Parameters
        ----------
        deep : bool
            See `check`.

        Raises
        ------
        FormatError
            There are steps, and none is whole.

        Warns
        -----
        UserWarning
            For each step that is passed over.
        """

        def attempt(step: int) -> StepInfo:
            return self._as_noted(step, lambda info: self._steps.check(step, deep=deep))[0]

        search = newest(self._steps, attempt)
        if search is None:
            return None
        return ValidStep(search.step, self.path(search.step), search.found, tuple(search.skipped))

    def restore(
        self,
        step: int | None = None,
        *,
        deep: bool = True,
        check_finite: bool = False,
        load: Callable[..., Any] | None = None,
        **options: Any,
    ) -> Restored | None:
        """Load a step: the newest that is whole, if none is named; None if there is no step.

        Parameters
        ----------
        step : int, optional
            Load this one, or fail.
        deep : bool
            Recompute all checksums first.
        check_finite : bool
            A step with NaN or infinity is not whole.
        load : callable, optional
            Called with a path and `options` instead of `tensorio.load`; for torch
            tensors, `tensorio.torch.load`. What was saved with ``max_shard_size=`` is a folder, or a file
            that has an index in its place.
        **options
            Of `tensorio.load`.

        Raises
        ------
        FormatError
            There are steps, and none is whole; or `step` is damaged.
        FileNotFoundError
            There is no `step`.
        IsADirectoryError
            `load` takes one file only, and the step was saved with ``max_shard_size=``.
        See `tensorio.load`.

        Warns
        -----
        UserWarning
            For each step that is passed over.
        """

        def attempt(step: int) -> tuple[StepInfo, Any]:
            return self._loaded(step, deep, check_finite, load or _api.load, options)

        if step is not None:
            self._require(step)
            info, value = attempt(step)
            return Restored(step, value, info)
        search = newest(self._steps, attempt)
        if search is None:
            return None
        info, value = search.found
        return Restored(search.step, value, info, tuple(search.skipped))

    def _loaded(
        self, step: int, deep: bool, check_finite: bool, load: Callable[..., Any], options: dict[str, Any]
    ) -> tuple[StepInfo, Any]:
        def act(info: StepInfo) -> Any:
            with self._steps.fetched(step) as folder:
                check_files(folder, info, deep=deep)
                places = {name: os.path.join(folder, place) for name, place in info.items.items()}
                return {name: _loaded_item(place, load, options) for name, place in places.items()}

        info, value = self._as_noted(step, act)
        if check_finite:
            require_finite(value, f"step {step} is not restored")
        return info, value if info.several else next(iter(value.values()))

    def _as_noted(self, step: int, act: Callable[[StepInfo], Found]) -> tuple[StepInfo, Found]:
        """What a step's note says, and what comes of its files; both again, if it was replaced meanwhile."""
        for _ in range(_TRIES):
            info = self._steps.info(step)
            try:
                found = act(info)
            except (FormatError, OSError):
                if self._is_as_noted(step, info):
                    raise
                continue
            if self._is_as_noted(step, info):
                break
        else:
            info = self._steps.info(step)
            found = act(info)
        return info, found

    def _is_as_noted(self, step: int, info: StepInfo) -> bool:
        """Whether a step was not replaced since; one that is gone was not."""
        try:
            now = self._steps.info(step)
        except (FormatError, OSError):
            return True
        return (now.time, now.files) == (info.time, info.files)  # metrics may be NaN, which equals nothing

    def _require(self, step: int) -> None:
        if step not in self.steps():
            raise FileNotFoundError(errno.ENOENT, "there is no such step", self.path(step))


def _loaded_item(path: str, load: Callable[..., Any], options: dict[str, Any]) -> Any:
    try:
        return load(path, **options)
    except OSError as error:
        if error.errno not in (_NO_FILE if os.path.isdir(path) else _NOTHING) or place_of_several(path) is None:
            raise
        raise IsADirectoryError(
            errno.EISDIR,
            "expected load= to take a checkpoint in several files, since the step was saved with max_shard_size=; give "
            "one that does, like tensorio.torch.load, or none",
            path,
        ) from error
