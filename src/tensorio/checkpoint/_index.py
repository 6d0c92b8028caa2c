"""A checkpoint in several files, opened as one.

As `save_pretrained` of Hugging Face transformers writes them: beside the files
is ``model.safetensors.index.json`` (or ``pytorch_model.bin.index.json``), whose
"weight_map" says which of them has which tensor.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

from tensorio.checkpoint._checkpoint import Checkpoint, open_single
from tensorio.checkpoint._manifest import is_plain_name
from tensorio.checkpoint._several import Place, place_in
from tensorio.encryption._header import is_encrypted
from tensorio.encryption._opening import head_of
from tensorio.errors import (
    DecryptionError,
    FormatError,
    HeaderError,
    TensorIOError,
    TruncatedError,
    error_context,
    escaped,
)
from tensorio.formats._base import Opened, StoredRecord
from tensorio.formats._strict_json import parse
from tensorio.storage.base import MemoryStorage
from tensorio.storage.opening import open_storage
from tensorio.tensors import ROW, Table
from tensorio.tree import is_leaf

__all__ = ["of_one_save", "open_joined", "open_several", "read_index"]

Found = TypeVar("Found")
_TRIES = 10  # at a set of files that somebody replaces as it is opened
_SHOWN_MAX = 3  # names in a message
_DIMS, _STORAGE = 3, 4  # fields of a row, csrc/table.h


def open_several(path: str, **options: Any) -> Checkpoint:
    """Open the files of a folder, or those that an index names, as one checkpoint.

    Parameters
    ----------
    path : str
        See `place_of_several`.

    Raises
    ------
    HeaderError
        The index and the files do not agree on which tensors there are.
    TruncatedError
        A file that the index names is not there.
    IsADirectoryError
        Nothing in the folder says which of its files are a checkpoint.
    FormatError
        The files were replaced again and again while they were opened.

    Notes
    -----
    Files that are replaced meanwhile are opened again, so that all are of one save.
    """
    return of_one_save(path, partial(_open_place, path, options), Checkpoint.close)


def of_one_save(
    path: str, act: Callable[[Place], Found], undo: Callable[[Found], object] = lambda found: None
) -> Found:
    """Return what `act` makes of the files that are there; again, if others have taken their place meanwhile.

    Parameters
    ----------
    path : str
        See `place_of_several`.
    act : callable
        Is given the file that says which files there are.
    undo : callable
        Lets go of what is not returned.
    """
    for _ in range(_TRIES):
        place = place_in(path)
        try:
            found = act(place)
        except (TensorIOError, OSError):
            if place_in(path) == place:
                raise
            continue
        if place_in(path) == place:
            return found
        undo(found)
    raise FormatError(f"the files were replaced {_TRIES} times while they were opened; try again", path=path)


def _open_place(path: str, options: dict[str, Any], place: Place) -> Checkpoint:
    if place.is_index:
        return _open_index(path, place.path, options)
    return open_single(place.path, **options)


def _open_index(path: str, index: str, options: dict[str, Any]) -> Checkpoint:
    """Open the files that an index names; see `open_several`."""
    if options.get("verify"):
        from tensorio.checkpoint._verify import verify_names

        verify_names(index, index).raise_first()
    folder = os.path.dirname(index)
    wanted = read_index(index)
    files = dict.fromkeys(wanted.values())
    missing = [name for name in files if not os.path.exists(os.path.join(folder, name))]
    if missing:
        more = f" and {len(missing) - _SHOWN_MAX} more" if len(missing) > _SHOWN_MAX else ""
        names = ", ".join(escaped(name) for name in missing[:_SHOWN_MAX])
        raise TruncatedError(f"index: {len(missing)} of {len(files)} files are not there: {names}{more}", path=index)
    checkpoint, found = open_joined(folder, files, path=path, **options)
    with error_context(path=index), _closing_unless_right(checkpoint):
        for fqn, name in wanted.items():
            if found.get(fqn) != name:
                raise HeaderError(f"index: expected the tensor in {escaped(name)}, which does not have it", record=fqn)
        for fqn, name in found.items():
            if fqn not in wanted:
                raise HeaderError(f"index: does not name a tensor that {escaped(name)} has", record=fqn)
    return checkpoint


def read_index(path: str) -> dict[str, str]:
    """Return which file has which tensor.

    Raises
    ------
    HeaderError
        It is no index, or names a file that is not beside it.
    """
    storage, _, _ = open_storage(path, local=True)
    try:
        with error_context(path=path):
            if is_encrypted(head_of(storage)):
                raise DecryptionError("the index is encrypted: decrypt the folder, or encrypt it with a readable index")
            value = parse(storage.view())
            wanted = value.get("weight_map") if isinstance(value, dict) else None
            if not isinstance(wanted, dict) or not _are_plain(wanted.values()):
                raise HeaderError('index: expected "weight_map" to give a file beside it for each tensor')
    finally:
        storage.close()
    return wanted


def _are_plain(names: Iterable[object]) -> bool:
    """Whether each is the name of a file beside the index; a few names, many times."""
    texts = {name for name in names if isinstance(name, str)}
    return all(map(is_plain_name, texts)) and all(isinstance(name, str) for name in names)


def _closing_unless_right(checkpoint: Checkpoint) -> ExitStack:
    """A context that closes a checkpoint if the block fails."""
    stack = ExitStack()
    stack.push(lambda kind, error, trace: checkpoint.close() if kind is not None else None)
    return stack


class Joined(Checkpoint):
    """Several files as one checkpoint; what is in them is added by `join`."""

    def __init__(self, path: str | None, name: str, arguments: dict[str, Any]) -> None:
        nothing = Opened("safetensors", Table([], array("q"), array("q")), [])
        super().__init__(nothing, path, name, arguments)
        self._parts: list[Checkpoint] = []
        self._firsts: list[int] = []  # the number of each part's first storage
        nothing.records = partial(_records, self._parts, self._firsts)
        nothing.payloads = partial(_records, self._parts, self._firsts, payloads=True)

    def join(self, part: Checkpoint) -> Iterable[str]:
        """Take the tensors of another checkpoint, which must not be used, or closed, any more; return their names."""
        opened, table, joined = part._opened, part._table, self._opened
        _require_flat(opened)
        rows, dims = joined.table.rows, joined.table.dims
        shift = len(dims), len(joined.storages)
        for row in table.index.values():
            fields = table.rows[row * ROW : (row + 1) * ROW]
            fields[_DIMS] += shift[0]
            fields[_STORAGE] += shift[1]
            rows.extend(fields)
        joined.table.names.extend(table.index)
        dims.extend(table.dims)
        joined.storages.extend(opened.storages)
        joined.metadata = _common(joined.metadata, opened.metadata)
        self.format = joined.format = opened.format
        self.loading = part.loading
        self._parts.append(part)
        self._firsts.append(shift[1])
        return table.index

    def done(self) -> None:
        """Called when all parts are there."""
        if not self._opened.storages:
            self._opened.storages.append(MemoryStorage(memoryview(b"")))  # no files: not a closed checkpoint

    @property
    def files(self) -> tuple[str, ...]:
        """The files the checkpoint is in, in the order of the index."""
        return tuple(file for part in self._parts for file in part.files)

    def close(self) -> None:
        """Let go of the files; see `Checkpoint.close`."""
        super().close()
        for part in self._parts:
            part.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._place is None:
            return super().__reduce__()
        self._storage(0)  # raises if closed
        identities = tuple(part._identity() for part in self._parts)
        return _reopen_several, (self._place, identities, self._arguments)


def _records(parts: list[Checkpoint], firsts: list[int], payloads: bool = False) -> Iterator[StoredRecord]:
    """The records of all files, each behind the name of its file."""
    for part, first in zip(parts, firsts, strict=True):
        opened, file = part._opened, os.path.basename(part._name)
        for record in (opened.payloads if payloads and opened.payloads else opened.records)():
            yield record._replace(name=f"{file}: {record.name}", storage=record.storage + first)


def _require_flat(opened: Opened) -> None:
    """Raise unless a file holds a dict of tensors and nothing else."""
    if opened.flat:
        return
    tree: Any = opened.tree
    if not isinstance(tree, dict):
        raise HeaderError("expected a dict of tensors in each of several files; open the files by themselves")
    for key, value in tree.items():
        if not is_leaf(value):
            raise HeaderError(
                "expected nothing but tensors in each of several files, found "
                f"{escaped(key)} ({type(value).__name__}); open the files by themselves"
            )


def _reopen_several(path: str, identities: tuple[Any, ...], arguments: dict[str, Any]) -> Checkpoint:
    """Open a pickled checkpoint of several files again, if all of them still are the same."""
    checkpoint = open_several(path, **arguments)
    parts = checkpoint._parts if isinstance(checkpoint, Joined) else [checkpoint]
    if tuple(part._identity() for part in parts) != identities:
        checkpoint.close()
        raise FormatError("a file was replaced since the checkpoint was pickled; open it again", path=path)
    return checkpoint


def open_joined(
    folder: str, files: Iterable[str], *, path: str | None = None, **options: Any
) -> tuple[Checkpoint, dict[str, str]]:
    """Open files of a folder as one checkpoint.

    Parameters
    ----------
    path : str, optional
        What opens it again.

    Returns
    -------
    checkpoint : Checkpoint
    found : dict of str to str
        Which file has which tensor.

    Raises
    ------
    HeaderError
        A tensor is in two files, or a file holds something else than tensors.
    """
    arguments = {key: value for key, value in options.items() if key not in ("verify", "progress")}
    checkpoint = Joined(path, folder if path is None else path, arguments)
    found: dict[str, str] = {}
    with _closing_unless_right(checkpoint):
        for name in files:
            file = os.path.join(folder, name)
            part = open_single(file, **options)
            with _closing_unless_right(part), error_context(path=file):
                for fqn in checkpoint.join(part):
                    if found.setdefault(fqn, name) != name:
                        raise HeaderError(f"the tensor is in {escaped(found[fqn])}, too", record=fqn)
        checkpoint.done()
    return checkpoint, found


def _common(a: dict[str, str] | None, b: dict[str, str] | None) -> dict[str, str] | None:
    """Notes that all files have."""
    if a is None or b is None:
        return a if b is None else dict(b)
    return {key: value for key, value in a.items() if b.get(key) == value}
