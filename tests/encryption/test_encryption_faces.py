"""What the rest of the package makes of encrypted files: it says so, and shows encrypted tensors as stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="needs the extra crypt")
pytest.importorskip("torch")
pytest.importorskip("safetensors")
import safetensors.numpy

import tensorio
import tensorio.safetensors.numpy
import tensorio.torch

KEY = bytes(range(32))
TENSORS = {"a": np.arange(3000, dtype="f4"), "b": np.ones((7, 2), "i2")}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    tensorio.save(TENSORS, tmp_path / "m.pt")
    tensorio.encrypt(tmp_path / "m.pt", tmp_path / "m.pt", key=KEY)
    return tmp_path / "m.pt"


@pytest.fixture
def chosen(tmp_path: Path) -> Path:
    tensorio.save(TENSORS, tmp_path / "m.safetensors")
    tensorio.encrypt(tmp_path / "m.safetensors", tmp_path / "m.safetensors", key=KEY, tensors="a")
    return tmp_path / "m.safetensors"


@pytest.mark.parametrize("act", [
    tensorio.load,
    tensorio.open,
    tensorio.verify,
    tensorio.publish,
    lambda path: tensorio.convert(path, f"{path}.safetensors"),
    lambda path: tensorio.recover(path, f"{path}.safetensors"),
    lambda path: tensorio.shard(path, f"{path}.ranks", tp=2, rules={"**": "replicate"}),
    lambda path: tensorio.load(path, format="torch_zip"),
])  # fmt: skip
def test_whole_files_are_refused_and_the_message_says_how_to_read_them(act: Callable[[Path], Any], whole: Path) -> None:
    with pytest.raises(tensorio.DecryptionError, match=r"encrypted: expected a key to read it with: .* as key="):
        act(whole)
    assert [p.name for p in whole.parent.iterdir()] == ["m.pt"]


FACES: dict[str, Callable[[Path], Any]] = {
    "torch.load": lambda path: tensorio.torch.load(path),
    "torch.load_file": lambda path: tensorio.torch.load_file(path),
    "safetensors.load_file": lambda path: tensorio.safetensors.numpy.load_file(path),
    "safetensors.load": lambda path: tensorio.safetensors.numpy.load(path.read_bytes()),
    "safetensors.safe_open": lambda path: tensorio.safetensors.safe_open(path, "np"),
}


@pytest.mark.parametrize("face", FACES)
def test_faces_of_others_say_which_functions_take_the_key(face: str, whole: Path) -> None:
    tensorio.encrypt(whole, whole, key=KEY, old_key=KEY, key_id="mine")
    with pytest.raises(tensorio.DecryptionError) as caught:
        FACES[face](whole)
    text = str(caught.value)
    assert "the file is encrypted: expected the key called 'mine' to read it with" in text
    assert (
        "as key= of tensorio.load, or of tensorio.decrypt, which writes it as it was; this function takes none" in text
    )
    assert caught.value.key_id == "mine"
    if face.startswith("safetensors"):
        assert isinstance(caught.value, tensorio.safetensors.SafetensorError)


@pytest.mark.parametrize("face", ["torch.load", "torch.load_file"])
def test_torch_tensors_are_not_made_of_what_is_encrypted(face: str, chosen: Path) -> None:
    with pytest.raises(tensorio.DecryptionError, match=r"the tensor is encrypted.*this function takes none.*'a'"):
        FACES[face](chosen)


def test_steps_of_a_training_run(tmp_path: Path) -> None:
    """They are saved as they are, and a folder of one that was encrypted is no damage."""
    with pytest.raises(tensorio.UnsupportedError, match="steps are not encrypted as they are saved"):
        tensorio.CheckpointManager(tmp_path / "run", key=KEY)
    with tensorio.CheckpointManager(tmp_path / "run") as manager:
        with pytest.raises(tensorio.UnsupportedError, match="steps are not encrypted as they are saved"):
            manager.save(1, TENSORS, key=KEY)
        assert manager.steps() == []
        manager.save(1, TENSORS)
        (tmp_path / "kept").mkdir()
        tensorio.encrypt(manager.path(1), tmp_path / "kept" / "step-00000001", key=KEY)
    with tensorio.CheckpointManager(tmp_path / "kept") as manager:
        with pytest.raises(tensorio.DecryptionError, match="encrypted after it was saved: decrypt its folder"):
            manager.restore(1, key=KEY)
        got = tensorio.load(tmp_path / "kept" / "step-00000001" / "checkpoint.pt", key=KEY)
        assert np.array_equal(got["a"], TENSORS["a"])
    (tmp_path / "back").mkdir()
    tensorio.decrypt(tmp_path / "kept" / "step-00000001", tmp_path / "back" / "step-00000001", key=KEY)
    with tensorio.CheckpointManager(tmp_path / "back") as manager:
        restored = manager.restore()
        assert restored is not None
        assert np.array_equal(restored.value["a"], TENSORS["a"])


def test_scan_says_that_it_can_not_look_inside(whole: Path) -> None:
    report = tensorio.scan(whole)
    assert report.verdict == "unknown"
    assert "an encrypted file (decrypt it, and scan that): can't look inside" in str(report.findings)


def test_safetensors_shows_what_the_reference_shows(chosen: Path) -> None:
    want, got = safetensors.numpy.load_file(chosen), tensorio.safetensors.numpy.load_file(chosen)
    assert got.keys() == want.keys()
    assert got["a"].dtype == np.uint8
    for name in want:
        assert np.array_equal(got[name], want[name])


def test_recovering_keeps_tensors_as_they_are_stored(chosen: Path, tmp_path: Path) -> None:
    tensorio.recover(chosen, tmp_path / "r.safetensors")
    assert np.array_equal(tensorio.load(tmp_path / "r.safetensors", key=KEY)["a"], TENSORS["a"])


@pytest.mark.parametrize("which", ["whole", "chosen"])
def test_published_memory_has_the_plaintext(which: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(which)
    with tensorio.open(path, key=KEY) as checkpoint, tensorio.publish(checkpoint) as publication:
        with publication.open() as shared:
            for name, array in TENSORS.items():
                assert np.array_equal(shared[name], array)


@pytest.mark.parametrize("which", ["whole", "chosen"])
def test_ranks_have_views_of_the_plaintext(which: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(which)
    with (
        tensorio.open(path, key=KEY) as checkpoint,
        tensorio.ranked(checkpoint, 1, tp=2, rules={"a": 0, "b": "replicate"}) as view,
    ):
        assert np.array_equal(view["a"], TENSORS["a"][1500:])
        out = {"a": np.empty(1500, "f4")}
        view.read_into(out)
        assert np.array_equal(out["a"], TENSORS["a"][1500:])
