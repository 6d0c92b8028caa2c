"""``step.json``: what a step is, and the sizes and checksums of its files.

It is a part of the step: published with the files by one rename (at an address,
as the last object), so that it can't say anything about other files than those
beside it. A checksum of its own guards it. Its fields::

    {"schema": 1, "step": 1000, "time": 1767225600.0, "version": "0.1.0", "metrics": {"loss": 0.25},
     "items": {"checkpoint": "checkpoint.pt"}, "several": false,
     "files": [{"name": "checkpoint.pt", "nbytes": 4096, "crc32": "89abcdef"}], "check": "01234567"}

``check`` is the CRC-32 of the text in front of it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from tensorio import _core
from tensorio._version import __version__
from tensorio.encryption._header import is_encrypted
from tensorio.encryption._opening import head_of
from tensorio.errors import ChecksumError, DecryptionError, HeaderError, TruncatedError, error_context, escaped
from tensorio.formats._strict_json import parse
from tensorio.plan import FlatPlan, Payloads
from tensorio.storage.base import Storage
from tensorio.storage.opening import open_storage
from tensorio.storage.reading import in_threads, readers
from tensorio.writing.output import write_plan

__all__ = [
    "DEFAULT_ITEM",
    "NOTE",
    "PINNED",
    "StepFile",
    "StepInfo",
    "check_files",
    "decode",
    "described",
    "is_text",
    "plain_metrics",
    "read_note",
    "write_note",
]

NOTE, PINNED = "step.json", "pinned"
DEFAULT_ITEM = "checkpoint"  # the name of what was saved by itself
SCHEMA = 1
_CHECK = ', "check": "'
_NOTE_MAX = 64 << 20  # bytes; a folder of 100,000 shards takes a sixth of it
PART = 32 << 20  # bytes of a file that one thread checks at a time

Metric = float | int | str | bool


@dataclass(frozen=True)
class StepFile:
    """A file of a step: its name in the folder, size in bytes, and checksums (sha256 at addresses only)."""

    name: str
    nbytes: int
    crc32: int
    sha256: str | None = None


@dataclass(frozen=True)
class StepInfo:
    """What is known of a step without opening its checkpoint.

    Attributes
    ----------
    step : int
    time : float
        When it was saved, in seconds since 1970.
    version : str
        Of tensorio.
    metrics : dict
        As given to `CheckpointManager.save`.
    items : dict of str to str
        Names of what was saved, and the file or folder of each.
    files : tuple of StepFile
    several : bool
        Whether it was saved with ``items=``, and comes back as a dict of them.
    """

    step: int
    time: float
    version: str = __version__
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    items: Mapping[str, str] = field(default_factory=dict)
    files: tuple[StepFile, ...] = ()
    several: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)


def is_text(name: str) -> bool:
    """Tell whether JSON can have a name: it holds no half of a surrogate pair (an undecodable byte, for example)."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def plain_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Metric]:
    """Return metrics as plain values; numbers of NumPy and torch become floats."""
    out: dict[str, Metric] = {}
    for name, value in (metrics or {}).items():
        if not isinstance(name, str):
            raise TypeError(f"expected the name of a metric, a str, found {type(name).__name__}")
        if not is_text(name):
            raise ValueError(f"expected the name of a metric in Unicode, found {escaped(name)}")
        out[name] = value if type(value) in (int, float, str, bool) else float(value)
    return out


# ------------------------------------------------------------------ text


def encoded(info: StepInfo) -> bytes:
    """Return the text of a note."""
    files = []
    for file in info.files:
        row: dict[str, Any] = {"name": file.name, "nbytes": file.nbytes, "crc32": f"{file.crc32:08x}"}
        if file.sha256 is not None:
            row["sha256"] = file.sha256
        files.append(row)
    head = {
        "schema": SCHEMA,
        "step": info.step,
        "time": info.time,
        "version": info.version,
        "metrics": {name: _written(value) for name, value in info.metrics.items()},
        "items": dict(info.items),
        "several": info.several,
        "files": files,
    }
    text = json.dumps(head, indent=1)[:-2].encode()  # without the brace at its end
    return text + _CHECK.encode() + b'%08x"\n}\n' % _core.crc32(text)


