"""The command line tool: what it says, what it never says, exit codes, and what it costs to look into a file."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import hexfile
import tensorio

pytest.importorskip("click", reason="the extra 'cli' is not installed")
pytest.importorskip("rich", reason="the extra 'cli' is not installed")

from click.testing import CliRunner, Result
from rich.console import Console

from tensorio.cli import cli
from tensorio.cli._text import Cell, Sheet, cut_middle, elements, parse_size, shape_text, shown, size
from tensorio.cli._values import value_text
from tensorio.values import Device, Opaque, Size, TorchDType

F32 = np.float32

# For processes of their own, wherever they run: the package that is tested here, and no wish for colours.
PACKAGES = os.pathsep.join([str(Path(tensorio.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "TERM")}
ENVIRONMENT["PYTHONPATH"] = PACKAGES


def run(*arguments: object) -> Result:
    """Run the tool in this process, with stdout and stderr apart."""
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def output(*arguments: object) -> str:
    """What the tool prints when all is well."""
    result = run(*arguments)
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert result.stderr == ""
    return result.stdout


def process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the tool as a process of its own."""
    command = [sys.executable, "-m", "tensorio", *map(str, arguments)]
    options["env"] = ENVIRONMENT | options.pop("env", {})
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


def row(text: str, name: str) -> list[str]:
    """The words behind a name in the only line that has it."""
    lines = [line for line in text.splitlines() if re.search(rf"(^|[ ─]){re.escape(name)}( |$)", line)]
    assert len(lines) == 1, (name, lines)
    return lines[0].partition(name)[2].split()


# --------------------------------------------------------------------- files


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    """A model of five equal layers, one that differs, and two tensors around them."""
    state = {"embed.weight": np.ones((10, 4), F32)}
    for i in range(6):
        state[f"layers.{i}.attn.weight"] = np.full((4, 4), i, F32)
        state[f"layers.{i}.attn.bias"] = np.full((4 if i < 5 else 3,), i, F32)
    state["head.weight"] = np.ones((4, 2), np.float64)
    path = tmp_path / "layers.safetensors"
    tensorio.save(state, path, metadata={"made": "here", "lines": "a\nb"})
    return path


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A torch file with tied, overlapping and strided tensors and other values."""
    big, w = np.arange(1000, dtype=F32), np.arange(64, dtype=F32).reshape(8, 8)
    obj = {
        "model": {"emb": w, "head": w, "t": w.T, "a": big[0:300], "b": big[200:400], "c": big[400:500]},
        "opt": {"lr": 1e-3, "betas": [0.9, 0.999], "params": list(range(148)), "name": "adam"},
        "epoch": 3,
    }
    path = tmp_path / "mixed.pt"
    tensorio.save(obj, path)
    return path


@pytest.fixture
def wasteful(tmp_path: Path) -> Path:
    """A torch file whose tensors reach 24 of the 4000 bytes of one record, none of a second, all of a third."""
    items = {"x": hexfile.tensor("0", 1000, (4,), offset=8), "y": hexfile.tensor("0", 1000, (3,), offset=11),
             "z": hexfile.tensor("2", 2, (2,))}  # fmt: skip
    storages = {"0": b"\1" * 4000, "1": b"\2" * 100, "2": b"\3" * 8}
    path = tmp_path / "wasteful.pt"
    path.write_bytes(hexfile.torch_file(hexfile.pickled(hexfile.mapping(items)), storages))
    return path


@pytest.fixture
def refused(tmp_path: Path) -> tuple[Path, Path]:
    """A torch file that would run a command if anything of it were run, and the file that command makes."""
    canary = tmp_path / "canary"
    call = hexfile.name("posix", "system") + b"(" + hexfile.text(f"touch {canary}") + b"tR"
    items = {"w": hexfile.tensor("0", 4, (4,)), "bad": call, "worse": call, "cls": hexfile.name("my.own", "Model")}
    path = tmp_path / "refused.pt"
    path.write_bytes(hexfile.torch_file(hexfile.pickled(hexfile.mapping(items)), {"0": b"\0" * 16}))
    return path, canary


def broken(path: Path, fqn: str) -> int:
    """Change a byte of one tensor; return the offset of its record's bytes."""
    offset = tensorio.open(path).infos[fqn].chunks[0].extent.offset
    data = bytearray(path.read_bytes())
    data[offset + 5] ^= 1
    path.write_bytes(data)
    return offset


# -------------------------------------------------------------- inspect: tensors


def test_inspect_flat_has_dtype_shape_bytes_and_offset_of_every_tensor(layers: Path) -> None:
    text = output("inspect", "--flat", layers)
    with tensorio.open(layers) as checkpoint:
        order = []
        for fqn, info in checkpoint.infos.items():
            offset = info.chunks[0].extent.offset
            assert row(text, fqn) == [*f"{info.dtype} {list(info.shape)} {size(info.nbytes)} {offset}".split()]
            order.append(text.index(f"\n{fqn} "))
    assert len(order) == 14
    assert order == sorted(order)


def test_inspect_tree_folds_equal_layers_and_only_those(layers: Path) -> None:
    text = output("inspect", layers)
    assert row(text, "layers") == ["476", "B"]  # 5 x 20 and 19 elements of 4 bytes
    assert row(text, "{0-4}.attn") == ["400", "B", "x5"]
    assert row(text, "5.attn")[:2] == ["76", "B"]
    assert row(text, "head.weight")[:3] == ["float64", "[4,", "2]"]
    assert len(re.findall("weight +float", text)) == 4  # embed, head, one folded, one not


