"""Files of every release of torch, and files that nobody here wrote: what `torch.load` makes of them."""

from __future__ import annotations

import pickle
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

import cases
import tensorio.torch
from alike import differences, quietly

ARCHIVES = sorted((cases.REPO / "tests" / "golden").glob("*.tar.xz"))
KINDS = ("torch_zip", "torch_legacy", "torch_tar")
# What our machine knows to be harmless, and torch's rules ask the user about.
MORE = ("numpy", "collections", "datetime", "builtins", "_codecs", "__builtin__", "pathlib", "uuid", "decimal")


def compared(path: Path) -> str | None:
    """What differs between the two; "refused" where torch refuses, and ours does, too."""
    try:
        theirs = quietly(torch.serialization.load, path, weights_only=True)
    except Exception as refusal:
        return judged_alone(path, refusal)
    ours = quietly(tensorio.torch.load, path)
    found = quietly(differences, ours, theirs)
    return "; ".join(found[:3]) if found else None


def judged_alone(path: Path, refusal: Exception) -> str | None:
    """Where torch refuses: an error that its callers catch, or data that our machine has known to be data."""
    try:
        quietly(tensorio.torch.load, path)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, AttributeError, TypeError):
        return None
    try:
        tensorio.load(path)  # raises what is not on the list of harmless names
    except Exception as error:
        return f"loaded what torch refuses ({refusal}) and tensorio.load does, too: {error}"[:500]
    return None


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.xz"))
def test_files_of_old_releases(archive: Path, tmp_path: Path) -> None:
    with tarfile.open(archive) as held:
        held.extractall(tmp_path, filter="data")
    found = {path.name: said for path in sorted(tmp_path.iterdir())
             if path.suffix != ".json" and (said := compared(path)) is not None}  # fmt: skip
    assert not found


ENTRIES = [e for e in cases.corpus_entries() if e["format"] in KINDS]


@pytest.mark.parametrize("entry", ENTRIES or [None], ids=lambda e: e["id"] if e else "none")  # type: ignore[index]
def test_files_of_the_corpus(entry: dict[str, Any] | None, corpus: Path) -> None:
    assert entry is not None
    assert compared(corpus / entry["path"]) is None
