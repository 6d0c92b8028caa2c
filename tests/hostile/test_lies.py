"""Files that say what is not so: each ends in a named error that tells the rule, at once."""

from __future__ import annotations

import gzip
import io
import os
import socket
import struct
import tarfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import hexfile
import tensorio
from hexfile import Rec, st_entry, st_file, torch_records, zip_file
from tensorio import (
    ChecksumError,
    FormatError,
    HeaderError,
    LimitError,
    TruncatedError,
    UnknownFormatError,
    UnsupportedError,
)

SECOND = 1.0


@contextmanager
def at_once() -> Iterator[None]:
    start = time.process_time()
    yield
    assert time.process_time() - start < SECOND


def refused(source: Any, kind: Any, words: str, **options: Any) -> None:
    """Both doors refuse it, with the words, in one short printable line."""
    for read in (tensorio.load, tensorio.open):
        with at_once(), pytest.raises(kind, match=words) as caught:
            read(source, **options)
        assert len(str(caught.value)) <= 500
        assert str(caught.value).isprintable()


# ------------------------------------------------------------------- impostors


def tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("data.pkl"))
    return out.getvalue()


IMPOSTORS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "an empty file"),
    "zeros": (bytes(4096), "zeros"),
    "many_zeros": (bytes(100_000), "zeros"),
    "git_lfs": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n",
        "git-lfs pointer",
    ),
    "html": (b"<!DOCTYPE html>\n<html><head><title>Login</title></head></html>", "HTML"),
    "html_with_a_bom": (b"\xef\xbb\xbf\r\n<html>404</html>", "HTML"),
    "xml_error": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "HTML or XML"),
    "gzip": (gzip.compress(cases.CASES["torch_zip_by_hand"]().data), "gzip"),
    "json": (b'{"weight_map": {}}', "JSON"),
    "json_list": (b"[1, 2, 3]           ", "JSON"),
    "npy": (b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', }", "npy"),
    "gguf": (b"GGUF\x03\x00\x00\x00" + bytes(32), "GGUF"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(100), "HDF5"),
    "png": (b"\x89PNG\r\n\x1a\n" + bytes(100), "PNG"),
    "pdf": (b"%PDF-1.7\n", "PDF"),
    "program": (b"\x7fELF\x02\x01\x01" + bytes(60), "program"),
    "plain_pickle": (b"\x80\x04\x95\x01\x00\x00\x00\x00\x00\x00\x00N.", "plain pickle"),
    "empty_zip": (b"PK\x05\x06" + bytes(18), "empty zip"),
    "text": (b"hello, world, I am no checkpoint at all", "begin with 'hello, world"),
    "control_characters": (b"\x1b[31m\x00\x01\x02 not for your terminal", r"\\x1b\[31m"),
}


@pytest.mark.parametrize(("data", "words"), IMPOSTORS.values(), ids=IMPOSTORS.keys())
def test_impostor_is_refused_by_what_it_looks_like(data: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(data)
    for source in (path, data):
        refused(source, UnknownFormatError, words)
        with at_once(), pytest.raises(UnknownFormatError, match=words):
            tensorio.identify(source)
    with pytest.raises(UnknownFormatError) as caught:
        tensorio.load(path)
    assert caught.value.path == str(path)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".bin", ".ckpt"])
