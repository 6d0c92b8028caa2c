"""Disks that are full or read-only, limits: OSError with number, path and bytes; the old file whole; no litter."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from power import Disk, Filesystem, why_not
from states import NEW, OLD, Scene
from writers import WRITERS

NBYTES = 6_000_000  # of the old checkpoint; the new one is a quarter larger
TMPFS = "tmpfs"
KINDS = {"ext4": Filesystem(("mkfs.ext4", "-F", "-q"), "loop", 24), TMPFS: None}

pytestmark = pytest.mark.plain_build


@contextlib.contextmanager
def small_disk(kind: str, folder: Path) -> Iterator[Path]:
    """A disk of 16 MiB or so."""
    made = KINDS[kind]
    if why := why_not("ext4"):
        pytest.skip(why)
    if made is not None:
        with Disk(folder, made).mounted() as mountpoint:
            yield mountpoint
        return
    (folder / "disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder / "disk"], check=True)
    try:
        yield folder / "disk"
    finally:
        subprocess.run(["umount", folder / "disk"], check=True)


def fill(folder: Path, leave: int) -> None:
    """Leave so many bytes on a disk, or a little less."""
    disk = os.statvfs(folder)
    with open(folder / "ballast", "wb") as f:
        f.write(bytes(max(0, disk.f_bavail * disk.f_frsize - leave)))
        f.flush()
        os.fsync(f.fileno())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("leave", [0, NBYTES // 2], ids=["full", "half of it"])
def test_full_disk(kind: str, name: str, leave: int, tmp_path: Path) -> None:
    with small_disk(kind, tmp_path) as disk:
        scene = Scene(WRITERS[name], tmp_path, NBYTES, disk)
        scene.reset()
        fill(disk, leave)
        with pytest.raises(OSError) as caught:
            scene.write()
        assert caught.value.errno == errno.ENOSPC
        assert str(caught.value.filename).startswith(str(scene.target))
        assert scene.state() == OLD
        assert scene.litter() == []
        (disk / "ballast").unlink()
        scene.write()
        assert scene.state() == NEW


def test_full_disk_says_what_is_needed_and_what_is_free(tmp_path: Path) -> None:
    with small_disk("ext4", tmp_path) as disk:
        scene = Scene(WRITERS["save .pt"], tmp_path, NBYTES, disk)
        scene.reset()
        fill(disk, 1 << 20)
        with pytest.raises(OSError, match=r"No space left on device: \d{7} bytes are needed, \d{5,7} are free"):
            scene.write()


@pytest.mark.parametrize("name", WRITERS)
def test_disk_that_became_read_only(name: str, tmp_path: Path) -> None:
    with small_disk("ext4", tmp_path) as disk:
        scene = Scene(WRITERS[name], tmp_path, 100_000, disk)
        scene.reset()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(OSError) as caught:
            scene.write()
        assert caught.value.errno == errno.EROFS
        assert str(caught.value.filename).startswith(str(scene.target))
        assert scene.state() == OLD


def _limited(scene: Scene, nbytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))
    scene.write()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limits")
@pytest.mark.parametrize("name", WRITERS)
def test_limit_on_the_size_of_files(name: str, tmp_path: Path, in_child: Any) -> None:
    scene = Scene(WRITERS[name], tmp_path, NBYTES)
    scene.reset()
    with pytest.raises(OSError) as caught:
        in_child(_limited, scene, 100_000)
    assert caught.value.errno == errno.EFBIG
    assert str(caught.value.filename).startswith(str(scene.target))
    assert scene.state() == OLD
    assert scene.litter() == []