def test_inspect_tree_no_fold_shows_each(layers: Path) -> None:
    text = output("inspect", "--no-fold", layers)
    assert len(re.findall("weight +float", text)) == 8
    assert "{" not in text


def test_inspect_tree_folded_layers_show_the_first_ones_offset(layers: Path) -> None:
    lines = output("inspect", layers).splitlines()
    at = next(i for i, line in enumerate(lines) if "{0-4}" in line)
    with tensorio.open(layers) as checkpoint:
        offsets = {str(checkpoint.infos[f"layers.0.attn.{n}"].chunks[0].extent.offset) for n in ("bias", "weight")}
    assert {line.split()[-1] for line in lines[at + 1 : at + 3]} == offsets


def test_inspect_tree_keeps_two_tensors_whose_names_have_the_same_levels(tmp_path: Path) -> None:
    tensorio.save({"a.b": np.ones(3, F32), "a": {"b": np.ones(5, F32)}}, tmp_path / "x.pt")
    text = output("inspect", tmp_path / "x.pt")
    assert "[3]" in text
    assert "[5]" in text


def test_inspect_of_a_lone_tensor(tmp_path: Path) -> None:
    tensorio.save(np.ones((2, 3), F32), tmp_path / "x.pt")
    assert row(output("inspect", tmp_path / "x.pt"), "(the object itself)")[:3] == ["float32", "[2,", "3]"]


def test_inspect_of_a_file_without_tensors(tmp_path: Path) -> None:
    tensorio.save({}, tmp_path / "x.safetensors")
    assert "0 tensors\n" in output("inspect", tmp_path / "x.safetensors")


@pytest.mark.parametrize(("flat", "noun"), [(["--flat"], "tensors"), (["--no-fold"], "rows")])
def test_inspect_limit_cuts_the_list_and_says_by_how_much(tmp_path: Path, flat: list[str], noun: str) -> None:
    tensorio.save({f"n{i:03}": np.ones(i + 1, np.int8) for i in range(300)}, tmp_path / "x.safetensors")
    text = output("inspect", *flat, tmp_path / "x.safetensors")
    assert f"... and 100 more {noun}; --limit 0 shows all" in text
    assert "n199 " in text
    assert "n200 " not in text
    assert f"... and 293 more {noun}" in output("inspect", *flat, "--limit", 7, tmp_path / "x.safetensors")
    everything = output("inspect", *flat, "--limit", 0, tmp_path / "x.safetensors")
    assert "n299 " in everything
    assert "more" not in everything


def test_inspect_offset_of_a_deflated_record_is_not_one_of_the_file(tmp_path: Path) -> None:
    records = hexfile.torch_records(hexfile.pickled(hexfile.mapping({"w": hexfile.tensor()})), {"0": b"\0" * 16})
    for record in records:
        record.method = 8 if record.name.endswith("data/0") else 0  # type: ignore[arg-type]
    path = tmp_path / "x.pt"
    path.write_bytes(hexfile.zip_file(records))
    text = output("inspect", path)
    assert row(text, "w")[-4:] == ["-", "unpacked", "on", "use"]
    assert "16 B in 1 record, all of it reached" in text


# --------------------------------------------------------------- inspect: totals


def test_inspect_totals_by_dtype(layers: Path) -> None:
    text = output("inspect", layers)
    by_dtype = text[text.index("by dtype") :]
    assert row(by_dtype, "float32")[:5] == ["13", "159", "636", "B", "90.9%"]
    assert row(by_dtype, "float64")[:5] == ["1", "8", "64", "B", "9.1%"]


@pytest.mark.parametrize(
    ("depth", "modules"),
    [
        (1, {"embed": 1, "layers": 12, "head": 1}),
        (2, {"embed": 1, "layers.*": 12, "head": 1}),
        (3, {"embed": 1, "layers.*.attn": 12, "head": 1}),
        (9, {"embed": 1, "layers.*.attn": 12, "head": 1}),
    ],
)
def test_inspect_totals_by_module_to_a_depth(layers: Path, depth: int, modules: dict[str, int]) -> None:
    found = json.loads(output("inspect", "--json", "--depth", depth, layers))["by_module"]
    assert {name: share["tensors"] for name, share in found.items()} == modules
    text = output("inspect", "--depth", depth, layers).partition("by module")[2]
    for name, count in modules.items():
        assert row(text, name)[0] == str(count)


def test_inspect_totals_by_module_take_one_level_less_if_two_are_long(tmp_path: Path) -> None:
    tensorio.save({f"m.k{i}.w": np.ones(2) for i in range(30)}, tmp_path / "x.safetensors")
    assert list(json.loads(output("inspect", "--json", tmp_path / "x.safetensors"))["by_module"]) == ["m"]


# ------------------------------------------------------- inspect: sharing, storage


def test_inspect_names_tied_and_overlapping_tensors(mixed: Path) -> None:
    facts = json.loads(output("inspect", "--json", mixed))
    assert facts["tied"] == [["model.emb", "model.head", "model.t"]]
    assert facts["overlapping"] == [["model.a", "model.b"]]  # c begins where b ends
    text = output("inspect", mixed)
    assert "tied         model.emb = model.head = model.t" in text
    assert "overlapping  model.a, model.b\n" in text
    assert row(text, "t")[-3:] == ["=", "model.emb,", "strided"]
    assert row(text, "b")[-1] == "overlaps"
    assert row(text, "c")[-1].isdigit()


