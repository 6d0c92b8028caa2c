"""`Checkpoint`: the tensors of an opened file as a read-only mapping."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tensorio import formats
from tensorio.checkpoint._delta import close_all, is_delta, options_of, with_bases
from tensorio.checkpoint._loading import check_choice, described, reads_payload, settle
from tensorio.checkpoint._moving import Moving
from tensorio.checkpoint._several import place_of_several
from tensorio.encryption._opening import unlocked
from tensorio.errors import (
    FormatError,
    TensorIOError,
    TensorNotFoundError,
    UnsupportedError,
    error_context,
)
from tensorio.formats._base import IncompleteError, Opened, OpenOptions
from tensorio.storage.base import Storage
from tensorio.storage.files import Identity
from tensorio.storage.opening import leave_behind, open_storage
from tensorio.tensors import CONJ, NEG, Infos, Table, TensorInfo
from tensorio.tree import filled, fqns, is_kind, leaves, name_of

if TYPE_CHECKING:
    import numpy as np

    from tensorio.checkpoint._verify import Report
    from tensorio.tree import Path

    Array = np.ndarray[Any, Any]
    Progress = Callable[[int, int], object]

__all__ = ["Checkpoint", "checkpoint_of", "load_file", "open_checkpoint", "open_single"]


class Checkpoint(Moving):
    """An opened checkpoint: full dotted names to arrays, made when asked for.

    A context manager. Pickling it carries the path, not the bytes: unpickling
    opens the same file again, and fails if it was replaced since.

    Attributes
    ----------
    format : str
        Name of the format.
    path : str or None
        As given; None for file objects and buffers.
    metadata : dict of str to str
        The file's notes; empty if it has none.
    infos : mapping of str to TensorInfo
        What is known without touching payload (NumPy not needed).
    paths : mapping of str to tuple
        The keys that lead to each tensor in the tree.
    loading : str
        How the bytes come into memory, and why: ``"mapped: ext4"``, or ``"read ahead: nfs4 at /data; page faults
        there are single small reads"``.

    Notes
    -----
    A tensor that NumPy has no array for (sparse, quantized, nested, ...) is
    listed by its parts, ``name.values`` and so on; ``checkpoint[name]`` gives the
    whole: a `TensorKind`.

    Arrays are views of one mapping. They are read-only unless the checkpoint was
    opened with ``writable=True``, keep the mapping alive, and stay valid after
    `close`.
    """

    def __init__(
        self,
        opened: Opened,
        path: str | None,
        name: str,
        arguments: dict[str, Any],
        loading: str = "in memory as given",
    ) -> None:
        self.format = opened.format
        self.path = path
        self.loading = loading
        self._place = None if path is None else os.path.abspath(path)  # wherever the current folder will be
        self._name = name
        self._opened = opened
        self._arguments = arguments
        self._reopening: Callable[[], tuple[Any, ...]] | None = None  # how to have it elsewhere, if not by its path
        self._paths: dict[str, Path] | None = None
        self._prefetches = []
        self._rows: Table | None = opened.table if opened.flat else None

    # ----------------------------------------------------------- description

    @property
    def metadata(self) -> dict[str, str]:
        """The file's free string-to-string notes (a copy)."""
        return dict(self._opened.metadata or {})

    @property
    def files(self) -> tuple[str, ...]:
        """The files the checkpoint is in; behind a delta, those it refers to."""
        return () if self.path is None else (self.path, *self._opened.bases)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, stored contiguously; tied ones count once per name."""
        return sum(info.nbytes for info in self.infos.values())

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """What is known of each tensor without touching its bytes."""
        return Infos(self._table)

    @property
    def paths(self) -> Mapping[str, Path]:
        """The exact keys of each tensor in the saved object."""
        if self._paths is None:
            self._paths = {name: (name,) for name in self._table.names} if self._opened.flat else self._name_tree()
        return self._paths

    @property
    def _table(self) -> Table:
        if self._rows is None:
            self._name_tree()
        assert self._rows is not None
        return self._rows

    def _name_tree(self) -> dict[str, Path]:
        """Name the tensors of a nested checkpoint: the table becomes one of names, tied ones on the same extent."""
        with error_context(path=self._name):
            named = fqns(self._opened.tree, self._opened.budget)
        self._rows = NamedTable(self._opened.table, [(name, row) for name, _, row in named])
        self._paths = {name: path for name, path, _ in named}
        return self._paths

    # ---------------------------------------------------------------- mapping

    def __len__(self) -> int:
        return len(self._table.index)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.index)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._table.index or (isinstance(fqn, str) and fqn in self._kinds)

    def __getitem__(self, fqn: str) -> Array:
        table = self._table
        for ahead in self._prefetches:
            ahead.advance(fqn)
        try:  # what error_context does, at a fifth of its cost
            row = table.index.get(fqn)
            if row is None:
                return self._kind(fqn)  # type: ignore[no-any-return]
            array = self._plain(table, row)
        except TensorIOError as error:
            error.path = error.path or self._name
            if not isinstance(error, TensorNotFoundError):
                error.record = error.record or fqn
            raise
        flags = table.flags(row)
        return self._computed(array, flags) if flags & (CONJ | NEG) else array

    def _kind(self, fqn: str) -> Any:
        """A tensor that NumPy has no array for: its parts have names of their own."""
        with error_context(path=self._name):
            if fqn not in self._kinds:
                raise TensorNotFoundError.among(fqn, self._table.names)
            return filled(self._kinds[fqn], lambda row: self._tensor(self._table, row))

    @cached_property
    def _kinds(self) -> dict[str, Any]:
        """The skeletons of such tensors, by name."""
        if self._opened.flat:
            return {}
        found = leaves(self._opened.tree, self._opened.budget, kinds=True)
        return {name_of(path): node for path, node in found if is_kind(node)}

    def _tensor(self, table: Table, row: int) -> Array:
        array, flags = self._plain(table, row), table.flags(row)
        return self._computed(array, flags) if flags & (CONJ | NEG) else array

    def _plain(self, table: Table, row: int) -> Array:
        """The bytes of a row as an array, whatever torch's lazy bits say."""
        if table.chunk_count(row) != 1:
            raise UnsupportedError("a tensor of several chunks can't be shown as one view")
        storage = self._storage(table.storage_of(row))
        lease = storage.lease_for(*table.extent_of(row)) if storage.ahead else storage.lease()
        array: Array = self._arrays.view_row(table.rows, table.dims, row, lease)
        return array

    @cached_property
    def _arrays(self) -> Any:
        """The module that needs NumPy; loaded with the first array."""
        from tensorio import _arrays

        return _arrays

    def _computed(self, array: Array, flags: int) -> Array:
        from tensorio.machine.rebuild import lazy_bits

        return lazy_bits(array, bool(flags & CONJ), bool(flags & NEG))  # type: ignore[no-any-return]

    def _storage(self, index: int) -> Any:
        if not self._opened.storages:
            raise ValueError("the checkpoint is closed")
        return self._opened.storages[index]

    def _read_ahead(self, rows: Iterable[int]) -> None:
        """Have the bytes of some rows in the page cache where a page fault is dear."""
        for row in rows:
            if self._table.chunk_count(row) == 1:
                storage = self._storage(self._table.storage_of(row))
                storage.read_ahead(*self._table.extent_of(row))

    def __repr__(self) -> str:
        return f"<Checkpoint {self._name!r}, {self.format}, {len(self)} tensors>"

    # ------------------------------------------------------------------ reading

    def tree(self) -> Any:
        """Return what was saved, with arrays at the tensors; for flat formats, a dict.

        Notes
        -----
        Views, as from ``ckpt[fqn]``; nested containers are made anew by each call.
        """
        with error_context(path=self._name):
            self._storage(0)
            for storage in self._opened.storages:
                storage.read_ahead(0, storage.nbytes)
            if self._opened.fill is not None:
                return self._opened.fill(None)
            table = self._table
            leases = [storage.lease() for storage in self._opened.storages]
            return dict(zip(table.names, self._arrays.views(table.rows, table.dims, leases), strict=True))

    def check_unchanged(self) -> None:
        """Raise if a file was written to, or cut short, since it was opened.

        Raises
        ------
        FormatError
            It was: what is mapped of it may be new bytes, or gone. A file that was replaced by renaming another
            over it is not changed.
        """
        self._storage(0)
        with error_context(path=self._name):
            for storage in self._opened.storages:
                storage.check_unchanged()

    def verify(self, *, require: bool = False, progress: Progress | None = None) -> Report:
        """Compare the bytes with every checksum there is of them.

        Parameters
        ----------
        require, progress
            See `tensorio.verify`.

        Returns
        -------
        Report
            What is wrong, and what nothing covers; `Report.raise_first` raises it.

        Raises
        ------
        ValueError
            The checkpoint is closed.

        Notes
        -----
        Reads the payload, with all cores.
        """
        from tensorio.checkpoint._verify import verify_opened

        self._storage(0)
        return verify_opened(self._opened, self._name, progress, self._place, require=require)

    # ----------------------------------------------------------------- lifetime

    def close(self) -> None:
        """Let go of the file, and stop prefetching. Arrays handed out stay valid; no new ones can be made."""
        for ahead in self._prefetches:
            ahead.cancel()
        self._prefetches = []
        for storage in self._opened.storages:
            storage.close()
        self._opened.storages = []

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._reopening is not None:
            return self._reopening()
        if self._place is None:
            raise TypeError("a checkpoint opened from a file object or buffer has no path to open again elsewhere")
        return _reopen, (self._place, self._identity(), self._arguments)

    def _identity(self) -> Identity:
        found = self._storage(0).identity
        assert isinstance(found, Identity)
        return found


