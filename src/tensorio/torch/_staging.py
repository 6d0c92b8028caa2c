"""Bytes of a mapping to a device, through two pinned buffers in turn.

While one buffer is copied to the device, the other is filled: reading the file
and copying overlap, and the device's copy engine reads pinned memory, which it
does at full speed and without holding up the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

__all__ = ["Cuda", "Device", "Staging"]

_cuda: Any = torch.cuda

BUFFER = 32 << 20  # bytes of each of the two: large enough for the engine, small enough to stay cheap to pin
SMALL = 1 << 16  # bytes; below this, pieces are packed into one buffer


class Device:
    """What `Staging` asks of a device; this one is memory, for tests.

    `buffer`, `room`, `copy`, `mark` and `wait` are all that there is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def room(self, nbytes: int) -> torch.Tensor:
        """Return memory on the device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return memory that copies start from."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def copy(self, out: torch.Tensor, piece: torch.Tensor) -> None:
        """Start a copy; `piece` must not change before `mark` is passed."""
        out.copy_(piece)

    def mark(self) -> Any:
        """Return a point behind all copies that were started."""

    def wait(self, mark: Any) -> None:
        """Return when a point is passed."""

    def finish(self) -> None:
        """See that whoever uses the memory next comes after all copies."""


class Cuda(Device):
    """Copies on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = _cuda.Stream(device)
        # Memory handed out by the allocator may still be in use by what was started before.
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, out: torch.Tensor, piece: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            out.copy_(piece, non_blocking=True)

    def mark(self) -> Any:
        event = _cuda.Event()
        event.record(self._stream)
        return event

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def finish(self) -> None:
        self._stream.synchronize()


class _Job(NamedTuple):
    source: torch.Tensor
    out: torch.Tensor


class Staging:
    """Copies to be made, and how.

    Parameters
    ----------
    make : callable
        ``make(device)`` returns a `Device`.
    nbytes : int
        Size of a buffer.
    """

    def __init__(self, make: Callable[[torch.device], Device] = Cuda, nbytes: int = BUFFER) -> None:
        self._make = make
        self._nbytes = nbytes
        self._devices: dict[torch.device, Device] = {}
        self._jobs: dict[torch.device, list[_Job]] = {}

    def add(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return room on a device for flat bytes that `run` copies there."""
        if device not in self._devices:
            self._devices[device] = self._make(device)
            self._jobs[device] = []
        out = self._devices[device].room(source.numel())
        self._jobs[device].append(_Job(source, out))
        return out

    def run(self) -> None:
        """Make all copies, in the order of their addresses: that of the file."""
        for device, jobs in self._jobs.items():
            jobs.sort(key=lambda job: job.source.data_ptr())
            self._copy(self._devices[device], jobs)
            jobs.clear()

    def _copy(self, device: Device, jobs: list[_Job]) -> None:
        total = sum(job.out.numel() for job in jobs)
        if not total:
            return
        buffers = [device.buffer(min(self._nbytes, total)) for _ in range(2 if total > self._nbytes else 1)]
        marks: list[Any] = [None] * len(buffers)
        for turn, batch in enumerate(self._batches(jobs, len(buffers[0]))):
            now = turn % len(buffers)
            if marks[now] is not None:
                device.wait(marks[now])
            at = 0
            for source, out in batch:
                piece = buffers[now][at : at + source.numel()]
                piece.copy_(source)  # reads the file; torch lets other threads run, and shares the work among its own
                device.copy(out, piece)
                at += source.numel()
            marks[now] = device.mark()
        device.finish()

    def _batches(self, jobs: list[_Job], room: int) -> Iterator[list[_Job]]:
        """Yield what fits one buffer: parts of large storages, several small ones."""
        batch: list[_Job] = []
        left = room
        for source, out in jobs:
            at, end = 0, source.numel()
            while at < end:
                count = min(left, end - at)
                batch.append(_Job(source[at : at + count], out[at : at + count]))
                at, left = at + count, left - count
                if not left:
                    yield batch
                    batch, left = [], room
        if batch:
            yield batch
