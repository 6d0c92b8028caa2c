"""A safetensors file of which some tensors are encrypted; every reader of safetensors opens it.

An encrypted tensor is stored under its name as U8 of one dimension: its chunks, see `tensorio.encryption._chunks`. Two
notes in ``__metadata__`` belong to them::

    tensorio.encryption           base64 of a header of kind 1, see `tensorio.encryption._header`
    tensorio.encryption.tensors   JSON: name -> [dtype, [dimension, ...]], as they were

The second, as it stands there in UTF-8, is the context of the header's tag. Each tensor has secrets of its own: 39
bytes of HKDF-SHA256 of the payload key, without salt, with the info `TENSOR_INFO` and the tensor's name.
"""

from __future__ import annotations

import base64
import binascii
import json
from array import array
from collections.abc import Collection, Iterator
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorio.dtypes import BY_NAME, c_strides
from tensorio.encryption._header import TENSORS, Header, new_header, tensor_secrets, unlock
from tensorio.encryption._opening import HEADER_KEY, LIST_KEY, NOT_ENCRYPTED, has_encrypted
from tensorio.errors import DecryptionError, HeaderError, LimitError, escaped

if TYPE_CHECKING:
    from tensorio.encryption._header import Secrets
    from tensorio.formats._base import Opened, OpenOptions
    from tensorio.formats._items import Items
    from tensorio.plan import Buffer, FlatPlan
    from tensorio.storage.base import Storage
    from tensorio.tensors import TensorInfo

__all__ = ["decrypted_tensors", "encrypted_tensors", "loaded_tensors", "opened_tensors"]

DIMS_MAX = 64  # of an array of NumPy
COUNT_MAX = 1 << 16  # each takes some hundred bytes of memory as soon as its file is opened


