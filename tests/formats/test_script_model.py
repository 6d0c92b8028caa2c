"""Script files of torch 1.0 to 1.2, and those of 1.3 and 1.4: what they may and may not hold.

Files of these releases themselves are in tests/golden.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cases
import hexfile
import tensorio
from tensorio.tensors import PARAMETER, REQUIRES_GRAD

TENSORS = {"w": cases.array("float32", (2, 3)), "in.b": cases.array("int64", (2,))}
Change = Callable[[dict[str, Any]], Any]


def made(change: Change | None = None, attributes: bytes = b"") -> bytes:
    return cases.model_json(TENSORS, change, attributes and hexfile.pickled(attributes))


def number(n: int) -> bytes:
    return hexfile.name("torch.jit._pickle", "build_tensor_from_id") + b"(" + hexfile.number(n) + b"tR"


def with_attribute(model: dict[str, Any]) -> None:
    model["mainModule"]["attributes"] = [{"name": "a", "type": "?", "id": "0"}]


def test_flags_tell_parameters_from_buffers() -> None:
    with tensorio.open(made()) as checkpoint:
        flags = {name: info.flags for name, info in checkpoint.infos.items()}
    assert flags == {"w": PARAMETER | REQUIRES_GRAD, "in.b": 0}


def test_shared_tensor_has_both_names_and_one_place() -> None:
    def tie(model: dict[str, Any]) -> None:
        model["mainModule"]["parameters"].append({"name": "again", "tensorId": "0", "isBuffer": False})

    with tensorio.open(made(tie)) as checkpoint:
        assert checkpoint["again"].tobytes() == TENSORS["w"].tobytes()
        assert checkpoint.infos["again"].chunks[0].extent == checkpoint.infos["w"].chunks[0].extent


def test_view_has_its_offset_and_strides() -> None:
    def view(model: dict[str, Any]) -> None:
        model["tensors"][0].update(dims=["2"], strides=["3"], offset="1")

    assert tensorio.load(made(view))["w"].tolist() == TENSORS["w"][:, 1].tolist()


def test_fields_of_value_zero_may_be_missing() -> None:
    def without(model: dict[str, Any]) -> None:
        for entry in model["tensors"]:
            del entry["offset"], entry["requiresGrad"]
        del model["mainModule"]["parameters"][0]["tensorId"], model["mainModule"]["parameters"][0]["isBuffer"]

    assert tensorio.load(made(without))["w"].tobytes() == TENSORS["w"].tobytes()


def test_tensors_in_lists_and_dicts_of_an_attribute_have_names() -> None:
    lists = hexfile.name("torch.jit._pickle", "build_tensorlist") + b"(](" + number(1) + number(0) + b"etR"
    attribute = hexfile.mapping({"x": lists, "y": hexfile.number(3), "z": number(1)})
    tree = tensorio.load(made(with_attribute, b"(" + attribute + b"t"))
    assert list(tree) == ["w", "a.x.0", "a.x.1", "a.z", "in.b"]
    assert tree["a.x.1"].tobytes() == TENSORS["w"].tobytes()


@pytest.mark.parametrize("attributes", [b"", b"(t", b"]", b"N", b"(" + number(2) + b"t"], ids=repr)
def test_attribute_without_a_value_is_refused(attributes: bytes) -> None:
    with pytest.raises(tensorio.HeaderError, match=r"number of an attribute|less than 2"):
        tensorio.load(made(with_attribute, attributes))


def test_attributes_that_share_their_parts_without_end_are_refused() -> None:
    bomb = number(0)
    for _ in range(25):
        bomb = b"](" + bomb + b"q\x05" + b"h\x05" * 9 + b"e"
    with pytest.raises(tensorio.LimitError):
        tensorio.load(made(with_attribute, b"(" + bomb + b"t"))


LIES: dict[str, tuple[Change, type[Exception], str]] = {
    "dtype": (lambda m: m["tensors"][0].update(dataType="STRING"), tensorio.UnsupportedError, "dataType"),
    "record": (lambda m: m["tensors"][0]["data"].update(key="tensors/9"), tensorio.HeaderError, "tensors/9"),
    "number": (lambda m: m["mainModule"]["parameters"][0].update(tensorId="2"), tensorio.HeaderError, "less than 2"),
    "negative": (lambda m: m["tensors"][0].update(offset="-1"), tensorio.HeaderError, "offset"),
    "no string": (lambda m: m["tensors"][0].update(offset=1), tensorio.HeaderError, "offset"),
    "huge": (lambda m: m["tensors"][0].update(dims=["9" * 19, "3"]), tensorio.HeaderError, "dims"),
    "digits": (lambda m: m["tensors"][0].update(dims=["\u0663", "3"]), tensorio.HeaderError, "dims"),
    "outside": (lambda m: m["tensors"][0].update(offset="1"), tensorio.HeaderError, "leaves its storage"),
    "rank": (lambda m: m["tensors"][0].update(dims=["1"] * 65, strides=["1"] * 65), tensorio.LimitError, "65"),
    "strides": (lambda m: m["tensors"][0].update(strides=["1"]), tensorio.HeaderError, "strides"),
    "twice": (lambda m: m["mainModule"]["parameters"].append({"name": "in.b"}), tensorio.HeaderError, "duplicate"),
    "no module": (lambda m: m.pop("mainModule"), tensorio.HeaderError, "mainModule"),
    "no object": (lambda m: m["mainModule"].update(parameters=[1]), tensorio.HeaderError, "name"),
    "no list": (lambda m: m.update(tensors={}), tensorio.HeaderError, "tensors"),
}


@pytest.mark.parametrize("name", list(LIES))
def test_lie_is_refused(name: str) -> None:
    change, error, text = LIES[name]
    for act in (tensorio.open, tensorio.load):
        with pytest.raises(error, match=text) as caught:
            act(made(lambda model: change(model) and None))
        assert caught.value.record in ("w", "m/model.json", "in.b")


def test_names_that_add_up_to_more_than_the_file_are_refused() -> None:
    def deep(model: dict[str, Any]) -> None:
        node = model["mainModule"]
        for _ in range(200):
            node["submodules"] = [{"name": "x" * 4000, "parameters": [{"name": "p"}] * 200}]
            node = node["submodules"][0]

    with pytest.raises(tensorio.LimitError, match="names"):
        tensorio.load(made(deep))


def test_model_beside_a_pickle_is_refused() -> None:
    with zipfile.ZipFile(io.BytesIO(made())) as archive:
        records = [hexfile.Rec(info.filename, archive.read(info)) for info in archive.infolist()]
    records.append(hexfile.Rec("m/data.pkl", hexfile.pickled(b"N")))
    records.append(hexfile.Rec("m/constants.pkl", hexfile.pickled(b")")))
    with pytest.raises(tensorio.HeaderError, match="both"):
        tensorio.load(hexfile.zip_file(records))


# ------------------------------------------------------------------ 1.3 and 1.4

SIX = hexfile.text("storage") + hexfile.name("torch", "FloatStorage") + hexfile.text("0") + hexfile.text("cpu")
SIXTH = (
    hexfile.name("torch._utils", "_rebuild_tensor_v2") + b"((" + SIX + hexfile.number(4) + b"NtQ" + hexfile.number(0)
    + hexfile.numbers([4]) + hexfile.numbers([1]) + b"\x89" + hexfile.HOOKS + b"tR"
)  # fmt: skip


@pytest.mark.parametrize("version", ["1\n", "2\n", "3\n"])
def test_sixth_part_of_an_id_is_of_the_old_versions(version: str) -> None:
    w = np.arange(4, dtype="f4")
    records = cases.script_records(cases.script_object({"w": SIXTH}), {"data/0": w.tobytes()})
    for rec in records:
        if str(rec.name).endswith("/version"):
            rec.data = version.encode()
    data = hexfile.zip_file(records)
    if version == "3\n":
        with pytest.raises(tensorio.HeaderError, match="5 parts"):
            tensorio.open(data)
    else:
        with tensorio.open(data) as checkpoint:
            assert checkpoint["w"].tobytes() == w.tobytes()


def test_storages_of_a_zip_file_of_1_4_are_in_a_folder_of_another_name() -> None:
    w = np.arange(4, dtype="f4")
    key = "94158719483008"
    pickle = hexfile.pickled(hexfile.mapping({"w": hexfile.tensor(key)}))
    parts = {"version": b"1\n", "data.pkl": pickle, f"tensors/{key}": w.tobytes()}
    records = [hexfile.Rec(f"a/{name}", data) for name, data in parts.items()]
    assert tensorio.load(hexfile.zip_file(records))["w"].tobytes() == w.tobytes()
    assert tensorio.verify(hexfile.zip_file(records)).ok
    both = [*records, hexfile.Rec("a/data/0", bytes(16))]
    with pytest.raises(tensorio.HeaderError, match="no record"):
        tensorio.load(hexfile.zip_file(both))
