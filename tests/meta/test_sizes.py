"""Ceilings for the length of files and functions: what outgrows one is to be split, by noun."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON_FILE = 450
PYTHON_FUNCTION = 60
CYTHON_FILE = 500
C_FUNCTION = 80


def python_files() -> list[Path]:
    return sorted((ROOT / "src").rglob("*.py"))


def test_python_files_stay_short() -> None:
    long = {p.name: n for p in python_files() if (n := len(p.read_text().splitlines())) > PYTHON_FILE}
    assert not long, f"over {PYTHON_FILE} lines: {long}"


def test_cython_files_stay_short() -> None:
    files = sorted(p for p in (ROOT / "src").rglob("*") if p.suffix in (".pyx", ".pxi"))
    assert files
    long = {p.name: n for p in files if (n := len(p.read_text().splitlines())) > CYTHON_FILE}
    assert not long, f"over {CYTHON_FILE} lines: {long}"


def test_python_functions_stay_short() -> None:
    """Counted without the docstring: a contract may be as long as it must."""
    long = {}
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                length = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
                if length > PYTHON_FUNCTION:
                    long[f"{path.name}:{node.name}"] = length
    assert not long, f"over {PYTHON_FUNCTION} lines: {long}"


def c_functions(text: str) -> dict[str, int]:
    """Lines from a function's name to its closing brace, both in the first column."""
    out, name, start = {}, None, 0
    for i, line in enumerate(text.splitlines()):
        found = re.match(r"[A-Za-z_][\w\s*]*?\b(\w+)\(", line)
        if found and not line.rstrip().endswith(";"):
            name, start = found[1], i
        elif line.startswith("}") and name is not None:
            out[name] = i - start + 1
            name = None
    return out


def test_c_functions_stay_short() -> None:
    long = {
        f"{path.name}:{name}": n
        for path in sorted((ROOT / "csrc").glob("*.[ch]"))
        for name, n in c_functions(path.read_text()).items()
        if n > C_FUNCTION
    }
    assert not long, f"over {C_FUNCTION} lines: {long}"


def test_c_functions_are_seen_at_all() -> None:
    found = c_functions((ROOT / "csrc" / "zip_read.c").read_text())
    assert "tio_zip_open" in found
    assert len(found) > 10