class Original(NamedTuple):
    """What an encrypted tensor is once it is decrypted."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


# ------------------------------------------------------------------------ reading


def opened_tensors(opened: Opened, options: OpenOptions) -> Opened:
    """Show the encrypted tensors of an opened file as what they were.

    Raises
    ------
    HeaderError
        What the notes say of a tensor does not fit what is stored.
    DecryptionError
        Another key, or changed notes; or there is a key, and nothing is encrypted.

    Notes
    -----
    Without a key, their bytes can't be had: a `DecryptionError` when they are asked for.
    """
    if not has_encrypted(opened.metadata):
        raise DecryptionError(NOT_ENCRYPTED)
    header, originals, text = _read_notes(opened.metadata or {})
    secrets = None
    if options.key is not None:
        secrets = unlock(header, options.key.key(header.key_id), text)
    _place(opened, header, originals, secrets, options.writable)
    opened.metadata = {k: v for k, v in (opened.metadata or {}).items() if k not in (HEADER_KEY, LIST_KEY)} or None
    return opened


def loaded_tensors(opened: Opened) -> dict[str, Any]:
    """Return all arrays of an opened file."""
    from tensorio import _arrays

    table = opened.table
    leases = [storage.lease() for storage in opened.storages]
    return dict(zip(table.names, _arrays.views(table.rows, table.dims, leases), strict=True))


def _read_notes(metadata: dict[str, str]) -> tuple[Header, dict[str, Original], bytes]:
    from tensorio.formats._strict_json import parse

    text = metadata.get(LIST_KEY, "").encode()
    try:
        raw = base64.b64decode(metadata.get(HEADER_KEY, ""), validate=True)
    except (ValueError, binascii.Error):
        raise HeaderError(f"expected base64 in the note {HEADER_KEY}") from None
    header = Header.read(raw)
    if header.kind != TENSORS:
        raise HeaderError(f"expected a header of tensors in the note {HEADER_KEY}, found one of a file")
    listed = parse(text)
    if not isinstance(listed, dict) or not listed:
        raise HeaderError(f"expected the encrypted tensors in the note {LIST_KEY}, found none")
    _require_count(len(listed))
    return header, {name: _original(name, value) for name, value in listed.items()}, text


def _require_count(count: int) -> None:
    if count > COUNT_MAX:
        raise LimitError(f"expected at most {COUNT_MAX} encrypted tensors, found {count}: encrypt the whole file")


def _original(name: str, value: object) -> Original:
    from tensorio.formats.safetensors import DTYPES

    shape: Any
    code, shape = value if isinstance(value, list) and len(value) == 2 else (None, None)
    dtype = DTYPES.get(code) if isinstance(code, str) else None
    if dtype is not None and _is_shape(shape):
        bits = prod(shape) * BY_NAME[dtype].bits
        if bits % 8 == 0:
            return Original(dtype, tuple(shape), bits // 8)
    raise HeaderError(f"expected dtype and shape in the note {LIST_KEY}, found {escaped(value)}", record=name)


def _is_shape(value: Any) -> bool:
    """Whether a value from a file is a shape whose bytes and strides can be counted in 64 bits."""
    return (
        isinstance(value, list)
        and len(value) <= DIMS_MAX
        and all(type(n) is int and n >= 0 for n in value)
        and prod(max(n, 1) for n in value) < 1 << 56
    )


def _place(
    opened: Opened, header: Header, originals: dict[str, Original], secrets: Secrets | None, writable: bool
) -> None:
    """Let the rows of encrypted tensors be of their dtypes and shapes, over storages of their own."""
    from tensorio.formats.safetensors import records_of
    from tensorio.tensors import ROW, Table

    table, file = opened.table, opened.storages[0]
    rows, dims = array("q", table.rows), array("q", table.dims)
    for name, original in originals.items():
        info = table.info(table.row_of(name)) if name in table.index else None
        storage = _storage(file, name, info, original, header, secrets, writable)
        shape = original.shape
        row = [BY_NAME[original.dtype].code, 0, len(shape), len(dims), len(opened.storages), 0, original.nbytes, 1, 0]
        at = table.index[name] * ROW
        rows[at : at + ROW] = array("q", row)
        dims.extend(shape)
        dims.extend(c_strides(shape, BY_NAME[original.dtype].itemsize))
        opened.storages.append(storage)
    opened.table = Table(table.names, rows, dims)
    opened.records = partial(records_of, opened.table, None)


def _storage(
    file: Storage,
    name: str,
    info: TensorInfo | None,
    original: Original,
    header: Header,
    secrets: Secrets | None,
    writable: bool,
) -> Storage:
    from tensorio.encryption._chunks import Chunks, stored_size
    from tensorio.encryption._storage import DecryptedStorage, LockedStorage

    want = stored_size(original.nbytes, header.chunk)
    if info is None or info.dtype != "uint8" or info.shape != (want,):
        found = "no such tensor" if info is None else f"{info.dtype} of {escaped(info.shape)}"
        raise HeaderError(f"encrypted: expected {want} bytes of uint8, found {found}", record=name)
    start = info.chunks[0].extent.offset
    if secrets is None:
        return LockedStorage(original.nbytes, name, header.key_id, (file, start, want), writable=writable)
    chunks = Chunks(header, partial(tensor_secrets, secrets, name), original.nbytes, start, name)
    return DecryptedStorage(file, start, chunks, writable=writable, owner=False)


# ------------------------------------------------------------------------ writing


def encrypted_tensors(opened: Opened, chosen: Collection[str], key: bytes, *, key_id: str, chunk: int) -> FlatPlan:
    """Plan a file of the same tensors, the chosen ones encrypted.

    Parameters
    ----------
    opened : Opened
        A safetensors file; must stay open until the plan is written.
    chosen : collection of str
        At least one.
    """
    from tensorio.encryption._chunks import Chunks
    from tensorio.encryption._plan import sealed
    from tensorio.formats._items import Items
    from tensorio.formats.safetensors import DTYPES

    codes = {dtype: code for code, dtype in DTYPES.items()}
    infos = [opened.table.info(i) for i in range(len(opened.table))]
    listed = {t.fqn: [codes[t.dtype], list(t.shape)] for t in infos if t.fqn in chosen}
    _require_count(len(listed))
    text = json.dumps(listed, ensure_ascii=False, separators=(",", ":"))
    total = sum(t.nbytes for t in infos if t.fqn in chosen)
    header, secrets = new_header(key, TENSORS, total, chunk=chunk, key_id=key_id, context=text.encode())
    items = Items()
    for info in infos:
        if info.fqn not in chosen:
            _add_plain(items, opened, info)
            continue
        chunks = Chunks(header, partial(tensor_secrets, secrets, info.fqn), info.nbytes)
        _, offset, _ = info.chunks[0].extent
        source = partial(sealed, chunks, opened.storages[info.chunks[0].extent.storage], offset)
        items.add(info.fqn, "uint8", (chunks.stored,)).add(source, chunks.stored)
    notes = {HEADER_KEY: base64.b64encode(header.raw).decode(), LIST_KEY: text}
    return _plan(items, {**(opened.metadata or {}), **notes})


def decrypted_tensors(opened: Opened) -> FlatPlan:
    """Plan a file of the tensors of an opened one as they are shown."""
    from tensorio.formats._items import Items

    items = Items()
    for i in range(len(opened.table)):
        _add_plain(items, opened, opened.table.info(i))
    return _plan(items, opened.metadata)


def _add_plain(items: Items, opened: Opened, info: TensorInfo) -> None:
    storage, offset, nbytes = info.chunks[0].extent

    def source() -> Iterator[Buffer]:
        return opened.storages[storage].stream(offset, nbytes)

    items.add(info.fqn, info.dtype, info.shape).add(source, nbytes)


def _plan(items: Items, metadata: dict[str, str] | None) -> FlatPlan:
    from tensorio.formats._base import SaveOptions
    from tensorio.formats.safetensors import plan_items

    return plan_items(items, SaveOptions(metadata=metadata))
