"""Which torch tensors share memory, and under which names a model is saved once.

A file has one owner per byte: tensors that overlap in one torch storage can't
be saved side by side. What `save_model` drops is written down in the metadata
under the name that it dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch

__all__ = [
    "end_ptr",
    "filter_shared_not_shared",
    "find_shared_tensors",
    "is_complete",
    "remove_duplicate_names",
    "storage_ptr",
    "storage_size",
]

State = Mapping[str, torch.Tensor]


def storage_ptr(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 for a meta tensor."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):
        return 0  # a kind of tensor that has none


def storage_size(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's storage."""
    try:
        return int(tensor.untyped_storage().nbytes())
    except (NotImplementedError, RuntimeError):
        return tensor.nelement() * tensor.element_size()


def end_ptr(tensor: torch.Tensor) -> int:
    """Return the address behind a tensor's last element."""
    address = int(tensor.data_ptr())
    if not tensor.nelement():
        return address
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return address + (reach + 1) * tensor.element_size()


def is_complete(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is all of its storage."""
    whole = tensor.nelement() * tensor.element_size() == storage_size(tensor)
    return whole and int(tensor.data_ptr()) == storage_ptr(tensor)


def find_shared_tensors(state_dict: State) -> list[set[str]]:
    """Return the names of tensors that have memory, in groups of those that overlap in one storage.

    Parameters
    ----------
    state_dict : mapping of str to Tensor

    Returns
    -------
    list of set of str
        A group of one for a tensor that shares with none; meta and empty
        tensors are in no group.
    """
    storages: dict[tuple[torch.device, int, int], list[str]] = {}
    for name, tensor in state_dict.items():
        if tensor.device.type == "meta":
            continue
        pointer, size = storage_ptr(tensor), storage_size(tensor)
        if pointer and size:
            storages.setdefault((tensor.device, pointer, size), []).append(name)
    return filter_shared_not_shared(storages.values(), state_dict)


def filter_shared_not_shared(tensors: Iterable[Iterable[str]], state_dict: State) -> list[set[str]]:
    """Split groups of tensors of one storage each into groups of those that overlap."""
    return [group for names in tensors for group in _overlapping(list(names), state_dict)]


def _overlapping(names: list[str], state_dict: State) -> list[set[str]]:
    """Split the tensors of one storage where no byte belongs to both sides."""
    if len(names) == 1:
        return [set(names)]
    areas = sorted((int(state_dict[name].data_ptr()), end_ptr(state_dict[name]), name) for name in names)
    groups: list[set[str]] = []
    reached = -1
    for start, stop, name in areas:
        if start >= reached:
            groups.append(set())
        groups[-1].add(name)
        reached = max(reached, stop)
    return groups


def remove_duplicate_names(
    state_dict: State, *, preferred_names: Collection[str] | None = None, discard_names: Iterable[str] | None = None
) -> dict[str, list[str]]:
    """Choose one name per group of tensors that overlap.

    Parameters
    ----------
    state_dict : mapping of str to Tensor
    preferred_names : collection of str, optional
        Kept if one of them is complete, before all others.
    discard_names : iterable of str, optional
        Kept only if no other is complete.

    Returns
    -------
    dict of str to list of str
        Kept name to the other names of its group, sorted.

    Raises
    ------
    RuntimeError
        No tensor of a group is all of its storage.
    """
    preferred, discard = set(preferred_names or ()), set(discard_names or ())
    removed: dict[str, list[str]] = {}
    for group in find_shared_tensors(state_dict):
        complete = {name for name in group if is_complete(state_dict[name])}
        if not complete:
            raise RuntimeError(
                "Error while trying to find names to remove to save state dict, but found no suitable name to keep for"
                f" saving amongst: {group}. None is covering the entire storage.Refusing to save/load the model since"
                " you could be storing much more memory than needed: save a copy (`.clone()`) of these tensors, or the"
                " tensor they are parts of."
            )
        kept = min(complete & preferred or complete - discard or complete)
        others = sorted(group - {kept})
        if others:
            removed[kept] = others
    return removed
