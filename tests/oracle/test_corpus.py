"""Files that nobody here wrote, against what the reference tools say is in them.

The oracle files were made by torch 2.13 and safetensors 0.8; see the corpus' README.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pickletools
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import tensorio
from tensorio.allowlist import ALLOWED
from tensorio.kinds import QuantizedTensor
from tensorio.tensors import PARAMETER, REQUIRES_GRAD

READ = ("torch_zip", "safetensors", "torch_legacy", "torch_tar", "pickle")
ELSEWHERE = ("pt2_zip", "sb3_zip")  # archives of checkpoints: see test_archives.py
ENTRIES = [e for e in cases.corpus_entries() if e["format"] in READ]
OTHERS = [e for e in cases.corpus_entries() if e["format"] not in READ + ELSEWHERE]

# What the reference refuses, and why.
REFUSED = {"las7_weight_inspect--tiny_safetensors": (tensorio.HeaderError, "bytes behind the last tensor")}


def by_id(entries: list[dict[str, Any]]) -> Any:
    """Parameters with readable ids; one skipped parameter where there is no corpus."""
    if not entries:
        return [pytest.param(None, marks=pytest.mark.skip(reason="no shared corpus"))]
    return [pytest.param(entry, id=entry["id"]) for entry in entries]


def oracle_of(corpus: Path, entry: dict[str, Any]) -> dict[str, Any]:
    oracle: dict[str, Any] = json.loads((corpus / entry["oracle"]).read_text())
    return oracle


def unknown_names(entry: dict[str, Any]) -> set[str]:
    """What a file names besides what is known to be harmless."""
    return {name for name in entry["globals"] if tuple(name.rsplit(".", 1)) not in ALLOWED}


def has_oracle(entry: dict[str, Any]) -> bool:
    """Whether the reference could read the file at all; the others have tests of their own below."""
    shared = cases.shared_folder()
    return shared is not None and "tree" in oracle_of(shared / "corpus", entry)


PLAIN = [e for e in ENTRIES if has_oracle(e) and not unknown_names(e)]
MODULES = [e for e in ENTRIES if unknown_names(e)]


def digest(array: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def object_path(tree: Any, path: tuple[object, ...]) -> tuple[object, ...]:
    """The keys of a path as the reference shows them: an inert object's state has no key of its own."""
    out: list[object] = []
    for part in path:
        if not (isinstance(tree, tensorio.Opaque) and part == "state"):
            out.append(part if isinstance(part, str | int) else f"repr:{part!r}")
        tree = tree[part] if isinstance(tree, dict | list | tuple) else getattr(tree, str(part))
    return tuple(out)


def walked(tree: Any, path: list[Any]) -> Any:
    """What a path of the oracle leads to; ``@__dict__`` stands for the attributes of a dict."""
    for part in path:
        if part == "@__dict__":
            tree = vars(tree)
        else:
            tree = tree[part] if isinstance(tree, dict | list | tuple) else vars(tree)[part]
    return tree


