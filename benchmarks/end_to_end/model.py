# pyright: basic
# (transformers is untyped)
"""The model: a Llama with random weights in a Hugging Face folder that every system loads."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagewood.engine.model_folder.folder import model_folder

BYTES_PER_VALUE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """One of the model's projections, and how often a step uses it."""

    name: str
    num_out: int
    num_in: int
    count: int

    @property
    def num_weights(self) -> int:
        """Number of weights in all layers that have this projection."""
        return self.num_out * self.num_in * self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a Llama."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    """Whether the head is the embedding table."""

    @property
    def head_dim(self) -> int:
        """Elements per head."""
        return self.hidden_size // self.num_heads

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one position in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * BYTES_PER_VALUE

    def linears(self) -> tuple[LinearShape, ...]:
        """Return the projections of the layers, with fused q, k, v and fused gate and up."""
        hidden, kv_size = self.hidden_size, self.num_kv_heads * self.head_dim
        sizes = {
            "qkv": (hidden + 2 * kv_size, hidden),
            "output": (hidden, hidden),
            "gate_up": (2 * self.intermediate_size, hidden),
            "down": (hidden, self.intermediate_size),
        }
        return tuple(
            LinearShape(name=name, num_out=num_out, num_in=num_in, count=self.num_layers)
            for name, (num_out, num_in) in sizes.items()
        )

    def head(self) -> LinearShape:
        """Return the projection onto the vocabulary."""
        return LinearShape(name="head", num_out=self.vocab_size, num_in=self.hidden_size, count=1)


FULL = ModelShape(
    num_layers=12,
    hidden_size=768,
    num_heads=12,
    num_kv_heads=4,
    intermediate_size=2048,
    vocab_size=32_000,
    tied=False,
)
QUICK = ModelShape(
    num_layers=2,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=512,
    vocab_size=1000,
    tied=False,
)


def write_model(shape: ModelShape, folder: Path, *, seed: int, dtype: str = "float32") -> int:
    """Draw weights, save them in `folder` as `dtype`, and return how many parameters there are."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            intermediate_size=shape.intermediate_size,
            vocab_size=shape.vocab_size,
            tie_word_embeddings=shape.tied,
            max_position_embeddings=4096,
            dtype=dtype,
            bos_token_id=None,
            eos_token_id=None,  # so that no answer ends early
        )
    )
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def write_served(shape: ModelShape, folder: Path, *, seed: int) -> None:
    """Write a model that can be served: with the tokenizer, and so the vocabulary, of the embedded model."""
    embedded = model_folder(None)
    vocab_size = json.loads((embedded / "config.json").read_text())["vocab_size"]
    write_model(replace(shape, vocab_size=vocab_size), folder, seed=seed)
    for path in embedded.glob("tokenizer*"):
        shutil.copy(path, folder)
