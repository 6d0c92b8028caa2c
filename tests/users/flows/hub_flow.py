"""huggingface_hub: its own writer of shards, and the mixin that gives any module `save_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import PyTorchModelHubMixin, load_torch_model, save_torch_model, split_torch_state_dict_into_shards


class Net(torch.nn.Module, PyTorchModelHubMixin):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.second = torch.nn.Linear(width, width)
        self.second.weight = self.first.weight


def net(seed: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net()


def write(folder: Path) -> dict[str, Any]:
    net().save_pretrained(folder / "mixin")
    for name, options in (("single", {}), ("sharded", {"max_shard_size": 200}), ("bin", {"safe_serialization": False})):
        (folder / name).mkdir(parents=True)
        save_torch_model(net(), folder / name, **options)
    return {"net": net().state_dict(), "split": split_torch_state_dict_into_shards(net().state_dict()).is_sharded}


def read(folder: Path) -> dict[str, Any]:
    out: dict[str, Any] = {"mixin": Net.from_pretrained(folder / "mixin").state_dict()}
    for name in ("single", "sharded", "bin"):
        read = net(seed=11)
        missing = load_torch_model(read, folder / name, safe=name != "bin")
        out[name] = read.state_dict(), sorted(missing.missing_keys), sorted(missing.unexpected_keys)
    return out
