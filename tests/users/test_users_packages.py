"""Packages that use safetensors and torch.load/save, unchanged, under ``python -m tensorio.dropin``."""

from __future__ import annotations

from pathlib import Path

import pytest
import users

pytestmark = [pytest.mark.plain_build, pytest.mark.timeout(users.LIMIT + 30)]


def test_users_transformers(tmp_path: Path) -> None:
    original, ours = users.run("transformers", tmp_path, "transformers", "accelerate")
    users.assert_same(original, ours)
    users.assert_same_files(original, ours, "trainer_state.json", "training_args.bin")
    served = ours.served()
    assert served.keys() >= {"safetensors.safe_open", "safetensors.torch.save_file", "safetensors.torch.load",
                             "torch.load", "torch.save"}  # fmt: skip
    assert not ours.passed_on()


def test_users_diffusers(tmp_path: Path) -> None:
    original, ours = users.run("diffusers", tmp_path, "diffusers")
    users.assert_same(original, ours)
    users.assert_same_files(original, ours)
    assert ours.served().keys() >= {"safetensors.torch.load_file", "safetensors.torch.save_file",
                                    "safetensors.torch.load", "torch.load", "torch.save"}  # fmt: skip
    assert not ours.passed_on()


def test_users_sentence_transformers(tmp_path: Path) -> None:
    original, ours = users.run("sentence_transformers", tmp_path, "sentence_transformers")
    users.assert_same(original, ours)
    users.assert_same_files(original, ours)
    assert ours.served().keys() >= {"safetensors.safe_open", "safetensors.torch.save_file", "torch.load", "torch.save"}
    assert not ours.passed_on()


def test_users_timm(tmp_path: Path) -> None:
    original, ours = users.run("timm", tmp_path, "timm")
    users.assert_same(original, ours)
    users.assert_same_files(original, ours)
    assert ours.served().keys() >= {"safetensors.torch.load_file", "safetensors.torch.save_file", "torch.load",
                                    "torch.save"}  # fmt: skip
    assert not ours.passed_on()


def test_users_peft(tmp_path: Path) -> None:
    original, ours = users.run("peft", tmp_path, "peft", "transformers")
    users.assert_same(original, ours)
    users.assert_same_files(original, ours)
    assert ours.served().keys() >= {"safetensors.torch.load_file", "safetensors.torch.save_file", "torch.load",
                                    "torch.save"}  # fmt: skip
    assert not ours.passed_on()


def test_users_huggingface_hub(tmp_path: Path) -> None:
    original, ours = users.run("hub", tmp_path, "huggingface_hub")
    users.assert_same(original, ours)
    users.assert_same_files(original, ours)
    assert ours.served().keys() >= {"safetensors.torch.load_file", "safetensors.torch.save_file", "torch.load",
                                    "torch.save"}  # fmt: skip
    assert not ours.passed_on()


def test_users_engines(tmp_path: Path) -> None:
    """What vLLM and SGLang call; the packages themselves need an accelerator's toolkit to install."""
    original, ours = users.run("engine", tmp_path)
    users.assert_same(original, ours)
    users.assert_same_files(original, ours, "consolidated.pth")  # legacy: storages are named by their addresses
    assert ours.served().keys() >= {"safetensors.safe_open", "safetensors.torch.load", "safetensors.torch.load_file",
                                    "safetensors.torch.save_file", "torch.load", "torch.save"}  # fmt: skip
    assert ours.passed_on() == {"torch.save": 1}  # the legacy format
