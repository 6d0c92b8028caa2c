"""`tensorio.torch.load` against `torch.load`: values, sharing, kinds of tensors and of files, errors."""

from __future__ import annotations

import bz2
import gc
import gzip
import io
import os
import pickle
import struct
import tempfile
import threading
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorio
import tensorio.torch
from alike import differences, quietly, sharing
from tensorio import _served
from tensorio.torch import LoadError, _exact, _load, _places, load
from tensorio.torch._staging import Device, Staging

torch_load, torch_save = torch.serialization.load, torch.serialization.save
COMPLEX = torch.tensor([1 + 2j, 3 - 4j])
LARGE = 4 << 20  # elements of float32: many times what the system reads around a page
BASE = torch.arange(60, dtype=torch.float32)
BYTES = torch.arange(12, dtype=torch.uint8)


def saved(obj: Any, **words: Any) -> bytes:
    out = io.BytesIO()
    quietly(torch_save, obj, out, **words)
    return out.getvalue()


def looped() -> list[Any]:
    inner: dict[str, Any] = {"w": BASE}
    inner["self"] = inner
    return [inner, inner, (inner,)]


def state_dict() -> OrderedDict[str, torch.Tensor]:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.LSTM(4, 2)).state_dict()


def with_metadata() -> Any:
    made = OrderedDict(a=BASE)
    made._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    return made


def optimizer() -> Any:
    model = torch.nn.Linear(3, 4)
    made = torch.optim.Adam(model.parameters(), lr=0.5)
    model(torch.ones(3)).sum().backward()
    made.step()
    return made.state_dict()


# What the machine makes by itself.
PLAIN: dict[str, Callable[[], Any]] = {
    "state_dict": state_dict, "optimizer": optimizer, "metadata": with_metadata, "loop": looped,
    "views": lambda: {"base": BASE, "part": BASE[3:9], "strided": BASE[::7], "turned": BASE.view(6, 10).t()},
    "tied": lambda: {"a": BASE, "b": BASE.view(3, 20), "same": [BASE, BASE]},
    "part of a storage": lambda: BASE[10:20],
    "expanded": lambda: torch.tensor([1.5]).expand(7, 3),
    "no dimensions": lambda: [torch.tensor(3), torch.tensor(True), torch.tensor(2.5, dtype=torch.bfloat16)],
    "no elements": lambda: [torch.empty(0), torch.empty(0, 3, dtype=torch.int8), BASE[5:5], torch.empty(2, 0)],
    "channels last": lambda: torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "gradients": lambda: {"a": BASE.clone().requires_grad_(), "b": torch.nn.Parameter(BASE), "c":
                          torch.nn.Parameter(BASE[:3], requires_grad=False)},
    "lazy bits": lambda: [COMPLEX.conj(), torch._neg_view(BASE), COMPLEX, (COMPLEX + 1).conj().imag],
    "values": lambda: [torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1), torch.device("cpu"), {1, 2},
                       b"bytes", bytearray(b"array"), 1 << 70, "\ud800x", -5, 2.5, None, True, (1, (2,)), 3j,
                       Counter("aab")],
    "types": lambda: [torch.zeros(4, dtype=dtype) for dtype in (
        torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
        torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
        torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)],
    "bits": lambda: [torch.zeros(4, dtype=torch.uint8).view(torch.bits8), torch.zeros(4, dtype=torch.uint16)],
    "types of one storage": lambda: [BYTES, BYTES.view(torch.float8_e5m2), BYTES[4:8].view(torch.uint16),
                                     BYTES[2:4].view(torch.float8_e4m3fn), BYTES[:4]],
}  # fmt: skip


def attributed() -> torch.Tensor:
    made = torch.ones(3)
    made.note = "kept"  # type: ignore[attr-defined]
    return made


class Constructed:
    """Saved as a call of a class of tensors, as programs with a ``__reduce__`` of their own write them."""

    def __reduce__(self) -> Any:
        return torch.sparse.FloatTensor, (torch.tensor([[0, 2]]), torch.ones(2), torch.Size([3]))