class NamedTable(Table):
    """The rows of a nested checkpoint under the names of its tree; several names may share a row."""

    __slots__ = ()

    def __init__(self, table: Table, named: list[tuple[str, int]]) -> None:
        super().__init__([name for name, _ in named], table.rows, table.dims, table.chunks)
        self._index = dict(named)


def _reopen(path: str, identity: Identity, arguments: dict[str, Any]) -> Checkpoint:
    """Open a pickled checkpoint again, if it still is the same file."""
    checkpoint = open_single(path, **arguments)
    now = checkpoint._identity()
    if now != identity:
        checkpoint.close()
        raise FormatError(
            f"the file was replaced since the checkpoint was pickled: expected {identity.size} bytes of inode "
            f"{identity.inode}, found {now.size} bytes of inode {now.inode}",
            path=path,
        )
    return checkpoint


def open_checkpoint(source: Any, **options: Any) -> Checkpoint:
    """Open a checkpoint; see `tensorio.open`."""
    several = place_of_several(source)
    if several is None:
        return open_single(source, **options)
    from tensorio.checkpoint._index import open_several  # which opens the files by `open_single`

    return open_several(several, **options)


def open_single(source: Any, *, format: str | None = None, mmap: bool | str = "auto", verify: bool | str = False,
                progress: Progress | None = None, **options: Any) -> Checkpoint:  # fmt: skip
    """Open a checkpoint that is one file, or in memory."""
    check_choice(mmap)
    if verify is not False:
        from tensorio.checkpoint._verify import check_verify

        check_verify(verify)
    choices = OpenOptions(**options)
    storage, path, name = open_storage(source, writable=choices.writable)
    arguments = {"format": format, "mmap": mmap, **options}
    checkpoint = checkpoint_of(storage, path, name, arguments, verify=verify, progress=progress)
    leave_behind(source, storage)
    return checkpoint


