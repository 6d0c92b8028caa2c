"""``tensorio shard``: what it writes, says and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import tensorio
from tensorio.cli import run

NAME = "model.layers.0.self_attn.k_proj.weight"
HEADS = ("--set", "num_attention_heads=4", "--set", "num_key_value_heads=2")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    tensors = {"model.embed_tokens.weight": np.ones((7, 4), "f4"), NAME: np.arange(32, dtype="f4").reshape(8, 4),
               "model.norm.weight": np.ones(4, "f4")}  # fmt: skip
    safetensors.numpy.save_file(tensors, path, metadata={"a": "b"})
    return path


@pytest.fixture
def shard(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command; its exit code, output and complaints."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = run(["shard", *map(str, arguments)])
        return code, *capsys.readouterr()

    return call


def test_cuts_by_a_preset_and_says_what_became_of_the_tensors(shard: Any, model: Path, tmp_path: Path) -> None:
    code, out, err = shard(model, tmp_path / "ranks", "--tp", 4, "--rules", "llama", *HEADS)
    assert (code, err) == (0, "")
    assert re.search(r"3 tensors for 4 ranks, safetensors, [\d.]+ KiB in [\d.]+ s", out)
    for rank in range(4):
        file = tmp_path / "ranks" / f"model-rank-{rank}-part-0.safetensors"
        assert re.search(rf"{rank}  {file.name} +{file.stat().st_size} B\n", out)
        assert safetensors.numpy.load_file(file)[NAME].shape == (4, 4)
    assert re.search(r"\*\*\.self_attn\.\{k,v\}_proj\.\{weight,bias\} +1\n", out)
    assert "q_proj" not in out  # a rule that took nothing
    assert "padded with zeros: 1\n    model.embed_tokens.weight\n" in out
    assert "several ranks have the same: 1\n    model.layers.*.self_attn.k_proj.weight\n" in out


def test_rules_file_and_config_are_read(shard: Any, model: Path, tmp_path: Path) -> None:
    (tmp_path / "my.rules").write_text("**.k_proj.weight = 0 heads=$kv  # heads\n** = replicate\n")
    (tmp_path / "other.json").write_text('{"kv": 8}')
    arguments = (
        model,
        tmp_path / "ranks",
        "--tp",
        2,
        "--rules",
        tmp_path / "my.rules",
        "--config",
        tmp_path / "other.json",
    )
    assert shard(*arguments)[0] == 0
    assert safetensors.numpy.load_file(tmp_path / "ranks" / "model-rank-1-part-0.safetensors")[NAME][0, 0] == 16
    code, _, err = shard(*arguments, "--overwrite", "--set", "kv=3")
    assert code == 1
    assert "8 elements along dimension 0 are not 3 heads" in err


def test_config_beside_the_source_is_found(shard: Any, model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4, "num_key_value_heads": 4}')
    assert shard(model, tmp_path / "a", "--tp", 4, "--rules", "llama")[0] == 0
    assert shard(model, tmp_path / "b", "--tp", 4, "--rules", "llama", "--set", "num_key_value_heads=2")[0] == 0
    found = [safetensors.numpy.load_file(tmp_path / x / "model-rank-0-part-0.safetensors")[NAME].shape for x in "ab"]
    assert found == [(2, 4), (4, 4)]


def test_dry_run_writes_nothing(shard: Any, model: Path, tmp_path: Path) -> None:
    code, out, _ = shard(model, tmp_path / "ranks", "--tp", 2, "--rules", "llama", *HEADS, "--dry-run")
    assert code == 0
    assert "would be written" in out
    assert list(tmp_path.iterdir()) == [model]


@pytest.mark.parametrize("dry", [True, False])
def test_json_is_one_object(shard: Any, model: Path, dry: bool, tmp_path: Path) -> None:
    (tmp_path / "my.rules").write_text("**.k_proj.weight = 1\nmodel.embed_tokens.weight = skip\n")
    options = ("--tp", 2, "--rules", tmp_path / "my.rules", "--default", "replicate", "--json")
    code, out, _ = shard(model, tmp_path / "ranks", *options, *(["--dry-run"] if dry else []))
    assert code == 0
    found = json.loads(out)
    assert found | {"nbytes": 0} == {
        "schema": 1, "source": "m.safetensors", "target": str(tmp_path / "ranks"), "written": not dry,
        "format": "safetensors", "tp": 2, "tensors": 3,
        "files": [["model-rank-0-part-0.safetensors"], ["model-rank-1-part-0.safetensors"]], "nbytes": 0,
        "rules": {"**.k_proj.weight": 1, "model.embed_tokens.weight": 1}, "unmatched": ["model.norm.weight"],
        "skipped": ["model.embed_tokens.weight"], "padded": [], "repeated": [], "dropped": [],
    }  # fmt: skip
    if not dry:
        assert found["nbytes"] == [(tmp_path / "ranks" / name).stat().st_size for (name,) in found["files"]]


@pytest.mark.parametrize("format", ["safetensors", "torch_zip"])
def test_merge_gives_the_same_file_again(shard: Any, model: Path, format: str, tmp_path: Path) -> None:
    assert shard(model, tmp_path / "ranks", "--tp", 2, "--rules", "llama", *HEADS, "--format", format)[0] == 0
    code, out, err = shard("--merge", tmp_path / "ranks", tmp_path / "back.safetensors")
    assert (code, err) == (0, "")
    assert re.search(r"back\.safetensors +[\d.]+ (B|KiB) in [\d.]+ s\n", out)
    assert (tmp_path / "back.safetensors").read_bytes() == model.read_bytes()


def test_merge_lists_what_was_skipped(shard: Any, model: Path, tmp_path: Path) -> None:
    tensorio.shard(model, tmp_path / "ranks", tp=1, rules={"**.weight": "skip"})
    code, out, _ = shard("--merge", tmp_path / "ranks", tmp_path / "back.safetensors")
    assert code == 0
    assert "missing, since they were skipped: 3\n" in out
    code, out, _ = shard("--merge", tmp_path / "ranks", tmp_path / "back.safetensors", "--json")
    found = json.loads(out)
    assert found["skipped"] == ["model.embed_tokens.weight", NAME, "model.norm.weight"]
    assert found["nbytes"] == (tmp_path / "back.safetensors").stat().st_size


def test_names_of_layers_are_listed_as_one(shard: Any, tmp_path: Path) -> None:
    names = [f"h.{i}.{j}" for i in range(30) for j in ("a", "b2", 7)] + ["12", "x"]
    safetensors.numpy.save_file({name: np.ones(1) for name in names}, tmp_path / "m.safetensors")
    (tmp_path / "my.rules").write_text("** = skip\n")
    code, out, _ = shard(
        tmp_path / "m.safetensors", tmp_path / "r", "--tp", 2, "--rules", tmp_path / "my.rules", "--dry-run"
    )
    assert code == 0
    listed = [line.split() for line in out.partition("skipped: 92\n")[2].splitlines()]
    assert sorted(listed) == [["*"], ["h.*.*", "x30"], ["h.*.a", "x30"], ["h.*.b2", "x30"], ["x"]]


def test_names_are_printed_harmlessly(shard: Any, tmp_path: Path) -> None:
    safetensors.numpy.save_file({"a\x1b[31m": np.ones(2)}, tmp_path / "m.safetensors")
    code, out, err = shard(
        tmp_path / "m.safetensors", tmp_path / "r", "--tp", 2, "--rules", "t5", "--set", "num_heads=2"
    )
    assert code == 1
    arguments = (tmp_path / "m.safetensors", tmp_path / "r", "--tp", 2, "--rules", "t5", "--set", "num_heads=2")
    code, out, err = shard(*arguments)
    assert code == 1
    assert r"a\x1b[31m" in err
    code, out, more = shard(*arguments, "--default", "replicate")
    assert code == 0
    assert "\x1b[31m" not in out + err + more
    assert r"a\x1b[31m" in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--tp", 2], 2, "--tp and --rules are needed"),
        (["--rules", "llama"], 2, "--tp and --rules are needed"),
        (["--tp", 0, "--rules", "llama"], 2, "--tp"),
        (["--tp", 2, "--rules", "camel"], 2, "no preset is called 'camel' (bert, gpt2"),
        (["--tp", 2, "--rules", "./no.rules"], 2, "No such file or directory: ./no.rules"),
        (["--tp", 2, "--rules", "llama"], 2, "which is not given; give it as --set num_attention_heads=N"),
        (["--tp", 2, "--rules", "llama", "--set", "x"], 2, "expected KEY=N, found 'x'"),
        (["--tp", 2, "--rules", "t5", "--set", "num_heads=2"], 1, "no rule fits 2 of 3 tensors"),
        (["--tp", 2, "--rules", "t5", "--set", "num_heads=2"], 1, "or set --default replicate"),
        (["--tp", 3, "--rules", "llama", *HEADS], 1, "2 heads can be neither cut into 3 equal parts nor repeated"),
        (["--tp", 2, "--rules", "llama", *HEADS, "--name", "x"], 2, "expected --name to be a file name with {rank}"),
        (["--tp", 2, "--rules", "llama", *HEADS, "--max-shard-size", "x"], 2, "expected --max-shard-size to be"),
        (["--merge", "--tp", 2], 2, "--tp is for cutting"),
        (["--merge", "--rules", "llama"], 2, "--rules is for cutting"),
    ],
)
def test_wrong_use_is_one_line_and_an_exit_code(
    shard: Any, model: Path, arguments: list[object], code: int, message: str, tmp_path: Path
) -> None:
    found, out, err = shard(model, tmp_path / "out.safetensors", *arguments)
    assert found == code
    assert out == ""
    assert message in err
    assert list(tmp_path.iterdir()) == [model]


def test_folder_that_is_not_empty_is_left_alone(shard: Any, model: Path, tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "x").write_text("keep")
    for options in ([], ["--overwrite"]):
        code, _, err = shard(model, tmp_path / "ranks", "--tp", 2, "--rules", "llama", *HEADS, *options)
        assert code == 2
        assert "the folder is not empty" in err
    assert (tmp_path / "ranks" / "x").read_text() == "keep"


def test_help_shows_how_rules_are_written(shard: Any) -> None:
    code, out, _ = shard("--help")
    assert code == 0
    for word in (
        "heads=32,8,8",
        "sections=1,1",
        "pad_to=64",
        "replicate",
        "rank0",
        "skip optional",
        "--merge",
        "--dry-run",
    ):
        assert word in out
