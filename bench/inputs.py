"""The files and arrays that the benches run on, made once per run, on a disk, and removed behind it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import tensorio
from cases import state_dict

Array = np.ndarray[Any, Any]

MANY_SHAPE = (4, 8)
BIG_TENSORS = 64
STAMP = 8 << 20  # bytes of random data, repeated


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes
    ----------
    tensors : int
        Small tensors in a file of many.
    big, crc : int
        Bytes of a file of few large tensors, and of a large buffer.
    hole : int
        Bytes of a file that is nearly all hole.
    workers : int
        Processes that share one file.
    """

    tensors: int
    big: int
    crc: int
    hole: int
    workers: int


FULL = Sizes(tensors=10_000, big=1 << 30, crc=256 << 20, hole=100 << 30, workers=4)
QUICK = Sizes(tensors=100, big=8 << 20, crc=1 << 20, hole=1 << 30, workers=2)


class Checkpoints:
    """The same tensors as arrays, as torch tensors, as ``.safetensors`` and as ``.pt``, each made when asked for."""

    def __init__(self, folder: Path, name: str, arrays: Mapping[str, Array]) -> None:
        self.folder = folder
        self.name = name
        self.arrays = dict(arrays)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays.values())

    @cached_property
    def tensors(self) -> dict[str, Any]:
        """torch tensors over the arrays; copies: no."""
        import torch

        return {name: torch.from_numpy(a) for name, a in self.arrays.items()}

    @cached_property
    def safetensors(self) -> Path:
        """As the safetensors package writes it, if it is here."""
        path = self.folder / f"{self.name}.safetensors"
        if find_spec("safetensors") is not None:
            from safetensors.numpy import save_file

            save_file(self.arrays, path)
            _sync(path)
        else:
            tensorio.save(self.arrays, path)
        return path

    @cached_property
    def pt(self) -> Path:
        """As torch writes it, if it is here."""
        path = self.folder / f"{self.name}.pt"
        if find_spec("torch") is not None:
            import torch

            torch.save(self.tensors, path)
            _sync(path)
        else:
            tensorio.save(self.arrays, path)
        return path

    def path(self, suffix: str) -> Path:
        return self.pt if suffix == ".pt" else self.safetensors

    def check(self, result: Mapping[str, Any]) -> None:
        """Raise unless these are the tensors, all of them, bit by bit."""
        assert result.keys() == self.arrays.keys()
        for name, a in self.arrays.items():
            got = np.asarray(result[name])
            assert got.dtype == a.dtype, name
            assert got.shape == a.shape, name
            assert np.array_equal(got, a), name

    def check_file(self, path: Path) -> None:
        """Raise unless a file holds the tensors."""
        self.check(tensorio.load(path))


def many(folder: Path, sizes: Sizes) -> Checkpoints:
    """A file of many small tensors: what it costs is the header, and an object each."""
    return Checkpoints(folder, "many", state_dict(sizes.tensors, MANY_SHAPE))


def big(folder: Path, sizes: Sizes) -> Checkpoints:
    """A file of few large tensors: what it costs is moving bytes."""
    return few(folder, "big", sizes.big)


def few(folder: Path, name: str, nbytes: int) -> Checkpoints:
    """Tensors of `nbytes` in all, no two of them equal."""
    each = nbytes // BIG_TENSORS // 4
    stamp = np.random.default_rng(0).random(min(STAMP, 4 * each) // 4, np.float32)
    arrays = {}
    for i in range(BIG_TENSORS):
        flat = np.empty(each, np.float32)
        for at in range(0, each, len(stamp)):
            flat[at : at + len(stamp)] = stamp[: each - at]
        flat[::1024] += i  # every page of every tensor is its own
        arrays[f"layers.{i}.weight"] = flat.reshape(-1, 128)
    return Checkpoints(folder, name, arrays)


def hole(path: Path, tensors: int, nbytes: int) -> None:
    """A safetensors file with a header of `tensors` tensors and a payload that takes no space on disk."""
    import json

    each = nbytes // tensors // 4 * 4
    header = {
        f"layers.{i}.weight": {"dtype": "F32", "shape": [each // 4], "data_offsets": [i * each, (i + 1) * each]}
        for i in range(tensors)
    }
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
        f.truncate(8 + len(raw) + tensors * each)


def size_of(nbytes: int) -> str:
    """Write a number of bytes in a binary unit."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"


def touch(tensors: Mapping[str, Any]) -> int:
    """Read one byte of every page; torch tensors are looked at through NumPy."""
    total = 0
    for tensor in tensors.values():
        flat = np.asarray(tensor).reshape(-1).view(np.uint8)
        total += int(flat[:: mmap.PAGESIZE].sum(dtype=np.int64))
    return total


def _sync(path: Path) -> None:
    """Have the file on disk, so that nothing is written back while something is timed."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def evict(path: Path) -> None:
    """Drop a file from the page cache, and fail if any of it stayed (somebody may have it mapped)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        pages = _resident(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)
    assert pages == 0, f"{pages} pages of {path} stayed in the page cache"


def _resident(fd: int, nbytes: int) -> int:
    """How many pages of a file are in the page cache (mincore(2), which the mmap module lacks)."""
    if nbytes == 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE) as mapping:  # private, so that ctypes may ask for its address
        start = ctypes.c_char.from_buffer(mapping)
        state = (ctypes.c_ubyte * (-(-nbytes // mmap.PAGESIZE)))()
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(nbytes), state)
        del start
    assert not failed, os.strerror(ctypes.get_errno())
    return sum(1 for page in state if page & 1)
