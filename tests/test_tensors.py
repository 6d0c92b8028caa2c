"""The table of tensors and what it unpacks to."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cases
import tensorio
from tensorio import Chunk, Extent, TensorInfo
from tensorio.dtypes import BY_NAME, c_strides
from tensorio.tensors import ROW, Infos, Table

F32 = BY_NAME["float32"].code


def table() -> Table:
    """Two plain tensors, and one of two chunks."""
    rows = array("q", [F32, 0, 2, 0, 0, 100, 24, 1, 0] + [F32, 3, 0, 4, 1, 8, 4, 1, 0] + [F32, 0, 1, 4, 0, 0, 0, 2, 0])
    dims = array("q", [2, 3, 12, 4, 4, 0] + [0, 3, 4] + [3, 1, 4])
    chunks = array("q", [0, 50, 12, 6, 2, 70, 4, 9])
    return Table(["w", "s", "c"], rows, dims, chunks)


def test_table_unpacks_rows() -> None:
    t = table()
    assert len(t) == 3
    assert len(t.rows) == 3 * ROW
    assert t.info(0) == TensorInfo("w", "float32", (2, 3), (Chunk((0, 0), (2, 3), (12, 4), Extent(0, 100, 24)),), 0)
    assert t.info(1) == TensorInfo("s", "float32", (), (Chunk((), (), (), Extent(1, 8, 4)),), 3)


def test_table_unpacks_chunks() -> None:
    assert table().info(2).chunks == (
        Chunk((0,), (3,), (4,), Extent(0, 50, 12)),
        Chunk((3,), (1,), (4,), Extent(2, 70, 4)),
    )
    assert not table().info(2).contiguous


def test_infos_are_a_read_only_mapping_in_table_order() -> None:
    infos = Infos(table())
    assert list(infos) == ["w", "s", "c"]
    assert len(infos) == 3
    assert "w" in infos
    assert "x" not in infos
    assert infos["s"].fqn == "s"
    assert infos == dict(infos)
    with pytest.raises(KeyError):
        infos["x"]
    with pytest.raises(TypeError):
        infos["w"] = infos["s"]  # type: ignore[index]
    assert repr(infos) == "<infos of 3 tensors>"


@given(st.lists(st.integers(0, 6), max_size=5), st.sampled_from(list(cases.DTYPES)))
def test_info_counts_like_numpy(shape: list[int], dtype: str) -> None:
    a = np.zeros(shape, cases.DTYPES[dtype])
    chunk = Chunk((0,) * a.ndim, a.shape, a.strides, Extent(0, 0, a.nbytes))
    info = TensorInfo("x", dtype, a.shape, (chunk,))
    assert (info.numel, info.nbytes, info.contiguous, info.packed) == (a.size, a.nbytes, True, False)


@given(st.lists(st.integers(1, 6), max_size=5))
def test_c_strides_are_numpys(shape: list[int]) -> None:
    assert c_strides(shape, 4) == np.zeros(shape, "f4").strides


@pytest.mark.parametrize(
    ("shape", "strides", "want"),
    [
        ((2, 3), (12, 4), True),
        ((2, 3), (4, 8), False),
        ((1, 3), (99, 4), True),
        ((2, 3), (24, 8), False),
        ((2, 2), (0, 4), False),
        ((0, 3), (1, 1), True),
        ((), (), True),
    ],
)
def test_info_contiguous_is_c_order(shape: tuple[int, ...], strides: tuple[int, ...], want: bool) -> None:
    chunk = Chunk((0,) * len(shape), shape, strides, Extent(0, 0, 99))
    assert TensorInfo("x", "float32", shape, (chunk,)).contiguous is want


def test_packed_info_counts_bits() -> None:
    info = TensorInfo("x", "float6_e2m3fn", (4, 4), (Chunk((0, 0), (4, 4), (0, 0), Extent(0, 0, 12)),))
    assert (info.numel, info.nbytes, info.packed, info.contiguous) == (16, 12, True, True)


def test_missing_name_suggests_near_ones() -> None:
    with tensorio.open(cases.CASES["safetensors_small"]().data) as checkpoint:
        with pytest.raises(tensorio.TensorNotFoundError, match=r"'a\.weight'"):
            checkpoint.infos["a.weights"]
        with pytest.raises(KeyError):
            checkpoint["nope"]
