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
    PREFIX/model.json, attributes.pkl, tensors/N     in place of the pickles and their storages, in torch 1.0 to 1.2

Tensors are named by their attributes, as in ``torch.jit.load(path).state_dict()``;
constants are called ``constants.N``. Classes of the file are kept as `Opaque`
objects, under whatever rule for unknown names: nothing of them is looked for.

Source: ``torch/csrc/jit/serialization`` (pickler, unpickler, import) of torch
2.1 to 2.13, checked against files of 2.13.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from tensorio.dtypes import BY_NAME
from tensorio.errors import HeaderError, UnsupportedError, error_context
from tensorio.formats._base import Opened
from tensorio.formats._pt2_config import Rows
from tensorio.formats._script_model import payloads
from tensorio.formats._torch_archive import MAX_PICKLE, Pickled, Pickles, TorchArchive
from tensorio.formats._zip_kind import LOCAL_HEADER, kind
from tensorio.pickles import Records
from tensorio.tensors import Table, first_duplicate
from tensorio.values import Opaque

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tensorio.formats._base import OpenOptions, SaveOptions, StoredRecord
    from tensorio.plan import LaidOut
    from tensorio.storage.base import Storage

NAME = "torchscript"
SUFFIXES = ()
OPENED_BY_SUFFIX = ()

OWN = "__torch__"  # what the names of the file's own classes begin with
# Persistent ids of these have a sixth part, as legacy files do; torch 1.3 and 1.4 write version 1.
OLD_VERSIONS = ("1\n", "2\n")
DATA, CONSTANTS, BYTECODE = "data", "constants", "bytecode"
EXTRA, MODEL, ATTRIBUTES = "extra/", "model.json", "attributes.pkl"


def recognises(head: bytes, storage: Storage) -> bool:
    """Tell by the names of the records."""
    return head[:4] == LOCAL_HEADER and kind(storage) == NAME


class _Layout(TorchArchive):
    """The parts of an archive that a script module has."""

    def __init__(self, storage: Storage, options: OpenOptions) -> None:
        super().__init__(storage, options, "torch.jit.save")
        self.check_version()
        self.model = self.others.get(self.full(MODEL))
        if self.model is not None:
            if self.full(f"{DATA}.pkl") in self.others:
                raise HeaderError(f"expected {MODEL} or {DATA}.pkl, found both")
            return
        parts = [self._part(DATA), self._part(CONSTANTS)]
        if self.full(f"{BYTECODE}.pkl") in self.others and self._keys(BYTECODE):
            # Without storages of its own, its tensors are those of the constants.
            parts.append(self._part(BYTECODE))
        self.pickles = Pickles(self, parts, self.is_swapped())

    def _part(self, name: str) -> Pickled:
        old = self.text("version") in OLD_VERSIONS
        rules = self.options.rules(OWN, legacy=old)._replace(spare=self.options.spare // 3)
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

    def _attributes(self) -> object:
        """What is beside model.json since torch 1.1; tensors are `Opaque` objects with their numbers."""
        from tensorio import _unpickler

        record = self.others.get(self.full(ATTRIBUTES))
        if record is None:
            return ()
        with error_context(record=self.full(ATTRIBUTES)):
            data = self.archive.checked(record, MAX_PICKLE)
            return _unpickler.loads(data, Records(array("q"), {}, array("q")), rules=self.options.rules(OWN)).obj

    def flat(self) -> Opened:
        """What a file of torch 1.0 to 1.2 has: tensors by name."""
        assert self.model is not None
        swapped = self.is_swapped()
        rows, names = Rows(), []
        places, decoded = self.extents(swapped), self.decoded(swapped)
        with error_context(record=self.full(MODEL)):
            for name, payload in payloads(self.archive.checked(self.model, MAX_PICKLE), self._attributes()):
                record = self.require(payload.record)
                storage, start, room = places[3 * record : 3 * record + 3]
                dtype = BY_NAME[payload.dtype]
                if storage < 0:
                    storage = decoded.index(record, dtype.code)
                assert payload.view is not None
                with error_context(record=name):
                    rows.add(dtype, payload.flags, payload.view, storage, start, room)
                names.append(name)
        if len(set(names)) != len(names):
            raise HeaderError("duplicate tensor name", record=first_duplicate(names))
        folders = (self.full("tensors/"),)
        return Opened(
            NAME,
            Table(names, rows.rows, rows.dims),
            [self.storage, *decoded.storages],
            metadata=self.notes(EXTRA) or None,
            records=lambda: iter(self.archive.records(folders)),
        )


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
    if layout.model is not None:
        return layout.flat()
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
    if layout.model is not None:
        opened = layout.flat()
        arrays = _arrays_of(opened)
        return dict(zip(opened.table.names, arrays, strict=True))
    return layout.tree(layout.pickles.fill(None))


def _arrays_of(opened: Opened) -> Sequence[object]:
    from tensorio import _arrays

    return _arrays.views(opened.table.rows, opened.table.dims, [storage.lease() for storage in opened.storages])


def plan(obj: object, options: SaveOptions) -> LaidOut:
    """Refuse: a script module can't be made of its weights."""
    raise UnsupportedError("TorchScript can't be written without its code; save as .pt or .safetensors")
