"""transformers and accelerate: saving, loading, sharding, tied weights, training with checkpoints."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, load_checkpoint_and_dispatch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def model(tied: bool = True, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


def answer(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(24).reshape(2, 12)).logits


def write(folder: Path) -> dict[str, Any]:
    model().save_pretrained(folder / "single")
    model().save_pretrained(folder / "sharded", max_shard_size="12KB")
    model(tied=False).save_pretrained(folder / "untied")
    model(dtype=torch.bfloat16).save_pretrained(folder / "bf16", max_shard_size="12KB")
    in_bins(model(), folder / "bin", 1)
    in_bins(model(tied=False), folder / "bins", 3)
    again = LlamaForCausalLM.from_pretrained(folder / "single")
    again.save_pretrained(folder / "single")  # over the files that its tensors came from
    Accelerator(cpu=True).save_model(model(), folder / "accelerate", max_shard_size="12KB")
    train(folder / "trained", 2)
    return {"model": model().state_dict(), "answer": answer(model())}


def in_bins(model: LlamaForCausalLM, folder: Path, count: int) -> None:
    """As releases before 5 wrote them."""
    model.config.save_pretrained(folder)
    state = model.state_dict()
    if count == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return
    where = {name: f"pytorch_model-{i % count + 1:05}-of-{count:05}.bin" for i, name in enumerate(state)}
    for file in sorted(set(where.values())):
        torch.save({name: state[name] for name in state if where[name] == file}, folder / file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in state.values())}, "weight_map": where}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def train(folder: Path, steps: int, resume: bool | str = False) -> LlamaForCausalLM:
    """A few steps with a checkpoint after each; from `resume` on."""
    rows = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(8)]
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, save_steps=1, save_total_limit=2, per_device_train_batch_size=2,
        report_to=[], use_cpu=True, disable_tqdm=True, seed=3, dataloader_pin_memory=False, logging_strategy="no",
    )  # fmt: skip
    trained = model()
    Trainer(model=trained, args=arguments, train_dataset=rows).train(resume_from_checkpoint=resume or None)
    return trained


def read(folder: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in ("single", "sharded", "untied", "bf16", "bin", "bins"):
        read = LlamaForCausalLM.from_pretrained(folder / name, dtype="auto").eval()
        out[name] = read.state_dict(), answer(read), tied(read)
    read = LlamaForCausalLM.from_pretrained(folder / "sharded", dtype=torch.bfloat16, device_map="cpu")
    out["cast"] = read.state_dict(), tied(read)
    read = LlamaForCausalLM.from_pretrained(folder / "single", disable_mmap=True)
    out["no mmap"] = read.state_dict()
    with torch.no_grad():
        read.lm_head.weight.mul_(2)  # weights are the model's own: writing to them reaches no file
    out["written to"] = read.state_dict()
    with tempfile.TemporaryDirectory() as offload:
        read = load_checkpoint_and_dispatch(
            model(), folder / "accelerate", device_map={"model": "cpu", "lm_head": "disk"}, offload_folder=offload
        )
        out["dispatched"] = answer(read)
    with tempfile.TemporaryDirectory() as copy:
        newest = sorted((folder / "trained").glob("checkpoint-*"))[-1]
        out["resumed"] = train(Path(copy), 4, resume=str(newest)).state_dict()
    return out


def tied(model: LlamaForCausalLM) -> bool:
    return model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
