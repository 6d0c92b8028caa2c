"""What was changed is refused, and the message says what and where: every byte, every length, every pair of chunks."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="needs the extra crypt")
import safetensors.numpy

import tensorio

KEY, OTHER = bytes(range(32)), bytes(32)
CHUNK, STORED, HEAD = 4096, 4096 + 16, 160
TENSORS = {"a": np.arange(3000, dtype="f4"), "b": np.ones(700, "i2")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encrypted")


@pytest.fixture(scope="module")
def plain(folder: Path) -> bytes:
    safetensors.numpy.save_file(TENSORS, folder / "m.safetensors")
    return (folder / "m.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(folder: Path, plain: bytes) -> bytes:
    """Four chunks; the last is not full."""
    tensorio.encrypt(plain, folder / "m.enc", key=KEY, key_id="mine", chunk_size=CHUNK)
    data = (folder / "m.enc").read_bytes()
    assert len(data) == HEAD + len(plain) + 4 * 16
    return data


@pytest.fixture(scope="module")
def chosen(folder: Path, plain: bytes) -> Path:
    tensorio.encrypt(plain, folder / "p.safetensors", key=KEY, tensors="**", chunk_size=CHUNK)
    return folder / "p.safetensors"


def parts(data: bytes) -> list[bytes]:
    return [data[at : at + STORED] for at in range(HEAD, len(data), STORED)]


def put_together(data: bytes, numbers: tuple[int, ...]) -> bytes:
    return data[:HEAD] + b"".join(parts(data)[i] for i in numbers)


def refused(data: Any, match: str, kind: type[Exception] = tensorio.DecryptionError, key: Any = KEY) -> Any:
    with pytest.raises(kind, match=match) as caught:
        tensorio.load(data, key=key)
    assert len(str(caught.value)) <= 500
    return caught.value


def test_wrong_key_is_told_from_damage(whole: bytes) -> None:
    error = refused(whole, "wrong key.*called 'mine'", key=OTHER)
    assert error.key_id == "mine"


@pytest.mark.parametrize("act", [tensorio.load, tensorio.open, tensorio.verify])
def test_no_key_is_asked_for_by_its_name(act: Any, whole: bytes) -> None:
    with pytest.raises(tensorio.DecryptionError, match=r"encrypted.*'mine'.*as key=") as caught:
        act(whole)
    assert caught.value.key_id == "mine"


def test_what_is_not_encrypted_is_refused_with_a_key(plain: bytes, folder: Path) -> None:
    refused(plain, "nothing in the file is encrypted")
    tensorio.save(TENSORS, folder / "m.pt")
    refused(folder / "m.pt", "nothing in the file is encrypted")
    with pytest.raises(tensorio.DecryptionError, match="nothing in the file is encrypted"):
        tensorio.decrypt(plain, folder / "no", key=KEY)
    assert not (folder / "no").exists()


@pytest.fixture(scope="module")
def small(folder: Path) -> bytes:
    """Two chunks, of which the second has few bytes."""
    tensorio.encrypt(
        safetensors.numpy.save({"a": np.arange(1030, dtype="f4")}), folder / "s", key=KEY, chunk_size=CHUNK
    )
    data = (folder / "s").read_bytes()
    assert STORED < len(data) - HEAD < STORED + 200
    return data


def test_every_byte_counts(small: bytes) -> None:
    data = bytearray(small)
    for at in range(len(data)):
        data[at] ^= 1 << at % 8
        with pytest.raises((tensorio.FormatError, tensorio.UnsupportedError)) as caught:
            tensorio.load(data, key=KEY)
        assert at < HEAD or caught.value.offset == HEAD + (at - HEAD) // STORED * STORED
        data[at] = small[at]
    assert tensorio.load(data, key=KEY).keys() == {"a"}


def test_every_truncation_is_seen_at_once(small: bytes) -> None:
    for length in range(len(small)):
        with pytest.raises(tensorio.FormatError) as caught:
            tensorio.open(small[:length], key=KEY)
        if length >= HEAD:
            assert isinstance(caught.value, tensorio.TruncatedError)
            assert f"{len(small) - length} are missing" in str(caught.value)


def test_what_is_put_behind_is_seen_at_once(whole: bytes) -> None:
    for more in (b"\0", whole[-STORED:], whole):
        refused(whole + more, "something was put behind", tensorio.HeaderError)


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations(range(3), 2)))
def test_chunks_that_were_exchanged_are_named(a: int, b: int, whole: bytes) -> None:
    order = [0, 1, 2, 3]
    order[a], order[b] = b, a
    error = refused(put_together(whole, tuple(order)), f"chunk ({a}: .* of chunk {b}|{b}: .* of chunk {a})")
    assert error.offset in (HEAD + a * STORED, HEAD + b * STORED)


@pytest.mark.parametrize("order", [
    (1, 1, 2, 3), (0, 0, 2, 3), (0, 1, 1, 3), (3, 1, 2, 0), (0, 1, 2), (1, 2, 3), (0, 2, 3), (0, 1, 2, 2), (), (3,),
    (0, 0, 1, 2, 3), (0, 1, 2, 3, 3),
])  # fmt: skip
def test_chunks_that_are_missing_or_there_twice_are_seen(order: tuple[int, ...], whole: bytes) -> None:
    with pytest.raises(tensorio.FormatError):
        tensorio.load(put_together(whole, order), key=KEY)


def test_last_chunk_knows_that_it_is_the_last(folder: Path) -> None:
    """Whoever has the key, but changes the size in the header as well, still can't cut a file between chunks."""
    from tensorio.encryption import _chunks, _header

    header, secrets = _header.new_header(KEY, 0, 3 * CHUNK, chunk=CHUNK)
    all_three = _chunks.Chunks(header, secrets, 3 * CHUNK, HEAD)
    sealed = [all_three.seal(i, memoryview(bytes(CHUNK))) for i in range(3)]
    out = memoryview(bytearray(CHUNK))
    with pytest.raises(tensorio.TruncatedError, match="chunk 1 was not the last one"):
        _chunks.Chunks(header, secrets, 2 * CHUNK, HEAD).open(1, memoryview(sealed[1]), out)
    with pytest.raises(tensorio.DecryptionError, match=r"chunk 2 was the last one.*others were put behind"):
        _chunks.Chunks(header, secrets, 4 * CHUNK, HEAD).open(2, memoryview(sealed[2]), out)
    assert bytes(out) == bytes(CHUNK)


