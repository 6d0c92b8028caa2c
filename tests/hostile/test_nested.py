"""One byte changed, at every place of small files that are archives of something: an error, or the file as it was."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

import cases
import tensorio

FILES = ["torchscript_by_hand", "torch_export_small", "torch_export_pickled", "torch_package_by_hand", "archive_small",
         "archive_deflated"]  # fmt: skip
SECONDS_PER_LOAD = 0.5  # a thousand times what one takes


def contents(tree: Any) -> Any:
    """All values of a tree, comparable."""
    if isinstance(tree, np.ndarray):
        return tree.dtype.str, tree.shape, tree.tobytes()
    if isinstance(tree, dict):
        return [(k, contents(v)) for k, v in tree.items()]
    if isinstance(tree, list | tuple):
        return [contents(v) for v in tree]
    if isinstance(tree, tensorio.Opaque):
        return tree.module, tree.name, contents(tree.args), contents(tree.state), contents(tree.items)
    return repr(tree)


def attempt(data: bytes, **options: Any) -> Any:
    """What loading gives: the contents, or an error of ours, fit to print."""
    start = time.process_time()
    try:
        return contents(tensorio.load(data, **options))
    except tensorio.TensorIOError as error:
        message = str(error)
        assert 10 < len(message) <= 500, message
        assert message.isprintable(), message
        return error
    finally:
        assert time.process_time() - start < SECONDS_PER_LOAD


@pytest.mark.parametrize("name", FILES)
def test_flip_anywhere_never_gives_other_values(name: str) -> None:
    data = bytearray(cases.CASES[name]().data)
    want = attempt(bytes(data))
    assert not isinstance(want, Exception)
    refused = 0
    for at in range(len(data)):
        for flip in (0x01, 0x80):
            data[at] ^= flip
            got = attempt(bytes(data))
            data[at] ^= flip
            refused += isinstance(got, Exception)
            assert isinstance(got, tensorio.TensorIOError) or got == want, f"byte {at} ^{flip:#x}"
    assert refused > len(data)


def test_flip_in_a_tar_changes_a_payload_without_a_checksum_at_most() -> None:
    case = cases.CASES["archive_tar"]()
    data = bytearray(case.data)
    want = attempt(bytes(data))
    payload = case.data.index(case.tensors["run/b.safetensors.t"].tobytes())
    for at in range(len(data)):
        for flip in (0x01, 0x80):
            data[at] ^= flip
            got = attempt(bytes(data))
            data[at] ^= flip
            if not isinstance(got, tensorio.TensorIOError) and got != want:
                fewer = all(item in want for item in got)  # a member begins as no checkpoint does
                assert fewer or payload <= at < payload + 8 or payload - 200 <= at < payload, at


@pytest.mark.parametrize("name", [*FILES, "archive_tar", "torchscript_frozen", "torch_export_until_2_6"])
def test_flips_of_several_bytes_end_in_an_error_or_a_result(name: str) -> None:
    rng = random.Random(7)
    original = cases.CASES[name]().data
    for _ in range(1000):
        data = bytearray(original)
        for _ in range(rng.randrange(2, 12)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        attempt(bytes(data), unknown=rng.choice(["error", "opaque"]))


@pytest.mark.parametrize("name", [*FILES, "archive_tar"])
def test_truncation_at_every_byte_is_refused(name: str) -> None:
    for n, data in enumerate(cases.truncations(cases.CASES[name]().data)):
        for read in (tensorio.open, tensorio.load):
            with pytest.raises(tensorio.FormatError) as caught:
                read(data)
            assert str(caught.value).isprintable(), n
