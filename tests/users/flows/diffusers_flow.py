"""diffusers: models and a pipeline, in safetensors and in torch's files, whole and in shards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDPMPipeline, DDPMScheduler, UNet2DModel


def unet() -> UNet2DModel:
    torch.manual_seed(1)
    return UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 16),
        norm_num_groups=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
    ).eval()  # fmt: skip


def vae() -> AutoencoderKL:
    torch.manual_seed(2)
    return AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=2, sample_size=8).eval()


def answer(model: UNet2DModel) -> torch.Tensor:
    with torch.no_grad():
        sample = torch.linspace(-1, 1, 192).reshape(1, 3, 8, 8).to(model.dtype)
        return model(sample, torch.tensor([5])).sample


def write(folder: Path) -> dict[str, Any]:
    unet().save_pretrained(folder / "single")
    unet().save_pretrained(folder / "sharded", max_shard_size="30KB")
    unet().save_pretrained(folder / "bin", safe_serialization=False)
    unet().save_pretrained(folder / "bins", safe_serialization=False, max_shard_size="30KB")
    unet().half().save_pretrained(folder / "single", variant="fp16")
    vae().save_pretrained(folder / "vae")
    DDPMPipeline(unet(), DDPMScheduler(num_train_timesteps=10)).save_pretrained(folder / "pipeline")
    return {"unet": unet().state_dict(), "vae": vae().state_dict(), "answer": answer(unet())}


def read(folder: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in ("single", "sharded", "bin", "bins"):
        read = UNet2DModel.from_pretrained(folder / name, use_safetensors="bin" not in name).eval()
        out[name] = read.state_dict(), answer(read)
    read = UNet2DModel.from_pretrained(folder / "single", variant="fp16", torch_dtype=torch.float16)
    out["fp16"] = read.state_dict()
    out["no mmap"] = UNet2DModel.from_pretrained(folder / "single", disable_mmap=True).state_dict()
    os.environ["HF_ENABLE_PARALLEL_LOADING"] = "yes"
    out["parallel"] = UNet2DModel.from_pretrained(folder / "sharded").state_dict()
    del os.environ["HF_ENABLE_PARALLEL_LOADING"]
    out["vae"] = AutoencoderKL.from_pretrained(folder / "vae", low_cpu_mem_usage=False).state_dict()
    pipeline = DDPMPipeline.from_pretrained(folder / "pipeline")
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(generator=torch.manual_seed(0), num_inference_steps=2, output_type="np").images
    out["images"] = torch.from_numpy(images)
    return out
