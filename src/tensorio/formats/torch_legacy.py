"""Legacy torch files: what ``torch.save`` wrote before 1.6, and still does if asked for ``.tar``-like streams.

One stream (`tensorio.formats._stream`); bytes behind it may be another. Storages are used where they are, at whatever
byte that is: NumPy knows that such arrays are not aligned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorio import _unpickler
from tensorio.errors import UnsupportedError
from tensorio.formats._base import Opened, OpenOptions, SaveOptions, naming_budget
from tensorio.formats._decoded import BIG_ENDIAN_HOST, Decoded
from tensorio.formats._stream import Stream, is_stream, located, read_stream, require_reference_stream
from tensorio.tensors import ROW, Table

if TYPE_CHECKING:
    from tensorio.plan import LaidOut
    from tensorio.storage.base import Storage

NAME = "torch_legacy"
SUFFIXES = ()
OPENED_BY_SUFFIX = ()


def recognises(head: bytes, storage: Storage) -> bool:
    """Tell by the magic number."""
    return is_stream(head)


def open(storage: Storage, options: OpenOptions) -> Opened:
    """Read the pickles and find the storages; touches none but the number in front of each."""
    stream = _read(storage, options)
    decoded = _decoded(storage, stream, options.writable)
    rows = stream.loaded.rows
    for at in range(4, len(rows), ROW):  # the storage column; the offset is behind it, the dtype four before
        record = rows[at]
        rows[at] = decoded.index(record, rows[at - 4]) if BIG_ENDIAN_HOST else 0
        rows[at + 1] += 0 if BIG_ENDIAN_HOST else stream.offsets[record]
    return Opened(
        NAME,
        Table([], rows, stream.loaded.dims),
        [storage, *decoded.storages],
        tree=stream.loaded.obj,
        flat=False,
        budget=naming_budget(stream.loaded.end - stream.start),
        records=lambda: iter(stream.records()),
        fill=lambda wanted: _filled(storage, stream, options, wanted),
    )


def load(storage: Storage, options: OpenOptions) -> object:
    """Return what was saved, with arrays at the tensors; reads the object's pickle twice, since its end tells where."""
    return _filled(storage, _read(storage, options), options, None)


def _read(storage: Storage, options: OpenOptions) -> Stream:
    view = storage.view()
    stream = read_stream(view, options.rules(legacy=True), first_row=options.first_row, first_dim=options.first_dim)
    if options.strict:
        require_reference_stream(view, stream)
    storage.used = stream.end
    return stream


def _filled(storage: Storage, stream: Stream, options: OpenOptions, wanted: set[int] | None) -> object:
    with located(stream.start, "object"):
        return _unpickler.loads(
            storage.view(),
            stream.known(-1 if BIG_ENDIAN_HOST else 0),
            leases=[storage.lease()],
            decode=_decoded(storage, stream, options.writable).lease,
            wanted=wanted,
            rules=options.rules(legacy=True),
            start=stream.start,
            first_row=options.first_row,
            first_dim=options.first_dim,
        ).obj


def _decoded(storage: Storage, stream: Stream, writable: bool) -> Decoded:
    """The storages in the order of a big-endian host."""

    def size(record: int) -> int:
        return stream.loaded.mentioned[record].nbytes

    def read(record: int) -> memoryview:
        start = stream.offsets[record]
        return storage.view()[start : start + size(record)]

    def source(record: int) -> tuple[Storage, int, int]:
        return storage, stream.offsets[record], size(record)

    return Decoded(size, read, source, swapped=True, writable=writable)


def plan(obj: object, options: SaveOptions) -> LaidOut:
    """Refuse: nothing writes this format any more."""
    raise UnsupportedError("legacy torch files are read only; save as .pt (format 'torch_zip') instead")
