"""TorchScript: names and values against ``torch.jit.load``, and what its files may and may not hold."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import hexfile
import tensorio
from tensorio import HeaderError, Opaque, UnsafePickleError, UnsupportedError

torch = pytest.importorskip("torch", reason="the reference writes and reads the files")

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own: most of TorchScript is deprecated

RAW = {"data/0": np.arange(4, dtype="f4").tobytes()}
MODULE = cases.script_object({"w": hexfile.tensor()})


def saved(module: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.jit.save(module, out, **options)
    return out.getvalue()


def as_array(tensor: Any) -> Any:
    """A torch tensor as bytes, shape and type, for types that NumPy lacks, too."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    raw = plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return str(plain.dtype).removeprefix("torch."), tuple(plain.shape), raw


def check(data: bytes, **options: Any) -> tensorio.Checkpoint:
    """Every tensor of torch's state dict is there, under its name, with its type, shape and bytes."""
    want = torch.jit.load(io.BytesIO(data)).state_dict()
    checkpoint = tensorio.open(data, **options)
    assert set(want) <= set(checkpoint)
    for name, tensor in want.items():
        got, info = checkpoint[name], checkpoint.infos[name]
        assert (info.dtype, got.shape, got.tobytes()) == as_array(tensor), name
    return checkpoint


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(3, 4)
        self.register_buffer("steps", torch.arange(5))
        self.register_buffer("unsaved", torch.ones(2), persistent=False)
        self.many = [torch.ones(2), torch.zeros(3)]
        self.named = {"a": torch.ones(1)}
        self.numbers, self.floats, self.bools = [1, 2], [0.5], [True]
        self.k, self.device, self.z = 3, torch.device("cpu"), 1 + 2j

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) + self.k + self.many[0].sum() + self.named["a"]


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sub = Inner()
        self.w = torch.nn.Parameter(torch.randn(4, 4))
        self.tied = self.w
        base = torch.arange(10.0)
        self.register_buffer("part", base[2:6])
        self.register_buffer("every", base[::2])  # a storage that the pickle refers to by its memo

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sub(x) @ self.w + torch.ones(4) + torch.tensor([1.0, 2.0, 3.0, 4.0])


def scripted(module: Any = None) -> Any:
    return torch.jit.script((Outer() if module is None else module).eval())


def holder(tensor: Any) -> Any:
    """A module with one buffer."""

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("x", tensor)

        def forward(self, y: torch.Tensor) -> torch.Tensor:
            return y

    return torch.jit.script(Holder())


def test_names_and_values_are_those_of_the_state_dict() -> None:
    checkpoint = check(saved(scripted()))
    assert set(checkpoint) - set(torch.jit.load(io.BytesIO(saved(scripted()))).state_dict()) == {
        "sub.many.0", "sub.many.1", "sub.named.a"
    }  # fmt: skip
    assert checkpoint.infos["w"].chunks[0].extent == checkpoint.infos["tied"].chunks[0].extent
    part, every = (checkpoint.infos[name].chunks[0] for name in ("part", "every"))
    assert (every.strides, part.extent.offset - every.extent.offset) == ((8,), 8)


def test_attributes_are_plain_values() -> None:
    tree = tensorio.load(saved(scripted()))
    sub = tree.state["sub"]
    assert (tree.module, tree.name) == ("__torch__.test_torchscript", "Outer") or isinstance(tree, Opaque)
    assert sub.state["numbers"] == [1, 2]
    assert sub.state["floats"] == [0.5]
    assert sub.state["bools"] == [True]
    assert sub.state["z"] == 1 + 2j
    assert sub.state["k"] == 3
    assert sub.state["device"].type == "cpu"
    assert sub.state["named"]["a"].tolist() == [1.0]
    assert sub.state["training"] is False


def test_traced_module_without_its_inputs() -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2)).eval()
    data = saved(torch.jit.trace(module, torch.ones(1, 1, 5, 5)))
    checkpoint = check(data)
    assert set(checkpoint) == set(module.state_dict())


@pytest.mark.parametrize("kind", ["plain", "frozen", "scripted_frozen"])
def test_lite_interpreter_files(kind: str) -> None:
    module = scripted()
    if kind != "plain":
        module = torch.jit.freeze(module)
    data = module._save_to_buffer_for_lite_interpreter()
    if kind == "scripted_frozen":
        data = saved(module)
    with tensorio.open(data) as checkpoint:
        assert checkpoint.format == "torchscript"
        if kind == "plain":
            check(data)
        else:
            assert all(name.startswith("constants.") for name in checkpoint)


def test_frozen_weights_are_constants_by_number() -> None:
    module = scripted()
    frozen = torch.jit.freeze(module)
    checkpoint = tensorio.open(saved(frozen))
    want = [as_array(t) for t in module.state_dict().values()]
    got = [(checkpoint.infos[n].dtype, a.shape, a.tobytes()) for n, a in checkpoint.items()]
    assert sum(w in got for w in want) >= 3  # those that its code still uses
    assert list(checkpoint) == [f"constants.{i}" for i in range(len(checkpoint))]


