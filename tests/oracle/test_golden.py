"""Files written by old releases of torch, and by the one at hand, against what those said is in them.

The archives in tests/golden are made by tools/golden_release.py; see the README there. The recipe also runs here,
under the torch that is installed, so that the same is asked of today's files.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import tarfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import tensorio
from tensorio.kinds import TensorKind
from tensorio.tensors import CONJ, NEG, PARAMETER, REQUIRES_GRAD

GOLDEN = cases.REPO / "tests" / "golden"
ARCHIVES = sorted(GOLDEN.glob("*.tar.xz"))
NOW = "now"

# Files of classes that are not on the list of names: whole modules.
OPAQUE = ("whole_module", "own_module", "package")
# Files whose tensors are found by name in an opened checkpoint, as their objects are not torch.save's.
BY_NAME = ("traced", "script", "script_lists", "lite", "exported")

Facts = dict[str, Any]


def stem(name: str) -> str:
    return name.split(".")[0]


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Unpacks a release's archive, or runs the recipe here; gives the folder."""

    @functools.cache
    def unpacked(release: str) -> Path:
        folder = tmp_path_factory.mktemp(f"torch-{release}")
        if release == NOW:
            write_now(folder)
            return folder
        with tarfile.open(GOLDEN / f"{release}.tar.xz") as archive:
            for entry in archive:
                held = archive.extractfile(entry)
                assert held is not None
                (folder / entry.name).write_bytes(held.read())
        return folder

    return unpacked


def write_now(folder: Path) -> None:
    pytest.importorskip("torch", reason="the files are made by torch")
    sys.path.insert(0, str(cases.REPO / "tools"))
    try:
        import make_golden
    finally:
        sys.path.pop(0)
    left_out = make_golden.write(str(folder))["left out"]
    assert not left_out, left_out


@pytest.fixture(params=[*(path.name.removesuffix(".tar.xz") for path in ARCHIVES), NOW])
def release(request: pytest.FixtureRequest, releases: Callable[[str], Path]) -> Path:
    return releases(request.param)


def files(folder: Path) -> Iterator[tuple[Path, Facts]]:
    """Path of every file, and what is in it."""
    found = json.loads((folder / "expected.json").read_text())["files"]
    for name, facts in found.items():
        yield folder / name, found[facts["as"]] if "as" in facts else facts


def each(folder: Path, check: Callable[[Path, Facts], None], *stems: str) -> None:
    """Check every file, or those with the given stems; what fails is told together."""
    failed = []
    for path, facts in files(folder):
        if stems and stem(path.name) not in stems:
            continue
        try:
            check(path, facts)
        except Exception as error:
            failed.append(f"{path.name}: {type(error).__name__}: {str(error)[:300]}")
    assert not failed, "\n".join(failed)


# ------------------------------------------------------------------ what is found


