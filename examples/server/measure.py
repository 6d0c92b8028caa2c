"""Print the memory table of README.md: workers that share against workers that copy.

python measure.py --mib 256 --workers 1 2 4 8
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
MIB = 1 << 20


@contextlib.contextmanager
def server(path: str, workers: int, *, copy: bool = False) -> Iterator[str]:
    """Run serve.py; its address, once it answers."""
    environment = dict(os.environ, SCORER_WEIGHTS=path, SCORER_COPY=str(int(copy)))
    command = [sys.executable, os.path.join(HERE, "serve.py"), "--workers", str(workers), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


def ask(address: str, path: str) -> Any:
    """Return a JSON answer."""
    with urllib.request.urlopen(address + path, timeout=60) as answer:
        return json.load(answer)


def settled(address: str, workers: int, least: int) -> list[dict[str, int]]:
    """Return the rows of all workers, once each has read its weights."""
    before: list[dict[str, int]] = []
    for _ in range(300):
        rows: list[dict[str, int]] = ask(address, "memory?json")
        if len(rows) == workers and all(row["rss"] > least for row in rows) and near(rows, before):
            return rows
        before = rows
        time.sleep(0.2)
    raise TimeoutError("the workers did not come up")


def near(rows: list[dict[str, int]], before: list[dict[str, int]]) -> bool:
    """Tell whether nobody is still reading: what is in memory is what it was."""
    return len(rows) == len(before) and all(abs(a["rss"] - b["rss"]) < MIB for a, b in zip(rows, before, strict=True))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure the memory of the example server.")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--legacy", action="store_true", help="also weights that can't be mapped as they are")
    arguments = parser.parse_args()
    ways = [("shared file", "w.safetensors", [], False), ("numpy.load", "w.npz", [], True)]
    if arguments.legacy:
        ways.insert(1, ("published memory", "w.pt", ["--legacy"], False))
    print(f"weights of {arguments.mib} MiB; PSS of all workers together, MiB: all memory (of that the weights)")
    with tempfile.TemporaryDirectory() as folder:
        for label, name, options, copy in ways:
            path, cells = os.path.join(folder, name), []
            make = [sys.executable, os.path.join(HERE, "make_weights.py"), path, "--mib", str(arguments.mib), *options]
            subprocess.run(make, check=True)
            for workers in arguments.workers:
                with server(path, workers, copy=copy) as address:
                    rows = settled(address, workers, arguments.mib * MIB)
                total, ours = (sum(row[key] for row in rows) / MIB for key in ("pss", "weights_pss"))
                cells.append(f"{workers}: {total:.0f}" + ("" if copy else f" ({ours:.0f})"))
            print(f"{label:>17}   " + "   ".join(cells))


if __name__ == "__main__":
    main()
