"""Recovering damaged files: what torch.load makes of the result is what was saved, less what is reported as lost."""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import hexfile
import tensorio
from tensorio import FormatError, Recovery, TensorIOError, TruncatedError, UnsafePickleError, UnsupportedError

torch = pytest.importorskip("torch", reason="the oracle is torch")

Make = Callable[[], Any]
ALIGN = 64


# ------------------------------------------------------------------------- oracle


def saved_bytes(obj: Any, align: int = ALIGN) -> bytes:
    """What torch.save makes of an object."""
    from torch.utils.serialization import config

    buffer = io.BytesIO()
    with config.patch({"save.storage_alignment": align}):
        torch.save(obj, buffer)
    return buffer.getvalue()


def recovered(data: bytes, tmp_path: Path, **options: Any) -> tuple[Recovery, Any]:
    """The report, and what torch makes of the result; the source must stay as it was."""
    source, target = tmp_path / "damaged.pt", tmp_path / "whole.pt"
    source.write_bytes(data)
    target.unlink(missing_ok=True)
    report = tensorio.recover(source, target, durable=False, **options)
    assert source.read_bytes() == data
    assert sorted(p.name for p in tmp_path.iterdir()) == ["damaged.pt", "whole.pt"]
    assert tensorio.verify(target).ok
    return report, torch.load(target, weights_only=True)


def without(obj: Any, lost: set[str], name: str = "") -> Any:
    """The same object without some tensors: they go from dicts and are None in lists and tuples."""
    inner = f"{name}." if name else ""
    if isinstance(obj, dict):
        kept = [(k, v) for k, v in obj.items() if not (isinstance(v, torch.Tensor) and f"{inner}{k}" in lost)]
        copy = type(obj)((k, without(v, lost, f"{inner}{k}")) for k, v in kept)
        vars_of = getattr(obj, "__dict__", {})
        getattr(copy, "__dict__", {}).update(vars_of)
        return copy
    if type(obj) in (list, tuple):
        return type(obj)(without(v, lost, f"{inner}{i}") for i, v in enumerate(obj))
    return None if isinstance(obj, torch.Tensor) and name in lost else obj


