"""What a file that is no checkpoint looks like, for the message that refuses it."""

from __future__ import annotations

from collections.abc import Iterator

from tensorio.errors import escaped
from tensorio.storage.base import Storage

__all__ = ["looks_like", "unknown"]

# Signature, what it is, what to do. Sources: the formats' own specifications.
_SIGNATURES: tuple[tuple[bytes, str, str], ...] = (
    (b"version https://git-lfs.github.com/spec/", "a git-lfs pointer, not the file itself", "run 'git lfs pull'"),
    (b"\x1f\x8b", "gzip data", "unpack it first"),
    (b"BZh", "bzip2 data", "unpack it first"),
    (b"\xfd7zXZ\x00", "xz data", "unpack it first"),
    (b"\x28\xb5\x2f\xfd", "zstd data", "unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it first"),
    (b"PK\x05\x06", "an empty zip archive", "there is nothing in it"),
    (b"GGUF", "a GGUF file", "this version does not read GGUF"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", "this version does not read HDF5"),
    (b"\x93NUMPY", "an .npy file", "numpy.load reads it"),
    (b"\x89PNG\r\n", "a PNG image", "this is not the file you wanted"),
    (b"\xff\xd8\xff", "a JPEG image", "this is not the file you wanted"),
    (b"%PDF-", "a PDF document", "this is not the file you wanted"),
    (b"\x78\x01", "zlib data", "if joblib wrote it, save it there again with compress=0"),
    (b"\x78\x5e", "zlib data", "if joblib wrote it, save it there again with compress=0"),
    (b"\x78\x9c", "zlib data", "if joblib wrote it, save it there again with compress=0"),
    (b"\x78\xda", "zlib data", "if joblib wrote it, save it there again with compress=0"),
    (b"ZF0x", "a compressed file of joblib before 0.10", "load it there and save it again with compress=0"),
    (b"\x7fELF", "a program", "this is not the file you wanted"),
)  # fmt: skip


def looks_like(head: bytes, storage: Storage) -> str | None:
    """Say in one line what the file seems to be and what to do; None if it looks like nothing known."""
    for kind, advice in _guesses(head, storage):
        return f"not a checkpoint that tensorio knows: it looks like {kind}; {advice}"
    return None


def unknown(head: bytes, storage: Storage) -> str:
    """Say in one line that nothing is known of the file."""
    found = f"found {storage.nbytes} bytes that begin with {escaped(head[:16])}"
    if head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        return (
            f"not a checkpoint that tensorio knows: {found}: it may be a plain pickle, of no arrays near its "
            "beginning; format='pickle' reads it as one"
        )
    return f"not a checkpoint that tensorio knows: expected a torch file or a safetensors file, {found}"


def _guesses(head: bytes, storage: Storage) -> Iterator[tuple[str, str]]:
    if storage.nbytes == 0:
        yield "an empty file", "the download or save may have failed"
    if head and not head.strip(b"\0"):
        yield f"zeros ({storage.nbytes} bytes)", "the file was never written, or lost in a crash"
    for signature, kind, advice in _SIGNATURES:
        if head.startswith(signature):
            yield kind, advice
    start = head[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head", b"<error")):
        yield "an HTML or XML page", "a server sent an error or login page instead of the file"
    if head[257:262] == b"ustar":
        yield "a tar archive", "unpack it first"
    if start.startswith((b"{", b"[")):
        yield "JSON text", "point to the checkpoint itself"
