"""Folders of tiny models that see images, with random weights, and their references in `transformers`."""

# pyright: basic
# torch, transformers and Pillow are typed in part only.

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from PIL import Image as pillow
from PIL.Image import Image as Picture
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from families.case import SMALL, randomise
from families.ropes import rope
from pagewood.engine.api import Image
from pagewood.engine.images.preparing import prepared
from pagewood.engine.images.recipe import ImageRecipe, read_recipe
from scratch import scratch_folder

IMAGE, BEGIN, END = 90, 91, 92
"""The tokens of images: that of their rows, and those around them."""
KINDS = ("gemma3", "qwen2.5", "qwen3")
_SIDE = 8
_TEXT: dict[str, Any] = {**SMALL, "bos_token_id": None, "eos_token_id": 0}
_QWEN_VISION: dict[str, Any] = {
    "depth": 3, "intermediate_size": 40, "num_heads": 2, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %} MARK {% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %} {% endfor %}[assistant] "
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictured:
    """A model, and what computes the same."""

    kind: str
    folder: Path
    reference: Any
    recipe: ImageRecipe

    def image(self, picture: Picture) -> Image:
        """A picture as the engine takes it."""
        return prepared(picture, self.recipe)

    def tokens(self, image: Image) -> list[int]:
        """The tokens of an image, with those around."""
        return [BEGIN, *[IMAGE] * self.recipe.num_tokens(image.height, image.width), END]

    def pixel_values(self, pictures: Sequence[Picture]) -> dict[str, Any]:
        """What the reference gets of pictures."""
        if self.kind == "gemma3":
            found = _gemma_processor()(list(pictures), return_tensors="pt")
            return {"pixel_values": found["pixel_values"]}
        found = _qwen_processor()(list(pictures), return_tensors="pt")
        return {"pixel_values": found["pixel_values"], "image_grid_thw": found["image_grid_thw"]}

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int], pictures: Sequence[Picture]) -> torch.Tensor:
        """The reference's log probabilities after each token."""
        ids = torch.tensor([list(tokens)])
        kinds = {"token_type_ids" if self.kind == "gemma3" else "mm_token_type_ids": (ids == IMAGE).int()}
        more = {**self.pixel_values(pictures), **kinds} if pictures else {}
        return self.reference(input_ids=ids, **more).logits[0].log_softmax(-1)


def pictures(count: int, *, seed: int = 0) -> list[Picture]:
    """Pictures of random colours and sizes."""
    rng = np.random.default_rng(seed)
    sizes = [(int(rng.integers(9, 41)), int(rng.integers(9, 41))) for _ in range(count)]
    return [pillow.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]


@cache
def pictured(kind: str, *, tower_size: int = 32, head_dim: int = 16) -> Pictured:
    """A model of a kind, whose tower has this many elements of a patch; FlashInfer has kernels for heads of 64."""
    torch.manual_seed(11)
    folder = scratch_folder()
    config, cls = _config(kind, tower_size, head_dim)
    reference = getattr(transformers, cls)._from_config(config, attn_implementation="eager").eval()
    randomise(reference, norms_from_zero=kind == "gemma3")
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "vision" in name or "visual" in name or "projector" in name:
                parameter.mul_(1.5)
                if parameter.ndim > 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    reference.save_pretrained(folder)
    (_gemma_processor() if kind == "gemma3" else _qwen_processor()).save_pretrained(folder)
    _write_tokenizer(folder, begin_stands_for_image=kind == "gemma3")
    recipe = read_recipe(folder)
    assert recipe is not None
    return Pictured(kind=kind, folder=folder, reference=reference, recipe=recipe)


def _config(kind: str, tower_size: int, head_dim: int) -> tuple[Any, str]:
    factor = head_dim // 16
    sizes = {**_TEXT, "head_dim": head_dim, "hidden_size": 4 * head_dim, "num_key_value_heads": 2 if factor == 1 else 1}
    if kind == "gemma3":
        vision = {
            "hidden_size": tower_size, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 16, "patch_size": 4, "hidden_act": "gelu_pytorch_tanh", "vision_use_head": False,
        }  # fmt: skip
        windows: dict[str, Any] = {"sliding_window": 7, "sliding_window_pattern": 2, "query_pre_attn_scalar": 20}
        text = transformers.Gemma3TextConfig(**sizes, **windows)
        return transformers.Gemma3Config(
            text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4, image_token_index=IMAGE,
            boi_token_index=BEGIN, eoi_token_index=END,
        ), "Gemma3ForConditionalGeneration"  # fmt: skip
    around: dict[str, Any] = {
        "image_token_id": IMAGE,
        "vision_start_token_id": BEGIN,
        "vision_end_token_id": END,
        "video_token_id": 93,
    }
    vision = {**_QWEN_VISION, "hidden_size": tower_size, "out_hidden_size": 4 * head_dim}
    if kind == "qwen2.5":
        text = transformers.Qwen2_5_VLTextConfig(
            **sizes, **rope("default", mrope_section=[2 * factor, 3 * factor, 3 * factor])
        )
        vision |= {"window_size": 2 * _SIDE, "fullatt_block_indexes": [1]}
        config = transformers.Qwen2_5_VLConfig(text_config=text.to_dict(), vision_config=vision, **around)
        return config, "Qwen2_5_VLForConditionalGeneration"
    sections = [4 * factor, 2 * factor, 2 * factor]
    text = transformers.Qwen3VLTextConfig(**sizes, **rope("default", mrope_section=sections, mrope_interleaved=True))
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]}
    config = transformers.Qwen3VLConfig(text_config=text.to_dict(), vision_config=vision, **around)
    return config, "Qwen3VLForConditionalGeneration"


@cache
def _gemma_processor() -> Any:
    return Gemma3ImageProcessorPil(size={"height": 16, "width": 16})


@cache
def _qwen_processor() -> Any:
    size = {"shortest_edge": 4 * _SIDE**2, "longest_edge": 12 * _SIDE**2}
    return Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=size)


def _write_tokenizer(folder: Path, *, begin_stands_for_image: bool) -> None:
    """Write a tokenizer of words."""
    words = {f"w{number}": number for number in range(3, IMAGE)}
    words |= {"[user]": 94, "[assistant]": 95, "[system]": 96, "<end>": 0, "<unk>": 1}
    special = {"<image>": IMAGE, "<begin>": BEGIN, "<close>": END}
    made = tokenizers.Tokenizer(WordLevel(words | special, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()  # not ours
    made.add_special_tokens(["<end>", *special])
    made.save(str(folder / "tokenizer.json"))
    mark = "<begin>" if begin_stands_for_image else "<begin><image><close>"
    fields = {"chat_template": _TEMPLATE.replace("MARK", mark), "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
