r"""torch zip: what ``torch.save`` has written since 1.6.

A zip archive (`tensorio.formats._zip`) whose names all begin with one folder::

    PREFIX/data.pkl               the object, as a pickle of protocol 2
    PREFIX/.format_version        "1"                              (since 2.7)
    PREFIX/.storage_alignment     "64"                             (since 2.7)
    PREFIX/byteorder              "little" or "big"                (since 2.1)
    PREFIX/data/KEY               one storage each, raw; 1.4, where asked for this format, has tensors/KEY
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
from tensorio.errors import HeaderError, LimitError, UnsupportedError, error_context
from tensorio.formats._base import Opened, OpenOptions, SaveOptions, naming_budget
from tensorio.formats._torch_archive import MAX_PICKLE, TorchArchive
from tensorio.formats._zip import ZipPlan
from tensorio.formats._zip_kind import LOCAL_HEADER, OTHER, kind
from tensorio.pickles import Loaded, Records
from tensorio.plan import Payloads
from tensorio.tensors import Table

if TYPE_CHECKING:
    from tensorio.plan import Source
    from tensorio.storage.base import Storage

NAME = "torch_zip"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
OPENED_BY_SUFFIX = ()

PICKLE = "data.pkl"
SERIALIZATION_ID = ".data/serialization_id"
ID_DIGITS = 40
OLD_FOLDER = "tensors/"
HEAD = (PICKLE, ".format_version", ".storage_alignment", "byteorder")  # before the storages, as 2.13 orders them
TAIL = ("version", SERIALIZATION_ID)  # behind them


def recognises(head: bytes, storage: Storage) -> bool:
    """Tell by the names of the records; zip archives of no known kind are refused with a reason when opened."""
    return head[:4] == LOCAL_HEADER and kind(storage) in (NAME, OTHER, None)


class _Layout(TorchArchive):
    """The parts of an archive that a torch file has."""

    def __init__(self, storage: Storage, options: OpenOptions) -> None:
        super().__init__(storage, options, "torch.save", "data/")
        self.folder = "data/"
        if not self.keys and max(self.numbers, default=-1) < 0 and self._is_old():
            self.folder = OLD_FOLDER
            self.numbers, self.keys, self.others = self.archive.names(self.full(OLD_FOLDER))
        self.pickle_record = self.require(PICKLE)
        if f"{self.prefix}/constants.pkl" in self.others:
            raise HeaderError("expected a file of torch.save, found one of torch.jit.save: its format is 'torchscript'")
        self.check_version()
        self.swapped = self.is_swapped()
        if options.strict:
            self._require_reference_layout()

    def _is_old(self) -> bool:
        return any(name.startswith(self.full(OLD_FOLDER)) for name in self.others)

    def _require_reference_layout(self) -> None:
        """Refuse an archive that torch 2.13 would have laid out otherwise."""
        align = self.text(".storage_alignment") or "64"
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
                at = min(start, view.nbytes)  # unpacked records would reach further than the file
                raise HeaderError("strict: expected the records of torch.save 2.13", record=r.name, offset=at)
        if view[directory:] != _core.zip_tail(placed, blob, directory):
            at = min(directory, view.nbytes)
            raise HeaderError("strict: expected the central directory of torch.save 2.13", offset=at)

    # ------------------------------------------------------------- contents

    def pickle(self) -> memoryview | bytes:
        """The object's pickle; its CRC is always checked, since all of it is read anyway."""
        return self.archive.checked(self.pickle_record, MAX_PICKLE)

    def run(self, leases: list[Any] | None, decode: Any = None, wanted: set[int] | None = None) -> Loaded:
        """Run the pickle machine over data.pkl."""
        from tensorio import _unpickler

        with error_context(record=f"{self.prefix}/{PICKLE}"):
            return _unpickler.loads(
                self.pickle(),
                Records(self.numbers, self.keys, self.extents(self.swapped)),
                leases=leases, decode=decode, wanted=wanted, rules=self.options.rules(),
                first_row=self.options.first_row, first_dim=self.options.first_dim,
            )  # fmt: skip


