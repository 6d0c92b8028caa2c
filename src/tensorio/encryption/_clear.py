"""Which files of a folder stay readable when it is encrypted: what other tools look for beside the weights.

Everything else is encrypted, known here or not: a file may have tensors in a format that nobody here reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from tensorio.encryption._opening import head_of
from tensorio.formats import HEAD, get, names

if TYPE_CHECKING:
    from tensorio.storage.base import Storage

__all__ = ["fits", "has_tensors", "is_usual"]

# Configurations, indexes, tokenizers, text for people: text, as long as there is no zero byte in it.
TEXTS = (
    "*.json", "*.txt", "*.md", "*.py", "*.yaml", "*.yml", "*.toml", "*.jinja", "*.tiktoken", "*.bpe",
    "LICENSE*", "NOTICE*", "README*", ".gitattributes",
)  # fmt: skip
TOKENIZERS = ("*.spm", "tokenizer*.model", "sentencepiece*.model", "spiece.model")  # of SentencePiece: not text
USUAL_MAX = 64 << 20  # bytes; twice the largest tokenizer.json in use


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Whether the name of a file fits one of some patterns, as in a shell."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_usual(name: str, storage: Storage) -> bool:
    """Whether a file is one that other tools look for, by its name, size and first bytes."""
    if storage.nbytes > USUAL_MAX:
        return False
    return fits(name, TOKENIZERS) or (fits(name, TEXTS) and b"\0" not in head_of(storage, HEAD))


def has_tensors(name: str, storage: Storage) -> bool:
    """Whether a file is of a format of tensors, by its suffix or by its first bytes."""
    suffix, head = os.path.splitext(name)[1].lower(), head_of(storage, HEAD)
    formats = [get(n) for n in names()]
    return any(suffix in (*f.SUFFIXES, *f.OPENED_BY_SUFFIX) or f.recognises(head, storage) for f in formats)
