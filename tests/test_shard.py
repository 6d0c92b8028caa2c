"""Files for each rank of a tensor-parallel group, views of a rank's slices, and the way back.

The oracle is NumPy's or torch's slicing of the whole tensors, and the files are read by safetensors and torch.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hexfile
import tensorio
from tensorio.errors import HeaderError, TensorMismatchError, TruncatedError, UnsupportedError
from tensorio.tp import Rules

Array = np.ndarray[Any, Any]
MIB = 1 << 20
RNG = np.random.default_rng(8)
LINUX = pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs Linux's /proc")


def random(dtype: Any, *shape: int) -> Array:
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(RNG.bytes(nbytes), dtype).reshape(shape)


def rank_files(folder: Path, tp: int, suffix: str = ".safetensors") -> list[Path]:
    return [folder / f"model-rank-{rank}-part-0{suffix}" for rank in range(tp)]


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A file by safetensors' own writer, with a cut along each dimension."""
    torch.manual_seed(0)
    tensors = {
        "embed": torch.randn(13, 6),
        "layers.0.up": torch.randn(8, 6).to(torch.bfloat16),
        "layers.0.down": torch.randn(6, 8).to(torch.bfloat16),
        "layers.0.qkv": torch.randn(16, 6),
        "layers.0.middle": torch.randint(0, 100, (2, 4, 5)),
        "layers.0.norm": torch.randn(6).to(torch.float8_e4m3fn),
        "layers.0.bias": torch.randn(6).to(torch.float16),
        "step": torch.tensor(3),
        "gone": torch.randn(3),
    }
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    return path, tensors


RULES = {
    "embed": {"dim": 0, "pad_to": 4},
    "**.up": 0,
    "**.down": 1,
    "**.qkv": {"dim": 0, "sections": [4, 2, 2], "heads": [4, 2, 2]},
    "**.middle": -2,
    "**.norm": "replicate",
    "**.bias": "rank0",
    "step": None,
    "gone": "skip",
}


