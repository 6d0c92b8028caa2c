"""Damaged files: whoever searches the messages of `torch.load` for its words finds them in ours."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorio
from tensorio.torch import LoadError, load
from tensorio.torch._words import with_words

torch_load, torch_save = torch.serialization.load, torch.serialization.save
ITEM = b"K\1G?\xf0\0\0\0\0\0\0"  # 1, 1.0


def saved(**words: Any) -> bytes:
    out = io.BytesIO()
    torch_save(torch.ones(10), out, **words)
    return out.getvalue()


def archive(change: Callable[[str, bytes], bytes | None]) -> bytes:
    """The file with other records, or without some."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved())) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            data = change(name.partition("/")[2], old.read(name))
            if data is not None:
                new.writestr(name, data)
    return out.getvalue()


def with_record(name: str, data: bytes | None) -> bytes:
    return archive(lambda found, old: data if found == name else old)


def with_more(opcodes: bytes) -> bytes:
    """The file with opcodes that come upon the tensor."""
    return archive(lambda name, old: old[:-1] + opcodes + b"." if name == "data.pkl" else old)


def without_header(number: int) -> bytes:
    data = saved()
    at = -1
    for _ in range(number):
        at = data.index(b"PK\3\4", at + 1)
    return data[:at] + b"\0\0" + data[at + 2 :]


NO_STORAGE = "Only persistent_load of storage is allowed, but got "
CORRUPTED = "your checkpoint file is corrupted"
OLD = saved(_use_new_zipfile_serialization=False)
CASES: dict[str, tuple[bytes, list[str]]] = {
    "cut": (saved()[:-30], ["PytorchStreamReader failed reading zip archive: failed finding central directory"]),
    "half": (saved()[:700], ["failed finding central directory", CORRUPTED]),
    "a header": (without_header(2), ["PytorchStreamReader failed reading file", "This is an internal miniz error"]),
    "the last header": (without_header(5), ["invalid header or archive is corrupted", CORRUPTED]),
    "no storage": (with_record("data/0", None), ["PytorchStreamReader failed locating file data/0: file not found"]),
    "no pickle": (with_record("data.pkl", None), ["PytorchStreamReader failed locating file data.pkl: file not found"]),
    "short": (with_record("data/0", bytes(20)), ["record size (20 bytes) does not match expected size (40 bytes"]),
    "long": (with_record("data/0", bytes(48)), ["record size (48 bytes) does not match expected size (40 bytes"]),
    "byte order": (with_record("byteorder", b"middle"), ["Unknown endianness type: middle"]),
    "item": (with_more(ITEM + b"s"), ["Can only SETITEM for dict, collections.OrderedDict, collections.Counter"]),
    "items": (with_more(b"(" + ITEM + b"u"), ["Can only SETITEMS for dict, collections.OrderedDict"]),
    "append": (with_record("data.pkl", b"\x80\2K\1K\2a."), ["Can only append to lists, but got"]),
    "extend": (with_record("data.pkl", b"\x80\2K\1(K\2e."), ["Can only extend lists, but got"]),
    "a number for a storage": (with_record("data.pkl", b"\x80\2K*\x85Q."), [f"{NO_STORAGE}<class 'int'>"]),
    "text for a storage": (with_record("data.pkl", b"\x80\2U\1a\x85Q."), [f"{NO_STORAGE}<class 'str'>"]),
    "legacy, cut": (OLD[:-15], ["unexpected EOF, expected 15 more bytes. The file might be corrupted."]),
    "a plain pickle": (pickle.dumps({"a": 1}, 2), ["Invalid magic number; corrupt file?"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("place", ["file", "buffer"])
def test_torchs_words_are_in_the_message(name: str, place: str, tmp_path: Path) -> None:
    data, words = CASES[name]
    (tmp_path / "m.pt").write_bytes(data)

    def source() -> Any:
        return io.BytesIO(data) if place == "buffer" else tmp_path / "m.pt"

    with pytest.raises(Exception) as theirs:  # of many sorts
        torch_load(source())
    with pytest.raises(LoadError) as ours:
        load(source())
    for word in words:
        assert word in str(theirs.value)
        assert word in str(ours.value)
    assert isinstance(ours.value, type(theirs.value))
    assert isinstance(ours.value, tensorio.FormatError)
    assert len(str(ours.value)) <= 500
    assert "\n" not in str(ours.value)


def test_other_messages_stay_as_they_are() -> None:
    assert with_words("the pickle of 3 bytes ends before its STOP opcode") == (
        "the pickle of 3 bytes ends before its STOP opcode"
    )


def test_tensorio_itself_speaks_its_own_words_only() -> None:
    with pytest.raises(tensorio.HeaderError) as caught:
        tensorio.load(CASES["short"][0])
    assert "torch.load" not in str(caught.value)
