"""Deltas that are encrypted, and bases that are: all of a chain, or none of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="needs the extra crypt")

import tensorio
from tensorio import ChecksumError, DecryptionError, UnsupportedError

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
OLD = {"a": np.arange(100, dtype="f4"), "b": np.ones(5000)}
NEW = {**OLD, "b": np.zeros(5000), "c": np.arange(3)}


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """A folder with a whole file, a delta of it, and a delta of that."""
    path = tmp_path / "plain"
    path.mkdir()
    tensorio.save(OLD, path / "0.safetensors")
    tensorio.save({**OLD, "c": np.arange(3)}, path / "1.safetensors", base=path / "0.safetensors")
    tensorio.save(NEW, path / "2.safetensors", base=path / "1.safetensors")
    return path


READS: dict[str, Callable[..., Any]] = {"load": tensorio.load, "open": lambda *a, **o: dict(tensorio.open(*a, **o))}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("options", [{}, {"mmap": False}, {"writable": True}, {"verify": True}], ids=repr)
def test_chain_of_encrypted_files_is_read_with_its_key(
    read: str, options: dict[str, Any], chain: Path, tmp_path: Path
) -> None:
    tensorio.encrypt(chain, tmp_path / "e", key=KEY, chunk_size=4096)
    got = READS[read](tmp_path / "e" / "2.safetensors", key=KEY, **options)
    assert sorted(got) == sorted(NEW)
    assert all(got[name].tobytes() == array.tobytes() for name, array in NEW.items())
    assert tensorio.verify(tmp_path / "e" / "2.safetensors", key=KEY, require=True).ok


def test_opening_a_chain_decrypts_few_chunks_of_its_bases(tmp_path: Path) -> None:
    big = {"a": np.zeros(1 << 20), "b": np.zeros(3)}
    tensorio.save(big, tmp_path / "0.safetensors")
    tensorio.save({**big, "b": np.ones(3)}, tmp_path / "1.safetensors", base=tmp_path / "0.safetensors")
    for i in range(2):
        tensorio.encrypt(tmp_path / f"{i}.safetensors", tmp_path / f"{i}.safetensors", key=KEY, chunk_size=4096)
    with tensorio.open(tmp_path / "1.safetensors", key=KEY) as checkpoint:
        base = checkpoint._opened.storages[1]
        assert 0 < sum(base._here) <= 8 < base.chunks.count


@pytest.mark.parametrize("read", READS)
def test_chain_that_is_not_encrypted_with_one_key_is_refused(read: str, chain: Path, tmp_path: Path) -> None:
    tensorio.encrypt(chain, tmp_path / "e", key=KEY)
    delta = tmp_path / "e" / "2.safetensors"
    with pytest.raises(DecryptionError, match="expected a key"):
        READS[read](delta)
    tensorio.encrypt(chain / "0.safetensors", tmp_path / "e" / "0.safetensors", key=OTHER)
    with pytest.raises(DecryptionError, match="wrong key"):
        READS[read](delta, key=KEY)
    shutil.copy(chain / "0.safetensors", tmp_path / "e")
    with pytest.raises(DecryptionError, match=r"its delta is encrypted, but '0\.safetensors' is not") as caught:
        READS[read](delta, key=KEY)
    assert caught.value.path == str(tmp_path / "e" / "0.safetensors")


@pytest.mark.parametrize("read", READS)
def test_base_that_was_encrypted_since_is_named_as_such(read: str, chain: Path) -> None:
    tensorio.encrypt(chain / "0.safetensors", chain / "0.safetensors", key=KEY)
    with pytest.raises(DecryptionError, match="the file is encrypted: expected a key") as caught:
        READS[read](chain / "2.safetensors")
    assert caught.value.path == str(chain / "0.safetensors")


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("key", [None, KEY], ids=["without key", "with key"])
def test_single_tensors_of_a_delta_are_not_encrypted(
    read: str, key: bytes | None, chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delta = chain / "2.safetensors"
    with pytest.raises(UnsupportedError, match="convert it to a whole file first"):
        tensorio.encrypt(delta, chain / "x.safetensors", key=KEY, tensors="b")
    monkeypatch.setattr("tensorio.encryption._files.DELTA_KEY", "")
    tensorio.encrypt(delta, delta, key=KEY, tensors="b")  # as another program may do
    with pytest.raises(UnsupportedError, match="single tensors of a delta, or of its base, can't be encrypted"):
        READS[read](delta, key=key)


def test_single_tensors_of_a_base_are_not_encrypted(chain: Path) -> None:
    tensorio.encrypt(chain / "0.safetensors", chain / "0.safetensors", key=KEY, tensors="a")
    with pytest.raises(UnsupportedError, match="single tensors of a delta, or of its base, can't be encrypted"):
        tensorio.open(chain / "2.safetensors")


@pytest.mark.parametrize("tensors", [None, "a"], ids=["file", "tensors"])
def test_what_is_encrypted_is_no_base_for_a_save(tensors: str | None, chain: Path) -> None:
    before = sorted(chain.iterdir())
    base = chain / "0.safetensors"
    tensorio.encrypt(base, base, key=KEY, tensors=tensors)
    with pytest.raises(UnsupportedError, match=r"base= is one \.safetensors file, of which nothing is encrypted"):
        tensorio.save(NEW, chain / "x.safetensors", base=base)
    assert sorted(chain.iterdir()) == before


def test_changed_base_is_told_from_damage(chain: Path, tmp_path: Path) -> None:
    tensorio.encrypt(chain, tmp_path / "e", key=KEY)
    other = tmp_path / "other.safetensors"
    tensorio.save({**OLD, "a": OLD["a"] + 1}, other)
    tensorio.encrypt(other, tmp_path / "e" / "0.safetensors", key=KEY)
    with pytest.raises(ChecksumError, match="another file than when it was saved"):
        tensorio.load(tmp_path / "e" / "2.safetensors", key=KEY)
