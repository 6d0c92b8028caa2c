"""The calls that servers and libraries make, as they make them."""

from __future__ import annotations

import json
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tensorio.safetensors as safetensors  # noqa: E402
from tensorio.safetensors import SafetensorError, safe_open  # noqa: E402
from tensorio.safetensors.torch import load, load_file, save_file  # noqa: E402

Tensors = dict[str, Any]


@pytest.fixture
def state() -> Tensors:
    torch.manual_seed(1)
    return {
        "embed.weight": torch.randn(32, 8),
        "layers.0.w": torch.randn(16, 8).to(torch.bfloat16),
        "layers.0.scale": torch.tensor(2.5),
        "lm_head.weight": torch.randn(32, 8, dtype=torch.float16),
    }


@pytest.fixture
def path(state: Tensors, tmp_path: Path) -> Path:
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def same(got: Tensors, want: Tensors) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)


def test_lazy_iterators_over_shards(path: Path, state: Tensors) -> None:
    """vLLM, SGLang: tensors outlive their file, one at a time; `f.read()` where mapping is switched off."""

    def weights() -> Any:
        with safe_open(str(path), framework="pt") as f:
            for name in f.keys():  # noqa: SIM118
                yield name, f.get_tensor(name)

    same(dict(weights()), state)
    with safetensors.safe_open(str(path), framework="pt", device="cpu") as f:
        assert f.metadata() == {"format": "pt"}
        kept = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118
    same(kept, state)
    with path.open("rb") as file:
        same(load(file.read()), state)
        file.seek(0)
        same(safetensors.torch.load(memoryview(file.read())), state)


def test_threads_load_files_whose_tensors_are_taken_out(path: Path, state: Tensors) -> None:
    with ThreadPoolExecutor(4) as pool:
        for loaded in pool.map(lambda _: load_file(str(path), device="cpu"), range(8)):
            for name in list(loaded):
                assert torch.equal(loaded.pop(name), state[name])


def test_slices_are_kept_for_long_and_used_from_threads(path: Path, state: Tensors) -> None:
    """transformers: handles closed by hand, slices used later, by workers."""
    f = safe_open(str(path), framework="pt", device="cpu", backend="mmap")
    slices = {name: f.get_slice(name) for name in f.keys()}  # noqa: SIM118
    f.__exit__(None, None, None)
    assert {name: (s.get_shape(), s.get_dtype()) for name, s in slices.items()} == {
        "embed.weight": ([32, 8], "F32"), "layers.0.w": ([16, 8], "BF16"), "layers.0.scale": ([], "F32"),
        "lm_head.weight": ([32, 8], "F16"),
    }  # fmt: skip
    with ThreadPoolExecutor(4) as pool:
        got = dict(zip(slices, pool.map(lambda s: s[...], slices.values()), strict=True))
    same(got, state)
    assert slices["layers.0.scale"][()].item() == 2.5


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_tensor_parallel_ranks_take_their_part(path: Path, state: Tensors, backend: str) -> None:
    """TGI, transformers, DCP: by rows, by columns, by slices in tuples."""
    with safe_open(str(path), framework="pytorch", backend=backend) as f:
        part = f.get_slice("embed.weight")
        rows, columns = part.get_shape()
        for rank in range(4):
            a, b = rank * rows // 4, (rank + 1) * rows // 4
            assert torch.equal(part[a:b], state["embed.weight"][a:b])
            c, d = rank * columns // 4, (rank + 1) * columns // 4
            assert torch.equal(part[:, c:d], state["embed.weight"][:, c:d])
            assert torch.equal(part[(slice(a, b), slice(c, d))], state["embed.weight"][a:b, c:d])


def test_what_a_model_hub_s_tools_ask(path: Path, state: Tensors) -> None:
    """accelerate, diffusers, sentence-transformers."""
    with safe_open(path, framework="pt") as f:
        assert f.metadata().get("format") in ("pt", "tf", "flax")
        assert f.offset_keys() == list(load_file(path, device=torch.device("cpu")))
    same(load_file(path, device="cpu:0"), state)
    same(load(path.read_bytes()), state)


def test_devices_of_torch_are_taken_and_reach_torch(path: Path) -> None:
    """ComfyUI hands on `device.type`, others the device; without one, torch says so."""
    with safe_open(str(path), framework="pt", device=torch.device("cpu").type) as f:
        assert f.get_tensor("embed.weight").device.type == "cpu"
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    for device in ("cuda", "cuda:0", torch.device("cuda", 0), 0):
        with pytest.raises((RuntimeError, AssertionError)), safe_open(path, "pt", device=device) as f:
            f.get_tensor("embed.weight")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_tensors_go_to_a_cuda_device(path: Path, state: Tensors, backend: str) -> None:
    loaded = load_file(path, device="cuda:0", backend=backend)
    assert {t.device for t in loaded.values()} == {torch.device("cuda:0")}
    same({name: tensor.cpu() for name, tensor in loaded.items()}, state)
    with safe_open(path, "pt", device=0, backend=backend) as f:
        assert torch.equal(f.get_slice("embed.weight")[:, 2:4].cpu(), state["embed.weight"][:, 2:4])
        assert f.get_tensor("layers.0.w").is_cuda


def test_damage_is_recognised_by_the_words_that_are_looked_for(path: Path) -> None:
    """ComfyUI looks into the text of the exception for these two."""
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    with pytest.raises(SafetensorError) as caught:
        load_file(path)
    assert len(caught.value.args) > 0
    assert "MetadataIncompleteBuffer" in caught.value.args[0]
    path.write_bytes(b"<!DOCTYPE html><html>not a file of tensors</html>")
    with pytest.raises(SafetensorError) as caught:
        safe_open(str(path), framework="pt", device="cpu")
    assert "HeaderTooLarge" in caught.value.args[0]


def test_state_dicts_are_saved_by_parts_with_an_index(state: Tensors, tmp_path: Path) -> None:
    """What transformers and vLLM write: ordered dicts, one file per part, notes."""
    index = {}
    for i, (name, tensor) in enumerate(state.items()):
        file = f"model-{i:05}-of-00004.safetensors"
        save_file(OrderedDict({name: tensor}), tmp_path / file, metadata={"format": "pt"})
        index[name] = file
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": index}))
    got = {}
    for name, file in json.loads((tmp_path / "index.json").read_text())["weight_map"].items():
        with safe_open(tmp_path / file, "pt") as f:
            got[name] = f.get_tensor(name)
    same(got, state)


def test_jax_and_flax_get_their_arrays(path: Path, state: Tensors, tmp_path: Path) -> None:
    jnp = pytest.importorskip("jax.numpy")
    from tensorio.safetensors import flax

    for loaded in (flax.load_file(path), flax.load(path.read_bytes()), flax.load_file(path, backend="pread")):
        for name, tensor in state.items():
            assert str(loaded[name].dtype) == str(tensor.dtype).removeprefix("torch.")
            assert np.array_equal(np.asarray(loaded[name], np.float32), tensor.float().numpy())
    arrays = {"e": jnp.ones((2, 3), jnp.float8_e4m3fn), "b": jnp.ones(4, jnp.bfloat16)}
    before = dict(arrays)
    flax.save_file(arrays, tmp_path / "f")
    assert flax.save(arrays) == (tmp_path / "f").read_bytes()
    assert all(arrays[name] is before[name] for name in before)  # the caller's dict is as it was
    with safe_open(tmp_path / "f", "jax") as f:
        assert f.get_tensor("e").dtype == jnp.float8_e4m3fn
        assert f.get_slice("b")[-2:].shape == (2,)
