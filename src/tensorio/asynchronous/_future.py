"""The future of a save, and the failures that nobody has looked at yet."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorio.checkpoint._saving import Saved

__all__ = ["SaveFuture", "Turn", "forget", "noted", "print_unseen"]

_lock = threading.RLock()  # a handler of a signal may come to it again
_unseen: dict[SaveFuture, None] = {}  # in order; holds them until somebody looks


class Turn:
    """Whose turn it is to write: what callbacks do on that thread can't wait for it.

    Attributes
    ----------
    by : int
        The thread that writes; 0: none does.
    """

    by = 0

    def refuse_here(self, what: str) -> None:
        """Raise RuntimeError on the thread that writes."""
        if self.by == threading.get_ident():
            raise RuntimeError(
                f"{what} in a callback or progress= of a save, which the thread that writes has called: it would wait "
                "for itself; do it in another thread"
            )


class SaveFuture(Future["Saved"]):
    """A `concurrent.futures.Future` that knows whether its failure was looked at.

    Attributes
    ----------
    path : str
        What is saved to, for messages.
    """

    def __init__(self, path: str, turn: Turn) -> None:
        super().__init__()
        self.path = path
        self._turn, self._process = turn, os.getpid()

    def result(self, timeout: float | None = None) -> Saved:
        """Return what was written, or raise what went wrong."""
        self._refuse_for_ever(timeout)
        try:
            return super().result(timeout)
        finally:
            self._see()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what went wrong, or None."""
        self._refuse_for_ever(timeout)
        try:
            return super().exception(timeout)
        finally:
            self._see()

    def _refuse_for_ever(self, timeout: float | None) -> None:
        """Raise if nothing will ever come of it in this thread, or this process."""
        if timeout is not None or self.done():
            return
        if os.getpid() != self._process:
            raise RuntimeError(f"the save of {self.path} is written by the process that this one was forked from")
        self._turn.refuse_here(f"the result of the save of {self.path} was asked for before it was written,")

    def fail(self, error: BaseException) -> None:
        """Set what went wrong, and remember it until it was looked at."""
        with _lock:
            _unseen[self] = None
        self.set_exception(error)

    def _see(self) -> None:
        if self.done():
            with _lock:
                _unseen.pop(self, None)

    @property
    def unseen(self) -> bool:
        """Whether it failed and nobody looked."""
        return self in _unseen


def noted(error: BaseException, path: str) -> BaseException:
    """Return an error that says of which save it is."""
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"raised by an earlier save, of {path}, that was written in the background")
    return error


def print_unseen() -> None:
    """Say at the end of the program what nobody looked at."""
    with _lock:
        failed = list(_unseen)
        _unseen.clear()
    for future in failed:
        error = future.exception()
        print(f"tensorio: the save of {future.path} failed, and nobody looked at its future:", file=sys.stderr)
        if error is not None:
            traceback.print_exception(type(error), error, error.__traceback__, file=sys.stderr)


def forget() -> None:
    """In a forked child: the failures are the parent's."""
    global _lock
    _lock = threading.RLock()
    _unseen.clear()
