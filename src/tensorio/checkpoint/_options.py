"""How a user says that a file is to be read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tensorio import allowing

__all__ = ["reading_options"]


def reading_options(
    writable: bool,
    unknown: str,
    allow: Iterable[type],
    strict: bool,
    encoding: str | None = None,
    key: Any = None,
) -> dict[str, Any]:
    """Check arguments of `tensorio.open`, and return those that `open_checkpoint` passes on."""
    if unknown not in ("error", "opaque"):
        raise ValueError(f"unknown= is 'error' or 'opaque', not {unknown!r}")
    if encoding not in (None, "bytes"):
        try:
            b"a".decode(encoding)
        except LookupError:
            raise ValueError(f"encoding= is the name of a codec for text or 'bytes', not {encoding!r}") from None
    allowed = (*allowing.current(), *allow)
    allowing.table(allowed)  # says at once what may not be allowed
    options = {"writable": writable, "unknown": unknown, "strict": strict, "encoding": encoding, "allow": allowed}
    if key is not None:
        from tensorio.encryption._keys import KeySource

        options["key"] = KeySource(key)
    return options
