"""Whole pickled modules: their state dict equals the one that torch gives, in names, order and values."""

from __future__ import annotations

import collections
import io
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensorio
from tensorio import HeaderError, LimitError, Opaque, modules

warnings.filterwarnings("ignore", "enable_nested_tensor is True", UserWarning)


class Named(nn.Module):
    """Parameters, buffers of both kinds, what is None, other tensors, modules in a list, a dict, and by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Conv1d(1, 1, 3, bias=False)])
        self.heads = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Identity()})
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("passing", torch.arange(4), persistent=False)
        self.register_buffer("missing", None)
        self.register_parameter("nothing", None)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.params = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(1))])
        self.table = nn.ParameterDict({"x": nn.Parameter(torch.ones(1))})
        self.absent: nn.Module | None = None
        self.register_module("unset", None)
        self.cache = torch.full((2,), 7.0)
        self.again = self.layers[0]


class Tied(nn.Module):
    """A language model's head that is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


class Deep(nn.Module):
    """Modules in one another, deeper than calls may go."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        if depth:
            self.inner = Deep(depth - 1)


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def spectral() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(3, 3))  # parameter, vector and their hooks


MODULES = {
    "linear": lambda: nn.Linear(2, 3),
    "convolutions": convolutions,
    "channels_last": lambda: convolutions().to(memory_format=torch.channels_last),
    "half_eval": lambda: convolutions().bfloat16().eval(),
    "encoder": encoder,
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "gru_in_a_dict": lambda: nn.ModuleDict({"rnn": nn.GRU(2, 2)}),
    "named": Named,
    "tied": Tied,
    "data_parallel": lambda: nn.DataParallel(convolutions()),
    "spectral_norm": spectral,
    "no_parameters": lambda: nn.Sequential(nn.ReLU()),
    "deep": lambda: Deep(60),
    "graph": lambda: torch.fx.symbolic_trace(convolutions()),
}


def equal(got: OrderedDict[str, Any], want: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(want)
    assert type(got) is OrderedDict
    for name, tensor in want.items():
        array = got[name]
        assert isinstance(array, np.ndarray), name
        assert array.shape == tuple(tensor.shape), name
        bits = tensor.detach().contiguous().flatten().view(torch.uint8).numpy() if tensor.numel() else np.empty(0)
        assert np.ascontiguousarray(array).tobytes() == bits.tobytes(), name
        assert str(array.dtype) == str(tensor.dtype).removeprefix("torch."), name


def written(obj: Any, legacy: bool = False, protocol: int = 2) -> bytes:
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # legacy files: the source of a class could not be found
        torch.save(obj, out, _use_new_zipfile_serialization=not legacy, pickle_protocol=protocol)
    return out.getvalue()


def load(data: bytes) -> Any:
    return tensorio.load(data, unknown="opaque")


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("case", MODULES)
def test_state_dict_is_that_of_torch(case: str, protocol: int) -> None:
    module = MODULES[case]()
    equal(tensorio.state_dict(load(written(module, protocol=protocol))), module.state_dict())


@pytest.mark.parametrize("case", MODULES)
def test_state_dict_of_a_legacy_file_is_that_of_torch(case: str) -> None:
    module = MODULES[case]()
    equal(tensorio.state_dict(load(written(module, legacy=True))), module.state_dict())


def test_tied_parameters_share_memory() -> None:
    got = tensorio.state_dict(load(written(Tied())))
    assert np.shares_memory(got["embed.weight"], got["head.weight"])


@pytest.mark.parametrize("old", ["_non_persistent_buffers_set", "_forward_hooks", "_is_full_backward_hook"])
def test_state_dict_of_a_module_of_old_torch(old: str) -> None:
    """Releases before 1.6 had no buffers that are not persistent."""
    module = Named()
    module._non_persistent_buffers_set.clear()
    want = module.state_dict()
    for inner in module.modules():
        del inner.__dict__[old]
    equal(tensorio.state_dict(load(written(module))), want)


def test_module_in_a_container_is_found() -> None:
    module = convolutions()
    got = load(written({"epoch": 3, "nested": [{"model": module}], "also": module, "optimizer": {"state": {}}}))
    equal(tensorio.state_dict(got), module.state_dict())
    assert [path for path, _ in modules.find(got)] == [("nested", 0, "model")]


def test_module_in_an_unknown_object_is_found() -> None:
    holder = collections.UserString("x")
    holder.model = nn.Linear(1, 1)  # type: ignore[attr-defined]
    equal(tensorio.state_dict(load(written([holder]))), holder.model.state_dict())  # type: ignore[attr-defined]


def test_several_modules_are_named() -> None:
    got = load(written({"g": nn.Linear(1, 1), "d": [nn.Linear(1, 1)]}))
    with pytest.raises(ValueError, match=r"found 2: \['g'\], \['d'\]\['0'\]"):
        tensorio.state_dict(got)
    assert list(tensorio.state_dict(got["g"])) == ["weight", "bias"]


@pytest.mark.parametrize("obj", [{}, None, [1, {"a": "b"}], {"weight": np.ones(3)}], ids=repr)
def test_no_module_is_a_type_error(obj: Any) -> None:
    with pytest.raises(TypeError, match="found none"):
        tensorio.state_dict(obj)


def test_an_object_that_holds_itself_ends() -> None:
    obj: list[Any] = [{}]
    obj[0]["again"] = obj
    with pytest.raises(TypeError):
        tensorio.state_dict(obj)


# ------------------------------------------------------------------ TorchScript


class Script(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = convolutions()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(1))
        self.words = ["a", "b"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.weight + self.count


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_state_dict_of_a_script_module_is_that_of_torch(tmp_path: Path) -> None:
    scripted = torch.jit.script(Script())
    scripted.save(tmp_path / "a.pt")
    try:
        obj = load((tmp_path / "a.pt").read_bytes())
    except tensorio.TensorIOError as error:
        pytest.skip(f"TorchScript is not read yet: {error}")
    equal(tensorio.state_dict(obj), scripted.state_dict())


def test_script_modules_are_known_by_their_names() -> None:
    inner = opaque("__torch__.torch.nn.modules.linear.Linear", {"weight": np.ones(2), "training": True, "bias": None})
    outer = opaque("__torch__.Net", {"training": True, "scale": np.zeros(1), "fc": inner, "words": ["a"]})
    got = tensorio.state_dict(outer)
    assert {name: array.tolist() for name, array in got.items()} == {"scale": [0], "fc.weight": [1, 1]}
    assert not modules.is_module(opaque("__torch__.torch.classes.quantized.LinearPackedParamsBase", {}))


# --------------------------------------------------------------------- quantised


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant = torch.ao.quantization.QuantStub()
        self.conv = nn.Conv2d(1, 2, 3)
        self.fc = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.conv(self.quant(x)).mean((2, 3)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["static", "dynamic", "embedding"])
def test_state_dict_of_a_quantised_module_has_the_names_of_torch(kind: str) -> None:
    if kind == "embedding":
        module: nn.Module = torch.ao.nn.quantized.Embedding(4, 4)
    elif kind == "dynamic":
        module = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 2)), {nn.Linear}, dtype=torch.qint8)
    else:
        module = Quantised().eval()
        module.qconfig = torch.ao.quantization.get_default_qconfig("fbgemm")  # type: ignore[assignment]
        prepared = torch.ao.quantization.prepare(module)
        prepared(torch.randn(1, 1, 4, 4))
        module = torch.ao.quantization.convert(prepared)
    want = module.state_dict()
    got = tensorio.state_dict(load(written(module)))
    assert list(got) == list(want)
    for name, value in want.items():
        if name.endswith(("scale", "zero_point", "bias")):
            np.testing.assert_array_equal(got[name], value.detach().numpy(), strict=True)
        elif isinstance(value, torch.dtype):
            assert f"torch.{got[name]}" == str(value)
        elif isinstance(value, tuple):
            np.testing.assert_array_equal(got[name][1], value[1].detach().numpy(), strict=True)
            np.testing.assert_array_equal(got[name][0].dequantize(), value[0].dequantize().numpy(), strict=True)
        else:
            np.testing.assert_array_equal(got[name].dequantize(), value.dequantize().numpy(), strict=True)


# ------------------------------------------------------------------------ files


@pytest.mark.parametrize("path", [
    "files/tracel_ai_burn/bb5550_mnist.pt", "files/atomistic_machine_learning_schnetpack/1a3670_best_model",
    "files/atomistic_machine_learning_schnetpack/si16.model",
])  # fmt: skip
def test_modules_of_classes_that_are_not_installed(corpus: Path, path: str) -> None:
    if not (corpus / path).is_file():
        pytest.skip("not in this corpus")
    got = tensorio.state_dict(tensorio.load(corpus / path, unknown="opaque"))
    assert got
    assert all(isinstance(array, np.ndarray) and name.isascii() for name, array in got.items())
    with tensorio.open(corpus / path, unknown="opaque") as checkpoint:
        rows = {id(array.base) for array in got.values()}
        assert rows
        assert {array.tobytes() for array in got.values()} <= {checkpoint[name].tobytes() for name in checkpoint}


# ---------------------------------------------------------------------- hostile


def opaque(name: str, state: Any, args: tuple[Any, ...] = ()) -> Opaque:
    module, _, last = name.rpartition(".")
    made = Opaque(module, last, args)
    made.state = state
    return made


def module(parameters: Any = None, children: Any = None, **more: Any) -> Opaque:
    return opaque("a.B", {"_parameters": parameters or {}, "_buffers": {}, "_modules": children or {}, **more})


def test_a_module_that_holds_itself_is_refused() -> None:
    inner = module({"w": 1})
    outer = module(children={"a": inner})
    inner.state["_modules"]["b"] = outer  # type: ignore[index]
    with pytest.raises(HeaderError, match="itself"):
        tensorio.state_dict(outer)


def test_modules_shared_a_thousandfold_are_refused() -> None:
    node = module({"w": 1})
    for _ in range(60):
        node = module(children={"a": node, "b": node})
    with pytest.raises(LimitError, match="shared"):
        tensorio.state_dict(node)


def test_modules_that_share_their_parts_take_no_time() -> None:
    """Each level has all of the others inside it, and much that is to be skipped before them."""
    held: dict[str, Any] = {f"junk{i}": None for i in range(100_000)}
    for i in range(500):
        held[f"m{i}"] = opaque("a.B", {"_parameters": {}, "_modules": held})
    with pytest.raises((HeaderError, LimitError)):
        tensorio.state_dict(held["m0"])


def test_modules_too_deep_in_one_another_are_refused() -> None:
    node = module({"w": 1})
    for _ in range(20_000):
        node = module(children={"a": node})
    with pytest.raises((HeaderError, LimitError)):
        tensorio.state_dict(node)


@pytest.mark.parametrize("bad", [
    module({5: 1}), module({("a",): 1}), module(children={5: module()}),
    module({"a.w": 1}, children={"a": module({"w": 2})}),
], ids=["int", "tuple", "int_module", "twice"])  # fmt: skip
def test_names_that_torch_has_not_are_refused(bad: Opaque) -> None:
    with pytest.raises(HeaderError):
        tensorio.state_dict(bad)


@pytest.mark.parametrize("odd", [
    opaque("a.B", {"_parameters": [], "_modules": {}}), opaque("a.B", None), opaque("a.B", {"_modules": {}}),
    opaque("torch.ao.nn.quantized.modules.conv.Conv2d", (1, 2)), opaque("__torch__.A", [1]), Opaque("a", "B"),
], ids=["list", "none", "no_parameters", "short_conv", "script_list", "class"])  # fmt: skip
def test_what_only_looks_like_a_module_is_none(odd: Opaque) -> None:
    assert not modules.is_module(odd)


@pytest.mark.parametrize("packed", [None, (), ((),), (5,), ((1, []),), ((1, [2]), "x")])
def test_odd_packed_weights_end_well(packed: Any) -> None:
    node = module(_packed_weight=opaque("torch.ScriptObject", packed), dtype="quint8")
    node.module = "torch.ao.nn.quantized.modules.embedding_ops"
    assert list(tensorio.state_dict(node)) == ["dtype", "_packed_weight"]


# --------------------------------------------------------- names in a checkpoint


@pytest.mark.parametrize("case", MODULES)
def test_checkpoint_of_a_module_has_the_names_of_its_state_dict(case: str, tmp_path: Path) -> None:
    whole = MODULES[case]()
    (tmp_path / "a.pt").write_bytes(written(whole))
    want = whole.state_dict()
    with tensorio.open(tmp_path / "a.pt", unknown="opaque") as checkpoint:
        equal(OrderedDict((name, checkpoint[name]) for name in checkpoint if name in want), want)
        extra = {name.rpartition(".")[2] for name in checkpoint.keys() - want.keys()}
    assert extra == EXTRA.get(case, set())
    tensorio.convert(tmp_path / "a.pt", tmp_path / "a.safetensors", unknown="opaque")
    got = tensorio.load(tmp_path / "a.safetensors")
    equal(OrderedDict((name, got[name]) for name in want), want)


# Tensors that are no parameters, and buffers that are not persistent: a state dict has none of them.
EXTRA = {"named": {"passing", "cache"}, "spectral_norm": {"weight"}}


def walked(node: Any, prefix: str = "") -> dict[str, Any]:
    """Tensors by the names that `module_children` gives, and a check that its steps lead there."""
    out = {}
    for steps, name, value in modules.module_children(node):
        found: Any = node
        for step in steps:
            found = getattr(found, step) if isinstance(found, Opaque) else found[step]
        assert found is value
        if modules.is_module(value):
            out.update(walked(value, f"{prefix}{name}."))
        elif isinstance(value, np.ndarray):
            out[prefix + name] = value
    return out


@pytest.mark.parametrize("case", MODULES)
def test_module_children_name_the_state_dict_first(case: str) -> None:
    whole = MODULES[case]()
    obj = load(written(whole))
    got, want = walked(obj), tensorio.state_dict(obj)
    assert {name: got[name] for name in want if name in got}.keys() == want.keys()
    assert all(got[name] is want[name] for name in want)
    extra = {name.rpartition(".")[2] for name in got.keys() - want.keys()}
    assert extra == EXTRA.get(case, set())


def test_module_children_leave_nothing_out() -> None:
    node = module({"w": 1}, epoch=3, _flat_weights=[1])
    node.args, node.items = (7,), [("k", 8)]
    got = [(name, value) for _, name, value in modules.module_children(node)]
    assert got == [("w", 1), ("epoch", 3), ("args.0", 7), ("items", [("k", 8)])]


def test_module_of_an_allowed_class_gives_its_state_dict() -> None:
    """Its parameters are arrays; what is inside it may still be opaque."""
    whole = Named()
    got = tensorio.load(written({"model": whole}), unknown="opaque", allow=[Named])
    assert type(got["model"]) is Named
    equal(tensorio.state_dict(got), whole.state_dict())
