"""`AsyncSaver`: takes snapshots, and has them written one after the other.

The thread that writes ends when there is nothing to write, and is no daemon: a program that ends waits for it by
itself, without a handler whose turn might come too late.
"""

from __future__ import annotations

import atexit
import errno
import os
import threading
import time
import warnings
import weakref
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorio.asynchronous._asked import absolute, name_of, request_of
from tensorio.asynchronous._process import Relay, Writer, require_memfd, shared
from tensorio.checkpoint._saving import SaveJob, SaveRequest, prepare

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from types import ModuleType

    from tensorio.asynchronous._buffers import Buffer
    from tensorio.asynchronous._future import SaveFuture
    from tensorio.checkpoint._saving import Saved

__all__ = ["AsyncSaver"]

_WHEN_BUSY = ("wait", "skip", "error")
_savers: weakref.WeakSet[AsyncSaver] = weakref.WeakSet()
_ending = False


class _Entry(NamedTuple):
    job: SaveJob
    buffer: Buffer | None
    future: SaveFuture
    progress: Callable[[int, int], object] | None
    to_path: bool  # file objects are written to by this process, whose they are


class AsyncSaver:
    """Saves in the background: a save returns when its snapshot is taken, and is written by another thread.

    Parameters
    ----------
    max_memory : int, optional
        Bytes that all snapshots together may take, with what is pickled beside the tensors and with the headers; half
        of what the system and the container have left if not given, and never more than there is.
    processes : bool
        Write by a process of its own, which shares the snapshots: a loop that holds Python's lock, or a process that
        is killed, does not hold up what was handed over. Needs Linux.
    when_busy : {"wait", "skip", "error"}
        What a save does while an earlier one is still being written: take its snapshot as soon as `max_memory` has
        room for it; return a future that is cancelled; raise BlockingIOError.

    Raises
    ------
    ValueError
        An unknown word, or a negative number of bytes.
    UnsupportedError
        ``processes=True`` on another system than Linux.

    Notes
    -----
    Saves are written in the order in which they were asked for, one at a time. Buffers are used again: the first
    snapshot pays for its pages (see `reserve`), the others are copies at the speed of memory.

    At the end of a ``with`` block or of the program, what is pending is written, and failures that nobody has looked
    at are raised or printed. A forked child has none of it: what is pending is its parent's.

    Callbacks of futures, and `progress`, are called by the thread that writes. There, a save whose snapshot
    has room is taken like any other; what would have to wait for that thread is a RuntimeError.
    """

    def __init__(self, max_memory: int | None = None, processes: bool = False, *, when_busy: str = "wait") -> None:
        if when_busy not in _WHEN_BUSY:
            raise ValueError(f"expected when_busy to be one of {', '.join(_WHEN_BUSY)}, found {when_busy!r}")
        if max_memory is not None and max_memory < 0:
            raise ValueError(f"expected max_memory in bytes, found {max_memory}")
        if processes:
            require_memfd()
        self._max_memory, self._processes, self._when_busy = max_memory, processes, when_busy
        self._closed = False
        self._reset()
        _savers.add(self)

    def _reset(self) -> None:
        """Begin with nothing; also in a forked child, whose locks may be held by threads that it does not have."""
        from tensorio.asynchronous._buffers import Buffers, private

        self._buffers = Buffers(self._max_memory)
        self._make = shared if self._processes else private
        self._writer = Writer() if self._processes else None
        self._lock = threading.RLock()  # entered by itself: an interrupt may come within `Condition.__enter__`
        self._changed = threading.Condition(self._lock)
        self._queue: deque[_Entry] = deque()
        self._writing = 0
        self._turn = _future().Turn()
        self._failed: list[SaveFuture] = []

    @property
    def pending(self) -> int:
        """How many saves are not written yet."""
        with self._lock:
            return len(self._queue) + self._writing

    def reserve(self, nbytes: int) -> None:
        """Have memory for a snapshot of so many bytes ready, pages and all, before the first save needs it.

        Parameters
        ----------
        nbytes : int
            Of all tensors of a save.

        Raises
        ------
        OSError
            ENOMEM: it is more than `max_memory`, or than there is.
        """
        buffer = self._buffers.lend(nbytes, self._make, waiting=self._refuse_waiting)
        if buffer is None:
            raise OSError(errno.ENOMEM, f"expected to reserve at most max_memory, found {nbytes} bytes asked for")
        try:
            buffer.populate()
        finally:
            self._buffers.give_back(buffer)

    def save(self, obj: Any, path: Any, **options: Any) -> Future[Saved]:
        """Take a snapshot of an object and return; it is written in the background.

        Parameters
        ----------
        obj, path
            See `tensorio.save`. When this returns, tensors, dicts and values may be changed.
        **options
            Those of `tensorio.save`. `progress` is called by the thread that writes.

        Returns
        -------
        concurrent.futures.Future of Saved
            Can be cancelled until the writing begins.

        Raises
        ------
        Exception
            What `tensorio.save` raises before it writes; or the failure of an earlier save that nobody looked at,
            with a note that names its path: then nothing was saved by this call.
        BlockingIOError
            An earlier save is not written yet: with ``when_busy="error"``.
        ValueError
            The saver is closed.

        Warns
        -----
        RuntimeWarning
            The snapshot is larger than `max_memory`: the save is written before this returns, from the tensors
            themselves.
        """
        path = absolute(path)
        future = self.future(path)
        self.save_as(future, obj, path, options)
        return future

    def future(self, path: Any) -> SaveFuture:
        """Return the future of a save that is not asked for yet.

        Parameters
        ----------
        path
            As of `save`.
        """
        future: SaveFuture = _future().SaveFuture(name_of(path), self._turn)
        return future

    def save_as(self, future: SaveFuture, obj: Any, path: Any, options: dict[str, Any]) -> None:
        """Save, as `save` does. If this raises, or is interrupted, the future may be cancelled: then nothing is saved.

        Parameters
        ----------
        future : SaveFuture
            From `future`.
        obj, options
            As of `save`.
        path
            As of `save`; absolute.
        """
        if self._closed:
            raise ValueError("the saver is closed")
        self._raise_unseen()
        request = request_of(options)
        progress = request.progress
        if self._writer is not None and progress is not None:
            request = replace(request, progress=Relay(progress))
        if self._when_busy != "wait" and self.pending:
            if self._when_busy == "error":
                raise BlockingIOError(errno.EAGAIN, "an earlier save is still being written", future.path)
            future.cancel()
            future.set_running_or_notify_cancel()
            return
        job, buffer = self._snapshot(obj, path, request)
        entry = _Entry(job, buffer, future, progress, isinstance(path, str | bytes))
        if entry.buffer is None:
            self._write_now(entry)
        else:
            self._enqueue(entry)

    def _snapshot(self, obj: Any, path: Any, request: SaveRequest) -> tuple[SaveJob, Buffer | None]:
        from tensorio.asynchronous._devices import Fetch, pinned
        from tensorio.asynchronous._snapshot import Snapshot

        fetch = Fetch()
        job = prepare(obj, path, request, fetch)
        snapshot = Snapshot(job.payloads, fetch)
        make = pinned if fetch.promises and not self._processes else self._make
        beside = job.nbytes - sum(sum(payloads.sizes) for payloads in job.payloads)
        buffer = self._buffers.lend(snapshot.nbytes, make, beside=beside, waiting=self._refuse_waiting)
        if buffer is None:
            return prepare(obj, path, request) if fetch.promises else job, None
        try:
            snapshot.take(buffer)
        except BaseException:
            self._buffers.give_back(buffer)
            raise
        return job, buffer

    def _refuse_waiting(self) -> None:
        self._turn.refuse_here("max_memory has no room for a save")

    def _write_now(self, entry: _Entry) -> None:
        self._refuse_waiting()
        warnings.warn(
            f"a snapshot for {entry.future.path} needs more than max_memory; it is saved without one",
            RuntimeWarning,
            stacklevel=4,
        )
        self._wait_for_writes(None)  # the order of the saves is kept
        self._write(entry)

    # ------------------------------------------------------------------ writing

    def _enqueue(self, entry: _Entry) -> None:
        entry.future.add_done_callback(self._drop_cancelled)
        with self._lock:
            self._queue.append(entry)
        self._have_written()

    def _have_written(self) -> None:
        """See that somebody writes what is asked for."""
        with self._lock:
            if not self._queue or self._turn.by:
                return
            thread = None if _ending else _started(self._run)
            self._turn.by = (thread or threading.current_thread()).ident or 0
        if thread is None:
            self._run()
            if _ending:
                _future().print_unseen()

    def _drop_cancelled(self, future: Future[Saved]) -> None:
        """Give back the buffer of a save as soon as it is cancelled."""
        if not future.cancelled():
            return
        with self._lock:
            found = next((e for e in self._queue if e.future is future), None)
            if found is None:
                return
            self._queue.remove(found)
            self._changed.notify_all()
        if found.buffer is not None:
            self._buffers.give_back(found.buffer)
        found.future.set_running_or_notify_cancel()

    def _run(self) -> None:
        this = threading.get_ident()
        with self._lock:
            if self._turn.by not in (0, this):  # who started this thread was interrupted, and another one was started
                return
            self._turn.by = this
        while True:
            with self._lock:
                if not self._queue:
                    self._turn.by = 0
                    self._changed.notify_all()
                    return
                entry = self._queue.popleft()
                self._writing += 1
            try:
                self._write(entry)
            except BaseException as error:  # of a callback, which does not keep the others from being written
                hook = threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread()))
                threading.excepthook(hook)
            finally:
                with self._lock:
                    self._writing -= 1
                    self._changed.notify_all()
            del entry

    def _write(self, entry: _Entry) -> None:
        future = entry.future
        saved: Saved | BaseException
        try:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._writer is None or entry.buffer is None or not entry.to_path:
                    saved = entry.job.write()
                else:
                    saved = self._writer.write(entry.job, entry.buffer, future.path, entry.progress)
            except BaseException as error:  # of `progress`, too, whatever it is: it is told to who looks
                saved = error
        finally:
            if entry.buffer is not None:
                self._buffers.give_back(entry.buffer)
        if not isinstance(saved, BaseException):
            future.set_result(saved)
            return
        with self._lock:
            self._failed = [f for f in self._failed if f.unseen]
            self._failed.append(future)
        future.fail(saved)

    # ------------------------------------------------------------------ waiting

    def wait(self, timeout: float | None = None) -> None:
        """Return when all saves are written.

        Parameters
        ----------
        timeout : float, optional
            In seconds.

        Raises
        ------
        TimeoutError
            They are not, in that time.
        RuntimeError
            In a callback of a save, or in `progress`: it would wait for itself.
        Exception
            The first failure that nobody has looked at, with a note that names its path.
        """
        if timeout is None:
            self._turn.refuse_here("wait()")
        if not self._wait_for_writes(timeout):
            raise TimeoutError(f"{self.pending} saves are not written after {timeout} seconds")
        self._raise_unseen()

    def _wait_for_writes(self, timeout: float | None) -> bool:
        self._have_written()  # an interrupt may have come before a thread was there
        end = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while self._queue or self._writing:
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def _raise_unseen(self) -> None:
        with self._lock:
            failed, self._failed = [f for f in self._failed if f.unseen], []
            self._failed += failed[1:]
        if failed:
            error = failed[0].exception()
            assert error is not None
            raise _future().noted(error, failed[0].path)

    def close(self) -> None:
        """Wait until all saves are written, and let go of the memory; what failed unseen is raised, as by `wait`."""
        self._turn.refuse_here("close()")
        self._closed = True
        self._wait_for_writes(None)  # interrupted, it leaves the memory to what is still written
        self._let_go()
        self._raise_unseen()

    def _let_go(self) -> None:
        self._buffers.drop()
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self.close()
            return
        self._turn.refuse_here("the end of a with block")
        self._closed = True  # what went wrong in the block is raised; failures of saves are printed at the end
        self._wait_for_writes(None)
        self._let_go()


def _started(work: Callable[[], object]) -> threading.Thread | None:
    """A thread; None if there are no more to be had, or the interpreter is ending."""
    thread = threading.Thread(target=work, name="tensorio-save", daemon=False)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def _future() -> ModuleType:
    """concurrent.futures takes longer to import than all of tensorio: only who saves in the background pays for it."""
    from tensorio.asynchronous import _future

    return _future


def _finish() -> None:
    """At the end of the program: threads were waited for, but not those that handlers like this one started."""
    global _ending
    _ending = True
    for saver in list(_savers):
        saver._wait_for_writes(None)
        saver._let_go()
    if _savers:
        _future().print_unseen()


def _begin_in_child() -> None:
    for saver in list(_savers):
        _future().forget()
        saver._reset()


atexit.register(_finish)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)
