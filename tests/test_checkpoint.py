"""What a Checkpoint is to its user: a mapping, a context manager, something to hand to other processes."""

from __future__ import annotations

import io
import itertools
import multiprocessing
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import hexfile
import tensorio
from hexfile import Rec, pickled, tensor, torch_file, torch_records, zip_file
from tensorio.tensors import CONJ, NEG

RAW = {"0": np.arange(4, dtype="f4").tobytes()}


def opened(body: bytes, storages: dict[str, bytes] | None = None, **options: Any) -> tensorio.Checkpoint:
    return tensorio.open(torch_file(pickled(body), RAW if storages is None else storages), **options)


# -------------------------------------------------------------------- a mapping


@pytest.fixture
def checkpoint() -> tensorio.Checkpoint:
    return tensorio.open(cases.CASES["safetensors_small"]().data)


def test_checkpoint_is_a_mapping(checkpoint: tensorio.Checkpoint) -> None:
    want = cases.CASES["safetensors_small"]().tensors
    assert isinstance(checkpoint, Mapping)
    assert list(checkpoint) == list(checkpoint.keys()) == list(want)
    assert len(checkpoint) == len(want)
    assert "b" in checkpoint
    assert "zzz" not in checkpoint
    assert [k for k, _ in checkpoint.items()] == list(want)
    assert checkpoint.get("zzz") is None
    assert checkpoint.get("b") is not None
    with pytest.raises(TypeError):
        checkpoint["b"] = 1  # type: ignore[index]


def test_checkpoint_missing_name_is_a_key_error_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(cases.CASES["safetensors_small"]().data)
    with tensorio.open(path) as checkpoint, pytest.raises(KeyError) as caught:
        checkpoint["a.weights"]
    assert "a.weight" in str(caught.value)
    assert str(path) in str(caught.value)


