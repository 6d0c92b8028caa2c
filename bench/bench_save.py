"""Save tensors: many small ones, where objects cost; few large ones, where bytes cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import peers
import tensorio
from inputs import Checkpoints, size_of
from race import Entry, Race

suffixes = pytest.mark.parametrize("suffix", [".safetensors", ".pt"])


def _saving(path: Path, save: Callable[[Path], object]) -> Callable[[], Path]:
    """What is timed: a save to a path that is not there yet; returns the path."""

    def run() -> Path:
        save(path)
        return path

    return run


def _fresh(folder: Path) -> Callable[[], None]:
    """Remove what was saved, so that each save makes a new file and none is written to disk meanwhile."""

    def remove() -> None:
        for path in folder.glob("target*"):
            path.unlink()

    return remove


@suffixes
@pytest.mark.parametrize("kind", ["NumPy", "torch"])
def test_many(race: Race, many: Checkpoints, target: Path, kind: str, suffix: str) -> None:
    if kind == "torch":
        pytest.importorskip("torch")
    obj = many.arrays if kind == "NumPy" else many.tensors
    path, other = target.with_suffix(suffix), target.with_name(f"target-peer{suffix}")
    if suffix == ".pt":
        goal = 1 / 20 if kind == "NumPy" else 1 / 4
        torch_save = _saving(other, lambda file: peers.torch_save(many.tensors, file))
        others = [Entry("torch.save", torch_save, goal, needs="torch")]
    else:
        goal = 1 / 5 if kind == "NumPy" else 1 / 4
        save_torch = _saving(other, lambda file: peers.safetensors_torch_save(many.tensors, file))
        others = [Entry("safetensors.torch.save_file", save_torch, goal, needs="safetensors")]
        if kind == "NumPy":
            save_numpy = _saving(other, lambda file: peers.safetensors_numpy_save(many.arrays, file))
            savez = _saving(target.with_name("target.npz"), lambda file: peers.numpy_savez(many.arrays, file))
            others += [
                Entry("safetensors.numpy.save_file", save_numpy, needs="safetensors"),
                Entry("numpy.savez", savez, check=lambda file: many.check(np.load(file))),
            ]
    race(
        f"save {len(many.arrays):,} {kind} tensors, {suffix}",
        Entry("save(durable=False)", _saving(path, lambda file: tensorio.save(obj, file, durable=False))),
        others,
        check=many.check_file,
        before=_fresh(path.parent),
        rounds=8,
    )


@suffixes
def test_big(race: Race, big: Checkpoints, target: Path, suffix: str) -> None:
    path = target.with_suffix(suffix)
    other = target.with_name(f"target-peer{suffix}")
    arrays = list(big.arrays.values())

    def check_raw(file: Path) -> None:
        assert np.array_equal(np.memmap(file, np.float32, "r"), np.concatenate([a.reshape(-1) for a in arrays]))

    plain = _saving(other, lambda file: peers.write(arrays, file))
    reserved = _saving(other, lambda file: peers.write(arrays, file, preallocate=True))
    others = [
        Entry("write(2)", plain, 1.1, "wall", check=check_raw),
        Entry("posix_fallocate(3), write(2)", reserved, None, "wall", check=check_raw),
    ]
    if suffix == ".pt":
        torch_save = _saving(other, lambda file: peers.torch_save(big.tensors, file))
        others.append(Entry("torch.save", torch_save, None, "wall", "torch"))
    else:
        save_torch = _saving(other, lambda file: peers.safetensors_torch_save(big.tensors, file))
        others.append(Entry("safetensors.torch.save_file", save_torch, None, "wall", "safetensors"))
    race(
        f"save {size_of(big.nbytes)}, {suffix}",
        Entry("save(durable=False)", _saving(path, lambda file: tensorio.save(big.arrays, file, durable=False))),
        others,
        check=big.check_file,
        before=_fresh(path.parent),
        rounds=7,
        nbytes=big.nbytes,
    )


def test_big_numpy_file(race: Race, big: Checkpoints, target: Path) -> None:
    """The same bytes as one array: no checksum on either side."""
    path, npy = target.with_suffix(".safetensors"), target.with_name("target-peer.npy")
    array = np.concatenate([a.reshape(-1) for a in big.arrays.values()])

    def check(file: Path) -> None:
        assert np.array_equal(tensorio.load(file)["a"] if file == path else np.load(file), array)

    race(
        f"save {size_of(big.nbytes)} as one array",
        Entry(
            "save(durable=False), .safetensors",
            _saving(path, lambda file: tensorio.save({"a": array}, file, durable=False)),
        ),
        [Entry("numpy.save", _saving(npy, lambda file: np.save(file, array)), None, "wall")],
        check=check,
        before=_fresh(path.parent),
        rounds=5,
        nbytes=big.nbytes,
    )


def test_big_durable(race: Race, big: Checkpoints, target: Path) -> None:
    """On the disk when it returns: what is measured is the disk."""
    path, other = target.with_suffix(".safetensors"), target.with_name("target-peer")
    arrays = list(big.arrays.values())
    race(
        f"save {size_of(big.nbytes)}, .safetensors, durable",
        Entry("save", _saving(path, lambda file: tensorio.save(big.arrays, file)), check=big.check_file),
        [
            Entry(
                "write, fsync, rename, fsync",
                _saving(other, lambda file: peers.write(arrays, file, sync=True)),
                1.1,
                "wall",
            )
        ],
        before=_fresh(path.parent),
        rounds=3,
        nbytes=big.nbytes,
    )
