"""Writes a trained model as a Hugging Face folder, in 16 bits."""

import json
from pathlib import Path

import torch
from model import Llama
from safetensors.torch import save_file
from tokenizer import END, PAD
from tokenizers import Tokenizer

STORED = torch.float16


def save_model(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights and config.json; the tokenizer must be in the same folder, or in its parent for a draft."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {f"model.{name}": value.detach().to(STORED).contiguous() for name, value in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    shape, end, pad = model.shape, tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "torch_dtype": str(STORED).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"do_sample": False, "eos_token_id": end, "pad_token_id": pad}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
