"""What a tensor of the user's is taken for: type, shape, size, address, and whether it lies in C order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cases
import tensorio
from tensorio import _source
from tensorio.dtypes import BY_NAME, DTYPES

Array = np.ndarray[Any, Any]


def address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


# ----------------------------------------------------------------------- NumPy


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_array_of_every_type_is_described(dtype: str) -> None:
    array = cases.array(dtype, (3, 4))
    assert _source.describe_array(array) == (BY_NAME[dtype].code, (3, 4), array.nbytes, address(array), True)


def test_pair_of_halves_is_complex32() -> None:
    array = np.zeros(3, [("real", "f2"), ("imag", "f2")])
    assert _source.describe_array(array)[:3] == (BY_NAME["complex32"].code, (3,), 12)


NO_TENSOR = {
    "strings": "U3", "bytes": "S3", "objects": "O", "dates": "M8[s]", "durations": "m8[ns]", "void": "V4",
    "fields": [("a", "i4"), ("b", "f4")], "other_halves": [("imag", "f2"), ("real", "f2")], "long_double": "longdouble",
    "complex_long_double": "clongdouble", "int4": ml_dtypes.int4, "float6": ml_dtypes.float6_e2m3fn,
    "sub_array": [("a", "f4", (2,))],
}  # fmt: skip


@pytest.mark.parametrize("dtype", NO_TENSOR.values(), ids=NO_TENSOR.keys())
def test_array_that_is_no_tensor_has_no_code(dtype: Any) -> None:
    for _ in range(2):  # the second answer is remembered
        array = np.zeros(3, dtype)
        assert _source.describe_array(array)[0] == -1
        assert _source.describe_array(np.zeros(3, "f4"))[0] == BY_NAME["float32"].code
        assert _source.describe_array(np.zeros(3, [("real", "f2"), ("imag", "f2")]))[0] == BY_NAME["complex32"].code


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">u2", ">c16", ">f2", [("real", ">f2"), ("imag", ">f2")]], ids=str)
def test_array_of_foreign_byte_order_has_no_code(dtype: Any) -> None:
    assert _source.describe_array(np.zeros(3, dtype))[0] == -1
    assert _source.describe_array(np.zeros(3, np.dtype(dtype).newbyteorder("<")))[0] >= 0
    assert _source.describe_array(np.zeros(3, dtype))[0] == -1


@pytest.mark.parametrize("dtype", ["<f4", "=f4", "f", np.float32, np.single])
def test_spelling_of_a_type_makes_no_difference(dtype: Any) -> None:
    assert _source.describe_array(np.zeros(3, dtype))[0] == BY_NAME["float32"].code


@pytest.mark.parametrize("dtype", ["b", "h", "i", "l", "q", "B", "H", "I", "L", "Q"])
def test_c_types_of_one_width_are_one_type(dtype: str) -> None:
    kind = np.dtype(dtype)
    assert DTYPES[_source.describe_array(np.zeros(2, kind))[0]].name == kind.name


BASE = np.arange(24.0).reshape(4, 6)

LAYOUTS: dict[str, tuple[Callable[[], Array], bool]] = {
    "whole": (lambda: BASE, True),
    "rows": (lambda: BASE[1:3], True),
    "transposed": (lambda: BASE.T, False),
    "fortran": (lambda: np.asfortranarray(BASE), False),
    "columns": (lambda: BASE[:, ::2], False),
    "one_column": (lambda: BASE[:, :1], False),
    "one_row_transposed": (lambda: BASE[:1].T, True),
    "reversed": (lambda: BASE[::-1], False),
    "reversed_single": (lambda: BASE[:1][::-1], True),
    "reversed_columns": (lambda: BASE[:, ::-1], False),
    "every_second_row": (lambda: BASE[::2], False),
    "first_of_every_ninth_row": (lambda: BASE[::9], True),
    "expanded": (lambda: np.broadcast_to(BASE, (2, 4, 6)), False),
    "expanded_once": (lambda: np.broadcast_to(BASE, (1, 4, 6)), True),
    "zero_dim": (lambda: BASE[2, 3, ...], True),
    "empty": (lambda: BASE[2:2], True),
    "empty_reversed": (lambda: BASE[2:2, ::-1].T, True),
    "inner_axis_of_one": (lambda: BASE[:, None, :], True),
    "field": (lambda: np.zeros(3, [("a", "f4"), ("b", "f8")])["b"], False),
    "packed_field": (lambda: np.zeros(3, [("a", "u1"), ("b", "f8")])["b"], False),
    "off_its_alignment": (lambda: np.frombuffer(bytes(33), np.uint8)[1:].view("f8"), True),
    "read_only": (lambda: np.frombuffer(bytes(32)), True),
    "subclass": (lambda: BASE.view(type("Tagged", (np.ndarray,), {})), True),
    "memory_map_like": (lambda: BASE.view(np.recarray), True),
    "many_axes": (lambda: np.ones((1,) * 64), True),
    "many_axes_of_two": (lambda: np.ones((1,) * 50 + (2,) * 10), True),
    "huge_and_empty": (lambda: np.empty((1 << 40, 0, 1 << 10)), True),
}


@pytest.mark.parametrize("make, in_order", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layout_of_an_array(make: Callable[[], Array], in_order: bool) -> None:
    array = make()
    code, shape, nbytes, place, order = _source.describe_array(array)
    assert (DTYPES[code].name, shape, nbytes, order) == (array.dtype.name, array.shape, array.nbytes, in_order)
    assert place == address(array)
    assert order == array.flags.c_contiguous or not array.size


@st.composite
def views(draw: st.DrawFn) -> Array:
    """Any view that basic indexing makes."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    array: Array = np.arange(int(np.prod(shape)), dtype=draw(st.sampled_from(["u1", "i2", "f8"]))).reshape(shape)
    steps = st.sampled_from([None, 1, 2, -1, -2])
    index = tuple(slice(draw(st.none() | st.integers(0, 4)), None, draw(steps)) for _ in shape)
    array = np.asarray(array[index]) if index else array
    return array.transpose(draw(st.permutations(range(array.ndim))))


