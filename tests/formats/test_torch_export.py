"""``.pt2``: names and values against ``torch.export.load``, every field of a configuration, older layouts."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import hexfile
import tensorio
from cases import pt2_entry, pt2_records
from tensorio import HeaderError, LimitError, TruncatedError, UnsafePickleError, UnsupportedError
from tensorio.tensors import PARAMETER, REQUIRES_GRAD

RAW = {"weights/weight_0": np.arange(12, dtype="f4").tobytes()}


def pt2(weights: Any, raw: Any = None, constants: Any = None, **options: Any) -> bytes:
    return hexfile.zip_file(pt2_records(weights, constants, RAW if raw is None else raw, **options))


def one(**changes: Any) -> bytes:
    """A file of one weight of 12 elements, some fields of which are replaced."""
    return pt2({"w": pt2_entry("weight_0", 7, (12,), **changes)})


# ------------------------------------------------------------------- by torch itself


def exported(torch: Any, module: Any, *inputs: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.export.save(torch.export.export(module, inputs), out, **options)
    return out.getvalue()


@pytest.fixture(scope="module")
def by_torch() -> tuple[Any, bytes]:
    """What torch loads from a file of its own with tied, viewed and strided weights, and the file."""
    torch = pytest.importorskip("torch", reason="the reference writes and reads the file")

    class Net(torch.nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.l = torch.nn.Linear(4, 3)
            self.tied = self.l.weight
            self.h = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
            self.t = torch.nn.Parameter(torch.arange(24.0).reshape(4, 6).T)
            base = torch.arange(10.0)
            self.register_buffer("part", base[2:6])
            self.register_buffer("every", base[::2])
            self.register_buffer("whole", base)
            self.register_buffer("steps", torch.arange(5))
            self.register_buffer("unsaved", torch.ones(2), persistent=False)
            self.register_buffer("none", torch.zeros(0, 3))

        def forward(self, x: Any) -> Any:
            y = self.l(x) + self.tied.sum() + self.h.sum() + self.t.sum() + self.part.sum() + self.every.sum()
            return y + self.steps.sum() + self.unsaved.sum() + torch.tensor([1.0, 2.0, 3.0]) + self.none.sum()

    data = exported(torch, Net(), torch.ones(2, 4), extra_files={"labels": "cat\ndog"})
    return torch.export.load(io.BytesIO(data)), data


@pytest.mark.filterwarnings("ignore")
def test_names_and_values_are_those_of_the_program(by_torch: tuple[Any, bytes]) -> None:
    program, data = by_torch
    want = {**program.state_dict, **program.constants}
    with tensorio.open(data) as checkpoint:
        assert checkpoint.format == "torch_export"
        assert set(checkpoint) == set(want)
        assert checkpoint.metadata == {"labels": "cat\ndog"}
        for name, tensor in want.items():
            got, info = checkpoint[name], checkpoint.infos[name]
            assert info.dtype == str(tensor.dtype).removeprefix("torch."), name
            assert got.shape == tuple(tensor.shape), name
            assert got.astype("f8").tolist() == tensor.detach().double().tolist(), name
            if got.size:
                assert got.strides == tuple(s * got.itemsize for s in tensor.stride()), name
            assert bool(info.flags & PARAMETER) == (type(tensor).__name__ == "Parameter"), name
            assert bool(info.flags & REQUIRES_GRAD) == tensor.requires_grad, name
        extents = {name: checkpoint.infos[name].chunks[0].extent for name in checkpoint}
        assert extents["l.weight"] == extents["tied"]
        assert extents["part"].offset == extents["whole"].offset + 8
        assert extents["every"].offset == extents["whole"].offset
    assert {name: a.tobytes() for name, a in tensorio.load(data).items()} == {
        name: a.tobytes() for name, a in tensorio.open(data).items()
    }


@pytest.mark.filterwarnings("ignore")
def test_several_models_have_names_of_their_own(by_torch: tuple[Any, bytes], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.export.pt2_archive import _package

    widths = {"a": 3, "b": 4}
    programs = {name: torch.export.export(torch.nn.Linear(n, 2), (torch.ones(1, n),)) for name, n in widths.items()}
    _package.package_pt2(str(tmp_path / "two.pt2"), exported_programs=programs)
    with tensorio.open(tmp_path / "two.pt2") as checkpoint:
        assert {name: a.shape for name, a in checkpoint.items()} == {
            "a.weight": (2, 3), "a.bias": (2,), "b.weight": (2, 4), "b.bias": (2,)
        }  # fmt: skip
        for name, program in programs.items():
            assert np.array_equal(checkpoint[f"{name}.weight"], program.state_dict["weight"].detach().numpy())


def test_converting_keeps_names_and_values(tmp_path: Path) -> None:
    case = cases.CASES["torch_export_small"]()
    (tmp_path / "x.pt2").write_bytes(case.data)
    for suffix in (".safetensors", ".pt"):
        tensorio.convert(tmp_path / "x.pt2", tmp_path / f"y{suffix}")
        with tensorio.open(tmp_path / f"y{suffix}") as checkpoint:
            assert {name: a.tobytes() for name, a in checkpoint.items()} == {
                name: a.tobytes() for name, a in case.tensors.items()
            }


# -------------------------------------------------------------------- configurations

ROOM = "the tensor leaves its storage"
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "size_beyond": ({"sizes": [{"as_int": 13}]}, HeaderError, ROOM),
    "stride_beyond": ({"strides": [{"as_int": 2}]}, HeaderError, ROOM),
    "offset_beyond": ({"storage_offset": {"as_int": 1}}, HeaderError, ROOM),
    "size_of_2_63": ({"sizes": [{"as_int": 1 << 63}]}, HeaderError, "sizes: expected 0 to 2"),
    "sizes_that_overflow": (
        {"sizes": [{"as_int": 1 << 62}] * 4, "strides": [{"as_int": 1 << 62}] * 4}, HeaderError, ROOM
    ),
    "negative_size": ({"sizes": [{"as_int": -1}]}, HeaderError, "sizes"),
    "negative_stride": ({"strides": [{"as_int": -1}]}, HeaderError, "strides"),
    "negative_offset": ({"storage_offset": {"as_int": -4}}, HeaderError, "storage_offset"),
    "size_as_text": ({"sizes": [{"as_int": "12"}]}, HeaderError, "expected int, found str"),
    "size_as_float": ({"sizes": [{"as_int": 12.0}]}, HeaderError, "expected int, found float"),
    "size_as_bool": ({"sizes": [{"as_int": True}]}, HeaderError, "expected int, found bool"),
    "size_bare": ({"sizes": [12]}, HeaderError, "'as_int'"),
    "size_symbolic": ({"sizes": [{"as_expr": {"expr_str": "s0"}}]}, UnsupportedError, "expression"),
    "sizes_no_list": ({"sizes": {"as_int": 12}}, HeaderError, "expected list"),
    "ranks_differ": ({"strides": []}, HeaderError, "1 dimensions and strides 0"),
    "rank_65": ({"sizes": [{"as_int": 1}] * 65, "strides": [{"as_int": 1}] * 65}, LimitError, "65 dimensions"),
    "dtype_unknown": ({"dtype": 0}, UnsupportedError, "number 0"),
    "dtype_as_text": ({"dtype": "float32"}, HeaderError, "dtype: expected int"),
    "layout_sparse": ({"layout": 1}, UnsupportedError, "sparse COO"),
    "layout_missing": ({"layout": None}, HeaderError, "layout: expected int"),
    "grad_as_number": ({"requires_grad": 1}, HeaderError, "expected bool"),
    "param_as_number": ({"is_param": 1}, HeaderError, "expected bool"),
    "pickle_as_text": ({"use_pickle": "false"}, HeaderError, "expected bool"),
    "meta_missing": ({"tensor_meta": None}, HeaderError, "tensor_meta"),
    "record_missing": ({"path_name": "weight_7"}, HeaderError, "no record"),
    "record_elsewhere": ({"path_name": "../constants/x"}, HeaderError, "name of a record"),
    "record_as_number": ({"path_name": 0}, HeaderError, "expected str"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_wrong_field_is_refused(what: str) -> None:
    changes, kind, words = BAD[what]
    with pytest.raises(kind, match=words) as caught:
        tensorio.open(one(**changes))
    assert len(str(caught.value)) <= 500


@pytest.mark.parametrize("view", [((), (), 11), ((3, 4), (4, 1), 0), ((4, 3), (1, 4), 0), ((2, 2), (0, 0), 11),
                                  ((0, 1 << 40), (1 << 62, 1), 1 << 62), ((1, 12), (1 << 62, 1), 0)])  # fmt: skip
def test_views_inside_their_storage_are_read(view: tuple[Any, Any, int]) -> None:
    shape, strides, offset = view
    entry = pt2_entry("weight_0", 7, shape, offset, strides)
    base = np.arange(12, dtype="f4")
    with tensorio.open(pt2({"w": entry})) as checkpoint:
        got = checkpoint["w"]
        assert got.shape == shape
        if got.size:
            want = np.lib.stride_tricks.as_strided(base[offset:], shape, [s % 64 * 4 for s in strides])
            assert np.array_equal(got, want)


def test_weight_without_data_is_refused() -> None:
    """What a program that was exported without real weights is saved as."""
    data = pt2({"w": pt2_entry("weight_0", 7, (2, 2))}, {"weights/weight_0": b""})
    with pytest.raises(HeaderError, match="at most 0 bytes"):
        tensorio.open(data)


JSON: dict[str, tuple[bytes, type[Exception], str]] = {
    "no_json": (b"\x80\x02}.", HeaderError, "UTF-8"),
    "cut": (b'{"config": {', HeaderError, "JSON"),
    "list": (b"[]", HeaderError, "'config'"),
    "config_is_list": (b'{"config": []}', HeaderError, "expected dict"),
    "entry_is_list": (b'{"config": {"w": []}}', HeaderError, "'path_name'"),
    "key_twice": (b'{"config": {"w": 1, "w": 2}}', HeaderError, "occurs twice"),
    "nan": (b'{"config": NaN}', HeaderError, "NaN"),
    "many_digits": (b'{"config": ' + b"9" * 5000 + b"}", HeaderError, "digits"),
    "half_a_pair": (b'{"config": {"\\ud800": 1}}', HeaderError, "surrogate"),
    "deep": (b'{"config": ' + b"[" * 100_000, LimitError, "deep"),
    "many_values": (b'{"config": [' + b"[]," * 1_000_000 + b"0]}", LimitError, "values"),
}


@pytest.mark.parametrize("what", JSON)
def test_wrong_json_is_refused(what: str) -> None:
    text, kind, words = JSON[what]
    with pytest.raises(kind, match=words):
        tensorio.open(pt2(text))


def test_name_of_a_weight_and_a_constant_is_refused() -> None:
    raw = {**RAW, "constants/tensor_0": RAW["weights/weight_0"]}
    data = pt2({"w": pt2_entry("weight_0", 7, (12,))}, raw, {"w": pt2_entry("tensor_0", 7, (12,))})
    with pytest.raises(HeaderError, match="weight and a constant"):
        tensorio.open(data)


def test_names_are_taken_as_they_are() -> None:
    names = ["", "a.b", "a", "ü", "a/b", "x" * 5000]
    with tensorio.open(pt2({name: pt2_entry("weight_0", 7, (12,)) for name in names})) as checkpoint:
        assert list(checkpoint) == names


@pytest.mark.parametrize(("name", "text"), [("archive_format", b"pt3"), ("archive_version", b"1")])
def test_other_versions_are_refused(name: str, text: bytes) -> None:
    records = pt2_records({}, raw=RAW)
    next(r for r in records if r.name == f"m/{name}").data = text
    with pytest.raises(UnsupportedError, match="pt2, version 0"):
        tensorio.open(hexfile.zip_file(records))


def test_big_endian_records() -> None:
    swapped = {"weights/weight_0": np.arange(12, dtype=">f4").tobytes()}
    records = pt2_records({"w": pt2_entry("weight_0", 7, (12,))}, raw=swapped)
    next(r for r in records if r.name == "m/byteorder").data = b"big"
    data = hexfile.zip_file(records)
    assert tensorio.load(data)["w"].tolist() == list(range(12))
    with tensorio.open(data) as checkpoint:
        assert checkpoint["w"].tolist() == list(range(12))


def test_deflated_records() -> None:
    records = pt2_records({"w": pt2_entry("weight_0", 7, (12,)), "v": pt2_entry("weight_0", 7, (2,), 3)}, raw=RAW)
    for record in records:
        record.method = 8
    with tensorio.open(hexfile.zip_file(records)) as checkpoint:
        assert checkpoint["w"].tolist() == list(range(12))
        assert checkpoint["v"].tolist() == [3, 4]


# ---------------------------------------------------------------- files within the file


def nested(obj: Any = None, body: bytes | None = None, raw: bytes = RAW["weights/weight_0"]) -> bytes:
    return hexfile.torch_file(hexfile.pickled(hexfile.tensor("0", 12, (3, 4)) if body is None else body), {"0": raw})


@pytest.mark.parametrize("method", [0, 8])
def test_pickled_weight_is_a_file_of_its_own(method: int) -> None:
    records = pt2_records({"w": pt2_entry("weight_0", 7, (3, 4), use_pickle=True)}, raw={"weights/weight_0": nested()})
    for record in records:
        record.method = method
    data = hexfile.zip_file(records)
    for source in (tensorio.load(data), dict(tensorio.open(data))):
        assert source["w"].tolist() == np.arange(12).reshape(3, 4).tolist()
    assert tensorio.verify(data).ok


def test_pickled_weight_that_names_what_is_not_allowed() -> None:
    evil = hexfile.name("os", "system") + b"(" + hexfile.text("echo") + b"tR"
    data = pt2({"w": pt2_entry("weight_0", 7, (1,), use_pickle=True)}, {"weights/weight_0": nested(body=evil)})
    with pytest.raises(UnsafePickleError) as caught:
        tensorio.open(data)
    assert caught.value.globals == ("os.system",)
    assert caught.value.record == "m/data/weights/weight_0: archive/data.pkl"


def test_damage_within_is_named_by_both_files() -> None:
    inner = nested()
    cut = inner[: len(inner) // 2]
    data = pt2({"w": pt2_entry("weight_0", 7, (1,), use_pickle=True)}, {"weights/weight_0": cut})
    with pytest.raises(TruncatedError) as caught:
        tensorio.open(data)
    assert caught.value.record == "m/data/weights/weight_0"


def test_custom_objects_may_have_classes_of_their_own() -> None:
    body = cases.script_object({"packed": hexfile.tensor("0", 12, (12,))})
    raw = {**RAW, "constants/custom_obj_0": nested(body=body), "constants/opaque_obj_0": b"\x80\x02cos\nsystem\n."}
    entry = {"is_param": False, "use_pickle": True, "tensor_meta": None}
    constants = {"c": {**entry, "path_name": "custom_obj_0"}, "o": {**entry, "path_name": "opaque_obj_0"}}
    with tensorio.open(pt2({}, raw, constants)) as checkpoint:
        assert list(checkpoint) == ["c.packed"]
        assert checkpoint._opened.skipped == ("data/constants/opaque_obj_0",)


def test_layout_of_2_7() -> None:
    parts = {
        "data/weights/model.pt": cases.plain_torch_bytes({"w": np.arange(3, dtype="f4")}),
        "data/constants/model.pt": cases.plain_torch_bytes({"c": np.arange(2)}),
    }
    parts |= {"archive_format": b"pt2", "archive_version": b"0"}
    records = [hexfile.Rec(f"m/{name}", data) for name, data in parts.items()]
    with tensorio.open(hexfile.zip_file(records)) as checkpoint:
        assert {name: a.tolist() for name, a in checkpoint.items()} == {"w": [0, 1, 2], "c": [0, 1]}


def test_whole_weights_must_be_a_dict() -> None:
    records = [hexfile.Rec("m/data/weights/model.pt", nested()), hexfile.Rec("m/archive_format", b"pt2")]
    with pytest.raises(HeaderError, match="expected a dict") as caught:
        tensorio.open(hexfile.zip_file(records))
    assert caught.value.record == "m/data/weights/model.pt"


# --------------------------------------------------------------------- compiled programs


def compiled(config: Any = None, **files: bytes) -> bytes:
    parts = {"archive_format": b"pt2", "archive_version": b"0", **files}
    if config is not None:
        parts["data/aotinductor/model/weights_config.json"] = json.dumps(config).encode()
    return hexfile.zip_file([hexfile.Rec(name, data) for name, data in parts.items()])


def test_weights_of_a_compiled_program_are_views_of_pickled_ones() -> None:
    files = {"data/weights/weight_0": nested(), "data/aotinductor/model/x.wrapper.so": b"\x7fELF"}
    config = {"l.weight": ["weight_0", [3, 4], [4, 1], 0], "t": ["weight_0", [4, 2], [1, 4], 4]}
    base = np.arange(12).reshape(3, 4)
    with tensorio.open(compiled(config, **files)) as checkpoint:
        assert checkpoint["l.weight"].tolist() == base.tolist()
        assert checkpoint["t"].tolist() == base[1:].T.tolist()
        assert checkpoint.tree()["t"].tolist() == base[1:].T.tolist()
    for wrong in (["weight_0", [3, 5], [5, 1], 0], ["weight_0", [3], [1]], ["weight_1", [1], [1], 0], 5,
                  ["weight_0", [-1], [1], 0], ["weight_0", [1], [1], "0"]):  # fmt: skip
        with pytest.raises(HeaderError):
            tensorio.open(compiled({"w": wrong}, **files))


@pytest.mark.parametrize(
    ("name", "words"), [("x.wrapper.so", "inside its library"), ("x_weights.blob", "without an index")]
)
def test_compiled_program_without_weights_says_where_they_are(name: str, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        tensorio.open(compiled(**{f"data/aotinductor/model/{name}": b"\x7fELF"}))


def test_program_without_weights() -> None:
    assert tensorio.load(pt2({})) == {}
    with pytest.raises(UnsupportedError, match="without weights"):
        tensorio.open(compiled())


def test_strict_and_saving_are_refused_with_words(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="strict"):
        tensorio.open(one(), strict=True)
    with pytest.raises(UnsupportedError, match="without its program"):
        tensorio.save({"x": np.ones(1)}, tmp_path / "x.pt2", format="torch_export")
