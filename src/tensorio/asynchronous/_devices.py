"""Tensors on a device: promised while the file is laid out, fetched into pinned memory when all are known.

A device's copy engine reads and writes pinned memory at full speed and without holding up the CPU; what is fetched is
not copied again. torch is not imported: who has a tensor on a device has done so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from tensorio.asynchronous._buffers import Buffer, private

__all__ = ["PROMISED", "Cuda", "Fetch", "Promise", "pinned"]

# No address of memory is this large: addresses from here on stand for bytes on a device.
PROMISED = 1 << 62
GAP = 64  # bytes between two: none is taken for a part of its neighbour


def pinned(nbytes: int) -> Buffer:
    """Return a new buffer in pinned memory; in ordinary memory if there is none."""
    torch: Any = sys.modules["torch"]
    try:
        return Buffer(memoryview(torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()))
    except RuntimeError:  # devices of other makers; or it can't be had
        return private(nbytes)


class Promise(NamedTuple):
    """Bytes that are going to be in memory.

    Attributes
    ----------
    address : int
        Stands for them until then.
    source : torch.Tensor
        On the device, flat, uint8.
    """

    address: int
    source: Any

    def data_ptr(self) -> int:
        """Return what stands for their address."""
        return self.address


class Cuda:
    """Copies on a stream of their own for each device, behind what was started before."""

    def __init__(self) -> None:
        self._torch: Any = sys.modules["torch"]
        self._streams: dict[Any, Any] = {}

    def start(self, target: Any, source: Any) -> None:
        """Start a copy to memory; devices that are not CUDA's make it at once."""
        device = source.device
        if device.type != "cuda":
            target.copy_(source)
            return
        cuda = self._torch.cuda
        if device not in self._streams:
            self._streams[device] = cuda.Stream(device)
            self._streams[device].wait_stream(cuda.current_stream(device))
        with cuda.stream(self._streams[device]):
            target.copy_(source, non_blocking=True)

    def finish(self) -> None:
        """Return when all copies are made."""
        for stream in self._streams.values():
            stream.synchronize()


class Fetch:
    """See `tensorio.formats._base.SaveOptions`.

    Parameters
    ----------
    make : callable
        ``make()`` returns what copies: a `Cuda` or something like it.

    Attributes
    ----------
    promises : list of Promise
        In the order of their addresses.
    """

    def __init__(self, make: Callable[[], Any] = Cuda) -> None:
        self.promises: list[Promise] = []
        self._make = make
        self._next = PROMISED

    def __call__(self, source: Any) -> Promise:
        """Promise the bytes of a storage, or of a contiguous tensor."""
        torch: Any = sys.modules["torch"]
        if isinstance(source, torch.Tensor):
            flat = source.view(-1).view(torch.uint8)
        else:
            flat = torch.empty(0, dtype=torch.uint8, device=source.device).set_(source)
        promise = Promise(self._next, flat)
        self.promises.append(promise)
        self._next += -(-flat.numel() // GAP) * GAP + GAP
        return promise

    def start(self, buffer: Buffer, offsets: dict[int, int]) -> Callable[[], None]:
        """Start to fetch what was promised.

        Parameters
        ----------
        offsets : dict of int to int
            Where in the buffer each promise goes, by its address.

        Returns
        -------
        callable
            Returns when all of it is there.
        """
        torch: Any = sys.modules["torch"]
        copies, room = self._make(), torch.frombuffer(buffer.view, dtype=torch.uint8)
        for promise in self.promises:
            offset = offsets.get(promise.address)
            if offset is not None:
                copies.start(room[offset : offset + promise.source.numel()], promise.source)
        return copies.finish  # type: ignore[no-any-return]
