"""Tensors on a device: the control flow with stand-ins for the device, the rest where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio
from gates import held_up
from tensorio.asynchronous import _devices
from tensorio.asynchronous._buffers import Buffer, Buffers, private
from tensorio.asynchronous._devices import PROMISED, Cuda, Fetch, pinned
from tensorio.asynchronous._snapshot import Snapshot
from tensorio.plan import Payloads

torch = pytest.importorskip("torch")

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Late:
    """Copies that are made when they are waited for, as a device makes them."""

    def __init__(self) -> None:
        self.started: list[tuple[Any, Any]] = []
        self.finished = False

    def start(self, target: Any, source: Any) -> None:
        self.started.append((target, source))

    def finish(self) -> None:
        for target, source in self.started:
            target.copy_(source)
        self.finished = True


class Elsewhere(torch.Tensor):
    """A tensor that says it is not in memory."""

    @property
    def is_cpu(self) -> bool:
        return False

    def cpu(self) -> Any:
        return self.as_subclass(torch.Tensor)


def elsewhere(tensor: Any) -> Any:
    return torch.Tensor._make_subclass(Elsewhere, tensor)


def test_promises_stand_for_bytes_until_they_are_fetched() -> None:
    late = Late()
    fetch = Fetch(lambda: late)
    first, second = torch.arange(100.0), torch.arange(10, dtype=torch.int64)
    here = np.arange(50, dtype="u1")
    payloads = Payloads()
    payloads.add_memory(fetch(first.untyped_storage()).data_ptr(), 400)
    payloads.add(here, 50)
    payloads.add_memory(fetch(second).data_ptr(), 80)
    payloads.add_memory(payloads.addresses[0], 400)  # tied
    fetch(torch.ones(3))  # of nobody's payload
    assert payloads.addresses[0] >= PROMISED
    snapshot = Snapshot([payloads], fetch)
    assert snapshot.nbytes < 400 + 50 + 80 + 4 * 64 * 2
    buffer = Buffers().lend(snapshot.nbytes)
    assert buffer is not None
    snapshot.take(buffer)
    assert late.finished
    assert len(late.started) == 2
    want = [first.numpy().tobytes(), here.tobytes(), second.numpy().tobytes(), first.numpy().tobytes()]
    assert [b"".join(payloads.pieces(i)) for i in range(4)] == want
    assert payloads.addresses[0] == payloads.addresses[3]


def test_copies_are_waited_for_when_the_rest_fails() -> None:
    """The device would write to a buffer that somebody else has by then."""
    late = Late()
    fetch = Fetch(lambda: late)
    payloads = Payloads()
    payloads.add_memory(fetch(torch.ones(4)).data_ptr(), 16)
    payloads.add(lambda: iter([b"too short"]), 100)
    snapshot = Snapshot([payloads], fetch)
    buffer = Buffers().lend(snapshot.nbytes)
    assert buffer is not None
    with pytest.raises(ValueError, match="planned"):
        snapshot.take(buffer)
    assert late.finished


@pytest.mark.parametrize("processes", [False, True])
def test_a_save_of_tensors_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: bool) -> None:
    """Fetched once, into a buffer of their kind, which is used again."""
    made: list[int] = []

    def make(nbytes: int) -> Buffer:
        made.append(nbytes)
        return private(nbytes)

    monkeypatch.setattr(_devices, "pinned", make)
    tensors = {"w": torch.arange(12.0).reshape(3, 4), "s": torch.tensor(3), "h": torch.ones(5, dtype=torch.bfloat16)}
    away = {name: elsewhere(tensor.clone()) for name, tensor in tensors.items()}
    away["t"] = away["w"].T
    tensors["t"] = tensors["w"].T
    (tmp_path / "at once").mkdir()
    tensorio.save(tensors, tmp_path / "at once" / "x.safetensors")
    want = (tmp_path / "at once" / "x.safetensors").read_bytes()
    with tensorio.AsyncSaver(processes=processes) as saver:
        for _ in range(2):
            saver.save(away, tmp_path / "x.safetensors").result()
            assert (tmp_path / "x.safetensors").read_bytes() == want
    assert made == ([] if processes else [2 << 20])


@pytest.mark.parametrize("options", [{}, {"max_shard_size": 64}, {"base": "base.safetensors"}], ids=repr)
def test_what_is_hashed_is_fetched_first(options: dict[str, Any], tmp_path: Path) -> None:
    tensors = {name: torch.arange(12.0) + i for i, name in enumerate("abc")}
    away = {name: elsewhere(tensor.clone()) for name, tensor in tensors.items()}
    target = tmp_path / "x.safetensors"
    if "base" in options:
        tensorio.save({**tensors, "a": torch.ones(12)}, tmp_path / "base.safetensors")
        options = {"base": tmp_path / "base.safetensors"}
    with tensorio.AsyncSaver() as saver:
        saver.save(away, target, digests=True, **options).result()
    assert tensorio.verify(target, require=True).ok
    got = tensorio.load(target)
    assert all(np.array_equal(got[name], tensor.numpy()) for name, tensor in tensors.items())


def test_what_is_too_large_is_fetched_as_by_a_save(tmp_path: Path) -> None:
    away = {"w": elsewhere(torch.arange(12.0))}
    with tensorio.AsyncSaver(max_memory=0) as saver, pytest.warns(RuntimeWarning, match="max_memory"):
        saver.save(away, tmp_path / "x.safetensors").result()
    assert np.array_equal(tensorio.load(tmp_path / "x.safetensors")["w"], np.arange(12.0, dtype="f4"))


class Storage:
    """What the pickler asks of a storage that is on a device."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.device = torch.device("cuda:0")
        self._cdata = id(self)

    def nbytes(self) -> int:
        return int(self.tensor.nbytes)

    def data_ptr(self) -> int:
        return 0


