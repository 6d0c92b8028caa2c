"""What is written is what was there when the call returned, byte for byte as a save at that moment."""

from __future__ import annotations

import copy
import hashlib
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

import tensorio
from gates import held_up
from tensorio import _host
from tensorio.asynchronous._buffers import Buffers
from tensorio.asynchronous._snapshot import Snapshot
from tensorio.formats import _digests
from tensorio.plan import Payloads
from tensorio.storage.reading import READ_PIECE

torch = pytest.importorskip("torch")

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is passed on on Linux only")


def numpy_arrays() -> dict[str, Any]:
    base = np.arange(4096, dtype="f4")
    return {
        "whole": base,
        "part": base[100:200],
        "overlapping": base[150:1000],
        "same": base,
        "strided": base[::3],
        "backwards": base[::-1],
        "transposed": np.arange(60, dtype="i8").reshape(3, 4, 5).transpose(2, 0, 1),
        "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "big endian": np.arange(7, dtype=">i4"),
        "scalar": np.array(3.5),
        "empty": np.empty((0, 3), "f2"),
        "large": np.arange(3 * READ_PIECE // 4 + 5, dtype="f4"),
        "bool": np.array([True, False, True]),
    }


def torch_tensors() -> dict[str, Any]:
    base = torch.arange(5000, dtype=torch.float32)
    tied = torch.nn.Parameter(torch.randn(30, 20))
    return {
        "view": base[10:20],
        "other view": base[15:4000].view(-1, 5),
        "strided": base[::7],
        "expanded": torch.arange(3).expand(4, 3),
        "transposed": torch.arange(12.0).reshape(3, 4).T,
        "embedding": tied,
        "head": tied,
        "half": torch.randn(33).to(torch.bfloat16),
        "eighth": torch.randn(33).to(torch.float8_e4m3fn),
        "conjugate": torch.randn(5, dtype=torch.complex64).conj(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "grad": torch.randn(3, requires_grad=True),
    }


def torch_kinds() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kinds that are experimental in torch
        return experimental()


def experimental() -> dict[str, Any]:
    coo = torch.sparse_coo_tensor(torch.tensor([[0, 1], [2, 0]]), torch.tensor([3.0, 4.0]), (2, 3))
    return {
        "coo": coo,
        "csr": torch.eye(4).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.randn(10), 0.1, 3, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)]),
        "storage": torch.arange(4).untyped_storage(),
        "buffer": torch.nn.Buffer(torch.randn(3)),
    }


def training_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1, "losses": [1.0, 0.5]}


def overwrite(obj: Any) -> None:
    """Change everything in place that can be."""
    if isinstance(obj, np.ndarray):
        obj.view(np.ndarray)[...] = 1
    elif isinstance(obj, torch.UntypedStorage):
        obj.fill_(7)
    elif isinstance(obj, torch.Tensor):
        for part in parts_of(obj):
            part.untyped_storage().fill_(7)
    elif isinstance(obj, dict):
        for value in list(obj.values()):
            overwrite(value)
        obj["later"] = 1
    elif isinstance(obj, list):
        obj.append("later")


def parts_of(tensor: Any) -> list[Any]:
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout == torch.sparse_csr:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor]


def saved_at_once(obj: Any, folder: Path, name: str, **options: Any) -> bytes:
    (folder / "at once").mkdir()
    tensorio.save(obj, folder / "at once" / name, durable=False, **options)
    return (folder / "at once" / name).read_bytes()


CASES: list[tuple[Callable[[], Any], str, dict[str, Any]]] = [
    (numpy_arrays, "x.pt", {}),
    (numpy_arrays, "x.safetensors", {"metadata": {"a": "b"}}),
    (torch_tensors, "x.pt", {}),
    (torch_tensors, "x.pt", {"compact": True, "align": 4096}),
    (torch_tensors, "x.safetensors", {}),
    (torch_kinds, "x.pt", {}),
    (training_state, "x.pt", {}),
]