@settings(max_examples=500, deadline=None)
@given(views())
def test_order_is_what_numpy_calls_contiguous(array: Array) -> None:
    code, shape, nbytes, place, in_order = _source.describe_array(array)
    assert (shape, nbytes, place) == (array.shape, array.nbytes, address(array))
    assert code >= 0
    assert in_order == array.flags.c_contiguous


@pytest.mark.parametrize("other", [None, 1, [1.0], b"abc", memoryview(b"abc"), np.float32(1)])
def test_what_is_no_array_is_refused(other: Any) -> None:
    with pytest.raises(TypeError):
        _source.describe_array(other)


# ----------------------------------------------------------------------- torch


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch makes the tensors")


TORCH_DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
                "complex128", "complex64", "complex32", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2",
                "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "bits8", "bits16",
                "bits1x8", "bits2x4", "bits4x2"]  # fmt: skip


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_tensor_of_every_type_is_described(dtype: str, torch: Any) -> None:
    kind = getattr(torch, dtype)
    tensor = torch.zeros(6 * kind.itemsize, dtype=torch.uint8).view(kind).reshape(2, 3)
    want = (BY_NAME[dtype].code, (2, 3), 6 * kind.itemsize, tensor.data_ptr(), True)
    assert _source.describe_torch(tensor) == want
    assert _source.describe_torch(tensor[1:]) == (want[0], (1, 3), 3 * kind.itemsize, tensor[1:].data_ptr(), True)
    assert _source.describe_torch(tensor.t())[4] is False


