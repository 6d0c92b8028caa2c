"""What is left of an encrypted file that was cut or changed: the tensors in chunks that fit their tags."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="needs the extra crypt")
import safetensors.numpy

import tensorio
from tensorio import DecryptionError, FormatError

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
CHUNK, HEADER, TAG = 4096, 160, 16
TENSORS = {f"w.{i:02}": np.random.default_rng(i).random(1000, "f4") for i in range(20)}


def safetensors_file() -> tuple[bytes, dict[str, tuple[int, int]]]:
    """A file, and where its tensors are."""
    data = safetensors.numpy.save(TENSORS)
    length = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:length])
    return data, {name: (length + a, length + b) for name, e in header.items() for a, b in [e["data_offsets"]]}


def torch_file() -> tuple[bytes, dict[str, tuple[int, int]]]:
    out = io.BytesIO()
    tensorio.save(TENSORS, out, format="torch_zip")
    places = {}
    with zipfile.ZipFile(out) as archive:
        for info in archive.infolist():
            folder, _, name = info.filename.rpartition("/")
            if folder.endswith("/data"):
                out.seek(info.header_offset + 26)
                lengths = out.read(4)
                start = info.header_offset + 30 + int.from_bytes(lengths[:2], "little")
                start += int.from_bytes(lengths[2:], "little")
                places[list(TENSORS)[int(name)]] = (start, start + info.file_size)
    return out.getvalue(), places


FILES = {"m.safetensors": safetensors_file, "m.pt": torch_file}
Maker = Callable[[], tuple[bytes, dict[str, tuple[int, int]]]]


@pytest.fixture(params=FILES)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, tuple[int, int]]]:
    data, places = FILES[request.param]()
    tensorio.encrypt(data, tmp_path / request.param, key=KEY, chunk_size=CHUNK)
    return tmp_path / request.param, places


def saved(path: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(path)


def test_nothing_is_wrong_with_a_whole_file(stored: tuple[Path, dict[str, tuple[int, int]]], tmp_path: Path) -> None:
    report = tensorio.recover(stored[0], tmp_path / "out.safetensors", key=KEY)
    assert report.healthy
    assert report.ok
    assert sorted(report.saved) == sorted(TENSORS)
    assert report.not_proven == {}
    got = saved(tmp_path / "out.safetensors")
    assert all(np.array_equal(got[name], array) for name, array in TENSORS.items())


def test_tensors_of_changed_chunks_are_lost(stored: tuple[Path, dict[str, tuple[int, int]]], tmp_path: Path) -> None:
    path, places = stored
    data = bytearray(path.read_bytes())
    for i in (3, 9):
        data[HEADER + i * (CHUNK + TAG) + 100] ^= 1
    path.write_bytes(data)
    gone = {
        name for name, (begin, end) in places.items()
        if any(begin < (i + 1) * CHUNK and i * CHUNK < end for i in (3, 9))
    }  # fmt: skip
    assert 2 <= len(gone) <= 6
    report = tensorio.recover(path, tmp_path / "out.safetensors", key=KEY, keep_damaged=True)
    assert set(TENSORS) - set(report.saved) == set(report.lost) >= gone
    assert len(report.lost) <= len(gone) + 2  # in front of a tensor of a .pt is a header, which may be in the chunk
    assert not report.healthy
    assert any("chunk 3 of" in loss.reason for loss in report.lost.values())
    got = saved(tmp_path / "out.safetensors")
    assert sorted(got) == sorted(report.saved)
    assert all(np.array_equal(got[name], TENSORS[name]) for name in got)


@pytest.mark.parametrize("cut", [1, 17, CHUNK, CHUNK + TAG, 5 * CHUNK + 1000])
def test_tensors_behind_the_cut_are_lost(
    cut: int, stored: tuple[Path, dict[str, tuple[int, int]]], tmp_path: Path
) -> None:
    path, places = stored
    data = path.read_bytes()[:-cut]
    path.write_bytes(data)
    there = (len(data) - HEADER) // (CHUNK + TAG) * CHUNK
    report = tensorio.recover(path, tmp_path / "out.safetensors", key=KEY)
    assert not report.healthy
    assert set(report.saved) == {name for name, (_, end) in places.items() if end <= there}
    got = saved(tmp_path / "out.safetensors")
    assert all(np.array_equal(got[name], TENSORS[name]) for name in got)


def test_what_was_put_behind_a_file_is_left_out(
    stored: tuple[Path, dict[str, tuple[int, int]]], tmp_path: Path
) -> None:
    stored[0].write_bytes(stored[0].read_bytes() + b"more")
    report = tensorio.recover(stored[0], tmp_path / "out.safetensors", key=KEY)
    assert report.ok
    assert not report.healthy
    assert sorted(report.saved) == sorted(TENSORS)


@pytest.mark.parametrize("nbytes", [10, 100, HEADER, HEADER + 100])
def test_without_a_chunk_nothing_is_left(
    nbytes: int, stored: tuple[Path, dict[str, tuple[int, int]]], tmp_path: Path
) -> None:
    path, _ = stored
    path.write_bytes(path.read_bytes()[:nbytes])
    with pytest.raises(FormatError):
        tensorio.recover(path, tmp_path / "out.safetensors", key=KEY)
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(("key", "match"), [(None, "expected a key"), (OTHER, "wrong key")], ids=["none", "other"])
def test_the_key_is_needed(
    key: bytes | None, match: str, stored: tuple[Path, dict[str, tuple[int, int]]], tmp_path: Path
) -> None:
    with pytest.raises(DecryptionError, match=match):
        tensorio.recover(stored[0], tmp_path / "out.safetensors", key=key)


@pytest.mark.parametrize("make", FILES.values(), ids=FILES)
def test_with_a_key_what_is_not_encrypted_is_refused(make: Maker, tmp_path: Path) -> None:
    with pytest.raises(DecryptionError, match="nothing in the file is encrypted"):
        tensorio.recover(make()[0], tmp_path / "out.safetensors", key=KEY)


@pytest.mark.parametrize("damage", ["none", "cut", "changed"])
def test_tensors_that_are_encrypted_by_themselves(damage: str, tmp_path: Path) -> None:
    path, out = tmp_path / "m", tmp_path / "out.safetensors"
    safetensors.numpy.save_file(TENSORS, path, {"note": "kept"})
    tensorio.encrypt(path, path, key=KEY, tensors="w.0*")
    data = bytearray(path.read_bytes())
    length = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:length])
    lost = set()
    if damage == "changed":
        data[length + header["w.05"]["data_offsets"][0]] ^= 1
        lost = {"w.05"}
    if damage == "cut":
        lost = {name for name in TENSORS if header[name]["data_offsets"][1] == len(data) - length}
        data = data[:-1]
    path.write_bytes(data)
    report = tensorio.recover(path, out, key=KEY)
    assert report.healthy == (damage == "none")
    assert set(report.lost) == lost
    assert set(report.not_proven) == {name for name in TENSORS if not name.startswith("w.0")} - lost
    got = saved(out)
    assert set(got) == set(TENSORS) - lost
    assert all(np.array_equal(array, TENSORS[name]) for name, array in got.items())
    with tensorio.open(out) as checkpoint:
        assert checkpoint.metadata == {"note": "kept"}
    with pytest.raises(DecryptionError, match="wrong key"):
        tensorio.recover(path, out, key=OTHER)


def test_a_pickle_with_a_hole_describes_nothing(tmp_path: Path) -> None:
    """Zeros in the place of a text are a text, too: nothing in a legacy file says that it was another."""
    torch = pytest.importorskip("torch")
    path, out = tmp_path / "m.pt", tmp_path / "out.pt"
    obj = {"note": "x" * 10 * CHUNK, "w": torch.arange(3000.0)}
    torch.save(obj, path, _use_new_zipfile_serialization=False)
    tensorio.encrypt(path, path, key=KEY, chunk_size=CHUNK)
    data = bytearray(path.read_bytes())
    data[HEADER + 4 * (CHUNK + TAG) + 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match="description of the tensors can't be used: chunk 4 of"):
        tensorio.recover(path, out, key=KEY)
    assert not out.exists()
    report = tensorio.recover(path, out, key=KEY, keep_damaged=True)
    assert (report.ok, set(report.damaged), report.saved) == (False, {"w"}, ())
    got = torch.load(out, weights_only=True)
    assert torch.equal(got["w"], obj["w"])
