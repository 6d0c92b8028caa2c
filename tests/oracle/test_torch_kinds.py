"""Sparse, quantized, nested, meta and distributed tensors beside what torch makes of the same parts.

Results are equal bit for bit. Each tensor is made twice: from the parts that torch tells, and
by loading what ``torch.save`` wrote.
"""

from __future__ import annotations

import io
import itertools
import sys
import types
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is the oracle")

import tensorio  # noqa: E402
from _trees import assert_same_file, bits, record, saved, saved_by_torch  # noqa: E402
from tensorio.kinds import (  # noqa: E402
    JaggedTensor,
    MetaTensor,
    NestedTensor,
    QuantizedTensor,
    SubclassTensor,
    TensorKind,
)
from tensorio.kinds.dtensor import Mesh, Partial, Replicate, Shard, StridedShard  # noqa: E402
from tensorio.kinds.sparse import SparseTensor  # noqa: E402

Array = np.ndarray[Any, Any]
Make = Callable[[Any], Any]

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:Sparse .* support is in beta"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

# What torch can add, and so what it has dense tensors of.
DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64",
          "complex128"]  # fmt: skip
LAYOUTS = ["coo", "csr", "csc", "bsr", "bsc"]


# ------------------------------------------------------- the same by two ways


def array_of(tensor: Any) -> Array:
    """A tensor's array, of the same strides."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def from_parts(tensor: Any) -> TensorKind:
    """The kind of a torch tensor, made of what torch tells of it."""
    if tensor.layout == torch.sparse_coo:
        parts = array_of(tensor._indices()), array_of(tensor._values())
        return SparseTensor("coo", tuple(tensor.shape), *parts, None, tensor.is_coalesced())
    if tensor.layout == torch.jagged:
        lengths = tensor.lengths()
        parts = array_of(tensor._values), array_of(tensor.offsets())
        return JaggedTensor(*parts, None if lengths is None else array_of(lengths), tensor._ragged_idx)
    if tensor.layout != torch.strided:
        by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        pointers = tensor.crow_indices() if by_row else tensor.ccol_indices()
        plain = tensor.col_indices() if by_row else tensor.row_indices()
        name = str(tensor.layout).removeprefix("torch.sparse_")
        return SparseTensor(name, tuple(tensor.shape), *map(array_of, (plain, tensor.values(), pointers)))
    if tensor.is_nested:
        parts = tensor._nested_tensor_size(), tensor._nested_tensor_strides(), tensor._nested_tensor_storage_offsets()
        return NestedTensor(array_of(tensor.values()), *map(array_of, parts))
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    values = array_of(tensor.int_repr())
    if tensor.qscheme() == torch.per_tensor_affine:
        return QuantizedTensor(values, dtype, shape, "per_tensor_affine", tensor.q_scale(), tensor.q_zero_point())
    parts = array_of(tensor.q_per_channel_scales()), array_of(tensor.q_per_channel_zero_points())
    return QuantizedTensor(values, dtype, shape, "per_channel_affine", *parts, tensor.q_per_channel_axis())


def from_file(tensor: Any) -> Any:
    """The kind of a torch tensor, through a file."""
    kind = tensorio.load(saved_by_torch([tensor]))[0]
    assert isinstance(kind, TensorKind)
    return kind


both = pytest.mark.parametrize("make", [from_parts, from_file])


def assert_equal(got: Array, want: Any) -> None:
    """The same type, shape and bits as a plain tensor."""
    want = want.detach()
    assert got.dtype == array_of(want).dtype
    assert got.shape == tuple(want.shape)
    assert got.tobytes() == bits(want)


# ----------------------------------------------------------------------- sparse


def numbers(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> Any:
    """Values of a type, odd ones among them: both zeros, infinities, the smallest, and such as lose bits when added."""
    kind = getattr(torch, dtype)
    count = int(np.prod(shape))
    if dtype == "bool":
        return torch.tensor(rng.integers(0, 2, count)).bool().reshape(shape)
    if not kind.is_floating_point and not kind.is_complex:
        return torch.tensor(rng.integers(-(2**62), 2**62, count)).to(kind).reshape(shape)
    odd = np.array([0.0, -0.0, np.inf, 6e-8, -6e-5, 1e4, 65504.0, 1.0])
    real = np.where(rng.random(count) < 0.3, rng.choice(odd, count), rng.standard_normal(count) * 100)
    if not kind.is_complex:
        return torch.tensor(real).to(kind).reshape(shape)
    real = np.where(np.isfinite(real), real, -0.0)  # torch multiplies by 1 + 0j, which makes infinities NaNs
    return torch.tensor(real + 1j * rng.standard_normal(count)).to(kind).reshape(shape)


def random_coo(dtype: str, rng: np.random.Generator, coalesced: bool) -> Any:
    sparse, dense = int(rng.integers(0, 4)), int(rng.integers(0, 3))
    shape = tuple(int(n) for n in rng.integers(1, 5, sparse + dense))
    count = int(rng.integers(0, 12)) if sparse else int(rng.integers(0, 3))
    indices = torch.tensor(
        np.stack([rng.integers(0, n, count) for n in shape[:sparse]]) if sparse else np.zeros((0, count), "i8")
    )
    made = torch.sparse_coo_tensor(indices, numbers((count, *shape[sparse:]), dtype, rng), shape)
    return made.coalesce() if coalesced else made


def random_compressed(layout: str, dtype: str, rng: np.random.Generator) -> Any:
    """With and without batch and dense dimensions; each list of a batch has as many elements."""
    block = (int(rng.integers(1, 4)), int(rng.integers(1, 4)))
    rows, columns = block[0] * int(rng.integers(1, 4)), block[1] * int(rng.integers(1, 4))
    batch = (2,) * int(rng.integers(0, 3))
    dense = tuple(int(n) for n in rng.integers(1, 4, rng.integers(0, 2)))
    blocked = layout[0] == "b"
    grid = (rows // block[0], columns // block[1]) if blocked else (rows, columns)
    major, minor = grid if layout.endswith("sr") else grid[::-1]
    count = int(rng.integers(0, major * minor + 1))
    pointers, plain = [], []
    for _ in range(int(np.prod(batch))):
        places = np.sort(rng.choice(major * minor, count, replace=False))
        pointers.append(np.searchsorted(places, np.arange(major + 1) * minor))
        plain.append(places % minor)
    index = torch.int32 if rng.random() < 0.5 else torch.int64
    values = numbers((*batch, count, *(block if blocked else ()), *dense), dtype, rng)
    return torch.sparse_compressed_tensor(
        torch.tensor(np.array(pointers)).to(index).reshape(*batch, major + 1),
        torch.tensor(np.array(plain)).to(index).reshape(*batch, count),
        values, (*batch, rows, columns, *dense), layout=getattr(torch, f"sparse_{layout}"),
    )  # fmt: skip


@both
@pytest.mark.parametrize("coalesced", [False, True], ids=["as_made", "coalesced"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_coo_is_dense_as_in_torch(make: Make, coalesced: bool, dtype: str) -> None:
    rng = np.random.default_rng(1)
    for _ in range(40):
        tensor = random_coo(dtype, rng, coalesced)
        assert_equal(make(tensor).dense(), tensor.to_dense())


@both
@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("dtype", [*DTYPES])
def test_compressed_is_dense_as_in_torch(make: Make, layout: str, dtype: str) -> None:
    rng = np.random.default_rng(2)
    for _ in range(25):
        tensor = random_compressed(layout, dtype, rng)
        assert_equal(make(tensor).dense(), tensor.to_dense())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_complex32_is_dense_as_in_torch(layout: str) -> None:
    """torch can't add them, but knows where each goes."""
    values = torch.tensor([1 + 2j, -3.5j, 0.25]).to(torch.complex32)
    shown = torch.tensor([[0, 0, 1], [0, 2, 1]])
    if layout == "coo":
        tensor: Any = torch.sparse_coo_tensor(shown, values, (2, 3), is_coalesced=True)
    else:
        by_row = layout.endswith("sr")
        pointers = torch.tensor([0, 2, 3] if by_row else [0, 1, 2, 3])
        plain = torch.tensor([0, 2, 1] if by_row else [0, 1, 0])
        blocks = values.reshape(3, 1, 1) if layout[0] == "b" else values
        kind = getattr(torch, f"sparse_{layout}")
        tensor = torch.sparse_compressed_tensor(pointers, plain, blocks, (2, 3), layout=kind)
    got = from_file(tensor).dense()
    assert got.tobytes() == bits(tensor.to_dense())


