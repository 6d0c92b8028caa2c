"""Chunks of bytes, each encrypted by itself, in an order that is authenticated.

The construction is STREAM (Hoang, Reyhanitabar, Rogaway and Vizar, "Online Authenticated-Encryption and its
Nonce-Reuse Misuse-Resistance", 2015) over AES-256-GCM. Chunk i of the N of one payload is encrypted under::

    nonce             prefix (7), i (4, big-endian), 1 if i is the last and 0 if not (1)
    associated data   the 160 bytes of the header
    stored            the ciphertext, as long as the plaintext, and the tag (16)

All chunks have the header's chunk size before encryption but the last, which has what is left: nothing if the payload
is empty, which has one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from tensorio.encryption._header import Header, Secrets, primitives
from tensorio.errors import DecryptionError, LimitError, TruncatedError

__all__ = ["RUN", "TAG", "Chunks", "stored_size"]

TAG = 16
RUN = 1 << 20  # bytes that one thread takes at a time, or one chunk
COUNT_MAX = 1 << 32
# Chunks that a damaged one is compared with, to say whose place it took.
TRIED_BYTES = 64 << 20
EXPLAINED = 8  # chunks of a payload that this is done for: the time to refuse a file stays that of reading it


def stored_size(nbytes: int, chunk: int) -> int:
    """Return how many bytes a payload takes once it is encrypted."""
    return nbytes + TAG * max(1, -(-nbytes // chunk))


class Chunks:
    """The chunks of one payload.

    Parameters
    ----------
    header : Header
    secrets : Secrets or callable
        Of the payload; or what returns them, called on first use.
    nbytes : int
        Of the payload before encryption.
    start : int
        Byte offset of the first chunk in its file, for messages.
    record : str, optional
        Likewise: the tensor.

    Attributes
    ----------
    count : int
    stored : int
        Bytes of the payload once it is encrypted.
    """

    def __init__(
        self,
        header: Header,
        secrets: Secrets | Callable[[], Secrets],
        nbytes: int,
        start: int = 0,
        record: str | None = None,
    ) -> None:
        self.size = header.chunk
        self.nbytes = nbytes
        self.count = max(1, -(-nbytes // self.size))
        if self.count > COUNT_MAX:
            raise LimitError(f"expected at most 2^32 chunks, found {self.count}: encrypt with a larger chunk_size=")
        self.stored = stored_size(nbytes, self.size)
        self._start = start
        self._record = record
        self._given = secrets
        self._header = header.raw
        self._explained_yet = 0

    @cached_property
    def _secrets(self) -> Secrets:
        return self._given() if callable(self._given) else self._given

    @cached_property
    def _aead(self) -> Any:
        return primitives()(self._secrets.key)

    def covering(self, offset: int, nbytes: int) -> range:
        """Return the numbers of the chunks that a range of the plaintext is in; the only one of an empty payload."""
        first = offset // self.size
        return range(first, min(max(-(-(offset + nbytes) // self.size), int(not self.nbytes)), self.count))

    def runs(self, numbers: Sequence[int]) -> list[range]:
        """Return ascending numbers as runs of neighbours, each as much as one thread takes at a time."""
        most = max(1, RUN // self.size)
        out: list[range] = []
        for i in numbers:
            if out and out[-1].stop == i and len(out[-1]) < most:
                out[-1] = range(out[-1].start, i + 1)
            else:
                out.append(range(i, i + 1))
        return out

    def plain(self, i: int) -> slice:
        """Return where chunk i is before encryption."""
        return slice(i * self.size, min((i + 1) * self.size, self.nbytes))

    def place(self, i: int) -> slice:
        """Return where chunk i is once it is encrypted."""
        begin = i * (self.size + TAG)
        return slice(begin, min(begin + self.size + TAG, self.stored))

    def seal(self, i: int, plain: memoryview) -> bytes:
        """Encrypt chunk i."""
        return self._aead.encrypt(self._nonce(i), plain, self._header)  # type: ignore[no-any-return]

    def open(self, i: int, stored: memoryview, out: memoryview) -> None:
        """Decrypt chunk i into memory of as many bytes as it has; none of them is left there if it is not authentic.

        Raises
        ------
        DecryptionError, TruncatedError
            It is not what was encrypted as this chunk; the message says as what it was, if that can be told.
        """
        from cryptography.exceptions import InvalidTag

        try:
            self._decrypt(self._nonce(i), stored, out)
        except InvalidTag:
            out[:] = bytes(len(out))
            raise self._explained(i, stored) from None

    def _decrypt(self, nonce: bytes, stored: memoryview, out: memoryview) -> None:
        if hasattr(self._aead, "decrypt_into"):
            self._aead.decrypt_into(nonce, stored, self._header, out)
        else:
            out[:] = self._aead.decrypt(nonce, stored, self._header)

    def _nonce(self, i: int, last: bool | None = None) -> bytes:
        ends = i == self.count - 1 if last is None else last
        return self._secrets.prefix + i.to_bytes(4, "big") + bytes([ends])

    def _explained(self, i: int, stored: memoryview) -> DecryptionError | TruncatedError:
        where: dict[str, Any] = {"record": self._record, "offset": self._start + self.place(i).start}
        self._explained_yet += 1
        if self._explained_yet > EXPLAINED:
            return self._changed(i, stored, where)
        ends = i == self.count - 1
        if self._is(i, stored, last=not ends):
            if ends:
                return TruncatedError(
                    f"chunk {i} was not the last one when it was encrypted: the end is missing", **where
                )
            return DecryptionError(
                f"chunk {i} was the last one when it was encrypted: others were put behind it", **where
            )
        for other in range(min(self.count, max(2, TRIED_BYTES // self.size))):
            if other != i and (self._is(other, stored, last=False) or self._is(other, stored, last=True)):
                return DecryptionError(f"chunk {i}: expected its own bytes, found those of chunk {other}", **where)
        return self._changed(i, stored, where)

    def _changed(self, i: int, stored: memoryview, where: dict[str, Any]) -> DecryptionError:
        return DecryptionError(
            f"chunk {i} of {self.count} was changed since encryption, or is of another file: its {len(stored)} bytes "
            "do not fit their tag",
            **where,
        )

    def _is(self, i: int, stored: memoryview, *, last: bool) -> bool:
        from cryptography.exceptions import InvalidTag

        try:
            self._aead.decrypt(self._nonce(i, last), stored, self._header)
        except InvalidTag:
            return False
        return True
