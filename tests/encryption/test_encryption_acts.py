"""What is done with checkpoints, done with encrypted ones: the same comes of it as of what was encrypted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="needs the extra crypt")
import safetensors.numpy

import tensorio
from tensorio import DecryptionError

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
TENSORS = {"a": np.arange(3000, dtype="f4"), "b": np.ones((8, 2), "i2")}
ADAPTER = {"b": np.zeros((8, 2), "i2"), "lora": np.arange(5000.0)}
TRAINING = {"state_dict": TENSORS, "optimizer": {"m": np.arange(7.0)}, "epoch": 3}
RULES = {"a": 0, "b": "replicate"}

Act = Callable[..., Any]


def same(path: Path, other: Path) -> None:
    """Assert that files, or those of two folders, are the same bytes."""
    names = sorted(os.listdir(other)) if other.is_dir() else [""]
    assert (sorted(os.listdir(path)) if path.is_dir() else [""]) == names
    for name in names:
        assert (path / name).read_bytes() == (other / name).read_bytes()


@pytest.fixture(params=["whole", "tensors"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of files, and beside it one of the same, encrypted."""
    plain = tmp_path / "plain"
    plain.mkdir()
    safetensors.numpy.save_file(TENSORS, plain / "base.safetensors", {"note": "kept"})
    safetensors.numpy.save_file(ADAPTER, plain / "adapter.safetensors")
    tensors = None if request.param == "whole" else ["b", "**"]
    tensorio.encrypt(plain, tmp_path / "e", key=KEY, tensors=tensors, chunk_size=4096)
    return plain


def acts(folder: Path) -> dict[str, Act]:
    base, adapter = folder / "base.safetensors", folder / "adapter.safetensors"
    return {
        "merge": lambda dst, **o: tensorio.merge(base, adapter, dst=dst, **o),
        "strip": lambda dst, **o: tensorio.strip(base, dst, **o),
        "shard": lambda dst, **o: tensorio.shard(base, dst.with_suffix(""), tp=2, rules=RULES, **o),
    }


@pytest.mark.parametrize("act", ["merge", "strip", "shard"])
def test_the_key_makes_them_what_they_were(act: str, files: Path, tmp_path: Path) -> None:
    wanted, got = tmp_path / "wanted.safetensors", tmp_path / "got.safetensors"
    acts(files)[act](wanted)
    acts(tmp_path / "e")[act](got, key=KEY)
    same(got.with_suffix("") if act == "shard" else got, wanted.with_suffix("") if act == "shard" else wanted)


@pytest.mark.parametrize("act", ["merge", "strip", "shard"])
@pytest.mark.parametrize(("key", "match"), [(None, "expected a key"), (OTHER, "wrong key")], ids=["none", "other"])
def test_nothing_is_written_without_the_right_key(
    act: str, key: bytes | None, match: str, files: Path, tmp_path: Path
) -> None:
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DecryptionError, match=match):
        acts(tmp_path / "e")[act](tmp_path / "out.safetensors", key=key)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("act", ["merge", "strip", "shard"])
def test_with_a_key_what_is_not_encrypted_is_refused(act: str, files: Path, tmp_path: Path) -> None:
    with pytest.raises(DecryptionError, match="nothing in the file is encrypted"):
        acts(files)[act](tmp_path / "out.safetensors", key=KEY)


