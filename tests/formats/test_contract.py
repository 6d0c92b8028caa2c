"""What every format promises, on every case of it; a new format is tested the day it has a case."""

from __future__ import annotations

import gc
import io
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import tensorio
from tensorio import formats

NAMES = [name for format in formats.names() for name in cases.cases_of(format)]


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest) -> cases.Case:
    return cases.CASES[request.param]()


@pytest.fixture
def path(case: cases.Case, tmp_path: Path) -> Path:
    path = tmp_path / f"model{case.suffix}"
    path.write_bytes(case.data)
    return path


def same(got: Any, want: Any) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert np.ascontiguousarray(got).tobytes() == want.tobytes()


def at(tree: Any, keys: tuple[object, ...]) -> Any:
    for key in keys:
        tree = getattr(tree, str(key)) if isinstance(tree, tensorio.Opaque) else tree[key]
    return tree


def test_every_format_has_cases() -> None:
    for format in formats.names():
        assert len(cases.cases_of(format)) >= 3, f"{format} needs cases"


def test_format_is_identified_by_content(case: cases.Case, path: Path, tmp_path: Path) -> None:
    other = tmp_path / "misleading.gguf"
    other.write_bytes(case.data)
    for source in (path, str(path), other, case.data, io.BytesIO(case.data)):
        assert tensorio.identify(source) == case.format
    with tensorio.open(other) as checkpoint:
        assert checkpoint.format == case.format


def test_open_equals_load_equals_what_was_saved(case: cases.Case, path: Path) -> None:
    tree = tensorio.load(path)
    with tensorio.open(path) as checkpoint:
        assert list(checkpoint) == list(case.tensors)
        assert len(checkpoint) == len(case.tensors) == len(checkpoint.infos) == len(checkpoint.paths)
        for name, want in case.tensors.items():
            same(checkpoint[name], want)
            same(at(tree, checkpoint.paths[name]), want)
            same(at(checkpoint.tree(), checkpoint.paths[name]), want)
            info = checkpoint.infos[name]
            assert (info.fqn, info.dtype, info.shape) == (name, want.dtype.name, want.shape)
            assert (info.nbytes, info.numel) == (want.nbytes, want.size)
        assert checkpoint.nbytes == sum(a.nbytes for a in case.tensors.values())


@pytest.mark.parametrize("options", [{"mmap": False}, {"writable": True}, {"mmap": False, "writable": True},
                                     {"verify": True}], ids=str)  # fmt: skip
def test_every_mode_gives_the_same(case: cases.Case, path: Path, options: dict[str, Any]) -> None:
    with tensorio.open(path, **options) as checkpoint:
        assert list(checkpoint) == list(case.tensors)
        for name, want in case.tensors.items():
            same(checkpoint[name], want)
            same(at(tensorio.load(path, **options), checkpoint.paths[name]), want)


def test_names_select_part_of_the_tree(case: cases.Case, path: Path) -> None:
    with tensorio.open(path) as checkpoint:
        paths = dict(checkpoint.paths)
    for name, want in case.tensors.items():
        tree = tensorio.load(path, names=[name])
        found = [leaf for leaf in leaves(tree) if isinstance(leaf, np.ndarray)]
        assert len(found) == 1
        same(found[0], want)
    with pytest.raises(tensorio.TensorNotFoundError):
        tensorio.load(path, names=["no such tensor"])
    assert len(paths) == len(case.tensors)


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [x for v in tree.values() for x in leaves(v)]
    if isinstance(tree, list | tuple):
        return [x for v in tree for x in leaves(v)]
    if isinstance(tree, tensorio.Opaque):
        return leaves(tree.state)
    return [tree]


def test_verdict_is_the_same_by_map_read_and_bytes(case: cases.Case, path: Path) -> None:
    """P6, on the file cut and changed at many places."""
    for n in range(0, len(case.data), 61):
        for data in (case.data[:n], case.data[:n] + b"\xa5" + case.data[n + 1 :]):
            path.write_bytes(data)
            verdicts = [
                verdict(path),
                verdict(path, mmap=False),
                verdict(data),
                verdict(io.BytesIO(data)),
                verdict(str(path)),
            ]
            assert all(v == verdicts[0] for v in verdicts), n