def test_bytecode_with_storages_of_its_own() -> None:
    code = hexfile.number(4) + b"(" + hexfile.text("f") + hexfile.tensor("0", 3, (3,), cls="ByteStorage") + b"t\x86"
    raw = {**RAW, "bytecode/0": b"\1\2\3"}
    for storages, names in ((raw, ["w", "bytecode.1.1"]), (RAW, ["w"])):
        records = cases.script_records(MODULE, storages, others={"bytecode.pkl": hexfile.pickled(code)})
        with tensorio.open(hexfile.zip_file(records)) as checkpoint:
            assert list(checkpoint) == names
    with tensorio.open(hexfile.zip_file(cases.script_records(MODULE, raw))) as checkpoint:
        assert list(checkpoint) == ["w"]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "bfloat16", "float8_e4m3fn", "float8_e5m2",
                                   "complex32", "complex64", "bool", "int8", "float64"])  # fmt: skip
def test_every_dtype(dtype: str) -> None:
    check(saved(holder(torch.zeros(3, dtype=getattr(torch, dtype)))))
    check(saved(holder(torch.ones(2, 3).to(getattr(torch, dtype)))))


def test_conjugate_and_negative_views() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    check(saved(holder(z.conj())))
    check(saved(holder(z.conj().imag)))


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_buffer(layout: str) -> None:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    tensor = dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()
    tree = tensorio.load(saved(holder(tensor)))
    assert tree.state["x"].dense().tolist() == dense.tolist()


def quantized_linear() -> tuple[bytes, Any]:
    engines = torch.backends.quantized.supported_engines
    torch.backends.quantized.engine = "fbgemm" if "fbgemm" in engines else engines[-1]
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LSTM(4, 2))
    quantized = torch.ao.quantization.quantize_dynamic(module, dtype=torch.qint8)
    data = saved(torch.jit.script(quantized))
    loaded = torch.jit.load(io.BytesIO(data))
    packed = getattr(loaded, "0")._packed_params._packed_params
    return data, torch.ops.quantized.linear_unpack(packed)


def test_quantized_weights_in_packed_parameters() -> None:
    data, (weight, bias) = quantized_linear()
    tree = tensorio.load(data)
    packed = tree.state["0"].state["_packed_params"].state["_packed_params"]
    assert (packed.module, packed.name) == ("__torch__.torch.classes.quantized", "LinearPackedParamsBase")
    got = packed.state[0]
    assert np.array_equal(got.dequantize(), weight.dequantize().numpy())
    assert packed.state[1].tolist() == bias.tolist()


def test_notes_are_metadata() -> None:
    data = saved(holder(torch.ones(1)), _extra_files={"labels.txt": "cat\ndog", "deep/v": "ä"})
    with tensorio.open(data) as checkpoint:
        assert checkpoint.metadata == {"labels.txt": "cat\ndog", "deep/v": "ä"}


def test_code_is_not_looked_at() -> None:
    records = cases.script_records(MODULE, RAW)
    for record in records:
        if record.name.endswith(".py"):
            record.data = b"\xff\x00 no text at all"
    assert tensorio.load(hexfile.zip_file(records)).state["w"].tolist() == [0, 1, 2, 3]


def test_own_classes_are_never_refused_and_others_always() -> None:
    evil = hexfile.name("os", "system") + b"(" + hexfile.text("echo") + b"tR"
    data = hexfile.zip_file(cases.script_records(cases.script_object({"w": hexfile.tensor(), "x": evil}), RAW))
    with pytest.raises(UnsafePickleError) as caught:
        tensorio.open(data)
    assert caught.value.globals == ("os.system",)
    assert tensorio.load(data, unknown="opaque").state["x"].args == ("echo",)


def test_refused_names_of_all_pickles_are_listed_at_once() -> None:
    first, second = (hexfile.name("some.module", name) + b")R" for name in ("one", "two"))
    records = cases.script_records(cases.script_object({"x": first}), {}, b"(" + second + b"t")
    with pytest.raises(UnsafePickleError, match="1 more") as caught:
        tensorio.open(hexfile.zip_file(records))
    assert caught.value.globals == ("some.module.one", "some.module.two")


@pytest.mark.parametrize("name", ["build_intlist", "build_doublelist", "build_boollist", "build_tensorlist"])
def test_typed_lists_of_older_files(name: str) -> None:
    call = hexfile.name("torch.jit._pickle", name)
    for argument, kind in ((b"](K\x01K\x02e", None), (b"}", HeaderError), (b"K\x05", HeaderError)):
        module = cases.script_object({"x": call + b"(" + argument + b"tR"})
        data = hexfile.zip_file(cases.script_records(module, {}))
        if kind is None:
            assert tensorio.load(data).state["x"] == [1, 2]
        else:
            with pytest.raises(kind, match="expected a list"):
                tensorio.load(data)


