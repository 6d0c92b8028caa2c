"""One byte changed, at every place of small files: an error with words, or the file as it was.

The checksums of a ``.pt`` cover every payload; of its headers, what torch itself does not
read (time stamps, padding) may differ without harm. A ``.safetensors`` has no checksum:
there, whatever loads must be a view inside the file.
"""

from __future__ import annotations

import io
import itertools
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import hexfile
import mutations
import tensorio
from judging import LONG, SCALE, attempt, picture, same_by_every_way

ARCHIVES = [
    "torch_zip_by_hand", "torch_zip_deflated", "torch_zip_small", "torch_zip_big_endian", "torchscript_by_hand",
    "torch_export_small", "torch_export_pickled", "torch_package_by_hand", "archive_small", "archive_deflated",
]  # fmt: skip
STREAMS = ["torch_legacy_by_hand", "torch_legacy_views", "torch_tar_by_hand", "pickle_protocol_5"]
SAFETENSORS = ["safetensors_small", "safetensors_unaligned"]
OTHERS = ["archive_tar", "torchscript_frozen", "torch_export_until_2_6"]
FLIPS = (0x01, 0x80, 0xFF)
ALL = range(1, 256)
EVERY = 41  # of the places: there, the changed file is also read from a file, in both ways


def payload_bytes(data: bytes) -> list[tuple[str, range]]:
    """Name and place of every record's bytes."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = archive.infolist()
    out = []
    for info in infos:
        at = info.header_offset
        start = (
            at
            + 30
            + int.from_bytes(data[at + 26 : at + 28], "little")
            + int.from_bytes(data[at + 28 : at + 30], "little")
        )
        out.append((info.filename, range(start, start + info.compress_size)))
    return out


def tensors_at(data: bytes) -> dict[int, set[str]]:
    """For every byte of a file that is part of tensors: their names."""
    out: dict[int, set[str]] = {}
    with tensorio.open(data) as checkpoint:
        for fqn, info in checkpoint.infos.items():
            for extent in (chunk.extent for chunk in info.chunks if chunk.extent.storage == 0):
                for at in range(extent.offset, extent.offset + extent.nbytes):
                    out.setdefault(at, set()).add(fqn)
    return out


@pytest.mark.parametrize("name", ARCHIVES)
def test_flip_anywhere_in_a_zip_archive_never_gives_other_values(name: str, tmp_path: Path) -> None:
    """In a payload that something is made of, it is always found."""
    data = bytearray(cases.CASES[name]().data)
    want = attempt(bytes(data))
    payload = {at: record for record, place in payload_bytes(bytes(data)) for at in place if is_read(record)}
    refused = 0
    for at, flip in itertools.product(range(len(data)), ALL if LONG else FLIPS):
        data[at] ^= flip
        raw = bytes(data)
        data[at] ^= flip
        got = attempt(raw)
        refused += isinstance(got, tensorio.TensorIOError)
        where = f"byte {at} of {payload.get(at)}, ^{flip:#x}"
        assert isinstance(got, tensorio.TensorIOError) or got == want, where
        spare = name.endswith("deflated") and got == want  # a stream has bits that mean nothing
        assert isinstance(got, tensorio.FormatError) or spare or at not in payload, where
        if at % EVERY == 0:
            same_by_every_way(raw, tmp_path / "file", got)
    assert refused > len(data)


def is_read(record: str) -> bool:
    """Whether something is made of a record: not of alignment, ids, source text and graphs."""
    unread = (".format_version", ".storage_alignment", "serialization_id", ".py", ".debug_pkl", "archive_version",
              "/models/model.json", "extern_modules", "python_version", ".txt")  # fmt: skip
    return not record.endswith(unread)


@pytest.mark.parametrize("name", STREAMS)
def test_flip_anywhere_in_a_file_without_checksums_is_an_error_or_a_result(name: str, tmp_path: Path) -> None:
    """In a tensor's bytes, it changes that tensor, perhaps one that shares memory with it, and nothing else."""
    data = bytearray(cases.CASES[name]().data)
    want = attempt(bytes(data), tensorio.open)
    places = tensors_at(bytes(data))
    refused = 0
    for at, flip in itertools.product(range(len(data)), ALL if LONG else FLIPS):
        data[at] ^= flip
        raw = bytes(data)
        data[at] ^= flip
        got = attempt(raw, tensorio.open)
        refused += isinstance(got, tensorio.TensorIOError)
        if at in places:
            changed = sum(a != b for a, b in zip(got, want, strict=True))
            assert 1 <= changed <= len(places[at]), f"byte {at} ^{flip:#x}"
        if at % EVERY == 0:
            same_by_every_way(raw, tmp_path / "file", attempt(raw))
    assert refused > len(data) // 4
    assert places


