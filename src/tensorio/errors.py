"""Everything tensorio raises by itself.

::

    TensorIOError
      FormatError (ValueError)        the bytes are wrong
        UnknownFormatError            nobody recognised the file
        TruncatedError                the file ends too early
        HeaderError                   syntax, duplicate, overlap, gap, out of range
        ChecksumError                 stored and computed checksum differ
        LimitError                    beyond a stated safety limit
        DecryptionError               encrypted: no key, the wrong one, or changed since
      UnsupportedError (NotImplementedError)
      UnsafePickleError (pickle.UnpicklingError)
      TensorNotFoundError (KeyError)
      TensorMismatchError (ValueError)
      NonFiniteError (ValueError)     NaN or infinity where only finite numbers were asked for
      LockedError                     another process writes there
      PublicationError                something published to other processes can't be had, or not under that name
        NotPublishedError (LookupError)   nobody publishes it, or no longer
        NameTakenError                somebody else publishes under that name

``OSError`` and ``MemoryError`` from the system pass through untouched.

An error is one line of at most 500 characters: what was expected, what was
found, what to do, and where. Code deep down knows the offset; `error_context`
adds the file and the record on the way up.
"""

from __future__ import annotations

import contextlib
import difflib
import pickle
from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "ChecksumError",
    "DecryptionError",
    "FormatError",
    "HeaderError",
    "LimitError",
    "LockedError",
    "NameTakenError",
    "NonFiniteError",
    "NotPublishedError",
    "PublicationError",
    "TensorIOError",
    "TensorMismatchError",
    "TensorNotFoundError",
    "TruncatedError",
    "UnknownFormatError",
    "UnsafePickleError",
    "UnsupportedError",
    "error_context",
    "escaped",
]

_LINE_MAX = 500
_TEXT_MAX = 80


def escaped(text: object, limit: int = _TEXT_MAX) -> str:
    """Quote text that comes from a file: printable ASCII, at most `limit` characters.

    Cut before it is escaped, so that the cost does not depend on the file's text.
    """
    if isinstance(text, bytes | bytearray | memoryview):
        raw = bytes(text[: limit + 1]).decode("latin-1")
    else:
        raw = str(text)[: limit + 1]
    shown = raw.encode("unicode_escape").decode("ascii")
    return f"'{shown[:limit]}...'" if len(shown) > limit or len(raw) > limit else f"'{shown}'"


class TensorIOError(Exception):
    """Base of all errors raised by tensorio.

    Attributes
    ----------
    path : str or None
        The file (or a short description of a file object or buffer).
    record : str or None
        The named byte range inside the file, e.g. a zip record or a tensor.
    offset : int or None
        Byte offset from the start of the file; inside a pickle, from the start
        of the record.
    nbytes : int or None
        How many bytes from there on are in doubt, where `tensorio.verify` found it.
    tensors : tuple of str
        Full names of the tensors that have some of them, where it is known.
    """

    nbytes: int | None = None
    tensors: tuple[str, ...] = ()

    def __init__(
        self,
        message: str = "",
        *,
        path: str | None = None,
        record: str | None = None,
        offset: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.record = record
        self.offset = offset

    def __str__(self) -> str:
        where = []
        if self.path is not None:
            where.append(f"file {escaped(self.path, 160)}")
        if self.record is not None:
            where.append(f"record {escaped(self.record)}")
        if self.offset is not None:
            where.append(f"byte offset {self.offset}")
        if self.tensors and self.tensors != (self.record,):
            more = f" and {len(self.tensors) - 2} more" if len(self.tensors) > 2 else ""
            shown = ", ".join(escaped(fqn, 60) for fqn in self.tensors[:2])
            where.append(f"tensor{'s' * (len(self.tensors) > 1)} {shown}{more}")
        place = f" ({', '.join(where)})" if where else ""
        room = _LINE_MAX - len(place)
        text = self.message if len(self.message) <= room else self.message[: room - 3] + "..."
        return text + place

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[TensorIOError], args: tuple[object, ...], state: dict[str, object]) -> TensorIOError:
    """Make a pickled error again without running its constructor, whatever its arguments are."""
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


