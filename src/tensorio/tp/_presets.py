"""Rules for layouts that many models share.

Linear layers of torch store ``[out, in]``: a layer that is cut by its outputs
("column parallel": query, key, value, up) is cut along dimension 0, its bias,
too; one that is cut by its inputs ("row parallel": attention output, down) along
dimension 1, and its bias, to be added once after the sum over ranks, is
replicated. Embeddings and output layers are cut by rows of the vocabulary.
Source of the scheme: Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3.
Names, shapes and the order inside fused tensors are those of the classes of
Hugging Face transformers that each preset names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensorio.tp._rules import Rule, Rules

__all__ = ["preset", "presets"]

# LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Phi3ForCausalLM (fused); the names of fused
# tensors are those of vLLM's modules, too.
_LLAMA = """
**.embed_tokens.weight = 0 pad_to=1
**.lm_head.weight = 0 pad_to=1
**.self_attn.q_proj.{weight,bias} = 0 heads=$num_attention_heads
**.self_attn.{k,v}_proj.{weight,bias} = 0 heads=$num_key_value_heads|num_attention_heads
**.self_attn.qkv_proj.{weight,bias} = 0 heads=Q,KV,KV
**.self_attn.o_proj.weight = 1 heads=$num_attention_heads
**.self_attn.o_proj.bias = replicate
**.self_attn.{q,k}_norm.weight = replicate
**.self_attn.rotary_emb.inv_freq = replicate
**.mlp.{gate,up}_proj.{weight,bias} = 0
**.mlp.gate_up_proj.{weight,bias} = 0 sections=1,1
**.mlp.down_proj.weight = 1
**.mlp.down_proj.bias = replicate
**.{input,post_attention,pre_feedforward,post_feedforward}_layernorm.weight = replicate
**.norm.weight = replicate
""".replace("Q,", "$num_attention_heads,").replace("KV", "$num_key_value_heads|num_attention_heads")

# MixtralForCausalLM (w1: gate, w3: up, w2: down), Qwen2MoeForCausalLM, Qwen3MoeForCausalLM: every expert on every rank,
# cut like an MLP. Releases from 5 on hold all experts of a layer in one tensor: [expert, (gate, up), in], [expert, out,
# in].
_MIXTRAL = (
    """
**.block_sparse_moe.gate.weight = replicate
**.block_sparse_moe.experts.*.{w1,w3}.weight = 0
**.block_sparse_moe.experts.*.w2.weight = 1
**.mlp.gate.weight = replicate
**.mlp.shared_expert_gate.weight = replicate
**.mlp.experts.*.{gate,up}_proj.weight = 0
**.mlp.experts.*.down_proj.weight = 1
**.mlp.experts.gate_up_proj = 1 sections=1,1
**.mlp.experts.down_proj = 2
**.mlp.shared_expert.{gate,up}_proj.weight = 0
**.mlp.shared_expert.down_proj.weight = 1
"""
    + _LLAMA
)

# GPT2LMHeadModel: its Conv1D stores [in, out], so that the dimensions change places; c_attn is [query, key, value].
_GPT2 = """
**.wte.weight = 0 pad_to=1
**.lm_head.weight = 0 pad_to=1
**.wpe.weight = replicate
**.attn.c_attn.weight = 1 heads=$n_head,$n_head,$n_head
**.attn.c_attn.bias = 0 heads=$n_head,$n_head,$n_head
**.attn.c_proj.weight = 0 heads=$n_head
**.attn.c_proj.bias = replicate
**.attn.{bias,masked_bias} = replicate
**.mlp.c_fc.weight = 1
**.mlp.c_fc.bias = 0
**.mlp.c_proj.weight = 0
**.mlp.c_proj.bias = replicate
**.{ln_1,ln_2,ln_f}.{weight,bias} = replicate
"""

# GPTNeoXForCausalLM: query_key_value is [head, (query, key, value), element]: an even cut between heads is right.
_GPT_NEOX = """
**.embed_in.weight = 0 pad_to=1
**.{embed_out,lm_head}.weight = 0 pad_to=1
**.attention.query_key_value.{weight,bias} = 0 heads=$num_attention_heads
**.attention.dense.weight = 1 heads=$num_attention_heads
**.attention.dense.bias = replicate
**.attention.{bias,masked_bias} = replicate
**.rotary_emb.inv_freq = replicate
**.mlp.dense_h_to_4h.{weight,bias} = 0
**.mlp.dense_4h_to_h.weight = 1
**.mlp.dense_4h_to_h.bias = replicate
**.{input_layernorm,post_attention_layernorm,final_layer_norm}.{weight,bias} = replicate
"""

# BertModel and its heads: cls.predictions.decoder is tied to the word embeddings; LayerNorm has old names, too.
_BERT = """
**.embeddings.word_embeddings.weight = 0 pad_to=1
**.embeddings.{position,token_type}_embeddings.weight = replicate
**.embeddings.{position,token_type}_ids = replicate
**.attention.self.{query,key,value}.{weight,bias} = 0 heads=$num_attention_heads
**.attention.output.dense.weight = 1 heads=$num_attention_heads
**.intermediate.dense.{weight,bias} = 0
**.output.dense.weight = 1
**.output.dense.bias = replicate
**.LayerNorm.{weight,bias,gamma,beta} = replicate
**.pooler.dense.{weight,bias} = replicate
**.cls.predictions.decoder.{weight,bias} = 0 pad_to=1
**.cls.predictions.bias = 0 pad_to=1
**.cls.predictions.transform.dense.{weight,bias} = replicate
**.cls.seq_relationship.{weight,bias} = replicate
**.{classifier,qa_outputs}.{weight,bias} = replicate
"""

# T5ForConditionalGeneration: relative_attention_bias is [bucket, head]; wi is two tensors in the gated variants.
_T5 = """
**.{shared,embed_tokens,lm_head}.weight = 0 pad_to=1
**.{SelfAttention,EncDecAttention}.{q,k,v}.weight = 0 heads=$num_heads
**.{SelfAttention,EncDecAttention}.o.weight = 1 heads=$num_heads
**.{SelfAttention,EncDecAttention}.relative_attention_bias.weight = 1 heads=$num_heads
**.DenseReluDense.{wi,wi_0,wi_1}.weight = 0
**.DenseReluDense.wo.weight = 1
**.{layer_norm,final_layer_norm}.weight = replicate
"""

_TEXTS = {
    "bert": _BERT, "gpt2": _GPT2, "gpt_neox": _GPT_NEOX, "llama": _LLAMA, "mistral": _LLAMA, "mixtral": _MIXTRAL,
    "qwen": _LLAMA, "qwen_moe": _MIXTRAL, "t5": _T5,
}  # fmt: skip


def presets() -> tuple[str, ...]:
    """Return the names of all presets."""
    return tuple(_TEXTS)


def preset(name: str, config: Mapping[str, Any] | None = None) -> Rules:
    """Return the rules for a layout that many models share.

    Parameters
    ----------
    name : str
        One of `presets`.
    config : mapping, optional
        The model's ``config.json``: where cuts must not go through heads, their
        number is taken from it.

    Raises
    ------
    ValueError
        No preset of that name, or a number is missing in `config`.

    Notes
    -----
    All rules are optional: a preset is for several architectures.
    """
    if name not in _TEXTS:
        raise ValueError(f"no preset is called {name!r}; there are {', '.join(_TEXTS)}")
    rules = Rules.parse(_TEXTS[name], config)
    return Rules(Rule(r.pattern, r.action, r.dim, r.sections, r.heads, r.pad_to, optional=True) for r in rules)
