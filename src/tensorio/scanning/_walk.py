"""A walk through one pickle that makes nothing: a stack of where values come from instead of the values.

It goes on where a loader would give up, so that what stands behind an error is listed, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from tensorio.errors import escaped
from tensorio.scanning._found import NAMES_MAX, TEXT_KEPT, Ref, Walk
from tensorio.scanning._oddities import BITS, BYTES, DICT, INT, NAME, OTHER, RESULT, TEXT, TUPLE, Oddities
from tensorio.scanning._operands import LENGTH, NAMES, Truncated, end_of_operand, line_at, text_at

__all__ = ["Goon", "Judge", "walk"]

# Opcodes that push one value and do nothing else.
_PUSHES = {
    TEXT: b"SVXUT\x8c\x8d", INT: b"KMJIL\x8a\x8b", DICT: b"}", BYTES: b"BC\x8e\x96",
    OTHER: b"N\x88\x89FG]\x8f\x97",
}  # fmt: skip
_PUSH = [-1] * 256
for _tag, _opcodes in _PUSHES.items():
    for _opcode in _opcodes:
        _PUSH[_opcode] = _tag
# These may hold a pickle of their own: Python 2 keeps bytes in strings.
_HOLDS_BYTES = frozenset(b"BC\x8e\x96TU")
_STOP, _MEMO_EMPTY = ord("."), -1

STEP = 1 << 16  # opcodes between two looks at the budgets
STACK_MAX = 1 << 24  # values, and marks; 8 bytes each
MEMO_MAX = 1 << 25  # slots; 8 bytes each
MEMO_JUMP = 1 << 12  # slots that may be left out at a time
PID_PARTS = 6


Judge = Callable[[str, str], tuple[str, str]]
# Asked every `STEP` opcodes with (opcodes done, offset reached); False ends the walk.
Goon = Callable[[int, int], bool]


def walk(data: memoryview, start: int, judge: Judge, go_on: Goon, keys: bool = False) -> Walk:
    """Walk the pickle at `start`.

    Parameters
    ----------
    judge : callable
        Tells (group, reason) of a name.
    go_on : callable
        See `Goon`.
    keys : bool
        Whether persistent ids are plain numbers (tar files of torch).

    Notes
    -----
    About half a microsecond per opcode; at most 8 bytes of memory per opcode, `MEMO_MAX` and `STACK_MAX` slots.
    """
    return _Machine(data, start, judge, keys).run(go_on)


class _Machine(Oddities):
    def __init__(self, data: memoryview, start: int, judge: Judge, keys: bool) -> None:
        super().__init__(data, start, keys)
        self.judge = judge
        self.marks = array("q")
        self.fence = 0  # height of the stack that the last mark protects
        self.memo = array("q")
        self.known = 0  # slots of the memo that are in use
        self.numbers: dict[tuple[str, str, str], int] = {}

    def run(self, go_on: Goon) -> Walk:
        """Go from opcode to opcode; the only loop."""
        data, size, at = self.data, len(self.data), self.out.start
        push, lengths, pushes, effects, out = self.stack.append, LENGTH, _PUSH, _EFFECTS, self.out
        try:
            while True:
                for _ in range(STEP):
                    opcode = data[at] if at < size else -1
                    length = lengths[opcode] if opcode >= 0 else -1
                    end = at + 1 + length if length >= 0 else self.operand_end(opcode, at)
                    if end > size:
                        raise Truncated(f"the data end inside {NAMES[opcode]}")
                    tag = pushes[opcode]
                    if tag >= 0:
                        push(at << 3 | tag)
                        if opcode in _HOLDS_BYTES:
                            self.hold(at)
                    elif opcode == _STOP:
                        return self.stop(at)
                    else:
                        effects[opcode](self, at)
                    at = end
                if len(self.stack) > STACK_MAX or len(self.marks) > STACK_MAX:
                    raise Truncated(f"over {STACK_MAX} values on the stack")
                if not go_on(STEP, at):
                    raise Truncated("more opcodes than are walked in a file of this size")
        except Truncated as error:
            self.fail(at, str(error))
        out.at = at
        return out

    def operand_end(self, opcode: int, at: int) -> int:
        """Where an operand of no fixed length ends."""
        if opcode < 0:
            raise Truncated("the data end before STOP")
        if LENGTH[opcode] == -1:
            raise Truncated(f"no opcode: byte 0x{opcode:02x}")
        try:
            return end_of_operand(self.data, at)
        except Truncated:
            if opcode in b"ci":
                self.refer(at)  # what is there of the name
            raise

    def stop(self, at: int) -> Walk:
        """End well: note the value, if it is a small one."""
        self.need(at, 1)
        self.out.at = self.out.end = at + 1
        self.out.value = self.plain(self.stack[-1])
        return self.out

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
            self.look_at_keys(value, height)
        del self.stack[height:]
        self.stack.append(value)

    def append(self, at: int) -> None:
        self.pop(at)
        self.need(at, 1)

    def set_item(self, at: int) -> None:
        self.need(at, 3)
        self.look_at_keys(self.stack[-3], len(self.stack) - 2)
        del self.stack[-2:]

    def add_items(self, at: int) -> None:
        """APPENDS, ADDITEMS, SETITEMS."""
        height = self.to_mark(at)
        if height <= self.fence:
            self.fail(at, f"{NAMES[self.data[at]]} finds nothing to add to")
            self.stack.insert(height, OTHER)
            height += 1
        if self.data[at] == ord("u"):
            self.look_at_keys(self.stack[height - 1], height)
        del self.stack[height:]

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
            memo.extend([_MEMO_EMPTY] * (slot + 1 - size))
        self.known += memo[slot] == _MEMO_EMPTY
        memo[slot] = stack[-1]

    def get_short(self, at: int) -> None:
        self.recall(at, self.data[at + 1])

    def get_long(self, at: int) -> None:
        self.recall(at, int.from_bytes(self.data[at + 1 : at + 5], "little"))

    def get_line(self, at: int) -> None:
        self.recall(at, self.slot_of_line(at))

    def recall(self, at: int, slot: int) -> None:
        """Push what is in a memo slot."""
        value = self.memo[slot] if slot < len(self.memo) else _MEMO_EMPTY
        if value == _MEMO_EMPTY:
            self.fail(at, f"{NAMES[self.data[at]]} of memo slot {slot}, which is empty")
            value = OTHER
        self.stack.append(value)

    def slot_of_line(self, at: int) -> int:
        word = line_at(self.data, at + 1)[0].strip()
        if not (word.isascii() and word.isdecimal() and len(word) < 20):
            raise Truncated(f"memo slot {escaped(word)}")
        return int(word)

    # ------------------------------------------------------------------ names and calls

    def refer(self, at: int) -> None:
        """GLOBAL and INST."""
        module, begin = line_at(self.data, at + 1)
        name, _ = line_at(self.data, min(begin, len(self.data)))
        value = self.name(at, module, name)
        if self.data[at] == ord("i"):
            height = self.to_mark(at)
            del self.stack[height:]
            value = self.call(at, value)
        self.stack.append(value)

    def stack_global(self, at: int) -> None:
        name, module = self.pop(at), self.pop(at)
        if name & 7 == TEXT and module & 7 == TEXT:
            texts = text_at(self.data, module >> BITS), text_at(self.data, name >> BITS)
            self.stack.append(self.name(at, *texts))
            return
        if RESULT in (name & 7, module & 7):
            self.odd(at, "a name that is made while the pickle is loaded")
        else:
            self.fail(at, "STACK_GLOBAL without two texts")
        self.stack.append(OTHER)

    def name(self, at: int, module: str, name: str) -> int:
        """Note a name; returns the value that stands for it."""
        refs = self.out.refs
        group, reason = self.judge(module, name)
        key = (module[:TEXT_KEPT], name[:TEXT_KEPT], group)
        number = self.numbers.get(key)
        if number is None:
            if len(refs) >= (2 if group == "dangerous" else 1) * NAMES_MAX:
                self.out.unlisted += 1
                return OTHER
            number = self.numbers[key] = len(refs)
            refs.append(Ref(key[0], key[1], group, reason, at))
        refs[number].count += 1
        return number << BITS | NAME

    def call(self, at: int, callee: int, use: str = "") -> int:
        """Note a call; returns the value that stands for its result."""
        tag = callee & 7
        if tag not in (NAME, RESULT):
            return OTHER
        use = use or NAMES[self.data[at]]
        self.out.refs[callee >> BITS].uses.add(use if tag == NAME else "result called")
        return callee & ~7 | RESULT

    def reduce(self, at: int) -> None:
        args, callee = self.pop(at), self.pop(at)
        if callee & 7 == NAME:
            name = self.out.refs[callee >> BITS].name
            if name in ("_rebuild_from_type_v2", "_set_obj_state"):
                self.look_at_state(at, args)
            elif name == "_load_from_bytes":
                self.load_from_bytes(at, args)
        self.stack.append(self.call(at, callee))

    def new(self, at: int) -> None:
        """NEWOBJ and NEWOBJ_EX."""
        for _ in range(1 if self.data[at] == 0x81 else 2):
            self.pop(at)
        self.stack.append(self.call(at, self.pop(at)))

    def obj(self, at: int) -> None:
        height = self.to_mark(at)
        if height >= len(self.stack):
            self.fail(at, "OBJ finds no class")
            self.stack.append(OTHER)
            return
        callee = self.stack[height]
        del self.stack[height:]
        self.stack.append(self.call(at, callee))

    def build(self, at: int) -> None:
        state = self.pop(at)
        self.need(at, 1)
        self.look_at_state(at, state)
        target = self.stack[-1]
        if target & 7 in (NAME, RESULT):
            self.out.refs[target >> BITS].uses.add("BUILD")

    def extension(self, at: int) -> None:
        code = int.from_bytes(self.data[at + 1 : at + 1 + LENGTH[self.data[at]]], "little")
        self.odd(at, f"{NAMES[self.data[at]]} {code}: an entry of the loading program's extension registry")
        self.stack.append(OTHER)

    # ------------------------------------------------------------------ persistent ids

    def persistent_line(self, at: int) -> None:
        self.persistent(at, line_at(self.data, at + 1)[0])
        self.stack.append(OTHER)

    def persistent_value(self, at: int) -> None:
        pid = self.pop(at)
        parts = self.tuple[1] if pid >> BITS == self.tuple[0] and pid & 7 == TUPLE else None
        if parts is not None and self.is_storage(parts):
            self.storage(at, parts)
        else:
            self.persistent(at, self.plain(pid))
        self.stack.append(OTHER)

    # ------------------------------------------------------------------ the rest

    def proto(self, at: int) -> None:
        if self.data[at + 1] > 5:
            self.fail(at, f"pickle protocol {self.data[at + 1]}")

    def frame(self, at: int) -> None:
        nbytes = int.from_bytes(self.data[at + 1 : at + 9], "little")
        if nbytes > len(self.data) - at - 9:
            self.fail(at, f"FRAME of {nbytes} bytes, where {len(self.data) - at - 9} are left")

    def nothing(self, at: int) -> None:
        self.need(at, 1)


_EFFECTS: list[Callable[[_Machine, int], None]] = [_Machine.nothing] * 256
for _opcodes, _effect in (
    (b"(", _Machine.mark), (b"0", _Machine.pop_one), (b"1", _Machine.pop_mark), (b"2", _Machine.dup),
    (b"t", _Machine.tuple_of_mark), (b")\x85\x86\x87", _Machine.tuple_of_some), (b"ld\x91", _Machine.collect),
    (b"a", _Machine.append), (b"s", _Machine.set_item), (b"eu\x90", _Machine.add_items),
    (b"q", _Machine.put_short), (b"r", _Machine.put_long), (b"p", _Machine.put_line), (b"\x94", _Machine.memoize),
    (b"h", _Machine.get_short), (b"j", _Machine.get_long), (b"g", _Machine.get_line),
    (b"ci", _Machine.refer), (b"\x93", _Machine.stack_global),
    (b"R", _Machine.reduce), (b"\x81\x92", _Machine.new), (b"o", _Machine.obj), (b"b", _Machine.build),
    (b"\x82\x83\x84", _Machine.extension), (b"P", _Machine.persistent_line), (b"Q", _Machine.persistent_value),
    (b"\x80", _Machine.proto), (b"\x95", _Machine.frame), (b"\x98", _Machine.nothing),
):  # fmt: skip
    for _opcode in _opcodes:
        _EFFECTS[_opcode] = _effect
