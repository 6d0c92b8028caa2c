"""What the user set in `torch.utils.serialization.config`; older releases of torch have none."""

from __future__ import annotations

from typing import Any

__all__ = ["setting"]


def setting(act: str, name: str, default: Any) -> Any:
    """Return one setting.

    Parameters
    ----------
    act : str
        ``"load"`` or ``"save"``.
    name : str
    default : object
        What holds where this release of torch has no such setting.
    """
    try:
        from torch.utils.serialization import config
    except ImportError:
        return default
    return getattr(getattr(config, act, None), name, default)
