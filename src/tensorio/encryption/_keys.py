"""Where a key comes from: bytes, the environment, a file, a function. None of its bytes is ever shown or pickled."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Callable
from typing import Any

from tensorio.encryption._header import KEY
from tensorio.errors import escaped
from tensorio.storage.opening import open_storage

__all__ = ["KeySource"]

FILE_MAX = 4096
_KINDS = "32 bytes, 'env:NAME', 'file:PATH', or a function that is given the key's name and returns one of these"


class KeySource:
    """What the user gave as ``key=``; the key itself is fetched when it is needed.

    Parameters
    ----------
    given : bytes, str or callable
        32 bytes; ``"env:NAME"`` for a variable of the environment, of 64
        hexadecimal digits or 44 characters of base64; ``"file:PATH"`` for a
        file of 32 bytes, or of one line of such text; or a function that is
        called with the name of the key in the file's header ("" if it has none).

    Raises
    ------
    TypeError, ValueError
        Nothing of that sort.

    Notes
    -----
    Pickled, it is its text: bytes and functions are refused.
    """

    __slots__ = ("_given",)

    def __init__(self, given: Any) -> None:
        if isinstance(given, KeySource):
            given = given._given
        elif isinstance(given, bytes | bytearray | memoryview):
            given = bytes(given)
            if len(given) != KEY:
                raise ValueError(f"key= is {_KINDS}; found {len(given)} bytes")
        elif isinstance(given, str):
            kind, colon, rest = given.partition(":")
            if kind not in ("env", "file") or not colon or not rest:
                raise ValueError(f"key= is {_KINDS}; found other text")  # it may be the key: it is not shown
            if kind == "file":
                given = f"file:{os.path.abspath(rest)}"  # wherever the current folder will be
        elif not callable(given):
            raise TypeError(f"key= is {_KINDS}; found {type(given).__name__}")
        self._given: bytes | str | Callable[[str], Any] = given

    @classmethod
    def of(cls, given: Any) -> KeySource | None:
        """Return the source for what a user gave; None for None."""
        return None if given is None else cls(given)

    def key(self, key_id: str = "") -> bytes:
        """Fetch the key.

        Raises
        ------
        ValueError
            What is there is no key.
        OSError
            The file can't be read.
        """
        given = self._given
        if isinstance(given, bytes):
            return given
        if isinstance(given, str):
            kind, _, rest = given.partition(":")
            return _from_environment(rest) if kind == "env" else _from_file(rest)
        found = given(key_id)
        if callable(found) or isinstance(found, KeySource):
            raise TypeError(f"expected the function to return bytes or text, found {type(found).__name__}")
        return KeySource(found).key(key_id)

    def __repr__(self) -> str:
        return f"<key from {self._given}>" if isinstance(self._given, str) else "<key>"

    def __reduce__(self) -> tuple[Any, ...]:
        if not isinstance(self._given, str):
            raise TypeError("a key that is bytes or a function is not pickled: use key='env:NAME' or key='file:PATH'")
        return KeySource, (self._given,)


def _from_environment(name: str) -> bytes:
    text = os.environ.get(name)
    if text is None:
        raise ValueError(f"expected a key in the environment, found no variable {escaped(name)}")
    return _of_text(os.fsencode(text), f"the variable {escaped(name)}")


def _from_file(path: str) -> bytes:
    storage, _, _ = open_storage(path, local=True)
    try:
        mode = os.fstat(storage.fileno()[0]).st_mode  # type: ignore[attr-defined]
        if os.name == "posix" and mode & 0o002:
            raise ValueError(
                f"expected a key that only its owner can change: anybody may write to {escaped(path, 160)}"
            )
        if storage.nbytes > FILE_MAX:
            raise ValueError(f"expected a key, found a file of {storage.nbytes} bytes: {escaped(path, 160)}")
        data = bytes(storage.view())
    finally:
        storage.close()
    return data if len(data) == KEY else _of_text(data, f"the file {escaped(path, 160)}")


def _of_text(text: bytes, where: str) -> bytes:
    text = text.strip()
    try:
        if len(text) == 2 * KEY:
            return binascii.unhexlify(text)
        key = base64.b64decode(text.replace(b"-", b"+").replace(b"_", b"/") + b"=" * (-len(text) % 4), validate=True)
    except (ValueError, binascii.Error):
        key = b""
    if len(key) != KEY:
        raise ValueError(f"expected a key of 32 bytes in {where}, as 64 hexadecimal digits or 44 characters of base64")
    return key
