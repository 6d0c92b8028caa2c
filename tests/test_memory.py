"""What saving, converting and opening cost in memory: fresh processes, a gibibyte of tensors.

Figures are the growth of VmHWM, the peak of what is resident, mapped pages included.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio

pytestmark = [
    pytest.mark.plain_build,
    pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs Linux's /proc"),
]

MIB = 1 << 20
GIB = 1 << 30
TENSORS = 16  # of 64 MiB each
WORKERS = 4

PREAMBLE = """
import json, sys
import numpy as np
import tensorio
import tensorio.formats.torch_zip, tensorio.formats.safetensors, tensorio._unpickler, tensorio._pickler

def status(field):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(field + ":"))

def answer(**values):
    print(json.dumps(values))
"""


def in_fresh_process(code: str, *arguments: object) -> dict[str, int]:
    """Run code in a new interpreter; what it gave to ``answer()``."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    command = [sys.executable, "-c", PREAMBLE + code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    values: dict[str, int] = json.loads(done.stdout)
    return values


@contextlib.contextmanager
def removed_afterwards(*paths: Path) -> Iterator[None]:
    try:
        yield
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


MAKE = f"""
block = np.arange({GIB} // {TENSORS} // 4, dtype=np.float32)
tensors = {{f"layers.{{i}}.weight": np.concatenate([block[i:], block[:i]]) for i in range({TENSORS})}}
"""


def make_file(path: Path) -> Path:
    in_fresh_process(MAKE + "tensorio.save(tensors, sys.argv[1], durable=False)\nanswer(done=1)", path)
    assert path.stat().st_size > GIB
    return path


@pytest.fixture(scope="module")
def torch_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("big") / "model.pt"
    with removed_afterwards(path):
        yield make_file(path)


@pytest.fixture(scope="module")
def safetensors_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("big") / "model.safetensors"
    with removed_afterwards(path):
        yield make_file(path)


# ----------------------------------------------------------------------- saving

