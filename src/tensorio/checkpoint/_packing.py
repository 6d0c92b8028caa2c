"""Which tensors go into one file, where files are of limited size: Hugging Face's way.

Source: huggingface_hub 2.4 (`split_state_dict_into_shards_factory`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorio.arraylike import is_tensor
from tensorio.errors import TensorMismatchError, escaped

if TYPE_CHECKING:
    from tensorio.tensors import TensorInfo

__all__ = ["Entry", "entries_of", "nbytes_of", "split", "stored_entry"]


def nbytes_of(size: int | str) -> int:
    """A size in bytes: a number, or text such as "5GB" (of 10**9 bytes each) or "5GiB".

    Raises
    ------
    ValueError
        It is something else, or nothing.
    """
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*(?:([KMGT])(i?)B|B)?", str(size).strip(), re.IGNORECASE)
    nbytes = 0
    if match is not None and not isinstance(size, bool):
        power = " KMGT".index((match[2] or " ").upper())
        nbytes = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    if not nbytes:
        raise ValueError(f"expected max_shard_size= to be a number of bytes or a size such as '5GB', found {size!r}")
    return nbytes


class Entry(NamedTuple):
    """A tensor that is to be put into a file.

    Attributes
    ----------
    name : str
    nbytes : int
        What it counts.
    storage : object
        Tensors of the same one go into one file, and count once; None: by itself.
    """

    name: str
    nbytes: int
    storage: object = None


def stored_entry(name: str, info: TensorInfo, file: int = 0) -> Entry:
    """Return what a tensor of a file counts; those of the same bytes of a file are one."""
    tied = (file, info.chunks[0].extent) if len(info.chunks) == 1 and info.nbytes else None
    return Entry(name, info.nbytes, tied)


def split(entries: Iterable[Entry], most: int) -> tuple[list[list[str]], int]:
    """Put tensors into files, in order, each file filled until the next tensor would not fit.

    Parameters
    ----------
    most : int
        Bytes in a file; a larger tensor has one to itself.

    Returns
    -------
    list of list of str
        Names of each file's tensors; at least one file.
    total : int
        Bytes of all tensors.
    """
    parts: list[list[str]] = []
    part: list[str] = []
    size = total = 0
    first: dict[object, list[str]] = {}  # by storage, the file of its first tensor
    tied: dict[object, list[str]] = {}
    for name, nbytes, storage in entries:
        if storage is not None and storage in first:
            tied.setdefault(storage, []).append(name)
            continue
        total += nbytes
        if nbytes > most:
            home = [name]
            parts.append(home)
        else:
            if size + nbytes > most:
                parts.append(part)
                part, size = [], 0
            part.append(name)
            size += nbytes
            home = part
        if storage is not None:
            first[storage] = home
    if part or not parts:
        parts.append(part)
    for storage in first:
        first[storage] += tied.get(storage, [])
    return parts, total


def entries_of(obj: Any) -> list[Entry]:
    """The tensors of a flat dict, and what they count.

    Raises
    ------
    TensorMismatchError
        It is no flat dict of tensors.
    """
    if not isinstance(obj, Mapping):
        raise TensorMismatchError(f"max_shard_size= is for a dict of names to tensors, found {type(obj).__name__}")
    entries = []
    for name, value in obj.items():
        if not isinstance(name, str) or not is_tensor(value):
            raise TensorMismatchError(
                "max_shard_size= is for a flat dict of names to tensors, found "
                f"{escaped(name)}: {type(value).__name__}; save the rest by itself, or all as one file"
            )
        entries.append(_entry(name, value))
    return entries


def _entry(name: str, value: Any) -> Entry:
    """A torch tensor counts as its whole storage, as it does for huggingface_hub; an array as its own bytes."""
    if hasattr(value, "untyped_storage"):
        try:
            storage = value.untyped_storage()
            nbytes = storage.nbytes()
            meta = value.device.type == "meta"
            return Entry(name, nbytes, None if meta else (value.device, storage.data_ptr(), nbytes))
        except (NotImplementedError, RuntimeError):  # of layouts that have no one storage
            return Entry(name, int(value.numel() * value.element_size()))
    nbytes = int(getattr(value, "nbytes", 0))
    interface = getattr(value, "__array_interface__", None)
    return Entry(name, nbytes, (interface["data"][0], nbytes) if interface and nbytes else None)
