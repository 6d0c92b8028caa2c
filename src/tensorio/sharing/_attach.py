"""Attaching to what was published, and the list of it."""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

from tensorio.checkpoint._checkpoint import Checkpoint
from tensorio.errors import NotPublishedError, PublicationError, error_context, escaped
from tensorio.sharing._manifest import KEPT, MEMORY, Manifest, read_manifest
from tensorio.sharing._publication import Publication, let_go
from tensorio.sharing._reach import open_published, reach_named
from tensorio.sharing._registry import Registry, split_name
from tensorio.sharing._segments import HAS_MEMFD, content_nbytes, is_sealed
from tensorio.storage.files import Identity
from tensorio.system.processes import mappers

__all__ = ["Published", "attach_to", "published_names", "unpublish_name"]

_POLL = 0.005, 0.1  # seconds between looks at a name: at first, at last


class Published(NamedTuple):
    """A published name.

    Attributes
    ----------
    name : str
    kind : {"file", "memory", "kept"}
        See `Publication`.
    format : str
    nbytes : int
    owners : tuple of int
        Ids of the processes that hold it and live.
    readers : tuple of int
        Ids of the processes that have it mapped, as far as this user may look.
    persistent : bool
        Whether it outlives them.
    path : str or None
        Of the file, if it is one that was there before.
    created : float
        Seconds since 1970.
    alive : bool
        Whether it can be attached to.
    """

    name: str
    kind: str
    format: str
    nbytes: int
    owners: tuple[int, ...]
    readers: tuple[int, ...]
    persistent: bool
    path: str | None
    created: float
    alive: bool


def attach_to(what: Any, *, writable: bool, unknown: str | None, allow: tuple[type, ...],
              timeout: float | None) -> Checkpoint:  # fmt: skip
    """See `tensorio.attach`."""
    if isinstance(what, Publication):
        return what.open(writable=writable)
    if isinstance(what, int):
        return _of_descriptor(what, writable, unknown or "error", allow)
    if not isinstance(what, str):
        raise TypeError(f"expected a name, a Publication or a descriptor, found {type(what).__name__}")
    user, name = split_name(what)
    deadline = None if timeout is None else time.monotonic() + timeout
    pause, longest = _POLL
    while True:
        try:
            return _attached(user, name, writable, unknown, allow)
        except NotPublishedError:
            if deadline is None or time.monotonic() >= deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, longest)


def _of_descriptor(fd: int, writable: bool, unknown: str, allow: tuple[type, ...]) -> Checkpoint:
    """Attach to what came over a socket, which need not be what was said."""
    if HAS_MEMFD and not is_sealed(fd):
        raise PublicationError(f"expected a descriptor of sealed memory, found at {fd} what others can still change")
    manifest = Manifest(None, MEMORY, "", Identity.of(fd), content_nbytes(fd))
    return open_published(manifest, os.dup(fd), None, writable=writable, unknown=unknown, allow=allow)


def _attached(user: int | None, name: str, writable: bool, unknown: str | None, allow: tuple[type, ...]) -> Checkpoint:
    try:
        registry = Registry(user)
    except FileNotFoundError:
        raise NotPublishedError(f"nothing is published under the name {escaped(name)}") from None
    with registry, error_context(path=registry.path(name)):
        while True:
            manifest = _manifest(registry, name)
            try:
                fd, path = reach_named(manifest)
            except PublicationError as error:
                if _manifest(registry, name) != manifest:
                    continue  # replaced meanwhile
                if isinstance(error, NotPublishedError):
                    _remove_stale(registry, name, manifest)
                raise
            return open_published(
                manifest, fd, path, writable=writable, unknown=unknown or manifest.unknown, allow=allow
            )


def _manifest(registry: Registry, name: str) -> Manifest:
    manifest = read_manifest(registry, name)
    if manifest is None:
        raise NotPublishedError(f"nothing is published under the name {escaped(name)}")
    return manifest


def _remove_stale(registry: Registry, name: str, manifest: Manifest) -> None:
    """Remove what a publisher who died left behind, unless somebody is publishing it just now."""
    if registry.user != os.geteuid() or (manifest.living() and manifest.here):
        return
    try:
        with registry.locked(name, grace=0):
            if _manifest(registry, name) == manifest:
                registry.remove(name)
                registry.remove_segments(name)
    except (PublicationError, OSError):
        pass


def published_names() -> list[Published]:
    """See `tensorio.published`."""
    try:
        registry = Registry()
    except FileNotFoundError:
        return []
    with registry:
        manifests = [m for name in registry.names() if (m := read_manifest(registry, name)) is not None]
    mapped = mappers(manifest.identity[:2] for manifest in manifests)
    return [_described(manifest, mapped[manifest.identity[:2]]) for manifest in manifests]


def _described(m: Manifest, readers: list[int]) -> Published:
    try:
        os.close(reach_named(m)[0])
        alive = True
    except PublicationError:
        alive = False
    owners = tuple(dict.fromkeys(h.pid for h in m.living())) if m.here else ()
    path = None if m.kind == KEPT else m.path
    assert m.name is not None
    return Published(m.name, m.kind, m.format, m.nbytes, owners, tuple(readers), m.persistent, path, m.created, alive)


def unpublish_name(name: str) -> None:
    """See `tensorio.unpublish`."""
    user, name = split_name(name)
    try:
        registry = Registry(user)
    except FileNotFoundError:
        raise NotPublishedError(f"nothing is published under the name {escaped(name)}") from None
    with registry, registry.locked(name), error_context(path=registry.path(name)):
        try:
            missing = registry.read(name) is None
        except PublicationError:
            missing = False  # whatever it is, it goes
        registry.remove(name)
        left = registry.remove_segments(name)  # or memory of a publisher who was killed before he had named it
        if missing and not left:
            raise NotPublishedError(f"nothing is published under the name {escaped(name)}")
        if registry.user == os.geteuid():
            let_go(name)
