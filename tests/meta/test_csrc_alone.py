"""The C core compiles by itself, with strict warnings as errors, and holds to its own rules."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
STRICT = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
COMPILERS = [c for c in ("gcc", "clang") if shutil.which(c)]


@pytest.mark.skipif(not COMPILERS, reason="neither gcc nor clang is installed")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_csrc_compiles_alone_without_a_warning(compiler: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [compiler, *STRICT, "-c", *map(str, sorted(CSRC.glob("*.c")))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[:4000]
    assert len(list(tmp_path.glob("*.o"))) == len(list(CSRC.glob("*.c")))


@pytest.mark.parametrize("path", sorted(CSRC.glob("*.[ch]")), ids=lambda p: p.name)
def test_csrc_knows_neither_python_nor_the_heap(path: Path) -> None:
    text = re.sub(r"/\*.*?\*/|//[^\n]*|\"(?:[^\"\\]|\\.)*\"", "", path.read_text(), flags=re.S)
    assert not re.search(r"Python\.h|\b(malloc|calloc|realloc|free|printf|fopen|errno|getenv)\b", text)


@pytest.mark.parametrize("path", sorted(CSRC.glob("*.[ch]")), ids=lambda p: p.name)
def test_csrc_files_begin_with_their_licence_and_say_what_they_are(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert "SPDX-License-Identifier: Apache-2.0" in lines[0]
    assert any(len(line.strip(" */")) > 20 for line in lines[1:6])
