"""A pytest plugin that makes `safetensors` mean `tensorio.safetensors`, for ``tools/peer_suite.py``."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType

NAME = "safetensors"


class Swap(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``safetensors[.x]`` as ``tensorio.safetensors[.x]``, and never as what is installed under that name."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for the names that are swapped."""
        if name != NAME and not name.startswith(NAME + "."):
            return None
        if importlib.util.find_spec(f"tensorio.{name}") is None:
            raise ModuleNotFoundError(f"tensorio has no {name}", name=name)
        return importlib.util.spec_from_loader(name, self)

    def exec_module(self, module: ModuleType) -> None:
        """Put ours in the place of the new module."""
        sys.modules[module.__name__] = importlib.import_module(f"tensorio.{module.__name__}")


def pytest_sessionfinish() -> None:
    """Make sure that nothing else was tested."""
    for name in [n for n in sys.modules if n == NAME or n.startswith(NAME + ".")]:
        assert sys.modules[name].__name__ == f"tensorio.{name}", name


assert NAME not in sys.modules, "imported before it could be swapped"
sys.meta_path.insert(0, Swap())