def check_tensors(checkpoint: tensorio.Checkpoint, wanted: list[dict[str, Any]]) -> None:
    """Every tensor of the oracle is there, under its path, with its type, shape, strides and bytes, and no other."""
    tree = checkpoint.tree()
    by_path = {object_path(tree, path): name for name, path in checkpoint.paths.items()}
    assert set(by_path) == {(*t["path"], "values") if is_quantized(t) else tuple(t["path"]) for t in wanted}
    starts: dict[tuple[int, int], int] = {}
    for tensor in wanted:
        if is_quantized(tensor):
            check_quantized(checkpoint[".".join(tensor["path"])], tensor)
            continue
        name = by_path[tuple(tensor["path"])]
        array, info = checkpoint[name], checkpoint.infos[name]
        where = f"tensor {name!r}"
        assert info.dtype == dtype_of(tensor), where
        assert info.shape == array.shape == tuple(tensor["shape"]), where
        assert digest(array) == tensor["sha256"], where
        if tensor["kind"] == "ndarray":
            assert array.flags.f_contiguous if tensor["fortran"] else array.flags.c_contiguous, where
            continue
        itemsize = array.itemsize
        if array.size:
            assert [s // itemsize for s in array.strides] == tensor["stride"], where
        assert bool(info.flags & REQUIRES_GRAD) == tensor["requires_grad"], where
        assert bool(info.flags & PARAMETER) == (tensor["cls"] == "Parameter"), where
        if array.size and checkpoint.format.startswith("torch_"):
            extent = info.chunks[0].extent
            place = (extent.storage, extent.offset - tensor["offset"] * itemsize)
            assert starts.setdefault(place, tensor["storage"]) == tensor["storage"], f"{where} shares another storage"
    assert len(set(starts.values())) == len(starts), "one storage of the file is in two places"


def dtype_of(tensor: dict[str, Any]) -> str:
    return np.dtype(tensor["dtype"]).name if tensor["kind"] == "ndarray" else str(tensor["dtype"])


def is_quantized(tensor: dict[str, Any]) -> bool:
    return "qscheme" in tensor


def check_quantized(kind: Any, tensor: dict[str, Any]) -> None:
    """The integers of a quantized tensor, and what they stand for."""
    assert isinstance(kind, QuantizedTensor)
    assert (kind.dtype, kind.scheme) == (tensor["dtype"], tensor["qscheme"].removeprefix("torch."))
    assert kind.values.shape == tuple(tensor["shape"])
    assert [s // kind.values.itemsize for s in kind.values.strides] == tensor["stride"]
    assert digest(kind.values) == tensor["sha256_int_repr"]
    assert (kind.scale, kind.zero_point) == (tensor["q_scale"], tensor["q_zero_point"])


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
        assert list(want) == list(checkpoint.infos)
    modes: list[tuple[Any, dict[str, Any]]] = [
        (path, {"mmap": False}),
        (path.read_bytes(), {"format": entry["format"]}),
        (path, {"writable": True}),
    ]
    for source, options in modes:
        with tensorio.open(source, **options) as other:
            assert {name: digest(array) for name, array in other.items()} == want


@pytest.mark.parametrize("entry", by_id([e for e in PLAIN if e["format"] != "safetensors"]))
def test_corpus_plain_values_equal_oracle(corpus: Path, entry: dict[str, Any]) -> None:
    tree = tensorio.load(corpus / entry["path"])
    for leaf in oracle_of(corpus, entry)["tree"]["leaves"]:
        if leaf["kind"] not in ("int", "float", "bool", "str", "NoneType") or any(
            str(part).startswith("repr:") for part in leaf["path"]
        ):
            continue
        value = walked(tree, leaf["path"])
        assert type(value).__name__ == leaf["kind"], leaf["path"]
        if leaf["kind"] == "str" and "len" in leaf:
            assert len(value) == leaf["len"], leaf["path"]
            assert value.startswith(leaf["repr"][:40]), leaf["path"]
        else:
            assert repr(value) == leaf["repr"], leaf["path"]


@pytest.mark.parametrize("entry", by_id([e for e in PLAIN if e["format"] in ("torch_zip", "torch_legacy")]))
def test_corpus_container_types_equal_oracle(corpus: Path, entry: dict[str, Any]) -> None:
    tree = tensorio.load(corpus / entry["path"])
    for path, kind, length in oracle_of(corpus, entry)["tree"]["containers"]:
        if kind not in ("dict", "OrderedDict", "list", "tuple") or any(str(p).startswith("repr:") for p in path):
            continue
        value = walked(tree, path)
        if isinstance(value, argparse.Namespace):
            value = vars(value)
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
    assert set(caught.value.globals) == unknown_names(entry)
    assert len(set(caught.value.globals)) == len(caught.value.globals)
    assert "unknown='opaque'" in str(caught.value)


@pytest.mark.parametrize("entry", by_id([e for e in MODULES if has_oracle(e)]))
def test_corpus_whole_module_opens_as_inert_data(corpus: Path, entry: dict[str, Any]) -> None:
    with tensorio.open(corpus / entry["path"], unknown="opaque") as checkpoint:
        assert checkpoint.format == entry["format"]
        check_tensors(checkpoint, oracle_of(corpus, entry)["tree"]["tensors"])


# ------------------------------------------------- what the reference can't read


def entry_of(ident: str) -> dict[str, Any]:
    """The manifest's entry of one file, or a skip where there is no corpus."""
    found = [e for e in ENTRIES if e["id"] == ident]
    if not found:
        pytest.skip("no shared corpus")
    return found[0]


TARS: dict[str, dict[str, Any]] = {
    "tar_2d_tensor": {"matrix": np.arange(1, 13, dtype="f4").reshape(3, 4)},
    "tar_float64": {"tensor": np.array([1.1, 2.2, 3.3], "f8")},
    "tar_int64": {"tensor": np.array([100, -200, 300, 0], "i8")},
    "tar_weight_bias": {
        "weight": np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], "f4"), "bias": np.array([0.01, 0.02], "f4")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", TARS)
def test_corpus_tar_of_storages_only(corpus: Path, name: str) -> None:
    """Written by another project's tests, without the members that torch asks for.

    The names and values were read off with tarfile and pickletools; the storages' bytes are those that tarfile finds.
    """
    path = corpus / entry_of(f"tracel_ai_burn--{name}_tar")["path"]
    with tarfile.open(path) as archive:
        raw = archive.extractfile("storages").read()  # type: ignore[union-attr]
    with tensorio.open(path) as checkpoint:
        assert checkpoint.format == "torch_tar"
        assert list(checkpoint) == list(TARS[name])
        for key, want in TARS[name].items():
            got = checkpoint[key]
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            assert np.array_equal(got, want)
            assert got.tobytes() in raw
    tree = tensorio.load(path)
    assert all(np.array_equal(tree[key], want) for key, want in TARS[name].items())


def test_corpus_joblib_file_of_arrays_objects_and_a_matrix(corpus: Path) -> None:
    """The values are those of joblib's own test data (``create_numpy_pickle.py``), as its repository has them."""
    path = corpus / entry_of("joblib_joblib--joblib_0_11_0_pickle_py36_np111_pkl")["path"]
    ints, floats, objects, raw, matrix, text = tensorio.load(path)
    assert (ints.tolist(), ints.dtype) == ([0, 1, 2, 3, 4], np.dtype("i8"))
    assert (floats.tolist(), floats.dtype) == ([0, 1, 2, 3, 4], np.dtype("f8"))
    assert objects.tolist() == [1, "abc", {"a": 1, "b": 2}]
    assert raw == bytes(range(256))
    assert matrix.tolist() == [[0, 1, 2]]
    assert text == "C'est l'\xe9t\xe9 !"
    with tensorio.open(path) as checkpoint:
        assert list(checkpoint) == ["0", "1", "4"]
        extent = checkpoint.infos["1"].chunks[0].extent
        assert path.read_bytes()[extent.offset : extent.offset + 40] == np.arange(5.0).tobytes()


def test_corpus_joblib_file_of_many_files_names_them(corpus: Path) -> None:
    """Up to 0.9, joblib put each array into a file of its own: what is here are their names."""
    path = corpus / entry_of("joblib_joblib_set1--joblib_0_9_2_pickle_py35_np19_pkl")["path"]
    tree = tensorio.load(path, unknown="opaque")
    wrappers = [part for part in tree if isinstance(part, tensorio.Opaque)]
    assert {w.name for w in wrappers} == {"NDArrayWrapper"}
    assert [w.state["filename"] for w in wrappers] == [f"{path.name}_{i:02}.npy" for i in (1, 2, 3, 4)]


def test_corpus_pickle_of_unknown_classes_and_torch_tensors(corpus: Path) -> None:
    """The strings of bytes that pickletools finds are the arrays, and the files that the tensors' storages are in."""
    path = corpus / entry_of("methods_group_drdmannturb--EddyLifetimeType_CUSTOMMLP_DataType_KAIMAL_pkl")["path"]
    data = path.read_bytes()
    strings = [arg for op, arg, _ in pickletools.genops(data) if op.name in ("BINBYTES", "SHORT_BINBYTES")]
    with tensorio.open(path, unknown="opaque") as checkpoint:
        found = {name: array.tobytes() for name, array in checkpoint.items()}
        assert found
        for name, raw in found.items():
            extent = checkpoint.infos[name].chunks[0].extent
            assert extent.storage == 0
            assert data[extent.offset : extent.offset + extent.nbytes] == raw
            assert any(s.endswith(raw) for s in strings), name
    whole = [s for s in strings if len(s) > 100]
    assert all(any(s.endswith(raw) for raw in found.values()) for s in whole)
    assert len(whole) == len(found)


@pytest.mark.parametrize("entry", by_id(OTHERS))
def test_corpus_file_of_another_format_is_refused_with_words(corpus: Path, entry: dict[str, Any]) -> None:
    with pytest.raises((tensorio.FormatError, tensorio.UnsupportedError, tensorio.UnsafePickleError)) as caught:
        tensorio.load(corpus / entry["path"])
    message = str(caught.value)
    assert 20 < len(message) <= 500
    assert message.isprintable()
    assert Path(entry["path"]).name[:20] in message
