"""Tensors read straight into buffers of the caller's: large ones in pieces, small ones together, in parallel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from tensorio import _host
from tensorio.dtypes import numpy_dtype
from tensorio.errors import TensorMismatchError, error_context
from tensorio.storage.files import FileStorage
from tensorio.storage.ranges import place_of
from tensorio.storage.reading import READ_PIECE, in_threads, readers
from tensorio.tensors import CONJ, NEG

if TYPE_CHECKING:
    from tensorio.checkpoint._checkpoint import Checkpoint
    from tensorio.storage.base import Storage
    from tensorio.tensors import TensorInfo

    Job = tuple[int, Callable[[], object]]  # bytes it is good for
    Part = tuple[int, memoryview]  # offset in a storage, where the bytes go
    Run = tuple[Storage, int, memoryview]

__all__ = ["read_into", "read_runs"]

# Small tensors next to each other are read by one call: at most this many, with at most so many bytes between two.
MOST_PARTS = 512  # the system's limit is 1024 (IOV_MAX), and every gap is a part, too
GAP = 64 << 10


def read_into(
    checkpoint: Checkpoint,
    out: Mapping[str, Any],
    progress: Callable[[int, int], object] | None,
    threads: int | None,
) -> None:
    """Read tensors into the caller's buffers; see `Checkpoint.read_into`."""
    table = checkpoint._table
    targets = [(table.info(table.row_of(fqn), fqn), target) for fqn, target in out.items()]
    flat = [_fitting(info, target) for info, target in targets]  # all of them, before the first byte
    runs: list[Run] = []
    jobs: list[Job] = []
    for (info, target), bytes_of in zip(targets, flat, strict=True):
        if bytes_of is None or not info.contiguous or info.flags & (CONJ | NEG):
            jobs.append((info.nbytes, partial(_copy, checkpoint, info.fqn, target)))
        elif info.nbytes:
            extent = info.chunks[0].extent
            runs.append((checkpoint._storage(extent.storage), extent.offset, bytes_of))
    read_runs(runs, jobs, checkpoint._name, progress, threads)


def read_runs(
    runs: Iterable[Run],
    jobs: list[Job],
    name: str,
    progress: Callable[[int, int], object] | None = None,
    threads: int | None = None,
) -> None:
    """Fill buffers from places in storages, and do other jobs meanwhile, in parallel.

    Parameters
    ----------
    runs : iterable of (Storage, int, memoryview)
        Where the bytes are, and where they go.
    jobs : list of (int, callable)
        What else is to be done, with the bytes that it is good for.
    name : str
        Of the file, for messages.
    progress, threads
        See `Checkpoint.read_into`.

    Raises
    ------
    FormatError
        A file changed since it was opened.
    """
    jobs = list(jobs)
    files: dict[int, tuple[FileStorage, list[Part]]] = {}
    for storage, offset, target in runs:
        storage, offset = place_of(storage, offset)
        if isinstance(storage, FileStorage) and not storage.in_memory:
            files.setdefault(id(storage), (storage, []))[1].append((offset, target))
        else:
            jobs += _copies(storage, offset, target)
    for file, parts in files.values():
        jobs += _reads(file, parts)
    _run(jobs, progress, threads, name)
    for file, _ in files.values():
        with error_context(path=name):
            file.check_unchanged()


def _fitting(info: TensorInfo, target: Any) -> memoryview | None:
    """Return the target's bytes if they are one run in C order, None if not; raise if the tensor does not fit."""
    import numpy as np

    if not isinstance(target, np.ndarray):
        raw = memoryview(target)
        if raw.readonly:
            raise TensorMismatchError("a target is read-only: expected a writable buffer", record=info.fqn)
        if not raw.c_contiguous or raw.nbytes != info.nbytes:
            raise TensorMismatchError(
                f"a target does not fit: expected {info.nbytes} contiguous bytes, found {raw.nbytes}", record=info.fqn
            )
        return raw.cast("B") if raw.nbytes else memoryview(bytearray())
    shape = (info.nbytes,) if info.packed else info.shape
    dtype = numpy_dtype(info.dtype)
    if target.shape != shape or target.dtype != dtype:
        raise TensorMismatchError(
            f"a target does not fit: expected {shape} {dtype}, found {target.shape} {target.dtype}", record=info.fqn
        )
    if not target.flags.writeable:
        raise TensorMismatchError("a target is read-only: expected a writable array", record=info.fqn)
    if not target.flags.c_contiguous:
        return None
    return target.reshape(-1).view(np.uint8).data if target.size else memoryview(bytearray())


def _copy(checkpoint: Checkpoint, fqn: str, target: Any) -> None:
    """Element by element, where bytes can't be taken as they are; NumPy lets go of Python's lock."""
    import numpy as np

    array = checkpoint[fqn]
    if not isinstance(target, np.ndarray):
        target = np.frombuffer(target, array.dtype).reshape(array.shape)
    np.copyto(target, array)


def _copies(storage: Storage, offset: int, target: memoryview) -> list[Job]:
    """From memory, or from what is unpacked into it on first use."""
    return [
        (len(piece), partial(_copy_bytes, storage, offset + at, piece))
        for at in range(0, len(target), READ_PIECE)
        for piece in (target[at : at + READ_PIECE],)
    ]


def _copy_bytes(storage: Storage, offset: int, target: memoryview) -> None:
    _host.copy(target, storage.view_for(offset, len(target))[offset : offset + len(target)])


def _reads(storage: FileStorage, parts: list[Part]) -> list[Job]:
    """Pieces of large tensors; small ones that are near each other in one call."""
    jobs: list[Job] = []
    batch: list[Part] = []
    nbytes = 0

    def end() -> None:
        nonlocal batch, nbytes
        if batch:
            jobs.append((nbytes, partial(storage.read_parts, batch)))
        batch, nbytes = [], 0

    position = -1
    for offset, target in sorted(parts, key=lambda part: part[0]):
        for at in range(0, len(target), READ_PIECE):
            piece, start = target[at : at + READ_PIECE], offset + at
            near = batch and 0 <= start - position <= GAP
            if not near or nbytes + len(piece) > READ_PIECE or len(batch) >= MOST_PARTS:
                end()
            batch.append((start, piece))
            nbytes += len(piece)
            position = start + len(piece)
    end()
    return jobs


def _run(jobs: list[Job], progress: Callable[[int, int], object] | None, threads: int | None, name: str) -> None:
    total, done = sum(nbytes for nbytes, _ in jobs), 0
    lock = threading.Lock()

    def work(job: Job) -> None:
        nonlocal done
        nbytes, act = job
        with error_context(path=name):
            act()
        if progress is not None:
            with lock:
                done += nbytes
                progress(done, total)

    in_threads(work, jobs, threads or readers())
