"""What is said of a publication: in the file of its name, and to a process that it is sent to."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

from tensorio.sharing._registry import Registry
from tensorio.storage.files import Identity
from tensorio.system.processes import boot_id, is_running, pid_namespace

__all__ = ["FILE", "KEPT", "MEMORY", "Holder", "Manifest", "read_manifest"]

VERSION = 1
CREATED_MAX = 1 << 40  # seconds; of an epoch that none of us will see

# Where the bytes of a publication are.
FILE = "file"  # in a checkpoint, which is mapped as it is
MEMORY = "memory"  # in a sealed segment, which lives as long as somebody holds it
KEPT = "kept"  # in a file in memory, which lives until it is unpublished
KINDS = (FILE, MEMORY, KEPT)


class Holder(NamedTuple):
    """A process that has a publication's bytes open.

    Attributes
    ----------
    pid, start : int
        See `tensorio.system.processes.start_time`.
    fd : int
        Where, in that process.
    """

    pid: int
    start: int
    fd: int

    @property
    def alive(self) -> bool:
        """Whether it is still there; by ids of this process's namespace."""
        return is_running(self.pid, self.start)


@dataclass(frozen=True)
class Manifest:
    """What a publication is, and where it can be had.

    Attributes
    ----------
    name : str or None
    kind : str
        `FILE`, `MEMORY` or `KEPT`.
    format : str
        Of the bytes.
    identity : Identity
        Of the file or segment: whatever is found must be exactly that.
    nbytes : int
        Bytes that count; less than the size for segments in reserved huge pages.
    holders : tuple of Holder
        Who has it open; any will do.
    path : str or None
        The checkpoint, or the file name of the segment in its registry.
    user : int
        Whose registry, for `KEPT`.
    persistent : bool
        Whether the name outlives the holders.
    unknown : str
        See `tensorio.open`; how it was published.
    created : float
        Seconds since 1970.
    boot : str
        Of the machine's start.
    namespace : int
        That the holders' ids are from.
    """

    name: str | None
    kind: str
    format: str
    identity: Identity
    nbytes: int
    holders: tuple[Holder, ...] = ()
    path: str | None = None
    user: int = 0
    persistent: bool = False
    unknown: str = "error"
    created: float = 0.0
    boot: str = dataclasses.field(default_factory=boot_id)
    namespace: int = dataclasses.field(default_factory=pid_namespace)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {"tensorio": VERSION, **dataclasses.asdict(self)}

    @classmethod
    def of_json(cls, values: dict[str, Any], name: str) -> Manifest:
        """Make it of what a file says, which may be anything.

        Raises
        ------
        ValueError
            What is wrong.
        """
        if values.get("tensorio") != VERSION:
            raise ValueError(f"expected a manifest of version {VERSION}")
        if values.get("name") != name:
            raise ValueError("it is of another name")
        for key, kinds in _TYPES.items():
            if type(values.get(key)) not in kinds:
                raise ValueError(f"{key!r} is missing or of a wrong type")
        if values["kind"] not in KINDS or values["unknown"] not in ("error", "opaque"):
            raise ValueError("it has a word that means nothing")
        if values["path"] is None and values["kind"] != MEMORY:
            raise ValueError("'path' is missing")
        if not _is_path(values["path"] or ""):
            raise ValueError("'path' is none that a system takes")
        if not 0 <= values["created"] < CREATED_MAX:  # neither is what is no number
            raise ValueError("'created' is no time")
        identity = Identity(*_numbers(values["identity"], [63] * len(Identity._fields)))
        holders = tuple(Holder(*_numbers(holder, [31, 63, 31])) for holder in values["holders"])
        plain = {key: values[key] for key in _TYPES if key not in ("identity", "holders")}
        return cls(identity=identity, holders=holders, **plain)

    @property
    def here(self) -> bool:
        """Whether the holders' ids are ones of this process's namespace."""
        return self.namespace == pid_namespace()

    @property
    def of_this_boot(self) -> bool:
        """Whether the machine has not been started anew since."""
        return self.boot == boot_id()

    def living(self) -> tuple[Holder, ...]:
        """Return the holders that are still there."""
        return tuple(holder for holder in self.holders if holder.alive)

    def with_holders(self, *holders: Holder) -> Manifest:
        """Return a copy with other holders."""
        return dataclasses.replace(self, holders=holders)


def read_manifest(registry: Registry, name: str) -> Manifest | None:
    """Return what is said of a name; None if there is no such name.

    Raises
    ------
    PublicationError
        It makes no sense, or is not to be trusted.
    """
    values = registry.read(name)
    if values is None:
        return None
    try:
        return Manifest.of_json(values, name)
    except ValueError as error:
        raise registry.damaged(name, str(error)) from None


_TYPES: dict[str, tuple[type, ...]] = {
    "name": (str,), "kind": (str,), "format": (str,), "identity": (list,), "nbytes": (int,), "holders": (list,),
    "path": (str, type(None)), "user": (int,), "persistent": (bool,), "unknown": (str,), "created": (int, float),
    "boot": (str,), "namespace": (int,),
}  # fmt: skip


def _is_path(text: str) -> bool:
    """Whether the system takes it for one."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _numbers(values: Any, bits: list[int]) -> list[int]:
    """Numbers that system calls take."""
    if not isinstance(values, list) or len(values) != len(bits):
        raise ValueError(f"expected a list of {len(bits)} numbers")
    if any(type(n) is not int or not 0 <= n < 1 << b for n, b in zip(values, bits, strict=True)):
        raise ValueError("a number is none, or out of range")
    return values