def _written(value: Metric) -> Any:
    """A metric in JSON, which has no NaN and no infinity."""
    return {"float": repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def decode(data: bytes | memoryview, path: str) -> StepInfo:
    """Return what a note says.

    Raises
    ------
    FormatError
        It is not whole, or not a note.
    """
    raw = bytes(data)
    with error_context(path=path):
        text, mark, check = raw.rpartition(_CHECK.encode())
        if not mark:
            raise TruncatedError(f"a step's note that ends without its checksum, after {len(raw)} bytes")
        if check != b'%08x"\n}\n' % _core.crc32(text):
            raise ChecksumError(
                f"CRC-32 of the step's note: computed {_core.crc32(text):08x}, found {escaped(check[:8])}"
            )
        try:
            return _info(parse(raw))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise HeaderError(f"not the note of a step: {escaped(error)}") from None


def _info(fields: dict[str, Any]) -> StepInfo:
    if fields["schema"] != SCHEMA:
        raise ValueError(f"expected schema {SCHEMA}, found {fields['schema']}")
    files = tuple(
        StepFile(_inside(row["name"]), int(row["nbytes"]), int(row["crc32"], 16), row.get("sha256"))
        for row in fields["files"]
    )
    metrics = {n: float(v["float"]) if isinstance(v, dict) else v for n, v in fields["metrics"].items()}
    items = {str(name): _inside(place) for name, place in fields["items"].items()}
    several = bool(fields.get("several", list(items) != [DEFAULT_ITEM]))  # the first notes did not say
    if not several and len(items) != 1:
        raise ValueError(f"expected one item, found {len(items)}")
    return StepInfo(int(fields["step"]), float(fields["time"]), str(fields["version"]), metrics, items, files, several)


def _inside(name: str) -> str:
    """A relative name that does not lead out of its folder."""
    if not name or name.startswith("/") or "\\" in name or "\0" in name or {"", ".", ".."} & set(name.split("/")):
        raise ValueError(f"a file name that leads elsewhere: {escaped(name)}")
    return name


# ----------------------------------------------------------------- files


def write_note(folder: str, info: StepInfo, *, durable: bool) -> None:
    """Put a note into a step's folder."""
    write_plan(FlatPlan(encoded(info), Payloads()), os.path.join(folder, NOTE), durable=durable)


def read_note(folder: str) -> StepInfo:
    """Read the note in a step's folder.

    Raises
    ------
    FormatError
        It is not whole, or not a note.
    OSError
        There is none.
    """
    path = os.path.join(folder, NOTE)
    storage, _, _ = open_storage(path, local=True)
    with closing(storage):
        if storage.nbytes > _NOTE_MAX:
            raise HeaderError(f"a step's note of {storage.nbytes} bytes", path=path)
        return decode(bytes(storage.view()), path)


def described(folder: str, *, sha256: bool = False) -> tuple[StepFile, ...]:
    """Return all files below a folder, with their checksums, by name."""
    names = sorted(_files_below(folder))
    return tuple(StepFile(name, *_sums(os.path.join(folder, name), sha256)) for name in names)


def _files_below(folder: str) -> Iterator[str]:
    for place, _, names in os.walk(folder):
        for name in names:
            yield os.path.relpath(os.path.join(place, name), folder).replace(os.sep, "/")


def check_files(folder: str, info: StepInfo, *, deep: bool) -> None:
    """Raise unless all files of a step are there: of their sizes, and with `deep`, of their checksums.

    Raises
    ------
    FormatError
        A file is shorter or longer than it was, or has other bytes.
    OSError
        From the system: a file is missing, or can't be read.
    """
    for file in info.files:
        path = os.path.join(folder, file.name)
        nbytes = os.stat(path).st_size
        if nbytes != file.nbytes:
            if os.path.isfile(path):
                _refuse_encrypted(path)
            raise TruncatedError(f"expected {file.nbytes} bytes, found {nbytes}", path=path)
    if not deep:
        return
    for file in info.files:
        path = os.path.join(folder, file.name)
        _, crc, digest = _sums(path, file.sha256 is not None)
        if crc != file.crc32:
            raise ChecksumError(
                f"CRC-32 of the file: expected {file.crc32:08x}, found {crc:08x}",
                expected=file.crc32, actual=crc, path=path,
            )  # fmt: skip
        if digest != file.sha256:
            raise ChecksumError(f"SHA-256 of the file: expected {file.sha256}, found {digest}", path=path)


def _refuse_encrypted(path: str) -> None:
    """Raise if a file was encrypted since it was noted; it is not damaged."""
    storage, _, _ = open_storage(path, local=True)
    with closing(storage):
        if is_encrypted(head_of(storage)):
            raise DecryptionError(
                "the step was encrypted after it was saved: decrypt its folder, and restore from that", path=path
            )


def _sums(path: str, sha256: bool) -> tuple[int, int, str | None]:
    """Size and checksums of a file, with all cores."""
    storage, _, _ = open_storage(path, local=True)
    with closing(storage):
        starts = range(0, storage.nbytes, PART)
        crcs: dict[int, int] = {}
        digests: list[str] = []

        def take(start: int) -> None:
            if start < 0:
                digests.append(_sha256(storage))
            else:
                crcs[start] = _crc32(storage, start, min(PART, storage.nbytes - start))

        # Not by a pool, which takes no work any more when the end of the program waits for its last step.
        in_threads(take, [*([-1] if sha256 else []), *starts], readers())
        crc = 0
        for start in starts:
            crc = _core.crc32_combine(crc, crcs[start], min(PART, storage.nbytes - start))
        return storage.nbytes, crc, digests[0] if sha256 else None


def _crc32(storage: Storage, offset: int, nbytes: int) -> int:
    crc = 0
    for piece in storage.stream(offset, nbytes):
        crc = _core.crc32(piece, crc)
    return crc


def _sha256(storage: Storage) -> str:
    import hashlib

    digest = hashlib.sha256()
    for piece in storage.stream(0, storage.nbytes):
        digest.update(piece)
    return digest.hexdigest()
