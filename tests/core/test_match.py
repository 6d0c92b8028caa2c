"""Elements that match a mask and a pattern, every variant against NumPy."""

from __future__ import annotations

from array import array
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorio import _core

variants = pytest.mark.parametrize("variant", _core.match_variants())
WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def expected(elements: np.ndarray, mask: int, pattern: int) -> int:
    """The index of the first match, as NumPy finds it."""
    hits = np.flatnonzero((elements & elements.dtype.type(mask)) == elements.dtype.type(pattern))
    return int(hits[0]) if len(hits) else len(elements)


def test_portable_comes_first_and_something_is_usable() -> None:
    assert _core.match_variants()[0] == "portable"


@variants
@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(WIDTHS)), st.binary(max_size=3000), st.integers(0, 7), st.data())
def test_first_match_of_any_bytes(variant: str, width: int, raw: bytes, shift: int, data: st.DataObject) -> None:
    top = (1 << 8 * width) - 1
    mask = data.draw(st.sampled_from([top, top >> 1, 0, 0x7F, 0xF0F0F0F0F0F0F0F0 & top]))
    pattern = data.draw(st.sampled_from([mask, 0, 0x70 & mask]))
    held = np.frombuffer(b"\0" * shift + raw, np.uint8)[shift:]  # at every alignment
    count = len(held) // width
    elements = held[: count * width].copy().view(WIDTHS[width])
    found = _core.match_with(variant, held.ctypes.data, count, width, mask, pattern)
    assert found == expected(elements, mask, pattern)
    hits = (elements & elements.dtype.type(mask)) == elements.dtype.type(pattern)
    assert _core.match_count(held.ctypes.data, count, width, mask, pattern) == int(hits.sum())


@variants
@pytest.mark.parametrize("width", WIDTHS)
def test_a_single_match_anywhere(variant: str, width: int) -> None:
    elements = np.zeros(1200 // width, WIDTHS[width])
    for place in range(len(elements)):
        elements[place] = 0x7C
        assert _core.match_with(variant, elements.ctypes.data, len(elements), width, 0x7F, 0x7C) == place
        assert _core.match_with(variant, elements.ctypes.data, place, width, 0x7F, 0x7C) == place
        elements[place] = 0


@variants
def test_nothing_is_read_of_no_elements(variant: str) -> None:
    assert _core.match_with(variant, 0, 0, 4, 1, 1) == 0


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ValueError, match="no variant"):
        _core.match_with("abacus", 0, 0, 1, 0, 0)


KINDS = array("Q", [1, 0x7C, 0x7C, 0, 0, 0, 4, 0x7F800000, 0x7F800000])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([-1, 0, 1, 2, 3]), st.binary(max_size=300)), max_size=20),
    st.sampled_from([8, 64, 1 << 20]), st.sampled_from([1, 500, 1 << 20]), st.integers(0, 100),
)  # fmt: skip
def test_runs_of_many_tensors(tensors: list[tuple[int, bytes]], part: int, task: int, cost: int) -> None:
    """Cut in any way, the first match of each run is that of NumPy; types that are not looked for have none."""
    held = [np.frombuffer(raw[: len(raw) // 4 * 4] or b"", np.uint8).copy() for _, raw in tensors]
    places = array("q")
    for (kind, _), values in zip(tensors, held, strict=True):
        places.extend((kind, values.ctypes.data, values.nbytes))
    runs, ends, nbytes = _core.match_cut(places, KINDS, part, task, cost)
    looked = [(i, values) for i, values in enumerate(held) if tensors[i][0] in (0, 2)]
    assert nbytes == sum(values.nbytes for _, values in looked)
    found = [hit for a, b in pairwise([0, *ends]) for hit in _core.match_runs(runs, KINDS, a, b)]
    want = []
    for i, values in looked:
        width, mask, pattern = KINDS[3 * tensors[i][0] :][:3]
        for start in range(0, values.nbytes, part):
            piece = values[start : start + part].view(WIDTHS[width])
            first = width * expected(piece, mask, pattern)
            if first < piece.nbytes:
                at = values.ctypes.data + start + first
                want.append((i, tensors[i][0], at, piece.nbytes - first, start + first))
    assert found == want


def test_runs_are_asked_for_within_the_table() -> None:
    runs, ends, _ = _core.match_cut(array("q", [0, 0, 0]), KINDS, 8, 8, 1)
    assert (len(runs), ends) == (0, [])
    for begin, end in ((0, 1), (-1, 0), (1, 0)):
        with pytest.raises(IndexError):
            _core.match_runs(runs, KINDS, begin, end)
