"""What is peculiar to legacy torch files: streams of objects, unaligned storages, the rules of the key list."""

from __future__ import annotations

import gzip
import io
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import hexfile
import tensorio
from oldfiles import INFO, MAGIC, VERSION, key_list, legacy_file, old_storage, old_tensor, view
from tensorio import HeaderError, TruncatedError, UnsafePickleError, UnsupportedError
from tensorio.tensors import PARAMETER, REQUIRES_GRAD

RAW = {"0": np.arange(4, dtype="<f4").tobytes()}
GOOD = legacy_file(old_tensor(), RAW)
TWO = {"0": RAW["0"], "1": np.arange(4, 8, dtype="<f4").tobytes()}
PAIR = hexfile.mapping({"a": old_tensor("0"), "b": old_tensor("1")})


def by_torch(obj: Any, protocol: int = 2) -> bytes:
    torch = pytest.importorskip("torch")
    out = io.BytesIO()
    torch.save(obj, out, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    return out.getvalue()


def raw_bytes(tensor: Any) -> bytes:
    """The elements of a torch tensor in C order, whatever its type."""
    torch = pytest.importorskip("torch")
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()  # type: ignore[no-any-return]


# ------------------------------------------------------------------- against torch


def test_objects_equal_what_torch_loads() -> None:
    torch = pytest.importorskip("torch")
    w = torch.randn(6, 4)
    obj = {
        "w": w, "tied": w, "rows": w[2:5], "column": w[:, 1], "transposed": w.t(), "expanded": w[:1].expand(3, 4),
        "empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5), "nested": [{"x": (torch.arange(3), None)}, "text", 7],
        "half": torch.ones(2).half(), "brain": torch.ones(3).bfloat16(), "flags": torch.tensor([True, False]),
        "complex": torch.randn(2, dtype=torch.complex64), "parameter": torch.nn.Parameter(torch.ones(2)),
    }  # fmt: skip
    data = by_torch(obj)
    want = torch.load(io.BytesIO(data), weights_only=True)
    got = tensorio.load(data)
    assert list(got) == list(want)
    for key in set(obj) - {"nested"}:
        assert got[key].shape == tuple(want[key].shape), key
        assert [s // got[key].itemsize for s in got[key].strides] == list(want[key].stride()), key
        assert np.ascontiguousarray(got[key]).tobytes() == raw_bytes(want[key].detach()), key
    assert got["nested"][0]["x"][0].tolist() == [0, 1, 2]
    assert got["nested"][1:] == ["text", 7]
    for key in ("tied", "rows", "column", "transposed", "expanded"):
        assert np.shares_memory(got["w"], got[key]), key
    with tensorio.open(data) as checkpoint:
        assert checkpoint.infos["parameter"].flags == PARAMETER | REQUIRES_GRAD
        extents = [checkpoint.infos[key].chunks[0].extent for key in ("w", "tied", "rows")]
        assert extents[0] == extents[1]
        assert extents[2].offset == extents[0].offset + 2 * 4 * 4


def test_lazy_bits_equal_torch() -> None:
    torch = pytest.importorskip("torch")
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert tensorio.load(by_torch(z.conj())).tolist() == z.conj().tolist()
    assert tensorio.load(by_torch(z.imag)).tolist() == z.imag.tolist()
    assert tensorio.load(by_torch(z.conj().imag)).tolist() == z.conj().imag.tolist()


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "complex32", "float8_e4m3fn", "float8_e5m2",
                                   "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "bits8", "bits16",
                                   "float4_e2m1fn_x2"])  # fmt: skip
