"""Files around pickles, and whole files changed at random: what the machine fuzzer opens.

A seed is a file of some format, taken apart where a pickle can be put in its place.
"""

from __future__ import annotations

import io
import pickletools
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import hexfile
from grammar import INTS, Program, parse

LONGEST_FILE = 1 << 16


@dataclass
class Seed:
    """A file whose pickle can be replaced.

    Attributes
    ----------
    kind : str
        How the pickle is wrapped: ``zip``, ``legacy``, ``tar`` or ``bare``.
    program : Program
        The pickle.
    name : str
        Of the record that the pickle is (zip, tar).
    records : dict of str to bytes
        All records by name (zip, tar).
    head, tail : bytes
        What stands in front of the pickle and behind it (legacy, bare).
    """

    kind: str
    program: Program
    name: str = "archive/data.pkl"
    records: dict[str, bytes] = field(default_factory=dict)
    head: bytes = b""
    tail: bytes = b""

    @property
    def keys(self) -> list[str]:
        """Storage keys, as far as they are known."""
        return [name.rpartition("/data/")[2] for name in self.records if "/data/" in name]


def seed_of(data: bytes) -> Seed | None:
    """Take a file apart; None if there is no pickle that could be replaced."""
    try:
        if data[:4] == b"PK\x03\x04":
            return _zip_seed(data)
        if data[257:262] == b"ustar":
            return _tar_seed(data)
        return _stream_seed(data)
    except Exception:
        return None


def _zip_seed(data: bytes) -> Seed | None:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    pickles = [name for name in records if name.endswith(".pkl")]
    if not pickles:
        return None
    name = min(pickles, key=lambda name: (not name.endswith("/data.pkl"), -len(records[name])))
    return Seed("zip", parse(records[name]), name, records)


def _tar_seed(data: bytes) -> Seed | None:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = {m.name: archive.extractfile(m) for m in archive.getmembers() if m.isfile()}
        records = {name: f.read() for name, f in members.items() if f is not None}
    return Seed("tar", parse(records["pickle"]), "pickle", records) if "pickle" in records else None


def _stream_seed(data: bytes) -> Seed | None:
    """Legacy: magic number, protocol, facts, the object, keys, bytes. Else a pickle and perhaps something behind it."""
    ends = []
    stream = io.BytesIO(data)
    for _ in range(4):
        for op, _, _ in pickletools.genops(stream):
            if op.name == "STOP":
                ends.append(stream.tell())
        if len(ends) == 1 and not data.startswith(b"\x80\x02\x8a\x0al\xfc\x9c\x46\xf9"):
            return Seed("bare", parse(data[: ends[0]]), tail=data[ends[0] :])
    return Seed("legacy", parse(data[ends[2] : ends[3]]), head=data[: ends[2]], tail=data[ends[3] :])


def wrapped(rng: random.Random, seed: Seed, pickle: bytes) -> bytes:
    """The pickle as a file of the seed's kind, its surroundings off now and then."""
    if seed.kind == "zip":
        return _zip(rng, seed, pickle)
    if seed.kind == "tar":
        return hexfile.tarred({**seed.records, seed.name: pickle})
    tail = seed.tail
    if tail and rng.random() < 0.1:
        tail = mutated(rng, tail, [tail])
    return seed.head + pickle + tail


def _zip(rng: random.Random, seed: Seed, pickle: bytes) -> bytes:
    records = {**seed.records, seed.name: pickle}
    if rng.random() < 0.1:
        name = rng.choice(list(records))
        change = rng.randrange(4)
        if change == 0:
            del records[name]
        elif change == 1:
            records[name] = records[name][: rng.randrange(len(records[name]) + 1)]
        elif change == 2:
            records = {k: rng.choice([b"big", b"little", b""]) if "byteorder" in k else v for k, v in records.items()}
        else:
            records[name] = mutated(rng, records[name], list(records.values()))
    parts = [hexfile.Rec(name, raw) for name, raw in records.items()]
    for part in parts:
        if rng.random() < 0.03:
            part.method = 8
        if rng.random() < 0.005:
            part.local = {rng.choice(["crc", "csize", "usize", "flags", "method"]): rng.choice(INTS) % 65536}
        if rng.random() < 0.005:
            part.central = {rng.choice(["crc", "csize", "usize", "offset"]): rng.choice(INTS) % 2**32}
    return hexfile.zip_file(parts, zip64=rng.random() < 0.9)


