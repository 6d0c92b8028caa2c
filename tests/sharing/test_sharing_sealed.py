"""Nobody can change or shrink what is published: the kernel refuses, whoever asks and however."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio
from tensorio.sharing import _segments as segments
from tensorio.system import memory

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's memfd")

REFUSED = (errno.EPERM, errno.EACCES, errno.EBADF, errno.EINVAL)
TENSORS = {"w": np.arange(10_000.0)}


@pytest.fixture
def publication() -> Iterator[tensorio.Publication]:
    with tensorio.publish(TENSORS, "sealed") as publication:
        yield publication


def writable_again(fd: int) -> int:
    """A descriptor for writing to the same file, as its owner can have one."""
    os.fchmod(fd, 0o600)
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR)


def overwrite(fd: int) -> None:
    os.pwrite(fd, b"x", 0)


def append(fd: int) -> None:
    os.pwrite(fd, b"x", os.fstat(fd).st_size)


def truncate(fd: int) -> None:
    os.ftruncate(fd, 10)


def extend(fd: int) -> None:
    os.ftruncate(fd, 1 << 20)


def punch(fd: int) -> None:
    os.posix_fallocate(fd, 0, 1 << 20)


def map_shared(fd: int) -> None:
    mmap.mmap(fd, 4096, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def unseal(fd: int) -> None:
    import fcntl

    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0x20)  # F_SEAL_EXEC: no more seals either


WAYS = [overwrite, append, truncate, extend, punch, map_shared, unseal]


@pytest.mark.parametrize("change", WAYS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("open_it", [os.dup, writable_again], ids=["as_given", "opened_for_writing"])
def test_change_is_refused(change: Callable[[int], None], open_it: Callable[[int], int],
                           publication: tensorio.Publication) -> None:  # fmt: skip
    with tensorio.attach("sealed") as checkpoint:
        array = checkpoint["w"]
        fd = open_it(publication.fileno())
        try:
            with pytest.raises(OSError) as caught:
                change(fd)
            assert caught.value.errno in REFUSED
        finally:
            os.close(fd)
        assert np.array_equal(array, TENSORS["w"])
    assert os.fstat(publication.fileno()).st_size == publication.nbytes


def test_private_mapping_can_be_written_to_and_changes_nothing(publication: tensorio.Publication) -> None:
    with publication.open(writable=True) as mine, publication.open() as others:
        mine["w"][:] = -1
        assert np.array_equal(others["w"], TENSORS["w"])
        assert (mine["w"] == -1).all()


def test_descriptor_is_read_only(publication: tensorio.Publication) -> None:
    import fcntl

    assert fcntl.fcntl(publication.fileno(), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    assert not os.get_inheritable(publication.fileno())


def test_fetched_and_huge_segments_are_sealed_too(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    path = tmp_path / "m.safetensors"
    tensorio.save({"w": np.zeros(3 << 20, np.uint8)}, path, durable=False)
    with fsspec.open("memory://sealed/m.safetensors", "wb") as f:
        f.write(path.read_bytes())
    for source, options in (("memory://sealed/m.safetensors", {}), (path, {"huge_pages": True})):
        with tensorio.publish(source, **options) as publication:
            assert publication.kind == "memory"
            assert segments.is_sealed(publication.fileno())


def test_memory_that_is_not_sealed_is_not_attached_to() -> None:
    """What comes over a socket may be anything."""
    with tensorio.publish(TENSORS) as publication:
        fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
        try:
            os.write(fd, os.pread(publication.fileno(), publication.nbytes, 0))
            with pytest.raises(tensorio.PublicationError, match="can still change"):
                tensorio.attach(fd)
        finally:
            os.close(fd)


def test_file_that_is_kept_can_not_be_opened_for_writing_by_name(registry: Path) -> None:
    with tensorio.publish(TENSORS, "kept", persistent=True):
        (file,) = registry.glob("*.segment")
        assert file.stat().st_mode & 0o777 == 0o400
        tensorio.unpublish("kept")


def test_changed_file_is_refused(registry: Path) -> None:
    with tensorio.publish(TENSORS, "kept", persistent=True):
        (file,) = registry.glob("*.segment")
        file.chmod(0o600)
        with open(file, "r+b") as f:
            f.truncate(100)
        with pytest.raises(tensorio.PublicationError, match="replaced or changed"):
            tensorio.attach("kept")
        tensorio.unpublish("kept")


def test_too_little_memory_is_said_before_anything_is_written(monkeypatch: pytest.MonkeyPatch, registry: Path) -> None:
    monkeypatch.setattr(memory, "available", lambda: 1 << 20)
    with pytest.raises(OSError, match=r"publishing needs \d+ bytes of memory and 1048576 are available") as caught:
        tensorio.publish({"w": np.zeros(8 << 20, np.uint8)}, "big")
    assert caught.value.errno == errno.ENOMEM
    assert list(registry.iterdir()) == []


def test_remote_file_that_is_too_large_is_said_before_memory_ends(
    monkeypatch: pytest.MonkeyPatch, registry: Path
) -> None:
    """Of a file that does not say how large it is, or has no end."""
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open("memory://models/large.safetensors", "wb") as f:
        f.write(bytes(40 << 20))
    before = len(os.listdir("/proc/self/fd"))
    left = iter([1 << 30, 1 << 20])
    monkeypatch.setattr(memory, "available", lambda: next(left))
    with pytest.raises(OSError, match=r"publishing needs \d+ bytes of memory and 1048576 are available") as caught:
        tensorio.publish("memory://models/large.safetensors", "big")
    assert caught.value.errno == errno.ENOMEM
    assert list(registry.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_full_folder_is_an_error_and_leaves_nothing(in_child: Any, registry: Path) -> None:
    """As a /dev/shm of 64 MiB in a container: no bus error later."""

    def work() -> int:
        try:
            tensorio.publish({"w": np.zeros(8 << 20, np.uint8)}, "big", persistent=True)
        except OSError as error:
            return error.errno or 0
        return 0

    assert in_child(work, file_size=1 << 20) == errno.EFBIG
    assert list(registry.iterdir()) == []


def test_publishing_that_fails_half_way_leaves_nothing(registry: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = len(os.listdir("/proc/self/fd"))
    for options in ({}, {"persistent": True}, {"huge_pages": True}):
        with pytest.raises(KeyboardInterrupt):
            tensorio.publish(TENSORS, "m", progress=stop, **options)  # type: ignore[arg-type]
        assert list(registry.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


# --------------------------------------------------------------- other systems


@pytest.fixture
def without_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorio.sharing import _attach, _reach

    for module in (segments, _attach, _reach):
        monkeypatch.setattr(module, "HAS_MEMFD", False)


@pytest.mark.usefixtures("without_memfd")
def test_without_memfd_it_is_a_file_that_has_no_name() -> None:
    with tensorio.publish(TENSORS, "m") as publication, tensorio.attach("m") as checkpoint:
        assert np.array_equal(checkpoint["w"], TENSORS["w"])
        assert os.readlink(f"/proc/self/fd/{publication.fileno()}").endswith("(deleted)")
