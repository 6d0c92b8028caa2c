"""`load_file` and `save_file`: flat names to tensors, whatever the format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from tensorio import _served, formats
from tensorio.checkpoint._several import place_of_several
from tensorio.checkpoint._watched import write_file
from tensorio.errors import LimitError, UnsupportedError
from tensorio.formats._base import OpenOptions, SaveOptions
from tensorio.storage.files import FileStorage
from tensorio.tensors import CONJ, NEG, REQUIRES_GRAD
from tensorio.torch._errors import torch_errors
from tensorio.torch._load import TORCH_FORMATS, load_storage
from tensorio.torch._maker import set_bits
from tensorio.torch._several import load_several
from tensorio.torch._sources import open_source
from tensorio.torch._tensors import tensor_of, tensors_of, to_device
from tensorio.tree import fqns, name_of

if TYPE_CHECKING:
    from tensorio.formats._base import Opened

__all__ = ["load_file", "save_file"]

_NODES = 1 << 24  # of a loaded object that are looked at; a model has some thousand
_LEVELS = 1000


def load_file(path: Any, device: Any = "cpu", *, mmap: bool = True) -> dict[str, torch.Tensor]:
    """Return all tensors of a file of any format that tensorio opens, by full dotted name.

    Parameters
    ----------
    path : str, os.PathLike, seekable binary file object, or buffer
        Of a folder or an index: the tensors of all files.
    device : str, int or torch.device
        Where the tensors go; to CUDA through two pinned buffers.
    mmap : bool
        Map the file: tensors alias private pages, copied when written. False:
        read all of it with all cores.

    Returns
    -------
    dict of str to Tensor
        Of a nested object, the keys joined with dots, in saved order; what is no
        tensor is left out. Tensors that shared memory when a torch file was
        saved share it here.

    Raises
    ------
    LoadError, pickle.UnpicklingError, OSError
        See `load`.
    UnsupportedError
        An element type that this release of torch lacks.

    Notes
    -----
    1 to 2 us per tensor; on the CPU, no payload byte is read with `mmap`.
    """
    several = place_of_several(path)
    if several is not None:
        with torch_errors():
            found: dict[str, torch.Tensor] = load_several(several, lambda file: load_file(file, device, mmap=mmap))
            return found
    storage, name = open_source(path, mmap, local=False)
    try:
        with torch_errors(name):
            format = formats.of_storage(storage, None, name)
            if format.NAME in TORCH_FORMATS:
                return dict(_named(load_storage(path, storage, name, torch.device(device))))
            opened = format.open(storage, OpenOptions(writable=True))
            found = tensors_of(opened) if opened.flat else _of_tree(opened)
            found = to_device(found, device)
            if isinstance(storage, FileStorage):
                storage.check_unchanged()
            _served.count("load_file", storage.nbytes)
            return found
    finally:
        storage.close()  # the tensors keep what they need


def _of_tree(opened: Opened) -> dict[str, torch.Tensor]:
    """The tensors of a nested object of another format: one for each row, under all of its names."""
    made: dict[int, torch.Tensor] = {}
    found = {}
    for name, _, row in fqns(opened.tree, opened.budget):
        if row not in made:
            lease = opened.storages[opened.table.storage_of(row)].lease()
            made[row] = _flagged(tensor_of(opened.table, row, lease), opened.table.flags(row))
        found[name] = made[row]
    return found


def _flagged(tensor: torch.Tensor, flags: int) -> torch.Tensor:
    if flags & REQUIRES_GRAD:
        tensor.requires_grad = True
    if flags & (CONJ | NEG):
        set_bits(tensor, bool(flags & CONJ), bool(flags & NEG))
    return tensor


def _named(root: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in dicts, lists and tuples; a name that is taken gets ``#2``, ``#3``, ..."""
    taken: dict[str, int] = {}
    left = _NODES
    stack: list[Iterator[tuple[Any, Any]]] = [iter([((), root)])]
    path: list[Any] = []
    while stack:
        step = next(stack[-1], None)
        if step is None:
            stack.pop()
            del path[-1:]
            continue
        key, node = step
        left -= 1
        if left < 0 or len(stack) > _LEVELS:
            raise LimitError("the saved object is too deep, or shared too often within itself, to name its tensors")
        keys = [*path, key] if len(stack) > 1 else []
        if isinstance(node, torch.Tensor):
            found = base = name_of(tuple(keys))
            while found in taken:
                taken[base] += 1
                found = f"{base}#{taken[base]}"
            taken[found] = 1
            yield found, node
        elif isinstance(node, dict | list | tuple):
            stack.append(iter(node.items()) if isinstance(node, dict) else iter(enumerate(node)))
            path.append(key)
            if len(stack) == 2:
                path.clear()


def save_file(
    tensors: Mapping[str, torch.Tensor], path: Any, metadata: Mapping[str, str] | None = None, *, durable: bool = True
) -> None:
    """Save tensors by name, in the format that the path's suffix names.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        Of any device and strides; what the format can't share is refused, as by
        `tensorio.save`.
    path : str or os.PathLike
        ``.safetensors``; ``.pt``, ``.pth``, ``.bin``, ``.ckpt``: a dict, as
        `torch.save` writes it.
    metadata : mapping of str to str, optional
        Notes, in formats that have room for them.
    durable : bool
        Sync file and folder to disk before returning.

    Raises
    ------
    ValueError
        The suffix names no format.
    UnsupportedError, TensorMismatchError
        The format can't hold something in `tensors`.
    OSError
        From the system; the old file is as it was.
    """
    chosen = formats.for_target(path)
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise UnsupportedError("expected tensors only; tensorio.torch.save saves other objects, too")
    if chosen.NAME != "torch_zip":
        tensors = {name: tensor.cpu() if tensor.device.type != "cpu" else tensor for name, tensor in tensors.items()}
    notes = None if metadata is None else dict(metadata)
    plan = chosen.plan(dict(tensors), SaveOptions(notes, None, False, formats.target_name(path)))
    write_file(plan, path, durable=durable)
    _served.count("save_file", plan.nbytes)
