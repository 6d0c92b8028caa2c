"""Keys: where they come from, and that they are never shown, pickled or guessed."""

from __future__ import annotations

import base64
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="needs the extra crypt")

import tensorio
from tensorio.encryption._files import Encryption
from tensorio.encryption._keys import KeySource

KEY = bytes(range(200, 232))
TEXTS = (
    KEY.hex(),
    KEY.hex().upper(),
    base64.b64encode(KEY).decode(),
    base64.urlsafe_b64encode(KEY).decode().rstrip("="),
)


def test_key_is_not_in_what_is_raised_or_shown_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = b"\xff" * 32
    monkeypatch.setitem(os.environ, "TENSORIO_KEY", os.fsdecode(raw))
    with pytest.raises(ValueError, match="expected a key of 32 bytes in the variable") as caught:
        KeySource("env:TENSORIO_KEY").key()
    assert type(caught.value) is ValueError  # a UnicodeError carries the text
    assert repr(KEY) not in repr(Encryption(KEY))


@pytest.fixture
def encrypted(tmp_path: Path) -> Path:
    tensorio.save({"a": np.arange(4)}, tmp_path / "m.safetensors")
    tensorio.encrypt(tmp_path / "m.safetensors", tmp_path / "m.enc", key=KEY, key_id="team/7")
    return tmp_path / "m.enc"


@pytest.mark.parametrize("text", [*TEXTS, f"  {KEY.hex()}\n"])
def test_key_comes_from_the_environment(text: str, encrypted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_KEY", text)
    assert np.array_equal(tensorio.load(encrypted, key="env:MODEL_KEY")["a"], np.arange(4))


@pytest.mark.parametrize("data", [KEY, *(f"{text}\n".encode() for text in TEXTS)])
def test_key_comes_from_a_file(data: bytes, encrypted: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(data)
    assert np.array_equal(tensorio.load(encrypted, key=f"file:{tmp_path / 'key'}")["a"], np.arange(4))


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_key_may_be_any_bytes(wrap: Any, encrypted: Path) -> None:
    assert tensorio.load(encrypted, key=wrap(KEY)).keys() == {"a"}


def test_function_is_given_the_name_of_the_key(encrypted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K", KEY.hex())
    asked = []
    for answer in (KEY, "env:K"):
        assert tensorio.load(encrypted, key=lambda name, a=answer: asked.append(name) or a).keys() == {"a"}
    assert asked == ["team/7", "team/7"]
    with pytest.raises(TypeError, match="expected the function to return bytes or text, found function"):
        tensorio.load(encrypted, key=lambda name: lambda: KEY)


def test_errors_of_the_function_are_its_own(encrypted: Path) -> None:
    def find(name: str) -> bytes:
        raise LookupError(name)

    with pytest.raises(LookupError, match="team/7"):
        tensorio.open(encrypted, key=find)


@pytest.mark.parametrize(("key", "match"), [
    (b"", "found 0 bytes"), (KEY[:31], "found 31 bytes"), (KEY + b"\n", "found 33 bytes"),
    (KEY.hex(), "found other text"), ("env:", "found other text"), ("file:", "found other text"),
    ("secret:x", "found other text"),
])  # fmt: skip
def test_other_keys_are_refused_without_showing_them(key: Any, match: str, encrypted: Path) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        tensorio.open(encrypted, key=key)
    assert KEY.hex() not in str(caught.value)


@pytest.mark.parametrize("key", [5, 1.5, ["env:X"], Path("key")])
def test_other_types_are_refused(key: Any, encrypted: Path) -> None:
    with pytest.raises(TypeError, match=r"'env:NAME', 'file:PATH'.*found (int|float|list|PosixPath)"):
        tensorio.open(encrypted, key=key)


@pytest.mark.parametrize(
    "text", ["", "zz" * 32, KEY.hex()[:-2], "x" * 44, "é" * 32, base64.b64encode(KEY[:30]).decode()]
)
def test_text_that_is_no_key_is_refused_without_showing_it(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_KEY", text)
    with pytest.raises(ValueError, match="expected a key of 32 bytes in the variable 'MODEL_KEY'") as caught:
        KeySource("env:MODEL_KEY").key()
    assert not text or text not in str(caught.value)
    assert caught.value.__cause__ is None


def test_variable_or_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MODEL_KEY", raising=False)
    with pytest.raises(ValueError, match="no variable 'MODEL_KEY'"):
        KeySource("env:MODEL_KEY").key()
    with pytest.raises(FileNotFoundError):
        KeySource(f"file:{tmp_path / 'no'}").key()


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX")
def test_file_that_anybody_can_change_is_no_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(KEY)
    (tmp_path / "key").chmod(0o644)
    assert KeySource(f"file:{tmp_path / 'key'}").key() == KEY
    (tmp_path / "key").chmod(0o646)
    with pytest.raises(ValueError, match="anybody may write"):
        KeySource(f"file:{tmp_path / 'key'}").key()


def test_large_file_is_no_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(bytes(5000))
    with pytest.raises(ValueError, match="found a file of 5000 bytes"):
        KeySource(f"file:{tmp_path / 'key'}").key()


def test_checkpoint_is_pickled_with_the_source_of_its_key(
    encrypted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_bytes(KEY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL_KEY", KEY.hex())
    for source in ("env:MODEL_KEY", "file:key"):
        with tensorio.open(encrypted, key=source) as checkpoint:
            data = pickle.dumps(checkpoint)
        assert KEY not in data
        assert KEY.hex().encode() not in data
        monkeypatch.chdir("/")
        with pickle.loads(data) as again:
            assert np.array_equal(again["a"], np.arange(4))
        monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("key", [KEY, lambda name: KEY], ids=["bytes", "function"])
def test_key_itself_is_not_pickled(key: Any, encrypted: Path) -> None:
    with tensorio.open(encrypted, key=key) as checkpoint:
        with pytest.raises(TypeError, match="not pickled: use key='env:NAME'"):
            pickle.dumps(checkpoint)


def test_key_is_shown_nowhere(encrypted: Path) -> None:
    with tensorio.open(encrypted, key=KEY) as checkpoint:
        shown = f"{checkpoint!r} {checkpoint._arguments!r} {checkpoint._opened!r} {vars(checkpoint)!r}"
    shown += f"{KeySource(KEY)!r} {KeySource(KEY)}"
    assert "<key>" in shown
    assert repr(KEY) not in shown
    assert KEY.hex() not in shown


@pytest.mark.parametrize("key_id", ["", "a", "é" * 20, "team/7"])
def test_name_of_the_key_is_in_the_file(key_id: str, tmp_path: Path) -> None:
    tensorio.encrypt(b"payload", tmp_path / "a", key=KEY, key_id=key_id)
    assert (tmp_path / "a").read_bytes()[56:96] == key_id.encode().ljust(40, b"\0")


@pytest.mark.parametrize("key_id", ["é" * 21, "a\n", "a\0"])
def test_name_that_is_no_name_is_refused(key_id: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="key_id= is printable text of at most 40 bytes"):
        tensorio.encrypt(b"payload", tmp_path / "a", key=KEY, key_id=key_id)
    assert not list(tmp_path.iterdir())


def test_salts_are_new_each_time(tmp_path: Path) -> None:
    files = set()
    for i in range(20):
        tensorio.encrypt(b"payload", tmp_path / str(i), key=KEY)
        files.add((tmp_path / str(i)).read_bytes()[24:56])
    assert len(files) == 20
