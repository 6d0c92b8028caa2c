"""``torch.load`` and ``torch.save``: replaced in torch when it is there, or as soon as it has been imported."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tensorio.dropin import _bound

__all__ = ["install", "installed", "uninstall"]

NAMES = ("load", "save")
DEFINED_IN = "torch.serialization"


class _Finder:
    """Of ``sys.meta_path``: lets the others find torch, and has its loader tell when it is done."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        # One of before Python 3.4 is asked by the import system itself, or not at all.
        for finder in [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    _call_after(spec.loader)
                return spec
        return None


def _call_after(loader: Any) -> None:
    """Have `loader` replace the functions when it has run the module.

    An attribute of the loader itself and for one call: what asks torch for its loader later gets an ordinary one.
    """
    run = loader.exec_module

    @functools.wraps(run)
    def run_then_replace(module: ModuleType) -> None:
        vars(loader).pop("exec_module", None)
        run(module)
        if not installed():
            return
        try:
            _replace(module)
        except ImportError as error:
            warnings.warn(
                f"tensorio.dropin: torch.load and torch.save stay torch's own: {error}", RuntimeWarning, stacklevel=2
            )

    try:
        loader.exec_module = run_then_replace
    except AttributeError:
        warnings.warn(
            f"tensorio.dropin: torch.load and torch.save stay torch's own, since its loader, "
            f"{type(loader).__qualname__}, takes no attribute; call tensorio.dropin.install() after 'import torch'",
            RuntimeWarning,
            stacklevel=2,
        )


_finder = _Finder()
_bindings: list[_bound.Binding] = []


def installed() -> bool:
    """Whether torch's functions are replaced, or will be when it is imported."""
    return _finder in sys.meta_path


def install() -> None:
    """Replace the functions now if torch was imported, else when it will be."""
    if installed():
        return
    sys.meta_path.insert(0, _finder)
    torch = sys.modules.get("torch")
    if torch is None:
        return
    try:
        if _is_being_imported(torch):
            importlib.import_module("torch")  # waits until the thread that imports it is done
            if _is_being_imported(torch):
                raise RuntimeError(
                    "tensorio.dropin.install() was called from within the import of torch: call it before or after"
                )
        _replace(torch)
    except BaseException:
        uninstall()
        raise


def uninstall() -> None:
    """Put torch's functions back."""
    if not installed():
        return
    sys.meta_path.remove(_finder)
    _bound.restore(_bindings)
    _bindings.clear()


def _is_being_imported(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


def _replace(torch: ModuleType) -> None:
    """Bind torch's two functions, wherever a module has them, to ours."""
    face = importlib.import_module("tensorio.torch")
    pairs: _bound.Pairs = {}
    for name in NAMES:
        old, new = getattr(torch, name), getattr(face, name)
        if old is new:
            continue
        if getattr(old, "__module__", None) != DEFINED_IN:
            _warn_of_another(name, old)
            continue
        pairs[id(old)] = (old, new)
    _bindings.extend(_bound.rebind(pairs, leave=("tensorio",)))


def _warn_of_another(name: str, found: object) -> None:
    where = f"{getattr(found, '__module__', None) or type(found).__module__}"
    what = getattr(found, "__qualname__", None) or type(found).__qualname__
    warnings.warn(
        f"tensorio.dropin: torch.{name} is not torch's own but {where}.{what}, and is left as it is; "
        f"call tensorio.dropin.install() before it is replaced",
        RuntimeWarning,
        stacklevel=4,
    )
