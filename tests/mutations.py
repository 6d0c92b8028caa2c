"""Good files changed at random, part by part: what is around the change stays right.

A zip archive is taken apart into records and put together again with sums that hold; so is a tar archive; a legacy
file is a row of pickles and counts; a pickle is a list of opcodes, a JSON text a tree. So changes get past the checks
of the layers outside them. Everything follows from the random generator that is handed in.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import pickletools
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable
from typing import Any

import hexfile
import oldfiles

Random = random.Random

ENDS = [
    0, 1, 2, 7, 8, 63, 64, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**61, 2**62,
    2**63 - 1, 2**63, 2**64 - 1,
]  # fmt: skip
WORDS = [
    "", "0", "1", "a", "storage", "cpu", "cuda:0", "meta", "latin1", "..", "a/b", "\0", "\u20ac", "x" * 200, "weight",
    "data.pkl", "version", "little", "big", "float32", "f4", ">f4",
]  # fmt: skip
NAMES = [
    ("torch", "FloatStorage"), ("torch", "QInt8Storage"), ("torch.storage", "UntypedStorage"), ("torch", "float8_e5m2"),
    ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3"), ("torch", "Size"),
    ("torch._utils", "_rebuild_qtensor"), ("torch._utils", "_rebuild_sparse_tensor"), ("os", "system"),
    ("torch._utils", "_rebuild_parameter"), ("collections", "OrderedDict"), ("builtins", "set"),
    ("torch.jit._pickle", "build_intlist"), ("__torch__.m", "Net"), ("numpy", "dtype"),
]  # fmt: skip


def int_in(rng: Random, bits: int) -> int:
    """A number at one of the ends of some range, cut to so many bits."""
    return (rng.choice(ENDS) * rng.choice((1, 1, -1)) + rng.choice((0, 0, 0, -1, 1))) % (1 << bits)


# ------------------------------------------------------------------------ pickles


def opcodes(pickle: bytes) -> list[bytes]:
    """The opcodes of a pickle with their arguments; what is behind the end is the last of them."""
    starts: list[int] = []
    with contextlib.suppress(Exception):
        starts.extend(at for _, _, at in pickletools.genops(pickle) if at is not None)
    ops = [pickle[a:b] for a, b in itertools.pairwise([*starts, len(pickle)])]
    if ops and ops[-1][:1] == b"." and len(ops[-1]) > 1:
        ops[-1:] = [b".", ops[-1][1:]]
    return ops or [pickle]


def shuffled(rng: Random, ops: list[bytes], pieces: list[bytes]) -> list[bytes]:
    """Opcodes dropped, doubled, exchanged and replaced; never the first and the last one."""
    changed = ops.copy()
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if len(changed) < 4:
            break
        i, j = rng.randrange(1, len(changed) - 1), rng.randrange(1, len(changed) - 1)
        what = rng.randrange(6)
        if what == 0:
            del changed[i]
        elif what == 1:
            changed.insert(i, changed[j])
        elif what == 2:
            changed[i], changed[j] = changed[j], changed[i]
        elif what == 3:
            changed[i] = rng.choice(pieces)
        elif what == 4:
            changed[i] = changed[j]
        else:
            changed[i] = argument(rng, changed[i])
    return changed


def argument(rng: Random, op: bytes) -> bytes:
    """The same kind of opcode with another argument."""
    code = op[:1]
    if code in b"KMJ\x8aI":
        value = int_in(rng, 64)
        return hexfile.number(value - (1 << 64) if rng.random() < 0.3 else value)
    if code in b"X\x8c\x8dUT":
        return hexfile.text(rng.choice(WORDS))
    if code == b"c":
        return hexfile.name(*rng.choice(NAMES))
    if code in b"qh\x80":
        return code + bytes([rng.randrange(256)])
    if code in b"rj":
        return code + struct.pack("<I", int_in(rng, 32))
    return op if len(op) == 1 else op[:1] + bytes(b ^ (1 << rng.randrange(8)) for b in op[1:])


def pickled(rng: Random, pickle: bytes, pieces: list[bytes]) -> bytes:
    """A pickle with a few of its opcodes changed."""
    return b"".join(shuffled(rng, opcodes(pickle), pieces))


# --------------------------------------------------------------------------- JSON


def json_text(rng: Random, text: bytes) -> bytes:
    """A JSON text with one value, key or character changed."""
    try:
        tree = json.loads(text)
    except ValueError:
        return raw(rng, text)
    if rng.random() < 0.2 or not isinstance(tree, dict | list):
        return raw(rng, text)
    node: Any = tree
    while True:
        keys: list[Any] = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return raw(rng, text)
        key = rng.choice(keys)
        if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.9:
            node = node[key]
            continue
        break
    other: list[Any] = [None, True, -1, 1.5, int_in(rng, 64), rng.choice(WORDS), [], {}, [node[key]], {"a": node[key]}]
    what = rng.randrange(4)
    if what == 0 and isinstance(node, dict):
        node[rng.choice(WORDS)] = node.pop(key)
    elif what == 1:
        del node[key]
    else:
        node[key] = rng.choice(other)
    return json.dumps(tree).encode()


# ---------------------------------------------------------------------- any bytes


def raw(rng: Random, data: bytes) -> bytes:
    """Bytes flipped, numbers replaced, an end cut off or put on."""
    out = bytearray(data)
    what = rng.randrange(5)
    if not out or what == 0:
        return bytes(out) + rng.randbytes(rng.randrange(1, 9))
    at = rng.randrange(len(out))
    if what == 1:
        out[at] ^= 1 << rng.randrange(8)
    elif what == 2:
        del out[at:]
    else:
        width = rng.choice((1, 2, 4, 8))
        out[at : at + width] = int_in(rng, 8 * width).to_bytes(width, rng.choice(("little", "big")))
    return bytes(out)


def payload(rng: Random, name: str, data: bytes, pieces: list[bytes]) -> bytes:
    """What a record of that name holds, changed in a way that fits it."""
    if data[:1] == b"\x80" or name.endswith(".pkl"):
        return pickled(rng, data, pieces)
    if name.endswith(".json"):
        return json_text(rng, data)
    if data[:4] == b"PK\3\4":
        return zip_archive(rng, data, pieces)
    return raw(rng, data)


# ------------------------------------------------------------------------ archives

# Fields of hexfile.Rec's headers, and the bits of each.
LOCAL = {"sig": 32, "flags": 16, "method": 16, "crc": 32, "csize": 32, "usize": 32, "name_len": 16, "extra_len": 16}
CENTRAL = {"sig": 32, "flags": 16, "method": 16, "crc": 32, "csize": 32, "usize": 32, "offset": 32, "disk": 16,
           "external": 32}  # fmt: skip
END = {"disk": 16, "first": 16, "here": 16, "total": 16, "csize": 32, "offset": 32, "comment": 16}
END64 = {"size": 64, "disk": 32, "first": 32, "here": 64, "total": 64, "csize": 64, "offset": 64}
LOCATOR = {"disk": 32, "offset": 64, "disks": 32}


def one(rng: Random, fields: dict[str, int]) -> dict[str, int]:
    """A lie in one field."""
    name = rng.choice(list(fields))
    return {name: int_in(rng, fields[name])}


def zip_archive(rng: Random, data: bytes, pieces: list[bytes]) -> bytes:
    """A zip archive put together again with a record, a name, a payload or a field changed; sums hold elsewhere."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = [hexfile.Rec(i.filename, archive.read(i), method=i.compress_type) for i in archive.infolist()]
    rec = rng.choice(records)
    options: dict[str, Any] = {}
    what = rng.randrange(12)
    if what < 5:
        rec.data = payload(rng, str(rec.name), rec.data, pieces)
    elif what == 5:
        records.remove(rec)
    elif what == 6:
        records.insert(rng.randrange(len(records)), rec)
    elif what == 7:
        i, j = rng.randrange(len(records)), rng.randrange(len(records))
        records[i].data, records[j].data = records[j].data, records[i].data
    elif what == 8:
        folder, _, rest = str(rec.name).rpartition("/")
        rec.name = f"{folder}/{rng.choice([*WORDS, rest.upper()])}"
    elif what == 9:
        rec.local = one(rng, LOCAL)
    elif what == 10:
        rec.central = one(rng, CENTRAL)
    else:
        part, fields = rng.choice([("end", END), ("end64", END64), ("locator", LOCATOR)])
        options[part] = one(rng, fields)
    return hexfile.zip_file(records, zip64=rng.random() < 0.9, align=rng.choice((64, 64, 1)), **options)


