"""The public functions that write in the background."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from tensorio.asynchronous._saver import AsyncSaver

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tensorio.checkpoint._saving import Saved

__all__ = ["AsyncSaver", "save_async"]

_lock = threading.Lock()
_saver: AsyncSaver | None = None


def save_async(obj: Any, path: Any, **options: Any) -> Future[Saved]:
    """Save in the background: returns when a snapshot is taken, after which tensors may be changed.

    Parameters
    ----------
    obj, path
        See `save`. A relative path counts from the folder the program is in now.
    **options
        Those of `save`. `progress` is called by the thread that writes.

    Returns
    -------
    concurrent.futures.Future of Saved
        Its ``result()`` waits until the file is written; ``cancel()`` works until the writing begins.

    Raises
    ------
    Exception
        What `save` raises before it writes; or the failure of an earlier call that nobody looked at, with a note
        that names its path: then nothing was saved by this call.

    Notes
    -----
    All calls share one `AsyncSaver`, whose snapshots take at most half of the memory that is available: a call waits
    until earlier ones leave room for its own. The end of the program waits for what is pending, and prints failures
    that nobody looked at.
    """
    return _shared().save(obj, path, **options)


def _shared() -> AsyncSaver:
    global _saver
    with _lock:
        if _saver is None:
            _saver = AsyncSaver()
        return _saver


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