def digest(array: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def walk(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Leaves of what was loaded, with their paths; a whole module is its state dict."""
    if isinstance(tree, tensorio.Opaque) and tensorio.state_dict(tree):
        tree = tensorio.state_dict(tree)
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from walk(value, (*path, key))
    elif isinstance(tree, list | tuple) and not isinstance(tree, tensorio.Device):
        for i, value in enumerate(tree):
            yield from walk(value, (*path, i))
    else:
        yield path, getattr(tree, "tensor", tree) if type(tree).__name__ == "SubclassTensor" else tree


def spelt(value: Any) -> Any:
    """A plain value as the recipe writes it."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, bytes | bytearray):
        return value.hex()
    if isinstance(value, tensorio.Device):
        return value.type if value.index is None else f"{value.type}:{value.index}"
    if isinstance(value, tensorio.TorchDType):
        return f"torch.{value}"
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, set | frozenset):
        return sorted(str(item) for item in value)
    return str(value)


def check_leaf(got: Any, want: Facts) -> None:
    """One tensor of any kind."""
    kind = want["kind"]
    if kind == "nested":
        parts = got.unbind()
        assert len(parts) == len(want["parts"])
        for part, facts in zip(parts, want["parts"], strict=True):
            check_leaf(part, facts)
        return
    assert tuple(got.shape) == tuple(want["shape"])
    if kind == "meta":
        assert (got.dtype, list(got.strides)) == (want["dtype"], want["stride"])
    elif kind == "quantized":
        assert got.dtype == want["dtype"]
        assert digest(got.values) == want["values"]["sha256"]
        assert digest(got.dequantize()) == want["dense"]["sha256"]
    elif kind.startswith("sparse_"):
        assert got.layout == kind.removeprefix("sparse_")
        assert digest(got.dense()) == want["dense"]["sha256"]
    elif want["sha256"] is not None:
        assert digest(got) == want["sha256"]


def check_tree(tree: Any, facts: Facts) -> None:
    """All leaves of an object, and no others."""
    leaves = dict(walk(tree))
    for tensor in facts["tensors"]:
        path = tuple(tensor["path"])
        got = leaves.pop(path, None)
        assert isinstance(got, np.ndarray | TensorKind), f"expected a tensor at {path}, found {got!r}"
        try:
            check_leaf(got, tensor)
        except AssertionError as error:
            raise AssertionError(f"{path}: {error}") from None
    for path, kind, value in facts["values"]:
        assert tuple(path) in leaves, f"nothing at {path}"
        assert spelt(leaves.pop(tuple(path))) == value, f"{kind} at {path}"
    assert not leaves


def options(path: Path) -> dict[str, Any]:
    return {"unknown": "opaque"} if stem(path.name) in OPAQUE else {}


def loaded(source: Any, path: Path, **more: Any) -> Any:
    tree = tensorio.load(source, **options(path), **more)
    if stem(path.name) == "package":
        return next(value for key, value in tree.items() if key.endswith("weights.pkl"))
    if stem(path.name) == "stream":
        return [tree]
    return tree


def first_of_stream(path: Path, facts: Facts) -> Facts:
    """Of several objects in a file, the first is what is loaded."""
    if stem(path.name) != "stream":
        return facts
    return {
        "tensors": [t for t in facts["tensors"] if t["path"][0] == 0],
        "values": [v for v in facts["values"] if v[0][0] == 0],
    }


# ------------------------------------------------------------------------ tests


def is_saved(path: Path) -> bool:
    return stem(path.name) not in (*BY_NAME, "frozen")


@pytest.mark.parametrize("mode", ["mmap", "memory", "bytes", "writable"])
def test_every_object_is_loaded_as_it_was(release: Path, mode: str) -> None:
    def check(path: Path, facts: Facts) -> None:
        if is_saved(path):
            more = {"memory": {"mmap": False}, "writable": {"writable": True}}.get(mode, {})
            source = path.read_bytes() if mode == "bytes" else path
            check_tree(loaded(source, path, **more), first_of_stream(path, facts))

    each(release, check)


def test_every_tensor_has_its_facts(release: Path) -> None:
    """Type, shape, strides, flags and which tensors share memory, without touching the data."""

    def check(path: Path, facts: Facts) -> None:
        if is_saved(path) and stem(path.name) not in (*OPAQUE, "stream", "plain"):
            with tensorio.open(path) as checkpoint:
                check_facts(checkpoint, facts["tensors"])

    each(release, check)


def check_facts(checkpoint: tensorio.Checkpoint, tensors: list[Facts]) -> None:
    by_path = {path: name for name, path in checkpoint.paths.items()}
    starts: dict[int, tuple[int, int]] = {}
    for want in tensors:
        name = by_path.get(tuple(want["path"]))
        if name is None or want["kind"] not in ("Tensor", "Parameter", "Buffer"):
            assert want["kind"] not in ("Tensor", "Parameter"), f"no tensor at {want['path']}"
            continue
        info = checkpoint.infos[name]
        assert info.dtype == want["dtype"], name
        assert info.shape == tuple(want["shape"]), name
        assert bool(info.flags & REQUIRES_GRAD) == want["requires_grad"], name
        assert bool(info.flags & PARAMETER) == (want["kind"] == "Parameter"), name
        if not info.nbytes:
            continue
        chunk = info.chunks[0]
        itemsize = info.nbytes // info.numel
        if not info.flags & (CONJ | NEG):
            assert [s // itemsize for s in chunk.strides] == want["stride"], name
        start = (chunk.extent.storage, chunk.extent.offset - want["offset"] * itemsize)
        assert starts.setdefault(want["storage"], start) == start, f"{name} is not in the storage of others"
    assert len(set(starts.values())) == len(starts), "two storages are in one place"


def test_every_tensor_of_other_containers_is_found_by_name(release: Path) -> None:
    def check(path: Path, facts: Facts) -> None:
        for source in (path, path.read_bytes()):
            with tensorio.open(source) as checkpoint:
                for tensor in facts["tensors"]:
                    name = ".".join(map(str, tensor["path"]))
                    check_leaf(checkpoint[name], tensor)
                    assert checkpoint.infos[name].dtype == tensor["dtype"]

    each(release, check, *BY_NAME)


def test_every_constant_of_a_frozen_module_is_found(release: Path) -> None:
    def check(path: Path, facts: Facts) -> None:
        with tensorio.open(path) as checkpoint:
            found = Counter((i.dtype, i.shape, digest(checkpoint[name])) for name, i in checkpoint.infos.items())
        wanted = Counter((t["dtype"], tuple(t["shape"]), t["sha256"]) for t in facts["tensors"])
        assert wanted <= found

    each(release, check, "frozen")


def test_every_file_verifies(release: Path) -> None:
    def check(path: Path, facts: Facts) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tensorio.verify(path)

    each(release, check)


def test_there_are_releases_of_every_age() -> None:
    if not ARCHIVES:
        pytest.skip("the golden files are not part of this copy")
    names = [path.name for path in ARCHIVES]
    assert any(name.startswith("1.0.") for name in names)
    assert any(".py2." in name for name in names)
    assert sum(path.stat().st_size for path in ARCHIVES) < 2_000_000
    assert max(path.stat().st_size for path in ARCHIVES) < 300_000