def assert_same(a: Any, b: Any) -> None:
    """Two objects are equal to the bit, in types and shapes, too."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        assert getattr(a, "__dict__", {}) == getattr(b, "__dict__", {})
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        assert a.detach().numpy().tobytes() == b.detach().numpy().tobytes()
    else:
        assert a == b


def names_of(obj: Any, name: str = "") -> Iterator[str]:
    """Full dotted names of the tensors of an object."""
    inner = f"{name}." if name else ""
    if isinstance(obj, torch.Tensor):
        yield name
    elif isinstance(obj, dict | list | tuple):
        for key, child in obj.items() if isinstance(obj, dict) else enumerate(obj):
            yield from names_of(child, f"{inner}{key}")


def check(data: bytes, obj: Any, tmp_path: Path, lost: set[str] | None = None, **options: Any) -> Recovery:
    """Recover; the result must be the object less what is reported as lost (exactly `lost`, if it is given)."""
    report, result = recovered(data, tmp_path, **options)
    if lost is not None:
        assert set(report.lost) == lost, report.lost
    assert set(report.saved) | set(report.lost) == set(names_of(obj))
    assert not set(report.saved) & set(report.lost)
    assert report.ok == (not report.lost)
    assert_same(result, without(obj, set(report.lost)))
    return report


class Layout:
    """Where zipfile, which knows nothing of torch, finds the records of a file."""

    def __init__(self, data: bytes) -> None:
        archive = zipfile.ZipFile(io.BytesIO(data))
        self.directory = archive.start_dir
        self.headers: dict[str, int] = {}
        self.payloads: dict[str, tuple[int, int]] = {}
        for info in archive.infolist():
            name = info.filename.partition("/")[2]
            at = info.header_offset
            n_name, n_extra = struct.unpack_from("<HH", data, at + 26)
            self.headers[name] = at
            self.payloads[name] = at + 30 + n_name + n_extra, info.compress_size

    def storages(self) -> list[str]:
        return [name for name in self.headers if name.startswith("data/")]


def flat(sizes: list[int], seed: int = 0) -> dict[str, Any]:
    """Tensors of so many bytes each; names that say which storage they are in."""
    random = np.random.default_rng(seed)
    return {f"data/{i}": torch.from_numpy(random.integers(0, 256, n, np.uint8)) for i, n in enumerate(sizes)}


def rich() -> Any:
    """An object with all that torch.load takes: tied tensors, views, parameters, no elements, other values."""
    base = torch.arange(2000.0).reshape(40, 50)
    model = OrderedDict(w=base, tied=base, t=base.T, view=base[3:5], none=torch.zeros(0, 3), half=torch.ones(7).half())
    model._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    return {
        "model": model, "list": [torch.ones(3), "text", torch.zeros(300), {"deep": torch.arange(5)}],
        "pair": (torch.full((2,), 7), 3), "parameter": torch.nn.Parameter(torch.randn(9)), "lr": 0.5, "step": 12,
        "names": {"a", "b"}, 3: torch.tensor(4), "empty": {}, "big": torch.randn(1 << 18),
    }  # fmt: skip


# --------------------------------------------------------------------- undamaged files


@pytest.mark.parametrize("align", [1, 2, 16, 48, 64, 256, 4096])
def test_undamaged_file_comes_out_whole(tmp_path: Path, align: int) -> None:
    obj = rich()
    report = check(saved_bytes(obj, align), obj, tmp_path, set())
    assert report.healthy
    assert not report.not_proven
    assert not report.dropped
    assert report.format == "torch_zip"


@pytest.mark.parametrize("obj", [torch.arange(4), [torch.ones(2)], (torch.ones(2), 1), {"a": 1}, 5, {}],
                         ids=["tensor", "list", "tuple", "plain", "number", "nothing"])  # fmt: skip
def test_any_root_is_saved(tmp_path: Path, obj: Any) -> None:
    data = saved_bytes(obj)
    check(data, obj, tmp_path, set())
    check(data[: Layout(data).directory], obj, tmp_path, set())


@pytest.mark.parametrize("name", cases.cases_of("torch_zip"))
def test_every_kind_of_archive_is_read(tmp_path: Path, name: str) -> None:
    case = cases.CASES[name]()
    source, target = tmp_path / "a.pt", tmp_path / "b.pt"
    source.write_bytes(case.data)
    report = tensorio.recover(source, target)
    assert report.healthy
    assert set(report.saved) == set(case.tensors)
    with tensorio.open(target) as result:
        for fqn, array in case.tensors.items():
            assert result[fqn].tobytes() == array.tobytes()


def test_file_objects_and_buffers(tmp_path: Path) -> None:
    obj = rich()
    data = saved_bytes(obj)
    for source in (data, io.BytesIO(data), memoryview(data)):
        out = io.BytesIO()
        assert tensorio.recover(source, out, format="torch_zip").ok
        assert_same(torch.load(io.BytesIO(out.getvalue()), weights_only=True), obj)


def test_other_target_formats(tmp_path: Path) -> None:
    obj = {"a": torch.arange(6.0).reshape(2, 3), "b": {"c": torch.ones(5)}, "lr": 0.1}
    data = saved_bytes(obj)
    source, target = tmp_path / "a.pt", tmp_path / "b.safetensors"
    source.write_bytes(data[: Layout(data).headers["data/1"]])
    report = tensorio.recover(source, target)
    assert report.saved == ("a",)
    assert set(report.lost) == {"b.c"}
    assert report.dropped == ("lr",)
    np.testing.assert_array_equal(tensorio.load(target)["a"], obj["a"].numpy())


# ---------------------------------------------------------------------------- cut files


def storages_before(layout: Layout, end: int) -> set[str]:
    """Storages whose payload ends at or before an offset."""
    return {name for name in layout.storages() if not layout.payloads[name][1] or sum(layout.payloads[name]) <= end}


@pytest.mark.parametrize("count", [1, 2, 11, 40])
@pytest.mark.parametrize("align", [1, 64, 4096])
def test_cut_at_every_boundary(tmp_path: Path, count: int, align: int) -> None:
    obj = flat([[0, 1, 7, 64, 300, 1000][(i * 7 + count) % 6] for i in range(count)], count)
    data = saved_bytes(obj, align)
    layout = Layout(data)
    places = {*layout.headers.values(), layout.directory}
    places |= {
        at + d for start, n in layout.payloads.values() for at in (start, start + n) for d in (-1, 0, 1, 5, 8, 9)
    }
    for end in sorted(places | {len(data) - 1, len(data) - 22, len(data) - 50}):
        there = storages_before(layout, end)
        if end < sum(layout.payloads["data.pkl"]) + 16:
            with pytest.raises(FormatError, match="nothing to recover" if end > 30 else "looks like|begins with"):
                recovered(data[:end], tmp_path)
        elif not any(layout.payloads[name][1] for name in there) and len(there) < count and not there:
            with pytest.raises(FormatError, match="no tensor is left"):
                recovered(data[:end], tmp_path)
        elif end < len(data):
            check(data[:end], obj, tmp_path, set(obj) - there)


@pytest.mark.parametrize("seed", range(12))
def test_cut_anywhere(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    obj = rich()
    data = saved_bytes(obj)
    layout = Layout(data)
    end = rng.randrange(sum(layout.payloads["data/0"]) + 24, len(data))
    there = storages_before(layout, end)
    report = check(data[:end], obj, tmp_path)
    assert {loss.record for loss in report.lost.values()} == {f"archive/{n}" for n in layout.storages()} - {
        f"archive/{n}" for n in there
    }
    for loss in report.lost.values():
        if loss.offset is not None:
            assert (loss.offset, loss.nbytes) == layout.payloads[loss.record.partition("/")[2]]
            assert loss.reason.startswith(f"cut off by the end of the file: {max(end - loss.offset, 0)} of ")


def test_a_checksum_that_is_cut_off_is_reported(tmp_path: Path) -> None:
    obj = flat([100, 200])
    data = saved_bytes(obj)
    end = sum(Layout(data).payloads["data/1"])
    assert set(check(data[: end + 7], obj, tmp_path, set()).not_proven) == {"data/1"}
    assert not check(data[: end + 8], obj, tmp_path, set()).not_proven  # behind the CRC, only sizes are missing


# ------------------------------------------------------------------------------- damage


SIZES = [0, 64, 1, 300, 1000, 300, 5, 64, 300, 2000, 300, 300, 64]


def both(data: bytes) -> Iterator[tuple[bytearray, bool]]:
    """The file with its directory, and without."""
    yield bytearray(data), True
    yield bytearray(data[: Layout(data).directory]), False


def test_directory_is_not_needed(tmp_path: Path) -> None:
    obj = rich()
    data = saved_bytes(obj)
    at = Layout(data).directory
    for damaged in (data[:at], data[: at + 100], data[:at] + bytes(len(data) - at), data[:-30] + b"\xff" * 30):
        report = check(damaged, obj, tmp_path, set())
        assert not report.healthy
        assert not report.not_proven


@pytest.mark.parametrize("length", [4, 30, 44])
def test_any_one_header_may_be_lost(tmp_path: Path, length: int) -> None:
    """The directory, or torch's order and the checksum, tell where and what the record was."""
    obj = flat(SIZES)
    data = saved_bytes(obj)
    for at in Layout(data).headers.values():
        for damaged, _ in both(data):
            damaged[at : at + length] = bytes(length)
            report = check(bytes(damaged), obj, tmp_path, set())
            assert not report.healthy