def test_files_of_two_encryptions_can_not_be_mixed(whole: bytes, plain: bytes, folder: Path) -> None:
    tensorio.encrypt(plain, folder / "again.enc", key=KEY, key_id="mine", chunk_size=CHUNK)
    again = (folder / "again.enc").read_bytes()
    assert len(again) == len(whole)
    assert not set(parts(again)) & set(parts(whole))
    for i in range(4):
        mixed = whole[: HEAD + i * STORED] + again[HEAD + i * STORED : HEAD + (i + 1) * STORED]
        mixed += whole[HEAD + (i + 1) * STORED :]
        assert refused(mixed, f"chunk {i} of 4 was changed").offset == HEAD + i * STORED
    refused(again[:HEAD] + whole[HEAD:], "chunk 0 of 4 was changed|chunk")


def test_nothing_of_a_damaged_chunk_is_seen(whole: bytes, folder: Path) -> None:
    path = folder / "damaged.enc"
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with tensorio.open(path, key=KEY) as checkpoint:
        assert np.array_equal(checkpoint["a"][:10], TENSORS["a"][:10])  # its chunks are right
        with pytest.raises(tensorio.DecryptionError, match=r"chunk 3 of 4.*record 'b'"):
            checkpoint["b"]
        with pytest.raises(tensorio.DecryptionError, match="chunk 3 of 4"):
            checkpoint.tree()
    with pytest.raises(tensorio.DecryptionError):
        tensorio.decrypt(path, folder / "plain", key=KEY)
    assert not (folder / "plain").exists()
    assert not list(folder.glob(".*"))


def test_verify_names_chunk_tensor_and_offset(whole: bytes, folder: Path) -> None:
    data = bytearray(whole)
    data[HEAD + STORED + 5] ^= 1
    data[-1] ^= 1
    report = tensorio.verify(bytes(data), key=KEY)
    assert [(p.record, p.offset) for p in report.problems] == [("a", HEAD + STORED), ("b", HEAD + 3 * STORED)]
    good = tensorio.verify(whole, key=KEY)
    assert good.ok
    assert (good.checked, good.unchecked) == (sum(a.nbytes for a in TENSORS.values()), 0)


