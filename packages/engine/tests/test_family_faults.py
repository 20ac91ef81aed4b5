"""Seeds faults into parts and fields that a model would survive, which the comparison of logits must notice."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from families.case import build
from families.registry import CASES
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.models import config as model_config
from pagewood.engine.models.fields import windows
from pagewood.engine.models.parts import layer, state_space
from pagewood.engine.models.parts.channel_delta import ChannelDelta
from pagewood.engine.models.parts.experts import Experts
from pagewood.engine.models.parts.feed_forward import FeedForward
from pagewood.engine.models.parts.layer import Layer
from pagewood.engine.models.parts.output import Output
from pagewood.engine.models.parts.state_space import StateSpace
from pagewood.engine.models.stored.stored_tensors import StoredTensors
from pagewood.engine.models.torch_ops import TorchOps, WholeTexts
from pagewood.engine.models.torch_recurrence import WholeTextStates
from seeded_faults import Edit, seed_fault

FAULTS: dict[str, tuple[str, Edit]] = {
    "a window is longer by one": (
        "gemma2",
        (windows, "_window", "return fields.integer(", "return 1 + fields.integer("),
    ),
    "the feed-forward reads what the mixer has added": (
        "gpt-neox",
        (Layer, "_beside", "_ops.norm(residual, self", "_ops.norm(residual + mixed, self"),
    ),
    "a norm behind a part is applied to the sum": (
        "gemma2",
        (
            Layer,
            "_leave",
            "self._ops.norm_add(x, residual, norm)",
            "residual.copy_(self._ops.norm(residual + x, norm))",
        ),
    ),
    "the multiplier of what parts add is left out": (
        "granite",
        (Layer, "_scaled", "x if self._multiplier == 1 else self._ops.scale(x, self._multiplier)", "x"),
    ),
    "logits have no cap": ("gemma2", (Output, "__call__", "self._config.soft_cap is not None", "False")),
    "logits are not scaled": ("granite", (Output, "__call__", "self._config.multiplier != 1", "False")),
    "embeddings are not scaled": (
        "granite",
        (model_config, "_embedding_multiplier", 'read_multiplier(fields, "embedding_multiplier")', "1.0"),
    ),
    "heads read keys and queries of another group": (
        "granite4-groups",
        (
            WholeTextStates,
            "recur",
            "one.repeat_interleave(heads.num_heads // heads.num_key_heads, 2)",
            "one.repeat(1, 1, heads.num_heads // heads.num_key_heads, 1)",
        ),
    ),
    "a state space has no skip": ("bamba", (WholeTextStates, "recur", "heads.skip is not None", "False")),
    "results are gated before they are normed": (
        "falcon-h1-norm-first",
        (StateSpace, "__call__", "if config.norms_first:", "if False:"),
    ),
    "filters are not multiplied": ("falcon-h1", (state_space, "_multiplied", "return weight * ", "return weight  # ")),
    "the product is not divided by what multiplied both projections": (
        "falcon-h1",
        (FeedForward, "__call__", "1 / of_gate", "1.0"),
    ),
    "a layer without a norm before it loses what is pending": (
        "olmo-hybrid",
        (layer, "add_and_norm", "if pending is not None:", "if False:"),
    ),
    "corrections have half of their strength": (
        "olmo-hybrid",
        (WholeTextStates, "recur", "strengths * heads.most_strength", "strengths"),
    ),
    "all channels of a head decay alike": (
        "kimi-linear",
        (WholeTextStates, "recur", "* steps)", "* steps.mean(-1, keepdim=True))"),
    ),
    "results of a delta rule are gated by silu": (
        "kimi-linear",
        (ChannelDelta, "__call__", 'gate, 0, "sigmoid"', 'gate, 0, "silu"'),
    ),
    "experts read the hidden state's first elements": (
        "nemotron-h-latents",
        (Experts, "__call__", "self._to_latent(x)", "x[:, : self._config.latent_size]"),
    ),
    "queries, keys and values of all heads stand together": (
        "gpt-neox",
        (StoredTensors, "read", "if self._layout.fused_by_head:", "if False:"),
    ),
}


@torch.inference_mode()
def difference(folder: Path, expected: torch.Tensor, tokens: list[int]) -> float:
    """Return the largest difference of the oracle's logits from those of `transformers`."""
    model = load_model(folder, TorchOps())
    positions, every = torch.arange(len(tokens)), torch.arange(len(tokens))
    attention = WholeTexts([layer.mixer for layer in model.config.layers], len(tokens))
    rotations, recurrence = [rope(positions) for rope in model.ropes], WholeTextStates(len(tokens))
    logits = model(torch.tensor(tokens), rotations, attention, every, recurrence=recurrence)
    return (logits - expected).abs().max().item()


@pytest.mark.parametrize("name", FAULTS)
def test_seeded_faults_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, edit = FAULTS[name]
    reference = build(CASES[case], tmp_path)
    tokens = torch.randint(0, 97, (24,), generator=torch.Generator().manual_seed(5)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor(tokens)[None]).logits[0]
    assert difference(tmp_path, expected, tokens) < 1e-4
    seed_fault([edit], monkeypatch)
    assert difference(tmp_path, expected, tokens) > 1e-2
