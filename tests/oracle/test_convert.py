"""Converting: what the reference readers find in the target is what they found in the source."""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is an oracle")
safetensors = pytest.importorskip("safetensors", reason="safetensors is an oracle")
import safetensors.torch  # noqa: E402, F811

import cases  # noqa: E402
import hexfile  # noqa: E402
import tensorio  # noqa: E402
from _trees import (  # noqa: E402
    BY_DTYPE,
    CLASSIC,
    Trees,
    assert_equal,
    assert_same_file,
    assert_sound,
    bits,
    masked,
    saved_by_torch,
    torch_base,
)  # fmt: skip

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

ENTRIES = [e for e in cases.corpus_entries() if e["format"] in ("torch_zip", "safetensors")]

# Element types that safetensors has.
ST_DTYPES = {"bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32",
             "float64", "complex64", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
             "float8_e8m0fnu", "float4_e2m1fn_x2"}  # fmt: skip


def by_id(entries: list[dict[str, Any]]) -> Any:
    if not entries:
        return [pytest.param(None, marks=pytest.mark.skip(reason="no shared corpus"))]
    return [pytest.param(entry, id=entry["id"]) for entry in entries]


def convert(src: Any, suffix: str, folder: Path, **options: Any) -> tuple[Path, list[str]]:
    target = folder / f"out{suffix}"
    return target, tensorio.convert(src, target, durable=False, **options)


def read(path: Path) -> Any:
    """What the reference reader makes of a file, by its suffix."""
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    assert_sound(path.read_bytes())
    return torch.load(path, weights_only=True, mmap=True)


