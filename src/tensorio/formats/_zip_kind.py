"""Which format a zip archive is of: one look at its directory, taken once for all who ask.

The names of the records tell. Nothing is validated here: a wrong guess only
picks the reader whose error is shown, and each checks all that it relies on.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from tensorio.storage.base import Storage

__all__ = ["LOCAL_HEADER", "MEMBERS", "OTHER", "kind"]

LOCAL_HEADER = b"PK\x03\x04"
_END, _END_SIZE, _COMMENT_MAX = b"PK\x05\x06", 22, 0xFFFF  # APPNOTE 4.3.16
_LOCATOR, _LOCATOR_SIZE = b"PK\x06\x07", 20  # APPNOTE 4.3.15
_ENTRY, _ENTRY_SIZE, _NAME_LENGTH = b"PK\x01\x02", 46, 28  # APPNOTE 4.3.12

OTHER = "other"  # an archive of no known kind

# Names that checkpoints go by inside an ordinary archive; what a member is, its first bytes decide.
MEMBERS = re.compile(rb"\.(?:pt|pth|pt2|ptl|bin|ckpt|safetensors|pkl|pickle|t7|tar|zip)", re.IGNORECASE)

_known: WeakKeyDictionary[Storage, str | None] = WeakKeyDictionary()


def kind(storage: Storage) -> str | None:
    """Return the name of the format whose records the archive has.

    Returns
    -------
    str or None
        `OTHER` if no name tells; None if there is no directory to be found.

    Notes
    -----
    Copies the directory, which is searched at the speed of memory; touches
    nothing else.
    """
    if storage not in _known:
        directory = _directory(storage.view())
        _known[storage] = None if directory is None else _kind(directory)
    return _known[storage]


def _directory(view: memoryview) -> bytes | None:
    """The central directory, where the end record says it is."""
    end = len(view) - _END_SIZE
    if end < 0:
        return None
    if view[end : end + 4] != _END:
        lowest = max(0, end - _COMMENT_MAX)
        found = bytes(view[lowest:]).rfind(_END, 0, len(view) - lowest - _END_SIZE + 4)
        if found < 0:
            return None
        end = lowest + found
    size, offset = struct.unpack_from("<II", view, end + 12)
    locator = end - _LOCATOR_SIZE
    if locator >= 0 and view[locator : locator + 4] == _LOCATOR:
        (wide,) = struct.unpack_from("<Q", view, locator + 8)
        if wide > len(view) - 56:
            return None
        size, offset = struct.unpack_from("<QQ", view, wide + 40)
    if offset > len(view) or size > len(view) - offset:
        return None
    return bytes(view[offset : offset + size])


def _kind(directory: bytes) -> str:
    if len(directory) < _ENTRY_SIZE:
        return OTHER
    (length,) = struct.unpack_from("<H", directory, _NAME_LENGTH)
    first = directory[_ENTRY_SIZE : _ENTRY_SIZE + length]
    folder, slash, _ = first.partition(b"/")
    prefix = folder if slash else b""

    def has(name: bytes, folder: bytes = prefix) -> bool:
        return _has(directory, folder, name)

    if prefix and (first == prefix + b"/data.pkl" or has(b"/data.pkl")):
        return "torchscript" if has(b"/constants.pkl") else "torch_zip"
    if prefix and (has(b"/.data/extern_modules") or has(b"/extern_modules")):  # the latter: torch 1.8
        return "torch_package"
    if prefix and has(b"/model.json") and has(b"/version"):
        return "torchscript"
    for name in (b"archive_format", b"serialized_exported_program.json"):
        if has(name, b"") or has(b"/" + name):
            return "torch_export"
    if b"data.pkl" not in directory and MEMBERS.search(directory):
        return "archive"
    return OTHER


def _has(directory: bytes, folder: bytes, name: bytes) -> bool:
    """Whether there is an entry called exactly `folder` + `name`."""
    whole = len(folder) + len(name)
    at = directory.rfind(name)  # backwards and without the folder is three times as fast (measured)
    while at >= 0:
        start = at - len(folder)
        entry = start - _ENTRY_SIZE
        if entry >= 0 and directory.startswith(folder, start) and directory.startswith(_ENTRY, entry):
            (length,) = struct.unpack_from("<H", directory, entry + _NAME_LENGTH)
            if length == whole:
                return True
        at = directory.rfind(name, 0, at + len(name) - 1)
    return False
