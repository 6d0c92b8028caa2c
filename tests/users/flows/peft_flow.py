"""peft: LoRA adapters of a small model, saved, loaded and merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def base() -> LlamaForCausalLM:
    torch.manual_seed(8)
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=96)
    ).eval()


def adapted(**options: Any) -> PeftModel:
    net = base()
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    torch.manual_seed(9)
    return get_peft_model(net, config).eval()


def answer(net: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return net(torch.arange(12).reshape(1, 12)).logits


def write(folder: Path) -> dict[str, Any]:
    adapted().save_pretrained(str(folder / "adapter"))
    adapted().save_pretrained(str(folder / "bin"), safe_serialization=False)
    adapted(modules_to_save=["lm_head"]).save_pretrained(str(folder / "head"))
    adapted().merge_and_unload().save_pretrained(str(folder / "merged"))
    return {"adapted": adapted().state_dict(), "answer": answer(adapted())}


def read(folder: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in ("adapter", "bin", "head"):
        read = PeftModel.from_pretrained(base(), str(folder / name)).eval()
        out[name] = read.state_dict(), answer(read)
    out["as merged"] = answer(read.merge_and_unload())
    two = PeftModel.from_pretrained(base(), str(folder / "adapter"), low_cpu_mem_usage=True)
    two.load_adapter(str(folder / "bin"), "second")
    two.set_adapter("second")
    out["second"] = answer(two.eval())
    out["merged"] = answer(LlamaForCausalLM.from_pretrained(folder / "merged").eval())
    return out