# What goes to torch's unpickler.
SPECIAL: dict[str, Callable[[], Any]] = {
    "storage": lambda: [BASE.untyped_storage(), torch.ones(3)],
    "storage of bytes": lambda: [BYTES.untyped_storage(), BYTES, BYTES.storage()],
    "sparse": lambda: [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), torch.eye(4).to_sparse_bsc((2, 2))],
    "quantized": lambda: [torch.quantize_per_tensor(BASE, 0.5, 3, torch.qint8),
                          torch.quantize_per_channel(BASE.view(6, 10), torch.ones(6), torch.zeros(6), 0, torch.quint8)],
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "meta": lambda: [torch.empty(3, device="meta"), BASE],
    "attributes": attributed,
    "constructor": Constructed, "layout": lambda: torch.sparse_coo,
    "odd text": lambda: {"\ud800x": BASE, "layout": torch.sparse_coo},
}  # fmt: skip


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes the ways that loads go besides the first."""
    gone: list[str] = []
    for name, word in (("_special", "special"), ("_as_a_whole", "whole")):
        real = getattr(_load._Load, name)
        monkeypatch.setattr(_load._Load, name, lambda *a, real=real, word=word: (gone.append(word), real(*a))[1])
    return gone


@pytest.mark.parametrize("zip", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", PLAIN)
def test_plain_objects_are_those_of_torch_and_made_here(name: str, zip: bool, tmp_path: Path, way: list[str]) -> None:
    if not zip and name in ("types", "bits", "types of one storage"):
        pytest.skip("torch itself can't read its legacy files of such types")
    path = tmp_path / "m.pt"
    path.write_bytes(saved(quietly(PLAIN[name]), _use_new_zipfile_serialization=zip))
    theirs = quietly(torch_load, path)
    assert not differences(load(path), theirs)
    assert not differences(load(path, mmap=False), theirs)
    assert not way


@pytest.mark.parametrize("zip", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", SPECIAL)
def test_special_objects_are_those_of_torch_and_made_by_it(
    name: str, zip: bool, tmp_path: Path, way: list[str]
) -> None:
    if not zip and name in ("storage", "storage of bytes", "nested"):
        pytest.skip("torch itself can't read its legacy files of untyped storages and nested tensors")
    path = tmp_path / "m.pt"
    path.write_bytes(saved(quietly(SPECIAL[name]), _use_new_zipfile_serialization=zip))
    assert not quietly(differences, quietly(load, path), quietly(torch_load, path))
    assert way == (["special"] if zip else ["special", "whole"])


def test_special_storages_alias_the_mapping_too(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    path.write_bytes(saved({"s": COMPLEX.untyped_storage(), "w": torch.ones(LARGE)}))
    tensor = load(path)["w"]
    assert resident(tensor) < 2 * LARGE
    assert tensor.sum() == LARGE
    assert resident(tensor) >= 4 * LARGE


def resident(tensor: torch.Tensor) -> int:
    """Bytes of the mapping around a tensor that are in memory of this process."""
    address = tensor.data_ptr() + tensor.nbytes // 2
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= address < high
        elif inside and first == "Rss:":
            return int(rest.split()[0]) * 1024
    raise AssertionError("no such mapping")


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs Linux")
def test_loading_touches_no_payload(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    path.write_bytes(saved([torch.ones(LARGE), torch.nn.Parameter(torch.ones(LARGE))]))
    first, _ = load(path)
    assert resident(first) < 4 * LARGE  # of twice as much: a page in front of each is read, and those around it


def test_writes_stay_in_memory_and_tensors_outlive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    path.write_bytes(data := saved({"a": BASE, "b": BASE[:3]}))
    found = load(path)
    found["a"].mul_(2)
    assert torch.equal(found["b"], BASE[:3] * 2)
    assert path.read_bytes() == data
    path.unlink()
    gc.collect()
    assert torch.equal(found["a"], BASE * 2)


def test_what_was_loaded_is_saved_again_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    path.write_bytes(saved(PLAIN["views"]()))
    assert saved(load(path)) == saved(torch_load(path))


# ------------------------------------------------------------------ bytes that are not as they are


def big_endian(data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            held = old.read(name)
            if name.endswith("byteorder"):
                held = b"big"
            elif "/data/" in name:
                held = np.frombuffer(held, "<f4").astype(">f4").tobytes()
            new.writestr(name, held)
    return out.getvalue()


def deflated(data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return out.getvalue()


@pytest.mark.parametrize("change", [big_endian, deflated])
@pytest.mark.parametrize("name", ["views", "tied", "part of a storage"])
def test_foreign_and_packed_bytes(change: Callable[[bytes], bytes], name: str, way: list[str]) -> None:
    data = change(saved(PLAIN[name]()))
    ours = load(data)
    assert not differences(ours, torch_load(io.BytesIO(data)))
    assert not differences(ours, torch_load(io.BytesIO(saved(PLAIN[name]()))))
    assert not way


def test_deflated_bytes_of_special_objects() -> None:
    assert not quietly(differences, load(deflated(saved(quietly(SPECIAL["sparse"])))), quietly(SPECIAL["sparse"]))


@pytest.mark.parametrize("shift", range(1, 9))
def test_unaligned_bytes_are_copied(shift: int) -> None:
    data = bytearray(b"x" * shift + saved([BASE, BASE[2:], COMPLEX], _use_new_zipfile_serialization=False))
    f = io.BytesIO(data)
    f.seek(shift)
    found = load(f)
    assert not differences(found, [BASE, BASE[2:], COMPLEX])
    assert all(t.data_ptr() % t.itemsize == 0 for t in found)


def test_the_byte_order_that_the_user_says() -> None:
    data = saved(BASE)
    before = torch.serialization.get_default_load_endianness()
    torch.serialization.set_default_load_endianness(torch.serialization.LoadEndianness.BIG)
    try:
        assert not differences(load(data), torch_load(io.BytesIO(data)))
    finally:
        torch.serialization.set_default_load_endianness(before)


def test_changed_elements_are_said_and_loaded() -> None:
    data = bytearray(saved(BASE))
    data[data.find(struct.pack("<3f", 7, 8, 9))] ^= 1
    with pytest.warns(UserWarning, match="CRC-32"):
        found = load(bytes(data))
    assert not differences(found, torch_load(io.BytesIO(bytes(data))))


# ------------------------------------------------------------------ map_location


def test_an_address_is_a_file_name_like_any_other_but_to_load_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As to torch: a name out of a request must not make a server fetch something."""
    monkeypatch.chdir(tmp_path)
    fsspec = pytest.importorskip("fsspec")
    for zip in (True, False):
        data = saved([BASE, torch.eye(3).to_sparse()], _use_new_zipfile_serialization=zip)
        with fsspec.open("memory://special.pt", "wb") as f:
            f.write(data)
        with pytest.raises(FileNotFoundError):
            load("memory://special.pt")
        with pytest.raises(FileNotFoundError):
            torch.load("memory://special.pt")
        found = tensorio.torch.load_file("memory://special.pt")
        assert torch.equal(found["0"], BASE)
    (tmp_path / "memory:").mkdir()
    (tmp_path / "memory:" / "special.pt").write_bytes(saved([BASE]))
    assert torch.equal(load("memory://special.pt")[0], BASE)


