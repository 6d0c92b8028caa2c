"""What can't be judged by a name: persistent ids, states that set special attributes, pickles in a pickle.

Every value of a walk is one int: the offset of the opcode that pushed it (or the number of the name it comes from) and
in the lowest bits what it is.
"""

from __future__ import annotations

from array import array

from tensorio.dangers import SPECIAL_ATTRIBUTES
from tensorio.errors import escaped
from tensorio.scanning._found import Named, Walk, itemsize
from tensorio.scanning._operands import WIDTH, data_at, number_at, text_at

__all__ = ["BITS", "BYTES", "DICT", "INT", "NAME", "OTHER", "RESULT", "TEXT", "TUPLE", "Oddities"]

# What a value is, in its lowest bits. Above them stands an offset; for NAME and RESULT, a number in `Walk.refs`.
OTHER, TEXT, NAME, RESULT, INT, TUPLE, DICT, BYTES = range(8)
BITS = 3

LISTED_MAX = 1000
STORAGES_MAX = 1 << 21
SPECIAL_MAX = 1 << 16
INNER_MAX = 100_000  # bytes objects in a pickle that are looked into
INNER_MIN = 8  # bytes of the shortest pickle in a pickle that does anything


class Oddities:
    """The part of the walk that knows what is odd.

    Parameters
    ----------
    data : memoryview
    start : int
        First byte of the pickle.
    keys : bool
        Whether persistent ids are plain numbers.
    """

    def __init__(self, data: memoryview, start: int, keys: bool) -> None:
        self.data = data
        self.keys = keys
        self.out = Walk(start)
        self.stack = array("q")
        self.tuple: tuple[int, list[int] | None] = (-1, None)  # the last tuple made and, if it is short, its parts
        self.special: dict[int, str] = {}  # dicts with a special attribute among their keys
        self.word_storage = -1  # the value that was seen to be the text "storage"

    def fail(self, at: int, why: str) -> None:
        """Note the first error; the walk goes on."""
        if self.out.error is None:
            self.out.error = (at, why)

    def odd(self, at: int, what: str) -> None:
        if len(self.out.odd) < LISTED_MAX:
            self.out.odd.append((at, what))

    def hold(self, at: int) -> None:
        """Note bytes that begin like a pickle or an archive."""
        begin, nbytes = data_at(self.data, at)
        head = bytes(self.data[begin : begin + 4])
        if nbytes >= INNER_MIN and ((head[0] == 0x80 and head[1] <= 5) or head in (b"PK\x03\x04", b"\x93NUM")):
            self.keep(begin, nbytes, sure=False)

    def keep(self, begin: int, nbytes: int, *, sure: bool) -> None:
        """Note bytes to be looked into."""
        if len(self.out.inner) < INNER_MAX:
            self.out.inner.append((begin, nbytes, sure))
        elif self.out.inner[-1][1] >= 0:
            self.out.inner.append((begin, -1, False))

    def load_from_bytes(self, at: int, args: int) -> None:
        """Note the bytes that a call loads as a torch file."""
        parts = self.tuple[1] if args >> BITS == self.tuple[0] else None
        if parts and (parts[0] & 7 == BYTES or (parts[0] & 7 == TEXT and self.data[parts[0] >> BITS] in b"TU")):
            self.keep(*data_at(self.data, parts[0] >> BITS), sure=True)
        else:
            self.odd(at, "a torch file in bytes that are made while the pickle is loaded")

    def plain(self, value: int) -> object:
        """A value as it is, if it is small."""
        tag, place = value & 7, value >> BITS
        if tag == INT:
            return number_at(self.data, place)
        if tag == TEXT:
            return text_at(self.data, place)
        if tag == TUPLE and place == self.tuple[0] and self.tuple[1] is not None:
            parts = self.tuple[1]
            return tuple(Named(v >> BITS) if v & 7 == NAME else None if v & 7 == TUPLE else self.plain(v)
                         for v in parts)  # fmt: skip
        return None

    def look_at_keys(self, target: int, height: int) -> None:
        """Note whether a key is the name of a special attribute: as a state, it would be set."""
        data, stack = self.data, self.stack
        for i in range(height, len(stack) - 1, 2):
            if stack[i] & 7 == TEXT:
                place = stack[i] >> BITS
                begin = place + 1 + WIDTH[data[place]]
                if data[begin] == ord("_") or data[place] in b"SV":
                    key = text_at(data, place)
                    if key in SPECIAL_ATTRIBUTES:
                        if len(self.special) >= SPECIAL_MAX:
                            self.odd(place, f"over {SPECIAL_MAX} dicts with special attributes among their keys")
                        else:
                            self.special[target] = key

    def look_at_state(self, at: int, state: int) -> None:
        parts = self.tuple[1] if state & 7 == TUPLE and state >> BITS == self.tuple[0] else None
        for value in (state, *(parts or ())):
            if value in self.special:
                self.odd(at, f"a state that sets the special attribute {escaped(self.special[value])} of an object")

    def is_storage(self, parts: list[int]) -> bool:
        """Whether a persistent id is one of torch's storages: ("storage", class, key, location, numel[, view])."""
        if len(parts) not in (5, 6) or [v & 7 for v in parts[:5]] != [TEXT, NAME, TEXT, TEXT, INT]:
            return False
        return parts[0] == self.word_storage or text_at(self.data, parts[0] >> BITS) == "storage"

    def storage(self, at: int, parts: list[int]) -> None:
        """Note how many bytes a storage has."""
        self.word_storage = parts[0]
        key, numel = text_at(self.data, parts[2] >> BITS), number_at(self.data, parts[4] >> BITS)
        if key not in self.out.storages and len(self.out.storages) < STORAGES_MAX:
            nbytes = itemsize(self.out.refs[parts[1] >> BITS])
            self.out.storages[key] = nbytes * numel if nbytes > 0 and numel is not None else -1

    def persistent(self, at: int, pid: object) -> None:
        """Judge a persistent id: a loader passes it to a function of its own."""
        match pid:
            case ("module", Named(), _, _):
                pass  # a class of the user's with its source text; its name is listed
            case (Named(), _, _) if self.keys:
                pass  # the same, as tar files have it
            case str() | int() if self.keys and str(pid).isdecimal():
                pass
            case _:
                shown = escaped(pid, 40) if isinstance(pid, str) else "of no known shape"
                self.odd(at, f"a persistent id that torch does not write ({shown}): the loading program acts on it")
