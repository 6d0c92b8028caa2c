"""Plain pickles that hold arrays: of NumPy, of joblib, of torch tensors that were pickled without ``torch.save``.

One pickle of protocol 0 to 5; bytes behind it may be another. Arrays whose bytes lie in the pickle as they are become
views of the file; those of other byte orders and of protocols before 3 are made when it is opened. A torch tensor's
storage lies in it as a whole file of its own (`tensorio.formats._stream`), and is used where it is.

A pickle has no signature of its own: by content, only those are taken that mention an array near their beginning; by
name (``.pkl`` and the like), any that can be read. ``format="pickle"`` takes all.

Source: CPython's ``Lib/pickletools.py``; NumPy's ``ndarray.__reduce__``; joblib's ``numpy_pickle.py``;
``torch/storage.py`` of 2.13, ``__reduce__``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tensorio import _unpickler
from tensorio.dtypes import DTYPES
from tensorio.errors import HeaderError, UnsupportedError
from tensorio.formats._base import Opened, OpenOptions, SaveOptions, StoredRecord, naming_budget
from tensorio.formats._decoded import BIG_ENDIAN_HOST
from tensorio.formats._stream import located, read_stream
from tensorio.pickles import Records
from tensorio.storage.base import MemoryStorage
from tensorio.tensors import ROW, Table

if TYPE_CHECKING:
    from tensorio.pickles import Loaded
    from tensorio.plan import LaidOut
    from tensorio.storage.base import Storage

NAME = "pickle"
SUFFIXES = ()
OPENED_BY_SUFFIX = (".pkl", ".pickle", ".p", ".joblib", ".sav")

# What a pickle of arrays begins with, behind its protocol: a container, a mark, or the name of a class.
_FIRST = (b"}", b"]", b"(", b")", b"c", b"\x8c", b"\x8f")
_MENTIONS = (b"numpy", b"joblib", b"_load_from_bytes")
_FRAME = 9  # bytes of the opcode FRAME and its argument


def recognises(head: bytes, storage: Storage) -> bool:
    """Tell by the protocol, the kind of the first object, and an array's class among the first bytes."""
    if head[:1] != b"\x80" or head[1:2] not in (b"\2", b"\3", b"\4", b"\5"):
        return False
    first = head[2 + _FRAME :] if head[2:3] == b"\x95" else head[2:]
    return first.startswith(_FIRST) and any(word in head for word in _MENTIONS)


class _Storages:
    """The storages of one run: the file, and bytes that had to be made of it."""

    def __init__(self, storage: Storage, options: OpenOptions, leased: bool) -> None:
        self.all = [storage]
        self.leases = [storage.lease()] if leased else None
        self._options = options

    def made(self, data: Any) -> int:
        """Take the bytes of an array that are not in the file as they stand: other byte order, older protocols."""
        made = MemoryStorage(data, writable=self._options.writable)
        self.all.append(made)
        if self.leases is not None:
            self.leases.append(made.lease())
        return len(self.all) - 1

    def nested(self, place: int | bytes, nbytes: int) -> tuple[str, int, int, int]:
        """(dtype, storage, offset, nbytes) of a storage that was saved as a file of its own."""
        if BIG_ENDIAN_HOST:
            raise UnsupportedError("a torch tensor in a plain pickle, on a big-endian machine")
        if isinstance(place, int):
            dtype, offset, count = _nested_storage(self.all[0].view(), place, nbytes, self._options)
            return dtype, 0, offset, count
        dtype, offset, count = _nested_storage(memoryview(place), 0, len(place), self._options)
        return dtype, self.made(bytearray(place[offset : offset + count])), 0, count


def _nested_storage(view: memoryview, start: int, nbytes: int, options: OpenOptions) -> tuple[str, int, int]:
    with located(start, "nested torch storage"):
        stream = read_stream(view[start : start + nbytes], options.rules(legacy=True))
        rows = stream.loaded.rows
        if len(rows) != ROW or len(stream.offsets) != 1 or not isinstance(stream.loaded.obj, _unpickler.Leaf):
            raise UnsupportedError("expected one storage, found a file of other objects", offset=stream.start)
        return DTYPES[rows[0]].name, start + stream.offsets[0], stream.loaded.mentioned[0].nbytes


def _run(storages: _Storages, options: OpenOptions, wanted: set[int] | None = None) -> Loaded:
    """Run the pickle machine over the file."""
    storage = storages.all[0]
    loaded = _unpickler.loads(
        storage.view(), Records.none(), leases=storages.leases, wanted=wanted, rules=options.rules(),
        own_storage=0, made_storage=storages.made, nested_storage=storages.nested,
        first_row=options.first_row, first_dim=options.first_dim,
    )  # fmt: skip
    if options.strict and loaded.end != storage.nbytes:
        raise HeaderError(f"strict: expected the end of the file, found {storage.nbytes - loaded.end} more bytes",
                          offset=loaded.end)  # fmt: skip
    storage.used = loaded.end
    return loaded


def open(storage: Storage, options: OpenOptions) -> Opened:
    """Read the pickle; the bytes of arrays that lie in it as they stand are not touched."""
    storages = _Storages(storage, options, leased=False)
    loaded = _run(storages, options)
    return Opened(
        NAME,
        Table([], loaded.rows, loaded.dims),
        storages.all,
        tree=loaded.obj,
        flat=False,
        budget=naming_budget(loaded.end),
        records=lambda: _records(loaded),
        fill=lambda wanted: _run(_Storages(storage, options, leased=True), options, wanted).obj,
    )


def _records(loaded: Loaded) -> Iterator[StoredRecord]:
    """The bytes of arrays that are in the file, each once; they have no names."""
    rows = loaded.rows
    places = {(rows[at + 5], rows[at + 6]) for at in range(0, len(rows), ROW) if rows[at + 4] == 0}
    for offset, nbytes in sorted(places):
        yield StoredRecord(f"array at {offset}", 0, offset, nbytes, None, nbytes)


def load(storage: Storage, options: OpenOptions) -> object:
    """Return what was pickled, with arrays at the arrays."""
    return _run(_Storages(storage, options, leased=True), options).obj


def plan(obj: object, options: SaveOptions) -> LaidOut:
    """Refuse: plain pickles are not written."""
    raise UnsupportedError("plain pickles are read only; save as .pt (format 'torch_zip') instead")
