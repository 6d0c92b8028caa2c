"""The public functions that encrypt and decrypt."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tensorio import formats
from tensorio.checkpoint._saving import Saved
from tensorio.checkpoint._watched import write_file
from tensorio.encryption._header import CHUNK

if TYPE_CHECKING:
    from tensorio.encryption._files import Processed

__all__ = ["decrypt", "encrypt"]

Progress = Callable[[int, int], object]


def encrypt(
    src: Any,
    dst: Any,
    *,
    key: Any,
    key_id: str = "",
    tensors: str | Iterable[str] | None = None,
    clear: str | Iterable[str] | None = None,
    chunk_size: int = CHUNK,
    old_key: Any = None,
    durable: bool = True,
    progress: Progress | None = None,
) -> Saved:
    """Encrypt a file, chosen tensors of a ``.safetensors``, or the files of a folder, by AES-256-GCM.

    Parameters
    ----------
    src : str, os.PathLike, buffer or seekable binary file object
        Any file; or a folder, of which all files are encrypted but those of
        `clear`, which are copied. Its manifests are not: they have the SHA-256
        of what is not encrypted.
    dst : str, os.PathLike or writable binary file object
        May be `src`. A folder, for a folder: new or empty.
    key : bytes, str or callable
        32 bytes; ``"env:NAME"``: a variable of the environment, of 64
        hexadecimal digits or 44 characters of base64; ``"file:PATH"``: a file of
        32 bytes or one line of such text; or a function that is called with
        `key_id` and returns one of these.
    key_id : str
        A name for the key, at most 40 bytes of UTF-8. It stands in the file, in
        the clear, and is given to the function that finds the key.
    tensors : str or iterable of str, optional
        Patterns of names, as in the rules of `tensorio.shard`: ``*`` within a
        level, ``**`` for levels. Only these are encrypted; any reader opens the
        file, and finds them as bytes (U8). All of the file if not given. Of a
        folder, files that are not of a format of tensors are then copied.
    clear : str or iterable of str, optional
        Patterns of names, as in a shell, of the files of a folder that stay
        readable; none for ``()``. If not given: what other tools look for beside
        the weights (``*.json``, tokenizers, text: `tensorio.encryption._clear`
        has the list), up to 64 MiB each, unless it has tensors, or is no text.
    chunk_size : int
        Bytes that are decrypted together: a power of two from 4 KiB to 64 MiB.
    old_key : bytes, str or callable, optional
        If `src` is encrypted already: its key, to encrypt it with another.
    durable, progress
        See `save`; progress is in bytes of what is written.

    Returns
    -------
    Saved
        Which files were written, how many bytes, and which of the files are in
        the clear (``.clear``).

    Raises
    ------
    DecryptionError
        `src` is encrypted already, or not with `old_key`.
    TensorMismatchError
        A pattern fits no tensor.
    UnsupportedError
        The extra ``crypt`` is missing; or `tensors` with another format.
    ValueError, TypeError
        What was given as a key is none.
    OSError
        From the system; nothing is written.

    Notes
    -----
    Reads `src` once, with all cores, in a few MiB of memory. The format is
    documented byte by byte in docs/encryption.md.
    """
    from tensorio.encryption._files import Encryption, process
    from tensorio.encryption._keys import KeySource

    if clear is not None and not (isinstance(src, str | os.PathLike) and os.path.isdir(src)):
        raise ValueError("clear= is for folders: it says which of their files stay readable")
    how = Encryption(
        KeySource(key).key(key_id), key_id, _patterns(tensors), chunk_size, KeySource.of(old_key), _patterns(clear)
    )
    return _saved(dst, process(src, dst, how, write=write_file, durable=durable, progress=progress))


def decrypt(src: Any, dst: Any, *, key: Any, durable: bool = True, progress: Progress | None = None) -> Saved:
    """Write what `encrypt` encrypted as it was.

    Parameters
    ----------
    src, dst
        See `encrypt`.
    key
        See `open`.
    durable, progress
        See `encrypt`.

    Returns
    -------
    Saved
        Which files were written, how many bytes, and which of the files were not
        encrypted (``.clear``).

    Raises
    ------
    DecryptionError
        Nothing is encrypted, or not with this key; or it was changed since.
    TruncatedError, HeaderError
        The file is shorter or longer than it was.
    OSError
        From the system; nothing is written.

    Notes
    -----
    The bytes are those that were encrypted. Of a file with encrypted tensors,
    they are if it was laid out as the reference writer of safetensors does.
    """
    from tensorio.encryption._files import Decryption, process
    from tensorio.encryption._keys import KeySource

    how = Decryption(KeySource(key))
    return _saved(dst, process(src, dst, how, write=write_file, durable=durable, progress=progress))


def _patterns(given: str | Iterable[str] | None) -> tuple[str, ...] | None:
    return None if given is None else (given,) if isinstance(given, str) else tuple(given)


def _saved(dst: Any, written: Processed) -> Saved:
    return Saved(formats.target_name(dst), tuple(written.files), written.nbytes, clear=tuple(written.clear))
