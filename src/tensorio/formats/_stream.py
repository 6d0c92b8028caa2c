"""The stream that ``torch.save`` wrote before zip, wherever it begins: in a file, or in the bytes of a pickle.

Pickles and storages, back to back, without padding::

    pickle   0x1950a86a20f9469cfc6c
    pickle   1001
    pickle   {"protocol_version": 1001, "little_endian": bool, "type_sizes": {...}}
    pickle   the object
    pickle   [storage key, ...]
    per key  i64 number of elements, then their bytes

Numbers and elements are little-endian, whatever ``little_endian`` says; it tells of the writer's machine.
Source: ``torch/serialization.py`` of 2.13, ``_legacy_save`` and ``_legacy_load``.
"""

from __future__ import annotations

import contextlib
import struct
from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from tensorio import _unpickler
from tensorio.errors import HeaderError, TensorIOError, TruncatedError, UnsupportedError, error_context, escaped
from tensorio.formats._base import StoredRecord
from tensorio.pickles import Records, Rules

if TYPE_CHECKING:
    from tensorio.pickles import Loaded, Mentioned

__all__ = ["Stream", "is_stream", "pickle_at", "read_count", "read_stream", "require_reference_stream"]

_MAGIC = bytes.fromhex("6cfc9c46f9206aa85019")
# The first pickle by protocol (2.13 writes 2 if not told otherwise), as CPython's pickler spells it.
_BEGINNINGS = (
    b"\x80\x02\x8a\x0a" + _MAGIC + b".",
    b"\x80\x03\x8a\x0a" + _MAGIC + b".",
    b"\x80\x04\x95\x0d\0\0\0\0\0\0\0\x8a\x0a" + _MAGIC + b".",
    b"\x80\x05\x95\x0d\0\0\0\0\0\0\0\x8a\x0a" + _MAGIC + b".",
    b"L119547037146038801333356L\n.",
)
_VERSION = 1001
_REFERENCE = _BEGINNINGS[0] + (
    b"\x80\x02M\xe9\x03."
    b"\x80\x02}q\0(X\x10\0\0\0protocol_versionq\x01M\xe9\x03X\x0d\0\0\0little_endianq\x02\x88"
    b"X\x0a\0\0\0type_sizesq\x03}q\x04(X\x05\0\0\0shortq\x05K\x02X\x03\0\0\0intq\x06K\x04X\x04\0\0\0longq\x07K\x04uu."
)
_COUNT = 8  # bytes


class Stream(NamedTuple):
    """What one stream holds; no storage was touched.

    Attributes
    ----------
    loaded : Loaded
        The object, with `Leaf` at the tensors. Rows count records as storages, and offsets from their record.
    start : int
        First byte of the object's pickle.
    offsets : array of int64
        Where each storage that the object mentions begins.
    end : int
        First byte behind the last storage.
    """

    loaded: Loaded
    start: int
    offsets: array[int]
    end: int

    def known(self, storage: int) -> Records:
        """The records as those of a second run, in the storage of this index."""
        mentioned, extents = self.loaded.mentioned, array("q", [storage]) * (3 * len(self.offsets))
        extents[1::3] = self.offsets if storage >= 0 else array("q", bytes(8 * len(mentioned)))
        extents[2::3] = array("q", [m.nbytes for m in mentioned])
        return Records(array("q"), {m.key: i for i, m in enumerate(mentioned)}, extents)

    def records(self) -> list[StoredRecord]:
        """The storages as the object mentions them, each with its place in the buffer."""
        pairs = zip(self.loaded.mentioned, self.offsets, strict=True)
        return [StoredRecord(m.key, 0, offset, m.nbytes, None, m.nbytes) for m, offset in pairs]


def is_stream(head: bytes) -> bool:
    """Tell by the first pickle, which has one value and few spellings."""
    return head.startswith(_BEGINNINGS)


def read_stream(view: memoryview, rules: Rules, *, first_row: int = 0, first_dim: int = 0) -> Stream:
    """Read the pickles of a stream at the start of a buffer, and find its storages.

    Raises
    ------
    HeaderError
        A storage that the object mentions and the stream does not list, one that it lists twice or does not mention,
        or one whose number of elements is another than the object says.
    TruncatedError
        The stream ends early.
    UnsafePickleError
        The object names what is not allowed.
    """
    begin = next((b for b in _BEGINNINGS if view[: len(b)] == b), None)
    if begin is None:
        raise HeaderError("expected the magic number of a legacy torch file, found other bytes", offset=0)
    version, at = pickle_at(view, len(begin), "protocol version")
    if type(version) is not int or version != _VERSION:
        raise UnsupportedError(
            f"expected protocol version {_VERSION}, found {escaped(version)}", record="protocol version", offset=at
        )
    info, start = pickle_at(view, at, "system info")
    if type(info) is not dict:
        raise HeaderError("expected a dict of system info", record="system info", offset=at)
    with located(start, "object"):
        loaded = _unpickler.loads(
            view, None, rules=rules, start=start, first_row=first_row, first_dim=first_dim
        )  # fmt: skip
    keys, at = pickle_at(view, loaded.end, "list of storage keys")
    offsets, end = _storages(view, at, loaded.mentioned, _order(keys, loaded))
    return Stream(loaded, start, offsets, end)


