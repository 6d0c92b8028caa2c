"""The console script ``tensorio``, and ``python -m tensorio``."""

from __future__ import annotations

import sys
from importlib.util import find_spec

__all__ = ["main"]

WRONG_USE = 2


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
    from tensorio.cli import run

    return run()


if __name__ == "__main__":
    sys.exit(main())
