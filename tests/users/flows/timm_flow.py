"""timm: checkpoints of a training run, safetensors files, a model folder for the hub."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import stand_ins

stand_ins.torchvision()  # timm imports it for transforms that are not used here

import timm  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from timm.models import load_checkpoint, load_state_dict, resume_checkpoint  # noqa: E402
from timm.models._hub import load_state_dict_from_path, save_for_hf  # noqa: E402
from timm.utils import CheckpointSaver  # noqa: E402


def model(seed: int = 4) -> torch.nn.Module:
    torch.manual_seed(seed)
    return timm.create_model("test_vit").eval()


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    net(image()).sum().backward()
    optimizer.step()
    return net, optimizer


def image() -> torch.Tensor:
    return torch.linspace(0, 1, 3 * 160 * 160).reshape(1, 3, 160, 160)


def answer(net: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return net.eval()(image())


def write(folder: Path) -> dict[str, Any]:
    net, optimizer = trained()
    (folder / "run").mkdir(parents=True)
    saver = CheckpointSaver(
        net, optimizer, args=argparse.Namespace(model="test_vit", lr=1e-3), checkpoint_dir=str(folder / "run"),
        recovery_dir=str(folder / "run"), max_history=2,
    )  # fmt: skip
    for epoch in range(3):
        saver.save_checkpoint(epoch, metric=float(epoch))
    save_file(net.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    torch.save({"state_dict": {f"module.{k}": v for k, v in net.state_dict().items()}}, folder / "parallel.pth")
    save_for_hf(model(), folder / "hub", safe_serialization=True)
    save_for_hf(model(), folder / "hub_bin", safe_serialization=False)
    return {"model": net.state_dict(), "answer": answer(net)}


def read(folder: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in ("model.safetensors", "parallel.pth", "run/last.pth.tar", "run/model_best.pth.tar"):
        net = model(seed=9)
        load_checkpoint(net, str(folder / name))
        out[name] = net.state_dict(), answer(net)
    out["from path"] = load_state_dict(str(folder / "parallel.pth"))
    net = timm.create_model("test_vit", checkpoint_path=str(folder / "model.safetensors"))
    out["created"] = net.state_dict()
    net, optimizer = trained()
    epoch = resume_checkpoint(net, str(folder / "run/last.pth.tar"), optimizer, log_info=False)
    out["resumed"] = net.state_dict(), optimizer.state_dict()["state"], epoch
    for name in ("hub", "hub_bin"):
        out[name] = load_state_dict_from_path(str(folder / name))
    return out