def expected(tensors: Mapping[str, torch.Tensor], rank: int, tp: int) -> dict[str, torch.Tensor]:
    """What `RULES` leave to a rank, by torch."""
    rows = -(-13 // 4) * 4
    padded = torch.cat([tensors["embed"], torch.zeros(rows - 13, 6)])
    q, k, v = tensors["layers.0.qkv"].split([8, 4, 4])
    kv = [x.chunk(2)[rank * 2 // tp] if tp > 2 else x.chunk(tp)[rank] for x in (k, v)]
    parts = {
        "embed": padded.chunk(tp)[rank],
        "layers.0.up": tensors["layers.0.up"].chunk(tp)[rank],
        "layers.0.down": tensors["layers.0.down"].chunk(tp, 1)[rank],
        "layers.0.qkv": torch.cat([q.chunk(tp)[rank], *kv]),
        "layers.0.middle": tensors["layers.0.middle"].chunk(tp, 1)[rank],
        "layers.0.norm": tensors["layers.0.norm"],
        "step": tensors["step"],
    }
    return parts | ({"layers.0.bias": tensors["layers.0.bias"]} if rank == 0 else {})


def assert_same(found: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> None:
    assert set(found) == set(want)
    for name, tensor in want.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        as_bytes = [t.contiguous().view(-1).view(torch.uint8) for t in (found[name], tensor)]
        assert torch.equal(*as_bytes), name


# -------------------------------------------------------------------------- cutting


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_rank_files_are_read_by_safetensors_and_are_torchs_chunks(model: Any, tp: int, tmp_path: Path) -> None:
    path, tensors = model
    report = tensorio.shard(path, tmp_path / "ranks", tp=tp, rules=RULES)
    for rank, file in enumerate(rank_files(tmp_path / "ranks", tp)):
        assert_same(safetensors.torch.load_file(file), expected(tensors, rank, tp))
        assert report.nbytes[rank] == file.stat().st_size
        assert report.files[rank] == (file.name,)
    assert sorted(p.name for p in (tmp_path / "ranks").iterdir()) == sorted(
        [*(name for names in report.files for name in names), "tensorio_tp.json"]
    )


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_rank_files_of_torch_are_read_by_torch(model: Any, tp: int, tmp_path: Path) -> None:
    path, tensors = model
    tensorio.shard(path, tmp_path / "ranks", tp=tp, rules=RULES, format="torch_zip")
    for rank, file in enumerate(rank_files(tmp_path / "ranks", tp, ".pt")):
        assert_same(torch.load(file, weights_only=True), expected(tensors, rank, tp))


def test_files_say_what_they_are(model: Any, tmp_path: Path) -> None:
    path, _ = model
    tensorio.shard(path, tmp_path / "ranks", tp=2, rules=RULES, metadata={"by": "me", "tensorio.tp": "no"})
    with safetensors.safe_open(tmp_path / "ranks" / "model-rank-1-part-0.safetensors", framework="np") as file:
        assert file.metadata() == {
            "format": "pt", "by": "me", "tensorio.tp": "2", "tensorio.rank": "1",
            "tensorio.source": "model.safetensors", "tensorio.rules": Rules(RULES).digest,
        }  # fmt: skip


def test_report_has_what_became_of_which_tensors(model: Any, tmp_path: Path) -> None:
    path, _ = model
    rules = {name: what for name, what in RULES.items() if name not in ("step",)}
    report = tensorio.shard(path, tmp_path / "ranks", tp=4, rules=rules, default="replicate")
    assert report.tensors == 9
    assert report.rules == dict.fromkeys(rules, 1)
    assert report.unmatched == ("step",)
    assert report.skipped == ("gone",)
    assert report.padded == ("embed",)
    assert report.repeated == ("layers.0.qkv",)
    assert report.dropped == ()
    assert str(report) == f"model.safetensors: 9 tensors for 4 ranks in 4 files ({sum(report.nbytes)} bytes)"


def test_dry_run_says_the_same_and_writes_nothing(model: Any, tmp_path: Path) -> None:
    path, _ = model
    would = tensorio.shard(path, tmp_path / "ranks", tp=2, rules=RULES, dry_run=True)
    assert list(tmp_path.iterdir()) == [path]
    assert tensorio.shard(path, tmp_path / "ranks", tp=2, rules=RULES) == would


def test_progress_counts_all_bytes(model: Any, tmp_path: Path) -> None:
    path, _ = model
    steps: list[tuple[int, int]] = []
    report = tensorio.shard(path, tmp_path / "x", tp=2, rules=RULES, progress=lambda *step: steps.append(step))
    assert steps[-1] == (sum(report.nbytes), sum(report.nbytes))
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)


@pytest.mark.parametrize("limit", [200, "200", "200B", "0.2"])
def test_max_shard_size_gives_a_rank_several_files(model: Any, limit: Any, tmp_path: Path) -> None:
    path, tensors = model
    if limit == "0.2":
        with pytest.raises(ValueError, match="max_shard_size="):
            tensorio.shard(path, tmp_path / "ranks", tp=2, rules=RULES, max_shard_size=limit)
        return
    report = tensorio.shard(path, tmp_path / "ranks", tp=2, rules=RULES, max_shard_size=limit)
    assert len(report.files[0]) > 2
    for rank, names in enumerate(report.files):
        found = {}
        for part, name in enumerate(names):
            assert name == f"model-rank-{rank}-part-{part}.safetensors"
            file = safetensors.torch.load_file(tmp_path / "ranks" / name)
            assert sum(t.nbytes for t in file.values()) <= 200 or len(file) == 1
            found |= file
        assert_same(found, expected(tensors, rank, 2))
    tensorio.unshard(tmp_path / "ranks", tmp_path / "back.safetensors")
    assert_same(
        safetensors.torch.load_file(tmp_path / "back.safetensors"), {k: v for k, v in tensors.items() if k != "gone"}
    )


def test_name_may_be_another(model: Any, tmp_path: Path) -> None:
    path, _ = model
    report = tensorio.shard(path, tmp_path / "ranks", tp=2, rules=RULES, name="w_{rank:02}.pt")
    assert report.files == (("w_00.pt",), ("w_01.pt",))
    assert report.format == "torch_zip"


@pytest.mark.parametrize(
    "name", ["x.safetensors", "{rank}/x.pt", "../{rank}.pt", "{rank.pt", "{}.pt", "{0}{rank}.pt", "{other}{rank}.pt",
             "{rank.x}.pt", "a\n{rank}.pt"],
)  # fmt: skip
def test_name_that_is_no_pattern_of_names_is_refused(model: Any, name: str, tmp_path: Path) -> None:
    path, _ = model
    with pytest.raises(ValueError, match="expected name= to be a file name"):
        tensorio.shard(path, tmp_path / "ranks", tp=2, rules=RULES, name=name)


def test_arguments_that_are_wrong_are_refused_before_anything_is_written(model: Any, tmp_path: Path) -> None:
    path, _ = model
    target = tmp_path / "ranks"
    for error, message, arguments in (
        (ValueError, "tp to be a positive", {"tp": 0}),
        (ValueError, "tp to be a positive", {"tp": 2.0}),
        (ValueError, "at most 1024 ranks", {"tp": 1025}),
        (ValueError, "names no format", {"name": "{rank}.xyz"}),
        (ValueError, r"needs \{part\}", {"name": "{rank}.pt", "max_shard_size": 10}),
        (UnsupportedError, "no place for metadata=", {"format": "torch_zip", "metadata": {"a": "b"}}),
        (UnsupportedError, "are read only", {"format": "pickle"}),
        (TypeError, "str to str", {"metadata": {"a": 1}}),
        (TensorMismatchError, "no rule fits 1 of 9 tensors: 'gone'", {"rules": dict(list(RULES.items())[:-1])}),
        (TensorMismatchError, "match no tensor: 'other'", {"rules": RULES | {"other": 0}}),
        (TensorMismatchError, "can't be cut into 5 equal parts", {"tp": 5}),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            tensorio.shard(path, target, **({"tp": 2, "rules": RULES} | arguments))
        assert list(tmp_path.iterdir()) == [path]


def test_error_names_file_tensor_and_rule(model: Any, tmp_path: Path) -> None:
    path, _ = model
    with pytest.raises(TensorMismatchError) as caught:
        tensorio.shard(path, tmp_path / "ranks", tp=5, rules=RULES)
    assert caught.value.path == str(path)
    assert caught.value.record == "layers.0.middle"
    assert "rule '**.middle': 4 elements along dimension -2" in str(caught.value)


# ------------------------------------------------------------------------- the folder


def test_folder_may_be_there_if_it_is_empty(model: Any, tmp_path: Path) -> None:
    path, _ = model
    (tmp_path / "ranks").mkdir()
    tensorio.shard(path, tmp_path / "ranks", tp=2, rules=RULES)
    assert len(list((tmp_path / "ranks").iterdir())) == 3


@pytest.mark.skipif(os.name != "posix", reason="modes are those of POSIX")
@pytest.mark.parametrize("mode", [0o700, 0o750])
def test_folder_that_is_closed_to_others_stays_closed(mode: int, model: Any, tmp_path: Path) -> None:
    path, folder = model[0], tmp_path / "ranks"
    folder.mkdir()
    folder.chmod(mode)
    seen = set()

    def look(done: int, total: int) -> None:
        seen.update(stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir() if p.is_dir())

    tensorio.shard(path, folder, tp=2, rules=RULES, progress=look)
    assert seen == {mode, 0o700}
    tensorio.shard(path, folder, tp=4, rules=RULES, overwrite=True)
    assert stat.S_IMODE(folder.stat().st_mode) == mode


def test_folder_with_files_is_refused(model: Any, tmp_path: Path) -> None:
    path, _ = model
    tensorio.shard(path, tmp_path / "ranks", tp=2, rules=RULES)
    before = {p.name: p.read_bytes() for p in (tmp_path / "ranks").iterdir()}
    with pytest.raises(FileExistsError, match="not empty"):
        tensorio.shard(path, tmp_path / "ranks", tp=4, rules=RULES)
    assert {p.name: p.read_bytes() for p in (tmp_path / "ranks").iterdir()} == before
    with pytest.raises(NotADirectoryError):
        tensorio.shard(path, path, tp=2, rules=RULES)


def test_overwrite_replaces_only_what_an_earlier_call_made(model: Any, tmp_path: Path) -> None:
    path, tensors = model
    target = tmp_path / "ranks"
    tensorio.shard(path, target, tp=4, rules=RULES)
    tensorio.shard(path, target, tp=2, rules=RULES, overwrite=True)
    assert sorted(p.name for p in target.iterdir()) == sorted(
        ["tensorio_tp.json", *(p.name for p in rank_files(target, 2))]
    )
    assert_same(safetensors.torch.load_file(rank_files(target, 2)[1]), expected(tensors, 1, 2))
    (target / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="others in it"):
        tensorio.shard(path, target, tp=4, rules=RULES, overwrite=True)
    assert (target / "mine.txt").read_text() == "keep"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").write_text("")
    with pytest.raises(FileExistsError):
        tensorio.shard(path, tmp_path / "other", tp=4, rules=RULES, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors", "other", "ranks"]


def test_overwrite_takes_no_folder_for_a_file_of_its_own(model: Any, tmp_path: Path) -> None:
    path, ranks = model[0], tmp_path / "ranks"
    tensorio.shard(path, ranks, tp=2, rules=RULES)
    (ranks / "model-rank-1-part-0.safetensors").unlink()
    (ranks / "model-rank-1-part-0.safetensors").mkdir()
    (ranks / "model-rank-1-part-0.safetensors" / "mine").write_text("keep")
    with pytest.raises(FileExistsError):
        tensorio.shard(path, ranks, tp=2, rules=RULES, overwrite=True)
    assert (ranks / "model-rank-1-part-0.safetensors" / "mine").exists()


def test_link_to_a_folder_stays_a_link(model: Any, tmp_path: Path) -> None:
    path, _ = model
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    tensorio.shard(path, tmp_path / "link", tp=2, rules=RULES)
    assert (tmp_path / "link").is_symlink()
    assert len(list((tmp_path / "real").iterdir())) == 3


def test_failure_in_the_middle_leaves_nothing(model: Any, tmp_path: Path) -> None:
    path, _ = model

    def stop(done: int, total: int) -> None:
        assert len(list(tmp_path.iterdir())) == 2
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tensorio.shard(path, tmp_path / "ranks", tp=2, rules=RULES, progress=stop)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("way", ["convert", "shard", "unshard"])
def test_source_that_is_written_to_meanwhile_makes_nothing(way: str, tmp_path: Path) -> None:
    source, target = tmp_path / "model.safetensors", tmp_path / "target.safetensors"
    tensorio.save({"a": np.zeros((4, 1 << 20), "u1")}, source)
    if way == "unshard":
        tensorio.shard(source, tmp_path / "ranks", tp=2, rules={"a": 0})
        source = tmp_path / "ranks"

    def write(done: int, total: int) -> None:
        for path in source.iterdir() if source.is_dir() else (source,):
            with path.open("r+b") as f:
                f.seek(-1, os.SEEK_END)
                f.write(b"x")
            os.utime(path, (1, 1))

    with pytest.raises(tensorio.FormatError, match="changed while it was read"):
        if way == "convert":
            tensorio.convert(source, target, progress=write)
        elif way == "shard":
            tensorio.shard(source, target, tp=2, rules={"a": 0}, progress=write)
        else:
            tensorio.unshard(source, target, progress=write)
    assert not target.exists()
    assert not list(tmp_path.glob(".*"))


def test_index_of_nothing_is_cut_into_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert tensorio.shard(tmp_path, tmp_path / "ranks", tp=1, rules=[]).tensors == 0


def test_target_that_appears_meanwhile_is_not_replaced(model: Any, tmp_path: Path) -> None:
    path, _ = model

    def interfere(done: int, total: int) -> None:
        (tmp_path / "ranks").mkdir(exist_ok=True)
        (tmp_path / "ranks" / "mine").write_text("keep")

    with pytest.raises(FileExistsError):
        tensorio.shard(path, tmp_path / "ranks", tp=2, rules=RULES, progress=interfere)
    assert [p.name for p in (tmp_path / "ranks").iterdir()] == ["mine"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors", "ranks"]


def test_parent_folder_that_is_not_there_is_an_error_of_the_system(model: Any, tmp_path: Path) -> None:
    path, _ = model
    with pytest.raises(FileNotFoundError, match="no/ranks"):
        tensorio.shard(path, tmp_path / "no" / "ranks", tp=2, rules=RULES)


# ----------------------------------------------------------------------------- back


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("format", ["safetensors", "torch_zip"])
def test_round_trip_of_a_file_by_safetensors_is_the_same_file(model: Any, tp: int, format: str, tmp_path: Path) -> None:
    path, _ = model
    rules = RULES | {"gone": "rank0"}
    tensorio.shard(path, tmp_path / "ranks", tp=tp, rules=rules, format=format)
    assert tensorio.unshard(tmp_path / "ranks", tmp_path / "back.safetensors") == []
    assert (tmp_path / "back.safetensors").read_bytes() == path.read_bytes()


def test_round_trip_without_notes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"a": random("f4", 4, 6)}, path)
    tensorio.shard(path, tmp_path / "ranks", tp=3, rules={"a": 1})
    tensorio.unshard(tmp_path / "ranks", tmp_path / "back.safetensors")
    assert (tmp_path / "back.safetensors").read_bytes() == path.read_bytes()


def test_skipped_tensors_are_listed_when_put_together(model: Any, tmp_path: Path) -> None:
    path, tensors = model
    tensorio.shard(path, tmp_path / "ranks", tp=2, rules=RULES)
    assert tensorio.unshard(tmp_path / "ranks", tmp_path / "back.pt") == ["gone"]
    assert_same(torch.load(tmp_path / "back.pt", weights_only=True), {k: v for k, v in tensors.items() if k != "gone"})


DTYPES = [
    np.dtype(d) for d in ("bool", "u1", "i2", "i4", "f2", "f4", "f8", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn,
                          ml_dtypes.float8_e5m2)
]  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, dict[str, Array], dict[str, Any]]:
    """Ranks, tensors, and a rule for each that can be followed."""
    tp = draw(st.sampled_from([1, 2, 3, 4]))
    tensors, rules = {}, {}
    for i in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        dtype = draw(st.sampled_from(DTYPES))
        what: Any = draw(st.sampled_from(["replicate", "rank0", "cut", "pad", "sections", "heads"])) if shape else None
        if what not in (None, "replicate", "rank0"):
            dim = draw(st.integers(0, len(shape) - 1))
            ratios = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
            heads = draw(st.lists(st.sampled_from([1, tp, 2 * tp]), min_size=1, max_size=3))
            unit = {"cut": tp, "pad": 1, "sections": sum(ratios) * tp, "heads": sum(heads)}[what]
            shape[dim] *= unit
            fields = {
                "pad": {"pad_to": draw(st.integers(1, 5))},
                "sections": {"sections": ratios},
                "heads": {"heads": heads},
            }
            what = {"dim": dim - draw(st.sampled_from([0, len(shape)])), **fields.get(what, {})}
        tensors[f"t{i}"] = random("u1", *shape).astype(dtype) if dtype.kind == "b" else random(dtype, *shape)
        rules[f"t{i}"] = what
    return tp, tensors, rules


def slices(array: Array, rule: Any, rank: int, tp: int) -> Array | None:
    """What a rule leaves to a rank, by NumPy."""
    if not isinstance(rule, dict):
        return None if rule == "rank0" and rank else array
    dim = rule["dim"]
    if "pad_to" in rule:
        multiple = int(np.lcm(rule["pad_to"], tp))
        widths = [(0, 0)] * array.ndim
        widths[dim] = (0, -array.shape[dim] % multiple)
        zero = np.zeros_like(array, shape=[a + b for a, (_, b) in zip(array.shape, widths, strict=True)])
        zero[tuple(slice(n) for n in array.shape)] = array
        return np.split(zero, tp, axis=dim)[rank]
    sizes = rule.get("sections") or rule.get("heads") or [1]
    unit = array.shape[dim] // sum(sizes)
    parts = []
    for section, size in zip(np.split(array, np.cumsum(sizes)[:-1] * unit, axis=dim), sizes, strict=True):
        copies = max(tp // size, 1) if "heads" in rule else 1
        parts.append(np.split(section, tp // copies, axis=dim)[rank // copies])
    return np.concatenate(parts, axis=dim)


def fortran(array: Array) -> torch.Tensor:
    """The same tensor, for torch, with its strides the other way round."""
    dtype = getattr(torch, array.dtype.name)
    tensor = torch.from_numpy(array.view(f"u{array.itemsize}" if array.itemsize < 8 else "i8").copy()).view(dtype)
    other_way = tuple(reversed(range(array.ndim)))
    return tensor.reshape(array.shape).permute(other_way).contiguous().permute(other_way)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(), target=st.sampled_from(["safetensors", "torch_zip"]), source=st.sampled_from(["st", "pt", "T"]))
def test_any_rules_cut_as_numpy_does_and_come_back(case: Any, target: str, source: str, tmp_path_factory: Any) -> None:
    tp, tensors, rules = case
    folder = tmp_path_factory.mktemp("any")
    path = folder / ("x.safetensors" if source == "st" else "x.pt")
    if source == "T":  # in Fortran's order
        torch.save({name: fortran(array) for name, array in tensors.items()}, path)
    else:
        tensorio.save(tensors, path)
    tensorio.shard(path, folder / "ranks", tp=tp, rules=rules, format=target, durable=False)
    suffix = ".safetensors" if target == "safetensors" else ".pt"
    for rank, file in enumerate(rank_files(folder / "ranks", tp, suffix)):
        want = {k: part for k, v in tensors.items() if (part := slices(v, rules[k], rank, tp)) is not None}
        with tensorio.ranked(path, rank, tp=tp, rules=rules) as view:
            for found in (tensorio.load(file), view):
                assert set(found) == set(want)
                for name, part in want.items():
                    assert found[name].shape == part.shape, name
                    assert found[name].dtype == part.dtype, name
                    assert found[name].tobytes() == part.tobytes(), name
    tensorio.unshard(folder / "ranks", folder / "back.safetensors", durable=False)
    back = tensorio.load(folder / "back.safetensors")
    assert set(back) == set(tensors)
    for name, whole in tensors.items():
        assert back[name].shape == whole.shape
        assert back[name].tobytes() == whole.tobytes()


# ------------------------------------------------------------------- kinds of sources


def test_nested_torch_file_is_cut_by_dotted_names_and_other_values_are_listed(tmp_path: Path) -> None:
    w = torch.randn(4, 6)
    tree = {"model": {"a": w, "blocks": [w.T, w[1:3, ::2]]}, "epoch": 3, "name": "x"}
    torch.save(tree, tmp_path / "x.pt")
    rules = {"model.a": 0, "model.blocks.0": 1, "model.blocks.1": "1 pad_to=2"}
    report = tensorio.shard(tmp_path / "x.pt", tmp_path / "ranks", tp=2, rules=rules)
    assert report.dropped == ("epoch", "name")
    for rank, file in enumerate(rank_files(tmp_path / "ranks", 2)):
        part = torch.nn.functional.pad(w[1:3, ::2], (0, 1)).chunk(2, 1)[rank]
        want = {"model.a": w.chunk(2)[rank], "model.blocks.0": w.T.chunk(2, 1)[rank], "model.blocks.1": part}
        assert_same(safetensors.torch.load_file(file), want)


@pytest.mark.parametrize("format", ["safetensors", "torch_zip"])
def test_tied_tensors_stay_tied_where_the_format_can(format: str, tmp_path: Path) -> None:
    w, x = torch.nn.Parameter(torch.randn(8, 600)), torch.randn(8, 6)
    torch.save({"embed": w, "head": w, "other": x, "view": x[:]}, tmp_path / "x.pt")
    rules = {"{embed,head}": 0, "other": 0, "view": 1}
    report = tensorio.shard(tmp_path / "x.pt", tmp_path / "ranks", tp=2, rules=rules, format=format)
    if format == "torch_zip":
        part = torch.load(tmp_path / "ranks" / report.files[1][0], weights_only=True)
        assert part["embed"].data_ptr() == part["head"].data_ptr()
        assert part["other"].data_ptr() != part["view"].data_ptr()
        assert isinstance(part["embed"], torch.nn.Parameter)
        assert torch.equal(part["embed"], w.chunk(2)[1])
    tensorio.unshard(tmp_path / "ranks", tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert_same(back, {"embed": w.detach(), "head": w.detach(), "other": x, "view": x})
    assert (back["embed"].data_ptr() == back["head"].data_ptr()) == (format == "torch_zip")


def test_records_that_are_not_raw_are_cut_as_well(tmp_path: Path) -> None:
    """Deflated, and of the other byte order."""
    array = np.arange(48, dtype=">f4").reshape(6, 8)
    items = {"w": hexfile.tensor("0", 48, (6, 8)), "x": hexfile.tensor("0", 48, (6, 8))}
    records = hexfile.torch_records(hexfile.pickled(hexfile.mapping(items)), {"0": array.tobytes()}, byteorder="big")
    for record in records:
        record.method = 8 if record.name.endswith("data/0") else 0  # type: ignore[arg-type]
    (tmp_path / "x.pt").write_bytes(hexfile.zip_file(records))
    rules = {"w": 1, "x": "0 sections=1,1,1"}
    tensorio.shard(tmp_path / "x.pt", tmp_path / "ranks", tp=2, rules=rules)
    for rank, file in enumerate(rank_files(tmp_path / "ranks", 2)):
        found = safetensors.numpy.load_file(file)
        np.testing.assert_array_equal(found["w"], np.split(array, 2, axis=1)[rank])
        np.testing.assert_array_equal(found["x"], array[rank::2])


def test_packed_elements_are_cut_and_come_back(tmp_path: Path) -> None:
    payload = RNG.bytes(4 * 8 // 2)
    header = b'{"x":{"dtype":"F4","shape":[4,8],"data_offsets":[0,16]}}'
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + payload)
    for tp, format in ((2, "safetensors"), (4, "safetensors"), (2, "torch_zip")):
        folder = tmp_path / f"{tp}{format}"
        tensorio.shard(path, folder, tp=tp, rules={"x": 1}, format=format)
        part = np.frombuffer(payload, "u1").reshape(4, 4)[:, : 4 // tp].tobytes()
        (array,) = tensorio.load(min(folder.iterdir())).values()
        assert array.tobytes() == part
        tensorio.unshard(folder, tmp_path / "back.safetensors")
        with safetensors.safe_open(tmp_path / "back.safetensors", "pt") as back:
            assert back.get_slice("x").get_shape() == [4, 8]
        assert (tmp_path / "back.safetensors").read_bytes().endswith(payload)


@pytest.mark.parametrize("shape", [(3, 5, 200_000), (2, 2_000_000), (1500, 1200), (2, 3, 4, 100_000)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_pieces_of_large_tensors_fit_together(shape: tuple[int, ...], order: str, tmp_path: Path) -> None:
    """Larger than a piece in all ways: many rows of few bytes, few of many, in either order of memory."""
    array = np.arange(np.prod(shape), dtype="f4").reshape(shape)
    tensor = torch.from_numpy(array)
    if order == "F":
        tensor = tensor.permute(*reversed(range(len(shape)))).contiguous().permute(*reversed(range(len(shape))))
    torch.save({"a": tensor, "b": tensor}, tmp_path / "x.pt")
    half = shape[-1] // 2
    rules = {"a": "-1 pad_to=3", "b": f"-1 sections={half},{half}"}
    tensorio.shard(tmp_path / "x.pt", tmp_path / "ranks", tp=2, rules=rules, durable=False)
    width = -(-shape[-1] // 6) * 6
    padded = np.concatenate([array, np.zeros((*shape[:-1], width - shape[-1]), "f4")], -1)
    for rank, file in enumerate(rank_files(tmp_path / "ranks", 2)):
        found = safetensors.numpy.load_file(file)
        np.testing.assert_array_equal(found["a"], np.split(padded, 2, -1)[rank])
        want = np.concatenate([np.split(section, 2, -1)[rank] for section in np.split(array, 2, -1)], -1)
        np.testing.assert_array_equal(found["b"], want)
    tensorio.unshard(tmp_path / "ranks", tmp_path / "back.safetensors", durable=False)
    back = safetensors.numpy.load_file(tmp_path / "back.safetensors")
    np.testing.assert_array_equal(back["a"], array)
    np.testing.assert_array_equal(back["b"], array)


def test_buffers_and_file_objects_may_be_cut(model: Any, tmp_path: Path) -> None:
    path, tensors = model
    with open(path, "rb") as file:
        for i, source in enumerate((path.read_bytes(), file)):
            tensorio.shard(source, tmp_path / str(i), tp=2, rules=RULES)
            assert_same(safetensors.torch.load_file(rank_files(tmp_path / str(i), 2)[1]), expected(tensors, 1, 2))


def test_config_beside_the_source_gives_numbers_of_heads(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    safetensors.numpy.save_file({name: np.arange(32.0).reshape(8, 4)}, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=r"'num_attention_heads' of the model's config\.json, which is not given"):
        tensorio.shard(tmp_path / "m.safetensors", tmp_path / "x", tp=4, rules="llama")
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4, "num_key_value_heads": 2}')
    report = tensorio.shard(tmp_path / "m.safetensors", tmp_path / "x", tp=4, rules="llama")
    assert report.repeated == (name,)
    tensorio.shard(tmp_path / "m.safetensors", tmp_path / "y", tp=4, rules="llama", config={"num_attention_heads": 4})
    (tmp_path / "config.json").write_text("no JSON, and no matter to rules that need nothing of it")
    tensorio.shard(tmp_path / "m.safetensors", tmp_path / "z", tp=4, rules={name: "0 heads=2"})
    with pytest.raises(HeaderError, match="JSON"):
        tensorio.shard(tmp_path / "m.safetensors", tmp_path / "w", tp=4, rules="llama")
    (tmp_path / "config.json").write_text('{"kv": 2}')
    pairs = ((pattern, "0 heads=$kv") for pattern in [name])
    assert tensorio.shard(tmp_path / "m.safetensors", tmp_path / "w", tp=4, rules=pairs).repeated == (name,)
    shapes = [safetensors.numpy.load_file(rank_files(tmp_path / folder, 4)[0])[name].shape for folder in "xy"]
    assert shapes == [(4, 4), (2, 4)]


# ----------------------------------------------------------------- folders with an index


@pytest.fixture
def indexed(model: Any, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """The model in two files, as `save_pretrained` leaves it."""
    _, tensors = model
    folder = tmp_path / "hub"
    folder.mkdir()
    names = list(tensors)
    files = {"model-00001-of-00002.safetensors": names[:4], "model-00002-of-00002.safetensors": names[4:]}
    for file, held in files.items():
        safetensors.torch.save_file(
            {n: tensors[n] for n in held}, folder / file, metadata={"format": "pt", "file": file}
        )
    index = {"metadata": {"total_size": 1}, "weight_map": {n: file for file, held in files.items() for n in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder, tensors


def test_folder_with_an_index_is_one_checkpoint(indexed: Any, tmp_path: Path) -> None:
    folder, tensors = indexed
    tensorio.shard(folder, tmp_path / "ranks", tp=2, rules=RULES)
    for rank, file in enumerate(rank_files(tmp_path / "ranks", 2)):
        assert_same(safetensors.torch.load_file(file), expected(tensors, rank, 2))
        with tensorio.ranked(folder, rank, tp=2, rules=RULES) as view:
            assert {n: a.tobytes() for n, a in view.items()} == {n: a.tobytes() for n, a in tensorio.load(file).items()}
            assert view.metadata == {"format": "pt"}


def change_index(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda i: i["weight_map"].update(step="../x"), HeaderError, "weight_map"),
        (lambda i: i["weight_map"].update(step="/etc/x"), HeaderError, "weight_map"),
        (lambda i: i["weight_map"].update(step=".."), HeaderError, "weight_map"),
        (lambda i: i["weight_map"].update(step=3), HeaderError, "weight_map"),
        (lambda i: i.update(weight_map=[]), HeaderError, "weight_map"),
        (lambda i: i["weight_map"].update(step="model-00003.safetensors"), TruncatedError, "'model-00003.safetensors'"),
        (lambda i: i["weight_map"].update(more="model-00001-of-00002.safetensors"), HeaderError, "does not have it"),
        (lambda i: i["weight_map"].update(step="model-00001-of-00002.safetensors"), HeaderError, "does not have it"),
        (lambda i: i["weight_map"].pop("step"), HeaderError, "does not name a tensor"),
    ],
)
def test_index_that_does_not_fit_the_files_is_refused(
    indexed: Any, change: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    folder, _ = indexed
    change_index(folder, change)
    with pytest.raises(error, match=message):
        tensorio.shard(folder, tmp_path / "ranks", tp=2, rules=RULES)
    assert not (tmp_path / "ranks").exists()


def test_tensor_in_two_files_is_refused(indexed: Any, tmp_path: Path) -> None:
    folder, tensors = indexed
    held = safetensors.torch.load_file(folder / "model-00002-of-00002.safetensors")
    safetensors.torch.save_file(held | {"embed": tensors["embed"]}, folder / "model-00002-of-00002.safetensors")
    with pytest.raises(HeaderError, match=r"is in 'model-00001-of-00002\.safetensors', too"):
        tensorio.shard(folder, tmp_path / "ranks", tp=2, rules=RULES)


# ------------------------------------------------------------- what may be wrong on the way back


@pytest.fixture
def ranks(model: Any, tmp_path: Path) -> Path:
    path, _ = model
    tensorio.shard(path, tmp_path / "ranks", tp=4, rules=RULES)
    return tmp_path / "ranks"


def change_file(path: Path, change: Any) -> None:
    with safetensors.safe_open(path, "pt") as file:
        notes = file.metadata()
    tensors = safetensors.torch.load_file(path)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors)
    safetensors.torch.save_file(tensors, path, metadata=notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["layers.0.norm"].view(torch.uint8).__setitem__(5, 0x3F), "ranks 0 and 2 should have the same"),
        (lambda t: t["step"].fill_(4), "ranks 0 and 2 should have the same here, and differ"),
        (lambda t: t["layers.0.qkv"][-1].fill_(7), "ranks 2 and 3 should have the same"),
        (lambda t: t.pop("layers.0.up"), "rank 2 does not have its part"),
        (lambda t: t.update({"layers.0.up": torch.zeros(3, 6).bfloat16()}), r"expected bfloat16 of shape \[2, 6\]"),
        (lambda t: t.update({"layers.0.up": torch.zeros(2, 6)}), r"found float32 of shape \[2, 6\]"),
        (lambda t: t.update(more=torch.zeros(2)), "rank 2 has a tensor that the manifest does not list"),
    ],
)
def test_rank_files_that_do_not_fit_are_refused(ranks: Path, change: Any, message: str, tmp_path: Path) -> None:
    if "ranks 2 and 3" in message:
        change_file(rank_files(ranks, 4)[3], change)
    else:
        change_file(rank_files(ranks, 4)[2], change)
    with pytest.raises((TensorMismatchError, HeaderError), match=message) as caught:
        tensorio.unshard(ranks, tmp_path / "back.safetensors")
    assert caught.value.record is not None
    assert not (tmp_path / "back.safetensors").exists()


def test_elements_still_to_be_conjugated_are_refused(tmp_path: Path) -> None:
    """Their bytes alone are other numbers."""
    whole = torch.arange(4).to(torch.complex64) * 1j
    torch.save({"z": whole}, tmp_path / "model.pt")
    tensorio.shard(tmp_path / "model.pt", tmp_path / "ranks", tp=2, rules={"z": 0}, format="torch_zip")
    path = min((tmp_path / "ranks").glob("*rank-1*"))
    torch.save({"z": torch.load(path)["z"].conj()}, path)
    with pytest.raises(TensorMismatchError, match="rank 1: expected plain elements"):
        tensorio.unshard(tmp_path / "ranks", tmp_path / "back.pt")


def test_padding_that_is_no_longer_zero_is_cut_off(ranks: Path, model: Any, tmp_path: Path) -> None:
    change_file(rank_files(ranks, 4)[3], lambda t: t["embed"][-1].fill_(7))
    tensorio.unshard(ranks, tmp_path / "back.safetensors")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "back.safetensors")["embed"], model[1]["embed"])


def test_missing_rank_file_and_missing_manifest_are_named(ranks: Path, tmp_path: Path) -> None:
    rank_files(ranks, 4)[1].unlink()
    with pytest.raises(TruncatedError, match=r"'model-rank-1-part-0\.safetensors' of the group is missing"):
        tensorio.unshard(ranks, tmp_path / "back.safetensors")
    (ranks / "tensorio_tp.json").unlink()
    with pytest.raises(FileNotFoundError, match="tensorio_tp"):
        tensorio.unshard(ranks, tmp_path / "back.safetensors")


def edited(**changes: Any) -> Any:
    return lambda manifest: manifest.update(changes)


def edited_tensor(**changes: Any) -> Any:
    return lambda manifest: manifest["tensors"]["layers.0.up"].update(changes)


@pytest.mark.parametrize(
    "change",
    [
        edited(format="x"), edited(version=2), edited(tp=3), edited(tp=0), edited(tp=True), edited(tp="4"),
        edited(tp=1 << 40), edited(files=[]), edited(files=[["a"]] * 4), edited(files=[["../x"], ["b"], ["c"], ["d"]]),
        edited(files=[["/x"], ["b"], ["c"], ["d"]]), edited(files=[[], [], [], 3]), edited(files=[[3], [], [], []]),
        edited(metadata=[]), edited(metadata={"a": 1}), edited(tensors=[]), edited(skipped=None), edited(source=None),
        edited(tensors={"x": []}), edited_tensor(dtype="float31"), edited_tensor(dtype=["float32"]),
        edited_tensor(shape=[8, -6]), edited_tensor(shape=[8, 6.0]), edited_tensor(shape=[1] * 100),
        edited_tensor(shape=[1 << 60, 1 << 60]), edited_tensor(shape=8), edited_tensor(dim=5), edited_tensor(dim="0"),
        edited_tensor(action="eat"), edited_tensor(heads=[0]), edited_tensor(heads="8"), edited_tensor(sections=[3]),
        edited_tensor(other=1), edited_tensor(shape=[16, 6]), edited_tensor(pad_to=-1), edited_tensor(heads=[1 << 80]),
        edited_tensor(pad_to=10**4299), edited_tensor(dim=-(10**4299)), edited(metadata={"a": "\ud800"}),
        edited(skipped=["\udfff"]), edited_tensor(shape=[4 << 20, 6], sections=[1] * (1 << 20)),
        edited_tensor(shape=[4096, 6], sections=[1] * 1024),
        lambda m: m["tensors"].update({"extra": {"dtype": "int8", "shape": [4], "action": "replicate"}}),
        lambda m: m["tensors"].update({"extra": {"dtype": "int8", "shape": [4], "action": "skip"}}),
    ],
)  # fmt: skip
def test_manifest_that_is_wrong_is_an_error_of_ours(ranks: Path, change: Any, tmp_path: Path) -> None:
    path = ranks / "tensorio_tp.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(tensorio.TensorIOError) as caught:
        tensorio.unshard(ranks, tmp_path / "back.safetensors")
    assert len(str(caught.value)) <= 500
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "back.safetensors").exists()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"format": "tensorio_tp", "format": 1}', b"\xff", b"[" * 50_000])
def test_manifest_that_is_no_json_is_an_error_of_ours(ranks: Path, data: bytes, tmp_path: Path) -> None:
    (ranks / "tensorio_tp.json").write_bytes(data)
    with pytest.raises(tensorio.FormatError):
        tensorio.unshard(ranks, tmp_path / "back.safetensors")


def test_manifest_has_a_line_for_each_tensor(ranks: Path) -> None:
    text = (ranks / "tensorio_tp.json").read_text()
    assert '\n"layers.0.down": {"dtype": "bfloat16", "shape": [6, 8], "action": "cut", "dim": 1},\n' in text
    assert json.loads(text)["files"][3] == ["model-rank-3-part-0.safetensors"]


def test_manifest_reaches_no_file_outside(ranks: Path, tmp_path: Path) -> None:
    """A folder that names a file of somebody else is not taken for ours, nor is the file opened."""
    (tmp_path / "secret.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    path = ranks / "tensorio_tp.json"
    path.write_text(path.read_text().replace("model-rank-1-part-0", "../secret"))
    with pytest.raises(HeaderError, match="names of files"):
        tensorio.unshard(ranks, tmp_path / "back.safetensors")
    with pytest.raises(FileExistsError):
        tensorio.shard(tmp_path / "model.safetensors", ranks, tp=2, rules=RULES, overwrite=True)


# ------------------------------------------------------------------- large, and killed

BIG = 1 << 30
TENSORS = 16
MEMORY = """
import json, sys
import numpy, tensorio, tensorio.checkpoint._pieces, tensorio.checkpoint._unshard, tensorio.formats.safetensors
import tensorio.formats.torch_zip, tensorio._pickler, ml_dtypes

def status(field):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(field + ":"))

rules = {"*.up": 0, "*.down": 1, "*.qkv": "1 sections=2,1,1", "*.padded": "0 pad_to=96"}
before = status("VmHWM")
if sys.argv[1] == "shard":
    tensorio.shard(sys.argv[2], sys.argv[3], tp=4, rules=rules, format=sys.argv[4], durable=False)
else:
    tensorio.unshard(sys.argv[2], sys.argv[3], durable=False)
print(status("VmHWM") - before)
"""


def child(*arguments: object) -> list[str]:
    return [sys.executable, "-c", MEMORY, *map(str, arguments)]


ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


@pytest.fixture
def big(tmp_path: Path) -> Iterator[Path]:
    """A gibibyte, most of it a hole."""
    kinds = ("up", "down", "qkv", "padded")
    entries, at = {}, 0
    for i in range(TENSORS):
        shape = [4096, BIG // TENSORS // 2 // 4096]
        entries[f"{i}.{kinds[i % 4]}"] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + BIG // TENSORS]}
        at += BIG // TENSORS
    header = json.dumps(entries).encode()
    path = tmp_path / "big.safetensors"
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        start = file.tell()
        for i in range(TENSORS):
            file.seek(start + i * (BIG // TENSORS) + 12345 * i)
            file.write(bytes([i + 1]) * 100_000)
        file.truncate(start + BIG)
    yield path
    for leftover in tmp_path.rglob("*"):
        if leftover.is_file():
            leftover.unlink()


@LINUX
@pytest.mark.plain_build
@pytest.mark.parametrize("format", ["safetensors", "torch_zip"])
def test_cutting_a_gibibyte_and_back_takes_under_64_mib(big: Path, format: str, tmp_path: Path) -> None:
    back = tmp_path / "back.safetensors"
    for arguments in (("shard", big, tmp_path / "ranks", format), ("unshard", tmp_path / "ranks", back)):
        done = subprocess.run(
            child(*arguments), env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) < 64 * MIB
    with tensorio.open(big) as whole, tensorio.open(back) as again:
        assert all(np.array_equal(again[name].view("u2"), whole[name].view("u2")) for name in whole)


@pytest.mark.plain_build
@pytest.mark.skipif(os.name != "posix", reason="kills with a signal")
def test_killed_in_the_middle_there_is_no_folder(big: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(child("shard", big, tmp_path / "ranks", "safetensors"), env=ENVIRONMENT)
    deadline = time.monotonic() + 60
    while not (files := list(tmp_path.glob(".ranks.*/*.safetensors"))) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert files
    assert not (tmp_path / "ranks").exists()
    assert not list(tmp_path.glob(".ranks.*/tensorio_tp.json"))
    tensorio.shard(big, tmp_path / "ranks", tp=2, rules={"*.*": 0}, durable=False)  # what is left is in nobody's way
