"""Deltas: what is stored, what is read back, and what is refused."""

from __future__ import annotations

import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

import tensorio
from tensorio import ChecksumError, FormatError, HeaderError, LimitError, TruncatedError, UnsupportedError
from tensorio.checkpoint._saving import SaveRequest, prepare

KEY = "tensorio.delta"


def step(number: int) -> dict[str, Any]:
    """The tensors at a step: some stay, some change, some come and go."""
    rng = np.random.default_rng(0)
    out = {f"layers.{i}.weight": rng.standard_normal((33, 17)).astype("f4") for i in range(6)}
    out["empty"] = np.zeros((0, 3), "i8")
    out["scalar"] = np.array(3.5)
    out["layers.0.weight"] = out["layers.0.weight"] + number
    out["steps"] = np.array([number])
    if number % 2:
        out["odd"] = np.arange(5, dtype="u1")
        del out["layers.5.weight"]
    return out


def assert_same(got: Any, want: dict[str, Any]) -> None:
    assert sorted(got) == sorted(want)
    for name, array in want.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_array_equal(got[name], array)


@pytest.fixture
def chain(tmp_path: Path) -> list[Path]:
    """A whole file and three deltas, each on the one before."""
    paths = [tmp_path / f"step-{i}.safetensors" for i in range(4)]
    tensorio.save(step(0), paths[0], metadata={"run": "a"})
    for number in (1, 2, 3):
        tensorio.save(step(number), paths[number], base=paths[number - 1], metadata={"run": str(number)})
    return paths


def test_delta_stores_what_changed_and_reads_as_a_whole(chain: list[Path]) -> None:
    for number, path in enumerate(chain):
        assert_same(tensorio.load(path), step(number))
        assert_same(tensorio.load(path, mmap=False), step(number))
        assert_same(tensorio.load(path, writable=True), step(number))
        with tensorio.open(path, verify=True) as checkpoint:
            assert_same(checkpoint, step(number))
            assert checkpoint.metadata == {"run": str(number) if number else "a"}
            assert checkpoint.files == tuple(str(p) for p in reversed(chain[: number + 1]))
            assert_same(pickle.loads(pickle.dumps(checkpoint)), step(number))
        assert tensorio.delta_chain(path) == [str(p) for p in reversed(chain[: number + 1])]


def test_reference_reads_the_changed_tensors(chain: list[Path]) -> None:
    got = safetensors.numpy.load_file(chain[1])
    assert_same(got, {name: step(1)[name] for name in ("layers.0.weight", "odd", "steps", "empty")})


def test_save_says_how_much_is_unchanged(chain: list[Path], tmp_path: Path) -> None:
    same = tensorio.save(step(0), tmp_path / "again.safetensors", base=chain[0])
    assert same.unchanged == sum(array.nbytes for array in step(0).values())
    assert_same(tensorio.load(tmp_path / "again.safetensors"), step(0))
    assert same.nbytes < 2000
    none = tensorio.save({"x": np.ones(3)}, tmp_path / "new.safetensors", base=chain[0])
    assert none.unchanged == 0
    with safetensors.safe_open(tmp_path / "new.safetensors", "np") as file:
        assert file.metadata() is None  # nothing is taken from the base: no delta


@pytest.mark.parametrize("target", ["safetensors", "pt"])
def test_convert_makes_one_whole_file(chain: list[Path], target: str, tmp_path: Path) -> None:
    whole = tmp_path / f"whole.{target}"
    tensorio.convert(chain[3], whole)
    for path in chain:
        path.unlink()
    assert_same(tensorio.load(whole), step(3))
    if target == "safetensors":
        tensorio.save(step(3), tmp_path / "direct.safetensors", metadata={"run": "3"})
        assert whole.read_bytes() == (tmp_path / "direct.safetensors").read_bytes()


@pytest.mark.parametrize("wrap", [lambda path: path, str, tensorio.open], ids=["path", "str", "checkpoint"])
def test_base_may_be_a_path_or_a_checkpoint(wrap: Any, chain: list[Path], tmp_path: Path) -> None:
    tensorio.save(step(5), tmp_path / "x.safetensors", base=wrap(chain[3]))
    assert_same(tensorio.load(tmp_path / "x.safetensors"), step(5))