@pytest.mark.parametrize("data", [i[0] for i in IMPOSTORS.values()], ids=IMPOSTORS.keys())
def test_impostor_is_refused_whatever_its_suffix(data: bytes, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_bytes(data)
    refused(path, FormatError, ".")
    with pytest.raises(UnknownFormatError):
        tensorio.identify(path)


@pytest.mark.parametrize("format", ["torch_zip", "safetensors"])
@pytest.mark.parametrize("data", [i[0] for i in IMPOSTORS.values()], ids=IMPOSTORS.keys())
def test_impostor_is_refused_by_every_format_it_is_forced_on(data: bytes, format: str) -> None:
    refused(data, FormatError, ".", format=format)


def test_tar_of_no_checkpoints_is_refused_as_such() -> None:
    refused(tar(), UnknownFormatError, "none of whose members is a checkpoint")


def test_beginning_of_a_legacy_stream_is_refused_as_cut_short() -> None:
    refused(bytes.fromhex("80028a0a6cfc9c46f9206aa850192e80024de9032e"), TruncatedError, "ends before its STOP")


def test_other_zip_archives_are_refused_as_such() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("word/document.xml", "<doc/>")
    refused(out.getvalue(), HeaderError, "not written by torch.save")
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("weights.npy", b"x")
    refused(out.getvalue(), HeaderError, "some other kind of zip")


# ---------------------------------------------------------------- special files


def special(kind: str, folder: Path) -> Path:
    path = folder / "m.pt"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        before = os.getcwd()
        os.chdir(folder)
        with socket.socket(socket.AF_UNIX) as s:
            s.bind("m.pt")
        os.chdir(before)
    elif kind == "dangling_link":
        path.symlink_to(folder / "nowhere.pt")
    elif kind == "link_to_itself":
        path.symlink_to(path)
    elif kind == "link_to_a_fifo":
        os.mkfifo(folder / "pipe")
        path.symlink_to("pipe")
    elif kind in ("null", "zero", "urandom"):
        return Path("/dev", kind)
    return path


@pytest.mark.parametrize(
    "kind",
    [
        "fifo",
        "folder",
        "socket",
        "dangling_link",
        "link_to_itself",
        "link_to_a_fifo",
        "missing",
        "null",
        "zero",
        "urandom",
    ],
)
def test_special_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    path = special(kind, tmp_path)
    for read in (tensorio.load, tensorio.open, tensorio.identify, tensorio.verify):
        modes: list[dict[str, Any]] = [{}, {"mmap": False}] if read in (tensorio.load, tensorio.open) else [{}]
        for options in modes:
            with at_once(), pytest.raises((OSError, UnsupportedError)) as caught:
                read(path, **options)
            assert path.name in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission_is_refused_by_the_system(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    path.write_bytes(b"x")
    path.chmod(0)
    with pytest.raises(PermissionError):
        tensorio.load(path)


# ------------------------------------------------------------------------- zip

RAW = {"0": np.arange(4, dtype="f4").tobytes(), "1": bytes(range(64))}
PICKLE = hexfile.pickled(hexfile.mapping({"a": hexfile.tensor(), "b": hexfile.tensor("1", 8, (8,), cls="LongStorage")}))
PKL, BYTEORDER, DATA0, DATA1, VERSION, ID = 0, 3, 4, 5, 6, 7  # places in `torch_records`


def archive(**changes: Any) -> bytes:
    """The healthy archive with attributes of records changed, ``rec_4=dict(flags=1)``."""
    records = torch_records(PICKLE, RAW)
    rest = {}
    for key, value in changes.items():
        if key.startswith("rec_"):
            for attribute, new in value.items():
                setattr(records[int(key[4:])], attribute, new)
        else:
            rest[key] = value
    return zip_file(records, **rest)


def with_records(change: Any) -> bytes:
    records = torch_records(PICKLE, RAW)
    change(records)
    return zip_file(records)


def test_zip_that_tells_the_truth_reads() -> None:
    assert tensorio.load(archive())["a"].tolist() == [0, 1, 2, 3]


ZIP_LIES: dict[str, tuple[bytes, Any, str]] = {
    # the two headers of a record
    "local_name": (archive(rec_4={"local": {"name": b"archive/data/9"}}), HeaderError, "name"),
    "local_name_length": (archive(rec_4={"local": {"name_len": 5}}), HeaderError, "name"),
    "local_method": (archive(rec_4={"local": {"method": 8}}), HeaderError, "method"),
    "local_flags": (archive(rec_4={"local": {"flags": 0x0809}}), HeaderError, "flag"),
    "local_signature": (archive(rec_4={"local": {"sig": 0x05044B50}}), HeaderError, "signature"),
    "local_size": (archive(rec_4={"descriptor": False, "local": {"usize": 17, "csize": 17}}), HeaderError, "size"),
    "local_crc": (archive(rec_4={"descriptor": False, "local": {"crc": 5}}), HeaderError, "(?i)crc"),
    "local_extra_longer": (archive(rec_4={"local": {"extra_len": 60000}}), FormatError, "."),
    "encrypted": (archive(rec_4={"flags": 0x0801}), UnsupportedError, "encrypt"),
    "strongly_encrypted": (archive(rec_4={"flags": 0x0840}), (UnsupportedError, FormatError), "."),
    "method_12": (archive(rec_4={"central": {"method": 12}, "local": {"method": 12}}), UnsupportedError, "method"),
    # where records lie
    "offset_past_the_directory": (archive(rec_4={"central": {"offset": 5000}}), FormatError, "."),
    "offset_of_4_gib": (archive(rec_4={"central": {"offset": 0xFFFFFFFE}}), FormatError, "."),
    "two_records_at_one_place": (archive(rec_5={"central": {"offset": 0}}), HeaderError, "."),
    "size_over_the_next_record": (archive(rec_4={"central": {"csize": 400, "usize": 400}}), HeaderError, "overlap"),
    "size_past_the_directory": (archive(rec_7={"central": {"csize": 4000, "usize": 4000}}), FormatError, "."),
    "size_of_4_gib": (archive(rec_4={"central": {"csize": 0xFFFFFFFE, "usize": 0xFFFFFFFE}}), FormatError, "."),
    "stored_sizes_differ": (archive(rec_4={"central": {"usize": 20}}), HeaderError, "size"),
    # names
    "data_twice": (with_records(lambda r: r.append(Rec("archive/data/0", b"other"))), HeaderError, "twice"),
    "pickle_twice": (with_records(lambda r: r.append(Rec("archive/data.pkl", b"N."))), HeaderError, "twice"),
    "name_with_nul": (with_records(lambda r: r.append(Rec("archive/data/0\0x", b""))), HeaderError, "NUL"),
    "name_going_up": (with_records(lambda r: r.append(Rec("archive/../x", b""))), HeaderError, r"'\.\.'"),
    "name_going_up_backwards": (with_records(lambda r: r.append(Rec("archive\\..\\x", b""))), HeaderError, r"'\.\.'"),
    "name_ends_going_up": (with_records(lambda r: r.append(Rec("archive/..", b""))), HeaderError, r"'\.\.'"),
    "name_not_utf8": (with_records(lambda r: r.append(Rec(b"archive/\xff", b""))), HeaderError, "UTF-8"),
    "no_folder": (with_records(lambda r: r.insert(0, Rec("data.pkl", b"N."))), HeaderError, "some other kind of zip"),
    "no_pickle": (with_records(lambda r: r.pop(PKL)), HeaderError, "data.pkl"),
    "no_storage": (with_records(lambda r: r.pop(DATA0)), HeaderError, "'0' has no record"),
    "pickle_of_other_case": (
        with_records(lambda r: setattr(r[PKL], "name", "archive/DATA.PKL")),
        HeaderError,
        "no record",
    ),
    # small records
    "version_of_tomorrow": (with_records(lambda r: setattr(r[VERSION], "data", b"11\n")), UnsupportedError, "version"),
    "version_text": (with_records(lambda r: setattr(r[VERSION], "data", b"three")), UnsupportedError, "version"),
    "version_of_70_bytes": (with_records(lambda r: setattr(r[VERSION], "data", b"3" * 70)), FormatError, "."),
    "byteorder_middle": (with_records(lambda r: setattr(r[BYTEORDER], "data", b"middle")), HeaderError, "middle"),
    "byteorder_not_ascii": (with_records(lambda r: setattr(r[BYTEORDER], "data", b"\xff\xfe")), HeaderError, "ASCII"),
    # checksums
    "crc_of_the_pickle": (
        archive(rec_0={"descriptor": False, "local": {"crc": 1}, "central": {"crc": 1}}),
        ChecksumError,
        "data.pkl",
    ),
    "crc_of_a_small_record": (
        archive(rec_4={"descriptor": False, "local": {"crc": 1}, "central": {"crc": 1}}),
        ChecksumError,
        "data/0",
    ),
    "descriptor_crc": (archive(rec_5={"central": {"crc": 1}}), (HeaderError, ChecksumError), "(?i)crc"),
    # the end
    "one_record_more": (archive(end={"here": 9, "total": 9}, zip64=False), FormatError, "."),
    "one_record_less": (archive(end={"here": 7, "total": 7}, zip64=False), HeaderError, "."),
    "here_and_total_differ": (archive(end={"here": 7}, zip64=False), FormatError, "."),
    "directory_offset": (archive(end={"offset": 1}, zip64=False), FormatError, "."),
    "directory_size": (archive(end={"csize": 1}, zip64=False), FormatError, "."),
    "directory_of_4_gib": (archive(end={"csize": 0xFFFFFFF0}, zip64=False), FormatError, "."),
    "second_disk": (archive(end={"disk": 1}, zip64=False), (FormatError, UnsupportedError), "."),
    "comment_longer_than_the_file": (archive(end={"comment": 9}), FormatError, "."),
    "two_ends": (archive(tail=b"PK\x05\x06" + bytes(18)), FormatError, "."),
    "end64_signature": (archive(end64={"sig": 1}), FormatError, "."),
    "end64_count": (archive(end64={"here": 1 << 40, "total": 1 << 40}), FormatError, "."),
    "end64_offset": (archive(end64={"offset": (1 << 64) - 1}), FormatError, "."),
    "end64_size": (archive(end64={"csize": (1 << 64) - 1}), FormatError, "."),
    "end64_contradicts_end": (archive(end64={"here": 7, "total": 7}), FormatError, "."),
    "end64_record_size": (archive(end64={"size": (1 << 64) - 1}), FormatError, "."),
    "locator_offset": (archive(locator={"offset": (1 << 64) - 1}), FormatError, "."),
    "locator_offset_zero": (archive(locator={"offset": 0}), FormatError, "."),
    "locator_of_two_disks": (archive(locator={"disks": 2}), (FormatError, UnsupportedError), "."),
    "no_end": (archive()[:-22], FormatError, "."),
    # deflate
    "deflated_shorter": (archive(rec_4={"method": 8, "central": {"usize": 20}}), FormatError, "."),
    "deflated_garbage": (archive(rec_4={"local": {"method": 8}, "central": {"method": 8}}), FormatError, "."),
    "deflated_ratio": (archive(rec_4={"method": 8, "central": {"usize": 1 << 30}}), FormatError, "."),
}


@pytest.mark.parametrize(("data", "kind", "words"), ZIP_LIES.values(), ids=ZIP_LIES.keys())
def test_zip_that_lies_is_refused(data: bytes, kind: Any, words: str) -> None:
    with at_once(), pytest.raises(kind, match=words) as caught:
        tensorio.load(data)
    assert len(str(caught.value)) <= 500
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", [n for n in ZIP_LIES if not n.startswith("deflated")])
def test_zip_that_lies_is_refused_without_its_payload(name: str) -> None:
    """The directory tells; only what is deflated has to be unpacked."""
    data, kind, _ = ZIP_LIES[name]
    with pytest.raises(kind):
        tensorio.open(data)


def test_crc_of_a_large_record_is_found_when_asked_for() -> None:
    data = bytearray(cases.plain_torch_bytes({"x": cases.array("float32", (5000,))}))
    data[data.index(cases.array("float32", (5000,)).tobytes()) + 9999] ^= 1
    assert tensorio.load(bytes(data))["x"].shape == (5000,)  # it would cost reading everything
    for read in (tensorio.load, tensorio.open):
        with pytest.raises(ChecksumError, match="data/0"):
            read(bytes(data), verify=True)
    report = tensorio.verify(bytes(data))
    assert not report.ok
    assert [p.record for p in report.problems] == ["archive/data/0"]


# ----------------------------------------------------------------- safetensors

A = {"a": st_entry("U8", [4], 0, 4)}
ST_LIES: dict[str, tuple[bytes, Any, str]] = {
    "length_1": (cases.frame(1) + b"{" + bytes(20), FormatError, "."),
    "length_past_the_file": (st_file(A, b"1234", length=500), TruncatedError, "."),
    "length_over_the_limit": (st_file(A, b"1234", length=100_000_001), FormatError, "."),
    "length_of_2_63": (st_file(A, b"1234", length=1 << 63), FormatError, "."),
    "length_of_2_64": (st_file(A, b"1234", length=(1 << 64) - 1), FormatError, "."),
    "length_short": (st_file(A, b"1234", length=20), FormatError, "."),
    "length_into_the_payload": (st_file(A, b"1234", length=58), FormatError, "."),
    "overlap": (st_file({**A, "b": st_entry("U8", [4], 2, 6)}, b"123456"), HeaderError, "overlap"),
    "gap": (st_file({**A, "b": st_entry("U8", [4], 5, 9)}, b"123456789"), HeaderError, "(?i)hole|gap"),
    "gap_in_front": (st_file({"b": st_entry("U8", [4], 1, 5)}, b"12345"), HeaderError, "(?i)hole|gap"),
    "reversed": (st_file({"a": st_entry("U8", [4], 4, 0)}, b"1234"), HeaderError, "data_offsets"),
    "past_the_end": (st_file({"a": st_entry("U8", [9], 0, 9)}, b"1234"), TruncatedError, "."),
    "offset_of_2_64": (st_file({"a": st_entry("U8", [9], 0, (1 << 64) - 1)}, b"1234"), FormatError, "."),
    "offset_over_2_64": (st_file({"a": st_entry("U8", [9], 0, 1 << 64)}, b"1234"), HeaderError, "."),
    "offset_negative": (st_file({"a": st_entry("U8", [4], -4, 0)}, b"1234"), HeaderError, "."),
    "three_offsets": (st_file('{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4,4]}}', b"1234"), HeaderError, "."),
    "shape_too_small": (st_file({"a": st_entry("U8", [3], 0, 4)}, b"1234"), HeaderError, "shape"),
    "shape_too_large": (st_file({"a": st_entry("U8", [5], 0, 4)}, b"1234"), HeaderError, "shape"),
    "shape_wraps": (
        st_file({"a": st_entry("U8", [1 << 32, 1 << 32, 4], 0, 4)}, b"1234"),
        FormatError,
        "overflow|shape",
    ),
    "shape_wraps_in_bytes": (st_file({"a": st_entry("F64", [1 << 61], 0, 0)}, b""), FormatError, "overflow|shape"),
    "shape_wraps_before_a_zero": (
        st_file({"a": st_entry("U8", [1 << 32, 1 << 32, 0], 0, 0)}),
        FormatError,
        "overflow|shape",
    ),
    "shape_negative": (st_file({"a": st_entry("U8", [-4], 0, 4)}, b"1234"), HeaderError, "."),
    "shape_float": (st_file('{"a":{"dtype":"U8","shape":[4.0],"data_offsets":[0,4]}}', b"1234"), HeaderError, "."),
    "shape_of_70_dimensions": (st_file({"a": st_entry("U8", [1] * 70, 0, 1)}, b"1"), LimitError, "dimension"),
    "half_a_byte": (st_file({"a": st_entry("F4", [3], 0, 1)}, b"1"), HeaderError, "byte"),
    "dtype_unknown": (st_file({"a": st_entry("Q7", [4], 0, 4)}, b"1234"), (UnsupportedError, HeaderError), "dtype"),
    "dtype_lower": (st_file({"a": st_entry("u8", [4], 0, 4)}, b"1234"), (UnsupportedError, HeaderError), "dtype"),
    "no_dtype": (st_file('{"a":{"shape":[4],"data_offsets":[0,4]}}', b"1234"), HeaderError, "dtype"),
    "name_twice": (
        st_file(
            '{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
            b"1234",
        ),
        HeaderError,
        "duplicate",
    ),
    "name_twice_by_escape": (
        st_file(
            '{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"\\u0061":{"dtype":"U8",'
            '"shape":[4],"data_offsets":[0,4]}}',
            b"1234",
        ),
        HeaderError,
        "duplicate",
    ),
    "metadata_twice": (st_file('{"__metadata__":{},"__metadata__":{}}'), HeaderError, "__metadata__"),
    "metadata_key_twice": (st_file('{"__metadata__":{"k":"1","k":"2"}}'), HeaderError, "duplicate"),
    "metadata_number": (st_file('{"__metadata__":{"k":1}}'), HeaderError, "."),
    "metadata_list": (st_file('{"__metadata__":[]}'), HeaderError, "."),
    "metadata_as_tensor": (st_file({"__metadata__": st_entry("U8", [4], 0, 4)}, b"1234"), HeaderError, "."),
    "not_utf8": (st_file(b'{"\xff":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', b"1234"), HeaderError, "UTF-8"),
    "surrogate": (st_file('{"\\ud800":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', b"1234"), HeaderError, "."),
    "two_objects": (st_file("{}{}"), HeaderError, "."),
    "comment": (st_file("{/**/}"), HeaderError, "."),
    "trailing_comma": (st_file('{"a":{"dtype":"U8","shape":[4,],"data_offsets":[0,4]}}', b"1234"), HeaderError, "."),
    "nul_padding": (st_file(b"{}" + bytes(6)), HeaderError, "."),
    "deep": (st_file('{"a":' + "[" * 10_000 + "]" * 10_000 + "}"), FormatError, "."),
    "deep_extra_field": (
        st_file('{"a":{"x":' + "[" * 200 + "]" * 200 + ',"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', b"1234"),
        FormatError,
        ".",
    ),
}


@pytest.mark.parametrize(("data", "kind", "words"), ST_LIES.values(), ids=ST_LIES.keys())
def test_safetensors_that_lies_is_refused(data: bytes, kind: Any, words: str) -> None:
    refused(data, kind, words, format="safetensors")


@pytest.mark.parametrize("name", ["overlap", "gap", "shape_too_small", "half_a_byte", "dtype_unknown", "name_twice"])
def test_safetensors_that_lies_is_refused_with_the_tensors_name_or_place(name: str) -> None:
    with pytest.raises(tensorio.TensorIOError) as caught:
        tensorio.load(ST_LIES[name][0], format="safetensors")
    assert caught.value.record is not None or caught.value.offset


def test_names_from_the_file_are_escaped_in_messages() -> None:
    name = "\x1b[2J\r\n" + "x" * 5000
    data = st_file({name: st_entry("U8", [3], 0, 4)}, b"1234")
    refused(data, HeaderError, r"\\x1b\[2J\\r\\nxxx")


def test_polyglot_zip_behind_a_safetensors_header_is_one_or_the_other() -> None:
    """Bytes that both readers would take go to one of them, by their first bytes, and the other refuses."""
    inner = archive()
    data = st_file({"a": st_entry("U8", [len(inner)], 0, len(inner))}, inner)
    assert tensorio.identify(data) == "safetensors"
    assert tensorio.load(data)["a"].nbytes == len(inner)
    refused(data, FormatError, ".", format="torch_zip")


def test_end_record_inside_a_payload_is_data() -> None:
    raw = b"PK\x05\x06" + bytes(18) + b"PK\x06\x06" + bytes(38)
    body = hexfile.pickled(hexfile.tensor("0", len(raw), (len(raw),), cls="ByteStorage"))
    assert tensorio.load(hexfile.torch_file(body, {"0": raw})).tobytes() == raw


def test_struct_sizes_of_the_builder_are_those_of_the_format() -> None:
    """The lies above mean something only if the truth is read by others, too."""
    with zipfile.ZipFile(io.BytesIO(archive())) as z:
        assert z.testzip() is None
        assert len(z.namelist()) == 8
    assert struct.unpack_from("<I", archive(), 0) == (0x04034B50,)
