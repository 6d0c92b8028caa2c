"""A walk through one pickle that makes nothing: a stack of where values come from instead of the values.

It goes on where a loader would give up, so that what stands behind an error is listed, too.
"""

from __future__ import annotations

from collections.abc import Callable

from tensorio.dangers import CALLERS
from tensorio.scanning._found import NAMES_MAX, TEXT_KEPT, Ref, Walk, plausible
from tensorio.scanning._oddities import BITS, BYTES, DICT, INT, NAME, OTHER, RESULT, TEXT, TUPLE
from tensorio.scanning._operands import LENGTH, NAMES, Truncated, end_of_operand, line_at, text_at
from tensorio.scanning._stack import MEMO_EMPTY, WithStack

__all__ = ["TOO_MANY", "Goon", "Judge", "walk"]

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
_STOP, _FRAME = ord("."), 0x95
NO_FRAME = 1 << 62

NO_OPCODE_TEXT = "no opcode"
TOO_MANY = "more opcodes than are walked in a file of this size"
STEP = 1 << 16  # opcodes between two looks at the budgets
LARGE = 1 << 16  # bytes of an operand behind which pages may be let go
STACK_MAX = 1 << 24  # values, and marks; 8 bytes each
NESTED_MAX = 8
UNLISTED_MAX = 100_000
STACK_SEEN = 1024  # values that a walk takes over from another one


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


class _Machine(WithStack):
    def __init__(self, data: memoryview, start: int, judge: Judge, keys: bool, depth: int = 0) -> None:
        super().__init__(data, start, keys)
        self.depth = depth
        self.go_on: Goon = lambda opcodes, at: True
        self.judge = judge
        self.numbers: dict[tuple[str, str, str], int] = {}
        self.seen: dict[tuple[str, str], int] = {}

    def run(self, go_on: Goon) -> Walk:
        """Go from opcode to opcode; the only loop."""
        self.go_on = go_on
        data, size, at = self.data, len(self.data), self.out.start
        push, lengths, pushes, effects, out = self.stack.append, LENGTH, _PUSH, _EFFECTS, self.out
        frame_end = NO_FRAME
        try:
            while True:
                for _ in range(STEP):
                    if at >= frame_end:
                        self.leave_frame(at, frame_end)
                        frame_end = NO_FRAME
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
                    elif opcode == _FRAME:
                        frame_end = self.frame(at, frame_end)
                    else:
                        end = effects[opcode](self, at) or end
                    at = end
                if len(self.stack) > STACK_MAX or len(self.marks) > STACK_MAX:
                    raise Truncated(f"over {STACK_MAX} values on the stack")
                if not go_on(STEP, at):
                    raise Truncated(TOO_MANY)
        except Truncated as error:
            self.fail(at, str(error))
        out.at = at
        return out

    def operand_end(self, opcode: int, at: int) -> int:
        """Where an operand of no fixed length ends."""
        if opcode < 0:
            raise Truncated("the data end before STOP")
        if LENGTH[opcode] == -1:
            raise Truncated(f"{NO_OPCODE_TEXT}: byte 0x{opcode:02x}")
        try:
            end = end_of_operand(self.data, at)
        except Truncated:
            if opcode in b"ci":
                self.refer(at)  # what is there of the name
            raise
        if end - at > LARGE:
            self.go_on(0, end)
        return end

    def stop(self, at: int) -> Walk:
        """End well: note the value, if it is a small one."""
        self.need(at, 1)
        self.out.at = self.out.end = at + 1
        self.out.value = self.plain(self.stack[-1])
        return self.out

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
        number = self.seen.get((module, name))
        if number is not None:
            refs[number].count += 1
            return number << BITS | NAME
        group, reason = self.judge(module, name)
        key = (module[:TEXT_KEPT], name[:TEXT_KEPT], group)
        number = self.numbers.get(key)
        if number is None:
            if len(refs) >= (2 if group == "dangerous" else 1) * NAMES_MAX:
                self.out.unlisted += 1
                if self.out.unlisted > UNLISTED_MAX:
                    raise Truncated(f"over {UNLISTED_MAX + NAMES_MAX} different names")
                return OTHER
            number = self.numbers[key] = len(refs)
            refs.append(Ref(key[0], key[1], group, reason, at))
            self.note_name(number, refs[number])
        if len(self.seen) < NAMES_MAX and len(module) + len(name) <= TEXT_KEPT:
            self.seen[module, name] = number
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
            if name == "_load_from_bytes":
                self.load_from_bytes(at, args)
            elif name in CALLERS:
                self.call_through(name, args)
            if name == "dtype":
                self.note_dtype(at << BITS, args)
                self.call(at, callee)
                self.stack.append(at << BITS | OTHER)
                return
        self.stack.append(self.call(at, callee))

    def call_through(self, caller: str, args: int) -> None:
        """Note which names a function calls; any of them, if its arguments are not known."""
        parts = self.tuple[1] if args & 7 == TUPLE and args >> BITS == self.tuple[0] else None
        if parts is None:
            for ref in self.out.refs:
                ref.uses.add(caller)
            return
        for number in CALLERS[caller]:
            if number < len(parts) and parts[number] & 7 in (NAME, RESULT):
                self.out.refs[parts[number] >> BITS].uses.add(caller)

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

    def build(self, at: int) -> int | None:
        state = self.pop(at)
        self.need(at, 1)
        self.look_at_state(at, state)
        target = self.stack[-1]
        if target & 7 in (NAME, RESULT):
            self.out.refs[target >> BITS].uses.add("BUILD")
            if target & 7 == RESULT and target >> BITS in self.wrappers:
                return self.skip_array(at, state)
        return None

    def skip_array(self, at: int, state: int) -> int:
        """Go past the array that joblib wrote behind BUILD."""
        end, objects = self.array_behind(at + 1, state)
        if objects:
            if self.depth >= NESTED_MAX:
                raise Truncated(f"over {NESTED_MAX} arrays of objects inside each other")
            nested = _Machine(self.data, end, self.judge, self.keys, self.depth + 1).run(self.go_on)
            self.out.nested.append(nested)
            if nested.end is None:
                raise Truncated("an array of objects that ends in an error")
            end = nested.end
        self.read_as_opcodes(at + 1, end)
        return end

    def read_as_opcodes(self, begin: int, end: int) -> None:
        """See what a loader would find that knows nothing of joblib, and takes an array's bytes for opcodes."""
        other = _Plain(self, self.data[:end], begin).run(self.go_on)
        if other.end is None and other.at < end and not (other.error and other.error[1].startswith(NO_OPCODE_TEXT)):
            other = _Plain(self, self.data, begin).run(lambda opcodes, at: False)  # goes on behind the array
            if other.error is not None and other.error[1] == TOO_MANY:
                self.odd(begin, "an array whose bytes are also opcodes of a pickle, more than are looked at")
        until = other.at if other.error is None else other.error[0]
        if (other.odd and other.end is not None) or any(r.offset < until and plausible(r) for r in other.refs):
            other.error = None
            self.out.nested.append(other)

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
            self.odd(at, f"pickle protocol {self.data[at + 1]}: there is none; loaders differ on what they do")

    def frame(self, at: int, before: int) -> int:
        """FRAME: return where it ends. Readers differ where opcodes and frames do not end together."""
        nbytes = int.from_bytes(self.data[at + 1 : at + 9], "little")
        if nbytes > len(self.data) - at - 9:
            self.fail(at, f"FRAME of {nbytes} bytes, where {len(self.data) - at - 9} are left")
        if before not in (NO_FRAME, at + 9):
            self.fail(at, "FRAME inside a frame: readers differ on what follows")
        return at + 9 + nbytes

    def leave_frame(self, at: int, end: int) -> None:
        if at != end:
            self.fail(end, "FRAME that ends inside an opcode: readers differ on what follows")

    def nothing(self, at: int) -> None:
        self.need(at, 1)


