"""TorchScript, torch.export and zip files of checkpoints that other tools wrote, against what torch says is in them."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import tensorio
from tensorio.tensors import PARAMETER, REQUIRES_GRAD

ENTRIES = cases.corpus_entries()
NOT_OURS = ("npz", "zip_other", "keras_v3_zip", "tar_other")


def entries(*kinds: str) -> Any:
    """Parameters with readable ids; one skipped parameter where there is no corpus."""
    found = [pytest.param(e, id=e["id"]) for e in ENTRIES if e["format"] in kinds]
    return found or [pytest.param(None, marks=pytest.mark.skip(reason="no shared corpus"))]


@pytest.mark.parametrize(("name", "format"), [("export.pt2", "torch_export"), ("script.pt", "torchscript")])
@pytest.mark.parametrize("options", [{}, {"mmap": False}], ids=["mmap", "memory"])
def test_sample_equals_what_torch_read(shared: Path, name: str, format: str, options: dict[str, Any]) -> None:
    folder = shared / "samples" / "pt2"
    want = json.loads((folder / "expected.json").read_text())[name]
    with tensorio.open(folder / name, **options) as checkpoint:
        assert checkpoint.format == format
        assert set(checkpoint) == set(want)
        for fqn, entry in want.items():
            stored = np.load(folder / entry["file"])
            assert checkpoint.infos[fqn].dtype == entry["dtype"].removeprefix("torch."), fqn
            assert checkpoint[fqn].shape == tuple(entry["shape"]), fqn
            assert checkpoint[fqn].tobytes() == stored.tobytes(), fqn
    assert tensorio.verify(folder / name).ok


def test_sample_shares_what_torch_shares(shared: Path) -> None:
    with tensorio.open(shared / "samples" / "pt2" / "export.pt2") as checkpoint:
        infos = checkpoint.infos
        assert infos["tied"].chunks == infos["l.weight"].chunks
        assert infos["t"].chunks[0].strides == (4, 24)


@pytest.mark.parametrize("entry", entries("pt2_zip"))
def test_exported_program_equals_oracle(corpus: Path, entry: dict[str, Any]) -> None:
    oracle = json.loads((corpus / entry["oracle"]).read_text())
    if "tree" not in oracle:  # compiled: torch finds no weights either
        with pytest.raises(tensorio.UnsupportedError, match="inside its library"):
            tensorio.open(corpus / entry["path"])
        return
    with tensorio.open(corpus / entry["path"]) as checkpoint:
        wanted = {tensor["path"][1]: tensor for tensor in oracle["tree"]["tensors"]}
        assert list(checkpoint) == list(wanted)
        for name, tensor in wanted.items():
            array, info = checkpoint[name], checkpoint.infos[name]
            assert (info.dtype, info.shape) == (tensor["dtype"], tuple(tensor["shape"]))
            assert [s // array.itemsize for s in array.strides] == tensor["stride"]
            assert hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest() == tensor["sha256"]
            assert bool(info.flags & REQUIRES_GRAD) == tensor["requires_grad"]
            assert bool(info.flags & PARAMETER) == (tensor["cls"] == "Parameter")


@pytest.mark.parametrize("entry", entries("sb3_zip"))
@pytest.mark.parametrize("options", [{}, {"mmap": False}, {"writable": True}], ids=str)
def test_members_equal_what_torch_reads_of_each(corpus: Path, entry: dict[str, Any], options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    path = corpus / entry["path"]
    tree = tensorio.load(path, **options)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist() if name.endswith(".pth")}
    assert list(tree) == list(members)
    for name, raw in members.items():
        assert_same(tree[name], torch.load(io.BytesIO(raw), weights_only=True))
    with tensorio.open(path) as checkpoint:
        assert set(checkpoint._opened.skipped) == set(zipfile.ZipFile(path).namelist()) - set(members)


def assert_same(got: Any, want: Any) -> None:
    if hasattr(want, "numpy"):
        assert got.tobytes() == want.numpy().tobytes()
        assert got.shape == tuple(want.shape)
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            assert_same(got[key], want[key])
    elif isinstance(want, list | tuple):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert_same(a, b)
    else:
        assert got == want


@pytest.mark.parametrize("entry", entries(*NOT_OURS))
def test_other_archives_are_refused_with_words(corpus: Path, entry: dict[str, Any]) -> None:
    with pytest.raises(tensorio.FormatError) as caught:
        tensorio.open(corpus / entry["path"])
    assert 20 < len(str(caught.value)) <= 500


@pytest.mark.parametrize("entry", entries("torch_zip"))
def test_files_by_torch_save_stay_what_they_are(corpus: Path, entry: dict[str, Any]) -> None:
    assert tensorio.identify(corpus / entry["path"]) == "torch_zip"
