"""Hostile files through `tensorio.torch.load`: nothing runs, nothing is loaded that `tensorio.load` refuses."""

from __future__ import annotations

import json
import os
import pickle
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

import tensorio
import tensorio.torch

KINDS = ["pt_zip", "pt_pickle", "pt_legacy"]
SECONDS = 4.0  # of CPU for one file, over a build of any sort
# Elements that changed: torch's users are told, and get them.
WARNED = {"pt/crc_wrong_tensor.pt"}


def outcome(load: Any, path: str) -> tuple[str, str]:
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            load(path)
            said = ("load", "")
        except (
            tensorio.TensorIOError,
            OSError,
            RuntimeError,
            pickle.UnpicklingError,
            ValueError,
            AssertionError,
        ) as error:
            said = ("raise", type(error).__name__)
    taken = time.process_time() - start
    return said if taken < SECONDS else ("slow", f"{taken:.1f} s")


def judged(folder: str, files: list[str]) -> list[str]:
    """What ends otherwise than by `tensorio.load`, which has tests of its own."""
    bad = []
    for file in files:
        path = os.path.join(folder, file)
        ours, (said, more) = outcome(tensorio.load, path)[0], outcome(tensorio.torch.load, path)
        fits = said == ours or (said, ours) == ("raise", "load") or (said == "load" and file in WARNED)
        if not fits or said == "slow":
            bad.append(f"{file}: {said} {more}, tensorio.load: {ours}")
    return bad


@pytest.mark.plain_build
@pytest.mark.parametrize("kind", KINDS)
def test_hostile_files(kind: str, shared: Path, tmp_path: Path, in_child: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = shared / "hostile" / "manifest.json"
    if not manifest.is_file():
        pytest.skip("no hostile corpus in the shared folder")
    cases = json.loads(manifest.read_text())["cases"]
    files = [case["file"] for case in cases if case["kind"] == kind and not case["setup"]]
    assert len(files) > 10
    monkeypatch.setenv("CANARY_DIR", str(tmp_path))
    assert in_child(judged, str(manifest.parent / "corpus"), files, wall=200) == []
    assert os.listdir(tmp_path) == []