# ------------------------------------------------------------- whole files


def mutated(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """A file with a few changes of the kinds that break parsers; any format."""
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        if not raw:
            break
        rng.choice(CHANGES)(rng, raw, others)
    return bytes(raw[:LONGEST_FILE])


def _spot(rng: random.Random, raw: bytearray) -> int:
    """A position; half of the time near one of the ends, where headers are."""
    n = len(raw)
    if rng.random() < 0.5:
        near = rng.randrange(min(n, 300))
        return near if rng.random() < 0.5 else n - 1 - near
    return rng.randrange(n)


def _flip(rng: random.Random, raw: bytearray, others: list[bytes]) -> None:
    raw[_spot(rng, raw)] ^= 1 << rng.randrange(8)


def _byte(rng: random.Random, raw: bytearray, others: list[bytes]) -> None:
    raw[_spot(rng, raw)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, 0x22, 0x7B, 0x5B, 0x2E, 0x0A, rng.randrange(256)))


def _number(rng: random.Random, raw: bytearray, others: list[bytes]) -> None:
    """A number of 2, 4 or 8 bytes: one of the ends of a range, or the one that was there and a bit."""
    width = rng.choice((2, 4, 8))
    at = min(_spot(rng, raw), max(len(raw) - width, 0))
    value = int.from_bytes(raw[at : at + width], "little") + rng.randrange(-8, 9)
    if rng.random() < 0.5:
        value = rng.choice([*INTS, len(raw), len(raw) - at, at])
    raw[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, rng.choice(("little", "little", "big")))


def _cut(rng: random.Random, raw: bytearray, others: list[bytes]) -> None:
    a = _spot(rng, raw)
    del raw[a : a + rng.choice((1, 1, 2, 4, 8, 30, len(raw)))]


def _insert(rng: random.Random, raw: bytearray, others: list[bytes]) -> None:
    other = rng.choice(others) or b"\0"
    a = rng.randrange(len(other))
    at = _spot(rng, raw)
    raw[at:at] = other[a : a + rng.choice((1, 2, 4, 8, 46, 300))]


def _swap(rng: random.Random, raw: bytearray, others: list[bytes]) -> None:
    n = rng.choice((1, 4, 8, 46, 64))
    a, b = sorted((_spot(rng, raw), _spot(rng, raw)))
    if a + n <= b:
        raw[a : a + n], raw[b : b + n] = raw[b : b + n], raw[a : a + n]


def _copy(rng: random.Random, raw: bytearray, others: list[bytes]) -> None:
    n = rng.choice((1, 4, 8, 46, 64, 512))
    a, b = _spot(rng, raw), _spot(rng, raw)
    raw[b : b + n] = raw[a : a + n]


def _double(rng: random.Random, raw: bytearray, others: list[bytes]) -> None:
    a = _spot(rng, raw)
    raw[a:a] = raw[a : a + rng.choice((1, 8, 46, 512))]


def _digits(rng: random.Random, raw: bytearray, others: list[bytes]) -> None:
    """Another decimal number, where a text has one."""
    places = [i for i in range(min(len(raw), 4096)) if 0x30 <= raw[i] <= 0x39]
    if places:
        at = rng.choice(places)
        end = at
        while end < len(raw) and 0x30 <= raw[end] <= 0x39:
            end += 1
        raw[at:end] = str(rng.choice(INTS)).encode()


CHANGES: list[Callable[[random.Random, bytearray, list[bytes]], None]] = [
    _flip, _flip, _byte, _number, _number, _cut, _insert, _swap, _copy, _double, _digits,
]  # fmt: skip


def suffix_of(data: bytes) -> str:
    """A name's ending that fits the content."""
    if data[:4] == b"PK\x03\x04" or data[:1] == b"\x80":
        return ".pt"
    length = struct.unpack("<Q", data[:8].ljust(8, b"\0"))[0]
    return ".safetensors" if length < 1 << 32 and data[8:9] == b"{" else ".bin"


def small(files: Iterable[bytes]) -> list[bytes]:
    """Those that are quick to open and change."""
    return [data for data in files if 0 < len(data) <= LONGEST_FILE]