def layout_of(storage: Storage, options: OpenOptions) -> _Layout:
    """Return the records of a file; none is read, but for the notes among them."""
    return _Layout(storage, options)


def open(storage: Storage, options: OpenOptions) -> Opened:
    """Read the directory and the pickle; touches at most one page per record."""
    layout = _Layout(storage, options)
    tree, rows, dims, *_ = layout.run(None)
    decoded = layout.decoded(layout.swapped)
    decoded.place(rows)
    return Opened(
        NAME,
        Table([], rows, dims),
        [storage, *decoded.storages],
        tree=tree,
        flat=False,
        budget=naming_budget(layout.size(layout.pickle_record)),
        records=lambda: iter(layout.archive.records((layout.full(layout.folder),))),
        fill=lambda wanted: _filled(layout, storage, wanted),
    )


def _filled(layout: _Layout, storage: Storage, wanted: set[int] | None) -> object:
    return layout.run([storage.lease()], layout.decoded(layout.swapped).lease, wanted).obj


def load(storage: Storage, options: OpenOptions) -> object:
    """Return what was saved, with arrays at the tensors."""
    return _filled(_Layout(storage, options), storage, None)


def plan(obj: object, options: SaveOptions) -> ZipPlan:
    """Lay out what ``torch.save`` would write for `obj`."""
    from tensorio import _pickler
    from tensorio.formats._items import c_order, native

    payloads = Payloads()
    data, _, payloads.addresses, payloads.sizes, payloads.keep, made, left_out = _pickler.dumps(
        obj, compact=options.compact, exact=options.exact, fetch=options.fetch
    )
    payloads.makers = {i: partial(c_order, odd, native) for i, odd in made.items()}
    plan = _archive(data, payloads, options)
    plan.left_out = left_out
    return plan


def plan_tree(
    tree: object,
    leaf: Callable[[Any], tuple[Any, ...]],
    source: Callable[[int, int, int], Source],
    options: SaveOptions,
    gathered: Callable[[Any], Source] | None = None,
) -> ZipPlan:
    """Lay out a tree whose tensors are extents of other storages.

    Parameters
    ----------
    leaf : callable
        See `tensorio._pickler.Pickler`.
    source : callable
        ``source(storage, offset, nbytes)`` returns the bytes of an extent.
    gathered : callable, optional
        ``gathered(leaf)`` returns the elements of a strided tensor in C order; needed with ``options.compact``.
    """
    from tensorio import _pickler

    try:
        data, spaces, offsets, sizes, _, made, left_out = _pickler.dumps(tree, leaf, compact=options.compact)
    except RecursionError:  # as in torch.save; but this tree is out of a file
        raise LimitError("the saved object has too many levels to be written again") from None
    payloads = Payloads()
    for i, (space, offset, nbytes) in enumerate(zip(spaces, offsets, sizes, strict=True)):
        payloads.add(gathered(made[i]) if gathered and i in made else source(space, offset, nbytes), nbytes)
    plan = _archive(data, payloads, options)
    plan.left_out = left_out
    return plan


def _archive(data: bytes, payloads: Payloads, options: SaveOptions) -> ZipPlan:
    if options.metadata:
        raise UnsupportedError("a torch file has no place for metadata=; put it into the object that is saved")
    if options.digests:
        raise UnsupportedError(
            "a torch file has a CRC-32 of each storage and no place for digests=; manifest=True hashes the file"
        )
    align = _core.ZIP_ALIGN if options.align is None else options.align
    if not 1 <= align <= _core.ZIP_ALIGN_MAX:
        raise ValueError(f"expected align from 1 to {_core.ZIP_ALIGN_MAX} bytes, found {align}")
    prefix = prefix_for(options.name)
    texts = (data, b"1", b"%d" % align, sys.byteorder.encode())
    head = [(f"{prefix}/{name}", text) for name, text in zip(HEAD, texts, strict=True)]
    tail = [(f"{prefix}/{name}", text) for name, text in zip(TAIL, (b"3\n", bytes(ID_DIGITS)), strict=True)]
    return ZipPlan(head, f"{prefix}/data/", payloads, tail, align, last=partial(serialization_id, data))


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
