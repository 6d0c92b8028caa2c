"""``safe_open`` and the slices it gives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from tensorio import _served
from tensorio.safetensors._devices import backend_of, device_of, framework_of
from tensorio.safetensors._errors import SafetensorError, missing
from tensorio.safetensors._file import File
from tensorio.safetensors._file import opened as open_file
from tensorio.safetensors._readers import Reader, reader_of

__all__ = ["PySafeSlice", "_safe_open_handle", "safe_open"]


class PySafeSlice:
    """A tensor of an open file that gives parts of itself by index; it stays valid when the file is closed."""

    __slots__ = ("_file", "_reader", "_row")

    def __init__(self, file: File, reader: Reader, row: int) -> None:
        self._file, self._reader, self._row = file, reader, row

    def get_shape(self) -> list[int]:
        """Return the shape in elements."""
        return list(self._file.shape(self._row))

    def get_dtype(self) -> str:
        """Return what the format calls the elements, e.g. ``"BF16"``."""
        return self._file.code(self._row)

    def __getitem__(self, index: Any) -> Any:
        """Return a part, indexed as the framework's tensors are.

        Notes
        -----
        torch, ``backend="mmap"``: a view, by torch's rules. Else: a new array,
        by NumPy's rules, except that a bound behind the end of its dimension
        and a list as the whole index are refused; with ``backend="pread"``
        only the bytes needed are read, and gaps of at most 16 KiB.
        """
        return self._reader.part(self._row, index)

    def __repr__(self) -> str:
        name = self._file.table.names[self._row]
        return f"<slice of {name!r}: {self.get_dtype()} {self.get_shape()}>"


class safe_open:  # noqa: N801  # the name that its users know
    """An open safetensors file: names, notes, and tensors of a framework.

    Parameters
    ----------
    filename : str, os.PathLike, buffer or seekable binary file object
        Bytes are a file's content. A file object counts from its current position on.
    framework : str
        ``"pt"``, ``"torch"``, ``"pytorch"``; ``"np"``, ``"numpy"``; ``"jax"``,
        ``"flax"``; ``"tf"``, ``"tensorflow"``; ``"mlx"``; ``"paddle"``.
    device : str, int, torch.device or None
        Where torch's and Paddle's tensors go.
    backend : {"mmap", "pread"}
        ``"mmap"``: tensors are views of a private copy-on-write mapping, whose
        pages are read when they are looked at; ``"pread"``: each is read into
        memory of its own.

    Raises
    ------
    SafetensorError
        Not a safetensors file; unknown framework, device or backend.
    OSError
        From the system, e.g. `FileNotFoundError`, `PermissionError`.

    Notes
    -----
    Costs the header, about 0.3 us per tensor; touches no payload. Also a
    container of names (``len``, ``in``, iteration), and picklable if it was
    opened by path: the other process opens the file again.
    """

    __slots__ = ("__weakref__", "_arguments", "_opened")

    def __init__(self, filename: Any, framework: str, device: Any = "cpu", *, backend: str = "mmap") -> None:
        kind, backend = framework_of(framework), backend_of(backend)
        where = device_of(device, kind)
        mapped = backend == "mmap"
        file = open_file(filename, writable=mapped and kind == "torch")
        # One attribute: a thread that asks while another one closes finds both or none.
        self._opened: tuple[File, Reader] | None = (file, reader_of(kind, file, mapped=mapped, device=where))
        # From here on, the working folder may change.
        self._arguments = (file.path and os.path.abspath(file.path), framework, where, backend)
        _served.count("safetensors.safe_open", file.storage.nbytes)

    @property
    def _file(self) -> File:
        opened = self._opened
        if opened is None:
            raise _closed()
        return opened[0]

    def keys(self) -> list[str]:
        """Return the names, sorted; a new list."""
        return self._file.keys()

    def offset_keys(self) -> list[str]:
        """Return the names in the order of their bytes in the file."""
        return self._file.offset_keys()

    def metadata(self) -> dict[str, str] | None:
        """Return the file's notes; None if it has none."""
        found = self._file.metadata
        return None if found is None else dict(found)

    def get_tensor(self, name: str) -> Any:
        """Return one tensor, of the framework and on the device that were asked for."""
        opened = self._opened
        if opened is None:
            raise _closed()
        file, reader = opened
        row = file.index.get(name)
        if row is None:
            raise missing(name, file.table.names)
        return reader.tensor(row)

    def get_tensors(self) -> dict[str, Any]:
        """Return all tensors by name, in the order of their bytes in the file."""
        opened = self._opened
        if opened is None:
            raise _closed()
        return opened[1].tensors()

    def get_slice(self, name: str) -> PySafeSlice:
        """Return a tensor of which parts can be had by index."""
        opened = self._opened
        if opened is None:
            raise _closed()
        file, reader = opened
        row = file.index.get(name)
        if row is None:
            raise missing(name, file.table.names)
        return PySafeSlice(file, reader, row)

    def __len__(self) -> int:
        return len(self._file.table)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._file.index

    def __enter__(self) -> safe_open:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file; tensors and slices taken from it stay valid."""
        self._opened = None

    def __reduce__(self) -> tuple[Any, ...]:
        path, framework, device, backend = self._arguments
        if self._opened is None or path is None:
            raise TypeError("a closed file, or one that was not opened by its path, can't be pickled")
        return _reopened, (type(self), path, framework, device, backend)

    def __repr__(self) -> str:
        opened = self._opened
        if opened is None:
            return "<safe_open: closed>"
        return f"<safe_open {opened[0].name!r}: {len(opened[0].table)} tensors>"


def _closed() -> SafetensorError:
    return SafetensorError("File is closed")


class _safe_open_handle(safe_open):  # noqa: N801
    """The same for a file object: its file is opened again by name, wherever it stands."""

    __slots__ = ()

    def __init__(self, f: Any, framework: str, device: Any = "cpu", *, backend: str = "mmap") -> None:
        name = getattr(f, "name", None)
        source = getattr(f, "buffer", f)
        if isinstance(name, str | bytes | os.PathLike) and os.path.exists(name):
            source = os.fsdecode(name)  # bytes would be a file's content
        super().__init__(source, framework, device, backend=backend)


def _reopened(kind: type[safe_open], path: str, framework: str, device: str | int, backend: str) -> safe_open:
    """Open what was pickled."""
    return safe_open(path, framework, device, backend=backend)
