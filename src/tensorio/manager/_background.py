"""Steps that are written while training goes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tensorio.manager._draft import Draft
from tensorio.manager._note import StepInfo

if TYPE_CHECKING:
    from tensorio._api_async import AsyncSaver
    from tensorio.asynchronous._future import SaveFuture

__all__ = ["Background"]


class Background:
    """Saves of drafts by an `AsyncSaver`, made when the first one is asked for."""

    def __init__(self) -> None:
        self._saver: AsyncSaver | None = None
        self._asked: dict[SaveFuture, None] = {}  # in order; whose failure would have to be told

    def save(self, draft: Draft, files: Mapping[str, tuple[Any, Mapping[str, Any]]], path: str) -> Future[StepInfo]:
        """Take snapshots of all values; return the future of the step, which is published when they are written.

        Parameters
        ----------
        files : mapping of str to (object, options)
            By file name.
        path : str
            Of the step, for messages.
        """
        from tensorio._api_async import AsyncSaver
        from tensorio.asynchronous._future import SaveFuture

        if self._saver is None:
            self._saver = AsyncSaver()
        future: Any = SaveFuture(path, self._saver._turn)
        future.set_running_or_notify_cancel()
        pending = _Pending(draft, future)
        try:
            for name, (value, options) in files.items():
                place = os.path.join(draft.folder, name)
                written = self._saver.future(place)
                pending.add()
                written.add_done_callback(pending.written)
                try:
                    self._saver.save_as(written, value, place, dict(options))
                except BaseException:
                    written.cancel()  # if it is written already, the step is dropped behind that
                    raise
        except BaseException as error:
            pending.give_up(error)
            raise
        self._asked[future] = None
        pending.end()
        return future  # type: ignore[no-any-return]

    def wait(self) -> None:
        """Return when all is written; raise what failed and was not looked at."""
        if self._saver is not None:
            self._saver.wait()
        self.raise_unseen()

    def raise_unseen(self) -> None:
        """Raise the first failure of a step whose future was not asked."""
        for future in list(self._asked):  # other threads may add some meanwhile
            if future.done():
                self._asked.pop(future, None)
                if future.unseen:
                    future.result()

    @property
    def pending(self) -> bool:
        """Whether something is not written yet."""
        return self._saver is not None and self._saver.pending > 0

    def refuse_here(self, what: str) -> None:
        """Raise in a callback that the thread which writes has called: it would wait for itself."""
        if self._saver is not None:
            self._saver._turn.refuse_here(what)

    def close(self, *, tell: bool = True) -> None:
        """Wait, and let go of the saver's memory; raise what failed unseen, or leave it to be printed at the end."""
        if self._saver is not None:
            try:
                self._saver.close()
            finally:
                if not self.pending:  # else somebody interrupted it, and may ask again
                    self._saver = None
        if tell:
            self.raise_unseen()


class _Pending:
    """The files of one step that are not written yet; the last one publishes it, or drops it."""

    def __init__(self, draft: Draft, future: SaveFuture) -> None:
        self._draft, self._future = draft, future
        self._lock = threading.Lock()
        self._left = 1  # whoever asks for the files, besides them
        self._error: BaseException | None = None
        self._told = False  # to the caller, who has no future then

    def add(self) -> None:
        """Expect one more file."""
        with self._lock:
            self._left += 1

    def written(self, future: Future[Any]) -> None:
        """Note that a file is written, or is not."""
        self.end(None if future.cancelled() else future.exception())

    def give_up(self, error: BaseException) -> None:
        """Drop the step when what was asked for already is written."""
        self._told = True
        self.end(error)

    def end(self, error: BaseException | None = None) -> None:
        """Count one down; act if it was the last."""
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            if self._left:
                return
        try:
            if self._error is not None:
                self._draft.drop(self._error)
                raise self._error
            info: Any = self._draft.publish()
        except BaseException as failure:  # it is told to who looks, whatever it is
            if not self._told:
                self._future.fail(failure)
        else:
            self._future.set_result(info)
