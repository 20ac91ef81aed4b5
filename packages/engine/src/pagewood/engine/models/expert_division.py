"""Models whose experts are divided among ranks as wholes, or whose rows of experts are counted."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.expert_map import ExpertPlacement, read_expert_map
from pagewood.engine.models.parts.experts import ExpertsConfig
from pagewood.engine.models.parts.experts_beside import ExpertsBesideConfig
from pagewood.engine.models.parts.layer import LayerConfig


def expert_layers(model: ModelConfig) -> dict[int, ExpertsConfig]:
    """Return the experts of each layer that has some, by its number."""
    found = ((number, _experts_of(layer)) for number, layer in enumerate(model.layers))
    return {number: experts for number, experts in found if experts is not None}


def divided_by_expert(model: ModelConfig, num_ranks: int, *, file: Path | None = None) -> ModelConfig:
    """Return the model with a placement of the experts of every layer.

    Args:
        model: whole.
        num_ranks: that divide it.
        file: with the map, see `read_expert_map`; None: ranks have consecutive experts.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the model has no experts, or too few, or the file does not fit.
    """
    layers = expert_layers(model)
    if not layers:
        raise ValueError(f"expert_parallel must be False for a model without experts ({model.architecture}), got True")
    counts = {number: experts.router.num_experts for number, experts in layers.items()}
    if file is None:
        placements = {number: ExpertPlacement.contiguous(count, num_ranks) for number, count in counts.items()}
    else:
        placements = read_expert_map(file, counts, num_ranks)
    return _changed(model, lambda number, experts: replace(experts, placement=placements[number]))


def counting_rows(model: ModelConfig) -> ModelConfig:
    """Return the model with its rows of experts counted, under the number of each layer."""
    return _changed(model, lambda number, experts: replace(experts, counted_as=number))


def division_mark(model: ModelConfig) -> str:
    """Return a text that differs between divisions of a model's experts; empty: ranks do not have whole experts."""
    placements = [(number, one.placement) for number, one in expert_layers(model).items() if one.placement is not None]
    if not placements:
        return ""
    text = repr([(number, one.num_ranks, one.ranks) for number, one in placements])
    return f" by expert {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _experts_of(layer: LayerConfig) -> ExpertsConfig | None:
    match layer.feed_forward:
        case ExpertsConfig() as experts:
            return experts
        case ExpertsBesideConfig(experts=experts):
            return experts
        case _:
            return None


def _changed(model: ModelConfig, change: Callable[[int, ExpertsConfig], ExpertsConfig]) -> ModelConfig:
    """Return the model with `change` applied to the experts of each layer."""

    def changed(number: int, layer: LayerConfig) -> LayerConfig:
        match layer.feed_forward:
            case ExpertsConfig() as experts:
                return replace(layer, feed_forward=change(number, experts))
            case ExpertsBesideConfig(experts=experts) as both:
                return replace(layer, feed_forward=replace(both, experts=change(number, experts)))
            case _:
                return layer

    return replace(model, layers=tuple(changed(number, layer) for number, layer in enumerate(model.layers)))
