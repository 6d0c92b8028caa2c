"""What `torch.load` says of the same damage, for programs that search its messages for words.

Ours says what is wrong and where; torch's phrase follows it. Where torch says
nothing of use, ours stands alone.
"""

from __future__ import annotations

import re

__all__ = ["with_words"]

_ROOM = 230  # characters of our own message, so that torch's phrase and the place fit into one line
_CORRUPTED = "This is an internal miniz error; there is a high likelihood that your checkpoint file is corrupted"
_SET = "for dict, collections.OrderedDict, collections.Counter, but got"

# Our message, from its beginning; torch's, with our groups.
_PHRASES: tuple[tuple[re.Pattern[str], str], ...] = tuple((re.compile(ours), theirs) for ours, theirs in (
    (r"local file header: ",
     rf"PytorchStreamReader failed reading file: invalid header or archive is corrupted. {_CORRUPTED}"),
    (r"(?:zip64 )?end of central directory",
     rf"PytorchStreamReader failed reading zip archive: failed finding central directory. {_CORRUPTED}"),
    (r"expected a record '[^']*?([^'/]+)', found none",
     rf"PytorchStreamReader failed locating file \1: file not found. {_CORRUPTED}"),
    (r".*storage '([^']*)' has no record in the archive",
     rf"PytorchStreamReader failed locating file data/\1: file not found. {_CORRUPTED}"),
    (r"pickle opcode 0x73: expected a dict, found (.+)", rf"Can only SETITEM {_SET} \1"),
    (r"pickle opcode 0x75: expected a dict, found (.+)", rf"Can only SETITEMS {_SET} \1"),
    (r"pickle opcode 0x61: expected a list, found (.+)", r"Can only append to lists, but got \1"),
    (r"pickle opcode 0x65: expected a list, found (.+)", r"Can only extend lists, but got \1"),
    (r".*expected a persistent id: .*that begins with (.+)",
     r"Only persistent_load of storage is allowed, but got <class '\1'>"),
    (r".*it may be a plain pickle", r"Invalid magic number; corrupt file?"),
    (r"expected 'little' or 'big', found '(.*)'", r"Unknown endianness type: \1"),
))  # fmt: skip
_SIZES = re.compile(r"storage '[^']*': expected (\d+) elements of (\d+) bytes, found a record of (\d+) bytes")
_SHORT = re.compile(r"expected a storage of (\d+) bytes, found (\d+)")


def with_words(message: str) -> str:
    """Return a message of ours, followed by torch's phrase for the same damage if it has one.

    Parameters
    ----------
    message : str

    Returns
    -------
    str
        One line; the phrase is cut before it would not fit into an error's line.
    """
    phrase = _phrase(message)
    return message if phrase is None else f"{message[:_ROOM]}; torch.load: {phrase}"


def _phrase(message: str) -> str | None:
    found = _SIZES.match(message)
    if found:
        count, itemsize, size = map(int, found.groups())
        return f"record size ({size} bytes) does not match expected size ({count * itemsize} bytes)"
    found = _SHORT.match(message)
    if found:
        missing = int(found[1]) - int(found[2])
        return f"unexpected EOF, expected {missing} more bytes. The file might be corrupted."
    for ours, theirs in _PHRASES:
        found = ours.match(message)
        if found:
            return found.expand(theirs)
    return None
