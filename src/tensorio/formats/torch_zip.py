r"""torch zip: what ``torch.save`` has written since 1.6.

A zip archive (`tensorio.formats._zip`) whose names all begin with one folder::

    PREFIX/data.pkl               the object, as a pickle of protocol 2
    PREFIX/.format_version        "1"                              (since 2.7)
    PREFIX/.storage_alignment     "64"                             (since 2.7)
    PREFIX/byteorder              "little" or "big"                (since 2.1)
    PREFIX/data/KEY               one storage each, raw
    PREFIX/version                "3\n"
    PREFIX/.data/serialization_id 40 digits                        (since 2.1)

Source: torch 2.13, checked against its own output; older layouts against files
of their time.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from tensorio import _core
from tensorio.dtypes import DTYPES
from tensorio.errors import HeaderError, UnsupportedError, error_context, escaped
from tensorio.formats._base import Opened, OpenOptions, SaveOptions
from tensorio.formats._zip import Archive, ZipPlan
from tensorio.pickles import Loaded, Records
from tensorio.plan import Payloads
from tensorio.storage import LazyStorage
from tensorio.tensors import ROW, Table

if TYPE_CHECKING:
    from tensorio.plan import Source
    from tensorio.storage import Storage

NAME = "torch_zip"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
OPENED_BY_SUFFIX = ()

LOCAL_HEADER = b"PK\x03\x04"
PICKLE = "data.pkl"
SERIALIZATION_ID = ".data/serialization_id"
ID_DIGITS = 40
HEAD = (PICKLE, ".format_version", ".storage_alignment", "byteorder")  # before the storages, as 2.13 orders them
TAIL = ("version", SERIALIZATION_ID)  # behind them
VERSIONS = range(1, 11)  # what torch's reader takes
# What naming the tensors may cost, in bytes: this much, and so much per byte of the pickle (half of promise P3).
NAMES_FIXED = 24 << 20
NAMES_PER_BYTE = 16
# What data.pkl may unpack to if it is deflated: real ones are far below 1% of this.
MAX_PICKLE = 64 << 20


def recognises(head: bytes, storage: Storage) -> bool:
    """Tell by the first record's signature; other zip archives are refused with a reason when opened."""
    return head[:4] == LOCAL_HEADER