@pytest.mark.parametrize("zip", [True, False], ids=["zip", "legacy"])
def test_keys_that_torch_has(zip: bool) -> None:
    obj = {torch.nn.Parameter(BASE): "a", torch.float32: "b", torch.Size([2]): "c", torch.device("cpu"): "d"}
    found = load(saved(obj, _use_new_zipfile_serialization=zip))
    assert list(found.values()) == list("abcd")
    assert list(found)[1:] == list(obj)[1:]
    key = next(iter(found))
    assert type(key) is torch.nn.Parameter
    assert torch.equal(key, BASE)


def test_keys_that_are_no_utf8(tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(saved(BASE))) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "m.pt", "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data.replace(b"X\1\0\0\x000", b"X\3\0\0\0\xed\xa0\x80"))
    with pytest.raises(LoadError, match="storage key"):
        load(tmp_path / "m.pt")


@pytest.mark.parametrize("where", [None, "cpu", torch.device("cpu"), {"cuda:0": "cpu"}, {}, "meta",
                                   lambda storage, _: storage, lambda storage, _: None],
                         ids=lambda where: "function" if callable(where) else repr(where))  # fmt: skip
def test_map_location(where: Any) -> None:
    data = saved(PLAIN["tied"]())
    assert not differences(load(data, where), torch_load(io.BytesIO(data), where))


