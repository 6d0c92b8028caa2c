"""What is published is what attaches, whatever it was: files of every format, remote ones, objects."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import tensorio

torch = pytest.importorskip("torch")
tensorio_torch = pytest.importorskip("tensorio.torch")

pytestmark = pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions.*:UserWarning")

# Of the cases, those whose bytes are used where they are.
MAPPED = {
    "safetensors_empty", "torch_zip_small", "torch_zip_by_hand", "torchscript_small",
    "torchscript_by_hand", "torch_export_small", "torch_package_small",
}  # fmt: skip


def same(found: Any, expected: Any) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("name", list(cases.CASES))
def test_attached_checkpoint_has_the_tensors_of_the_file(name: str, tmp_path: Path) -> None:
    case = cases.CASES[name]()
    path = tmp_path / f"model{case.suffix}"
    path.write_bytes(case.data)
    with tensorio.publish(path, "m"), tensorio.attach("m") as checkpoint:
        if checkpoint.format == "safetensors":  # ordered by dtype when it is laid out anew
            same({name: checkpoint[name] for name in case.tensors}, case.tensors)
            assert len(checkpoint) == len(case.tensors)
        else:
            same(checkpoint, case.tensors)
        assert all(a.flags.aligned for a in checkpoint.values())


@pytest.mark.parametrize("name", list(cases.CASES))
def test_only_what_can_be_mapped_is_left_where_it_is(name: str, tmp_path: Path) -> None:
    case = cases.CASES[name]()
    path = tmp_path / f"model{case.suffix}"
    path.write_bytes(case.data)
    with tensorio.open(path) as checkpoint:
        aligned = all(a.flags.aligned for a in checkpoint.values())
    with tensorio.publish(path) as publication:
        assert publication.kind in ("file", "memory")
        assert (publication.path == str(path)) == (publication.kind == "file")
        if name in MAPPED:
            assert publication.kind == "file"
        if not aligned or name in ("torch_zip_deflated", "torch_zip_big_endian"):
            assert publication.kind == "memory"


def test_legacy_file_is_aligned_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    state = {f"l{i}": torch.arange(i + 3, dtype=torch.float64) for i in range(5)}
    torch.save(state, path, _use_new_zipfile_serialization=False)
    with tensorio.open(path) as checkpoint:
        assert not all(a.flags.aligned for a in checkpoint.values())
    with tensorio.publish(path) as publication, publication.open() as checkpoint:
        assert checkpoint.format == "torch_zip"
        assert all(a.__array_interface__["data"][0] % 64 == 0 for a in checkpoint.values())
        same(checkpoint, {name: tensor.numpy() for name, tensor in state.items()})
        tree = checkpoint.tree()
        assert list(tree) == list(state)


def test_tree_ties_and_kinds_survive(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    weight = torch.arange(12.0).reshape(3, 4)
    quantized = torch.quantize_per_tensor(weight, 0.5, 3, torch.qint8)
    torch.save({"model": {"w": weight, "tied": weight, "t": weight.t()}, "q": quantized, "step": 7, "note": "x"}, path,
               _use_new_zipfile_serialization=False)  # fmt: skip
    with tensorio.publish(path, "tree"), tensorio.attach("tree", writable=True) as checkpoint:
        tree = checkpoint.tree()
        assert (tree["step"], tree["note"]) == (7, "x")
        tree["model"]["w"][0, 0] = 99
        assert tree["model"]["tied"][0, 0] == 99
        assert tree["model"]["t"].strides == weight.t().numpy().strides
        assert isinstance(checkpoint["q"], tensorio.QuantizedTensor)
        assert np.array_equal(checkpoint["q"].dequantize(), quantized.dequantize().numpy())


def test_dequantized_tensors_are_what_torch_makes_of_them(tmp_path: Path) -> None:
    path = tmp_path / "q.pt"
    real = torch.linspace(-3, 3, 24).reshape(4, 6)
    by_row = torch.quantize_per_channel(real, torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.zeros(4, dtype=torch.int64), 0,
                                        torch.qint8)  # fmt: skip
    whole = torch.quantize_per_tensor(real, 0.05, 3, torch.quint8)
    torch.save({"a": [by_row, real], "b": (whole, whole), "n": 3}, path)
    with tensorio.publish(path) as publication:
        assert publication.kind == "file"
    with tensorio.publish(path, dequantize=True) as publication, publication.open() as checkpoint:
        tree = checkpoint.tree()
        assert np.array_equal(tree["a"][0], by_row.dequantize().numpy())
        assert np.array_equal(tree["a"][1], real.numpy())
        assert np.array_equal(tree["b"][0], whole.dequantize().numpy())
        assert np.shares_memory(tree["b"][0], tree["b"][1])
        assert tree["n"] == 3
        assert {a.dtype for a in checkpoint.values()} == {np.dtype("float32")}


def test_without_quantized_tensors_dequantize_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"a": torch.ones(3)}, path)
    with tensorio.publish(path, dequantize=True) as publication:
        assert publication.kind == "file"


def test_object_in_memory(tmp_path: Path) -> None:
    obj = {
        "np": np.arange(5, dtype="i2"), "torch": [torch.ones(2, 3, dtype=torch.bfloat16)], "lr": 0.5,
        "swapped": np.arange(4, dtype=">f8"), "strided": np.arange(12.0).reshape(3, 4)[:, ::2],
    }  # fmt: skip
    with tensorio.publish(obj, "obj"), tensorio.attach("obj") as checkpoint:
        tree = checkpoint.tree()
        assert list(tree) == list(obj)
        assert tree["np"].tolist() == [0, 1, 2, 3, 4]
        assert tree["torch"][0].dtype.name == "bfloat16"
        assert tree["swapped"].dtype == np.dtype("=f8")
        assert tree["swapped"].tolist() == [0, 1, 2, 3]
        assert np.array_equal(tree["strided"], obj["strided"])
        assert tree["lr"] == 0.5


class Point:
    """Nobody may make one, unless he is told."""


@pytest.mark.parametrize("persistent", [False, True])
def test_object_of_a_class_that_readers_refuse_is_refused_when_it_is_published(
    persistent: bool, registry: Path
) -> None:
    before = cases.open_descriptors()
    with pytest.raises(tensorio.UnsafePickleError, match=r"Point"):
        tensorio.publish({"w": np.ones(3), "p": Point()}, "m", persistent=persistent)
    assert list(registry.iterdir()) == []
    assert cases.open_descriptors() == before
    with tensorio.publish({"w": np.ones(3), "p": Point()}, "m", allow=[Point]):
        assert type(tensorio.attach("m", allow=[Point]).tree()["p"]) is Point


def test_metadata_survives_where_the_layout_has_room(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    data = cases.safetensors_bytes({"w": np.arange(4.0), "v": np.ones(3, "f4")}, {"who": "me"})
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    with tensorio.publish(path) as publication, publication.open() as checkpoint:
        assert publication.kind == "memory"  # its first byte of payload is at an odd address
        assert checkpoint.metadata == {"who": "me"}
        assert publication.dropped == ()


def test_buffers_and_file_objects_are_copied_as_they_are() -> None:
    case = cases.CASES["torch_zip_small"]()
    for source in (case.data, bytearray(case.data), io.BytesIO(case.data)):
        with tensorio.publish(source) as publication, publication.open() as checkpoint:
            assert publication.kind == "memory"
            assert publication.nbytes == len(case.data)
            same(checkpoint, case.tensors)


@pytest.mark.parametrize("start", [0, 5])
def test_file_object_is_copied_from_where_it_stands(start: int, tmp_path: Path) -> None:
    """Others can't have what has no path, and may change."""
    case = cases.CASES["torch_zip_small"]()
    path = tmp_path / "m.pt"
    path.write_bytes(bytes(start) + case.data)
    with open(path, "rb") as f:
        f.seek(start)
        with tensorio.publish(f, "m") as publication:
            assert publication.kind == "memory"
            path.write_bytes(b"")
            same(tensorio.attach("m"), case.tensors)


