"""Tar archives: where their members are.

Blocks of 512 bytes; each member is a header and its bytes, padded to whole blocks; two blocks of zeros end the
archive. Read are the plain files that Python's tarfile writes, ``x`` headers of time stamps and large sizes included.
What two readers could understand differently is refused, as is everything that is not a plain file: links, devices,
sparse and renamed members. Of the bytes behind the end, nothing is read.

Source: POSIX.1-2017, "ustar Interchange Format" and "pax Interchange Format".
"""

from __future__ import annotations

from typing import NamedTuple

from tensorio.errors import HeaderError, LimitError, TruncatedError, UnsupportedError, escaped

__all__ = ["Member", "is_tar", "members"]

BLOCK = 512
_NAME, _SIZE, _SUM, _TYPE, _MAGIC, _PREFIX = (slice(*ends) for ends in (
    (0, 100), (124, 136), (148, 156), (156, 157), (257, 262), (345, 500)))  # fmt: skip
_MAX_PAX = 64 << 10  # bytes of one pax header; tarfile's have about 40
_MAX_MEMBERS = 4096  # torch's archives have four
# Notes of a pax header that say nothing about the member's bytes or name.
_NOTES = {b"atime", b"comment", b"ctime", b"gid", b"gname", b"mtime", b"uid", b"uname"}
_OTHERS = {
    b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a FIFO",
    b"S": "a sparse file", b"L": "a long name", b"K": "a long link", b"g": "a header for all members",
}  # fmt: skip


class Member(NamedTuple):
    """A plain file in an archive.

    Attributes
    ----------
    name : str
    offset, nbytes : int
        Of its bytes, from the start of the archive.
    """

    name: str
    offset: int
    nbytes: int


def is_tar(head: bytes) -> bool:
    """Tell by the first header's magic."""
    return head[_MAGIC] == b"ustar"


def members(view: memoryview) -> dict[str, Member]:
    """Return the plain files of an archive by name, in order; nothing of their bytes is touched."""
    found: dict[str, Member] = {}
    at, size = 0, None
    while any(block := _block(view, at)):
        kind, nbytes = bytes(block[_TYPE]), _checked_size(block, at)
        start = at + BLOCK
        if kind == b"x":
            if size is not None:
                raise HeaderError("tar: two extended headers for one member", offset=at)
            size = _pax_size(view, start, nbytes)
        elif kind in (b"0", b"\0"):
            nbytes = nbytes if size is None or size < 0 else size
            _add(found, Member(_name(block, at), start, nbytes), len(view))
            size = None
        elif kind == b"5" and nbytes == 0 and size is None:
            _name(block, at)  # a folder: nothing is in it
        else:
            what = _OTHERS.get(kind, f"a member of type {escaped(kind)}")
            raise UnsupportedError(f"tar: expected plain files, found {what}", offset=at)
        at = start + (nbytes + BLOCK - 1) // BLOCK * BLOCK
    if size is not None:
        raise HeaderError("tar: an extended header without a member", offset=at)
    if any(_block(view, at + BLOCK)):
        raise HeaderError("tar: expected two blocks of zeros at the end, found one", offset=at + BLOCK)
    return found


def _block(view: memoryview, at: int) -> memoryview:
    if len(view) - at < BLOCK:
        raise TruncatedError(
            f"tar: expected a header or the end of the archive in {BLOCK} bytes, found {max(len(view) - at, 0)} bytes",
            offset=at,
        )
    return view[at : at + BLOCK]


def _checked_size(block: memoryview, at: int) -> int:
    """The bytes of a member, from a header whose checksum holds."""
    want = _number(block[_SUM], at)
    found = sum(block) - sum(block[_SUM]) + len(block[_SUM]) * ord(" ")
    if bytes(block[_MAGIC]) != b"ustar" or want != found:
        raise HeaderError(f"tar: expected a header with the checksum {want}, found {found}", offset=at)
    return _number(block[_SIZE], at)


def _number(field: memoryview, at: int) -> int:
    """Octal digits; or, if the first bit is set, a big-endian number."""
    if field[0] == 0x80:
        number = int.from_bytes(field[1:], "big")
    else:
        text = bytes(field).rstrip(b" \0").lstrip(b" ")
        if text.strip(b"01234567"):
            raise HeaderError(f"tar: expected a number, found {escaped(text)}", offset=at)
        number = int(text or b"0", 8)
    if number >> 63:
        raise HeaderError("tar: a number over 2^63 - 1", offset=at)
    return number


def _name(block: memoryview, at: int) -> str:
    """A relative name that stays inside the archive."""
    name, prefix = (bytes(block[field]).split(b"\0", 1)[0].decode("latin-1") for field in (_NAME, _PREFIX))
    path = f"{prefix}/{name}" if prefix else name
    if not path or path.startswith(("/", "\\")) or ".." in path.replace("\\", "/").split("/"):
        raise HeaderError(f"tar: expected a relative name, found {escaped(path)}", offset=at)
    return path.removeprefix("./")


def _pax_size(view: memoryview, start: int, nbytes: int) -> int:
    """What an extended header says of the next member's size; -1 if nothing. Its lines are ``LENGTH KEY=VALUE``."""
    if nbytes > _MAX_PAX:
        raise LimitError(f"tar: an extended header of {nbytes} bytes; at most {_MAX_PAX} are read", offset=start)
    if nbytes > len(view) - start:
        raise TruncatedError(
            f"tar: expected an extended header of {nbytes} bytes, found {len(view) - start}", offset=start
        )
    rest, size = bytes(view[start : start + nbytes]), -1
    while rest:
        digits, _, _ = rest[:8].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        key, equals, value = rest[len(digits) + 1 : length].partition(b"=")
        if not equals or length > len(rest) or not value.endswith(b"\n"):
            raise HeaderError("tar: expected lines of a length, a key and a value in an extended header", offset=start)
        if key == b"size" and size < 0 and value[:-1].isdigit() and len(value) < 20:
            size = int(value)
        elif key not in _NOTES:
            raise UnsupportedError(f"tar: an extended header that sets {escaped(key)}", offset=start)
        rest = rest[length:]
    return size


def _add(found: dict[str, Member], member: Member, total: int) -> None:
    if len(found) == _MAX_MEMBERS:
        raise LimitError(f"tar archive of over {_MAX_MEMBERS} members", offset=member.offset - BLOCK)
    if member.name in found:
        raise HeaderError("tar: two members of one name", record=member.name, offset=member.offset - BLOCK)
    if member.nbytes > total - member.offset:
        raise TruncatedError(
            f"tar: expected a member of {member.nbytes} bytes, found {total - member.offset}",
            record=member.name, offset=member.offset,
        )  # fmt: skip
    found[member.name] = member
