"""sentence-transformers: a small BERT with pooling and a dense layer, a static embedding; vectors of sentences."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer, models
from sentence_transformers.models import StaticEmbedding
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel, BertTokenizer

SENTENCES = ["a file of weights", "the weights of a file", "one two three"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({w for s in SENTENCES for w in s.split()})]


def encoder() -> SentenceTransformer:
    torch.manual_seed(5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "vocab.txt").write_text("\n".join(WORDS))
        BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
        config = BertConfig(vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                            intermediate_size=24, max_position_embeddings=32)  # fmt: skip
        BertModel(config).save_pretrained(folder)
        words = models.Transformer(str(folder))
    dense = models.Dense(16, 8, init_weight=torch.randn(8, 16), init_bias=torch.randn(8))
    return SentenceTransformer(modules=[words, models.Pooling(16), dense], device="cpu")


def static() -> SentenceTransformer:
    torch.manual_seed(6)
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=8)], device="cpu")


def vectors(model: SentenceTransformer) -> torch.Tensor:
    return model.encode(SENTENCES, convert_to_tensor=True)


def write(folder: Path) -> dict[str, Any]:
    encoder().save(str(folder / "encoder"))
    encoder().save(str(folder / "bin"), safe_serialization=False)
    static().save(str(folder / "static"))
    return {"encoder": encoder().state_dict(), "vectors": vectors(encoder()), "static": vectors(static())}


def read(folder: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in ("encoder", "bin", "static"):
        read = SentenceTransformer(str(folder / name), device="cpu")
        out[name] = read.state_dict(), vectors(read)
    return out