@pytest.mark.parametrize("bit", [0, 3])
def test_any_one_header_byte_may_be_wrong(tmp_path: Path, bit: int) -> None:
    """Names are not covered by any checksum: a wrong one must not lead to a wrong tensor."""
    obj = flat(SIZES)
    data = saved_bytes(obj)
    layout = Layout(data)
    for name in ("data/1", "data/5", "version"):
        at = layout.headers[name]
        for place in range(at, at + 30 + len(f"archive/{name}") + 4):
            for damaged, _ in both(data):
                damaged[place] ^= 1 << bit
                check(bytes(damaged), obj, tmp_path, set())


def test_wrong_payloads_are_lost(tmp_path: Path) -> None:
    obj = flat(SIZES)
    data = saved_bytes(obj)
    layout = Layout(data)
    for name in layout.storages():
        start, nbytes = layout.payloads[name]
        for place in {start, start + nbytes // 2, start + nbytes - 1} if nbytes else ():
            for damaged, _ in both(data):
                damaged[place] ^= 0x10
                report = check(bytes(damaged), obj, tmp_path, {name})
                loss = report.lost[name]
                assert (loss.record, loss.offset, loss.nbytes) == (f"archive/{name}", start, nbytes)
                assert loss.reason.startswith("CRC-32: expected ")
                assert report.lost_nbytes == nbytes
                assert report.saved_nbytes == sum(SIZES) - nbytes


def test_damaged_payloads_are_kept_on_request(tmp_path: Path) -> None:
    obj = flat([100, 200, 300])
    data = bytearray(saved_bytes(obj))
    layout = Layout(bytes(data))
    data[layout.payloads["data/1"][0]] ^= 1
    report, result = recovered(bytes(data[: sum(layout.payloads["data/2"]) - 1]), tmp_path, keep_damaged=True)
    assert report.saved == ("data/0",)
    assert set(report.damaged) == {"data/1"}
    assert set(report.lost) == {"data/2"}  # bytes that are not there can't be kept
    assert not report.ok
    assert list(result) == ["data/0", "data/1"]
    changed = obj["data/1"].clone()
    changed[0] ^= 1
    assert torch.equal(result["data/1"], changed)


@pytest.mark.parametrize("part", [(0, 4), (4, 8), (8, 12), (12, 16), (0, 16)])
def test_descriptors_may_be_wrong_if_the_directory_is_there(tmp_path: Path, part: tuple[int, int]) -> None:
    obj = flat([300, 300, 300, 20])
    data = saved_bytes(obj)
    layout = Layout(data)
    for name in ("data/0", "data/2", "data/3"):
        end = sum(layout.payloads[name])
        for damaged, whole in both(data):
            for i in range(*part):
                damaged[end + i] ^= 0x55
            report = check(bytes(damaged), obj, tmp_path, set() if whole else {name})
            if not whole:
                assert "checksum" in report.lost[name].reason or "CRC-32" in report.lost[name].reason


@pytest.mark.parametrize("hole", [16, 100, 512, 4096])
def test_holes(tmp_path: Path, hole: int) -> None:
    """What lies in a hole is lost; what does not is saved, whatever the hole took away besides."""
    obj = flat([300, 64, 5000, 700, 300, 1, 0, 300, 5000, 300, 64, 300])
    data = saved_bytes(obj)
    layout = Layout(data)
    for at in range(layout.headers["byteorder"], layout.directory, 211):
        ends = {name for name in layout.storages() for end in [sum(layout.payloads[name])]
                if end < at + hole and at < end + 16 and layout.payloads[name][1]}  # fmt: skip
        for damaged, whole in both(data):
            damaged[at : at + hole] = bytes(len(damaged[at : at + hole]))
            report = check(bytes(damaged), obj, tmp_path)
            changed = {name for name in layout.storages() for start, n in [layout.payloads[name]]
                       if damaged[start : start + n] != data[start : start + n]}  # fmt: skip
            assert changed <= set(report.lost)
            assert set(report.lost) <= (changed if whole and at + hole <= layout.directory else changed | ends)


def random_damage(rng: random.Random, data: bytes) -> bytes:
    """A few flipped bits, zeroed or overwritten ranges, perhaps a cut."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(out))
        kind = rng.randrange(4)
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            n = min(rng.choice([4, 30, 64, 512, 3000]), len(out) - at)
            out[at : at + n] = bytes(n)
        elif kind == 2:
            n = min(rng.choice([1, 8, 100]), len(out) - at)
            out[at : at + n] = rng.randbytes(n)
        else:
            n = min(rng.choice([16, 200, 1000]), len(out) - at)
            source = rng.randrange(len(out) - n + 1)
            out[at : at + n] = out[source : source + n]
    return bytes(out if rng.random() < 0.7 else out[: rng.randrange(len(out) // 2, len(out))])


@pytest.mark.parametrize("seed", range(8))
def test_random_damage_never_leads_to_a_wrong_tensor(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    obj = flat([rng.choice([0, 1, 64, 64, 300, 300, 1000, 4000]) for _ in range(rng.randint(1, 30))], seed)
    data = saved_bytes(obj, rng.choice([1, 16, 64, 64, 64, 256]))
    done = 0
    for _ in range(60):
        try:
            report, result = recovered(random_damage(rng, data), tmp_path)
        except TensorIOError as error:
            assert len(str(error)) <= 500  # noqa: PT017
            continue
        done += 1
        assert set(report.saved) | set(report.lost) == set(obj)
        for name in set(report.saved) - set(report.not_proven):
            assert torch.equal(result[name], obj[name]), (name, report)
    assert done


def test_archives_inside_payloads_are_not_taken_for_the_file(tmp_path: Path) -> None:
    """A saved file in a tensor has records of the same names, whole ones: they are inside a payload all the same."""
    inner = flat([500, 40, 300, 300, 300, 64])
    sizes = {f"data/{i}": n for i, n in enumerate([len(saved_bytes(inner)), 40, 300, 300, 300, 64])}
    obj = flat(list(sizes.values()), 1)
    obj["data/0"] = torch.frombuffer(bytearray(saved_bytes(inner)), dtype=torch.uint8)
    data = saved_bytes(obj)
    layout = Layout(data)
    start, _ = layout.payloads["data/0"]
    for lost in ({"data/0"}, {"data/0", "data/1"}, {"data/0", "data/1", "data/2"}):
        damaged = bytearray(data[: layout.directory])
        first = layout.headers[".format_version"] if len(lost) > 1 else layout.headers["data/0"]
        damaged[first : start + 100] = bytes(start + 100 - first)
        for name in lost:
            at, n = layout.payloads[name]
            damaged[at + n : at + n + 16] = bytes(16)
            if name != "data/0":
                damaged[layout.headers[name] : at + n] = bytes(at + n - layout.headers[name])
        check(bytes(damaged), obj, tmp_path, lost)


def test_damaged_pickle(tmp_path: Path) -> None:
    obj = flat([100, 200])
    data = bytearray(saved_bytes(obj))
    layout = Layout(bytes(data))
    place = data.index(b"data/1", *(layout.payloads["data.pkl"][0], sum(layout.payloads["data.pkl"]))) + 5
    data[place] = ord("7")
    with pytest.raises(FormatError, match=r"its pickle can't be used: CRC-32.*raw=True saves the 2 whole storages"):
        recovered(bytes(data), tmp_path)
    report, result = recovered(bytes(data), tmp_path, keep_damaged=True)
    assert set(report.damaged) == {"data/0", "data/7"}
    assert not report.saved
    assert torch.equal(result["data/7"], obj["data/1"])


def test_records_of_one_name_and_other_contents_are_not_chosen_from(tmp_path: Path) -> None:
    a, b = cases.array("float32", (4,)), cases.array("float32", (4,), 1)
    items = {"x": hexfile.tensor("0"), "y": hexfile.tensor("1")}
    records = hexfile.torch_records(hexfile.pickled(hexfile.mapping(items)), {"0": a.tobytes(), "1": a.tobytes()})
    records.append(hexfile.Rec("archive/data/1", b.tobytes()))
    data = hexfile.zip_file(records)
    source = tmp_path / "a.pt"
    source.write_bytes(data[: Layout(data).directory])
    report = tensorio.recover(source, tmp_path / "b.pt")
    assert "x" in report.saved
    assert torch.equal(torch.load(tmp_path / "b.pt")["x"], torch.from_numpy(a))


# ------------------------------------------------------------------------ other layouts


def repacked(data: bytes, order: Callable[[list[str]], list[str]], method: int = zipfile.ZIP_STORED) -> bytes:
    """The same records, by a zip tool."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w", method) as target:
        for name in order(source.namelist()):
            target.writestr(name, source.read(name))
    return out.getvalue()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
