"""Fixtures of the benches, and the table at the end.

Sizes are those of the targets if benchmarks are enabled, small ones otherwise (an
ordinary test run): then every bench runs once, and its result is still checked.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parent
for folder in (str(BENCH), str(BENCH.parent / "tests")):  # the latter for cases.py, whatever is collected besides
    if folder not in sys.path:
        sys.path.append(folder)

import inputs  # noqa: E402
import report  # noqa: E402
from inputs import Checkpoints, Sizes  # noqa: E402
from race import Race, Table  # noqa: E402

TABLE = pytest.StashKey[Table]()
MACHINE = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "benches: small sizes and one round, whatever else is set"
    parser.addoption("--bench-quick", action="store_true", help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TABLE] = Table()
    if config.getoption("benchmark_only", False):
        config.option.benchmark_enable = True  # who asks for them means it, though the project's settings disable them
    config.option.benchmark_quiet = True  # our table says it shorter; --benchmark-verbose overrides


def is_quick(config: pytest.Config) -> bool:
    """Whether this is a test of the benches rather than a measurement."""
    if config.getoption("--bench-quick", False) or os.environ.get("TENSORIO_BENCH_QUICK") == "1":
        return True
    return bool(config.getoption("benchmark_disable")) and not config.getoption("benchmark_enable")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    table = config.stash[TABLE]
    if not table.rows or not (_asked_for(config) or not is_quick(config)):
        return
    write = terminalreporter.write_line
    terminalreporter.section("costs" + (" (small sizes, one round: they say nothing)" if is_quick(config) else ""))
    if config.getoption("verbose") > 0:
        for line in report.detail_lines(table):
            write(line)
        write("")
    for line in report.lines(table, judged=not is_quick(config)):
        write(line)
    write("")
    write("Best of all rounds; files are warm (in the page cache) where nothing else is said.")
    write(config.stash[MACHINE] + f"; {report.load()} at the end")
    if os.environ.get("TENSORIO_BENCH_RESULTS") == "1" and not is_quick(config):
        write(f"kept in {report.write(table, config.stash[MACHINE])}")


def _asked_for(config: pytest.Config) -> bool:
    """Whether benches were named on the command line, rather than run among all tests."""
    named = [Path(arg.split("::")[0]).resolve() for arg in config.invocation_params.args if not arg.startswith("-")]
    return any(path == BENCH or BENCH in path.parents for path in named)


@pytest.fixture(scope="session")
def quick(request: pytest.FixtureRequest) -> bool:
    return is_quick(request.config)


@pytest.fixture(scope="session")
def sizes(quick: bool) -> Sizes:
    return inputs.QUICK if quick else inputs.FULL


@pytest.fixture(scope="session")
def work(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder for files: below ``TENSORIO_BENCH_DIR``, or the system's temporary one; removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="tensorio-bench-", dir=os.environ.get("TENSORIO_BENCH_DIR")))
    request.config.stash[MACHINE] = f"{report.machine(folder)}; {report.load()} at the start"
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest, work: Path) -> Table:
    return request.config.stash[TABLE]


@pytest.fixture
def race(benchmark: Any, table: Table, quick: bool, request: pytest.FixtureRequest) -> Race:
    table.section = request.module.__name__
    return Race(benchmark, table, quick)


@pytest.fixture(scope="session")
def many(work: Path, sizes: Sizes) -> Checkpoints:
    return inputs.many(work, sizes)


@pytest.fixture(scope="session")
def big(work: Path, sizes: Sizes) -> Checkpoints:
    return inputs.big(work, sizes)


@pytest.fixture
def target(work: Path) -> Iterator[Path]:
    """A path without suffix to save to; what was saved to it and its namesakes is removed."""
    yield work / "target"
    for path in work.glob("target*"):
        path.unlink()
