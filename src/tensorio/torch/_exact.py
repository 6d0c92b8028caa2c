"""torch's own weights-only unpickler over our reader: what is special is made, and refused, in torch's words.

`torch.serialization._load` asks a zip reader for records and storages. This one
answers out of our mapping, so that storages alias it here, too. Its signature
is private to torch: where it is another one, the whole file goes to `torch.load`.
"""

from __future__ import annotations

import inspect
import io
from typing import TYPE_CHECKING, Any

import torch

from tensorio import _core
from tensorio.formats import torch_zip
from tensorio.torch._tensors import bytes_of

if TYPE_CHECKING:
    from tensorio.formats._base import OpenOptions
    from tensorio.storage.base import Storage

__all__ = ["KNOWN", "load_zip"]

_serialization: Any = torch.serialization
_PARAMETERS = ["zip_file", "map_location", "pickle_module", "pickle_file", "overall_storage", "pickle_load_args"]
_WEIGHTS_ONLY = getattr(_serialization, "_weights_only_unpickler", None)
_LARGE = 0xFFFFFFFF  # from here on, miniz writes numbers of 64 bits


def _is_known() -> bool:
    try:
        return list(inspect.signature(_serialization._load).parameters) == _PARAMETERS and _WEIGHTS_ONLY is not None
    except (AttributeError, ValueError):
        return False


# Whether torch's loader is as we know it.
KNOWN = _is_known()


def load_zip(storage: Storage, options: OpenOptions, map_location: Any, encoding: str) -> Any:
    """Return what torch's weights-only unpickler makes of a file whose structure was found good.

    Raises
    ------
    Exception
        Whatever torch does.
    """
    reader = _Reader(torch_zip.layout_of(storage, options), storage)
    try:
        return _serialization._load(reader, map_location, _WEIGHTS_ONLY, encoding=encoding)
    finally:
        # Where it fails, torch leaves this behind for the next load of the thread.
        _serialization._serialization_tls.map_location = None


class _Reader:
    """What torch asks of ``torch._C.PyTorchFileReader``."""

    def __init__(self, layout: Any, storage: Storage) -> None:
        self._layout = layout
        self._storage = storage

    def _record(self, name: str) -> int | None:
        layout = self._layout
        folder = layout.folder
        if name.startswith("data/") and folder:
            key = name[len("data/") :]
            found = layout.keys.get(key)
            if found is None and key.isdecimal() and str(int(key)) == key and int(key) < len(layout.numbers):
                found = layout.numbers[int(key)]
            if found is not None and found >= 0:
                return int(found)
        other: int | None = layout.others.get(layout.full(name))
        return other

    def _known(self, name: str) -> int:
        record = self._record(name)
        if record is None:
            raise RuntimeError(f"file not found: {self._layout.full(name)}")
        return record

    def has_record(self, name: str) -> bool:
        return self._record(name) is not None

    def get_record(self, name: str) -> bytes:
        return bytes(self._layout.archive.checked(self._known(name)))

    def get_all_records(self) -> list[str]:
        start = len(self._layout.full(""))
        return [record.name[start:] for record in self._layout.archive.records()]

    def get_storage_from_record(self, name: str, nbytes: int, cls: Any) -> torch.Tensor:
        """Return bytes of a record, which torch then takes the storage of; in the mapping where they are raw."""
        record = self._known(name)
        offset, _, size, _, method, _ = _core.zip_record(self._layout.archive.rows, record)
        if size != nbytes:
            raise RuntimeError(f"storage {name}: expected {nbytes} bytes, as the pickle says, found {size}")
        if method == 0:
            found = bytes_of(self._storage.lease(), offset, size)
            # torch swaps bytes in place; what it fails at is read once more, from the same mapping.
            as_it_is = not self._layout.swapped and found.data_ptr() % _ALIGNED == 0
            return found if not nbytes or as_it_is else found.clone()
        data = bytearray(self._layout.archive.read(record))
        return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")

    def get_record_offset(self, name: str) -> int:
        return _core.zip_record(self._layout.archive.rows, self._known(name))[0]

    def get_record_header_offset(self, name: str) -> int:
        return _core.zip_record(self._layout.archive.rows, self._known(name))[5]

    def get_record_offset_no_read(self, cursor: int, name: str, nbytes: int, alignment: int) -> int:
        """Return where torch's writer puts a payload whose local header begins at `cursor`."""
        start = cursor + 30 + len(self._layout.full(name).encode())
        large = (16 if nbytes >= _LARGE else 0) + (8 if cursor >= _LARGE else 0)
        start += (4 + large if large else 0) + 4
        return start + -start % alignment

    def serialization_id(self) -> str:
        if not self.has_record(torch_zip.SERIALIZATION_ID):
            return ""
        return self.get_record(torch_zip.SERIALIZATION_ID).decode("ascii", "replace")


_ALIGNED = 16  # bytes: the largest element


def as_file(storage: Storage) -> io.BytesIO:
    """Return the bytes as a file object of torch's liking (a copy)."""
    return io.BytesIO(storage.view())
