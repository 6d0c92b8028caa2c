"""What is left of a damaged file: its table and tree as they were, and the fate of each tensor's bytes."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from tensorio import _unpickler, formats
from tensorio.checkpoint._checks import sha256_of
from tensorio.dtypes import BY_NAME
from tensorio.errors import (
    HeaderError,
    TensorIOError,
    TruncatedError,
    UnsafePickleError,
    UnsupportedError,
    error_context,
)
from tensorio.formats import safetensors
from tensorio.formats._base import Opened, OpenOptions, naming_budget
from tensorio.formats._decoded import BIG_ENDIAN_HOST, Decoded
from tensorio.formats._digests import KEY as DIGESTS_KEY
from tensorio.formats._salvage import Damaged
from tensorio.formats._salvage_find import find_pickle, whole_storages
from tensorio.formats._salvage_layout import BYTEORDER
from tensorio.formats._salvage_parts import LOCAL, Directory, Piece, State
from tensorio.formats._salvage_storages import Storages
from tensorio.formats._stream import is_stream, located, pickle_at
from tensorio.formats._zip import Inflation
from tensorio.storage.base import MemoryStorage
from tensorio.storage.reading import arena
from tensorio.sums import sums_of
from tensorio.tensors import ROW, Table

if TYPE_CHECKING:
    from tensorio.pickles import Loaded, Rules
    from tensorio.storage.base import Storage

    Progress = Callable[[int], object]

__all__ = ["NO_CHECKSUMS", "Choices", "Remains", "remains"]

HEAD = 4096  # bytes that tell the format
MAX_PICKLE = 64 << 20  # bytes that a deflated pickle may unpack to
LENGTH = 8  # bytes of a safetensors file's first field
COUNT = 8  # bytes of the number in front of a storage in a legacy file
NO_CHECKSUMS = "the format has no checksums"
WRONG_DIGEST = "its SHA-256 is not the one in the file's notes"
_ENDS = re.compile(rb'"data_offsets"\s*:\s*\[\s*\d+\s*,\s*(\d{1,18})\s*\]')
_DTYPE, _STORAGE, _OFFSET, _NBYTES = 0, 4, 5, 6  # fields of a row


class Choices(NamedTuple):
    """What the caller wants saved; see `tensorio.recover`."""

    options: OpenOptions
    raw: bool
    keep_damaged: bool


class Remains(NamedTuple):
    """A damaged file as if it were whole, and what it is not.

    Attributes
    ----------
    opened : Opened
    pieces : list of Piece
        The byte ranges that tensors are in.
    piece_of : list of int
        The number in `pieces` of each row.
    described : State
        How sure names, shapes and types are.
    raw : bool
        Whether there are no names, shapes and types, but only bytes.
    """

    opened: Opened
    pieces: list[Piece]
    piece_of: list[int]
    described: State = State.PROVEN
    raw: bool = False


def remains(storage: Storage, name: str, choices: Choices, progress: Progress) -> Remains:
    """Find what is left of a file.

    Parameters
    ----------
    name : str
        The file's, whose suffix may help.
    progress : callable
        Called with the offset up to which the file was looked at.

    Raises
    ------
    FormatError
        Nothing can be had, or only raw bytes.
    UnsupportedError
        A format that can't be recovered.
    """
    head = bytes(storage.view()[:HEAD])
    archive = Damaged(storage)
    if head[:4] != LOCAL:
        if safetensors.recognises(head, storage):
            return _safetensors(storage)
        if is_stream(head):
            return _torch_legacy(storage, choices.options.rules(legacy=True))
        if next((at for at in archive.signatures(LOCAL, 0) if archive.header(at)), None) is None:
            other = formats.of_storage(storage, None, name)
            other.open(storage, choices.options)
            raise _not_read(other.NAME)
    directory = archive.directory()
    if head[:4] == LOCAL and not choices.raw:
        _refuse_others(storage, name, choices.options)
    found = find_pickle(archive, directory)
    problem: TensorIOError
    if found is None or not found[1].size:
        problem = HeaderError("its pickle (data.pkl) was not found")
    elif not found[1].whole and not (choices.keep_damaged and found[1].state is State.DAMAGED):
        error = TruncatedError if found[1].state is State.CUT else HeaderError
        problem = error(f"its pickle can't be used: {found[1].why}", record=found[1].record)
    else:
        try:
            return _torch_zip(archive, directory, *found, choices, progress)
        except TensorIOError as failure:
            if not choices.raw:
                raise
            problem = failure
    return _raw(archive, directory, problem, choices, progress)


def _refuse_others(storage: Storage, name: str, options: OpenOptions) -> None:
    """Refuse a zip archive that is not torch.save's. If it is damaged, what it looks like may be wrong."""
    try:
        other = formats.of_storage(storage, None, name)
        if other.NAME != "torch_zip":
            other.open(storage, options)
    except TensorIOError:
        return
    if other.NAME != "torch_zip":
        raise _not_read(other.NAME)