# -------------------------------------------------------------------------- headers


@pytest.mark.parametrize(("at", "value", "kind", "match"), [
    (7, b"\x02", tensorio.UnsupportedError, "version 1, found 2"),
    (8, b"\x02", tensorio.HeaderError, "kind"),
    (8, b"\x01", tensorio.HeaderError, "header of a file"),
    (9, b"\x00", tensorio.HeaderError, r"found 2\^0"),
    (9, b"\x0b", tensorio.HeaderError, r"found 2\^11"),
    (9, b"\x1b", tensorio.HeaderError, r"found 2\^27"),
    (9, b"\xff", tensorio.HeaderError, r"found 2\^255"),
    (9, b"\x0d", tensorio.DecryptionError, "header was changed"),
    (10, b"\x29", tensorio.HeaderError, "name of the key"),
    (10, b"\x03", tensorio.HeaderError, "name of the key"),
    (11, b"\x01", tensorio.HeaderError, "bytes 11 to 15"),
    (16, b"\xff" * 8, tensorio.HeaderError, r"2\^32 chunks"),
    (16, b"\xff" * 5, tensorio.DecryptionError, "header was changed"),
    (24, b"\x00" * 32, tensorio.DecryptionError, "wrong key"),
    (56, b"yours", tensorio.HeaderError, "zeros behind"),
    (56, b"your", tensorio.DecryptionError, "header was changed"),
    (56, b"\xff\xff\xff\xff", tensorio.HeaderError, "UTF-8"),
    (96, b"\x00" * 32, tensorio.DecryptionError, "wrong key"),
    (128, b"\x00" * 32, tensorio.DecryptionError, "header was changed"),
])  # fmt: skip
def test_changed_headers_are_refused(at: int, value: bytes, kind: type[Exception], match: str, whole: bytes) -> None:
    refused(whole[:at] + value + whole[at + len(value) :], match, kind)


def test_signature_alone_is_refused_with_and_without_a_key() -> None:
    refused(b"\x89TIOENC\x01", "header of 160 bytes, found 8", tensorio.TruncatedError)
    refused(b"\x89TIOENC\x01", "encrypted: expected a key", key=None)
    assert tensorio.identify(b"\x89TIOENC\x01") == "encrypted"


# -------------------------------------------------------------------------- tensors


