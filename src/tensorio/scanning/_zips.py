"""Zip archives: every record is looked into, listed or not; an archive that the strict reader refuses, too."""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from tensorio import _core
from tensorio.errors import TensorIOError, escaped
from tensorio.formats._zip import Archive
from tensorio.scanning._collect import Trust
from tensorio.scanning._wrapped import PEEK, deflated, unpack
from tensorio.storage.base import MemoryStorage

if TYPE_CHECKING:
    from tensorio.formats._base import StoredRecord
    from tensorio.scanning._collect import Blob, Collector

__all__ = ["archive_start", "look_zip", "trust_of_name"]

_LOCAL, _CENTRAL, _END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_SIGNATURES = re.compile(rb"PK(?:\x03\x04|\x01\x02)")
_END64, _LOCATOR = struct.Struct("<4sQHHIIQQQQ"), struct.Struct("<4sIQI")
_END_RECORD = struct.Struct("<4sHHHHIIH")
TAIL = _END_RECORD.size + 0xFFFF  # an end record and the longest comment
_DESCRIPTOR_MAX = 24  # bytes behind a payload that are its descriptor
STORED, DEFLATED = 0, 8
RECORDS_MAX = 200_000  # that are looked for in an archive which the strict reader refuses

_PICKLE_NAME = re.compile(r"\.(\w*_?pkl|pickle|pcl|pck|p|pk|pt|pth|ckpt|joblib|dill)$|(^|/)pickle$", re.IGNORECASE)
# The tensors of a torch archive, by number or by name.
_TENSOR_NAME = re.compile(r"(^|/)(data|constants|tensors|weights)/[^/]*$")


class _Place(NamedTuple):
    """A record of an archive that was refused: what one of its headers says."""

    begin: int
    end: int
    method: int
    name: str


def trust_of_name(name: str) -> Trust:
    """Tell by a name how sure it is that there is a pickle behind it."""
    if _PICKLE_NAME.search(name[-256:]):
        return Trust.SURE
    return Trust.UNLIKELY if _TENSOR_NAME.search(name[-256:]) else Trust.MAYBE


def archive_start(view: memoryview) -> int | None:
    """Find the last end record of `view` and tell where its archive begins; None if there is none."""
    tail = bytes(view[max(0, len(view) - TAIL) :])
    found = tail.rfind(_END)
    while found >= 0:
        at = len(view) - len(tail) + found
        if len(view) - at >= _END_RECORD.size:
            return min(max(_directory_end(view, at) - _size_before(view, at), 0), at)
        found = tail.rfind(_END, 0, found)
    return None


def _locator(view: memoryview, at: int) -> bool:
    """Whether the end record at `at` has zip64 kin in front of it."""
    begin = at - _LOCATOR.size - _END64.size
    return begin >= 0 and bytes(view[at - _LOCATOR.size : at - _LOCATOR.size + 4]) == b"PK\x06\x07"


def _directory_end(view: memoryview, at: int) -> int:
    return at - _LOCATOR.size - _END64.size if _locator(view, at) else at


def _size_before(view: memoryview, at: int) -> int:
    """Bytes of records and directory, as the end record says."""
    if _locator(view, at):
        *_, size, offset = _END64.unpack_from(view, at - _LOCATOR.size - _END64.size)
    else:
        _, _, _, _, _, size, offset, _ = _END_RECORD.unpack_from(view, at)
    return int(size + offset)


def look_zip(c: Collector, blob: Blob) -> int:
    """Look into the archive that `blob` ends with, and into archives in front of it.

    Returns
    -------
    int
        How many of the first bytes are to be looked at as something else: those in front of the archive, or all if
        there is none that is accepted.
    """
    while True:
        c.tails -= min(len(blob.view), TAIL)
        if c.tails < 0:
            c.unreadable(blob, 0, "more archives than are looked into in a file of this size")
            return len(blob.view)
        start = archive_start(blob.view) or 0
        archive = blob.part(start)
        try:
            with c.scattered():
                reader = Archive(MemoryStorage(archive.view))
            records = reader.records()
            reader.names("")
        except TensorIOError as error:
            c.unreadable(archive, error.offset, f"the archive is refused: {error.message}")
            _look_refused(c, blob)
            return 0 if bytes(blob.view[:4]) == _LOCAL else len(blob.view)
        _look_records(c, archive, reader, records)
        blob = blob.part(0, start)
        if start == 0 or bytes(blob.view[:4]) != _LOCAL:
            return start


