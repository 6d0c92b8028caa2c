"""`strip`: what is taken for weights, what is left out, and what is written."""

from __future__ import annotations

import argparse
import json
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import tensorio
from tensorio.checkpoint._strip import WEIGHTS
from tensorio.cli import run
from tensorio.errors import FormatError, TensorMismatchError

torch = pytest.importorskip("torch")


def trained() -> tuple[Any, Any]:
    """A small model and its optimizer, after a step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


MODEL, OPTIMIZER = trained()
STATE, OTHER = MODEL.state_dict(), OPTIMIZER.state_dict()
RNG = torch.get_rng_state()
LAYOUTS: dict[str, tuple[Any, str | None]] = {
    "tutorial": ({"epoch": 1, "model_state_dict": STATE, "optimizer_state_dict": OTHER, "loss": 0.5},
                 "model_state_dict"),
    "lightning": ({"epoch": 1, "pytorch-lightning_version": "2", "state_dict": STATE, "loops": {}, "callbacks": {},
                   "optimizer_states": [OTHER], "lr_schedulers": []}, "state_dict"),
    "torchvision": ({"model": STATE, "optimizer": OTHER, "lr_scheduler": {}, "epoch": 1, "model_ema": STATE,
                     "args": argparse.Namespace(lr=1)}, "model"),
    "deepspeed": ({"module": STATE, "buffer_names": [], "optimizer": OTHER, "rng": RNG}, "module"),
    "timm": ({"epoch": 1, "arch": "x", "state_dict": STATE, "state_dict_ema": STATE, "optimizer": OTHER}, "state_dict"),
    "flat": (STATE, None),
    "beside": ({**STATE, "optimizer": OTHER, "rng_state": RNG}, None),
}  # fmt: skip


def assert_state(got: Any) -> None:
    assert sorted(got) == sorted(STATE)
    for name, tensor in STATE.items():
        found = got[name]
        assert torch.equal(found if isinstance(found, torch.Tensor) else torch.from_numpy(np.array(found)), tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("how", ["nested", "flat", "safetensors"])
def test_weights_of_usual_layouts_are_kept_and_nothing_else(layout: str, how: str, tmp_path: Path) -> None:
    saved, entry = LAYOUTS[layout]
    src, dst = tmp_path / "src.pt", tmp_path / ("dst.safetensors" if how == "safetensors" else "dst.pt")
    torch.save(saved, src)
    report = tensorio.strip(src, dst, flat=how == "flat")
    assert report.entry == entry
    assert report.nbytes == dst.stat().st_size
    assert set(report.dropped) == ({"optimizer", "rng_state"} if layout == "beside" else
                                   {str(key) for key in saved if key != entry} if entry else set())  # fmt: skip
    if "optimizer" in report.dropped:
        assert report.dropped["optimizer"] == sum(t.nbytes for s in OTHER["state"].values() for t in s.values())
    if how == "safetensors":
        assert_state(safetensors.numpy.load_file(dst))
        return
    got = torch.load(dst)
    if how == "nested" and entry is not None:
        assert list(got) == [entry]
        assert type(got[entry]) is OrderedDict
        got = got[entry]
    assert_state(got)
    torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)).load_state_dict(got)


def test_entry_patterns_and_dry_run(tmp_path: Path) -> None:
    src, dst = tmp_path / "src.pt", tmp_path / "dst.pt"
    ema = {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in STATE.items()}
    torch.save({"model": STATE, "ema": ema, "optimizer": OTHER}, src)
    said = tensorio.strip(src, dst, keep="ema", dry_run=True)
    assert not dst.exists()
    assert tensorio.strip(src, dst, keep="ema") == said
    assert torch.equal(torch.load(dst)["ema"]["0.weight"], ema["0.weight"])
    tensorio.strip(src, dst, exclude="**.running_*")
    assert sorted(torch.load(dst)["model"]) == sorted(name for name in STATE if "running" not in name)
    report = tensorio.strip(src, dst, include=["model.0.*", "optimizer.state.0.exp_avg"])
    assert report.entry is None
    got = torch.load(dst)
    assert sorted(got["model"]) == ["0.bias", "0.weight"]
    assert torch.equal(got["optimizer"]["state"][0]["exp_avg"], OTHER["state"][0]["exp_avg"])


def test_flat_files_lose_what_training_alone_needs(tmp_path: Path) -> None:
    src = tmp_path / "src.safetensors"
    ones = np.ones(4, "f4")
    safetensors.numpy.save_file({"model.layers.0.w": ones, "lm_head.w": ones, "optimizer.state.0.exp_avg": ones,
                                 "rng_state": np.ones(9, "u1")}, src)  # fmt: skip
    report = tensorio.strip(src, tmp_path / "dst.safetensors")
    assert report.dropped == {"optimizer": 16, "rng_state": 9}
    assert sorted(safetensors.numpy.load_file(tmp_path / "dst.safetensors")) == ["lm_head.w", "model.layers.0.w"]


def test_states_of_optimizers_are_known_by_what_is_in_them(tmp_path: Path) -> None:
    src, dst = tmp_path / "src.pt", tmp_path / "dst.pt"
    torch.save({"netG": STATE, "netD": STATE, "optG": OTHER, "both": [OTHER, OTHER], "ratios": [torch.ones(2)]}, src)
    assert tensorio.strip(src, dst).dropped.keys() == {"optG", "both"}
    assert torch.load(dst).keys() == {"netG", "netD", "ratios"}


@pytest.mark.parametrize(
    "state",
    [
        OTHER,
        {"python": (3, (1, 2), None), "numpy": np.random.RandomState(0).get_state(), "cpu": RNG},
        {"step": 1, "random_state": (3, (1, 2), None), "numpy_random_seed": None, "torch_manual_seed": RNG},
    ],
    ids=["optimizer.pt", "rng_state.pth", "random_states_0.pkl"],
)
def test_file_of_such_a_state_has_no_weights(state: Any, tmp_path: Path) -> None:
    src, dst = tmp_path / "src.pt", tmp_path / "dst.pt"
    torch.save(state, src)
    with pytest.raises(TensorMismatchError, match=r"no tensor would be left; keep= .* include= the tensors"):
        tensorio.strip(src, dst)
    assert not dst.exists()
    assert tensorio.strip(src, dst, include="**").kept


@pytest.mark.parametrize("options", [{}, {"exclude": "0.bias"}, {"include": ["1.**"]}], ids=repr)
@pytest.mark.parametrize("nested", [False, True], ids=["bare", "nested"])
@pytest.mark.parametrize("how", ["strip", "convert"])
def test_state_dict_stays_one_with_the_versions_of_its_modules(
    how: str, nested: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    torch.save({"state_dict": STATE} if nested else STATE, tmp_path / "m.pt")
    prefix = "state_dict." if nested else ""
    patterns = {key: [prefix + p for p in ([v] if isinstance(v, str) else v)] for key, v in options.items()}
    getattr(tensorio, how)(tmp_path / "m.pt", tmp_path / "s.pt", **patterns)
    got = torch.load(tmp_path / "s.pt")
    got = got["state_dict"] if nested else got
    assert type(got) is OrderedDict
    assert got._metadata == STATE._metadata


@pytest.mark.parametrize(
    ("options", "start", "count"),
    [
        ({}, "model.", 7),
        ({"keep": "ema"}, "ema.", 7),
        ({"include": "ema.**"}, "ema.", 7),
        ({"include": ["model.0.*", "epoch"]}, "model.", 2),
        ({"exclude": "**.running_*"}, "model.", 5),
    ],
    ids=repr,
)
def test_pickled_modules_become_their_state_dicts(
    options: dict[str, Any], start: str, count: int, tmp_path: Path
) -> None:
    src, dst = tmp_path / "src.pt", tmp_path / "dst.pt"
    torch.save({"epoch": torch.ones(1), "model": MODEL, "ema": MODEL, "optimizer": OTHER}, src)
    report = tensorio.strip(src, dst, **options)
    got = torch.load(dst)
    assert got.pop("epoch", None) == (torch.ones(1) if "epoch" in report.kept else None)
    flat = {f"{key}.{name}": tensor for key, state in got.items() for name, tensor in state.items()}
    assert len(flat) == count
    assert set(flat) == set(report.kept) - {"epoch"}
    for name, tensor in flat.items():
        assert torch.equal(tensor, STATE[name.removeprefix(start)])


@pytest.mark.parametrize("format", ["safetensors", "torch_zip"])
@pytest.mark.parametrize("model", [STATE, MODEL], ids=["state_dict", "module"])
def test_weights_are_written_in_several_files(format: str, model: Any, tmp_path: Path) -> None:
    src, dst = tmp_path / "src.pt", tmp_path / "model"
    torch.save({"model": model, "optimizer": OTHER}, src)
    said = tensorio.strip(src, dst, format=format, max_shard_size=100, dry_run=True)
    assert not dst.exists()
    assert tensorio.strip(src, dst, format=format, max_shard_size=100) == said
    assert said.nbytes == sum(path.stat().st_size for path in dst.iterdir())
    index = json.loads(next(dst.glob("*.index.json")).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in STATE.values())
    load = safetensors.numpy.load_file if format == "safetensors" else torch.load
    assert_state({name: load(dst / file)[name] for name, file in index["weight_map"].items()})


def test_storages_are_trimmed(tmp_path: Path) -> None:
    big = torch.zeros(100_000)
    torch.save({"model": {"a": big[:10]}, "optimizer": {"b": big}}, tmp_path / "src.pt")
    tensorio.strip(tmp_path / "src.pt", tmp_path / "dst.pt")
    assert (tmp_path / "dst.pt").stat().st_size < 3000


def test_source_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"model": STATE, "optimizer": OTHER}, path)
    tensorio.strip(path, path)
    assert_state(torch.load(path)["model"])


def test_nothing_left_is_an_error_and_writes_nothing(tmp_path: Path) -> None:
    src, dst = tmp_path / "src.pt", tmp_path / "dst.pt"
    torch.save({"optimizer": OTHER, "epoch": 3}, src)
    with pytest.raises(TensorMismatchError, match="no tensor would be left"):
        tensorio.strip(src, dst)
    with pytest.raises(TensorMismatchError, match="keep='epoch' is no entry with tensors; there are: 'optimizer'"):
        tensorio.strip(src, dst, keep="epoch")
    src.write_bytes(src.read_bytes()[:500])
    with pytest.raises(FormatError):
        tensorio.strip(src, dst)
    assert list(tmp_path.iterdir()) == [src]


# ------------------------------------------------------------------------- command line


def test_command_says_what_was_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src, dst = tmp_path / "src.pt", tmp_path / "dst.safetensors"
    torch.save(LAYOUTS["torchvision"][0], src)
    assert run(["strip", str(src), str(dst), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "would be written" in out
    assert "optimizer" in out
    assert not dst.exists()
    assert run(["strip", str(src), str(dst), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["entry"] == "model"
    assert found["dropped"].keys() == {"optimizer", "lr_scheduler", "epoch", "model_ema", "args"}
    assert found["nbytes"] == dst.stat().st_size
    assert found["written"]
    assert_state(safetensors.numpy.load_file(dst))


def test_command_writes_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src, dst = tmp_path / "src.pt", tmp_path / "model"
    torch.save({"model": STATE, "optimizer": OTHER}, src)
    assert run(["strip", str(src), str(dst), "--max-shard-size", "100B"]) == 0
    assert "kept: 7 tensors, of model" in capsys.readouterr().out
    assert_state({name: array for path in dst.glob("*.safetensors")
                  for name, array in safetensors.numpy.load_file(path).items()})  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--max-shard-size", "lots"], 2, "expected --max-shard-size to be a number of bytes"),
        (["--keep", "none"], 1, "--keep 'none' is no entry with tensors"),
        (["--include", "x"], 1, "fits none of"),
        (["--exclude", "a**"], 2, "stands for whole levels"),
        (["--format", "pickle"], 2, "--format"),
    ],
)
def test_wrong_use_of_strip_is_one_line(
    arguments: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"model": STATE}, tmp_path / "src.pt")
    assert run(["strip", str(tmp_path / "src.pt"), str(tmp_path / "dst.pt"), *arguments]) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "dst.pt").exists()


def test_the_page_has_the_keys_of_weights_in_the_order_in_which_they_count() -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "less.md").read_text()
    table = page.partition("| key | written by |")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines()[2:]]
    assert re.findall(r"`(\w+)`", " ".join(cells)) == list(WEIGHTS)
