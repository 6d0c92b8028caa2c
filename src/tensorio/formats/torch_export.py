"""torch.export: the weights of a ``.pt2``.

A zip archive (`tensorio.formats._zip`); since 2.8, all names begin with one
folder::

    archive_format, archive_version              "pt2", "0"
    byteorder                                    "little" or "big"
    models/MODEL.json                            the graph; not read
    data/weights/MODEL_weights_config.json       name -> record, dtype, sizes, strides, offset
    data/weights/weight_K                        the raw bytes of a storage, or a file of torch.save
    data/constants/MODEL_constants_config.json   constants and buffers that are not saved, in the same way
    data/constants/tensor_K, custom_obj_K
    data/aotinductor/MODEL/weights_config.json   name -> [record, shape, stride, offset]; weights as files of torch.save
    extra/NAME                                   notes

Until 2.7: ``data/weights/MODEL.pt`` and ``data/constants/MODEL.pt``, files of
torch.save; until 2.6: ``serialized_state_dict.pt`` and
``serialized_constants.pt``, in no folder. Names are those of
``ExportedProgram.state_dict`` and ``.constants``; where there are several
models, below the model's.

Source: ``torch/export/pt2_archive`` of torch 2.13 and its schema
(``torch/_export/serde/schema.py``); older layouts: ``torch/export/__init__.py`` of their time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorio._unpickler import Leaf
from tensorio.dtypes import BY_NAME, DTYPES
from tensorio.errors import HeaderError, UnsupportedError, error_context, escaped
from tensorio.formats import _pt2_config as config
from tensorio.formats._base import Opened
from tensorio.formats._join import Joined, member_context, member_storage
from tensorio.formats._torch_archive import MAX_PICKLE, TorchArchive
from tensorio.formats._zip_kind import LOCAL_HEADER, kind
from tensorio.tensors import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tensorio.formats._base import OpenOptions, SaveOptions, StoredRecord
    from tensorio.plan import LaidOut
    from tensorio.storage.base import Storage

NAME = "torch_export"
SUFFIXES = ()
OPENED_BY_SUFFIX = ()

WEIGHTS, CONSTANTS, AOTI, EXTRA = "data/weights/", "data/constants/", "data/aotinductor/", "extra/"
# The whole of the weights, or of the constants, as one file of torch.save; so named until 2.6.
FLAT = tuple(f"serialized_{part}.{suffix}" for part in ("state_dict", "constants") for suffix in ("pt", "json"))
FLAT_PROGRAM = "serialized_exported_program.json"
MODEL = "model"  # what a program without a name is called


def recognises(head: bytes, storage: Storage) -> bool:
    """Tell by the names of the records."""
    return head[:4] == LOCAL_HEADER and kind(storage) == NAME


class _Entry(NamedTuple):
    """A tensor, and where it is.

    Attributes
    ----------
    model : str
    fqn : str or None
        None for all that is in the part.
    part : str
        Name of a member that is a file itself; ``RAW`` or ``VIEWS``.
    key : str or None
        Name in the part; None for the part as a whole.
    """

    model: str
    fqn: str | None
    part: str
    key: str | None = None


RAW, VIEWS = "raw", "views"  # no member is called so: their names have folders, or a dot


class _Layout(TorchArchive):
    """The records of a ``.pt2``, and what its configurations say of them."""

    def __init__(self, storage: Storage, options: OpenOptions) -> None:
        super().__init__(storage, options, "torch.export.save")
        folder = self.full("")
        self.names = {name[len(folder) :]: record for name, record in self.others.items() if name.startswith(folder)}
        self._check_archive()
        self.swapped = self.is_swapped()
        self.models: dict[str, None] = {}  # in order
        self.entries: list[_Entry] = []
        self.members: dict[str, bool] = {}  # by name: whether it may have classes of its own
        self.raw: list[tuple[str, config.Payload]] = []
        self.views: list[tuple[str, config.View]] = []
        self.skipped: list[str] = []
        for name in self.names:
            self._take_weights(name)
        for name in self.names:
            self._take_compiled(name)
        if not self.models:
            raise UnsupportedError(self._why_empty())

    def find_prefix(self) -> str:
        """Return the folder that all records are in; in files by Python's zipfile, there is none."""
        first = self.archive.name(0) if self.archive.rows else ""
        flat = self.archive.names("")[2]
        return "" if "archive_format" in flat or FLAT_PROGRAM in flat else first.partition("/")[0]

    def _check_archive(self) -> None:
        form, version = self.text("archive_format"), self.text("archive_version")
        if form is None and FLAT_PROGRAM not in self.names:
            raise HeaderError("expected a record 'archive_format', found none: no archive of torch.export")
        if form not in (None, "pt2") or version not in (None, "0"):
            found = escaped(form if form not in (None, "pt2") else version)
            raise UnsupportedError(f"expected an archive of format pt2, version 0, found {found}")

    # -------------------------------------------------------- configurations

    def _take_weights(self, name: str) -> None:
        """Look at a record that may say where the weights or the constants of a model are."""
        for folder, suffix in ((WEIGHTS, "_weights_config.json"), (CONSTANTS, "_constants_config.json")):
            if name.startswith(folder) and name.endswith(suffix):
                self._take_config(name, folder, name[len(folder) : -len(suffix)])
            elif name.startswith(folder) and name.endswith(".pt"):
                self._take_whole(name, name[len(folder) : -len(".pt")])
        if name in FLAT:
            self._take_whole(name, MODEL)

    def _take_config(self, name: str, folder: str, model: str) -> None:
        self.models[model] = None
        with error_context(record=self.full(name)):
            for fqn, payload in config.payloads(self._json(name)):
                record = folder + payload.record
                if record not in self.names:
                    raise HeaderError(f"{escaped(fqn)} is in {escaped(record)}, of which there is no record")
                if not payload.pickled:
                    self.entries.append(_Entry(model, fqn, RAW, str(len(self.raw))))
                    self.raw.append((fqn, payload._replace(record=record)))
                elif payload.record.startswith("opaque_obj_"):
                    self.skipped.append(record)  # an object of Python's own pickle, never a tensor
                else:
                    self.entries.append(_Entry(model, fqn, record))
                    self.members[record] = payload.record.startswith("custom_obj_")  # by the script interpreter

    def _take_whole(self, name: str, model: str) -> None:
        self.models[model] = None
        if self.size(self.names[name]):  # empty: the program was saved without
            self.entries.append(_Entry(model, None, name))
            self.members[name] = False

    def _take_compiled(self, name: str) -> None:
        """Look at a record that may be the configuration of a compiled program; one beside its source says the same."""
        model = name[len(AOTI) : -len("/weights_config.json")]
        if not name.startswith(AOTI) or not name.endswith("/weights_config.json") or model in self.models:
            return
        self.models[model] = None
        with error_context(record=self.full(name)):
            for fqn, record, view in config.views(self._json(name)):
                member = WEIGHTS + record
                if member not in self.names:
                    raise HeaderError(f"{escaped(fqn)} is in {escaped(member)}, of which there is no record")
                self.members[member] = False
                self.entries.append(_Entry(model, fqn, VIEWS, str(len(self.views))))
                self.views.append((member, view))

    def _json(self, name: str) -> bytes | memoryview:
        return self.archive.checked(self.names[name], MAX_PICKLE)

    def _why_empty(self) -> str:
        if any(name.endswith(".blob") for name in self.names):
            return "the weights of this compiled program are a blob without an index: nothing says which is which"
        if any(name.startswith(AOTI) for name in self.names):
            return "the weights of this compiled program are inside its library; save the exported program instead"
        return "this exported program was saved without weights: it has no configuration of them"

    # --------------------------------------------------------------- contents

    def raw_tensors(self) -> Opened:
        """The tensors whose bytes are records, as a file of their own."""
        rows = config.Rows()
        places, decoded = self.extents(self.swapped), self.decoded(self.swapped)
        for fqn, payload in self.raw:
            assert payload.view is not None
            record, dtype = self.names[payload.record], BY_NAME[payload.dtype]
            storage, start, room = places[3 * record : 3 * record + 3]
            if storage < 0:
                storage = decoded.index(record, dtype.code)
            with error_context(record=fqn):
                rows.add(dtype, payload.flags, payload.view, storage, start, room)
        names = [str(i) for i in range(len(self.raw))]
        return Opened(NAME, Table(names, rows.rows, rows.dims), [self.storage, *decoded.storages])

    def compiled_tensors(self, joined: Joined, parts: dict[str, Any]) -> Opened:
        """The weights of compiled programs: views of tensors in members."""
        rows = config.Rows()
        for member, view in self.views:
            with member_context(self.full(member)):
                if not isinstance(parts[member], Leaf):
                    raise HeaderError(f"expected one tensor, found {type(parts[member]).__name__}")
                dtype, flags, _, _, storage, offset, nbytes = joined.row(parts[member])[:7]
                rows.add(DTYPES[dtype], flags, view, storage, offset, nbytes)
        names = [str(i) for i in range(len(self.views))]
        return Opened(NAME, Table(names, rows.rows, rows.dims), joined.storages)

    def tree(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Names to values, below the models' names if there are several."""
        models: dict[str, dict[str, Any]] = {model: {} for model in self.models}
        for model, fqn, part, key in self.entries:
            value = parts[part] if key is None else parts[part][key]
            if fqn is not None:
                found = {fqn: value}
            elif isinstance(value, Mapping):
                found = dict(value)
            else:
                raise HeaderError(f"expected a dict of tensors, found {type(value).__name__}", record=self.full(part))
            names = models[model]
            for name in found:
                if name in names:
                    raise HeaderError(f"{escaped(name)} is a weight and a constant", record=self.full(part))
            names.update(found)
        return models if len(models) > 1 else next(iter(models.values()))


def open(storage: Storage, options: OpenOptions) -> Opened:
    """Read the directory, the configurations and the pickles; touches no weights but those in pickles."""
    if options.strict:
        raise UnsupportedError("strict=True is for files of torch.save and safetensors; there is no such layout here")
    layout = _Layout(storage, options)
    joined = Joined(storage, options)
    inner = options.within(len(layout.members), storage.nbytes)
    parts: dict[str, Any] = {}
    for name, scripted in layout.members.items():
        member = member_storage(layout.archive, layout.names[name], inner)
        parts[name] = joined.add(layout.full(name), member, replace(inner, own="__torch__" if scripted else ""))
    joined.finish()
    parts[RAW] = joined.append(RAW, layout.raw_tensors())
    parts[VIEWS] = joined.append(VIEWS, layout.compiled_tensors(joined, parts))

    def fill(wanted: set[int] | None) -> dict[str, Any]:
        return layout.tree(dict(zip(parts, joined.fill(wanted), strict=True)))

    return Opened(
        NAME,
        joined.table(),
        joined.storages,
        metadata=layout.notes(EXTRA) or None,
        tree=layout.tree(parts),
        flat=False,
        budget=joined.budget + 16 * sum(layout.size(r) for name, r in layout.names.items() if name.endswith(".json")),
        records=lambda: _records(layout),
        fill=fill,
        skipped=tuple(layout.skipped),
    )


def _records(layout: _Layout) -> Iterator[StoredRecord]:
    weights = (layout.full(WEIGHTS), layout.full(CONSTANTS), *(layout.full(name) for name in FLAT))
    for record in layout.archive.records(weights):
        yield record._replace(payload=record.payload and not record.name.endswith("_config.json"))


def load(storage: Storage, options: OpenOptions) -> object:
    """Return names to arrays."""
    opened = open(storage, options)
    assert opened.fill is not None
    return opened.fill(None)


def plan(obj: object, options: SaveOptions) -> LaidOut:
    """Refuse: a program can't be made of its weights."""
    raise UnsupportedError("a .pt2 can't be written without its program; save as .pt or .safetensors")