def test_types_that_torch_writes_and_no_longer_reads(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    raw = torch.arange(24, dtype=torch.uint8)
    source = raw.view(kind)
    data = by_torch({"x": source, "part": source[1:3]})
    with tensorio.open(data) as checkpoint:
        assert checkpoint.infos["x"].dtype == dtype
        assert checkpoint["x"].tobytes() == raw.numpy().tobytes()
        size = source.element_size()
        assert checkpoint["part"].tobytes() == raw.numpy().tobytes()[size : 3 * size]
    assert tensorio.load(data)["x"].tobytes() == raw.numpy().tobytes()


def test_untyped_storage_is_a_flat_array() -> None:
    torch = pytest.importorskip("torch")
    data = by_torch([torch.arange(3.0).untyped_storage(), torch.arange(4).untyped_storage()])
    first, second = tensorio.load(data)
    assert first.dtype == second.dtype == np.uint8
    assert first.view("<f4").tolist() == [0, 1, 2]
    assert second.view("<i8").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_every_protocol_of_torch_save_reads(protocol: int) -> None:
    torch = pytest.importorskip("torch")
    data = by_torch({"a": torch.arange(3.0), "n": [1, "x", 2.5, True, None]}, protocol)
    assert tensorio.identify(data) == "torch_legacy"
    got = tensorio.load(data)
    assert got["a"].tolist() == [0, 1, 2]
    assert got["n"] == [1, "x", 2.5, True, None]


def test_protocol_0_reads_what_torch_can_write_by_it() -> None:
    data = by_torch({"n": [1, "x", 2.5, True, None]}, 0)
    assert tensorio.load(data) == {"n": [1, "x", 2.5, True, None]}


def test_many_tensors_equal_torch() -> None:
    """From the second of its kind on, a tensor is taken in one step; memo slots and keys in all their spellings."""
    torch = pytest.importorskip("torch")
    obj: dict[str, Any] = {f"{i}": torch.arange(i, dtype=torch.float32).reshape(-1, 1, 1)[:, 0] for i in range(400)}
    obj |= {f"half.{i}": obj[f"{i}"][: i // 2] for i in range(0, 400, 3)}
    obj |= {f"int.{i}": torch.full((2, 1, 2, 1), i) for i in range(100)}
    data = by_torch(obj)
    want, tree = torch.load(io.BytesIO(data), weights_only=True), tensorio.load(data)
    assert list(tree) == list(want)
    with tensorio.open(data) as checkpoint:
        for name, tensor in want.items():
            assert tree[name].shape == checkpoint[name].shape == tuple(tensor.shape)
            assert tree[name].tobytes() == checkpoint[name].tobytes() == raw_bytes(tensor)
        assert checkpoint.infos["half.300"].chunks[0].extent.offset == checkpoint.infos["300"].chunks[0].extent.offset


def test_builder_is_what_torch_writes_and_reads() -> None:
    torch = pytest.importorskip("torch")
    assert by_torch(5).startswith(MAGIC + VERSION + INFO)
    assert torch.load(io.BytesIO(GOOD), weights_only=True).tolist() == [0, 1, 2, 3]
    parts = legacy_file(old_tensor("0", 4, (2,), part=view("9", 1, 2)), RAW)
    assert torch.load(io.BytesIO(parts), weights_only=True).tolist() == [1, 2]


# -------------------------------------------------------------------------- layout


def test_arrays_are_views_wherever_their_bytes_are(tmp_path: Path) -> None:
    """Zero copy at every remainder of 8; NumPy is told the truth about it, and computes the same."""
    values = np.arange(6, dtype="<f8")
    seen = set()
    for pad in range(8):
        path = tmp_path / f"{pad}.pt"
        body = hexfile.mapping({"n" * pad: old_tensor("0", 6, (2, 3), cls="DoubleStorage")})
        path.write_bytes(legacy_file(body, {"0": values.tobytes()}, itemsize=8))
        with tensorio.open(path) as checkpoint:
            array = checkpoint["n" * pad]
            offset = checkpoint.infos["n" * pad].chunks[0].extent.offset
            address = array.__array_interface__["data"][0]
            assert path.read_bytes()[offset : offset + 48] == values.tobytes()
            assert address % 4096 == offset % 4096  # in the mapping
            assert array.flags.aligned == (address % 8 == 0)
            assert not array.flags.owndata
            assert (array * 2).tolist() == [[0, 2, 4], [6, 8, 10]]
            assert (array.T @ array).tolist() == (values.reshape(2, 3).T @ values.reshape(2, 3)).tolist()
            seen.add(array.flags.aligned)
    assert seen == {True, False}


def test_parts_of_a_root_share_its_bytes() -> None:
    tree = tensorio.load(cases.CASES["torch_legacy_views"]().data)
    assert np.shares_memory(tree["a"], tree["b"])
    assert not np.shares_memory(tree["b"], tree["c"])


@pytest.mark.parametrize(("first", "count"), [(0, 4), (4, 0), (1, 3)])
def test_part_of_a_storage_bounds_its_tensors(first: int, count: int) -> None:
    if count:
        good = legacy_file(old_tensor("0", 4, (count,), part=view("9", first, count)), RAW)
        assert tensorio.load(good).tolist() == list(range(first, first + count))
    bad = legacy_file(old_tensor("0", 4, (count + 1,), part=view("9", first, count)), RAW)
    with pytest.raises(HeaderError, match="leaves its storage"):
        tensorio.load(bad)


@pytest.mark.parametrize("part", [view("9", 5, 0), view("9", 2, 3), view("9", -1, 2), view("9", 0, -1), b"K\1", b"(t",
                                  view("9", 1 << 62, 1 << 62)])  # fmt: skip
def test_part_that_leaves_its_storage_is_refused(part: bytes) -> None:
    with pytest.raises(HeaderError):
        tensorio.load(legacy_file(old_tensor(part=part), RAW))


@pytest.mark.parametrize("location", ["cuda:0", "cuda:7", "mps", "privateuseone", "meta", ""])
def test_location_is_only_a_tag(location: str) -> None:
    assert tensorio.load(legacy_file(old_tensor(location=location), RAW)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("flag", [b"\x88", b"\x89"])
def test_byte_order_is_little_whatever_the_flag_says(flag: bytes) -> None:
    info = INFO.replace(b"q\2\x88", b"q\2" + flag)
    assert tensorio.load(legacy_file(old_tensor(), RAW, info=info)).tolist() == [0, 1, 2, 3]


def test_big_endian_machine_swaps_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on such a machine: what this one then shows is the elements reversed."""
    from tensorio.formats import torch_legacy

    monkeypatch.setattr(torch_legacy, "BIG_ENDIAN_HOST", True)
    data = cases.CASES["torch_legacy_by_hand"]().data
    want = {name: a.byteswap() for name, a in cases.CASES["torch_legacy_by_hand"]().tensors.items()}
    for writable in (False, True):
        tree = tensorio.load(data, writable=writable)
        with tensorio.open(data, writable=writable) as checkpoint:
            for name, array in want.items():
                assert checkpoint[name].tobytes() == tree[name].tobytes() == array.tobytes()
                assert checkpoint[name].flags.writeable == tree[name].flags.writeable == writable
            assert checkpoint.verify().ok


# --------------------------------------------------------------- several in a stream


def streams(tmp_path: Path, data: bytes) -> list[Any]:
    path = tmp_path / "stream"
    path.write_bytes(data)
    packed = tmp_path / "packed.gz"
    packed.write_bytes(gzip.compress(data))
    return [open(path, "rb"), open(path, "rb", buffering=0), io.BytesIO(data), open(path, "r+b"), gzip.open(packed)]


@pytest.mark.parametrize("options", [{}, {"mmap": False}, {"verify": True}, {"writable": True}], ids=str)
def test_objects_of_one_stream_load_in_turn_as_with_torch(tmp_path: Path, options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    objects = [{"a": torch.arange(3.0)}, torch.ones(5, dtype=torch.int64), [torch.zeros(0), "x"], {}]
    data = b"HEAD" + b"".join(by_torch(obj) for obj in objects) + b"TAIL"
    for ours, theirs in zip(streams(tmp_path, data), streams(tmp_path, data), strict=True):
        with ours, theirs:
            ours.seek(4)
            theirs.seek(4)
            for _ in objects:
                got, want = tensorio.load(ours, **options), torch.load(theirs, weights_only=True)
                assert ours.tell() == theirs.tell()
                assert str(cases.as_torch(writable(got))) == str(want)
            assert ours.read() == b"TAIL"


def writable(tree: Any) -> Any:
    """The same with arrays that torch does not warn of."""
    if isinstance(tree, np.ndarray):
        return tree.copy()
    if isinstance(tree, dict):
        return {k: writable(v) for k, v in tree.items()}
    return [writable(v) for v in tree] if isinstance(tree, list) else tree


def test_open_and_names_leave_the_position_behind_the_object(tmp_path: Path) -> None:
    two = legacy_file(PAIR, TWO)
    for f in streams(tmp_path, two + GOOD):
        with f:
            with tensorio.open(f) as checkpoint:
                assert checkpoint["b"].tolist() == [4, 5, 6, 7]
                assert f.tell() == len(two)
            assert tensorio.load(f).tolist() == [0, 1, 2, 3]
            f.seek(0)
            assert list(tensorio.load(f, names=["b"])) == ["b"]
            assert tensorio.load(f).tolist() == [0, 1, 2, 3]
            with pytest.raises(tensorio.UnknownFormatError, match="empty"):
                tensorio.load(f)


def test_path_and_bytes_give_the_first_object(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(GOOD + legacy_file(PAIR, TWO))
    assert tensorio.load(path).tolist() == tensorio.load(path.read_bytes()).tolist() == [0, 1, 2, 3]


def test_bytes_behind_the_last_storage_are_harmless() -> None:
    assert tensorio.load(legacy_file(old_tensor(), RAW, tail=b"anything")).tolist() == [0, 1, 2, 3]


# ------------------------------------------------------------------- the key list

WRONG_KEYS = {
    "none_listed": (key_list([]), "2 storages that the object mentions are not in it"),
    "one_missing": (key_list(["0"]), "1 storages that the object mentions are not in it, such as '1'"),
    "unknown": (key_list(["0", "1", "2"]), "lists '2', which the object does not mention"),
    "twice": (key_list(["0", "1", "0"]), "lists storage '0' twice"),
    "int": (hexfile.pickled(b"K\5"), "expected a list, found int"),
    "dict": (hexfile.pickled(b"}"), "expected a list, found dict"),
    "tuple": (hexfile.pickled(b"(" + hexfile.text("0") + hexfile.text("1") + b"t"), "expected a list, found tuple"),
    "of_ints": (hexfile.pickled(b"](K\0K\1e"), "lists '0', which"),
    "of_lists": (hexfile.pickled(b"](]]e"), "which the object does not mention"),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "words"), WRONG_KEYS.values(), ids=WRONG_KEYS.keys())
def test_key_list_must_name_every_storage_once(keys: bytes, words: str) -> None:
    """What is missing from it would have no bytes."""
    for read in (tensorio.open, tensorio.load):
        with pytest.raises(HeaderError, match=re.escape(words)) as caught:
            read(legacy_file(PAIR, TWO, keys=keys))
        assert caught.value.record == "list of storage keys"
        assert caught.value.offset == len(MAGIC + VERSION + INFO + hexfile.pickled(PAIR))


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (3, "storage of 3"),
        (5, "storage of 5"),
        (0, "storage of 0"),
        (-4, "found -4"),
        (1 << 62, f"storage of {1 << 62}"),
    ],
)
def test_number_of_elements_must_be_what_the_object_says(count: int, words: str) -> None:
    with pytest.raises(HeaderError, match=words) as caught:
        tensorio.load(legacy_file(PAIR, TWO, counts={"1": count}))
    assert caught.value.record == "1"
    assert caught.value.offset == len(legacy_file(PAIR, TWO)) - 24


def test_storage_mentioned_as_two_types_is_refused() -> None:
    body = hexfile.mapping({"a": old_tensor("0"), "b": old_tensor("0", 2, (2,), cls="DoubleStorage")})
    with pytest.raises(HeaderError, match="mentioned twice"):
        tensorio.load(legacy_file(body, RAW))


@pytest.mark.parametrize("numel", [-1, 1 << 61, 1 << 62, 1 << 63, 1 << 70])
def test_number_of_elements_beyond_reason_is_refused(numel: int) -> None:
    with pytest.raises(tensorio.FormatError):
        tensorio.load(legacy_file(old_tensor("0", numel), RAW))


# ----------------------------------------------------------------------- truncation


def test_truncated_storage_says_what_is_there_and_what_is_missing() -> None:
    whole = legacy_file(PAIR, TWO)
    with pytest.raises(TruncatedError) as caught:
        tensorio.load(whole[:-30])  # 6 bytes of the first storage, and all behind it
    message = str(caught.value)
    assert "expected a storage of 16 bytes, found 10" in message
    assert f"30 of {len(whole)} bytes are missing in all" in message
    assert (caught.value.record, caught.value.offset) == ("0", len(whole) - 40)
    with pytest.raises(TruncatedError, match="found 3 bytes"):
        tensorio.load(whole[:-21])


@pytest.mark.parametrize("numel", [1 << 33, 1 << 50])
def test_storage_far_beyond_the_end_costs_nothing(numel: int) -> None:
    with pytest.raises(TruncatedError, match=str(4 * numel)):
        tensorio.load(legacy_file(old_tensor("0", numel), {"0": b""}, counts={"0": numel}))


# --------------------------------------------------------------------------- header


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ({"version": hexfile.pickled(hexfile.number(1002))}, UnsupportedError),
        ({"version": hexfile.pickled(hexfile.text("1001"))}, UnsupportedError),
        ({"version": hexfile.pickled(b"G" + struct.pack(">d", 1001.0))}, UnsupportedError),
        ({"version": b""}, UnsupportedError),
        ({"info": hexfile.pickled(b"K\1")}, HeaderError),
        ({"info": hexfile.pickled(b"]")}, HeaderError),
        ({"info": hexfile.pickled(old_storage())}, HeaderError),
        ({"info": hexfile.pickled(hexfile.name("os", "system") + hexfile.text("x") + b"\x85R")}, UnsafePickleError),
        ({"version": hexfile.pickled(hexfile.name("os", "system"))}, UnsafePickleError),
        ({"keys": hexfile.pickled(b"](" + hexfile.name("os", "system") + b"e")}, UnsafePickleError),
        ({"keys": hexfile.pickled(b"]" + old_storage() + b"a")}, HeaderError),
    ],
    ids=lambda v: str(v)[:40],
)
@pytest.mark.parametrize("unknown", ["error", "opaque"])
def test_header_of_anything_else_is_refused(parts: dict[str, bytes], error: type, unknown: str) -> None:
    """Names have no business there, whatever `unknown` says of those in the object."""
    for read in (tensorio.open, tensorio.load):
        with pytest.raises(error) as caught:
            read(legacy_file(old_tensor(), RAW, **parts), unknown=unknown)  # type: ignore[arg-type]
        assert caught.value.record in ("protocol version", "system info", "list of storage keys")


def test_other_file_asked_for_by_name_is_refused() -> None:
    for data in (b"", b"PK\3\4" + bytes(100), hexfile.pickled(b"}"), MAGIC[:10]):
        with pytest.raises(HeaderError, match="magic number"):
            tensorio.load(data, format="torch_legacy")


def test_magic_number_off_by_one_is_no_torch_file() -> None:
    wrong = GOOD.replace(MAGIC[4:6], bytes([MAGIC[4] + 1, MAGIC[5]]), 1)
    assert wrong != GOOD
    with pytest.raises(tensorio.UnknownFormatError):
        tensorio.load(wrong)


def test_offset_of_an_error_counts_from_the_start_of_the_file() -> None:
    body = hexfile.mapping({"a": old_tensor(size=(5,))})
    with pytest.raises(HeaderError) as caught:
        tensorio.load(legacy_file(body, RAW))
    start = len(MAGIC + VERSION + INFO)
    assert caught.value.record == "object"
    assert caught.value.offset == start + 2 + len(body) - 2  # the REDUCE


# ------------------------------------------------------------------- older releases


def test_python_2_strings_and_hooks_of_none_read() -> None:
    def short(value: str) -> bytes:
        return b"U" + bytes([len(value)]) + value.encode()

    pid = b"(" + short("storage") + hexfile.name("torch", "FloatStorage") + short("0") + short("cpu")
    pid += b"\x8a\1\4" + b"NtQ"  # a long, and no view
    tensor = hexfile.name("torch._utils", "_rebuild_tensor_v2") + b"(" + pid + b"K\0(\x8a\1\4t(\x8a\1\1t\x89NtR"
    body = b"}" + short("w") + tensor + b"s"
    keys = hexfile.pickled(b"]" + short("0") + b"a")
    for encoding in (None, "ascii", "latin1"):
        tree = tensorio.load(legacy_file(body, RAW, keys=keys), encoding=encoding)
        assert tree["w"].tolist() == [0, 1, 2, 3]
    assert tensorio.load(legacy_file(body, RAW, keys=keys), encoding="bytes")[b"w"].tolist() == [0, 1, 2, 3]


def test_rebuild_of_the_time_before_0_4_reads() -> None:
    body = hexfile.name("torch._utils", "_rebuild_tensor") + b"(" + old_storage() + b"K\1(K\2t(K\1ttR"
    assert tensorio.load(legacy_file(body, RAW)).tolist() == [1, 2]


def test_id_without_a_view_reads_and_is_no_different() -> None:
    """Five parts, as in a zip archive; mixed with six."""
    body = hexfile.mapping({"a": hexfile.tensor(), "b": old_tensor()})
    tree = tensorio.load(legacy_file(body, RAW))
    assert tree["a"].tolist() == tree["b"].tolist() == [0, 1, 2, 3]
    assert np.shares_memory(tree["a"], tree["b"])


def test_class_with_its_source_opens_as_inert_data() -> None:
    """A whole module, as torch saved it up to 0.3: its persistent id tells the class, its file and its source."""
    pid = b"(" + hexfile.text("module") + hexfile.name("models", "Net") + hexfile.text("/home/x/models.py")
    pid += hexfile.text("class Net:\n    raise SystemExit\n") + b"tQ"
    body = pid + b")\x81}" + hexfile.text("weight") + old_tensor() + b"sb"
    with pytest.raises(UnsafePickleError) as caught:
        tensorio.load(legacy_file(body, RAW))
    assert list(caught.value.globals) == ["models.Net"]
    tree = tensorio.load(legacy_file(body, RAW), unknown="opaque")
    assert (tree.module, tree.name) == ("models", "Net")
    assert tree.state["weight"].tolist() == [0, 1, 2, 3]


def test_unknown_names_are_listed_all_at_once() -> None:
    body = hexfile.mapping(
        {"a": hexfile.name("m", "A") + b")R", "b": hexfile.name("m", "B") + b")R", "c": old_tensor()}
    )
    with pytest.raises(UnsafePickleError) as caught:
        tensorio.load(legacy_file(body, RAW))
    assert list(caught.value.globals) == ["m.A", "m.B"]


# ------------------------------------------------------------------------- the rest


def test_strict_accepts_what_torch_writes() -> None:
    torch = pytest.importorskip("torch")
    for obj in (5, {}, torch.arange(5), {f"{i}": torch.ones(i) for i in range(300)}):
        data = by_torch(obj)
        tensorio.load(data, strict=True)
        with tensorio.open(data, strict=True) as checkpoint:
            assert checkpoint.format == "torch_legacy"


LOOSE = {
    "bytes_behind": legacy_file(old_tensor(), RAW, tail=b"\n"),
    "other_sizes": legacy_file(old_tensor(), RAW, info=INFO.replace(b"q\7K\4", b"q\7K\x08")),
    "other_protocol": legacy_file(old_tensor(), RAW, protocol=3),
    "other_protocol_of_the_header": legacy_file(old_tensor(), RAW, magic=MAGIC.replace(b"\x80\2", b"\x80\3")),
    "other_order": legacy_file(PAIR, dict(reversed(TWO.items()))),
}  # fmt: skip


@pytest.mark.parametrize("data", LOOSE.values(), ids=LOOSE.keys())
def test_strict_refuses_what_torch_would_not_write(data: bytes) -> None:
    tensorio.load(data)
    for read in (tensorio.load, tensorio.open):
        with pytest.raises(HeaderError, match="strict"):
            read(data, strict=True)


def test_verify_says_that_there_is_nothing_to_check() -> None:
    report = tensorio.verify(legacy_file(PAIR, TWO))
    assert report.ok
    assert (report.records, report.checked, report.unchecked) == (2, 0, 32)


def test_converts_to_safetensors_and_to_zip(tmp_path: Path) -> None:
    for name in cases.cases_of("torch_legacy"):
        case = cases.CASES[name]()
        for suffix, options in ((".safetensors", {}), (".pt", {"strict": True})):
            tensorio.convert(case.data, tmp_path / f"out{suffix}")
            with tensorio.open(tmp_path / f"out{suffix}", **options) as checkpoint:
                assert set(checkpoint) == set(case.tensors)
                for key, want in case.tensors.items():
                    assert np.array_equal(checkpoint[key], want)


def test_tied_tensors_stay_tied_when_converted(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    w = torch.arange(6.0)
    tensorio.convert(by_torch({"a": w, "b": w[2:4]}), tmp_path / "out.pt")
    got = torch.load(tmp_path / "out.pt", weights_only=True)
    assert got["a"].untyped_storage().data_ptr() == got["b"].untyped_storage().data_ptr()
    assert got["b"].tolist() == [2, 3]


def test_nothing_writes_it(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="read only"):
        tensorio.save({"a": np.ones(3)}, tmp_path / "x.pth", format="torch_legacy")
    assert not list(tmp_path.iterdir())


@pytest.mark.plain_build
def test_open_touches_no_storage(tmp_path: Path) -> None:
    """A file with a hole of 2 GiB for a payload opens and loads at once, in little memory."""
    numel = 1 << 29
    path = tmp_path / "big.pt"
    head = legacy_file(old_tensor("0", numel, (numel,)), {"0": b""}, counts={"0": numel})
    with open(path, "wb") as f:
        f.write(head)
        f.truncate(len(head) + 4 * numel)
    code = "import sys, tensorio; t = tensorio.load(sys.argv[1]); c = tensorio.open(sys.argv[1]); "
    code += "print(t.nbytes, c[''][-1], next(int(x.split()[1]) < 200_000 for x in open('/proc/self/status') "
    code += "if x.startswith('VmHWM')))"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60,
                          env={"PYTHONPATH": ":".join(p for p in sys.path if p)})  # fmt: skip
    assert done.stdout == f"{4 * numel} 0.0 True\n", done.stderr


@pytest.mark.parametrize(
    ("bomb", "words"),
    [
        (b"N" + b"r\xff\xff\xff\x7f", "memo slot 2147483647"),
        (b"](" + hexfile.name("collections", "OrderedDict") + b"q\0" + b"h\0)R" * 700_000 + b"e", "32 times"),
    ],
    ids=["memo", "dicts"],
)
def test_object_costs_no_more_than_its_own_bytes_allow(bomb: bytes, words: str, tmp_path: Path, in_child: Any) -> None:
    """In a file of 8 GiB, most of it a hole: nobody knows where the pickle ends."""
    path = tmp_path / "big.pt"
    head = MAGIC + VERSION + INFO + hexfile.proto() + bomb
    with open(path, "wb") as f:
        f.write(head)
        f.truncate(8 << 30)
    error = in_child(refusal, path, wall=20, memory=(64 << 20) + 32 * len(bomb) + (9 << 30))
    assert error[0] == "LimitError"
    assert words in error[1]
    assert error[2] < (96 << 20) + 32 * len(bomb)


def refusal(path: Path) -> tuple[str, str, int]:
    """Class and text of the error, and by how much memory grew."""
    before = high_water()
    try:
        tensorio.load(path)
    except tensorio.TensorIOError as error:
        return type(error).__name__, str(error), high_water() - before
    return "nothing", "", 0


def high_water() -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))
