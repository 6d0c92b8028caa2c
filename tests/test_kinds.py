"""Tensors that NumPy has no array for: what they are made of, what is computed, what is refused."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tensorio import HeaderError, LimitError, TensorMismatchError, UnsupportedError
from tensorio._unpickler import Leaf
from tensorio.allowlist import ALLOWED
from tensorio.kinds._base import (
    JaggedTensor,
    MetaTensor,
    NestedTensor,
    QuantizedTensor,
    SubclassTensor,
    TensorKind,
    described,
)
from tensorio.kinds.dtensor import DTensor, Mesh, Partial, Replicate, Shard, StridedShard
from tensorio.kinds.sparse import SparseTensor
from tensorio.machine.rebuild_kinds import KINDS
from tensorio.values import Device, Opaque, Size, TorchDType, TorchTag

Array = np.ndarray[Any, Any]


class Known:
    """What the pickle machine tells of its tensors; leaves are described by a dict."""

    def __init__(self, leaves: dict[int, tuple[str, tuple[int, ...], tuple[int, ...]]] | None = None) -> None:
        self.leaves = leaves or {}

    def is_tensor(self, obj: object) -> bool:
        return type(obj) in (Leaf, np.ndarray)

    def describe(self, tensor: Any) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        return self.leaves[tensor.row] if type(tensor) is Leaf else described(tensor)


def rebuilt(kind: str, *args: Any, facts: Any = None) -> Any:
    return KINDS[kind](args, facts or Known())


def ints(*values: Any) -> Array:
    return np.array(values, np.int64)


def floats(count: int) -> Array:
    return np.arange(1, count + 1, dtype=np.float32)


COO = TorchTag("torch.sparse_coo")
CSR = TorchTag("torch.sparse_csr")
AFFINE = TorchTag("torch.per_tensor_affine")
CHANNELS = TorchTag("torch.per_channel_affine")


def coo(indices: Array, values: Array, shape: tuple[int, ...]) -> SparseTensor:
    return SparseTensor("coo", shape, indices, values)


def qint8(values: Array, quantizer: tuple[Any, ...], **changes: Any) -> Any:
    last = {"grad": False, "storage": "QInt8Storage", "place": (0, values.shape, (1,) * values.ndim), **changes}
    return rebuilt("rebuild_qtensor", values, quantizer, last["grad"], last["storage"], last["place"])


EXAMPLES: dict[str, TensorKind] = {
    "coo": coo(ints([0, 1]), floats(2), (3,)),
    "csr": SparseTensor("csr", (2, 2), ints(0, 1), floats(2), ints(0, 1, 2)),
    "per_tensor": QuantizedTensor(np.zeros((2, 3), np.int8), "qint8", (2, 3), "per_tensor_affine", 0.5, 1),
    "per_channel": QuantizedTensor(np.zeros(2, np.int8), "qint8", (2,), "per_channel_affine", floats(2), ints(0, 0), 0),
    "nested": NestedTensor(floats(4), ints([1], [3]), ints([1], [1]), ints(0, 1)),
    "jagged": JaggedTensor(floats(4), ints(0, 1, 4)),
    "meta": MetaTensor("float32", (2, 3), (3, 1)),
    "dtensor": DTensor(floats(2), (4,), "float32", (Shard(0),), Mesh("cpu", (2,), ("tp",), (0, 1), (1,))),
    "subclass": SubclassTensor(floats(2), "some.module", "Class", {"scale": floats(1)}),
}
PARTS = {
    "coo": ["indices", "values"], "csr": ["compressed", "indices", "values"], "per_tensor": ["values"],
    "per_channel": ["values", "scale", "zero_point"], "nested": ["buffer", "sizes", "strides", "offsets"],
    "jagged": ["values", "offsets"], "meta": [], "dtensor": ["local"], "subclass": ["tensor", "state"],
}  # fmt: skip


# ------------------------------------------------------------------ dataclasses


@pytest.mark.parametrize("name", EXAMPLES)
def test_parts_are_the_tensors_in_order(name: str) -> None:
    kind = EXAMPLES[name]
    parts = kind.parts()
    assert list(parts) == PARTS[name]
    assert all(parts[part] is getattr(kind, part) for part in parts)


@pytest.mark.parametrize("name", EXAMPLES)
def test_replaced_changes_the_parts_only(name: str) -> None:
    kind = EXAMPLES[name]
    leaves = {part: Leaf(i) for i, part in enumerate(kind.parts())}
    other = kind.replaced(leaves)
    assert type(other) is type(kind)
    assert other.parts() == leaves
    for field in dataclasses.fields(kind):
        assert field.name in leaves or getattr(other, field.name) is getattr(kind, field.name)


@pytest.mark.parametrize("name", EXAMPLES)
def test_kinds_are_frozen_and_compared_by_identity(name: str) -> None:
    kind = EXAMPLES[name]
    with pytest.raises(dataclasses.FrozenInstanceError):
        kind.requires_grad = True  # type: ignore[misc]
    assert kind == kind
    assert kind != copy.copy(kind)
    assert len({kind, copy.copy(kind)}) == 2


@pytest.mark.parametrize("name", EXAMPLES)
def test_kinds_are_shown_in_one_short_line(name: str) -> None:
    assert repr(EXAMPLES[name]).startswith(f"<{type(EXAMPLES[name]).__name__}")
    assert len(repr(EXAMPLES[name])) < 120


@pytest.mark.parametrize("name", EXAMPLES)
def test_kinds_can_be_pickled_and_copied(name: str) -> None:
    kind = EXAMPLES[name].as_parameter(True)
    for other in (pickle.loads(pickle.dumps(kind)), copy.deepcopy(kind)):
        assert (type(other), other.parameter, other.requires_grad) == (type(kind), True, True)
        for a, b in zip(other.parts().values(), kind.parts().values(), strict=True):
            np.testing.assert_equal(a, b)


@pytest.mark.parametrize("name", ["coo", "per_tensor", "nested", "jagged"])
def test_leaves_have_no_values(name: str) -> None:
    kind = EXAMPLES[name].replaced({PARTS[name][0]: Leaf(0)})
    compute = getattr(kind, "dense", None) or getattr(kind, "dequantize", None) or kind.unbind  # type: ignore[attr-defined]
    with pytest.raises(TensorMismatchError, match="expected an array"):
        compute()


def test_placements_compare_by_value() -> None:
    assert Shard(1) == Shard(1) != Shard(0)
    assert StridedShard(0, 2) != Shard(0)
    assert Replicate() == Replicate()
    assert Partial("sum") != Partial("avg")
    assert len({Shard(1), Shard(1), Replicate(), Partial("sum")}) == 3


# ----------------------------------------------------------------------- sparse


def test_elements_of_one_index_are_added_in_order() -> None:
    values = np.array([1, 1e-3, 2048, -1], np.float16)
    got = coo(ints([1, 1, 1, 0]), values, (3,)).dense()
    assert got.tolist() == [-1, float(np.float16(np.float16(1) + np.float16(1e-3)) + np.float16(2048)), 0]


def test_minus_zero_is_added_to_zero() -> None:
    assert str(coo(ints([0]), np.array([-0.0]), (1,)).dense()[0]) == "0.0"


def test_dense_is_a_copy() -> None:
    kind = coo(ints([0, 1]), floats(2), (2,))
    got = kind.dense()
    got[:] = 9
    assert kind.values.tolist() == [1, 2]


@pytest.mark.parametrize("dtype", ["?", "u1", "i8", "f2", "f8", "c8", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_dense_has_the_type_of_the_values(dtype: Any) -> None:
    got = coo(ints([2, 0]), np.ones(2, dtype), (3,)).dense()
    assert got.dtype == dtype
    assert (got == np.array([1, 0, 1]).astype(dtype)).all()


def test_complex32_is_added_by_halves() -> None:
    pairs = np.array([(1, 2), (3, -4), (5, 6)], [("real", "f2"), ("imag", "f2")])
    got = coo(ints([1, 0, 1]), pairs, (2,)).dense()
    assert got.dtype == pairs.dtype
    assert got.tolist() == [(3, -4), (6, 8)]
    rows = SparseTensor("csr", (1, 2), ints(0, 1), pairs[:2], ints(0, 2))
    assert rows.dense().tolist() == [[(1, 2), (3, -4)]]


def test_a_type_without_zero_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no zero"):
        coo(ints([0]), np.ones(1, ml_dtypes.float8_e8m0fnu), (2,)).dense()


@pytest.mark.parametrize("shape", [(), (1,), (2, 0), (0,)])
def test_empty_and_scalar_coo(shape: tuple[int, ...]) -> None:
    kind = coo(np.zeros((len(shape), 0), np.int64), np.zeros(0, "f4"), shape)
    assert kind.dense().shape == shape


def test_scalar_coo_adds_its_elements() -> None:
    assert coo(np.zeros((0, 3), np.int64), floats(3), ()).dense() == 6


@pytest.mark.parametrize("bad", [-1, 3, 2**62, -(2**62), 2**63 - 1])
def test_indices_outside_the_shape_are_refused(bad: int) -> None:
    with pytest.raises(HeaderError, match=str(bad)):
        coo(ints([0, bad], [0, 0]), floats(2), (3, 2)).dense()
    with pytest.raises(HeaderError, match=str(bad)):
        coo(ints([0, 0], [0, bad]), floats(2), (2, 3)).dense()
    with pytest.raises(HeaderError, match=str(bad)):
        SparseTensor("csr", (2, 3), ints(0, bad), floats(2), ints(0, 1, 2)).dense()


@pytest.mark.parametrize("pointers", [[1, 1, 2], [0, 1, 1], [0, 3, 2], [0, -1, 2], [0, 2**62, 2], [-(2**63), 0, 2]])
def test_pointers_that_do_not_grow_from_zero_to_the_count_are_refused(pointers: list[int]) -> None:
    with pytest.raises(HeaderError, match="grow from 0 to 2"):
        SparseTensor("csr", (2, 3), ints(0, 1), floats(2), ints(*pointers)).dense()


def test_elements_where_there_is_no_room_are_refused() -> None:
    with pytest.raises(HeaderError, match="no room"):
        coo(ints([0], [0]), floats(1), (3, 0)).dense()
    with pytest.raises(HeaderError, match="1 elements"):
        SparseTensor("csr", (0, 3), ints(0), floats(1), ints(0)).dense()


def test_shapes_that_no_array_has_are_refused() -> None:
    with pytest.raises(LimitError, match="NumPy has no such arrays"):
        coo(np.zeros((3, 0), np.int64), floats(0), (2**31, 2**31, 2**31)).dense()
    with pytest.raises(LimitError, match="65 dimensions"):
        coo(np.zeros((65, 0), np.int64), floats(0), (1,) * 65).dense()


def test_shared_bytes_do_not_multiply_the_work() -> None:
    """A small file may name many elements over few bytes; no more are taken than the tensor has places."""
    one, many = np.broadcast_to(ints(0), (1, 1 << 40)), np.broadcast_to(floats(1), 1 << 40)
    with pytest.raises(HeaderError, match="share their bytes"):
        coo(one, many, (2,)).dense()
    with pytest.raises(HeaderError, match="share their bytes"):
        coo(np.empty((0, 1 << 40), np.int64), many, ()).dense()
    with pytest.raises(HeaderError, match="no two may have one place"):
        SparseTensor("csr", (2, 2), one[0], many, ints(0, 0, 1 << 40)).dense()
    assert coo(one, many[:, None][:, :0], (1 << 40, 0)).dense().shape == (1 << 40, 0)
    some = np.broadcast_to(ints(0), (1, 3)), np.broadcast_to(floats(1), 3)
    assert coo(*some, (4,)).dense().tolist() == [3, 0, 0, 0]


# What the arguments of `_rebuild_sparse_tensor` may be; one lie each.
GOOD_COO = (COO, (ints([0, 1], [0, 0]), floats(2), Size((2, 2)), True))
BAD_SPARSE: dict[str, tuple[Any, ...]] = {
    "one_argument": (COO,),
    "three_arguments": (*GOOD_COO, 1),
    "no_tag": ("torch.sparse_coo", GOOD_COO[1]),
    "no_tuple": (COO, list(GOOD_COO[1])),
    "two_parts": (COO, GOOD_COO[1][:2]),
    "five_parts": (COO, (*GOOD_COO[1], 1)),
    "flag": (COO, (*GOOD_COO[1][:3], 1)),
    "size": (COO, (*GOOD_COO[1][:2], (2, -2), True)),
    "size_float": (COO, (*GOOD_COO[1][:2], (2, 2.0), True)),
    "size_bool": (COO, (*GOOD_COO[1][:2], (2, True), True)),
    "size_large": (COO, (*GOOD_COO[1][:2], (2, 2**63), True)),
    "size_none": (COO, (*GOOD_COO[1][:2], None, True)),
    "indices_list": (COO, ([[0], [0]], floats(1), (2, 2), True)),
    "values_none": (COO, (GOOD_COO[1][0], None, (2, 2), True)),
    "counts": (COO, (GOOD_COO[1][0], floats(3), (2, 2), True)),
    "rank": (COO, (ints([0], [0], [0]), floats(1), (2, 2), True)),
    "flat_indices": (COO, (ints(0, 1), floats(2), (2,), True)),
    "dense_part": (COO, (ints([0, 1]), np.zeros((2, 3), "f4"), (2, 2), True)),
    "float_indices": (COO, (np.zeros((2, 2), "f8"), floats(2), (2, 2), True)),
    "scalar_values": (COO, (ints([0]), np.float32([1])[0:1].reshape(()), (1,), True)),
    "strided": (TorchTag("torch.strided"), (ints(0), ints(0), floats(1), (1, 1))),
    "csr_three": (CSR, (ints(0, 1), ints(0), floats(1))),
    "csr_rank": (CSR, (ints(0, 1), ints(0), floats(1), (1,))),
    "csr_length": (CSR, (ints(0, 1), ints(0), floats(1), (2, 1))),
    "csr_counts": (CSR, (ints(0, 1), ints(0, 0), floats(1), (1, 2))),
    "csr_batch": (CSR, (ints([0, 1]), ints([0]), np.zeros((1, 1), "f4"), (2, 1, 1))),
    "csr_scalar": (CSR, (np.zeros((), "i8"), ints(0), floats(1), (1, 1))),
    "csr_types": (CSR, (np.zeros(2, "f4"), ints(0), floats(1), (1, 1))),
    "csr_full": (CSR, (ints(0, 3), ints(0, 0, 0), floats(3), (1, 2))),
    "bsr_block": (TorchTag("torch.sparse_bsr"), (ints(0, 1), ints(0), np.zeros((1, 2, 2), "f4"), (3, 2))),
    "bsr_flat": (TorchTag("torch.sparse_bsr"), (ints(0, 1), ints(0), floats(1), (1, 1))),
    "bsr_none": (TorchTag("torch.sparse_bsr"), (ints(0, 1), ints(0), np.zeros((1, 0, 1), "f4"), (0, 1))),
}


@pytest.mark.parametrize("name", BAD_SPARSE)
def test_lies_about_sparse_tensors_are_refused(name: str) -> None:
    with pytest.raises((HeaderError, UnsupportedError)):
        rebuilt("rebuild_sparse", *BAD_SPARSE[name])


def test_sparse_tensors_are_rebuilt() -> None:
    kind = rebuilt("rebuild_sparse", *GOOD_COO)
    assert (kind.layout, kind.shape, kind.is_coalesced, kind.compressed) == ("coo", (2, 2), True, None)
    assert rebuilt("rebuild_sparse", COO, GOOD_COO[1][:3]).is_coalesced is None
    assert rebuilt("rebuild_sparse", CSR, (ints(0, 1), ints(0), floats(1), [1, 1])).dense().tolist() == [[1]]


def test_sparse_tensors_of_leaves_are_rebuilt_and_checked() -> None:
    facts = Known({0: ("int64", (1, 5), (40, 8)), 1: ("float32", (5,), (4,)), 2: ("float32", (6,), (4,))})
    kind = rebuilt("rebuild_sparse", COO, (Leaf(0), Leaf(1), (9,), False), facts=facts)
    assert [part.row for part in kind.parts().values()] == [0, 1]
    with pytest.raises(HeaderError, match=r"expected shape \(5,\), found \(6,\)"):
        rebuilt("rebuild_sparse", COO, (Leaf(0), Leaf(2), (9,), False), facts=facts)


def test_too_many_dimensions_are_refused() -> None:
    with pytest.raises(LimitError, match="65 dimensions"):
        rebuilt("rebuild_sparse", COO, (np.zeros((65, 0), "i8"), floats(0), (1,) * 65, True))


# -------------------------------------------------------------------- quantized


def test_quantized_tensor_by_hand() -> None:
    kind = qint8(np.array([-128, 0, 127], np.int8), (AFFINE, 0.25, -3))
    assert (kind.dtype, kind.scheme, kind.scale, kind.zero_point, kind.axis) == (
        "qint8",
        "per_tensor_affine",
        0.25,
        -3,
        None,
    )
    assert kind.dequantize().tolist() == [-31.25, 0.75, 32.5]
    assert kind.dequantize().dtype == np.float32


def test_quantized_scalar() -> None:
    kind = QuantizedTensor(np.array(-(2**31), np.int32), "qint32", (), "per_tensor_affine", 1.0, 2**31 - 1)
    assert kind.dequantize() == np.float32(1)  # the difference wraps, as 32 bits do


def test_scales_and_zero_points_of_old_releases_are_lists() -> None:
    kind = qint8(np.ones((2, 2), np.int8), (CHANNELS, [0.5, 2.0], [1, -1], 0))
    assert kind.parts().keys() == {"values"}
    assert kind.dequantize().tolist() == [[0, 0], [4, 4]]


def test_packed_integers_by_hand() -> None:
    """The first is in the lowest bits."""
    kind = rebuilt("rebuild_qtensor", np.array([0x21, 0x43, 0xF5], np.uint8), (AFFINE, 1.0, 0), False,
                   "QUInt4x2Storage", (0, (1, 5), (5, 1)))  # fmt: skip
    assert kind.dequantize().tolist() == [[1, 2, 3, 4, 5]]
    kind = rebuilt("rebuild_qtensor", np.array([0b11100100, 1], np.uint8), (AFFINE, 1.0, 0), False,
                   "QUInt2x4Storage", (0, (5,), (1,)))  # fmt: skip
    assert kind.dequantize().tolist() == [0, 1, 2, 3, 1]


I8 = np.zeros((2, 3), np.int8)
BAD_QUANTIZERS: dict[str, Any] = {
    "none": None,
    "empty": (),
    "word": ("per_tensor_affine", 1.0, 0),
    "two": (AFFINE, 1.0),
    "four": (AFFINE, 1.0, 0, 0),
    "scale_int": (AFFINE, 1, 0),
    "scale_array": (AFFINE, floats(1), 0),
    "zero_float": (AFFINE, 1.0, 0.0),
    "zero_bool": (AFFINE, 1.0, True),
    "zero_large": (AFFINE, 1.0, 2**63),
    "channel_three": (CHANNELS, floats(2), ints(0, 0)),
    "axis_outside": (CHANNELS, floats(2), ints(0, 0), 2),
    "axis_negative": (CHANNELS, floats(3), ints(0, 0, 0), -1),
    "axis_float": (CHANNELS, floats(2), ints(0, 0), 0.0),
    "axis_none": (CHANNELS, floats(2), ints(0, 0), None),
    "axis_bool": (CHANNELS, floats(2), ints(0, 0), False),
    "scales_short": (CHANNELS, floats(1), ints(0, 0), 0),
    "zeros_long": (CHANNELS, floats(2), ints(0, 0, 0), 0),
    "scales_2d": (CHANNELS, np.ones((2, 1), "f4"), ints(0, 0), 0),
    "scales_ints": (CHANNELS, ints(1, 1), ints(0, 0), 0),
    "zeros_bools": (CHANNELS, floats(2), np.zeros(2, "?"), 0),
    "list_of_words": (CHANNELS, ["a", "b"], [0, 0], 0),
    "list_short": (CHANNELS, [1.0], [0, 0], 0),
    "list_of_floats": (CHANNELS, [1.0, 1.0], [0.0, 0.0], 0),
    "symmetric": (TorchTag("torch.per_channel_symmetric"), floats(2), ints(0, 0), 0),
    "layout": (COO, 1.0, 0),
}


@pytest.mark.parametrize("name", BAD_QUANTIZERS)
def test_lies_about_quantizers_are_refused(name: str) -> None:
    with pytest.raises((HeaderError, UnsupportedError)):
        qint8(I8, BAD_QUANTIZERS[name])


@pytest.mark.parametrize(("changes", "error"), [
    ({"storage": "FloatStorage"}, HeaderError), ({"storage": "QUInt8Storage"}, HeaderError), ({"grad": 1}, HeaderError),
    ({"place": (0, (3, 2), (2, 1))}, HeaderError), ({"place": (0, (6,), (1,))}, HeaderError),
    ({"place": (0, (2, -3), (3, 1))}, HeaderError),
], ids=str)  # fmt: skip
def test_lies_about_quantized_tensors_are_refused(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        qint8(I8, (AFFINE, 1.0, 0), **changes)


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ((0, (7,), (1,)), HeaderError),
        ((0, (2**40, 2**40), (2**40, 1)), HeaderError),
        ((1, (2,), (1,)), UnsupportedError),
        ((0, (2, 3), (1, 2)), UnsupportedError),
        ((0, (2, 3), (3,)), HeaderError),
        ((floats(2), (2,), (1,)), UnsupportedError),
    ],
    ids=str,
)
def test_packed_integers_must_be_all_of_their_storage_in_order(place: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        rebuilt("rebuild_qtensor", np.zeros(3, np.uint8), (AFFINE, 1.0, 0), False, "QUInt4x2Storage", place)


# ----------------------------------------------------------------------- nested


def test_nested_tensors_are_views() -> None:
    buffer = floats(7)
    a, b = NestedTensor(buffer, ints([1, 2], [2, 2]), ints([2, 1], [1, 2]), ints(5, 1)).unbind()
    assert a.tolist() == [[6, 7]]
    assert b.tolist() == [[2, 4], [3, 5]]
    a[0, 0] = 9
    assert buffer[5] == 9
    assert np.shares_memory(a, buffer)


def test_nested_views_of_read_only_arrays_are_read_only() -> None:
    buffer = floats(2)
    buffer.flags.writeable = False
    (view,) = NestedTensor(buffer, ints([2]), ints([1]), ints(0)).unbind()
    assert not view.flags.writeable


def test_nested_views_of_a_strided_buffer() -> None:
    (view,) = NestedTensor(floats(6)[::2], ints([2]), ints([2]), ints(0)).unbind()
    assert view.tolist() == [1, 5]


@pytest.mark.parametrize(("size", "stride", "offset"), [
    ([5], [1], 0), ([2], [1], 3), ([2], [4], 0), ([-1], [1], 0), ([2], [-1], 1), ([1], [1], -1), ([1], [1], 4),
    ([2**62], [2**62], 0), ([2], [2**63 - 1], 0), ([1], [1], 2**63 - 1), ([0], [1], -1), ([0], [-1], 0), ([0], [1], 5),
], ids=str)  # fmt: skip
def test_nested_tensors_that_leave_the_buffer_are_refused(size: list[int], stride: list[int], offset: int) -> None:
    with pytest.raises(HeaderError, match="leaves the buffer of 4"):
        NestedTensor(floats(4), ints(size), ints(stride), ints(offset)).unbind()


def test_nested_tensors_are_proven_against_what_python_computes() -> None:
    """Of all combinations of odd numbers, the same are refused as by exact arithmetic."""
    odd = [-(2**63), -1, 0, 1, 2, 3, 5, 2**31, 2**62, 2**63 - 1]
    refused = 0
    for size, other, stride, offset in itertools.product(odd, [0, 1, 2, 2**62], odd, odd):
        kind = NestedTensor(floats(5), ints([1, 1], [size, other]), ints([0, 0], [stride, 1]), ints(0, offset))
        reach = 0 if 0 in (size, other) else 1 + (size - 1) * stride + (other - 1)
        fits = min(size, stride, offset) >= 0 and offset + reach <= 5
        if fits and max(size, 1) * max(other, 1) * 4 < 2**63:
            assert kind.unbind()[1].shape == (size, other)
        else:
            refused += 1
            with pytest.raises(LimitError if fits else HeaderError, match="nested tensor"):
                kind.unbind()
    assert refused > 2000


def test_nested_tensors_are_proven_when_loaded() -> None:
    with pytest.raises(HeaderError, match=r"tensor 0 of shape \[2\] at 3"):
        rebuilt("rebuild_nested", floats(4), ints([2]), ints([1]), ints(3))
    shapes = {0: ("float32", (4,), (4,)), 1: ("int64", (1, 1), (8, 8)), 2: ("int64", (1,), (8,))}
    made = rebuilt("rebuild_nested", Leaf(0), Leaf(1), Leaf(1), Leaf(2), facts=Known(shapes))
    assert type(made) is NestedTensor  # whose values nobody has read


def test_expanded_nested_tensors() -> None:
    (view,) = NestedTensor(floats(1), ints([2**40]), ints([0]), ints(0)).unbind()
    assert view.shape == (2**40,)
    with pytest.raises(LimitError, match="NumPy has no such arrays"):
        NestedTensor(floats(1), ints([2**40, 2**40]), ints([0, 0]), ints(0)).unbind()


NESTED = (floats(4), ints([1], [3]), ints([1], [1]), ints(0, 1))
BAD_NESTED: dict[str, tuple[Any, ...]] = {
    "three": NESTED[:3],
    "five": (*NESTED, 1),
    "no_tensor": (None, *NESTED[1:]),
    "buffer_2d": (floats(4).reshape(2, 2), *NESTED[1:]),
    "sizes_flat": (NESTED[0], ints(1, 3), ints(1, 1), NESTED[3]),
    "strides_other": (NESTED[0], NESTED[1], ints([1]), NESTED[3]),
    "offsets_long": (*NESTED[:3], ints(0, 1, 2)),
    "offsets_2d": (*NESTED[:3], ints([0, 1])),
    "offsets_float": (*NESTED[:3], floats(2)),
    "offsets_words": (*NESTED[:3], ["0", "1"]),
    "offsets_short": (*NESTED[:3], [0]),
    "offsets_large": (*NESTED[:3], [0, 2**63]),
    "sizes_float": (NESTED[0], NESTED[1].astype("f8"), NESTED[2], NESTED[3]),
    "sizes_scalar": (NESTED[0], np.zeros((), "f4"), np.zeros((), "f4"), ints(0)),
    "shared": (NESTED[0], *(np.broadcast_to(ints([1]), (1 << 40, 1)),) * 2, np.broadcast_to(ints(0), 1 << 40)),
    "shared_buffer": (np.broadcast_to(floats(1), 1 << 40), *NESTED[1:]),
    "shared_sizes": (NESTED[0], *(np.broadcast_to(ints([1]), (2, 1)),) * 2, ints(0, 0)),
}


@pytest.mark.parametrize("name", BAD_NESTED)
def test_lies_about_nested_tensors_are_refused(name: str) -> None:
    with pytest.raises(HeaderError):
        rebuilt("rebuild_nested", *BAD_NESTED[name])


def test_nested_tensors_of_old_releases_have_a_list_of_offsets() -> None:
    kind = rebuilt("rebuild_nested", *NESTED[:3], [0, 1])
    assert [view.tolist() for view in kind.unbind()] == [[1], [2, 3, 4]]
    assert list(kind.parts()) == ["buffer", "sizes", "strides"]


def test_an_empty_list_of_tensors() -> None:
    """As torch saves it: sizes are one tensor without dimensions."""
    scalar = np.zeros((), np.float32)
    assert rebuilt("rebuild_nested", floats(0), scalar, scalar, np.zeros(0, "i8")).unbind() == []


def test_jagged_tensors_are_views() -> None:
    values = floats(10).reshape(5, 2)
    kind = rebuilt("rebuild_njt", {"values": values, "offsets": ints(0, 2, 2, 5), "lengths": None, "_ragged_idx": 1})
    assert [view.shape for view in kind.unbind()] == [(2, 2), (0, 2), (3, 2)]
    assert all(np.shares_memory(view, values) for view in kind.unbind() if view.size)
    kind = JaggedTensor(values.T, ints(0, 2, 5), ints(1, 3), 2)
    assert [view.tolist() for view in kind.unbind()] == [[[1], [2]], [[5, 7, 9], [6, 8, 10]]]


@pytest.mark.parametrize(
    ("offsets", "lengths"),
    [
        ([0, 6], None),
        ([-1, 2], None),
        ([3, 2], None),
        ([0, 2**63 - 1], None),
        ([2, 2], [4]),
        ([0, 2], [-1]),
        ([2**62, 0], [2**62]),
    ],
    ids=str,
)
def test_jagged_offsets_outside_the_values_are_refused(offsets: list[int], lengths: list[int] | None) -> None:
    with pytest.raises(HeaderError, match="of a dimension of size 5"):
        JaggedTensor(floats(5), ints(*offsets), None if lengths is None else ints(*lengths)).unbind()


NJT = {"values": floats(4), "offsets": ints(0, 4)}
BAD_NJT: dict[str, tuple[Any, ...]] = {
    "none": (),
    "two": (NJT, NJT),
    "no_dict": ([NJT],),
    "no_values": ({"offsets": ints(0)},),
    "no_offsets": ({"values": floats(4)},),
    "offsets_empty": ({**NJT, "offsets": ints()},),
    "offsets_2d": ({**NJT, "offsets": ints([0, 4])},),
    "lengths": ({**NJT, "lengths": ints(1, 2)},),
    "lengths_word": ({**NJT, "lengths": "x"},),
    "ragged": ({**NJT, "_ragged_idx": 2},),
    "ragged_zero": ({**NJT, "_ragged_idx": 0},),
    "ragged_word": ({**NJT, "_ragged_idx": "1"},),
    "ragged_bool": ({**NJT, "_ragged_idx": True},),
    "grad": ({**NJT, "requires_grad": None},),
    "shared": ({**NJT, "offsets": np.broadcast_to(ints(0), 1 << 40)},),
    "scalar": ({**NJT, "values": np.zeros((), "f4")},),
}


@pytest.mark.parametrize("name", BAD_NJT)
def test_lies_about_jagged_tensors_are_refused(name: str) -> None:
    with pytest.raises(HeaderError):
        rebuilt("rebuild_njt", *BAD_NJT[name])


# ----------------------------------------------------------------- without data


def test_meta_tensor() -> None:
    kind = rebuilt("rebuild_meta", TorchDType("int4"), Size((2, 3)), (3, 1), True)
    assert (kind.dtype, kind.shape, kind.strides, kind.requires_grad, kind.parameter) == (
        "int4",
        (2, 3),
        (3, 1),
        True,
        False,
    )
    assert (type(kind.dtype), type(kind.shape)) == (str, tuple)


BAD_META: dict[str, tuple[Any, ...]] = {
    "three": (TorchDType("int4"), (2,), (1,)),
    "dtype": ("float32", (2,), (1,), False),
    "rank": (TorchDType("int4"), (2,), (1, 1), False),
    "grad": (TorchDType("int4"), (2,), (1,), 0),
    "size": (TorchDType("int4"), (-2,), (1,), False),
    "stride": (TorchDType("int4"), (2,), (-1,), False),
    "many": (TorchDType("int4"), (1,) * 65, (1,) * 65, False),
}


@pytest.mark.parametrize("name", BAD_META)
def test_lies_about_tensors_without_data_are_refused(name: str) -> None:
    with pytest.raises((HeaderError, LimitError)):
        rebuilt("rebuild_meta", *BAD_META[name])


# ------------------------------------------------------------------- subclasses

WRAPPER = (TorchDType("float32"), (4, 2), (2, 1), 0, TorchTag("torch.strided"), Device("cpu"), True)


def unknown(module: str = "some.module", name: str = "Class") -> Opaque:
    return Opaque(module, name)


def test_subclass_of_tensor() -> None:
    array = floats(3)
    kind = rebuilt("from_type", array, unknown(), {"scale": 2})
    assert (type(kind), kind.tensor is array, kind.module, kind.name) == (SubclassTensor, True, "some.module", "Class")
    assert kind.parts() == {"tensor": array, "state": {"scale": 2}}


def test_wrapper_subclass() -> None:
    kind = rebuilt(
        "from_type", rebuilt("rebuild_wrapper_subclass", unknown(), *WRAPPER), unknown(), {"inner": floats(2)}
    )
    assert (kind.tensor.dtype, kind.tensor.shape, kind.tensor.requires_grad) == ("float32", (4, 2), True)
    assert list(kind.state) == ["inner"]


@pytest.mark.parametrize("name", ["torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"])
def test_attributes_of_plain_tensors_are_dropped(name: str) -> None:
    array = floats(3)
    assert rebuilt("from_type", array, TorchTag(name), {"persistent": True}) is array


@pytest.mark.parametrize(
    "state", [{"__class__": 1}, {1: 2}, {"a b": 1}, {"": 1}, [], 1, ({"a": 1}, []), ({}, {"__dict__": {}})], ids=str
)
def test_odd_attributes_of_plain_tensors_are_refused(state: Any) -> None:
    with pytest.raises(HeaderError, match="attribute"):
        rebuilt("from_type", floats(3), TorchTag("torch.Tensor"), state)
    for good in (None, {}, {"a": [1]}, ({"_is_buffer": True}, {"slot": 1}), (None, {"b": 1})):
        rebuilt("from_type", floats(3), TorchTag("torch.Tensor"), good)


def test_class_that_the_caller_allowed_is_named() -> None:
    kind = rebuilt("from_type", floats(1), Known, None)
    assert (kind.module, kind.name, kind.state) == (Known.__module__, "Known", None)


def test_subclass_made_by_an_unknown_function_is_inert() -> None:
    made = Opaque("some.module", "rebuild", (1,))
    kept = rebuilt("from_type", made, unknown(), {"a": 1})
    assert (type(kept), kept.module, kept.name, kept.args, kept.state) == (
        Opaque,
        "some.module",
        "Class",
        (made,),
        {"a": 1},
    )


BAD_TYPES: dict[str, tuple[Any, ...]] = {
    "two": (floats(1), unknown()), "tensor": ([1], unknown(), None), "class": (floats(1), "Class", None),
    "class_array": (floats(1), floats(1), None), "instance": (floats(1), Opaque("m", "n", ()), None),
    "of_another": (SubclassTensor(floats(1), "some.module", "Class", {}), unknown(), None),
    "other_class": (SubclassTensor(floats(1), "some.module", "Other"), unknown(), None),
}  # fmt: skip
BAD_WRAPPERS: dict[str, tuple[Any, ...]] = {
    "seven": (unknown(), *WRAPPER[:6]),
    "class": ("x", *WRAPPER),
    "dtype": (unknown(), "float32", *WRAPPER[1:]),
    "offset": (unknown(), *WRAPPER[:3], None, *WRAPPER[4:]),
    "layout": (unknown(), *WRAPPER[:4], "torch.strided", *WRAPPER[5:]),
    "device": (unknown(), *WRAPPER[:5], None, True),
    "plain": (TorchTag("torch.Tensor"), *WRAPPER),
    "parameter": (TorchTag("torch.nn.parameter.Parameter"), *WRAPPER),
    "grad": (unknown(), *WRAPPER[:6], "yes"),
}


@pytest.mark.parametrize("name", BAD_TYPES)
def test_lies_about_subclasses_are_refused(name: str) -> None:
    with pytest.raises(HeaderError):
        rebuilt("from_type", *BAD_TYPES[name])


@pytest.mark.parametrize("name", BAD_WRAPPERS)
def test_lies_about_wrapper_subclasses_are_refused(name: str) -> None:
    with pytest.raises(HeaderError):
        rebuilt("rebuild_wrapper_subclass", *BAD_WRAPPERS[name])


def test_tensors_of_devices_are_the_tensors() -> None:
    array = floats(2)
    assert rebuilt("device_tensor", array, TorchDType("bfloat16"), "xla:0", False) is array
    assert rebuilt("device_from_numpy", array, TorchDType("bfloat16"), "xla:0", False) is array
    for kind in ("device_tensor", "device_from_numpy"):
        for wrong in ((array,), (None, TorchDType("bfloat16"), "xla:0", False)):
            with pytest.raises(HeaderError):
                rebuilt(kind, *wrong)


def test_layouts_are_tags() -> None:
    assert rebuilt("get_layout", "torch.sparse_coo") == COO
    assert type(rebuilt("get_layout", "torch.strided")) is TorchTag
    for wrong in ((), ("torch.load",), ("torch.strided", 1), (b"torch.strided",), ("strided",)):
        with pytest.raises(HeaderError):
            rebuilt("get_layout", *wrong)


# ---------------------------------------------------------------------- DTensor


def inert(name: str, state: Any, module: str = "torch.distributed.tensor", args: Any = ()) -> Opaque:
    out = Opaque(module, name, args)
    out.state = state
    return out


def axis(size: Any, stride: Any) -> Opaque:
    return inert("_FlatLayout", {"shape": size, "stride": stride})


def mesh_of(*axes: Opaque, ranks: Any = (0, 1, 2, 3), rank: Any = 0, **more: Any) -> Opaque:
    words = {"_device_type": "cuda", "_layout": inert("_MeshLayout", {"axes": axes}), "_flatten_rank_map": ranks,
             "_rank": rank, "_mesh_dim_names": None, "_coordinate_on_dim": None, **more}  # fmt: skip
    return inert("DeviceMesh", words)


DTENSOR = TorchTag("torch.distributed.tensor.DTensor")
GRID = (axis((2,), (2,)), axis((2,), (1,)))


def dtensor(mesh: Any, placements: Any, local: Any = None, cls: Any = DTENSOR) -> Any:
    made = rebuilt("rebuild_wrapper_subclass", cls, *WRAPPER)
    words = {
        "_local_tensor": floats(4) if local is None else local,
        "_spec": inert("DTensorSpec", {"mesh": mesh, "placements": placements}),
    }
    return rebuilt("from_type", made, cls, (None, words))


def test_dtensor_by_hand() -> None:
    placements = (inert("Shard", {"dim": 1}), inert("Replicate", {}))
    kind = dtensor(mesh_of(*GRID, rank=2, _mesh_dim_names=("dp", "tp"), _coordinate_on_dim=[1, 0]), placements)
    assert kind.mesh == Mesh("cuda", (2, 2), ("dp", "tp"), (0, 1, 2, 3), (1, 0))
    assert kind.placements == (Shard(1), Replicate())
    assert (kind.shape, kind.dtype, kind.requires_grad) == ((4, 2), "float32", True)
    assert kind.parts().keys() == {"local"}


def test_placements_of_other_names() -> None:
    other = inert("_NormPartial", {"norm_type": 2})
    placements = [inert("_StridedShard", {"dim": 0, "split_factor": 2}), inert("Partial", {"reduce_op": "avg"}), other]
    kind = dtensor(mesh_of(*GRID, axis((1,), (1,))), placements)
    assert kind.placements == (StridedShard(0, 2), Partial("avg"), other)


@pytest.mark.parametrize(("axes", "rank", "want"), [
    ([axis((2,), (1,))], 3, (2, 3)), ([axis((2,), (2,))], 3, (1, 3)), ([axis((2, 2), (2, 1))], 3, (0, 1, 2, 3)),
    ([axis((2,), (1,))], 0, (0, 1)), ([axis((2,), (1,))], 9, None), ([axis((4,), (1,))], 9, (0, 1, 2, 3)),
    ([axis((2,), (1,))], None, None), ([axis((), ())], 2, (2,)),
], ids=str)  # fmt: skip
def test_ranks_of_part_of_a_mesh(axes: list[Opaque], rank: Any, want: Any) -> None:
    kind = dtensor(mesh_of(*axes, rank=rank), (inert("Replicate", {}),) * len(axes))
    assert kind.mesh.ranks == want


def test_ranks_are_those_of_the_map() -> None:
    assert dtensor(mesh_of(axis((2,), (1,)), ranks=(4, 6, 5, 7), rank=5), (inert("Replicate", {}),)).mesh.ranks == (
        5,
        7,
    )


@pytest.mark.parametrize(
    "axes",
    [
        [axis((2,), (3,))],
        [axis((5,), (1,))],
        [axis((2**40,), (1,))],
        [axis((2**40,) * 60, (1,) * 60)],
        [axis((2,), (0,))],
        [axis((0,), (1,))],
        [axis((4,), (2**60,))],
    ],
    ids=str,
)
def test_layouts_outside_the_map_have_no_ranks_or_those_inside(axes: list[Opaque]) -> None:
    kind = dtensor(mesh_of(*axes, rank=1), (inert("Replicate", {}),))
    assert kind.mesh.ranks is None or set(kind.mesh.ranks) <= {0, 1, 2, 3}


def test_mesh_of_older_releases_is_a_tensor() -> None:
    words = {
        "device_type": "cpu",
        "mesh": ints([0, 1], [2, 3]),
        "mesh_dim_names": ("a", "b"),
        "_flatten_mesh_list": (0, 1, 2, 3),
        "_coordinate_on_dim": [0, 1],
    }
    tag = TorchTag("torch.distributed._tensor.api.DTensor")
    kind = dtensor(inert("DeviceMesh", words), (inert("Shard", {"dim": 0}),) * 2, cls=tag)
    assert kind.mesh == Mesh("cpu", (2, 2), ("a", "b"), (0, 1, 2, 3), (0, 1))


@pytest.mark.parametrize(
    ("mesh", "placements", "local"),
    [
        (None, (), None),
        (mesh_of(*GRID), (inert("Replicate", {}),), None),
        (mesh_of(*GRID), None, None),
        (mesh_of(*GRID, _device_type=3), (1, 2), None),
        (mesh_of(*GRID, _layout=None), (), "x"),
        (inert("DeviceMesh", {}), (), None),
        (mesh_of(axis((2,), (1, 1))), (1,), None),
        (mesh_of(axis((-2,), (1,))), (1,), None),
        (mesh_of(axis(2, 1)), (1,), None),
        (mesh_of(*GRID), (1, 2), "no tensor"),
        (mesh_of(*[axis((1,), (1,))] * 65), (1,) * 65, None),
    ],
    ids=str,
)
def test_dtensor_that_is_not_understood_is_a_subclass(mesh: Any, placements: Any, local: Any) -> None:
    kind = dtensor(mesh, placements, local)
    assert (type(kind), kind.name) == (SubclassTensor, "DTensor")
    assert kind.tensor.shape == (4, 2)


# ------------------------------------------------------------------- allow-list


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"from_type", "from_class"}))
def test_every_kind_is_selected_by_a_name(kind: str) -> None:
    assert any(entry.kind == kind for entry in ALLOWED.values())


@pytest.mark.parametrize(
    ("module", "name", "kind"),
    [
        ("torch", "sparse_coo", "tag"),
        ("torch", "per_channel_affine", "tag"),
        ("torch", "Tensor", "tag"),
        ("torch.nn.parameter", "Parameter", "tag"),
        ("torch.cuda.sparse", "FloatTensor", "tag"),
        ("torch", "quint4x2", "dtype"),
        ("torch", "uint7", "dtype"),
        ("torch._utils", "_rebuild_sparse_csr_tensor", "rebuild_sparse"),
        ("torch", "QUInt2x4Storage", "storage"),
        ("torch._tensor", "_rebuild_from_type_v2", "rebuild_from_type"),
        ("torch.distributed.device_mesh", "DeviceMesh", "inert"),
        ("torch.distributed.tensor", "DTensor", "tag"),
    ],
    ids=str,
)
def test_names_have_their_kind(module: str, name: str, kind: str) -> None:
    assert ALLOWED[module, name].kind == kind
    assert ALLOWED[module, name].why


def test_machine_knows_no_kind_by_another_word() -> None:
    """A row that names no function would be found only when a file has it."""
    import tensorio._unpickler  # builds its table from every row

    assert tensorio._unpickler.Leaf is Leaf
