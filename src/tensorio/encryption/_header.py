"""The header of what is encrypted, and the keys that are derived with it.

::

    offset  size  content
    0       8     89 54 49 4F 45 4E 43 01: the signature, and version 1
    8       1     kind: 0 a file, 1 tensors of a safetensors file
    9       1     c: a chunk is 2^c bytes before encryption; 12 <= c <= 26
    10      1     k: bytes of the key's name, at most 40
    11      5     zeros
    16      8     n: bytes of all that is encrypted, before encryption
    24      32    salt: random
    56      40    the key's name: k bytes of UTF-8, then zeros
    96      32    key check
    128     32    header tag
    160     -     of a file: its chunks

Numbers are little-endian. HKDF-SHA256 (RFC 5869) of the key, with the salt and the info `INFO`, gives 103 bytes: the
payload key (32), the header key (32), the key check (32), the nonces' prefix (7). The header tag is HMAC-SHA256 by the
header key over bytes 0 to 127 and, behind them, the context: nothing for a file, the list of the tensors for tensors.

The layout is that of docs/encryption.md, which says what each part is for.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from typing import Any, NamedTuple

from tensorio.errors import DecryptionError, HeaderError, TruncatedError, UnsupportedError, escaped

__all__ = [
    "CHUNK", "FILE", "HEADER", "KEY", "MAGIC", "Header", "Secrets", "chunk_log", "is_encrypted", "new_header",
    "primitives", "tensor_secrets", "unlock",
]  # fmt: skip

VERSION = 1
MAGIC = b"\x89TIOENC" + bytes([VERSION])
HEADER = 160
FILE, TENSORS = 0, 1
KEY, SALT, ID_MAX, CHECK, TAG, PREFIX = 32, 32, 40, 32, 32, 7
LOG_MIN, LOG_MAX = 12, 26
CHUNK = 1 << 20  # bytes of a chunk if nobody says otherwise: the figures are in docs/encryption.md

INFO = b"tensorio encryption 1"
TENSOR_INFO = b"tensorio encryption 1 tensor "

_FIELDS = struct.Struct("<8sBBB5xQ32s40s32s32s")
_SIGNED = HEADER - TAG  # bytes of the header that its tag is over


class Secrets(NamedTuple):
    """What chunks are encrypted with: a key of AES-256, and the first bytes of every nonce."""

    key: bytes
    prefix: bytes

    def __repr__(self) -> str:
        return "<secrets>"


class Header(NamedTuple):
    """The fields of a header.

    Attributes
    ----------
    kind : int
        `FILE` or `TENSORS`.
    chunk : int
        Bytes of a chunk before encryption.
    nbytes : int
        Of all that is encrypted, before encryption.
    salt : bytes
    key_id : str
        The key's name; empty if it has none.
    raw : bytes
        All of it.
    """

    kind: int
    chunk: int
    nbytes: int
    salt: bytes
    key_id: str
    raw: bytes

    @classmethod
    def read(cls, raw: bytes) -> Header:
        """Take a header apart; of its content, nothing is proven before `unlock`.

        Raises
        ------
        TruncatedError, HeaderError
        UnsupportedError
            A later version.
        """
        if len(raw) < HEADER:
            raise TruncatedError(f"encrypted: expected a header of {HEADER} bytes, found {len(raw)}", offset=len(raw))
        raw = raw[:HEADER]
        magic, kind, log, length, nbytes, salt, name, _, _ = _FIELDS.unpack(raw)
        if magic[:-1] != MAGIC[:-1]:
            raise HeaderError("encrypted: expected the signature of an encrypted file", offset=0)
        if magic[-1] != VERSION:
            raise UnsupportedError(f"encrypted: expected version {VERSION}, found {magic[-1]}", offset=len(MAGIC) - 1)
        if kind not in (FILE, TENSORS):
            raise HeaderError(f"encrypted: expected kind 0 or 1, found {kind}", offset=8)
        if not LOG_MIN <= log <= LOG_MAX:
            raise HeaderError(
                f"encrypted: expected chunks of 2^{LOG_MIN} to 2^{LOG_MAX} bytes, found 2^{log}", offset=9
            )
        if length > ID_MAX or any(name[length:]) or any(raw[11:16]):
            raise HeaderError("encrypted: expected zeros behind the name of the key, and in bytes 11 to 15", offset=10)
        if nbytes >> 62 or (nbytes >> log) >> 32:
            raise HeaderError(f"encrypted: expected at most 2^32 chunks, found {nbytes} bytes", offset=16)
        try:
            key_id = name[:length].decode()
        except UnicodeDecodeError:
            raise HeaderError("encrypted: expected the name of the key in UTF-8", offset=56) from None
        return cls(kind, 1 << log, nbytes, salt, key_id, raw)


def is_encrypted(head: bytes) -> bool:
    """Tell by its first bytes whether a file is encrypted, whatever the version."""
    return head[: len(MAGIC) - 1] == MAGIC[:-1]


def chunk_log(chunk: int) -> int:
    """Return the exponent of a chunk's bytes.

    Raises
    ------
    ValueError
        Not a power of two within the limits.
    """
    log = chunk.bit_length() - 1 if isinstance(chunk, int) else -1
    if not LOG_MIN <= log <= LOG_MAX or chunk != 1 << log:
        raise ValueError(f"chunk_size= is a power of two from {1 << LOG_MIN} to {1 << LOG_MAX} bytes, not {chunk!r}")
    return log


def new_header(
    key: bytes, kind: int, nbytes: int, *, chunk: int = CHUNK, key_id: str = "", context: bytes = b""
) -> tuple[Header, Secrets]:
    """Make the header of something to be encrypted, with a new salt, and the secrets that go with it.

    Raises
    ------
    ValueError
        The name of the key is too long, or no text.
    """
    name = key_id.encode()
    if len(name) > ID_MAX or not (key_id.isprintable() or not key_id):
        raise ValueError(f"key_id= is printable text of at most {ID_MAX} bytes, not {key_id!r}")
    log, salt = chunk_log(chunk), os.urandom(SALT)
    secrets, header_key, check = _derived(key, salt)
    raw = _FIELDS.pack(MAGIC, kind, log, len(name), nbytes, salt, name, check, bytes(TAG))[:_SIGNED]
    raw += _tag(header_key, raw, context)
    return Header.read(raw), secrets


def unlock(header: Header, key: bytes, context: bytes = b"") -> Secrets:
    """Return what the chunks are encrypted with, having proven the key and the header.

    Raises
    ------
    DecryptionError
        Another key, or bytes of the header or of the context that were changed.
    """
    secrets, header_key, check = _derived(key, header.salt)
    if not hmac.compare_digest(check, header.raw[_SIGNED - CHECK : _SIGNED]):
        name = f" (it is called {escaped(header.key_id)} in the file)" if header.key_id else ""
        raise DecryptionError(
            f"wrong key: expected the one that the file was encrypted with{name}, found another; or the salt or the "
            "key check in the header was changed",
            key_id=header.key_id,
        )
    if not hmac.compare_digest(_tag(header_key, header.raw[:_SIGNED], context), header.raw[_SIGNED:]):
        what = "header, or the list of encrypted tensors, was" if header.kind == TENSORS else "header was"
        raise DecryptionError(f"the key is right, but the {what} changed since encryption", key_id=header.key_id)
    return secrets


def tensor_secrets(secrets: Secrets, name: str) -> Secrets:
    """Return what one tensor is encrypted with: no other's bytes can be in its place."""
    made = _hkdf(secrets.key, None, TENSOR_INFO + name.encode(), KEY + PREFIX)
    return Secrets(made[:KEY], made[KEY:])


def _derived(key: bytes, salt: bytes) -> tuple[Secrets, bytes, bytes]:
    """The secrets of the payload, the key of the header's tag, the key check."""
    made = _hkdf(key, salt, INFO, 2 * KEY + CHECK + PREFIX)
    return Secrets(made[:KEY], made[-PREFIX:]), made[KEY : 2 * KEY], made[2 * KEY : 2 * KEY + CHECK]


def _tag(header_key: bytes, signed: bytes, context: bytes) -> bytes:
    return hmac.new(header_key, signed + context, hashlib.sha256).digest()


def _hkdf(key: bytes, salt: bytes | None, info: bytes, nbytes: int) -> bytes:
    primitives()
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), nbytes, salt, info).derive(key)


def primitives() -> Any:
    """Return the class of AES-GCM.

    Raises
    ------
    UnsupportedError
        The package is not installed; the message names the extra.
    """
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise UnsupportedError("encryption needs cryptography: pip install 'tensorio[crypt]'") from None
    return AESGCM
