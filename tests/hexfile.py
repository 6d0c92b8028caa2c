"""Files built from readable pieces: zip and tar archives, torch pickles, safetensors.

Nothing here knows how tensorio works: the layouts come from APPNOTE 6.3.10, CPython's
``Lib/pickletools.py``, what ``torch.save`` writes, and the safetensors README. Each
builder can be told to lie about any single field, so that a test shows in one line what
is wrong with its file.
"""

from __future__ import annotations

import io
import json
import pickletools
import re
import struct
import tarfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# ------------------------------------------------------------- annotated hex

_TOKEN = re.compile(r'"((?:[^"\\]|\\.)*)"|([0-9a-fA-F]{2})(?=\s|$)|(\^)')


def annotated(text: str) -> bytes:
    """Bytes from lines of hex pairs and "quoted text", each with a note behind ``;``."""
    return caret(text)[0]


def caret(text: str) -> tuple[bytes, int | None]:
    """Like `annotated`; also where the line that begins with ``^`` starts, for the offset of an error."""
    out = bytearray()
    place = None
    for line in text.splitlines():
        code = re.split(r"\s;|^;", line, maxsplit=1)[0].strip()
        at = 0
        while at < len(code):
            token = _TOKEN.match(code, at)
            if token is None:
                raise ValueError(f"not hex, quoted text or a caret: {code[at:]!r}")
            if token[3]:
                place = len(out)
            elif token[2]:
                out.append(int(token[2], 16))
            else:
                out += token[1].encode("latin-1").decode("unicode_escape").encode("latin-1")
            at = token.end()
            while at < len(code) and code[at].isspace():
                at += 1
    return bytes(out), place


# ----------------------------------------------------------------------- zip


@dataclass
class Rec:
    """One record of a zip archive; `local` and `central` replace single fields of its two headers.

    Fields by name: sig needed flags method time date crc csize usize name extra; central also
    offset comment.
    """

    name: str | bytes
    data: bytes = b""
    method: int = 0
    flags: int = 0x0800
    pad: bool = True  # the FB extra that puts the payload at a multiple of `align`
    descriptor: bool = True
    local: Mapping[str, Any] = field(default_factory=dict)
    central: Mapping[str, Any] = field(default_factory=dict)
    gap: bytes = b""  # bytes in front of the local header


