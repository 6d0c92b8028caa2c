"""The worker processes of ``tensorio demo``: each opens the same file, reads every byte of it, and is measured.

Three meetings keep the figures honest: all have started before anyone's memory
is looked at, nobody begins before that, and nobody leaves before all have been
measured with everything still in memory.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorio.cli._memory import pss
from tensorio.errors import TensorIOError

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier

    from tensorio.checkpoint._checkpoint import Checkpoint

__all__ = ["Crew", "WorkerError", "checksum", "run_workers"]

MEETING_SECONDS = 120


class WorkerError(Exception):
    """A worker process died or failed."""


class Report(NamedTuple):
    """What one worker measured; `pss` in bytes beyond that before opening, times in seconds."""

    start: float
    end: float
    cpu: float
    nbytes: int
    crc32: int
    pss: int | None


class Crew(NamedTuple):
    """What all workers together took.

    Attributes
    ----------
    wall : float
        Seconds from the first one's start to the last one's end.
    cpu : float
    nbytes : int
        Bytes read, summed over the workers.
    crc32 : set of int
        Of all tensors; one number if all read the same.
    pss : list of int or None
        Per worker.
    """

    wall: float
    cpu: float
    nbytes: int
    crc32: set[int]
    pss: list[int | None]


def run_workers(path: str, count: int, *, copy: bool) -> Crew:
    """Start processes that read a checkpoint at the same time.

    Parameters
    ----------
    copy : bool
        Read the file into each worker's own memory instead of mapping it.

    Raises
    ------
    WorkerError
        One of them failed.
    """
    context = multiprocessing.get_context("spawn")
    meeting = context.Barrier(count)
    answers: Any = context.SimpleQueue()
    workers = [context.Process(target=_work, args=(path, copy, meeting, answers), daemon=True) for _ in range(count)]
    try:
        for worker in workers:
            worker.start()
        return _summed(_answers(workers, answers))
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.terminate()
                worker.join()


def _answers(workers: list[Any], answers: Any) -> list[Report]:
    """Wait for everyone's report, but not for those of the dead."""
    reports: list[Report] = []
    while len(reports) < len(workers):
        died = next((w for w in workers if w.exitcode), None)
        if not answers.empty():
            answer = answers.get()
            if isinstance(answer, str):
                raise WorkerError(answer)
            reports.append(answer)
        elif died is not None:
            raise WorkerError(f"a worker process died with exit code {died.exitcode}")
        else:
            time.sleep(0.01)
    return reports


def _summed(reports: list[Report]) -> Crew:
    return Crew(
        max(r.end for r in reports) - min(r.start for r in reports),
        sum(r.cpu for r in reports),
        sum(r.nbytes for r in reports),
        {r.crc32 for r in reports},
        [r.pss for r in reports],
    )


def _work(path: str, copy: bool, meeting: Barrier, answers: Any) -> None:
    """Run in a worker: the whole of its life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the workers
    try:
        answers.put(_measured(path, copy, meeting))
    except (TensorIOError, OSError, MemoryError, RuntimeError) as error:
        answers.put(f"a worker process failed: {type(error).__name__}: {error}")


def _measured(path: str, copy: bool, meeting: Barrier) -> Report:
    import ml_dtypes  # noqa: F401
    import numpy as np  # noqa: F401

    import tensorio
    from tensorio import _arrays, _unpickler  # noqa: F401

    meeting.wait(MEETING_SECONDS)
    before = pss()
    meeting.wait(MEETING_SECONDS)
    start, cpu = time.monotonic(), time.process_time()
    source: str | bytes = path
    if copy:
        with open(path, "rb") as f:
            source = f.read()
    with tensorio.open(source) as checkpoint:
        nbytes, crc = checksum(checkpoint)
        end, cpu = time.monotonic(), time.process_time() - cpu
        meeting.wait(MEETING_SECONDS)
        after = pss()
        meeting.wait(MEETING_SECONDS)
    return Report(start, end, cpu, nbytes, crc, None if before is None or after is None else max(0, after - before))


def checksum(checkpoint: Checkpoint) -> tuple[int, int]:
    """Read every byte of every tensor, in order; return how many they are and their CRC-32."""
    import numpy as np

    from tensorio import _core

    nbytes = crc = 0
    for array in checkpoint.values():
        flat = array.reshape(-1).view(np.uint8)
        crc = _core.crc32(flat.data, crc)
        nbytes += flat.nbytes
    return nbytes, crc