def verdict(source: Any, **options: Any) -> Any:
    try:
        tree = tensorio.load(source, **options)
    except tensorio.TensorIOError as error:
        return type(error), error.message, error.offset, error.record
    return [leaf.tobytes() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves(tree)]


def test_truncation_anywhere_is_refused(case: cases.Case) -> None:
    for n, data in enumerate(cases.truncations(case.data)):
        with pytest.raises(tensorio.FormatError):
            tensorio.open(data)
        if n % 7 == 0:
            with pytest.raises(tensorio.FormatError):
                tensorio.load(data)


def test_arrays_are_read_only_unless_asked_otherwise(case: cases.Case, path: Path) -> None:
    with tensorio.open(path) as checkpoint:
        for array in checkpoint.values():
            assert not array.flags.writeable
            with pytest.raises(ValueError):
                array.flags.writeable = True
    assert not any(a.flags.writeable for a in leaves(tensorio.load(path)) if isinstance(a, np.ndarray))


@pytest.mark.parametrize("options", [{}, {"mmap": False}], ids=["mmap", "memory"])
def test_writable_arrays_never_change_the_file(case: cases.Case, path: Path, options: dict[str, Any]) -> None:
    with tensorio.open(path, writable=True, **options) as checkpoint:
        for array in checkpoint.values():
            assert array.flags.writeable
            array[...] = 1
    data = bytearray(case.data)
    for source in (path, data):
        for array in leaves(tensorio.load(source, writable=True, **options)):
            if isinstance(array, np.ndarray):
                array[...] = 1
    assert path.read_bytes() == case.data == data


def test_arrays_outlive_the_checkpoint(case: cases.Case, path: Path) -> None:
    checkpoint = tensorio.open(path)
    arrays = dict(checkpoint)
    checkpoint.close()
    del checkpoint
    path.unlink()
    gc.collect()
    for name, want in case.tensors.items():
        same(arrays[name], want)


def test_close_is_final_and_may_come_twice(case: cases.Case, path: Path) -> None:
    checkpoint = tensorio.open(path)
    checkpoint.close()
    checkpoint.close()
    for name in case.tensors:
        with pytest.raises(ValueError, match="closed"):
            checkpoint[name]
    assert list(checkpoint.infos) == list(case.tensors)  # the description stays


def test_no_descriptor_is_left_open(case: cases.Case, path: Path) -> None:
    tensorio.load(path)
    gc.collect()
    before = cases.open_descriptors()
    for _ in range(5):
        with tensorio.open(path) as checkpoint:
            dict(checkpoint)
        tensorio.load(path)
        tensorio.load(path, mmap=False)
        tensorio.identify(path)
        tensorio.verify(path)
        with pytest.raises(tensorio.FormatError):
            tensorio.open(path, format=next(f for f in formats.names() if f != case.format))
    gc.collect()
    assert cases.open_descriptors() == before


