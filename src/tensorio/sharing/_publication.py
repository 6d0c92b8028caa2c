"""`Publication`: what this process shares, or has been given to share."""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING, Any

from tensorio.errors import PublicationError
from tensorio.sharing._manifest import FILE, KEPT, MEMORY, Holder, Manifest, read_manifest
from tensorio.sharing._reach import myself, open_published, reach
from tensorio.sharing._registry import Registry

if TYPE_CHECKING:
    from tensorio.checkpoint._checkpoint import Checkpoint
    from tensorio.storage.files import Identity

__all__ = ["Publication", "hold", "let_go"]

_WORDS = {FILE: "a file, mapped as it is", MEMORY: "memory", KEPT: "a file in memory"}


class Publication:
    """Tensors that other processes can attach to; see `tensorio.publish`.

    A context manager. It can be passed to other processes of the host (pickled:
    as an argument of a spawned process, through a queue); what arrives refers to
    the same bytes and holds them on its own. A forked child has it as it is.

    Attributes
    ----------
    name : str or None
        What `tensorio.attach` finds it by.
    kind : {"file", "memory", "kept"}
        Where the bytes are: in the checkpoint's own file, mapped as it is; in a
        sealed memory segment that lives as long as a process holds or maps it;
        in a file in memory that lives until `tensorio.unpublish`.
    format : str
        Of the bytes that readers see.
    nbytes : int
        How many they are.
    path : str or None
        The checkpoint's file, for ``"file"``.
    pages : {"small", "transparent", "reserved"}
        Whether huge pages were had: those that the kernel makes, or those that
        were set aside. For ``"file"`` always ``"small"``: the page cache decides.
    dropped : tuple of str
        Names of notes that the layout in memory has no place for.
    """

    def __init__(self, manifest: Manifest, fd: int, *, allow: tuple[type, ...] = (), pages: str = "small",
                 dropped: tuple[str, ...] = ()) -> None:  # fmt: skip
        self._manifest = manifest
        self._fd = fd
        self._allow = allow
        self._holding = False  # whether the name's manifest says that this process holds it
        self._pid = os.getpid()
        self.name = manifest.name
        self.kind = manifest.kind
        self.format = manifest.format
        self.nbytes = manifest.nbytes
        self.path = manifest.path if manifest.kind == FILE else None
        self.pages = pages
        self.dropped = dropped

    def open(self, *, writable: bool = False) -> Checkpoint:
        """Map it in this process.

        Parameters
        ----------
        writable : bool
            Whether arrays may be written to. What is written is this
            checkpoint's own: pages are copied when written.

        Returns
        -------
        Checkpoint
            Its arrays stay valid when the publication is closed, and when the
            process that published it has ended. Pickled, it attaches again.
        """
        # By the descriptor, whatever has become of the path.
        fd = os.dup(self.fileno())
        return open_published(
            self._manifest, fd, None, writable=writable, unknown=self._manifest.unknown, allow=self._allow
        )

    def fileno(self) -> int:
        """Return the descriptor of the bytes, read-only.

        To be passed over a Unix socket (``socket.send_fds``) where processes can't
        see each other, as in containers; the receiver calls ``tensorio.attach(fd)``.
        """
        if self._fd < 0:
            raise ValueError("the publication is closed")
        return self._fd

    def close(self) -> None:
        """Withdraw the name, if this process published it, and let go of the bytes.

        Who is attached stays attached. A persistent name stays, too; see `tensorio.unpublish`.
        """
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            if self._holding and self._pid == os.getpid():
                self._holding = False
                _LIVE.pop(id(self), None)
                self._withdraw(myself(fd))
        finally:
            os.close(fd)

    def _withdraw(self, me: Holder) -> None:
        """Take this holder off the name; the last one takes the name with it."""
        assert self.name is not None
        try:
            with Registry() as registry, registry.locked(self.name):
                manifest = read_manifest(registry, self.name)
                if manifest is None or manifest.identity != self._manifest.identity or manifest.persistent:
                    return  # another one took the name; or it is to stay
                left = [holder for holder in manifest.living() if holder != me]
                if left:
                    registry.write(self.name, manifest.with_holders(*left).to_json())
                else:
                    registry.remove(self.name)
        except (OSError, PublicationError):
            pass  # the folder is gone or somebody else's: there is nothing to withdraw

    def __enter__(self) -> Publication:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        manifest = self._manifest.with_holders(myself(self.fileno()), *self._manifest.holders)
        return _received, (manifest, self._allow, self.pages, self.dropped)

    def __repr__(self) -> str:
        state = "closed " if self._fd < 0 else ""
        name = "" if self.name is None else f" {self.name!r}"
        return f"<{state}Publication{name}: {self.nbytes} bytes of {self.format} in {_WORDS[self.kind]}>"


def _received(manifest: Manifest, allow: tuple[type, ...], pages: str, dropped: tuple[str, ...]) -> Publication:
    """A publication that another process sent."""
    fd, _ = reach(manifest)
    return Publication(manifest, fd, allow=allow, pages=pages, dropped=dropped)


_LIVE: dict[int, Publication] = {}  # by id: a name lives until it is withdrawn, though nobody keeps the object


def hold(publication: Publication) -> None:
    """Keep a name that this process published until it is closed or the process ends."""
    publication._holding = True
    if not _LIVE:
        atexit.register(_close_all)
    _LIVE[id(publication)] = publication


def let_go(name: str, but: Identity | None = None) -> None:
    """Keep what was published under a name no longer for the name's sake, since it is another's now, or nobody's.

    What the program holds stays open; what it does not is closed with the last reference.
    """
    for key, publication in list(_LIVE.items()):
        if publication.name == name and publication._manifest.identity != but and publication._pid == os.getpid():
            publication._holding = False
            _LIVE.pop(key, None)


def _close_all() -> None:
    for publication in list(_LIVE.values()):
        publication.close()
