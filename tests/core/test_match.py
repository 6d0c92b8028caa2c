"""Elements that match a mask and a pattern, every variant against NumPy."""

from __future__ import annotations

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