def test_strided_and_expanded_parts_are_dense_as_in_torch() -> None:
    columns = torch.tensor([[0, 1], [2, 0], [2, 2]])
    one = torch.ones(1).expand(3)
    for values in (torch.arange(6.0)[::2], one, torch.randn(2, 3).t()):
        tensor = torch.sparse_coo_tensor(columns.t(), values, (3, 3, *values.shape[1:]))
        assert_equal(from_file(tensor).dense(), tensor.to_dense())
    same = torch.arange(3).expand(2, 3)
    tensor = torch.sparse_coo_tensor(same, one, (3, 3))
    assert_equal(from_file(tensor).dense(), tensor.to_dense())


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 2), ()])
def test_without_elements_is_dense_as_in_torch(shape: tuple[int, ...]) -> None:
    tensors = [torch.zeros(shape).to_sparse()]
    if len(shape) == 2:
        tensors += [torch.zeros(shape).to_sparse_csr(), torch.zeros(shape).to_sparse_csc()]
    for tensor in tensors:
        assert_equal(from_file(tensor).dense(), tensor.to_dense())


def test_many_elements_of_one_index_are_added_as_in_torch() -> None:
    """The sum depends on the order where bits are lost."""
    rng = np.random.default_rng(3)
    for dtype in ("float16", "bfloat16", "float32", "complex64"):
        values = numbers((5000,), dtype, rng)
        values = torch.where(
            torch.isfinite(torch.view_as_real(values).sum(-1) if values.is_complex() else values),
            values,
            torch.ones_like(values),
        )
        tensor = torch.sparse_coo_tensor(torch.tensor(rng.integers(0, 7, (1, 5000))), values, (7,))
        assert_equal(from_file(tensor).dense(), tensor.to_dense())