def test_a_torch_file_asks_for_a_storage_once() -> None:
    from tensorio.formats import torch_zip
    from tensorio.formats._base import SaveOptions

    typed = object.__new__(torch.TypedStorage)
    typed.dtype, typed._untyped_storage = torch.float32, Storage(torch.arange(6.0))
    late = Late()
    fetch = Fetch(lambda: late)
    asked: list[Any] = []

    def promise(storage: Any) -> Any:
        asked.append(storage)
        return fetch(storage.tensor)

    plan = torch_zip.plan({"a": typed, "b": [typed]}, SaveOptions(name="x.pt", fetch=promise))
    assert len(asked) == 1
    snapshot = Snapshot([plan.payloads], fetch)
    buffer = Buffers().lend(snapshot.nbytes)
    assert buffer is not None
    snapshot.take(buffer)
    assert torch.arange(6.0).numpy().tobytes() in b"".join(plan.pieces())


def test_memory_that_cannot_be_pinned_is_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr(torch, "empty", refuse)
    assert pinned(2 << 20).nbytes == 2 << 20


def test_devices_that_are_not_cuda_copy_at_once() -> None:
    copies, target = Cuda(), torch.zeros(4)
    copies.start(target, torch.ones(4))
    assert torch.equal(target, torch.ones(4))
    copies.finish()


@needs_cuda
@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_a_model_on_a_cuda_device(tmp_path: Path, name: str) -> None:
    model = torch.nn.Linear(300, 200).cuda()
    state = model.state_dict()
    (tmp_path / "at once").mkdir()
    tensorio.save(state, tmp_path / "at once" / name)
    with tensorio.AsyncSaver() as saver, held_up(saver, tmp_path):
        saver.save(state, tmp_path / name)
        with torch.no_grad():
            model.weight.zero_()
    assert (tmp_path / name).read_bytes() == (tmp_path / "at once" / name).read_bytes()
