"""The format as docs/encryption.md has it, by primitives put together here: neither side reads the other's code."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import struct
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="needs the extra crypt")
import safetensors.numpy
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

import tensorio

KEY = bytes(range(100, 132))
CHUNK = 4096


def derived(key: bytes, salt: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """Payload key, header key, key check, prefix."""
    out = HKDF(SHA256(), 103, salt, b"tensorio encryption 1").derive(key)
    return out[:32], out[32:64], out[64:96], out[96:]


def header(key: bytes, kind: int, nbytes: int, salt: bytes, name: bytes = b"", context: bytes = b"") -> bytes:
    _, header_key, check, _ = derived(key, salt)
    raw = b"\x89TIOENC\x01" + bytes([kind, 12, len(name)]) + bytes(5) + struct.pack("<Q", nbytes)
    raw += salt + name.ljust(40, b"\0") + check
    return raw + hmac.new(header_key, raw + context, hashlib.sha256).digest()


def chunks(key: bytes, prefix: bytes, head: bytes, plain: bytes) -> bytes:
    parts = [plain[at : at + CHUNK] for at in range(0, len(plain), CHUNK)] or [b""]
    return b"".join(
        AESGCM(key).encrypt(prefix + struct.pack(">I", i) + bytes([i == len(parts) - 1]), part, head)
        for i, part in enumerate(parts)
    )


def unchunked(key: bytes, prefix: bytes, head: bytes, stored: bytes) -> bytes:
    parts = [stored[at : at + CHUNK + 16] for at in range(0, len(stored), CHUNK + 16)]
    return b"".join(
        AESGCM(key).decrypt(prefix + struct.pack(">I", i) + bytes([i == len(parts) - 1]), part, head)
        for i, part in enumerate(parts)
    )


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 5])
def test_a_file_made_by_hand_is_decrypted(nbytes: int, tmp_path: Path) -> None:
    plain, salt = np.random.default_rng(nbytes).bytes(nbytes), bytes(range(32))
    key, _, _, prefix = derived(KEY, salt)
    head = header(KEY, 0, nbytes, salt, "schlüssel".encode())
    (tmp_path / "a").write_bytes(head + chunks(key, prefix, head, plain))
    names = []
    tensorio.decrypt(tmp_path / "a", tmp_path / "b", key=lambda name: names.append(name) or KEY)
    assert (tmp_path / "b").read_bytes() == plain
    assert names == ["schlüssel"]


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_a_file_that_is_encrypted_is_what_the_documentation_says(nbytes: int, tmp_path: Path) -> None:
    plain = np.random.default_rng(nbytes).bytes(nbytes)
    (tmp_path / "a").write_bytes(plain)
    tensorio.encrypt(tmp_path / "a", tmp_path / "b", key=KEY, key_id="k1", chunk_size=CHUNK)
    stored = (tmp_path / "b").read_bytes()
    head, salt = stored[:160], stored[24:56]
    assert head == header(KEY, 0, nbytes, salt, b"k1")
    key, _, _, prefix = derived(KEY, salt)
    assert unchunked(key, prefix, head, stored[160:]) == plain
    assert len(stored) == 160 + nbytes + 16 * max(1, -(-nbytes // CHUNK))


def tensor_keys(payload_key: bytes, name: str) -> tuple[bytes, bytes]:
    out = HKDF(SHA256(), 39, None, b"tensorio encryption 1 tensor " + name.encode()).derive(payload_key)
    return out[:32], out[32:]


def test_tensors_encrypted_by_hand_are_read(tmp_path: Path) -> None:
    secret, plain, salt = np.arange(5000, dtype="f4").reshape(50, 100), np.ones(3, "i2"), bytes(32)
    listed = '{"a.w": ["F32", [50, 100]],  "é": ["BF16", [0, 2]]}'
    head = header(KEY, 1, secret.nbytes, salt, context=listed.encode())
    key, _, _, _ = derived(KEY, salt)
    stored = {name: np.frombuffer(chunks(*tensor_keys(key, name), head, data), "u1")
              for name, data in (("a.w", secret.tobytes()), ("é", b""))}  # fmt: skip
    notes = {"tensorio.encryption": base64.b64encode(head).decode(), "tensorio.encryption.tensors": listed, "x": "y"}
    safetensors.numpy.save_file({**stored, "b": plain}, tmp_path / "m.safetensors", metadata=notes)
    with tensorio.open(tmp_path / "m.safetensors", key=KEY) as checkpoint:
        assert np.array_equal(checkpoint["a.w"], secret)
        assert checkpoint["é"].shape == (0, 2)
        assert np.array_equal(checkpoint["b"], plain)
        assert checkpoint.metadata == {"x": "y"}


def test_tensors_that_are_encrypted_are_what_the_documentation_says(tmp_path: Path) -> None:
    tensors = {
        "a.w": np.arange(5000, dtype="f4").reshape(50, 100),
        "b": np.ones(3, "i2"),
        "c.w": np.zeros((0, 4), "f2"),
    }
    safetensors.numpy.save_file(tensors, tmp_path / "m.safetensors")
    tensorio.encrypt(
        tmp_path / "m.safetensors", tmp_path / "e.safetensors", key=KEY, tensors="**.w", chunk_size=CHUNK, key_id="i"
    )
    with safetensors.safe_open(tmp_path / "e.safetensors", "numpy") as file:
        notes = file.metadata()
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    listed = notes["tensorio.encryption.tensors"]
    assert json.loads(listed) == {"a.w": ["F32", [50, 100]], "c.w": ["F16", [0, 4]]}
    head = base64.b64decode(notes["tensorio.encryption"])
    assert head == header(KEY, 1, 20000, head[24:56], b"i", listed.encode())
    key, _, _, _ = derived(KEY, head[24:56])
    for name in ("a.w", "c.w"):
        assert stored[name].dtype == np.uint8
        assert stored[name].ndim == 1
        assert unchunked(*tensor_keys(key, name), head, stored[name].tobytes()) == tensors[name].tobytes()
    assert np.array_equal(stored["b"], tensors["b"])


def test_hkdf_is_that_of_the_rfc() -> None:
    """RFC 5869, test case 1."""
    from tensorio.encryption._header import _hkdf

    okm = _hkdf(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)), 42)
    assert okm.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"


def test_chunks_are_aes_256_gcm_of_the_specification() -> None:
    """Test case 16 of the GCM specification (McGrew and Viega), by the class that chunks are encrypted with."""
    from tensorio.encryption._header import primitives

    key = bytes.fromhex("feffe9928665731c6d6a8f9467308308feffe9928665731c6d6a8f9467308308")
    plain = bytes.fromhex(
        "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
        "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39"
    )
    sealed = primitives()(key).encrypt(
        bytes.fromhex("cafebabefacedbaddecaf888"), plain, bytes.fromhex("feedfacedeadbeeffeedfacedeadbeefabaddad2")
    )
    assert sealed.hex() == (
        "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
        "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662"
        "76fc6ece0f4e1768cddf8853bb2d551b"
    )
