"""One table of facts: what it says must be what NumPy, ml_dtypes and torch say."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import cases
from tensorio.dtypes import BY_NAME, DTYPES, numpy_dtype, numpy_dtypes, of_numpy


def test_rows_are_numbered_and_named_once() -> None:
    assert [d.code for d in DTYPES] == list(range(len(DTYPES)))
    assert len(BY_NAME) == len(DTYPES)
    assert all(BY_NAME[d.name] is d for d in DTYPES)


@pytest.mark.parametrize("name", cases.DTYPES)
def test_row_equals_the_array_type(name: str) -> None:
    row, want = BY_NAME[name], np.dtype(cases.DTYPES[name])
    assert numpy_dtype(name) == want
    assert row.itemsize == want.itemsize
    assert row.bits == 8 * want.itemsize
    assert not row.packed
    assert of_numpy(want) is row


@pytest.mark.parametrize("row", DTYPES, ids=lambda d: d.name)
def test_every_row_can_be_shown(row: object) -> None:
    shown = numpy_dtype(row.name)  # type: ignore[attr-defined]
    assert shown == numpy_dtypes()[row.code]  # type: ignore[attr-defined]
    assert shown.itemsize == row.itemsize  # type: ignore[attr-defined]


@pytest.mark.parametrize("row", [d for d in DTYPES if not d.packed], ids=lambda d: d.name)
def test_itemsize_equals_torchs(row: object) -> None:
    torch = pytest.importorskip("torch")
    kind = getattr(torch, row.name, None)  # type: ignore[attr-defined]
    assert kind is not None, "a torch type by the same name"
    assert kind.itemsize == row.itemsize  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "bits"), [("float4_e2m1fn", 4), ("float6_e2m3fn", 6), ("float6_e3m2fn", 6)])
def test_packed_rows_are_shown_as_bytes(name: str, bits: int) -> None:
    row = BY_NAME[name]
    assert (row.packed, row.bits, row.itemsize, numpy_dtype(name)) == (True, bits, 1, np.dtype("u1"))


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("complex64", 4),
        ("complex128", 8),
        ("complex32", 2),
        ("float64", 8),
        ("uint8", 1),
        ("bool", 1),
        ("bfloat16", 2),
        ("bits16", 2),
        ("float8_e5m2", 1),
    ],
)
def test_swapped_unit_is_a_number_not_an_element(name: str, unit: int) -> None:
    assert BY_NAME[name].swap == unit


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c16", "<u2"])
def test_foreign_byte_order_is_the_same_type(dtype: str) -> None:
    row = of_numpy(np.dtype(dtype))
    assert row is not None
    assert row.name == np.dtype(dtype).newbyteorder("=").name


@pytest.mark.parametrize(
    "dtype", ["S3", "U2", "V4", "O", "M8[s]", "m8[s]", "f4,f4", "f4,i8", [("a", "f2"), ("b", "f2")]], ids=str
)
def test_types_that_are_no_tensors_have_no_row(dtype: object) -> None:
    assert of_numpy(np.dtype(dtype)) is None  # type: ignore[call-overload]


def test_pair_of_halves_is_complex32() -> None:
    row = of_numpy(np.dtype([("real", "f2"), ("imag", "f2")]))
    assert row is not None
    assert row.name == "complex32"


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.float8_e3m4], ids=lambda d: d.__name__)
def test_other_small_types_have_no_row(dtype: type) -> None:
    assert of_numpy(np.dtype(dtype)) is None


@pytest.mark.plain_build
def test_table_needs_no_numpy() -> None:
    code = "import sys, tensorio.dtypes as d; assert d.BY_NAME['bfloat16'].itemsize == 2 and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
