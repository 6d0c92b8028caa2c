"""An open file's tensors as torch's."""

from __future__ import annotations

import functools
from array import array
from typing import Any

import numpy as np
import torch

from tensorio import _arrays
from tensorio.errors import LimitError, UnsupportedError
from tensorio.formats._base import Opened
from tensorio.safetensors._blocks import read_blocks
from tensorio.safetensors._errors import LOADING, SafetensorError, SafetensorIndexError, explained, translated
from tensorio.safetensors._file import File
from tensorio.safetensors._gather import gathered
from tensorio.safetensors._index import checked
from tensorio.tensors import ROW, Table
from tensorio.torch import _tensors

__all__ = ["TorchReader"]


class TorchReader:
    """Tensors as torch's, on a device.

    With `mapped`, they are views of one private copy-on-write mapping, each
    with a torch storage of exactly its bytes; writing to one never changes the
    file. Otherwise each is read into memory of its own.

    Parameters
    ----------
    file : File
        Over a writable storage, if `mapped`.
    mapped : bool
    device : str or int
    """

    def __init__(self, file: File, *, mapped: bool, device: str | int) -> None:
        self.file = file
        self._device = device
        self._lease = file.storage.lease() if mapped else None

    @functools.cached_property
    def _alone(self) -> Table:
        """The file's table as if each tensor were the only one of its storage."""
        table = self.file.table
        rows = array("q", table.rows)
        rows[5::ROW] = array("q", bytes(8 * len(table)))
        return Table(table.names, rows, table.dims)

    def tensor(self, row: int) -> Any:
        return self._moved(self._tensor(row))

    def tensors(self) -> dict[str, Any]:
        file, names = self.file, self.file.table.names
        try:
            if self._lease is not None:
                file.bring()
                found = _tensors.tensors_of(file.opened)
            else:
                table, storages = read_blocks(file)
                found = _tensors.tensors_of(Opened(file.opened.format, table, list(storages)))
        except UnsupportedError:
            found = {names[row]: self._tensor(row) for row in file.order}  # which says what tensor it is
        if not file.in_order:
            found = {names[row]: found[names[row]] for row in file.order}
        return found if self._device == "cpu" else _tensors.to_device(found, self._device)

    def part(self, row: int, index: Any) -> Any:
        if self._lease is not None:
            found = self._tensor(row)[index]
            if self._device != "cpu" and found.nbytes < found.untyped_storage().nbytes():
                found = found.clone()  # storages are moved whole: this one is the tensor's, of which a part is wanted
            return self._moved(found)
        table = self.file.table
        try:
            model = _arrays.view_row(table.rows, table.dims, row, self.file.storage.lease())  # only looked at
        except LimitError as error:
            error.path, error.record = self.file.name, table.names[row]
            raise explained(error, LOADING) from error
        try:
            wanted = checked(index, model.shape)
            found = gathered(self.file.read, self.file.extent(row)[0], model.shape, model.dtype, wanted)
        except IndexError as error:
            raise SafetensorIndexError(str(error)) from error
        code = self.file.dtype(row)
        if _tensors.TYPES[code] is None:
            raise self._refused(_tensors.unsupported(code), row)
        return self._moved(_over(found, code))

    def _tensor(self, row: int) -> Any:
        try:
            if self._lease is not None:
                self.file.bring(row)
                return _tensors.tensor_of(self.file.table, row, self._lease)
            offset, nbytes = self.file.extent(row)
            memory = memoryview(np.zeros(nbytes, np.uint8))  # type: ignore[arg-type]
            if nbytes:
                self.file.read(offset, memory)
            return _tensors.tensor_of(self._alone, row, _arrays.Lease(memory, True))
        except UnsupportedError as error:
            raise self._refused(error, row) from error

    def _moved(self, tensor: Any) -> Any:
        return tensor if self._device == "cpu" else _tensors.to_device({"": tensor}, self._device)[""]

    def _refused(self, error: UnsupportedError, row: int) -> SafetensorError:
        """What torch does not have, in the format's words."""
        error.path, error.record = self.file.name, self.file.table.names[row]
        code = self.file.code(row)
        return translated(error, f"Dtype not understood: {code}: {error.message}")


def _over(found: np.ndarray[Any, Any], code: int) -> Any:
    """Return a tensor over the memory of an array of a type, which it keeps."""
    if not found.size:
        return torch.empty(found.shape, dtype=_tensors.TYPES[code], device="cpu")
    raw = memoryview(found.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
    flat = _tensors.bytes_of(_arrays.Lease(raw, True), 0, len(raw))
    return flat.view(_tensors.TYPES[code]).view(found.shape)