def test_flip_in_a_tar_of_files_changes_a_payload_without_a_checksum_at_most() -> None:
    case = cases.CASES["archive_tar"]()
    data = bytearray(case.data)
    want = tensorio.load(case.data)
    payload = case.data.index(case.tensors["run/b.safetensors.t"].tobytes())
    for at, flip in itertools.product(range(len(data)), FLIPS):
        data[at] ^= flip
        raw = bytes(data)
        data[at] ^= flip
        got = attempt(raw)
        if not isinstance(got, tensorio.TensorIOError) and got != picture(want):
            tree = tensorio.load(raw)
            fewer = all(name in want and picture(tree[name]) == picture(want[name]) for name in tree)
            # A member begins as no checkpoint does; a changed element, or a dtype of the same size.
            assert fewer or payload <= at < payload + 8 or payload - 200 <= at < payload, at


def test_flip_anywhere_in_a_safetensors_header_is_an_error_or_a_result() -> None:
    for name in SAFETENSORS:
        data = bytearray(cases.CASES[name]().data)
        end = 8 + int.from_bytes(data[:8], "little")
        total = len(data) - end
        for at in range(end):
            for flip in range(1, 256):
                data[at] ^= flip
                got = attempt(bytes(data))
                data[at] ^= flip
                if not isinstance(got, tensorio.TensorIOError):
                    raws = [part[2] for part in got if isinstance(part, tuple) and len(part) == 3]
                    assert sum(map(len, raws)) == total, f"{name}: byte {at} ^{flip:#x}"


def test_flip_in_a_safetensors_payload_changes_that_element_only() -> None:
    case = cases.CASES["safetensors_small"]()
    data = bytearray(case.data)
    end = 8 + int.from_bytes(data[:8], "little")
    want = case.data[end:]
    for at in range(end, len(data)):
        data[at] ^= 0x55
        got = b"".join(a.tobytes() for a in tensorio.load(bytes(data)).values())
        data[at] ^= 0x55
        changed = [i for i, (x, y) in enumerate(zip(got, want, strict=True)) if x != y]
        assert changed == [at - end]