def test_inspect_does_not_fold_layers_that_share_bytes(tmp_path: Path) -> None:
    w, v = np.ones(4, F32), np.ones(4, F32)
    tensorio.save({"l": [{"w": w}, {"w": w}, {"w": v}, {"w": np.ones(4, F32)}]}, tmp_path / "x.pt")
    text = output("inspect", tmp_path / "x.pt")
    assert row(text, "0.w")[-1] == "tied"
    assert row(text, "1.w")[-2:] == ["=", "l.0.w"]
    assert row(text, "{2-3}.w")[-1] == "x2"


def test_inspect_counts_bytes_that_no_tensor_reaches(wasteful: Path) -> None:
    stored = json.loads(output("inspect", "--json", wasteful))["stored"]
    assert (stored["records"], stored["nbytes"]) == (3, 4108)
    assert stored["reached"] == 6 * 4 + 8  # x: elements 8-11, y: 11-13
    assert stored["unreached"] == 4108 - 32
    assert [(p["record"], p["nbytes"], p["reached"], p["fqns"]) for p in stored["partly"]] == [
        ("archive/data/0", 4000, 24, ["x", "y"]), ("archive/data/1", 100, 0, [])
    ]  # fmt: skip
    text = output("inspect", wasteful)
    assert "4.0 KiB (99.2%) of it is reached by no tensor" in text
    assert re.search(r"archive/data/0 +24 B of 3.9 KiB +x, y\n", text)
    assert re.search(r"archive/data/1 +0 B of 100 B +no tensor\n", text)


def test_inspect_counts_bytes_reached_by_nested_and_by_separate_views_once(tmp_path: Path) -> None:
    parts = {"outer": (10, 40), "inner": (15, 5), "after": (50, 10), "far": (90, 10)}  # offset, elements
    items = {name: hexfile.tensor("0", 100, (n,), offset=at) for name, (at, n) in parts.items()}
    path = tmp_path / "x.pt"
    path.write_bytes(hexfile.torch_file(hexfile.pickled(hexfile.mapping(items)), {"0": b"\1" * 400}))
    facts = json.loads(output("inspect", "--json", path))
    assert facts["stored"]["reached"] == 4 * (40 + 10 + 10)
    assert facts["stored"]["partly"][0]["reached"] == 4 * (40 + 10 + 10)
    assert facts["overlapping"] == [["outer", "inner"]]


def test_inspect_of_a_compact_file_has_nothing_unreached(tmp_path: Path) -> None:
    tensorio.save({"x": np.arange(1000, dtype=F32)[8:12]}, tmp_path / "x.pt", compact=True)
    text = output("inspect", tmp_path / "x.pt")
    assert "16 B in 1 record, all of it reached by tensors" in text
    assert "no tensor;" not in text


# ------------------------------------------------------- inspect: everything else


def test_inspect_shows_metadata(layers: Path) -> None:
    text = output("inspect", layers)
    assert row(text.partition("metadata")[2], "made") == ["here"]
    assert row(text.partition("metadata")[2], "lines") == ["a\\x0ab"]


def test_inspect_shows_other_values_in_short(mixed: Path) -> None:
    tree = output("inspect", mixed)
    flat = output("inspect", "--flat", mixed)
    for name, value in [("epoch", "3"), ("lr", "0.001"), ("betas", "[0.9, 0.999]"), ("name", "'adam'"),
                        ("params", "[0, 1, 2, 3, ...] 148 items")]:  # fmt: skip
        full = name if name == "epoch" else f"opt.{name}"
        assert row(tree, name) == value.split()
        assert row(flat.partition("other values")[2], full) == value.split()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"), (True, "True"), (-7, "-7"), (1.5, "1.5"), (float("inf"), "inf"), (1j, "1j"),
        ("a'b", "'a'b'"), ("x" * 100, "'" + "x" * 60 + "...'"), ("\x1b[31m", "'\\x1b[31m'"), (b"abc", "3 bytes"),
        (bytearray(2000), "2,000 bytes"), ([], "[]"), ((), "()"), ({}, "{}"), ([1, "b"], "[1, 'b']"),
        ((1, 2, 3, 4, 5), "(1, 2, 3, 4, ...) 5 items"), ([[1], []], "[[...], []]"), ({1}, "set {1}"),
        (frozenset(), "frozenset {}"), (Size((2, 3)), "Size [2, 3]"), (Device("cuda", 1), "device cuda:1"),
        (Device("cpu\x07"), "device cpu\\x07"), (TorchDType("bfloat16"), "dtype bfloat16"), ({"a": 1}, "dict of 1"),
        (Opaque("os\n", "system", ()), "<os\\x0a.system>"), (10**100, "1" + "0" * 59 + "..."),
        (np.zeros((2, 3), np.uint32), "numpy uint32 [2, 3]"), (object(), "<object>"),
    ],
)  # fmt: skip
def test_value_text(value: object, text: str) -> None:
    assert value_text(value) == text


def test_inspect_lists_refused_classes_and_runs_nothing(refused: tuple[Path, Path]) -> None:
    path, canary = refused
    for arguments in ([], ["--flat"], ["--json"]):
        text = output("inspect", *arguments, path)
        assert "posix.system" in text
    section = output("inspect", path).partition("refused:")[2]
    assert row(section, "posix.system") == ["x2"]
    assert row(section, "my.own.Model") == []
    facts = json.loads(output("inspect", "--json", path))
    assert facts["refused"] == {"posix.system": 2, "my.own.Model": 1}
    assert facts["others"][0] == {"path": ["bad"], "type": "refused", "text": "<posix.system>"}
    assert not canary.exists()
    subprocess.run(["sh", "-c", f"touch {canary}"], check=True)
    assert canary.exists()  # so the command in the file would have been seen


