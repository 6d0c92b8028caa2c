"""Copies to a device through two buffers, with memory in the device's place; and on CUDA where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tensorio.torch
from tensorio.torch._staging import Device, Staging
from tensorio.torch._tensors import to_device

CPU = torch.device("cpu")


class Late(Device):
    """Copies only when waited for, as a device may: what is overwritten before is lost."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.started: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.buffers: list[int] = []
        self.waits = 0

    def buffer(self, nbytes: int) -> torch.Tensor:
        self.buffers.append(nbytes)
        return super().buffer(nbytes)

    def copy(self, out: torch.Tensor, piece: torch.Tensor) -> None:
        self.started.append((out, piece))

    def mark(self) -> Any:
        return len(self.started)

    def wait(self, mark: Any) -> None:
        self.waits += 1
        self._until(mark)

    def finish(self) -> None:
        self._until(len(self.started))

    def _until(self, mark: int) -> None:
        for i in range(mark):
            if self.started[i] is not None:
                out, piece = self.started[i]
                out.copy_(piece)
                self.started[i] = None  # type: ignore[call-overload]


@pytest.mark.parametrize("sizes", [[], [0], [1], [100], [7, 0, 300, 1, 1, 99, 100, 101], [1] * 500, [1000, 3]])
@pytest.mark.parametrize("room", [100, 1 << 20])
def test_all_bytes_arrive(sizes: list[int], room: int) -> None:
    whole = torch.arange(sum(sizes) + 1, dtype=torch.int64).to(torch.uint8)
    made: list[Late] = []

    def make(device: torch.device) -> Late:
        made.append(Late(device))
        return made[-1]

    staging = Staging(make, room)
    sources, at = [], 0
    for size in sizes:
        sources.append(whole[at : at + size])
        at += size
    rooms = [staging.add(source, CPU) for source in reversed(sources)]
    staging.run()
    assert all(torch.equal(room, source) for room, source in zip(rooms, reversed(sources), strict=True))
    assert len(made) == bool(sizes)
    if sum(sizes) > room:
        assert made[0].buffers == [room, room]
        assert made[0].waits == -(-sum(sizes) // room) - 2
    elif sum(sizes):
        assert made[0].buffers == [sum(sizes)]


def test_tensors_share_on_the_device_as_they_do_here() -> None:
    base = torch.arange(40.0)
    found = to_device({"a": base, "b": base[3:9], "c": base.view(4, 10).t(), "d": torch.ones(3).requires_grad_()},
                      "meta", Staging(lambda device: Device(CPU), 64))  # fmt: skip
    assert torch.equal(found["c"], base.view(4, 10).t())
    found["a"][3] = -1
    assert found["b"][0] == -1
    assert base[3] == 3
    assert found["d"].requires_grad


def test_another_default_device_changes_nothing() -> None:
    base = torch.arange(40.0)
    with torch.device("meta"):
        found = to_device({"a": base}, "cpu:0", None)
        moved = to_device({"a": base}, "cuda", Staging(lambda device: Device(CPU), 64))
    assert torch.equal(found["a"], base)
    assert torch.equal(moved["a"], base)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_device(tmp_path: Path) -> None:
    obj = {"a": torch.arange(30_000_000, dtype=torch.float32), "b": torch.ones(7, dtype=torch.bfloat16)}
    obj["v"] = obj["a"][5:]
    torch.save(obj, tmp_path / "m.pt")
    for found in (
        tensorio.torch.load(tmp_path / "m.pt", "cuda"),
        tensorio.torch.load_file(tmp_path / "m.pt", "cuda:0"),
    ):
        assert all(torch.equal(found[name].cpu(), obj[name]) for name in obj)
        assert all(tensor.is_cuda for tensor in found.values())
        assert found["a"].untyped_storage().data_ptr() == found["v"].untyped_storage().data_ptr()
    torch.save({"w": found["a"]}, tmp_path / "c.pt")
    assert tensorio.torch.load(tmp_path / "c.pt")["w"].is_cuda
