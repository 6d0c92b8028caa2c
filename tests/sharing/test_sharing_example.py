"""The example server: its workers answer as the model does, and have its weights in memory once."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

import tensorio
from cases import REPO

EXAMPLE = REPO / "examples" / "server"
pytestmark = [
    pytest.mark.plain_build,
    pytest.mark.timeout(60),
    pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs Linux's /proc"),
    pytest.mark.skipif(not EXAMPLE.is_dir(), reason="the examples are not here"),
]

MIB = 1 << 20
SIZE = 16  # MiB
WORKERS = 3
TEXTS = ["good", "it works, thanks: great and fast", "slow, and it crashes: terrible", "broken", "", "the"]


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(EXAMPLE), *(p for p in sys.path if p)])
    return dict(os.environ, PYTHONPATH=path, **more)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("server") / "weights.safetensors"
    make(path)
    return path


def unaligned(weights: Path, path: Path) -> Path:
    """The same with a longer header, so that its payload begins at an odd address."""
    data = weights.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    return path


def make(path: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "make_weights.py"), str(path), "--mib", str(SIZE)]
    subprocess.run(command, check=True, env=environment(), timeout=60)


@contextmanager
def running(command: list[str], path: Path) -> Iterator[subprocess.Popen[str]]:
    """A server of the example; it must end in order when it is told to."""
    environ = environment(SCORER_WEIGHTS=str(path))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ, start_new_session=True)
    try:
        yield process
        process.terminate()
        process.communicate(timeout=30)
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            os.killpg(process.pid, 9)
            process.communicate()


def ask(address: str, path: str) -> Any:
    with urllib.request.urlopen(address + path, timeout=20) as answer:
        return json.load(answer)


def model_answers(path: Path) -> list[float]:
    spec = importlib.util.spec_from_file_location("scorer", EXAMPLE / "scorer.py")
    assert spec is not None
    assert spec.loader is not None
    scorer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scorer)
    own = {name: np.array(array) for name, array in tensorio.load(path).items()}
    return [scorer.score(own, text) for text in TEXTS]


def check(address: str, path: Path, workers: int) -> None:
    want = model_answers(path)
    assert want[0] > 0.9
    assert want[3] < 0.1
    assert want[4] == 0.5
    rows = settled(address, workers)
    found = [ask(address, f"?text={quote(text)}") for text in TEXTS * 3]
    assert [a["score"] for a in found] == pytest.approx(want * 3, abs=1e-6)
    assert {a["worker"] for a in found} <= {row["pid"] for row in rows}
    assert all(row["weights_private"] == 0 for row in rows)
    with urllib.request.urlopen(address + "memory", timeout=20) as answer:
        assert len(answer.read().splitlines()) == workers + 2
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        ask(address, "nothing")
    caught.value.close()


def settled(address: str, workers: int) -> list[dict[str, int]]:
    """The workers' memory, once all have read all weights."""
    rows: list[dict[str, int]] = []
    for _ in range(200):
        rows = ask(address, "memory?json")
        shared = all(row["weights_pss"] > (SIZE / workers - 0.1) * MIB for row in rows)
        if len(rows) == workers and shared and abs(sum(row["weights_pss"] for row in rows) - SIZE * MIB) < MIB:
            return rows
        time.sleep(0.05)
    pytest.fail(f"the workers never had {SIZE} MiB in memory together: {rows}")


@pytest.mark.parametrize("kind", ["mapped", "published"])
def test_workers_answer_from_one_copy(kind: str, weights: Path, tmp_path: Path, registry: Path) -> None:
    path = weights
    if kind == "published":
        path = unaligned(weights, tmp_path / "weights.safetensors")
    command = [sys.executable, str(EXAMPLE / "serve.py"), "--workers", str(WORKERS), "--port", "0"]
    with running(command, path) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        check(address, path, WORKERS)
        (entry,) = tensorio.published()
        assert entry.kind == ("file" if kind == "mapped" else "memory")
        assert len(entry.owners) == WORKERS
        os.kill(entry.owners[0], 9)  # whoever published it: the others hold it, and so does the one that comes in
        check(address, path, WORKERS)
    assert list(registry.iterdir()) == []


def test_client_that_says_nothing_holds_up_nobody(weights: Path, registry: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "serve.py"), "--workers", "1", "--port", "0"]
    with running(command, weights) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        settled(address, 1)
        with socket.create_connection(("127.0.0.1", int(address.rstrip("/").rpartition(":")[2]))):
            assert ask(address, "?text=good")["text"] == "good"
            process.terminate()
            assert process.wait(10) == 0
    assert list(registry.iterdir()) == []


def test_gunicorn(weights: Path) -> None:
    pytest.importorskip("gunicorn")
    port = 18_000 + os.getpid() % 10_000
    options = ["-c", str(EXAMPLE / "gunicorn.conf.py"), "--chdir", str(EXAMPLE), "-w", "2", "-b", f"127.0.0.1:{port}"]
    with running([sys.executable, "-m", "gunicorn", *options, "app:application"], weights):
        address = f"http://127.0.0.1:{port}/"
        wait_for(address)
        check(address, weights, 2)


def wait_for(address: str) -> None:
    for _ in range(200):
        try:
            ask(address, "?text=good")
        except OSError:
            time.sleep(0.1)
        else:
            return
    pytest.fail("the server did not come up")