@pytest.mark.parametrize("order", [list, sorted, lambda names: names[::-1]], ids=["same", "sorted", "reversed"])
def test_repacked_archives(tmp_path: Path, method: int, order: Any) -> None:
    obj = flat(SIZES)
    data = repacked(saved_bytes(obj), order, method)
    layout = Layout(data)
    check(data, obj, tmp_path, set())
    report = check(data[: layout.directory], obj, tmp_path, set())
    assert len(report.not_proven) == sum(n > 0 for n in SIZES)  # nothing but its header says which record is whose
    damaged = bytearray(data)
    damaged[layout.payloads["data/9"][0] + 20] ^= 1
    check(bytes(damaged), obj, tmp_path, {"data/9"})
    check(bytes(damaged[: layout.directory]), obj, tmp_path)


def test_layout_before_2_7(tmp_path: Path) -> None:
    """Records sorted as strings, with and without `byteorder`; the oldest begin with `version`."""
    arrays = {f"data/{i}": cases.array("uint8", (n,), i) for i, n in enumerate(SIZES)}
    obj = {name: torch.from_numpy(a.copy()) for name, a in arrays.items()}
    items = {f"data/{i}": hexfile.tensor(str(i), n, (n,), cls="ByteStorage") for i, n in enumerate(SIZES)}
    keys = sorted(map(str, range(len(SIZES))))
    pickle = hexfile.pickled(hexfile.mapping(items))
    storages = {key: arrays[f"data/{key}"].tobytes() for key in keys}
    for byteorder, first in (("little", False), (None, False), (None, True)):
        records = hexfile.torch_records(pickle, storages, modern=False, byteorder=byteorder)
        if first:
            records.insert(0, records.pop())
        data = hexfile.zip_file(records)
        layout = Layout(data)
        check(data, obj, tmp_path, set())
        for end in sorted([*layout.headers.values()])[4:]:
            check(data[:end], obj, tmp_path, set(obj) - storages_before(layout, end))
        for at in layout.headers.values():
            for damaged, _ in both(data):
                damaged[at : at + 40] = bytes(40)
                check(bytes(damaged), obj, tmp_path, set())


def test_layout_of_1_4(tmp_path: Path) -> None:
    """`version` comes first, and storages are in another folder."""
    keys = [str(94158691260224 + 48 * i) for i in range(6)]
    items = {f"t{i}": hexfile.tensor(key, 40 + i, (40 + i,), cls="ByteStorage") for i, key in enumerate(keys)}
    raw = {key: cases.array("uint8", (40 + i,), i).tobytes() for i, key in enumerate(keys)}
    records = hexfile.torch_records(hexfile.pickled(hexfile.mapping(items)), raw, modern=False, byteorder=None)
    for record in records:
        record.name = str(record.name).replace("/data/", "/tensors/")
    data = hexfile.zip_file([records[-1], *records[:-1]])
    at = zipfile.ZipFile(io.BytesIO(data)).getinfo(f"archive/tensors/{keys[2]}").header_offset
    damaged = bytearray(data[: Layout(data).directory])
    damaged[at : at + 30] = bytes(30)
    source, target = tmp_path / "a.pt", tmp_path / "b.pt"
    source.write_bytes(damaged)
    report = tensorio.recover(source, target)
    assert report.ok
    assert not report.not_proven
    loaded = torch.load(target)
    assert {name: loaded[name].numpy().tobytes() for name in loaded} == {f"t{i}": raw[k] for i, k in enumerate(keys)}