def test_tensor_by_number_is_inert() -> None:
    """It means something only beside the table of a file of before 1.3."""
    call = hexfile.name("torch.jit._pickle", "build_tensor_from_id") + b"(K\x07tR"
    inert = tensorio.load(hexfile.zip_file(cases.script_records(cases.script_object({"x": call}), {}))).state["x"]
    assert (type(inert), inert.args) == (Opaque, (7,))
    wrong = call.replace(b"K\x07", hexfile.text("7"))
    with pytest.raises(HeaderError, match="number of a tensor"):
        tensorio.load(hexfile.zip_file(cases.script_records(cases.script_object({"x": wrong}), {})))


@pytest.mark.parametrize("version", ["2", "4", "10"])
def test_versions(version: str) -> None:
    records = cases.script_records(MODULE, RAW)
    next(r for r in records if r.name == "m/version").data = version.encode()
    assert tensorio.load(hexfile.zip_file(records)).state["w"].shape == (4,)


def test_version_of_the_future_is_refused() -> None:
    records = cases.script_records(MODULE, RAW)
    next(r for r in records if r.name == "m/version").data = b"11"
    with pytest.raises(UnsupportedError, match="1 to 10"):
        tensorio.load(hexfile.zip_file(records))


def test_constants_stand_beside_an_attribute_of_their_name() -> None:
    module = cases.script_object({"constants": hexfile.tensor()})
    raw = {**RAW, "constants/0": b"\1\2"}
    constants = b"(" + hexfile.tensor("0", 2, (2,), cls="ByteStorage") + b"t"
    with tensorio.open(hexfile.zip_file(cases.script_records(module, raw, constants))) as checkpoint:
        assert list(checkpoint) == ["constants", "constants#2.0"]


def test_constants_are_a_tuple() -> None:
    with pytest.raises(HeaderError, match="expected a tuple") as caught:
        tensorio.load(hexfile.zip_file(cases.script_records(MODULE, RAW, b"]")))
    assert caught.value.record == "m/constants.pkl"


def test_root_may_be_no_object() -> None:
    constants = b"(" + hexfile.tensor("0", 4, (4,)) + b"t"
    raw = {"constants/0": RAW["data/0"]}
    with tensorio.open(hexfile.zip_file(cases.script_records(b"]", raw, constants))) as checkpoint:
        assert list(checkpoint) == ["constants.0"]


def test_keys_do_not_reach_into_other_folders() -> None:
    module = cases.script_object({"w": hexfile.tensor("../constants/0")})
    for key in ("../constants/0", "constants/0", "1"):
        module = cases.script_object({"w": hexfile.tensor(key)})
        with pytest.raises(HeaderError, match="no record"):
            tensorio.load(hexfile.zip_file(cases.script_records(module, {**RAW, "constants/0": RAW["data/0"]})))


def test_big_endian_records() -> None:
    records = cases.script_records(MODULE, {"data/0": np.arange(4, dtype=">f4").tobytes()})
    next(r for r in records if r.name == "m/byteorder").data = b"big"
    assert tensorio.load(hexfile.zip_file(records)).state["w"].tolist() == [0, 1, 2, 3]
    with tensorio.open(hexfile.zip_file(records)) as checkpoint:
        assert checkpoint["w"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_converting_keeps_names_and_values(suffix: str, tmp_path: Path) -> None:
    data = saved(scripted())
    target = tmp_path / f"x{suffix}"
    with tensorio.open(data) as source:
        want = {name: array.tobytes() for name, array in source.items()}
        if suffix == ".pt":
            with pytest.raises(UnsupportedError, match="can't be written"):
                tensorio.convert(data, target)
            tensorio.convert(data, target, rename={})
        else:
            tensorio.convert(data, target)
    with tensorio.open(target) as checkpoint:
        assert {name: array.tobytes() for name, array in checkpoint.items()} == want


def test_verify_finds_a_changed_weight() -> None:
    w = np.arange(5000, dtype="f4")
    module = cases.script_object({"w": hexfile.tensor("0", 5000, (5000,))})
    data = bytearray(hexfile.zip_file(cases.script_records(module, {"data/0": w.tobytes()})))
    assert tensorio.verify(bytes(data)).ok
    data[data.index(w[100:].tobytes()[:64])] ^= 1
    report = tensorio.verify(bytes(data))
    assert [problem.record for problem in report.problems] == ["m/data/0"]


def test_strict_has_no_reference() -> None:
    with pytest.raises(UnsupportedError, match="strict"):
        tensorio.open(saved(holder(torch.ones(1))), strict=True)


def test_torch_save_of_the_same_name_is_no_script(tmp_path: Path) -> None:
    torch.save({"constants.pkl": torch.ones(1)}, tmp_path / "x.pt")
    assert tensorio.identify(tmp_path / "x.pt") == "torch_zip"
    with pytest.raises(HeaderError, match=r"torch\.jit\.save"):
        tensorio.open(saved(holder(torch.ones(1))), format="torch_zip")


def test_saving_is_refused_with_words(tmp_path: Path) -> None:
    with warnings.catch_warnings(), pytest.raises(UnsupportedError, match="without its code"):
        tensorio.save({"x": np.ones(1)}, tmp_path / "x.ptl", format="torchscript")
    assert not list(tmp_path.iterdir())
