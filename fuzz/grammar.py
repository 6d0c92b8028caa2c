"""Pickles made and changed at random, with the grammar in mind: opcodes are whole, values mostly end up where values
belong. All 68 opcodes of protocols 0 to 5 occur; lengths, memo slots and names lie now and then.

A program is a list of opcodes, each with its argument. Source of the grammar: CPython's ``Lib/pickletools.py``.
"""

from __future__ import annotations

import pickletools
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import hexfile

Program = list[bytes]

OPCODES = {op.code.encode("latin-1"): op for op in pickletools.opcodes}
ENDS = {0, 1, 2, 3, 63, 64, 65, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**61 - 1,
        2**61, 2**62, 2**63 - 1, 2**63, 2**64, 2**65, 10**30}  # fmt: skip
INTS = sorted(ENDS | {-n for n in ENDS})
WORDS = ["", "a", "0", "1", "k", "storage", "cpu", "cuda:0", "latin1", "latin-1", "utf-8", "hex", "bytes", "conj",
         "neg", "f8", "<f4", ">i2", "U1", "S3", "V0", "V8", "O8", "M8[ns]", "?", "<", ">", "|", "=", "little", "weight",
         "\xff", "\u20ac", "\U0001f600", "\x00", "a\nb", "x" * 300, "torch.float32", "__dict__"]  # fmt: skip
RAW = [b"", b"a", b"ab", b"abcd", b"\xff\xfe", bytes(8), bytes(range(16)), b"\x80\x02N.", b"x" * 300]
EVIL = [("os", "system"), ("builtins", "eval"), ("__builtin__", "apply"), ("posix", "system"), ("torch", "load"),
        ("torch.serialization", "os.system"), ("copyreg", "_reconstructor"), ("copy_reg", "_reconstructor"),
        ("__main__", "Model"), ("builtins", "object"), ("builtins", "getattr"), ("functools", "partial"), ("", ""),
        ("numpy", ""), ("torch._utils", "_rebuild_tensor_v2.__globals__"), ("os\0x", "system")]  # fmt: skip
SMALL = 60  # opcodes of a value that is spelled out again for each GET
LONGEST = 4000  # opcodes of a program


def parse(pickle: bytes) -> Program:
    """Split a pickle; what is behind its STOP, or can't be read, is one last piece."""
    starts: list[int] = []
    at = 0
    try:
        for _op, _, start in pickletools.genops(pickle):
            starts.append(start or 0)
            at = (start or 0) + 1
    except Exception:
        pass
    if not starts:
        return [pickle]
    ends = [*starts[1:], at if pickle[starts[-1] : at] == b"." else len(pickle)]
    ops = [pickle[a:b] for a, b in zip(starts, ends, strict=True)]
    return ops + ([pickle[ends[-1] :]] if ends[-1] < len(pickle) else [])


def subtrees(ops: Sequence[bytes]) -> list[tuple[int, int]]:
    """The ranges of opcodes that make one value each, as far as the stack can be followed."""
    stack: list[tuple[int, bool]] = []  # where each value's opcodes begin; whether it is a mark
    out = []
    for i, piece in enumerate(ops):
        op = OPCODES.get(piece[:1])
        if op is None:
            break
        start = i
        before = [b for b in op.stack_before if b is not pickletools.stackslice]
        if pickletools.markobject in before:
            while stack and not stack[-1][1]:
                start = stack.pop()[0]
            if stack:
                start = stack.pop()[0]
            before = before[: before.index(pickletools.markobject)]
        for _ in before:
            if stack:
                start = min(start, stack.pop()[0])
        stack += [(start, made is pickletools.markobject) for made in op.stack_after]
        if stack and not stack[-1][1] and (op.stack_after or "PUT" in op.name):
            out.append((stack[-1][0], i + 1))
    return out


def self_contained(ops: Program) -> Program | None:
    """The same program without the memo: what a GET fetches is made again. None if that is too much."""
    out: Program = []
    memo: dict[int, Program] = {}
    for piece in ops:
        op = OPCODES.get(piece[:1])
        if op is None or len(out) > LONGEST:
            return None
        if "PUT" in op.name or op.name == "MEMOIZE":
            slot = len(memo) if op.name == "MEMOIZE" else slot_of(piece)
            ranges = [r for r in subtrees(out[-SMALL:]) if r[1] == min(len(out), SMALL)]
            if ranges:
                start = max(0, len(out) - SMALL) + min(r[0] for r in ranges[-1:])
                memo[slot] = out[start:]
        elif "GET" in op.name:
            out += memo.get(slot_of(piece), [b"N"])
        else:
            out.append(piece)
    return out


