"""Lines and branches of the C core that its tests run, by gcov; fails if a parser has less than it should.

``c_coverage.py`` builds csrc/ with counters under build/coverage/, runs the C tests, and prints a table.
``--python`` also builds the extensions that way and runs the Python tests that exercise the core; both are added up.
A line that can't be reached says so at its end: ``/* unreachable: why */``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "coverage"
PARSERS = {"json.c", "st_header.c", "zip_read.c", "zip_write.c", "tensor_ops.c"}
LINES = 98.0  # percent of a parser's lines that its tests must run
FLAGS = ["-std=c11", "-O0", "-g", "--coverage", "-fprofile-update=atomic"]
PYTHON_TESTS = ["tests/core", "tests/formats", "tests/test_unpickler.py"]


def run(*command: Any, **options: Any) -> None:
    """Run a command that must succeed."""
    subprocess.run([str(part) for part in command], check=True, **options)


def run_c_tests() -> Path:
    """Compile the core once and each C test against it; run them. Where the counters are."""
    folder = OUT / "c"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    sources = sorted((ROOT / "csrc").glob("*.c"))
    run("gcc", *FLAGS, "-I", ROOT / "csrc", "-c", *sources, cwd=folder)
    objects = [folder / f"{source.stem}.o" for source in sources]
    for test in sorted((ROOT / "tests" / "c").glob("test_*.c")):
        run("gcc", *FLAGS[:3], "-I", ROOT / "csrc", "-I", ROOT / "tests" / "c", "-c", test, cwd=folder)
        run("gcc", "--coverage", folder / f"{test.stem}.o", *objects, "-o", folder / test.stem)
        run(folder / test.stem, stdout=subprocess.DEVNULL)
    return folder


def run_python_tests() -> Path:
    """Build the extensions in a tree of their own and run the tests that exercise the core. Where the counters are."""
    tree = OUT / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    ignored = shutil.ignore_patterns(
        "*.so", "__pycache__", "_core.c", "_unpickler.c", "_arrays.c", "_source.c", "_pickler.c"
    )
    for name in ("src", "csrc"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, tree / name)
    environment = {**os.environ, "TENSORIO_COVERAGE": "1", "CC": "gcc"}
    run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=tree, env=environment)
    environment["PYTHONPATH"] = str(tree / "src")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *PYTHON_TESTS]
    subprocess.run(command, check=False, cwd=ROOT, env=environment)  # they are judged elsewhere; here they are counted
    return tree / "build"


class Counts:
    """How often each line and branch of each file of csrc/ was run."""

    def __init__(self) -> None:
        self.lines: dict[str, Counter[int]] = {}
        self.branches: dict[str, Counter[tuple[int, int]]] = {}

    def add(self, folder: Path) -> None:
        """Add what gcov says of every object in a folder."""
        for data in sorted(folder.rglob("*.gcda")):
            done = subprocess.run(["gcov", "--json-format", "--stdout", "--branch-probabilities", str(data)],
                                  check=True, capture_output=True, text=True, cwd=data.parent)  # fmt: skip
            for file in json.loads(done.stdout)["files"]:
                if Path(file["file"]).parent.name == "csrc":
                    self._add_file(Path(file["file"]).name, file["lines"])

    def _add_file(self, name: str, lines: Iterable[dict[str, Any]]) -> None:
        counts, branches = self.lines.setdefault(name, Counter()), self.branches.setdefault(name, Counter())
        for line in lines:
            counts[line["line_number"]] += line["count"]
            for i, branch in enumerate(line["branches"]):
                branches[line["line_number"], i] += branch["count"]


def unreachable(name: str) -> set[int]:
    """Lines with a written reason."""
    text = (ROOT / "csrc" / name).read_text().splitlines()
    return {i for i, line in enumerate(text, 1) if "/* unreachable: " in line}


def share(counts: Iterable[int]) -> tuple[int, int, float]:
    """Those that were run, all, and the percentage."""
    numbers = list(counts)
    ran = sum(n > 0 for n in numbers)
    return ran, len(numbers), 100 * ran / max(len(numbers), 1)


def table(counts: Counts, verbose: bool) -> bool:
    """Print lines and branches per file; whether every parser has enough."""
    good = True
    print(f"{'csrc/':16} {'lines':>15} {'branches':>18}   lines not run")
    for name in sorted(counts.lines):
        excused = unreachable(name)
        lines = {line: n for line, n in counts.lines[name].items() if line not in excused}
        ran, total, percent = share(lines.values())
        taken, branches, taken_percent = share(
            n for (line, _), n in counts.branches[name].items() if line not in excused
        )
        missed = [str(line) for line, n in sorted(lines.items()) if n == 0]
        shown = " ".join(missed if verbose else missed[:12]) + (" ..." if len(missed) > 12 and not verbose else "")
        print(f"{name:16} {ran:4}/{total:4} {percent:5.1f} {taken:6}/{branches:5} {taken_percent:5.1f}   {shown}")
        good &= name not in PARSERS or percent >= LINES
    if missing := PARSERS - counts.lines.keys():
        print("not seen at all:", *sorted(missing))
    return good and not missing


def main() -> int:
    """Build, run, count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="store_true", help="run the Python tests, too")
    parser.add_argument("--verbose", action="store_true", help="all lines that were not run")
    arguments = parser.parse_args()
    if not (shutil.which("gcc") and shutil.which("gcov")):
        print("no gcc with gcov here: skipped (Debian: gcc)")
        return 0
    counts = Counts()
    counts.add(run_c_tests())
    if arguments.python:
        counts.add(run_python_tests())
    good = table(counts, arguments.verbose)
    if not good:
        print(f"less than {LINES:g} % of the lines of a parser: {', '.join(sorted(PARSERS))}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
