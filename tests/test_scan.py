"""What a scan lists: names by record and offset, in every container, and never "clean" for what could not be read."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import random
import struct
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import hexfile
import tensorio
from hexfile import Rec, name, number, pickled, proto, tarred, text
from tensorio.dangers import danger
from tensorio.scanning import _collect
from tensorio.scanning._walk import Walk, walk

Child = Callable[..., Any]

F32 = np.float32
EVIL = name("os", "system") + b"(" + text("true") + b"tR"  # nothing here is ever loaded
BAD = pickled(EVIL)
GOOD = pickled(hexfile.mapping({"w": hexfile.tensor()}))
WEIGHTS = {"0": b"\0" * 16}


def scan(data: bytes, **options: Any) -> tensorio.ScanReport:
    return tensorio.scan(data, **options)


def groups(report: tensorio.ScanReport) -> dict[str, str]:
    """Full name -> group."""
    return {f"{f.module}.{f.name}": f.group for f in report.findings if f.module}


def walked(data: bytes) -> Walk:
    return walk(memoryview(data), 0, lambda module, name: ("unknown", ""), lambda opcodes, at: True)


def zipped(records: dict[str, bytes], **options: Any) -> bytes:
    return hexfile.zip_file([Rec(n, raw) for n, raw in records.items()], **options)


def saved_array(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


# ------------------------------------------------------------------- names in a pickle


@pytest.mark.parametrize(("body", "found", "opcode"), [
    (name("a.b", "C"), ("a.b", "C"), b"c"),
    (b"(" + b"ia.b\nC\n", ("a.b", "C"), b"i"),
    (text("m") + text("n") + b"\x93", ("m", "n"), b"\x93"),
    (text("m") + b"q\1" + text("n") + b"q\2" + b"00" + b"h\1h\2\x93", ("m", "n"), b"\x93"),
    (text("m") + b"\x94" + text("n") + b"\x94" + b"00" + b"h\0h\1\x93", ("m", "n"), b"\x93"),
    (b"\x8c\1m" + b"V\\u006e\n" + b"\x93", ("m", "n"), b"\x93"),
    (b"U\1m" + b"S'\\x6e'\n" + b"\x93", ("m", "n"), b"\x93"),
    (b"\x8d" + struct.pack("<Q", 1) + b"m" + b"T" + struct.pack("<i", 1) + b"n\x93", ("m", "n"), b"\x93"),
    (text("m") + b"2" + b"\x93", ("m", "m"), b"\x93"),
    (text("m") + b"p12\n" + b"g12\n" + b"\x93", ("m", "m"), b"\x93"),
    (text("m") + b"r" + struct.pack("<I", 300) + b"j" + struct.pack("<I", 300) + b"\x93", ("m", "m"), b"\x93"),
    (b"(" + text("m") + text("n") + b"1" + name("x", "y"), ("x", "y"), b"c"),
    (b"(0" + name("x", "y"), ("x", "y"), b"c"),
], ids=["global", "inst", "stack_global", "memo", "memoize", "unicode_line", "python2", "eight_bytes", "dup",
        "put_line", "long_put", "pop_mark", "pop_of_a_mark"])  # fmt: skip
def test_every_spelling_of_a_name_is_found(body: bytes, found: tuple[str, str], opcode: bytes) -> None:
    walk = walked(pickled(body, 4))
    assert [(r.module, r.name, r.offset) for r in walk.refs] == [(*found, 2 + body.rindex(opcode))]
    assert walk.error is None or b"g12" in body
    assert walk.end == len(pickled(body))


@pytest.mark.parametrize(("body", "use"), [
    (name("a", "b") + b")R", "REDUCE"), (name("a", "b") + b")\x81", "NEWOBJ"),
    (name("a", "b") + b")}\x92", "NEWOBJ_EX"),
    (b"(" + name("a", "b") + b"o", "OBJ"), (b"(ia\nb\n", "INST"), (name("a", "b") + b")R)R", "result called"),
    (name("a", "b") + b")R}b", "BUILD"), (name("a", "b") + b"q\0" + b"0h\0)R", "REDUCE"),
], ids=["reduce", "newobj", "newobj_ex", "obj", "inst", "twice", "build", "memo"])  # fmt: skip
def test_it_is_told_how_a_name_is_used(body: bytes, use: str) -> None:
    assert use in walked(pickled(body)).refs[0].uses


def test_a_name_that_is_only_named_says_so() -> None:
    finding = scan(pickled(name("a", "b") * 3)).findings[0]
    assert (finding.how, finding.count, finding.offset) == ("only named", 3, 2)


@pytest.mark.parametrize(("body", "word"), [
    (b"\x82\1", "extension registry"), (b"\x83\1\2", "extension registry"), (b"\x84\1\2\3\4", "extension registry"),
    (b"\x80\x09N", "protocol 9"), (b"Pos.system\n", "persistent id"),
    (text("x") + b"Q", "persistent id"), (name("a", "b") + b")RQ", "persistent id"),
    (b"(" + text("reduce_package") + number(1) + b"tQ", "persistent id"),
    (name("builtins", "str") + b"(" + text("os") + b"tR" + text("system") + b"\x93", "made while"),
    (hexfile.HOOKS + b"}(" + text("__class__") + number(1) + b"ub", "special attribute"),
    (hexfile.HOOKS + b"(N}" + text("__setstate__") + number(1) + b"s" + b"tb", "special attribute"),
    (name("torch.storage", "_load_from_bytes") + b"(" + name("_codecs", "encode") + b"(" + text("x") + b"tR" + b"tR",
     "made while"),
], ids=["ext1", "ext2", "ext4", "protocol", "persid", "text", "object", "package", "computed", "class", "slots",
        "bytes"])  # fmt: skip
def test_what_no_name_tells_is_listed(body: bytes, word: str) -> None:
    report = scan(pickled(body))
    assert report.verdict in ("unknown", "dangerous")
    assert any(f.module == "" and word in f.reason and f.group == "unknown" for f in report.findings)


def test_ids_of_torch_are_not_odd() -> None:
    view = b"(" + text("storage") + name("torch", "FloatStorage") + text("0") + text("cpu") + number(4)
    for rest in (b"tQ", b"NtQ", b"(" + text("1") + number(0) + number(2) + b"ttQ"):
        assert scan(pickled(view + rest)).verdict == "clean"
    assert scan(
        pickled(b"(" + text("module") + name("a", "B") + text("f.py") + text("class B: ...") + b"tQ")
    ).verdict == ("unknown")


# ------------------------------------------------------------------- groups and verdicts


@pytest.mark.parametrize(("pair", "group"), [
    (("collections", "OrderedDict"), "data"), (("torch", "FloatStorage"), "data"), (("__builtin__", "set"), "data"),
    (("torch.distributed.device_mesh", "DeviceMesh"), "harmless"),
    (("my.module", "Class"), "unknown"), (("__main__", "Net"), "unknown"), (("my", "Outer.Inner"), "unknown"),
    (("functools", "partial"), "unknown"), (("os2", "system"), "unknown"), (("__torch__.a", "B"), "unknown"),
    (("os", "system"), "dangerous"), (("posix", "anything"), "dangerous"), (("os.path", "join"), "dangerous"),
    (("builtins", "exec"), "dangerous"), (("__builtin__", "eval"), "dangerous"), (("builtins", "getattr"), "dangerous"),
    (("operator", "attrgetter"), "dangerous"), (("importlib", "import_module"), "dangerous"),
    (("runpy", "_run_code"), "dangerous"), (("socket", "socket"), "dangerous"),
    (("commands", "getoutput"), "dangerous"),
    (("torch.serialization", "os.system"), "dangerous"), (("torch", "serialization.os.system"), "dangerous"),
    (("a", "b.c"), "dangerous"), (("a", "Outer.method"), "dangerous"), (("os\0x", "system"), "dangerous"),
    (("a", "b\0"), "dangerous"), (("a", "__globals__"), "dangerous"), (("a", "A.__init__"), "dangerous"),
    (("numpy.testing._private.utils", "runstring"), "dangerous"), (("torch", "load"), "dangerous"),
    (("torch.hub", "load"), "dangerous"), (("pkgutil", "resolve_name"), "dangerous"), (("sys", "modules"), "dangerous"),
    (("uuid", "_get_command_stdout"), "dangerous"), (("copyreg", "__newobj__"), "data"), (("uuid", "UUID"), "data"),
], ids=lambda v: v if isinstance(v, str) else "-".join(v).replace("\0", "NUL"))  # fmt: skip
def test_each_name_has_its_group(pair: tuple[str, str], group: str) -> None:
    finding = scan(pickled(name(*pair))).findings[0]
    assert (finding.group, (finding.module, finding.name)) == (group, pair)
    assert finding.reason


MEMMAP = name("numpy", "memmap")
MESH = name("torch.distributed.device_mesh", "DeviceMesh")


@pytest.mark.parametrize(("body", "verdict"), [
    (MEMMAP, "clean"),
    (name("numpy.core.multiarray", "_reconstruct") + b"(" + MEMMAP + number(0) + b"\x85" + b"C\1b" + b"tR", "clean"),
    (MEMMAP + b"(" + text("file") + text("u1") + text("w+") + b"tR", "dangerous"),
    (MEMMAP + text("file") + b"\x85\x81", "dangerous"),
    (b"(" + MEMMAP + text("file") + b"o", "dangerous"),
    (name("copyreg", "__newobj__") + b"(" + MEMMAP + text("file") + b"tR", "dangerous"),
    (name("copyreg", "_reconstructor") + MEMMAP + b"2" + text("file") + b"\x87R", "dangerous"),
    (name("torch._tensor", "_rebuild_from_type_v2") + b"(" + MEMMAP + name("torch", "Tensor") + text("f") + b"\x85NtR",
     "dangerous"),
    (MEMMAP + text("f") + b"\x86q\0" + b"N\x85" + name("copyreg", "__newobj__") + b"h\0R", "dangerous"),
    (MESH + b")\x81}b", "clean"), (MESH + text("cuda") + b"\x85R", "dangerous"),
])  # fmt: skip
def test_names_of_data_that_do_harm_when_they_are_called(body: bytes, verdict: str) -> None:
    assert scan(pickled(body)).verdict == verdict


def test_no_name_that_may_be_used_counts_as_dangerous() -> None:
    from tensorio.allowlist import ALLOWED

    for module, attribute in ALLOWED:
        assert groups(scan(pickled(name(module, attribute)))) != {f"{module}.{attribute}": "dangerous"}


def test_classes_of_torchscript_are_harmless_in_its_archives_only() -> None:
    inner = pickled(name("__torch__.net", "Net") + b")\x81")
    assert scan(zipped({"a/data.pkl": inner, "a/constants.pkl": pickled(b")")})).verdict == "clean"
    assert scan(zipped({"a/data.pkl": inner})).verdict == "unknown"
    assert scan(zipped({"a/data.pkl": pickled(name("__torch__", "os.system")), "a/constants.pkl": b"."})).verdict == (
        "dangerous"
    )


def test_the_verdict_is_that_of_the_worst_finding() -> None:
    order = ["clean", "unknown", "unreadable", "dangerous"]
    parts = {"clean": GOOD, "unknown": pickled(name("a", "b")), "unreadable": b"\x80\2N", "dangerous": BAD}
    for first in order:
        for second in order:
            report = scan(zipped({"a.pkl": parts[first], "b.pkl": parts[second]}))
            assert report.verdict == max(first, second, key=order.index)
            assert report.ok == (report.verdict == "clean")
            assert report.files[0].verdict == report.verdict


@pytest.mark.parametrize(("allow", "verdict"), [
    ((), "unknown"), (("pkg.mod.Class",), "clean"), (("pkg.*",), "clean"), (("pkg.mod.*",), "clean"),
    (("pkg.mod.Clas",), "unknown"), (("pkg.mo.*",), "unknown"), (("mod.Class",), "unknown"), (("pkg.mod",), "unknown"),
])  # fmt: skip
def test_unknown_names_can_be_allowed(allow: tuple[str, ...], verdict: str) -> None:
    report = scan(pickled(name("pkg.mod", "Class")), allow=allow)
    assert report.verdict == verdict
    assert report.findings[0].group == ("unknown" if verdict == "unknown" else "allowed")


def test_a_class_can_be_allowed_and_nothing_dangerous() -> None:
    body = name(Case.__module__, "Case")
    assert scan(pickled(body)).verdict == "unknown"
    assert scan(pickled(body), allow=[Case]).verdict == "clean"
    assert scan(BAD, allow=["os.system", "os.*"]).verdict == "dangerous"


class Case:
    pass


@pytest.mark.parametrize("pattern", ["", "*", ".*", "a", "a.", "a b.c", "a.*.b", "a\0.b", 5, None])
def test_patterns_that_name_nothing_are_refused(pattern: Any) -> None:
    with pytest.raises(ValueError, match="allow="):
        scan(GOOD, allow=[pattern])


def test_the_report_is_frozen_sorted_and_goes_to_json() -> None:
    report = scan(zipped({"a.pkl": GOOD, "b.pkl": BAD}))
    assert [f.group for f in report.findings] == ["dangerous", "data", "data", "data"]
    back = json.loads(json.dumps(report.as_dict()))
    assert back["findings"][0] == {
        "file": report.path, "record": "b.pkl", "offset": 2, "module": "os", "name": "system", "group": "dangerous",
        "reason": danger("os", "system"), "how": "called by REDUCE", "count": 1,
    }  # fmt: skip
    assert set(back) == {"path", "verdict", "findings", "notes", "files"}
    with pytest.raises(AttributeError):
        report.verdict = "clean"  # type: ignore[misc]
    assert "dangerous" in str(report)


# ------------------------------------------------------------------- pickles that end badly


@pytest.mark.parametrize("data", [
    b"\x80\2N", b"\x80\2.", b"\x80\2\xff.", b"\x80\2R.", b"\x80\2h\5.", b"\x80\2X\xff\xff\0\0abc.", b"\x80\2t.",
    b"\x80\2" + name("a", "b")[:-1], b"\x80\4\x95" + b"\xff" * 8 + b"N.", b"\x80\2r\xff\xff\xff\x7f.",
    b"\x80\4\x95" + struct.pack("<Q", 3) + b"X\1\0\0\0a.",
    b"\x80\4\x95" + struct.pack("<Q", 11) + b"\x95" + struct.pack("<Q", 3) + b"NN.",
    b"\x80\2T\xff\xff\xff\xff.", b"\x80\2NN\x93.", b"\x80\2pxx\n.", b"\x80\2",
], ids=lambda d: d.hex()[:24])  # fmt: skip
def test_what_ends_in_an_error_is_never_clean(data: bytes) -> None:
    report = scan(data)
    assert report.verdict == "unreadable", report
    finding = report.findings[0]
    assert finding.reason.startswith("could not be read to the end")
    assert finding.offset is not None


@pytest.mark.parametrize("damage", [
    b"R", b"h\5", b"t", b"\xff", b"\0\0\0\0", b"X\xff\xff\xff\x7f", b"\x93", b"e",
], ids=lambda d: d.hex())  # fmt: skip
@pytest.mark.parametrize("evil", [
    EVIL, b"\x8c\2os\x94\x8c\6system\x94\x93)R",
], ids=["global", "stack_global"])  # fmt: skip
def test_names_behind_an_error_are_listed(damage: bytes, evil: bytes) -> None:
    report = scan(proto(4) + damage + evil + b".")
    assert groups(report)["os.system"] == "dangerous"
    assert any(f.group == "unreadable" for f in report.findings)
    found = next(f for f in report.findings if f.module)
    assert "behind an error" in found.how or found.how == "found by a search"


def test_names_from_the_memo_are_listed_behind_an_error() -> None:
    data = proto(4) + b"\x8c\2os\x94\x8c\6system\x94" + b"0000R" + b"h\0h\1\x93."
    assert groups(scan(data)) == {"os.system": "dangerous"}


def test_several_pickles_in_a_row_are_all_scanned() -> None:
    assert groups(scan(pickled(b"N") * 3 + BAD)) == {"os.system": "dangerous"}
    assert scan(pickled(b"N") * 3).verdict == "clean"
    assert scan(pickled(b"N") + b"\0" * 1000 + b"\0").notes == ()
    finding = scan(pickled(b"N") * 3 + BAD).findings[0]
    assert finding.offset == 3 * len(pickled(b"N")) + 2


@pytest.mark.parametrize("suffix", [".pkl", ""])
def test_pickles_in_a_row_need_no_proto(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(b"N." * 3 + b"\x8c\2os\x940\x8c\6system\x940h\0h\1\x93)R.")
    assert groups(tensorio.scan(path)) == {"os.system": "dangerous"}


def test_names_in_bytes_behind_a_pickle_are_found() -> None:
    report = scan(pickled(b"N") + b"\xff" * 50 + BAD)
    assert report.verdict == "dangerous"
    assert report.findings[0].how == "found by a search"
    assert report.findings[0].offset == len(pickled(b"N")) + 50 + 2
    assert len(scan(pickled(b"N") + b"\xff" * 50).notes) == 1


def test_pickles_in_the_bytes_of_a_pickle_are_found() -> None:
    inside = b"B" + struct.pack("<I", len(BAD)) + BAD
    report = scan(pickled(inside))
    assert report.verdict == "dangerous"
    assert report.findings[0].record == "bytes at 7"
    nested = hexfile.torch_file(BAD)
    loads = name("torch.storage", "_load_from_bytes") + b"(B" + struct.pack("<I", len(nested)) + nested + b"tR"
    assert scan(pickled(loads)).verdict == "dangerous"
    assert scan(pickled(b"B" + struct.pack("<I", 40) + b"\x80\2" + b"\x11" * 38)).verdict == "clean"


def test_wide_names_are_cut_and_never_collide_with_dangerous_ones() -> None:
    long = "a" * 300_000
    finding = scan(pickled(name(long, "b"))).findings[0]
    assert (len(finding.module), finding.group) == (256, "unknown")
    assert scan(pickled(name("b" * 300 + "\0", "c"))).verdict == "dangerous"
    assert scan(b"\x80\2cos\xff\nsystem\n.").findings[0].module == "os\\xff"


def test_a_flood_of_names_hides_no_dangerous_one(monkeypatch: pytest.MonkeyPatch) -> None:
    flood = b"".join(name(f"m{i}", "n") + b"0" for i in range(25_000))
    report = scan(pickled(flood + EVIL))
    assert report.verdict == "dangerous"
    assert any("different names" in f.reason for f in report.findings)
    assert len(report.findings) < 21_000


# ------------------------------------------------------------------- joblib's arrays


def joblib_array(code: str, count: int, raw: bytes, *, align: bool = False) -> bytes:
    """A wrapper and the bytes behind it, as joblib writes them."""
    dtype = name("numpy", "dtype") + b"(" + text(code) + b"tR"
    state = {"shape": number(count) + b"\x85", "order": text("C"), "dtype": dtype, "allow_mmap": b"\x88",
             "subclass": name("numpy", "ndarray"),
             "numpy_array_alignment_bytes": number(16) if align else b"N"}  # fmt: skip
    wrapper = name("joblib.numpy_pickle", "NumpyArrayWrapper") + b")\x81" + hexfile.mapping(state) + b"b"
    return wrapper + (b"\3\xff\xff\xff" if align else b"") + raw


@pytest.mark.parametrize("align", [False, True])
def test_arrays_in_the_middle_of_a_pickle_are_skipped(align: bool) -> None:
    body = b"]" + joblib_array("f8", 3, bytes(range(200, 224)), align=align) + b"a" + EVIL + b"a"
    report = scan(pickled(body))
    assert groups(report)["os.system"] == "dangerous"
    assert not [f for f in report.findings if f.group == "unreadable"]
    clean = scan(pickled(b"]" + joblib_array("f8", 3, bytes(range(200, 224)), align=align) + b"a"))
    assert clean.verdict == "clean"


def test_arrays_of_objects_are_pickles_in_the_middle() -> None:
    assert scan(pickled(b"]" + joblib_array("O8", 3, BAD) + b"a")).verdict == "dangerous"
    assert scan(pickled(b"]" + joblib_array("O8", 3, pickled(b"N")) + b"a")).verdict == "clean"
    assert scan(pickled(joblib_array("O8", 3, b"\x80\2"))).verdict == "unreadable"


def test_array_bytes_are_looked_at_as_opcodes_too() -> None:
    """A loader that does not know joblib takes them for that."""
    assert scan(pickled(b"]" + joblib_array("u1", len(EVIL), EVIL) + b"a")).verdict == "dangerous"
    by_memo = b"\x8c\2os\x94\x8c\6system\x9400"
    hidden = b"h\0h\1\x93)R"
    assert scan(proto(4) + by_memo + joblib_array("u1", len(hidden), hidden) + b".").verdict == "dangerous"


def test_an_array_of_unknown_size_is_unreadable() -> None:
    assert scan(pickled(joblib_array("V8", 3, b"\xff" * 24))).verdict == "unreadable"
    assert scan(pickled(joblib_array("f8", 1 << 40, b"\xff" * 24))).verdict == "unreadable"


# ------------------------------------------------------------------- archives


def test_a_torch_file_is_clean_or_not() -> None:
    assert scan(hexfile.torch_file(GOOD, WEIGHTS)).verdict == "clean"
    report = scan(hexfile.torch_file(BAD, WEIGHTS))
    assert (report.verdict, report.findings[0].record, report.findings[0].offset) == (
        "dangerous",
        "archive/data.pkl",
        2,
    )


EXTRA: dict[str, Callable[[], bytes]] = {
    "record": lambda: hexfile.zip_file([*hexfile.torch_records(GOOD, WEIGHTS), Rec("archive/extra", BAD)]),
    "record_without_proto": lambda: hexfile.zip_file([*hexfile.torch_records(GOOD, WEIGHTS), Rec("x", EVIL + b".")]),
    "tensor_record": lambda: hexfile.torch_file(GOOD, {"0": BAD}),
    "deflated": lambda: hexfile.zip_file([Rec("a.pkl", BAD, method=8)]),
    "deflated_tensor": lambda: hexfile.zip_file([Rec("a/data/0", BAD, method=8)]),
    "two_data_pkl": lambda: hexfile.zip_file([Rec("a/data.pkl", GOOD), Rec("a/data.pkl", BAD)]),
    "upper_case": lambda: hexfile.zip_file([*hexfile.torch_records(GOOD, WEIGHTS), Rec("archive/DATA.PKL", BAD)]),
    "second_root": lambda: hexfile.zip_file([*hexfile.torch_records(GOOD, WEIGHTS), Rec("evil/data.pkl", BAD)]),
    "wrong_crc": lambda: hexfile.zip_file([Rec("a/data.pkl", BAD, local={"crc": 5}, central={"crc": 5})]),
    "encrypted_flag": lambda: hexfile.zip_file([Rec("a/data.pkl", BAD, flags=0x801)]),
    "central_flag": lambda: hexfile.zip_file([Rec("a/data.pkl", BAD, central={"flags": 0x2000})]),
    "name_disagrees": lambda: hexfile.zip_file([Rec("a/data.pkl", BAD, central={"name": b"a/version"})]),
    "local_name_disagrees": lambda: hexfile.zip_file([Rec("a/data.pkl", BAD, local={"name": b"a/version"})]),
    "local_signature": lambda: hexfile.zip_file([Rec("a/data.pkl", BAD, local={"sig": 0})]),
    "zip64_offset": lambda: hexfile.zip_file([Rec("a/data.pkl", BAD, local={"sig": 0}, central={
        "offset": 0xFFFFFFFF, "extra": struct.pack("<HHQ", 1, 8, 0)})]),
    "method_disagrees": lambda: hexfile.zip_file([Rec("a/data.pkl", BAD, central={"method": 8})]),
    "size_lies": lambda: hexfile.zip_file([Rec("a/data.pkl", BAD, central={"csize": 5, "usize": 5})]),
    "no_directory": lambda: hexfile.torch_file(BAD, WEIGHTS)[:-200],
    "count_lies": lambda: hexfile.torch_file(BAD, WEIGHTS, end={"total": 0, "here": 0}),
    "offset_lies": lambda: hexfile.torch_file(BAD, WEIGHTS, end={"offset": 7}, end64={"offset": 7}),
    "prefix": lambda: b"#!/bin/sh\n" * 9 + hexfile.torch_file(BAD, WEIGHTS),
    "behind_another": lambda: hexfile.torch_file(GOOD, WEIGHTS) + hexfile.torch_file(BAD, WEIGHTS),
    "in_front_of_another": lambda: hexfile.torch_file(BAD, WEIGHTS) + hexfile.torch_file(GOOD, WEIGHTS),
    "in_a_gap": lambda: hexfile.zip_file([Rec("a", b"x"), Rec("b", b"y", gap=zipped({"c.pkl": BAD})[:200])]),
    "gap_pickle": lambda: hexfile.zip_file([Rec("a", b"x"), Rec("b", b"y", gap=BAD)]),
    "trailing": lambda: hexfile.torch_file(GOOD, WEIGHTS) + BAD,
    "comment": lambda: hexfile.torch_file(GOOD, WEIGHTS, comment=b"") + b"\0" * 9 + b"",
    "zip_in_zip": lambda: zipped({"m.zip": hexfile.torch_file(BAD)}),
    "zip_in_deflated_zip": lambda: hexfile.zip_file([Rec("m", hexfile.torch_file(BAD), method=8)]),
    "zip_in_tar": lambda: tarred({"m.pt": hexfile.torch_file(BAD)}),
    "tar": lambda: tarred({"readme": b"x", "pickle": BAD}),
    "tar_gz": lambda: gzip.compress(tarred({"pickle": BAD})),
    "gzip": lambda: gzip.compress(BAD),
    "gzip_twice": lambda: gzip.compress(gzip.compress(BAD)),
    "gzip_members": lambda: gzip.compress(BAD[:9]) + gzip.compress(BAD[9:]),
    "gzip_zip": lambda: gzip.compress(hexfile.torch_file(BAD)),
    "bzip2": lambda: bz2.compress(BAD),
    "xz": lambda: lzma.compress(BAD),
    "lzma": lambda: lzma.compress(BAD, format=lzma.FORMAT_ALONE),
    "zlib": lambda: zlib.compress(BAD),
    "old_joblib": lambda: b"ZF" + hex(len(BAD)).encode().ljust(19) + zlib.compress(BAD),
    "npy": lambda: saved_array(np.array([1, None], object))[:-1] + EVIL + b".",
    "behind_npy": lambda: saved_array(np.arange(5)) + BAD,
    "npz": lambda: zipped({"x.npy": saved_array(np.array([], object))[:128] + BAD}),
    "safetensors_with_zip": lambda: hexfile.st_file({"w": hexfile.st_entry("U8", (300,), 0, 300)}, b"\0" * 300)
    + hexfile.torch_file(BAD),
    "pickle_around_zip": lambda: b"B" + struct.pack("<I", len(hexfile.torch_file(GOOD))) + hexfile.torch_file(GOOD)
    + b"0" + EVIL + b".",
    "pickle_before_zip": lambda: EVIL + b"." + hexfile.torch_file(GOOD),
    "tar_named_like_a_pickle": lambda: tarred({"cos\nsystem\n(S'true'\ntR.": b"x"}),
}  # fmt: skip
CLEAN_EXTRA = {"comment"}


@pytest.mark.parametrize("what", EXTRA)
def test_a_pickle_is_found_wherever_it_hides(what: str) -> None:
    report = scan(EXTRA[what]())
    if what in CLEAN_EXTRA:
        assert report.verdict == "clean", report
        return
    assert report.verdict == "dangerous", (report, report.findings)
    assert groups(report)["os.system"] == "dangerous"


@pytest.mark.parametrize("what", [
    "two_data_pkl", "wrong_crc", "encrypted_flag", "central_flag", "name_disagrees", "local_name_disagrees",
    "method_disagrees", "local_signature", "zip64_offset", "size_lies", "no_directory", "count_lies",
    "offset_lies", "in_a_gap",
])  # fmt: skip
def test_a_refused_archive_is_a_finding_of_its_own(what: str) -> None:
    clean = EXTRA[what]().replace(b"system", b"Sys___").replace(b"cos\n", b"c_a\n")
    report = scan(clean)
    assert any(f.group == "unreadable" for f in report.findings), report.findings


@pytest.mark.parametrize("member", [
    b"7z\xbc\xaf\x27\x1c\0\4", b"Rar!\x1a\x07\0", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18", b"\x89HDF\r\n\x1a\n",
])  # fmt: skip
def test_what_cannot_be_looked_into_is_unknown(member: bytes) -> None:
    for data in (member + b"x" * 99, zipped({"a.bin": member + b"x" * 99})):
        report = scan(data)
        assert report.verdict == "unknown"
        assert "can't look inside" in report.findings[0].reason


def test_damaged_packed_data_are_unreadable() -> None:
    packed = gzip.compress(os.urandom(5000))
    assert scan(packed[:2000]).verdict == "unreadable"
    assert scan(packed[:-8] + b"\0" * 8).verdict == "unreadable"
    assert scan(hexfile.zip_file([Rec("a.pkl", GOOD, method=8)]).replace(hexfile.deflate(GOOD), b"\xff" * len(
        hexfile.deflate(GOOD)))).verdict == "unreadable"  # fmt: skip


@pytest.mark.parametrize("data", [
    hexfile.torch_file(GOOD, WEIGHTS), hexfile.st_file({"w": hexfile.st_entry("U8", (4,), 0, 4)}, b"abcd"), GOOD,
    saved_array(np.arange(9)), saved_array(np.zeros(3, [("a", "<f4"), ("b", "U7")])), saved_array(np.array([None, {}])),
    tarred({"a.txt": b"hello"}), gzip.compress(b"hello" * 99, mtime=0),
    zipped({"a.txt": b"hello", "b.bin": b"\0" * 99}),
    b"", b"\0", b"GGUF" + b"\0" * 60, b"version https://git-lfs.github.com/spec/v1\n", b"click\nrich\nnumpy\n",
    b"import os\nimport sys\n",
    b"(a list) of words\n", b"{\"a\": 1}", b"# Title\n\ntext\n", b"xyz" * 999, b"x^2 + y^2", bytes(range(256)) * 4,
    hexfile.torch_file(GOOD, WEIGHTS) + b"\0" * 100, pickled(b"N") + b"\0" * 50,
    saved_array(np.arange(9)) * 3,
], ids=lambda d: bytes(d[:12]).hex() or "empty")  # fmt: skip
def test_what_holds_no_name_but_data_is_clean(data: bytes) -> None:
    report = scan(data)
    assert report.verdict == "clean", report.findings
    assert not [f for f in report.findings if f.group not in ("data", "harmless")]


def test_numbers_of_tensors_that_look_like_opcodes_are_no_pickles() -> None:
    rng = np.random.default_rng(0)
    kinds = (np.uint8, np.int64, np.float32)
    storages = {str(i): rng.integers(0, 200, 300).astype(kinds[i % 3]).tobytes() for i in range(300)}
    storages["300"] = b"\x80\2" + rng.bytes(300)
    storages["301"] = struct.pack("<4q", 99, 10, 10, 0) * 9
    storages["302"] = b"c" + b"\0" * 9 + b"\n" + b"\0" * 9 + b"\n."
    assert scan(hexfile.torch_file(GOOD, storages)).verdict == "clean"


def test_chains_of_archives_are_scanned_from_the_last_to_the_first() -> None:
    chain = [hexfile.torch_file(GOOD, WEIGHTS)] * 40
    assert scan(b"".join(chain)).verdict == "clean"
    chain[20] = hexfile.torch_file(BAD)
    assert scan(b"".join(chain)).verdict == "dangerous"


# ------------------------------------------------------------------- files and folders


def test_paths_file_objects_and_bytes_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(hexfile.torch_file(BAD, WEIGHTS))
    with path.open("rb") as f:
        reports = [tensorio.scan(path), tensorio.scan(str(path)), tensorio.scan(f), scan(path.read_bytes())]
    facts = [[(x.record, x.offset, x.module, x.name, x.group, x.how) for x in r.findings] for r in reports]
    assert all(fact == facts[0] for fact in facts)
    assert reports[0].files == (tensorio.ScannedFile(str(path), "a zip archive", path.stat().st_size, "dangerous"),)


def test_a_pickle_by_its_name_must_be_readable(tmp_path: Path) -> None:
    for suffix, verdict in ((".pkl", "unreadable"), (".pt", "unreadable"), (".txt", "clean"), ("", "clean")):
        path = tmp_path / f"x{suffix}"
        path.write_bytes(b"<html>not a pickle</html>")
        assert tensorio.scan(path).verdict == verdict


def test_folders_are_scanned_with_all_below(tmp_path: Path) -> None:
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "good.pt").write_bytes(hexfile.torch_file(GOOD, WEIGHTS))
    (tmp_path / "readme.md").write_text("# hi\n")
    (tmp_path / "sub" / "deep" / "bad.bin").write_bytes(BAD)
    seen: list[tuple[int, int]] = []
    report = tensorio.scan(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert report.verdict == "dangerous"
    assert [f.path for f in report.files] == ["good.pt", "readme.md", "sub/deep/bad.bin"]
    assert [f.verdict for f in report.files] == ["clean", "clean", "dangerous"]
    assert report.findings[0].file == "sub/deep/bad.bin"
    assert seen[-1][0] == seen[-1][1] == sum(f.nbytes for f in report.files)
    assert tensorio.scan(tmp_path / "sub").findings[0].file == "deep/bad.bin"


def test_links_and_special_files_are_not_followed(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside.pt", tmp_path / "model"
    outside.write_bytes(BAD)
    inside.mkdir()
    (inside / "real.pt").write_bytes(hexfile.torch_file(GOOD, WEIGHTS))
    (inside / "again.pt").symlink_to("real.pt")
    (inside / "loop").symlink_to(".")
    (inside / "gone.pt").symlink_to("nowhere")
    os.mkfifo(inside / "pipe")
    report = tensorio.scan(inside)
    assert (report.verdict, len(report.notes)) == ("clean", 4)
    (inside / "out.pt").symlink_to(outside)
    report = tensorio.scan(inside)
    assert report.verdict == "unreadable"
    assert report.findings[0].file == "out.pt"
    assert tensorio.scan(inside / "out.pt").verdict == "dangerous"  # what was asked for is opened


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        tensorio.scan(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(tensorio.UnsupportedError):
        tensorio.scan(tmp_path / "pipe")
    assert tensorio.scan(tmp_path).verdict == "clean"


# ------------------------------------------------------------------- bounds


def test_bombs_end_in_a_finding(in_child: Child) -> None:
    zeros = gzip.compress(b"\0" * (130 << 20), 1)
    pops = hexfile.zip_file([Rec("a.pkl", proto() + b"N0" * (10 << 20) + b"N.", method=8)])
    for data in (zeros, pops):
        report = in_child(tensorio.scan, data, memory=600 << 20, cpu=30)
        assert report.verdict == "unreadable"


def test_archives_inside_each_other_end(monkeypatch: pytest.MonkeyPatch) -> None:
    data = BAD
    for _ in range(_collect.DEPTH_MAX - 1):
        data = zipped({"a": data})
    assert scan(data).verdict == "dangerous"
    assert scan(zipped({"a": zipped({"a": zipped({"a": data})})})).verdict == "unreadable"


def test_overlapping_headers_cost_no_square(in_child: Child) -> None:
    header = struct.pack("<IHHHHHIIIHH", 0x04034B50, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0) + b"a"
    data = header * 30_000 + b"N" * 100_000
    start = time.monotonic()
    assert in_child(tensorio.scan, data, wall=120).verdict == "unreadable"
    assert time.monotonic() - start < 60


def test_memory_stays_flat_over_big_files(tmp_path: Path, in_child: Child) -> None:
    """A pickle, half a GiB of something behind it, and an archive at the end."""
    path = tmp_path / "big.pkl"
    block = np.random.default_rng(0).bytes(1 << 20)
    with path.open("wb") as f:
        f.write(GOOD + b"".join(b"B" + struct.pack("<I", 1 << 20) + block + b"0" for _ in range(64)))
        f.writelines([block] * 192)
        f.write(hexfile.torch_file(BAD))
    verdict, grown = in_child(_scan_and_measure, path, wall=200)
    assert verdict == "dangerous"
    assert grown < 64 << 20


def _scan_and_measure(path: Path) -> tuple[str, int]:
    scan(GOOD)
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak()
    return tensorio.scan(path).verdict, _peak() - before


def _peak() -> int:
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").open() if line.startswith("VmHWM"))


# ------------------------------------------------------------------- whatever comes


def mutated(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randrange(1, 8)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(5):
            case 0:
                out[at : at + 1] = rng.randbytes(1)
            case 1:
                del out[at : at + rng.randrange(1, 64)]
            case 2:
                other = rng.choice(others)
                begin = rng.randrange(len(other))
                out[at:at] = other[begin : begin + rng.randrange(1, 300)]
            case 3:
                out[at : at + 4] = rng.randbytes(4)
            case _:
                out += rng.choice(others)[: rng.randrange(1, 400)]
    return bytes(out)


@pytest.mark.parametrize("seed", range(4))
def test_no_mutation_raises_or_hangs(seed: int) -> None:
    rng = random.Random(seed)
    whole = [make() for make in EXTRA.values()]
    whole += [pickled(b"]" + joblib_array("f8", 3, bytes(24)) + b"a"), pickle.dumps({"a": [1, 2.5, "x"] * 9}, 5)]
    for _ in range(400):
        data = mutated(rng, rng.choice(whole), whole)
        start = time.process_time()
        assert scan(data).verdict in ("clean", "unknown", "unreadable", "dangerous")
        assert time.process_time() - start < 5, data.hex()


# ------------------------------------------------------------------- the command


def run(*arguments: object) -> Any:
    pytest.importorskip("click", reason="the extra 'cli' is not installed")
    pytest.importorskip("rich", reason="the extra 'cli' is not installed")
    from click.testing import CliRunner

    from tensorio.cli import cli

    return CliRunner().invoke(cli, ["scan", *(str(a) for a in arguments)])


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    made = {"clean": hexfile.torch_file(GOOD, WEIGHTS), "dangerous": BAD, "unreadable": b"\x80\2N",
            "unknown": pickled(name("pkg.mod", "Class") + b")R")}  # fmt: skip
    paths = {verdict: tmp_path / f"{verdict}.pkl" for verdict in made}
    for verdict, data in made.items():
        paths[verdict].write_bytes(data)
    return paths


def test_exit_codes(files: dict[str, Path], tmp_path: Path) -> None:
    codes = {"clean": 0, "unknown": 3, "unreadable": 1, "dangerous": 1}
    for verdict, code in codes.items():
        assert run(files[verdict]).exit_code == code
    missing = tmp_path / "missing"
    assert run(missing).exit_code == 2
    assert run(files["clean"], missing).exit_code == 2
    assert run(files["unknown"], missing).exit_code == 2
    assert run(files["dangerous"], missing).exit_code == 1
    assert run(files["unknown"], files["unreadable"]).exit_code == 1
    assert run(files["unknown"], files["clean"]).exit_code == 3
    assert run().exit_code == 2
    assert run("--allow", "*", files["clean"]).exit_code == 2
    assert run("--allow", "pkg.mod.Class", files["unknown"]).exit_code == 0
    assert run("--allow", "other.*", "--allow", "pkg.*", files["unknown"]).exit_code == 0
    assert run("--allow", "os.system", files["dangerous"]).exit_code == 1


def test_people_see_names_reasons_and_places(files: dict[str, Path]) -> None:
    out = run(files["dangerous"]).stdout
    assert "DANGEROUS" in out
    assert "os.system" in out
    assert "called by REDUCE" in out
    assert "byte 2" in out
    assert "clean" in run(files["clean"]).stdout
    assert "torch.FloatStorage" in run(files["clean"]).stdout
    assert "unknown: could run code in a loader that imports it" in run(files["unknown"]).stdout
    assert "could not be read to the end" in run(files["unreadable"]).stdout


def test_json_has_the_schema_of_the_help(files: dict[str, Path], tmp_path: Path) -> None:
    result = run("--json", files["dangerous"], files["clean"], tmp_path / "missing", tmp_path)
    answer = json.loads(result.stdout)
    assert (answer["schema"], answer["exit_code"], result.exit_code) == (1, 1, 1)
    first, second, third, folder = answer["paths"]
    assert first["verdict"] == "dangerous"
    assert set(first["findings"][0]) == {
        "file", "record", "offset", "module", "name", "group", "reason", "how", "count"}  # fmt: skip
    assert second["files"][0]["what"] == "a zip archive"
    assert set(third) == {"path", "error"}
    assert len(folder["files"]) == 4


def test_text_of_files_is_escaped_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    record = "a\x1b[31m\n\u202e" + "b" * 500 + ".pkl"
    path.write_bytes(zipped({record: pickled(name("m\x1b[2J[red]" + "x" * 500, "n\u202e"))}))
    out = run("--limit", "0", path).stdout
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert "\\x1b[2J[red]" in out
    assert max(map(len, out.splitlines())) < 700
    answer = run("--json", path).stdout
    assert answer.isascii()
    assert "\x1b" not in answer
    assert json.loads(answer)["paths"][0]["findings"][0]["name"] == "n\u202e"


def test_limit_cuts_each_group(tmp_path: Path) -> None:
    path = tmp_path / "x.pkl"
    path.write_bytes(pickled(b"".join(name("m", f"n{i}") for i in range(60))))
    assert "and 20 more unknown" in run(path).stdout
    assert "m.n59" not in run(path).stdout
    assert "m.n59" in run("--limit", "0", path).stdout
    assert len(json.loads(run("--json", "--limit", "1", path).stdout)["paths"][0]["findings"]) == 60


def test_cases_of_both_formats_are_clean() -> None:
    for case in ("safetensors_small", "safetensors_empty", "torch_zip_by_hand", "torch_zip_deflated"):
        assert scan(cases.CASES[case]().data).verdict == "clean"


def test_zipfile_writes_what_is_scanned() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", BAD)
        archive.writestr("a/b.txt", "x" * 999)
    assert scan(out.getvalue()).verdict == "dangerous"
