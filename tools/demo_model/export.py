"""Writes and reads Hugging Face folders of a trained model or head, in 16 bits."""

import json
from pathlib import Path
from typing import Any

import torch
from eagle import Head
from model import Llama, Shape
from safetensors.torch import load_file, save_file
from tokenizer import END, PAD
from tokenizers import Tokenizer
from torch import Tensor

STORED = torch.float16


def save_model(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights and config.json; the tokenizer must be in the same folder, or in its parent for a draft."""
    _save_weights({f"model.{name}": value for name, value in model.named_parameters()}, folder)
    end, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    config = {
        "architectures": ["LlamaForCausalLM"],
        **_llama_config(model.shape),
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "torch_dtype": str(STORED).removeprefix("torch."),
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": end, "pad_token_id": pad})


def load_model(folder: Path) -> Llama:
    """Return the model that `save_model` wrote, with fp32 copies of the stored weights."""
    model = Llama(_shape(json.loads((folder / "config.json").read_text())))
    weights = {name.removeprefix("model."): value for name, value in load_file(folder / "model.safetensors").items()}
    model.load_state_dict({name: value.float() for name, value in weights.items()})
    return model.requires_grad_(False)


def save_head(head: Head, folder: Path) -> None:
    """Write the weights and config.json of an EAGLE-3 head."""
    _save_weights(dict(head.named_parameters()), folder)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_llama_config(head.shape),
        "target_hidden_size": head.shape.hidden,
        "draft_vocab_size": None,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(head.captured)},
        "torch_dtype": str(STORED).removeprefix("torch."),
    }
    _write_json(folder / "config.json", config)


def load_head(folder: Path) -> Head:
    """Return the head that `save_head` wrote, with fp32 copies of the stored weights."""
    config = json.loads((folder / "config.json").read_text())
    head = Head(_shape(config), tuple(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]))
    head.load_state_dict({name: value.float() for name, value in load_file(folder / "model.safetensors").items()})
    return head.requires_grad_(False)


def _save_weights(weights: dict[str, Tensor], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: value.detach().to(STORED).contiguous() for name, value in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _llama_config(shape: Shape) -> dict[str, object]:
    return {
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
    }


def _shape(config: dict[str, Any]) -> Shape:
    return Shape(
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate=config["intermediate_size"],
        max_positions=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
    )
