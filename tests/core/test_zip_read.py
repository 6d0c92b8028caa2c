"""Reading zip archives, beside `zipfile`."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexfile import Rec, zip_file
from tensorio import FormatError, HeaderError, TensorIOError, TruncatedError, UnsupportedError, _core

members = st.dictionaries(
    st.text("abc/_.0123456789", min_size=1, max_size=12).filter(lambda n: ".." not in n.split("/")),
    st.tuples(st.binary(max_size=200), st.booleans()),
    min_size=1,
    max_size=8,
)


def listing(data: bytes) -> list[Any]:
    rows, _, _ = _core.zip_read(data)
    return _core.zip_records(data, rows)


def by_zipfile(contents: dict[str, Any], comment: bytes = b"") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, (raw, packed) in contents.items():
            archive.writestr(name, raw, zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED)
        archive.comment = comment
    return out.getvalue()


ENDS = (b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07")  # a comment with one of these is refused


@settings(max_examples=200, deadline=None)
@given(members, st.binary(max_size=50).filter(lambda c: not any(s in c for s in ENDS)))
def test_archive_by_zipfile_reads_the_same(contents: dict[str, Any], comment: bytes) -> None:
    data = by_zipfile(contents, comment)
    got = listing(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        want = [(i.filename, i.compress_size, i.file_size, i.CRC, i.compress_type) for i in archive.infolist()]
    assert [(n, c, s, crc, m) for n, _, c, s, crc, m in got] == want
    for name, offset, compressed, size, _, method in got:
        raw = data[offset : offset + compressed]
        assert (zlib.decompress(raw, -15, size) if method else raw) == contents[name][0]


@settings(max_examples=100, deadline=None)
@given(members, st.sampled_from([1, 8, 64, 100]), st.booleans())
def test_archive_by_hand_reads_the_same_here_and_by_zipfile(contents: dict[str, Any], align: int, zip64: bool) -> None:
    data = zip_file([Rec(n, raw) for n, (raw, _) in contents.items()], align=align, zip64=zip64)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert {n: archive.read(n) for n in archive.namelist()} == {n: raw for n, (raw, _) in contents.items()}
    for name, offset, size, *_ in listing(data):
        assert offset % align == 0
        assert data[offset : offset + size] == contents[name][0]


def test_archive_that_was_streamed_reads() -> None:
    """A writer that can't seek leaves sizes to descriptors."""

    class Pipe(io.RawIOBase):
        def __init__(self) -> None:
            self.data = bytearray()

        def writable(self) -> bool:
            return True

        def write(self, piece: Any) -> int:
            self.data += piece
            return len(piece)

    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w") as archive:
        archive.writestr("a/x", b"123")
        archive.writestr("a/y", b"456" * 100, zipfile.ZIP_DEFLATED)
    assert [n for n, *_ in listing(bytes(pipe.data))] == ["a/x", "a/y"]


def test_archive_with_zip64_local_fields_reads() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive, archive.open("a/big", "w", force_zip64=True) as f:
        f.write(b"payload")
    ((name, offset, size, *_),) = listing(out.getvalue())
    assert (name, out.getvalue()[offset : offset + size]) == ("a/big", b"payload")


def sparse(size: int) -> bytes:
    """The directory of an archive whose record has a size over 4 GiB: central zip64 field."""
    extra = struct.pack("<HHQQ", 1, 16, size, size)
    return zip_file(
        [Rec("a/x", b"12", descriptor=False, central={"csize": 0xFFFFFFFF, "usize": 0xFFFFFFFF, "extra": extra})]
    )


def test_archive_with_a_lying_zip64_size_is_refused() -> None:
    for size in (3, 1 << 33, (1 << 64) - 1):
        with pytest.raises(FormatError):
            listing(sparse(size))
    assert listing(sparse(2))[0][2] == 2


def test_archive_without_records_reads_as_empty() -> None:
    assert listing(zip_file([])) == []
    assert listing(by_zipfile({})) == []


@pytest.mark.parametrize("junk", [b"x", b"PK", bytes(100), b"PK\x03\x04" + bytes(26)])
def test_archive_behind_other_bytes_is_refused(junk: bytes) -> None:
    with pytest.raises(FormatError):
        listing(junk + by_zipfile({"a/x": (b"1", False)}))


