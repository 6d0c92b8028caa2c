"""The console script ``tensorio``, and ``python -m tensorio``."""

from __future__ import annotations

import sys
from importlib.util import find_spec

__all__ = ["main"]

# What a shell reports for a program that died of the signal (128 + its number).
WRONG_USE, INTERRUPTED = 2, 130


def main() -> int:
    """Run the command line tool.

    Returns
    -------
    int
        What the process is to exit with; see ``tensorio --help``.
    """
    missing = [name for name in ("click", "rich") if find_spec(name) is None]
    if missing:
        print(f"tensorio: the command line needs {' and '.join(missing)}: pip install 'tensorio[cli]'", file=sys.stderr)
        return WRONG_USE
    try:
        from tensorio.cli import run

        return run()
    except KeyboardInterrupt:  # while modules are imported; later, it is the command's
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
