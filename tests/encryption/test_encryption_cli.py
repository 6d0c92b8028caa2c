"""``tensorio encrypt``, ``decrypt``, ``keygen``, and ``--key`` of the others: what they write, say and refuse."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="needs the extra crypt")
import safetensors.numpy

import tensorio
from tensorio.cli import run

TENSORS = {"head.w": np.arange(3000, dtype="f4"), "body.w": np.ones((7, 2), "i2")}


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the tool; its exit code, output and complaints."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = run([str(a) for a in arguments])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def model(tmp_path: Path) -> Path:
    safetensors.numpy.save_file(TENSORS, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


@pytest.fixture
def key(tmp_path: Path, tool: Any) -> str:
    assert tool("keygen", tmp_path / "key")[0] == 0
    return f"file:{tmp_path / 'key'}"


def test_keygen_writes_a_key_for_its_owner_alone(tool: Any, tmp_path: Path) -> None:
    code, out, err = tool("keygen", tmp_path / "key")
    text = (tmp_path / "key").read_text()
    assert (code, err) == (0, "")
    assert re.fullmatch("[0-9a-f]{64}\n", text)
    assert text.strip() not in out
    path = tmp_path / "key"
    assert " ".join(out.split()) == f"{path} a key; use it as --key file:{path}"
    if os.name == "posix":
        assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    code, out, err = tool("keygen", tmp_path / "key")
    assert (code, out) == (2, "")
    assert "File exists" in err
    assert (tmp_path / "key").read_text() == text


def test_there_and_back(tool: Any, model: Path, key: str, tmp_path: Path) -> None:
    code, out, err = tool("encrypt", model, tmp_path / "e", "--key", key, "--key-id", "mine")
    assert (code, err) == (0, "")
    assert re.search(r"e +encrypted, 12\.\d KiB in [\d.]+ s\n", out)
    code, out, err = tool("decrypt", tmp_path / "e", tmp_path / "back", "--key", key)
    assert (code, err) == (0, "")
    assert "decrypted, " in out
    assert (tmp_path / "back").read_bytes() == model.read_bytes()


def test_other_commands_take_the_key(tool: Any, model: Path, key: str, tmp_path: Path) -> None:
    tool("encrypt", model, tmp_path / "e", "--key", key)
    code, out, _ = tool("inspect", tmp_path / "e", "--key", key)
    assert code == 0
    assert "head" in out
    code, out, _ = tool("verify", tmp_path / "e", "--key", key)
    assert code == 0
    assert "11.7 KiB in 2 records checked, all right" in out
    assert "no checksums" not in out
    assert tool("convert", tmp_path / "e", tmp_path / "c.safetensors", "--key", key)[0] == 0
    assert (tmp_path / "c.safetensors").read_bytes() == model.read_bytes()


COMMANDS = {
    "merge": ["merge", "E", "E", "-o", "DST.safetensors"],
    "strip": ["strip", "E", "DST.safetensors"],
    "recover": ["recover", "E", "DST.safetensors"],
    "shard": ["shard", "E", "DST", "--tp", "2", "--rules", "RULES"],
    "unshard": ["shard", "--merge", "RANKS", "DST.safetensors"],
}


def words(command: str, folder: Path) -> list[Path | str]:
    """The arguments of a command, with what it reads and writes in a folder."""
    paths = {
        "E": "enc/m.safetensors",
        "RANKS": "ranks.e",
        "RULES": "rules",
        "DST": "out",
        "DST.safetensors": "out.safetensors",
    }
    return [folder / paths[word] if word in paths else word for word in COMMANDS[command]]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_write_take_the_key(command: str, tool: Any, model: Path, key: str, tmp_path: Path) -> None:
    (tmp_path / "rules").write_text("head.w = 0\n** = replicate\n")
    assert tool("shard", model, tmp_path / "ranks", "--tp", 2, "--rules", tmp_path / "rules")[0] == 0
    tool("encrypt", tmp_path / "ranks", tmp_path / "ranks.e", "--key", key)
    (tmp_path / "enc").mkdir()
    tool("encrypt", model, tmp_path / "enc" / model.name, "--key", key)
    code, out, err = tool(*words(command, tmp_path))
    assert (code, out) == (1, "")
    assert "--key" in err
    assert not list(tmp_path.glob("out*"))
    code, out, err = tool(*words(command, tmp_path), "--key", key)
    assert (code, err) == (0, "")
    if command == "shard":
        for path in (tmp_path / "ranks").iterdir():
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    else:
        assert (tmp_path / "out.safetensors").read_bytes() == model.read_bytes()


def test_a_prefix_is_looked_for_in_encrypted_adapters(tool: Any, model: Path, key: str, tmp_path: Path) -> None:
    safetensors.numpy.save_file({"base.head.w": np.zeros(3000, "f4")}, tmp_path / "adapter")
    tool("encrypt", model, tmp_path / "e", "--key", key)
    tool("encrypt", tmp_path / "adapter", tmp_path / "a", "--key", key)
    dst = tmp_path / "out.safetensors"
    command = ["merge", tmp_path / "e", tmp_path / "a", "-o", dst, "--key", key, "--strip-prefix"]
    code, _, err = tool(*command, "other.")
    assert code == 1
    assert "begins with --strip-prefix 'other.'; the first is 'base.head.w'" in err
    code, _, err = tool(*command, "base.")
    assert (code, err) == (0, "")
    got = safetensors.numpy.load_file(dst)
    assert sorted(got) == sorted(TENSORS)
    assert not got["head.w"].any()
    code, _, err = tool("merge", tmp_path / "e", tmp_path / "adapter", *command[3:], "base.")
    assert code == 1
    assert "key= (or --key) is of all that is merged" in err


def test_publish_takes_the_key(tool: Any, model: Path, key: str, tmp_path: Path) -> None:
    tool("encrypt", model, tmp_path / "e", "--key", key)
    name = f"test-{os.getpid()}-key"
    assert "--key" in tool("publish", "--persistent", tmp_path / "e", name)[2]
    try:
        code, _, err = tool("publish", "--persistent", tmp_path / "e", name, "--key", key)
        assert (code, err) == (0, "")
        with tensorio.attach(name) as shared:
            assert all(np.array_equal(shared[fqn], array) for fqn, array in TENSORS.items())
    finally:
        tool("unpublish", name)


@pytest.mark.parametrize("command", ["inspect", "verify", "convert"])
def test_without_the_key_they_ask_for_it(command: str, tool: Any, model: Path, key: str, tmp_path: Path) -> None:
    tool("encrypt", model, tmp_path / "e", "--key", key, "--key-id", "mine")
    code, _, err = tool(command, tmp_path / "e", *([tmp_path / "c.pt"] if command == "convert" else []))
    assert code == 1
    assert "expected the key called 'mine'" in err
    assert "--key" in err
    assert err.count("\n") == 1


def test_chosen_tensors_and_another_key(tool: Any, model: Path, key: str, tmp_path: Path) -> None:
    code, _, err = tool("encrypt", model, model, "--key", key, "--tensors", "head.*", "--chunk-size", 4096)
    assert (code, err) == (0, "")
    stored = safetensors.numpy.load_file(model)
    assert stored["head.w"].dtype == np.uint8
    assert np.array_equal(stored["body.w"], TENSORS["body.w"])
    tool("keygen", tmp_path / "new")
    new = f"file:{tmp_path / 'new'}"
    code, _, err = tool("encrypt", model, model, "--key", new, "--old-key", key, "--tensors", "**")
    assert (code, err) == (0, "")
    tool("decrypt", model, model, "--key", new)
    got = safetensors.numpy.load_file(model)
    assert all(np.array_equal(got[name], array) for name, array in TENSORS.items())


def test_files_in_the_clear_are_listed(tool: Any, model: Path, key: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    model.rename(folder / model.name)
    (folder / "config.json").write_text("{}")
    code, out, err = tool("encrypt", folder, tmp_path / "e", "--key", key)
    assert (code, err) == (0, "")
    assert re.search(r"in the clear: 1 file\s+config\.json\s*$", out)
    code, out, err = tool("decrypt", tmp_path / "e", tmp_path / "back", "--key", key)
    assert re.search(r"copied, since they were not encrypted: 1 file\s+config\.json\s*$", out)
    code, out, err = tool("encrypt", folder, tmp_path / "none", "--key", key, "--clear", "")
    assert (code, err) == (0, "")
    assert "in the clear" not in out
    assert (tmp_path / "none" / "config.json").read_bytes()[:7] == b"\x89TIOENC"


def test_damage_is_named(tool: Any, model: Path, key: str, tmp_path: Path) -> None:
    tool("encrypt", model, tmp_path / "e", "--key", key, "--chunk-size", 4096)
    data = bytearray((tmp_path / "e").read_bytes())
    data[-1] ^= 1
    (tmp_path / "e").write_bytes(data)
    code, out, _ = tool("verify", tmp_path / "e", "--key", key)
    assert code == 1
    assert re.search(r"bad record body.w|bad record head.w", out)
    assert "chunk 2 of 3 was changed" in out
    code, _, err = tool("decrypt", tmp_path / "e", tmp_path / "back", "--key", key)
    assert code == 1
    assert "chunk 2 of 3 was changed" in err
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(("more", "code", "match"), [
    ((), 2, "Missing option '--key'"),
    (("--key", "secret"), 2, "'env:NAME', 'file:PATH'.*found other text"),
    (("--key", "env:NO_SUCH_VARIABLE"), 2, "no variable 'NO_SUCH_VARIABLE'"),
    (("--key", "file:no-such-file"), 2, "No such file"),
    (("--key", "KEY", "--chunk-size", "5000"), 2, "--chunk-size is a power of two"),
    (("--key", "KEY", "--clear", "*.json"), 2, "--clear is for folders"),
    (("--key", "KEY", "--tensors", "x"), 1, "--tensors 'x' fits no tensor"),
    (("--key", "KEY", "--tensors", "a**"), 2, r"\*\* stands for whole levels"),
    (("--key", "KEY", "--key-id", "x" * 41), 2, "at most 40 bytes"),
    (("--key", "KEY", "--old-key", "KEY"), 1, "--old-key was given, but nothing in the file is encrypted"),
])  # fmt: skip
def test_wrong_use_is_explained(
    more: tuple[str, ...], code: int, match: str, tool: Any, model: Path, key: str, tmp_path: Path
) -> None:
    found, out, err = tool("encrypt", model, tmp_path / "e", *(key if word == "KEY" else word for word in more))
    assert (found, out) == (code, "")
    assert re.search(match, " ".join(err.split()))
    assert not (tmp_path / "e").exists()
