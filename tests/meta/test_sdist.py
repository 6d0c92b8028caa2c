"""A source release has all that the pages in it lead to and that `make` there runs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="not a checkout")
def test_every_folder_of_the_checkout_is_in_the_source_release() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = {name.split("/")[0] for name in listed.splitlines() if "/" in name and not name.startswith(".")}
    text = (ROOT / "MANIFEST.in").read_text()
    grafted = re.findall(r"^graft (.+)$", text, re.MULTILINE)
    assert sorted(folders - {"src"}) == sorted(" ".join(grafted).split())
    assert "recursive-include src/tensorio " in text  # without what is built there
