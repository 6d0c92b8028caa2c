"""safetensors: a JSON header, then the tensors' bytes back to back.

::

    offset  size  content
    0       8     N, little-endian, at most 100,000,000
    8       N     JSON: name -> {dtype, shape, data_offsets}, "__metadata__"
    8+N     -     payload, covered exactly

Reads what the reference implementation (release 0.8.0) reads, except that a
name that occurs twice is refused. Writes the same bytes as it does for the same
input; metadata keys, which it writes in random order, are sorted. A key of our
own, where it is asked for: `tensorio.formats._digests`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tensorio import _core
from tensorio.dtypes import BY_NAME
from tensorio.encryption._opening import has_encrypted
from tensorio.errors import HeaderError, TensorMismatchError, UnsupportedError, escaped
from tensorio.formats._base import DELTA_KEY, IncompleteError, Opened, OpenOptions, SaveOptions, StoredRecord
from tensorio.formats._digests import KEY, DigestedPlan, digests_in, without_digests
from tensorio.plan import FlatPlan
from tensorio.tensors import Table, first_duplicate

if TYPE_CHECKING:
    from array import array

    from tensorio.formats._items import Items
    from tensorio.storage.base import Storage

    _Columns = tuple[list[str], list[int], list[tuple[int, ...]], list[int]]

NAME = "safetensors"
SUFFIXES = (".safetensors",)
OPENED_BY_SUFFIX = SUFFIXES

# Format code -> canonical name.
DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn", "F6_E2M3": "float6_e2m3fn",
    "F6_E3M2": "float6_e3m2fn",
}  # fmt: skip

_ORDER = [DTYPES[code] for code, _ in _core.st_dtypes()]  # the writer's order, widest first
_CODES = bytes(BY_NAME[name].code for name in _ORDER)
_RANK = {name: i for i, name in enumerate(_ORDER)}
_RANK_OF_CODE = {BY_NAME[name].code: i for i, name in enumerate(_ORDER)}

HEADER_MAX = 100_000_000
METADATA_KEY = "__metadata__"


def recognises(head: bytes, storage: Storage) -> bool:
    """Tell by the frame: a plausible length, then (behind white space) an object's brace."""
    if len(head) < 9:
        return False
    length = int.from_bytes(head[:8], "little")
    return 0 < length <= HEADER_MAX and head[8:].lstrip(b" \t\r\n")[:1] in (b"{", b"")


def open(storage: Storage, options: OpenOptions) -> Opened:
    """Read the header; touches no payload. Encrypted tensors are shown as what they are once decrypted."""
    opened = open_stored(storage, options)
    if options.key is None and not has_encrypted(opened.metadata):
        return opened
    from tensorio.encryption._tensors import opened_tensors

    return opened_tensors(opened, options)


def open_stored(storage: Storage, options: OpenOptions) -> Opened:
    """Read the header; tensors that are encrypted are bytes, as they are stored."""
    view = _header_view(storage)
    names, rows, dims, pairs, data_offset = _core.st_read(view, _CODES)
    table = Table(names, rows, dims)
    if len(table.index) != len(names):
        raise HeaderError("duplicate tensor name", record=first_duplicate(names))
    metadata = _metadata(pairs)
    if options.strict:
        _require_reference_layout(bytes(view[:data_offset]), table, pairs)
    return Opened(NAME, table, [storage], metadata, records=lambda: records_of(table, metadata))


def load(storage: Storage, options: OpenOptions) -> object:
    """Return a dict of arrays in header order."""
    if options.strict:
        open(storage, options)
    names, rows, dims, pairs, _ = _core.st_read(_header_view(storage), _CODES)
    metadata = _metadata(pairs)
    if DELTA_KEY in (metadata or {}):
        raise IncompleteError
    if options.key is not None or has_encrypted(metadata):
        from tensorio.encryption._tensors import loaded_tensors

        return loaded_tensors(open(storage, options))
    arrays = _views(rows, dims, storage)
    tensors = dict(zip(names, arrays, strict=True))
    if len(tensors) != len(names):
        raise HeaderError("duplicate tensor name", record=first_duplicate(names))
    return tensors


def notes_of(storage: Storage) -> dict[str, str] | None:
    """Return the notes of a file as they stand in it."""
    return _metadata(_core.st_read(_header_view(storage), _CODES)[3])


def _header_view(storage: Storage) -> memoryview:
    """All bytes, of which those of the header are looked at."""
    length = int.from_bytes(storage.view_for(0, min(8, storage.nbytes))[:8], "little")
    return storage.view_for(0, min(8 + min(length, HEADER_MAX), storage.nbytes))


def _views(rows: array[int], dims: array[int], storage: Storage) -> Sequence[object]:
    from tensorio import _arrays

    return _arrays.views(rows, dims, [storage.lease()])


