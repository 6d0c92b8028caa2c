"""Make the weights of the example: an embedding of words, and two layers that score their mean.

    python make_weights.py weights.safetensors --mib 256
    python make_weights.py weights.pt --mib 256 --legacy     # unaligned: what can't be mapped as it is

Words of praise and of blame have a direction of their own; all other words are noise, which the
layers do not look at. So the answers mean something, and the file has the size of a real one.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
from scorer import BLAME, DIMENSIONS, HIDDEN, PRAISE, row_of

import tensorio

MIB = 1 << 20


def weights(mib: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return the model: `mib` MiB of float32."""
    rng = np.random.default_rng(7)
    words = mib * MIB // (4 * DIMENSIONS)
    embedding = rng.standard_normal((words, DIMENSIONS), dtype=np.float32)
    embedding[:, :2] = 0
    for column, texts in enumerate((PRAISE, BLAME)):
        for text in texts:
            embedding[row_of(text, words), column] = 1
    first = np.zeros((DIMENSIONS, HIDDEN), np.float32)
    first[0, 0] = first[1, 1] = 8
    last = np.zeros((HIDDEN, 2), np.float32)
    last[0, 0] = last[1, 1] = 4
    return {
        "embedding": embedding,
        "layers.0.weight": first,
        "layers.0.bias": np.zeros(HIDDEN, np.float32),
        "layers.1.weight": last,
        "layers.1.bias": np.zeros(2, np.float32),
    }


def main() -> None:
    """Write the file that the command line asks for."""
    parser = argparse.ArgumentParser(description="Make the weights of the example server.")
    parser.add_argument("path")
    parser.add_argument("--mib", type=int, default=256, help="size in MiB")
    parser.add_argument("--legacy", action="store_true", help="in torch's format of before 1.6 (needs torch)")
    arguments = parser.parse_args()
    tensors = weights(arguments.mib)
    if arguments.legacy:
        import torch

        state = {name: torch.from_numpy(array) for name, array in tensors.items()}
        torch.save(state, arguments.path, pickle_protocol=2, _use_new_zipfile_serialization=False)
    elif arguments.path.endswith(".npz"):
        np.savez(arguments.path, **tensors)  # type: ignore[arg-type]
    else:
        tensorio.save(tensors, arguments.path)


if __name__ == "__main__":
    sys.exit(main())
