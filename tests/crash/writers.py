"""All that writes checkpoints, in one table: a new writer is a line, and every campaign runs on it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch

import tensorio
import tensorio.safetensors.torch
import tensorio.torch

BASE = "base.safetensors"
STEP = "step-00000001"  # of a CheckpointManager
KEY = bytes(range(32))
SUMS = ".sha256"


class Version(NamedTuple):
    """One of two checkpoints: in memory, and in files for those who convert."""

    arrays: dict[str, Any]
    files: dict[str, Path]  # by suffix

    @property
    def tensors(self) -> dict[str, Any]:
        return {name: torch.from_numpy(array) for name, array in self.arrays.items()}


def versions(folder: Path, nbytes: int = 1 << 20) -> tuple[Version, Version]:
    """Two checkpoints of the same names, of another length, with no byte range in common; and a base of either."""
    old, new = _version(folder, "old", nbytes, 1), _version(folder, "new", nbytes * 5 // 4, 2)
    halves = {name: (old if i % 2 else new).arrays[name] for i, name in enumerate(sorted(old.arrays))}
    safetensors.numpy.save_file(halves, folder / BASE)
    return old, new


def _version(folder: Path, name: str, nbytes: int, seed: int) -> Version:
    rng = np.random.default_rng(seed)
    count = max(64, nbytes // 4 // 512 * 8)
    arrays: dict[str, Any] = {"w": rng.random((count, 64), "f4"), "v": rng.random((16, 64), "f4")}
    arrays |= {f"b{i}": rng.random(100, "f4") for i in range(20)}
    files = {suffix: folder / f"{name}{suffix}" for suffix in (".pt", ".safetensors")}
    torch.save({k: torch.from_numpy(a) for k, a in arrays.items()}, files[".pt"])
    safetensors.numpy.save_file(arrays, files[".safetensors"])
    return Version(arrays, files)


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint, or all of a folder, by the reference tools; sums that are there must be true."""
    for sums in (path.with_name(path.name + SUMS), path / f"checkpoint{SUMS}"):
        for line in sums.read_text().splitlines() if sums.is_file() else ():
            wanted, name = line.split("  ")
            assert hashlib.sha256((sums.parent / name).read_bytes()).hexdigest() == wanted, f"{sums} is not true"
    index = path / "model.safetensors.index.json"
    if index.is_file() and not (path / "model.safetensors").exists():
        held = json.loads(index.read_text())["weight_map"]
        files = {name: read(path / name) for name in set(held.values())}
        return {name: files[file][name] for name, file in held.items()}
    if (path / "model.safetensors").is_file():
        return read(path / "model.safetensors")
    if path.is_dir():
        # What is there beside the checkpoint's own files is read as bytes.
        return {f"{p.name}:{k}": a for p in sorted(path.iterdir()) for k, a in read(p).items()}
    if path.suffix == ".safetensors":
        return {k: _array(t) for k, t in safetensors.torch.load_file(path).items()}
    if path.suffix in (".pt", ".bin"):
        return {k: _array(t) for k, t in torch.load(path, weights_only=True).items()}
    return {"": np.frombuffer(path.read_bytes(), "u1")}


def _read_step(run: Path) -> dict[str, Any]:
    step = run / STEP
    assert json.loads((step / "step.json").read_text())["step"] == 1
    return read(step / "checkpoint.pt")


class Writer(NamedTuple):
    """Writes a version to a path."""

    name: str
    target: str  # file or folder
    write: Callable[[Version, Path], object]
    promises: bool = True  # all or nothing
    durable: bool = True  # and on the disk once it has returned
    read: Callable[[Path], dict[str, Any]] = read  # where the reference tools can't, ours
    beside: str = ""  # the name of what else may be there
    shows: str = ""  # what of the target is there as soon as a checkpoint is, if that is not all of it


def _array(tensor: Any) -> Any:
    return tensor.numpy()


