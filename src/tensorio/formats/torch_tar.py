"""Tar torch files: what ``torch.save`` wrote up to 0.1.9.

A tar archive (`tensorio.formats._tar`) of four members::

    sys_info  pickle of a dict; nothing is made of it
    storages  pickle of a number; so often: pickle (key, location, storage class), i64 number of elements, elements;
              pickle [(key, key of the root, offset, number of elements), ...] of storages inside others
    tensors   pickle of a number; so often: pickle (key, storage key, tensor class), i32 rank, 4 unused bytes,
              i64 sizes, i64 strides, i64 offset
    pickle    the object; persistent ids are keys as text, or (class, source file, source) for classes of modules

All little-endian; offsets and strides count elements. `tensors` and the list of storages inside others may be missing:
some writers of such files know storages only, and mention them as later pickles do.

Source: ``legacy_load`` in ``torch/serialization.py`` of 2.13, and files of 2017.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorio import _unpickler
from tensorio.allowlist import ALLOWED
from tensorio.dtypes import BY_NAME
from tensorio.errors import HeaderError, TruncatedError, UnsupportedError, error_context, escaped
from tensorio.formats._base import Opened, OpenOptions, SaveOptions, StoredRecord, naming_budget
from tensorio.formats._decoded import BIG_ENDIAN_HOST, Decoded
from tensorio.formats._stream import located, read_count
from tensorio.formats._tar import BLOCK, Member, is_tar, members
from tensorio.pickles import Placed, Records, Rules
from tensorio.tensors import Table
from tensorio.values import TorchTag

if TYPE_CHECKING:
    from tensorio.pickles import Loaded
    from tensorio.plan import LaidOut
    from tensorio.storage.base import Storage

NAME = "torch_tar"
SUFFIXES = ()
OPENED_BY_SUFFIX = ()

MEMBERS = ("sys_info", "pickle", "tensors", "storages")
MAX_RANK = 64  # NumPy's


class _Kept(NamedTuple):
    """A storage: bytes of the file, as elements of one type; `made` for a tensor that has none."""

    key: str
    dtype: str
    offset: int
    nbytes: int
    made: bool = False

    @property
    def itemsize(self) -> int:
        return BY_NAME[self.dtype].itemsize


def recognises(head: bytes, storage: Storage) -> bool:
    """Tell by the first member's name; other tar archives are not torch's."""
    if not is_tar(head):
        return False
    at = 0 if head[156:157] != b"x" else 2 * BLOCK  # behind a header of time stamps
    return head[at : at + 100].split(b"\0", 1)[0].decode("latin-1") in MEMBERS


class _Layout:
    """The parts of an archive that a torch file has."""

    def __init__(self, storage: Storage, options: OpenOptions) -> None:
        if options.strict:
            raise HeaderError("strict: expected what torch writes today, found a tar archive, as it wrote up to 0.1.9")
        self.storage = storage
        self.options = options
        self.members = members(storage.view())
        self.pickle = self._member("pickle")
        self.records = _storages(storage.view(), self._member("storages"))
        self.placed = {kept.key: Placed(i, kept.dtype) for i, kept in enumerate(self.records)}
        if "tensors" in self.members:
            self.placed |= _tensors(storage.view(), self.members["tensors"], self.records)
        self.named = {kept.key: i for i, kept in enumerate(self.records) if not kept.made}

    def _member(self, name: str) -> Member:
        member = self.members.get(name)
        if member is None:
            raise HeaderError(f"expected a member {name!r}, found none: this tar archive was not written by torch.save")
        return member

    def known(self) -> Records:
        """The storages as records of the pickle machine."""
        extents = array("q")
        for kept in self.records:
            extents.extend((-1, 0, kept.nbytes) if BIG_ENDIAN_HOST else (0, kept.offset, kept.nbytes))
        return Records(array("q"), self.named, extents)

    def decoded(self) -> Decoded:
        """The storages in the order of a big-endian host."""

        def read(record: int) -> memoryview:
            kept = self.records[record]
            return self.storage.view()[kept.offset : kept.offset + kept.nbytes]

        def source(record: int) -> tuple[Storage, int, int]:
            return self.storage, self.records[record].offset, self.records[record].nbytes

        return Decoded(lambda i: self.records[i].nbytes, read, source, swapped=True, writable=self.options.writable)

    def run(self, leases: list[Any] | None, decode: Any = None, wanted: set[int] | None = None) -> Loaded:
        """Run the pickle machine over the object."""
        start, end = self.pickle.offset, self.pickle.offset + self.pickle.nbytes
        with located(start, self.pickle.name):
            return _unpickler.loads(
                self.storage.view()[start:end], self.known(), leases=leases, decode=decode, wanted=wanted,
                rules=self.options.rules(legacy=True), placed=self.placed,
                first_row=self.options.first_row, first_dim=self.options.first_dim,
            )  # fmt: skip


class _Reader:
    """Pickles and numbers in one member, back to back; offsets count from the start of the file."""

    def __init__(self, view: memoryview, member: Member, unknown: str = "error") -> None:
        self.view = view[: member.offset + member.nbytes]
        self.at = member.offset
        self._name = member.name
        self._rules = Rules(unknown)

    @property
    def left(self) -> int:
        return len(self.view) - self.at

    def pickle(self) -> Any:
        with located(self.at, self._name):
            loaded = _unpickler.loads(self.view, Records.none(), start=self.at, rules=self._rules)
        self.at = loaded.end
        return loaded.obj

    def number(self, value: object, what: str) -> int:
        """Check a number that a pickle gave."""
        if type(value) is not int or value < 0:
            raise self.wrong(f"expected {what}, found {escaped(value)}")
        return value

    def numbers(self, count: int, size: int) -> list[int]:
        raw = self.skip(count * size)
        return [int.from_bytes(raw[i : i + size], "little", signed=True) for i in range(0, len(raw), size)]

    def skip(self, nbytes: int) -> memoryview:
        if nbytes > self.left:
            raise TruncatedError(f"expected {nbytes} bytes, found {self.left}", record=self._name, offset=self.at)
        self.at += nbytes
        return self.view[self.at - nbytes : self.at]

    def wrong(self, message: str) -> HeaderError:
        return HeaderError(message, record=self._name, offset=self.at)


def _storages(view: memoryview, member: Member) -> list[_Kept]:
    """The storages of a file: those with bytes of their own, then those inside others."""
    reader = _Reader(view, member)
    found: dict[str, _Kept] = {}
    for _ in range(reader.number(reader.pickle(), "the number of storages")):
        item = reader.pickle()
        if type(item) is not tuple or len(item) != 3:
            raise reader.wrong("expected (key, location, storage class)")
        key, dtype = _key(item[0], reader), _element_type(item[2], reader, "Storage")
        with error_context(record=member.name):
            count = read_count(reader.view, reader.at)
        reader.skip(8)
        nbytes = count * BY_NAME[dtype].itemsize
        if found.setdefault(key, kept := _Kept(key, dtype, reader.at, nbytes)) is not kept:
            raise reader.wrong(f"two storages have the key {escaped(key)}")
        reader.skip(nbytes)
    if reader.left:
        for item in _list(reader):
            kept = _inner(item, found, reader)
            if found.setdefault(kept.key, kept) is not kept:
                raise reader.wrong(f"two storages have the key {escaped(kept.key)}")
    return list(found.values())


def _list(reader: _Reader) -> list[Any]:
    items = reader.pickle()
    if type(items) is not list:
        raise reader.wrong("expected a list of storages inside others")
    if reader.left:
        raise reader.wrong(f"expected the end of the member, found {reader.left} more bytes")
    return items


def _inner(item: object, found: dict[str, _Kept], reader: _Reader) -> _Kept:
    """A storage that is a part of another: (key, key of the root, offset, number of elements)."""
    if type(item) is not tuple or len(item) != 4:
        raise reader.wrong("expected (key, key of the root, offset, number of elements)")
    key, root = _key(item[0], reader), found.get(_key(item[1], reader))
    if root is None:
        raise reader.wrong(f"storage {escaped(key)} is inside {escaped(item[1])}, which is not there")
    offset, count = (reader.number(n, "an offset and a number of elements") for n in item[2:])
    if offset + count > root.nbytes // root.itemsize:
        raise reader.wrong(
            f"storage {escaped(key)} leaves its root: {count} elements at {offset} of {root.nbytes // root.itemsize}"
        )
    return _Kept(key, root.dtype, root.offset + offset * root.itemsize, count * root.itemsize)


def _tensors(view: memoryview, member: Member, records: list[_Kept]) -> dict[str, Placed]:
    """What the keys of tensors stand for; appends a storage of no bytes for each tensor that has none."""
    # The class of a tensor is only looked at: it says nothing that its storage's doesn't.
    reader = _Reader(view, member, unknown="opaque")
    numbers = {kept.key: i for i, kept in enumerate(records)}
    placed: dict[str, Placed] = {}
    for _ in range(reader.number(reader.pickle(), "the number of tensors")):
        item = reader.pickle()
        if type(item) is not tuple or len(item) != 3:
            raise reader.wrong("expected (key, storage key, tensor class)")
        key, dtype = _key(item[0], reader), _element_type(item[2], reader, "Tensor")
        if key in numbers or key in placed:
            raise reader.wrong(f"two tensors or storages have the key {escaped(key)}")
        record = len(records) if item[1] is None else numbers.get(_key(item[1], reader))
        if record is None:
            raise reader.wrong(f"tensor {escaped(key)} is in storage {escaped(item[1])}, which is not there")
        if item[1] is None:
            records.append(_Kept(key, dtype, 0, 0, made=True))
        elif records[record].dtype != dtype:
            raise reader.wrong(f"tensor {escaped(key)} of {dtype} is in a storage of {records[record].dtype}")
        placed[key] = _place(reader, record, records[record])
    if reader.left:
        raise reader.wrong(f"expected the end of the member, found {reader.left} more bytes")
    return placed


def _place(reader: _Reader, record: int, kept: _Kept) -> Placed:
    rank, _ = reader.numbers(2, 4)
    if not 0 <= rank <= MAX_RANK:
        raise reader.wrong(f"expected a rank of 0 to {MAX_RANK}, found {rank}")
    size, stride = tuple(reader.numbers(rank, 8)), tuple(reader.numbers(rank, 8))
    (offset,) = reader.numbers(1, 8)
    if min((offset, *size, *stride)) < 0:
        raise reader.wrong("expected sizes, strides and an offset that are not negative")
    if rank == 0 and kept.nbytes == 0:
        size, stride = (0,), (1,)  # torch had no 0-dim tensors then: this is how it wrote an empty one
    return Placed(record, kept.dtype, offset, size, stride)


def _key(value: object, reader: _Reader) -> str:
    """A key as text: it is the address of a C structure, as a number."""
    if type(value) is not int and type(value) is not str:
        raise reader.wrong(f"expected a key, found {type(value).__name__}")
    return str(value)[:100]


def _element_type(cls: object, reader: _Reader, noun: str) -> str:
    """The element type of a class such as ``torch.FloatStorage`` or ``torch.cuda.FloatTensor``."""
    if isinstance(cls, TorchTag):
        module, _, name = cls.rpartition(".")
    else:
        module, name = getattr(cls, "module", ""), getattr(cls, "name", "")
    entry = ALLOWED.get((module, f"{name.removesuffix(noun)}Storage")) if name.endswith(noun) else None
    if entry is None or entry.kind != "storage" or getattr(cls, "args", None) is not None:
        raise reader.wrong(f"expected the class of a {noun.lower()}")
    return entry.dtype


def open(storage: Storage, options: OpenOptions) -> Opened:
    """Read the members' headers and pickles, and find the storages; touches none but the number in front of each."""
    layout = _Layout(storage, options)
    tree, rows, dims, *_ = layout.run(None)
    decoded = layout.decoded()
    decoded.place(rows)
    return Opened(
        NAME,
        Table([], rows, dims),
        [storage, *decoded.storages],
        tree=tree,
        flat=False,
        budget=naming_budget(layout.pickle.nbytes),
        records=lambda: (StoredRecord(f"storages/{k.key}", 0, k.offset, k.nbytes, None, k.nbytes)
                         for k in layout.records),
        fill=lambda wanted: _filled(layout, wanted),
    )  # fmt: skip


def _filled(layout: _Layout, wanted: set[int] | None) -> object:
    return layout.run([layout.storage.lease()], layout.decoded().lease, wanted).obj


def load(storage: Storage, options: OpenOptions) -> object:
    """Return what was saved, with arrays at the tensors."""
    return _filled(_Layout(storage, options), None)


def plan(obj: object, options: SaveOptions) -> LaidOut:
    """Refuse: nothing writes this format any more."""
    raise UnsupportedError("tar torch files are read only; save as .pt (format 'torch_zip') instead")
