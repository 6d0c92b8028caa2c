"""Where loaded storages go: torch's ``map_location``, as far as it is about the CPU and CUDA."""

from __future__ import annotations

from typing import Any

import torch

from tensorio.pickles import NotPlain
from tensorio.torch._staging import Staging

__all__ = ["Places", "has_stock_packages", "is_ordinary"]

_C: Any = torch._C
_overrides: Any = torch.overrides
_serialization: Any = torch.serialization


def is_ordinary() -> bool:
    """Tell whether torch is in no mode in which `torch.load` makes something else than tensors with data."""
    if getattr(_serialization._serialization_tls, "skip_data", False):
        return False
    if _C._len_torch_dispatch_stack() or torch._guards.active_fake_mode() is not None:
        return False
    modes = _overrides._get_current_function_mode_stack() if _C._len_torch_function_stack() else ()
    return all(type(mode) is torch.utils._device.DeviceContext for mode in modes)


def has_stock_packages() -> bool:
    """Tell whether nobody registered a package of their own in front of torch's for the CPU (``register_package``)."""
    return _is_stock(0, "_cpu_deserialize")


class Places:
    """Resolves locations for one load.

    Parameters
    ----------
    map_location : None, str, torch.device or dict
        As `torch.load` takes it; anything else is not plain.
    staging : Staging, optional
        Copies to the device; made when first needed.
    """

    def __init__(self, map_location: object, staging: Staging | None = None) -> None:
        if isinstance(map_location, torch.device):
            map_location = str(map_location)
        if not isinstance(map_location, str | dict | None):
            raise NotPlain("a function as map_location")
        self._map_location = map_location
        self._staging = staging

    def moves(self, location: object) -> bool:
        """Tell whether storages of a location go to a device that has memory of its own."""
        where = self._resolved(location)
        if where == "cpu" and has_stock_packages():
            return False
        if where.partition(":")[0] != "cuda" or not torch.cuda.is_available() or not _is_stock(1, "cuda"):
            raise NotPlain("a location of some other sort")  # torch knows what to do, or to say
        return True

    def moved(self, source: torch.Tensor, location: object) -> torch.Tensor:
        """Return room for bytes on the device of a location; they are there after `finish`."""
        if self._staging is None:
            self._staging = Staging()
        device = _serialization._validate_device(self._resolved(location), "cuda")
        return self._staging.add(source, torch.device(device))

    def finish(self) -> None:
        """Wait until every storage has its bytes."""
        if self._staging is not None:
            self._staging.run()

    def _resolved(self, location: object) -> str:
        where = location.decode("ascii", "replace") if isinstance(location, bytes) else location
        if isinstance(self._map_location, str):
            where = self._map_location
        elif isinstance(self._map_location, dict) and isinstance(where, str):
            where = self._map_location.get(where, where)
        if type(where) is not str:
            raise NotPlain("a location that is no text")
        return where


def _is_stock(place: int, name: str) -> bool:
    """Whether an entry of the registry is torch's own."""
    function = _serialization._package_registry[place][2]
    return name in (getattr(function, "__name__", ""), *getattr(function, "args", ()))