def test_inspect_shows_tensors_within_refused_objects(tmp_path: Path) -> None:
    module = hexfile.name("my.own", "Model") + b")\x81" + hexfile.mapping({"w": hexfile.tensor(), "n": b"K\x05"}) + b"b"
    path = tmp_path / "x.pt"
    path.write_bytes(hexfile.torch_file(hexfile.pickled(hexfile.mapping({"net": module})), {"0": b"\0" * 16}))
    text = output("inspect", path)
    assert row(text, "net") == ["<my.own.Model>"]
    assert row(text, "w")[:2] == ["float32", "[4]"]
    assert row(text, "n") == ["5"]
    assert "net.w" in output("inspect", "--flat", path)


def test_inspect_shows_at_most_so_many_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorio.cli._survey.VALUES_MAX", 10)
    tensorio.save({f"k{i}": i for i in range(25)} | {"w": np.ones(2)}, tmp_path / "x.pt")
    text = output("inspect", "--limit", 0, tmp_path / "x.pt")
    assert "... and 15 other values too many to show" in text
    assert row(text, "w")[0] == "float64"
    assert "... and 15 more" in output("inspect", "--flat", "--limit", 0, tmp_path / "x.pt")
    facts = json.loads(output("inspect", "--json", tmp_path / "x.pt"))
    assert (facts["values"], len(facts["others"])) == (25, 10)


def test_inspect_of_an_object_that_contains_itself_ends(tmp_path: Path) -> None:
    body = b"]q\x01(" + hexfile.tensor("0", 4, (4,)) + b"h\x01e"
    path = tmp_path / "x.pt"
    path.write_bytes(hexfile.torch_file(hexfile.pickled(body), {"0": b"\0" * 16}))
    assert row(output("inspect", path), "0")[0] == "float32"


def test_inspect_of_an_object_shared_a_millionfold_is_refused(tmp_path: Path) -> None:
    steps = (b"](" + 2 * (b"h" + bytes([i])) + b"eq" + bytes([i + 1]) + b"0" for i in range(30))
    body = b"]q\x000" + b"".join(steps) + b"h\x1e"
    path = tmp_path / "x.pt"
    path.write_bytes(hexfile.torch_file(hexfile.pickled(body)))
    result = run("inspect", path)
    assert result.exit_code == 1
    assert "shared so often" in result.stderr


# ------------------------------------------------------------------ inspect --json

KEYS = ["schema", "path", "format", "file_nbytes", "files", "metadata", "total", "by_dtype", "by_module", "stored",
        "tied", "overlapping", "refused", "values", "loading", "tensors", "others"]  # fmt: skip


def test_inspect_json_has_the_documented_keys_and_all_facts(mixed: Path) -> None:
    facts = json.loads(output("inspect", "--json", "--limit", 1, mixed))
    assert list(facts) == KEYS
    assert (facts["schema"], facts["format"], facts["path"]) == (1, "torch_zip", str(mixed))
    assert facts["file_nbytes"] == mixed.stat().st_size
    with tensorio.open(mixed) as checkpoint:
        infos = list(checkpoint.infos.values())
        assert [t["fqn"] for t in facts["tensors"]] == list(checkpoint)
    for found, info in zip(facts["tensors"], infos, strict=True):
        (chunk,), (want,) = found["chunks"], info.chunks
        assert (found["dtype"], tuple(found["shape"])) == (info.dtype, info.shape)
        assert (found["nbytes"], found["numel"], found["contiguous"]) == (info.nbytes, info.numel, info.contiguous)
        assert (chunk["storage"], chunk["offset"], chunk["nbytes"]) == want.extent
        assert (tuple(chunk["shape"]), tuple(chunk["strides"])) == (want.shape, want.strides)
    assert facts["total"] == {"tensors": 6, "numel": 3 * 64 + 600, "nbytes": 4 * (3 * 64 + 600)}
    assert facts["others"][0] == {"path": ["opt", "lr"], "type": "float", "text": "0.001"}


def test_inspect_help_documents_every_key_of_the_json() -> None:
    text = output("inspect", "--help")
    for key in KEYS:
        assert key in text


def test_inspect_json_is_ascii_whatever_the_names(nasty: Path) -> None:
    text = output("inspect", "--json", nasty)
    assert text.isascii()
    assert [t["fqn"] for t in json.loads(text)["tensors"]] == [*NASTY]


# ------------------------------------------------------------------------ escapes

NASTY = {
    "esc\x1b[31mred": "esc\\x1b[31mred", "osc\x1b]0;title\x07": "osc\\x1b]0;title\\x07", "csi\x9b2J": "csi\\x9b2J",
    "bidi\u202eevil": "bidi\\u202eevil", "isolate\u2066x": "isolate\\u2066x", "hebrew\u05d0": "hebrew\\u05d0",
    "line\nbreak\r": "line\\x0abreak\\x0d", "tab\t": "tab\\x09", "sep\u2028": "sep\\u2028", "zero\u200bwidth":
    "zero\\u200bwidth", "back\\x1b": "back\\\\x1b", "del\x7f": "del\\x7f", "nul\x00": "nul\\x00",
    "tag\U000e0041": "tag\\U000e0041", "[bold]markup[/bold]": "[bold]markup[/bold]", "[/]": "[/]",
    ":smile:": ":smile:", "\u540d\u524d": "\u540d\u524d", "na\u00efve": "na\u00efve",
}  # fmt: skip


