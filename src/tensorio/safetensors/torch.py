"""safetensors files as dicts of torch tensors.

Needs torch (extra ``torch``). Loaded CPU tensors are views of one private
copy-on-write mapping, each with a torch storage of exactly its bytes: lazy,
writable, and none shares with another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

try:
    import torch
except ImportError as error:
    if error.name != "torch":
        raise
    raise ImportError("tensorio.safetensors.torch needs torch: pip install 'tensorio[torch]'", name="torch") from None

import numpy as np

from tensorio import _core, _served
from tensorio.formats._base import SaveOptions
from tensorio.formats._items import Items, items_of
from tensorio.formats.safetensors import DTYPES as _CODES
from tensorio.formats.safetensors import plan_items
from tensorio.plan import FlatPlan
from tensorio.safetensors import TensorSpec, deserialize, safe_open, serialize, serialize_file
from tensorio.safetensors import _torch_sharing as _sharing
from tensorio.safetensors._devices import backend_of, device_of
from tensorio.safetensors._errors import SAVING, SafetensorError, SafetensorUnsupportedError
from tensorio.safetensors._file import of_buffer, opened
from tensorio.safetensors._torch_reader import TorchReader
from tensorio.safetensors._writing import (
    bytes_of,
    checked_metadata,
    planned,
    require_name,
    write,
)

# Those of the package itself are here because callers import them from here, too.
__all__ = [
    "TensorSpec",
    "deserialize",
    "load",
    "load_file",
    "load_model",
    "safe_open",
    "save",
    "save_file",
    "save_model",
    "serialize",
    "serialize_file",
    "storage_ptr",
    "storage_size",
]

Metadata = Mapping[str, str] | None
Tensors = dict[str, torch.Tensor]

# torch's name for what the format counts in elements.
_TORCH_NAMES = {"float4_e2m1fn": "float4_e2m1fn_x2"}
# Format code -> torch type, for those that this torch has.
_TYPES: dict[str, torch.dtype] = {
    code: found for code, name in _CODES.items() if (found := getattr(torch, _TORCH_NAMES.get(name, name), None))
}
_SIZE: dict[torch.dtype, int] = {dtype: dtype.itemsize for dtype in _TYPES.values()}

storage_ptr, storage_size = _sharing.storage_ptr, _sharing.storage_size
_end_ptr, _is_complete = _sharing.end_ptr, _sharing.is_complete
_find_shared_tensors, _remove_duplicate_names = _sharing.find_shared_tensors, _sharing.remove_duplicate_names
_filter_shared_not_shared = _sharing.filter_shared_not_shared

_SPARSE = (
    "You are trying to save a sparse tensors: `{names}` which this library does not support. You can make it a dense"
    " tensor before saving with `.to_dense()` but be aware this might make a much larger file than needed."
)
_NOT_CONTIGUOUS = (
    "You are trying to save a non contiguous tensor: `{name}` which is not allowed. It either means you are trying to"
    " save tensors which are reference of each other in which case it's recommended to save only the full tensors,"
    " and reslice at load time, or simply call `.contiguous()` on your tensor to pack it before saving."
)
_SHARED = (
    "Some tensors share memory, this will lead to duplicate memory on disk and potential differences when loading"
    " them again: {groups}. A potential way to correctly save your model is to use `save_model`; or save copies"
    " (`.clone()`) of all but one."
)


def save(tensors: Tensors, metadata: Metadata = None) -> bytes:
    """Return a file of tensors as bytes.

    Parameters
    ----------
    tensors : dict of str to Tensor
        Dense, contiguous, none overlapping another; on any device. Lazy
        conjugates and negatives are resolved.
    metadata : mapping of str to str, optional
        Notes; written sorted by key.

    Raises
    ------
    ValueError
        Something else than a dict of tensors; a tensor that is sparse or not contiguous.
    RuntimeError
        Tensors that share memory; see `save_model`.
    SafetensorError
        An element type or a name that the format does not have; a meta tensor.
    """
    plan = _plan(tensors, metadata)
    _served.count("safetensors.torch.save", plan.nbytes)
    return bytes_of(plan)


def save_file(tensors: Tensors, filename: Any, metadata: Metadata = None) -> None:
    """Write a file of tensors.

    Parameters
    ----------
    tensors, metadata
        See `save`.
    filename : str, bytes, os.PathLike or writable binary file object
        A path appears whole or not at all, also over the file that the tensors
        are mapped from; links are followed, the mode is the process's or the old
        file's. Not synced to disk.
    """
    plan = _plan(tensors, metadata)
    write(plan, filename)
    _served.count("safetensors.torch.save_file", plan.nbytes)


def load(data: Any) -> Tensors:
    """Return the tensors of a file in memory.

    Parameters
    ----------
    data : bytes or another buffer

    Returns
    -------
    dict of str to Tensor
        By offset, on the CPU; over one copy of `data`, each with a storage of exactly its bytes.
    """
    file = of_buffer(data, copied=True)
    _served.count("safetensors.torch.load", file.storage.nbytes)
    return TorchReader(file, mapped=True, device="cpu").tensors()


def load_file(filename: Any, device: Any = "cpu", *, backend: str = "mmap") -> Tensors:
    """Return the tensors of a file.

    Parameters
    ----------
    filename : str, os.PathLike, buffer or seekable binary file object
    device : str, int or torch.device
    backend : {"mmap", "pread"}
        ``"pread"`` reads each tensor into memory of its own.

    Returns
    -------
    dict of str to Tensor
        By offset. On the CPU with ``"mmap"``: copies nothing and reads no
        payload; about 1 us per tensor.
    """
    mapped = backend_of(backend) == "mmap"
    where = device_of(device, "torch")
    file = opened(filename, writable=mapped)
    _served.count("safetensors.torch.load_file", file.storage.nbytes)
    return TorchReader(file, mapped=mapped, device=where).tensors()


def save_model(model: torch.nn.Module, filename: Any, metadata: Metadata = None, force_contiguous: bool = True) -> None:
    """Write a model's tensors, those that share memory once.

    Parameters
    ----------
    model : Module
    filename
        See `save_file`.
    metadata : mapping of str to str, optional
        Each name that was dropped is added, with the name that was kept for it, unless it is there.
    force_contiguous : bool
        Make all tensors contiguous first.
    """
    state = model.state_dict()
    notes = dict(metadata) if metadata is not None else {}
    dropped = False
    for kept, others in _remove_duplicate_names(state).items():
        for name in others:
            notes.setdefault(name, kept)
            del state[name]
            dropped = True
    if force_contiguous:
        state = {name: tensor.contiguous() for name, tensor in state.items()}
    try:
        save_file(dict(state), filename, metadata=notes if dropped or metadata is not None else None)
    except ValueError as error:
        if isinstance(error, SafetensorError):  # which says by itself what is wrong, and it is not the layout
            raise
        raise ValueError(f"{error} Or use save_model(..., force_contiguous=True), which copies such tensors.") from None


def load_model(
    model: torch.nn.Module, filename: Any, strict: bool = True, device: Any = "cpu", *, backend: str = "mmap"
) -> tuple[set[str], list[str]]:
    """Load a file into a model; tensors that the model shares may be in it under one of their names.

    Parameters
    ----------
    model : Module
    filename, device, backend
        See `load_file`.
    strict : bool
        Raise if names are missing or unexpected.

    Returns
    -------
    missing : set of str
    unexpected : list of str

    Raises
    ------
    RuntimeError
        With `strict`, naming them.
    """
    state = load_file(filename, device, backend=backend)
    duplicates = _remove_duplicate_names(model.state_dict(), preferred_names=state.keys())
    absent, extra = model.load_state_dict(state, strict=False)
    missing, unexpected = set(absent), list(extra)
    for name in (n for group in duplicates.values() for n in group):
        if name in missing:
            missing.remove(name)
        else:
            unexpected.append(name)  # the file has it, the model has it under another name
    if strict and (missing or unexpected):
        raise RuntimeError(_differences(model, missing, unexpected))
    return missing, unexpected


def _differences(model: torch.nn.Module, missing: set[str], unexpected: list[str]) -> str:
    lines = [f"Error(s) in loading state_dict for {type(model).__name__}:"]
    for word, names in (("Missing", missing), ("Unexpected", unexpected)):
        if names:
            quoted = ", ".join(f'"{name}"' for name in sorted(names))
            lines.append(f"    {word} key(s) in state_dict: {quoted}")
    return "\n".join(lines)


def _plan(tensors: Any, metadata: Metadata) -> FlatPlan:
    """Lay out a file, or say why the tensors can't be in one."""
    in_order = _check_kinds(tensors)
    if not in_order:
        _check_sharing(tensors)
        _check_layout(tensors)
    options = SaveOptions(metadata=checked_metadata(metadata))

    def make() -> FlatPlan:
        items = items_of(tensors)
        if not _apart(items):
            _check_sharing(tensors)
        return plan_items(items, options)

    return planned(make, tensors)


