"""``python run.py FLOW OWN OTHER``: what a flow writes into OWN, and what it reads from there and from OTHER.

Two of these run at once, one of them under the drop-in, and wait for each
other's files. What they found goes to ``OWN.json``, tensors as digests.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

PATIENCE = 150


def digest(value: Any) -> Any:
    """JSON that is equal for equal values only."""
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().view(-1).view(torch.uint8) if value.nelement() else value
        return [str(value.dtype), list(value.shape), hashlib.sha256(data.numpy().tobytes()).hexdigest()]
    if isinstance(value, Mapping):
        return {str(key): digest(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [digest(item) for item in value]
    return value


def wait_for(path: Path) -> None:
    end = time.monotonic() + PATIENCE
    while not path.exists():
        if time.monotonic() > end:
            sys.exit(f"no {path.name} after {PATIENCE} s")
        time.sleep(0.05)


def main(name: str, own: Path, other: Path) -> None:
    torch.set_num_threads(1)
    flow = importlib.import_module(f"{name}_flow")
    own.mkdir()
    found = {"written": digest(flow.write(own))}
    own.with_suffix(".done").touch()
    found["own"] = digest(flow.read(own))
    wait_for(other.with_suffix(".done"))
    found["other"] = digest(flow.read(other))
    own.with_suffix(".json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