@pytest.fixture
def nasty(tmp_path: Path) -> Path:
    """A file whose names and notes try to get at the terminal."""
    header: dict[str, Any] = {"__metadata__": {"note\x1b[1m": "v\x1b[2J\u202e"}}
    header |= {name: hexfile.st_entry("U8", [1], i, i + 1) for i, name in enumerate(NASTY)}
    path = tmp_path / "nasty\x1b[5m.safetensors"
    path.write_bytes(hexfile.st_file(header, bytes(len(NASTY))))
    return path


def assert_harmless(text: str) -> None:
    """No character moves the cursor, changes a colour or turns the direction."""
    bad = [c for c in text if (c != "\n" and not c.isprintable()) or c == "\u05d0"]
    assert bad == []


@pytest.mark.parametrize("arguments", [["inspect"], ["inspect", "--flat"], ["verify"]])
def test_text_of_files_does_not_reach_the_terminal(nasty: Path, arguments: list[str]) -> None:
    text = output(*arguments, nasty)
    assert_harmless(text)
    assert "nasty\\x1b[5m.safetensors" in text
    if arguments[0] == "inspect":
        for want in NASTY.values():
            assert want in text
        assert "note\\x1b[1m  v\\x1b[2J\\u202e" in text


def test_text_of_files_does_not_reach_the_terminal_from_convert(nasty: Path, tmp_path: Path) -> None:
    text = output("convert", nasty, tmp_path / "out\x1b[7m.pt")
    assert_harmless(text)
    assert "note\\x1b[1m" in text


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_text_of_files_does_not_reach_the_terminal_in_errors(tmp_path: Path, command: str) -> None:
    path = tmp_path / "bad\x1b[5m.safetensors"
    path.write_bytes(hexfile.st_file({"x\x1b[31m": hexfile.st_entry("U8", [2], 0, 1)}, b"1"))
    missing = tmp_path / "none\x1b[5m"
    for where, code in [(path, 1), (missing, 2)]:
        result = run(command, where)
        assert result.exit_code == code
        assert_harmless(result.output)
        assert result.stderr.startswith("tensorio: ")
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(("text", "want"), NASTY.items())
def test_shown(text: str, want: str) -> None:
    assert shown(text) == want


def test_shown_keeps_apart_what_is_different() -> None:
    assert shown("\x1b") != shown("\\x1b")
    assert shown("\udc80") == "\\udc80"


def test_shown_cuts_before_it_escapes() -> None:
    assert shown("\x1b" * 10**6, 3) == "\\x1b" * 3 + "..."


# ---------------------------------------------------------------- numbers, columns


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (1023 << 10, "1.0 MiB"), (1 << 20, "1.0 MiB"),
     (100 << 30, "100.0 GiB"), (1 << 62, "4096.0 PiB")],
)  # fmt: skip
def test_size(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0"), (9999, "9999"), (10_000, "10 K"), (6_738_415_616, "6.74 G")])
def test_elements(count: int, text: str) -> None:
    assert elements(count) == text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), ("1b", 1), ("1KiB", 1024), ("1kb", 1000), ("1.5 MiB", 1536 << 10), ("2g", 2 * 10**9),
     ("1TiB", 1 << 40)],
)  # fmt: skip
def test_parse_size(text: str, nbytes: int) -> None:
    assert parse_size(None, None, text) == nbytes  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1XB", "1e9", "9" * 30, "1 2"])
def test_demo_size_that_is_none_is_wrong_use(text: str) -> None:
    result = run("demo", f"--size={text}")
    assert result.exit_code == 2
    assert "is no size" in result.stderr


def test_shape_text_of_very_many_dimensions_is_cut() -> None:
    assert shape_text((3, 4)) == "[3, 4]"
    assert len(shape_text((1234,) * 64)) <= 36


@pytest.mark.parametrize("width", range(1, 30))
@pytest.mark.parametrize("text", ["model.layers.0.attn.weight", "\u540d\u524d\u540d\u524d\u540d\u524d\u540d\u524d"])
def test_cut_middle_never_exceeds_its_width(text: str, width: int) -> None:
    from rich.cells import cell_len

    cut = cut_middle(text, width)
    assert cell_len(cut) <= width
    if width > 12 and cut != text:
        assert cut[0] == text[0]
        assert cut[-1] == text[-1]
        assert "..." in cut