def test_what_is_published_can_be_published_again(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    tensorio.save({"w": np.arange(4.0)}, path)
    with tensorio.publish(path, "file"), tensorio.publish(tensorio.attach("file"), "again") as publication:
        assert publication.kind == "file"
    with tensorio.publish(path) as first, tensorio.publish(first.open(), "again"):
        assert tensorio.attach("again")["w"][1] == 1
    with tensorio.publish({"w": np.arange(4.0)}) as first, tensorio.publish(first.open(), "again") as second:
        assert os.path.sameopenfile(first.fileno(), second.fileno())  # sealed memory needs no copy
        assert tensorio.attach("again")["w"][1] == 1


def test_remote_file_is_in_memory_once(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    case = cases.CASES["torch_zip_small"]()
    with fsspec.open("memory://models/m.safetensors", "wb") as f:
        f.write(case.data)
    with tensorio.publish("memory://models/m.safetensors", "remote") as publication:
        assert publication.kind == "memory"
        assert publication.nbytes == len(case.data)
        with tensorio.attach("remote") as checkpoint:
            same(checkpoint, case.tensors)


def test_remote_file_that_is_no_checkpoint_is_an_error() -> None:
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open("memory://models/page.html", "wb") as f:
        f.write(b"<!DOCTYPE html><html></html>")
    before = cases.open_descriptors()
    with pytest.raises(tensorio.UnknownFormatError, match="HTML"):
        tensorio.publish("memory://models/page.html")
    assert cases.open_descriptors() == before


def test_checkpoint_as_source_stays_open(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    case = cases.CASES["torch_zip_small"]()
    path.write_bytes(case.data)
    with tensorio.open(path) as checkpoint:
        with tensorio.publish(checkpoint) as publication:
            assert publication.kind == "file"
        same(checkpoint, case.tensors)
    with tensorio.open(path, mmap=False) as checkpoint, tensorio.publish(checkpoint) as publication:
        assert publication.kind == "memory"


def test_private_changes_are_published(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(cases.safetensors_bytes({"w": np.zeros(5)}))
    with tensorio.open(path, writable=True) as checkpoint:
        checkpoint["w"][2] = 4
        with tensorio.publish(checkpoint) as publication, publication.open() as attached:
            assert attached["w"].tolist() == [0, 0, 4, 0, 0]
    assert tensorio.load(path)["w"].tolist() == [0] * 5


def test_opaque_objects_stay_what_they_are(tmp_path: Path) -> None:
    from hexfile import name, pickled, tensor, torch_file

    path = tmp_path / "m.pt"
    raw = np.arange(4, dtype="f4").tobytes()
    path.write_bytes(torch_file(pickled(b"](" + tensor() + name("m", "C") + b")Re"), {"0": raw}))
    with pytest.raises(tensorio.UnsafePickleError):
        tensorio.publish(path, "m")
    with tensorio.publish(path, "m", unknown="opaque"), tensorio.attach("m") as checkpoint:
        assert isinstance(checkpoint.tree()[1], tensorio.Opaque)
    with tensorio.publish(path, "m", unknown="opaque"), pytest.raises(tensorio.UnsafePickleError):
        tensorio.attach("m", unknown="error")


def test_checkpoint_is_attached_to_as_it_was_opened(tmp_path: Path) -> None:
    from hexfile import name, pickled, tensor, torch_file

    path, raw = tmp_path / "m.pt", {"0": np.arange(4, dtype="f4").tobytes()}
    path.write_bytes(torch_file(pickled(b"](" + tensor() + name("m", "C") + b")Re"), raw))
    with tensorio.open(path, unknown="opaque") as checkpoint, tensorio.publish(checkpoint, "m") as publication:
        assert isinstance(publication.open().tree()[1], tensorio.Opaque)
        assert isinstance(tensorio.attach("m").tree()[1], tensorio.Opaque)
    path.write_bytes(torch_file(pickled(b"}(U\x01\xe9" + tensor() + b"u"), raw))
    for encoding, key in (("latin1", "é"), (None, b"\xe9")):
        with tensorio.open(path, encoding=encoding) as checkpoint, tensorio.publish(checkpoint, "m"):
            assert list(tensorio.attach("m").tree()) == list(checkpoint.tree()) == [key]


def test_bad_file_is_an_error_and_leaves_no_name(tmp_path: Path, registry: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(cases.CASES["safetensors_small"]().data[:-1])
    before = cases.open_descriptors()
    with pytest.raises(tensorio.FormatError, match=r"m\.safetensors"):
        tensorio.publish(path, "m")
    assert tensorio.published() == []
    assert list(registry.iterdir()) == []
    assert cases.open_descriptors() == before


def test_object_that_holds_no_tensors_only_is_as_it_was() -> None:
    with tensorio.publish({"a": [1, None, "x"]}) as publication, publication.open() as checkpoint:
        assert checkpoint.tree() == {"a": [1, None, "x"]}


def test_what_can_not_be_pickled_is_refused() -> None:
    with pytest.raises(pickle.PicklingError):
        tensorio.publish({"a": lambda: None})


def test_huge_pages_are_had_or_it_is_said(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    big = {"w": np.arange(4 << 20, dtype=np.uint8)}
    tensorio.save(big, path, durable=False)
    with tensorio.publish(path, huge_pages=True) as publication, publication.open() as checkpoint:
        assert publication.kind == "memory"
        assert publication.pages in ("small", "transparent", "reserved")
        assert publication.nbytes == path.stat().st_size
        assert np.array_equal(checkpoint["w"], big["w"])
        assert checkpoint.format == "safetensors"


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux's /proc")
def test_other_readers_map_a_segment_by_its_descriptor(tmp_path: Path) -> None:
    """The reference tools read what was laid out, too: a segment is a file like any other, but for its name."""
    safetensors = pytest.importorskip("safetensors.numpy")
    state = {"w": torch.arange(12.0).reshape(3, 4), "n": [torch.ones(2, dtype=torch.bfloat16), 7]}
    with tensorio.publish(state) as publication:
        path = f"/proc/self/fd/{publication.fileno()}"
        for found in (torch.load(path, mmap=True, weights_only=True), tensorio_torch.load(path)):
            assert torch.equal(found["w"], state["w"])
            assert torch.equal(found["n"][0], state["n"][0])
            found["w"][0, 0] = 5  # its own
        assert publication.open()["w"][0, 0] == 0
    data = cases.CASES["safetensors_unaligned"]()
    source = tmp_path / "m.safetensors"
    source.write_bytes(data.data)
    with tensorio.publish(source) as publication:
        assert publication.kind == "memory"
        same(safetensors.load_file(f"/proc/self/fd/{publication.fileno()}"), data.tensors)
