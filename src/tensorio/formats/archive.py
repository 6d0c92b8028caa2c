"""Ordinary archives that hold checkpoints: zip and tar files with files of other formats in them.

The object is a dict of the members that are checkpoints, by name, such as
``{"policy.pth": {...}}``; what the other members are is left open
(`Opened.skipped`). A member that is stored as it is is read in place; one that
is packed is unpacked into memory when it is opened. Archives in archives are
opened up to four levels deep.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tensorio import _core, formats
from tensorio.errors import HeaderError, LimitError, TensorIOError, UnknownFormatError, UnsupportedError, escaped
from tensorio.formats._base import Opened
from tensorio.formats._join import Joined, member_storage
from tensorio.formats._tar import BLOCK, is_tar, members
from tensorio.formats._zip import CHECKED_ON_OPEN, Archive
from tensorio.formats._zip_kind import LOCAL_HEADER, MEMBERS, OTHER, kind
from tensorio.storage.base import MemoryStorage
from tensorio.storage.ranges import RangeStorage

if TYPE_CHECKING:
    from tensorio.formats._base import OpenOptions, SaveOptions, StoredRecord
    from tensorio.plan import LaidOut
    from tensorio.storage.base import Storage

NAME = "archive"
SUFFIXES = ()
OPENED_BY_SUFFIX = ()

MAX_MEMBERS = 1 << 16  # looked at; each costs a page of the file
CLAIMS = re.compile(r"\.(?:pt|pth|pt2|ptl|ckpt|safetensors)\Z", re.IGNORECASE)  # names of checkpoints, surely
HEAD = 4096  # bytes of a packed member that are unpacked to see what it is


def recognises(head: bytes, storage: Storage) -> bool:
    """Tell by names of members that checkpoints go by."""
    if head[:4] == LOCAL_HEADER:
        return kind(storage) == NAME
    return is_tar(head) and any(MEMBERS.search(name.encode()) for name in _tar_names(head, storage))


def _tar_names(head: bytes, storage: Storage) -> list[str]:
    try:
        return list(members(storage.view(), ordinary=True))
    except TensorIOError:
        return [head[:100].decode("latin-1")]  # damaged: the first one's tells whose error to show


class _Zip:
    """The members of a zip archive."""

    def __init__(self, storage: Storage) -> None:
        self.archive = Archive(storage)
        self.names = self.archive.names("")[2]
        if len(self.names) > MAX_MEMBERS:
            raise LimitError(f"archive of {len(self.names)} members; at most {MAX_MEMBERS} are looked at")

    def head(self, name: str) -> Storage:
        """The first bytes of a member."""
        offset, compressed, _, _, method, _ = _core.zip_record(self.archive.rows, self.names[name])
        raw = self.archive.storage.view()[offset : offset + compressed]
        if method == 0:
            return RangeStorage(self.archive.storage, offset, compressed)
        try:
            return MemoryStorage(zlib.decompressobj(-15).decompress(raw[:HEAD], HEAD))
        except zlib.error as error:
            raise HeaderError(f"deflated record: {error}", record=name, offset=offset) from None

    def member(self, name: str, options: OpenOptions) -> Storage:
        """The whole of it."""
        return member_storage(self.archive, self.names[name], options)

    def check(self, name: str) -> None:
        """Raise if its bytes changed since it was packed: it is called a checkpoint, or small."""
        record = self.names[name]
        if CLAIMS.search(name) or _core.zip_record(self.archive.rows, record)[1] <= CHECKED_ON_OPEN:
            self.archive.check(record)

    def records(self, joined: Joined) -> Iterator[StoredRecord]:
        """The archive's own records: their checksums cover all of each member."""
        return iter(self.archive.records())


class _Tar:
    """The members of a tar archive."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.names = members(storage.view(), ordinary=True)

    def head(self, name: str) -> Storage:
        """The whole of a member, too: nothing is packed here."""
        member = self.names[name]
        return RangeStorage(self.storage, member.offset, member.nbytes)

    def member(self, name: str, options: OpenOptions) -> Storage:
        """The whole of it."""
        return self.head(name)

    def check(self, name: str) -> None:
        """Nothing: a tar archive has no checksums of its own."""

    def records(self, joined: Joined) -> Iterator[StoredRecord]:
        """Those of the members: a tar archive has no checksums of its own."""
        return joined.records()


def _is_checkpoint(storage: Storage, name: str) -> bool:
    """Whether a member, or its beginning, is of any format."""
    if storage.nbytes >= 4 and storage.view()[:4] == LOCAL_HEADER and kind(storage) == OTHER:
        return False
    try:
        formats.of_storage(storage, None, name)
    except UnknownFormatError:
        return False
    return True


def open(storage: Storage, options: OpenOptions) -> Opened:
    """Read the directory and the headers of all members that are checkpoints; touches a page of each of the others."""
    if options.strict:
        raise UnsupportedError("strict=True is for files of torch.save and safetensors; there is no such layout here")
    outer = _Tar(storage) if is_tar(bytes(storage.view()[:BLOCK])) else _Zip(storage)
    likely = [name for name in outer.names if _is_checkpoint(outer.head(name), name)]
    inner = options.within(len(likely), storage.nbytes)
    joined = Joined(storage, options)
    tree = {}
    for name in likely:
        member = outer.member(name, inner)
        if _is_checkpoint(member, name):  # now that all of it can be seen
            tree[name] = joined.add(name, member, inner)
    joined.finish()
    skipped = tuple(name for name in outer.names if name not in tree and not name.endswith("/"))
    for name in skipped:  # damage at its very beginning must not make a checkpoint pass for something else
        outer.check(name)
    if not tree:
        raise UnknownFormatError(_nothing(list(outer.names)))

    def fill(wanted: set[int] | None) -> dict[str, Any]:
        return dict(zip(tree, joined.fill(wanted), strict=True))

    return Opened(
        NAME,
        joined.table(),
        joined.storages,
        metadata=joined.metadata or None,
        tree=tree,
        flat=False,
        budget=joined.budget,
        records=lambda: outer.records(joined),
        payloads=joined.records,
        fill=fill,
        skipped=skipped,
    )


def _nothing(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return (
        "an archive, none of whose members is a checkpoint that tensorio knows: "
        f"{', '.join(escaped(name, 40) for name in names[:4])}{more}"
    )


def load(storage: Storage, options: OpenOptions) -> object:
    """Return the members that are checkpoints, with arrays at the tensors."""
    opened = open(storage, options)
    assert opened.fill is not None
    return opened.fill(None)


def plan(obj: object, options: SaveOptions) -> LaidOut:
    """Refuse: archives of checkpoints are read only."""
    raise UnsupportedError("archives of checkpoints are read only; save each checkpoint by itself")
