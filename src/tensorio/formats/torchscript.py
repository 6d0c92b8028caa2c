r"""TorchScript: the weights and constants of what ``torch.jit.save`` writes, without its code.

A zip archive by torch's writer (`tensorio.formats._torch_archive`)::

    PREFIX/extra/NAME           notes of the writer's
    PREFIX/data/KEY             one storage each, raw
    PREFIX/data.pkl             the module: objects of classes below __torch__, with dicts of attributes
    PREFIX/code/...             source text and where it comes from; not read
    PREFIX/constants/KEY        storages of
    PREFIX/constants.pkl        a tuple of what the code refers to by number; all weights of a frozen module
    PREFIX/bytecode.pkl         for the lite interpreter (.ptl): code, with constants in bytecode/ (until about 1.9)
    PREFIX/traced_inputs.pkl    examples, whose elements are not saved; not read
    PREFIX/version              "3\n"; 2 to 10
    PREFIX/byteorder, PREFIX/.data/serialization_id

Tensors are named by their attributes, as in ``torch.jit.load(path).state_dict()``;
constants are called ``constants.N``. Classes of the file are kept as `Opaque`
objects, under whatever rule for unknown names: nothing of them is looked for.

Source: ``torch/csrc/jit/serialization`` (pickler, unpickler, import) of torch
2.1 to 2.13, checked against files of 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorio.errors import HeaderError, UnsupportedError
from tensorio.formats._base import Opened
from tensorio.formats._torch_archive import Pickled, Pickles, TorchArchive
from tensorio.formats._zip_kind import LOCAL_HEADER, kind
from tensorio.values import Opaque

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tensorio.formats._base import OpenOptions, SaveOptions, StoredRecord
    from tensorio.plan import Plan
    from tensorio.storage import Storage

NAME = "torchscript"
SUFFIXES = ()
OPENED_BY_SUFFIX = ()

OWN = "__torch__"  # what the names of the file's own classes begin with
DATA, CONSTANTS, BYTECODE = "data", "constants", "bytecode"
EXTRA = "extra/"


def recognises(head: bytes, storage: Storage) -> bool:
    """Tell by the names of the records."""
    return head[:4] == LOCAL_HEADER and kind(storage) == NAME


class _Layout(TorchArchive):
    """The parts of an archive that a script module has."""

    def __init__(self, storage: Storage, options: OpenOptions) -> None:
        super().__init__(storage, options, "torch.jit.save")
        if self.full("model.json") in self.others:
            raise UnsupportedError(
                "TorchScript of before 1.4 (it has a record model.json) is not read; load it with a later torch and "
                "save it again"
            )
        self.check_version()
        parts = [self._part(DATA), self._part(CONSTANTS)]
        if self.full(f"{BYTECODE}.pkl") in self.others and self._keys(BYTECODE):
            # Without storages of its own, its tensors are those of the constants.
            parts.append(self._part(BYTECODE))
        self.pickles = Pickles(self, parts, self.is_swapped())

    def _part(self, name: str) -> Pickled:
        rules = self.options.rules(OWN)._replace(spare=self.options.spare // 3)
        return Pickled(self.full(f"{name}.pkl"), self.require(f"{name}.pkl"), self._keys(name), rules)

    def _keys(self, folder: str) -> dict[str, int]:
        start = self.full(f"{folder}/")
        return {name[len(start) :]: record for name, record in self.others.items() if name.startswith(start)}

    def tree(self, objects: list[Any]) -> Any:
        """The module, with what it has beside its attributes under names of their own."""
        module, constants, *bytecode = objects
        if type(constants) is not tuple:
            raise HeaderError(
                f"expected a tuple, found {type(constants).__name__}", record=self.full(f"{CONSTANTS}.pkl")
            )
        extra: dict[str, Any] = {CONSTANTS: constants} if constants else {}
        extra.update((BYTECODE, code) for code in bytecode)
        if extra and type(module) is Opaque and (module.state is None or type(module.state) is dict):
            state = dict(module.state or {})
            state.update((_free(name, state), value) for name, value in extra.items())
            module.state = state
        elif extra:
            return {DATA: module, **extra}
        return module

    def records(self) -> Iterator[StoredRecord]:
        """All records; tensors may be in those in folders of storages."""
        return iter(self.archive.records(tuple(self.full(f"{name}/") for name in (DATA, CONSTANTS, BYTECODE))))


def _free(name: str, taken: dict[str, Any]) -> str:
    """A name that no attribute has."""
    number = 1
    free = name
    while free in taken:
        number += 1
        free = f"{name}#{number}"
    return free


def open(storage: Storage, options: OpenOptions) -> Opened:
    """Read the directory and the pickles; touches at most one page per record."""
    if options.strict:
        raise UnsupportedError("strict=True is for files of torch.save and safetensors; there is no such layout here")
    layout = _Layout(storage, options)
    objects, table, storages = layout.pickles.open()
    return Opened(
        NAME,
        table,
        storages,
        metadata=layout.notes(EXTRA) or None,
        tree=layout.tree(objects),
        flat=False,
        budget=layout.pickles.budget(),
        records=layout.records,
        fill=lambda wanted: layout.tree(layout.pickles.fill(wanted)),
    )


def load(storage: Storage, options: OpenOptions) -> object:
    """Return the module as an `Opaque` object, with arrays at the tensors."""
    if options.strict:
        open(storage, options)
    layout = _Layout(storage, options)
    return layout.tree(layout.pickles.fill(None))


def plan(obj: object, options: SaveOptions) -> Plan:
    """Refuse: a script module can't be made of its weights."""
    raise UnsupportedError("TorchScript can't be written without its code; save as .pt or .safetensors")