# -------------------------------------------------------------------- quantized

QDTYPES = {"qint8": torch.int8, "quint8": torch.uint8, "qint32": torch.int32}
SCALES = [1.0, 0.1, 1 / 3, 1e-3, 3.0000001, 1e-38, 1e-45, 3e38, 0.1 + 1e-12, 1e300]


def integers(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> Any:
    info = torch.iinfo(QDTYPES[dtype])
    values = rng.integers(info.min, info.max, shape, endpoint=True)
    return torch.tensor(np.where(rng.random(shape) < 0.2, rng.choice([info.min, info.max, 0], shape), values)).to(
        QDTYPES[dtype]
    )


def zero_point(dtype: str, rng: np.random.Generator) -> int:
    info = torch.iinfo(QDTYPES[dtype])
    return int(rng.integers(info.min, info.max, endpoint=True))


@both
@pytest.mark.parametrize("dtype", QDTYPES)
@pytest.mark.parametrize("scale", SCALES)
def test_per_tensor_is_dequantized_as_in_torch(make: Make, dtype: str, scale: float) -> None:
    rng = np.random.default_rng(4)
    for shape in ((), (0,), (1,), (7,), (16, 33), (2, 3, 5)):
        tensor = torch._make_per_tensor_quantized_tensor(integers(shape, dtype, rng), scale, zero_point(dtype, rng))
        assert_equal(make(tensor).dequantize(), tensor.dequantize())


@both
@pytest.mark.parametrize(
    ("dtype", "floating"), [("qint8", False), ("quint8", False), ("qint32", False), ("quint8", True)]
)
def test_per_channel_is_dequantized_as_in_torch(make: Make, dtype: str, floating: bool) -> None:
    rng = np.random.default_rng(5)
    for shape, axis in (((3,), 0), ((4, 5), 0), ((4, 5), 1), ((2, 3, 4), 1), ((2, 3, 4, 5), 3), ((0, 2), 0)):
        scales = torch.tensor(rng.choice(SCALES[: 5 if floating else None], shape[axis]))
        if floating:
            zeros = torch.tensor(rng.standard_normal(shape[axis]) * 10)
            values = torch.tensor(rng.standard_normal(shape) * 30).float()
            tensor = torch.quantize_per_channel(values, scales.float(), zeros.float(), axis, getattr(torch, dtype))
        else:
            zeros = torch.tensor([zero_point(dtype, rng) for _ in range(shape[axis])], dtype=torch.int64)
            tensor = torch._make_per_channel_quantized_tensor(integers(shape, dtype, rng), scales, zeros, axis)
        assert_equal(make(tensor).dequantize(), tensor.dequantize())


@pytest.mark.parametrize("dtype", ["quint4x2", "quint2x4"])
def test_packed_is_dequantized_as_in_torch(dtype: str) -> None:
    rng = np.random.default_rng(6)
    for shape in ((1, 1), (3, 5), (4, 8), (5, 7), (2, 16)):
        values = torch.tensor(rng.standard_normal(shape) * 8).float()
        scales, zeros = (torch.tensor(rng.random(shape[0])).float() + 0.1 for _ in range(2))
        tensor = torch.quantize_per_channel(values, scales, zeros, 0, getattr(torch, dtype))
        kind = from_file(tensor)
        assert kind.values.shape == (tensor.untyped_storage().nbytes(),)
        assert_equal(kind.dequantize(), tensor.dequantize())


@pytest.mark.parametrize("view", [
    lambda t: t.transpose(0, 1), lambda t: t[1:, ::2], lambda t: t[0], lambda t: t.unsqueeze(0).expand(3, 4, 6),
    lambda t: t[:, 2],
], ids=["transposed", "sliced", "selected", "expanded", "column"])  # fmt: skip
def test_strided_views_are_dequantized_as_in_torch(view: Callable[[Any], Any]) -> None:
    tensor = view(torch.quantize_per_tensor(torch.randn(4, 6), 0.1, 3, torch.qint8))
    kind = from_file(tensor)
    assert_equal(kind.dequantize(), tensor.dequantize())


def test_strided_views_per_channel_are_dequantized_as_in_torch() -> None:
    base = torch.quantize_per_channel(torch.randn(4, 6), torch.rand(6) + 0.1, torch.arange(6), 1, torch.quint8)
    for tensor in (base[:2], base[1::2], base[3:]):
        assert_equal(from_file(tensor).dequantize(), tensor.dequantize())


# ----------------------------------------------------------------------- nested


def assert_lists_equal(got: list[Array], want: Any) -> None:
    want = list(want)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert_equal(a, b)


@both
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int64", "bool"])
def test_nested_is_unbound_as_in_torch(make: Make, dtype: str) -> None:
    rng = np.random.default_rng(7)
    for count, rank in itertools.product((1, 2, 5), (0, 1, 2, 3)):
        shapes = [tuple(int(n) for n in rng.integers(0 if rank < 3 else 1, 4, rank)) for _ in range(count)]
        tensor = torch.nested.nested_tensor([numbers(shape, dtype, rng) for shape in shapes])
        assert_lists_equal(make(tensor).unbind(), tensor.unbind())


@both
def test_transposed_nested_is_unbound_as_in_torch(make: Make) -> None:
    tensor = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 1)]).transpose(1, 2)
    assert_lists_equal(make(tensor).unbind(), tensor.unbind())


