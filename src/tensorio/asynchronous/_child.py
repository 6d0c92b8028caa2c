"""What the process that writes does; see `tensorio.asynchronous._process`."""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler, recv_handle
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorio import _core
from tensorio.asynchronous._shared import mapped

if TYPE_CHECKING:
    from tensorio.checkpoint._saving import SaveJob

__all__ = ["asked_parent", "main"]

_link: Connection[Any, Any]


class _Stopped(Exception):
    """The function for progress raised, in the parent."""


def _progress(done: int, total: int) -> None:
    _link.send(("progress", (done, total)))
    if not _link.recv():
        raise _Stopped


def asked_parent() -> object:
    """Return a function for progress that asks the parent's."""
    return _progress


def main() -> None:
    """Write what comes, until nobody is there to send more."""
    global _link
    _link = Connection(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the temporary is removed on the way
    try:
        while True:
            message = _link.recv_bytes()
            _link.send(_answer(message, recv_handle(_link)))
    except (EOFError, ConnectionError):
        return


def _answer(message: bytes, fd: int) -> tuple[str, object]:
    try:
        job, address, nbytes = ForkingPickler.loads(message)
    except Exception as error:
        os.close(fd)
        return "unreadable", repr(error)
    try:
        _move(job, address, mapped(fd, nbytes))
        return "saved", job.write()
    except Exception as error:
        return "failed", _portable(error)


def _move(job: SaveJob, address: int, view: memoryview) -> None:
    """Let the payloads be read where the memory is mapped here."""
    away = _core.address(view) - address
    for payloads in job.payloads:
        places = np.frombuffer(payloads.addresses, np.int64)
        sizes = np.frombuffer(payloads.sizes, np.int64)
        ends = places + sizes
        if np.any((sizes > 0) & ((places < address) | (ends > address + len(view)))):
            raise ValueError("a payload is not in the snapshot")
        places += np.where(sizes > 0, away, 0)
        payloads.keep = [view]


def _portable(error: Exception) -> Exception:
    """The error, if it can be passed on as it is."""
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
