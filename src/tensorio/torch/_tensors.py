"""Table rows as torch tensors over the storage's bytes; no payload byte is touched.

Each tensor has a torch storage of its own, of exactly the bytes it covers,
which keeps the mapping alive. Rows become tensors through DLPack, at about a
microsecond each. Types that DLPack or this release of torch lacks there take a
way around: a tensor of bytes, whose storage another tensor is set over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tensorio import _dlpack
from tensorio.dtypes import BY_NAME, DTYPES
from tensorio.errors import UnsupportedError
from tensorio.tensors import ROW
from tensorio.torch._staging import Staging

if TYPE_CHECKING:
    from tensorio._arrays import Lease
    from tensorio.formats._base import Opened
    from tensorio.tensors import Table

__all__ = ["CODES", "FROM_DLPACK", "TAKEN", "TYPES", "bytes_of", "tensor_of", "tensors_of", "to_device", "unsupported"]

# The public function checks what it is given, in Python, at five times the cost.
FROM_DLPACK = getattr(torch._C, "_from_dlpack", torch.utils.dlpack.from_dlpack)

_UINT8 = BY_NAME["uint8"].code
# Elements of 4 bits: torch counts bytes, of two each.
_HALVED = {"float4_e2m1fn": "float4_e2m1fn_x2"}

# torch's type by code of ours; None where this release has none.
TYPES: tuple[Any, ...] = tuple(getattr(torch, _HALVED.get(d.name, d.name), None) for d in DTYPES)
# And back: types whose shape counts what torch's does.
CODES: dict[Any, int] = {TYPES[d.code]: d.code for d in DTYPES if TYPES[d.code] is not None and not d.packed}


def _is_taken(code: int) -> bool:
    """Whether this torch makes a tensor of the right type of a capsule."""
    from tensorio._arrays import Lease

    if TYPES[code] is None or not _dlpack.has_dtype(code):
        return False
    shape = (2,) if DTYPES[code].packed else (1,)
    capsule = _dlpack.capsule(Lease(bytearray(16), True), code, shape, (DTYPES[code].itemsize,), 0, 1)
    try:
        return FROM_DLPACK(capsule).dtype is TYPES[code]
    except (RuntimeError, BufferError):
        return False


TAKEN = frozenset(d.code for d in DTYPES if _is_taken(d.code))


def tensors_of(opened: Opened) -> dict[str, torch.Tensor]:
    """Return the tensors of an opened file of a flat format, by name.

    Parameters
    ----------
    opened : Opened
        Of storages that were opened ``writable=True``: torch knows no read-only memory.

    Returns
    -------
    dict of str to Tensor
        In table order. Copies: no; each keeps the storage's bytes alive. None
        requires a gradient.

    Raises
    ------
    UnsupportedError
        An element type that this release of torch lacks; a tensor in several chunks.

    Notes
    -----
    About 1 us per tensor.
    """
    table = opened.table
    leases = [_writable(storage).lease() for storage in opened.storages]
    codes, chunks = set(table.rows[0::ROW]), set(table.rows[7::ROW])
    if codes <= TAKEN and chunks <= {1}:
        made = _dlpack.tensors(table.rows, table.dims, leases, FROM_DLPACK)
    else:
        made = [tensor_of(table, row, leases[table.storage_of(row)]) for row in range(len(table))]
    return dict(zip(table.names, made, strict=True))


def tensor_of(table: Table, row: int, lease: Lease) -> torch.Tensor:
    """Return one row of a table as a tensor; see `tensors_of`.

    Parameters
    ----------
    table : Table
    row : int
    lease : Lease
        Of the row's storage, writable.
    """
    if table.chunk_count(row) != 1:
        raise UnsupportedError("a tensor that is spread over several places of its files", record=table.names[row])
    code = table.rows[row * ROW]
    if code in TAKEN:
        return FROM_DLPACK(_dlpack.tensor_row(table.rows, table.dims, row, lease))
    _, _, rank, dims, _, offset, nbytes = table.rows[row * ROW : row * ROW + 7]
    if TYPES[code] is None or DTYPES[code].packed:
        raise unsupported(code)
    itemsize = DTYPES[code].itemsize
    shape = tuple(table.dims[dims : dims + rank])
    strides = tuple(step // itemsize for step in table.dims[dims + rank : dims + 2 * rank])
    storage = bytes_of(lease, offset, nbytes).untyped_storage()
    return torch.empty(0, dtype=TYPES[code], device="cpu").set_(storage, 0, shape, strides)


def bytes_of(lease: Lease, offset: int, nbytes: int) -> torch.Tensor:
    """Return bytes of a storage as a flat tensor of uint8."""
    return FROM_DLPACK(_dlpack.capsule(lease, _UINT8, (nbytes,), (1,), offset, nbytes))


def unsupported(code: int) -> UnsupportedError:
    """Return the error for an element type that this release of torch lacks."""
    return UnsupportedError(
        f"torch {torch.__version__} has no dtype for {DTYPES[code].name}; tensorio.load shows such tensors as raw bytes"
    )


def to_device(tensors: dict[str, torch.Tensor], device: Any, staging: Staging | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors on a device, in the same order; as they are for the CPU.

    Parameters
    ----------
    tensors : dict of str to Tensor
        On the CPU.
    device : str, int or torch.device
    staging : Staging, optional
        How bytes get there; by default, through pinned buffers to CUDA, and by
        ``Tensor.to`` elsewhere.

    Notes
    -----
    To CUDA, storages are copied whole: tensors that share one here share one there.
    """
    where = torch.device(device)
    if where.type == "cpu":
        return tensors
    if staging is None and where.type != "cuda":
        return {name: tensor.to(where) for name, tensor in tensors.items()}
    staging = Staging() if staging is None else staging
    rooms: dict[int, torch.Tensor] = {}
    moved = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        room = rooms.get(storage._cdata)
        if room is None:
            source = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (storage.nbytes(),), (1,))
            room = rooms[storage._cdata] = staging.add(source, where)
        empty = torch.empty(0, dtype=tensor.dtype, device=room.device)
        moved[name] = empty.set_(room.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.requires_grad:
            moved[name].requires_grad = True
    staging.run()
    return moved


def _writable(storage: Any) -> Any:
    if not storage.writable:
        raise ValueError("expected a storage that was opened writable=True: torch knows no read-only memory")
    return storage