def drawn(sheet: Sheet, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(sheet)
    return out.getvalue().splitlines()


def test_sheet_lines_up_columns_and_cuts_only_the_first() -> None:
    sheet = Sheet("<>")
    sheet.add("a" * 50, "1")
    sheet.add(Cell("b", "bold", "+- "), "1000")
    assert drawn(sheet, 100) == ["a" * 50 + "     1", "+- b" + " " * 46 + "  1000"]
    assert drawn(sheet, 40) == [f"{'a' * 11}...{'a' * 20}     1", "+- b" + " " * 30 + "  1000"]


def test_sheet_last_cell_of_a_short_row_runs_on() -> None:
    sheet = Sheet("<<<")
    sheet.add("name", "float32", "[1]")
    sheet.add("x", "a text that is longer than its column")
    assert drawn(sheet, 80)[1] == "x     a text that is longer than its column"
    assert all(len(line) <= 20 for line in drawn(sheet, 20))


def test_sheet_prose_wraps_and_loses_nothing() -> None:
    sheet = Sheet("<<")
    sheet.add("  " + "word " * 20 + "x" * 50)
    sheet.add("name", "1")
    *prose, last = drawn(sheet, 40)
    assert last == "name  1"
    assert all(len(line) <= 40 for line in prose)
    assert all(line.startswith("    ") for line in prose[1:])
    assert "".join(prose).replace(" ", "") == "word" * 20 + "x" * 50


def test_sheet_long_name_in_a_pipe_pushes_only_its_own_line() -> None:
    sheet = Sheet("<>")
    sheet.add("x" * 200, "1")
    sheet.add("y", "2")
    assert drawn(sheet, 1 << 20) == ["x" * 200 + "  1", "y  2"]


# ------------------------------------------------------------------- verify, convert


def test_verify_of_good_files(mixed: Path, layers: Path) -> None:
    text = output("verify", mixed, layers)
    assert f"{mixed}  ok\n" in text
    assert re.search(r" in \d+ records checked, all right\n", text)
    assert f"{layers}  ok as far as can be told\n" in text
    assert "not covered: 700 B, all payload: no checksum in the file, no manifest beside it" in text


def test_verify_names_each_bad_record_and_its_offset(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    tensorio.save({"a": np.ones(5000), "b": np.ones(5000), "c": np.ones(5000)}, path)
    offsets = broken(path, "a"), broken(path, "c")
    result = run("verify", path)
    assert result.exit_code == 1
    assert "BAD: 2 records" in result.stdout
    for key, offset in zip("02", offsets, strict=True):
        assert f"bad record x/data/{key} at byte {offset}: CRC-32" in result.stdout
    assert "x/data/1" not in result.stdout
    assert "all right" not in result.stdout


def test_verify_goes_on_behind_a_bad_file_and_ends_with_the_worst_code(mixed: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.pt"
    cut.write_bytes(mixed.read_bytes()[:-50])
    result = run("verify", cut, mixed)
    assert result.exit_code == 1
    assert f"{mixed}  ok\n" in result.stdout
    assert re.fullmatch(r"tensorio: .*cut\.pt.*\n", result.stderr)
    assert run("verify", cut, tmp_path / "none", mixed).exit_code == 2


def test_verify_of_a_file_without_payload(tmp_path: Path) -> None:
    tensorio.save({}, tmp_path / "x.safetensors")
    assert "not covered: 0 B" in output("verify", tmp_path / "x.safetensors")


def test_convert_writes_the_tensors_and_lists_what_is_dropped(mixed: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    text = output("convert", mixed, target)
    with tensorio.open(mixed) as a, tensorio.open(target) as b:
        assert set(a) == set(b)
        for fqn in a:
            assert np.array_equal(a[fqn], b[fqn])
    assert "dropped, since safetensors can't hold them: 153 values" in text
    assert row(text, "opt.params.*") == ["x148"]
    assert row(text, "opt.lr") == []
    assert row(text, "epoch") == []


def test_convert_says_if_nothing_is_dropped(tmp_path: Path) -> None:
    tensorio.save({"w": np.ones(3)}, tmp_path / "a.safetensors")
    assert "nothing was dropped" in output("convert", tmp_path / "a.safetensors", tmp_path / "b.pt")
    assert tensorio.identify(tmp_path / "b.pt") == "torch_zip"


def test_convert_format_goes_before_the_suffix(layers: Path, tmp_path: Path) -> None:
    output("convert", "--format", "torch_zip", layers, tmp_path / "b.safetensors")
    assert tensorio.identify(tmp_path / "b.safetensors") == "torch_zip"


@pytest.mark.parametrize("target", ["x.xyz", "x"])
def test_convert_to_an_unknown_suffix_is_wrong_use(layers: Path, tmp_path: Path, target: str) -> None:
    result = run("convert", layers, tmp_path / target)
    assert result.exit_code == 2
    assert "suffix" in result.stderr
    assert not (tmp_path / target).exists()


@pytest.mark.parametrize("command", ["convert", "merge", "strip", "recover"])
def test_target_without_a_format_is_told_how_to_name_it(command: str, layers: Path, tmp_path: Path) -> None:
    output = ["-o"] if command == "merge" else []
    result = run(command, layers, *output, tmp_path / "x.foo")
    assert result.exit_code == 2
    assert f"Invalid value for {'--output' if output else 'DST'}" in result.stderr
    assert "the suffix '.foo' names no format" in result.stderr
    assert result.stderr.rstrip().endswith("or give --format")


def test_convert_refuses_classes_that_are_not_allowed_unless_asked_to_keep_them(
    refused: tuple[Path, Path], tmp_path: Path
) -> None:
    path, canary = refused
    result = run("convert", path, tmp_path / "x.safetensors")
    assert result.exit_code == 1
    assert "posix.system" in result.stderr
    assert "--unknown opaque" in result.stderr
    assert not (tmp_path / "x.safetensors").exists()
    output("convert", "--unknown", "opaque", path, tmp_path / "x.safetensors")
    assert list(tensorio.open(tmp_path / "x.safetensors")) == ["w"]
    assert not canary.exists()


# ------------------------------------------------------------------------ exit codes


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["inspect", "GOOD"], 0), (["verify", "GOOD"], 0), (["--help"], 0), (["--version"], 0),
        (["inspect", "BAD"], 1), (["verify", "BAD"], 1), (["convert", "BAD", "out.pt"], 1), (["inspect", "FIFO"], 1),
        (["inspect", "NONE"], 2), (["verify", "NONE"], 2), (["convert", "NONE", "out.pt"], 2), (["inspect", "."], 2),
        (["convert", "GOOD", "no/folder/out.pt"], 2), (["inspect"], 2), (["inspect", "--nonsense", "GOOD"], 2),
        (["nonsense"], 2), (["inspect", "--limit", "-1", "GOOD"], 2), (["convert", "--format", "gif", "GOOD", "x"], 2),
        (["demo", "--workers", "0"], 2), (["demo", "--size", "1KiB"], 2),
    ],
)  # fmt: skip
def test_exit_code_without_traceback(layers: Path, arguments: list[str], code: int) -> None:
    folder = layers.parent
    (folder / "BAD").write_bytes(b"<!doctype html>")
    os.mkfifo(folder / "FIFO")
    layers.rename(folder / "GOOD")
    done = process(*arguments, cwd=folder)
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr
    assert code == 0 or done.stderr
    assert code != 1 or re.fullmatch(r"tensorio: .+\n", done.stderr)
    assert not [p for p in folder.iterdir() if p.name.startswith(("out", "."))]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, ""), (MemoryError(), 2, "tensorio: out of memory\n"),
        (PermissionError(errno.EACCES, "Permission denied", "x\x1b"), 2, "tensorio: Permission denied: x\\x1b\n"),
        (tensorio.LimitError("too much", path="f"), 1, "tensorio: too much (file 'f')\n"),
    ],
)  # fmt: skip
def test_exit_code_of_an_exception(
    layers: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(tensorio, "open", fail)
    result = run("inspect", layers)
    assert (result.exit_code, result.stderr) == (code, said)


def test_an_unexpected_exception_is_not_hidden(layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(tensorio, "open", fail)
    assert isinstance(run("inspect", layers).exception, ZeroDivisionError)


@pytest.mark.parametrize("arguments", [["--json"], ["--flat", "--limit", "0"]])
@pytest.mark.parametrize("tensors", [1, 5000])
def test_closed_pipe_is_quiet(tmp_path: Path, arguments: list[str], tensors: int) -> None:
    tensorio.save({f"n{i}": np.ones(1) for i in range(tensors)}, tmp_path / "x.safetensors")
    command = [sys.executable, "-m", "tensorio", "inspect", *arguments, str(tmp_path / "x.safetensors")]
    reader, writer = os.pipe()
    with subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, env=ENVIRONMENT) as child:
        assert child.stderr is not None
        os.close(writer)
        if tensors > 1:
            os.read(reader, 100)
        os.close(reader)
        assert child.stderr.read() == b""
        assert child.wait(60) == 141


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_missing_extra_is_named_in_one_line(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from tensorio.__main__ import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.returncode == 2
    assert done.stderr == f"tensorio: the command line needs {missing}: pip install 'tensorio[cli]'\n"
    assert done.stdout == ""


# ------------------------------------------------------------------- pipe and terminal


def on_terminal(columns: int, *arguments: object) -> str:
    """What the tool prints on a terminal of some width."""
    pid, fd = pty.fork()
    if pid == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        command = [sys.executable, "-m", "tensorio", *map(str, arguments)]
        os.execve(sys.executable, command, ENVIRONMENT | {"TERM": "xterm-256color"})
    text = b"".join(_pieces(fd)).decode().replace("\r\n", "\n")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, text
    return text


def _pieces(fd: int) -> Iterator[bytes]:
    try:
        while piece := os.read(fd, 1 << 16):
            yield piece
    except OSError:
        pass  # Linux's way to say that the other side is closed
    finally:
        os.close(fd)


COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("arguments", [[], ["--flat"], ["--no-fold"]])
def test_terminal_lines_fit_and_have_colours(tmp_path: Path, columns: int, arguments: list[str]) -> None:
    state = {f"model.decoder.layers.{i}.self_attention.output_projection.weight": np.ones((64, 64, 3, 3), F32)
             for i in range(12)}  # fmt: skip
    path = tmp_path / f"{'long' * 20}.safetensors"
    tensorio.save(state, path, metadata={"key": "value " * 40})
    text = on_terminal(columns, "inspect", *arguments, path)
    assert COLOURS.search(text)
    lines = COLOURS.sub("", text).splitlines()
    assert [line for line in lines if len(line) > columns] == []
    assert any(line.count("float32") and line.rstrip().endswith(tuple("0123456789")) for line in lines)


def test_pipe_has_no_codes_and_cuts_nothing(tmp_path: Path) -> None:
    name = "layer." * 30 + "weight"
    tensorio.save({name: np.ones(3)}, tmp_path / "x.safetensors")
    done = process("inspect", "--flat", tmp_path / "x.safetensors", env={"COLUMNS": "40"})
    assert "\x1b" not in done.stdout
    assert name in done.stdout


def test_output_in_ascii_if_the_terminal_has_nothing_else(layers: Path) -> None:
    done = process("inspect", layers, env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "|- embed.weight" in done.stdout
    assert "\\u" not in done.stdout


def test_progress_bar_goes_to_the_terminal_and_not_into_a_pipe(mixed: Path, tmp_path: Path) -> None:
    assert process("verify", mixed).stderr == ""
    assert process("convert", mixed, tmp_path / "x.safetensors").stderr == ""
    assert "/s" in on_terminal(100, "verify", mixed)


# ------------------------------------------------------------------------------ cost

COST = """
import atexit, runpy, sys
def tell():
    peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print("cost", peak, *[m for m in ("numpy", "torch", "ml_dtypes") if m in sys.modules], file=sys.stderr)
atexit.register(tell)
sys.argv[0] = "tensorio"
runpy.run_module("tensorio", run_name="__main__")
"""

GIB = 1 << 30


def sparse_safetensors(path: Path, count: int, nbytes: int) -> None:
    """A file of `count` tensors of `nbytes` bytes, all holes."""
    header = {
        f"layers.{i}.weight": hexfile.st_entry("BF16", [nbytes // 2], i * nbytes, (i + 1) * nbytes)
        for i in range(count)
    }
    with open(path, "wb") as f:
        f.write(hexfile.st_file(header))
        f.truncate(f.tell() + count * nbytes)


def sparse_torch(path: Path, count: int, nbytes: int) -> None:
    """A torch zip of `count` storages of `nbytes` bytes, all holes (zip64: APPNOTE 4.5.3)."""
    items = {
        f"layers.{i}.weight": hexfile.tensor(str(i), nbytes // 2, (nbytes // 2,), cls="BFloat16Storage")
        for i in range(count)
    }
    records = [("data.pkl", hexfile.pickled(hexfile.mapping(items)), 0)]
    records += [(f"data/{i}", b"", nbytes) for i in range(count)] + [("version", b"3\n", 0)]
    central = b""
    with open(path, "wb") as f:
        for short, data, hole in records:
            name, at, length = f"archive/{short}".encode(), f.tell(), len(data) + hole
            crc = zlib.crc32(data) if data else 0x12345678  # nobody looks: it would take reading 256 MiB
            f.write(struct.pack("<IHHHHHIIIHH", 0x04034B50, 0, 8, 0, 0, 0, 0, 0, 0, len(name), 0) + name + data)
            f.seek(hole, os.SEEK_CUR)
            f.write(struct.pack("<IIQQ", 0x08074B50, crc, length, length))
            extra = struct.pack("<HHQQQ", 1, 24, length, length, at)
            central += struct.pack("<IHHHHHHIII", 0x02014B50, 0, 0, 8, 0, 0, 0, crc, 0xFFFFFFFF, 0xFFFFFFFF)
            central += struct.pack("<HHHHHII", len(name), len(extra), 0, 0, 0, 0, 0xFFFFFFFF) + name + extra
        start, n = f.tell(), len(records)
        f.write(central)
        end = f.tell()
        f.write(struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, n, n, len(central), start))
        f.write(struct.pack("<IIQI", 0x07064B50, 0, end, 1))
        f.write(struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0))


def cost(*arguments: object) -> tuple[str, float, int, list[str]]:
    """Output, seconds (best of three), peak memory in bytes, and the heavy packages that were imported."""
    best, done = 1e9, None
    for _ in range(3):
        start = time.perf_counter()
        command = [sys.executable, "-c", COST, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=ENVIRONMENT)
        best = min(best, time.perf_counter() - start)
    assert done is not None
    found = re.fullmatch(r"cost (\d+)(.*)\n", done.stderr)
    assert found is not None, done.stderr
    return done.stdout, best, int(found[1]) * 1024, found[2].split()


@pytest.mark.plain_build
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read from /proc")
@pytest.mark.parametrize("mode", [[], ["--flat"], ["--json"]], ids=["tree", "flat", "json"])
@pytest.mark.parametrize("make", [sparse_safetensors, sparse_torch])
def test_inspect_of_100_gib_costs_nothing(
    tmp_path: Path, make: Callable[[Path, int, int], None], mode: list[str]
) -> None:
    path = tmp_path / "sparse"
    try:
        make(path, 400, GIB // 4)
    except OSError as error:
        pytest.skip(f"no sparse file of 100 GiB here: {error}")
    text, seconds, peak, heavy = cost("inspect", *mode, path)
    assert heavy == []
    assert peak < 60 << 20
    assert seconds < 20  # it takes 0.15 s; the bound is for busy machines, and to read it all would take longer
    if mode == []:
        assert "100.0 GiB in 400 records, all of it reached by tensors" in text
        assert row(text, "layers.{0-399}.weight")[-1] == "x400"


def test_inspect_of_100000_tensors_stays_readable(tmp_path: Path) -> None:
    path = tmp_path / "many.safetensors"
    path.write_bytes(cases.safetensors_bytes({f"block{i}.w": np.ones(1, np.uint8) for i in range(100_000)}))
    start = time.perf_counter()
    text = output("inspect", path)
    assert time.perf_counter() - start < 60  # it takes 3 s
    assert "... and 199,800 more rows" in text or "... and 99,800 more rows" in text
    assert text.count("\n") < 300


def test_interrupt_while_modules_are_imported_has_no_traceback() -> None:
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'tensorio.cli.shard': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from tensorio.__main__ import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "{src}", "{dst}.pt", "--include", "none.*"], "--include 'none.*' fits none of 1 tensors"),
        (["convert", "{src}", "{dst}.zzz"], "or give --format\n"),
        (["convert", "{src}", "{dst}", "--max-shard-size", "lots"], "expected --max-shard-size to be a number"),
        (
            ["strip", "{src}", "{dst}.pt", "--exclude", "w"],
            "tensorio: --include and --exclude leave no tensor",
        ),
        (["strip", "{src}", "{dst}.zzz"], "or give --format\n"),
        (
            ["merge", "{src}", "{src}", "-o", "{dst}.pt", "--on-conflict", "error"],
            "; --on-conflict 'replace' or 'keep'",
        ),
        (["merge", "{src}", "-o", "{dst}.zzz"], "or give --format\n"),
    ],
    ids=lambda value: value[0] + value[-1] if isinstance(value, list) else "",
)
def test_messages_call_options_what_they_are_called_on_the_command_line(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    src = tmp_path / "src.safetensors"
    tensorio.save({"w": np.ones(3)}, src)
    result = run(*(argument.format(src=src, dst=tmp_path / "dst") for argument in arguments))
    assert result.exit_code in (1, 2)
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == [src]
