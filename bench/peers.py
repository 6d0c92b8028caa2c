"""The calls of other packages that ours are compared with. Each imports its package when first called."""

from __future__ import annotations

import mmap
import os
import subprocess
import zipfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

READ = 8 << 20  # bytes per pread(2)
HUGE = 2 << 20


def safetensors_numpy(path: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return load_file(path)


def safetensors_torch(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(path)


def safetensors_names(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path, "numpy") as f:
        return list(f.keys())


def safetensors_one_by_one(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(path, "numpy") as f:
        return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118  (not a mapping)


def torch_load(path: Path, mapped: bool = False) -> Any:
    import torch

    return torch.load(path, weights_only=True, mmap=mapped)


def safetensors_numpy_save(tensors: dict[str, Any], path: Path) -> None:
    from safetensors.numpy import save_file

    save_file(tensors, path)


def safetensors_torch_save(tensors: dict[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path)


def torch_save(tensors: Mapping[str, Any], path: Path) -> None:
    import torch

    torch.save(tensors, path)


def numpy_savez(arrays: Mapping[str, Any], path: Path) -> None:
    with path.open("wb") as f:  # given a name, it would add its own suffix
        np.savez(f, allow_pickle=False, **arrays)


def write(buffers: Iterable[Any], path: Path, preallocate: bool = False, sync: bool = False) -> None:
    """Plain write(2) into a new file, a call per buffer; with `sync`, renamed, and file and folder synced."""
    views = [memoryview(b).cast("B") for b in buffers]
    written = path.with_name(f"{path.name}.new") if sync else path
    fd = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        if preallocate:
            os.posix_fallocate(fd, 0, sum(map(len, views)))
        for view in views:
            at = 0
            while at < len(view):
                at += os.write(fd, view[at:])
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)
    if sync:
        written.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def pread(path: Path) -> memoryview:
    """Read a file into a fresh mapping of huge pages, each core an equal part of it."""
    nbytes = path.stat().st_size
    block = mmap.mmap(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    skip = -np.frombuffer(block, np.uint8).ctypes.data % HUGE
    data = memoryview(block)[skip : skip + nbytes]
    threads = os.cpu_count() or 1
    part = -(-nbytes // threads // READ) * READ
    fd = os.open(path, os.O_RDONLY)

    def read(start: int) -> None:
        at, end = start, min(start + part, nbytes)
        while at < end:
            at += os.preadv(fd, [data[at : min(at + READ, end)]], at)

    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, range(0, nbytes, part)))
    finally:
        os.close(fd)
    return data


def copy(source: Path, target: Path, *options: str) -> None:
    subprocess.run(["cp", *options, source, target], check=True)


def testzip(path: Path) -> str | None:
    """Recompute the CRCs of an archive with the standard library; the first bad record, or None."""
    with zipfile.ZipFile(path) as archive:
        return archive.testzip()


def copy_in_threads(arrays: list[Any], target: Any, pool: ThreadPoolExecutor) -> None:
    """All bytes to one array, a piece at a time."""
    jobs, at = [], 0
    for array in arrays:
        flat = array.reshape(-1).view(np.uint8)
        for start in range(0, len(flat), READ):
            piece = flat[start : start + READ]
            jobs.append((target[at + start : at + start + len(piece)], piece))
        at += len(flat)
    list(pool.map(lambda job: np.copyto(*job), jobs))


def torch_async_save(tensors: dict[str, Any], folder: Path) -> Any:
    """The future of a save by one process."""
    from torch.distributed.checkpoint import async_save

    return async_save(tensors, checkpoint_id=folder, no_dist=True)
