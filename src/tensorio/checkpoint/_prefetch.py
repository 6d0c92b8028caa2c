"""`Prefetch`: tensors brought into memory ahead of their use, in its order, within a window."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from tensorio.errors import error_context
from tensorio.system import memory
from tensorio.system.paging import STEP

if TYPE_CHECKING:
    from tensorio.checkpoint._checkpoint import Checkpoint
    from tensorio.storage.base import Storage

    Progress = Callable[[int, int], object]

__all__ = ["Prefetch", "window_of"]

# The part of the memory that is left, of the system or the container, that may be filled ahead of use: more than that
# drives out what was read a moment ago (a window of a quarter made 25 minutes 2.6, lightseekorg/tokenspeed#833).
SHARE = 4
LEAST = 2 * STEP  # bytes; below it, the disk would wait for the consumer after every step


def window_of(asked: int | None) -> int:
    """Return how many bytes may be ahead: those asked for, within a quarter of what memory is left."""
    most = max(memory.available() // SHARE, LEAST)
    return most if asked is None else min(max(asked, LEAST), most)


class Run(NamedTuple):
    """Bytes of one storage that are next to each other and wanted one after the other."""

    storage: Storage
    offset: int
    nbytes: int


class Prefetch:
    """Tensors on their way into memory; what `Checkpoint.prefetch` returns.

    A context manager: leaving it cancels what is not done.

    Attributes
    ----------
    total, position : int
        Bytes to be brought in, and those that were.
    window : int
        Bytes that may be ahead of the consumer.
    done, ended : bool
        Whether all was brought in; whether nothing more will be.

    Notes
    -----
    One background thread works, with Python's lock released. It stops when `window` bytes are ahead, and goes on as
    the consumer does: a tensor asked for by ``checkpoint[fqn]``, `Checkpoint.read` or named to `advance` says that
    all before it, in the order of the prefetch, were used. A child process made by fork has the tensors, and nothing
    brought in ahead.
    """

    def __init__(self, checkpoint: Checkpoint, fqns: Iterable[str], window: int | None, progress: Progress | None):
        self._runs: list[Run] = []
        self._starts: dict[str, int] = {}
        self.total = 0
        self._plan(checkpoint, fqns)
        self.window = window_of(window)
        self._name = checkpoint._name
        self._progress = progress
        self._position = 0  # bytes brought in
        self._used = 0  # bytes of what the consumer is past
        self._state = threading.Condition()
        self._cancelled = self._stalled = self._ended = False
        self._error: BaseException | None = None
        self._owner = weakref.ref(checkpoint, lambda _: self.cancel())  # nobody is left to advance or to close
        self._thread = threading.Thread(target=self._work, name="tensorio-prefetch", daemon=True)
        self._thread.start()

    def _plan(self, checkpoint: Checkpoint, fqns: Iterable[str]) -> None:
        seen: set[tuple[int, int, int]] = set()
        for fqn in fqns:
            self._starts.setdefault(fqn, self.total)
            for chunk in checkpoint.infos[fqn].chunks:
                extent = chunk.extent
                if not extent.nbytes or extent in seen:
                    continue  # tied to one before it
                seen.add(extent)
                self._add(Run(checkpoint._storage(extent.storage), extent.offset, extent.nbytes))

    def _add(self, run: Run) -> None:
        last = self._runs[-1] if self._runs else None
        if last is not None and last.storage is run.storage and last.offset + last.nbytes == run.offset:
            self._runs[-1] = last._replace(nbytes=last.nbytes + run.nbytes)
        else:
            self._runs.append(run)
        self.total += run.nbytes

    # ---------------------------------------------------------------- consumer

    @property
    def done(self) -> bool:
        """Whether all of it was brought in."""
        return self._position >= self.total

    @property
    def ended(self) -> bool:
        """Whether nothing more will be brought in: all is, or it was cancelled or failed."""
        return self._ended

    @property
    def position(self) -> int:
        """Bytes brought in so far."""
        return self._position

    def advance(self, fqn: str) -> None:
        """Say that `fqn` is about to be used, and all that is before it in the order was; unknown names say nothing.

        Parameters
        ----------
        fqn : str
        """
        start = self._starts.get(fqn, 0)
        if start > self._used and self._alive:
            with self._state:
                self._used = max(self._used, start)
                self._stalled = False
                self._state.notify_all()

    @property
    def _alive(self) -> bool:
        """Whether the thread is there: in a child process it is not, and may have left the lock taken."""
        return self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all is in memory, or the window is full and only the consumer can go on.

        Parameters
        ----------
        timeout : float, optional
            Seconds.

        Returns
        -------
        bool
            Whether all of it is in memory.

        Raises
        ------
        FormatError
            The file shrank meanwhile.
        OSError
            The disk failed.
        """
        if self._alive:
            with self._state:
                self._state.wait_for(lambda: self._stalled or self._ended or not self._alive, timeout)
        if self._error is not None:
            raise self._error
        return self.done

    def cancel(self) -> None:
        """Stop after the step that is under way (32 MiB); returns at once."""
        self._cancelled = True
        if self._state.acquire(blocking=False):  # may be called from anywhere, the collector of garbage included
            self._state.notify_all()
            self._state.release()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cancel()

    def __repr__(self) -> str:
        state = "done" if self.done else "cancelled" if self._cancelled else "under way"
        return f"<Prefetch of {self._name!r}, {state}: {self._position} of {self.total} bytes>"

    # ------------------------------------------------------------------ thread

    def _work(self) -> None:
        try:
            with error_context(path=self._name):
                for nbytes in self._steps():
                    with self._state:
                        self._position += nbytes
                    if self._progress is not None:
                        self._progress(self._position, self.total)
        except BaseException as error:
            if not self._cancelled:  # a storage that was closed under it is no error of the reader's
                self._error = error
        finally:
            with self._state:
                self._ended = True
                self._state.notify_all()

    def _steps(self) -> Iterator[int]:
        for storage, offset, nbytes in self._runs:
            for at in range(offset, offset + nbytes, STEP):
                step = min(STEP, offset + nbytes - at)
                if not self._may_go(step):
                    return
                yield from storage.bring(at, step)

    def _may_go(self, step: int) -> bool:
        """Wait for room in the window; False if it was cancelled meanwhile."""
        with self._state:
            while not self._cancelled and self._position + step > self._used + self.window:
                self._stalled = True
                self._state.notify_all()
                self._state.wait(1.0)  # now and then by itself: `cancel` does not wait for the lock
            self._stalled = False
            return not self._cancelled
