"""What the drop-in faces did in this process, for the line that `tensorio.dropin` prints at exit."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["calls", "count", "pass_on", "passed_on", "tell"]

# Name of the act (e.g. "torch.load") -> [times, bytes of the files]. Plain dicts: a lost increment between threads
# would cost a digit in a message, a lock would cost every load.
calls: dict[str, list[int]] = {}
# Name of the act -> times it was left to the original.
passed_on: dict[str, int] = {}

_listener: Callable[[], None] | None = None


def count(name: str, nbytes: int = 0) -> None:
    """Count one act that was served here.

    Parameters
    ----------
    name : str
        Of the function that was replaced, e.g. ``"safetensors.safe_open"``.
    nbytes : int
        Size of the file.
    """
    entry = calls.get(name)
    if entry is None:
        entry = calls.setdefault(name, [0, 0])
    entry[0] += 1
    entry[1] += nbytes
    _tell()


def pass_on(name: str) -> None:
    """Count one act that was left to the original function."""
    passed_on[name] = passed_on.get(name, 0) + 1
    _tell()


def _tell() -> None:
    listener = _listener  # which another thread may take away
    if listener is not None:
        listener()


def tell(listener: Callable[[], None] | None) -> None:
    """Have `listener` called after each act; None: nobody."""
    global _listener
    _listener = listener
