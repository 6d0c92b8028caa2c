"""Which filesystem a file is on, and what is done about it. The lookup is replaced: tests have a local disk only."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import tensorio
from tensorio.storage import files, reading
from tensorio.system import disks
from tensorio.system.disks import Disk

NFS = Disk("nfs4", "/data")
CASE = cases.CASES["safetensors_small"]()

# Lines of real machines: a container on an overlay, an NFS export, FUSE daemons, a mount point with a space in it.
MOUNTINFO = """\
1044 812 0:91 / / rw,relatime master:300 - overlay overlay rw,lowerdir=/l1:/l2,upperdir=/u,workdir=/w
1045 1044 0:95 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
1046 1044 0:96 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
1050 1044 0:58 /models /data rw,relatime - nfs4 10.0.0.7:/export/models rw,vers=4.2,rsize=1048576
1051 1044 0:77 / /mnt/my\\040bucket rw,nosuid - fuse.gcsfuse gcsfuse rw,user_id=0
1052 1044 0:78 / /mnt/hub rw,nosuid shared:9 master:3 - fuse hf-mount rw
1053 1044 259:1 / /scratch rw,relatime - ext4 /dev/nvme0n1 rw
1054 1053 259:2 / /scratch/deep rw,relatime - xfs /dev/nvme1n1 rw
"""


@pytest.mark.parametrize(("device", "path", "expected"), [
    ((0, 58), "/anything", Disk("nfs4", "/data")),
    ((0, 77), "/x", Disk("fuse.gcsfuse", "/mnt/my bucket")),
    ((0, 78), "/x", Disk("fuse", "/mnt/hub")),
    ((259, 1), "/x", Disk("ext4", "/scratch")),
    ((0, 91), "/x", Disk("overlay", "/")),
    # Subvolumes and some overlays have numbers that no mount has: the path decides.
    ((0, 4000), "/scratch/deep/model.pt", Disk("xfs", "/scratch/deep")),
    ((0, 4000), "/scratch/deeper/model.pt", Disk("ext4", "/scratch")),
    ((0, 4000), "/mnt/my bucket/model.pt", Disk("fuse.gcsfuse", "/mnt/my bucket")),
    ((0, 4000), "/home/model.pt", Disk("overlay", "/")),
])  # fmt: skip
def test_filesystem_is_found_by_device_then_by_path(device: tuple[int, int], path: str, expected: Disk) -> None:
    assert disks._found(MOUNTINFO, os.makedev(*device), path) == expected


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memfd_create is Linux'")
def test_memory_with_a_descriptor_is_memory() -> None:
    fd = os.memfd_create("x")
    disk = disks.disk_of(os.fstat(fd).st_dev, fd)
    os.close(fd)
    assert disk.in_memory
    assert disk.local


def test_filesystem_of_this_file_is_what_the_system_says() -> None:
    with open(__file__, "rb") as f:
        disk = disks.disk_of(os.fstat(f.fileno()).st_dev, f.fileno())
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    assert disk.type in {fields[2] for fields in mounts}


@pytest.mark.parametrize("type", ["nfs", "nfs4", "lustre", "fuse", "fuse.sshfs", "fuseblk", "9p", "cifs", "smb3",
                                  "beegfs", "gpfs", "ceph", "virtiofs"])  # fmt: skip
def test_far_filesystems(type: str) -> None:
    assert Disk(type, "/data").far


@pytest.mark.parametrize("type", ["ext4", "xfs", "btrfs", "overlay", "tmpfs", "zfs", "", "hugetlbfs"])
def test_near_filesystems(type: str) -> None:
    assert not Disk(type, "/data").far


# ------------------------------------------------------------------------------ what is done


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[Disk], None]:
    """Have every file be on some filesystem."""
    return lambda disk: monkeypatch.setattr(files, "disk_of", lambda device, fd: disk)


@pytest.fixture
def preads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Offset and bytes of what is read by pread."""
    seen: list[tuple[int, int]] = []
    real = reading._pread

    def pread(fd: int, offset: int, out: memoryview) -> int:
        n = real(fd, offset, out)
        seen.append((offset, n))
        return n

    monkeypatch.setattr(reading, "_pread", pread)
    return seen


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(CASE.data)
    return path


