"""From rebuild arguments to kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["KINDS"]

KINDS: dict[str, Callable[[tuple[Any, ...], Any], Any]] = {}