class _Layout:
    """The parts of an archive that a torch file has."""

    def __init__(self, storage: Storage, options: OpenOptions) -> None:
        self.storage = storage
        self.options = options
        self.archive = Archive(storage)
        self.prefix = self._find_prefix()
        self.numbers, self.keys, self.others = self.archive.names(f"{self.prefix}/data/")
        self.pickle_record = self._require(PICKLE)
        self._check_version()
        self.swapped = self._byteorder() == "big"
        if options.strict:
            self._require_reference_layout()

    def _find_prefix(self) -> str:
        if not self.archive.rows:
            raise HeaderError("expected the records of torch.save, found an empty zip archive")
        name = self.archive.name(0)
        prefix, slash, _ = name.partition("/")
        if not slash:
            raise HeaderError(
                f"expected records in one folder, as torch.save writes them, found {escaped(name)} at the top: "
                "this is some other kind of zip archive"
            )
        return prefix

    def _require(self, name: str) -> int:
        record = self.others.get(f"{self.prefix}/{name}")
        if record is None:
            raise HeaderError(
                f"expected a record {escaped(f'{self.prefix}/{name}')}, found none: this zip archive was not "
                "written by torch.save"
            )
        return record

    def _text(self, name: str) -> str | None:
        """The contents of a small side record; None if there is none."""
        record = self.others.get(f"{self.prefix}/{name}")
        if record is None:
            return None
        with error_context(record=f"{self.prefix}/{name}"):
            data = bytes(self.archive.checked(record, 64))
            if len(data) > 64 or not data.isascii():
                raise HeaderError(f"expected a short ASCII text, found {len(data)} bytes")
            return data.decode("ascii")

    def _check_version(self) -> None:
        text = self._text("version")
        if text is None:
            return  # torch always writes one; other writers forget it, and nothing depends on it
        if not text.strip().isdecimal() or int(text) not in VERSIONS:
            raise UnsupportedError(
                f"expected a version from 1 to 10, found {escaped(text)}", record=f"{self.prefix}/version"
            )

    def _byteorder(self) -> str:
        text = self._text("byteorder")
        if text is None:
            return "little"  # so it is in files before 2.1
        if text not in ("little", "big"):
            raise HeaderError(f"expected 'little' or 'big', found {escaped(text)}", record=f"{self.prefix}/byteorder")
        return text

    def _require_reference_layout(self) -> None:
        """Refuse an archive that torch 2.13 would have laid out otherwise."""
        align = self._text(".storage_alignment") or "64"
        if not align.isdecimal() or not 1 <= int(align) <= _core.ZIP_ALIGN_MAX:
            raise HeaderError(f"strict: expected a .storage_alignment of 1 to {_core.ZIP_ALIGN_MAX}")
        records = self.archive.records()
        sizes = array("q", [r.size for r in records[len(HEAD) : -len(TAIL)]])
        head, tail = ([(f"{self.prefix}/{n}".encode(), r.size) for n, r in zip(names, part, strict=False)]
                      for names, part in ((HEAD, records), (TAIL, records[-len(TAIL) :])))  # fmt: skip
        placed, blob, directory = _core.zip_place(head, f"{self.prefix}/data/".encode(), sizes, tail, int(align))
        view = self.storage.view()
        for i, r in enumerate(records):
            crc = _core.zip_record(self.archive.rows, i)[3]
            start, data, end = _core.zip_placed(placed, i)
            behind = _core.zip_descriptor(placed, i, crc)
            if view[start:data] != _core.zip_local(placed, blob, i) or view[data + r.size : end] != behind:
                raise HeaderError("strict: expected the records of torch.save 2.13", record=r.name, offset=start)
        if view[directory:] != _core.zip_tail(placed, blob, directory):
            raise HeaderError("strict: expected the central directory of torch.save 2.13", offset=directory)

    # ------------------------------------------------------------- contents

    def pickle(self) -> memoryview | bytes:
        """The object's pickle; its CRC is always checked, since all of it is read anyway."""
        return self.archive.checked(self.pickle_record, MAX_PICKLE)

    def pickle_size(self) -> int:
        """Bytes of the pickle, unpacked."""
        return _core.zip_record(self.archive.rows, self.pickle_record)[2]

    def extents(self) -> array[int]:
        """(storage, offset, nbytes) per record; storage -1 where the bytes are not raw: deflated, or swapped."""
        extents = _core.zip_extents(self.archive.rows)
        if self.swapped:
            for i in range(0, len(extents), 3):
                extents[i], extents[i + 1] = -1, 0
        return extents

    def run(self, leases: list[Any] | None, decode: Any = None, wanted: set[int] | None = None) -> Loaded:
        """Run the pickle machine over data.pkl."""
        from tensorio import _unpickler

        with error_context(record=f"{self.prefix}/{PICKLE}"):
            return _unpickler.loads(
                self.pickle(),
                Records(self.numbers, self.keys, self.extents()),
                leases=leases, decode=decode, wanted=wanted, rules=self.options.rules(),
                first_row=self.options.first_row, first_dim=self.options.first_dim,
            )  # fmt: skip

    def decoded(self, record: int, swap: int) -> Storage:
        """A storage for a record that is not raw in the file, made on first use."""
        size = _core.zip_record(self.archive.rows, record)[2]

        def make() -> memoryview | bytes | bytearray:
            data = self.archive.read(record)
            return byteswapped(data, swap) if swap > 1 else data

        if not self.options.writable:
            return LazyStorage(size, make)
        return LazyStorage(size, lambda: bytearray(make()), writable=True)


class _Decoded:
    """The storages of records that are not raw, by record and unit of swapping."""

    def __init__(self, layout: _Layout, first: int) -> None:
        self.layout = layout
        self.first = first
        self.storages: list[Storage] = []
        self._index: dict[tuple[int, int], int] = {}

    def index(self, record: int, dtype: int) -> int:
        """The storage index for a record seen as elements of `dtype`."""
        swap = DTYPES[dtype].swap if self.layout.swapped else 1
        found = self._index.get((record, swap))
        if found is None:
            found = self._index[record, swap] = self.first + len(self.storages)
            self.storages.append(self.layout.decoded(record, swap))
        return found

    def lease(self, record: int, dtype: int) -> Any:
        """What the pickle machine asks for."""
        return self.storages[self.index(record, dtype) - self.first].lease()


def byteswapped(data: memoryview | bytes, unit: int) -> memoryview:
    """Return a copy with the bytes of each `unit` bytes reversed."""
    import numpy as np

    return memoryview(np.frombuffer(data, f"u{unit}").byteswap().view(np.uint8))  # type: ignore[arg-type]