# ---------------------------------------------------------------- an archive that is accepted


def _look_records(c: Collector, blob: Blob, reader: Archive, records: list[StoredRecord]) -> None:
    """Look into each record, and at the bytes that belong to none."""
    script = any(r.name.endswith("/constants.pkl") or "/code/" in r.name for r in records)
    blob = replace(blob, script=script)
    if any("/code/" in r.name and r.name.endswith(".py") for r in records):
        c.note(blob, "holds TorchScript code, which torch runs in an interpreter of its own; it is not looked at")
    if any(r.name.endswith("/.data/extern_modules") for r in records):
        c.say("unknown", blob, None, "a torch.package archive: its importer runs the Python source in it")
    with c.scattered():
        directory = _core.zip_read(blob.view)
    spans = []
    for number, record in enumerate(records):
        header = _core.zip_record(reader.rows, number)[5]
        spans.append((header, record.offset + record.nbytes))
        place = _Place(
            record.offset, record.offset + record.nbytes, DEFLATED if record.deflated else STORED, record.name
        )
        _look_record(c, blob, place)
    spans.sort()
    end = 0
    for header, behind in [*spans, (directory[1], directory[2])]:
        _look_between(c, blob, end, header)
        end = behind
    _look_between(c, blob, end, len(blob.view), tail=True)


def _look_between(c: Collector, blob: Blob, begin: int, end: int, tail: bool = False) -> None:
    """Look at bytes between records, or behind the archive."""
    if end - begin <= (0 if tail else _DESCRIPTOR_MAX) and _SIGNATURES.search(blob.view, begin, end) is None:
        return
    gap = blob.part(begin + _descriptor_size(blob.view, begin, end), end, Trust.UNLIKELY)
    if c.only_zeros(gap, 0):
        return
    if any(_SIGNATURES.search(piece) for piece, _ in c.pieces(gap, 0, len(gap.view))):
        c.unreadable(gap, 0, f"{len(gap.view)} bytes that the directory does not list hold headers of records")
        _look_refused(c, gap)
    else:
        c.note(gap, f"{len(gap.view)} bytes at {gap.origin} belong to no record")
        c.look(gap)
        c.sweep(gap, 0)


def _descriptor_size(view: memoryview, begin: int, end: int) -> int:
    """Bytes of the data descriptor at `begin`, which has sizes of 4 or 8 bytes; 0 if there is none that is marked."""
    if end - begin < 16 or bytes(view[begin : begin + 4]) != b"PK\x07\x08":
        return 0
    small = bytes(view[begin + 8 : begin + 12]) != bytes(4) and bytes(view[begin + 12 : begin + 16]) != bytes(4)
    return 16 if small or end - begin < _DESCRIPTOR_MAX else _DESCRIPTOR_MAX


def _look_record(c: Collector, blob: Blob, place: _Place) -> None:
    trust = trust_of_name(place.name)
    name = place.name if len(place.name) <= 256 else place.name[:256] + "..."
    if place.method == STORED:
        c.look(blob.inside(name, blob.view[place.begin : place.end], trust, place.begin))
    elif place.method == DEFLATED:
        _look_deflated(c, blob, place, name, trust)
    else:
        c.unreadable(blob, place.begin, f"record {escaped(name)}: compression method {place.method}: can't look inside")


