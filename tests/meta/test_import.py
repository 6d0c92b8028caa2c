"""Importing tensorio costs little: no NumPy, no torch, no threads, no files; headers need no NumPy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import cases

pytestmark = pytest.mark.plain_build


def run(code: str, *arguments: str) -> str:
    """Run code in a fresh interpreter; its output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": ":".join(p for p in sys.path if p)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


HEAVY = ("numpy", "ml_dtypes", "torch", "safetensors", "click", "rich", "multiprocessing", "asyncio", "unittest")


def test_import_brings_neither_numpy_nor_torch() -> None:
    out = run(f"import sys, tensorio; print([m for m in {HEAVY!r} if m in sys.modules])")
    assert out == "[]\n"


# In front of code: an interpreter in which these can't be imported.
BARE = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("numpy", "ml_dtypes", "torch"):
            raise ImportError(name + " is not to be imported")
sys.meta_path.insert(0, Missing())
"""


@pytest.mark.parametrize(
    "name", ["safetensors_small", "torch_zip_small", "torch_zip_by_hand", "torch_legacy_by_hand", "torch_tar_by_hand"]
)
def test_headers_need_no_numpy(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    case = cases.CASES[name]()
    path.write_bytes(case.data)
    code = """
import tensorio
with tensorio.open(sys.argv[1]) as checkpoint:
    for name, info in checkpoint.infos.items():
        print(name, info.dtype, *info.shape)
    checkpoint.metadata, checkpoint.nbytes, checkpoint.paths
assert tensorio.identify(sys.argv[1]) == checkpoint.format
assert tensorio.verify(sys.argv[1]).ok
"""
    out = run(BARE + code, str(path))
    want = [" ".join([name, a.dtype.name, *map(str, a.shape)]) for name, a in case.tensors.items()]
    assert out.splitlines() == want


def test_infos_of_a_rank_need_no_numpy(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    case = cases.CASES["safetensors_small"]()
    path.write_bytes(case.data)
    code = """
import tensorio
with tensorio.ranked(sys.argv[1], 0, tp=2, rules={"**": "replicate"}) as view:
    print(len(view.infos), view.nbytes)
"""
    assert run(BARE + code, str(path)).split() == [
        str(len(case.tensors)), str(sum(a.nbytes for a in case.tensors.values()))
    ]  # fmt: skip


def test_import_leaves_no_thread_and_no_descriptor() -> None:
    out = run("import os, threading; a = len(os.listdir('/proc/self/fd')); import tensorio; "
              "print(threading.active_count(), len(os.listdir('/proc/self/fd')) - a)")  # fmt: skip
    assert out == "1 0\n"


def test_loading_without_torch_works(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    path.write_bytes(cases.CASES["torch_zip_small"]().data)
    out = run(
        "import sys, tensorio; print(tensorio.load(sys.argv[1])['model']['w'].shape, 'torch' in sys.modules)", str(path)
    )
    assert out == "(3, 4) False\n"
