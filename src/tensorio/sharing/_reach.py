"""From what is said of a publication to its bytes: found, and proven to be those that were published."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from typing import Any

from tensorio.checkpoint._checkpoint import Checkpoint, checkpoint_of
from tensorio.errors import NotPublishedError, PublicationError, escaped
from tensorio.sharing._manifest import FILE, KEPT, MEMORY, Holder, Manifest
from tensorio.sharing._registry import Registry
from tensorio.sharing._segments import HAS_MEMFD, content_nbytes, is_sealed, open_file, open_held
from tensorio.storage.base import Storage
from tensorio.storage.files import Identity, storage_of
from tensorio.storage.ranges import RangeStorage
from tensorio.system.processes import start_time

__all__ = ["called", "myself", "open_published", "reach", "reach_named"]


def called(manifest: Manifest) -> str:
    """What to call a publication in messages."""
    return "the publication" if manifest.name is None else f"the published name {escaped(manifest.name)}"


def myself(fd: int) -> Holder:
    """Return this process, as a holder of what it has open at `fd`."""
    return Holder(os.getpid(), start_time(os.getpid()), fd)


def reach(manifest: Manifest) -> tuple[int, str | None]:
    """Open a publication's bytes, read-only.

    Returns
    -------
    fd : int
        The caller's to close.
    path : str or None
        Of the checkpoint, if that is where the bytes were found.

    Raises
    ------
    NotPublishedError
        They are gone.
    PublicationError
        They can't be reached from here, or something else is in their place.
    """
    if not manifest.of_this_boot and not (manifest.persistent and manifest.kind == FILE):
        raise NotPublishedError(f"{called(manifest)} is from before the machine was started; publish it again")
    refused: list[str] = []
    for path, opened in _candidates(manifest):
        try:
            fd = opened()
        except FileNotFoundError:
            continue
        except OSError as error:
            refused.append(f"{error.strerror} ({path or 'memory of its owner'})")
            continue
        if (why := _other_than(manifest, fd)) is None:
            return fd, path
        refused.append(why)
        os.close(fd)
    raise _missing(manifest, refused)


def reach_named(manifest: Manifest) -> tuple[int, str | None]:
    """Do the same by its name, which goes with the last process that holds it, even where a file stays behind."""
    if not manifest.persistent and manifest.here and not manifest.living():
        raise _missing(manifest, [])
    return reach(manifest)


def _candidates(manifest: Manifest) -> Iterator[tuple[str | None, Callable[[], int]]]:
    """Where the bytes may be had, best first."""
    path = manifest.path
    if manifest.kind == FILE and path is not None:
        yield path, lambda: _open_file(path)
    if manifest.kind == KEPT and path is not None:
        yield None, lambda: _open_kept(manifest.user, path)
    if manifest.here:
        for holder in manifest.living():
            yield None, lambda holder=holder: _open_held(holder, manifest.identity)  # type: ignore[misc]


def _open_file(path: str) -> int:
    """Open what another user may have named, after a look at what that is: opening some devices does something."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "expected a regular file")
    return open_file(path)


def _open_kept(user: int, entry: str) -> int:
    with Registry(user) as registry:
        return registry.open_segment(entry)


def _open_held(holder: Holder, identity: Identity) -> int:
    """Open what another process has open, after a look at what that is: opening some devices does something."""
    if holder.pid == os.getpid():
        return _open_own(holder.fd, identity)
    status = os.stat(f"/proc/{holder.pid}/fd/{holder.fd}")
    if (status.st_dev, status.st_ino) != identity[:2] or not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError
    return open_held(holder.pid, holder.fd)


def _open_own(fd: int, identity: Identity) -> int:
    try:
        if Identity.of(fd) == identity:
            return os.dup(fd)
    except OSError:
        pass  # closed
    raise FileNotFoundError


def _other_than(manifest: Manifest, fd: int) -> str | None:
    """Why the bytes at a descriptor are not those that were published; None if they are."""
    found = Identity.of(fd)
    if found != manifest.identity:
        want = manifest.identity
        return (
            f"expected {want.size} bytes of inode {want.inode}, found {found.size} bytes of inode {found.inode}, or a "
            "new modification time: the file was replaced or changed since"
        )
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return "expected a regular file"
    if manifest.kind == MEMORY and HAS_MEMFD and not is_sealed(fd):
        return "expected memory that is sealed"
    if (nbytes := content_nbytes(fd)) != manifest.nbytes:
        return f"expected {manifest.nbytes} bytes that count, found {nbytes}"
    return None


def _missing(manifest: Manifest, refused: list[str]) -> PublicationError:
    what = called(manifest)
    if refused:
        return PublicationError(f"{what} can't be used: {refused[0]}")
    if manifest.kind == KEPT or not manifest.holders:
        return NotPublishedError(f"{what} can't be had: its file is gone")
    pids = ", ".join(str(holder.pid) for holder in manifest.holders[:3])
    if not manifest.here:
        return PublicationError(
            f"{what} is held by process {pids} of another pid namespace, which can't be seen from here; pass the "
            "descriptor over a socket (Publication.fileno), or publish with persistent=True"
        )
    if manifest.living():
        return NotPublishedError(f"{what} was closed by process {pids}, or is kept from this one; publish it again")
    return NotPublishedError(f"{what} is gone: its owner (process {pids}) has ended; publish it again")


# ------------------------------------------------------------------------ opening


class _Content(RangeStorage):
    """The bytes of a segment that count; closes the segment."""

    def close(self) -> None:
        super().close()
        self.whole.close()


def open_published(manifest: Manifest, fd: int, path: str | None, *, writable: bool, unknown: str,
                   allow: tuple[type, ...]) -> Checkpoint:  # fmt: skip
    """Open what was reached; `fd` is the checkpoint's from here on."""
    name = path or (f"<published {manifest.name}>" if manifest.name else "<publication>")
    file = storage_of(fd, name, writable=writable)
    storage: Storage = file if manifest.nbytes == file.nbytes else _Content(file, 0, manifest.nbytes)
    arguments = {
        "format": manifest.format or None,
        "mmap": True,
        "writable": writable,
        "unknown": unknown,
        "allow": allow,
    }
    checkpoint = checkpoint_of(storage, path, name, arguments)

    def reopening() -> tuple[Any, ...]:
        fd = file.fileno()[0]
        if fd < 0:
            raise ValueError("the checkpoint is closed")
        holders = (myself(fd), *manifest.holders)
        return _reattach, (manifest.with_holders(*holders), writable, unknown, allow)

    checkpoint._reopening = reopening
    return checkpoint


def _reattach(manifest: Manifest, writable: bool, unknown: str, allow: tuple[type, ...]) -> Checkpoint:
    """Open a pickled checkpoint that was attached: of whoever still holds it."""
    fd, path = reach(manifest)
    return open_published(manifest, fd, path, writable=writable, unknown=unknown, allow=allow)
