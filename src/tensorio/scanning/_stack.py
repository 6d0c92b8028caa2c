"""The stack, the marks and the memo of a walk: what each opcode does to them."""

from __future__ import annotations

from array import array

from tensorio.errors import escaped
from tensorio.scanning._joblib import WithArrays
from tensorio.scanning._oddities import BITS, DICT, OTHER, TUPLE
from tensorio.scanning._operands import NAMES, Truncated, line_at

__all__ = ["MEMO_EMPTY", "WithStack"]

MEMO_EMPTY = -1
MEMO_MAX = 1 << 25  # slots; 8 bytes each
MEMO_JUMP = 1 << 12  # slots that may be left out at a time
PID_PARTS = 6


class WithStack(WithArrays):
    """The part of the walk that holds values."""

    def __init__(self, data: memoryview, start: int, keys: bool) -> None:
        super().__init__(data, start, keys)
        self.marks = array("q")
        self.fence = 0  # height of the stack that the last mark protects
        self.memo = array("q")
        self.known = 0  # slots of the memo that are in use

    # ------------------------------------------------------------------ stack

    def need(self, at: int, count: int) -> None:
        """See to it that `count` values are there; invent them if not."""
        missing = count - (len(self.stack) - self.fence)
        if missing > 0:
            self.fail(at, f"{NAMES[self.data[at]]} finds no value on the stack")
            self.stack.extend([OTHER] * missing)

    def pop(self, at: int) -> int:
        if len(self.stack) <= self.fence:
            self.need(at, 1)
        return self.stack.pop()

    def to_mark(self, at: int) -> int:
        """Take the last mark away and return its height."""
        if not self.marks:
            self.fail(at, f"{NAMES[self.data[at]]} finds no MARK")
            return 0
        height = self.marks.pop()
        self.fence = self.marks[-1] if self.marks else 0
        return height

    # ------------------------------------------------------------------ marks and containers

    def mark(self, at: int) -> None:
        self.fence = len(self.stack)
        self.marks.append(self.fence)

    def pop_one(self, at: int) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.to_mark(at)
        else:
            self.pop(at)

    def pop_mark(self, at: int) -> None:
        height = self.to_mark(at)
        del self.stack[height:]

    def dup(self, at: int) -> None:
        self.need(at, 1)
        self.stack.append(self.stack[-1])

    def make_tuple(self, at: int, height: int) -> None:
        short = len(self.stack) - height <= PID_PARTS
        self.tuple = (at, self.stack[height:].tolist() if short else None)
        del self.stack[height:]
        self.stack.append(at << BITS | TUPLE)
        if self.wrappers:
            self.note_tuple(at << BITS | TUPLE, self.tuple[1])

    def tuple_of_mark(self, at: int) -> None:
        self.make_tuple(at, self.to_mark(at))

    def tuple_of_some(self, at: int) -> None:
        count = b")\x85\x86\x87".index(self.data[at])
        self.need(at, count)
        self.make_tuple(at, len(self.stack) - count)

    def collect(self, at: int) -> None:
        """LIST, DICT, FROZENSET."""
        height = self.to_mark(at)
        value = at << BITS | (DICT if self.data[at] == ord("d") else OTHER)
        if value & 7 == DICT:
            self.add_keys(value, height)
        del self.stack[height:]
        self.stack.append(value)

    def append(self, at: int) -> None:
        self.pop(at)
        self.need(at, 1)

    def set_item(self, at: int) -> None:
        self.need(at, 3)
        self.add_keys(self.stack[-3], len(self.stack) - 2)
        del self.stack[-2:]

    def add_items(self, at: int) -> None:
        """APPENDS, ADDITEMS, SETITEMS."""
        height = self.to_mark(at)
        if height <= self.fence:
            self.fail(at, f"{NAMES[self.data[at]]} finds nothing to add to")
            self.stack.insert(height, OTHER)
            height += 1
        if self.data[at] == ord("u"):
            self.add_keys(self.stack[height - 1], height)
        del self.stack[height:]

    def add_keys(self, target: int, height: int) -> None:
        self.look_at_keys(target, height)
        if self.wrappers:
            self.note_items(target, height)

    # ------------------------------------------------------------------ memo

    def put_short(self, at: int) -> None:
        self.remember(at, self.data[at + 1])

    def put_long(self, at: int) -> None:
        self.remember(at, int.from_bytes(self.data[at + 1 : at + 5], "little"))

    def put_line(self, at: int) -> None:
        self.remember(at, self.slot_of_line(at))

    def memoize(self, at: int) -> None:
        self.remember(at, self.known)

    def remember(self, at: int, slot: int) -> None:
        """Put the top of the stack into a memo slot."""
        memo, stack = self.memo, self.stack
        if len(stack) <= self.fence:
            self.need(at, 1)
        size = len(memo)
        if slot == size < MEMO_MAX:
            memo.append(stack[-1])
            self.known += 1
            return
        if slot >= size:
            if slot >= MEMO_MAX or slot - size > max(MEMO_JUMP, self.known):
                raise Truncated(f"memo slot {slot}, where {self.known} are in use")
            memo.extend([MEMO_EMPTY] * (slot + 1 - size))
        self.known += memo[slot] == MEMO_EMPTY
        memo[slot] = stack[-1]

    def get_short(self, at: int) -> None:
        self.recall(at, self.data[at + 1])

    def get_long(self, at: int) -> None:
        self.recall(at, int.from_bytes(self.data[at + 1 : at + 5], "little"))

    def get_line(self, at: int) -> None:
        self.recall(at, self.slot_of_line(at))

    def recall(self, at: int, slot: int) -> None:
        """Push what is in a memo slot."""
        value = self.memo[slot] if slot < len(self.memo) else MEMO_EMPTY
        if value == MEMO_EMPTY:
            self.fail(at, f"{NAMES[self.data[at]]} of memo slot {slot}, which is empty")
            value = OTHER
        self.stack.append(value)

    def slot_of_line(self, at: int) -> int:
        word = line_at(self.data, at + 1)[0].strip()
        if not (word.isascii() and word.isdecimal() and len(word) < 20):
            raise Truncated(f"memo slot {escaped(word)}")
        return int(word)
