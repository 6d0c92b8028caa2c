"""torch.package: values against ``PackageImporter``, and what packages may and may not hold."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import hexfile
import tensorio
from tensorio import HeaderError, Opaque, TensorMismatchError, UnsafePickleError, UnsupportedError

RAW = {"0": np.arange(4, dtype="f4").tobytes()}


def packaged(fill: Any, scripts: bool = False) -> bytes:
    torch = pytest.importorskip("torch", reason="the reference writes the file")
    from torch.package import package_exporter

    out = io.BytesIO()
    before = package_exporter._gate_torchscript_serialization
    package_exporter._gate_torchscript_serialization = not scripts
    try:
        with package_exporter.PackageExporter(out) as package:
            fill(package, torch)
    finally:
        package_exporter._gate_torchscript_serialization = before
    return out.getvalue()


@pytest.mark.filterwarnings("ignore")
def test_resources_equal_what_the_importer_loads() -> None:
    def fill(package: Any, torch: Any) -> None:
        w = torch.arange(12.0).reshape(3, 4)
        package.save_pickle("nets", "a.pkl", {"w": w, "row": w[1], "n": 5, "half": w.to(torch.bfloat16)})
        package.save_pickle("nets.deep", "b.pkl", [torch.ones(2, dtype=torch.int64), w.T])
        package.save_pickle("nets", "plain", {"epoch": 3, "names": ["x", "y"]})

    data = packaged(fill)
    from torch.package import PackageImporter

    importer = PackageImporter(io.BytesIO(data))
    tree = tensorio.load(data)
    assert list(tree) == ["nets/a.pkl", "nets/deep/b.pkl", "nets/plain"]
    assert tree["nets/plain"] == importer.load_pickle("nets", "plain")
    first, second = importer.load_pickle("nets", "a.pkl"), importer.load_pickle("nets.deep", "b.pkl")
    assert tree["nets/a.pkl"]["n"] == 5
    for got, want in ((tree["nets/a.pkl"]["w"], first["w"]), (tree["nets/a.pkl"]["row"], first["row"]),
                      (tree["nets/deep/b.pkl"][0], second[0]), (tree["nets/deep/b.pkl"][1], second[1])):  # fmt: skip
        assert np.array_equal(got, want.numpy())
        assert got.strides == tuple(s * got.itemsize for s in want.stride())
    assert tree["nets/a.pkl"]["half"].dtype.name == "bfloat16"
    assert np.shares_memory(tree["nets/a.pkl"]["w"], tree["nets/deep/b.pkl"][1])


@pytest.mark.filterwarnings("ignore")
def test_other_resources_are_left_alone() -> None:
    def fill(package: Any, torch: Any) -> None:
        package.save_pickle("r", "x.pkl", torch.ones(2))
        package.save_text("r", "note.txt", "hello")
        package.save_binary("r", "raw.bin", b"\x80\x03 and so on")
        package.save_source_string("some.module", "raise ValueError\n")

    with tensorio.open(packaged(fill)) as checkpoint:
        assert list(checkpoint) == ["r/x.pkl"]
        assert checkpoint._opened.skipped == ("r/note.txt", "r/raw.bin")


@pytest.mark.filterwarnings("ignore")
def test_script_modules_have_a_place_of_their_own() -> None:
    def fill(package: Any, torch: Any) -> None:
        module = torch.jit.script(torch.nn.Linear(3, 2))
        package.save_pickle("m", "script.pkl", {"module": module, "again": module, "t": torch.arange(3)})

    data = packaged(fill, scripts=True)
    with tensorio.open(data) as checkpoint:
        assert list(checkpoint) == ["m/script.pkl.t", ".data/ts_code/0.weight", ".data/ts_code/0.bias"]
        assert checkpoint[".data/ts_code/0.weight"].shape == (2, 3)
    assert isinstance(tensorio.load(data)["m/script.pkl"]["module"], Opaque)


@pytest.mark.filterwarnings("ignore")
def test_classes_of_the_package_are_unknown_names() -> None:
    def fill(package: Any, torch: Any) -> None:
        package.extern(["test_torch_package"])
        package.save_pickle("m", "a.pkl", {"x": Thing(torch.ones(2))})
        package.save_pickle("m", "b.pkl", [Other()])

    data = packaged(fill)
    with pytest.raises(UnsafePickleError) as caught:
        tensorio.open(data)
    assert {name.rpartition(".")[2] for name in caught.value.globals} == {"Thing", "Other"}
    with tensorio.open(data, unknown="opaque") as checkpoint:
        assert [array.tolist() for array in checkpoint.values()] == [[1.0, 1.0]]


class Thing:
    def __init__(self, x: Any) -> None:
        self.x = x


class Other:
    pass


def test_keys_are_numbers_or_text() -> None:
    case = cases.CASES["torch_package_by_hand"]()
    tree = tensorio.load(case.data)
    assert np.array_equal(tree["r/x.pkl"], case.tensors["r/x.pkl"])
    assert np.array_equal(tree["y"]["a"], case.tensors["y.a"])


def test_storage_without_a_record_is_refused() -> None:
    data = hexfile.zip_file(cases.package_records({"x.pkl": hexfile.tensor("1")}, RAW))
    with pytest.raises(HeaderError, match="no record") as caught:
        tensorio.open(data)
    assert caught.value.record == "p/x.pkl"


def test_pickle_of_a_damaged_resource_is_refused_by_name() -> None:
    records = cases.package_records({"ok.pkl": hexfile.tensor(), "bad.pkl": b"K\x01K\x02"}, RAW)
    with pytest.raises(HeaderError, match="stops") as caught:
        tensorio.open(hexfile.zip_file(records))
    assert caught.value.record == "p/bad.pkl"


def test_package_without_pickles_is_empty() -> None:
    assert tensorio.load(hexfile.zip_file(cases.package_records({}, RAW, {"a.txt": b"x"}))) == {}


def test_damage_is_found_by_verify() -> None:
    w = np.arange(5000, dtype="f4")
    records = cases.package_records({"x.pkl": hexfile.tensor("0", 5000, (5000,))}, {"0": w.tobytes()})
    data = bytearray(hexfile.zip_file(records))
    data[data.index(w[9:].tobytes()[:64])] ^= 1
    assert [p.record for p in tensorio.verify(bytes(data)).problems] == ["p/.data/0.storage"]


def test_converting_keeps_names_and_values(tmp_path: Path) -> None:
    case = cases.CASES["torch_package_by_hand"]()
    (tmp_path / "x.pt").write_bytes(case.data)
    for suffix in (".safetensors", ".pt"):
        tensorio.convert(tmp_path / "x.pt", tmp_path / f"y{suffix}")
        with tensorio.open(tmp_path / f"y{suffix}") as checkpoint:
            assert {name: a.tobytes() for name, a in checkpoint.items()} == {
                name: a.tobytes() for name, a in case.tensors.items()
            }


def test_strict_and_saving_are_refused_with_words(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="strict"):
        tensorio.open(cases.CASES["torch_package_by_hand"]().data, strict=True)
    with pytest.raises((UnsupportedError, TensorMismatchError), match="read only"):
        tensorio.save({"x": np.ones(1)}, tmp_path / "x", format="torch_package")


@pytest.mark.parametrize("method", [0, 8])
def test_many_pickles_share_many_storages(method: int) -> None:
    count = 30
    raw = {str(i): np.full(3, i, "f4").tobytes() for i in range(count)}
    pickles = {
        f"{i}.pkl": b"](" + hexfile.tensor(str(i), 3, (3,)) + hexfile.tensor(str(i // 2), 3, (2,)) + b"e"
        for i in range(count)
    }
    records = cases.package_records(pickles, raw)
    for record in records:
        record.method = method
    data = hexfile.zip_file(records)
    with tensorio.open(data) as checkpoint:
        assert {name: a.tolist() for name, a in checkpoint.items()} == {
            f"{i}.pkl.{j}": [i, i, i] if j == 0 else [i // 2] * 2 for i in range(count) for j in (0, 1)
        }
        assert [a.tolist() for a in checkpoint.tree()["7.pkl"]] == [[7, 7, 7], [3, 3]]
    assert [a.tolist() for a in tensorio.load(data)["7.pkl"]] == [[7, 7, 7], [3, 3]]
    tree = tensorio.load(data, names=["9.pkl.1"])
    assert tree["9.pkl"][0].tolist() == [4, 4]
    records[-5].name = "p/.data/x.storage"
    with pytest.raises(HeaderError, match="no record"):
        tensorio.open(hexfile.zip_file([r for r in records if r.name != "p/.data/5.storage"]))
