"""The pages name what is there: modules, commands, files, other pages; each once, in lines of one width."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tensorio.cli import cli
from test_layering import RANK

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "tensorio"
# Folders of many modules that do different things; of the others, the table says what they are as a whole.
DESCRIBED = ("asynchronous", "checkpoint", "encryption", "manager", "storage", "system", "tp", "writing")


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def modules() -> list[str]:
    top = [p.stem for p in PACKAGE.iterdir() if p.suffix in (".py", ".pyx")]
    inside = [p.stem for folder in DESCRIBED for p in (PACKAGE / folder).glob("*.py")]
    included = [p.name for p in PACKAGE.glob("*.pxi")]
    return sorted(set(top + inside + included) - {"__init__", "_version"})


def folders() -> list[str]:
    return sorted(p.parent.name for p in PACKAGE.glob("*/__init__.py"))


@pytest.mark.parametrize("name", [*modules(), *(f"{folder}/" for folder in folders())])
def test_every_module_has_its_place_in_the_architecture(name: str) -> None:
    assert f"`{name}`" in text_of("ARCHITECTURE.md")


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_no_row_or_line_is_there_twice(page: str) -> None:
    """Tables by their first cells, which name the row; lists and prose by the line."""
    keys = []
    for line in re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL).splitlines():
        cells = line.split("|")
        if line.startswith("|") and not set(line) <= set("| -"):
            keys.append("|".join(cells[1:-2]) or line)
        elif len(line) > 40:
            keys.append(line)
    assert sorted({key for key in keys if keys.count(key) > 1}) == []


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md"])
@pytest.mark.parametrize("command", sorted(cli.commands))
def test_every_command_is_named(page: str, command: str) -> None:
    assert re.search(rf"`{command}`|tensorio {command}\b", text_of(page))


@pytest.mark.parametrize("page", sorted(p.name for p in (ROOT / "docs").glob("*.md")))
def test_every_page_is_linked(page: str) -> None:
    assert f"](docs/{page})" in text_of("README.md")


@pytest.mark.parametrize(
    "page",
    ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))],
)
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\((?!\w+:)([^)#]+)", text_of(page))
    assert [t for t in targets if not ((ROOT / page).parent / t).exists()] == []


PAGES = sorted(
    str(p.relative_to(ROOT))
    for pattern in ("*.md", "docs/*.md", "*/README.md", "*/*/README.md")
    for p in ROOT.glob(pattern)
    if p.relative_to(ROOT).parts[0] != "build"
)
WIDTH = 120


@pytest.mark.parametrize("page", PAGES)
def test_lines_end_where_others_do(page: str) -> None:
    """Rows of tables and code are as long as they are."""
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    assert [line for line in prose.splitlines() if len(line) > WIDTH and not line.startswith("|")] == []


@pytest.mark.parametrize(
    ("page", "files"),
    [
        ("bench/README.md", "*.py"),
        ("csrc/README.md", "*.h"),
        ("fuzz/README.md", "*.py"),
        ("tests/hostile/README.md", "test_*.py"),
        ("examples/server/README.md", "*.py"),
        ("examples/training/README.md", "*.py"),
    ],
)
def test_every_file_of_a_folder_is_named_in_its_page(page: str, files: str) -> None:
    text = text_of(page)
    folder = (ROOT / page).parent
    assert [p.name for p in sorted(folder.glob(files)) if p.name != "conftest.py" and f"`{p.name}`" not in text] == []


def test_every_folder_and_helper_of_the_tests_is_named_in_their_page() -> None:
    text = text_of("tests/README.md")
    folders = [f"{p.name}/" for p in (ROOT / "tests").iterdir() if p.is_dir() and not p.name.startswith(("__", "."))]
    helpers = [p.name for p in (ROOT / "tests").glob("*.py") if not p.name.startswith("test_")]
    assert [name for name in sorted(folders + helpers) if f"`{name}`" not in text] == []


def page_ranks() -> dict[str, int]:
    """The rank of each module and folder in the table of layers."""
    rows = re.findall(r"^\| (\d) \| ([^|]+) \|", text_of("ARCHITECTURE.md"), re.MULTILINE)
    return {name.strip("/"): int(rank) for rank, names in rows for name in re.findall(r"`(\w+/?)`", names)}


def test_the_table_of_layers_has_the_order_that_is_held() -> None:
    ranks = page_ranks()
    assert len(ranks) > 40
    assert set(ranks) <= set(RANK)
    by_page = sorted(ranks, key=lambda name: (ranks[name], RANK[name]))
    assert [RANK[name] for name in by_page] == sorted(RANK[name] for name in by_page)
