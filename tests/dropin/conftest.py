"""Fixtures of the drop-in's tests."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from worlds import FACES, METADATA, ORIGINALS, World


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Stand-ins for originals, installed, and for the faces."""
    return World(tmp_path).write(ORIGINALS | METADATA | FACES)


@pytest.fixture
def bare_world(tmp_path: Path) -> World:
    """The same where safetensors is not installed; whether it is where the tests run makes no difference."""
    files = {name: text for name, text in ORIGINALS.items() if not name.startswith("safetensors")}
    hide = """
        class Hidden:
            def find_spec(self, name, path=None, target=None):
                if name == "safetensors":
                    raise ModuleNotFoundError("No module named 'safetensors'", name=name)
        import importlib.metadata
        find = importlib.metadata.MetadataPathFinder.find_distributions
        def find_others(context=importlib.metadata.DistributionFinder.Context()):
            return (d for d in find(context) if d.metadata["Name"] != "safetensors")
        importlib.metadata.MetadataPathFinder.find_distributions = staticmethod(find_others)
        sys.meta_path.insert(sys.meta_path.index(importlib.machinery.PathFinder), Hidden())
    """
    site = dedent(FACES["sitecustomize.py"]) + dedent(hide)
    return World(tmp_path).write(files | FACES | {"sitecustomize.py": site})
