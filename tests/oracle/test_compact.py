"""``compact=True``: what the file still holds, and that torch finds the same tensors in it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio

torch = pytest.importorskip("torch")


def stored(obj: Any, path: Path) -> tuple[Any, list[int], Any]:
    """What torch reads from a compact save, the bytes of its storages, and what the save says."""
    said = tensorio.save(obj, path, compact=True)
    with tensorio.open(path) as checkpoint:
        sizes = [record.nbytes for record in checkpoint._opened.records() if record.payload]
    return torch.load(path), sizes, said


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.stride() == b.stride() or a.is_contiguous()
        assert torch.equal(a.view(torch.uint8) if a.dtype == torch.float8_e4m3fn else a, b.view(torch.uint8)
                           if b.dtype == torch.float8_e4m3fn else b)  # fmt: skip


@pytest.mark.parametrize(
    "views",
    [
        lambda t: [t[:, ::2]],
        lambda t: [t[::2], t[1::2]],
        lambda t: [t[:, :4], t[:, 4:]],
        lambda t: [t[:3], t[90:]],
        lambda t: [t[::3].t(), t[1:3, 1]],
        lambda t: [t[:, i] for i in range(0, 8, 2)],
        lambda t: [torch.nn.Parameter(t[5:7, 1:3], t.is_floating_point()), t[5:7, 3:5]],
    ],
    ids=["inner", "rows", "halves", "far", "transposed", "columns", "parameter"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "complex64"])
def test_views_that_share_no_byte_are_stored_without_holes(
    views: Callable[[Any], list[Any]], dtype: str, tmp_path: Path
) -> None:
    base = torch.arange(800).reshape(100, 8).to(getattr(torch, dtype))
    made = views(base)
    got, sizes, said = stored(made, tmp_path / "x.pt")
    assert_same(got, made)
    assert sum(sizes) == sum(t.numel() * t.element_size() for t in made)
    assert said.left_out == base.nbytes - sum(sizes)


def test_views_that_overlap_still_do(tmp_path: Path) -> None:
    base = torch.arange(100.0).reshape(10, 10)
    made = [base[:, ::2], base[:, 2:5], base[5:, 7]]
    got, sizes, said = stored(made, tmp_path / "x.pt")
    assert_same(got, made)
    got[0][0, 1] = -1
    assert got[1][0, 0] == -1
    assert sizes == [99 * 4]  # by itself, the column would be once more what the others span
    assert said.left_out == 4


def test_view_among_others_goes_by_itself_if_that_is_less(tmp_path: Path) -> None:
    base = torch.arange(10_000.0).reshape(100, 100)
    made = [base[:2, :3], base[1:3, 1:2], base[:, 50]]
    got, sizes, _ = stored(made, tmp_path / "x.pt")
    assert_same(got, made)
    assert sizes == [202 * 4, 100 * 4]


def test_tied_views_stay_tied(tmp_path: Path) -> None:
    base = torch.arange(100.0).reshape(10, 10)
    made = [base[:, ::2], base[:, ::2]]
    got, sizes, _ = stored(made, tmp_path / "x.pt")
    assert_same(got, made)
    assert got[0].data_ptr() == got[1].data_ptr()
    assert sizes == [50 * 4]


def marked(tensor: Any) -> Any:
    tensor.note = "kept"
    return tensor


ODD = {
    "conjugate": lambda base: base[2:6].conj(),
    "negative": lambda base: torch._neg_view(base[2:6]),
    "with an attribute": lambda base: marked(base[2:6]),
}


@pytest.mark.parametrize("order", [1, -1], ids=["view first", "view last"])
@pytest.mark.parametrize("odd", ODD)
def test_views_beside_what_torch_reduces_itself_share_its_storage(odd: str, order: int, tmp_path: Path) -> None:
    base = torch.arange(10.0) + (1j if odd == "conjugate" else 0)
    made = [ODD[odd](base), base[4::2], base[4:], torch.ones(100)[::4]][::order]
    got, sizes, said = stored(made, tmp_path / "x.pt")
    assert_same([t.resolve_conj().resolve_neg() for t in got], [t.resolve_conj().resolve_neg() for t in made])
    assert sorted(sizes) == sorted([base.nbytes, 100])
    assert said.left_out == 300
    assert len({t.untyped_storage().data_ptr() for t in got}) == 2


def test_numpy_views_count_from_the_bytes_that_they_span(tmp_path: Path) -> None:
    base = np.arange(100, dtype="f4").reshape(10, 10)
    got, sizes, said = stored({"a": base[:, ::2], "b": base[2:4, 1::2]}, tmp_path / "x.pt")
    np.testing.assert_array_equal(got["a"], base[:, ::2])
    np.testing.assert_array_equal(got["b"], base[2:4, 1::2])
    assert sizes == [200, 40]
    assert said.left_out == 99 * 4 - 240


def test_many_views_and_whole_storages_are_as_they_were(tmp_path: Path) -> None:
    base = torch.arange(4000.0).reshape(1000, 4)
    many = [base[i : i + 2, :3] for i in range(998)]  # more than are compared in pairs
    assert_same(stored(many, tmp_path / "x.pt")[0], many)
    whole = [torch.ones(3, 4).t(), torch.ones(2), base]
    buffer = io.BytesIO()
    said = tensorio.save(whole, buffer, format="torch_zip", compact=True)
    assert said.left_out == 0
    plain = io.BytesIO()
    tensorio.save(whole, plain, format="torch_zip")
    assert plain.getvalue() == buffer.getvalue()


def test_convert_leaves_holes_out(tmp_path: Path) -> None:
    base = torch.arange(800.0).reshape(100, 8)
    obj = {"a": base[:, ::2], "b": base[:, 1], "n": 3}
    torch.save(obj, tmp_path / "x.pt")
    tensorio.convert(tmp_path / "x.pt", tmp_path / "loose.pt")
    tensorio.convert(tmp_path / "x.pt", tmp_path / "y.pt", compact=True)
    got = torch.load(tmp_path / "y.pt")
    assert_same([got["a"], got["b"]], [obj["a"], obj["b"]])
    assert got["n"] == 3
    with tensorio.open(tmp_path / "y.pt") as checkpoint:
        assert [record.nbytes for record in checkpoint._opened.records() if record.payload] == [1600, 400]