def open(storage: Storage, options: OpenOptions) -> Opened:
    """Read the directory and the pickle; touches at most one page per record."""
    layout = _Layout(storage, options)
    tree, rows, dims, *_ = layout.run(None)
    decoded = _Decoded(layout, 1)
    for at in range(4, len(rows), ROW):  # the storage column
        if rows[at] < 0:
            rows[at] = decoded.index(-1 - rows[at], rows[at - 4])
    return Opened(
        NAME,
        Table([], rows, dims),
        [storage, *decoded.storages],
        tree=tree,
        flat=False,
        budget=NAMES_FIXED + NAMES_PER_BYTE * layout.pickle_size(),
        records=lambda: iter(layout.archive.records()),
        fill=lambda wanted: _filled(layout, storage, wanted),
    )


def _filled(layout: _Layout, storage: Storage, wanted: set[int] | None) -> object:
    return layout.run([storage.lease()], _Decoded(layout, 1).lease, wanted).obj


def load(storage: Storage, options: OpenOptions) -> object:
    """Return what was saved, with arrays at the tensors."""
    return _filled(_Layout(storage, options), storage, None)


def plan(obj: object, options: SaveOptions) -> ZipPlan:
    """Lay out what ``torch.save`` would write for `obj`."""
    from tensorio import _pickler
    from tensorio.formats._items import c_order, native

    payloads = Payloads()
    data, _, payloads.addresses, payloads.sizes, payloads.keep, made = _pickler.dumps(obj, compact=options.compact)
    payloads.makers = {i: partial(c_order, odd, native) for i, odd in made.items()}
    return _archive(data, payloads, options)


def plan_tree(
    tree: object,
    leaf: Callable[[Any], tuple[Any, ...]],
    source: Callable[[int, int, int], Source],
    options: SaveOptions,
) -> ZipPlan:
    """Lay out a tree whose tensors are extents of other storages.

    Parameters
    ----------
    leaf : callable
        See `tensorio._pickler.Pickler`.
    source : callable
        ``source(storage, offset, nbytes)`` returns the bytes of an extent.
    """
    from tensorio import _pickler

    data, spaces, offsets, sizes, _, _ = _pickler.dumps(tree, leaf)
    payloads = Payloads()
    for space, offset, nbytes in zip(spaces, offsets, sizes, strict=True):
        payloads.add(source(space, offset, nbytes), nbytes)
    return _archive(data, payloads, options)


def _archive(data: bytes, payloads: Payloads, options: SaveOptions) -> ZipPlan:
    if options.metadata:
        raise UnsupportedError("a torch file has no place for metadata=; put it into the object that is saved")
    align = _core.ZIP_ALIGN if options.align is None else options.align
    if not 1 <= align <= _core.ZIP_ALIGN_MAX:
        raise ValueError(f"expected align from 1 to {_core.ZIP_ALIGN_MAX} bytes, found {align}")
    prefix = prefix_for(options.name)
    texts = (data, b"1", b"%d" % align, sys.byteorder.encode())
    head = [(f"{prefix}/{name}", text) for name, text in zip(HEAD, texts, strict=True)]
    tail = [(f"{prefix}/{name}", text) for name, text in zip(TAIL, (b"3\n", bytes(ID_DIGITS)), strict=True)]
    return ZipPlan(head, f"{prefix}/data/", payloads, tail, align, last=lambda crcs: serialization_id(data, crcs))


def prefix_for(name: str | None) -> str:
    """Return the folder that torch names an archive's records after: the stem of an ASCII file name.

    Raises
    ------
    ValueError
        A file name without a stem, which torch refuses, too.
    """
    if name is None or not name.isascii():
        return "archive"
    last = name.replace("\\", "/").rpartition("/")[2] if os.name == "nt" else name.rpartition("/")[2]
    stem = last.rpartition(".")[0] if "." in last else last
    if not stem:
        raise ValueError(f"invalid file name {name!r}: expected something in front of the last dot")
    return stem


def serialization_id(data: bytes, crcs: list[int]) -> bytes:
    """Return 40 digits that depend on the bytes of the records, and on nothing else.

    torch hashes the records' names in an order that its C++ library happens to
    have; here, the first half is over the pickle, whose bytes name the records.
    The second half is torch's: its fold of the records' CRCs. Readers only log
    the id.
    """
    return b"%020d%020d" % (_fold([_core.crc32(data), len(data)]), _fold(crcs))


def _fold(values: Iterable[int]) -> int:
    state = 0
    for value in values:
        state ^= (value + 0x9E3779B9 + (state << 6) + (state >> 2)) & 0xFFFFFFFFFFFFFFFF
        state &= 0xFFFFFFFFFFFFFFFF
    return state