def _metadata(pairs: list[tuple[str, str]] | None) -> dict[str, str] | None:
    if pairs is None:
        return None
    metadata = dict(pairs)
    if len(metadata) != len(pairs):
        raise HeaderError("duplicate key in __metadata__", record=first_duplicate([k for k, _ in pairs]))
    return metadata


def records_of(table: Table, metadata: dict[str, str] | None) -> Iterator[StoredRecord]:
    """Yield a record per tensor, with the digest that the notes have of it: the format has no checksums."""
    digests = digests_in(metadata)
    for i, name in enumerate(table.names):
        storage, offset, nbytes = table.info(i).chunks[0].extent
        yield StoredRecord(name, storage, offset, nbytes, None, nbytes, sha256=digests.get(name))


def rank_of(code: int) -> int:
    """Return the place of a dtype in the order in which tensors are written; those of one dtype go by name."""
    return _RANK_OF_CODE[code]


def _require_reference_layout(header: bytes, table: Table, pairs: list[tuple[str, str]] | None) -> None:
    """Refuse a header that the reference would have written in other bytes."""
    infos = [table.info(i) for i in range(len(table))]
    infos.sort(key=lambda t: t.chunks[0].extent.offset)  # stable: empty tensors stay in header order
    want = _core.st_header(
        [t.fqn for t in infos],
        [_RANK[t.dtype] for t in infos],
        [t.shape for t in infos],
        [t.nbytes for t in infos],
        pairs,
    )
    ordered = sorted(infos, key=lambda t: (_RANK[t.dtype], t.fqn.encode()))
    if header != want or [t.fqn for t in infos] != [t.fqn for t in ordered]:
        at = next(
            (i for i, (a, b) in enumerate(zip(header, want, strict=False)) if a != b), min(len(header), len(want))
        )
        raise HeaderError(
            "strict: expected the header exactly as the reference writes it, found other bytes", offset=at
        )


def plan(obj: object, options: SaveOptions) -> FlatPlan:
    """Lay out a mapping of names to tensors, as the reference orders them: by dtype, widest first, then by name."""
    from tensorio.formats._items import items_of  # needs NumPy, which reading headers does not

    return plan_items(items_of(obj, options.fetch), options)


def plan_items(items: Items, options: SaveOptions) -> FlatPlan:
    """Lay out tensors wherever their bytes are now."""
    ranks = _logical(items)
    order = sorted(range(len(ranks)), key=lambda i: (ranks[i], items.names[i]))  # str sorts as its UTF-8 does
    payloads = items.payloads.select(order)
    names, shapes = [items.names[i] for i in order], [items.shapes[i] for i in order]
    metadata = without_digests(options.metadata)  # whatever they were of, here they are made anew or not at all
    columns = (names, [ranks[i] for i in order], shapes, payloads.sizes.tolist())
    if options.digests:
        return DigestedPlan(partial(_head, columns, metadata or {}, options.align), names, payloads)
    return FlatPlan(_head(columns, metadata, options.align), payloads)


def _head(columns: _Columns, metadata: dict[str, str] | None, align: int | None, digests: str | None = None) -> bytes:
    """The header, of names, ranks, shapes and sizes."""
    if digests is not None:
        metadata = {**(metadata or {}), KEY: digests}
    pairs = _pairs(metadata)
    head = _core.st_header(*columns, pairs)
    return head if align is None else _core.st_header(*columns, pairs, _padding(len(head), align))


def _pairs(metadata: Mapping[str, str] | None) -> list[tuple[str, str]] | None:
    if metadata is None:
        return None
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"expected metadata of str to str, found {key!r}: {type(value).__name__}")
    return sorted(metadata.items())


def _padding(length: int, align: int) -> int:
    """Spaces behind the header that put the payload's start at a multiple of `align` bytes."""
    if align < 1 or (align % 8 and 8 % align):
        raise ValueError(f"expected align to be 1, 2, 4 or a multiple of 8 bytes, found {align}")
    return -length % align


def _logical(items: Items) -> list[int]:
    """Check that the format can hold the tensors; their dtypes as ranks in the writer's order.

    torch's shape of two 4-bit numbers per byte is made the logical one.
    """
    if METADATA_KEY in items.names:
        raise TensorMismatchError(f"a tensor can't be called {escaped(METADATA_KEY)} in a safetensors file")
    ranks = []
    for i, dtype in enumerate(items.dtypes):
        if dtype == "float4_e2m1fn_x2":
            if not items.shapes[i]:
                raise UnsupportedError("a 0-dim tensor of two 4-bit numbers has no shape here", record=items.names[i])
            *outer, last = items.shapes[i]
            items.shapes[i], dtype = (*outer, 2 * last), "float4_e2m1fn"
        rank = _RANK.get(dtype)
        if rank is None:
            raise UnsupportedError(
                f"safetensors has no dtype for {dtype}; convert the tensor or save as .pt", record=items.names[i]
            )
        ranks.append(rank)
    return ranks