def checkpoint_of(storage: Storage, path: str | None, name: str, arguments: dict[str, Any], *,
                  verify: bool | str = False, progress: Progress | None = None) -> Checkpoint:  # fmt: skip
    """Open a checkpoint whose bytes are a storage, which is closed if that fails.

    Parameters
    ----------
    path : str or None
        What opens it again.
    name : str
        What to call it in messages.
    arguments : dict
        Those of `open_checkpoint`, for opening it again.
    """
    format, mmap, options = arguments["format"], arguments["mmap"], dict(arguments)
    del options["format"], options["mmap"]
    choices = OpenOptions(**options)
    storages = [storage]
    try:
        with error_context(path=name):
            storage, choices = unlocked(storage, choices)
            opened = formats.of_storage(storage, format, name).open(storage, choices)
            if is_delta(opened):
                opened = with_bases(opened, path, mmap, OpenOptions(**options))
                storages = opened.storages
            settle(storage, mmap, progress, whole=False)
            storage.check_unchanged()
            if verify:
                from tensorio.checkpoint._verify import verify_opened

                verify_opened(opened, name, progress, path, require=verify == "require").raise_first()
        loading = described(storage, mmap)
    except BaseException:
        close_all(storages)
        raise
    return Checkpoint(opened, path, name, arguments, loading)


def load_file(
    source: Any, *, format: str | None, mmap: bool | str, progress: Progress | None, options: OpenOptions
) -> Any:
    """Load a whole file the short way: no table, arrays at once."""
    check_choice(mmap)
    storage, path, name = open_storage(source, writable=options.writable)
    stored, given = storage, options
    try:
        with error_context(path=name):
            storage, options = unlocked(storage, options)
            reader = formats.of_storage(storage, format, name)
            if reads_payload(storage, mmap):
                reader.open(storage, options)  # a bad header must not cost reading the payload
                settle(storage, mmap, progress, whole=True)
                storage.read_ahead(0, storage.nbytes)
            else:
                settle(storage, mmap, progress, whole=True)
            tree = reader.load(storage, options)
            storage.check_unchanged()
        leave_behind(source, stored)
        return tree
    except IncompleteError:
        arguments = {"format": format, "mmap": mmap, **options_of(given)}
        with checkpoint_of(stored, path, name, arguments, progress=progress) as checkpoint:
            return checkpoint.tree()
    finally:
        storage.close()  # the arrays keep what they need
