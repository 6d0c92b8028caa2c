"""How killed saves ended, ours and others': ``table.py KILLS [BYTES]`` prints a table of counts."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import shim
from writers import PEERS, WRITERS

COLUMNS = ("kills", "before", "after", "neither", "litter", "litter at the end")


def main() -> None:
    kills, nbytes = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4_000_000
    print("| writer |", " | ".join(COLUMNS), "|")
    print("|---|" + "---|" * len(COLUMNS))
    for name in [*WRITERS, *PEERS]:
        with tempfile.TemporaryDirectory() as folder:
            counts = json.loads(shim.run("kills.py", name, Path(folder) / "trials", kills, nbytes, 1, preload=False))
        print(f"| {name} |", " | ".join(str(counts[column]) for column in COLUMNS), "|", flush=True)


if __name__ == "__main__":
    main()