def _look_deflated(c: Collector, blob: Blob, place: _Place, name: str, trust: Trust) -> None:
    """Unpack a record: all of it if it may matter, else its beginning."""
    packed = blob.part(place.begin, place.end)
    if trust is Trust.UNLIKELY:
        unpacked = unpack(c, packed, deflated, most=PEEK)
    else:
        unpacked = unpack(c, packed, deflated)
    inner = blob.inside(name, memoryview(unpacked.data), trust)
    if unpacked.data:
        c.look(inner)
    if unpacked.why and trust is not Trust.UNLIKELY:
        c.unreadable(inner, None, unpacked.why)


# ---------------------------------------------------------------- an archive that is refused


def _look_refused(c: Collector, blob: Blob) -> None:
    """Look at every place where one of the headers in `blob` says that a record begins."""
    names: dict[tuple[int, int], list[_Place]] = {}
    for place in _places(c, blob):
        names.setdefault((place.begin, place.method), []).append(place)
        if len(names) >= RECORDS_MAX:
            c.unreadable(blob, place.begin, f"over {RECORDS_MAX} records")
            break
    for places in names.values():
        end = max(place.end for place in places)
        best = max(places, key=lambda place: trust_of_name(place.name))
        _look_record(c, blob, best._replace(end=end))


def _places(c: Collector, blob: Blob) -> Iterator[_Place]:
    """Yield what local headers say, and what directory entries say of the local headers that they point to."""
    view = blob.view
    stop = min(len(view), max(c.swept, 0))
    signatures = ((at + m.start(), bytes(m[0])) for piece, at in c.pieces(blob, 0, stop, 3)
                  for m in _SIGNATURES.finditer(piece))  # fmt: skip
    found = list(islice(signatures, 2 * RECORDS_MAX))
    c.swept -= stop
    if stop < len(view):
        c.unreadable(blob, stop, f"the last {len(view) - stop} bytes were not searched for records")
    starts = {0, archive_start(view) or 0}
    offsets = [at for at, _ in found]
    for number, (at, signature) in enumerate(found):
        after = offsets[number + 1] if number + 1 < len(found) else len(view)
        if signature == _LOCAL:
            yield from _local(view, at, after)
        else:
            for start in starts:
                yield from _central(view, at, start, offsets)


def _local(view: memoryview, at: int, after: int) -> Iterator[_Place]:
    """The record whose local header is at `at`, by that header; `after` is where the next header is."""
    if at + 30 > len(view):
        return
    method, size, name_size, extra_size = struct.unpack_from("<8xH8xI4xHH", view, at)
    begin = at + 30 + name_size + extra_size
    if begin < len(view):
        name = bytes(view[at + 30 : at + 30 + name_size]).decode("utf-8", "backslashreplace")
        yield _Place(begin, min(max(begin + size, after), len(view)), method, name)


def _central(view: memoryview, at: int, start: int, offsets: list[int]) -> Iterator[_Place]:
    """The record that the directory entry at `at` points to, by that entry, whatever stands there."""
    if at + 46 > len(view):
        return
    method, packed, size, name_size, extra_size, offset = struct.unpack_from("<10xH8xIIHH10xI", view, at)
    extra = bytes(view[at + 46 + name_size : at + 46 + name_size + extra_size])
    size, packed, offset = _wide(extra, size, packed, offset)
    if offset + start >= len(view):
        return
    following = bisect_right(offsets, offset + start)
    after = offsets[following] if following < len(offsets) else len(view)
    name = bytes(view[at + 46 : at + 46 + name_size]).decode("utf-8", "backslashreplace")
    for place in _local(view, offset + start, after):
        yield _Place(place.begin, min(max(place.begin + packed, place.end), len(view)), method, name)


def _wide(extra: bytes, *values: int) -> list[int]:
    """Replace values that are all ones by those of the zip64 field."""
    wide = b""
    while len(extra) >= 4:
        kind, nbytes = struct.unpack_from("<HH", extra)
        wide = extra[4 : 4 + nbytes] if kind == 1 else wide
        extra = extra[4 + nbytes :]
    out = []
    for value in values:
        if value == 0xFFFFFFFF and len(wide) >= 8:
            value, wide = int.from_bytes(wide[:8], "little"), wide[8:]
        out.append(value)
    return out