def maps(path: Path) -> bool:
    with open("/proc/self/maps") as f:
        return str(path) in f.read()


def test_load_from_afar_reads_all_of_the_file(path: Path, on: Any, preads: list[tuple[int, int]]) -> None:
    on(NFS)
    tree = tensorio.load(path)
    assert {k: v.tobytes() for k, v in tree.items()} == {k: v.tobytes() for k, v in CASE.tensors.items()}
    assert sum(n for _, n in preads) == len(CASE.data)
    assert not maps(path)


def test_load_from_near_reads_nothing(path: Path, on: Any, preads: list[tuple[int, int]]) -> None:
    on(Disk("ext4", "/"))
    tree = tensorio.load(path)
    assert preads == []
    assert maps(path)
    del tree


def test_load_from_afar_maps_what_memory_has_no_room_for(
    tmp_path: Path, on: Any, preads: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    tensorio.save({"x": np.ones(1 << 20, "f4")}, path, durable=False)
    on(NFS)
    monkeypatch.setattr("tensorio.system.memory.available", lambda: 1 << 20)
    tree = tensorio.load(path)
    assert maps(path)
    assert sum(n for _, n in preads) == path.stat().st_size  # into the page cache
    assert (tree["x"] == 1).all()


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_open_from_afar_reads_each_tensor_ahead_once(
    suffix: str, tmp_path: Path, on: Any, preads: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "READ_PIECE", 1 << 20)
    path = tmp_path / f"x{suffix}"
    tensors = {name: np.full(3 << 20, i, "u1") for i, name in enumerate("abc")}
    tensorio.save(tensors, path, durable=False)
    on(NFS)
    with tensorio.open(path) as checkpoint:
        assert preads == []
        b = checkpoint["b"]
        extent = checkpoint.infos["b"].chunks[0].extent
        begin, end = min(at for at, _ in preads), max(at + n for at, n in preads)
        assert begin <= extent.offset < extent.offset + extent.nbytes <= end
        assert end - begin <= extent.nbytes + (2 << 20)
        assert max(n for _, n in preads) == 1 << 20
        assert maps(path)  # N workers share one copy
        count = len(preads)
        assert (checkpoint["b"] == b).all()
        assert len(preads) == count
        tree = checkpoint.tree()
        assert sorted({at for at, _ in preads}) == list(range(0, path.stat().st_size, 1 << 20))
        assert len({at for at, _ in preads}) == len(preads)
    assert {k: v.tobytes() for k, v in tree.items()} == {k: v.tobytes() for k, v in tensors.items()}


def test_names_from_afar_are_read_ahead(tmp_path: Path, on: Any, preads: list[tuple[int, int]]) -> None:
    path = tmp_path / "x.pt"
    tensorio.save({"a": np.zeros(20 << 20, "u1"), "b": np.ones(100, "u1")}, path, durable=False)
    on(NFS)
    tree = tensorio.load(path, names=["b"])
    assert tree["b"].sum() == 100
    assert 0 < sum(n for _, n in preads) <= 16 << 20


@pytest.mark.parametrize(("disk", "options", "expected"), [
    (Disk("ext4", "/"), {}, "mapped: ext4"),
    (Disk("ext4", "/"), {"writable": True}, "mapped, private pages where written to: ext4"),
    (Disk("ext4", "/"), {"mmap": False}, "read into memory: mmap=False"),
    (Disk("tmpfs", "/dev/shm"), {}, "mapped: tmpfs, in memory already"),
    (NFS, {}, "read ahead: nfs4 at /data; page faults there are single small reads"),
    (NFS, {"mmap": True}, "mapped: nfs4"),
    (NFS, {"mmap": False}, "read into memory: mmap=False"),
    (Disk("", ""), {}, "mapped: a filesystem that the system does not name"),
])  # fmt: skip
def test_loading_says_what_is_done_and_why(
    disk: Disk, options: dict[str, Any], expected: str, path: Path, on: Any
) -> None:
    on(disk)
    with tensorio.open(path, **options) as checkpoint:
        assert checkpoint.loading == expected


def test_loading_of_bytes() -> None:
    assert tensorio.open(CASE.data).loading == "in memory as given"


def test_inspect_shows_how_a_file_is_loaded(path: Path, on: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("click")
    from tensorio.cli import run

    on(NFS)
    assert run(["inspect", str(path)]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "read ahead: nfs4 at /data; page faults there are single small reads" in lines


def test_mmap_of_another_kind_is_refused(path: Path) -> None:
    for read in (tensorio.open, tensorio.load):
        with pytest.raises(ValueError, match="'auto'"):
            read(path, mmap="maybe")


@pytest.mark.parametrize("mmap", [True, False, "auto"])
@pytest.mark.parametrize("name", ["safetensors_small", "torch_zip_small", "torch_zip_deflated", "torch_legacy_small",
                                  "archive_small"])  # fmt: skip
def test_every_way_gives_the_same_tensors(mmap: Any, name: str, tmp_path: Path, on: Any) -> None:
    case = cases.CASES[name]()
    path = tmp_path / "x"
    path.write_bytes(case.data)
    on(NFS)
    with tensorio.open(path, mmap=mmap) as checkpoint:
        assert {k: v.tobytes() for k, v in checkpoint.items()} == {k: v.tobytes() for k, v in case.tensors.items()}


def test_verify_from_afar_reads_in_large_pieces(tmp_path: Path, on: Any, preads: list[tuple[int, int]]) -> None:
    path = tmp_path / "x.pt"
    tensorio.save({"a": np.zeros(20 << 20, "u1")}, path, durable=False)
    on(NFS)
    assert tensorio.verify(path).ok
    assert sum(n for _, n in preads) >= 20 << 20


@pytest.mark.parametrize("disk", [NFS, Disk("ext4", "/")], ids=["far", "near"])
def test_faces_read_ahead_from_afar_and_nothing_from_near(
    disk: Disk, tmp_path: Path, on: Any, preads: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    import tensorio.safetensors.numpy
    import tensorio.safetensors.torch
    import tensorio.torch

    monkeypatch.setattr(files, "READ_PIECE", 1 << 20)
    tree = {f"w{i}": torch.full((1 << 18,), i, dtype=torch.float32) for i in range(8)}  # a MiB each
    flat, pt = tmp_path / "m.safetensors", tmp_path / "m.pt"
    tensorio.save(tree, flat, durable=False)
    tensorio.save(tree, pt, durable=False)
    on(disk)

    def read_by(act: Callable[[], Any]) -> int:
        preads.clear()
        found = act()
        assert all((found[name].numpy() if hasattr(found[name], "numpy") else found[name])[0] == int(name[1:])
                   for name in found)  # fmt: skip
        return sum(n for _, n in preads)

    def one() -> dict[str, Any]:
        with tensorio.safetensors.safe_open(flat, "pt") as f:
            return {"w3": f.get_tensor("w3")}

    def part() -> dict[str, Any]:
        with tensorio.safetensors.safe_open(flat, "np") as f:
            return {"w3": f.get_slice("w3")[5:6]}

    for act, path in (
        (lambda: tensorio.safetensors.torch.load_file(flat), flat),
        (lambda: tensorio.safetensors.numpy.load_file(flat), flat),
        (lambda: tensorio.torch.load(pt), pt),
        (lambda: tensorio.torch.load(flat), flat),
    ):
        assert read_by(act) == (path.stat().st_size if disk.far else 0)
    assert read_by(lambda: tensorio.torch.load(pt, mmap=True)) == 0  # as it was asked for
    assert read_by(one) == (2 << 20 if disk.far else 0)  # the pieces that it lies in
    assert read_by(part) <= 4