def test_checkpoint_tells_about_itself(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(cases.CASES["safetensors_small"]().data)
    with tensorio.open(path) as checkpoint:
        assert (checkpoint.format, checkpoint.path, checkpoint.files) == ("safetensors", str(path), (str(path),))
        assert checkpoint.metadata == {"made": "here"}
        checkpoint.metadata["x"] = "y"
        assert checkpoint.metadata == {"made": "here"}  # a copy
        assert str(path) in repr(checkpoint)
        assert "6 tensors" in repr(checkpoint)
    with tensorio.open(io.BytesIO(path.read_bytes())) as checkpoint:
        assert (checkpoint.path, checkpoint.files) == (None, ())


def test_checkpoint_tree_of_a_flat_format_is_a_dict(checkpoint: tensorio.Checkpoint) -> None:
    tree = checkpoint.tree()
    assert type(tree) is dict
    assert list(tree) == list(checkpoint)
    assert tree is not checkpoint.tree()


def test_checkpoint_context_closes(checkpoint: tensorio.Checkpoint) -> None:
    with checkpoint as same:
        assert same is checkpoint
    with pytest.raises(ValueError, match="closed"):
        checkpoint["b"]
    with pytest.raises(ValueError, match="closed"):
        checkpoint.tree()


# ------------------------------------------------------------------- names


def test_names_of_a_nested_object_lead_to_its_keys() -> None:
    body = b"}(" + hexfile.text("a.b") + tensor() + hexfile.text("a") + b"}" + hexfile.text("b") + tensor() + b"s"
    body += hexfile.number(3) + b"]" + tensor() + b"au"
    with opened(body) as checkpoint:
        assert dict(checkpoint.paths) == {"a.b": ("a.b",), "a.b#2": ("a", "b"), "3.0": (3, 0)}
        for name, path in checkpoint.paths.items():
            node = checkpoint.tree()
            for key in path:
                node = node[key]
            assert np.array_equal(node, checkpoint[name])


def test_name_of_a_lone_tensor_is_empty() -> None:
    with opened(tensor()) as checkpoint:
        assert list(checkpoint) == [""]
        assert checkpoint[""].tolist() == [0, 1, 2, 3]
        assert checkpoint.tree().tolist() == [0, 1, 2, 3]


def test_selected_names_keep_the_shape_of_the_tree() -> None:
    body = b"}(" + hexfile.text("a") + b"](" + tensor() + b"K\x05" + tensor(offset=1, size=(2,)) + b"e"
    data = torch_file(pickled(body + hexfile.text("b") + tensor() + b"u"), RAW)
    tree = tensorio.load(data, names=["a.2"])
    assert list(tree) == ["a"]
    assert [x.tolist() for x in tree["a"]] == [[1, 2]]
    assert list(tensorio.load(data, names=["b", "a.0"])) == ["a", "b"]
    with pytest.raises(tensorio.TensorNotFoundError):
        tensorio.load(data, names=["a"])


def test_names_may_come_from_any_iterable_and_none_at_all() -> None:
    data = cases.CASES["safetensors_small"]().data
    assert list(tensorio.load(data, names=(n for n in ["b"]))) == ["b"]
    assert tensorio.load(data, names=[]) == {}


# ------------------------------------------------------------------- tied tensors


def test_tied_tensors_are_two_names_of_one_extent() -> None:
    body = (
        b"}("
        + hexfile.text("a")
        + tensor()
        + b"q\x00"
        + hexfile.text("b")
        + b"h\x00"
        + hexfile.text("c")
        + tensor(size=(2,))
        + b"u"
    )
    data = torch_file(pickled(body), RAW)
    with tensorio.open(data, writable=True) as checkpoint:
        infos = checkpoint.infos
        assert infos["a"].chunks == infos["b"].chunks
        assert infos["c"].chunks[0].extent.offset == infos["a"].chunks[0].extent.offset
        checkpoint["a"][0] = 9
        assert checkpoint["b"][0] == checkpoint["c"][0] == 9
        tree = checkpoint.tree()
        assert tree["a"] is tree["b"]
        assert tree["c"][0] == 9
        assert checkpoint.nbytes == 16 + 16 + 8


# ------------------------------------------------------------------ lazy bits


@pytest.mark.parametrize(
    ("bits", "want"),
    [
        ({"conj"}, [1 - 2j, 3 + 4j]),
        ({"neg"}, [-1 - 2j, -3 + 4j]),
        ({"conj", "neg"}, [-1 + 2j, -3 - 4j]),
        (set(), [1 + 2j, 3 - 4j]),
    ],
    ids=lambda value: "+".join(sorted(value)) or "none" if isinstance(value, set) else "",
)
def test_lazy_bits_show_as_the_values(bits: set[str], want: list[complex]) -> None:
    raw = {"0": np.array([1 + 2j, 3 - 4j], "c8").tobytes()}
    meta = b"}(" + b"".join(hexfile.text(b) + (b"\x88" if b in bits else b"\x89") for b in ("conj", "neg")) + b"u"
    data = torch_file(pickled(tensor("0", 2, (2,), cls="ComplexFloatStorage", metadata=meta)), raw)
    with tensorio.open(data) as checkpoint:
        assert checkpoint[""].tolist() == want
        assert checkpoint.tree().tolist() == want
        assert checkpoint.read("", 1) == want[1]
        assert checkpoint.infos[""].flags == (CONJ if "conj" in bits else 0) | (NEG if "neg" in bits else 0)
    assert tensorio.load(data).tolist() == want


# ---------------------------------------------------------------- byte orders


@pytest.mark.parametrize("options", [{}, {"mmap": False}, {"writable": True}], ids=str)
@pytest.mark.parametrize("cls", cases.TORCH_STORAGES)
def test_big_endian_file_of_every_storage_class(cls: str, options: dict[str, Any]) -> None:
    want = cases.array(cases.TORCH_STORAGES[cls], (2, 3))
    half = want.itemsize // (2 if want.dtype.kind == "c" else 1)
    foreign = np.frombuffer(want.tobytes(), f"u{half}").byteswap().tobytes()
    data = torch_file(pickled(tensor("0", 6, (2, 3), cls=cls)), {"0": foreign}, byteorder="big")
    got = tensorio.load(data, **options)
    assert got.dtype == want.dtype
    assert got.tobytes() == want.tobytes()
    with tensorio.open(data, **options) as checkpoint:
        assert checkpoint[""].tobytes() == want.tobytes()
        assert checkpoint[""].flags.writeable == bool(options.get("writable"))


@pytest.mark.parametrize("dtype", [*cases.DTYPES, "complex32", "bits16", "bits8"])
def test_big_endian_file_of_every_dtype_over_an_untyped_storage(dtype: str) -> None:
    """The values that were saved on the big-endian machine are what is meant, whatever the storage's class."""
    from tensorio.dtypes import BY_NAME

    row = BY_NAME[dtype]
    raw = bytes(range(1, 4 * row.itemsize + 1))
    swapped = np.frombuffer(raw, f"u{row.swap}").byteswap().tobytes()
    body = hexfile.name("torch._utils", "_rebuild_tensor_v3") + b"("
    body += hexfile.storage("UntypedStorage", "0", len(raw), module="torch.storage") + b"K\x00K\x04\x85K\x01\x85\x89"
    body += hexfile.HOOKS + hexfile.name("torch", dtype) + b"tR"
    data = torch_file(pickled(body), {"0": swapped}, byteorder="big")
    assert tensorio.load(data).tobytes() == raw
    with tensorio.open(data) as checkpoint:
        assert checkpoint[""].tobytes() == raw


def test_big_endian_file_by_torch_itself_reads_like_torch() -> None:
    torch = pytest.importorskip("torch")
    want = {"a": cases.array("float32", (3, 4)), "b": cases.array("int64", (2,))}
    foreign = {k: np.frombuffer(a.byteswap().tobytes(), a.dtype).reshape(a.shape) for k, a in want.items()}
    data = cases.plain_torch_bytes(foreign, byteorder="big")
    theirs = torch.load(io.BytesIO(data), weights_only=True)
    for name, array in tensorio.load(data).items():
        assert array.tobytes() == theirs[name].numpy().tobytes() == want[name].tobytes()


@pytest.mark.parametrize("byteorder", ["little", None])
def test_file_without_byteorder_is_little(byteorder: str | None) -> None:
    assert tensorio.load(torch_file(pickled(tensor()), RAW, byteorder=byteorder)).tolist() == [0, 1, 2, 3]


# ------------------------------------------------------- what real writers wrote


def test_deflated_records_read_like_stored_ones() -> None:
    want = cases.array("float32", (50, 40))
    for packed in itertools.product((0, 8), repeat=2):
        records = torch_records(pickled(tensor("0", 2000, (50, 40))), {"0": want.tobytes()})
        records[0].method, records[4].method = packed
        data = zip_file(records)
        modes: list[dict[str, Any]] = [{}, {"writable": True}, {"verify": True}]
        for options in modes:
            assert tensorio.load(data, **options).tobytes() == want.tobytes()
            with tensorio.open(data, **options) as checkpoint:
                assert checkpoint[""].tobytes() == want.tobytes()
        assert tensorio.verify(data).ok


def test_deflated_record_that_is_damaged_is_found_when_used() -> None:
    records = torch_records(pickled(tensor("0", 2000, (2000,))), {"0": cases.array("float32", (2000,)).tobytes()})
    records[4].method = 8
    data = bytearray(zip_file(records))
    at = data.index(b"archive/data/0") + 3000
    data[at] ^= 0xFF
    with tensorio.open(bytes(data)) as checkpoint, pytest.raises(tensorio.FormatError) as caught:
        checkpoint[""]
    assert caught.value.record in ("archive/data/0", "")
    with pytest.raises(tensorio.FormatError):
        tensorio.load(bytes(data))
    assert not tensorio.verify(bytes(data)).ok


def test_file_repacked_by_a_zip_tool_reads() -> None:
    case = cases.CASES["torch_zip_small"]()
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(case.data)) as source, zipfile.ZipFile(out, "w", method) as target:
            for name in sorted(source.namelist()):
                target.writestr(name, source.read(name))
            target.comment = b"repacked"
        with tensorio.open(out.getvalue()) as checkpoint:
            assert {k: v.tobytes() for k, v in checkpoint.items()} == {k: v.tobytes() for k, v in case.tensors.items()}