def flat(tree: Any, path: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Tensors of a nested object by dotted name."""
    if isinstance(tree, torch.Tensor):
        return {".".join(map(str, path)): tree}
    out: dict[str, Any] = {}
    children: Any = (
        tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    )
    for key, child in children:
        for name, tensor in flat(child, (*path, key)).items():
            # A name that is taken gets a number, as `Checkpoint` names it.
            n = 2
            unique = name
            while unique in out:
                unique, n = f"{name}#{n}", n + 1
            out[unique] = tensor
    return out


def others(tree: Any, path: tuple[Any, ...] = ()) -> list[str]:
    """Dotted names of what is neither tensor nor container."""
    if isinstance(tree, torch.Tensor):
        return []
    if isinstance(tree, dict):
        return [n for key, child in tree.items() for n in others(child, (*path, key))]
    if isinstance(tree, list | tuple):
        return [n for key, child in enumerate(tree) for n in others(child, (*path, key))]
    return [".".join(map(str, path))]


def assert_same_tensors(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(got[name]) == bits(tensor), name


# --------------------------------------------------------------- corpus files


def source_of(corpus: Path, entry: dict[str, Any]) -> Any:
    """The reference's reading of a corpus file; the test is skipped if it refuses it."""
    path = corpus / entry["path"]
    try:
        if entry["format"] == "safetensors":
            return safetensors.torch.load(path.read_bytes())
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        pytest.skip(f"the reference does not read it: {type(error).__name__}")


@pytest.mark.parametrize("entry", by_id(ENTRIES))
def test_corpus_file_to_safetensors(corpus: Path, entry: dict[str, Any], tmp_path: Path) -> None:
    want = source_of(corpus, entry)
    tensors = flat(want)
    odd = [n for n, t in tensors.items() if str(t.dtype).removeprefix("torch.") not in ST_DTYPES]
    if odd:
        with pytest.raises(tensorio.UnsupportedError):
            convert(corpus / entry["path"], ".safetensors", tmp_path)
        assert not list(tmp_path.iterdir())
        return
    target, dropped = convert(corpus / entry["path"], ".safetensors", tmp_path)
    assert_same_tensors(read(target), tensors)
    assert sorted(dropped) == sorted(others(want))


@pytest.mark.parametrize("entry", by_id(ENTRIES))
def test_corpus_file_to_torch(corpus: Path, entry: dict[str, Any], tmp_path: Path) -> None:
    want = source_of(corpus, entry)
    target, dropped = convert(corpus / entry["path"], ".pt", tmp_path)
    got = read(target)
    assert_same_tensors(flat(got), flat(want))
    if entry["format"] == "torch_zip":
        assert dropped == []
        assert sorted(others(got)) == sorted(others(want))
        assert_equal(got, want)
    else:
        metadata = tensorio.open(corpus / entry["path"]).metadata
        assert sorted(dropped) == sorted(f"__metadata__.{key}" for key in metadata)


@pytest.mark.parametrize("entry", by_id([e for e in ENTRIES if e["format"] == "safetensors"]))
def test_corpus_safetensors_there_and_back(corpus: Path, entry: dict[str, Any], tmp_path: Path) -> None:
    want = source_of(corpus, entry)
    middle, _ = convert(corpus / entry["path"], ".pt", tmp_path)
    target, dropped = convert(middle, ".safetensors", tmp_path)
    assert dropped == []
    assert target.read_bytes() == safetensors.torch.save({n: t.contiguous() for n, t in want.items()})


@pytest.mark.parametrize("entry", by_id([e for e in ENTRIES if e["format"] == "safetensors"]))
def test_corpus_safetensors_to_itself_carries_metadata(corpus: Path, entry: dict[str, Any], tmp_path: Path) -> None:
    want = source_of(corpus, entry)
    target, dropped = convert(corpus / entry["path"], ".safetensors", tmp_path)
    assert dropped == []
    assert_same_tensors(read(target), want)
    with tensorio.open(corpus / entry["path"]) as a, tensorio.open(target, strict=True) as b:
        assert a.metadata == b.metadata


# -------------------------------------------------------------- generated trees


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_generated_torch_trees_to_torch(first: int, tmp_path: Path) -> None:
    """The tree with all its values; tensors equal, sharing kept."""
    for seed in range(first, first + 100):
        tree = Trees(seed, "torch").tree()
        source = saved_by_torch(tree)
        target, dropped = convert(source, ".pt", tmp_path)
        got = read(target)
        assert_equal(got, torch.load(io.BytesIO(source), weights_only=True))
        assert dropped == []


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_generated_torch_trees_to_safetensors(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 100):
        tree = Trees(seed, "torch").tree()
        source = saved_by_torch(tree)
        tensors = flat(torch.load(io.BytesIO(source), weights_only=True))
        bad = [t for t in tensors.values() if str(t.dtype).removeprefix("torch.") not in ST_DTYPES
               or (str(t.dtype) == "torch.float4_e2m1fn_x2" and not t.dim())]  # fmt: skip
        if bad:
            with pytest.raises(tensorio.UnsupportedError):
                convert(source, ".safetensors", tmp_path)
            continue
        target, dropped = convert(source, ".safetensors", tmp_path)
        assert_same_tensors(read(target), tensors)
        assert sorted(dropped) == sorted(others(torch.load(io.BytesIO(source), weights_only=True))), seed


@pytest.mark.parametrize("first", range(0, 200, 100))
def test_generated_safetensors_there_and_back(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 100):
        rng = random.Random(seed)
        tensors = {f"{i}.w": torch_base(rng.choice(sorted(ST_DTYPES)), (rng.randrange(3), rng.randrange(1, 4)), rng)
                   for i in range(rng.randrange(6))}  # fmt: skip
        source = safetensors.torch.save(tensors)
        middle, _ = convert(source, ".pt", tmp_path)
        assert_same_tensors(read(middle), tensors)
        target, _ = convert(middle, ".safetensors", tmp_path)
        assert target.read_bytes() == source


# --------------------------------------------------------------------- by kind


def test_state_dict_to_torch_is_what_torch_saves_again(tmp_path: Path) -> None:
    """A file that torch wrote comes out as it was, name and id apart."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Conv2d(2, 3, 3))
    optimizer = torch.optim.AdamW(net.parameters())
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    obj = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "name": "x", "none": None,
           "big": 2**70, "size": torch.Size([1, 2]), "device": torch.device("cuda", 1)}  # fmt: skip
    torch.save(obj, tmp_path / "out.pt")
    source = (tmp_path / "out.pt").read_bytes()
    (tmp_path / "in").mkdir()
    target, dropped = convert(source, ".pt", tmp_path)
    assert_same_file(target.read_bytes(), source)
    assert dropped == []
    assert_equal(read(target)["model"], obj["model"])


def test_dtype_values_are_carried(tmp_path: Path) -> None:
    obj = {"dtype": torch.bfloat16, "list": [torch.float8_e4m3fn, torch.int64], "w": torch.ones(2)}
    target, _ = convert(saved_by_torch(obj), ".pt", tmp_path)
    assert_equal(read(target), obj)


@pytest.mark.parametrize("dtype", CLASSIC + BY_DTYPE)
def test_dtype_survives_torch_to_torch(dtype: str, tmp_path: Path) -> None:
    base = torch_base(dtype, (4, 6), random.Random(dtype))
    obj = {"whole": base, "view": base[1:3, ::2], "t": base.t(), "zero_dim": base[0, 0], "empty": base[:0]}
    target, _ = convert(saved_by_torch(obj), ".pt", tmp_path)
    got = read(target)
    assert_equal(got, obj)
    assert len({t.untyped_storage().data_ptr() for n, t in got.items() if n != "empty"}) == 1


STRIDED: dict[str, Callable[[], Any]] = {
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).t(),
    "slice": lambda: torch.arange(60.0).reshape(6, 10)[2:4, 1:9:3],
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "zero_dim_inside": lambda: torch.arange(9.0)[4],
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "windows": lambda: torch.arange(10.0).unfold(0, 4, 2),
    "conjugate": lambda: torch.randn(3, 4, dtype=torch.complex64).conj(),
    "conjugate_transposed": lambda: torch.randn(3, 4, dtype=torch.complex64).mH,
    "negative": lambda: torch.randn(5, dtype=torch.complex64).conj().imag,
    "both": lambda: torch._neg_view(torch.randn(5, dtype=torch.complex64).conj()),
    "negative_ints": lambda: torch._neg_view(torch.arange(5)),
    "large_transposed": lambda: torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024).t(),
    "large_conjugate": lambda: torch.randn(1 << 19, dtype=torch.complex64).conj(),
    "large_every_second": lambda: torch.arange(1 << 20, dtype=torch.float32)[::2],
    "empty": lambda: torch.ones(3, 0).t(),
    "bfloat16_transposed": lambda: torch.arange(12).reshape(3, 4).to(torch.bfloat16).t(),
    "float8_columns": lambda: torch_base("float8_e4m3fn", (4, 6), random.Random(0))[:, 1:3],
    "float4_rows": lambda: torch_base("float4_e2m1fn_x2", (4, 6), random.Random(0))[1::2],
}


@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED.keys())
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_strided_tensor_keeps_its_values(make: Callable[[], Any], suffix: str, tmp_path: Path) -> None:
    obj = {"x": make(), "y": torch.ones(2)}
    target, dropped = convert(saved_by_torch(obj), suffix, tmp_path)
    assert_same_tensors(read(target), obj)
    assert dropped == []
    if suffix == ".pt":
        got = read(target)["x"]
        assert (got.stride(), got.is_conj(), got.is_neg()) == (obj["x"].stride(), obj["x"].is_conj(), obj["x"].is_neg())


def test_tied_tensors_are_repeated_where_the_target_cannot_alias(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    obj = {"a": base, "b": base, "part": base[3:6], "n": {"c": base.view(3, 4)}}
    flat_target, _ = convert(saved_by_torch(obj), ".safetensors", tmp_path)
    assert_same_tensors(read(flat_target), flat(obj))
    target, _ = convert(saved_by_torch(obj), ".pt", tmp_path)
    got = read(target)
    assert_equal(got, obj)
    assert got["a"] is got["b"]
    assert got["n"]["c"].data_ptr() == got["a"].data_ptr()
    assert got["part"].data_ptr() - got["a"].data_ptr() == 12


def test_part_of_a_large_storage_is_all_that_is_copied(tmp_path: Path) -> None:
    obj = {"a": torch.zeros(1 << 20)[100:110], "b": torch.ones(1 << 20)[::1024]}
    flat_target, _ = convert(saved_by_torch(obj), ".safetensors", tmp_path)
    assert flat_target.stat().st_size < 10_000
    target, _ = convert(saved_by_torch(obj), ".pt", tmp_path)
    assert_equal(read(target), obj)


def test_parameters_stay_parameters(tmp_path: Path) -> None:
    obj = {"p": torch.nn.Parameter(torch.ones(3)), "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
           "g": torch.ones(2, requires_grad=True), "t": torch.zeros(2)}  # fmt: skip
    source = saved_by_torch(obj)
    target = io.BytesIO()
    tensorio.convert(source, target, format="torch_zip")
    assert masked(target.getvalue()) == masked(source)
    flat_target, _ = convert(source, ".safetensors", tmp_path)
    assert_same_tensors(read(flat_target), obj)


def test_shared_and_recursive_containers_survive(tmp_path: Path) -> None:
    inner = {"w": torch.ones(2), "n": 1}
    loop: dict[str, Any] = {"inner": inner, "again": inner, "list": [inner]}
    loop["self"] = loop
    target, _ = convert(saved_by_torch(loop), ".pt", tmp_path)
    got = torch.load(target, weights_only=True)
    assert got["self"] is got
    assert got["inner"] is got["again"] is got["list"][0]
    flat_target, _ = convert(saved_by_torch(loop), ".safetensors", tmp_path)
    assert "inner.w" in read(flat_target)


# ------------------------------------------------------- sources that are not raw


def deflated(data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w") as target:
        for info in source.infolist():
            target.writestr(info.filename, source.read(info), zipfile.ZIP_DEFLATED)
    return out.getvalue()


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_deflated_source(suffix: str, tmp_path: Path) -> None:
    base = torch.arange(40_000.0).reshape(200, 200)
    obj = {"a": base, "t": base.t(), "part": base[5:7], "ints": torch.arange(7), "none": torch.zeros(0)}
    target, _ = convert(deflated(saved_by_torch(obj)), suffix, tmp_path)
    assert_same_tensors(read(target), obj)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("packed", [False, True])
def test_big_endian_source(suffix: str, packed: bool, tmp_path: Path) -> None:
    dtypes = ["float32", "float64", "float16", "int16", "int64", "uint8", "complex64"]
    want = {dtype: cases.array(dtype, (3, 4), i) for i, dtype in enumerate(dtypes)}
    foreign = {n: np.frombuffer(a.byteswap().tobytes(), a.dtype).reshape(a.shape) for n, a in want.items()}
    data = cases.plain_torch_bytes(foreign, byteorder="big")
    target, _ = convert(deflated(data) if packed else data, suffix, tmp_path)
    assert_same_tensors(read(target), {n: torch.from_numpy(a.copy()) for n, a in want.items()})
    if suffix == ".pt":
        with zipfile.ZipFile(target) as archive:
            assert archive.read("out/byteorder") == b"little"


def test_unaligned_source_is_aligned_again(tmp_path: Path) -> None:
    obj = {"a": torch.arange(5.0), "b": torch.arange(3)}
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved_by_torch(obj))) as source, zipfile.ZipFile(out, "w") as target:
        for info in source.infolist():
            target.writestr(info.filename, source.read(info))
    path, _ = convert(out.getvalue(), ".pt", tmp_path)
    with tensorio.open(path, strict=True) as checkpoint:
        assert all(i.chunks[0].extent.offset % 64 == 0 for i in checkpoint.infos.values())
    assert_equal(read(path), obj)


def test_safetensors_with_odd_header_is_written_as_the_reference_does(tmp_path: Path) -> None:
    case = cases.CASES["safetensors_unaligned"]()
    target, _ = convert(case.data, ".safetensors", tmp_path)
    assert target.read_bytes() == safetensors.torch.save(
        {n: torch.from_numpy(a.copy()) for n, a in case.tensors.items()}
    )


# ------------------------------------------------------------------- 4-bit numbers


def test_float4_both_ways(tmp_path: Path) -> None:
    tensor = torch_base("float4_e2m1fn_x2", (3, 5), random.Random(0))
    data = safetensors.torch.save({"x": tensor})
    middle, _ = convert(data, ".pt", tmp_path)
    assert_equal(read(middle), {"x": tensor})
    back, _ = convert(middle, ".safetensors", tmp_path)
    assert back.read_bytes() == data


@pytest.mark.parametrize("code, shape", [("F6_E2M3", [4]), ("F6_E3M2", [2, 2]), ("F4", [2, 1, 3])])
def test_packed_shape_that_torch_has_not_is_refused(code: str, shape: list[int], tmp_path: Path) -> None:
    data = hexfile.st_file({"x": hexfile.st_entry(code, shape, 0, 3)}, b"abc")
    with pytest.raises(tensorio.UnsupportedError, match="torch"):
        convert(data, ".pt", tmp_path)
    assert not list(tmp_path.iterdir())
    same, _ = convert(data, ".safetensors", tmp_path)
    assert safetensors.deserialize(same.read_bytes()) == [("x", {"dtype": code, "shape": shape, "data": b"abc"})]


# --------------------------------------------------------- names, notes, refusals


def test_dropped_names_are_listed(tmp_path: Path) -> None:
    obj = {"w": torch.ones(2), "epoch": 3, "cfg": {"lr": 0.1, "names": ["a", "b"], "empty": {}}, "none": None,
           "pair": (1, torch.zeros(1))}  # fmt: skip
    target, dropped = convert(saved_by_torch(obj), ".safetensors", tmp_path)
    assert dropped == ["epoch", "cfg.lr", "cfg.names.0", "cfg.names.1", "none", "pair.0"]
    assert set(read(target)) == {"w", "pair.1"}


def test_root_tensor_has_the_empty_name(tmp_path: Path) -> None:
    target, dropped = convert(saved_by_torch(torch.ones(3)), ".safetensors", tmp_path)
    assert dropped == []
    assert set(read(target)) == {""}
    back, _ = convert(saved_by_torch(torch.ones(3)), ".pt", tmp_path)
    assert_equal(read(back), torch.ones(3))


def test_names_that_collide_are_numbered(tmp_path: Path) -> None:
    obj = {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(2), 1: torch.full((3,), 2.0), "1": torch.full((4,), 3.0)}
    target, _ = convert(saved_by_torch(obj), ".safetensors", tmp_path)
    assert {n: t.numel() for n, t in read(target).items()} == {"a.b": 1, "a.b#2": 2, "1": 3, "1#2": 4}


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("rename", [
    lambda n: n.removeprefix("model.").replace(".", "/"), {"model.w": "w", "model.b": "b", "not there": "x"},
], ids=["function", "mapping"])  # fmt: skip
def test_rename(suffix: str, rename: Any, tmp_path: Path) -> None:
    obj = {"model": {"w": torch.arange(4.0), "b": torch.ones(2)}, "keep": torch.zeros(3), "epoch": 5}
    target, dropped = convert(saved_by_torch(obj), suffix, tmp_path, rename=rename)
    assert_same_tensors(read(target), {"w": obj["model"]["w"], "b": obj["model"]["b"], "keep": obj["keep"]})
    assert dropped == ["epoch"]


def test_rename_keeps_ties_and_parameters_in_torch_files(tmp_path: Path) -> None:
    w = torch.nn.Parameter(torch.ones(3))
    target, _ = convert(saved_by_torch({"m": {"a": w, "b": w}}), ".pt", tmp_path, rename=str.upper)
    got = read(target)
    assert set(got) == {"M.A", "M.B"}
    assert isinstance(got["M.A"], torch.nn.Parameter)
    assert got["M.A"].data_ptr() == got["M.B"].data_ptr()


def test_rename_of_safetensors_carries_metadata(tmp_path: Path) -> None:
    data = safetensors.torch.save({"a": torch.ones(2)}, {"format": "pt"})
    target, _ = convert(data, ".safetensors", tmp_path, rename={"a": "b"})
    assert target.read_bytes() == safetensors.torch.save({"b": torch.ones(2)}, {"format": "pt"})


def test_rename_to_one_name_is_refused(tmp_path: Path) -> None:
    source = saved_by_torch({"a": torch.ones(1), "b": torch.ones(1)})
    with pytest.raises(tensorio.TensorMismatchError, match="same"):
        convert(source, ".safetensors", tmp_path, rename=lambda n: "same")
    assert not list(tmp_path.iterdir())


def test_metadata_is_carried_or_listed(tmp_path: Path) -> None:
    metadata = {"format": "pt", "note": "\u00e9"}
    data = safetensors.torch.save({"x": torch.ones(2)}, metadata)
    same, dropped = convert(data, ".safetensors", tmp_path)
    with safetensors.safe_open(same, "pt") as f:
        assert f.metadata() == metadata
    assert dropped == []
    _, dropped = convert(data, ".pt", tmp_path)
    assert sorted(dropped) == ["__metadata__.format", "__metadata__.note"]


@pytest.mark.parametrize("metadata", [None, {"a": "b"}])
def test_absent_metadata_stays_absent(metadata: Any, tmp_path: Path) -> None:
    data = safetensors.torch.save({"x": torch.ones(2)}, metadata)
    target, _ = convert(data, ".safetensors", tmp_path)
    assert target.read_bytes() == data


def test_name_of_the_metadata_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(tensorio.TensorMismatchError, match="__metadata__"):
        convert(saved_by_torch({"__metadata__": torch.ones(1)}), ".safetensors", tmp_path)
    assert not list(tmp_path.iterdir())


def test_opaque_objects_are_dropped_or_refused_by_name(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 3)
    source = saved_by_torch({"net": net, "w": torch.ones(2)})
    with pytest.raises(tensorio.UnsafePickleError):
        convert(source, ".safetensors", tmp_path)
    target, dropped = convert(source, ".safetensors", tmp_path, unknown="opaque")
    got = read(target)
    assert sorted(bits(t) for t in got.values()) == sorted(bits(t) for t in (net.weight, net.bias, torch.ones(2)))
    assert dropped
    with pytest.raises(tensorio.UnsupportedError, match="Linear"):
        convert(source, ".pt", tmp_path, unknown="opaque")


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_damaged_source_leaves_the_old_target(suffix: str, tmp_path: Path) -> None:
    target = tmp_path / f"out{suffix}"
    target.write_bytes(b"old")
    data = deflated(saved_by_torch({"a": torch.randn(20_000)}))
    at = data.index(b"archive/data/0") + 5000
    broken = data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :]
    with pytest.raises(tensorio.FormatError):
        tensorio.convert(broken, target, durable=False)
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_target_may_be_the_source(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x{suffix}"
    tensors = {"a": torch.arange(100_000.0), "b": torch.ones(3)}
    tensorio.save(tensors, path, durable=False)
    before = path.read_bytes()
    tensorio.convert(path, path, durable=False)
    assert path.read_bytes() == before


def test_target_may_be_a_file_object() -> None:
    tensors = {"a": torch.arange(5.0)}
    out = io.BytesIO()
    assert tensorio.convert(saved_by_torch(tensors), out, format="safetensors") == []
    assert out.getvalue() == safetensors.torch.save(tensors)


def test_source_may_be_opened_by_another_suffix(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(safetensors.torch.save({"a": torch.ones(2)}))
    target, _ = convert(tmp_path / "x.pt", ".pt", tmp_path)
    assert_same_tensors(read(target), {"a": torch.ones(2)})


@pytest.mark.parametrize("count", [0, 3000])
def test_many_tensors(count: int, tmp_path: Path) -> None:
    tensors = {f"layers.{i}.weight": torch.full((i % 5, 2), float(i)) for i in range(count)}
    source = saved_by_torch(tensors)
    flat_target, _ = convert(source, ".safetensors", tmp_path)
    assert flat_target.read_bytes() == safetensors.torch.save(tensors)
    target, _ = convert(flat_target, ".pt", tmp_path)
    assert_same_tensors(read(target), tensors)
    header = json.loads(flat_target.read_bytes()[8:].split(b"}}", 1)[0] + b"}}") if count else {}
    assert len(header) == count
