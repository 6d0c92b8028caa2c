"""The error of this face: one class to catch, part of tensorio's tree, with the words that callers look for.

A message begins with the sentence that users of the format know, names its
code (``HeaderTooLarge``), and goes on with what tensorio has to say: what was
expected, what was found, and where.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tensorio.encryption._opening import without_argument
from tensorio.errors import (
    DecryptionError,
    FormatError,
    HeaderError,
    LimitError,
    TensorIOError,
    TensorMismatchError,
    TensorNotFoundError,
    TruncatedError,
    UnsupportedError,
    escaped,
)

__all__ = ["SafetensorError", "SafetensorIndexError", "explained", "missing", "rejected", "translated"]

OPENING = "Error while deserializing header"
LOADING = "Error while deserializing"
SAVING = "Error while serializing"


class SafetensorError(TensorIOError):
    """What every function of ``tensorio.safetensors`` raises for a file, a tensor or an index that it can't serve.

    Subclasses are also of the kinds in `tensorio.errors` (and `IndexError`), so
    that either may be caught.

    Attributes
    ----------
    code : str or None
        Name of the rule that a header breaks, e.g. ``"InvalidOffset"``.
    path, record, offset
        Where; see `tensorio.TensorIOError`.
    """

    __module__ = "tensorio.safetensors"
    code: str | None = None


class SafetensorHeaderError(SafetensorError, HeaderError):
    """The header is wrong."""


class SafetensorTruncatedError(SafetensorError, TruncatedError):
    """The file ends too early."""


class SafetensorDecryptionError(SafetensorError, DecryptionError):
    """The file is encrypted."""


class SafetensorLimitError(SafetensorError, LimitError):
    """The file asks for more than a stated limit."""


class SafetensorUnsupportedError(SafetensorError, UnsupportedError):
    """Legal, but not handled here."""


class SafetensorMismatchError(SafetensorError, TensorMismatchError):
    """A tensor that does not fit into a file."""


class SafetensorNotFoundError(SafetensorError, TensorNotFoundError):
    """No tensor of that name."""


class SafetensorIndexError(SafetensorError, IndexError):
    """An index that the tensor does not have."""


_KINDS: tuple[tuple[type[TensorIOError], type[SafetensorError]], ...] = (
    (TruncatedError, SafetensorTruncatedError),
    (LimitError, SafetensorLimitError),
    (DecryptionError, SafetensorDecryptionError),
    (FormatError, SafetensorHeaderError),
    (TensorMismatchError, SafetensorMismatchError),
    (UnsupportedError, SafetensorUnsupportedError),
    (TensorNotFoundError, SafetensorNotFoundError),
)

_MISALIGNED = (
    "The slice is slicing for subbytes dtypes, and the slice does not end up at a byte boundary, this is invalid."
)
_JSON = ("InvalidHeaderDeserialization", "invalid JSON in header")
_OFFSET = ("InvalidOffset", "invalid offset for tensor `{name}`")
_OVERFLOW = ("ValidationOverflow", "overflow computing buffer size from shape and/or element type")

# How the messages of the core begin (see csrc/st_header.c and csrc/json.c), and what the format's users call them.
_SENTENCES: tuple[tuple[str, tuple[str, str]], ...] = (
    ("header length: the file ends", ("HeaderTooSmall", "header too small")),
    ("header length", ("HeaderTooLarge", "header too large")),
    ("header: the file ends", ("InvalidHeaderLength", "invalid header length")),
    ("JSON string: expected UTF-8", ("InvalidHeader", "invalid UTF-8 in header")),
    ("tensor entry: data_offsets: overlaps", _OFFSET),
    ("tensor entry: data_offsets: hole", _OFFSET),
    ("tensor entry: data_offsets: end before", _OFFSET),
    ("tensor entry: data_offsets: size", ("TensorInvalidInfo", "invalid shape, data type, or offset for tensor")),
    ("tensor entry: shape: bits", ("MisalignedSlice", _MISALIGNED)),
    ("tensor entry: shape: size in bits", _OVERFLOW),
    ("tensor entry: shape: a dimension over", _OVERFLOW),
    ("payload:", ("MetadataIncompleteBuffer", "incomplete metadata, file not fully covered")),
    ("JSON", _JSON),
    ("tensor entry", _JSON),
    ("__metadata__", _JSON),
    ("duplicate", _JSON),
    ("header: expected", _JSON),
)


def explained(error: TensorIOError, doing: str) -> SafetensorError:
    """Return an error of the core as this face's, with the sentence that belongs to it."""
    found = next((words for start, words in _SENTENCES if error.message.startswith(start)), None)
    if found is None:
        return translated(error, f"{doing}: {error.message}")
    code, sentence = found
    name = escaped(error.record)[1:-1] if error.record is not None else ""
    out = translated(error, f"{doing}: {sentence.format(name=name)} ({code}): {error.message}")
    out.code = code
    return out


def translated(error: TensorIOError, message: str) -> SafetensorError:
    """Return an error of ours as this face's, with another message and the same place."""
    kind = next((ours for theirs, ours in _KINDS if isinstance(error, theirs)), SafetensorError)
    out = kind(without_argument(message), path=error.path, record=error.record, offset=error.offset)
    if isinstance(error, DecryptionError) and isinstance(out, DecryptionError):
        out.key_id = error.key_id
    return out


@contextlib.contextmanager
def rejected(doing: str, path: str | None = None) -> Iterator[None]:
    """Raise this face's error for those of tensorio that rise through."""
    try:
        yield
    except SafetensorError:
        raise
    except TensorIOError as error:
        if error.path is None:
            error.path = path
        raise explained(error, doing) from error


def missing(name: object, names: list[str]) -> SafetensorNotFoundError:
    """Return the error for a name that is not in the file, with near ones."""
    hint = TensorNotFoundError.among(name, names).message.partition(";")[2]
    text = name if isinstance(name, str) and len(name) <= 80 and name.isprintable() else escaped(name)
    return SafetensorNotFoundError(f"File does not contain tensor {text}{';' if hint else ''}{hint}")