def test_empty_nested_is_unbound_as_in_torch() -> None:
    tensor = torch.nested.nested_tensor([])
    assert from_file(tensor).unbind() == list(tensor.unbind()) == []


def jagged() -> dict[str, Any]:
    parts = [torch.randn(2, 3), torch.randn(0, 3), torch.randn(5, 3)]
    plain = torch.nested.nested_tensor(parts, layout=torch.jagged)
    starts, lengths = torch.tensor([0, 1, 4]), torch.tensor([1, 0, 2])
    return {
        "plain": plain, "transposed": plain.transpose(1, 2),
        "grad": torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True),
        "narrowed": torch.nested.narrow(torch.randn(3, 7, 2), 1, starts, lengths, layout=torch.jagged),
        "of_values": torch.nested.nested_tensor_from_jagged(torch.randn(6, 2), torch.tensor([0, 2, 6])),
    }  # fmt: skip


@both
@pytest.mark.parametrize("name", ["plain", "transposed", "grad", "narrowed", "of_values"])
def test_jagged_is_unbound_as_in_torch(make: Make, name: str) -> None:
    tensor = jagged()[name]
    assert_lists_equal(make(tensor).unbind(), tensor.unbind())
    assert from_file(tensor).requires_grad == tensor.requires_grad


# ----------------------------------------------------------------- round trips


def example(name: str) -> Any:
    return examples()[name]


@cache
def examples() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return made()