SAVE = (
    MAKE
    + """
if len(sys.argv) > 2:
    tensors = {name: eval(sys.argv[2])(a) for name, a in tensors.items()}
del block
before = status("VmHWM"), status("VmRSS")
tensorio.save(tensors, sys.argv[1], durable=False)
answer(grown=status("VmHWM") - before[1], high=before[0] - before[1])
"""
)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_save_of_1_gib_adds_under_32_mib(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x{suffix}"
    with removed_afterwards(path):
        result = in_fresh_process(SAVE, path)
        assert path.stat().st_size > GIB
    assert result["high"] < 96 * MIB, "making the tensors hides the peak"
    assert result["grown"] - result["high"] < 32 * MIB


@pytest.mark.parametrize(
    "layout", ["lambda a: a.reshape(4096, -1).T", "lambda a: a[::-1]"], ids=["transposed", "reversed"]
)
def test_save_of_strided_safetensors_adds_under_32_mib(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with removed_afterwards(path):
        result = in_fresh_process(SAVE, path, layout)
    assert result["grown"] - result["high"] < 32 * MIB


def test_save_of_reversed_arrays_holds_one_copy_at_a_time(tmp_path: Path) -> None:
    """What has to be copied for a torch file: 64 MiB each, never all of them."""
    path = tmp_path / "x.pt"
    with removed_afterwards(path):
        result = in_fresh_process(SAVE, path, "lambda a: a[::-1]")
    assert result["grown"] - result["high"] < (64 + 32) * MIB


# --------------------------------------------------------------------- converting

CONVERT = """
before = status("VmHWM")
dropped = tensorio.convert(sys.argv[1], sys.argv[2], durable=False)
answer(grown=status("VmHWM") - before, dropped=len(dropped))
"""


@pytest.mark.parametrize("target", [".safetensors", ".pt"])
def test_convert_of_a_torch_file_adds_under_64_mib(target: str, torch_file: Path, tmp_path: Path) -> None:
    path = tmp_path / f"x{target}"
    with removed_afterwards(path):
        result = in_fresh_process(CONVERT, torch_file, path)
        check_same(torch_file, path)
    assert result["grown"] < 64 * MIB


@pytest.mark.parametrize("target", [".pt", ".safetensors"])
def test_convert_of_a_safetensors_file_adds_under_64_mib(target: str, safetensors_file: Path, tmp_path: Path) -> None:
    path = tmp_path / f"x{target}"
    with removed_afterwards(path):
        result = in_fresh_process(CONVERT, safetensors_file, path)
        check_same(safetensors_file, path)
    assert result["grown"] < 64 * MIB


def check_same(source: Path, target: Path) -> None:
    """The same tensors, by their ends."""
    with tensorio.open(source) as a, tensorio.open(target) as b:
        assert sorted(a) == sorted(b)
        assert len(a) == TENSORS
        for name in a:
            assert np.array_equal(a[name][:100], b[name][:100])
            assert np.array_equal(a[name][-100:], b[name][-100:])


# ------------------------------------------------------------------------ opening


def resident_pages(path: Path) -> int:
    """Pages of a file in the page cache, by mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY) as whole:
        count = -(-len(whole) // mmap.PAGESIZE)
        flags = (ctypes.c_ubyte * count)()
        start = ctypes.addressof(ctypes.c_char.from_buffer(whole))
        assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(whole)), flags) == 0
        return sum(flag & 1 for flag in flags)


OPEN = """
before = status("VmHWM"), status("RssFile")
checkpoint = tensorio.open(sys.argv[1])
arrays = dict(checkpoint)
answer(grown=status("VmHWM") - before[0], mapped=status("RssFile") - before[1], tensors=len(arrays))
"""

LOAD = OPEN.replace("tensorio.open(", "tensorio.load(")


@pytest.mark.parametrize("code", [OPEN, LOAD], ids=["open", "load"])
@pytest.mark.parametrize("kind", ["torch_file", "safetensors_file"])
def test_open_of_1_gib_maps_no_payload(code: str, kind: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(kind)
    result = in_fresh_process(code, path)
    assert result["tensors"] == TENSORS
    # A fault brings in the pages around it that are cached already, 64 KiB as a rule: one such block per record.
    assert result["mapped"] < 4 * MIB
    assert result["grown"] < 8 * MIB


@pytest.mark.parametrize("kind", ["torch_file", "safetensors_file"])
def test_open_of_1_gib_reads_no_payload_from_disk(kind: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(kind)
    with path.open("rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_pages(path) * mmap.PAGESIZE > GIB // 2:
        pytest.skip("this system does not let a file go from its page cache")
    before = resident_pages(path)
    in_fresh_process(OPEN, path)
    # Readahead around each record's header; a payload is 64 MiB.
    assert (resident_pages(path) - before) * mmap.PAGESIZE < TENSORS * 2 * MIB


READ = """
before = status("VmRSS")
tree = tensorio.load(sys.argv[1], mmap=False)
total = sum(int(a[-1]) for a in tree.values())
answer(grown=status("VmHWM") - before, total=total)
"""


@pytest.mark.parametrize("kind", ["torch_file", "safetensors_file"])
def test_load_without_mapping_peaks_at_one_copy(kind: str, request: pytest.FixtureRequest) -> None:
    result = in_fresh_process(READ, request.getfixturevalue(kind))
    assert GIB <= result["grown"] < GIB + 48 * MIB


# ------------------------------------------------------------------------ sharing


def pss_of(path: str) -> int:
    """Proportional share of the pages of one file that this process maps, in bytes."""
    total, counting = 0, False
    with open("/proc/self/smaps") as f:
        for line in f:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                counting = line.rstrip().endswith(path)
            elif counting and line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def worker(checkpoint: tensorio.Checkpoint, ready: Any, answers: Any) -> None:
    """Touch every page, wait until all have, measure, wait until all have measured."""
    total = sum(float(array[:: mmap.PAGESIZE // array.itemsize].sum()) for array in checkpoint.values())
    ready.wait(60)
    pss = pss_of(str(checkpoint.path))
    ready.wait(60)
    answers.put((total, pss))


@pytest.mark.parametrize("kind", ["torch_file", "safetensors_file"])
def test_spawned_workers_share_one_copy(kind: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(kind)
    context = multiprocessing.get_context("spawn")
    ready, answers = context.Barrier(WORKERS), context.Queue()
    with tensorio.open(path) as checkpoint:
        workers = [context.Process(target=worker, args=(checkpoint, ready, answers)) for _ in range(WORKERS)]
        for process in workers:
            process.start()
        results = [answers.get(timeout=90) for _ in workers]
        for process in workers:
            process.join(30)
    assert {process.exitcode for process in workers} == {0}
    assert len({total for total, _ in results}) == 1
    shares = [pss for _, pss in results]
    assert abs(sum(shares) - GIB) < GIB // 20
    assert max(shares) < GIB // 3


# -------------------------------------------------------------------- verifying


def test_verify_of_many_records_maps_few_of_them_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with removed_afterwards(path):
        tensorio.save({f"w{i}": np.full(200 << 10, i % 256, np.uint8) for i in range(1500)}, path, durable=False)
        result = in_fresh_process(
            """
import tensorio.checkpoint._verify
before = status("VmHWM")
assert tensorio.verify(sys.argv[1]).ok
answer(grown=status("VmHWM") - before)
""",
            path,
        )
    assert result["grown"] < 64 * MIB
