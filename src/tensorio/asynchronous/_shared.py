"""Memory without a name that a snapshot is taken in and another process maps: memfd_create(2)."""

from __future__ import annotations

import mmap
import os

from tensorio.asynchronous._buffers import Buffer
from tensorio.sharing._segments import anonymous_file
from tensorio.system import paging

__all__ = ["SharedBuffer", "mapped"]


class SharedBuffer(Buffer):
    """A buffer that others can map.

    Attributes
    ----------
    fd : int
        Closed with the buffer.
    """

    def __init__(self, nbytes: int) -> None:
        self.fd = anonymous_file("tensorio-snapshot")
        os.ftruncate(self.fd, nbytes)
        block = mmap.mmap(self.fd, nbytes)
        paging.advise(block, "MADV_HUGEPAGE")
        super().__init__(memoryview(block))

    def __del__(self) -> None:
        os.close(self.fd)


def mapped(fd: int, nbytes: int) -> memoryview:
    """Map the memory of another process' buffer, to be read; closes the descriptor."""
    try:
        return memoryview(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ))
    finally:
        os.close(fd)
