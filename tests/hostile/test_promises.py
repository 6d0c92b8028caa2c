"""Parts of good files of every format changed at random: whatever comes of it, the promises hold.

What is around a change stays right, so that it gets past checksums and lengths; see tests/mutations.py.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import cases
import mutations
import tensorio
from judging import SCALE, attempt, same_by_every_way
from test_flips import PIECES

MUTANTS = 100_000  # of all files together
EVERY = 251  # of them is also read from a file, in both ways


@cache
def pieces() -> list[bytes]:
    """Opcodes to put into any pickle: those of shuffled pickles, and what the files themselves are made of."""
    own: set[bytes] = set()
    for case in cases.CASES.values():
        with contextlib.suppress(pytest.skip.Exception):  # a case that torch makes, where there is none
            own.update(op for op in mutations.opcodes(case().data) if len(op) < 100)
    return [*PIECES, *sorted(own)]


@pytest.mark.parametrize("name", list(cases.CASES))
def test_parts_changed_at_random_end_in_an_error_or_a_result(name: str, tmp_path: Path) -> None:
    case = cases.CASES[name]()
    rng = random.Random(f"{name} {SCALE}")
    found: Counter[str] = Counter()
    for i in range(MUTANTS * SCALE // len(cases.CASES)):
        data = mutations.mutated(rng, case.format, case.data, pieces())
        unknown = rng.choice(("error", "opaque"))
        act: Any = rng.choice((tensorio.load, tensorio.open))
        try:
            outcome = attempt(data, act, unknown=unknown)
            if i % EVERY == 0 and act is tensorio.load:
                same_by_every_way(data, tmp_path / "file", outcome, unknown=unknown)
        except Exception as error:
            kept = tmp_path / "mutant"
            kept.write_bytes(data)
            pytest.fail(f"{type(error).__name__}: {error} from {act.__name__}(unknown={unknown!r}) of {kept}")
        found["refused" if isinstance(outcome, Exception) else "loaded"] += 1
    assert min(found["refused"], found["loaded"]) > found.total() // 100, f"changes that are all alike: {found}"
