"""The way back: the newest step that is whole, and why newer ones are not."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tensorio.errors import FormatError, NonFiniteError, escaped
from tensorio.manager._local import LocalSteps
from tensorio.manager._note import StepInfo
from tensorio.manager._remote import RemoteSteps

__all__ = ["Restored", "Skipped", "ValidStep", "newest"]

Found = TypeVar("Found")
_SHOWN = 3  # reasons in an error
# What says nothing of a step: this process, this system or a server has no more of something, or does not let it read;
# what is to load it takes no folders.
_ELSEWHERE = {
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.ESTALE, errno.ETIMEDOUT, errno.EISDIR,
}  # fmt: skip


@dataclass(frozen=True)
class Skipped:
    """A step that was passed over.

    Attributes
    ----------
    step : int
    why : Exception
    """

    step: int
    why: Exception

    def __str__(self) -> str:
        return f"step {self.step}: {self.why}"


@dataclass(frozen=True)
class ValidStep:
    """A step that was found whole.

    Attributes
    ----------
    step : int
    path : str
        Of its folder.
    info : StepInfo
    skipped : tuple of Skipped
        Newer steps that are not whole, the newest first.
    """

    step: int
    path: str
    info: StepInfo
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True)
class Restored:
    """What `CheckpointManager.restore` brought back.

    Attributes
    ----------
    step : int
    value : object
        What was saved; of a step saved with ``items=``, a dict of them.
    metrics : mapping
    info : StepInfo
    skipped : tuple of Skipped
        Newer steps that are not whole, the newest first.
    """

    step: int
    value: Any
    info: StepInfo
    skipped: tuple[Skipped, ...] = ()

    @property
    def metrics(self) -> Mapping[str, Any]:
        """As given to `CheckpointManager.save`."""
        return self.info.metrics


@dataclass
class Search(Generic[Found]):
    """What `newest` came to."""

    step: int
    found: Found
    skipped: list[Skipped] = field(default_factory=list)


def newest(store: LocalSteps | RemoteSteps, attempt: Callable[[int], Found]) -> Search[Found] | None:
    """Return what `attempt` makes of the newest step that it does not fail on; None if there is no step.

    Warns
    -----
    UserWarning
        For each step that is passed over: which, and why.

    Raises
    ------
    FormatError
        There are steps, and none is whole.
    OSError
        From the system, where it says nothing of the step: no more descriptors or
        memory, no permission, a server that does not answer. A step that may be
        whole is not passed over.
    """
    skipped: list[Skipped] = []
    gone: set[int] = set()  # removed since they were listed
    while steps := [step for step in store.numbers() if step not in gone and not any(s.step == step for s in skipped)]:
        step = steps[-1]
        try:
            return Search(step, attempt(step), skipped)
        except (FormatError, NonFiniteError, OSError) as error:
            if isinstance(error, OSError) and step not in store.numbers():
                gone.add(step)  # by its writer, who may have saved another one meanwhile
                continue
            if isinstance(error, OSError) and error.errno in _ELSEWHERE:
                raise
            skipped.append(Skipped(step, error))
            warnings.warn(f"checkpoint passed over: step {step}: {error}", UserWarning, stacklevel=3)
    if not skipped:
        return None
    reasons = "; ".join(f"step {s.step}: {escaped(s.why, 100)[1:-1]}" for s in skipped[:_SHOWN])
    raise FormatError(f"none of {len(skipped)} checkpoints is whole: {reasons}", path=store.place)
