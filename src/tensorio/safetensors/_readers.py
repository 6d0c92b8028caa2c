"""How an open file's tensors become a framework's.

One reader per framework: `tensor` for one, `tensors` for all, `part` for what
an index selects. Those that go by NumPy share `NumpyReader` and differ in a
last step; torch has its own in `_torch_reader`.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import numpy as np

from tensorio import _arrays, _core
from tensorio._arrays import Lease
from tensorio.dtypes import BY_NAME, DTYPES
from tensorio.errors import TensorIOError
from tensorio.safetensors._blocks import read_blocks
from tensorio.safetensors._errors import LOADING, SafetensorError, SafetensorIndexError, explained, rejected
from tensorio.safetensors._file import File
from tensorio.safetensors._gather import gathered
from tensorio.safetensors._index import checked
from tensorio.tensors import ROW

__all__ = ["NumpyReader", "Reader", "aligned", "reader_of"]

_ITEMSIZES = np.array([d.itemsize for d in DTYPES], np.int64)
_BFLOAT16 = BY_NAME["bfloat16"].code

# From so many tensors on, arithmetic on the table is cheaper than asking each array (measured: 0.1 us each).
MANY = 256

Array = np.ndarray[Any, Any]


class Reader(Protocol):
    """What a handle asks of its framework."""

    def tensor(self, row: int) -> Any:
        """Return one tensor."""
        ...

    def tensors(self) -> dict[str, Any]:
        """Return all of them, in the order of their bytes."""
        ...

    def part(self, row: int, index: Any) -> Any:
        """Return what an index selects of one tensor."""
        ...


class NumpyReader:
    """Tensors as NumPy arrays: writable, aligned, and each by itself.

    With `mapped`, an array is a view of a private copy-on-write mapping: no
    byte is read before it is looked at. Whoever asks for the same tensor once
    more gets the file's bytes again and not what became of the first array, so
    a view of the mapping is given once; after that, and for tensors that are
    not aligned, the bytes are copied.

    Parameters
    ----------
    file : File
        Its storage is not written to.
    mapped : bool
        False reads every tensor into memory of its own.
    """

    _shares = False  # whether what is made of an array can't change it, so that views may be given again

    def __init__(self, file: File, *, mapped: bool) -> None:
        self.file = file
        self._mapped = mapped
        self._source: Lease | None = None
        self._private: Lease | None = None
        self._given: set[int] = set()
        self._all_given = False
        self._lock = threading.Lock()

    def tensor(self, row: int) -> Any:
        try:
            return self._finished(self._array(row), row)
        except SafetensorError:
            raise
        except TensorIOError as error:
            raise self._refused(error, row) from error

    def tensors(self) -> dict[str, Any]:
        with rejected(LOADING, self.file.name):
            return self._tensors()

    def _tensors(self) -> dict[str, Any]:
        table = self.file.table
        with self._lock:
            fresh = self._mapped and (self._shares or not (self._all_given or self._given))
            self._all_given = True
            fresh = fresh and self._lease() is not None
        if fresh:
            self.file.bring()
        arrays = self._views() if fresh else self._copies()
        names, plain = table.names, type(self)._finished is NumpyReader._finished
        if self.file.in_order and plain:
            return dict(zip(names, arrays, strict=True))
        return {names[i]: self._finished(arrays[i], i) for i in self.file.order}

    def part(self, row: int, index: Any) -> Any:
        model = self._model(row)
        wanted = checked(index, model.shape)
        try:
            if self._mapped and not self.file.storage.ahead:
                return self._sliced(np.asarray(model[wanted]), row)
            offset, _ = self.file.extent(row)
            return self._sliced(gathered(self.file.read, offset, model.shape, model.dtype, wanted), row)
        except IndexError as error:
            raise SafetensorIndexError(str(error)) from error

    def _finished(self, array: Array, row: int) -> Any:
        """The framework's own step."""
        return array

    def _sliced(self, array: Array, row: int) -> Any:
        """The same for a part: a copy in C order, if it is a view of the file."""
        return self._finished(array if array.flags.owndata else np.array(array, order="C"), row)

    def _model(self, row: int) -> Array:
        """The array over the file's own bytes, which is only looked at: shape, dtype, and source of copies."""
        table = self.file.table
        if self._source is None:
            self._source = self.file.storage.lease()
        try:
            return _arrays.view_row(table.rows, table.dims, row, self._source)
        except TensorIOError as error:
            raise self._refused(error, row) from error

    def _refused(self, error: TensorIOError, row: int) -> SafetensorError:
        """An error about one tensor as this face's."""
        error.path, error.record = self.file.name, self.file.table.names[row]
        return explained(error, LOADING)

    def _lease(self) -> Lease | None:
        if self._private is None:
            self._private = self.file.private()
        return self._private

    def _array(self, row: int) -> Array:
        if self._mapped and (self._shares or self._is_first(row)):
            lease = self._private
            if lease is None:
                with self._lock:
                    lease = self._lease()
            if lease is not None:
                self.file.bring(row)
                array = _arrays.view_row(self.file.table.rows, self.file.table.dims, row, lease)
                if array.flags.aligned:
                    return array
        return self._copy(row)

    def _is_first(self, row: int) -> bool:
        """Whether nobody was given this row; who asks is."""
        with self._lock:
            first = not self._all_given and row not in self._given
            self._given.add(row)
        return first

    def _copy(self, row: int) -> Array:
        model = self._model(row)
        array = np.zeros(model.shape, model.dtype)
        if array.size:
            self.file.read(self.file.extent(row)[0], memoryview(array.reshape(-1).view(np.uint8)))  # type: ignore[arg-type]
        return array

    def _copies(self) -> list[Array]:
        """All of them in memory, small ones side by side."""
        table, storages = read_blocks(self.file)
        return aligned(_arrays.views(table.rows, table.dims, [storage.lease() for storage in storages]))

    def _views(self) -> list[Array]:
        lease = self._lease()
        assert lease is not None
        table = self.file.table
        arrays = _arrays.views(table.rows, table.dims, [lease])
        if len(arrays) < MANY:
            rows = [row for row, array in enumerate(arrays) if not array.flags.aligned]
        else:
            rows = unaligned(table.rows, _core.address(self.file.storage.view()))
        for row in rows:
            arrays[row] = self._copy(row)
        return arrays


