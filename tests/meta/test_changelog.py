"""The changelog's top entry is the version that is here."""

from __future__ import annotations

import re
from pathlib import Path

import tensorio

ROOT = Path(__file__).resolve().parents[2]


def test_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## \[?v?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions
    assert versions[0] == tensorio.__version__
    assert len(set(versions)) == len(versions)


def test_version_is_three_numbers() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", tensorio.__version__)
