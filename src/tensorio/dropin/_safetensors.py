"""`safetensors` as another name of `tensorio.safetensors`: one set of modules and classes under two names.

A finder, first in ``sys.meta_path``, answers for the package and its modules.
It also answers `importlib.metadata` for the distribution: packages ask for its
version before they use it, and it must be the one whose surface they get.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from tensorio.dropin import _bound

__all__ = ["install", "installed", "uninstall"]

NAME = "safetensors"
OURS = "tensorio.safetensors"


class _Alias:
    """Loader: the module of ours, imported under its own name."""

    def __init__(self, target: str):
        self.target = target
        self.spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.target)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # the import machinery has put the alias's in its place


class _Distribution(importlib.metadata.Distribution):
    """What is known of safetensors as a distribution: its name, version and only package."""

    def read_text(self, filename: str) -> str | None:
        if filename in ("METADATA", "PKG-INFO"):
            version = importlib.import_module(OURS).__version__
            return (
                f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\nSummary: served by tensorio.safetensors\n\n"
            )
        return f"{NAME}\n" if filename == "top_level.txt" else None

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


class _Finder:
    """Of ``sys.meta_path``."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != NAME and not name.startswith(NAME + "."):
            return None
        real = importlib.util.find_spec("tensorio." + name)
        if real is None:
            return None  # nor will the finders behind find it: they would look into the same folder
        spec = ModuleSpec(
            name,
            _Alias(real.name),  # type: ignore[arg-type]  # a loader by its methods
            origin=real.origin,
            is_package=real.submodule_search_locations is not None,
        )
        spec.submodule_search_locations = real.submodule_search_locations
        spec.has_location = real.has_location
        return spec

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        name = getattr(context, "name", None)
        if (name or "").lower() == NAME or (name is None and not self._is_installed()):
            yield _Distribution()

    def _is_installed(self) -> bool:
        """Whether a listing has the original already."""
        context = importlib.metadata.DistributionFinder.Context(name=NAME)
        others = [f for f in sys.meta_path if f is not self and hasattr(f, "find_distributions")]
        return any(next(iter(f.find_distributions(context)), None) is not None for f in others)


_finder = _Finder()
_originals: dict[str, ModuleType] = {}
_bindings: list[_bound.Binding] = []


def installed() -> bool:
    """Whether the finder is in place."""
    return _finder in sys.meta_path


def install() -> None:
    """Put the finder first, and replace what was imported from the original."""
    if installed():
        return
    sys.meta_path.insert(0, _finder)
    _originals.update(_imported())
    for name in _originals:
        del sys.modules[name]
    try:
        for name in sorted(_originals):
            if importlib.util.find_spec(name) is not None:
                importlib.import_module(name)
    except BaseException:
        uninstall()
        raise
    if _originals:
        _bindings.extend(_bound.rebind(_pairs(), leave=("tensorio", NAME)))


def uninstall() -> None:
    """Take the finder away and put the originals back."""
    if not installed():
        return
    sys.meta_path.remove(_finder)
    for name in _imported():
        del sys.modules[name]
    sys.modules.update(_originals)
    _bound.restore(_bindings)
    _originals.clear()
    _bindings.clear()


def _imported() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name == NAME or name.startswith(NAME + ".")}


def _pairs() -> _bound.Pairs:
    """The originals that have a replacement: modules, and the functions and classes that they define."""
    pairs: _bound.Pairs = {}
    for module_name, old in _originals.items():
        new = sys.modules.get(module_name)
        if new is None:
            continue
        pairs[id(old)] = (old, new)
        for name, value in vars(old).items():
            if name in vars(new) and not name.startswith("__") and _is_defined_there(value, module_name):
                pairs[id(value)] = (value, vars(new)[name])
    return pairs


def _is_defined_there(value: object, module_name: str) -> bool:
    """Whether a function or class is the package's own, not what it imported."""
    if not callable(value):
        return False
    # The compiled module's classes call themselves builtins; it imports nothing.
    return module_name == f"{NAME}._safetensors_rust" or getattr(value, "__module__", "").split(".")[0] == NAME
