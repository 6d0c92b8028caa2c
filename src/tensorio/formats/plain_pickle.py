"""Plain pickles that hold arrays: of NumPy, of joblib, of torch tensors that were pickled without ``torch.save``.

One pickle of protocol 0 to 5; bytes behind it may be another. Arrays whose bytes lie in the pickle as they are become
views of the file; others are values of the tree, copied out. A torch tensor's storage lies in it as a whole file of
its own (`tensorio.formats._stream`), and is used where it is.

A pickle has no signature of its own: by content, only those are taken that mention an array near their beginning; by
name (``.pkl`` and the like), any that can be read. ``format="pickle"`` takes all.

Source: CPython's ``Lib/pickletools.py``; NumPy's ``ndarray.__reduce__``; joblib's ``numpy_pickle.py``;
``torch/storage.py`` of 2.13, ``__reduce__``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tensorio import _unpickler
from tensorio.dtypes import DTYPES
from tensorio.errors import HeaderError, UnsupportedError
from tensorio.formats._base import Opened, OpenOptions, SaveOptions, StoredRecord
from tensorio.formats._stream import located, read_stream
from tensorio.pickles import Records, Rules
from tensorio.tensors import ROW, Table

if TYPE_CHECKING:
    from tensorio.pickles import Loaded
    from tensorio.plan import Plan
    from tensorio.storage import Storage

NAME = "pickle"
SUFFIXES = ()
OPENED_BY_SUFFIX = (".pkl", ".pickle", ".p", ".joblib", ".sav")

# What a pickle of arrays begins with, behind its protocol: a container, a mark, or the name of a class.
_FIRST = (b"}", b"]", b"(", b")", b"c", b"\x8c", b"\x8f")
_MENTIONS = (b"numpy", b"joblib", b"_load_from_bytes")
_FRAME = 9  # bytes of the opcode FRAME and its argument

# What naming the tensors may cost, in bytes: this much, and so much per byte of the pickle (half of promise P3).
NAMES_FIXED = 24 << 20
NAMES_PER_BYTE = 16

BIG_ENDIAN_HOST = sys.byteorder == "big"


def recognises(head: bytes, storage: Storage) -> bool:
    """Tell by the protocol, the kind of the first object, and an array's class among the first bytes."""
    if head[:1] != b"\x80" or head[1:2] not in (b"\2", b"\3", b"\4", b"\5"):
        return False
    first = head[2 + _FRAME :] if head[2:3] == b"\x95" else head[2:]
    return first.startswith(_FIRST) and any(word in head for word in _MENTIONS)


def _run(storage: Storage, options: OpenOptions, leases: list[Any] | None, wanted: set[int] | None = None) -> Loaded:
    """Run the pickle machine over the file."""
    view = storage.view()

    def nested(offset: int, nbytes: int) -> tuple[str, int, int]:
        return _nested_storage(view, offset, nbytes, options.rules(legacy=True))

    loaded = _unpickler.loads(
        view, Records.none(), leases=leases, wanted=wanted, rules=options.rules(), own_storage=0,
        nested_storage=nested, first_row=options.first_row, first_dim=options.first_dim,
    )  # fmt: skip
    if options.strict and loaded.end != len(view):
        raise HeaderError(f"strict: expected the end of the file, found {len(view) - loaded.end} more bytes",
                          offset=loaded.end)  # fmt: skip
    storage.used = loaded.end
    return loaded


def _nested_storage(view: memoryview, offset: int, nbytes: int, rules: Rules) -> tuple[str, int, int]:
    """(dtype, offset, nbytes) of a storage that was saved as a file of its own into a part of the pickle."""
    if BIG_ENDIAN_HOST:
        raise UnsupportedError("a torch tensor in a plain pickle, on a big-endian machine")
    with located(offset, "nested torch storage"):
        stream = read_stream(view[offset : offset + nbytes], rules)
        rows = stream.loaded.rows
        if len(rows) != ROW or len(stream.records) != 1 or not isinstance(stream.loaded.obj, _unpickler.Leaf):
            raise UnsupportedError("expected one storage, found a file of other objects", offset=stream.start)
        record = stream.records[0]
        return DTYPES[rows[0]].name, offset + record.offset, record.nbytes


def open(storage: Storage, options: OpenOptions) -> Opened:
    """Read the pickle; the bytes of arrays that lie in it are not touched."""
    loaded = _run(storage, options, None)
    return Opened(
        NAME,
        Table([], loaded.rows, loaded.dims),
        [storage],
        tree=loaded.obj,
        flat=False,
        budget=NAMES_FIXED + NAMES_PER_BYTE * loaded.end,
        records=lambda: _records(loaded),
        fill=lambda wanted: _run(storage, options, [storage.lease()], wanted).obj,
    )


def _records(loaded: Loaded) -> Iterator[StoredRecord]:
    """The bytes of arrays, each once; they have no names."""
    rows = loaded.rows
    for offset, nbytes in sorted({(rows[at + 5], rows[at + 6]) for at in range(0, len(rows), ROW)}):
        yield StoredRecord(f"array at {offset}", 0, offset, nbytes, None, nbytes)


def load(storage: Storage, options: OpenOptions) -> object:
    """Return what was pickled, with arrays at the arrays."""
    return _run(storage, options, [storage.lease()]).obj


def plan(obj: object, options: SaveOptions) -> Plan:
    """Refuse: plain pickles are not written."""
    raise UnsupportedError("plain pickles are read only; save as .pt (format 'torch_zip') instead")