def _not_read(format: str) -> UnsupportedError:
    return UnsupportedError(
        f"recovering a file of format {format} is not available in this version; convert reads it if it is whole"
    )


# ----------------------------------------------------------------------- torch zip


def _torch_zip(archive: Damaged, directory: Directory | None, prefix: str, pickle: Piece, choices: Choices,
               progress: Progress) -> Remains:  # fmt: skip
    loaded = _run(archive, pickle, choices.options.rules())
    sizes = {storage.key: storage.nbytes for storage in loaded.mentioned}
    found = Storages(archive, prefix, sizes, pickle, directory, progress)
    pieces = [found.pieces.get(key) or _missing(found.folder + key, size) for key, size in sizes.items()]
    piece_of = list(loaded.rows[_STORAGE::ROW])
    storages = _placed(archive.storage, loaded.rows, pieces, found.texts.get(BYTEORDER) == b"big")
    opened = Opened("torch_zip", Table([], loaded.rows, loaded.dims), storages, tree=loaded.obj, flat=False,
                    budget=naming_budget(pickle.size))  # fmt: skip
    return Remains(opened, pieces, piece_of, pickle.state)


def _missing(record: str, nbytes: int) -> Piece:
    if nbytes == 0:
        return Piece(record, 0, 0, 0, False, State.PROVEN)
    return Piece(record, -1, nbytes, nbytes, False, State.MISSING, "its record was not found")


def _cut(there: int, nbytes: int) -> str:
    return f"cut off by the end of the file: {max(there, 0)} of {nbytes} bytes are there"


def _run(archive: Damaged, pickle: Piece, rules: Rules) -> Loaded:
    try:
        with error_context(record=pickle.record):
            return _unpickler.loads(_payload(archive.storage, pickle, MAX_PICKLE), None, rules=rules)
    except UnsafePickleError as error:
        if any(name.startswith("__torch__.") for name in error.globals):
            raise _not_read("torchscript") from None
        raise


def _payload(storage: Storage, piece: Piece, limit: int) -> memoryview | bytes:
    """All bytes of a record, unpacked if they are deflated, to at most `limit`."""
    raw = storage.view()[piece.start : piece.start + piece.compressed]
    if not piece.deflated:
        return raw
    with error_context(record=piece.record):
        return b"".join(Inflation([raw], min(piece.size, limit), piece.start))[: piece.size]


def _placed(storage: Storage, rows: array[int], pieces: list[Piece], swapped: bool) -> list[Storage]:
    """Turn rows that count from their record into rows that count from their storage; return the storages.

    Rows of records that are not there reach no bytes.
    """
    decoded = Decoded(
        lambda i: pieces[i].size, lambda i: _payload(storage, pieces[i], pieces[i].size),
        lambda i: (storage, pieces[i].start, pieces[i].compressed), swapped=swapped, writable=False,
    )  # fmt: skip
    for at in range(0, len(rows), ROW):
        i = rows[at + _STORAGE]
        piece = pieces[i]
        rows[at + _STORAGE] = 0
        if piece.state in (State.CUT, State.MISSING) or rows[at + _NBYTES] == 0:
            rows[at + _OFFSET] = rows[at + _NBYTES] = 0
        elif piece.deflated or swapped:
            rows[at + _STORAGE] = decoded.index(i, rows[at + _DTYPE])
        else:
            rows[at + _OFFSET] += piece.start
    return [storage, *decoded.storages]


# -------------------------------------------------------------------- torch legacy


def _torch_legacy(storage: Storage, rules: Rules) -> Remains:
    """The storages of a stream that is cut short: they stand one behind the other, in the order of a list of keys."""
    view = storage.view()
    at = 0
    for part in ("magic number", "protocol version", "system info"):
        _, at = pickle_at(view, at, part)
    with located(at, "object"):
        loaded = _unpickler.loads(view, None, rules=rules, start=at)
    numbers = {mentioned.key: i for i, mentioned in enumerate(loaded.mentioned)}
    pieces = [_missing(mentioned.key, mentioned.nbytes) for mentioned in loaded.mentioned]
    for key, nbytes, itemsize, start in _stored(view, loaded):
        there = len(view) - start
        piece = Piece(key, start, nbytes, nbytes, False, State.UNPROVEN, NO_CHECKSUMS)
        if there < nbytes:
            piece = piece._replace(state=State.CUT, why=_cut(there, nbytes))
        elif int.from_bytes(view[start - COUNT : start], "little") * itemsize != nbytes:
            break  # from here on, nothing is where it should be
        pieces[numbers[key]] = piece
    piece_of = list(loaded.rows[_STORAGE::ROW])
    storages = _placed(storage, loaded.rows, pieces, BIG_ENDIAN_HOST)
    opened = Opened("torch_legacy", Table([], loaded.rows, loaded.dims), storages, tree=loaded.obj, flat=False,
                    budget=naming_budget(loaded.end - at))  # fmt: skip
    return Remains(opened, pieces, piece_of)