class _Plain(_Machine):
    """A walk that goes on where another one stands, with its stack and memo as they are, and leaves both alone."""

    def __init__(self, other: _Machine, data: memoryview, start: int) -> None:
        super().__init__(data, start, other.judge, other.keys)
        self.memo_before, self.memo_since = other.memo, dict[int, int]()
        self.known = other.known
        self.stack.extend(map(_without_number, other.stack[-STACK_SEEN:]))
        below = len(other.stack) - len(self.stack)
        self.marks.extend(max(mark - below, 0) for mark in other.marks[-STACK_SEEN:])
        self.fence = self.marks[-1] if self.marks else 0

    def remember(self, at: int, slot: int) -> None:
        self.need(at, 1)
        self.known += 1
        self.memo_since[slot] = self.stack[-1]

    def recall(self, at: int, slot: int) -> None:
        before = self.memo_before[slot] if slot < len(self.memo_before) else MEMO_EMPTY
        value = self.memo_since.get(slot, _without_number(before))
        if value == MEMO_EMPTY:
            raise Truncated(f"memo slot {slot}, which is empty")
        self.stack.append(value)

    def skip_array(self, at: int, state: int) -> int:
        return at + 1


def _without_number(value: int) -> int:
    """A value of another walk: the numbers of its names mean nothing here."""
    return OTHER if value & 7 in (NAME, RESULT) and value != MEMO_EMPTY else value


_EFFECTS: list[Callable[[_Machine, int], int | None]] = [_Machine.nothing] * 256
for _opcodes, _effect in (
    (b"(", _Machine.mark), (b"0", _Machine.pop_one), (b"1", _Machine.pop_mark), (b"2", _Machine.dup),
    (b"t", _Machine.tuple_of_mark), (b")\x85\x86\x87", _Machine.tuple_of_some), (b"ld\x91", _Machine.collect),
    (b"a", _Machine.append), (b"s", _Machine.set_item), (b"eu\x90", _Machine.add_items),
    (b"q", _Machine.put_short), (b"r", _Machine.put_long), (b"p", _Machine.put_line), (b"\x94", _Machine.memoize),
    (b"h", _Machine.get_short), (b"j", _Machine.get_long), (b"g", _Machine.get_line),
    (b"ci", _Machine.refer), (b"\x93", _Machine.stack_global),
    (b"R", _Machine.reduce), (b"\x81\x92", _Machine.new), (b"o", _Machine.obj), (b"b", _Machine.build),
    (b"\x82\x83\x84", _Machine.extension), (b"P", _Machine.persistent_line), (b"Q", _Machine.persistent_value),
    (b"\x80", _Machine.proto), (b"\x98", _Machine.nothing),
):  # fmt: skip
    for _opcode in _opcodes:
        _EFFECTS[_opcode] = _effect