def test_keys_are_had_as_for_open(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text(KEY.hex())
    monkeypatch.setenv("THE_KEY", KEY.hex())
    for key in ("env:THE_KEY", f"file:{tmp_path / 'key'}", lambda key_id: KEY):
        report = tensorio.merge(
            tmp_path / "e" / "base.safetensors", tmp_path / "e" / "adapter.safetensors", dst=tmp_path / "m.pt", key=key
        )
        assert (report.added, report.replaced) == (("lora",), ("b",))


def test_each_merged_file_has_its_own_key(files: Path, tmp_path: Path) -> None:
    keys = {"base": KEY, "adapter": OTHER}
    for name, key in keys.items():
        path = files / f"{name}.safetensors"
        tensorio.encrypt(path, tmp_path / name, key=key, key_id=name)
    tensorio.merge(tmp_path / "base", tmp_path / "adapter", dst=tmp_path / "got.safetensors", key=keys.__getitem__)
    tensorio.merge(files / "base.safetensors", files / "adapter.safetensors", dst=tmp_path / "wanted.safetensors")
    same(tmp_path / "got.safetensors", tmp_path / "wanted.safetensors")


def test_merging_encrypted_and_other_files(files: Path, tmp_path: Path) -> None:
    """With a key all are to be encrypted, as everywhere; whoever knows better opens them."""
    encrypted, plain = tmp_path / "e" / "base.safetensors", files / "adapter.safetensors"
    with pytest.raises(DecryptionError, match=r"key= \(or --key\) is of all that is merged.* open it") as caught:
        tensorio.merge(encrypted, plain, dst=tmp_path / "got.safetensors", key=KEY)
    assert caught.value.path == str(plain)
    with tensorio.open(encrypted, key=KEY) as base:
        tensorio.merge(base, plain, dst=tmp_path / "got.safetensors")
        assert np.array_equal(base["a"], TENSORS["a"])  # it stays open
    tensorio.merge(files / "base.safetensors", plain, dst=tmp_path / "wanted.safetensors")
    same(tmp_path / "got.safetensors", tmp_path / "wanted.safetensors")


def test_no_file_is_decrypted_at_once(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor by a tensor of a few bytes."""
    from tensorio.encryption._storage import DecryptedStorage

    monkeypatch.delattr(DecryptedStorage, "view")
    for act in acts(files):
        acts(tmp_path / "e")[act](tmp_path / f"{act}.safetensors", key=KEY)


def test_strip_takes_the_weights_of_an_encrypted_training_checkpoint(tmp_path: Path) -> None:
    tensorio.save(TRAINING, tmp_path / "t.pt")
    tensorio.encrypt(tmp_path / "t.pt", tmp_path / "e.pt", key=KEY)
    report = tensorio.strip(tmp_path / "e.pt", tmp_path / "got.pt", key=KEY)
    assert (report.entry, report.dropped) == ("state_dict", {"optimizer": 56, "epoch": 0})
    assert tensorio.load(tmp_path / "got.pt")["state_dict"]["a"].tobytes() == TENSORS["a"].tobytes()


def test_files_of_ranks_are_put_together_and_viewed(files: Path, tmp_path: Path) -> None:
    source = files / "base.safetensors"
    tensorio.shard(source, tmp_path / "ranks", tp=2, rules=RULES)
    tensorio.encrypt(tmp_path / "ranks", tmp_path / "ranks.e", key=KEY)
    with pytest.raises(DecryptionError, match="expected a key"):
        tensorio.unshard(tmp_path / "ranks.e", tmp_path / "got.safetensors")
    assert tensorio.unshard(tmp_path / "ranks.e", tmp_path / "got.safetensors", key=KEY) == []
    same(tmp_path / "got.safetensors", source)
    encrypted = tmp_path / "e" / "base.safetensors"
    with tensorio.ranked(encrypted, 1, tp=2, rules=RULES, key=KEY) as view:
        assert np.array_equal(view["a"], TENSORS["a"][1500:])
    with pytest.raises(DecryptionError, match="expected a key"):
        tensorio.ranked(encrypted, 1, tp=2, rules=RULES)["a"]


def test_published_from_a_path(files: Path, tmp_path: Path) -> None:
    path = tmp_path / "e" / "base.safetensors"
    with pytest.raises(DecryptionError, match="expected a key") as caught:
        tensorio.publish(path)
    assert caught.value.path == str(path)
    with tensorio.publish(path, key=KEY) as publication, publication.open() as shared:
        assert publication.kind == "memory"
        for name, array in TENSORS.items():
            assert np.array_equal(shared[name], array)


def test_a_chain_is_listed(tmp_path: Path) -> None:
    tensorio.save(TENSORS, tmp_path / "0.safetensors")
    tensorio.save({**TENSORS, "b": ADAPTER["b"]}, tmp_path / "1.safetensors", base=tmp_path / "0.safetensors")
    tensorio.encrypt(tmp_path, tmp_path.with_name("encrypted"), key=KEY)
    paths = [str(tmp_path.with_name("encrypted") / f"{i}.safetensors") for i in (1, 0)]
    with pytest.raises(DecryptionError, match="expected a key"):
        tensorio.delta_chain(paths[0])
    assert tensorio.delta_chain(paths[0], key=KEY) == paths


def test_a_folder_is_said_to_be_encrypted(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    safetensors.numpy.save_file(TENSORS, tmp_path / "m" / "model.safetensors")
    assert tensorio.identify(tmp_path / "m") == "safetensors"
    tensorio.encrypt(tmp_path / "m", tmp_path / "e", key=KEY)
    assert tensorio.identify(tmp_path / "e") == "encrypted"


def test_finite_numbers_are_looked_for(tmp_path: Path) -> None:
    tensorio.save({"a": np.array([1, np.nan]), "b": np.ones(2)}, tmp_path / "m.pt")
    tensorio.encrypt(tmp_path / "m.pt", tmp_path / "m.pt", key=KEY)
    with pytest.raises(DecryptionError, match="expected a key"):
        tensorio.check_finite(tmp_path / "m.pt")
    assert [found.name for found in tensorio.check_finite(tmp_path / "m.pt", key=KEY)] == ["a"]
