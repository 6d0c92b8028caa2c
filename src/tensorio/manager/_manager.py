"""`CheckpointManager`: saves by step, keeps what its rules say, finds the way back."""

from __future__ import annotations

import contextlib
import errno
import operator
import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Literal, overload

from tensorio import _api_save, formats
from tensorio.errors import FormatError, UnsupportedError, escaped
from tensorio.manager._background import Background
from tensorio.manager._draft import Draft
from tensorio.manager._local import STEPS_MAX, LocalSteps
from tensorio.manager._note import DEFAULT_ITEM, NOTE, PINNED, StepInfo, is_text, plain_metrics
from tensorio.manager._reader import StepReader
from tensorio.manager._remote import RemoteSteps
from tensorio.manager._retention import Best, Kept, Policy, superfluous

__all__ = ["CheckpointManager"]

_managers: weakref.WeakSet[CheckpointManager] = weakref.WeakSet()


class CheckpointManager(StepReader):
    """Checkpoints of a training run, numbered by step, in a folder or at an address.

    Parameters
    ----------
    folder : str or os.PathLike
        Made with the first save. With ``://`` in it, an address for fsspec (extra
        ``remote``).
    keep : int or None
        How many of the last steps stay; None: all.
    every : int, optional
        Steps that this number divides stay for ever.
    best : Best or tuple, optional
        ``("loss", "min", 2)``: so many steps with the best value of a metric stay,
        besides the others.
    format : str
        The suffix of the files, and so their format: ``"pt"`` holds whatever
        `tensorio.save` does; ``"safetensors"`` holds tensors only. Shards are of this
        format, too.
    finite : bool
        Refuse to save NaN and infinity.
    lock : bool
        Whether saving, pinning, removing and rolling back take the folder's lock,
        which is held until `close` or the end of the process. Reading takes none.
        False for filesystems without locks. There are none at addresses.
    durable : bool
        Sync to disk before a step counts, and before older ones go.
    **options
        Of `tensorio.save`, for every save: ``max_shard_size=``, ``compact=``, ...

    Raises
    ------
    ValueError
        A rule that keeps nothing, or a `format` that can't be written.
    UnsupportedError
        With ``key=``: steps are not encrypted.

    Notes
    -----
    A step is a folder ``step-00001000`` with the files and ``step.json``, which has
    the metrics, and sizes and checksums of the files. It gets its name by one
    rename when all of it is on disk: what is listed is whole, and the latest step
    is the one with the highest number; no other file says so. Readers need no
    lock: arrays mapped from a step stay valid when it is removed.

    A manager may be used from several threads. It is a context manager; `close`
    waits for saves in the background.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        every: int | None = None,
        best: Best | tuple[Any, ...] | None = None,
        format: str = "pt",
        finite: bool = False,
        lock: bool = True,
        durable: bool = True,
        **options: Any,
    ) -> None:
        _refuse_key(options)
        place = os.fspath(folder)
        self._policy = Policy(keep, every, Best(*best) if isinstance(best, tuple) else best)
        remote = "://" in place
        super().__init__(RemoteSteps(place) if remote else LocalSteps(place, lock=lock, durable=durable))
        self._suffix = format.lstrip(".")
        self._format = _format_of(self._suffix)
        self._durable = durable
        self._options = {"durable": durable, "check_finite": finite, **options}
        self._infos: dict[int, StepInfo] = {}  # of steps that were looked at for their metrics
        self._closed = False
        self._begin()
        _managers.add(self)

    def _begin(self) -> None:
        """Begin with nothing pending; also in a forked child, which lacks the thread that may hold the lock."""
        self._turn = threading.RLock()  # of whoever writes
        self._background = Background()

    # ---------------------------------------------------------------- saving

    @overload
    def save(self, step: int, obj: Any = ..., *, items: Mapping[str, Any] | None = ...,
             metrics: Mapping[str, Any] | None = ..., block: Literal[True] = ..., overwrite: bool = ...,
             pin: bool = ..., **options: Any) -> StepInfo: ...  # fmt: skip

    @overload
    def save(self, step: int, obj: Any = ..., *, items: Mapping[str, Any] | None = ...,
             metrics: Mapping[str, Any] | None = ..., block: Literal[False], overwrite: bool = ...,
             pin: bool = ..., **options: Any) -> Future[StepInfo]: ...  # fmt: skip

    def save(
        self,
        step: int,
        obj: Any = None,
        *,
        items: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        block: bool = True,
        overwrite: bool = False,
        pin: bool = False,
        **options: Any,
    ) -> StepInfo | Future[StepInfo]:
        """Save a step, then remove those that no rule keeps.

        Parameters
        ----------
        step : int
            Not negative.
        obj : object
            See `tensorio.save`.
        items : mapping of str to object, instead of `obj`
            Several files: names without a suffix get the manager's, others are
            file names: ``{"model.safetensors": ..., "training": ...}``.
        metrics : mapping of str to number or str, optional
            Kept with the step; `best` goes by them.
        block : bool
            False: return when the object may be changed again, and write in the
            background (see `tensorio.AsyncSaver`). What fails there is raised by
            the future, and by the next call of `save`, `wait` or `close`.
        overwrite : bool
            Replace a step that is there; a pinned one stays pinned.
        pin : bool
            Pin the step.
        **options
            Of `tensorio.save`, for this save.

        Returns
        -------
        StepInfo, or a Future of it

        Raises
        ------
        FileExistsError
            The step is there.
        LockedError
            Another process saves to this folder.
        NonFiniteError
            With ``finite=True``; nothing was written.
        OSError
            From the system; the step is not there, and older ones are as they were.
        UnsupportedError
            With ``base=``: a delta is beside its base, and each step has a folder of its own.
        See `tensorio.save`.
        """
        options = {**self._options, **options}
        _refuse_key(options)
        if options.get("base") is not None:
            raise UnsupportedError(
                "base= is for files of one folder, and each step has its own; leave it out, or use tensorio.save"
            )
        files, places = self._files(obj, items, options)
        info = StepInfo(
            _checked(step), time.time(), metrics=plain_metrics(metrics), items=places, several=items is not None
        )
        if block:
            self._background.wait()
        else:
            self._background.raise_unseen()
        draft = self._draft(info, overwrite, pin)
        if not block:
            return self._background.save(draft, files, self.path(step))
        try:
            for place, (value, chosen) in files.items():
                _api_save.save(value, os.path.join(draft.folder, place), **chosen)
        except BaseException as error:
            draft.drop(error)
            raise
        return draft.publish()

    def _files(
        self, obj: Any, items: Mapping[str, Any] | None, options: dict[str, Any]
    ) -> tuple[dict[str, tuple[Any, dict[str, Any]]], dict[str, str]]:
        """What is saved and how, by the name of the file (or folder); and these names, by that of the item."""
        if items is None:
            items = {DEFAULT_ITEM: obj}
        elif obj is not None or not items:
            raise TypeError("expected an object, or items=, which are several; found both or neither")
        sharded = options.get("max_shard_size") is not None
        for name in items:
            odd = name.startswith(".") or {"/", "\\", "\0"} & set(name) or not is_text(name)
            if not name or odd or name in (PINNED, NOTE):
                raise ValueError(f"items=: expected the name of a file, found {escaped(name)}")
        places = {name: name if sharded or "." in name else f"{name}.{self._suffix}" for name in items}
        if len(set(places.values())) != len(places):
            raise ValueError("items=: two of them have the same file name")
        shards = {"format": self._format, **options} if sharded else options  # a folder's name does not tell it
        return {place: (items[name], options if "." in name else shards) for name, place in places.items()}, places

    def _draft(self, info: StepInfo, overwrite: bool, pin: bool) -> Draft:
        with self._writing():
            if not overwrite and info.step in self.steps():
                raise FileExistsError(
                    errno.EEXIST, "the step is there already; say overwrite=True, or roll back", self.path(info.step)
                )
            return Draft(
                self._steps, info, overwrite=overwrite, pin=pin, durable=self._durable, then=self._remove_superfluous
            )

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """One thread at a time; the only process that writes."""
        with self._turn:
            if self._closed:
                raise ValueError("the manager is closed")
            self._steps.prepare_writing()
            yield

    # --------------------------------------------------------------- staying

    def _remove_superfluous(self, saved: StepInfo) -> None:
        """Apply the rules, after a step was published. What can't be removed is no failure of that save."""
        with self._turn:
            self._infos[saved.step] = saved
            problems: list[str] = []
            try:
                there = [self._kept(step, problems) for step in self.steps()]
            except Exception as error:
                problems.append(str(error))
                there = []
            for step in superfluous(there, self._policy, saved.step):
                try:
                    self._remove(step)
                except Exception as error:  # at an address, whatever its client raises
                    problems.append(f"step {step}: {error}")
            if problems:
                warnings.warn(f"old checkpoints are not removed: {'; '.join(problems)}", UserWarning, stacklevel=4)

    def _kept(self, step: int, problems: list[str]) -> Kept:
        """What the rules go by; a step that can't be read now stays, and keeps no other one."""
        try:
            return Kept(step, self._metrics(step), self.pinned(step))
        except Exception as error:
            problems.append(f"step {step}: {error}")
            return Kept(step, pinned=True)

    def _metrics(self, step: int) -> Mapping[str, Any]:
        """Those of a step; none if its note is damaged."""
        if step not in self._infos:
            try:
                self._infos[step] = self.info(step)
            except (FormatError, FileNotFoundError):
                return {}
        return self._infos[step].metrics

    def _remove(self, step: int) -> None:
        self._infos.pop(step, None)
        self._steps.remove(step)

    def pin(self, step: int) -> None:
        """Keep a step until it is unpinned, whatever the rules say.

        Parameters
        ----------
        step : int

        Raises
        ------
        FileNotFoundError
            There is no such step.
        LockedError
            Another process saves to this folder.
        """
        with self._writing():
            self._require(step)
            self._steps.pin(step, True)

    def unpin(self, step: int) -> None:
        """Leave a step to the rules, which are applied with the next save.

        Parameters
        ----------
        step : int

        Raises
        ------
        See `pin`.
        """
        with self._writing():
            self._require(step)
            self._steps.pin(step, False)

    def remove(self, step: int) -> None:
        """Remove a step, pinned or not. Who has mapped its files keeps them.

        Parameters
        ----------
        step : int

        Raises
        ------
        See `pin`.
        """
        with self._writing():
            self._require(step)
            self._remove(step)
            self._steps.settle()

    def rollback(self, to_step: int, *, aside: bool = False) -> list[int]:
        """Take away all steps after one, so that training goes on from there.

        Parameters
        ----------
        to_step : int
            Checked first, all of its bytes: nothing is taken away if it is damaged.
        aside : bool
            Rename the newer ones to ``aside-step-...``, which are no steps, instead
            of removing them; not at addresses.

        Returns
        -------
        list of int
            The steps that were taken away, the newest first.

        Raises
        ------
        FormatError, OSError
            `to_step` is damaged, or not there; see `check`.
        ValueError
            A newer step is pinned.
        LockedError
            Another process saves to this folder.
        """
        self._background.wait()
        with self._writing():
            self._require(to_step)
            self._steps.check(to_step, deep=True)
            newer = [step for step in reversed(self.steps()) if step > to_step]
            pinned = [step for step in newer if self.pinned(step)]
            if pinned:
                raise ValueError(f"a newer step is pinned: {pinned[0]}; unpin it first")
            for step in newer:  # the newest first: what a crash leaves is a run that ends earlier
                self._infos.pop(step, None)
                (self._steps.put_aside if aside else self._steps.remove)(step)
            self._steps.settle()
            return newer

    # -------------------------------------------------------------- lifetime

    def wait(self) -> None:
        """Return when saves in the background are done; raise what failed, unless its future was asked."""
        self._background.wait()

    def close(self) -> None:
        """Wait for saves in the background, and let go of the lock; raise what failed, unless its future was asked."""
        self._close(tell=True)

    def _close(self, *, tell: bool) -> None:
        self._background.refuse_here("close()")
        self._closed = True
        try:
            self._background.close(tell=tell)
        finally:
            if not self._background.pending:
                self._steps.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._close(tell=kind is None)  # what went wrong in the block is what is raised

    def __repr__(self) -> str:
        return f"<CheckpointManager {self.folder!r}>"


def _format_of(suffix: str) -> str:
    """The name of the format that files of a suffix are written in."""
    try:
        chosen = formats.for_target(f"checkpoint.{suffix}").NAME
    except ValueError:
        chosen = ""
    if chosen not in formats.WRITTEN:
        known = ", ".join(s[1:] for name in formats.WRITTEN for s in formats.get(name).SUFFIXES)
        raise ValueError(
            f"expected format= to be the suffix of a format that can be written ({known}), found {suffix!r}"
        )
    return chosen


def _refuse_key(options: Mapping[str, Any]) -> None:
    if "key" in options:
        raise UnsupportedError(
            "key=: steps are not encrypted as they are saved; save to a filesystem that is encrypted, or encrypt what "
            "is to be kept elsewhere: tensorio.encrypt(manager.path(step), folder, key=key)"
        )


def _checked(step: int) -> int:
    number = operator.index(step)
    if not 0 <= number < STEPS_MAX:
        raise ValueError(f"expected a step from 0 to {STEPS_MAX - 1}, found {number}")
    return number


def _begin_in_child() -> None:
    for manager in list(_managers):
        manager._begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)
