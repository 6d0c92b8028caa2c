"""`include` and `exclude`: which part of an object they save and convert."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import tensorio
from tensorio.cli import run
from tensorio.errors import TensorMismatchError, TensorNotFoundError, UnsupportedError

ONE, TWO = np.ones(3, "f4"), np.arange(4)
LORA = "base_model.model.layers.0.q_proj.lora_A.weight"
STATE = {LORA: ONE, "base_model.model.layers.0.q_proj.weight": TWO, "lm_head.weight": ONE + 1}
TREE = {"model": OrderedDict(a=ONE, b=TWO), "optimizer": {"state": [{"m": ONE + 2}, {"m": TWO}], "lr": 0.1}, "epoch": 7}


def names(path: Path) -> list[str]:
    with tensorio.open(path) as checkpoint:
        return sorted(checkpoint)


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_adapters_alone_are_saved(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{suffix}"
    tensorio.save(STATE, path, include="**.lora_*.**")
    assert names(path) == [LORA]
    tensorio.save(STATE, path, include=["**.lora_*.**", "lm_head.*"], exclude="**.bias")
    assert names(path) == sorted([LORA, "lm_head.weight"])
    tensorio.save(STATE, path, exclude=("**.lora_*.**", "nothing"))
    assert names(path) == sorted(set(STATE) - {LORA})


def test_reference_reads_what_was_chosen(tmp_path: Path) -> None:
    tensorio.save(STATE, tmp_path / "x.safetensors", include="**.lora_*.**")
    (got,) = safetensors.numpy.load_file(tmp_path / "x.safetensors").values()
    np.testing.assert_array_equal(got, ONE)


def test_include_leaves_out_what_is_no_tensor_and_exclude_does_not(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    tensorio.save(TREE, path, include=["model.*", "optimizer.state.1.*"])
    got = tensorio.load(path)
    assert list(got) == ["model", "optimizer"]
    assert type(got["model"]) is OrderedDict
    assert got["optimizer"].keys() == {"state"}
    np.testing.assert_array_equal(got["optimizer"]["state"][0]["m"], TWO)
    tensorio.save(TREE, path, exclude="optimizer.state.**")
    got = tensorio.load(path)
    assert got["optimizer"] == {"state": [{}, {}], "lr": 0.1}
    assert got["epoch"] == 7
    tensorio.save(TREE, path, exclude="model.a")
    assert list(tensorio.load(path)["model"]) == ["b"]


def test_versions_of_a_torch_state_dict_stay(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).state_dict()
    tensorio.save(state, tmp_path / "x.pt", exclude="0.*")
    got = torch.load(tmp_path / "x.pt")
    assert list(got) == [name for name in state if name.startswith("1.")]
    assert got._metadata == state._metadata


@pytest.mark.parametrize("source", ["pt", "safetensors"])
@pytest.mark.parametrize("target", ["pt", "safetensors"])
def test_convert_chooses_by_the_names_of_the_source(source: str, target: str, tmp_path: Path) -> None:
    src, dst = tmp_path / f"s.{source}", tmp_path / f"d.{target}"
    tensorio.save(STATE, src)
    assert tensorio.convert(src, dst, include="**.lora_*.**") == []
    assert names(dst) == [LORA]
    tensorio.convert(src, dst, include="**.lora_*.**", rename=lambda name: name.removeprefix("base_model."))
    assert names(dst) == [LORA.removeprefix("base_model.")]
    tensorio.convert(src, dst, exclude="**.lora_*.**")
    assert names(dst) == sorted(set(STATE) - {LORA})


def test_convert_keeps_the_tree_of_what_is_chosen(tmp_path: Path) -> None:
    tensorio.save(TREE, tmp_path / "s.pt")
    tensorio.convert(tmp_path / "s.pt", tmp_path / "d.pt", exclude="optimizer.**")
    got = tensorio.load(tmp_path / "d.pt")
    assert got["optimizer"] == {"state": [{}, {}], "lr": 0.1}
    assert got["epoch"] == 7
    tensorio.convert(tmp_path / "s.pt", tmp_path / "d.pt", include="model.a")
    got = tensorio.load(tmp_path / "d.pt")
    assert list(got) == ["model"]
    assert list(got["model"]) == ["a"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"include": "*lora_*"}, TensorNotFoundError, r"include='\*lora_\*' fits none of 3 tensors; \* stays within"),
        ({"include": ["lm_head.*", "x"]}, TensorNotFoundError, "include='x' fits none"),
        ({"exclude": "**"}, TensorMismatchError, "leave no tensor"),
        ({"include": "a**"}, ValueError, "stands for whole levels"),
        ({"include": [3]}, TypeError, "include= is a pattern"),
    ],
)
def test_patterns_that_choose_nothing_are_refused(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        tensorio.save(STATE, tmp_path / "x.safetensors", **options)
    assert list(tmp_path.iterdir()) == []


def test_only_containers_have_parts_to_choose(tmp_path: Path) -> None:
    with pytest.raises(TensorMismatchError, match="found ndarray"):
        tensorio.save(ONE, tmp_path / "x.pt", include="**")
    with pytest.raises((TensorMismatchError, UnsupportedError)):
        tensorio.save(object(), tmp_path / "x.pt", exclude="a")


def test_command_converts_a_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src, dst = tmp_path / "s.pt", tmp_path / "d.safetensors"
    tensorio.save(TREE, src)
    assert (
        run(["convert", str(src), str(dst), "--include", "model.*", "--include", "**.m", "--exclude", "model.b"]) == 0
    )
    assert names(dst) == ["model.a", "optimizer.state.0.m", "optimizer.state.1.m"]
    assert run(["convert", str(src), str(dst), "--include", "x"]) == 1
    assert "fits none of 4 tensors" in capsys.readouterr().err
    assert run(["convert", str(src), str(dst), "--exclude", "a**"]) == 2
    assert "stands for whole levels" in capsys.readouterr().err
    views = {"a": np.arange(200.0).reshape(20, 10)[:, ::2]}
    torch = pytest.importorskip("torch")
    torch.save({"a": torch.from_numpy(views["a"])}, src)
    assert run(["convert", str(src), str(tmp_path / "d.pt"), "--compact"]) == 0
    assert torch.load(tmp_path / "d.pt")["a"].is_contiguous()