def test_big_endian(tmp_path: Path) -> None:
    case = cases.CASES["torch_zip_big_endian"]()
    source = tmp_path / "a.pt"
    source.write_bytes(case.data[: Layout(case.data).directory])
    assert tensorio.recover(source, tmp_path / "b.pt").ok
    loaded = torch.load(tmp_path / "b.pt")
    for name, array in case.tensors.items():
        np.testing.assert_array_equal(loaded[name].numpy(), array)


def test_without_checksums_nothing_is_proven(tmp_path: Path) -> None:
    obj = flat([100, 0, 200])
    torch.serialization.set_crc32_options(False)
    try:
        data = saved_bytes(obj)
    finally:
        torch.serialization.set_crc32_options(True)
    for damaged in (data, data[: Layout(data).directory]):
        assert set(check(damaged, obj, tmp_path, set()).not_proven) >= {"data/0", "data/2"}
    check(data[: Layout(data).headers["data/2"]], obj, tmp_path, {"data/2"})


def test_corpus_files_cut_short(tmp_path: Path, shared: Path) -> None:
    """Files of every release there is: what is in front of the cut comes out as it does of the whole file."""
    entries = [e for e in cases.corpus_entries() if e["format"] == "torch_zip" and e["size"] < 400_000]
    done = 0
    for entry in entries:
        data = (shared / "corpus" / entry["path"]).read_bytes()
        try:
            whole = tensorio.open(data)
        except TensorIOError:
            continue
        layout = Layout(data)
        ends = sorted(layout.headers[name] for name in layout.storages())
        for end in {layout.directory, *ends[len(ends) // 2 : len(ends) // 2 + 1]} if ends else ():
            source, target = tmp_path / "a.pt", tmp_path / "b.safetensors"
            source.write_bytes(data[:end])
            there = storages_before(layout, end)
            try:
                report = tensorio.recover(source, target)
            except TensorIOError as error:
                assert "no tensor is left" in str(error) or isinstance(error, UnsupportedError), (entry["id"], error)  # noqa: PT017
                continue
            done += 1
            assert {loss.record.partition("/")[2] for loss in report.lost.values()}.isdisjoint(there), entry["id"]
            with tensorio.open(target) as result:
                assert set(result) == set(report.saved)
                for name in report.saved:
                    assert result[name].tobytes() == whole[name].tobytes()
    assert done > 20


# ------------------------------------------------------------------------ lost pickles


def test_raw_storages(tmp_path: Path) -> None:
    obj = flat([100, 0, 5000, 64])
    data = saved_bytes(obj)
    layout = Layout(data)
    start, nbytes = layout.payloads["data.pkl"]
    for damaged, _ in both(data):
        damaged[start + 5 : start + nbytes] = bytes(nbytes - 5)
        with pytest.raises(FormatError, match=r"raw=True saves the 4 whole storages \(5164 bytes\)"):
            recovered(bytes(damaged), tmp_path)
        report, result = recovered(bytes(damaged), tmp_path, raw=True)
        assert report.raw
        assert_same(result, obj)
        damaged[layout.payloads["data/2"][0]] ^= 1
        damaged[layout.headers["data/0"]] ^= 1
        assert set(recovered(bytes(damaged), tmp_path, raw=True)[0].saved) >= {"data/1", "data/3"}
        assert "data/2" not in recovered(bytes(damaged), tmp_path, raw=True)[0].saved


def test_raw_is_not_used_where_the_pickle_is_whole(tmp_path: Path) -> None:
    obj = rich()
    assert not check(saved_bytes(obj), obj, tmp_path, set(), raw=True).raw


def test_raw_is_the_way_out_for_pickles_that_are_refused(tmp_path: Path) -> None:
    pickle = hexfile.pickled(hexfile.mapping({"a": hexfile.name("posix", "system"), "b": hexfile.tensor("0")}))
    data = hexfile.torch_file(pickle, {"0": b"\1" * 16})
    with pytest.raises(UnsafePickleError):
        recovered(data, tmp_path)
    report, result = recovered(data, tmp_path, raw=True)
    assert report.saved == ("data/0",)
    assert result["data/0"].tolist() == [1] * 16
    with pytest.raises(UnsupportedError, match=r"recover to a \.safetensors file"):
        recovered(data, tmp_path, unknown="opaque")
    (tmp_path / "whole.pt").unlink(missing_ok=True)
    target = tmp_path / "b.safetensors"
    assert tensorio.recover(tmp_path / "damaged.pt", target, unknown="opaque").saved == ("b",)


# -------------------------------------------------------------------------- safetensors


def test_safetensors_cut_short(tmp_path: Path) -> None:
    tensors = {f"t{i}": cases.array("float32", (i, 5), i) for i in range(9)}
    data = cases.safetensors_bytes(tensors, {"made": "here"})
    source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    length = 8 + int.from_bytes(data[:8], "little")
    ends = {name: sum(a.nbytes for a in list(tensors.values())[: i + 1]) for i, name in enumerate(tensors)}
    for end in [length, *range(length + 20, len(data) + 1, 37), len(data)]:
        source.write_bytes(data[:end])
        report = tensorio.recover(source, target)
        there = {name for name in tensors if length + ends[name] <= end or not tensors[name].size}
        assert set(report.saved) == there
        assert set(report.lost) == set(tensors) - there
        assert report.healthy == (end == len(data))
        assert set(report.not_proven) == {name for name in there if tensors[name].size}
        with tensorio.open(target) as result:
            assert set(result) == there
            assert result.metadata == {"made": "here"}
            for name in there:
                np.testing.assert_array_equal(result[name], tensors[name])
    source.write_bytes(data[: length - 1])
    with pytest.raises(TruncatedError, match="cut off in its header"):
        tensorio.recover(source, target)


def test_digests_of_a_safetensors_file_judge_its_tensors(tmp_path: Path) -> None:
    tensors = {name: np.random.default_rng(i).random(500) for i, name in enumerate("abcd")}
    source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    tensorio.save(tensors, source, digests=True)
    data = bytearray(source.read_bytes())
    data[-1200 * 8] ^= 1  # of b
    source.write_bytes(data[:-8])
    report = tensorio.recover(source, target)
    assert not report.healthy
    assert (report.saved, report.not_proven) == (("a", "c"), {})
    assert "its SHA-256 is not the one in the file's notes" in report.lost["b"].reason
    assert "cut off" in report.lost["d"].reason
    report = tensorio.recover(source, target, keep_damaged=True)
    assert (report.saved, list(report.damaged), list(report.lost)) == (("a", "c"), ["b"], ["d"])
    tensorio.save(tensors, source, digests=True)
    source.write_bytes(source.read_bytes().replace(b"  a\\n", b"  c\\n", 1))  # c has two
    assert set(tensorio.recover(source, target).not_proven) == {"a", "c"}


def test_safetensors_header_may_say_anything(tmp_path: Path) -> None:
    for header in ({"a": hexfile.st_entry("U8", (1 << 50,), 0, 1 << 50), "b": hexfile.st_entry("U8", (4,), 0, 4)},
                   {"a": hexfile.st_entry("U8", (3,), 0, 4)}, {"a": 1}, b'{"data_offsets":[0,99999999999999999999]}',
                   b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'):  # fmt: skip
        with pytest.raises((TensorIOError, OSError, MemoryError)):
            tensorio.recover(hexfile.st_file(header, b"1234"), tmp_path / "b.safetensors")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("data", [b"", b"\0" * 5000, b"<!doctype html>" * 9, b"PK\x03\x04", b"PK\x05\x06" + bytes(18),
                                  b"PK\x03\x04" * 100, b"\x80\x02.", os.urandom(3000)])  # fmt: skip
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(TensorIOError):
        tensorio.recover(data, tmp_path / "b.pt")
    assert not list(tmp_path.iterdir())


def test_never_writes_over_its_source(tmp_path: Path) -> None:
    source = tmp_path / "a.pt"
    data = saved_bytes(flat([10]))
    source.write_bytes(data)
    (tmp_path / "link.pt").symlink_to(source)
    os.link(source, tmp_path / "hard.pt")
    for target in (source, tmp_path / "link.pt", tmp_path / "hard.pt", tmp_path / "." / "a.pt"):
        with pytest.raises(ValueError, match="the target is the damaged file itself"):
            tensorio.recover(source, target)
    assert source.read_bytes() == data


def test_nothing_is_written_if_nothing_is_left(tmp_path: Path) -> None:
    obj = flat([1000])
    data = saved_bytes(obj)
    target = tmp_path / "b.pt"
    target.write_bytes(b"old")
    with pytest.raises(
        FormatError, match="no tensor is left; of 'data/0': cut off by the end of the file: 500 of 1000"
    ):
        tensorio.recover(data[: Layout(data).payloads["data/0"][0] + 500], target)
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_torchscript_is_refused_by_name(tmp_path: Path) -> None:
    pickle = hexfile.pickled(
        hexfile.name("__torch__", "Model") + b")\x81" + hexfile.mapping({"w": hexfile.tensor("0")}) + b"b"
    )
    with pytest.raises(UnsupportedError, match="torchscript"):
        tensorio.recover(hexfile.torch_file(pickle, {"0": bytes(16)}), tmp_path / "b.pt")


def test_other_formats_are_refused_by_name(tmp_path: Path, shared: Path) -> None:
    done = set()
    for entry in cases.corpus_entries():
        if entry["format"] in ("torch_tar", "pt2_zip", "npz", "pickle", "gguf", "gzip"):
            with pytest.raises(TensorIOError):
                tensorio.recover(shared / "corpus" / entry["path"], tmp_path / "b.pt")
            done.add(entry["format"])
    assert len(done) == 6
    assert not list(tmp_path.iterdir())


def test_hostile_files_end_in_our_errors(tmp_path: Path, shared: Path) -> None:
    folder = shared / "hostile" / "corpus" / "pt"
    if not folder.is_dir():
        pytest.skip("no hostile corpus in the shared folder")
    files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    assert len(files) > 100
    for path in files:
        for options in ({}, {"raw": True, "keep_damaged": True, "unknown": "opaque"}):
            start = time.process_time()
            try:
                tensorio.recover(path, tmp_path / "b.safetensors", durable=False, **options)
            except TensorIOError as error:
                assert len(str(error)) <= 500  # noqa: PT017
            assert time.process_time() - start < 5, path


# ---------------------------------------------------------------------------- cost


def signatures_galore(nbytes: int, kind: str) -> bytes:
    """A file made to look everywhere like the beginning (or the end) of records that reach far."""
    big = nbytes // 2
    items = {f"t{i}": hexfile.tensor(str(i), big, (big,), cls="ByteStorage") for i in range(20)}
    start = hexfile.torch_file(hexfile.pickled(hexfile.mapping(items)), {})[:-200]
    headers = b"".join(struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 0, 0x0808, 0, 0, 0, 0, 0, 0, len(n), 0) + n
                       for n in [f"archive/data/{i}".encode() for i in range(20)])  # fmt: skip
    descriptor = struct.pack("<4sIII", b"PK\x07\x08", 1, big, big)
    central = b"PK\x01\x02" + bytes(42)
    pattern = {
        "headers": headers, "descriptors": descriptor, "both": headers[:43] + descriptor, "central": central,
        "side": headers[:30].replace(b"\x0e\0\0\0", b"\x0f\0\0\0") + b"archive/version",
        "unknown": struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 0, 0x0808, 0, 0, 0, 0, 0, 0, 9, 0) + b"archive/x",
        "deflated": headers.replace(b"\x08\x08\0\0", b"\x08\x08\x08\0") + zlib.compress(bytes(100_000))[2:],
        "ends": b"PK\x05\x06" + bytes(18),
    }[kind]  # fmt: skip
    return (start + pattern * (nbytes // len(pattern)))[:nbytes]


@pytest.mark.parametrize("kind", ["headers", "descriptors", "both", "central", "side", "unknown", "deflated", "ends"])
def test_time_is_linear_whatever_is_in_the_file(tmp_path: Path, kind: str) -> None:
    def seconds(nbytes: int) -> float:
        data = signatures_galore(nbytes, kind)
        start = time.process_time()
        with pytest.raises(TensorIOError):
            tensorio.recover(data, tmp_path / "b.pt")
        with pytest.raises(TensorIOError):
            tensorio.recover(data[500:], tmp_path / "b.pt", raw=True)
        return time.process_time() - start

    small = min(seconds(200_000) for _ in range(2))
    large = seconds(1_600_000)
    assert large < 16 * small + 1.5, (small, large)


def test_many_records_take_no_time(tmp_path: Path) -> None:
    tensors = {f"layers.{i}.weight": np.full(16, i, np.float32) for i in range(10_000)}
    source, target = tmp_path / "a.pt", tmp_path / "b.pt"
    tensorio.save(tensors, source)
    data = source.read_bytes()
    source.write_bytes(data[: Layout(data).directory])
    start = time.process_time()
    assert tensorio.recover(source, target, durable=False).ok
    assert time.process_time() - start < 10
    np.testing.assert_array_equal(tensorio.load(target)["layers.9999.weight"], tensors["layers.9999.weight"])


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Half a gibibyte of tensors, damaged, in a process of its own."""
    if not os.path.exists("/proc/self/status"):
        pytest.skip("needs Linux's /proc")
    code = """if True:
        import sys
        import numpy as np
        import tensorio, tensorio.checkpoint._convert
        def peak():
            with open("/proc/self/status") as f:
                return next(int(line.split()[1]) for line in f if line.startswith("VmHWM")) << 10
        before = peak()
        report = tensorio.recover(sys.argv[1], sys.argv[2], durable=False)
        print(len(report.saved), len(report.lost), peak() - before)
    """
    make = """if True:
        import sys
        import numpy as np
        import tensorio
        block = np.arange(8 << 20, dtype=np.uint32)
        tensorio.save({f"w{i}": block + np.uint32(i) for i in range(16)}, sys.argv[1], durable=False)
    """
    source, target = tmp_path / "a.pt", tmp_path / "b.pt"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}

    def output(program: str) -> str:
        done = subprocess.run([sys.executable, "-c", program, source, target], env=environment, capture_output=True,
                              text=True, timeout=200, check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        output(make)
        with source.open("r+b") as f:
            f.seek(300 << 20)
            f.write(bytes(1 << 20))
            f.truncate(source.stat().st_size - (5 << 20))
        saved, lost, grown = map(int, output(code).split())
    finally:
        source.unlink(missing_ok=True)
        target.unlink(missing_ok=True)
    assert (saved, lost) == (14, 2)
    assert grown < 48 << 20


# ------------------------------------------------------------- trees without some tensors


def test_tensors_are_taken_out_of_any_tree() -> None:
    """In place, each object once, whatever is shared or contains itself."""
    from types import SimpleNamespace

    from tensorio._unpickler import Leaf
    from tensorio.checkpoint._without import without as taken_out
    from tensorio.values import Opaque

    keep, lose = Leaf(0), Leaf(1)
    shared = {"keep": keep, "lose": lose}
    pair = (lose, (keep, lose), shared)
    opaque = Opaque("m", "C", (lose, 1))
    opaque.state, opaque.items = {"a": lose, "b": keep}, [lose, keep]
    space = SimpleNamespace(a=lose, b=keep)
    attributed = OrderedDict(x=lose, y=1)
    attributed.extra = lose  # type: ignore[attr-defined]
    tree: dict[str, Any] = {"shared": shared, "pair": pair, "pairs": [pair, pair], "list": [lose, keep],
                            "opaque": opaque, "space": space, "attributed": attributed, "number": 5,
                            "deque": deque([lose, 1])}  # fmt: skip
    tree["itself"] = tree
    out = taken_out(tree, {1})
    assert out is tree
    assert out["shared"] is shared
    assert shared == {"keep": keep}
    assert out["pair"] == (None, (keep, None), shared)
    assert out["pairs"][0] is out["pairs"][1] is out["pair"]
    assert out["list"] == [None, keep]
    assert (opaque.args, opaque.state, opaque.items) == ((None, 1), {"b": keep}, [None, keep])
    assert vars(space) == {"b": keep}
    assert dict(attributed) == {"y": 1}
    assert vars(attributed) == {}
    assert out["deque"] == deque([None, 1])
    assert out["itself"] is out
    assert taken_out(lose, {1}) is None
    assert taken_out(keep, {1}) is keep
    assert taken_out((keep, lose), {1}) == (keep, None)


def test_deep_trees_are_no_problem() -> None:
    from tensorio._unpickler import Leaf
    from tensorio.checkpoint._without import without as taken_out

    tree: Any = Leaf(1)
    for _ in range(100_000):
        tree = (tree,)
    tree = taken_out([tree], {1})[0]
    while tree is not None:
        (tree,) = tree
    wide: Any = Leaf(1)
    for _ in range(60):
        wide = (wide, wide)
    assert taken_out(wide, {2}) is wide
    assert taken_out(wide, {1}) is not wide


# ------------------------------------------------------------------------- command line


def run(*arguments: object) -> Any:
    pytest.importorskip("click", reason="the extra 'cli' is not installed")
    pytest.importorskip("rich", reason="the extra 'cli' is not installed")
    from click.testing import CliRunner

    from tensorio.cli import cli

    return CliRunner().invoke(cli, ["recover", *map(str, arguments)])


def test_command_line(tmp_path: Path) -> None:
    obj = flat([100, 200, 300])
    data = saved_bytes(obj)
    layout = Layout(data)
    source, target = tmp_path / "a.pt", tmp_path / "b.pt"
    source.write_bytes(data)
    whole = run(source, target)
    assert whole.exit_code == 0
    assert "nothing is wrong with it" in whole.output
    assert "saved 3 tensors (600 B)" in whole.output
    source.write_bytes(data[: layout.directory])
    assert run(source, target).exit_code == 0
    source.write_bytes(data[: layout.payloads["data/2"][0] + 10])
    cut = run(source, target)
    assert cut.exit_code == 1
    assert "LOST: 1 tensor" in cut.output
    assert "10 of 300 bytes are there" in cut.output
    start = layout.payloads["data/2"][0]
    assert f"bytes {start:,} to {start + 300:,}" in cut.output
    report = json.loads(run(source, target, "--json").output)
    assert report["saved"] == ["data/0", "data/1"]
    assert report["lost"]["data/2"]["offset"] == start
    assert torch.equal(torch.load(target)["data/1"], obj["data/1"])


def test_command_line_options(tmp_path: Path) -> None:
    obj = flat([100, 200])
    data = bytearray(saved_bytes(obj))
    layout = Layout(bytes(data))
    source, target = tmp_path / "a.pt", tmp_path / "b.pt"
    data[layout.payloads["data/1"][0]] ^= 1
    source.write_bytes(data)
    assert "LOST" in run(source, target).output
    kept = run(source, target, "--keep-damaged")
    assert kept.exit_code == 1
    assert "saved although damaged: 1 tensor" in kept.output
    data[layout.payloads["data.pkl"][0] + 9] ^= 1
    source.write_bytes(data)
    lost = run(source, target)
    assert lost.exit_code == 1
    assert "--raw saves the 1 whole storages" in lost.output
    assert "bytes of records" in run(source, target, "--raw").output
    assert run(source, source).exit_code == 2
    assert run(source, tmp_path / "b.unknown").exit_code == 2
    assert run(tmp_path / "none.pt", target).exit_code == 2


def test_names_from_the_file_are_printed_harmlessly(tmp_path: Path) -> None:
    obj = {"a\x1b[31m\n[bold]": torch.ones(3), "b": torch.zeros(2)}
    data = saved_bytes(obj)
    source = tmp_path / "a.pt"
    source.write_bytes(data[: Layout(data).headers["data/1"]])
    assert "\x1b" not in run(source, tmp_path / "b.pt").output
    damaged = bytearray(data)
    damaged[Layout(data).payloads["data/0"][0]] ^= 1
    source.write_bytes(damaged)
    out = run(source, tmp_path / "b.pt").output
    assert "\x1b" not in out
    assert "a\\x1b[31m\\x0a[bold]" in out


# ------------------------------------------------------------------------------- legacy


def legacy_bytes(obj: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(obj, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def test_legacy_cut_short(tmp_path: Path) -> None:
    base = torch.arange(2000.0)
    obj = {"a": torch.ones(300), "view": base[10:20], "list": [base, torch.zeros(0), 5], "b": torch.arange(40), "lr": 1}
    data = legacy_bytes(obj)
    report = check(data, obj, tmp_path, set())
    assert report.healthy
    assert report.format == "torch_legacy"
    assert set(report.not_proven) == {"a", "view", "list.0", "b"}
    lost: list[set[str]] = []
    for end in range(len(data) - 1, 0, -41):
        try:
            report = check(data[:end], obj, tmp_path)
        except TensorIOError:
            assert end < len(data) - 300  # in the pickles, or in the first storage
            continue
        assert all(loss.record.isdecimal() for loss in report.lost.values())
        lost.append(set(report.lost))
    assert all(a <= b for a, b in itertools.pairwise(lost))
    assert len({frozenset(names) for names in lost}) >= 3  # one storage after the other, and perhaps none


def test_legacy_storages_behind_a_wrong_number_are_lost(tmp_path: Path) -> None:
    """There is no telling where they begin."""
    obj = {f"t{i}": torch.full((10 + i,), i) for i in range(8)}
    data = bytearray(legacy_bytes(obj))
    places = sorted((data.rindex(struct.pack("<qq", 10 + i, i)), f"t{i}") for i in range(8))
    data[places[5][0]] += 1
    source = tmp_path / "a.pt"
    source.write_bytes(data)
    report = tensorio.recover(source, tmp_path / "b.pt")
    assert set(report.lost) == {name for _, name in places[5:]}
    assert_same(torch.load(tmp_path / "b.pt"), without(obj, set(report.lost)))


# ------------------------------------------------------------ tensors of several parts


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_tensor_of_several_parts_goes_as_one(tmp_path: Path) -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.tensor([5.0, 6.0]), (2, 2))
    quantized = torch.quantize_per_channel(
        torch.randn(2, 3), torch.ones(2).double(), torch.zeros(2).long(), 0, torch.qint8
    )
    obj = {"sparse": sparse, "q": [quantized], "plain": torch.ones(7)}
    data = saved_bytes(obj)
    layout = Layout(data)
    source, target = tmp_path / "a.pt", tmp_path / "b.pt"
    with tensorio.open(data) as whole:
        parts = list(whole)
    assert len(parts) > 4
    for name in layout.storages():
        damaged = bytearray(data)
        damaged[layout.payloads[name][0]] ^= 1
        source.write_bytes(damaged)
        report = tensorio.recover(source, target)
        assert set(report.saved) | set(report.lost) == set(parts)
        gone = {part.split(".")[0] for part in report.lost}
        assert len(gone) == 1
        assert {part for part in parts if part.split(".")[0] in gone} == set(report.lost)
        loaded = torch.load(target)
        assert set(loaded) == set(obj) - (gone - {"q"})
        assert (loaded["q"] == [None]) == (gone == {"q"})
        if gone != {"plain"}:
            assert torch.equal(loaded["plain"], obj["plain"])
        if "sparse" in loaded:
            assert torch.equal(loaded["sparse"].to_dense(), sparse.to_dense())