def made() -> dict[str, Any]:
    torch.manual_seed(0)
    dense = torch.randn(4, 6).relu()
    channels = torch.rand(4) + 0.1, torch.arange(4), 0
    base = torch.quantize_per_tensor(torch.randn(4, 6), 0.5, 3, torch.qint8)
    return {
        "coo": dense.to_sparse(), "coo_hybrid": dense.to_sparse(1), "bool": (dense > 0).to_sparse(),
        "uncoalesced": torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2), (3,)),
        "csr": dense.to_sparse_csr(), "csc": dense.to_sparse_csc(), "bsr": dense.to_sparse_bsr((2, 3)),
        "bsc": dense.to_sparse_bsc((2, 3)), "batched": dense.reshape(2, 2, 6).clamp(min=1).to_sparse_csr(),
        "bfloat16": dense.bfloat16().to_sparse_csr(), "qint8": base, "qint8_view": base[1:, ::2].transpose(0, 1),
        "quint8": torch.quantize_per_tensor(dense, 1e-3, 0, torch.quint8),
        "qint32": torch.quantize_per_tensor(dense, 1e-3, -7, torch.qint32),
        "per_channel": torch.quantize_per_channel(dense, *channels, torch.qint8),
        "float_qparams": torch.quantize_per_channel(dense, channels[0], torch.rand(4), 0, torch.quint8),
        "quint4x2": torch.quantize_per_channel(dense, channels[0], torch.rand(4), 0, torch.quint4x2),
        "quint2x4": torch.quantize_per_channel(dense[:, :5], channels[0], torch.rand(4), 0, torch.quint2x4),
        "nested": torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(1, 3)]),
        "meta": torch.empty_strided((2, 3), (1, 2), device="meta", dtype=torch.float8_e5m2, requires_grad=True),
        **{f"jagged_{name}": tensor for name, tensor in jagged().items()},
    }  # fmt: skip


EXAMPLES = [
    "coo",
    "coo_hybrid",
    "bool",
    "uncoalesced",
    "csr",
    "csc",
    "bsr",
    "bsc",
    "batched",
    "bfloat16",
    "qint8",
    "qint8_view",
    "quint8",
    "qint32",
    "per_channel",
    "float_qparams",
    "quint4x2",
    "quint2x4",
    "nested",
    "meta",
    "jagged_plain",
    "jagged_transposed",
    "jagged_grad",
    "jagged_narrowed",
    "jagged_of_values",
]


def assert_same_tensor(got: Any, want: Any) -> None:
    """Two torch tensors of any kind."""
    assert (type(got), got.dtype, got.layout, got.is_quantized, got.is_nested, got.requires_grad) == (
        type(want), want.dtype, want.layout, want.is_quantized, want.is_nested, want.requires_grad,
    )  # fmt: skip
    if got.is_nested:
        assert len(got.unbind()) == len(want.unbind())
        for a, b in zip(got.unbind(), want.unbind(), strict=True):
            assert_same_tensor(a.detach(), b.detach())
        return
    assert got.shape == want.shape
    if got.is_quantized:
        assert got.qscheme() == want.qscheme()
        assert got.stride() == want.stride()
        got, want = got.dequantize(), want.dequantize()
    elif got.device.type == "meta":
        assert got.stride() == want.stride()
        return
    elif got.layout == torch.sparse_coo:
        assert got.is_coalesced() == want.is_coalesced()
    assert bits(got.to_dense()) == bits(want.to_dense())


@pytest.mark.parametrize("name", EXAMPLES)
def test_written_again_torch_reads_the_same(name: str) -> None:
    tensor = example(name)
    ours = saved(tensorio.load(saved_by_torch({"w": tensor, "again": tensor})))
    got = torch.load(io.BytesIO(ours), weights_only=True)
    assert got["w"] is got["again"]
    assert_same_tensor(got["w"], tensor)


# Views of part of a storage (we write the part), and attributes that we drop.
OTHERWISE = {"csr", "csc", "bsr", "bsc", "batched", "bfloat16", "qint8_view"}


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the layout is that of torch 2.13")
@pytest.mark.parametrize("name", sorted(n for n in set(EXAMPLES) - OTHERWISE if not n.startswith("jagged")))
def test_written_again_the_file_is_the_same(name: str) -> None:
    theirs = saved_by_torch({"w": example(name), "again": [example(name)]})
    assert_same_file(saved(tensorio.load(theirs)), theirs)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "meta"])
