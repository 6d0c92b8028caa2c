"""The model: the mean of a text's word vectors, two layers, praise against blame. NumPy alone."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

DIMENSIONS = 256
HIDDEN = 64
PRAISE = ("good", "great", "fast", "clear", "love", "excellent", "thanks", "works")
BLAME = ("bad", "slow", "broken", "crash", "hate", "terrible", "wrong", "fails")


def row_of(word: str, words: int) -> int:
    """Return the row of a word in an embedding of so many words."""
    return zlib.crc32(word.encode()) % words


def score(weights: Mapping[str, Array], text: str) -> float:
    """Return how much a text praises: 0 to 1, 0.5 if it does neither.

    Parameters
    ----------
    weights : mapping of str to ndarray
        Of `make_weights`; a `tensorio.Checkpoint` is one.
    text : str
    """
    embedding = weights["embedding"]
    rows = [row_of(word, len(embedding)) for word in re.findall(r"[a-z]+", text.lower())]
    if not rows:
        return 0.5
    hidden = np.tanh(embedding[rows].mean(axis=0) @ weights["layers.0.weight"] + weights["layers.0.bias"])
    praise, blame = hidden @ weights["layers.1.weight"] + weights["layers.1.bias"]
    return float(1 / (1 + np.exp(blame - praise)))
