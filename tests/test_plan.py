"""Plans are pure: they say the size before, yield exactly that, and do no I/O."""

from __future__ import annotations

import functools
import io
import zipfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorio
from tensorio import formats, plan
from tensorio.formats._base import SaveOptions

FORMATS = ["safetensors", "torch_zip"]


def laid_out(format: str, tensors: Any, **options: Any) -> Any:
    return formats.get(format).plan(tensors, SaveOptions(**options))


sizes = st.lists(
    st.sampled_from([0, 1, 7, 64, 4000, 70_000, plan.PIECE - 1, plan.PIECE, plan.PIECE + 1, 3 * plan.PIECE]),
    max_size=12,
)


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=40, deadline=None)
@given(sizes)
def test_plan_yields_what_it_promised(format: str, counts: list[int]) -> None:
    tensors = {f"t{i}": np.full(n, i, "u1") for i, n in enumerate(counts)}
    planned = laid_out(format, tensors)
    promised = planned.nbytes
    pieces = [bytes(p) for p in planned.pieces()]
    data = b"".join(pieces)
    assert len(data) == promised == planned.nbytes
    assert max(map(len, pieces)) <= 2 * plan.PIECE
    assert {k: v.tobytes() for k, v in tensorio.load(data, verify=True).items()} == {
        k: v.tobytes() for k, v in tensors.items()
    }


@pytest.mark.parametrize("format", FORMATS)
def test_plan_of_strided_arrays_copies_a_piece_at_a_time(format: str) -> None:
    base = np.arange(1 << 20, dtype="i4").reshape(1 << 10, -1)
    tensors = {"t": base.T, "rows": base[::3], "back": base[::-1, ::-1], "swapped": base.astype(">i4")}
    data = b"".join(bytes(p) for p in laid_out(format, tensors).pieces())
    for name, array in tensorio.load(data).items():
        assert np.array_equal(array, tensors[name]), name


def test_plan_of_copied_arrays_among_overlapping_ones_keeps_their_values() -> None:
    """Overlaps are found in a first pass; what was copied for it must be what the second one writes."""
    for n in (4, 64, 300):
        base = np.arange(n * n, dtype="i4").reshape(n, n)
        tensors = {
            "t": base.T,
            "rows": base[::3],
            "back": base[::-1],
            "again": base[::-1],
            "swapped": base.astype(">i4"),
        }
        data = b"".join(bytes(p) for p in laid_out("torch_zip", tensors).pieces())
        for name, array in tensorio.load(data).items():
            assert np.array_equal(array, tensors[name]), name


@pytest.mark.parametrize("format", FORMATS)
def test_plan_can_be_written_twice(format: str) -> None:
    planned = laid_out(format, {"a": np.arange(9.0), "b": np.arange(9.0).reshape(3, 3).T})
    assert b"".join(planned.pieces()) == b"".join(planned.pieces())


@pytest.mark.parametrize("align", [1, 2, 8, 64, 100, 4096, 32768])
def test_plan_of_a_zip_aligns_every_record(align: int) -> None:
    data = b"".join(
        bytes(p) for p in laid_out("torch_zip", {"a": np.ones(3, "f4"), "b": np.ones(5, "u1")}, align=align).pieces()
    )
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
    with tensorio.open(data) as checkpoint:
        for info in checkpoint.infos.values():
            assert info.chunks[0].extent.offset % align == 0


@pytest.mark.parametrize("align", [1, 8, 64, 4096])
def test_plan_of_a_safetensors_file_aligns_its_first_tensor(align: int) -> None:
    data = b"".join(bytes(p) for p in laid_out("safetensors", {"a": np.ones(3, "f4")}, align=align).pieces())
    assert (8 + int.from_bytes(data[:8], "little")) % max(align, 8) == 0
    assert tensorio.load(data)["a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("format", "align"),
    [
        ("safetensors", 0),
        ("safetensors", 12),
        ("safetensors", -8),
        ("torch_zip", 0),
        ("torch_zip", 32769),
        ("torch_zip", -1),
    ],
)
def test_plan_with_an_impossible_alignment_is_refused(format: str, align: int) -> None:
    with pytest.raises((ValueError, OverflowError, tensorio.TensorIOError), match=r"(?i)align"):
        laid_out(format, {"a": np.ones(3)}, align=align)


@pytest.mark.parametrize("sizes", [[3], [0], [plan.PIECE], [plan.PIECE + 1, 5], [1, 2 * plan.PIECE + 3]])
def test_pieces_are_the_bytes_in_pieces(sizes: list[int]) -> None:
    buffers = [bytes([i]) * n for i, n in enumerate(sizes)]
    got = list(plan.pieces_of(lambda: iter(buffers), sum(sizes)))
    assert b"".join(bytes(p) for p in got) == b"".join(buffers)
    assert all(len(p) <= plan.PIECE for p in got)


@pytest.mark.parametrize("nbytes", [2, 4])
def test_source_of_another_size_than_planned_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="planned were"):
        list(plan.pieces_of(b"abc", nbytes))
    payloads = plan.Payloads()
    payloads.add(lambda: iter([b"abc"]), nbytes)
    with pytest.raises(ValueError, match="planned"):
        list(plan.FlatPlan(b"head", payloads).pieces())


def test_flat_plan_joins_neighbours_and_keeps_order() -> None:
    payloads = plan.Payloads()
    parts: list[bytes] = [
        b"",
        b"a",
        b"b" * plan.SMALL,
        b"c" * (plan.SMALL + 1),
        b"d",
        b"e" * (3 * plan.PIECE),
        b"",
        b"f",
    ]
    for i, part in enumerate(parts):
        payloads.add(functools.partial(iter, [part]) if i % 3 == 1 else part, len(part))
    flat = plan.FlatPlan(b"head", payloads)
    pieces = [bytes(p) for p in flat.pieces()]
    assert b"".join(pieces) == b"head" + b"".join(parts)
    assert flat.nbytes == len(b"".join(pieces))
    picked = plan.FlatPlan(b"", payloads.select([7, 4, 1]))
    assert b"".join(bytes(p) for p in picked.pieces()) == b"fda"


@pytest.mark.parametrize("format", FORMATS)
def test_pieces_of_large_tensors_end_where_the_file_has_whole_blocks(format: str) -> None:
    """Else each block of the page cache is written by two calls."""
    tensors = {name: np.zeros(2 * plan.PIECE + 100, "u1") for name in "abc"}
    offsets = {0}
    for piece in laid_out(format, tensors).pieces():
        offsets.add(max(offsets) + len(piece))
    assert offsets >= set(range(0, max(offsets), plan.PIECE))
