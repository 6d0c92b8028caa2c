"""torch.package: the pickles of what ``torch.package.PackageExporter`` writes, without its code.

A zip archive by torch's writer (`tensorio.formats._torch_archive`)::

    PREFIX/.data/N.storage              one storage each, raw
    PREFIX/.data/extern_modules         names of modules, by lines; not read
    PREFIX/.data/ts_code/N/data.pkl     a script module, see `tensorio.formats.torchscript`
    PREFIX/.data/version, PREFIX/.data/python_version, PREFIX/byteorder, PREFIX/.data/serialization_id
    PREFIX/data/N, PREFIX/extern_modules, PREFIX/version      the same, as torch 1.8 has it
    PREFIX/PACKAGE/RESOURCE             a pickle, text or bytes
    PREFIX/PACKAGE/MODULE.py            source text; not read

The object is a dict of the resources that are pickles, by their names without
PREFIX; script modules are in it as ``.data/ts_code/N``. Classes that the
package brings along are unknown names like any other.

Source: ``torch/package`` of torch 2.13.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tensorio.errors import UnsupportedError
from tensorio.formats._base import Opened
from tensorio.formats._torch_archive import MAX_PICKLE, Pickled, Pickles, TorchArchive
from tensorio.formats._zip_kind import LOCAL_HEADER, kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tensorio.formats._base import OpenOptions, SaveOptions, StoredRecord
    from tensorio.pickles import Rules
    from tensorio.plan import LaidOut
    from tensorio.storage.base import Storage

NAME = "torch_package"
SUFFIXES = ()
OPENED_BY_SUFFIX = ()

OWN = "__torch__"  # what the names of script modules' classes begin with
STORAGE = ".storage"
_SCRIPT = re.compile(r"\.data/ts_code/\d+/data\.pkl\Z")
_SIDE = re.compile(r"\.data/|byteorder\Z|.*\.py\Z", re.DOTALL)
OLD_FOLDER = "data/"  # of the storages, in torch 1.8
_OLD_SIDE = re.compile(r"data/[0-9]+\Z|(?:extern_modules|version|byteorder)\Z|.*\.py\Z", re.DOTALL)
_KEYS = {".data/": r".*\.storage\Z", OLD_FOLDER: r"[0-9]+\Z"}


def recognises(head: bytes, storage: Storage) -> bool:
    """Tell by the names of the records."""
    return head[:4] == LOCAL_HEADER and kind(storage) == NAME


class _Layout(TorchArchive):
    """The parts of an archive that a package has."""

    def __init__(self, storage: Storage, options: OpenOptions) -> None:
        super().__init__(storage, options, "torch.package")
        self.folder = ".data/" if self.full(".data/extern_modules") in self.others else OLD_FOLDER
        old = self.folder == OLD_FOLDER
        side = _OLD_SIDE if old else _SIDE
        self.require("extern_modules" if old else ".data/extern_modules")
        self.check_version("version" if old else ".data/version")
        self.storages = re.compile(re.escape(self.full(self.folder)) + _KEYS[self.folder], re.DOTALL)
        folder = self.full("")
        self.resources: list[str] = []
        self.skipped: list[str] = []
        scripts: list[str] = []
        for full, record in self.others.items():
            name = full.removeprefix(folder)
            if _SCRIPT.match(name):
                scripts.append(name)
            elif not side.match(name):
                (self.resources if self._is_pickle(record) else self.skipped).append(name)
        keys, script_keys = self._storages(self.full(self.folder))
        spare = options.spare // max(1, len(self.resources) + len(scripts))
        # Keys of storages are numbers here, as they were in files before zip.
        rules, own = (options.rules(prefix, legacy=True)._replace(spare=spare) for prefix in ("", OWN))
        parts = [self._part(name, keys, rules) for name in self.resources]
        parts += [self._part(name, script_keys, own) for name in scripts]
        self.resources += [name.removesuffix("/data.pkl") for name in scripts]
        self.pickles = Pickles(self, parts, self.is_swapped())

    def _is_pickle(self, record: int) -> bool:
        """Whether a resource begins and ends as pickles do."""
        data = self.archive.read(record, MAX_PICKLE)
        return len(data) > 2 and data[0] == 0x80 and 2 <= data[1] <= 5 and data[-1] == ord(".")

    def _storages(self, folder: str) -> tuple[dict[str, int], dict[str, int]]:
        """The records of storages as pickles name them, and as script modules do."""
        full = {name[len(folder) :]: record for name, record in self.others.items()
                if self.storages.match(name)}  # fmt: skip
        return {name.removesuffix(STORAGE): record for name, record in full.items()}, full

    def _part(self, name: str, keys: dict[str, int], rules: Rules) -> Pickled:
        return Pickled(self.full(name), self.require(name), keys, rules)

    def tree(self, objects: list[Any]) -> dict[str, Any]:
        """Names of resources to objects."""
        return dict(zip(self.resources, objects, strict=True))

    def records(self) -> Iterator[StoredRecord]:
        """All records; tensors may be in storages."""
        for record in self.archive.records((self.full(self.folder),)):
            yield record._replace(payload=record.payload and bool(self.storages.match(record.name)))


def open(storage: Storage, options: OpenOptions) -> Opened:
    """Read the directory and the pickles; touches at most one page per record besides."""
    if options.strict:
        raise UnsupportedError("strict=True is for files of torch.save and safetensors; there is no such layout here")
    layout = _Layout(storage, options)
    objects, table, storages = layout.pickles.open()
    return Opened(
        NAME,
        table,
        storages,
        tree=layout.tree(objects),
        flat=False,
        budget=layout.pickles.budget(),
        records=layout.records,
        fill=lambda wanted: layout.tree(layout.pickles.fill(wanted)),
        skipped=tuple(layout.skipped),
    )


def load(storage: Storage, options: OpenOptions) -> object:
    """Return the resources that are pickles, with arrays at the tensors."""
    if options.strict:
        open(storage, options)
    layout = _Layout(storage, options)
    return layout.tree(layout.pickles.fill(None))


def plan(obj: object, options: SaveOptions) -> LaidOut:
    """Refuse: packages are read only."""
    raise UnsupportedError("packages of torch.package are read only; save as .pt")
