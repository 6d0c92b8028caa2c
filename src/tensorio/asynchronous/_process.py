"""A process that writes: it is sent a save that is laid out, and the memory that the snapshot is in.

One job at a time, over a pair of sockets. The process needs tensorio and NumPy only; of the program's own modules
it imports nothing. When its parent is gone, it finishes what it was given and ends.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from tensorio.errors import UnsupportedError

if TYPE_CHECKING:
    import subprocess
    from multiprocessing.connection import Connection

    from tensorio.asynchronous._buffers import Buffer
    from tensorio.checkpoint._saving import Saved, SaveJob

    Progress = Callable[[int, int], object]

__all__ = ["Relay", "Writer", "require_memfd", "shared"]

SECONDS = 60  # for the process to end once it has nothing to do; it is ended then


def require_memfd() -> None:
    """Raise if this system has no memory that can be passed to another process."""
    if not hasattr(os, "memfd_create"):
        raise UnsupportedError("expected Linux for processes=True (memfd_create); use processes=False")


def shared(nbytes: int) -> Buffer:
    """Return a new buffer that the process can map."""
    from tensorio.asynchronous._shared import SharedBuffer

    return SharedBuffer(nbytes)


class Relay:
    """A function for progress that is called here, wherever it is told from."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def __call__(self, done: int, total: int) -> object:
        return self.progress(done, total)

    def __reduce__(self) -> tuple[Any, ...]:
        from tensorio.asynchronous._child import asked_parent

        return asked_parent, ()


class Writer:
    """The process, started when the first save is written."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Connection[Any, Any] | None = None

    def write(self, job: SaveJob, buffer: Any, path: str, progress: Progress | None) -> Saved:
        """Have a save written; what can't be passed to another process (file objects) is written here.

        Parameters
        ----------
        job : SaveJob
        buffer : SharedBuffer
            All payloads of the job are in it.
        path : str
            For messages.
        progress : callable or None
            Called here, where the job has a `Relay`.

        Raises
        ------
        ChildProcessError
            The process was ended; the old file is as it was.
        Exception
            Whatever went wrong there, or in `progress` here.
        """
        message = _packed(job, buffer)
        if message is None:
            return job.write()
        with self._lock:
            try:
                return self._handed_over(message, job, buffer, progress)
            except (EOFError, ConnectionError):
                how = self._end()
                what = f"the process that writes ended ({how}) before the save was done"
                raise ChildProcessError(errno.ECHILD, what, path) from None

    def _handed_over(self, message: bytes, job: SaveJob, buffer: Any, progress: Progress | None) -> Saved:
        from multiprocessing.reduction import send_handle

        link = self._link or self._start()
        link.send_bytes(message)
        assert self._process is not None
        send_handle(link, buffer.fd, self._process.pid)
        failure: BaseException | None = None
        while True:
            kind, value = link.recv()
            if kind == "saved":
                return cast("Saved", value)
            if kind == "unreadable":
                return job.write()
            if kind == "failed":
                raise failure or value
            try:
                if progress is not None:
                    progress(*value)
            except BaseException as error:
                failure = error
            link.send(failure is None)

    def _start(self) -> Connection[Any, Any]:
        import socket
        import subprocess
        from multiprocessing.connection import Connection

        here, there = socket.socketpair()
        with there:
            code = f"import sys; sys.path[:] = {sys.path!r}; from tensorio.asynchronous._child import main; main()"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(there.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                start_new_session=True,  # Ctrl-C is for the program; what it saved before is written
            )
        self._link = Connection(here.detach())
        return self._link

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def __del__(self) -> None:
        self._end()  # without the lock, which in a forked child may be held by nobody

    def _end(self) -> str:
        """Let the process end; how it did."""
        link, process, self._link, self._process = self._link, self._process, None, None
        if link is not None:
            link.close()
        if process is None:
            return "it was not started"  # at the very end of a program, when nothing can be imported, it never was

        import subprocess

        try:
            status = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        return f"signal {-status}" if status < 0 else f"status {status}"


def _packed(job: SaveJob, buffer: Any) -> bytes | None:
    """The job as bytes, its payloads without what keeps them here; None if it has parts that can't be passed on."""
    from multiprocessing.reduction import ForkingPickler

    kept = [payloads.keep for payloads in job.payloads]
    for payloads in job.payloads:
        payloads.keep = []
    try:
        return bytes(ForkingPickler.dumps((job, buffer.address, buffer.nbytes)))
    except Exception:  # of whatever sort: the user's objects have their own
        return None
    finally:
        for payloads, keep in zip(job.payloads, kept, strict=True):
            payloads.keep = keep