def test_archive_cut_anywhere_is_refused() -> None:
    data = zip_file([Rec("a/x", b"123"), Rec("a/y", b"")])
    for n in range(len(data)):
        with pytest.raises(TruncatedError):
            listing(data[:n])


def test_every_bit_of_the_headers_flipped_is_an_error_or_the_same_listing() -> None:
    """Fields that matter can't be changed; the others (times, versions, padding) change nothing."""
    data = bytearray(zip_file([Rec("a/x", b"123"), Rec("a/y", b"4567"), Rec("a/z", b"")], align=16))
    want = listing(bytes(data))
    refused = 0
    for at in range(len(data)):
        for bit in range(8):
            data[at] ^= 1 << bit
            try:
                got = listing(bytes(data))
            except TensorIOError:
                refused += 1
            else:
                if got != want:  # a name or a checksum of the directory: whoever reads the record finds out
                    changed = [i for i in range(len(want)) if got[i] != want[i]]
                    assert len(changed) == 1, (at, bit)
                    assert [r[1:4] for r in got] == [r[1:4] for r in want], (at, bit)
            data[at] ^= 1 << bit
    assert refused > 1000


@pytest.mark.parametrize("method", [1, 9, 12, 14, 93, 99])
def test_archive_of_another_method_is_unsupported(method: int) -> None:
    data = zip_file([Rec("a/x", b"123", local={"method": method}, central={"method": method})])
    with pytest.raises(UnsupportedError, match="method"):
        listing(data)


def test_names_are_sorted_by_kind() -> None:
    data = zip_file(
        [
            Rec("p/data/0", b"a"),
            Rec("p/data/2", b"b"),
            Rec("p/data/94279043900432", b"c"),
            Rec("p/data/x", b"d"),
            Rec("p/data/01", b"e"),
            Rec("p/version", b"3"),
            Rec("q/data/1", b"f"),
        ]
    )
    rows, _, _ = _core.zip_read(data)
    numbers, inside, outside = _core.zip_names(data, rows, "p/data/")
    assert [numbers[0], numbers[1], numbers[2]] == [0, -1, 1]
    assert inside == {"94279043900432": 2, "x": 3, "01": 4}
    assert outside == {"p/version": 5, "q/data/1": 6}


@pytest.mark.parametrize("name", ["p/data/0", "p/version", "p/data/x", "p/data/99999999999"])
def test_names_that_occur_twice_are_refused(name: str) -> None:
    data = zip_file([Rec("p/version", b"3"), Rec("p/data/0", b""), Rec("p/data/x", b""), Rec("p/data/99999999999", b""),
                     Rec(name, b"2")])  # fmt: skip
    rows, _, _ = _core.zip_read(data)
    with pytest.raises(HeaderError, match="twice") as caught:
        _core.zip_names(data, rows, "p/data/")
    assert caught.value.record in (name, name.rpartition("/")[2])


@pytest.mark.parametrize("name", ["a/../x", "../x", "a/..", "..", "a\\..\\b", "x\0y"])
def test_names_that_could_lead_elsewhere_are_refused(name: str) -> None:
    data = zip_file([Rec(name, b"")])
    rows, _, _ = _core.zip_read(data)
    with pytest.raises(HeaderError, match=r"NUL or '\.\.'"):
        _core.zip_names(data, rows, "")


@pytest.mark.parametrize("name", ["a..b/c", "...", "a/...", "a/..b", "a/b.."])
def test_names_with_dots_that_lead_nowhere_are_fine(name: str) -> None:
    data = zip_file([Rec(name, b"")])
    rows, _, _ = _core.zip_read(data)
    assert _core.zip_names(data, rows, "")[2] == {name: 0}


def test_index_out_of_range_is_an_index_error() -> None:
    data = zip_file([Rec("a/x", b"")])
    rows, _, _ = _core.zip_read(data)
    for i in (-1, 1, 1 << 40):
        with pytest.raises(IndexError):
            _core.zip_name(data, rows, i)
        with pytest.raises(IndexError):
            _core.zip_record(rows, i)


def test_many_records_read_in_linear_time() -> None:
    data = zip_file([Rec(f"a/data/{i}", b"x", pad=False) for i in range(70_000)])
    rows, _, end = _core.zip_read(data)
    numbers, inside, outside = _core.zip_names(data, rows, "a/data/")
    assert (len(numbers), inside, outside, end) == (70_000, {}, {}, len(data))