def test_checksums_of_zero_mean_not_computed() -> None:
    torch = pytest.importorskip("torch")
    out = io.BytesIO()
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(5000.0)}, out)
    finally:
        torch.serialization.set_crc32_options(before)
    data = out.getvalue()
    assert tensorio.load(data, verify=True)["a"][-1] == 4999
    report = tensorio.verify(data)
    assert report.ok
    assert report.checked == 0
    assert report.unchecked > 20_000
    assert "no checksum" in str(report)


@pytest.mark.parametrize("keys", [["94279043900432", "94279043900448"], ["10", "9"], ["7", "3"], ["a", "b/c"],
                                  ["18446744073709551616", "0"]], ids=str)  # fmt: skip
def test_storage_keys_may_be_anything(keys: list[str]) -> None:
    """Pointers (torch 1.6), numbers in any order, words."""
    raw = {key: np.full(4, i, "f4").tobytes() for i, key in enumerate(keys)}
    body = b"(" + b"".join(tensor(key) for key in keys) + b"t"
    assert [a[0] for a in tensorio.load(torch_file(pickled(body), raw))] == [0, 1]


def test_records_sorted_as_text_read() -> None:
    """0, 1, 10, 11, 2, ...: as torch 1.9 to 2.6 ordered them."""
    keys = sorted(map(str, range(25)))
    body = b"(" + b"".join(tensor(str(i)) for i in range(25)) + b"t"
    data = torch_file(pickled(body), {k: np.full(4, int(k), "f4").tobytes() for k in keys}, modern=False)
    assert [a[0] for a in tensorio.load(data)] == list(range(25))


