"""Run PyTorch's own tests of its serialization with `torch.load` and `torch.save` swapped for ours.

    python tools/torch_suite.py test_serialization.py [-k EXPRESSION]

The file is ``test/test_serialization.py`` of pytorch/pytorch; it is not part of this repository. Its tests run twice,
with torch's functions and with ours, each time in a process of its own; every test that ends otherwise is printed.
The exit status is 1 if one that passes with torch's does not pass with ours.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

OUTCOMES = "TENSORIO_SUITE_OUTCOMES"  # where the plugin writes how each test ended
SWAP = "TENSORIO_SUITE_SWAP"  # set: with ours
ENDED = (0, 1)  # pytest's exit statuses: all passed, some failed; others are of files that can't be imported, and more


class Plugin:
    """Notes how each test ends."""

    def __init__(self) -> None:
        self.outcomes: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the worst of a test's phases, and the end of what it said."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid.partition("::")[2]] = (report.outcome, str(report.longrepr or "")[-1500:])

    def pytest_sessionfinish(self) -> None:
        """Write what was noted."""
        Path(os.environ[OUTCOMES]).write_text(json.dumps(self.outcomes))


def pytest_configure(config: Any) -> None:
    """Swap the functions, before the tests are imported."""
    if os.environ.get(SWAP):
        import torch

        import tensorio.torch

        torch.load, torch.save = tensorio.torch.load, tensorio.torch.save
    config.pluginmanager.register(Plugin())


def run(file: Path, expression: str | None, swap: bool, timeout: float) -> dict[str, tuple[str, str]]:
    """Run the file's tests; by test, how it ended and what it said."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder) / "outcomes.json"
        here = str(Path(__file__).resolve().parent)
        paths = [here, str(Path(here).parent / "src"), str(file.parent), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, OUTCOMES: str(outcomes), SWAP: "1" if swap else "",
                       "PYTHONPATH": os.pathsep.join(path for path in paths if path)}  # fmt: skip
        command = [sys.executable, "-m", "pytest", "-p", "torch_suite", "-p", "no:cacheprovider", "-p", "no:benchmark",
                   "-c", os.devnull, "--rootdir", str(file.parent), "-q", "--no-header", str(file)]  # fmt: skip
        done = subprocess.run(
            [*command, *(["-k", expression] if expression else [])], cwd=folder, env=environment, timeout=timeout,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        noted = json.loads(outcomes.read_text()) if outcomes.exists() else {}
        if not noted or done.returncode not in ENDED:
            raise SystemExit(f"the tests did not run to their end:\n{done.stdout[-3000:]}")
        found: dict[str, tuple[str, str]] = {name: (how, said) for name, (how, said) in noted.items()}
        return found


def main() -> int:
    """Compare the two runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("-k", dest="expression")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each of the two runs")
    arguments = parser.parse_args()
    theirs, ours = (
        run(arguments.file.resolve(), arguments.expression, swap, arguments.timeout) for swap in (False, True)
    )
    worse = 0
    for name in sorted(theirs.keys() | ours.keys()):
        before, after = theirs.get(name, ("missing", "")), ours.get(name, ("missing", ""))
        if before[0] != after[0]:
            worse += before[0] == "passed"
            print(f"{name}: {before[0]} with torch's, {after[0]} with ours\n{after[1]}\n")
    counts = {how: sum(outcome == how for outcome, _ in ours.values()) for how in ("passed", "failed", "skipped")}
    print(f"{len(ours)} tests with ours: {counts}; {worse} that pass with torch's do not")
    return 1 if worse else 0


if __name__ == "__main__":
    raise SystemExit(main())
