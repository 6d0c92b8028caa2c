"""Which filesystem a file is on, and what that means for reading it."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

__all__ = ["Disk", "disk_of", "is_mount"]

# On these, a page fault is a request to a server or a program, of little more than a page each: large reads in order
# are tens to hundreds of times faster (28 MiB/s became 16 GiB/s).
FAR = {
    "9p", "afs", "beegfs", "ceph", "cifs", "gpfs", "lustre", "mmfs", "ncpfs", "nfs", "nfs4", "orangefs", "panfs",
    "prl_fs", "pvfs2", "smb3", "smbfs", "vboxsf", "virtiofs", "vmhgfs", "wekafs",
}  # fmt: skip
FAR_FAMILIES = ("fuse",)  # fuse.sshfs, fuse.gcsfuse, fuseblk: a program answers every request
IN_MEMORY = {"devtmpfs", "hugetlbfs", "ramfs", "tmpfs"}
# Where reading past the page cache is known to be quicker for a cold file, and safe.
DIRECT = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "xfs"}
# One kernel serves all who open a file there, so that its locks are seen by everybody.
LOCAL = {
    "bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "ntfs3", "overlay", "ramfs",
    "reiserfs", "tmpfs", "vfat", "xfs", "zfs",
}  # fmt: skip
_KEPT, _KEPT_FOR = 64, 1.0  # filesystems whose type is remembered, and for how many seconds


class Disk(NamedTuple):
    """What is known of the filesystem a file is on.

    Attributes
    ----------
    type : str
        As in ``/proc/self/mountinfo``; empty where the system does not tell.
    mount : str
        Where it is mounted.
    """

    type: str
    mount: str

    @property
    def far(self) -> bool:
        """Whether a page fault costs a round trip, so that reads should be few and large."""
        return self.type in FAR or self.type.startswith(FAR_FAMILIES)

    @property
    def local(self) -> bool:
        """Whether no other host can have its files open."""
        return self.type in LOCAL

    @property
    def in_memory(self) -> bool:
        """Whether its files are in memory already."""
        return self.type in IN_MEMORY

    @property
    def direct(self) -> bool:
        """Whether a cold file is better read past the page cache."""
        return self.type in DIRECT

    def __str__(self) -> str:
        return f"{self.type} at {self.mount}" if self.type else "a filesystem that the system does not name"


_found_before: dict[int, tuple[float, Disk]] = {}


def disk_of(device: int, fd: int) -> Disk:
    """Return the filesystem of a file.

    Parameters
    ----------
    device : int
        ``st_dev`` of the file.
    fd : int
        The file, open. Where no mount has that number (subvolumes, overlays), the longest mount point above its path
        counts.

    Notes
    -----
    An overlay counts as what it says it is: its layers may be out of sight from inside a container, and are local
    as a rule. One small file of the kernel's is read, and the answer remembered for a second: numbers are given to
    other filesystems once these are unmounted.
    """
    now = time.monotonic()
    then, disk = _found_before.get(device, (-_KEPT_FOR, Disk("", "")))
    if now - then >= _KEPT_FOR:
        if len(_found_before) >= _KEPT:
            _found_before.clear()
        disk = _look(device, fd)
        _found_before[device] = now, disk
    return disk


def _look(device: int, fd: int) -> Disk:
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as f:
            text = f.read()
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path.startswith("/memfd:"):
            return Disk("tmpfs", "no mount")  # of the kernel's own (memfd_create(2)), which no table of mounts has
        return _found(text, device, path)
    except OSError:
        return Disk("", "")


def _found(mountinfo: str, device: int, path: str) -> Disk:
    above = Disk("", "")
    number = f"{os.major(device)}:{os.minor(device)}" if hasattr(os, "major") else ""
    for line in mountinfo.splitlines():
        before, _, behind = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not behind:
            continue
        disk = Disk(behind.split(" ", 1)[0], _unescaped(fields[4]))
        if fields[2] == number:
            return disk
        if (path + "/").startswith(disk.mount.rstrip("/") + "/") and len(disk.mount) >= len(above.mount):
            above = disk
    return above


def is_mount(folder: str) -> bool:
    """Tell whether something is mounted at a folder, be it another folder of the same filesystem.

    Parameters
    ----------
    folder : str
        Absolute, and no link.
    """
    if os.path.ismount(folder):
        return True
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as f:
            return any(_unescaped(line.split(" ", 5)[4]) == folder for line in f)
    except (OSError, IndexError):
        return False


def _unescaped(mount: str) -> str:
    """Spaces, tabs, newlines and backslashes are octal there."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        mount = mount.replace(code, character)
    return mount