def test_base_that_is_open_is_found_whatever_the_current_folder(
    chain: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with tensorio.open(chain[0].name) as base:
        monkeypatch.chdir(tmp_path / "elsewhere")
        tensorio.save(step(1), tmp_path / "x.safetensors", base=base)
    assert_same(tensorio.load(tmp_path / "x.safetensors"), step(1))


def test_current_folder_may_change_while_a_delta_is_written(
    chain: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "x.safetensors"
    job = prepare(step(1), target, SaveRequest(base=chain[0].name))
    monkeypatch.chdir(tmp_path / "elsewhere")
    job.write()
    assert_same(tensorio.load(target), step(1))


@pytest.mark.parametrize("named", ["folder", "index"])
def test_folder_or_index_is_no_base(named: str, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    tensorio.save(step(0), tmp_path / "m" / "model.safetensors")
    index = tmp_path / "m" / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(step(0), "model.safetensors")}))
    base, target = (
        (index, index.parent / "x.safetensors") if named == "index" else (index.parent, tmp_path / "x.safetensors")
    )
    with pytest.raises(UnsupportedError, match=r"base= is one \.safetensors file"):
        tensorio.save(step(1), target, base=base)
    assert not target.exists()


def test_torch_tensors_and_odd_layouts_are_compared_by_value(chain: list[Path], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = {name: torch.from_numpy(array) for name, array in step(0).items()}
    state["layers.1.weight"] = state["layers.1.weight"].t().contiguous().t()
    state["layers.2.weight"] = step(0)["layers.2.weight"].astype(">f4")
    said = tensorio.save(state, tmp_path / "x.safetensors", base=chain[0])
    assert said.unchanged == sum(array.nbytes for array in step(0).values())
    assert_same(tensorio.load(tmp_path / "x.safetensors"), step(0))


def test_bits_count_and_not_values(tmp_path: Path) -> None:
    zeros = {"a": np.zeros(4), "nan": np.full(3, np.nan), "same bytes": np.arange(4, dtype="u4")}
    tensorio.save(zeros, tmp_path / "a.safetensors")
    other = {"a": -zeros["a"], "nan": zeros["nan"], "same bytes": zeros["same bytes"].view("i4")}
    said = tensorio.save(other, tmp_path / "b.safetensors", base=tmp_path / "a.safetensors")
    assert said.unchanged == zeros["nan"].nbytes
    got = tensorio.load(tmp_path / "b.safetensors")
    assert np.signbit(got["a"]).all()
    assert got["same bytes"].dtype == np.int32


def test_one_byte_anywhere_in_a_large_tensor_is_seen(tmp_path: Path) -> None:
    big = np.zeros(40 << 20, "u1")
    tensorio.save({"big": big, "x": np.ones(1)}, tmp_path / "a.safetensors")
    for at in (0, (16 << 20) - 1, 16 << 20, len(big) - 1):
        changed = big.copy()
        changed[at] = 1
        said = tensorio.save({"big": changed, "x": np.ones(1)}, tmp_path / "b.safetensors",
                             base=tmp_path / "a.safetensors")  # fmt: skip
        assert said.unchanged == 8
    said = tensorio.save({"big": big}, tmp_path / "b.safetensors", base=tmp_path / "a.safetensors")
    assert said.unchanged == len(big)
    assert tensorio.verify(tmp_path / "b.safetensors").ok


def test_folder_may_be_moved(chain: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for path in chain:
        path.rename(moved / path.name)
    assert_same(tensorio.load(moved / chain[3].name), step(3))
    monkeypatch.chdir(moved)
    assert_same(tensorio.load(chain[3].name), step(3))
    (tmp_path / "latest.safetensors").symlink_to(moved / chain[2].name)
    assert_same(tensorio.load(tmp_path / "latest.safetensors"), step(2))


# ---------------------------------------------------------------------- lost and changed


def test_missing_base_is_named(chain: list[Path]) -> None:
    chain[1].unlink()
    with pytest.raises(TruncatedError, match=r"is in 'step-1.safetensors', which is not there.*step-2") as caught:
        tensorio.load(chain[3])
    assert caught.value.path == str(chain[2])


@pytest.mark.parametrize("how", ["other step", "other header", "cut", "in place"])
def test_changed_base_is_named(how: str, chain: list[Path]) -> None:
    if how == "other step":
        tensorio.save(step(2) | {"odd": np.arange(5, dtype="u1")}, chain[0])
    elif how == "other header":
        tensorio.save(step(0), chain[0])
    elif how == "cut":
        chain[0].write_bytes(chain[0].read_bytes()[:-1])
    else:
        with chain[0].open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")
    for read in (tensorio.open, tensorio.load, tensorio.verify):
        with pytest.raises(ChecksumError, match=r"its base 'step-0.safetensors' is another file.*put that file back"):
            read(chain[2])


def test_verify_finds_a_changed_byte_that_the_fingerprint_does_not_see(tmp_path: Path) -> None:
    state = {"a": np.zeros(100_000, "u1"), "b": np.ones(3)}
    base = tmp_path / "a.safetensors"
    tensorio.save(state, base)
    tensorio.save({**state, "b": np.ones(2)}, tmp_path / "b.safetensors", base=base)
    raw = bytearray(base.read_bytes())
    raw[-1000] ^= 1
    base.write_bytes(raw)
    tensorio.open(tmp_path / "b.safetensors").close()
    report = tensorio.verify(tmp_path / "b.safetensors")
    assert [problem.record for problem in report.problems] == ["a"]
    with pytest.raises(ChecksumError):
        tensorio.load(tmp_path / "b.safetensors", verify=True)


# ---------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("of", [0, 1], ids=["base", "delta"])
def test_verify_compares_the_digests_of_every_file_of_a_chain(of: int, tmp_path: Path) -> None:
    paths = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    tensorio.save(step(0), paths[0], digests=True)
    tensorio.save(step(1), paths[1], base=paths[0], digests=True)
    report = tensorio.verify(paths[1], require=True)
    assert report.ok
    assert report.checked == sum(array.nbytes for array in step(1).values())
    name = ["layers.1.weight", "layers.0.weight"][of]
    with tensorio.open(paths[of]) as checkpoint:
        at = checkpoint.infos[name].chunks[0].extent.offset + 100  # where no fingerprint looks
    with open(paths[of], "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    report = tensorio.verify(paths[1])
    assert {problem.record for problem in report.problems} == {name}
    assert any("SHA-256" in str(problem) for problem in report.problems)


def test_what_no_delta_can_be_is_refused(chain: list[Path], tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    (tmp_path / "sub").mkdir()
    tensorio.save(step(0), tmp_path / "sub" / "base.pt")
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (tmp_path / "x.pt", chain[0], UnsupportedError, "torch_zip can't refer to another"),
        (tmp_path / "sub" / "x.safetensors", chain[0], UnsupportedError, "in the folder of its base"),
        (
            tmp_path / "sub" / "x.safetensors",
            tmp_path / "sub" / "base.pt",
            UnsupportedError,
            "is one .safetensors file",
        ),
        (chain[1], chain[3], ValueError, "is one that base= needs"),
        (chain[0], chain[0], ValueError, "is one that base= needs"),
        (tmp_path / "x.safetensors", tmp_path / "none.safetensors", FileNotFoundError, "none.safetensors"),
        (tmp_path / "x.safetensors", tensorio.open(chain[0].read_bytes()), ValueError, "opened by one"),
    ]
    for path, base, error, message in cases:
        with pytest.raises(error, match=message):
            tensorio.save(step(1), path, base=base)
    with pytest.raises(ValueError, match="may not have the key"):
        tensorio.save(step(1), tmp_path / "x.safetensors", base=chain[0], metadata={KEY: ""})
    with pytest.raises(UnsupportedError, match="max_shard_size"):
        tensorio.save(step(1), tmp_path / "x.safetensors", base=chain[0], max_shard_size="1MB")
    assert sorted(p for p in tmp_path.iterdir() if p.is_file()) == before
    assert_same(tensorio.load(chain[3]), step(3))


def test_delta_without_a_path_has_no_base(chain: list[Path]) -> None:
    for source in (chain[1].read_bytes(), io.BytesIO(chain[1].read_bytes())):
        with pytest.raises(UnsupportedError, match="open it by its path"):
            tensorio.load(source)


def test_chain_ends_somewhere(tmp_path: Path) -> None:
    path = tmp_path / "0.safetensors"
    tensorio.save({"a": np.ones(2), "b": np.array([0])}, path)
    for number in range(1, 64):
        after = tmp_path / f"{number}.safetensors"
        tensorio.save({"a": np.ones(2), "b": np.array([number])}, after, base=path)
        path = after
    assert tensorio.load(path)["b"] == 63
    with pytest.raises(UnsupportedError, match="64 files, one on the other"):
        tensorio.save({"a": np.ones(2)}, tmp_path / "x.safetensors", base=path)


# -------------------------------------------------------------------- files of strangers


def forged(path: Path, **changes: Any) -> Path:
    """A delta whose note is a stranger's."""
    with safetensors.safe_open(path, "np") as file:
        note = json.loads(file.metadata()[KEY])
    note = {key: value for key, value in {**note, **changes}.items() if value is not None}
    safetensors.numpy.save_file({"x": np.ones(1)}, path, {KEY: json.dumps(note)})
    return path


OUTSIDE = ["/etc/passwd", "../outside.safetensors", "a/b", "..", ".", "", "a\\b", "C:x", "x\x00y", "s3://x/y", 7, ["a"]]


@pytest.mark.parametrize("name", OUTSIDE, ids=repr)
def test_base_outside_the_folder_is_never_opened(name: Any, chain: list[Path]) -> None:
    with pytest.raises(HeaderError, match="expected the name of a file in the same folder"):
        tensorio.open(forged(chain[1], base=name))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"base": "step-1.safetensors"}, HeaderError, "leads back to 'step-1.safetensors'"),
        ({"fingerprint": "0" * 64}, ChecksumError, "another file than when it was saved"),
        ({"fingerprint": "0" * 63}, HeaderError, "hexadecimal"),
        ({"unchanged": {"nope": "00000000"}}, HeaderError, "the base has no such tensor"),
        ({"unchanged": {"scalar": "0"}}, HeaderError, "hexadecimal"),
        ({"unchanged": ["scalar"]}, HeaderError, "hexadecimal"),
        ({"unchanged": None}, HeaderError, "expected version, base"),
        ({"version": 2}, UnsupportedError, "version 2 is not known"),
        ({"version": 0}, UnsupportedError, "version 0 is not known"),
        ({"version": "1"}, HeaderError, "expected version, base"),
        ({"more": 1}, HeaderError, "expected version, base"),
    ],
)
def test_note_that_lies_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str, chain: list[Path]
) -> None:
    with pytest.raises(error, match=message):
        tensorio.load(forged(chain[1], **changes))


