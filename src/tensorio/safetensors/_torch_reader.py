"""An open file's tensors as torch's."""

from __future__ import annotations

import functools
from array import array
from typing import Any

import numpy as np

from tensorio import _arrays
from tensorio.dtypes import BY_NAME, DTYPES, c_strides
from tensorio.errors import UnsupportedError
from tensorio.formats._base import Opened
from tensorio.safetensors._blocks import read_blocks
from tensorio.safetensors._errors import SafetensorError, SafetensorIndexError, translated
from tensorio.safetensors._file import File
from tensorio.safetensors._gather import gathered
from tensorio.safetensors._index import checked
from tensorio.tensors import ROW, Table
from tensorio.torch import _tensors

__all__ = ["TorchReader"]

_FLOAT4 = BY_NAME["float4_e2m1fn"].code
_FLOAT4_X2 = BY_NAME["float4_e2m1fn_x2"].code


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
            return self._moved(self._tensor(row)[index])
        model = _arrays.view_row(self.file.table.rows, self.file.table.dims, row, self.file.storage.lease())
        try:
            wanted = checked(index, model.shape)
            found = gathered(self.file.read, self.file.extent(row)[0], model.shape, model.dtype, wanted)
        except IndexError as error:
            raise SafetensorIndexError(str(error)) from error
        code = self.file.dtype(row)
        if code == _FLOAT4:
            code = _FLOAT4_X2  # the array's shape counts bytes
        return self._moved(_over(found.reshape(-1).view(np.uint8), code, found.shape))

    def _tensor(self, row: int) -> Any:
        try:
            if self._lease is not None:
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


def _over(memory: np.ndarray[Any, Any], code: int, shape: tuple[int, ...]) -> Any:
    """Return a tensor over all bytes of `memory`, which it keeps."""
    dims = array("q", [*shape, *c_strides(shape, DTYPES[code].itemsize)])
    row = array("q", [code, 0, len(shape), 0, 0, 0, memory.nbytes, 1, 0])
    return _tensors.tensor_of(Table([""], row, dims), 0, _arrays.Lease(memoryview(memory), True))  # type: ignore[arg-type]
