"""Compare two runs: ``python bench/compare.py OLD.json NEW.json``.

The machine is never the same twice, so that what is compared is not our time but our
ratio to each peer, which ran in the same minutes; peers of the same version are the
ruler. Lines that changed by more than the noise come with a mark.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

CHANGE = 0.10  # of the ratio: the same code, measured twice, stays within this on a busy machine, as a rule
SMALL = 1.0  # MiB, copies, page faults: limits are counts, and one more or less is nothing


def main(old: str, new: str) -> int:
    before, after = (json.loads(Path(name).read_text()) for name in (old, new))
    for run, name in ((before, "old"), (after, "new")):
        print(f"{name}: {run['commit']}, {run['time']}\n     {run['machine']}")
    print(f"\n{'ours:its, cpu':66}  {'old':>8}  {'new':>8}  change")
    kept = {_key(row): row for row in before["rows"]}
    for row in after["rows"]:
        was = kept.get(_key(row))
        if was is not None:
            _line(row, _value(was), _value(row))
    return 0


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return row["act"], row.get("peer") or row["what"]


def _value(row: dict[str, Any]) -> float | None:
    value: float | None = row["cpu"] if "peer" in row else row["value"]
    return value


def _line(row: dict[str, Any], old: float | None, new: float | None) -> None:
    if not old or not new:
        return
    change = new / old - 1
    nothing = abs(change) <= CHANGE or ("peer" not in row and abs(new - old) <= SMALL)
    mark = "" if nothing else ("  worse" if change > 0 else "  better")
    print(f"{' / '.join(_key(row)):66}  {old:8.3g}  {new:8.3g}  {change:+6.1%}{mark}")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