def test_name_that_is_in_the_file_and_in_the_base_is_refused(chain: list[Path]) -> None:
    with safetensors.safe_open(chain[1], "np") as file:
        note = file.metadata()[KEY]
    safetensors.numpy.save_file({"scalar": np.ones(1)}, chain[1], {KEY: note})
    with pytest.raises(HeaderError, match="says of a tensor of the file"):
        tensorio.open(chain[1])


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"version": 1, "version": 1}', "[" * 100_000, '{"version": true}']
)
def test_note_that_is_no_note_is_refused(text: str, chain: list[Path]) -> None:
    safetensors.numpy.save_file({"x": np.ones(1)}, chain[1], {KEY: text})
    with pytest.raises((HeaderError, LimitError)):
        tensorio.open(chain[1])


def test_base_that_is_no_regular_file_is_refused(chain: list[Path]) -> None:
    chain[0].unlink()
    os.mkfifo(chain[0])
    with pytest.raises(UnsupportedError, match="found a FIFO"):
        tensorio.open(chain[1])
    chain[0].unlink()
    chain[0].mkdir()
    with pytest.raises(OSError, match="folder"):
        tensorio.open(chain[1])


def test_failed_open_leaves_no_descriptor(chain: list[Path]) -> None:
    chain[1].write_bytes(chain[1].read_bytes() + b"x")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(FormatError):
            tensorio.open(chain[3])
    assert len(os.listdir("/proc/self/fd")) == before
