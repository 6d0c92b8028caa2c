"""``tensorio checkpoints``: what it lists, says and refuses."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio
from tensorio.cli import run


@pytest.fixture
def checkpoints(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command; its exit code, output and complaints."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = run(["checkpoints", *map(str, arguments)])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with tensorio.CheckpointManager(tmp_path / "run") as manager:
        for step in (10, 20, 30):
            manager.save(step, {"w": np.ones(100)}, metrics={"loss": 1 / step, "bad": float("nan")}, pin=step == 20)
    return tmp_path / "run"


def flip(folder: Path, step: int) -> None:
    path = folder / f"step-{step:08d}" / "checkpoint.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_lists_steps_with_what_is_known_of_them(checkpoints: Any, folder: Path) -> None:
    code, out, err = checkpoints(folder)
    assert (code, err) == (0, "")
    assert re.search(r"^10 +[\d.]+ KiB +(now|\d+ s ago) +whole by its sizes", out, re.M)
    assert re.search(r"^20 .* pinned", out, re.M)
    assert "loss 0.0333333, bad nan" in out
    assert out.splitlines()[-1] == "3 checkpoints"


def test_verify_finds_what_sizes_do_not_show(checkpoints: Any, folder: Path) -> None:
    flip(folder, 30)
    assert checkpoints(folder)[0] == 0
    code, out, _ = checkpoints(folder, "--verify")
    assert code == 1
    assert re.search(r"^30 .*BAD: CRC-32", out, re.M)
    assert re.search(r"^20 .* ok$", out, re.M)
    assert out.splitlines()[-1] == "3 checkpoints, 1 of them bad"


def test_a_damaged_note_is_listed_as_bad(checkpoints: Any, folder: Path) -> None:
    (folder / "step-00000030" / "step.json").write_text("{}")
    code, out, _ = checkpoints(folder)
    assert code == 1
    assert re.search(r"^30 .*BAD: ", out, re.M)


def test_json_is_for_programs(checkpoints: Any, folder: Path) -> None:
    os.unlink(folder / "step-00000030" / "checkpoint.pt")
    code, out, err = checkpoints(folder, "--json", "--verify")
    found = json.loads(out)
    assert (code, err) == (1, "")
    assert {key: found[key] for key in ("schema", "folder", "latest_valid", "verified")} == {
        "schema": 1, "folder": str(folder), "latest_valid": 20, "verified": True,
    }  # fmt: skip
    assert [(row["step"], row["pinned"], row["valid"]) for row in found["steps"]] == [
        (10, False, True), (20, True, True), (30, False, False),
    ]  # fmt: skip
    assert found["steps"][0]["metrics"] == {"loss": 0.1, "bad": "nan"}
    assert found["steps"][0]["problem"] is None


def test_an_empty_folder_is_no_error(checkpoints: Any, tmp_path: Path) -> None:
    code, out, _ = checkpoints(tmp_path)
    assert code == 0
    assert "no checkpoints" in out
    assert json.loads(checkpoints(tmp_path, "--json")[1])["latest_valid"] is None


def test_a_folder_that_is_not_there_is_wrong_use(checkpoints: Any, tmp_path: Path) -> None:
    for more in ([], ["--json"]):
        assert checkpoints(tmp_path / "nothing", *more)[0] == 2