def aligned(arrays: list[Array]) -> list[Array]:
    """Return arrays as they are or as copies, if their elements are not at a multiple of their size."""
    return [array if array.flags.aligned else array.copy() for array in arrays]


def unaligned(rows: Any, base: int) -> list[int]:
    """Return the rows whose elements are not at a multiple of their size, in a storage at address `base`.

    Mappings begin alike: `base` may be that of another mapping of the same file.
    """
    if not len(rows):
        return []
    cells = np.frombuffer(rows, np.int64).reshape(-1, ROW)
    sizes = _ITEMSIZES[cells[:, 0]]
    units = np.where(sizes > 8, 8, sizes)
    found: list[int] = np.flatnonzero((cells[:, 5] + base % 8) & (units - 1)).tolist()
    return found


class FlaxReader(NumpyReader):
    """Tensors as JAX arrays, which nobody can write to."""

    _shares = True

    def _finished(self, array: Array, row: int) -> Any:
        import jax.numpy as jnp

        return jnp.asarray(array)


class TensorflowReader(NumpyReader):
    """Tensors as TensorFlow's."""

    _shares = True

    def _finished(self, array: Array, row: int) -> Any:
        import tensorflow

        return tensorflow.convert_to_tensor(array)


class MlxReader(NumpyReader):
    """Tensors as MLX arrays."""

    _shares = True

    def _finished(self, array: Array, row: int) -> Any:
        import mlx.core as mx

        if self.file.dtype(row) == _BFLOAT16:  # which MLX does not know as NumPy's
            return mx.array(array.view(np.uint16)).view(mx.bfloat16)
        return mx.array(array)


class PaddleReader(NumpyReader):
    """Tensors as Paddle's, on one of its devices."""

    _shares = True

    def __init__(self, file: File, *, mapped: bool, device: str | int = "cpu") -> None:
        super().__init__(file, mapped=mapped)
        number = f"gpu:{device}" if isinstance(device, int) else device.replace("cuda", "gpu")
        self._device = number

    def _finished(self, array: Array, row: int) -> Any:
        import paddle

        name = DTYPES[self.file.dtype(row)].name
        if array.dtype.name == name and array.dtype.kind != "V":
            return paddle.to_tensor(array, place=self._device)
        raw = array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint8)
        if name == "bfloat16":  # Paddle takes 16-bit NumPy integers for them
            return paddle.to_tensor(raw, dtype="bfloat16", place=self._device)
        return paddle.to_tensor(raw, place=self._device).view(name)


def reader_of(framework: str, file: File, *, mapped: bool, device: str | int) -> Reader:
    """Return the reader of a framework; see `_devices.framework_of`."""
    if framework == "torch":
        from tensorio.safetensors._torch_reader import TorchReader

        return TorchReader(file, mapped=mapped, device=device)
    if framework == "paddle":
        return PaddleReader(file, mapped=mapped, device=device)
    kinds: dict[str, type[NumpyReader]] = {
        "numpy": NumpyReader, "flax": FlaxReader, "tensorflow": TensorflowReader, "mlx": MlxReader,
    }  # fmt: skip
    return kinds[framework](file, mapped=mapped)
