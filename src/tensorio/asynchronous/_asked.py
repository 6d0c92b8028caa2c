"""What a save in the background was asked for."""

from __future__ import annotations

import os
from typing import Any

from tensorio.checkpoint._saving import SaveRequest

__all__ = ["absolute", "name_of", "request_of"]


def request_of(options: dict[str, Any]) -> SaveRequest:
    """Return the options of a save as one.

    Raises
    ------
    TypeError
        `tensorio.save` has no option of such a name.
    """
    for name in options:
        if name not in SaveRequest.__dataclass_fields__:
            raise TypeError(f"expected options of tensorio.save, found {name}=")
    return SaveRequest(**options)


def absolute(path: Any) -> Any:
    """Return a path from the root: the program may go to another folder before the file is written."""
    if not isinstance(path, str | bytes | os.PathLike) or "://" in os.fsdecode(path):
        return path
    return os.path.abspath(os.fspath(path))


def name_of(path: Any) -> str:
    """Return what a target is called in messages."""
    return os.fsdecode(path) if isinstance(path, str | bytes) else f"a {type(path).__name__}"
