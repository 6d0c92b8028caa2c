"""Files of torch's earlier formats, from readable pieces: legacy streams and tar archives.

The layouts come from torch's own reader of them (``torch/serialization.py`` of 2.13) and from POSIX.1-2017; each
builder can be told to lie about any single field.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from hexfile import HOOKS, c_strides, name, number, numbers, pickled, text

# -------------------------------------------------------------------- legacy

MAGIC = pickled(number(0x1950A86A20F9469CFC6C))
VERSION = pickled(number(1001))
INFO = pickled(
    b"}q\0(" + text("protocol_version") + b"q\1" + number(1001)
    + text("little_endian") + b"q\2\x88"
    + text("type_sizes") + b"q\3}q\4(" + text("short") + b"q\5K\2" + text("int") + b"q\6K\4"
    + text("long") + b"q\7K\4uu"
)  # fmt: skip


def view(key: str, first: int, count: int) -> bytes:
    """The last part of a persistent id: where a storage is inside its root."""
    return b"(" + text(key) + number(first) + number(count) + b"t"


def old_storage(
    key: str = "0", numel: int = 4, cls: str = "FloatStorage", *, part: bytes = b"N", location: str = "cpu",
    module: str = "torch",
) -> bytes:  # fmt: skip
    """BINPERSID of a storage's six parts."""
    pid = text("storage") + name(module, cls) + text(key) + text(location) + number(numel) + part
    return b"(" + pid + b"tQ"


def old_tensor(
    key: str = "0", numel: int = 4, size: Sequence[int] = (4,), stride: Sequence[int] | None = None, offset: int = 0,
    cls: str = "FloatStorage", hooks: bytes = HOOKS, **options: Any,
) -> bytes:  # fmt: skip
    """One tensor of a legacy file by ``_rebuild_tensor_v2``, without the memo."""
    return (
        name("torch._utils", "_rebuild_tensor_v2") + b"(" + old_storage(key, numel, cls, **options) + number(offset)
        + numbers(size) + numbers(c_strides(size) if stride is None else stride) + b"\x89" + hooks + b"tR"
    )  # fmt: skip


def key_list(keys: Sequence[str]) -> bytes:
    """The pickle of the keys of storages."""
    return pickled(b"](" + b"".join(text(key) for key in keys) + b"e")


def legacy_file(
    body: bytes,
    storages: Mapping[str, bytes] | None = None,
    *,
    itemsize: int | Mapping[str, int] = 4,
    counts: Mapping[str, int] | None = None,
    keys: bytes | None = None,
    magic: bytes = MAGIC,
    version: bytes = VERSION,
    info: bytes = INFO,
    protocol: int = 2,
    tail: bytes = b"",
) -> bytes:
    """A legacy file around the body of a pickle."""
    storages = storages or {}
    out = magic + version + info + pickled(body, protocol) + (key_list(list(storages)) if keys is None else keys)
    for key, raw in storages.items():
        size = itemsize if isinstance(itemsize, int) else itemsize[key]
        out += struct.pack("<q", (counts or {}).get(key, len(raw) // size)) + raw
    return out + tail


# ----------------------------------------------------------------------- tar

BLOCK = 512


def tar_header(member: str, nbytes: int, /, **fields: bytes) -> bytes:
    """A header; single fields can be replaced: name size sum type link magic prefix."""
    block = bytearray(BLOCK)
    places = {"name": 0, "size": 124, "sum": 148, "type": 156, "link": 157, "magic": 257, "prefix": 345}
    truth = {"name": member.encode(), "size": b"%011o\0" % nbytes, "type": b"0", "magic": b"ustar\x0000"} | fields
    block[100:108] = block[108:116] = block[116:124] = b"0000644\0"
    block[136:148] = b"%011o\0" % 0
    block[148:156] = b" " * 8
    for field, value in truth.items():
        if field != "sum":
            block[places[field] : places[field] + len(value)] = value
    block[148:156] = truth.get("sum", b"%06o\0 " % sum(block))
    return bytes(block)


def tar_member(member: str, data: bytes, /, **fields: bytes) -> bytes:
    """A header and the bytes behind it, in whole blocks."""
    return tar_header(member, len(data), **fields) + data + bytes(-len(data) % BLOCK)


def pax_header(lines: bytes) -> bytes:
    """An extended header for the next member."""
    return tar_member("././@PaxHeader", lines, type=b"x")


def pax_line(key: str, value: str) -> bytes:
    """A line of an extended header, its own length in front."""
    rest = f" {key}={value}\n".encode()
    length = next(n for n in range(len(rest), len(rest) + 9) if n == len(rest) + len(str(n)))
    return str(length).encode() + rest


def tar_file(*parts: bytes, end: bytes = bytes(2 * BLOCK)) -> bytes:
    """An archive of members that were made by `tar_member`."""
    return b"".join(parts) + end


def tar_storages(storages: Sequence[tuple[int | str, str, int, bytes]], views: bytes | None = b"]",
                 number_of: int | None = None) -> bytes:  # fmt: skip
    """The member of that name: (key, class, number of elements, bytes) each, then storages inside others."""
    out = pickled(number(len(storages) if number_of is None else number_of))
    for key, cls, count, raw in storages:
        out += pickled(b"(" + _key(key) + text("cpu") + name("torch", cls) + b"t") + struct.pack("<q", count) + raw
    return out + (b"" if views is None else pickled(views))


def tar_tensors(tensors: Sequence[tuple[Any, Any, str, Sequence[int], Sequence[int], int]],
                number_of: int | None = None) -> bytes:  # fmt: skip
    """The member of that name: (key, key of the storage, class, size, stride, offset) each."""
    out = pickled(number(len(tensors) if number_of is None else number_of))
    for key, storage, cls, size, stride, offset in tensors:
        inside = b"N" if storage is None else _key(storage)
        out += pickled(b"(" + _key(key) + inside + name("torch", cls) + b"t")
        out += struct.pack(f"<i4x{len(size)}q{len(stride)}qq", len(size), *size, *stride, offset)
    return out


def _key(key: int | str) -> bytes:
    return number(key) if isinstance(key, int) else text(key)


def tar_id(key: int | str) -> bytes:
    """What stands in the object for a tensor or storage."""
    return text(str(key)) + b"Q"


def torch_tar(body: bytes, storages: bytes, tensors: bytes | None = None, *more: bytes, **options: Any) -> bytes:
    """A tar torch file around the body of a pickle."""
    parts = [tar_member("sys_info", INFO), tar_member("pickle", pickled(body))]
    parts += [] if tensors is None else [tar_member("tensors", tensors)]
    return tar_file(*parts, tar_member("storages", storages), *more, **options)