def digest(tensors: dict[str, Any]) -> str:
    """Tell checkpoints apart by names, dtypes, shapes and the SHA-256 of all bytes."""
    rows = [
        f"{name} {array.dtype} {array.shape} {hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()}"
        for name, array in sorted(tensors.items())
    ]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def _shard(version: Version, path: Path) -> None:
    tensorio.shard(version.files[".safetensors"], path, tp=2, rules={"w": 0}, default="replicate", overwrite=True)


def _shards(version: Version, path: Path) -> None:
    tensorio.save(version.arrays, path, max_shard_size=100_000)


def _shards_in_place(version: Version, path: Path) -> None:
    tensorio.save(version.arrays, path / "model.safetensors", max_shard_size=100_000, manifest=True)


def _delta(version: Version, path: Path) -> None:
    base = path.with_name(BASE)
    if not base.exists():
        shutil.copyfile(version.files[".pt"].with_name(BASE), base)
    assert tensorio.save(version.arrays, path, base=base).unchanged


def _step(version: Version, path: Path) -> None:
    with tensorio.CheckpointManager(path) as manager:
        manager.save(1, version.arrays, overwrite=True)


def _save_aside(version: Version, path: Path) -> None:
    with tensorio.AsyncSaver() as saver:
        saver.save(version.arrays, path).result()


WRITERS = {
    writer.name: writer
    for writer in [
        Writer("save .pt", "model.pt", lambda v, path: tensorio.save(v.arrays, path)),
        Writer("save .safetensors", "model.safetensors", lambda v, path: tensorio.save(v.arrays, path)),
        Writer("convert", "model.safetensors", lambda v, path: tensorio.convert(v.files[".pt"], path)),
        Writer("recover", "model.pt", lambda v, path: tensorio.recover(v.files[".pt"], path)),
        Writer("shard", "ranks", _shard),
        Writer("save, several files", "model", _shards),
        Writer("save, several files in place", "model", _shards_in_place),
        Writer("convert, several files", "model",
               lambda v, path: tensorio.convert(v.files[".pt"], path, max_shard_size=100_000)),
        Writer("CheckpointManager", "run", _step, read=_read_step, shows=STEP),
        Writer("save, manifest", "model.safetensors", lambda v, path: tensorio.save(v.arrays, path, manifest=True),
               beside=f"model.safetensors{SUMS}"),
        Writer("save, base", "model.safetensors", _delta, read=tensorio.load, beside=BASE),
        Writer("encrypt", "model.safetensors", lambda v, path: tensorio.encrypt(v.files[".safetensors"], path, key=KEY),
               read=lambda path: tensorio.load(path, key=KEY)),
        Writer("AsyncSaver", "model.safetensors", _save_aside),
        Writer("tensorio.torch.save", "model.pt", lambda v, path: tensorio.torch.save(v.tensors, path), durable=False),
        Writer("tensorio.safetensors", "model.safetensors",
               lambda v, path: tensorio.safetensors.torch.save_file(v.tensors, path), durable=False),
    ]
}  # fmt: skip
# All or nothing as long as the power stays on: the control of the power cuts.
UNSYNCED = {
    writer.name: writer
    for writer in [
        Writer("save durable=False", "model.safetensors",
               lambda v, path: tensorio.save(v.arrays, path, durable=False), durable=False),
        Writer("save durable=False, several files", "model",
               lambda v, path: tensorio.save(v.arrays, path, max_shard_size=100_000, durable=False), durable=False),
    ]
}  # fmt: skip
# For comparison, in the long run.
PEERS = {
    writer.name: writer
    for writer in [
        Writer("torch.save", "model.pt", lambda v, path: torch.save(v.tensors, path), promises=False, durable=False),
        Writer("safetensors save_file", "model.safetensors",
               lambda v, path: safetensors.torch.save_file(v.tensors, path), promises=False, durable=False),
    ]
}  # fmt: skip