def pickle_at(view: memoryview, start: int, part: str) -> tuple[Any, int]:
    """Read one of the pickles around the object, which hold plain values: the value, and the first byte behind it."""
    with located(start, part):
        loaded = _unpickler.loads(view, Records.none(), start=start)
    return loaded.obj, loaded.end


@contextlib.contextmanager
def located(start: int, part: str) -> Iterator[None]:
    """Name the part that an error is in, and count its offset from the start of the file."""
    with error_context(record=part):
        try:
            yield
        except TensorIOError as error:
            if error.offset is not None:
                error.offset += start
            raise


def _order(keys: object, loaded: Loaded) -> list[int]:
    """The numbers of the mentioned storages in the order in which the stream lists them: all, and each once."""
    if type(keys) is not list:
        raise _wrong_list(f"expected a list, found {type(keys).__name__}", loaded)
    numbers = {mentioned.key: i for i, mentioned in enumerate(loaded.mentioned)}
    order = []
    for key in keys:
        text = key.decode("latin-1") if type(key) is bytes else key
        number = numbers.pop(text, None) if type(text) is str else None
        if number is None:
            known = any(mentioned.key == text for mentioned in loaded.mentioned)
            what = "it lists storage {} twice" if known else "it lists {}, which the object does not mention"
            raise _wrong_list(what.format(escaped(text)), loaded)
        order.append(number)
    if numbers:
        one = escaped(next(iter(numbers)))
        raise _wrong_list(f"{len(numbers)} storages that the object mentions are not in it, such as {one}", loaded)
    return order


def _wrong_list(message: str, loaded: Loaded) -> HeaderError:
    return HeaderError(message, record="list of storage keys", offset=loaded.end)


def _storages(view: memoryview, at: int, mentioned: list[Mentioned], order: list[int]) -> tuple[array[int], int]:
    """Where each storage is, by its number; each is as long as the object says, and inside the buffer."""
    offsets, total, unpack = array("q", bytes(8 * len(order))), len(view), struct.Struct("<q").unpack_from
    for i, number in enumerate(order):
        key, nbytes, itemsize, _ = mentioned[number]
        if at + _COUNT > total or unpack(view, at)[0] * itemsize != nbytes:
            _wrong_count(view, at, mentioned[number])
        at += _COUNT
        if at + nbytes > total:
            due = at - _COUNT + sum(mentioned[other].nbytes + _COUNT for other in order[i:])
            raise TruncatedError(
                f"expected a storage of {nbytes} bytes, found {total - at}; {due - total} of {due} bytes are missing "
                "in all", record=key, offset=at,
            )  # fmt: skip
        offsets[number] = at
        at += nbytes
    return offsets, at


def _wrong_count(view: memoryview, at: int, storage: Mentioned) -> NoReturn:
    with error_context(record=storage.key):
        count = read_count(view, at)
    raise HeaderError(
        f"expected {storage.nbytes // storage.itemsize} elements of {storage.itemsize} bytes, as the object says, "
        f"found a storage of {count}", record=storage.key, offset=at,
    )  # fmt: skip


def read_count(view: memoryview, at: int) -> int:
    """Read the number of elements in front of a storage."""
    if len(view) - at < _COUNT:
        raise TruncatedError(
            f"expected a number of {_COUNT} bytes in front of a storage, found {len(view) - at} bytes", offset=at
        )
    count = int.from_bytes(view[at : at + _COUNT], "little", signed=True)
    if count < 0:
        raise HeaderError(f"expected a number of elements, found {count}", offset=at)
    return count


def require_reference_stream(view: memoryview, stream: Stream) -> None:
    """Refuse a stream that torch 2.13 would not write by default: header, order of the storages, bytes behind."""
    if view[: len(_REFERENCE)] != _REFERENCE:
        raise HeaderError("strict: expected the header of torch 2.13's legacy files", offset=0)
    if bytes(view[stream.start : stream.start + 2]) != b"\x80\x02":
        raise HeaderError("strict: expected an object pickled by protocol 2", record="object", offset=stream.start)
    names = [record.name for record in sorted(stream.records(), key=lambda record: record.offset)]
    if names != sorted(names):
        raise HeaderError("strict: expected storages in the order of their keys", offset=stream.loaded.end)
    if stream.end != len(view):
        raise HeaderError(f"strict: expected the end of the file, found {len(view) - stream.end} more bytes",
                          offset=stream.end)  # fmt: skip
