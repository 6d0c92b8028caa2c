"""Results in order, made by several threads that are a few of them ahead of who takes them."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

__all__ = ["in_order"]

Job = TypeVar("Job")
Result = TypeVar("Result")


def in_order(work: Callable[[Job], Result], jobs: Sequence[Job], threads: int) -> Iterator[Result]:
    """Yield what `work` makes of each job, in their order, by several threads that are a few jobs ahead.

    None of them works on when it ends, is closed or raises, Ctrl-C included; a second Ctrl-C does not wait for that.

    Notes
    -----
    No pool of `concurrent.futures`: those take no work once the main thread has ended, so a save of a handler of
    `atexit` would fail. Where no thread can be started any more, as there from Python 3.12 on, this one does the work.
    """
    if len(jobs) < 2 or threads < 2:
        yield from map(work, jobs)
        return
    ahead = _Ahead(work, jobs, threads)
    try:
        ahead.start()
        for i in range(len(jobs)):
            yield ahead.result(i)
    finally:
        ahead.stop()


class _Ahead(Generic[Job, Result]):
    """Jobs that threads take one by one, at most so many of them before the result that is asked for next."""

    def __init__(self, work: Callable[[Job], Result], jobs: Sequence[Job], threads: int) -> None:
        self._work = work
        self._jobs = jobs
        self._most = 2 * threads
        self._taken = self._given = self._working = 0
        self._made: dict[int, Result | _Failed] = {}
        self._stopped = False
        self._changed = threading.Condition()
        self._process = os.getpid()
        count = min(threads, len(jobs))
        self._threads = [threading.Thread(target=self._help, daemon=True) for _ in range(count)]

    def start(self) -> None:
        """Start the threads; as many as there are to be had."""
        with contextlib.suppress(RuntimeError):
            for thread in self._threads:
                thread.start()

    def stop(self) -> None:
        """Have the threads end, and wait for it: they use what the caller is about to close."""
        if self._is_alone():
            return
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            if threading.current_thread() in self._threads:  # the garbage collector ran there
                return
            self._changed.wait_for(lambda: not self._working)  # not `join`, which a Ctrl-C may leave (Python 3.11)
            self._made.clear()  # an error among them keeps this object until the garbage collector comes
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def result(self, i: int) -> Result:
        """Return the result of job i; made here and now if no thread has begun with it."""
        if self._is_alone():
            return self._work(self._jobs[i])
        with self._changed:
            mine = self._taken == i
            self._taken += mine
            self._changed.wait_for(lambda: mine or i in self._made)
            made = None if mine else self._made.pop(i)
            self._given = i + 1
            self._changed.notify_all()
        if mine:
            return self._work(self._jobs[i])
        if isinstance(made, _Failed):
            raise made.error
        return made  # type: ignore[return-value]

    def _is_alone(self) -> bool:
        """Whether the threads are no more, and left their lock as it was: at the interpreter's end, or in a fork."""
        return sys.is_finalizing() or os.getpid() != self._process

    def _help(self) -> None:
        while (i := self._take()) is not None:
            made: Result | _Failed
            try:
                made = self._work(self._jobs[i])
            except BaseException as error:  # whatever it is: it is raised where the result is asked for
                made = _Failed(error)
            with self._changed:
                self._made[i] = made
                self._working -= 1
                self._changed.notify_all()
            del made  # an error has this frame in its traceback

    def _take(self) -> int | None:
        """The number of the next job, once there is room for its result; None if there is none."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopped or self._taken == len(self._jobs) or self._taken - self._given < self._most
            )
            if self._stopped or self._taken == len(self._jobs):
                return None
            self._working += 1
            self._taken += 1
            return self._taken - 1


class _Failed:
    """An error in the place of a result."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