def test_records_that_nobody_asks_for_are_harmless() -> None:
    records = [
        *torch_records(pickled(tensor()), RAW),
        Rec("archive/data/5", b"?"),
        Rec("archive/extra/notes.txt", b"hello"),
    ]
    assert tensorio.load(zip_file(records)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("prefix", ["a", "x.tar", "sp ace", "\u00e4", "archive"])
def test_prefix_is_any_folder(prefix: str) -> None:
    assert tensorio.load(torch_file(pickled(tensor()), RAW, prefix=prefix)).tolist() == [0, 1, 2, 3]


# ------------------------------------------------------------------ reading


def test_read_takes_what_numpy_takes() -> None:
    want = cases.array("float32", (4, 5, 6))
    with tensorio.open(cases.safetensors_bytes({"x": want})) as checkpoint:
        for index in (
            0,
            -1,
            slice(1, 3),
            (slice(None), 2),
            (..., 3),
            (1, slice(None, None, 2), [0, 5]),
            np.array([3, 0]),
            want > 0,
            (),
            None,
        ):
            got = checkpoint.read("x", index)
            assert got.tobytes() == want[index].tobytes()
            assert got.shape == want[index].shape
            assert got.base is None or got.flags.owndata
            got = np.asarray(got)
            out = np.zeros_like(want[index])
            assert checkpoint.read("x", index, out=out) is out
            assert out.tobytes() == want[index].tobytes()
        with pytest.raises(IndexError):
            checkpoint.read("x", 9)


@pytest.mark.parametrize("out", [np.zeros(3, "f4"), np.zeros((4, 5), "f8"), np.zeros((5, 4), "f4")], ids=str)
def test_read_into_what_does_not_fit_is_refused(out: Any) -> None:
    with tensorio.open(cases.safetensors_bytes({"x": cases.array("float32", (4, 5))})) as checkpoint:
        before = out.copy()
        with pytest.raises(tensorio.TensorMismatchError, match="does not fit") as caught:
            checkpoint.read("x", out=out)
        assert caught.value.record == "x"
        assert np.array_equal(out, before)


def test_read_out_may_be_strided() -> None:
    want = cases.array("float32", (4, 5))
    with tensorio.open(cases.safetensors_bytes({"x": want})) as checkpoint:
        out = np.zeros((5, 8), "f4").T[::2]
        checkpoint.read("x", out=out)
        assert np.array_equal(out, want)


def test_prefetch_of_a_missing_name_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(cases.CASES["safetensors_small"]().data)
    with tensorio.open(path) as checkpoint:
        checkpoint.prefetch()
        with pytest.raises(tensorio.TensorNotFoundError):
            checkpoint.prefetch(["nope"])
    with tensorio.open(path.read_bytes()) as checkpoint:
        checkpoint.prefetch()  # nothing to do for memory


# ------------------------------------------------------------- other processes


def _sum(raw: bytes) -> tuple[int, dict[str, float]]:
    import os

    checkpoint = pickle.loads(raw)
    with open("/proc/self/maps") as f:
        mapped = checkpoint.path in f.read()
    assert mapped
    return os.getpid(), {name: float(array.sum()) for name, array in checkpoint.items()}


def test_spawned_process_maps_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensors = {"a": cases.array("float64", (100,)), "b": cases.array("int32", (7,))}
    path.write_bytes(cases.safetensors_bytes(tensors))
    with tensorio.open(path) as checkpoint, multiprocessing.get_context("spawn").Pool(1) as pool:
        pid, sums = pool.apply(_sum, (pickle.dumps(checkpoint),))
        assert sums == {name: float(array.sum()) for name, array in checkpoint.items()}
        assert pid != multiprocessing.current_process().pid


@pytest.mark.parametrize(
    "options", [{"mmap": False}, {"writable": True}, {"unknown": "opaque"}, {"format": "torch_zip"}], ids=str
)
def test_pickled_checkpoint_keeps_how_it_was_opened(options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    body = b"](" + tensor() + hexfile.name("m", "C") + b")Re" if "unknown" in options else b"]" + tensor() + b"a"
    path.write_bytes(torch_file(pickled(body), RAW))
    with tensorio.open(path, **options) as checkpoint:
        again = pickle.loads(pickle.dumps(checkpoint))
        assert again["0"].flags.writeable == checkpoint["0"].flags.writeable
        with open("/proc/self/maps") as f:
            assert f.read().count(str(path)) == (0 if options == {"mmap": False} else 2)


@pytest.mark.parametrize("change", ["rewritten", "appended", "removed", "other_time"])
def test_pickled_checkpoint_refuses_a_changed_file(change: str, tmp_path: Path) -> None:
    import os

    path = tmp_path / "m.safetensors"
    data = cases.CASES["safetensors_small"]().data
    path.write_bytes(data)
    checkpoint = tensorio.open(path)
    raw = pickle.dumps(checkpoint)
    if change == "rewritten":
        tensorio.save({"x": np.zeros(3)}, path)
    elif change == "appended":
        path.write_bytes(cases.safetensors_bytes({"x": np.zeros(300)}))
    elif change == "removed":
        path.unlink()
    else:
        os.utime(path, ns=(7, 7))
    with pytest.raises(FileNotFoundError if change == "removed" else tensorio.FormatError):
        pickle.loads(raw)
    assert checkpoint["b"].shape == (2, 2)  # who has it open still has it


def test_closed_checkpoint_can_not_be_pickled(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(cases.CASES["safetensors_small"]().data)
    checkpoint = tensorio.open(path)
    checkpoint.close()
    with pytest.raises(ValueError, match="closed"):
        pickle.dumps(checkpoint)


def test_error_of_one_array_names_file_and_tensor(tmp_path: Path) -> None:
    """A view of more elements than NumPy can count: known when opened, refused when asked for."""
    path = tmp_path / "huge.pt"
    body = b"}" + hexfile.text("huge") + hexfile.tensor(size=(1 << 62, 4), stride=(0, 0)) + b"s"
    path.write_bytes(hexfile.torch_file(hexfile.pickled(body), {"0": bytes(16)}))
    with tensorio.open(path) as checkpoint, pytest.raises(tensorio.LimitError) as caught:
        checkpoint["huge"]
    assert (caught.value.path, caught.value.record) == (str(path), "huge")
