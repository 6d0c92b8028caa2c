"""A checkpoint in several ``.safetensors`` files, opened as one.

As `save_pretrained` of Hugging Face transformers writes them: beside the files
is ``model.safetensors.index.json``, whose "weight_map" says which of them has
which tensor.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from tensorio.checkpoint._checkpoint import Checkpoint, open_checkpoint
from tensorio.checkpoint._manifest import is_plain_name
from tensorio.errors import HeaderError, TruncatedError, error_context, escaped
from tensorio.formats._base import Opened
from tensorio.formats._strict_json import parse
from tensorio.opening import open_storage
from tensorio.tensors import ROW, Table

__all__ = ["INDEX", "open_index", "open_joined"]

INDEX = "model.safetensors.index.json"
_DIMS, _STORAGE = 3, 4  # fields of a row, csrc/table.h


def open_index(folder: str, **options: Any) -> Checkpoint:
    """Open the files that an index names, as one checkpoint.

    Raises
    ------
    HeaderError
        The index and the files do not agree on which tensors there are.
    TruncatedError
        A file that the index names is not there.
    """
    path = os.path.join(folder, INDEX)
    storage, _, _ = open_storage(path)
    try:
        with error_context(path=path):
            value = parse(storage.view())
            wanted = value.get("weight_map") if isinstance(value, dict) else None
            if not isinstance(wanted, dict) or not all(map(is_plain_name, wanted.values())):
                raise HeaderError('index: expected "weight_map" to give a file beside it for each tensor')
            files = dict.fromkeys(wanted.values())
            missing = [name for name in files if not os.path.exists(os.path.join(folder, name))]
            if missing:
                raise TruncatedError(f"index: {len(missing)} files are not there: {escaped(', '.join(missing))}")
    finally:
        storage.close()
    checkpoint, found = open_joined(folder, files, **options)
    with error_context(path=path), _closing_unless_right(checkpoint):
        for fqn, name in wanted.items():
            if found.get(fqn) != name:
                raise HeaderError(f"index: expected the tensor in {escaped(name)}, which does not have it", record=fqn)
        for fqn, name in found.items():
            if fqn not in wanted:
                raise HeaderError(f"index: does not name a tensor that {escaped(name)} has", record=fqn)
    return checkpoint


def _closing_unless_right(checkpoint: Checkpoint) -> ExitStack:
    """A context that closes a checkpoint if the block fails."""
    stack = ExitStack()
    stack.push(lambda kind, error, trace: checkpoint.close() if kind is not None else None)
    return stack


def open_joined(folder: str, files: Iterable[str], **options: Any) -> tuple[Checkpoint, dict[str, str]]:
    """Open files of a folder as one checkpoint.

    Returns
    -------
    checkpoint : Checkpoint
    found : dict of str to str
        Which file has which tensor.

    Raises
    ------
    HeaderError
        A tensor is in two files.
    """
    names: list[str] = []
    rows, dims = array("q"), array("q")
    joined = Opened("safetensors", Table(names, rows, dims), [])
    checkpoint = Checkpoint(joined, None, folder, {})
    found: dict[str, str] = {}
    with _closing_unless_right(checkpoint):
        for name in files:
            part = open_checkpoint(os.path.join(folder, name), **options)
            opened, table = part._opened, part._table
            for fqn in table.index:
                if found.setdefault(fqn, name) != name:
                    raise HeaderError(f"the tensor is in {escaped(found[fqn])}, too", path=part._name, record=fqn)
            row = [table.rows[i * ROW : (i + 1) * ROW] for i in table.index.values()]
            for fields in row:
                fields[_DIMS] += len(dims)
                fields[_STORAGE] += len(joined.storages)
                rows.extend(fields)
            names.extend(table.index)
            dims.extend(table.dims)
            joined.storages.extend(opened.storages)
            joined.format = opened.format
            joined.metadata = _common(joined.metadata, opened.metadata)
    return checkpoint, found


def _common(a: dict[str, str] | None, b: dict[str, str] | None) -> dict[str, str] | None:
    """Notes that all files have."""
    if a is None or b is None:
        return a if b is None else dict(b)
    return {key: value for key, value in a.items() if b.get(key) == value}
