"""Many threads, one file: the same answers, whatever the others do; the same on free-threaded builds."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import hexfile
import tensorio
from tensorio import _core

THREADS = 8
ROUNDS = 30


def together(work: Callable[[int], Any], threads: int = THREADS) -> list[Any]:
    """Run ``work(i)`` in threads that start at one barrier; their results, or the first error."""
    barrier = threading.Barrier(threads)
    results: list[Any] = [None] * threads
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            barrier.wait(30)
            results[i] = work(i)
        except BaseException as error:
            errors.append(error)

    pool = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(threads)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]
    return results


@pytest.fixture(
    params=["safetensors_small", "torch_zip_small", "torch_zip_deflated", "torch_zip_big_endian", "torch_legacy_small",
            "torch_tar_by_hand"]
)  # fmt: skip
def case(request: pytest.FixtureRequest) -> cases.Case:
    return cases.CASES[request.param]()


@pytest.fixture
def path(case: cases.Case, tmp_path: Path) -> Path:
    path = tmp_path / f"m{case.suffix}"
    path.write_bytes(case.data)
    return path


def picture(mapping: Any) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in mapping.items()}


def test_one_file_opened_by_all(case: cases.Case, path: Path) -> None:
    want = picture(case.tensors)

    def work(i: int) -> None:
        for _ in range(ROUNDS):
            with tensorio.open(path, mmap=i % 2 == 0, writable=i % 3 == 0) as checkpoint:
                assert picture(checkpoint) == want
            tensorio.load(path)

    together(work)


def test_one_checkpoint_used_by_all(case: cases.Case, path: Path) -> None:
    """What is made on first use (names, leases, unpacked records) is made once and whole."""
    want = picture(case.tensors)
    for _ in range(ROUNDS):
        with tensorio.open(path) as checkpoint:
            names = list(case.tensors)

            def work(i: int, checkpoint: Any = checkpoint, names: list[str] = names) -> None:
                for name in names[i % len(names) :] + names[: i % len(names)]:
                    assert checkpoint[name].tobytes() == want[name]
                assert list(checkpoint.paths) == names
                assert [info.shape for info in checkpoint.infos.values()] == [a.shape for a in case.tensors.values()]

            together(work)


def test_unpacked_record_is_shared_by_all() -> None:
    """Eight views of one deflated storage are views of one block of memory."""
    case = cases.CASES["torch_zip_deflated"]()
    for _ in range(ROUNDS):
        with tensorio.open(case.data) as checkpoint:

            def address(i: int, checkpoint: Any = checkpoint) -> int:
                return int(checkpoint["a"].ctypes.data)

            addresses = together(address)
            assert len(set(addresses)) == 1


def test_many_files_at_once(tmp_path: Path) -> None:
    for i in range(THREADS):
        (tmp_path / f"{i}.safetensors").write_bytes(cases.safetensors_bytes({"x": np.full(1000, i, "i4")}))

    def work(i: int) -> None:
        for k in range(ROUNDS * 3):
            n = (i + k) % THREADS
            assert tensorio.load(tmp_path / f"{n}.safetensors")["x"].sum() == 1000 * n

    together(work)


def test_close_while_others_read(case: cases.Case, path: Path) -> None:
    """A reader gets the right bytes or hears that the checkpoint is closed; never anything else."""
    want = picture(case.tensors)
    for _ in range(ROUNDS):
        checkpoint = tensorio.open(path)

        def work(i: int, checkpoint: Any = checkpoint) -> int:
            if i == 0:
                checkpoint.close()
                return 0
            done = 0
            try:
                for name in want:
                    assert checkpoint[name].tobytes() == want[name]
                    done += 1
                assert picture(checkpoint) == want
            except ValueError as error:
                assert "closed" in str(error), error  # noqa: PT017
            return done

        together(work)


def test_save_while_others_load(tmp_path: Path) -> None:
    """Each load sees one save's file, whole."""
    path = tmp_path / "m.safetensors"
    tensorio.save({"x": np.zeros(5000), "y": np.zeros(5000)}, path, durable=False)

    def work(i: int) -> None:
        for k in range(ROUNDS):
            if i < 2:
                value = float(i * ROUNDS + k)
                tensorio.save({"x": np.full(5000, value), "y": np.full(5000, value)}, path, durable=False)
            else:
                tree = tensorio.load(path)
                assert len({*tree["x"].tolist(), *tree["y"].tolist()}) == 1

    together(work)
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_one_file_converted_by_all(case: cases.Case, path: Path, tmp_path: Path) -> None:
    """Both ways at once, out of one mapping per thread."""
    want = picture(case.tensors)

    def work(i: int) -> None:
        for k in range(ROUNDS // 5):
            target = tmp_path / f"{i}-{k}{('.safetensors', '.pt')[i % 2]}"
            tensorio.convert(path, target, durable=False)
            with tensorio.open(target) as checkpoint:
                assert picture(checkpoint) == want

    together(work)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("mmap", [True, False])
def test_fork_after_load(case: cases.Case, path: Path, mmap: bool, in_child: Any) -> None:
    """Arrays and checkpoints that were there before a fork serve the child, and the child can open more."""
    want = picture(case.tensors)
    with tensorio.open(path, mmap=mmap) as checkpoint:
        together(lambda i: picture(checkpoint) if i % 2 else tensorio.load(path, mmap=mmap))
        arrays = dict(checkpoint)

        def child() -> bool:
            again = tensorio.open(path, mmap=mmap)
            return picture(arrays) == picture(checkpoint) == picture(again) == want and tensorio.verify(path).ok

        assert in_child(child)
        assert picture(arrays) == want


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_fork_while_others_load(path: Path, in_child: Any) -> None:
    """A child that was forked in the middle of other threads' work can load: no lock stays behind."""
    stop = threading.Event()

    def load_on() -> None:
        while not stop.is_set():
            tensorio.load(path)

    loaders = [threading.Thread(target=load_on, daemon=True) for _ in range(3)]
    for loader in loaders:
        loader.start()
    try:
        for _ in range(10):
            assert in_child(lambda: tensorio.load(path) is not None)
    finally:
        stop.set()
        for loader in loaders:
            loader.join(30)


def test_one_object_saved_by_all(tmp_path: Path) -> None:
    tensors = cases.state_dict(200)

    def work(i: int) -> bytes:
        path = tmp_path / f"{i}.pt"
        tensorio.save(tensors, path, durable=False)
        assert picture(tensorio.load(path)) == picture(tensors)
        return path.read_bytes()[1000:2000]

    together(work)


def test_refusals_are_the_same_in_all() -> None:
    data = hexfile.torch_file(hexfile.pickled(hexfile.name("evil", "one") + b"0" + hexfile.name("evil", "two")))

    def work(i: int) -> set[Any]:
        seen = set()
        for _ in range(ROUNDS):
            with pytest.raises(tensorio.UnsafePickleError) as caught:
                tensorio.load(data)
            seen.add((str(caught.value), caught.value.globals))
        return seen

    assert len(set().union(*together(work))) == 1


def test_checksums_by_all() -> None:
    data = np.random.default_rng(0).bytes(1 << 20)
    want = zlib.crc32(data)
    assert set(together(lambda i: {_core.crc32(data) for _ in range(ROUNDS)} == {want})) == {True}


def test_verify_by_all(path: Path) -> None:
    assert all(together(lambda i: all(tensorio.verify(path).ok for _ in range(10))))
