"""Small files and objects that once crashed, leaked or filled memory; each must end in words."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hexfile
import tensorio
from hexfile import name, pickled, tensor, text
from tensorio.errors import HeaderError, LimitError, UnsupportedError

MIB = 1 << 20


def numpy_dtype(letter: str) -> bytes:
    return name("numpy", "dtype") + text(letter) + b"\x89\x88\x87R"


def load(body: bytes, storages: dict[str, bytes] | None = None) -> Any:
    return tensorio.load(hexfile.torch_file(pickled(body), storages or {}))


@pytest.mark.parametrize("letter", ["M8", "m8", "b9", "f17", "i0"])
def test_numpy_type_that_there_is_not_is_refused(letter: str, in_child: Any) -> None:
    state = b"(K\x03" + text("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    with pytest.raises(UnsupportedError, match="NumPy dtype"):
        in_child(load, numpy_dtype(letter) + state)


def test_arrays_of_objects_in_one_another_end_before_the_stack_does(in_child: Any) -> None:
    begin = (
        name("numpy.core.multiarray", "_reconstruct") + name("numpy", "ndarray") + b"K\x00\x85" + text("b") + b"\x87R"
    )
    body = begin * 20_000 + b"".join([b"(K\x01K\x01\x85" + numpy_dtype("O") + b"\x89]Natb"])
    wrap = b"q\x000(K\x01K\x01\x85" + numpy_dtype("O") + b"\x89]h\x00atb"
    with pytest.raises((LimitError, HeaderError, UnsupportedError)):
        in_child(load, body + wrap * 19_999)


def test_conjugate_of_an_expanded_tensor_is_computed_once(in_child: Any) -> None:
    meta = b"}(" + text("conj") + b"\x88u"
    body = tensor("0", 2, (1 << 30, 2), (0, 1), cls="ComplexFloatStorage", metadata=meta)
    data = hexfile.torch_file(pickled(body), {"0": np.array([1 + 2j, 3j], "c8").tobytes()})

    def look() -> Any:
        with tensorio.open(data) as checkpoint:
            seen = checkpoint[""]
            return seen.shape, seen[5].tolist(), tensorio.load(data)[7].tolist()

    assert in_child(look, memory=512 * MIB) == ((1 << 30, 2), [1 - 2j, -3j], [1 - 2j, -3j])


def test_storage_out_of_the_memo_is_the_same_storage() -> None:
    """TorchScript puts storages into the memo; each mention is one to be accounted for."""
    body = b"](" + hexfile.storage("FloatStorage", "0", 4) + b"q\x05h\x05e"
    one, two = load(body, {"0": np.arange(4, dtype="f4").tobytes()})
    assert one.tolist() == two.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("format", ["torch_zip", "safetensors"])
def test_array_of_no_bytes_per_element_is_refused(format: str, tmp_path: Path) -> None:
    target = tmp_path / "file"
    if format == "torch_zip":
        tensorio.save({"a": np.empty(3, "V0")}, target, format=format)  # goes by NumPy's own reduction
        return
    with pytest.raises(UnsupportedError, match="not a tensor's"):
        tensorio.save({"a": np.empty(3, "V0")}, target, format=format)


def test_object_that_changes_between_the_two_looks_is_refused(tmp_path: Path) -> None:
    base = np.arange(10.0)

    class Growing:
        looks = 0

        def __reduce__(self) -> Any:
            Growing.looks += 1
            return list, ([base[i:] for i in range(2 * Growing.looks)],)

    with pytest.raises(UnsupportedError, match="changed while it was saved"):
        tensorio.save([base, base[1:], Growing()], tmp_path / "a.pt")
    assert list(tmp_path.iterdir()) == []


def test_file_object_may_keep_what_it_was_given() -> None:
    kept: list[memoryview] = []

    class Keeper:
        def write(self, piece: memoryview) -> int:
            kept.append(memoryview(piece))
            return len(piece)

    tensorio.save({"a": np.full(MIB, 7, np.uint8)}, Keeper(), format="safetensors")
    assert b"".join(kept)[-MIB:] == b"\x07" * MIB


def test_deep_object_in_a_small_thread_is_a_recursion_error() -> None:
    root: Any = []
    for _ in range(50_000):
        root = [root]
    ended: list[str] = []

    def save() -> None:
        try:
            tensorio.save(root, Path("/nowhere/x.pt"), format="torch_zip")
        except RecursionError as error:
            ended.append(type(error).__name__)

    before = threading.stack_size(2 * MIB)
    try:
        thread = threading.Thread(target=save)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert ended == ["RecursionError"]


@pytest.mark.parametrize("func", [("torch._tensor", "_rebuild_from_type_v2"), ("copyreg", "__newobj__")])
def test_types_of_types_of_tensors_are_refused(func: tuple[str, str]) -> None:
    """Each would be a call within a call: 300,000 of them are more than a stack holds."""
    outer, cls = hexfile.name("torch._tensor", "_rebuild_from_type_v2"), hexfile.name("torch", "Tensor")
    count = 300_000
    body = outer + (b"(" + hexfile.name(*func) + cls) * count + b")" + b"Nt" * count + b"R"
    for unknown in ("error", "opaque"):
        with pytest.raises(HeaderError, match="rebuilds a tensor"):
            tensorio.load(hexfile.torch_file(pickled(body), {}), unknown=unknown)


@pytest.mark.parametrize("levels", [9_000, 60_000])
def test_deep_objects_end_in_errors_of_ours(levels: int, tmp_path: Path) -> None:
    """Every walk over a tree is iterative or bounded; only what is written again goes level by level."""
    source, target = tmp_path / "a.pt", tmp_path / "b.pt"
    source.write_bytes(hexfile.torch_file(pickled(b"]" * levels + hexfile.tensor() + b"a" * levels), {"0": bytes(16)}))
    assert isinstance(tensorio.load(source), list)
    for act in (tensorio.convert, tensorio.recover):
        with pytest.raises(LimitError, match="levels"):
            act(source, target)
        assert not target.exists()
