"""Archives of checkpoints: what is opened, what is left alone, and how far it goes."""

from __future__ import annotations

import io
import os
import tarfile
import tracemalloc
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

import cases
import hexfile
import tensorio
from hexfile import tarred
from tensorio import (
    ChecksumError,
    FormatError,
    HeaderError,
    LimitError,
    TruncatedError,
    UnknownFormatError,
    UnsafePickleError,
    UnsupportedError,
)
from tensorio.formats import _zip_kind
from tensorio.formats._base import OpenOptions
from tensorio.storage.base import MemoryStorage
from tensorio.storage.files import FileStorage
from tensorio.storage.ranges import RangeStorage

W = np.arange(6, dtype="f4").reshape(2, 3)
TORCH = cases.plain_torch_bytes({"w": W})
ST = cases.safetensors_bytes({"x": W}, {"made": "here"})


def zipped(members: dict[str, bytes] | Iterable[tuple[str, bytes]], packed: bool = False) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        for name, data in dict(members).items():
            archive.writestr(name, data)
    return out.getvalue()


# ----------------------------------------------------------------------- telling zips apart


@pytest.mark.parametrize("name", [n for f in ("torch_zip", "torchscript", "torch_export", "torch_package", "archive")
                                  for n in cases.cases_of(f) if n != "archive_tar"])  # fmt: skip
@pytest.mark.parametrize("comment", [b"", b"a comment"])
def test_kind_of_every_case(name: str, comment: bytes) -> None:
    case = cases.CASES[name]()
    data = case.data
    if comment:
        data = data[:-2] + len(comment).to_bytes(2, "little") + comment
    assert _zip_kind.kind(MemoryStorage(data)) == case.format


