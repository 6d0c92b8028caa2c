"""`merge`: tensors of several files in one, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import tensorio
from tensorio.cli import run
from tensorio.errors import TensorMismatchError

PREFIX = "base_model.model."
BASE = {"q.weight": np.arange(6, dtype="f4").reshape(2, 3), "k.weight": np.ones(2, "i8")}
LORA = {PREFIX + "q.lora_A.weight": np.ones((1, 3), "f4"), PREFIX + "k.weight": np.array([7, 8])}


def without_prefix(name: str) -> str:
    return name.removeprefix(PREFIX)


def files(folder: Path, *states: Any, suffix: str = "safetensors") -> list[Path]:
    paths = [folder / f"{i}.{suffix}" for i in range(len(states))]
    for path, state in zip(paths, states, strict=True):
        tensorio.save(state, path)
    return paths


def assert_same(got: Any, want: dict[str, Any]) -> None:
    assert sorted(got) == sorted(want)
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, strict=True)


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("target", ["safetensors", "pt"])
def test_adapter_goes_over_and_beside_the_base(suffix: str, target: str, tmp_path: Path) -> None:
    base, lora = files(tmp_path, BASE, LORA, suffix=suffix)
    dst = tmp_path / f"out.{target}"
    said = tensorio.merge(base, lora, dst=dst, rename=without_prefix)
    assert said == tensorio.Merged(str(dst), dst.stat().st_size, ("q.lora_A.weight",), ("k.weight",), (), ())
    want = {
        "q.weight": BASE["q.weight"],
        "k.weight": LORA[PREFIX + "k.weight"],
        "q.lora_A.weight": np.ones((1, 3), "f4"),
    }
    assert_same(tensorio.load(dst), want)
    if target == "safetensors":
        assert_same(safetensors.numpy.load_file(dst), want)


def test_last_file_counts_most_and_keep_turns_that_round(tmp_path: Path) -> None:
    a, b, c = files(tmp_path, *({"x": np.array([i]), f"y{i}": np.array([i])} for i in range(3)))
    dst = tmp_path / "out.safetensors"
    assert tensorio.merge(a, b, c, dst=dst).replaced == ("x", "x")
    assert_same(tensorio.load(dst), {"x": np.array([2]), "y0": np.array([0]), "y1": np.array([1]), "y2": np.array([2])})
    assert tensorio.merge(a, b, c, dst=dst, on_conflict="keep").kept == ("x", "x")
    assert tensorio.load(dst)["x"] == 0
    assert tensorio.merge(a, dst=dst) == tensorio.Merged(str(dst), a.stat().st_size, (), (), (), ())


def test_metadata_is_the_bases_and_other_values_are_listed(tmp_path: Path) -> None:
    tensorio.save({"a": np.ones(1)}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    tensorio.save({"b": np.ones(1), "epoch": 3}, tmp_path / "b.pt")
    said = tensorio.merge(tmp_path / "a.safetensors", tmp_path / "b.pt", dst=tmp_path / "c.safetensors")
    assert said.dropped == ("epoch",)
    assert tensorio.open(tmp_path / "c.safetensors").metadata == {"format": "pt"}


def test_tied_and_strided_tensors_are_merged_by_value(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.arange(12.0).reshape(3, 4)
    torch.save({"a": weight, "tied": weight, "t": weight.t()}, tmp_path / "a.pt")
    torch.save({"b": weight[:, ::2]}, tmp_path / "b.pt")
    tensorio.merge(tmp_path / "a.pt", tmp_path / "b.pt", dst=tmp_path / "c.pt")
    got = torch.load(tmp_path / "c.pt")
    for name, tensor in {"a": weight, "tied": weight, "t": weight.t(), "b": weight[:, ::2]}.items():
        assert torch.equal(got[name], tensor)
    assert got["a"].data_ptr() == got["tied"].data_ptr()


@pytest.mark.parametrize(
    ("later", "options", "message"),
    [
        (
            {"x": np.ones(3)},
            {},
            r"expected float64 of shape \[2\], as in an earlier file, found float64 of shape \[3\]",
        ),
        ({"x": np.ones(2, "f4")}, {}, "found float32"),
        ({"x": np.ones(2)}, {"on_conflict": "error"}, "in an earlier file, too"),
        ({"a": np.ones(2), "b": np.ones(2)}, {"rename": lambda name: "x"}, "gives two tensors the name 'x'"),
    ],
)
def test_what_does_not_fit_is_refused(later: Any, options: Any, message: str, tmp_path: Path) -> None:
    base, other = files(tmp_path, {"x": np.ones(2)}, later)
    with pytest.raises(TensorMismatchError, match=message) as caught:
        tensorio.merge(base, other, dst=tmp_path / "out.safetensors", **options)
    assert caught.value.path == str(other)
    assert sorted(tmp_path.iterdir()) == [base, other]


def test_shards_of_a_base_are_merged_into_shards(tmp_path: Path) -> None:
    """Which file has which tensor is what huggingface_hub says of the merged dict: in order, up to the limit."""
    base = {f"l{i}.weight": np.full(100, i, "f4") for i in range(4)}
    tensorio.save(base, tmp_path / "base", max_shard_size=800)
    (tmp_path / "base" / "config.json").write_text("{}")
    adapter = tmp_path / "adapter.safetensors"
    safetensors.numpy.save_file({"l1.weight": np.full(100, 9, "f4"), "l9.lora_A": np.ones(50, "f4")}, adapter)
    merged = tensorio.merge(tmp_path / "base", adapter, dst=tmp_path / "out", max_shard_size=800)
    names = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [*names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 1800}
    got = {}
    for name in names:
        part = safetensors.numpy.load_file(tmp_path / "out" / name)
        assert set(part) == {fqn for fqn, file in index["weight_map"].items() if file == name}
        got.update(part)
    assert_same(got, {**base, "l1.weight": np.full(100, 9, "f4"), "l9.lora_A": np.ones(50, "f4")})
    assert merged.nbytes == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert merged.replaced == ("l1.weight",)
    with pytest.raises(TensorMismatchError):
        tensorio.merge(tmp_path / "base", adapter, dst=tmp_path / "no", max_shard_size=800, on_conflict="error")
    assert not (tmp_path / "no").exists()


def test_command_merges_into_shards_over_the_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, lora = files(tmp_path, BASE, LORA)
    folder = tmp_path / "model"
    tensorio.convert(base, folder, max_shard_size=20)
    (folder / "config.json").write_text("{}")
    command = ["merge", str(folder), str(lora), "-o", str(folder), "--strip-prefix", PREFIX, "--max-shard-size"]
    assert run([*command, "lots"]) == 2
    assert "expected --max-shard-size to be" in capsys.readouterr().err
    assert run([*command, "24B"]) == 0
    assert (folder / "config.json").exists()
    want = {"q.weight": BASE["q.weight"], "k.weight": LORA[PREFIX + "k.weight"],
            "q.lora_A.weight": LORA[PREFIX + "q.lora_A.weight"]}  # fmt: skip
    got = [safetensors.numpy.load_file(path) for path in folder.glob("model-*.safetensors")]
    assert_same({name: array for part in got for name, array in part.items()}, want)


def test_conflict_is_one_of_three(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one of replace, keep, error"):
        tensorio.merge(*files(tmp_path, BASE, LORA), dst=tmp_path / "x.pt", on_conflict="sum")


def test_command_merges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, lora = files(tmp_path, BASE, LORA)
    dst = tmp_path / "out.safetensors"
    command = ["merge", str(base), str(lora), "-o", str(dst), "--strip-prefix", PREFIX]
    assert run(command) == 0
    out = capsys.readouterr().out
    assert "added" in out
    assert "q.lora_A.weight" in out
    assert run([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["added"] == ["q.lora_A.weight"]
    assert found["replaced"] == ["k.weight"]
    assert run([*command, "--on-conflict", "error"]) == 1
    assert "--on-conflict" in capsys.readouterr().err
    assert run(["merge", str(base), str(lora)]) == 2
    assert run(["merge", str(base), str(lora), "-o", "x.zzz"]) == 2


def test_prefix_that_no_adapter_has_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, lora = files(tmp_path, BASE, LORA)
    dst = tmp_path / "out.safetensors"
    assert run(["merge", str(base), str(lora), "-o", str(dst), "--strip-prefix", "base.model."]) == 1
    assert f"begins with --strip-prefix 'base.model.'; the first is '{PREFIX}" in capsys.readouterr().err
    assert not dst.exists()
    assert run(["merge", str(base), str(base), str(lora), "-o", str(dst), "--strip-prefix", PREFIX]) == 0
