"""Writing zip archives: read back by `zipfile`, and byte for byte the layout of torch.save."""

from __future__ import annotations

import functools
import io
import zipfile
import zlib
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hexfile
from hexfile import Rec
from tensorio import LimitError, TensorIOError, _core
from tensorio.formats._zip import ZipPlan
from tensorio.plan import Payloads

payloads = st.lists(st.binary(max_size=300), min_size=1, max_size=10)


NONE = array("q")


def written(contents: list[bytes], align: int = 64, names: list[bytes] | None = None) -> bytes:
    """An archive out of the pieces that the writer is made of, record by record."""
    names = names or [f"archive/data/{i}".encode() for i in range(len(contents))]
    plan, blob, directory = _core.zip_place(
        [(n, len(c)) for n, c in zip(names, contents, strict=True)], b"", NONE, [], align
    )
    out = b""
    for i, raw in enumerate(contents):
        out += _core.zip_local(plan, blob, i) + raw + _core.zip_descriptor(plan, i, zlib.crc32(raw))
    assert len(out) == directory
    tail = _core.zip_tail(plan, blob, directory)
    assert len(tail) == _core.zip_tail_size(plan)
    return out + tail


def planned(contents: list[bytes], align: int = 64) -> bytes:
    """The same archive by way of a plan, its records numbered."""
    payloads = Payloads()
    for i, raw in enumerate(contents):
        payloads.add(functools.partial(iter, [raw]) if i % 3 == 2 else raw, len(raw))
    plan = ZipPlan([], "archive/data/", payloads, [], align)
    data = b"".join(bytes(piece) for piece in plan.pieces())
    assert len(data) == plan.nbytes
    for i, raw in enumerate(contents):
        at = plan.data_offset(i)
        assert data[at : at + len(raw)] == raw
    return data


@settings(max_examples=150, deadline=None)
@given(payloads, st.sampled_from([1, 2, 3, 8, 48, 64, 100, 4096, 32768]))
def test_archive_is_the_layout_assembled_by_hand(contents: list[bytes], align: int) -> None:
    data = written(contents, align)
    assert planned(contents, align) == data
    assert data == hexfile.zip_file([Rec(f"archive/data/{i}", raw) for i, raw in enumerate(contents)], align=align)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert [archive.read(n) for n in archive.namelist()] == contents


@settings(max_examples=50, deadline=None)
@given(payloads)
def test_archive_reads_back(contents: list[bytes]) -> None:
    data = written(contents)
    rows, _, end = _core.zip_read(data)
    assert end == len(data)
    assert [data[o : o + n] for _, o, n, *_ in _core.zip_records(data, rows)] == contents


def test_archive_equals_torch_save() -> None:
    torch = pytest.importorskip("torch")
    out = io.BytesIO()
    torch.save({"a": torch.arange(10.0), "b": torch.zeros(0), "c": torch.ones(3, dtype=torch.uint8)}, out)
    with zipfile.ZipFile(io.BytesIO(out.getvalue())) as archive:
        names = [n.encode() for n in archive.namelist()]
        contents = [archive.read(n.decode()) for n in names]
    assert written(contents, 64, names) == out.getvalue()


def test_many_records_have_a_zip64_count() -> None:
    data = planned([b""] * 65_540, 1)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert len(archive.namelist()) == 65_540


@pytest.mark.parametrize("size", [0xFFFFFFFE, 0xFFFFFFFF, 1 << 32, 1 << 40])
def test_large_records_are_placed_with_zip64_fields(size: int) -> None:
    """Nothing that large is written here: the headers alone say what must follow."""
    placed, blob, directory = _core.zip_place([], b"a/data/", array("q", [size, 5]), [], 64)
    start, data, end = _core.zip_placed(placed, 0)
    big = size >= 0xFFFFFFFF
    assert (start, data % 64, end - data - size) == (0, 0, 24 if big else 16)
    local = _core.zip_local(placed, blob, 0)
    assert (b"\x01\x00\x10\x00" + size.to_bytes(8, "little") in local) == big
    assert len(_core.zip_descriptor(placed, 0, 1)) == (24 if big else 16)
    next_start, next_data, next_end = _core.zip_placed(placed, 1)
    assert next_start == end
    assert next_data % 64 == 0
    assert (next_end - next_data - 5) == (24 if next_start >= 0xFFFFFFFF else 16)
    _core.zip_descriptor(placed, 1, 2)
    tail = _core.zip_tail(placed, blob, directory)
    assert len(tail) == _core.zip_tail_size(placed)
    assert directory.to_bytes(8, "little") in tail


def test_name_too_long_is_refused() -> None:
    with pytest.raises(LimitError, match=r"655\d\d"):
        _core.zip_place([(b"x" * 65_536, 0)], b"", NONE, [], 64)


@pytest.mark.parametrize("align", [0, 32_769, 65_536, 1 << 31])
def test_alignment_that_can_not_be_written_is_refused(align: int) -> None:
    with pytest.raises((TensorIOError, ValueError)):
        _core.zip_place([(b"x", 1)], b"", NONE, [], align)


def test_sizes_that_overflow_are_refused() -> None:
    with pytest.raises((TensorIOError, OverflowError)):
        _core.zip_place([(b"x", (1 << 64) - 10), (b"y", 100)], b"", NONE, [], 64)


def test_payload_of_another_size_than_planned_is_refused() -> None:
    plan, blob, _ = _core.zip_place([(b"x", 3)], b"", NONE, [], 64)
    for payload in (b"", b"12", b"1234"):
        with pytest.raises(ValueError, match="planned were 3"):
            _core.zip_pack(plan, blob, 0, payload)


@pytest.mark.parametrize("i", [-1, 1, 1 << 40])
def test_record_number_out_of_range_is_an_index_error(i: int) -> None:
    plan, _, _ = _core.zip_place([(b"x", 0)], b"", NONE, [], 64)
    with pytest.raises(IndexError):
        _core.zip_placed(plan, i)
