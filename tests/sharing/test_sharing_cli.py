"""``tensorio publish``, ``published``, ``unpublish``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio

pytest.importorskip("click", reason="the extra 'cli' is not installed")
pytest.importorskip("rich", reason="the extra 'cli' is not installed")

from click.testing import CliRunner, Result

from tensorio.cli import cli


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def start(*arguments: object) -> subprocess.Popen[str]:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    command = [sys.executable, "-m", "tensorio", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    tensorio.save({"w": np.arange(5.0)}, path)
    return path


def test_nothing_is_published() -> None:
    result = run("published")
    assert (result.exit_code, result.stdout) == (0, "nothing is published\n")
    assert json.loads(run("published", "--json").stdout) == {"schema": 1, "published": []}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("options", [(), ("--huge-pages",)], ids=["as_it_is", "laid_out"])
def test_publish_holds_the_name_until_it_is_told_to_end(
    number: signal.Signals, options: tuple[str, ...], model: Path, registry: Path
) -> None:
    process = start("publish", model, "m", *options)
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().split()[:2] == ["m", "torch_zip,"]
            checkpoint = tensorio.attach("m", timeout=10)
            assert checkpoint["w"].tolist() == [0, 1, 2, 3, 4]
            lines = run("published").stdout.splitlines()
            assert len(lines) == 1
            assert f"process {process.pid}, 1 reader" in lines[0]
            (entry,) = json.loads(run("published", "--json").stdout)["published"]
            assert (entry["name"], entry["owners"], entry["readers"]) == ("m", [process.pid], [os.getpid()])
            taken = run("publish", model, "m")
            assert taken.exit_code == 1
            assert f"by process {process.pid}" in taken.stderr
            process.send_signal(number)
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert list(registry.iterdir()) == []
    assert checkpoint["w"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_publishing_is_interrupted(
    number: signal.Signals, model: Path, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it waits for another one, or lays out what is large."""
    really = tensorio.publish

    def slow(*arguments: Any, **options: Any) -> tensorio.Publication:
        os.kill(os.getpid(), number)
        return really(*arguments, **options)

    monkeypatch.setattr(tensorio, "publish", slow)
    assert run("publish", model, "m", "--persistent").exit_code == 130
    assert list(registry.iterdir()) == []


def test_persistent_name_is_kept_until_it_is_unpublished(model: Path, registry: Path) -> None:
    result = run("publish", model, "m", "--persistent", "--huge-pages")
    assert result.exit_code == 0
    assert "until it is unpublished" in result.stdout
    assert "kept, 0 readers" in run("published").stdout
    assert run("unpublish", "m").exit_code == 0
    assert list(registry.iterdir()) == []
    again = run("unpublish", "m")
    assert again.exit_code == 1
    assert "nothing is published under the name 'm'" in again.stderr


def test_dead_owner_is_shown(model: Path) -> None:
    process = start("publish", model, "m")
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    assert "GONE" in run("published").stdout


@pytest.mark.parametrize("arguments", [("a/b",), ("m", "--mode", "x"), ("m", "--mode", "644")], ids=str)
def test_wrong_use(arguments: tuple[str, ...], model: Path) -> None:
    assert run("publish", model, *arguments).exit_code == 2


def test_bad_file(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(b"<!DOCTYPE html>")
    assert run("publish", path, "m").exit_code == 1
    assert run("publish", tmp_path / "none.pt", "m").exit_code == 2