def _check_kinds(tensors: Any) -> bool:
    """Raise unless all are dense tensors; tell whether all are plain memory in C order."""
    if not isinstance(tensors, dict):
        raise ValueError(f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}")
    in_order, sparse, strided = True, [], torch.strided
    for name, tensor in tensors.items():
        require_name(name)
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"Key `{name}` is invalid, expected torch.Tensor but received {type(tensor)}")
        if tensor.layout is not strided:
            sparse.append(name)
        elif not (in_order and tensor.is_cpu and tensor.is_contiguous()) or tensor.is_neg() or tensor.is_conj():
            in_order = False
    if sparse:
        raise ValueError(_SPARSE.format(names=sparse))
    return in_order


def _check_sharing(tensors: Tensors) -> None:
    groups = [group for group in _find_shared_tensors(tensors) if len(group) > 1]
    if groups:
        raise RuntimeError(_SHARED.format(groups=groups))


def _check_layout(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(_NOT_CONTIGUOUS.format(name=name))
        if tensor.device.type == "meta":
            raise SafetensorUnsupportedError(f"{SAVING}: Cannot copy out of meta tensor; no data!", record=name)


def _apart(items: Items) -> bool:
    """Tell whether no two payloads overlap in memory, which is quicker to see than what shares a storage."""
    starts = np.frombuffer(items.payloads.addresses, np.int64) if len(items.names) else np.empty(0, np.int64)
    sizes = np.frombuffer(items.payloads.sizes, np.int64) if len(items.names) else starts
    full = sizes > 0
    starts, sizes = starts[full], sizes[full]
    order = np.argsort(starts)
    return bool((starts[order][:-1] + sizes[order][:-1] <= starts[order][1:]).all())


def _evaluate_tensors_for_save(tensors: Tensors) -> None:
    """Raise for what can't be saved: other things than tensors, sparse ones, tensors that share memory."""
    _check_kinds(tensors)
    _check_sharing(tensors)


def _flatten_as_ptr(tensors: Tensors, keep_alive_buffer: list[Any]) -> dict[str, TensorSpec]:
    """Describe tensors for `serialize`; what holds their bytes goes into `keep_alive_buffer`."""
    _evaluate_tensors_for_save(tensors)
    _check_layout(tensors)
    out = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        keep_alive_buffer.append(plain)
        out[name] = TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tensor.shape,
            data_ptr=plain.data_ptr(),
            data_len=plain.nbytes,
        )
    return out


