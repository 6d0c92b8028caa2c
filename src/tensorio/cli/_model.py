"""A made-up transformer for ``tensorio demo``: real names, dtypes and shapes, random numbers, no memory to speak of.

All tensors are mappings of one scratch file of random numbers: each has its own
addresses, as the tensors of a real model have, but the pages behind them are
the same few.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["Spec", "layout", "scratch_file", "state_dict"]

WIDTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
LAYERS_MIN = 12  # as in small real models; the widest model that has so many is chosen
VOCABULARY = 8  # times the width
BLOCK = 4 << 20  # bytes of random numbers made at a time

# Name below a layer -> rows and columns in units of the width; None for a vector.
_MATRICES: tuple[tuple[str, tuple[int, int | None]], ...] = (
    ("input_layernorm.weight", (1, None)),
    ("self_attn.q_proj.weight", (1, 1)),
    ("self_attn.k_proj.weight", (1, 1)),
    ("self_attn.v_proj.weight", (1, 1)),
    ("self_attn.o_proj.weight", (1, 1)),
    ("post_attention_layernorm.weight", (1, None)),
    ("mlp.gate_proj.weight", (3, 1)),
    ("mlp.up_proj.weight", (3, 1)),
    ("mlp.down_proj.weight", (1, 3)),
)


class Spec(NamedTuple):
    """One tensor to be made: matrices are bfloat16, vectors float16."""

    name: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return 2 * self.shape[0] * (self.shape[1] if len(self.shape) > 1 else 1)


def layout(nbytes: int) -> list[Spec]:
    """Return the tensors of a model of about `nbytes` bytes."""
    fitting = (w for w in WIDTHS if LAYERS_MIN * _layer_nbytes(w) + _embedding_nbytes(w) <= nbytes)
    width = max(fitting, default=WIDTHS[0])
    layers = max(1, round((nbytes - _embedding_nbytes(width)) / _layer_nbytes(width)))
    embedding = Spec("model.embed_tokens.weight", (VOCABULARY * width, width))
    blocks = [spec for i in range(layers) for spec in _layer(f"model.layers.{i}", width)]
    return [embedding, *blocks, Spec("model.norm.weight", (width,))]


def _layer(prefix: str, width: int) -> Iterator[Spec]:
    for name, (rows, columns) in _MATRICES:
        shape = (rows * width,) if columns is None else (rows * width, columns * width)
        yield Spec(f"{prefix}.{name}", shape)


def _layer_nbytes(width: int) -> int:
    return sum(spec.nbytes for spec in _layer("", width))


def _embedding_nbytes(width: int) -> int:
    return 2 * VOCABULARY * width * width


def scratch_file(path: str, nbytes: int) -> None:
    """Write random 16-bit numbers of moderate size, valid as bfloat16 and as float16, a block at a time."""
    import numpy as np

    rng = np.random.default_rng(0)
    with open(path, "wb") as f:
        for at in range(0, nbytes, BLOCK):
            bits = rng.integers(0, 1 << 16, min(BLOCK, nbytes - at) // 2, dtype=np.uint16)
            f.write((bits & 0x83FF | 0x3800).tobytes())  # sign and low bits at random, exponent near 0


def state_dict(specs: list[Spec], scratch: str) -> dict[str, Any]:
    """Return names and arrays, each a mapping of its own of the scratch file's beginning."""
    import ml_dtypes
    import numpy as np

    state: dict[str, Any] = {}
    fd = os.open(scratch, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        for name, shape in specs:
            dtype = np.dtype(ml_dtypes.bfloat16 if len(shape) > 1 else np.float16)
            mapping = mmap.mmap(fd, int(np.prod(shape)) * 2, access=mmap.ACCESS_READ)
            state[name] = np.frombuffer(mapping, dtype).reshape(shape)
    finally:
        os.close(fd)
    return state