def tar_archive(rng: Random, data: bytes, pieces: list[bytes]) -> bytes:
    """A tar archive put together again with a member or a field of a header changed; header sums hold elsewhere."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = [(m.name, f.read()) for m in archive if (f := archive.extractfile(m)) is not None]
    i = rng.randrange(len(members))
    name, held = members[i]
    fields: dict[str, bytes] = {}
    what = rng.randrange(6)
    if what < 3:
        members[i] = (name, pickle_row(rng, held, pieces))
    elif what == 3:
        del members[i]
    elif what == 4:
        members.insert(i, members[rng.randrange(len(members))])
    else:
        field, width = rng.choice([("name", 100), ("size", 12), ("sum", 8), ("type", 1), ("magic", 8), ("link", 100)])
        fields[field] = rng.choice([b"%011o\0" % int_in(rng, 33), rng.randbytes(8), b"../x\0", b"\x80" + bytes(11)])[
            :width
        ]
    parts = [oldfiles.tar_member(n, h, **(fields if k == i else {})) for k, (n, h) in enumerate(members)]
    return oldfiles.tar_file(*parts)


def pickle_row(rng: Random, data: bytes, pieces: list[bytes]) -> bytes:
    """Pickles with numbers and bytes between them: one pickle, or something between them, is changed."""
    spots = [at for at in range(len(data) - 1) if data[at : at + 2] == b"\x80\x02"]
    if not spots or rng.random() < 0.4:
        return raw(rng, data)
    at = rng.choice(spots)
    stream = io.BytesIO(data)
    stream.seek(at)
    try:
        for _ in pickletools.genops(stream):
            pass
    except Exception:
        return raw(rng, data)
    return data[:at] + pickled(rng, data[at : stream.tell()], pieces) + data[stream.tell() :]


MUTATORS: dict[str, Callable[[Random, bytes, list[bytes]], bytes]] = {
    "torch_legacy": pickle_row,
    "torch_tar": tar_archive,
    "pickle": pickle_row,
    "safetensors": lambda rng, data, pieces: safetensors(rng, data),
}


def safetensors(rng: Random, data: bytes) -> bytes:
    """A safetensors file with its header changed as JSON, its length right but now and then."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json_text(rng, data[8:end])
    length = len(header) if rng.random() < 0.9 else int_in(rng, 64)
    return struct.pack("<Q", length) + header + data[end:]


def mutated(rng: Random, format: str, data: bytes, pieces: list[bytes]) -> bytes:
    """A file of some format, changed in one of its parts; now and then just anywhere."""
    if rng.random() < 0.1:
        return raw(rng, data)
    return MUTATORS.get(format, zip_archive)(rng, data, pieces)
