"""The demo: what it measures is what happened, and nothing of it stays behind."""

from __future__ import annotations

import io
import itertools
import mmap
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tensorio
from tensorio import _core

pytest.importorskip("click", reason="the extra 'cli' is not installed")
pytest.importorskip("rich", reason="the extra 'cli' is not installed")

from click.testing import CliRunner
from rich.console import Console

from tensorio.cli import _memory, _model, _workers, cli
from tensorio.cli._text import size

MIB = 1 << 20

linux = pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="PSS is read from /proc")

ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR", "NO_COLOR")}
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join(
    [str(Path(tensorio.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)


def started(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tensorio", "demo", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


def nbytes_of(text: str) -> float:
    """The bytes of a size as `tensorio.cli._text.size` writes it."""
    number, unit = text.split()
    return float(number) * float(1024 ** ["B", "KiB", "MiB", "GiB"].index(unit))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 16 MiB, big enough to see in a process."""
    folder = tmp_path_factory.mktemp("model")
    specs = _model.layout(16 * MIB)
    _model.scratch_file(str(folder / "scratch"), max(s.nbytes for s in specs))
    tensorio.save(_model.state_dict(specs, str(folder / "scratch")), folder / "model.pt", durable=False)
    return folder / "model.pt"


# ------------------------------------------------------------------------- as a whole


@linux
@pytest.mark.plain_build
def test_demo_shows_all_steps_and_leaves_nothing(tmp_path: Path) -> None:
    with started("--size", "24MiB", "--workers", 3, "--dir", tmp_path) as child:
        text, errors = child.communicate(timeout=120)
    assert (child.returncode, errors) == (0, "")
    assert list(tmp_path.iterdir()) == []
    seconds, sized = r"([\d.]+ m?s)", r"([\d.]+ [KMG]?i?B)"
    alone = rf" +{seconds} +{seconds} +{sized} +{sized} *\n"
    crew = rf" +{seconds} +{seconds} +{sized} +{sized} +{sized} *\n"
    saved = re.search(r"save \d+ tensors as .pt" + alone, text)
    opened = re.search("open it by mmap" + alone, text)
    mapped = re.search("3 workers map it" + crew, text)
    copied = re.search("3 workers copy it" + crew, text)
    assert saved is not None
    assert opened is not None
    assert mapped is not None
    assert copied is not None
    assert re.search("convert to .safetensors" + alone, text)
    whole = nbytes_of(saved[3])
    assert 20 * MIB < whole < 28 * MIB
    assert nbytes_of(opened[3]) < whole / 50  # headers only
    assert 0.97 < nbytes_of(mapped[3]) / (3 * whole) < 1.01  # every byte of the tensors, three times
    assert mapped[3] == copied[3]
    assert nbytes_of(mapped[5]) < 1.7 * whole  # one copy, and what three interpreters take
    assert nbytes_of(copied[5]) > 2.9 * whole
    assert re.search(r"All of them read the same bytes \(CRC-32 [0-9a-f]{8}\)", text)
    assert f"The workers hold {mapped[5]} when they map the file, {copied[5]} when each copies it." in text


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_demo_that_is_stopped_leaves_nothing(tmp_path: Path, number: int, code: int) -> None:
    with started("--size", "64MiB", "--workers", 4, "--dir", tmp_path) as child:
        while not list(tmp_path.glob("*/model.safetensors")):  # then the workers are about to start
            assert child.poll() is None
            time.sleep(0.01)
        time.sleep(0.2)
        child.send_signal(number)
        text, errors = child.communicate(timeout=60)
    assert (child.returncode, text, errors) == (code, "", "")
    assert list(tmp_path.iterdir()) == []


def test_demo_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise tensorio.LimitError("enough")

    monkeypatch.setattr(tensorio, "convert", fail)
    result = CliRunner().invoke(cli, ["demo", "--size", "2MiB", "--dir", str(tmp_path)])
    assert (result.exit_code, result.stderr) == (1, "tensorio: enough\n")
    assert list(tmp_path.iterdir()) == []


def test_demo_without_room_on_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1))
    result = CliRunner().invoke(cli, ["demo", "--dir", str(tmp_path)])
    assert result.exit_code == 2
    assert "needs 1.1 GiB on disk and 1 B are free" in result.stderr


@pytest.mark.parametrize(
    ("fitting", "said"), [(1, "Only 1 of 2 copies fit"), (0, "Not even one copy fits into the free memory")]
)
def test_demo_makes_no_more_copies_than_memory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fitting: int, said: str
) -> None:
    monkeypatch.setattr("tensorio.cli.demo._copies_that_fit", lambda nbytes: fitting)
    result = CliRunner().invoke(cli, ["demo", "--size", "2MiB", "--workers", "2", "--dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert said in result.stdout
    assert ("1 worker copy it" in result.stdout) is (fitting == 1)
    assert "2 workers map it" in result.stdout


def test_demo_without_pss_shows_the_rest() -> None:
    from tensorio.cli.demo import Step, _notes, _table

    crew = _workers.Crew(0.5, 1.0, 2000, {0xABC}, [None, None])
    out = io.StringIO()
    Console(file=out, width=80).print(_table([Step("map it", 0.5, 1.0, 2000, [None, None])]))
    assert re.search(r"map it +0.50 s +1.00 s +2.0 KiB +n/a", out.getvalue())
    notes = list(_notes(crew, crew, 2))
    assert any("only Linux has PSS" in note for note in notes)
    assert not any("hold" in note for note in notes)


# ---------------------------------------------------------------------------- workers


@linux
@pytest.mark.plain_build
def test_workers_that_map_share_one_copy_and_those_that_copy_do_not(model: Path) -> None:
    whole = model.stat().st_size
    mapped = _workers.run_workers(str(model), 3, copy=False)
    copied = _workers.run_workers(str(model), 3, copy=True)
    with tensorio.open(model) as checkpoint:
        nbytes, crc = _workers.checksum(checkpoint)
        assert nbytes == checkpoint.nbytes
    for crew in (mapped, copied):
        assert crew.nbytes == 3 * nbytes
        assert crew.crc32 == {crc}
        assert crew.wall > 0
        assert crew.cpu > 0
    assert sum(share or 0 for share in mapped.pss) < 1.7 * whole
    assert all(0.9 * whole < (share or 0) < 1.7 * whole for share in copied.pss)


def test_checksum_reads_every_byte_in_order(model: Path) -> None:
    with tensorio.open(model) as checkpoint:
        joined = b"".join(checkpoint[fqn].tobytes() for fqn in checkpoint)
        assert _workers.checksum(checkpoint) == (len(joined), _core.crc32(joined))


@pytest.mark.parametrize("copy", [False, True])
def test_worker_that_fails_ends_all(tmp_path: Path, copy: bool) -> None:
    (tmp_path / "bad.pt").write_bytes(b"PK\x03\x04 and nothing else")
    with pytest.raises(_workers.WorkerError, match="a worker process failed: "):
        _workers.run_workers(str(tmp_path / "bad.pt"), 2, copy=copy)


def test_worker_that_is_killed_ends_all(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for = _workers._answers

    def kill_one(workers: list[Any], answers: Any) -> Any:
        os.kill(workers[0].pid, signal.SIGKILL)
        return wait_for(workers, answers)

    monkeypatch.setattr(_workers, "_answers", kill_one)
    with pytest.raises(_workers.WorkerError, match="died with exit code -9"):
        _workers.run_workers(str(model), 3, copy=False)


# ----------------------------------------------------------------------- model, meter


@pytest.mark.parametrize("nbytes", [1 * MIB, 10 * MIB, 100 * MIB, 512 * MIB, 4 << 30, 64 << 30])
def test_layout_is_about_as_large_as_asked(nbytes: int) -> None:
    specs = _model.layout(nbytes)
    assert abs(sum(s.nbytes for s in specs) / nbytes - 1) < 0.1
    assert len({s.name for s in specs}) == len(specs)
    assert len([s for s in specs if s.name.endswith("q_proj.weight")]) >= _model.LAYERS_MIN


def test_state_dict_has_numbers_and_tensors_that_do_not_alias(tmp_path: Path) -> None:
    specs = _model.layout(2 * MIB)
    _model.scratch_file(str(tmp_path / "scratch"), max(s.nbytes for s in specs))
    state = _model.state_dict(specs, str(tmp_path / "scratch"))
    assert {n: a.shape for n, a in state.items()} == {s.name: s.shape for s in specs}
    assert {a.dtype.name for a in state.values()} == {"bfloat16", "float16"}
    starts = sorted((a.ctypes.data, a.nbytes) for a in state.values())
    assert all(at + n <= following for (at, n), (following, _) in itertools.pairwise(starts))
    values = state["model.embed_tokens.weight"].astype(np.float32)
    assert np.isfinite(values).all()
    assert len(np.unique(values)) > 1000


@linux
def test_meter_sees_memory_that_is_gone_at_the_end() -> None:
    with _memory.Meter() as meter:
        block = mmap.mmap(-1, 32 * MIB)  # an array might be given memory that the process has already
        block.write(bytes(range(256)) * (32 * MIB // 256))
        give_up = time.monotonic() + 30
        while meter._most - meter._before < 30 * MIB and time.monotonic() < give_up:  # until a sample was taken
            time.sleep(_memory.SAMPLE_SECONDS)
        block.close()
    assert meter.grown is not None
    assert 30 * MIB < meter.grown < 64 * MIB
    assert meter.wall > 0
    assert meter.cpu > 0


def test_meter_without_pss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_memory, "pss", lambda: None)
    with _memory.Meter() as meter:
        pass
    assert meter.grown is None
    assert meter.wall > 0


def test_demo_default_size_is_readable() -> None:
    from tensorio.cli._text import parse_size

    assert size(parse_size(None, None, "512MiB")) == "512.0 MiB"  # type: ignore[arg-type]
    assert "[default: 512MiB]" in CliRunner().invoke(cli, ["demo", "--help"]).output
