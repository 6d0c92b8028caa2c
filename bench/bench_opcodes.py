"""What the pickle machine pays per opcode, and that a million tensors cost a million times one.

The table is what docs/performance.md quotes. A target is set only for the growth: per tensor, 100 times as many may
not cost more than cache misses explain.
"""

from __future__ import annotations

import io
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio
from race import Entry, Race, Table

# How much more a tensor may cost among a million than among ten thousand: its rows no longer fit any cache.
GROWTH = 3.0

# Opcodes, and what of each round is not theirs (popped off again by the POP that ends it).
OPCODES: dict[str, bytes] = {
    "NONE": b"N0",
    "BININT1": b"K\x010",
    "BININT": b"J\x00\x00\x01\x000",
    "LONG1": b"\x8a\x02\x00\x010",
    "BINFLOAT": b"G?\xf0\x00\x00\x00\x00\x00\x000",
    "BINUNICODE (8 characters)": b"X\x08\x00\x00\x00abcdefgh0",
    "SHORT_BINBYTES (8 bytes)": b"C\x08abcdefgh0",
    "BINPUT and BINGET": b"Nq\x00h\x0000",
    "EMPTY_DICT": b"}0",
    "MARK, TUPLE of 3": b"(NNNt0",
    "TUPLE2": b"NN\x860",
    "SETITEM": b"}X\x01\x00\x00\x00aNs0",
    "APPEND": b"]Na0",
    "GLOBAL": b"ccollections\nOrderedDict\n0",
    "REDUCE (OrderedDict)": b"ccollections\nOrderedDict\n)R0",
    "REDUCE (torch.Size)": b"ctorch\nSize\nK\x02K\x03\x86\x85R0",
    "REDUCE, BUILD (opaque)": b"capp\nThing\n)R}b0",
    "INT (text)": b"I123\n0",
    "UNICODE (text)": b"Vabcdefgh\n0",
}


def torch_file(data: bytes) -> bytes:
    """The smallest archive around a pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("x/data.pkl", data)
    return out.getvalue()


def seconds(run: Callable[[], Any], rounds: int = 15) -> float:
    """CPU time of the best round."""
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        run()
        best = min(best, time.process_time() - start)
    return best


@pytest.mark.parametrize("name", OPCODES)
def test_cost_of_an_opcode(benchmark: Any, table: Table, quick: bool, name: str) -> None:
    """Time per round of the opcode and the POP that takes its result away."""
    repeats = 100 if quick else 20_000  # more of the dear ones would be over the budget of a pickle
    bare = torch_file(b"\x80\x04N.")
    data = torch_file(b"\x80\x04" + OPCODES[name] * repeats + b"N.")
    assert tensorio.load(data, unknown="opaque") is None
    cost = seconds(lambda: tensorio.load(data, unknown="opaque")) - seconds(lambda: tensorio.load(bare))
    table.bound("an opcode, and POP", name, 1e9 * max(cost, 0) / repeats, None, "ns")
    benchmark.pedantic(lambda: tensorio.load(bare), rounds=1)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_million_tensors_cost_a_million_times_one(race: Race, quick: bool, tmp_path: Path, suffix: str) -> None:
    """Both sides are asked for a million arrays: one file of a million, or a hundred times one of ten thousand."""
    few, many = tmp_path / f"few{suffix}", tmp_path / f"many{suffix}"
    total = 10_000 if quick else 1_000_000
    for path, count in ((few, total // 100), (many, total)):
        tensorio.save({f"layers.{i}.w": np.zeros(4, np.float32) for i in range(count)}, path, durable=False)
    race(
        f"{total:,} tensors of a {suffix}, as arrays",
        Entry("one file", lambda: [tensorio.load(many)]),
        [Entry(f"100 files of {total // 100:,}", lambda: [tensorio.load(few) for _ in range(100)], at_most=GROWTH)],
        check=lambda loaded: _count(loaded, total),
        rounds=3,
    )


def _count(loaded: list[Any], want: int) -> None:
    assert sum(map(len, loaded)) == want
