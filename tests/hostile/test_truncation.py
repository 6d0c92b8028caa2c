"""Every shorter prefix of a good file is refused, and what is missing is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cases
import tensorio

FILES = list(cases.CASES)


@pytest.mark.parametrize("name", FILES)
def test_truncation_at_every_byte_is_refused(name: str) -> None:
    for n, data in enumerate(cases.truncations(cases.CASES[name]().data)):
        for read in (tensorio.open, tensorio.load):
            with pytest.raises(tensorio.FormatError) as caught:
                read(data)
            assert str(caught.value).isprintable(), n


@pytest.mark.parametrize("name", FILES)
def test_truncation_is_refused_by_path_as_by_bytes(name: str, tmp_path: Path) -> None:
    data = cases.CASES[name]().data
    path = tmp_path / f"cut{cases.CASES[name]().suffix}"
    for n in range(0, len(data), 37):
        path.write_bytes(data[:n])
        verdicts: list[Any] = []
        modes: list[tuple[Any, dict[str, Any]]] = [(path, {}), (path, {"mmap": False}), (data[:n], {})]
        for source, options in modes:
            with pytest.raises(tensorio.FormatError) as caught:
                tensorio.load(source, **options)
            verdicts.append((type(caught.value), caught.value.message, caught.value.offset))
        assert len(set(verdicts)) == 1, n


@pytest.mark.parametrize("missing", [1, 10, 1000])
def test_truncation_of_a_payload_says_how_much_is_missing(missing: int) -> None:
    data = cases.safetensors_bytes({"x": cases.array("uint8", (5000,))})
    with pytest.raises(tensorio.TruncatedError) as caught:
        tensorio.load(data[:-missing])
    message = str(caught.value)
    assert "5000" in message
    assert str(5000 - missing) in message


def test_truncation_of_a_download_is_called_truncated() -> None:
    """The half-finished download of a large torch file: no end record, but a good beginning."""
    data = cases.plain_torch_bytes({"x": cases.array("float32", (10_000,))})
    with pytest.raises(tensorio.TruncatedError) as caught:
        tensorio.load(data[: len(data) // 2])
    assert str(len(data) // 2) in str(caught.value)


def test_bytes_behind_a_safetensors_file_are_refused() -> None:
    with pytest.raises(tensorio.HeaderError, match="behind the last tensor"):
        tensorio.load(cases.CASES["safetensors_small"]().data + b"\0")


def test_bytes_behind_a_zip_archive_are_harmless() -> None:
    case = cases.CASES["torch_zip_by_hand"]()
    tree = tensorio.load(case.data + b"anything, and more than the size of an end record")
    assert {k: v.tobytes() for k, v in tree.items()} == {k: v.tobytes() for k, v in case.tensors.items()}
    with pytest.raises(tensorio.FormatError):
        tensorio.load(case.data + b"anything", strict=True)
