"""Files and folders there and back: every format, any chunks, other keys; no more is decrypted than is asked for."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="needs the extra crypt")
import safetensors.numpy

import cases
import tensorio

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
SMALL = 4096


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file({f"w.{i}": np.full((50, 100), i, "f4") for i in range(20)}, path, {"a": "b"})
    return path


@pytest.mark.parametrize("name", [name for name in cases.CASES if not name.endswith("unpickled")])
def test_every_format_is_read_as_if_it_were_not_encrypted(name: str, tmp_path: Path) -> None:
    case = cases.CASES[name]()
    tensorio.encrypt(case.data, tmp_path / "m", key=KEY, chunk_size=SMALL)
    with (
        tensorio.open(case.data, unknown="opaque") as want,
        tensorio.open(tmp_path / "m", key=KEY, unknown="opaque") as got,
    ):
        assert got.format == want.format
        assert list(got) == list(want)
        assert {n: (i.dtype, i.shape) for n, i in got.infos.items()} == {
            n: (i.dtype, i.shape) for n, i in want.infos.items()
        }
        for fqn in want:
            assert np.asarray(got[fqn]).tobytes() == np.asarray(want[fqn]).tobytes()
        assert got.metadata == want.metadata
    assert tensorio.verify(tmp_path / "m", key=KEY).ok
    tensorio.decrypt(tmp_path / "m", tmp_path / "back", key=KEY)
    assert (tmp_path / "back").read_bytes() == case.data


@pytest.mark.parametrize("nbytes", [0, 1, SMALL - 1, SMALL, SMALL + 1, (1 << 20) + 5, 5 << 20])
@pytest.mark.parametrize("chunk", [SMALL, 1 << 16, 1 << 20, 1 << 26])
def test_bytes_come_back(nbytes: int, chunk: int, tmp_path: Path) -> None:
    data = np.random.default_rng(nbytes).bytes(nbytes)
    saved = tensorio.encrypt(data, tmp_path / "a", key=KEY, chunk_size=chunk)
    stored = (tmp_path / "a").stat().st_size
    assert (saved.path, saved.files, saved.nbytes) == (str(tmp_path / "a"), (str(tmp_path / "a"),), stored)
    assert stored == 160 + nbytes + 16 * max(1, -(-nbytes // chunk))
    out = io.BytesIO()
    assert tensorio.decrypt(tmp_path / "a", out, key=KEY).files == ()
    assert out.getvalue() == data


def test_saved_says_what_was_written_whatever_names_the_file(model: Path, tmp_path: Path) -> None:
    acts: list[Any] = [tensorio.encrypt, tensorio.decrypt]
    for act in acts:
        act(model, tmp_path / "x", key=KEY)
        want = (tmp_path / "x").stat().st_size
        named = act(model, os.fsencode(tmp_path / "y"), key=KEY)
        assert (named.path, named.files, named.nbytes) == (str(tmp_path / "y"), (str(tmp_path / "y"),), want)
        loose = act(model, io.BytesIO(), key=KEY)
        assert (loose.path, loose.files, loose.nbytes) == (None, (), want)
        model = tmp_path / "x2"
        (tmp_path / "x").rename(model)


@pytest.mark.parametrize("chunk", [0, 4096.0, 1, 4095, 5000, 1 << 27, -4096, 2048])
def test_chunks_are_powers_of_two_within_limits(chunk: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="chunk_size= is a power of two from 4096 to 67108864 bytes"):
        tensorio.encrypt(b"payload", tmp_path / "a", key=KEY, chunk_size=chunk)
    assert not list(tmp_path.iterdir())


def test_file_is_replaced_in_place_and_progress_is_told(model: Path) -> None:
    data, seen = model.read_bytes(), []
    model.chmod(0o640)
    tensorio.encrypt(model, model, key=KEY, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (model.stat().st_size,) * 2
    assert model.stat().st_mode & 0o777 == 0o640
    tensorio.decrypt(model, model, key=KEY)
    assert model.read_bytes() == data


def decrypted_chunks(checkpoint: Any) -> tuple[int, int]:
    storage = checkpoint._opened.storages[0]
    return sum(storage._here), storage.chunks.count


def test_opening_decrypts_the_header_and_asking_what_is_asked_for(model: Path) -> None:
    tensorio.encrypt(model, model, key=KEY, chunk_size=SMALL)
    with tensorio.open(model, key=KEY) as checkpoint:
        header, count = decrypted_chunks(checkpoint)
        assert header == 1
        assert count > 90
        assert checkpoint.infos["w.3"].shape == (50, 100)
        assert decrypted_chunks(checkpoint)[0] == header
        assert np.all(checkpoint["w.3"] == 3)
        assert header < decrypted_chunks(checkpoint)[0] <= header + 6
        out = {"w.9": np.empty((50, 100), "f4")}
        checkpoint.read_into(out)
        assert np.all(out["w.9"] == 9)
        assert decrypted_chunks(checkpoint)[0] <= header + 12
        for name, array in checkpoint.stream(["w.5", "w.4"]):
            assert np.all(array == int(name[2:]))
        with checkpoint.prefetch(["w.1"], wait=True):
            assert np.all(checkpoint["w.1"] == 1)
        assert decrypted_chunks(checkpoint)[0] < count // 2
        assert np.all(checkpoint.tree()["w.19"] == 19)
        assert decrypted_chunks(checkpoint) == (count, count)


def test_without_mmap_all_is_decrypted_at_once(model: Path) -> None:
    tensorio.encrypt(model, model, key=KEY, chunk_size=SMALL)
    with tensorio.open(model, key=KEY, mmap=False) as checkpoint:
        assert len(set(decrypted_chunks(checkpoint))) == 1
        assert "decrypted" in checkpoint.loading


def test_converting_keeps_nothing_decrypted(model: Path, tmp_path: Path) -> None:
    want = model.read_bytes()
    tensorio.encrypt(model, tmp_path / "e", key=KEY, chunk_size=SMALL)
    assert tensorio.convert(tmp_path / "e", tmp_path / "c.pt", key=KEY) == ["__metadata__.a"]
    assert np.all(tensorio.load(tmp_path / "c.pt")["w.7"] == 7)
    tensorio.convert(tmp_path / "e", tmp_path / "c.safetensors", key=KEY)
    assert (tmp_path / "c.safetensors").read_bytes() == want


def test_arrays_outlive_the_checkpoint_and_are_read_only_unless_asked(model: Path, tmp_path: Path) -> None:
    tensorio.encrypt(model, tmp_path / "e", key=KEY)
    with tensorio.open(tmp_path / "e", key=KEY) as checkpoint:
        array = checkpoint["w.2"]
    assert np.all(array == 2)
    with pytest.raises(ValueError, match="closed"):
        checkpoint["w.3"]
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with tensorio.open(tmp_path / "e", key=KEY, writable=True) as checkpoint:
        checkpoint["w.2"][:] = 50
        assert np.all(checkpoint["w.2"] == 50)
        assert np.all(checkpoint.tree()["w.2"] == 50)
    assert np.all(tensorio.load(tmp_path / "e", key=KEY)["w.2"] == 2)


def test_damage_that_comes_after_opening_is_found(model: Path, tmp_path: Path) -> None:
    tensorio.encrypt(model, tmp_path / "e", key=KEY, chunk_size=SMALL)
    with tensorio.open(tmp_path / "e", key=KEY) as checkpoint:
        with open(tmp_path / "e", "r+b") as file:
            file.seek(-1, 2)
            file.write(b"\xff\xff")
        with pytest.raises(tensorio.FormatError, match="the file changed"):
            checkpoint.check_unchanged()


# ------------------------------------------------------------------ other keys


def test_another_key_by_way_of_memory_only(model: Path, tmp_path: Path) -> None:
    data = model.read_bytes()
    tensorio.encrypt(model, model, key=KEY, chunk_size=SMALL)
    with pytest.raises(tensorio.DecryptionError, match=r"encrypted already.*old_key="):
        tensorio.encrypt(model, model, key=OTHER)
    with pytest.raises(tensorio.DecryptionError, match="wrong key"):
        tensorio.encrypt(model, model, key=OTHER, old_key=OTHER)
    tensorio.encrypt(model, model, key=OTHER, old_key=KEY, chunk_size=1 << 16, key_id="new")
    with pytest.raises(tensorio.DecryptionError, match="wrong key"):
        tensorio.load(model, key=KEY)
    tensorio.decrypt(model, tmp_path / "back", key=OTHER)
    assert (tmp_path / "back").read_bytes() == data
    with pytest.raises(tensorio.DecryptionError, match="old_key= was given, but nothing"):
        tensorio.encrypt(tmp_path / "back", model, key=OTHER, old_key=KEY)


def test_another_key_for_tensors(model: Path, tmp_path: Path) -> None:
    data = model.read_bytes()
    tensorio.encrypt(model, model, key=KEY, tensors="w.*")
    with pytest.raises(tensorio.DecryptionError, match="encrypted already"):
        tensorio.encrypt(model, model, key=OTHER, tensors="w.1")
    with pytest.raises(tensorio.UnsupportedError, match="expected tensors="):
        tensorio.encrypt(model, model, key=OTHER, old_key=KEY)
    tensorio.encrypt(model, model, key=OTHER, old_key=KEY, tensors=["w.1", "w.2"], chunk_size=SMALL)
    assert np.all(tensorio.load(model, names=["w.3"])["w.3"] == 3)
    tensorio.decrypt(model, tmp_path / "back", key=OTHER)
    assert (tmp_path / "back").read_bytes() == data


# ------------------------------------------------------------------ chosen tensors


@pytest.mark.parametrize("dtype", ["bool", "u1", "i8", "f2", "f4", "f8", "c8", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (30, 41)])
def test_tensors_of_any_kind_come_back(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    import ml_dtypes  # noqa: F401  (names of dtypes)

    rng = np.random.default_rng(1)
    array = np.frombuffer(rng.bytes(2 * max(1, int(np.prod(shape))) * 8), "u1")
    kind = np.dtype(dtype)
    array = (array[: int(np.prod(shape)) * kind.itemsize] & (1 if dtype == "bool" else 255)).view(kind).reshape(shape)
    tensorio.save({"a": array, "b": np.ones(3)}, tmp_path / "m.safetensors")
    tensorio.encrypt(tmp_path / "m.safetensors", tmp_path / "e.safetensors", key=KEY, tensors="a", chunk_size=SMALL)
    with tensorio.open(tmp_path / "e.safetensors", key=KEY) as checkpoint:
        got = checkpoint["a"]
        assert (got.dtype, got.shape, got.tobytes()) == (kind, shape, array.tobytes())
        assert checkpoint.infos["a"].contiguous
    assert tensorio.load(tmp_path / "e.safetensors", key=KEY)["a"].tobytes() == array.tobytes()
    tensorio.decrypt(tmp_path / "e.safetensors", tmp_path / "back.safetensors", key=KEY)
    assert (tmp_path / "back.safetensors").read_bytes() == (tmp_path / "m.safetensors").read_bytes()


def test_bits_come_back(tmp_path: Path) -> None:
    """Of dtypes that share bytes, the header has a shape that no array has."""
    head = json.dumps({"a": {"dtype": "F4", "shape": [2, 6], "data_offsets": [0, 6]}}).encode()
    data = len(head).to_bytes(8, "little") + head + b"abcdef"
    tensorio.encrypt(data, tmp_path / "e.safetensors", key=KEY, tensors="a")
    with tensorio.open(tmp_path / "e.safetensors", key=KEY) as checkpoint:
        assert checkpoint.infos["a"].shape == (2, 6)
        assert checkpoint["a"].tobytes() == b"abcdef"


def test_patterns_must_fit_and_the_format_must_have_tensors(model: Path, tmp_path: Path) -> None:
    with pytest.raises(tensorio.TensorMismatchError, match=r"tensors='v\.\*' fits no tensor"):
        tensorio.encrypt(model, tmp_path / "e", key=KEY, tensors=["w.1", "v.*"])
    with pytest.raises(ValueError, match="tensors= is one pattern or more"):
        tensorio.encrypt(model, tmp_path / "e", key=KEY, tensors=[])
    tensorio.save({"a": np.ones(3)}, tmp_path / "m.pt")
    with pytest.raises(tensorio.UnsupportedError, match="expected a safetensors file"):
        tensorio.encrypt(tmp_path / "m.pt", tmp_path / "e", key=KEY, tensors="a")
    assert not (tmp_path / "e").exists()


def test_convert_with_a_key_writes_plain_tensors(model: Path, tmp_path: Path) -> None:
    tensorio.encrypt(model, tmp_path / "e.safetensors", key=KEY, tensors="w.1*")
    tensorio.convert(tmp_path / "e.safetensors", tmp_path / "c.safetensors", key=KEY)
    assert (tmp_path / "c.safetensors").read_bytes() == model.read_bytes()
    with pytest.raises(tensorio.DecryptionError, match="the tensor is encrypted"):
        tensorio.convert(tmp_path / "e.safetensors", tmp_path / "d.safetensors")
    assert not (tmp_path / "d.safetensors").exists()


# ------------------------------------------------------------------ folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    index = {}
    for i in range(3):
        name = f"model-{i + 1:05}-of-00003.safetensors"
        safetensors.numpy.save_file({f"w.{i}": np.full(3000, i, "f4")}, path / name)
        index[f"w.{i}"] = name
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (path / "config.json").write_text("{}")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("tensors", [None, "w.*", ["w.0", "w.2"]])
def test_files_of_a_folder_are_encrypted_and_its_notes_copied(tensors: Any, folder: Path, tmp_path: Path) -> None:
    want, seen = contents(folder), []
    saved = tensorio.encrypt(
        folder, tmp_path / "e", key=KEY, tensors=tensors, progress=lambda done, total: seen.append((done, total))
    )
    got = contents(tmp_path / "e")
    assert sorted(saved.files) == sorted(str(tmp_path / "e" / name) for name in want)
    assert saved.nbytes == sum(map(len, got.values()))
    assert seen[-1][0] <= seen[-1][1]
    changed = {name for name in want if got[name] != want[name]}
    assert len(changed) == (2 if isinstance(tensors, list) else 3)
    assert all(name.endswith(".safetensors") for name in changed)
    tensorio.decrypt(tmp_path / "e", tmp_path / "back", key=KEY)
    assert contents(tmp_path / "back") == want


UNKNOWN = b"GGUF" + bytes(range(256)) * 8  # a format that nothing here reads


def test_no_file_of_a_folder_stays_readable_but_what_other_tools_look_for(folder: Path, tmp_path: Path) -> None:
    side = {
        "tokenizer.json": b"{}", "tokenizer.model": b"\n\x0e\n\x05<unk>", "merges.txt": b"#version: 0.2\n",
        "README.md": b"---\n", "modeling.py": b"import torch\n", "LICENSE": b"MIT\n",
    }  # fmt: skip
    model = (folder / "model-00001-of-00003.safetensors").read_bytes()
    hidden = {"model.gguf": UNKNOWN, "weights": UNKNOWN, "model.onnx_data": bytes(9), "notes.txt": model, "empty": b""}
    for name, data in {**side, **hidden}.items():
        (folder / name).write_bytes(data)
    want = contents(folder)
    saved = tensorio.encrypt(folder, tmp_path / "e", key=KEY)
    got = contents(tmp_path / "e")
    clear = {name for name in want if got[name] == want[name]}
    assert clear == {*side, "config.json", "model.safetensors.index.json"}
    assert saved.clear == tuple(str(tmp_path / "e" / name) for name in sorted(clear))
    assert all(got[name].startswith(b"\x89TIOENC\x01") for name in want.keys() - clear)
    assert tensorio.decrypt(tmp_path / "e", tmp_path / "back", key=KEY).clear == tuple(
        str(tmp_path / "back" / name) for name in sorted(clear)
    )
    assert contents(tmp_path / "back") == want


@pytest.mark.parametrize(("clear", "names"), [
    ((), set()),
    ("", set()),
    ("config.*", {"config.json"}),
    (["*.gguf", "*.index.json", "none*"], {"m.gguf", "model.safetensors.index.json"}),
    (["*-00002-*"], {"model-00002-of-00003.safetensors"}),
])  # fmt: skip
def test_what_stays_readable_can_be_said(clear: Any, names: set[str], folder: Path, tmp_path: Path) -> None:
    (folder / "m.gguf").write_bytes(UNKNOWN)
    want = contents(folder)
    saved = tensorio.encrypt(folder, tmp_path / "e", key=KEY, clear=clear)
    got = contents(tmp_path / "e")
    assert {name for name in want if got[name] == want[name]} == names == {Path(path).name for path in saved.clear}
    tensorio.decrypt(tmp_path / "e", tmp_path / "back", key=KEY)
    assert contents(tmp_path / "back") == want


def test_side_files_that_are_large_do_not_stay_readable(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "tensors.json").write_text(json.dumps(list(range(1000))))
    monkeypatch.setattr("tensorio.encryption._clear.USUAL_MAX", 1000)
    saved = tensorio.encrypt(folder, tmp_path / "e", key=KEY)
    assert [Path(path).name for path in saved.clear] == ["config.json", "model.safetensors.index.json"]


def test_side_files_that_are_no_text_do_not_stay_readable(folder: Path, tmp_path: Path) -> None:
    """Tensors of a format that nothing here reads, under the name of a text."""
    want = contents(folder)
    np.save(folder / "a.npy", np.ones(100))
    (folder / "a.npy").rename(folder / "a.txt")
    (folder / "b.json").write_bytes(np.random.default_rng(0).random(1000, "f4").tobytes())
    (folder / "README.gguf").write_bytes(UNKNOWN)
    (folder / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    (folder / "notes.md").write_text("\u00e9t\u00e9", encoding="utf-8")
    saved = tensorio.encrypt(folder, tmp_path / "e", key=KEY)
    clear = {Path(path).name for path in saved.clear}
    assert clear == {name for name in want if not name.endswith(".safetensors")} | {"tokenizer.model", "notes.md"}


def test_chosen_tensors_leave_other_formats_readable_and_say_so(folder: Path, tmp_path: Path) -> None:
    (folder / "m.gguf").write_bytes(UNKNOWN)
    saved = tensorio.encrypt(folder, tmp_path / "e", key=KEY, tensors="w.0")
    assert [Path(path).name for path in saved.clear] == [
        "config.json", "m.gguf", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]  # fmt: skip


def test_side_files_that_are_encrypted_get_the_new_key(folder: Path, tmp_path: Path) -> None:
    want = contents(folder)
    tensorio.encrypt(folder, tmp_path / "e", key=KEY, clear=())
    saved = tensorio.encrypt(tmp_path / "e", tmp_path / "f", key=OTHER, old_key=KEY)
    assert saved.clear == ()
    tensorio.decrypt(tmp_path / "f", tmp_path / "back", key=OTHER)
    assert contents(tmp_path / "back") == want


def test_index_that_is_encrypted_is_told_from_damage(folder: Path, tmp_path: Path) -> None:
    tensorio.encrypt(folder, tmp_path / "e", key=KEY, clear="config.json")
    for key in (None, KEY):
        with pytest.raises(tensorio.DecryptionError, match="the index is encrypted: decrypt the folder"):
            tensorio.open(tmp_path / "e", key=key)


def test_file_that_is_encrypted_already_is_not_copied_unless_its_key_is_given(folder: Path, tmp_path: Path) -> None:
    """It would stay with its old key, without a word."""
    tensorio.encrypt(UNKNOWN, folder / "config.json", key=OTHER)
    with pytest.raises(tensorio.DecryptionError, match="encrypted already") as caught:
        tensorio.encrypt(folder, tmp_path / "e", key=KEY)
    assert caught.value.path == str(folder / "config.json")
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize("tensors", [None, "**"], ids=["whole files", "tensors"])
def test_no_file_keeps_its_old_key(tensors: str | None, folder: Path, tmp_path: Path) -> None:
    """What is listed as readable is: a file of which nothing is chosen is what it was before it was encrypted."""
    want = contents(folder)
    tensorio.encrypt(folder, tmp_path / "e", key=KEY, tensors=tensors)
    saved = tensorio.encrypt(tmp_path / "e", tmp_path / "f", key=OTHER, old_key=KEY, tensors="w.0")
    got = contents(tmp_path / "f")
    clear = {Path(path).name for path in saved.clear}
    assert clear == want.keys() - {"model-00001-of-00003.safetensors"}
    assert all(got[name] == want[name] for name in clear)
    tensorio.decrypt(tmp_path / "f", tmp_path / "back", key=OTHER)
    assert contents(tmp_path / "back") == want


def test_clear_is_for_folders(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="clear= is for folders"):
        tensorio.encrypt(model, tmp_path / "e", key=KEY, clear="*.json")


def test_index_of_encrypted_files_is_followed(folder: Path, tmp_path: Path) -> None:
    tensorio.encrypt(folder, tmp_path / "e", key=KEY)
    with tensorio.open(tmp_path / "e", key=KEY) as checkpoint:
        for i in range(3):
            assert np.all(checkpoint[f"w.{i}"] == i)


def test_manifests_of_a_folder_are_not_copied(folder: Path, tmp_path: Path) -> None:
    """They have the digests of what is not encrypted, and are of no use for what is."""
    want = contents(folder)
    tensorio.write_manifest(folder)
    tensorio.write_manifest(folder / "model-00001-of-00003.safetensors")
    (folder / "SHA256SUMS").write_bytes((folder / "checkpoint.sha256").read_bytes())
    tensorio.encrypt(folder, tmp_path / "e", key=KEY)
    assert sorted(contents(tmp_path / "e")) == sorted(want)
    tensorio.write_manifest(tmp_path / "e")
    assert tensorio.verify(tmp_path / "e", key=KEY).ok
    tensorio.decrypt(tmp_path / "e", tmp_path / "back", key=KEY)
    assert contents(tmp_path / "back") == want


@pytest.mark.parametrize("spoil", [
    lambda folder: (folder / "more").mkdir(),
    lambda folder: (folder / "model-00002-of-00003.safetensors").write_bytes(b"\x89TIOENC\x01"),
    lambda folder: [p.unlink() for p in folder.glob("*.safetensors")],
], ids=["folder", "encrypted already", "no tensors"])  # fmt: skip
def test_folder_appears_whole_or_not_at_all(spoil: Callable[[Path], Any], folder: Path, tmp_path: Path) -> None:
    spoil(folder)
    with pytest.raises(tensorio.TensorIOError):
        tensorio.encrypt(folder, tmp_path / "e", key=KEY)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_folder_of_which_a_file_was_changed_is_not_decrypted(folder: Path, tmp_path: Path) -> None:
    tensorio.encrypt(folder, tmp_path / "e", key=KEY)
    file = tmp_path / "e" / "model-00003-of-00003.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(tensorio.FormatError):
        tensorio.decrypt(tmp_path / "e", tmp_path / "back", key=KEY)
    with pytest.raises(tensorio.DecryptionError, match="nothing in the file is encrypted"):
        tensorio.decrypt(folder, tmp_path / "back", key=KEY)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["e", "model"]


# ------------------------------------------------------------------ without the extra


def test_missing_package_is_named(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(tensorio.UnsupportedError, match=r"pip install 'tensorio\[crypt\]'"):
        tensorio.encrypt(model, tmp_path / "e", key=KEY)
    assert not (tmp_path / "e").exists()


def test_package_without_decrypt_into_will_do(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    from tensorio.encryption import _chunks

    class Old:
        """As in cryptography 42."""

        def __init__(self, key: bytes) -> None:
            aead = AESGCM(key)
            self.encrypt, self.decrypt = aead.encrypt, aead.decrypt

    monkeypatch.setattr(_chunks, "primitives", lambda: Old)
    tensorio.encrypt(model, tmp_path / "e", key=KEY, chunk_size=SMALL)
    tensorio.decrypt(tmp_path / "e", tmp_path / "back", key=KEY)
    assert (tmp_path / "back").read_bytes() == model.read_bytes()


# ------------------------------------------------------------------ memory, threads


def test_file_that_is_cut_while_it_is_open_is_an_error(model: Path, tmp_path: Path) -> None:
    tensorio.encrypt(model, tmp_path / "e", key=KEY, chunk_size=SMALL)
    with tensorio.open(tmp_path / "e", key=KEY) as checkpoint:
        with open(tmp_path / "e", "r+b") as file:
            file.truncate(20_000)
        with pytest.raises(tensorio.TruncatedError, match=r"ends .* bytes too early"):
            checkpoint["w.19"]


def test_threads_share_what_was_decrypted(model: Path, tmp_path: Path) -> None:
    tensorio.encrypt(model, tmp_path / "e", key=KEY, chunk_size=SMALL)
    with tensorio.open(tmp_path / "e", key=KEY) as checkpoint, ThreadPoolExecutor(8) as pool:

        def right(i: int) -> bool:
            return bool(np.all(checkpoint[f"w.{i % 20}"] == i % 20))

        assert all(pool.map(right, range(400)))
        assert len({checkpoint["w.1"].base for _ in range(3)}) == 1


@pytest.mark.plain_build
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read from /proc")
@pytest.mark.parametrize("act", ["encrypt", "decrypt", "open"])
def test_memory_stays_flat(act: str, tmp_path: Path) -> None:
    """64 MiB go through, or a tensor of 1 MiB out of them; neither has them in memory."""
    safetensors.numpy.save_file({f"w.{i}": np.full(1 << 18, i, "f4") for i in range(64)}, tmp_path / "m.safetensors")
    tensorio.encrypt(tmp_path / "m.safetensors", tmp_path / "e", key=KEY, chunk_size=1 << 16)
    code = """
import sys, tensorio
import numpy, cryptography.hazmat.primitives.ciphers.aead, tensorio.encryption._files, tensorio._arrays
def peak(): return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) << 10
key, (act, plain, encrypted, out) = bytes(range(32)), sys.argv[1:]
tensorio.encrypt(b"x", out, key=key)
tensorio.decrypt(out, out, key=key)
before = peak()
if act == "open":
    with tensorio.open(encrypted, key=key) as checkpoint:
        assert (checkpoint["w.40"] == 40).all()
else:
    getattr(tensorio, act)(plain if act == "encrypt" else encrypted, out, key=key)
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, act, tmp_path / "m.safetensors", tmp_path / "e", tmp_path / "out"],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(p for p in sys.path if p)},
    )  # fmt: skip
    assert int(done.stdout) < 24 << 20
