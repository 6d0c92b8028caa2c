"""Pages of mapped files: brought into memory in steps, in huge ones where the system can, and let go."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tensorio import _core, _host
from tensorio.errors import FormatError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["STEP", "advise", "populate"]

# Bytes that one call maps: long enough for the disk, short enough to be stopped, and to tell how far it is.
STEP = 32 << 20
# Not in the mmap module of any Python yet; numbers of all Linux architectures (asm-generic/mman-common.h).
POPULATE_READ = 22
# What a kernel that has no such call, or not for this kind of mapping, answers.
_UNKNOWN = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}


def advise(view: Buffer, name: str) -> None:
    """Give the system a piece of advice by its name in the mmap module; without effect where it does not take it."""
    number = getattr(mmap, name, None)
    if number is not None:
        _host.advise(view, number)


def populate(view: memoryview, check: Callable[[], object]) -> Iterator[int]:
    """Map the pages of a range, from the page cache or the disk, a step at a time.

    Parameters
    ----------
    view : memoryview
        Over a mapping of a file.
    check : callable
        Raises if the file is no longer what it was; called before pages are touched that could be gone.

    Yields
    ------
    int
        Bytes that were mapped by a step. Whoever stops asking stops it.

    Raises
    ------
    FormatError
        The file shrank while it was mapped: the pages behind its end are gone.
    OSError
        The disk failed.
    """
    for at in range(0, len(view), STEP):
        piece = view[at : at + STEP]
        error = _host.advise(piece, POPULATE_READ) if os.name == "posix" else errno.ENOSYS
        if error == errno.EFAULT:
            check()
            raise FormatError(
                "the file shrank, or its disk failed, while it was mapped: pages of it are gone; "
                "load it again with mmap=False once its writer is done"
            )
        if error in _UNKNOWN:
            check()
            _core.touch(piece)
        elif error:
            raise OSError(error, os.strerror(error))
        yield len(piece)
