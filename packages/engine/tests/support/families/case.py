"""A tiny model with random weights, and its reference."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.12,
    "pad_token_id": 0,
}


_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
_QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
VISION: dict[str, dict[str, Any] | None] = {
    "Gemma4": None,
    "Gemma4Unified": None,
    "Gemma3": {**_VISION, "num_hidden_layers": 1},
    "Mistral3": {**_VISION, "num_hidden_layers": 1, "model_type": "pixtral"},
    "Qwen2_5_VL": {**_QWEN_VISION, "fullatt_block_indexes": [0]},
    "Llama4": {
        **_VISION,
        "num_hidden_layers": 1,
        "vision_output_dim": 16,
        "projector_input_dim": 16,
        "projector_output_dim": 16,
    },
    "Qwen3VLMoe": {**_QWEN_VISION, "deepstack_visual_indexes": [], "num_position_embeddings": 16},
    "Qwen3_5": {**_QWEN_VISION, "num_position_embeddings": 16},
    "Qwen3_5Moe": {**_QWEN_VISION, "num_position_embeddings": 16},
    "Qwen3VL": {**_QWEN_VISION, "deepstack_visual_indexes": [], "num_position_embeddings": 16},
}
"""Fields of the models of images beside decoders."""
IMAGES: dict[str, dict[str, Any]] = {"Gemma3": {"mm_tokens_per_image": 4, "image_token_id": 90}}
"""Other fields beside both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a test builds of an architecture."""

    kind: str
    """As in "Llama" of `LlamaForCausalLM`."""
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the configuration beside, or in place of, those of `SMALL`."""
    model: str = ""
    """Class of the model; by default `kind` with the usual end."""
    config: str = ""
    """Class of the configuration; by default that of `kind`."""
    file: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields of config.json as a checkpoint has them, in place of those that `transformers` writes; those that are None
    are left out."""
    tensors: Callable[[dict[str, torch.Tensor]], None] | None = None
    """Changes the tensors of the file to what a checkpoint has, in place of what `transformers` writes."""
    by_token: bool = False
    """Whether the reference computes one token at a time."""
    is_inside: bool = False
    """Whether the model is a part of one that reads images too."""
    norms_from_zero: bool = False
    """Whether norms are stored less one."""
    query_norm: float = 1.0
    """Mean of the norms of queries: low where the attention does not divide by the root of a head's size."""
    is_long: bool = False
    """Whether sequences may be longer than `max_position_embeddings`."""

    @property
    def architecture(self) -> str:
        """The name in config.json."""
        return self.model or f"{self.kind}For{'ConditionalGeneration' if self.is_inside else 'CausalLM'}"


def randomise(reference: Any, *, norms_from_zero: bool = False, query_norm: float = 1.0) -> None:
    """Give norms and biases other values than those that a new model has; `query_norm` is the mean of norms of q."""
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            # Norms start at one, or at zero if they are stored less one, and biases at zero: a test would not see
            # them swapped.
            if parameter.ndim == 1 and ".q_norm." in name:
                parameter.normal_(0.0 if norms_from_zero else query_norm, 0.2 * query_norm)
            elif name.endswith(".A_log"):
                parameter.normal_(-1.0, 0.5)  # so that states remember
            elif parameter.ndim == 1:
                parameter.normal_(1.0 if ("norm" in name or "scale" in name) and not norms_from_zero else 0.0, 0.2)
            elif name.endswith("_bias"):
                parameter.normal_(0.0, 0.2)
        for name, buffer in reference.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.2)
            if name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.2)


def build(case: Case, folder: Path) -> Any:
    """Save a model with random weights to `folder`, and return it."""
    torch.manual_seed(7)
    config = getattr(transformers, case.config or f"{case.kind}Config")(**{**SMALL, **case.extra})
    if case.is_inside:
        config = getattr(transformers, f"{case.kind}Config")(
            text_config=config.to_dict(), vision_config=VISION[case.kind], **IMAGES.get(case.kind, {})
        )
    reference = getattr(transformers, case.architecture)._from_config(config, attn_implementation="eager").eval()
    randomise(reference, norms_from_zero=case.norms_from_zero, query_norm=case.query_norm)
    reference.save_pretrained(folder)
    if case.tensors is not None:
        stored = load_file(folder / "model.safetensors")
        case.tensors(stored)
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
    if case.file:
        path = folder / "config.json"
        fields = {**json.loads(path.read_text()), **case.file}
        path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    return reference
