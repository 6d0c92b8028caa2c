"""How a file's bytes come into memory: mapped, read, or read ahead of a mapping; by which disk it is on."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tensorio.storage.files import FileStorage

if TYPE_CHECKING:
    from tensorio.storage.base import Storage

    Progress = Callable[[int, int], object]

__all__ = ["check_choice", "described", "reads_payload", "settle"]

FAR = "page faults there are single small reads"


def check_choice(mmap: Any) -> None:
    """Raise if `mmap` is none of what `tensorio.open` takes."""
    if not (isinstance(mmap, bool) or mmap in ("auto", "random")):
        raise ValueError(f"mmap= is True, False, 'auto' or 'random', not {mmap!r}")


def reads_payload(storage: Storage, mmap: bool | str) -> bool:
    """Whether `settle` would do anything."""
    if not isinstance(storage, FileStorage) or storage.in_memory:
        return False
    return not mmap or (mmap == "auto" and storage.disk.far)


def settle(storage: Storage, mmap: bool | str, progress: Progress | None, *, whole: bool) -> None:
    """With the header known to be good, see to the payload.

    Parameters
    ----------
    storage : Storage
    mmap : bool or "auto"
        See `tensorio.open`.
    whole : bool
        Whether all of it is wanted now.
    """
    if isinstance(storage, FileStorage):
        storage.random = mmap == "random"
    if not reads_payload(storage, mmap):
        if not mmap:
            storage.read_ahead(0, storage.nbytes)  # of what is decrypted on use
        return
    assert isinstance(storage, FileStorage)
    if not mmap:
        storage.read_all(progress)
    elif not (whole and _fits(storage, progress)):
        storage.ahead = True


def _fits(storage: FileStorage, progress: Progress | None) -> bool:
    """Read all of a file, unless there is no memory for it."""
    try:
        storage.read_all(progress)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        return False
    return True


def described(storage: Storage, mmap: bool | str) -> str:
    """Say how the bytes are loaded, and why; for `Checkpoint.loading`."""
    if not isinstance(storage, FileStorage):
        return storage.how
    disk = storage.disk
    if storage.ahead:
        return f"read ahead: {disk}; {FAR}"
    if not storage.in_memory:
        kind = "mapped, private pages where written to" if storage.writable else "mapped"
        note = ", in memory already" if disk.in_memory else ", nothing read around what is looked at" * storage.random
        return f"{kind}: {disk.type or disk}{note}"
    if not mmap:
        return "read into memory: mmap=False"
    return f"read into memory: {disk}; " + (FAR if disk.far else "files can't be mapped there")
