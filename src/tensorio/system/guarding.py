"""A word before the end: bus errors of mapped files, explained."""

from __future__ import annotations

import os
import threading

from tensorio import _host
from tensorio.errors import UnsupportedError

__all__ = ["Guard", "guard"]

_lock = threading.Lock()
_guards = 0  # how many are held


class Guard:
    """What `guard` returns; a context manager."""

    def __init__(self) -> None:
        global _guards
        self._held = False
        with _lock:
            if not _guards and (error := _host.guard_install()):
                raise UnsupportedError(f"this system has no bus errors to be explained: {os.strerror(error)}")
            _guards += 1
            self._held = True

    def close(self) -> None:
        """Put back the handler that was there before, when the last guard is closed."""
        global _guards
        with _lock:
            if self._held:
                self._held = False
                _guards -= 1
                if not _guards:
                    _host.guard_uninstall()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def guard() -> Guard:
    """Have a bus error say which mapped file it came from, before the process ends of it.

    A file that is cut short while it is mapped, or whose disk fails, ends the process that looks at the pages
    which are gone (SIGBUS). With a guard, it first writes one line to stderr: the file, the offset, what to do.

    Returns
    -------
    Guard
        A context manager. Without ``with``, the guard stays until ``close()`` or the end of the process.

    Raises
    ------
    UnsupportedError
        The system has no SIGBUS.

    Notes
    -----
    A handler in C, installed for the whole process, by calls that are safe in one. It never goes on: it puts back the
    handler that was there before and has the access made again, so that exit status, core file and the traceback of
    `faulthandler` are what they are without it. It knows all files that tensorio has mapped, up to 4096 at a time,
    whenever they were opened. A handler that is installed later, `faulthandler` included, sees the signal first.

    Never installed unless asked for.
    """
    return Guard()
