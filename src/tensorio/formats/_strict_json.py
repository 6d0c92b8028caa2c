"""JSON from files: no key twice, no number that is none, and bounds on depth and memory."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from tensorio.errors import HeaderError, LimitError, escaped

__all__ = ["parse"]

# What the parser may make, in bytes: this much, and so much per byte of the text. Values take at most about 100 bytes
# beside their text (a dict of one key 184, a list of one value 64; CPython 3.11), and real files have one in 7 bytes.
FIXED = 32 << 20
PER_BYTE = 16
VALUE = 100


def parse(data: bytes | memoryview) -> Any:
    """Return the value of a JSON text in UTF-8.

    Raises
    ------
    HeaderError
        Not JSON; a key that occurs twice in one object; NaN or an infinity; a
        number of over 4300 digits.
    LimitError
        Deeper than Python's recursion limit, or many more values than text.

    Notes
    -----
    Takes at most 32 MiB plus 16 times the text's bytes.
    """
    raw = bytes(data)
    values = raw.count(b",") + raw.count(b":") + raw.count(b"[") + raw.count(b"{")
    if values * VALUE > FIXED + PER_BYTE * len(raw):
        raise LimitError(f"JSON: about {values} values in {len(raw)} bytes, more than any description of tensors has")
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_number)
    except RecursionError:
        raise LimitError("JSON: nested too deep") from None
    except json.JSONDecodeError as error:
        raise HeaderError(f"JSON: {error.msg}", offset=error.pos) from None
    except UnicodeDecodeError as error:
        raise HeaderError("JSON: expected UTF-8", offset=error.start) from None
    except ValueError as error:
        if isinstance(error, HeaderError):
            raise
        raise HeaderError("JSON: a number of too many digits") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise HeaderError(f"JSON: the key {escaped(twice)} occurs twice in one object")
    try:
        "".join(out).encode()
    except UnicodeEncodeError:
        raise HeaderError("JSON: half a surrogate pair in a key") from None
    return out


def _no_number(text: str) -> NoReturn:
    raise HeaderError(f"JSON: expected a number, found {text}")
