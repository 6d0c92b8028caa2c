"""Files that nobody here wrote, against what the reference tools say is in them.

The oracle files were made by torch 2.13 and safetensors 0.8; see the corpus' README.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import tensorio
from tensorio.tensors import PARAMETER, REQUIRES_GRAD

ENTRIES = [e for e in cases.corpus_entries() if e["format"] in ("torch_zip", "safetensors")]
OTHERS = [e for e in cases.corpus_entries() if e not in ENTRIES]

# What the pickles of plain weights name; whatever else a file names must be refused, all of it.
HARMLESS = {
    "collections.OrderedDict", "__builtin__.set", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter",
    "torch.DoubleStorage", "torch.FloatStorage", "torch.LongStorage", "torch.BoolStorage",
}  # fmt: skip

# What the reference refuses, and why.
REFUSED = {"las7_weight_inspect--tiny_safetensors": (tensorio.HeaderError, "bytes behind the last tensor")}


def by_id(entries: list[dict[str, Any]]) -> Any:
    """Parameters with readable ids; one skipped parameter where there is no corpus."""
    if not entries:
        return [pytest.param(None, marks=pytest.mark.skip(reason="no shared corpus"))]
    return [pytest.param(entry, id=entry["id"]) for entry in entries]


def whole_module(entry: dict[str, Any]) -> bool:
    return bool(set(entry["globals"]) - HARMLESS - {g for g in entry["globals"] if _is_new_dtype(g)})


def _is_new_dtype(name: str) -> bool:
    return name.startswith("torch.") and (
        name.removeprefix("torch.") in ("complex32", "uint16", "uint32", "uint64")
        or name.startswith(("torch.float8", "torch._utils._rebuild_tensor_v3", "torch.storage.UntypedStorage"))
        or name.removeprefix("torch.").removesuffix("Storage") in (
            "BFloat16", "Half", "Byte", "Char", "Short", "Int", "ComplexFloat", "ComplexDouble")
    )  # fmt: skip


PLAIN = [e for e in ENTRIES if e["id"] not in REFUSED and not whole_module(e)]
MODULES = [e for e in ENTRIES if whole_module(e)]


def oracle_of(corpus: Path, entry: dict[str, Any]) -> dict[str, Any]:
    oracle: dict[str, Any] = json.loads((corpus / entry["oracle"]).read_text())
    return oracle


def digest(array: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def object_path(tree: Any, path: tuple[object, ...]) -> tuple[object, ...]:
    """The keys of a path as the reference's inert stubs show them: an object's state has no key of its own."""
    out: list[object] = []
    for part in path:
        if isinstance(tree, tensorio.Opaque):
            tree = getattr(tree, str(part))
            if part != "state":
                out.append(part)
        else:
            tree = tree[part]
            out.append(part)
    return tuple(out)


def walked(tree: Any, path: list[Any]) -> Any:
    """What a path of the oracle leads to; ``@__dict__`` stands for the attributes of a dict."""
    for part in path:
        tree = vars(tree) if part == "@__dict__" else tree[part]
    return tree


def check_tensors(checkpoint: tensorio.Checkpoint, wanted: list[dict[str, Any]]) -> None:
    """Every tensor of the oracle is there, under its path, with its type, shape, strides and bytes, and no other."""
    tree = checkpoint.tree()
    by_path = {object_path(tree, path): name for name, path in checkpoint.paths.items()}
    assert set(by_path) == {tuple(t["path"]) for t in wanted}
    starts: dict[tuple[int, int], int] = {}
    for tensor in wanted:
        name = by_path[tuple(tensor["path"])]
        array, info = checkpoint[name], checkpoint.infos[name]
        where = f"tensor {name!r}"
        assert info.dtype == tensor["dtype"], where
        assert info.shape == array.shape == tuple(tensor["shape"]), where
        itemsize = array.itemsize
        if array.size:
            assert [s // itemsize for s in array.strides] == tensor["stride"], where
        assert digest(array) == tensor["sha256"], where
        assert bool(info.flags & REQUIRES_GRAD) == tensor["requires_grad"], where
        assert bool(info.flags & PARAMETER) == (tensor["cls"] == "Parameter"), where
        if array.size and checkpoint.format == "torch_zip":
            extent = info.chunks[0].extent
            place = (extent.storage, extent.offset - tensor["offset"] * itemsize)
            assert starts.setdefault(place, tensor["storage"]) == tensor["storage"], f"{where} shares another storage"
    assert len(set(starts.values())) == len(starts), "one storage of the file is in two places"


@pytest.mark.parametrize("entry", by_id(PLAIN))
def test_corpus_file_equals_oracle(corpus: Path, entry: dict[str, Any]) -> None:
    oracle = oracle_of(corpus, entry)
    with tensorio.open(corpus / entry["path"]) as checkpoint:
        assert checkpoint.format == entry["format"]
        check_tensors(checkpoint, oracle["tree"]["tensors"])
        assert checkpoint.metadata == (oracle.get("metadata") or {})


@pytest.mark.parametrize("entry", by_id(PLAIN))
def test_corpus_file_loads_the_same_in_every_mode(corpus: Path, entry: dict[str, Any]) -> None:
    path = corpus / entry["path"]
    with tensorio.open(path) as checkpoint:
        want = {name: digest(array) for name, array in checkpoint.items()}
    modes: list[tuple[Any, dict[str, Any]]] = [
        (path, {"mmap": False}),
        (path.read_bytes(), {}),
        (path, {"writable": True}),
    ]
    for source, options in modes:
        with tensorio.open(source, **options) as other:
            assert {name: digest(array) for name, array in other.items()} == want


@pytest.mark.parametrize("entry", by_id([e for e in PLAIN if e["format"] == "torch_zip"]))
def test_corpus_plain_values_equal_oracle(corpus: Path, entry: dict[str, Any]) -> None:
    tree = tensorio.load(corpus / entry["path"])
    for leaf in oracle_of(corpus, entry)["tree"]["leaves"]:
        if leaf["kind"] not in ("int", "float", "bool", "str", "NoneType") or any(
            str(part).startswith("repr:") for part in leaf["path"]
        ):
            continue
        value = walked(tree, leaf["path"])
        assert type(value).__name__ == leaf["kind"], leaf["path"]
        if leaf["kind"] == "str":
            assert len(value) == leaf["len"], leaf["path"]
            assert value.startswith(leaf["repr"][:40]), leaf["path"]
        else:
            assert repr(value) == leaf["repr"], leaf["path"]


@pytest.mark.parametrize("entry", by_id([e for e in PLAIN if e["format"] == "torch_zip"]))
def test_corpus_container_types_equal_oracle(corpus: Path, entry: dict[str, Any]) -> None:
    tree = tensorio.load(corpus / entry["path"])
    for path, kind, length in oracle_of(corpus, entry)["tree"]["containers"]:
        if kind not in ("dict", "OrderedDict", "list", "tuple") or any(str(p).startswith("repr:") for p in path):
            continue
        value = walked(tree, path)
        assert (type(value).__name__, len(value)) == (kind, length), path


@pytest.mark.parametrize("entry", by_id(PLAIN))
def test_corpus_checksums_hold(corpus: Path, entry: dict[str, Any]) -> None:
    report = tensorio.verify(corpus / entry["path"])
    assert report.ok, str(report)
    if entry["format"] == "torch_zip" and all(
        int(r["crc"], 16) for r in oracle_of(corpus, entry)["records"] if r["size"]
    ):
        assert report.unchecked == 0
        assert report.checked == sum(r["size"] for r in oracle_of(corpus, entry)["records"])


@pytest.mark.parametrize("entry", by_id([e for e in ENTRIES if e["id"] in REFUSED]))
def test_corpus_file_refused_by_reference_is_refused_with_the_rule(corpus: Path, entry: dict[str, Any]) -> None:
    kind, words = REFUSED[entry["id"]]
    assert not any(attempt["ok"] for attempt in oracle_of(corpus, entry)["attempts"])
    for source in (corpus / entry["path"], (corpus / entry["path"]).read_bytes()):
        with pytest.raises(kind, match=words):
            tensorio.open(source)


@pytest.mark.parametrize("entry", by_id(MODULES))
def test_corpus_whole_module_is_refused_with_all_its_names(corpus: Path, entry: dict[str, Any]) -> None:
    with pytest.raises(tensorio.UnsafePickleError) as caught:
        tensorio.load(corpus / entry["path"])
    assert set(caught.value.globals) == set(entry["globals"]) - HARMLESS
    assert len(set(caught.value.globals)) == len(caught.value.globals)
    assert "unknown='opaque'" in str(caught.value)


@pytest.mark.parametrize("entry", by_id(MODULES))
def test_corpus_whole_module_opens_as_inert_data(corpus: Path, entry: dict[str, Any]) -> None:
    with tensorio.open(corpus / entry["path"], unknown="opaque") as checkpoint:
        check_tensors(checkpoint, oracle_of(corpus, entry)["tree"]["tensors"])


@pytest.mark.parametrize("entry", by_id(OTHERS))
def test_corpus_file_of_another_format_is_refused_with_words(corpus: Path, entry: dict[str, Any]) -> None:
    with pytest.raises((tensorio.FormatError, tensorio.UnsupportedError, tensorio.UnsafePickleError)) as caught:
        tensorio.load(corpus / entry["path"])
    message = str(caught.value)
    assert 20 < len(message) <= 500
    assert message.isprintable()
    assert Path(entry["path"]).name[:20] in message