def test_flips_of_several_bytes_end_in_an_error_or_a_result() -> None:
    rng = random.Random(7)
    for name in (*ARCHIVES, *STREAMS, *SAFETENSORS, *OTHERS):
        original = cases.CASES[name]().data
        for _ in range(1000 * SCALE):
            data = bytearray(original)
            for _ in range(rng.randrange(2, 12)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            attempt(bytes(data), unknown=rng.choice(["error", "opaque"]))


# ------------------------------------------------------------- pickles, at random

STORAGES = {"0": np.arange(4, dtype="f4").tobytes(), "1": bytes(range(16)), "2": bytes(16)}
PIECES = [
    hexfile.tensor(),
    hexfile.tensor("1", 2, (2,), cls="LongStorage"),
    hexfile.storage("FloatStorage", "0", 4),
    hexfile.HOOKS,
    hexfile.name("collections", "OrderedDict"),
    hexfile.name("collections", "Counter"),
    hexfile.name("builtins", "set"),
    hexfile.name("builtins", "frozenset"),
    hexfile.name("builtins", "bytearray"),
    hexfile.name("builtins", "complex"),
    hexfile.name("builtins", "bytes"),
    hexfile.name("torch", "Size"),
    hexfile.name("torch", "device"),
    hexfile.name("torch", "float32"),
    hexfile.name("torch", "FloatStorage"),
    hexfile.name("torch._utils", "_rebuild_tensor_v2"),
    hexfile.name("torch._utils", "_rebuild_tensor_v3"),
    hexfile.name("torch._utils", "_rebuild_parameter"),
    hexfile.name("numpy", "dtype"),
    hexfile.name("numpy", "ndarray"),
    hexfile.name("numpy.core.multiarray", "_reconstruct"),
    hexfile.name("numpy.core.multiarray", "scalar"),
    hexfile.name("_codecs", "encode"),
    hexfile.name("a", "b"),
    hexfile.text("f4"),
    hexfile.text("latin1"),
    hexfile.text("storage"),
    hexfile.text("0"),
    hexfile.text("|"),
    hexfile.number(0),
    hexfile.number(3),
    hexfile.number(-1),
    hexfile.number(1 << 70),
    b"C\x04abcd",
    b"C\x00",
    b"G?\xf0\0\0\0\0\0\0",
    b"N",
    b"\x88",
    b"\x89",
    b")",
    b"]",
    b"}",
    b"\x8f",
    b"(",
    b"(",
    b"t",
    b"l",
    b"e",
    b"u",
    b"a",
    b"s",
    b"b",
    b"R",
    b"R",
    b"R",
    b"\x81",
    b"\x85",
    b"\x85",
    b"\x86",
    b"\x87",
    b"q\x00",
    b"q\x01",
    b"h\x00",
    b"h\x01",
    b"\x94",
    b"0",
    b"1",
    b"2",
    b"Q",
    b"\x90",
    b"\x93",
]


def rich_pickle() -> bytes:
    """One of everything that the machine knows."""
    import collections
    import pickle

    plain = collections.OrderedDict(a=np.arange(3), b=np.float32(2), c={1, (2, 3)}, d=1j, e=bytearray(b"xy"), f=b"z")
    plain.note = collections.Counter("aab")  # type: ignore[attr-defined]
    meta = b"}(" + hexfile.text("conj") + b"\x88u"
    body = b"(" + pickle.dumps(plain, 2)[2:-1]
    body += (
        hexfile.name("torch._utils", "_rebuild_parameter") + b"(" + hexfile.tensor() + b"\x88" + hexfile.HOOKS + b"tR"
    )
    body += hexfile.tensor("1", 2, (2,), cls="ComplexFloatStorage", metadata=meta)
    body += hexfile.name("torch._utils", "_rebuild_tensor_v3") + b"("
    body += hexfile.storage("UntypedStorage", "2", 16, module="torch.storage") + b"K\x00K\x02\x85K\x01\x85\x89"
    body += hexfile.HOOKS + hexfile.name("torch", "uint16") + b"tR"
    body += hexfile.name("torch", "device") + hexfile.text("cuda") + b"K\x01\x86R"
    body += hexfile.name("torch", "Size") + hexfile.numbers([1, 2]) + b"\x85R" + hexfile.name("m", "C") + b")\x81}bt"
    return hexfile.pickled(body)


@pytest.mark.parametrize("unknown", ["error", "opaque"])
def test_shuffled_opcodes_end_in_an_error_or_a_result(unknown: str) -> None:
    """A pickle with one of everything, its opcodes dropped, doubled, exchanged, replaced, given other arguments."""
    rng = random.Random(13)
    ops = mutations.opcodes(rich_pickle())
    results = 0
    for _ in range(15_000 * SCALE):
        body = b"".join(mutations.shuffled(rng, ops, PIECES))
        data = hexfile.torch_file(body, STORAGES)
        for read in (tensorio.load, tensorio.open):
            results += ends_well(read, data, body, unknown)
    assert results > 50 or unknown == "error"  # which refuses one name, unless just that was lost


def ends_well(read: Any, data: bytes, body: bytes, unknown: str) -> bool:
    try:
        read(data, unknown=unknown)
    except tensorio.TensorIOError as error:
        message = str(error)
        assert len(message) <= 500, body
        assert message.isprintable(), body
        return False
    except Exception as error:
        pytest.fail(f"{type(error).__name__}: {error} from {read.__name__} of {body!r}")
    return True


@pytest.mark.parametrize("unknown", ["error", "opaque"])
def test_random_opcodes_end_in_an_error_or_a_result(unknown: str) -> None:
    """Programs that make sense more often than chance would have it: pieces of pickles, in any order."""
    rng = random.Random(11)
    results = 0
    for _ in range(12_000 * SCALE):
        body = b"".join(rng.choices(PIECES, k=rng.randrange(1, 16)))
        data = hexfile.torch_file(hexfile.pickled(body, 4), STORAGES)
        for read in (tensorio.load, tensorio.open):
            results += ends_well(read, data, body, unknown)
    assert results > 50 or unknown == "error"  # which refuses one name, unless just that was lost
