"""Imports point down only; see the rank table of DESIGN and ARCHITECTURE.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "tensorio"

# Lower ranks know nothing of higher ones; within a rank, modules may use each other.
RANKS: list[tuple[str, ...]] = [
    ("errors", "_version"),
    (
        "_core",
        "_append",
        "_csrc",
        "_source",
        "_unpickler",
        "_pickler",
        "_arrays",
        "_dlpack",
        "_host",
        "_served",
        "dtypes",
        "allowing",
        "allowlist",
        "dangers",
        "sums",
        "values",
        "pickles",
        "kinds",
        "machine",
        "arraylike",
    ),
    (
        "system",
        "storage",
        "writing",
    ),
    ("tensors", "modules", "tree", "plan", "tp"),
    ("formats", "encryption"),
    (
        "checkpoint",
        "scanning",
        "sharing",
    ),
    ("asynchronous",),
    (
        "_api",
        "_api_crypt",
        "_api_async",
        "_api_less",
        "_api_save",
        "_api_tp",
        "cli",
        "torch",
        "safetensors",
        "dropin",
        "manager",
        "__main__",
    ),
    ("",),  # the package itself: re-exports only
]
# Who may open files or map them: checkpoints; memory that is shared, and the notes on it; what the system says.
DOORS = (
    "storage",
    "system",
    "writing",
    "asynchronous/_shared",
    "sharing/_segments",
    "sharing/_registry",
    "manager/_lock",
    "cli",
)
RANK = {name: i for i, row in enumerate(RANKS) for name in row}


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*") if p.suffix in (".py", ".pyx") and "__pycache__" not in p.parts)


def source(path: Path) -> str:
    """A module's text, that of the files it includes in their places."""
    text = path.read_text()
    return re.sub(r'^include "([\w.]+)"$', lambda found: source(path.with_name(found[1])), text, flags=re.M)


def part(path: Path) -> str:
    """The unit a file belongs to: a top module, or one of the folders."""
    relative = path.relative_to(PACKAGE)
    top = relative.parts[0].removesuffix(path.suffix) if len(relative.parts) == 1 else relative.parts[0]
    return "" if top == "__init__" else top


def imports(path: Path) -> list[tuple[str, bool]]:
    """Modules of tensorio that a file imports, and whether only for its annotations."""
    text = source(path)
    if path.suffix == ".pyx":
        found = re.findall(
            r"^\s*(?:from\s+(tensorio[\w.]*)\s+c?import\s+([\w, ]+)|c?import\s+(tensorio[\w.]*))", text, re.M
        )
        return [
            (f"{a}.{n.split(' as ')[0].strip()}", False) for a, names, _ in found if a for n in names.split(",")
        ] + [(c, False) for *_, c in found if c]
    out = []
    tree = ast.parse(text)
    typing = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    inside = {id(n) for block in typing for n in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tensorio":
            out += [(f"{node.module}.{a.name}", id(node) in inside) for a in node.names]
        elif isinstance(node, ast.Import):
            out += [(a.name, id(node) in inside) for a in node.names if a.name.split(".")[0] == "tensorio"]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import; name modules in full"
    return out


def target(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in RANK else ""


def test_every_included_file_is_a_part_of_one_module() -> None:
    """So that the tests below read it."""
    included = [name for path in modules() for name in re.findall(r'^include "([\w.]+)"$', path.read_text(), re.M)]
    assert sorted(included) == sorted(p.name for p in PACKAGE.rglob("*.pxi"))


def test_every_module_has_a_rank() -> None:
    assert {part(p) for p in modules()} <= set(RANK)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    here = part(path)
    for name, for_types in imports(path):
        there = target(name)
        if there == here or for_types:
            continue
        if there == "" and here in ("cli", "__main__", "torch", "safetensors", "dropin"):
            continue  # the faces speak to the public package
        assert RANK[there] <= RANK[here], f"{path.name} imports {name}, which stands above it"


@pytest.mark.parametrize("path", sorted((PACKAGE / "formats").glob("*.py")), ids=lambda p: p.name)
def test_formats_do_not_import_each_other(path: Path) -> None:
    for name, _ in imports(path):
        parts = name.split(".")
        if parts[1] == "formats" and len(parts) > 2 and path.stem != "__init__":
            assert parts[2].startswith("_"), f"{path.name} imports the format {parts[2]}"


def test_every_door_is_there_and_used() -> None:
    files = {str(p.relative_to(PACKAGE).with_suffix("")): p for p in modules()}
    for door in DOORS:
        inside = [p for name, p in files.items() if name == door or name.startswith(f"{door}/")]
        assert any(opens(p) for p in inside), door


def opens(path: Path) -> bool:
    """Whether a module maps files or opens them."""
    text = path.read_text()
    call = r"(?<![.\w])os\.open\(|(?<![.\w\"'])open\([^)]*[\"'][rwab]+[\"']"
    return "import mmap" in text or re.search(call, text) is not None


def test_only_storage_maps_files_and_opening_opens_them() -> None:
    """The door to a file's bytes."""
    for path in modules():
        if {part(path), str(path.relative_to(PACKAGE).with_suffix(""))} & set(DOORS) or path.suffix == ".pyx":
            continue
        assert not opens(path), path.name


def test_no_module_can_run_what_a_file_says() -> None:
    """P1: nothing here calls, imports or evaluates a name that it was given."""
    for path in modules():
        if part(path) in ("_pickler", "dangers"):
            continue  # looks up the caller's own objects, to write their names; has names of that sort in a table
        text = source(path)
        for word in ("pickle.load", "Unpickler(", "eval(", "exec(", "marshal", "getattr(sys.modules"):
            assert word not in text.replace("_unpickler.loads", ""), f"{path.name}: {word}"
        if "import_module" in text or "__import__" in text:
            assert part(path) in ("formats", "_arrays", "dropin"), path.name
