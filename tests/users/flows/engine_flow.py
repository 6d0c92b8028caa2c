"""The calls that the loaders of inference engines make, in the order and with the arguments they make them."""

from __future__ import annotations

import concurrent.futures
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from safetensors.torch import load, load_file, safe_open, save_file

Pairs = Iterator[tuple[str, torch.Tensor]]


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(12)
    out: dict[str, torch.Tensor] = {}
    for i in range(6):
        out[f"layers.{i}.qkv.weight"] = torch.randn(24, 16).bfloat16()
        out[f"layers.{i}.mlp.weight"] = torch.randn(16, 40).to(torch.float8_e4m3fn)
        out[f"layers.{i}.mlp.weight_scale_inv"] = torch.rand(1, 1)
        out[f"layers.{i}.norm.weight"] = torch.randn(16)
    out["embed.weight"] = torch.randn(50, 16).half()
    out["expert.ids"] = torch.arange(9)
    out["mask"] = torch.arange(5) % 2 == 0
    out["scalar"] = torch.tensor(2.5)
    out["empty"] = torch.zeros(0, 16)
    return out


def split(count: int) -> list[dict[str, torch.Tensor]]:
    items = sorted(weights().items())
    return [dict(items[i::count]) for i in range(count)]


def write(folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    where = {}
    for i, part in enumerate(split(11)):
        name = f"model-{i + 1}-of-11.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    for i, part in enumerate(split(3)):
        torch.save(part, folder / f"pytorch_model-{i + 1:05}-of-00003.bin")
    old = {name: tensor for name, tensor in weights().items() if tensor.dtype != torch.float8_e4m3fn}
    torch.save({"model": old}, folder / "consolidated.pth", _use_new_zipfile_serialization=False)
    save_sharded_state(folder)
    return weights()


def save_sharded_state(folder: Path, limit: int = 3000) -> None:
    """Per rank, in parts of limited size; tensors are narrowed views of what the rank holds."""
    for rank in range(2):
        part: dict[str, torch.Tensor] = {}
        number = 0
        for name, tensor in weights().items():
            half = tensor[rank::2].contiguous() if tensor.ndim == 2 and len(tensor) else tensor
            if part and sum(t.nbytes for t in part.values()) + half.nbytes > limit:
                save_file(part, str(folder / f"model-rank-{rank}-part-{number}.safetensors"))
                part, number = {}, number + 1
            part[name] = half
        save_file(part, str(folder / f"model-rank-{rank}-part-{number}.safetensors"))


def files(folder: Path, pattern: str) -> list[str]:
    """In the order of their numbers."""
    return sorted(map(str, folder.glob(pattern)), key=lambda p: [int(d) for d in p.split("-") if d.isdigit()] + [p])


def lazily(paths: Iterable[str]) -> Pairs:
    for path in paths:
        with safe_open(path, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118
                yield name, f.get_tensor(name)


def eagerly(paths: Iterable[str]) -> Pairs:
    for path in paths:
        with open(path, "rb") as f:
            state = load(f.read())
        for name in sorted(state):
            yield name, state[name]


def warmed(paths: list[str]) -> Pairs:
    """Files are read by other threads meanwhile, for the cache."""

    def touch(path: str) -> None:
        with open(path, "rb") as f:
            while f.read(16 << 20):
                pass

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        done = [pool.submit(touch, path) for path in paths]
        yield from lazily(paths)
        for future in done:
            future.result()


def by_threads(paths: list[str]) -> Pairs:
    """Whole files at once in several threads, handed on as they come."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for future in concurrent.futures.as_completed([pool.submit(load_file, p, device="cpu") for p in paths]):
            state = future.result()
            while state:
                yield state.popitem()


def dropping_pages(paths: Iterable[str]) -> Pairs:
    """Each file's pages are given up once its tensors have been taken; these outlive it."""
    for path in paths:
        with safetensors.safe_open(path, framework="pt", device="cpu") as f:
            for name in f.keys():  # noqa: SIM118
                yield name, f.get_tensor(name)
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def from_torch(paths: Iterable[str], map_location: Any = "cpu", **options: Any) -> Pairs:
    for path in paths:
        state = torch.load(path, map_location=map_location, weights_only=True, **options)
        yield from state.items()
        del state


def cached_as_numpy(paths: Iterable[str], folder: Path) -> Pairs:
    """Each tensor in a file of NumPy's; what NumPy has no type for, as float32."""
    folder.mkdir()
    names = []
    for path in paths:
        for name, tensor in torch.load(path, map_location="cpu", weights_only=True).items():
            plain = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn) else tensor
            np.save(folder / f"{name}.npy", plain.numpy())
            names.append(name)
    for name in names:
        yield name, torch.from_numpy(np.load(folder / f"{name}.npy"))


def sharded_state(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    """Into parameters that are there already, narrowed to what the file has."""
    out = {}
    for path in files(folder, f"model-rank-{rank}-part-*.safetensors"):
        with safe_open(path, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118
                tensor = f.get_tensor(name)
                held = torch.zeros_like(weights()[name])
                out[name] = held.narrow(0, 0, len(tensor)) if tensor.ndim else held
                out[name].copy_(tensor)
    return out


def by_slices(paths: Iterable[str], rank: int = 1) -> Pairs:
    """A rank's rows or columns, from handles that stay open and slices that are kept."""
    handles: dict[str, Any] = {}
    for path in paths:
        handle = handles[path] = safe_open(path, framework="pytorch")
        for name in handle.keys():  # noqa: SIM118
            piece = handle.get_slice(name)
            shape = piece.get_shape()
            if len(shape) != 2:
                yield f"{name} {piece.get_dtype()}", handle.get_tensor(name)
                continue
            half = shape[0] // 2
            yield f"{name} rows {piece.get_dtype()}", piece[rank * half : (rank + 1) * half]
            half = shape[1] // 2
            yield f"{name} columns", piece[:, rank * half : (rank + 1) * half]
    for handle in handles.values():
        handle.__exit__(None, None, None)


def load_all(folder: Path, scratch: Path) -> dict[str, Any]:
    paths = files(folder, "model-*-of-11.safetensors")
    bins = files(folder, "pytorch_model-*.bin")
    out: dict[str, Any] = {f.__name__: dict(f(paths)) for f in (lazily, eagerly, warmed, by_threads, dropping_pages)}
    out["order"] = [name for name, _ in lazily(paths)]
    out["slices"] = dict(by_slices(paths))
    out["torch"] = dict(from_torch(bins))
    out["torch mapped"] = dict(from_torch(bins, mmap=True))
    out["torch by dict"] = dict(from_torch(bins, {"cuda:0": "cpu"}))
    out["torch by device"] = dict(from_torch(bins, torch.device("cpu")))
    out["legacy"] = torch.load(folder / "consolidated.pth", map_location="cpu", weights_only=True)["model"]
    out["numpy"] = dict(cached_as_numpy(bins, scratch / "npcache"))
    out["ranks"] = [sharded_state(folder, rank) for rank in range(2)]
    with safe_open(paths[0], framework="pt") as f:
        out["notes"] = f.metadata(), list(f.offset_keys())
        out["together"] = f.get_tensors()
    with safe_open(files(folder, "model-rank-0*")[0], framework="pt") as f:
        out["no notes"] = f.metadata()
    out["errors"] = [refusal(load_file, folder / "absent.safetensors"), refusal(load, b"not one")]
    return out


def refusal(function: Any, argument: Any) -> list[str]:
    try:
        function(argument)
    except Exception as error:
        return [
            name
            for name in ("FileNotFoundError", "SafetensorError")
            if name in [c.__name__ for c in type(error).__mro__]
        ]
    return []


def read(folder: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        return load_all(folder, Path(scratch))
