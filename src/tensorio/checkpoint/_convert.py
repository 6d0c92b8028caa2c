"""Write a checkpoint again in another format: extents of the source become records of the target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from tensorio._unpickler import Leaf
from tensorio.checkpoint._choosing import Choice, part_of
from tensorio.dtypes import BY_NAME, c_strides
from tensorio.errors import TensorMismatchError, UnsupportedError, error_context, escaped
from tensorio.formats._base import SaveOptions
from tensorio.formats._items import Items, c_order
from tensorio.plan import SMALL
from tensorio.storage.base import LazyStorage
from tensorio.tensors import CONJ, NEG, first_duplicate
from tensorio.tree import is_kind, is_leaf, leaves, name_of

if TYPE_CHECKING:
    from tensorio.checkpoint._checkpoint import Checkpoint
    from tensorio.formats._base import Format
    from tensorio.plan import LaidOut, Plan, Source
    from tensorio.storage.base import Storage
    from tensorio.tensors import TensorInfo

    Rename = Callable[[str], str] | Mapping[str, str]

__all__ = ["chosen_names", "convert_checkpoint", "convert_part", "others", "plan_tree", "renamed"]


def convert_checkpoint(
    checkpoint: Checkpoint,
    target: Format,
    name: str | None,
    rename: Rename | None,
    align: int | None = None,
    choice: Choice | None = None,
    compact: bool = False,
) -> tuple[Plan, list[str]]:
    """Plan the target file.

    Parameters
    ----------
    align, compact
        See `tensorio.save`.
    choice : Choice, optional
        Of the tensors, by the names they have in `checkpoint`.

    Returns
    -------
    plan : Plan
        Its sources are extents of the checkpoint, which must stay open until it is written.
    dropped : list of str
        Names of values that the target has no room for.
    """
    choice = choice or Choice(None, None)
    chosen = chosen_names(checkpoint, choice)
    names = renamed(chosen, rename)
    rest = [] if choice.only else others(checkpoint)
    if not hasattr(target, "plan_tree"):
        options = SaveOptions(metadata=checkpoint._opened.metadata, align=align, name=name)
        return target.plan_items(_items(checkpoint, names), options), rest  # type: ignore[attr-defined]
    tree = checkpoint._opened.tree
    if checkpoint._opened.flat or rename is not None:
        tree = {new: Leaf(checkpoint._table.index[fqn]) for fqn, new in names.items()}
    elif not choice.everything:
        wanted = set(chosen)
        tree = part_of(tree, [(path, fqn in wanted) for fqn, path in checkpoint.paths.items()], choice.only)
    plan = plan_tree(checkpoint, target, tree, SaveOptions(align=align, compact=compact, name=name))
    dropped = [f"__metadata__.{key}" for key in checkpoint.metadata]
    return plan, dropped + (rest if rename is not None else [])


def chosen_names(checkpoint: Checkpoint, choice: Choice) -> list[str]:
    """Return the names of the tensors that are chosen, in order."""
    chosen = set(checkpoint) if choice.everything else choice.of(checkpoint)
    return [fqn for fqn in checkpoint if fqn in chosen]


def convert_part(
    checkpoint: Checkpoint, target: Format, names: dict[str, str], name: str, compact: bool = False
) -> LaidOut:
    """Plan a file of some of the tensors, under the names that `names` gives to theirs, in a flat dict."""
    if hasattr(target, "plan_tree"):
        tree = {new: Leaf(checkpoint._table.index[fqn]) for fqn, new in names.items()}
        return plan_tree(checkpoint, target, tree, SaveOptions(compact=compact, name=name))
    options = SaveOptions(metadata=checkpoint._opened.metadata, name=name)
    return target.plan_items(_items(checkpoint, names), options)  # type: ignore[attr-defined, no-any-return]


def renamed(fqns: list[str], rename: Rename | None) -> dict[str, str]:
    """Return the new name of each tensor.

    Raises
    ------
    TensorMismatchError
        Two have the same.
    """
    if rename is None:
        return {fqn: fqn for fqn in fqns}
    new = {fqn: rename.get(fqn, fqn) if isinstance(rename, Mapping) else rename(fqn) for fqn in fqns}
    if len(set(new.values())) != len(new):
        raise TensorMismatchError(f"rename= gives two tensors the name {escaped(first_duplicate(new.values()))}")
    return new


def others(checkpoint: Checkpoint) -> list[str]:
    """Names of everything in the tree that is not a tensor."""
    opened = checkpoint._opened
    if opened.flat:
        return []
    found = leaves(opened.tree, opened.budget, kinds=True)
    return [
        f"{name_of(path)} ({type(node).__name__})" if is_kind(node) else name_of(path)
        for path, node in found if not is_leaf(node)
    ]  # fmt: skip


# ------------------------------------------------------------------- flat targets


def _items(checkpoint: Checkpoint, names: dict[str, str]) -> Items:
    """The tensors as contiguous bytes: extents as they are, or strided views gathered a piece at a time."""
    items = Items()
    for fqn, name in names.items():
        info = checkpoint.infos[fqn]
        items.add(name, info.dtype, info.shape).add(_source(checkpoint, info), info.nbytes)
    return items


def _source(checkpoint: Checkpoint, info: TensorInfo) -> Source:
    if len(info.chunks) != 1:
        raise UnsupportedError(
            "converting a tensor of several chunks is not available in this version", record=info.fqn
        )
    if info.contiguous and not info.flags & (CONJ | NEG):
        return _extent(checkpoint._storage(info.chunks[0].extent.storage), info.chunks[0].extent.offset, info.nbytes)
    return partial(_gathered, checkpoint, info)


def _extent(storage: Storage, offset: int, nbytes: int) -> Source:
    """Bytes of a storage: small ones by address, to be packed with their neighbours; others streamed."""
    if nbytes <= SMALL and not isinstance(storage, LazyStorage):
        return storage.view_for(offset, nbytes)[offset : offset + nbytes]
    return partial(storage.stream, offset, nbytes)


def _gathered(checkpoint: Checkpoint, info: TensorInfo) -> Iterator[memoryview]:
    """Elements of a strided view in C order; conjugation and negation are done a piece at a time, too."""
    from tensorio.machine.rebuild import lazy_bits

    table = checkpoint._table
    plain = checkpoint._plain(table, table.row_of(info.fqn))
    conj, neg = bool(info.flags & CONJ), bool(info.flags & NEG)
    yield from c_order(plain, partial(lazy_bits, conj=conj, neg=neg) if conj or neg else None)


# ------------------------------------------------------------------- tree targets


def plan_tree(checkpoint: Checkpoint, target: Any, tree: Any, options: SaveOptions) -> LaidOut:
    """Lay out a file of a tree whose leaves are rows of a checkpoint."""
    table = checkpoint._table

    def leaf(obj: Any) -> tuple[Any, ...]:
        info = table.info(obj.row, "")
        extent = info.chunks[0].extent
        dtype = BY_NAME[info.dtype]
        if dtype.packed:
            dtype, info = _unpacked(info)
        strides = info.chunks[0].strides
        return dtype.code, extent.storage, extent.offset, extent.nbytes, info.shape, strides, info.flags

    def source(space: int, lo: int, nbytes: int) -> Source:
        return _extent(checkpoint._storage(space), lo, nbytes)

    def gathered(obj: Any) -> Source:
        return partial(c_order, checkpoint._plain(table, obj.row))

    with error_context(path=checkpoint._name):
        return target.plan_tree(tree, leaf, source, options, gathered)  # type: ignore[no-any-return]


def _unpacked(info: TensorInfo) -> tuple[Any, TensorInfo]:
    """A tensor of two 4-bit numbers per byte, in torch's own terms."""
    if info.dtype != "float4_e2m1fn" or not info.shape or info.shape[-1] % 2:
        raise UnsupportedError(f"torch files have no dtype for {info.dtype} of shape {info.shape}")
    shape = (*info.shape[:-1], info.shape[-1] // 2)
    chunk = info.chunks[0]._replace(shape=shape, strides=c_strides(shape, 1))
    return BY_NAME["float4_e2m1fn_x2"], info._replace(shape=shape, chunks=(chunk,))