def deflate(data: bytes) -> bytes:
    """A raw deflate stream, as zip records hold it."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


def zip_file(
    records: Iterable[Rec],
    *,
    align: int = 64,
    zip64: bool = True,
    end: Mapping[str, int] | None = None,
    end64: Mapping[str, int] | None = None,
    locator: Mapping[str, int] | None = None,
    comment: bytes = b"",
    tail: bytes = b"",
) -> bytes:
    """A zip archive as ``torch.save`` lays one out, except for what is asked otherwise."""
    records = list(records)
    out = bytearray()
    central = bytearray()
    for rec in records:
        out += rec.gap
        offset = len(out)
        name = rec.name.encode() if isinstance(rec.name, str) else rec.name
        raw = deflate(rec.data) if rec.method == 8 else rec.data
        streamed = rec.descriptor and len(rec.data) > 0
        truth: dict[str, Any] = {
            "sig": 0x04034B50, "needed": 0, "flags": rec.flags | (8 if streamed else 0), "method": rec.method,
            "time": 0, "date": 0, "crc": zlib.crc32(rec.data), "csize": len(raw), "usize": len(rec.data), "name": name,
            "extra": b"", "offset": offset, "comment": b"",
        }  # fmt: skip
        near = dict(truth, crc=0, csize=0, usize=0) if streamed else dict(truth)
        if rec.pad:
            room = -(offset + 30 + len(name) + 4) % align
            near["extra"] = b"FB" + struct.pack("<H", room) + b"Z" * room
        near.update(rec.local)
        far = dict(truth, sig=0x02014B50)
        far.update(rec.central)
        out += _local(near) + raw
        if streamed:
            out += struct.pack("<IIII", 0x08074B50, truth["crc"], len(raw), len(rec.data))
        central += _central(far)
    start = len(out)
    out += central
    n = len(records)
    if zip64:
        where = len(out)
        big = {"sig": 0x06064B50, "size": 44, "made": 0x031E, "needed": 0x2D, "disk": 0, "first": 0, "here": n,
               "total": n, "csize": len(central), "offset": start}  # fmt: skip
        big.update(end64 or {})
        out += struct.pack("<IQHHIIQQQQ", *(big[k] for k in big))
        loc = {"sig": 0x07064B50, "disk": 0, "offset": where, "disks": 1}
        loc.update(locator or {})
        out += struct.pack("<IIQI", *(loc[k] for k in loc))
    last = {"sig": 0x06054B50, "disk": 0, "first": 0, "here": min(n, 0xFFFF), "total": min(n, 0xFFFF),
            "csize": len(central), "offset": start, "comment": len(comment)}  # fmt: skip
    last.update(end or {})
    out += struct.pack("<IHHHHIIH", *(last[k] for k in last)) + comment
    return bytes(out) + tail


def _local(f: Mapping[str, Any]) -> bytes:
    fixed = ("sig", "needed", "flags", "method", "time", "date", "crc", "csize", "usize")
    lengths = (f.get("name_len", len(f["name"])), f.get("extra_len", len(f["extra"])))
    out: bytes = struct.pack("<IHHHHHIIIHH", *(f[k] for k in fixed), *lengths) + f["name"] + f["extra"]
    return out


def _central(f: Mapping[str, Any]) -> bytes:
    fixed = ("needed", "flags", "method", "time", "date", "crc", "csize", "usize")
    lengths = (len(f["name"]), len(f["extra"]), len(f["comment"]))
    head = struct.pack("<IH", f["sig"], 0) + struct.pack("<HHHHHIII", *(f[k] for k in fixed))
    rest = struct.pack("<HHHHHII", *lengths, f.get("disk", 0), 0, f.get("external", 0), f["offset"])
    out: bytes = head + rest + f["name"] + f["extra"] + f["comment"]
    return out


# --------------------------------------------------------------- torch pickle


def proto(version: int = 2) -> bytes:
    """PROTO."""
    return b"\x80" + bytes([version])


def name(module: str, attribute: str) -> bytes:
    """GLOBAL."""
    return f"c{module}\n{attribute}\n".encode()


def text(value: str) -> bytes:
    """BINUNICODE."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value: int) -> bytes:
    """The shortest of BININT1, BININT2, BININT and LONG1, as CPython's pickler chooses."""
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if 0 <= value < 65536:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def numbers(values: Sequence[int]) -> bytes:
    """A tuple of ints."""
    return b"(" + b"".join(number(v) for v in values) + b"t"


def storage(cls: str, key: str, numel: int, location: str = "cpu", module: str = "torch") -> bytes:
    """BINPERSID of a storage's five parts."""
    return b"(" + text("storage") + name(module, cls) + text(key) + text(location) + number(numel) + b"tQ"


HOOKS = name("collections", "OrderedDict") + b")R"


def tensor(
    key: str = "0",
    numel: int = 4,
    size: Sequence[int] = (4,),
    stride: Sequence[int] | None = None,
    offset: int = 0,
    cls: str = "FloatStorage",
    requires_grad: bool = False,
    metadata: bytes = b"",
) -> bytes:
    """One tensor by ``_rebuild_tensor_v2``, without the memo."""
    if stride is None:
        stride = c_strides(size)
    return (
        name("torch._utils", "_rebuild_tensor_v2") + b"(" + storage(cls, key, numel) + number(offset) + numbers(size)
        + numbers(stride) + (b"\x88" if requires_grad else b"\x89") + HOOKS + metadata + b"tR"
    )  # fmt: skip


