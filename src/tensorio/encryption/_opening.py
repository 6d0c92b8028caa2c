"""Where an encrypted file becomes one that formats can read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tensorio.encryption._header import FILE, HEADER, MAGIC, Header, is_encrypted, unlock
from tensorio.errors import DecryptionError, HeaderError, TruncatedError, UnsupportedError

if TYPE_CHECKING:
    from tensorio.encryption._keys import KeySource
    from tensorio.encryption._storage import DecryptedStorage
    from tensorio.formats._base import OpenOptions
    from tensorio.storage.base import Storage

__all__ = ["HEADER_KEY", "HOW", "LIST_KEY", "NOT_ENCRYPTED", "decrypted", "has_encrypted", "head_of",
           "refuse_without_key", "unlocked", "without_argument"]  # fmt: skip

# Notes of a file with encrypted tensors, see `tensorio.encryption._tensors`.
HEADER_KEY = "tensorio.encryption"
LIST_KEY = "tensorio.encryption.tensors"

NOT_ENCRYPTED = (
    "key= was given, but nothing in the file is encrypted: it may have been replaced; open it without key= (or --key)"
)


# Where the key goes, at the end of messages; and where in a program that reads by functions that take none.
HOW = "as key= (or --key)"
_ELSEWHERE = "as key= of tensorio.load, or of tensorio.decrypt, which writes it as it was; this function takes none"


def without_argument(message: str) -> str:
    """Return a message for callers of a function that has no ``key=``."""
    return message.replace(HOW, _ELSEWHERE)


def head_of(storage: Storage, nbytes: int = HEADER) -> bytes:
    """Return the first bytes of a storage."""
    return bytes(storage.view_for(0, min(nbytes, storage.nbytes))[:nbytes])


def has_encrypted(metadata: dict[str, str] | None) -> bool:
    """Tell by a file's notes whether tensors in it are encrypted."""
    return metadata is not None and (HEADER_KEY in metadata or LIST_KEY in metadata)


def refuse_without_key(storage: Storage) -> None:
    """Raise if a storage is a file that is encrypted.

    Raises
    ------
    DecryptionError
        With the name of the key, if it has one.
    """
    if not is_encrypted(head_of(storage, len(MAGIC))):
        return
    from tensorio.encryption._storage import without_key

    try:
        key_id = Header.read(head_of(storage)).key_id
    except (HeaderError, TruncatedError, UnsupportedError):
        key_id = ""
    raise without_key("the file", key_id)


def unlocked(storage: Storage, options: OpenOptions) -> tuple[Storage, OpenOptions]:
    """Return the storage of a file's plaintext, if there is a key and the file is encrypted; and how to read that.

    Raises
    ------
    DecryptionError
        Nothing in the file is encrypted with a key, or not with this one.
    """
    if options.key is None:
        return storage, options
    if not is_encrypted(head_of(storage, len(MAGIC))):
        from tensorio.formats import safetensors

        if not safetensors.recognises(head_of(storage), storage):
            raise DecryptionError(NOT_ENCRYPTED)
        return storage, options  # some of its tensors may be
    return decrypted(storage, options.key, writable=options.writable), replace(options, key=None)


def decrypted(storage: Storage, key: KeySource, *, writable: bool = False) -> DecryptedStorage:
    """Return the plaintext of a file that is encrypted; of its chunks, none is looked at.

    Raises
    ------
    DecryptionError
        Another key; or the header was changed.
    TruncatedError, HeaderError
        The file is shorter or longer than it was.
    """
    from tensorio.encryption._chunks import Chunks, stored_size
    from tensorio.encryption._storage import DecryptedStorage

    header = Header.read(head_of(storage))
    if header.kind != FILE:
        raise HeaderError("encrypted: expected the header of a file, found one of tensors", offset=8)
    secrets = unlock(header, key.key(header.key_id))
    want = HEADER + stored_size(header.nbytes, header.chunk)
    if storage.nbytes < want:
        raise TruncatedError(
            f"encrypted: expected a file of {want} bytes, found {storage.nbytes}: {want - storage.nbytes} are missing "
            "at its end",
            offset=storage.nbytes,
        )
    if storage.nbytes > want:
        raise HeaderError(
            f"encrypted: expected a file of {want} bytes, found {storage.nbytes}: something was put behind it",
            offset=want,
        )
    return DecryptedStorage(storage, HEADER, Chunks(header, secrets, header.nbytes, HEADER), writable=writable)