def _flatten(tensors: Tensors) -> dict[str, dict[str, Any]]:
    """Describe tensors as older releases did, with copies of their bytes."""
    _evaluate_tensors_for_save(tensors)
    return {
        name: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": tensor.shape,
            "data": _tobytes(tensor, name),
        }
        for name, tensor in tensors.items()
    }


def _tobytes(tensor: torch.Tensor, name: str) -> bytes:
    """Return a tensor's bytes in C order."""
    if tensor.layout != torch.strided:
        raise ValueError(_SPARSE.format(names=name))
    _check_layout({name: tensor})
    return _to_ndarray(tensor)[0].tobytes()


def _to_ndarray(tensor: torch.Tensor) -> tuple[np.ndarray[Any, Any], torch.Tensor]:
    """Return a contiguous tensor's bytes as a flat array, and the tensor that holds them."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    raw = _core.memory(plain.data_ptr() if plain.nbytes else 0, plain.nbytes, plain)
    return np.frombuffer(raw, np.uint8), plain


def _getdtype(dtype_str: str) -> torch.dtype:
    """Return torch's type for a format code."""
    return _TYPES[dtype_str]


def _view2torch(safeview: Iterable[tuple[str, Mapping[str, Any]]]) -> Tensors:
    """Return what `deserialize` gives, as tensors over its buffers."""
    out = {}
    for name, view in safeview:
        dtype, shape = _getdtype(view["dtype"]), list(view["shape"])
        if view["dtype"] == "F4":
            shape[-1:] = [n // 2 for n in shape[-1:]]
        if not len(view["data"]):
            out[name] = torch.empty(shape, dtype=dtype, device="cpu")
        else:
            out[name] = torch.frombuffer(view["data"], dtype=torch.uint8).view(dtype).reshape(shape)
    return out