def test_opened_its_parts_have_names(name: str) -> None:
    data = saved_by_torch({"a": [example(name)], "b": 1})
    with tensorio.open(data) as checkpoint:
        loaded = tensorio.load(data)["a"][0]
        assert list(checkpoint) == [f"a.0.{part}" for part in loaded.parts()]
        kind = checkpoint["a.0"]
        assert type(kind) is type(loaded)
        for part, want in loaded.parts().items():
            info = checkpoint.infos[f"a.0.{part}"]
            assert (info.dtype, info.shape) == (want.dtype.name, want.shape)
            for got in (checkpoint[f"a.0.{part}"], kind.parts()[part], checkpoint.tree()["a"][0].parts()[part]):
                assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("name", EXAMPLES)
def test_converted_torch_reads_the_same(name: str, tmp_path: Path) -> None:
    tensor = example(name)
    (tmp_path / "a.pt").write_bytes(saved_by_torch({"w": tensor, "again": [tensor]}))
    tensorio.convert(tmp_path / "a.pt", tmp_path / "b.pt")
    got = torch.load(tmp_path / "b.pt", weights_only=True)
    assert got["w"] is got["again"][0]
    assert_same_tensor(got["w"], tensor)


def test_made_by_hand_torch_reads_it() -> None:
    """Of plain arrays, strided, byte-swapped and shared ones among them."""
    values = np.arange(6, dtype=">f4")[::-2]
    kind = SparseTensor("coo", (4,), np.array([[3, 0, 3]]), values)
    packed = QuantizedTensor(np.arange(6, dtype=np.int8)[::-1], "qint8", (6,), "per_tensor_affine", 0.5, 1)
    listed = NestedTensor(np.arange(5.0), np.array([[2], [3]]), np.array([[1], [1]]), (0, 2))
    swapped = QuantizedTensor(np.arange(4, dtype=">i4"), "qint32", (4,), "per_channel_affine", (1.0,) * 4, (0,) * 4, 0)
    got = torch.load(io.BytesIO(saved([kind, packed, listed, swapped])), weights_only=True)
    assert got[0].to_dense().tolist() == kind.dense().tolist() == [3, 0, 0, 6]
    assert got[1].dequantize().tolist() == packed.dequantize().tolist()
    assert [t.tolist() for t in got[2].unbind()] == [[0, 1], [2, 3, 4]]
    assert got[3].dequantize().tolist() == [0, 1, 2, 3]