def _stored(view: memoryview, loaded: Loaded) -> Iterator[tuple[str, int, int, int]]:
    """Yield key, bytes, bytes per element and place of the storages that a stream lists; none twice, none beyond it."""
    keys, at = pickle_at(view, loaded.end, "list of storage keys")
    due = {mentioned.key: mentioned for mentioned in loaded.mentioned}
    for key in keys if type(keys) is list else ():
        text = key.decode("latin-1") if type(key) is bytes else key
        mentioned = due.pop(text, None) if type(text) is str else None
        if mentioned is None or at + COUNT > len(view):
            break
        yield mentioned.key, mentioned.nbytes, mentioned.itemsize, at + COUNT
        at += COUNT + mentioned.nbytes


# --------------------------------------------------------------------- without a pickle


def _raw(archive: Damaged, directory: Directory | None, problem: TensorIOError, choices: Choices,
         progress: Progress) -> Remains:  # fmt: skip
    """Whole storages as flat bytes by their record's name, if that was asked for; else the problem with a hint."""
    found = whole_storages(archive, directory, progress)
    if not choices.raw or not found:
        problem.message += _hint(found)
        raise problem
    pieces = list(found.values())
    code = BY_NAME["uint8"].code
    rows, dims = array("q"), array("q")
    for i, piece in enumerate(pieces):
        rows.extend((code, 0, 1, len(dims), i, 0, piece.size, 1, 0))
        dims.extend((piece.size, 1))
    storages = _placed(archive.storage, rows, pieces, swapped=False)
    opened = Opened("torch_zip", Table(list(found), rows, dims), storages)
    return Remains(opened, pieces, list(range(len(pieces))), raw=True)


def _hint(found: dict[str, Piece]) -> str:
    lost = ", and with it the names, shapes and types of all tensors"
    if not found:
        return f"{lost}; no whole storage is left either: there is nothing to recover"
    nbytes = sum(piece.size for piece in found.values())
    return f"{lost}; raw=True saves the {len(found)} whole storages ({nbytes} bytes) as bytes, by their record's name"


# ---------------------------------------------------------------------- safetensors


def _safetensors(storage: Storage) -> Remains:
    """The tensors of a file that is cut short behind its header, which must be whole: nothing else says where they are.

    The header is read as that of a whole file, in memory that is as large as the
    file was to be and of which only the header is ever touched.
    """
    length = LENGTH + int.from_bytes(storage.view()[:LENGTH], "little")
    if length > storage.nbytes:
        raise TruncatedError(
            f"cut off in its header: {storage.nbytes} of {length} bytes are there, and nothing else tells of the "
            "tensors: there is nothing to recover", offset=storage.nbytes,
        )  # fmt: skip
    header = storage.view()[:length]
    nbytes = length + max((int(match[1]) for match in _ENDS.finditer(header)), default=0)
    whole = arena(max(nbytes, storage.nbytes), touched=length)
    whole[:length] = header
    opened = safetensors.open_stored(MemoryStorage(whole), OpenOptions())
    opened.storages = [storage]
    digests = sums_of((opened.metadata or {}).get(DIGESTS_KEY, ""), refuse=lambda error: None)
    pieces = []
    for i, name in enumerate(opened.table.names):
        extent = opened.table.info(i).chunks[0].extent
        there = storage.nbytes - extent.offset
        piece = Piece(name, extent.offset, extent.nbytes, extent.nbytes, False, State.UNPROVEN, NO_CHECKSUMS)
        if there < extent.nbytes:
            piece = piece._replace(state=State.CUT, why=_cut(there, extent.nbytes))
        elif name in digests:
            right = sha256_of(storage, extent.offset, extent.nbytes, lambda done: None) == digests[name]
            piece = piece._replace(state=State.PROVEN if right else State.DAMAGED, why="" if right else WRONG_DIGEST)
        pieces.append(piece)
    return Remains(opened, pieces, list(range(len(pieces))))