def notes_of(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    with safetensors.safe_open(path, "numpy") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def edited(path: Path, notes: dict[str, str], tensors: dict[str, Any]) -> bytes:
    return safetensors.numpy.save(tensors, notes)


def test_tensors_can_not_be_exchanged(folder: Path) -> None:
    safetensors.numpy.save_file({"a": np.zeros(9, "f4"), "b": np.ones(9, "f4")}, folder / "two.safetensors")
    tensorio.encrypt(folder / "two.safetensors", folder / "two.enc", key=KEY, tensors=["a", "b"])
    notes, stored = notes_of(folder / "two.enc")
    data = edited(folder, notes, {"a": stored["b"], "b": stored["a"]})
    with tensorio.open(data, key=KEY) as checkpoint, pytest.raises(tensorio.DecryptionError, match="record 'a'"):
        checkpoint["a"]


def changes(notes: dict[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Lists that others could have written, and what is said of them."""
    key = "tensorio.encryption.tensors"
    listed = json.loads(notes[key])
    yield "wrong|changed", {**notes, key: notes[key].replace("[3000]", "[30,100]")}
    yield "wrong|changed", {**notes, key: notes[key].replace("F32", "I32")}
    yield "changed", {**notes, key: notes[key].replace(":", ": ")}
    yield "changed", {**notes, key: json.dumps({"a": listed["a"]})}
    yield "changed", {**notes, key: notes[key].replace("3000", "2999")}
    yield "changed", {**notes, key: notes[key].replace('"a"', '"c"')}
    for shape in ([-1], [1 << 60], [True], ["1"], [1 << 40, 1 << 40, 0], 5, [1] * 65):
        yield "expected dtype and shape", {**notes, key: json.dumps({"a": ["F32", shape]})}
    yield "expected dtype and shape", {**notes, key: json.dumps({"a": ["F99", [1]]})}
    yield "expected dtype and shape", {**notes, key: json.dumps({"a": []})}
    yield "found none", {**notes, key: "{}"}
    yield "JSON", {**notes, key: "{"}
    yield "JSON", {k: v for k, v in notes.items() if k != key}
    yield "header of 160 bytes", {k: v for k, v in notes.items() if k != "tensorio.encryption"}
    yield "base64", {**notes, "tensorio.encryption": "?"}
    raw = bytearray(base64.b64decode(notes["tensorio.encryption"]))
    raw[8] = 0
    yield "header of tensors", {**notes, "tensorio.encryption": base64.b64encode(raw).decode()}


def test_what_is_said_of_tensors_can_not_be_changed(chosen: Path) -> None:
    notes, stored = notes_of(chosen)
    for match, other in changes(notes):
        with pytest.raises(tensorio.FormatError, match=match):
            tensorio.open(edited(chosen, other, stored), key=KEY)
    with pytest.raises(tensorio.DecryptionError, match="nothing in the file is encrypted"):
        tensorio.open(edited(chosen, {}, stored), key=KEY)
    assert tensorio.open(edited(chosen, notes, stored), key=KEY).keys() == TENSORS.keys()


def test_what_is_said_of_tensors_fits_what_is_stored_without_a_key_too(chosen: Path) -> None:
    notes, stored = notes_of(chosen)
    key = "tensorio.encryption.tensors"
    for old, new, match in (
        ("3000", "2999", "expected 12044 bytes of uint8, found uint8 of"),
        ('"a"', '"c"', "no such tensor"),
    ):
        with pytest.raises(tensorio.HeaderError, match=match):
            tensorio.open(edited(chosen, {**notes, key: notes[key].replace(old, new)}, stored))


def test_tensors_have_a_limit(chosen: Path, folder: Path) -> None:
    notes, stored = notes_of(chosen)
    many = {str(i): ["U8", [1]] for i in range((1 << 16) + 1)}
    with pytest.raises(tensorio.LimitError, match="at most 65536 encrypted tensors, found 65537"):
        tensorio.open(edited(chosen, {**notes, "tensorio.encryption.tensors": json.dumps(many)}, stored))
    one = np.zeros(1, "u1")
    with pytest.raises(tensorio.LimitError, match="encrypt the whole file"):
        tensorio.encrypt(safetensors.numpy.save(dict.fromkeys(many, one)), folder / "no", key=KEY, tensors="*")
    assert not (folder / "no").exists()


def test_encrypted_tensor_can_not_be_replaced_by_a_plain_one(chosen: Path) -> None:
    notes, stored = notes_of(chosen)
    with pytest.raises(tensorio.HeaderError, match=r"expected \d+ bytes of uint8, found float32.*record 'a'"):
        tensorio.open(edited(chosen, notes, {**stored, "a": TENSORS["a"]}), key=KEY)


def test_every_byte_of_an_encrypted_tensor_counts(chosen: Path) -> None:
    data = bytearray(chosen.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    for at in range(start, len(data), 173):
        data[at] ^= 64
        with pytest.raises(tensorio.DecryptionError) as caught:
            tensorio.load(bytes(data), key=KEY)
        assert caught.value.offset is not None
        assert 0 <= at - caught.value.offset < STORED
        data[at] ^= 64


def test_without_a_key_the_others_are_read(folder: Path, plain: bytes) -> None:
    tensorio.encrypt(plain, folder / "one.safetensors", key=KEY, key_id="k", tensors="a")
    with tensorio.open(folder / "one.safetensors") as checkpoint:
        assert checkpoint.infos["a"].shape == (3000,)
        assert checkpoint.infos["a"].dtype == "float32"
        assert np.array_equal(checkpoint["b"], TENSORS["b"])
        with pytest.raises(tensorio.DecryptionError, match=r"the tensor is encrypted.*'k'.*record 'a'"):
            checkpoint["a"]
        with pytest.raises(tensorio.DecryptionError, match="the tensor is encrypted"):
            checkpoint.read_into({"a": np.empty(3000, "f4")})
    with pytest.raises(tensorio.DecryptionError, match="the tensor is encrypted"):
        tensorio.load(folder / "one.safetensors")
    report = tensorio.verify(folder / "one.safetensors")
    assert (report.ok, report.checked, report.unchecked) == (True, 0, sum(a.nbytes for a in TENSORS.values()))
    assert tensorio.verify(folder / "one.safetensors", key=KEY).checked == TENSORS["a"].nbytes
