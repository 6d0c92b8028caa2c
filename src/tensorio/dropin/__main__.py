"""``python -m tensorio.dropin``."""

from __future__ import annotations

import sys

from tensorio.dropin._command import main

if __name__ == "__main__":
    sys.exit(main())
