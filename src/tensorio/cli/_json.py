"""The machine-readable form of ``tensorio inspect``, a line at a time; the schema stands in its help."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tensorio.cli._survey import file_nbytes

if TYPE_CHECKING:
    from tensorio.checkpoint._checkpoint import Checkpoint
    from tensorio.cli._survey import Entry, Share, Stored, Survey
    from tensorio.tensors import TensorInfo

__all__ = ["json_lines"]

SCHEMA = 1


def json_lines(checkpoint: Checkpoint, facts: Survey, path: str, depth: int) -> Iterator[str]:
    """Yield the lines of one JSON object, ASCII only; a line per tensor, so that 100,000 of them take no memory."""
    head = _head(checkpoint, facts, path, depth)
    yield "{"
    for key, value in head.items():
        yield f"{json.dumps(key)}: {json.dumps(value)},"
    yield from _list("tensors", (_tensor(e.tensor) for e in facts.tensors if e.tensor is not None), end=",")
    yield from _list("others", (_other(e) for e in facts.entries if e.tensor is None), end="")
    yield "}"


def _list(key: str, items: Iterable[dict[str, Any]], end: str) -> Iterator[str]:
    yield f"{json.dumps(key)}: ["
    waiting = None
    for item in items:
        if waiting is not None:
            yield waiting + ","
        waiting = json.dumps(item)
    if waiting is not None:
        yield waiting
    yield "]" + end


def _head(checkpoint: Checkpoint, facts: Survey, path: str, depth: int) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "path": path,
        "format": checkpoint.format,
        "file_nbytes": file_nbytes(checkpoint),
        "files": checkpoint.files,
        "metadata": checkpoint.metadata,
        "total": _share(facts.total),
        "by_dtype": {name: _share(share) for name, share in facts.by_dtype.items()},
        "by_module": {name: _share(share) for name, share in facts.by_module(depth).items()},
        "stored": _stored(facts.stored),
        "tied": facts.tied,
        "overlapping": facts.overlapping,
        "refused": dict(facts.refused),
        "values": facts.values,
        "loading": checkpoint.loading,
    }


def _share(share: Share) -> dict[str, int]:
    return {"tensors": share.tensors, "numel": share.numel, "nbytes": share.nbytes}


def _stored(stored: Stored) -> dict[str, Any]:
    return {
        "records": stored.records,
        "nbytes": stored.nbytes,
        "reached": stored.reached,
        "unreached": stored.nbytes - stored.reached,
        "other_records": stored.others,
        "other_nbytes": stored.others_nbytes,
        "skipped": list(stored.skipped),
        "partly": [part._asdict() for part in stored.partly],
    }


def _tensor(info: TensorInfo) -> dict[str, Any]:
    from tensorio.cli._view import flag_names

    chunks = [{"offsets": c.offsets, "shape": c.shape, "strides": c.strides, **c.extent._asdict()} for c in info.chunks]
    return {
        "fqn": info.fqn, "dtype": info.dtype, "shape": info.shape, "nbytes": info.nbytes, "numel": info.numel,
        "packed": info.packed, "contiguous": info.contiguous, "flags": flag_names(info.flags), "chunks": chunks,
    }  # fmt: skip


def _other(entry: Entry) -> dict[str, Any]:
    return {"path": [str(key) for key in entry.path], "type": entry.kind, "text": entry.text}