def c_strides(size: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    out, step = [], 1
    for n in reversed(size):
        out.append(step)
        step *= max(n, 1)
    return tuple(reversed(out))


def mapping(items: Mapping[str, bytes]) -> bytes:
    """A dict of pickled values."""
    return b"}(" + b"".join(text(k) + v for k, v in items.items()) + b"u"


def pickled(body: bytes, version: int = 2) -> bytes:
    """A whole pickle."""
    return proto(version) + body + b"."


def torch_records(
    pickle: bytes,
    storages: Mapping[str, bytes] | None = None,
    *,
    prefix: str = "archive",
    byteorder: str | None = "little",
    version: str | None = "3\n",
    modern: bool = True,
) -> list[Rec]:
    """The records of a torch file, in the order of torch 2.13."""
    parts: list[tuple[str, bytes | None]] = [("data.pkl", pickle)]
    if modern:
        parts += [(".format_version", b"1"), (".storage_alignment", b"64")]
    parts.append(("byteorder", None if byteorder is None else byteorder.encode()))
    parts += [(f"data/{key}", raw) for key, raw in (storages or {}).items()]
    parts.append(("version", None if version is None else version.encode()))
    if modern:
        parts.append((".data/serialization_id", b"0" * 40))
    return [Rec(f"{prefix}/{part}", raw) for part, raw in parts if raw is not None]


def torch_file(pickle: bytes, storages: Mapping[str, bytes] | None = None, **options: Any) -> bytes:
    """A torch zip around a pickle."""
    split = {k: options.pop(k) for k in ("align", "zip64", "end", "end64", "locator", "comment", "tail")
             if k in options}  # fmt: skip
    return zip_file(torch_records(pickle, storages, **options), **split)


def respelled(pickle: bytes, *, memo: str = "same", words: str = "same", padded: bool = False) -> bytes:
    """The same object in other opcodes.

    Parameters
    ----------
    memo : {"same", "long", "memoize"}
        LONG_BINPUT and LONG_BINGET for all slots, or MEMOIZE where the slot is the next free one.
    words : {"same", "short"}
        "short": names as STACK_GLOBAL and strings as SHORT_BINUNICODE (protocol 4).
    padded : bool
        A NONE that is popped again behind every opcode.
    """
    out = bytearray()
    slots: set[Any] = set()
    ops: list[tuple[Any, Any, Any]] = list(pickletools.genops(pickle))
    ends = [at for _, _, at in ops[1:]] + [len(pickle)]
    for (op, arg, at), end in zip(ops, ends, strict=True):
        piece = pickle[at:end]
        if op.name == "PROTO" and (memo == "memoize" or words == "short"):
            piece = proto(4)
        elif op.name in ("BINPUT", "LONG_BINPUT"):
            if memo == "long":
                piece = b"r" + struct.pack("<I", arg)
            elif memo == "memoize" and arg == len(slots) and arg not in slots:
                piece = b"\x94"
            slots.add(arg)
        elif op.name == "BINGET" and memo == "long":
            piece = b"j" + struct.pack("<I", arg)
        elif words == "short" and op.name == "BINUNICODE" and len(arg.encode()) < 256:
            piece = _short(arg)
        elif words == "short" and op.name == "GLOBAL":
            module, _, attribute = arg.partition(" ")
            piece = _short(module) + _short(attribute) + b"\x93"
        out += piece
        if padded and op.name not in ("PROTO", "STOP"):
            out += b"N0"
    return bytes(out)


def _short(value: str) -> bytes:
    raw = value.encode()
    return b"\x8c" + bytes([len(raw)]) + raw


# ------------------------------------------------------------------------ tar


def tarred(members: Mapping[str, bytes], format: int = tarfile.USTAR_FORMAT) -> bytes:
    """A tar file of regular members, as Python's tarfile writes it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


# ---------------------------------------------------------------- safetensors


def st_file(header: Any, payload: bytes = b"", *, length: int | None = None, pad: int = 8) -> bytes:
    """A safetensors file; `header` is bytes, text, or what becomes compact JSON."""
    if not isinstance(header, bytes | str):
        header = json.dumps(header, separators=(",", ":"))
    raw = header.encode() if isinstance(header, str) else header
    raw += b" " * (-len(raw) % pad)
    return struct.pack("<Q", len(raw) if length is None else length) + raw + payload


def st_entry(dtype: str, shape: Sequence[int], begin: int, end: int) -> dict[str, Any]:
    """One tensor of a safetensors header."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
