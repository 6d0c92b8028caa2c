"""What inference needs of a training checkpoint: the weights, without optimizer, schedule, RNG state and the like.

Trainers keep the weights under one key of a dict, or everything side by side.
The tables below are from the code that writes the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tensorio import formats
from tensorio.checkpoint._checkpoint import Checkpoint, open_checkpoint
from tensorio.checkpoint._choosing import Choice, like, part_of
from tensorio.checkpoint._packing import nbytes_of
from tensorio.checkpoint._shards import converted_shards, shard_target
from tensorio.checkpoint._watched import write_file
from tensorio.errors import TensorMismatchError, error_context, escaped
from tensorio.formats._base import SaveOptions
from tensorio.modules import is_module, state_dict
from tensorio.plan import CheckedPlan
from tensorio.tp._patterns import Pattern
from tensorio.tree import Path, is_leaf, leaves

if TYPE_CHECKING:
    from tensorio.checkpoint._shards import Shards, ShardTarget
    from tensorio.formats._base import Format
    from tensorio.plan import Plan

    Progress = Callable[[int, int], object]
    Write = Callable[..., object]

__all__ = ["TRAINING", "WEIGHTS", "Stripped", "strip_file"]

# Where the weights are; the first that is there and holds tensors counts.
WEIGHTS: dict[str, str] = {
    "state_dict": "PyTorch Lightning, timm, mmengine, MoCo",
    "model_state_dict": "the PyTorch tutorial on saving, and most scripts after it",
    "model_state": "scripts",
    "model": "torchvision's references, fairseq, DeiT, Megatron-LM",
    "module": "DeepSpeed (mp_rank_00_model_states.pt)",
    "net": "scripts",
    "network": "scripts",
    "weights": "scripts",
    "params": "BasicSR",
}
# What is left out where none of those keys is there: patterns of keys, by who writes them.
TRAINING: dict[str, str] = {
    "optimizers": "{optimizer,optimizers} {optimizer,optim}_{state,states,state_dict} *_optimizer optimizer_* *_optim",
    "fairseq": "last_optimizer_state extra_state",
    "schedules": "{lr_,}{scheduler,schedulers} *scheduler_state_dict *_scheduler scheduler_*",
    "mixed precision": "{scaler,grad_scaler,scaler_state_dict,amp,amp_scaling_state,loss_scaler}",
    "random numbers": "{rng,random}_{state,states} *_rng_state rng np_random_state",
    "PyTorch Lightning": "{loops,callbacks,datamodule,pytorch-lightning_version}",
    "data position": "{dataloader,train_dataloader,data_state,sampler,iterator,train_iterator,message_hub}",
}
# Keys of dicts that are left out there, too, whatever they are under: by who writes them.
STATES: dict[str, tuple[str, ...]] = {
    "torch.optim": ("state", "param_groups"),
    "Trainer of transformers: rng_state.pth": ("python", "numpy", "cpu"),
    "accelerate: random_states_0.pkl": ("random_state", "numpy_random_seed", "torch_manual_seed"),
}
# Bytes that looking for a tensor in an entry may cost; see `tensorio.tree.leaves`.
LOOK = 64 << 20
_TRAINING = tuple(Pattern(text) for texts in TRAINING.values() for text in texts.split())


@dataclass(frozen=True)
class Stripped:
    """What `tensorio.strip` kept and dropped.

    Attributes
    ----------
    path : str or None
        As given; None for a file object.
    entry : str or None
        Key that the weights were under; None if they were side by side with the rest.
    kept : tuple of str
        Names of the tensors that are written, as in the source.
    dropped : dict of str to int
        What was left out, by key of the outermost dict, and the bytes of its tensors.
    nbytes : int
        Bytes of all files; those they would have had, with ``dry_run=True``.
    """

    path: str | None
    entry: str | None
    kept: tuple[str, ...]
    dropped: dict[str, int]
    nbytes: int

    @property
    def dropped_nbytes(self) -> int:
        """Bytes of all tensors that were left out."""
        return sum(self.dropped.values())


def strip_file(
    src: Any, dst: Any, *, keep: str | None, include: str | Iterable[str] | None, exclude: str | Iterable[str] | None,
    flat: bool, format: str | None, max_shard_size: int | str | None, dry_run: bool, reading: dict[str, Any],
    durable: bool, progress: Progress | None,
) -> Stripped:  # fmt: skip
    """Strip; see `tensorio.strip`."""
    if max_shard_size is None:
        lay_out = partial(_one, formats.for_target(dst, format), flat)
    else:
        lay_out = partial(_several, shard_target(dst, format), nbytes_of(max_shard_size))
    choice = Choice(include, exclude)
    with open_checkpoint(src, **reading) as checkpoint:
        with error_context(path=checkpoint._name):
            part = _Part(checkpoint, keep, choice)
            nbytes, write = lay_out(dst, part, checkpoint.check_unchanged)
        if not dry_run:
            write(durable=durable, progress=progress)
        return Stripped(formats.target_name(dst), part.entry, tuple(part.kept), part.dropped(), nbytes)


def _one(target: Format, flat: bool, dst: Any, part: _Part, check: Callable[[], object]) -> tuple[int, Write]:
    """Lay out one file: its bytes, and what writes it."""
    plan = part.plan(target, flat or not hasattr(target, "plan_tree"), formats.target_name(dst))
    return plan.nbytes, partial(write_file, CheckedPlan(plan, check), dst)


def _several(target: ShardTarget, most: int, _dst: Any, part: _Part, check: Callable[[], object]) -> tuple[int, Write]:
    """Lay out files of limited size and an index: the bytes of all, and what writes them."""
    shards = part.shards(target, most)
    return shards.nbytes, partial(shards.write, check=check)


class _Part:
    """What is kept of a checkpoint.

    Attributes
    ----------
    entry : str or None
        Key of the weights.
    kept : list of str
        Names of tensors.
    """

    def __init__(self, checkpoint: Checkpoint, keep: str | None, choice: Choice) -> None:
        self._checkpoint = checkpoint
        self._choice = choice
        tree = checkpoint._opened.tree
        self._tree: dict[Any, Any] | None = tree if isinstance(tree, dict) else None
        self.entry = None if choice.only else self._entry(keep)
        self.kept = [fqn for fqn in checkpoint if choice.only or self._keeps(self._first(fqn))]
        if not choice.everything:
            chosen = choice.of(self.kept)
            self.kept = [fqn for fqn in self.kept if fqn in chosen]
        if not self.kept:
            raise TensorMismatchError(
                "no tensor would be left; keep= names the entry that has the weights, include= the tensors"
            )

    def _entry(self, keep: str | None) -> str | None:
        """The key that has the weights; None if they are not below one."""
        tree = self._tree or {}
        if keep is not None:
            if not _has_tensors(tree.get(keep)):
                near = ", ".join(escaped(key) for key, node in list(tree.items())[:20] if _has_tensors(node))
                raise TensorMismatchError(f"keep={escaped(keep)} is no entry with tensors; there are: {near or 'none'}")
            return keep
        return next((key for key in WEIGHTS if _has_tensors(tree.get(key))), None)

    def _first(self, fqn: str) -> object:
        """The outermost key of a tensor; in files of names only, the first level of its name."""
        if self._checkpoint._opened.flat:
            return fqn.partition(".")[0]
        return next(iter(self._checkpoint.paths[fqn]), "")

    def _keeps(self, key: object) -> bool:
        if self.entry is not None:
            return key == self.entry
        tree = self._tree or {}
        return not (_is_training(key) or _is_state(tree) or _is_state(tree.get(key)))

    def dropped(self) -> dict[str, int]:
        """What is not kept, by its outermost key, and its bytes."""
        out: dict[str, int] = {}
        kept = set(self.kept)
        for key in () if self._tree is None else self._tree:
            if self._choice.only or not self._keeps(key):
                out[str(key)] = 0
        for fqn, info in self._checkpoint.infos.items():
            if fqn not in kept:
                key = str(self._first(fqn))
                out[key] = out.get(key, 0) + info.nbytes
        return {key: nbytes for key, nbytes in out.items() if nbytes or not self._choice.only}

    def _names(self) -> dict[str, str]:
        """The names of the tensors below the key."""
        start = "" if self.entry is None else f"{self.entry}."
        return {fqn: fqn.removeprefix(start) for fqn in self.kept}

    def shards(self, target: ShardTarget, most: int) -> Shards:
        """Lay out files of limited size."""
        return converted_shards(self._checkpoint, target, most, self.kept, self._names(), compact=True)

    def plan(self, target: Format, flat: bool, name: str | None) -> Plan:
        """Lay out the file."""
        from tensorio.checkpoint._convert import convert_checkpoint, plan_tree  # needs NumPy

        checkpoint = self._checkpoint
        if flat or self._tree is None:
            exactly = _Exactly(self.kept)
            return convert_checkpoint(checkpoint, target, name, self._names(), choice=exactly, compact=True)[0]
        tree: Any = self._tree
        if not self._choice.only:
            tree = like(self._tree, [(key, node) for key, node in self._tree.items() if self._keeps(key)])
        kept = set(self.kept)
        paths = [(path, fqn in kept) for fqn, path in checkpoint.paths.items() if path and path[0] in tree]
        tree, paths = _without_classes(tree, paths, kept)
        tree = part_of(tree, paths, self._choice.only) if not self._choice.everything else tree
        return plan_tree(checkpoint, target, tree, SaveOptions(compact=True, name=name))


def _without_classes(tree: Any, paths: list[tuple[Path, bool]], kept: set[str]) -> tuple[Any, list[tuple[Path, bool]]]:
    """A tree with the state dicts of pickled modules in their places, and the paths in it."""
    states = {key: state_dict(node) for key, node in tree.items() if is_module(node)}
    if not states:
        return tree, paths
    paths = [(path, wanted) for path, wanted in paths if path[0] not in states]
    paths += [((key, name), f"{key}.{name}" in kept) for key, state in states.items() for name in state]
    return like(tree, [(key, states.get(key, node)) for key, node in tree.items()]), paths


class _Exactly(Choice):
    """The tensors of a list."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(None, None)
        self._names = set(names)

    everything = False
    only = True

    def of(self, names: Iterable[str]) -> set[str]:
        """Return them."""
        return self._names


def _has_tensors(node: Any) -> bool:
    """Whether a value is a container (or a pickled module) with a tensor in it."""
    if node is None or is_leaf(node):
        return False
    return any(is_leaf(leaf) for _, leaf in leaves(node, LOOK))


def _is_state(node: object) -> bool:
    """Whether a value is what an optimizer or random numbers go on from, by its own keys; or a list of such."""
    if isinstance(node, list | tuple) and node:
        return all(isinstance(item, dict) and _is_state(item) for item in node)
    return isinstance(node, dict) and any(all(key in node for key in keys) for keys in STATES.values())


def _is_training(key: object) -> bool:
    return isinstance(key, str) and any(pattern.fits(key) for pattern in _TRAINING)