def on_cuda(data: bytes) -> bytes:
    return data.replace(b"X\3\0\0\0cpu", b"X\6\0\0\0cuda:0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device to load to")
def test_a_device_that_is_not_there_is_said_in_torchs_words() -> None:
    legacy = saved(BASE, _use_new_zipfile_serialization=False)
    assert legacy != on_cuda(legacy)
    for words in ({}, {"map_location": "cuda"}, {"map_location": torch.device("cuda:1")}):
        with pytest.raises(RuntimeError, match="Attempting to deserialize object on a CUDA device"):
            load(on_cuda(legacy), **words)
    assert torch.equal(load(on_cuda(legacy), "cpu"), BASE)
    assert torch.equal(load(on_cuda(legacy), {"cuda:0": "cpu"}), BASE)


def test_a_location_that_nobody_knows() -> None:
    with pytest.raises(RuntimeError, match="don't know how to restore data location"):
        load(saved(BASE), "nowhere")


def test_storages_go_to_a_device_whole_and_share_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory in the place of a device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.serialization, "_validate_device", lambda location, backend: torch.device("cpu"))
    made: list[Staging] = []

    def staging() -> Staging:
        made.append(Staging(Device, 100))
        return made[-1]

    monkeypatch.setattr(_places, "Staging", staging)
    obj = {**PLAIN["views"](), "other": torch.ones(3), "none": torch.empty(0), "p": torch.nn.Parameter(BASE)}
    found = load(saved(obj), "cuda:0")
    assert len(made) == 1
    assert not differences(found, torch_load(io.BytesIO(saved(obj))))
    assert sharing(found) == [0, 0, 0, 0, 4, 5, 0]


# ------------------------------------------------------------------ kinds of files


class Minimal:
    """The least that torch asks of a file object."""

    def __init__(self, data: bytes) -> None:
        self._f = io.BytesIO(data)
        self.read, self.readline, self.seek, self.tell = self._f.read, self._f.readline, self._f.seek, self._f.tell


@pytest.mark.parametrize("zip", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("make", [io.BytesIO, bytes, bytearray, memoryview, Minimal], ids=lambda m: m.__name__)
def test_objects_of_bytes(make: Callable[[bytes], Any], zip: bool) -> None:
    data = saved(PLAIN["views"](), _use_new_zipfile_serialization=zip)
    assert not differences(load(make(data)), torch_load(io.BytesIO(data)))


def test_spooled_files() -> None:
    with tempfile.SpooledTemporaryFile() as f:
        f.write(saved(PLAIN["views"]()))
        f.seek(0)
        assert not differences(load(f), PLAIN["views"]())


@pytest.mark.parametrize("module", [gzip, bz2], ids=["gzip", "bz2"])
def test_packed_files(module: Any, tmp_path: Path) -> None:
    with module.open(tmp_path / "m", "wb") as f:
        f.write(b"head" + saved(PLAIN["views"]()))
    with module.open(tmp_path / "m", "rb") as f:
        assert f.read(4) == b"head"
        assert not differences(load(f), PLAIN["views"]())


def test_files_from_where_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b"head" + saved(BASE))
    with path.open("rb") as f:
        f.seek(4)
        assert torch.equal(load(f, mmap=True), BASE)
        f.seek(4)
        assert torch.equal(load(f), BASE)


def test_objects_one_behind_the_other(tmp_path: Path) -> None:
    path = tmp_path / "m"
    parts = [BASE, {"a": COMPLEX}, quietly(SPECIAL["sparse"]), [1, 2]]
    path.write_bytes(b"".join(saved(part, _use_new_zipfile_serialization=False) for part in parts) + b"tail")
    for mode in ("rb", "r+b", None):
        with io.BytesIO(path.read_bytes()) if mode is None else path.open(mode) as f:
            assert not [d for part in parts for d in quietly(differences, load(f), part)]
            assert f.read() == b"tail"