def slot_of(piece: bytes) -> int:
    """The memo slot of a GET or PUT."""
    if piece[:1] in (b"g", b"p"):
        text = piece[1:].strip()
        return int(text) if text.isdigit() else -1
    return int.from_bytes(piece[1:], "little")


def short(word: str) -> bytes:
    """SHORT_BINUNICODE, of as much as it can hold."""
    raw = word.encode()[:255]
    return b"\x8c" + bytes([len(raw)]) + raw


class Grammar:
    """A source of programs.

    Parameters
    ----------
    rng : random.Random
    names : sequence of (module, name)
        That are likely to be allowed.
    parts : list of Program
        Values out of other pickles, that need no memo.
    keys : list of str
        Storage keys that exist.
    """

    def __init__(
        self, rng: random.Random, names: Sequence[tuple[str, str]], parts: list[Program], keys: list[str]
    ) -> None:
        self.rng = rng
        self.names = names
        self.parts = parts
        self.keys = keys or ["0"]

    # ------------------------------------------------------------ arguments

    def int(self) -> int:
        rng = self.rng
        return rng.choice(INTS) if rng.random() < 0.4 else rng.randrange(-2, 10)

    def slot(self) -> int:
        rng = self.rng
        return rng.choice([rng.randrange(8), rng.randrange(40), rng.randrange(300), 2**31, 2**32 - 1])

    def word(self) -> str:
        rng = self.rng
        return rng.choice(self.keys) if rng.random() < 0.2 else rng.choice(WORDS)

    def name_pair(self) -> tuple[str, str]:
        rng = self.rng
        roll = rng.random()
        if roll < 0.9:
            return rng.choice(self.names)
        return rng.choice(EVIL) if roll < 0.97 else (self.word(), self.word())

    def length(self, true: int) -> int:
        """A length, which lies now and then."""
        return true if self.rng.random() < 0.97 else abs(self.int()) % 2**64

    def argument(self, kind: str) -> bytes:
        """An argument in the encoding that pickletools calls `kind`."""
        rng = self.rng
        fixed = {"uint1": (1, False), "uint2": (2, False), "uint4": (4, False), "uint8": (8, False), "int4": (4, True)}
        if kind in fixed:
            width, signed = fixed[kind]
            value = self.slot() if rng.random() < 0.7 else self.int()
            return (value % (1 << 8 * width)).to_bytes(width, "little") if not signed else struct.pack(
                "<i", (value + 2**31) % 2**32 - 2**31)  # fmt: skip
        if kind == "float8":
            return struct.pack(">d", rng.choice([0.0, -0.0, 1.5, float("nan"), float("inf"), 5e-324]))
        if kind in ("decimalnl_short", "decimalnl_long"):
            text = rng.choice([str(self.int()), "00", "01", "+1", " 1", "1_0", "0x1", "", "9" * 400])
            return text.encode() + (b"L\n" if kind == "decimalnl_long" and rng.random() < 0.9 else b"\n")
        if kind == "floatnl":
            return rng.choice(["1.5", "-0", "nan", "inf", "1e999", "1_0", "x", ""]).encode() + b"\n"
        if kind == "stringnl":
            return repr(rng.choice([self.word().encode("utf-8", "replace"), rng.choice(RAW)]))[1:].encode() + b"\n"
        if kind == "stringnl_noescape":
            return rng.choice([self.word(), str(self.slot())]).encode().replace(b"\n", b"") + b"\n"
        if kind == "stringnl_noescape_pair":
            return b"".join(part.encode().replace(b"\n", b"") + b"\n" for part in self.name_pair())
        if kind == "unicodestringnl":
            return self.word().encode("raw-unicode-escape").replace(b"\n", b"\\u000a") + b"\n"
        return self.counted(kind)

    def counted(self, kind: str) -> bytes:
        """An argument with its length in front."""
        rng = self.rng
        if kind in ("long1", "long4"):
            value = self.int()
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True) if rng.random() < 0.9 else b""
        elif kind.startswith("unicode"):
            raw = self.word().encode() if rng.random() < 0.95 else b"\xff\xc0\x80"
        else:
            raw = rng.choice([*RAW, self.word().encode()])
        width = int(kind[-1])
        return (self.length(len(raw)) % (1 << 8 * width)).to_bytes(width, "little") + raw

    def any_op(self) -> bytes:
        """Any opcode but STOP, with an argument of its kind."""
        code = self.rng.choice([c for c in OPCODES if c != b"."])
        arg = OPCODES[code].arg
        return code + (self.argument(arg.name) if arg is not None else b"")

    # --------------------------------------------------------------- values

    def value(self, depth: int = 0) -> Program:
        """The opcodes of one value."""
        rng = self.rng
        roll = rng.random()
        if roll < 0.25 and self.parts:
            return list(rng.choice(self.parts))
        if depth > 4 or roll < 0.5:
            return self.atom()
        makers: list[Callable[[int], Program]] = [self.container, self.call, self.tensor, self.pushed, self.built]
        return rng.choice(makers)(depth + 1)

    def atom(self) -> Program:
        rng = self.rng
        simple = ["NONE", "NEWTRUE", "NEWFALSE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "EMPTY_TUPLE", "INT",
                  "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "STRING", "BINSTRING", "SHORT_BINSTRING",
                  "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
                  "BINUNICODE8", "FLOAT", "BINFLOAT", "GLOBAL", "GET", "BINGET", "LONG_BINGET"]  # fmt: skip
        wanted = rng.choice(simple)
        op = next(op for op in OPCODES.values() if op.name == wanted)
        return [op.code.encode("latin-1") + (self.argument(op.arg.name) if op.arg is not None else b"")]

    def many(self, depth: int, count: int | None = None) -> Program:
        count = self.rng.choice((0, 1, 1, 2, 3)) if count is None else count
        return [op for _ in range(count) for op in self.value(depth)]

    def container(self, depth: int) -> Program:
        what = self.rng.randrange(12)
        if what < 7:  # between a mark and an opcode that takes all of it
            front, end = ((b"", b"t"), (b"", b"l"), (b"]", b"e"), (b"\x8f", b"\x90"), (b"", b"\x91"), (b"", b"d"),
                          (b"}", b"u"))[what]  # fmt: skip
            many = self.many(depth, self.rng.choice((0, 2, 2, 4)) if what > 4 else None)
            return [*([front] if front else []), b"(", *many, end]
        front, count, end = ((b"", 1, b"\x85"), (b"", 2, b"\x86"), (b"", 3, b"\x87"), (b"]", 1, b"a"),
                             (b"}", 2, b"s"))[what - 7]  # fmt: skip
        return [*([front] if front else []), *self.many(depth, count), end]

    def named(self) -> Program:
        """A class or function, by one of the ways to name it."""
        module, name = self.name_pair()
        roll = self.rng.random()
        if roll < 0.6:
            return [f"c{module}\n{name}\n".encode()]
        if roll < 0.97:
            return [short(module), short(name), b"\x93"]
        return [self.rng.choice([b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00"])]

    def call(self, depth: int) -> Program:
        """A class or function called or instantiated, with a state perhaps."""
        rng = self.rng
        many = self.many(depth)
        if rng.random() < 0.8:
            end = rng.choice([[b"R"], [b"R"], [b"\x81"], [b"}", b"\x92"]])
            made = [*self.named(), b"(", *many, b"t", *end]
        elif rng.random() < 0.5:
            made = [b"(", *many, b"i" + self.argument("stringnl_noescape_pair")]
        else:
            made = [b"(", *self.named(), *many, b"o"]
        return made + (self.state(depth) if rng.random() < 0.4 else [])

    def state(self, depth: int) -> Program:
        rng = self.rng
        if rng.random() < 0.5:
            return [b"}", b"(", *self.many(depth, 2), b"u", b"b"]
        return [*self.value(depth), b"b"] if rng.random() < 0.7 else [b"}", *self.value(depth), b"\x86", b"b"]

    def tensor(self, depth: int) -> Program:
        """A tensor of an existing storage, its geometry off now and then."""
        rng = self.rng
        size = rng.choice([(4,), (2, 2), (0,), (), (1,), (2,), (1, 4, 1), (0, 1 << 62), (1 << 32, 1 << 32)])
        stride = None if rng.random() < 0.8 else tuple(rng.choice((0, 1, 2, 1 << 62, -1)) for _ in size)
        metadata = rng.choice([b"", b"", b"}", b"}" + hexfile.text("conj") + b"\x88s", b"N", b"K\x01"])
        raw = hexfile.tensor(
            rng.choice(self.keys), rng.choice((4, 4, 4, 2, 1 << 40)), size, stride,
            offset=rng.choice((0, 0, 0, 1, 1 << 61, -1)),
            cls=rng.choice(["FloatStorage", "IntStorage", "ByteStorage", "LongStorage", "ComplexFloatStorage"]),
            requires_grad=rng.random() < 0.2, metadata=metadata,
        )  # fmt: skip
        return parse(raw)

    def pushed(self, depth: int) -> Program:
        """A value with something done to the stack or memo around it."""
        rng = self.rng
        value = self.value(depth)
        around: list[tuple[Program, Program]] = [
            ([], [b"2", b"0"]), ([], [b"2", b"\x86"]), ([b"N", b"0"], []), ([b"(", b"1"], []),
            ([], [b"q" + bytes([rng.randrange(8)])]),
            ([], [b"\x94"]), ([], [b"p%d\n" % self.slot()]), ([], [b"r" + struct.pack("<I", self.slot() % 2**32)]),
            ([], [b"Q"]), ([b"P" + self.word().encode().replace(b"\n", b"") + b"\n", b"0"], []), ([b"\x97", b"0"], []),
            ([], [b"\x98"]), ([b"\x95" + struct.pack("<Q", self.length(sum(map(len, value))))], []),
        ]  # fmt: skip
        front, back = rng.choice(around)
        return [*front, *value, *back]

    def built(self, depth: int) -> Program:
        return [*self.value(depth), *self.state(depth)]

    def program(self) -> Program:
        """A whole pickle."""
        rng = self.rng
        head = [] if rng.random() < 0.1 else [b"\x80" + bytes([rng.choice((0, 1, 2, 2, 3, 4, 4, 5, 6, 255))])]
        body = self.value() if rng.random() < 0.2 else [b"]", b"(", *self.many(0, rng.randrange(1, 6)), b"e"]
        return [*head, *body, b"."]

    # -------------------------------------------------------------- changes

    def mutate(self, ops: Program) -> Program:
        """A few changes; now and then many."""
        ops = list(ops)
        changes: list[Callable[[Program], None]] = [
            self.drop, self.double, self.exchange, self.replace, self.insert, self.flip, self.number, self.rename,
            self.slots, self.swap_value, self.swap_value, self.drop_value, self.double_value, self.wrap_value,
            self.insert_value, self.noise, self.cut,
        ]  # fmt: skip
        if self.rng.random() < 0.35:  # most of these are still read in the end
            changes = [self.part_for_value, self.part_for_value, self.double_value, self.wrapped_in_list, self.noise]
        for _ in range(self.rng.choice((1, 1, 1, 1, 2, 2, 3, 6))):
            if len(ops) > 1:
                self.rng.choice(changes)(ops)
        return ops[:LONGEST]

    def at(self, ops: Program) -> int:
        return self.rng.randrange(len(ops))

    def drop(self, ops: Program) -> None:
        i = self.at(ops)
        del ops[i : i + self.rng.choice((1, 1, 1, 2, 5, 12))]

    def double(self, ops: Program) -> None:
        i = self.at(ops)
        ops[i:i] = ops[i : i + self.rng.choice((1, 1, 2, 8))]

    def exchange(self, ops: Program) -> None:
        i, j = self.at(ops), self.at(ops)
        ops[i], ops[j] = ops[j], ops[i]

    def replace(self, ops: Program) -> None:
        ops[self.at(ops)] = self.any_op()

    def insert(self, ops: Program) -> None:
        ops.insert(self.at(ops), self.any_op())

    def flip(self, ops: Program) -> None:
        i = self.at(ops)
        piece = bytearray(ops[i])
        piece[self.rng.randrange(len(piece))] ^= 1 << self.rng.randrange(8)
        ops[i] = bytes(piece)

    def number(self, ops: Program) -> None:
        """Another number, or length, in an opcode that has one."""
        found = [i for i, op in enumerate(ops) if op[:1] in b"KMJI\x8a\x8bXBCUT\x8c\x8d\x8e\x96\x95G" and len(op) > 1]
        if not found:
            return
        i = self.rng.choice(found)
        op = OPCODES[ops[i][:1]]
        if op.name in ("BININT", "BININT1", "BININT2", "INT", "LONG1"):
            ops[i] = hexfile.number(self.int())
        elif self.rng.random() < 0.5 and op.arg is not None:
            ops[i] = ops[i][:1] + self.argument(op.arg.name)
        else:  # the length alone
            width = {"X": 4, "B": 4, "T": 4, "\x8b": 4, "C": 1, "U": 1, "\x8c": 1, "\x8a": 1}.get(op.code, 8)
            value = abs(self.int()) % (1 << 8 * width)
            ops[i] = ops[i][:1] + value.to_bytes(width, "little") + ops[i][1 + width :]

    def rename(self, ops: Program) -> None:
        found = [i for i, op in enumerate(ops) if op[:1] in b"ci"]
        if found:
            i = self.rng.choice(found)
            ops[i] = ops[i][:1] + self.argument("stringnl_noescape_pair")

    def slots(self, ops: Program) -> None:
        """Another memo slot: one that is taken, unknown or huge."""
        found = [i for i, op in enumerate(ops) if op[:1] in b"qrphjg\x94"]
        if found:
            i = self.rng.choice(found)
            code = self.rng.choice([b"q", b"r", b"p", b"\x94"] if ops[i][:1] in b"qrp\x94" else [b"h", b"j", b"g"])
            slot = slot_of(self.ops_with_slot(ops)) if self.rng.random() < 0.6 else self.slot()
            slot = max(slot, 0)
            spelled = {b"q": bytes([slot % 256]), b"h": bytes([slot % 256]), b"\x94": b"", b"p": b"%d\n" % slot}
            spelled[b"g"] = spelled[b"p"]
            ops[i] = code + spelled.get(code, struct.pack("<I", slot % 2**32))

    def ops_with_slot(self, ops: Program) -> bytes:
        return self.rng.choice([op for op in ops if op[:1] in b"qrphjg"] or [b"q\x00"])

    def some_value(self, ops: Program) -> tuple[int, int]:
        ranges = subtrees(ops)
        return self.rng.choice(ranges) if ranges else (0, 0)

    def swap_value(self, ops: Program) -> None:
        a, b = self.some_value(ops)
        ops[a:b] = self.value(2)

    def part_for_value(self, ops: Program) -> None:
        """A value out of another pickle in the place of one; in a container half of the time."""
        a, b = self.some_value(ops)
        part = self.rng.choice(self.parts) if self.parts else [b"N"]
        ops[a:b] = part if self.rng.random() < 0.5 else [b"(", *part, *ops[a:b], b"l"]

    def wrapped_in_list(self, ops: Program) -> None:
        a, b = self.some_value(ops)
        ops[a:b] = [b"]", b"(", *ops[a:b], *(self.rng.choice(self.parts) if self.parts else [b"N"]), b"e"]

    def drop_value(self, ops: Program) -> None:
        a, b = self.some_value(ops)
        del ops[a:b]

    def double_value(self, ops: Program) -> None:
        a, b = self.some_value(ops)
        c, d = self.some_value(ops)
        ops[c:d] = ops[a:b] + (ops[c:d] if self.rng.random() < 0.3 else [])

    def wrap_value(self, ops: Program) -> None:
        a, b = self.some_value(ops)
        value = ops[a:b]
        ops[a:b] = self.rng.choice([[*value, b"\x85"], [b"(", *value, b"l"], [*value, b"Q"], [*value, b")", b"R"],
                                    [*value, b"}", b"b"], [*self.named(), *value, b"\x85", b"R"]])  # fmt: skip

    def insert_value(self, ops: Program) -> None:
        i = self.at(ops)
        ops[i:i] = self.value(2) + ([b"0"] if self.rng.random() < 0.5 else [])

    def noise(self, ops: Program) -> None:
        """Opcodes that change nothing, at a few places."""
        for _ in range(self.rng.randrange(1, 5)):
            i = self.at(ops)
            nothing = [[b"N", b"0"], [b"(", b"1"], [b"(", b"t", b"0"], [b"\x95" + bytes(8)], [b"]", b"0"]]
            ops[i:i] = self.rng.choice(nothing)

    def cut(self, ops: Program) -> None:
        if self.rng.random() < 0.3:
            del ops[self.at(ops) :]
        else:
            ops.insert(self.at(ops), b".")


def parts_of(programs: Sequence[Program], most: int = 40) -> list[Program]:
    """The values of some programs that need no memo: what splices are made of."""
    out: dict[bytes, Program] = {}
    for program in programs:
        plain = self_contained(program)
        for a, b in subtrees(plain or []):
            if plain is not None and 1 < b - a <= most:
                out.setdefault(b"".join(plain[a:b]), plain[a:b])
    return list(out.values())


def joined(ops: Any) -> bytes:
    """The pickle of a program."""
    return b"".join(ops)