def test_kind_of_archives_that_are_none_of_these() -> None:
    assert _zip_kind.kind(MemoryStorage(zipped({"a.npy": b"x", "b.npy": b"y"}))) == _zip_kind.OTHER
    assert _zip_kind.kind(MemoryStorage(zipped({}))) == _zip_kind.OTHER
    for data in (b"", b"PK\3\4", TORCH[:-1], TORCH[: len(TORCH) // 2], b"PK\5\6" + bytes(18)):
        assert _zip_kind.kind(MemoryStorage(data)) in (None, _zip_kind.OTHER)


def test_kind_of_a_file_by_torch_that_only_looks_like_another() -> None:
    records = hexfile.torch_records(hexfile.pickled(hexfile.tensor()), {"0": bytes(16)})
    more = ("archive/x/constants.pkl", "archive/constants.pkl.py", "archive/a.pth")
    data = hexfile.zip_file([*records, *map(hexfile.Rec, more)])
    assert tensorio.identify(data) == "torch_zip"
    assert tensorio.load(data).shape == (4,)


def test_npz_is_no_archive_of_checkpoints() -> None:
    out = io.BytesIO()
    np.savez(out, a=W)
    with pytest.raises(HeaderError, match="some other kind of zip archive"):
        tensorio.open(out.getvalue())


@pytest.mark.parametrize("offset", [0xFFFFFFFF, 1 << 40, (1 << 64) - 1])
def test_end_records_that_point_outside_are_nobodys(offset: int) -> None:
    for data in (
        hexfile.zip_file([hexfile.Rec("a/x.pth", TORCH)], end64={"offset": offset}),
        hexfile.zip_file([hexfile.Rec("a/x.pth", TORCH)], end64={"csize": offset}),
        hexfile.zip_file([hexfile.Rec("a/x.pth", TORCH)], locator={"offset": offset}),
        hexfile.zip_file([hexfile.Rec("a/x.pth", TORCH)], zip64=False, end={"offset": min(offset, 0xFFFFFFF0)}),
    ):
        with pytest.raises(FormatError):
            tensorio.open(data)


# ------------------------------------------------------------------------------- members


def test_stored_members_are_views_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    path.write_bytes(zipped({"notes.txt": b"hello", "a/policy.pth": TORCH, "b.safetensors": ST}))
    with tensorio.open(path) as checkpoint:
        assert {name: array.tolist() for name, array in checkpoint.items()} == {
            "a/policy.pth.w": W.tolist(), "b.safetensors.x": W.tolist()
        }  # fmt: skip
        for info in checkpoint.infos.values():
            extent = info.chunks[0].extent
            assert extent.storage == 0
            assert path.read_bytes()[extent.offset : extent.offset + extent.nbytes] == W.tobytes()
        assert len(checkpoint._opened.storages) == 1
        assert checkpoint._opened.skipped == ("notes.txt",)
        assert checkpoint.metadata == {"b.safetensors.made": "here"}
        checkpoint.prefetch()


def test_packed_members_are_unpacked_once_each() -> None:
    data = zipped({"a.pth": TORCH, "big.bin": b"\0" * 1_000_000, "b.pth": TORCH}, packed=True)
    with tensorio.open(data) as checkpoint:
        assert list(checkpoint) == ["a.pth.w", "b.pth.w"]
        assert [s.nbytes for s in checkpoint._opened.storages] == [len(data), len(TORCH), len(TORCH)]
        assert checkpoint["b.pth.w"].tolist() == W.tolist()
        assert checkpoint._opened.skipped == ("big.bin",)


def test_members_are_known_by_content() -> None:
    data = zipped({"a.pth": ST, "no suffix": TORCH, "b.bin": b"hello", "c.npz": zipped({"x.npy": b""}), "d/": b""})
    with tensorio.open(data) as checkpoint:
        assert list(checkpoint) == ["a.pth.x", "no suffix.w"]
        assert checkpoint._opened.skipped == ("b.bin", "c.npz")


def test_tar_members_are_views(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(tarred({"run/notes": b"x", "run/a.pt": TORCH, "b.safetensors": ST}))
    with tensorio.open(path) as checkpoint:
        assert list(checkpoint) == ["run/a.pt.w", "b.safetensors.x"]
        assert checkpoint["run/a.pt.w"].tolist() == W.tolist()
        assert len(checkpoint._opened.storages) == 1
    report = tensorio.verify(path)
    assert report.ok
    assert report.checked > 0


def test_tar_of_other_things_is_unknown() -> None:
    with pytest.raises(UnknownFormatError, match="tar archive"):
        tensorio.open(tarred({"readme": b"x"}))


def test_archives_in_archives() -> None:
    data = zipped({"x.pth": TORCH})
    for level in range(3):
        data = zipped({"in.zip": data, f"{level}.pth": TORCH}, packed=level == 1)
    with tensorio.open(data) as checkpoint:
        assert list(checkpoint) == ["in.zip.in.zip.in.zip.x.pth.w", "in.zip.in.zip.0.pth.w", "in.zip.1.pth.w",
                                    "2.pth.w"]  # fmt: skip
        assert all(a.tolist() == W.tolist() for a in checkpoint.values())
        assert all(a.tolist() == W.tolist() for a in
                   (checkpoint.tree()["in.zip"]["in.zip"]["0.pth"]["w"], checkpoint.tree()["2.pth"]["w"]))  # fmt: skip


def test_tar_in_zip_in_tar() -> None:
    data = tarred({"x.zip": zipped({"y.tar": tarred({"z.safetensors": ST})})})
    with tensorio.open(data) as checkpoint:
        assert list(checkpoint) == ["x.zip.y.tar.z.safetensors.x"]
        extent = checkpoint.infos["x.zip.y.tar.z.safetensors.x"].chunks[0].extent
        assert data[extent.offset : extent.offset + extent.nbytes] == W.tobytes()


def test_every_kind_of_torch_file_may_be_a_member() -> None:
    members, want = {}, {}
    for format in ("torch_zip", "torchscript", "torch_export", "torch_package", "safetensors"):
        for name in cases.cases_of(format):
            case = cases.CASES[name]()
            members[f"{name}.pt"] = case.data
            want |= {f"{name}.pt.{fqn}": array for fqn, array in case.tensors.items()}
    for packed in (False, True):
        with tensorio.open(zipped(members, packed)) as checkpoint:
            assert set(checkpoint) == set(want)
            for name, array in want.items():
                assert checkpoint[name].tobytes() == array.tobytes()
                assert checkpoint.infos[name].dtype == array.dtype.name
        tree = tensorio.load(zipped(members, packed))
        assert list(tree) == list(members)


def test_some_names_of_some_members() -> None:
    data = zipped({"a.pth": cases.plain_torch_bytes({"w": W, "v": W}), "b.safetensors": ST, "c.pth": TORCH})
    tree = tensorio.load(data, names=["a.pth.v", "b.safetensors.x"])
    assert list(tree) == ["a.pth", "b.safetensors"]
    assert list(tree["a.pth"]) == ["v"]
    assert tree["b.safetensors"]["x"].tolist() == W.tolist()


def test_converting_keeps_names_and_values(tmp_path: Path) -> None:
    case = cases.CASES["archive_deflated"]()
    (tmp_path / "x.zip").write_bytes(case.data)
    for suffix in (".safetensors", ".pt"):
        tensorio.convert(tmp_path / "x.zip", tmp_path / f"y{suffix}")
        with tensorio.open(tmp_path / f"y{suffix}") as checkpoint:
            assert {name: a.tobytes() for name, a in checkpoint.items()} == {
                name: a.tobytes() for name, a in case.tensors.items()
            }


# -------------------------------------------------------------------------------- refusals


def test_no_member_is_a_checkpoint() -> None:
    with pytest.raises(UnknownFormatError, match=r"none of whose members.*'a\.pth', 'b\.txt'"):
        tensorio.open(zipped({"a.pth": b"hello", "b.txt": b"there"}))


@pytest.mark.parametrize("packed", [False, True])
def test_bad_member_is_named_by_both_files(packed: bool, tmp_path: Path) -> None:
    path = tmp_path / "outer.zip"
    changed = bytearray(TORCH)
    changed[TORCH.index(W.tobytes())] ^= 1
    for inner, kind, record in (
        (TORCH[:-30], FormatError, "bad.pth"),
        (TORCH[: len(TORCH) // 2], TruncatedError, "bad.pth"),
        (bytes(changed), ChecksumError, "bad.pth: archive/data/0"),
    ):
        path.write_bytes(zipped({"good.pth": TORCH, "bad.pth": inner}, packed))
        with pytest.raises(kind) as caught:
            tensorio.open(path)
        assert (caught.value.path, caught.value.record) == (str(path), record)


def test_refused_names_of_all_members_are_listed_at_once() -> None:
    members = {}
    for name in ("one", "two"):
        body = hexfile.name("some.module", name) + b")R"
        members[f"{name}.pth"] = hexfile.torch_file(hexfile.pickled(body))
    with pytest.raises(UnsafePickleError, match="1 more") as caught:
        tensorio.open(zipped(members))
    assert caught.value.globals == ("some.module.one", "some.module.two")
    assert caught.value.record == "one.pth: archive/data.pkl"
    assert set(tensorio.load(zipped(members), unknown="opaque")) == {"one.pth", "two.pth"}


def test_depth_is_limited() -> None:
    data = zipped({"x.pth": TORCH})
    for _ in range(4):
        data = zipped({"in.zip": data})
    with pytest.raises(LimitError, match="over 4 levels"):
        tensorio.open(data)


def test_archive_that_contains_itself_ends() -> None:
    """What unpacks to itself is deeper than any limit."""
    data = zipped({"x.pth": TORCH})
    for _ in range(30):
        data = zipped({"a.zip": data, "b.zip": zipped({"x.pth": b""})})
    with pytest.raises(LimitError):
        tensorio.open(data)


def test_bomb_is_refused_before_it_is_unpacked() -> None:
    zeros = cases.safetensors_bytes({"x": np.zeros(70 << 20, "u1")})
    bomb = zipped({"x.safetensors": zeros}, packed=True)
    assert len(bomb) < 100_000
    for data in (bomb, zipped({"a.zip": bomb}), zipped({"a.zip": bomb}, packed=True), tarred({"a.zip": bomb})):
        tracemalloc.start()
        with pytest.raises(LimitError, match="unpack"):
            tensorio.open(data)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
        tracemalloc.stop()


def test_packed_zeros_are_not_unpacked_to_see_that_they_are_nothing() -> None:
    data = zipped({"x.bin": bytes(100 << 20), "y.pth": TORCH}, packed=True)
    tracemalloc.start()
    assert list(tensorio.open(data)) == ["y.pth.w"]
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_room_is_shared_by_all_members(monkeypatch: pytest.MonkeyPatch) -> None:
    data = zipped({f"{i}.pth": TORCH for i in range(4)}, packed=True)
    from tensorio.formats import _base

    monkeypatch.setattr(_base, "UNPACKED_PER_BYTE", 0)
    monkeypatch.setattr(_base, "UNPACKED", 4 * len(TORCH))
    assert len(tensorio.load(data)) == 4
    monkeypatch.setattr(_base, "UNPACKED", 4 * len(TORCH) - 1)
    with pytest.raises(LimitError, match="unpack"):
        tensorio.open(data)
    monkeypatch.setattr(_base, "UNPACKED", 2 * len(zipped({"x.pth": TORCH}, packed=True)) + 2 * len(TORCH) - 1)
    twice = zipped({f"{i}.zip": zipped({"x.pth": TORCH}, packed=True) for i in range(2)}, packed=True)
    with pytest.raises(LimitError, match="unpack"):
        tensorio.open(twice)


def test_members_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorio.formats import _base

    data = zipped({"x.zip": zipped({"a.pth": TORCH, "b.pth": TORCH}), "c.pth": TORCH})
    monkeypatch.setattr(_base, "MEMBERS", 4)
    assert len(tensorio.open(data)) == 3
    monkeypatch.setattr(_base, "MEMBERS", 3)
    with pytest.raises(LimitError, match="too many"):
        tensorio.open(data)


def test_what_pickles_may_cost_is_shared_out() -> None:
    options = OpenOptions()
    inner = options.within(10, 100)
    assert inner.spare * 10 <= options.spare
    assert inner.within(3, 100).spare * 30 <= options.spare
    assert inner.rules().spare == inner.spare
    body = b"](" + b"}" * 300_000 + b"e"  # 96 bytes each in memory, 1 in the file
    member = hexfile.torch_file(hexfile.pickled(body))
    assert len(tensorio.load(zipped({"a.pth": member}))["a.pth"]) == 300_000
    with pytest.raises(LimitError):
        tensorio.load(zipped({f"{i}.pth": member for i in range(8)}))


def test_two_members_of_one_name_are_refused() -> None:
    records = [hexfile.Rec("a.pth", TORCH), hexfile.Rec("a.pth", TORCH)]
    with pytest.raises(HeaderError, match="twice"):
        tensorio.open(hexfile.zip_file(records))


@pytest.mark.parametrize("name", ["../a.pth", "a/../../b.pth", "a\0.pth"])
def test_odd_names_are_refused(name: str) -> None:
    with pytest.raises(HeaderError, match="component"):
        tensorio.open(hexfile.zip_file([hexfile.Rec(name, TORCH)]))


def test_strict_and_saving_are_refused_with_words(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="strict"):
        tensorio.open(zipped({"a.pth": TORCH}), strict=True)
    with pytest.raises(UnsupportedError, match="read only"):
        tensorio.save({"x": W}, tmp_path / "x.zip", format="archive")


# ----------------------------------------------------------------------------------- ranges


def test_range_of_a_storage_reads_and_streams_what_the_whole_does(tmp_path: Path) -> None:
    data = np.arange(100_000, dtype="u1").tobytes() * 20
    (tmp_path / "x").write_bytes(data)
    with open(tmp_path / "x", "rb") as f:
        whole = FileStorage(os.dup(f.fileno()), "x")
    part = RangeStorage(RangeStorage(whole, 1000, 1_500_000), 24, 1_400_000)
    assert (part.whole, part.offset, part.nbytes, part.mapped, part.writable) == (whole, 1024, 1_400_000, True, False)
    assert bytes(part.view()) == data[1024:1_401_024]
    assert b"".join(bytes(p) for p in part.stream(10, 1_300_000)) == data[1034:1_301_034]
    assert repr(part.lease()) == "<lease of 1400000 bytes>"
    with part.scattered():
        pass
    whole.read_all()
    assert not part.mapped
    assert bytes(part.view()) == data[1024:1_401_024]
    whole.close()
    with pytest.raises(ValueError, match="closed"):
        part.view()


def test_range_of_writable_memory_is_writable() -> None:
    whole = MemoryStorage(bytearray(10), writable=True)
    part = RangeStorage(whole, 2, 4)
    part.view()[0] = 7
    assert bytes(whole.view()) == b"\0\0\7" + bytes(7)
    assert part.writable


# -------------------------------------------------------------------------------------- tar


@pytest.mark.parametrize(("format", "depth"), [(tarfile.USTAR_FORMAT, 20), (tarfile.GNU_FORMAT, 30),
                                               (tarfile.PAX_FORMAT, 30)])  # fmt: skip
def test_tar_of_every_dialect(format: int, depth: int) -> None:
    long = "deep/" * depth + "x.safetensors"
    others = {"run": tarfile.DIRTYPE, "run/link.pt": tarfile.SYMTYPE, "run/hard.pt": tarfile.LNKTYPE}
    notes = {"comment": "a commit"} if format == tarfile.PAX_FORMAT else None
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format, pax_headers=notes) as archive:
        for name, kind in others.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.mtime = kind, "l" * 4 * depth, 1
            archive.addfile(info)
        for name, data in (("run/a.pt", TORCH), (long, ST), ("ü.safetensors", ST)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    with tensorio.open(out.getvalue()) as checkpoint:
        assert list(checkpoint) == ["run/a.pt.w", f"{long}.x", "ü.safetensors.x"]
        assert all(array.tolist() == W.tolist() for array in checkpoint.values())


@pytest.mark.parametrize("name", ["/etc/x.pt", "../x.pt", "a/../x.pt"])
def test_tar_names_that_leave_the_archive_are_refused(name: str) -> None:
    for format in (tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT):
        with pytest.raises(HeaderError, match="relative name"):
            tensorio.open(tarred({"ok.pt": TORCH, name + "é" * (format == tarfile.PAX_FORMAT): TORCH}, format))


def test_tar_members_of_one_name_are_refused() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for _ in range(2):
            info = tarfile.TarInfo("a.pt")
            info.size = len(TORCH)
            archive.addfile(info, io.BytesIO(TORCH))
    with pytest.raises(HeaderError, match="one name"):
        tensorio.open(out.getvalue())


def test_damaged_tar_says_so() -> None:
    data = bytearray(tarred({"a.pt": TORCH, "b.pt": TORCH}))
    data[512 + (len(TORCH) + 511) // 512 * 512 + 3] ^= 1
    with pytest.raises(HeaderError, match="checksum"):
        tensorio.open(bytes(data))
