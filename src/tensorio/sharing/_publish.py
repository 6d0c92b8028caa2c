"""Publishing: laying out once what others will map, under a name or without."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from tensorio.checkpoint._checkpoint import Checkpoint
from tensorio.errors import NameTakenError, NotPublishedError, PublicationError, error_context, escaped
from tensorio.sharing._layout import Layout, laid_out, opened
from tensorio.sharing._manifest import FILE, KEPT, MEMORY, Manifest, read_manifest
from tensorio.sharing._publication import Publication, hold, let_go
from tensorio.sharing._reach import myself, reach_named
from tensorio.sharing._registry import Registry, split_name
from tensorio.sharing._segments import content_nbytes, make_file, make_memory
from tensorio.storage.files import FileStorage, Identity

__all__ = ["How", "publish_source"]

Progress = Callable[[int, int], object]


class How(NamedTuple):
    """How something is to be published; see `tensorio.publish`."""

    format: str | None
    huge_pages: bool
    dequantize: bool
    mode: int
    persistent: bool
    replace: bool
    exist_ok: bool
    timeout: float | None
    options: dict[str, Any]  # of `open_checkpoint`
    progress: Progress | None

    def check(self, name: str | None) -> None:
        """Refuse what does not go together."""
        if self.persistent and name is None:
            raise ValueError("persistent=True needs a name, or nobody could find it")
        if self.mode & 0o077 and not self.persistent:
            raise ValueError(
                f"mode=0o{self.mode:o} needs persistent=True: the memory of a process is only for its own user"
            )
        if self.mode & ~0o777 or not self.mode & 0o400:
            raise ValueError(f"mode= is a file's mode that its owner can read with, not 0o{self.mode:o}")
        if self.replace and self.exist_ok:
            raise ValueError("replace=True and exist_ok=True contradict each other")


def publish_source(source: Any, name: str | None, how: How) -> Publication:
    """See `tensorio.publish`."""
    how.check(name)
    if isinstance(source, Checkpoint):
        how = how._replace(options=_as_opened(source, how.options))
    if name is None:
        return _built(source, None, None, how)
    user, name = split_name(name)
    if user is not None:
        raise ValueError("a name to publish has no ':': it is this user's")
    wait = how.timeout if how.exist_ok or how.replace else 0
    with Registry(create=True) as registry, registry.locked(name, wait):
        old = _existing(registry, name, how)
        if old is not None:
            return _joined(registry, name, *old, how)
        return _published(source, name, registry, how)


def _as_opened(checkpoint: Checkpoint, options: dict[str, Any]) -> dict[str, Any]:
    """Have readers read a checkpoint as it was opened."""
    opened = checkpoint._arguments
    unknown = "opaque" if opened.get("unknown") == "opaque" else options["unknown"]
    return {**options, "unknown": unknown, "allow": (*opened.get("allow", ()), *options["allow"])}


def _existing(registry: Registry, name: str, how: How) -> tuple[Manifest, int] | None:
    """What the name stands for now, opened, if that can still be had and is to be used."""
    if how.replace:
        return None  # whatever it is
    manifest = read_manifest(registry, name)
    if manifest is None:
        return None
    try:
        fd, _ = reach_named(manifest)
    except NotPublishedError:
        return None  # a stale name
    except PublicationError as error:
        if how.exist_ok:
            raise
        raise NameTakenError(f"{error.message}; publish with replace=True to take the name") from None
    if how.exist_ok and (manifest.persistent or not how.persistent):
        return manifest, fd
    os.close(fd)
    if how.exist_ok:
        raise NameTakenError(
            f"the name {escaped(name)} is published already, but only as long as its owner lives (process "
            f"{_owner(manifest)}); publish with replace=True for one that is persistent"
        )
    who = "unpublish it" if manifest.persistent else f"by process {_owner(manifest)}"
    raise NameTakenError(
        f"the name {escaped(name)} is published already ({who}); publish with replace=True for a new version, or with "
        "exist_ok=True to use what is there"
    )


def _owner(manifest: Manifest) -> str:
    return ", ".join(str(holder.pid) for holder in manifest.living()) or "of another container"


def _joined(registry: Registry, name: str, manifest: Manifest, fd: int, how: How) -> Publication:
    """Hold what another process published, so that the name outlives that process."""
    manifest = manifest.with_holders(*manifest.living(), myself(fd))
    publication = Publication(manifest, fd, allow=how.options["allow"])
    if not manifest.persistent and manifest.here:
        registry.write(name, manifest.to_json())
        hold(publication)
    return publication


def _published(source: Any, name: str, registry: Registry, how: How) -> Publication:
    """Build and name it; the caller holds the name's lock."""
    before = _kept_by(registry, name)
    registry.remove_segments(name, before)
    try:
        publication = _named(_built(source, name, registry, how), name, registry, how)
    except BaseException:
        registry.remove_segments(name, before)  # memory that nobody could find
        raise
    kept = publication._manifest.path if publication.kind == KEPT else None
    registry.remove_segments(name, kept)  # of the version before; its readers keep their mappings
    let_go(name, but=publication._manifest.identity)
    if not how.persistent:
        hold(publication)
    return publication


