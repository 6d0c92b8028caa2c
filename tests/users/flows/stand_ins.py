"""What stands in for packages that a user of safetensors imports and that do nothing here."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any


class _Named(type):
    """A class whose attributes are their names, as an enumeration's."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Anything(ModuleType):
    """A module in which every name is a class."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Named(name, (), {})
        setattr(self, name, made)
        return made


def torchvision() -> None:
    """Where no torchvision works beside the torch that is installed."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        names = ("", ".transforms", ".transforms.functional", ".ops", ".ops.misc", ".datasets", ".models", ".utils")
        for name in names:
            module = _Anything("torchvision" + name)
            module.__spec__ = importlib.util.spec_from_loader(module.__name__, None)
            sys.modules[module.__name__] = module
            if name:
                parent, _, child = module.__name__.rpartition(".")
                setattr(sys.modules[parent], child, module)
