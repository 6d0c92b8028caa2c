"""All tensors of a file, read into memory: large ones by themselves, small neighbours together."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from tensorio.storage.base import MemoryStorage
from tensorio.storage.reading import arena
from tensorio.tensors import ROW, Table

if TYPE_CHECKING:
    from tensorio.safetensors._file import File

__all__ = ["read_blocks"]

# Tensors of more bytes have memory of their own; the others keep alive at most a block of this many.
OWN_FROM = 256 << 10
BLOCK = 1 << 20
# Memory is aligned to this many bytes, and so are the places of the file that it begins with.
ALIGN = 64
# Up to this many bytes, memory from the heap is cheaper than pages of one's own.
HEAP = 2 << 20


def read_blocks(file: File) -> tuple[Table, list[MemoryStorage]]:
    """Read a file's payload.

    Returns
    -------
    table : Table
        As the file's, over `storages`.
    storages : list of MemoryStorage
        Writable. A tensor of over 256 KiB has one of its own; smaller ones share those of at most 1 MiB.
    """
    cells = np.frombuffer(file.table.rows, np.int64).reshape(-1, ROW).copy() if len(file.table) else None
    if cells is None:
        return file.table, []
    storages: list[MemoryStorage] = []
    order = np.array(file.order)
    offsets, sizes = cells[order, 5], cells[order, 6]
    for first, after in _runs(offsets.tolist(), sizes.tolist()):
        begin = int(offsets[first]) // ALIGN * ALIGN
        end = int(offsets[after - 1] + sizes[after - 1])
        cells[order[first:after], 4] = len(storages)
        cells[order[first:after], 5] -= begin
        memory = memoryview(bytearray(end - begin)) if end - begin < HEAP else arena(end - begin)
        file.read(int(offsets[first]), memory[int(offsets[first]) - begin :])
        storages.append(MemoryStorage(memory, writable=True))
    rows = array("q", cells.tobytes())
    return Table(file.table.names, rows, file.table.dims), storages


def _runs(offsets: list[int], sizes: list[int]) -> list[tuple[int, int]]:
    """Split the tensors, by offset, into runs that are read together."""
    runs, first = [], 0
    for i, size in enumerate(sizes):
        if size > OWN_FROM:
            if first < i:
                runs.append((first, i))
            runs.append((i, i + 1))
            first = i + 1
        elif offsets[i] + size - offsets[first] > BLOCK:
            runs.append((first, i))
            first = i
    if first < len(sizes):
        runs.append((first, len(sizes)))
    return runs
