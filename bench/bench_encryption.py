"""Encrypt a file, decrypt it, load it with its key; beside AES-256-GCM itself over the same bytes, in one thread."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import peers
import tensorio
from inputs import Checkpoints, size_of
from race import Entry, Race

pytest.importorskip("cryptography", reason="needs the extra crypt")

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY = bytes(range(32))
CHUNK = 1 << 20
# CPU time beside the cipher's own: reading what is encrypted, and writing what comes of it. For a load by all cores,
# which share the memory's speed, the clock on the wall: the cipher by one core, and new memory.
ENCRYPT, DECRYPT, LOAD = 1.6, 1.6, 1.25


@pytest.fixture(scope="module")
def encrypted(big: Checkpoints, work: Path) -> Iterator[Path]:
    path = work / "big.enc"
    tensorio.encrypt(big.safetensors, path, key=KEY)
    yield path
    path.unlink()


def sealed(path: Path, out: Path | None = None) -> int:
    """Encrypt the bytes of a file by one thread, and write them where that is asked for; their number."""
    aead, data, total = AESGCM(KEY), np.memmap(path, np.uint8, "r"), 0
    with open(out or os.devnull, "wb", buffering=0) as file:
        for i, at in enumerate(range(0, len(data), CHUNK)):
            piece = aead.encrypt(i.to_bytes(12, "big"), memoryview(data[at : at + CHUNK]), None)
            total += len(piece)
            if out is not None:
                file.write(piece)
    return total


def test_encrypt(race: Race, big: Checkpoints, target: Path) -> None:
    source, path, other = big.safetensors, target.with_suffix(".enc"), target.with_suffix(".other")

    def ours() -> Any:
        return tensorio.encrypt(source, path, key=KEY, durable=False)

    def check(saved: tensorio.Saved) -> None:
        assert saved.nbytes > big.nbytes
        assert tensorio.load(path, key=KEY).keys() == big.arrays.keys()

    def remove() -> None:
        path.unlink(missing_ok=True)
        other.unlink(missing_ok=True)

    def some(total: int) -> None:
        assert total > big.nbytes

    race(
        f"encrypt {size_of(big.nbytes)}",
        Entry("encrypt(durable=False)", ours, check=check),
        [
            Entry("AES-GCM alone, one thread", lambda: sealed(source), check=some),
            Entry("AES-GCM and write(2), one thread", lambda: sealed(source, other), ENCRYPT, check=some),
            Entry("cp --reflink=never", lambda: peers.copy(source, other, "--reflink=never"), check=lambda _: None),
        ],
        before=remove,
        rounds=5,
        nbytes=big.nbytes,
    )
    remove()


def test_decrypt(race: Race, big: Checkpoints, encrypted: Path, target: Path) -> None:
    path, other = target.with_suffix(".safetensors"), target.with_suffix(".other")

    def ours() -> Path:
        tensorio.decrypt(encrypted, path, key=KEY, durable=False)
        return path

    def remove() -> None:
        path.unlink(missing_ok=True)
        other.unlink(missing_ok=True)

    race(
        f"decrypt {size_of(big.nbytes)}",
        Entry("decrypt(durable=False)", ours, check=big.check_file),
        [Entry("AES-GCM and write(2), one thread", lambda: sealed(encrypted, other), DECRYPT, check=lambda _: None)],
        before=remove,
        rounds=5,
        nbytes=big.nbytes,
    )
    remove()


def test_load(race: Race, big: Checkpoints, encrypted: Path) -> None:
    def check(arrays: Any) -> None:
        assert arrays.keys() == big.arrays.keys()
        assert all(np.array_equal(arrays[name], array) for name, array in big.arrays.items())

    race(
        f"load {size_of(big.nbytes)}",
        Entry("load(key=)", lambda: tensorio.load(encrypted, key=KEY), check=check),
        [
            Entry("AES-GCM alone, one thread", lambda: sealed(encrypted), LOAD, "wall", check=lambda _: None),
            Entry("load(mmap=False), not encrypted", lambda: tensorio.load(big.safetensors, mmap=False), check=check),
        ],
        rounds=5,
        nbytes=big.nbytes,
    )


def test_one_tensor(race: Race, big: Checkpoints, encrypted: Path) -> None:
    """What is asked for is what is decrypted."""
    name = list(big.arrays)[len(big.arrays) // 2]

    def ours() -> Any:
        with tensorio.open(encrypted, key=KEY) as checkpoint:
            return checkpoint[name]

    race(
        f"one tensor of {size_of(big.nbytes)}",
        Entry("open(key=)[name]", ours, check=lambda array: np.testing.assert_array_equal(array, big.arrays[name])),
        [Entry("load(key=)", lambda: tensorio.load(encrypted, key=KEY), 0.2, check=lambda _: None)],
        rounds=5,
    )
