"""Fields of published files that are absent or null mean what they mean to `transformers`, or are refused by name."""

# pyright: basic
# transformers is typed in part only.

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError

from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.parts.attention import AttentionConfig
from real_configs import REAL

FEW = ("Qwen 2.5 7B", "Gemma 3 1B", "OLMo 3 7B", "GLM 4.5 Air", "Qwen 3 VL 4B")
NAMES = [name for name, real in REAL.items() if real.values["model_type"] in transformers.CONFIG_MAPPING]
"""All but those of remote code: Kimi K2 and MiMo."""
OTHERWISE = {
    ("HunYuan 7B", "theta"): "`alpha` is a part of the base here",
    ("Mistral Small 3.1", "tied"): "the file says nothing, and the checkpoint has an output projection",
    ("Ministral 3 3B", "tied"): "the flag of `text_config` counts if the outer one is absent",
    ("Qwen 3 VL 4B", "tied"): "the same",
}
"""Values that differ, and why."""
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon")


def of_transformers(values: dict[str, Any]) -> dict[str, Any] | None:
    """Return what `transformers` reads in a file; None: it refuses the file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of `rope_scaling` in a model without rotation
            whole = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(json.loads(json.dumps(values)))
        config = whole.get_text_config()
        fields = config.to_dict()
    except (StrictDataclassError, AttributeError, TypeError, ValueError, ZeroDivisionError):
        return None
    text = SimpleNamespace(**fields, **{name: getattr(config, own) for name, own in config.attribute_map.items()})
    ropes = getattr(text, "rope_parameters", None) or {}
    found: dict[str, Any] = {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "layers": config.num_hidden_layers,
        "tied": bool(whole.tie_word_embeddings),
        "epsilon": next(getattr(text, name) for name in _EPSILONS if hasattr(text, name)),
        "theta": ropes.get("full_attention", ropes).get("rope_theta"),
    }
    if not getattr(text, "kv_lora_rank", None):
        kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
        windows = {
            "sliding_attention": getattr(text, "sliding_window", None),
            "chunked_attention": getattr(text, "attention_chunk_size", None),
        }
        found |= {
            "heads": text.num_attention_heads,
            "kv_heads": getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            "windows": tuple(windows.get(kind) for kind in kinds),
        }
    return {name: value for name, value in found.items() if value is not None}


def read_here(values: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """Return the same of the package; None: it refuses the file, with the file and a field."""
    file = folder / "config.json"
    file.write_text(json.dumps(values))
    refusal = ""
    try:
        config = ModelConfig.from_folder(folder)
    except ValueError as error:
        config, refusal = None, str(error)
    if config is None:
        assert refusal.startswith(str(file))
        return None
    mixers = config.paged
    whole = [mixer.rope for mixer in mixers if getattr(mixer, "window", None) is None and mixer.rope is not None]
    found: dict[str, Any] = {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "layers": config.num_layers,
        "tied": config.tied_embeddings, "epsilon": config.norm.epsilon,
    }  # fmt: skip
    if ropes := whole or list(config.ropes):
        found["theta"] = ropes[0].theta
    if isinstance(first := mixers[0], AttentionConfig):
        found |= {"heads": first.num_heads, "kv_heads": first.num_kv_heads, "head_dim": first.head_dim}
        found["windows"] = config.windows
    return found


def changed(values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what is done to a file, and its contents: nothing, and each field of the text model absent or null."""
    yield "nothing", values
    for field in values.get("text_config", values):
        if field in ("model_type", "architectures", "text_config", "vision_config", "audio_config"):
            continue
        if "text_config" not in values and field == "hidden_size":  # tells that all fields of a text model are outside
            continue
        for what in ("absent", "null"):
            copy = json.loads(json.dumps(values))
            inner = copy.get("text_config", copy)
            if what == "absent":
                del inner[field]
            else:
                inner[field] = None
            yield f"{field} is {what}", copy


@pytest.mark.parametrize("name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow)
                                  for name in NAMES])  # fmt: skip
def test_fields_that_are_absent_or_null(name: str, tmp_path: Path) -> None:
    num_equal = 0
    for what, values in changed(REAL[name].values):
        ours, theirs = read_here(values, tmp_path), of_transformers(values)
        assert ours is not None or what != "nothing"
        if ours is None or theirs is None:
            continue
        for field in ours.keys() & theirs.keys():
            if (name, field) not in OTHERWISE:
                assert ours[field] == pytest.approx(theirs[field]), f"{what}: {field}"
        num_equal += 1
    assert num_equal > 5 or name == "Llama 4 Scout"  # whose file `transformers` refuses as it is