def test_a_file_that_may_be_written_to_is_read(tmp_path: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=tmp_path) as f:
        torch_save(BASE, f)
        f.seek(0)
        found = load(f)
        f.seek(0)
        f.write(bytes(2000))
        f.truncate(10)
        f.flush()
        assert torch.equal(found, BASE)


def test_safetensors_by_path_or_content(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensorio.torch.save_file({"a": BASE, "b": COMPLEX}, path)
    assert not differences(load(path), {"b": COMPLEX, "a": BASE})
    assert not differences(load(path.read_bytes(), "cpu"), {"b": COMPLEX, "a": BASE})
    for where in ({"cpu": "cpu"}, lambda storage, location: storage):
        with pytest.raises(RuntimeError) as theirs:
            torch_load(path, where)
        with pytest.raises(RuntimeError, match="one device") as ours:
            load(path, where)
        assert str(theirs.value).partition(".")[0] in str(ours.value)


# ------------------------------------------------------------------ who does what


class Own:
    """A class that nobody allowed."""


def test_weights_only_is_resolved_as_torch_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = saved(Own())
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        load(io.BytesIO(data))
    assert type(load(io.BytesIO(data), weights_only=False)) is Own
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.warns(UserWarning, match="forcing weights_only=False"):
        assert type(load(io.BytesIO(data))) is Own
    with pytest.raises(pickle.UnpicklingError):
        load(io.BytesIO(data), weights_only=True)
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(RuntimeError, match="Only one of"):
        load(io.BytesIO(data))
    monkeypatch.delenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    with pytest.raises(pickle.UnpicklingError):
        load(io.BytesIO(data), weights_only=False)


def test_other_pickle_modules_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(load(io.BytesIO(saved(Own())), pickle_module=pickle)) is Own
    with pytest.raises(RuntimeError, match="explicit pickle_module"):
        load(io.BytesIO(saved(Own())), pickle_module=pickle, weights_only=True)


def test_classes_that_the_user_allowed() -> None:
    with torch.serialization.safe_globals([Own]):
        assert type(load(saved({"a": Own(), "b": BASE}))["a"]) is Own
    with pytest.raises(pickle.UnpicklingError, match="Own was not an allowed global"):
        load(saved({"a": Own(), "b": BASE}))


def test_modes_of_torch(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch_save({"w": BASE}, path)
    with torch.device("meta"):
        assert load(path)["w"].device.type == "cpu"
    with torch._subclasses.FakeTensorMode():
        fake = load(path)["w"]
        theirs = torch_load(path)["w"]
    assert type(fake) is type(theirs)
    assert fake.untyped_storage()._checkpoint_offset == theirs.untyped_storage()._checkpoint_offset
    with torch.serialization.skip_data():
        assert load(path)["w"].shape == BASE.shape
    with torch.inference_mode():
        assert load(path)["w"].is_inference()


def test_shared_mappings_are_torchs(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch_save(torch.zeros(2000), path)
    with torch.serialization.set_default_mmap_options(torch.serialization.MAP_SHARED):
        load(path, mmap=True).fill_(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert load(path).sum() == 2000
    load(path).fill_(5)
    assert load(path).sum() == 2000


def test_mmap_of_what_is_no_file() -> None:
    with pytest.raises(ValueError, match="file path"):
        load(io.BytesIO(saved(BASE)), mmap=True)


def test_scripts_are_refused_as_torch_does(tmp_path: Path) -> None:
    quietly(lambda: torch.jit.save(torch.jit.script(torch.nn.Linear(2, 3)), tmp_path / "m.pt"))
    with pytest.warns(UserWarning, match="TorchScript"), pytest.raises(RuntimeError, match="TorchScript archives"):
        load(tmp_path / "m.pt")


def test_a_loader_of_torchs_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_exact, "KNOWN", False)
    assert not quietly(differences, load(saved(quietly(SPECIAL["sparse"]))), quietly(SPECIAL["sparse"]))


def test_acts_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch_save(BASE, path)
    times, nbytes = _served.calls.get("torch.load", [0, 0])
    passed = _served.passed_on.get("torch.load", 0)
    load(path)
    load(path, weights_only=False)
    assert _served.calls["torch.load"] == [times + 1, nbytes + path.stat().st_size]
    assert _served.passed_on["torch.load"] == passed + 1


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize("error", [RuntimeError, pickle.UnpicklingError, EOFError, tensorio.FormatError,
                                   tensorio.TensorIOError, ValueError, LoadError])  # fmt: skip
def test_damaged_files_are_said_by_errors_of_all_sorts(error: type[Exception], tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    path.write_bytes(saved(torch.ones(1000))[:-300])
    with pytest.raises(error) as caught:
        load(path)
    assert str(path) in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (type(caught.value), str(caught.value))


@pytest.mark.parametrize("data", [b"", b"\0" * 600, b"<html>", b"version https://git-lfs.github.com/spec/v1\n"])
def test_what_is_no_checkpoint(data: bytes) -> None:
    with pytest.raises(tensorio.UnknownFormatError) as caught:
        load(data)
    assert isinstance(caught.value, LoadError)


def test_checkpoints_of_others_are_named() -> None:
    with pytest.raises(LoadError, match="'pickle'"):
        load(pickle.dumps({"a": 1}))


def test_damage_never_reaches_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of a special object, cut or changed, whose structure is wrong."""
    data = bytearray(saved(quietly(SPECIAL["sparse"])))
    at = data.find(b"ctorch._utils\n_rebuild_sparse_tensor")
    monkeypatch.setattr(_load, "torch_load", None)
    monkeypatch.setattr(_exact, "load_zip", None)
    for broken in (data[:-40], data[: at + 5] + b"\xff" + data[at + 6 :]):
        with pytest.raises(LoadError):
            load(bytes(broken))


def with_pickle(data: bytes) -> bytes:
    """A file with another pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(1))) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            new.writestr(name, data if name.endswith("data.pkl") else old.read(name))
    return out.getvalue()


class OfSomeType:
    """Saved as a tensor whose type is anything."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    def __reduce__(self) -> Any:
        arguments = (BYTES.untyped_storage(), 0, (3,), (1,), False, OrderedDict(), self.dtype)
        return torch._utils._rebuild_tensor_v3, arguments


@pytest.mark.parametrize("dtype", [{}, [], OrderedDict(), ([],), {1}], ids=repr)
def test_a_type_that_is_none_and_has_no_hash(dtype: Any) -> None:
    with pytest.raises(tensorio.FormatError, match="expected a dtype"):
        load(io.BytesIO(saved(OfSomeType(dtype))))


def test_a_name_of_a_whole_book_is_refused_here() -> None:
    with pytest.raises(tensorio.UnsafePickleError):
        load(with_pickle(b"\x80\2c" + b"m" * 100_000 + b"\nprint\nX\1\0\0\0x\x85R."))


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.pt")
    with pytest.raises(IsADirectoryError):
        load(tmp_path)
    with pytest.raises(AttributeError, match="seekable"):
        load(object())


@pytest.mark.skipif(not hasattr(os, "pipe"), reason="no pipes")
def test_what_only_runs_forward_is_refused_as_torch_does() -> None:
    class Forward(io.RawIOBase):
        def readable(self) -> bool:
            return True

    for make in (torch_load, load):
        with pytest.raises(io.UnsupportedOperation, match="from a file that is seekable"):
            make(Forward())
        out, into = os.pipe()
        os.close(into)
        with os.fdopen(out, "rb") as pipe, pytest.raises(OSError, match=r"Illegal seek|not seekable"):
            make(pipe)


def test_text_of_python_2_in_another_encoding() -> None:
    data = with_pickle(b"\x80\x02U\x02\xc5\x91.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert load(data, encoding="utf-8") == "ő"
        assert load(data, encoding="bytes") == b"\xc5\x91"
        with pytest.raises(UnicodeDecodeError):
            load(data, encoding="ascii")
    with pytest.warns(UserWarning, match="pickle_load_args"):
        load(data, encoding="latin1")


# ------------------------------------------------------------------ threads


def test_many_threads_at_once(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch_save({f"w{i}": torch.full((100,), float(i)) for i in range(300)}, path)
    start = threading.Barrier(8)
    failed: list[Any] = []

    def work() -> None:
        start.wait()
        for _ in range(5):
            found = load(path)
            failed.extend(name for name, w in found.items() if w[7] != float(name[1:]))
            found["w3"].zero_()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
