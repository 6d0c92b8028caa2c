"""A small world for child processes: stand-ins for safetensors and torch, and for the faces that replace them.

``tensorio.torch`` needs the real torch; what is tested here is who is called, for which a few lines each will do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent

import tensorio

SRC = Path(tensorio.__file__).resolve().parents[1]

ORIGINALS = {
    "safetensors/__init__.py": """
        from ._safetensors_rust import SafetensorError, safe_open
        __version__ = "0.1"
    """,
    "safetensors/_safetensors_rust.py": """
        class SafetensorError(Exception): pass
        def safe_open(f): return "original"
        safe_open.__module__ = "builtins"  # as the compiled one says
    """,
    "safetensors/torch.py": """
        import os
        from safetensors import safe_open
        _TYPES = {}
        def load_file(f): return "original"
        def only_there(f): return "original"
    """,
    "torch/__init__.py": """
        from torch.serialization import load, save
        import torch.hub
    """,
    "torch/serialization.py": """
        def load(f, weights_only=None): return "original"
        def save(obj, f): return "original"
    """,
    "torch/hub.py": "from torch.serialization import load as _fetch",
}
METADATA = {"safetensors-0.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: safetensors\nVersion: 0.1\n"}
FACES = {
    "faces/safetensors/__init__.py": """
        from tensorio import _served
        from tensorio.safetensors._safetensors_rust import SafetensorError, safe_open
        __version__ = "0.8.0"
    """,
    "faces/safetensors/_safetensors_rust.py": """
        from tensorio import _served
        class SafetensorError(Exception): pass
        def safe_open(f):
            _served.count("safetensors.safe_open", 1000)
            return "tensorio"
    """,
    "faces/safetensors/torch.py": """
        import os
        from tensorio import _served
        _TYPES = {"ours": 1}
        def load_file(f):
            _served.count("safetensors.torch.load_file")
            return "tensorio"
    """,
    "faces/torch.py": """
        from tensorio import _served
        from torch import load as _load
        def load(f, weights_only=None):
            if weights_only is False:
                _served.pass_on("torch.load(weights_only=False)")
                return _load(f)
            _served.count("torch.load", 2_500_000)
            return "tensorio"
        def save(obj, f): return "tensorio"
    """,
    # Also what an environment's own sitecustomize is: it has to run, drop-in or not.
    "sitecustomize.py": """
        import importlib.machinery, os, sys
        class Faces:
            def find_spec(self, name, path=None, target=None):
                if name in ("tensorio.torch", "tensorio.safetensors"):
                    folder = os.path.join(os.path.dirname(__file__), "faces")
                    return importlib.machinery.PathFinder.find_spec(name, [folder])
        sys.meta_path.insert(0, Faces())
        own_site = True
    """,
}


@dataclass
class World:
    """A folder of stand-ins, and Pythons that run in it."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    def write(self, files: dict[str, str]) -> World:
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(text))
        return self

    def python(self, *arguments: str, status: int = 0, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        """Run a Python in the folder; fails unless it exits with `status`."""
        paths = [str(self.folder), str(SRC), *(p for p in sys.path if p.endswith("site-packages"))]
        done = subprocess.run(
            [sys.executable, "-W", "error", *arguments],
            cwd=self.folder,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(self.tmp)}
            | self.env
            | env,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done

    def code(self, text: str, **env: str) -> str:
        """Run code in which ``dropin`` is imported; its output. Standard error must stay empty but for the line."""
        done = self.python("-c", "from tensorio import dropin\n" + dedent(text), **env)
        assert not done.stderr or done.stderr.startswith("tensorio: served "), done.stderr
        return done.stdout

    @property
    def tmp(self) -> Path:
        path = self.folder / "tmp"
        path.mkdir(exist_ok=True)
        return path
