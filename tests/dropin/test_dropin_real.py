"""The real packages under the drop-in: who is called, and that names, signatures and pickles hold."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from worlds import SRC

pytestmark = pytest.mark.plain_build


def run(code: str, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *arguments, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(SRC)},
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def test_real_torch() -> None:
    """Imported before and after `install`, in one process: what it says of itself, and what it loads."""
    pytest.importorskip("torch")
    done = run(
        """
import inspect, io, pickle, subprocess, sys
import torch
names = list(inspect.signature(torch.load).parameters), list(inspect.signature(torch.save).parameters)
originals = [torch.load, torch.save]  # in a list, where they are not bound anew
from tensorio import dropin
dropin.install()
assert torch.load is torch.serialization.load and torch.load not in originals and torch.save not in originals
assert names == (list(inspect.signature(torch.load).parameters), list(inspect.signature(torch.save).parameters))
assert torch.load.__name__ == "load" and inspect.getdoc(torch.load) and inspect.getsource(torch.load)
assert pickle.loads(pickle.dumps(torch.load)) is torch.load

def round_trip(obj, **options):
    file = io.BytesIO()
    torch.save(obj, file)
    file.seek(0)
    return torch.load(file, **options)

assert torch.equal(round_trip({"w": torch.arange(5)})["w"], torch.arange(5))
assert type(round_trip(torch.nn.Linear(1, 1), weights_only=False)) is torch.nn.Linear
print(subprocess.check_output([sys.executable, "-c", "import torch; print(torch.load.__module__.split('.')[0])"]))
dropin.uninstall()
assert [torch.load, torch.serialization.save] == originals
"""
    )
    assert done.stdout == "b'tensorio\\n'\n"
    assert done.stderr == ""


def test_real_safetensors() -> None:
    """All that the package's modules define is there, under the names that others import."""
    pytest.importorskip("safetensors")
    pytest.importorskip("torch")
    done = run(
        """
import safetensors.numpy, safetensors.torch, safetensors, sys, types
from safetensors.torch import load, load_file, safe_open, save_file
modules = [safetensors, safetensors.numpy, safetensors.torch, sys.modules["safetensors._safetensors_rust"]]
from tensorio import dropin
dropin.install()
import safetensors as ours
assert ours.__version__ == safetensors.__version__ and ours is safetensors  # this module's names are bound anew
for old in modules[1:]:
    new = sys.modules[old.__name__]
    assert new is not old and new.__name__ == "tensorio." + old.__name__
    public = [n for n, v in vars(old).items() if not n.startswith("_") and getattr(v, "__module__", "") != "typing"
              and not isinstance(v, types.ModuleType) and n != "defaultdict"]
    missing = [n for n in public if not hasattr(new, n)]
    assert not missing, (old.__name__, missing)
assert safe_open is ours.safe_open and load_file is sys.modules["safetensors.torch"].load_file
with __import__("tempfile").NamedTemporaryFile(suffix=".safetensors") as f:
    import torch
    save_file({"w": torch.ones(3)}, f.name)
    with safe_open(f.name, "pt") as file:
        print(file.get_tensor("w").tolist(), sorted(load_file(f.name)))
"""
    )
    assert done.stdout == "[1.0, 1.0, 1.0] ['w']\n"
    assert done.stderr.startswith("tensorio: served ")