def _named(publication: Publication, name: str, registry: Registry, how: How) -> Publication:
    try:
        manifest = publication._manifest
        if how.persistent:  # does not depend on who holds it
            registry.write(name, manifest.with_holders().to_json(), how.mode)
        else:
            registry.write(name, manifest.to_json())
    except BaseException:
        publication.close()
        raise
    return publication


def _kept_by(registry: Registry, name: str) -> str | None:
    """The segment that a name to be replaced stands on; until the new one is there."""
    with contextlib.suppress(PublicationError):
        manifest = read_manifest(registry, name)
        return manifest.path if manifest is not None and manifest.kind == KEPT else None
    return None


def _built(source: Any, name: str | None, registry: Registry | None, how: How) -> Publication:
    checkpoint, ours = opened(source, how.format, how.options)
    try:
        with error_context(path=None if checkpoint is None else checkpoint._name):
            layout = laid_out(source, checkpoint, dequantize=how.dequantize, anew=how.huge_pages)
            if layout.plan is not None:
                return _proven(_in_memory(layout, name, registry, how))
        assert checkpoint is not None
        file = checkpoint._opened.storages[0]
        assert isinstance(file, FileStorage)
        file.check_unchanged()
        kind = FILE if checkpoint.path is not None else MEMORY  # memory: fetched, and sealed already
        return _of_descriptor(os.dup(file.fileno()[0]), kind, checkpoint._place, name, layout, how)
    finally:
        if ours and checkpoint is not None:
            checkpoint.close()


def _proven(publication: Publication) -> Publication:
    """Open what was laid out, before anyone else does: objects may be of classes that no reader is allowed to make."""
    try:
        publication.open().close()
    except BaseException:
        publication.close()
        raise
    return publication


def _in_memory(layout: Layout, name: str | None, registry: Registry | None, how: How) -> Publication:
    plan = layout.plan
    assert plan is not None
    if how.persistent:
        assert registry is not None
        assert name is not None
        entry = registry.new_segment(name)
        fd = make_file(plan, registry.folder, entry, mode=how.mode & 0o444, progress=how.progress)
        return _of_descriptor(fd, KEPT, entry, name, layout, how)
    segment = make_memory(plan, f"tensorio:{name or ''}", huge_pages=how.huge_pages, progress=how.progress)
    return _of_descriptor(segment.fd, MEMORY, None, name, layout, how, segment.pages)


def _of_descriptor(fd: int, kind: str, path: str | None, name: str | None, layout: Layout, how: How,
                   pages: str = "small") -> Publication:  # fmt: skip
    user = os.geteuid() if hasattr(os, "geteuid") else 0
    manifest = Manifest(
        name, kind, layout.format, Identity.of(fd), content_nbytes(fd), (myself(fd),), path, user, how.persistent,
        how.options["unknown"], time.time(),
    )  # fmt: skip
    return Publication(manifest, fd, allow=how.options["allow"], pages=pages, dropped=layout.dropped)