TORCH_LAYOUTS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "whole": (lambda t: t.arange(6.0).reshape(2, 3), True),
    "transposed": (lambda t: t.arange(6.0).reshape(2, 3).t(), False),
    "offset": (lambda t: t.arange(6.0)[2:], True),
    "every_second": (lambda t: t.arange(6.0)[::2], False),
    "expanded": (lambda t: t.ones(1).expand(3, 4), False),
    "zero_dim": (lambda t: t.tensor(1.0), True),
    "empty": (lambda t: t.empty(0, 3), True),
    "empty_transposed": (lambda t: t.empty(0, 3).t(), True),
    "one_wide": (lambda t: t.arange(6.0).reshape(6, 1).t(), True),
    "channels_last": (lambda t: t.ones(2, 3, 4, 5).to(memory_format=t.channels_last), False),
    "conjugate": (lambda t: t.ones(3, dtype=t.complex64).conj(), False),
    "negative": (lambda t: t._neg_view(t.ones(3)), False),
    "parameter": (lambda t: t.nn.Parameter(t.ones(3)), True),
    "asks_for_gradients": (lambda t: t.ones(3, requires_grad=True), True),
    "many_axes": (lambda t: t.ones([1] * 64), True),
}


@pytest.mark.parametrize("make, in_order", TORCH_LAYOUTS.values(), ids=TORCH_LAYOUTS.keys())
def test_layout_of_a_tensor(make: Callable[[Any], Any], in_order: bool, torch: Any) -> None:
    tensor = make(torch)
    code, shape, nbytes, place, order = _source.describe_torch(tensor)
    assert DTYPES[code].name == str(tensor.dtype).removeprefix("torch.")
    assert (shape, nbytes, order) == (tuple(tensor.shape), tensor.numel() * tensor.itemsize, in_order)
    assert place == tensor.data_ptr()


@pytest.mark.filterwarnings("ignore:Sparse .* support is in beta")
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("make", [
    lambda t: t.eye(3).to_sparse(), lambda t: t.eye(3).to_sparse_csr(), lambda t: t.empty(3, device="meta"),
    lambda t: t.quantize_per_tensor(t.ones(3), 0.1, 0, t.qint8), lambda t: t.zeros(4, dtype=t.uint8).view(t.int4),
    lambda t: t.nested.nested_tensor([t.ones(2), t.ones(3)]), lambda t: t.ones([1] * 65),
    lambda t: t.nested.nested_tensor([t.ones(2), t.ones(3)], layout=t.jagged),
], ids=["sparse", "csr", "meta", "quantized", "int4", "nested", "65_axes", "jagged"])  # fmt: skip
def test_tensor_that_is_not_one_view_of_memory_has_no_description(make: Callable[[Any], Any], torch: Any) -> None:
    assert _source.describe_torch(make(torch)) is None


def test_tensor_views_agree_with_torch(torch: Any) -> None:
    rng = random.Random(0)
    for _ in range(500):
        tensor = torch.arange(120.0).reshape(2, 3, 4, 5)
        for axis in range(4):
            start, step = rng.randrange(3), rng.choice((1, 1, 1, 2, 7))
            tensor = tensor[(slice(None),) * axis + (slice(start if rng.random() < 0.3 else None, None, step),)]
        tensor = tensor.permute(rng.sample(range(4), 4)) if rng.random() < 0.5 else tensor
        _, shape, nbytes, place, in_order = _source.describe_torch(tensor)
        assert (shape, nbytes, place) == (tuple(tensor.shape), tensor.nbytes, tensor.data_ptr())
        assert in_order == tensor.is_contiguous()


@pytest.mark.parametrize("left", [0, 8])
@pytest.mark.parametrize("start", [0, 5])
def test_storage_that_was_taken_away_is_not_described_as_memory(left: int, start: int, torch: Any) -> None:
    """A shape whose storage has fewer bytes than it spans: they must not be read."""
    whole = torch.ones(1 << 10)
    tensor = whole[start:]
    whole.untyped_storage().resize_(left)
    try:
        described = _source.describe_torch(tensor)
    except tensorio.UnsupportedError:
        return
    assert described is None or described[0] == -1


@pytest.mark.parametrize("other", [None, 1, "text"])
def test_what_is_no_tensor_is_an_error(other: Any) -> None:
    with pytest.raises((AttributeError, TypeError)):
        _source.describe_torch(other)
