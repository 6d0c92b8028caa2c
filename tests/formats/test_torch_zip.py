"""What is peculiar to torch files: `strict`, old layouts, archives that are something else."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

import cases
import hexfile
import tensorio
from hexfile import Rec, pickled, tensor, torch_file, torch_records, zip_file
from tensorio import HeaderError, UnsupportedError

RAW = {"0": np.arange(4, dtype="f4").tobytes()}
BODY = pickled(tensor())


def by_torch(obj: Any, **options: Any) -> bytes:
    torch = pytest.importorskip("torch")
    out = io.BytesIO()
    torch.save(obj, out, **options)
    return out.getvalue()


# ----------------------------------------------------------------------- strict


def test_strict_accepts_what_torch_writes() -> None:
    torch = pytest.importorskip("torch")
    for obj in (
        torch.arange(5),
        {"a": torch.zeros(0), "b": [torch.ones(3000)]},
        {},
        {f"{i}": torch.ones(i) for i in range(40)},
    ):
        data = by_torch(obj)
        tensorio.load(data, strict=True)
        with tensorio.open(data, strict=True) as checkpoint:
            assert checkpoint.format == "torch_zip"


def test_strict_accepts_what_we_write() -> None:
    out = io.BytesIO()
    tensorio.save({"a": np.ones((3, 4)), "n": {"b": np.zeros(0, "i4")}, "x": 5}, out, format="torch_zip")
    assert tensorio.load(out.getvalue(), strict=True)["x"] == 5


def changed(**kind: Any) -> bytes:
    records = torch_records(BODY, RAW)
    for place, attributes in kind.items():
        for name, value in attributes.items():
            setattr(records[int(place[1:])], name, value)
    return zip_file(records)


LOOSE: dict[str, bytes] = {
    "old_layout": torch_file(BODY, RAW, modern=False),
    "without_byteorder": torch_file(BODY, RAW, byteorder=None),
    "without_version": torch_file(BODY, RAW, version=None),
    "deflated": changed(r4={"method": 8}),
    "unaligned": changed(r4={"pad": False}),
    "without_descriptor": changed(r4={"descriptor": False}),
    "with_a_time": changed(r4={"local": {"time": 5}, "central": {"time": 5}}),
    "without_zip64": torch_file(BODY, RAW, zip64=False),
    "with_a_comment": torch_file(BODY, RAW, comment=b"hello"),
    "with_bytes_behind": torch_file(BODY, RAW, tail=b"\n"),
    "with_a_gap": changed(r4={"gap": b"?" * 64}),
    "with_another_record": zip_file([*torch_records(BODY, RAW), Rec("archive/more", b"")]),
    "in_another_order": zip_file(torch_records(BODY, RAW)[::-1]),
    "with_a_hole_in_the_keys": torch_file(pickled(tensor("1")), {"1": RAW["0"]}),
}  # fmt: skip


@pytest.mark.parametrize("data", LOOSE.values(), ids=LOOSE.keys())
def test_strict_refuses_what_torch_would_not_write(data: bytes) -> None:
    assert tensorio.load(data).tolist() == [0, 1, 2, 3]
    for read in (tensorio.load, tensorio.open):
        with pytest.raises(HeaderError, match="strict"):
            read(data, strict=True)


@pytest.mark.parametrize("align", [1, 8, 48, 64, 128, 4096])
def test_alignment_is_any_that_was_asked_for(align: int) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.serialization import config

    before = config.save.storage_alignment
    config.save.storage_alignment = align
    try:
        data = by_torch({"a": torch.arange(5.0), "b": torch.arange(3)})
    finally:
        config.save.storage_alignment = before
    assert tensorio.load(data, strict=True)["a"].tolist() == [0, 1, 2, 3, 4]
    with tensorio.open(data) as checkpoint:
        assert all(i.chunks[0].extent.offset % align == 0 for i in checkpoint.infos.values())


# ----------------------------------------------------------------- side records


@pytest.mark.parametrize("version", ["1", "2\n", "3\n", " 3 ", "10", None])
def test_version_of_any_torch_reads(version: str | None) -> None:
    assert tensorio.load(torch_file(BODY, RAW, version=version)).shape == (4,)


@pytest.mark.parametrize("version", ["0", "11", "-3", "3x", "", "three", "\u0663"])
def test_version_of_none_is_refused(version: str) -> None:
    with pytest.raises((UnsupportedError, HeaderError)) as caught:
        tensorio.load(torch_file(BODY, RAW, version=version))
    assert caught.value.record == "archive/version"


@pytest.mark.parametrize("byteorder", ["", "Little", "little\n", "LITTLE", "native", "big "])
def test_byteorder_is_one_of_two_words(byteorder: str) -> None:
    with pytest.raises(HeaderError) as caught:
        tensorio.load(torch_file(BODY, RAW, byteorder=byteorder))
    assert caught.value.record == "archive/byteorder"


# -------------------------------------------------------- what is no plain torch file


def test_torchscript_is_refused_with_words_or_read() -> None:
    """An archive with code in it: nothing of it runs, and the weights are not guessed at."""
    records = torch_records(BODY, RAW)
    records += [
        Rec("archive/constants.pkl", pickled(b")")),
        Rec("archive/code/__torch__.py", b"raise SystemExit", method=8),
    ]
    try:
        tree = tensorio.load(zip_file(records))
    except tensorio.TensorIOError as error:
        assert "torchscript" in str(error).lower() or "constants.pkl" in str(error)  # noqa: PT017
    else:
        assert tree.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("first", ["word/document.xml", "META-INF/MANIFEST.MF", "assets/a.txt"])
def test_other_archives_are_refused_by_what_is_missing(first: str) -> None:
    with pytest.raises(HeaderError, match=r"not written by torch\.save"):
        tensorio.load(zip_file([Rec(first, b"x")]))


def test_pickle_of_an_archive_is_checked_even_without_verify() -> None:
    data = bytearray(cases.plain_torch_bytes(cases.state_dict(200)))
    at = data.index(b"layers.77.weight")
    data[at + 7 : at + 9] = b"78"
    with pytest.raises(tensorio.FormatError):
        tensorio.load(bytes(data))


def test_file_object_in_the_middle_of_a_stream_reads(tmp_path: Any) -> None:
    """As torch reads one archive behind another."""
    path = tmp_path / "two"
    one, two = torch_file(BODY, RAW), torch_file(pickled(tensor(size=(2,))), RAW)
    path.write_bytes(one + two)
    with open(path, "rb") as f:
        f.seek(len(one))
        assert tensorio.load(f).tolist() == [0, 1]


def test_first_of_two_archives_in_one_file_is_not_guessed(tmp_path: Any) -> None:
    """Two end records: which directory counts depends on who reads."""
    data = torch_file(BODY, RAW) + torch_file(pickled(tensor(size=(2,))), RAW)
    with pytest.raises(tensorio.FormatError):
        tensorio.load(data)


def test_pickle_of_all_opcodes_of_torch_reads_like_torch() -> None:
    torch = pytest.importorskip("torch")
    obj = {
        "t": (1, (2, 3), (4, 5, 6), (), (7, 8, 9, 10)),
        "l": [None, True, False, 1.5, -1, 1 << 40, "x"],
        "d": {1: {}},
        "n": [torch.Size([1, 2]), torch.device("cpu")],
        "big": list(range(1500)),
    }
    got = tensorio.load(by_torch(obj))
    assert {k: got[k] for k in ("t", "l", "d", "big")} == {k: obj[k] for k in ("t", "l", "d", "big")}
    assert got["n"] == [(1, 2), ("cpu", None)]


def test_hexfile_builder_is_what_torch_writes() -> None:
    """The builder that the hostile tests rely on makes torch's own bytes."""
    torch = pytest.importorskip("torch")
    data = by_torch({"a": torch.arange(10), "b": torch.zeros(0), "c": torch.ones(3)})
    import zipfile

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert zip_file([Rec(n, archive.read(n)) for n in archive.namelist()]) == data
    assert torch.load(io.BytesIO(torch_file(BODY, RAW)), weights_only=True).tolist() == [0, 1, 2, 3]
    assert hexfile.respelled(BODY) == BODY


def test_strict_blames_a_byte_of_the_file() -> None:
    """Also where the records that torch would have written reach further than the file."""
    for records in (1, 2, 4, 6):
        data = hexfile.zip_file(hexfile.torch_records(hexfile.pickled(b"]"), {"0": bytes(8)})[:records])
        with pytest.raises(tensorio.FormatError, match="strict") as caught:
            tensorio.load(data, strict=True)
        assert caught.value.offset <= len(data)