class FormatError(TensorIOError, ValueError):
    """The bytes of the file are wrong."""


class UnknownFormatError(FormatError):
    """No reader recognised the file; the message says what it looks like."""


class TruncatedError(FormatError):
    """The file ends too early: how much is there, how much is missing."""


class HeaderError(FormatError):
    """The description of the tensors is wrong: syntax, duplicate, overlap, gap, out of range."""


class ChecksumError(FormatError):
    """A stored checksum and the one computed over the bytes differ.

    Attributes
    ----------
    expected, actual : int
        The stored and the computed value.
    """

    def __init__(self, message: str = "", *, expected: int = 0, actual: int = 0, **where: object) -> None:
        super().__init__(message, **where)  # type: ignore[arg-type]
        self.expected = expected
        self.actual = actual


class LimitError(FormatError):
    """The file asks for more than a stated safety limit."""


class DecryptionError(FormatError):
    """What is encrypted can't be had: no key, the wrong one, or bytes that were changed since encryption.

    Attributes
    ----------
    key_id : str
        The name of the key, if the file has one for it; else empty.
    """

    def __init__(self, message: str = "", *, key_id: str = "", **where: object) -> None:
        super().__init__(message, **where)  # type: ignore[arg-type]
        self.key_id = key_id


class UnsupportedError(TensorIOError, NotImplementedError):
    """Legal, but not handled by this version (or needs an optional extra, which is named)."""


class UnsafePickleError(TensorIOError, pickle.UnpicklingError):
    """The pickle names something that is not on the list of harmless names.

    Attributes
    ----------
    globals : tuple of str
        Every refused name of the file, as ``"module.name"``, in order of appearance.
    """

    def __init__(self, message: str = "", *, globals: Sequence[str] = (), **where: object) -> None:
        super().__init__(message, **where)  # type: ignore[arg-type]
        self.globals = tuple(globals)


class TensorNotFoundError(TensorIOError, KeyError):
    """No tensor of that name; the message suggests near ones."""

    @classmethod
    def among(cls, fqn: object, names: Iterable[str]) -> TensorNotFoundError:
        """Build the error with up to three near names out of `names`."""
        near = difflib.get_close_matches(str(fqn)[:_TEXT_MAX], list(names)[:20_000], 3)
        hint = f"; near names: {', '.join(escaped(n) for n in near)}" if near else ""
        return cls(f"no tensor named {escaped(fqn)}{hint}")


class TensorMismatchError(TensorIOError, ValueError):
    """A tensor does not fit what the caller gave or asked for."""


class NonFiniteError(TensorIOError, ValueError):
    """NaN or infinity in tensors that were asked to be finite.

    Attributes
    ----------
    found : tuple of NonFinite
        Every such tensor: its name, the index of the first such element, how many.
    """

    def __init__(self, message: str = "", *, found: Sequence[object] = (), **where: object) -> None:
        super().__init__(message, **where)  # type: ignore[arg-type]
        self.found = tuple(found)


class LockedError(TensorIOError):
    """Another process, or another object of this one, writes to the folder; the message names it."""


class PublicationError(TensorIOError):
    """What another process published can't be had, or can't be published: refused, out of reach, in use."""


class NotPublishedError(PublicationError, LookupError):
    """Nothing is published under that name; or its owner has ended, and it went with it."""


class NameTakenError(PublicationError):
    """Another living process publishes under that name; the message names it."""


@contextlib.contextmanager
def error_context(*, path: str | None = None, record: str | None = None) -> Iterator[None]:
    """Attach where we are to a `TensorIOError` that rises through and does not know yet."""
    try:
        yield
    except TensorIOError as error:
        if error.path is None:
            error.path = path
        if error.record is None:
            error.record = record
        raise