def test_no_resource_warning_when_a_checkpoint_is_dropped(case: cases.Case, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint = tensorio.open(path)
        dict(checkpoint)
        del checkpoint
        gc.collect()


def test_pickled_checkpoint_opens_the_same_file(case: cases.Case, path: Path) -> None:
    with tensorio.open(path) as checkpoint:
        raw = pickle.dumps(checkpoint)
        assert len(raw) < 2000
        with pickle.loads(raw) as again:
            assert list(again) == list(checkpoint)
            for name, want in case.tensors.items():
                same(again[name], want)


def test_pickled_checkpoint_refuses_another_file_at_its_path(case: cases.Case, path: Path) -> None:
    with tensorio.open(path) as checkpoint:
        raw = pickle.dumps(checkpoint)
    path.unlink()
    path.write_bytes(case.data)
    os.utime(path, ns=(1, 1))
    with pytest.raises(tensorio.FormatError, match="replaced") as caught:
        pickle.loads(raw)
    assert caught.value.path == str(path)


def test_checkpoint_of_bytes_can_not_be_pickled(case: cases.Case) -> None:
    with tensorio.open(case.data) as checkpoint, pytest.raises(TypeError, match="no path"):
        pickle.dumps(checkpoint)


def test_read_copies_parts(case: cases.Case, path: Path) -> None:
    with tensorio.open(path) as checkpoint:
        for name, want in case.tensors.items():
            got = checkpoint.read(name)
            same(got, want)
            assert got.flags.owndata
            assert got.flags.writeable
            if want.ndim and want.shape[0]:
                same(checkpoint.read(name, slice(None, 1)), want[:1])
                out = np.empty(want.shape[1:], want.dtype)
                assert checkpoint.read(name, 0, out=out) is out
                same(out, want[0])
        checkpoint.prefetch()
        checkpoint.prefetch(list(case.tensors)[:1])


def test_verify_finds_nothing_in_a_good_file(case: cases.Case, path: Path) -> None:
    for source in (path, case.data):
        report = tensorio.verify(source)
        assert report.ok
        assert report.problems == []
        assert report.format == case.format
        stored = sum(a.nbytes for a in case.tensors.values() if a.tobytes() in case.data)
        assert report.checked + report.unchecked >= stored


def test_progress_ends_at_the_total(case: cases.Case, path: Path) -> None:
    for act in (lambda p: tensorio.load(path, mmap=False, progress=p), lambda p: tensorio.verify(path, progress=p)):
        calls: list[tuple[int, int]] = []
        act(lambda done, total: calls.append((done, total)))  # noqa: B023
        assert all(0 <= done <= total for done, total in calls)
        assert calls == sorted(calls)
        assert not calls or calls[-1][0] == calls[-1][1]


def test_progress_may_stop_the_read(path: Path) -> None:
    class Enough(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise Enough

    with pytest.raises(Enough):
        tensorio.load(path, mmap=False, progress=stop)


@pytest.mark.parametrize("source", [None, 3, 3.5, object(), ["x"], {"a": 1}], ids=lambda x: type(x).__name__)
def test_unknown_kinds_of_path_are_type_errors(source: Any) -> None:
    for act in (tensorio.open, tensorio.load, tensorio.identify, tensorio.verify):
        with pytest.raises(TypeError, match="expected a path"):
            act(source)


def test_unknown_format_name_is_refused(path: Path) -> None:
    with pytest.raises(tensorio.UnsupportedError, match="torch_zip"):
        tensorio.open(path, format="nonsense")


@pytest.mark.parametrize("unknown", ["ignore", "", None])
def test_unknown_must_be_one_of_two_words(path: Path, unknown: Any) -> None:
    with pytest.raises(ValueError, match="unknown="):
        tensorio.load(path, unknown=unknown)


WRITERS = {
    "save": lambda path, dst, name: tensorio.save({"a": np.ones(1)}, dst, format=name),
    "save in files": lambda path, dst, name: tensorio.save({"a": np.ones(1)}, dst, format=name, max_shard_size=9),
    "convert": lambda path, dst, name: tensorio.convert(path, dst, format=name),
    "convert to files": lambda path, dst, name: tensorio.convert(path, dst, format=name, max_shard_size=9),
    "merge": lambda path, dst, name: tensorio.merge(path, dst=dst, format=name),
    "strip": lambda path, dst, name: tensorio.strip(path, dst, format=name),
    "recover": lambda path, dst, name: tensorio.recover(path, dst, format=name),
    "shard": lambda path, dst, name: tensorio.shard(path, dst, tp=1, rules=[("**", "replicate")], format=name),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", [*(name for name in formats.names() if name not in formats.WRITTEN), "gguf"])
def test_what_is_only_read_is_refused_in_words(writer: str, name: str, tmp_path: Path) -> None:
    source = tmp_path / "m.safetensors"
    tensorio.save({"a": np.ones(1)}, source)
    with pytest.raises(tensorio.UnsupportedError, match=r"\.pt|save each|can be written: safetensors, torch_zip"):
        WRITERS[writer](source, tmp_path / "x.pt", name)
    assert list(tmp_path.iterdir()) == [source]


def test_formats_that_can_be_written_are_those_with_a_suffix() -> None:
    assert sorted(formats.WRITTEN) == sorted(name for name in formats.names() if formats.get(name).SUFFIXES)
