"""`tensorio.torch` without torch says what is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.plain_build
def test_without_torch_the_extra_is_named() -> None:
    code = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import tensorio
try:
    import tensorio.torch
except ImportError as error:
    print(error.name, error)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout == "torch tensorio.torch needs torch: pip install 'tensorio[torch]'\n"