@pytest.mark.parametrize(("make", "name", "options"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_the_file_is_that_of_a_save_at_that_moment(
    make: Callable[[], Any], name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    obj = make()
    want = saved_at_once(obj, tmp_path, name, **options)
    with tensorio.AsyncSaver() as saver:
        with held_up(saver, tmp_path):
            future = saver.save(obj, tmp_path / name, durable=False, **options)
            overwrite(obj)
        saved = future.result()
    assert (tmp_path / name).read_bytes() == want
    assert saved.nbytes == len(want)
    assert saved.files == (str(tmp_path / name),)


def test_torch_reads_the_state_of_that_moment(tmp_path: Path) -> None:
    state = training_state()
    want = copy.deepcopy(state)
    future = tensorio.save_async(state, tmp_path / "x.pt")
    overwrite(state)
    future.result()
    got = torch.load(tmp_path / "x.pt", weights_only=True)
    assert got["step"] == 1
    assert got["losses"] == [1.0, 0.5]
    assert got["model"].keys() == want["model"].keys()
    for name, tensor in want["model"].items():
        assert torch.equal(got["model"][name], tensor)
    assert torch.equal(got["optimizer"]["state"][0]["exp_avg"], want["optimizer"]["state"][0]["exp_avg"])


def test_arrays_over_a_mapped_file_that_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensorio.save({"x": np.arange(1000)}, path)
    tree = tensorio.load(path)
    with tensorio.AsyncSaver() as saver, held_up(saver, tmp_path):
        future = saver.save(tree, path)
    future.result()
    assert np.array_equal(tensorio.load(path)["x"], np.arange(1000))


@pytest.mark.parametrize("seed", range(20))
def test_random_views_of_one_block(seed: int) -> None:
    """Every payload reads the same in the copy, whatever overlaps, and bytes are copied once."""
    random = np.random.default_rng(seed)
    block = random.integers(0, 256, 200_000, np.uint8)
    payloads = [Payloads(), Payloads()]
    want: list[bytes] = []
    for columns in payloads:
        for _ in range(random.integers(0, 60)):
            start = int(random.integers(0, len(block)))
            part = block[start : start + int(random.choice([0, 1, 7, 100, 5000]))]
            columns.add(part, len(part))
            want.append(part.tobytes())
    made = block[::3]
    payloads[1].add(lambda: iter([made[:10].tobytes(), made[10:].tobytes()]), len(made))
    want.append(made.tobytes())
    reached = np.zeros(len(block), bool)
    for columns in payloads:
        for address, size in zip(columns.addresses, columns.sizes, strict=True):
            if address:
                start = address - block.ctypes.data
                reached[start : start + size] = True
    snapshot = Snapshot(payloads)
    runs = int(np.count_nonzero(np.diff(reached.astype("i1"), prepend=0) == 1))
    assert snapshot.nbytes <= reached.sum() + len(made) + 128 * (runs + 1)
    buffer = Buffers().lend(snapshot.nbytes)
    assert buffer is not None
    snapshot.take(buffer)
    block[:] = 0
    assert [b"".join(columns.pieces(i)) for columns in payloads for i in range(len(columns))] == want


def test_a_maker_that_yields_other_bytes_than_planned() -> None:
    for made in (b"abc", b"abcde"):
        payloads = Payloads()
        payloads.add(lambda made=made: iter([made]), 4)
        snapshot = Snapshot([payloads])
        buffer = Buffers().lend(snapshot.nbytes)
        assert buffer is not None
        with pytest.raises(ValueError, match="4 that were planned"):
            snapshot.take(buffer)


def test_copy_runs_looks_at_its_columns() -> None:
    from array import array

    one, two = array("q", [0]), array("q", [0, 0])
    for columns, first, end in [((one, one, two), 0, 1), ((one, one, one), 0, 2), ((one, one, one), 1, 0)]:
        with pytest.raises(ValueError, match="columns of one length"):
            _host.copy_runs(*columns, first, end)


@pytest.mark.parametrize("options", [{}, {"max_shard_size": 5000}, {"align": 64, "metadata": {"k": "v"}}], ids=repr)
@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=LINUX)])
def test_digests_are_of_the_snapshot_and_made_in_the_background(
    processes: bool, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by: list[int] = []

    def noting(*arguments: Any) -> str:
        by.append(threading.get_ident())
        return digest_note(*arguments)

    digest_note = _digests.digest_note
    monkeypatch.setattr(_digests, "digest_note", noting)
    tensors = {f"w{i}": np.full(1000, i, "f4")[:: 1 + i % 2] for i in range(4)}
    was = {name: array.tobytes() for name, array in tensors.items()}
    (tmp_path / "at once").mkdir()
    tensorio.save(tensors, tmp_path / "at once" / "x.safetensors", digests=True, **options)
    by.clear()
    with tensorio.AsyncSaver(processes=processes) as saver:
        with held_up(saver, tmp_path):
            saver.save(tensors, tmp_path / "x.safetensors", digests=True, **options)
            assert by == []
            for array in tensors.values():
                array[:] = -1
        saver.wait()
    assert threading.get_ident() not in by
    for path in (tmp_path / "at once").iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()
    for path in tmp_path.glob("x*.safetensors"):
        with safetensors.safe_open(path, "np") as file:
            note = file.metadata()["tensorio.sha256"]
            assert {line.split("  ")[1] for line in note.splitlines()} == set(file.keys())
        for line in note.splitlines():
            digest, name = line.split("  ")
            assert hashlib.sha256(was[name]).hexdigest() == digest
