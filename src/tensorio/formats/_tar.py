"""Tar archives: where their members are.

Blocks of 512 bytes; each member is a header and its bytes, padded to whole blocks; two blocks of zeros end the
archive. Read are the plain files that Python's tarfile writes, ``x`` headers of time stamps and large sizes included.
What two readers could understand differently is refused, as is everything that is not a plain file: links, devices,
sparse and renamed members; archives of any folder may have long names and links besides. Of the bytes behind the end,
nothing is read.

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
_MAX_ORDINARY = 1 << 16
# Notes of a pax header that say nothing about the member's bytes or name.
_NOTES = {b"atime", b"comment", b"ctime", b"gid", b"gname", b"mtime", b"uid", b"uname"}
_SAYS = {b"path", b"size", b"hdrcharset"}  # keys that do, beside GNU's of sparse files
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


def members(view: memoryview, *, ordinary: bool = False) -> dict[str, Member]:
    """Return the plain files of an archive by name, in order; nothing of their bytes is touched.

    Parameters
    ----------
    ordinary : bool
        Take what tar programs write of any folder: long names and names in
        extended headers, notes of all kinds; links and devices are left out.
    """
    found: dict[str, Member] = {}
    at = 0
    ahead: _Said | None = None  # what a header in front of the member's own says
    while any(block := _block(view, at)):
        kind, nbytes = bytes(block[_TYPE]), _checked_size(block, at)
        start = at + BLOCK
        if kind == b"x" or (ordinary and kind == b"L"):
            if ahead is not None:
                raise HeaderError("tar: two extended headers for one member", offset=at)
            ahead = (_pax if kind == b"x" else _long_name)(view, start, nbytes, ordinary)
        elif kind in (b"0", b"\0"):
            said = ahead or _Said()
            nbytes = nbytes if said.size is None else said.size
            name = _name(block, at) if said.name is None else _relative(said.name, at)
            _add(found, Member(name, start, nbytes), len(view), _MAX_ORDINARY if ordinary else _MAX_MEMBERS)
            ahead = None
        elif kind == b"5" and nbytes == 0 and (ordinary or ahead is None):
            ahead = None  # a folder: nothing is in it
        elif ordinary and kind in (b"1", b"2", b"3", b"4", b"6") and nbytes == 0:
            ahead = None
        elif not (ordinary and (kind == b"K" or (kind == b"g" and _pax(view, start, nbytes, True) == _Said()))):
            what = _OTHERS.get(kind, f"a member of type {escaped(kind)}")
            raise UnsupportedError(f"tar: expected plain files, found {what}", offset=at)
        at = start + (nbytes + BLOCK - 1) // BLOCK * BLOCK
    if ahead is not None:
        raise HeaderError("tar: an extended header without a member", offset=at)
    if any(_block(view, at + BLOCK)):
        raise HeaderError("tar: expected two blocks of zeros at the end, found one", offset=at + BLOCK)
    return found


class _Said(NamedTuple):
    """What a header in front of a member's own says of it."""

    size: int | None = None
    name: str | None = None


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
    name, prefix = (bytes(block[field]).split(b"\0", 1)[0].decode("utf-8", "backslashreplace")
                    for field in (_NAME, _PREFIX))  # fmt: skip
    return _relative(f"{prefix}/{name}" if prefix else name, at)


def _relative(path: str, at: int) -> str:
    if not path or path.startswith(("/", "\\")) or ".." in path.replace("\\", "/").split("/"):
        raise HeaderError(f"tar: expected a relative name, found {escaped(path)}", offset=at)
    return path.removeprefix("./")


def _pax(view: memoryview, start: int, nbytes: int, ordinary: bool) -> _Said:
    """What an extended header says of the next member. Its lines are ``LENGTH KEY=VALUE``."""
    rest, size, name = _text_at(view, start, nbytes), None, None
    while rest:
        digits, _, _ = rest[:8].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        key, equals, value = rest[len(digits) + 1 : length].partition(b"=")
        if not equals or length > len(rest) or not value.endswith(b"\n"):
            raise HeaderError("tar: expected lines of a length, a key and a value in an extended header", offset=start)
        if key == b"size" and size is None and value[:-1].isdigit() and len(value) < 20:
            size = int(value)
        elif key == b"path" and name is None and ordinary:
            name = value[:-1].decode("utf-8", "backslashreplace")
        elif key not in _NOTES and not (ordinary and key not in _SAYS and not key.startswith(b"GNU.sparse.")):
            raise UnsupportedError(f"tar: an extended header that sets {escaped(key)}", offset=start)
        rest = rest[length:]
    return _Said(size, name)


def _long_name(view: memoryview, start: int, nbytes: int, ordinary: bool) -> _Said:
    """The name of the next member, by GNU tar."""
    return _Said(name=_text_at(view, start, nbytes).rstrip(b"\0").decode("utf-8", "backslashreplace"))


def _text_at(view: memoryview, start: int, nbytes: int) -> bytes:
    if nbytes > _MAX_PAX:
        raise LimitError(f"tar: an extended header of {nbytes} bytes; at most {_MAX_PAX} are read", offset=start)
    if nbytes > len(view) - start:
        raise TruncatedError(
            f"tar: expected an extended header of {nbytes} bytes, found {len(view) - start}", offset=start
        )
    return bytes(view[start : start + nbytes])


def _add(found: dict[str, Member], member: Member, total: int, most: int) -> None:
    if len(found) == most:
        raise LimitError(f"tar archive of over {most} members", offset=member.offset - BLOCK)
    if member.name in found:
        raise HeaderError("tar: two members of one name", record=member.name, offset=member.offset - BLOCK)
    if member.nbytes > total - member.offset:
        raise TruncatedError(
            f"tar: expected a member of {member.nbytes} bytes, found {total - member.offset}",
            record=member.name, offset=member.offset,
        )  # fmt: skip
    found[member.name] = member
