"""From what torch saves of a DTensor to `tensorio.kinds.dtensor.DTensor`.

Its specification comes as inert objects: a ``DTensorSpec`` with a
``DeviceMesh`` and placements, whose attributes have changed names from release
to release. What is not understood is left out; nothing of it is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from tensorio.kinds import MetaTensor, TensorKind
from tensorio.kinds._base import product as numel
from tensorio.kinds.dtensor import DTensor, Mesh, Partial, Replicate, Shard, StridedShard
from tensorio.values import Opaque

__all__ = ["dtensor"]

Ints = tuple[int, ...]


def attributes(obj: object) -> Mapping[str, Any]:
    """Return the attributes of an inert object, or of a state: a dict, or a dict or None and a dict of slots."""
    state = obj.state if type(obj) is Opaque else obj
    out: dict[str, Any] = {}
    for part in state if type(state) is tuple else (state,):
        if type(part) is dict:
            out.update((key, value) for key, value in part.items() if type(key) is str)
    return out


def _ints(value: object) -> Ints | None:
    """Return non-negative ints as a tuple; None for anything else."""
    if isinstance(value, tuple | list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value):
        return tuple(value)
    return None


def dtensor(made: object, state: object, facts: Any) -> DTensor | None:
    """Return the DTensor of a state; None if it is not understood.

    Parameters
    ----------
    made : MetaTensor
        The whole tensor.
    state : object
        Its attributes: ``_local_tensor`` and ``_spec``.
    facts : Facts
        See `tensorio.machine.rebuild_kinds`.
    """
    words = attributes(state)
    local, spec = words.get("_local_tensor"), attributes(words.get("_spec"))
    placements, mesh = spec.get("placements"), _mesh(spec.get("mesh"), facts)
    if type(made) is not MetaTensor or not (facts.is_tensor(local) or isinstance(local, TensorKind)):
        return None
    if mesh is None or not isinstance(placements, tuple | list) or len(placements) != len(mesh.shape):
        return None
    where = tuple(_placement(each) for each in placements)
    return DTensor(local, made.shape, made.dtype, where, mesh, requires_grad=made.requires_grad)


def _placement(obj: object) -> object:
    """Return a placement; an inert object of an unknown kind stays one."""
    if type(obj) is not Opaque or not obj.module.startswith("torch.distributed."):
        return obj
    words = attributes(obj)
    dim, factor, reduce_op = words.get("dim"), words.get("split_factor"), words.get("reduce_op")
    if obj.name == "Shard" and type(dim) is int:
        return Shard(dim)
    if obj.name == "_StridedShard" and type(dim) is int and type(factor) is int:
        return StridedShard(dim, factor)
    if obj.name == "Replicate":
        return Replicate()
    if obj.name in ("Partial", "_Partial") and type(reduce_op) is str:
        return Partial(reduce_op)
    return obj


def _mesh(obj: object, facts: Any) -> Mesh | None:
    """Return the mesh of an inert ``DeviceMesh``: with a layout over a map of ranks, or a tensor of them (to 2.8)."""
    words = attributes(obj)
    device = words.get("_device_type", words.get("device_type"))
    names = words.get("_mesh_dim_names", words.get("mesh_dim_names"))
    names = tuple(names) if isinstance(names, tuple | list) and all(type(n) is str for n in names) else None
    coordinate = _ints(words.get("_coordinate_on_dim"))
    if type(device) is not str:
        return None
    if "_layout" in words:
        axes = _axes(words["_layout"])
        if axes is None:
            return None
        flat = _ints(words.get("_flatten_rank_map"))
        shape = tuple(numel(sizes) for sizes, _ in axes)
        return Mesh(device, shape, names, None if flat is None else _ranks(axes, flat, words.get("_rank")), coordinate)
    grid = words.get("mesh")
    if not facts.is_tensor(grid):
        return None
    shape, ranks = facts.describe(grid)[1], _ints(words.get("_flatten_mesh_list"))
    return Mesh(device, shape, names, ranks if ranks is not None and len(ranks) == numel(shape) else None, coordinate)


def _axes(layout: object) -> list[tuple[Ints, Ints]] | None:
    """Return sizes and strides of each dimension of a ``_MeshLayout``."""
    words = attributes(layout)
    parts = words["axes"] if isinstance(words.get("axes"), tuple | list) else [layout]
    out = []
    for part in parts:
        axis = attributes(part)
        sizes, strides = _ints(axis.get("shape")), _ints(axis.get("stride"))
        if sizes is None or strides is None or len(sizes) != len(strides) or len(sizes) > 64:
            return None
        out.append((sizes, strides))
    return out if len(out) <= 64 else None


def _ranks(axes: list[tuple[Ints, Ints]], flat: Ints, rank: object) -> Ints | None:
    """Return the ranks of the mesh that this process is in.

    A layout says how far apart its ranks are in the map of all; a part of a
    mesh is there several times over, and the rank tells which one is meant.
    """
    dims = [(size, stride) for sizes, strides in axes for size, stride in zip(sizes, strides, strict=True)]
    if not all(size for size, _ in dims) or numel(tuple(size for size, _ in dims)) > len(flat):
        return None
    first = 0
    if type(rank) is int and rank in flat:
        first = flat.index(rank)
        first -= sum(first // stride % size * stride for size, stride in dims if stride)
    elif numel(tuple(size for size, _ in dims)) != len(flat):
        return None
    places = [
        first + sum(n * stride for n, (_, stride) in zip(at, dims, strict=True))
        for at in product(*(range(size) for size, _ in dims))
    ]
    return tuple(flat[place] for place in places) if min(places) >= 0 and max(places) < len(flat) else None