def test_bytes_shared_with_plain_integers_are_stored_twice() -> None:
    """A torch file may not have one storage of two types."""
    values = np.arange(6, dtype=np.int8)
    kind = QuantizedTensor(values[1:], "qint8", (5,), "per_tensor_affine", 1.0, 0)
    other = QuantizedTensor(values[3:], "qint8", (3,), "per_tensor_affine", 2.0, 0)
    got = torch.load(io.BytesIO(saved([values, kind, values[:2], other])), weights_only=True)
    assert got[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert got[1].int_repr().tolist() == [1, 2, 3, 4, 5]
    assert got[2].tolist() == [0, 1]
    assert got[3].dequantize().tolist() == [6, 8, 10]
    keys = [t.untyped_storage().data_ptr() for t in got]
    assert (keys[0] == keys[2], keys[1] == keys[3], keys[0] == keys[1]) == (True, True, False)


def test_packed_integers_must_have_bytes_of_their_own() -> None:
    values = np.arange(6, dtype=np.uint8)
    kinds = [QuantizedTensor(values[i:], "quint4x2", (2,), "per_tensor_affine", 1.0, 0) for i in range(2)]
    with pytest.raises(tensorio.UnsupportedError, match="shares its bytes"):
        saved(kinds)


@pytest.mark.parametrize("kind", [
    SparseTensor("coo", (4,), np.array([[0]]), np.zeros(2)), SparseTensor("csr", (1, 1), np.array([0]), np.zeros(1)),
    QuantizedTensor(np.zeros(2), "qint8", (2,), "per_tensor_affine", 1.0, 0),
    QuantizedTensor(np.zeros(2, np.int8), "qint8", (3,), "per_tensor_affine", 1.0, 0),
    QuantizedTensor(np.zeros(2, np.int8), "int8", (2,), "per_tensor_affine", 1.0, 0),
    NestedTensor(np.zeros(3), np.array([1]), np.array([1]), np.array([0])),
], ids=str)  # fmt: skip
def test_parts_that_do_not_fit_are_not_written(kind: TensorKind) -> None:
    with pytest.raises(tensorio.HeaderError):
        saved(kind)


def test_pieces_and_subclasses_are_not_written() -> None:
    from tensorio.kinds.dtensor import DTensor

    piece = DTensor(np.zeros(2), (4,), "float64", (Shard(0),), Mesh("cpu", (2,)))
    for kind in (piece, SubclassTensor(np.zeros(2), "some.module", "Class")):
        with pytest.raises(tensorio.UnsupportedError, match="save its parts"):
            saved({"w": kind})


def test_names_with_newlines_are_not_written() -> None:
    with pytest.raises(Exception, match="not a name"):
        saved(MetaTensor("float32\nos\nsystem", (1,), (1,)))


@pytest.mark.parametrize("without", [False, True], ids=["with_torch", "without_torch"])
def test_the_file_is_the_same_without_torch(without: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = tensorio.load(saved_by_torch({name: t for name, t in examples().items() if name not in OTHERWISE}))
    want = record(saved(kinds), "data.pkl")
    if without:
        for module in [m for m in sys.modules if m == "torch" or m.startswith("torch.")]:
            monkeypatch.delitem(sys.modules, module)
    assert record(saved(kinds), "data.pkl") == want


# -------------------------------------------------------------------- parameters


def parameter_of(name: str) -> Any:
    bare = example(name).detach() if name == "meta" else example(name)
    return torch.nn.Parameter(bare, requires_grad=name not in ("qint8", "meta"))


PARAMETERS = ["coo", "csr", "meta", "qint8"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_written_as_parameters(name: str) -> None:
    want = parameter_of(name)
    kind = from_file(want).as_parameter(want.requires_grad)
    got = torch.load(io.BytesIO(saved([kind, kind])), weights_only=True)
    assert got[0] is got[1]
    assert isinstance(got[0], torch.nn.Parameter)
    assert_same_tensor(got[0].detach(), want.detach())
    if name not in OTHERWISE:
        assert record(saved(kind), "data.pkl") == record(saved_by_torch(want), "data.pkl")


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_read_as_parameters(name: str) -> None:
    want = parameter_of(name)
    kind = from_file(want)
    assert (kind.parameter, kind.requires_grad) == (True, want.requires_grad)


# ----------------------------------------------------------- values beside tensors


def test_tags_and_types_are_written_as_they_were() -> None:
    tree = [torch.qint8, torch.int4, torch.uint7, torch.per_channel_affine, torch.strided, torch.sparse_bsc,
            torch.jagged, torch.Tensor, torch.nn.Parameter, torch.strided]  # fmt: skip
    theirs = saved_by_torch(tree)
    ours = saved(tensorio.load(theirs))
    assert torch.load(io.BytesIO(ours), weights_only=True) == tree
    assert record(ours, "data.pkl") == record(theirs, "data.pkl")


def test_buffers_lose_their_attributes() -> None:
    got = tensorio.load(saved_by_torch(torch.nn.Buffer(torch.ones(2))))
    assert type(got) is np.ndarray
    assert got.tolist() == [1, 1]


def test_uninitialized_parameters_are_inert() -> None:
    got = tensorio.load(saved_by_torch(torch.nn.LazyLinear(3).state_dict()))
    assert [(o.name, o.args) for o in got.values()] == [("UninitializedParameter", (True,))] * 2


# ------------------------------------------------------------------- subclasses


def test_subclass_is_kept_with_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("some_module")
    module.Sub = type("Sub", (torch.Tensor,), {"__module__": "some_module"})
    monkeypatch.setitem(sys.modules, "some_module", module)
    tensor = torch.arange(3.0).as_subclass(module.Sub)
    tensor.scale = torch.ones(2)
    data = saved_by_torch({"w": tensor})
    with pytest.raises(tensorio.UnsafePickleError, match=r"some_module\.Sub"):
        tensorio.load(data)
    kind = tensorio.load(data, unknown="opaque")["w"]
    assert (type(kind), kind.module, kind.name) == (SubclassTensor, "some_module", "Sub")
    assert kind.tensor.tolist() == [0, 1, 2]
    assert kind.state["scale"].tolist() == [1, 1]


# ---------------------------------------------------------------------- DTensor


def placement_of(placement: Any) -> Any:
    """Our word for torch's."""
    name = type(placement).__name__
    if name == "_StridedShard":
        return StridedShard(placement.dim, placement.split_factor)
    if name == "Shard":
        return Shard(placement.dim)
    return Replicate() if name == "Replicate" else Partial(placement.reduce_op)


def spread(rank: int, world: int) -> None:
    """Make DTensors as one of several processes (the others are feigned), and compare them with what we load."""
    from torch import distributed
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torch.distributed.tensor import Partial as Sum
    from torch.distributed.tensor import Replicate as Whole
    from torch.distributed.tensor import Shard as Split
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    grid = init_device_mesh("cpu", (2, 2, world // 4), mesh_dim_names=("pp", "dp", "tp"))
    line, odd = init_device_mesh("cpu", (world,)), DeviceMesh("cpu", torch.arange(world).flip(0).reshape(2, -1))
    whole = torch.arange(60.0).reshape(10, 6)
    made = {
        "line": distribute_tensor(whole, line, [Split(0)]), "whole": distribute_tensor(whole, line, [Whole()]),
        "grid": distribute_tensor(whole, grid, [Split(0), Whole(), Split(1)]),
        "names": distribute_tensor(whole.bfloat16(), grid["dp", "tp"], [Split(1), Split(0)]),
        "slice": distribute_tensor(whole, grid["pp"], [Split(0)]),
        "flat": distribute_tensor(whole, grid["pp", "dp"]._flatten(), [Split(0)]),
        "reversed": distribute_tensor(whole, odd, [Whole(), Split(1)]),
        "partial": DTensor.from_local(torch.ones(3), line, [Sum("avg")]),
        "strided": DTensor.from_local(torch.ones(3, 2), odd, [_StridedShard(0, split_factor=2), Split(0)]),
        "grad": torch.nn.Parameter(distribute_tensor(whole, line, [Split(1)])).detach().requires_grad_(),
        "scalar": DTensor.from_local(torch.tensor(3), line, [Whole()]),
    }  # fmt: skip
    loaded = tensorio.load(saved_by_torch(made))
    for name, tensor in made.items():
        kind = loaded[name]
        mesh = tensor.device_mesh
        assert (kind.shape, kind.dtype) == (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")), name
        assert kind.requires_grad == tensor.requires_grad, name
        assert kind.placements == tuple(map(placement_of, tensor.placements)), name
        assert kind.mesh == Mesh("cpu", tuple(mesh.shape), mesh.mesh_dim_names, tuple(mesh.mesh.flatten().tolist()),
                                 tuple(mesh.get_coordinate())), name  # fmt: skip
        assert kind.local.tobytes() == bits(tensor.to_local()), name


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.parametrize(("rank", "world"), [(0, 4), (3, 4), (5, 8)])
def test_pieces_are_those_that_torch_has(rank: int, world: int, in_child: Any) -> None:
    in_child(spread, rank, world)


def test_pieces_saved_by_four_processes_make_the_whole(shared: Any) -> None:
    folder = shared / "samples" / "dcp" / "4rank_dtensor_pt"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    pieces = [tensorio.load(folder / "ckpt" / f"model_world_size_4_rank_{rank}.pt") for rank in range(4)]
    for name in ("s0", "s0s1", "rep", "hsdp", "bf"):
        kinds = [piece[name] for piece in pieces]
        want = np.load(folder / "expected" / f"{name}.npy")
        assert all(kind.shape == want.shape for kind in kinds)
        assert [kind.mesh.ranks[np.ravel_multi_index(kind.mesh.coordinate, kind.mesh.shape)] for kind in kinds] == [
            0,
            1,
            2,
            3,
        ]
        for kind in kinds:
            place = [slice(None)] * want.ndim
            for where, at, size in zip(kind.placements, kind.mesh.coordinate, kind.mesh.shape, strict=True):
                if isinstance(where, Shard):
                    step = -(-want.shape[where.dim] // size)
                    place[where.dim] = slice(at * step, (at + 1) * step)
            assert kind.local.view(want.dtype).tolist() == want[tuple(place)].tolist()
