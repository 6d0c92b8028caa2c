"""Tensor parallelism: which part of which tensor belongs to which rank. Rules and arithmetic; no I/O but a rules file.

A `Rule` says what becomes of the tensors whose names fit its pattern; `Rules`
are tried in order, and the first that fits counts. In a file, a rule is a line::

    model.layers.*.mlp.up_proj.weight = 0                  cut along dimension 0
    **.self_attn.qkv_proj.weight      = 0 heads=32,8,8     three sections, each cut by itself, between heads
    **.mlp.gate_up_proj.weight        = 0 sections=1,1     two sections of equal size
    **.embed_tokens.weight            = 0 pad_to=64        rows of zeros up to a multiple of 64 and of the ranks
    **.norm.weight                    = replicate          whole, on every rank
    **.o_proj.bias                    = rank0              whole, on rank 0 only
    **.rotary_emb.inv_freq            = skip optional      nowhere; and no matter if there is none

``*`` stands for any characters but a dot, ``?`` for one, ``**`` for any number
of whole levels, ``{a,b}`` for either. A number may be taken from the model's
``config.json``: ``heads=$num_key_value_heads|num_attention_heads`` is the first
of the two keys that is there. ``#`` begins a comment.
"""

from tensorio.tp._cuts import Cut, cut_of
from tensorio.tp._presets import preset, presets
from tensorio.tp._read import config_of, rules_of
from tensorio.tp._rules import Rule, Rules

__all__ = ["Cut", "Rule", "Rules", "config_of", "cut_of", "preset", "presets", "rules_of"]
