"""Arrays that joblib writes into the middle of a pickle: raw bytes behind the state of their wrapper.

Source: ``NumpyArrayWrapper.read_array`` of joblib 0.10 to 1.5. Since 1.2, one byte says how many bytes of padding
follow it. An array of objects is a pickle of its own there.
"""

from __future__ import annotations

import re

from tensorio.scanning._found import Ref
from tensorio.scanning._oddities import BITS, DICT, INT, TEXT, TUPLE, Oddities
from tensorio.scanning._operands import Truncated, number_at, text_at

__all__ = ["WithArrays"]

_FIELDS = ("shape", "dtype", "numpy_array_alignment_bytes")
_DTYPE = re.compile(r"[<>|=]?([biufcSUmMO])(\d{1,9})")
KEPT_MAX = 1 << 16  # shapes, dtypes, wrappers
OBJECTS = -1


class WithArrays(Oddities):
    """The part of the walk that knows how many bytes an array has."""

    def __init__(self, data: memoryview, start: int, keys: bool) -> None:
        super().__init__(data, start, keys)
        self.wrappers: set[int] = set()  # numbers of the names of the wrapper
        self.shapes: dict[int, list[int]] = {}
        self.dtypes: dict[int, int] = {}  # bytes per element, OBJECTS
        self.fields: dict[int, dict[str, int]] = {}

    def note_name(self, number: int, ref: Ref) -> None:
        """Note that a wrapper is named: from here on, shapes and states matter."""
        if ref.name == "NumpyArrayWrapper" and ref.module.endswith("joblib.numpy_pickle"):
            self.wrappers.add(number)

    def note_tuple(self, value: int, parts: list[int] | None) -> None:
        """Note what may be a shape."""
        if parts is not None and all(part & 7 == INT for part in parts) and len(self.shapes) < KEPT_MAX:
            numbers = [number_at(self.data, part >> BITS) for part in parts]
            if None not in numbers:
                self.shapes[value] = numbers  # type: ignore[assignment]

    def note_dtype(self, value: int, args: int) -> None:
        """Note how many bytes an element of a dtype has: numpy.dtype(args)."""
        parts = self.tuple[1] if args & 7 == TUPLE and args >> BITS == self.tuple[0] else None
        if parts and parts[0] & 7 == TEXT and len(self.dtypes) < KEPT_MAX:
            found = _DTYPE.fullmatch(text_at(self.data, parts[0] >> BITS))
            if found is not None:
                width = int(found[2]) * (4 if found[1] == "U" else 1)
                self.dtypes[value] = OBJECTS if found[1] == "O" else width

    def note_items(self, target: int, height: int) -> None:
        """Note the state of a wrapper."""
        if target & 7 != DICT or len(self.fields) >= KEPT_MAX:
            return
        for i in range(height, len(self.stack) - 1, 2):
            if self.stack[i] & 7 == TEXT and (key := text_at(self.data, self.stack[i] >> BITS)) in _FIELDS:
                self.fields.setdefault(target, {})[key] = self.stack[i + 1]

    def array_behind(self, begin: int, state: int) -> tuple[int, bool]:
        """Return where the bytes of the array end that stands at `begin`, or that a pickle of objects begins there.

        Raises
        ------
        Truncated
            The state does not tell, or the data end before.
        """
        fields = self.fields.pop(state, {})
        itemsize, shape = self.dtypes.get(fields.get("dtype", -1)), self.shapes.get(fields.get("shape", -1))
        if itemsize is None or shape is None or min(shape, default=0) < 0:
            raise Truncated("an array of joblib whose size can't be told")
        if itemsize == OBJECTS:
            return begin, True
        if fields.get("numpy_array_alignment_bytes", 0) & 7 == INT:
            begin += 1 + (self.data[begin] if begin < len(self.data) else 0)
        nbytes = itemsize
        for length in shape:
            nbytes *= length
        if nbytes > len(self.data) - begin:
            raise Truncated(f"an array of {nbytes} bytes, where {max(len(self.data) - begin, 0)} are left")
        return begin + nbytes, False
