"""Tensors into the caller's buffers: what fits, what does not, and the same bytes from every kind of storage."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import tensorio
from tensorio.checkpoint import _into
from tensorio.storage import reading

NAMES = [n for n in cases.CASES if not n.startswith("torch_package")]


def empty_like(array: Any) -> Any:
    """An array of the same type, full of something else."""
    out = np.empty(array.shape, array.dtype)
    out.reshape(-1).view(np.uint8)[...] = 0xA5
    return out


@pytest.mark.parametrize("options", [{}, {"mmap": False}, {"writable": True}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_the_tensors(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    case = cases.CASES[name]()
    path = tmp_path / "x"
    path.write_bytes(case.data)
    for source in (path, case.data):
        with tensorio.open(source, **options) as checkpoint:
            out = {fqn: empty_like(array) for fqn, array in checkpoint.items()}
            checkpoint.read_into(out)
            assert {k: v.tobytes() for k, v in out.items()} == {k: v.tobytes() for k, v in checkpoint.items()}


def many(tmp_path: Path) -> Path:
    """Large ones, many small ones, empty ones, and gaps between those that are asked for."""
    random = np.random.default_rng(0)
    tensors: dict[str, Any] = {f"small.{i}": random.integers(0, 256, 100 + i, "u1") for i in range(1200)}
    tensors["large"] = random.integers(0, 256, 5_000_003, "u1")
    tensors["empty"] = np.empty((3, 0), "f4")
    tensors["scalar"] = np.array(3.5)
    path = tmp_path / "many.safetensors"
    tensorio.save(tensors, path, durable=False)
    return path


@pytest.mark.parametrize("every", [1, 3, 100])
@pytest.mark.parametrize("threads", [None, 1, 4])
def test_pieces_and_neighbours(
    every: int, threads: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_into, "READ_PIECE", 100_000)
    with tensorio.open(many(tmp_path)) as checkpoint:
        names = list(checkpoint)[::every]
        out = {fqn: empty_like(checkpoint[fqn]) for fqn in names}
        seen: list[tuple[int, int]] = []
        checkpoint.read_into(out, threads=threads, progress=lambda done, total: seen.append((done, total)))
        for fqn in names:
            assert out[fqn].tobytes() == checkpoint[fqn].tobytes(), fqn
        total = sum(a.nbytes for a in out.values())
        assert seen[-1] == (total, total)
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_small_neighbours_share_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = reading.read_parts

    def read_parts(fd: int, parts: Any) -> None:
        calls.append(len(parts))
        real(fd, parts)

    monkeypatch.setattr("tensorio.storage.files.read_parts", read_parts)
    with tensorio.open(many(tmp_path)) as checkpoint:
        out = {fqn: empty_like(checkpoint[fqn]) for fqn in checkpoint if fqn.startswith("small")}
        checkpoint.read_into(out)
    assert sum(calls) == 1200
    assert len(calls) <= 4


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", lambda fd, out, at: _one_by_one(fd, out, at))
    real = os.preadv

    with tensorio.open(many(tmp_path)) as checkpoint:
        out = {fqn: empty_like(array) for fqn, array in checkpoint.items()}
        checkpoint.read_into(out)
        assert all(out[fqn].tobytes() == checkpoint[fqn].tobytes() for fqn in out)
    assert real is os.preadv


def _one_by_one(fd: int, out: Any, at: int) -> int:
    """As a system that gives a hundred bytes at a time."""
    data = os.pread(fd, min(100, len(out[0])), at)
    out[0][: len(data)] = data
    return len(data)


STRIDES: dict[str, Any] = {
    "fortran": lambda: np.zeros((64, 48), "f4", order="F"),
    "every_other": lambda: np.zeros((64, 96), "f4")[:, ::2],
    "backwards": lambda: np.zeros((64, 48), "f4")[::-1],
    "columns_of_a_larger": lambda: np.zeros((64, 500), "f4")[:, 100:148],
    "rows_of_a_larger": lambda: np.zeros((500, 48), "f4")[7:71],
}


@pytest.mark.parametrize("kind", STRIDES)
def test_target_of_any_strides(kind: str, tmp_path: Path) -> None:
    want = np.random.default_rng(1).random((64, 48)).astype("f4")
    path = tmp_path / "x.safetensors"
    tensorio.save({"x": want}, path, durable=False)
    out = STRIDES[kind]()
    with tensorio.open(path) as checkpoint:
        checkpoint.read_into({"x": out})
    assert np.array_equal(out, want)


@pytest.mark.parametrize(
    "make", [bytearray, lambda n: np.zeros(n, "u1").data, lambda n: memoryview(bytearray(n + 7))[7:]]
)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_target_that_is_a_buffer_gets_the_bytes(make: Any, suffix: str, tmp_path: Path) -> None:
    want = np.arange(12, dtype="i8").reshape(3, 4)
    path = tmp_path / f"x{suffix}"
    tensorio.save({"x": want, "t": want.T}, path, durable=False)
    with tensorio.open(path) as checkpoint:
        out = {fqn: make(checkpoint[fqn].nbytes) for fqn in checkpoint}
        checkpoint.read_into(out)
    assert {k: bytes(v) for k, v in out.items()} == {"x": want.tobytes(), "t": want.T.tobytes()}


def test_torch_tensors_are_targets_by_their_arrays(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    want = np.random.default_rng(2).random((5, 6)).astype("f4")
    path = tmp_path / "x.safetensors"
    tensorio.save({"x": want}, path, durable=False)
    out = torch.zeros(5, 6)
    with tensorio.open(path) as checkpoint:
        checkpoint.read_into({"x": out.numpy()})
    assert np.array_equal(out.numpy(), want)


@pytest.mark.parametrize(("target", "match"), [
    (np.zeros((3, 2), "f4"), r"expected \(2, 3\) float32, found \(3, 2\) float32"),
    (np.zeros((2, 3), "f8"), "found .* float64"),
    (np.zeros((2, 3), ">f4"), "expected"),
    (np.zeros(6, "f4"), "expected"),
    (bytearray(23), "expected 24 contiguous bytes, found 23"),
    (bytes(24), "read-only"),
    (np.broadcast_to(np.zeros(3, "f4"), (2, 3)), "read-only"),
    (memoryview(bytearray(48))[::2], "contiguous"),
])  # fmt: skip
def test_target_that_does_not_fit_is_refused_before_anything_is_written(
    target: Any, match: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    tensorio.save({"a": np.ones(5), "x": np.ones((2, 3), "f4")}, path, durable=False)
    first = np.zeros(5)
    with tensorio.open(path) as checkpoint:
        with pytest.raises(tensorio.TensorMismatchError, match=match) as caught:
            checkpoint.read_into({"a": first, "x": target})
        assert caught.value.record == "x"
        with pytest.raises(tensorio.TensorNotFoundError):
            checkpoint.read_into({"a": first, "y": np.zeros(5)})
    assert not first.any()


def test_target_that_is_no_buffer_is_a_type_error(tmp_path: Path) -> None:
    with tensorio.open(cases.CASES["safetensors_small"]().data) as checkpoint:
        with pytest.raises(TypeError):
            checkpoint.read_into({next(iter(checkpoint)): [1, 2, 3]})


def test_file_that_shrank_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensorio.save({"x": np.ones(1 << 20, "u1")}, path, durable=False)
    with tensorio.open(path) as checkpoint:
        out = np.zeros(1 << 20, "u1")
        os.truncate(path, 4096)
        with pytest.raises(tensorio.FormatError) as caught:
            checkpoint.read_into({"x": out})
        assert caught.value.path == str(path)


def test_closed_checkpoint_reads_nothing() -> None:
    checkpoint = tensorio.open(cases.CASES["safetensors_small"]().data)
    out = {fqn: empty_like(array) for fqn, array in checkpoint.items()}
    checkpoint.close()
    with pytest.raises(ValueError, match="closed"):
        checkpoint.read_into(out)


@pytest.mark.parametrize("error", [RuntimeError, StopIteration])
def test_error_of_progress_ends_it(error: type[Exception], tmp_path: Path) -> None:
    with tensorio.open(many(tmp_path)) as checkpoint:
        out = {fqn: empty_like(array) for fqn, array in checkpoint.items()}

        def progress(done: int, total: int) -> None:
            raise error("enough")

        with pytest.raises(error, match="enough"):
            checkpoint.read_into(out, progress=progress, threads=4)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="this system has no signals for threads")
def test_interrupt_leaves_no_thread_that_writes_on() -> None:
    begun, done = threading.Event(), threading.Event()

    def work(job: int) -> None:
        if threading.current_thread() is threading.main_thread():
            assert begun.wait(60)
            return
        begun.set()
        time.sleep(0.1)  # for the other to wait for this one
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.1)
        done.set()

    with pytest.raises(KeyboardInterrupt):
        reading.in_threads(work, range(2), 2)
    assert done.is_set()
