"""What an engine's configuration says about the experts of its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.api import EngineConfig
from pagewood.engine.core.observe.expert_load import ExpertRows
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.expert_division import counting_rows, divided_by_expert, expert_layers


def expert_change(config: EngineConfig) -> Callable[[ModelConfig], ModelConfig]:
    """Return what gives a model's experts their ranks and counts; it raises what `divided_by_expert` raises."""

    def change(model: ModelConfig) -> ModelConfig:
        if config.expert_parallel:
            file = None if config.expert_map is None else Path(config.expert_map)
            model = divided_by_expert(model, config.tensor_parallel_size, file=file)
        if config.expert_load == "off":
            return model
        if not expert_layers(model):
            raise ValueError(
                f"expert_load must be off for a model without experts ({model.architecture}), got {config.expert_load}"
            )
        return counting_rows(model)

    return change


def expert_rows(config: EngineConfig, model: ModelConfig, counts: Mapping[int, NDArray[np.int64]]) -> ExpertRows | None:
    """Return the rows of a model's experts, or None if they are not counted.

    Args:
        config: of the engine.
        model: whole, after `expert_change`.
        counts: by layer, the rows of each placed expert; they grow.
    """
    if config.expert_load == "off":
        return None
    layers = expert_layers(model)
    placements = [layers[layer].placement for layer in counts]
    divided = [one for one in placements if one is not None]
    every = np.arange(max(layer.router.num_experts for layer in layers.values()), dtype=np.int32)
    return ExpertRows(
        counts=counts,
        experts=[every if one is None else one.placed_experts() for one in placements],
        ranks=[one.placed_ranks() for one in divided] if divided else None,
        num_experts=len(every),
        num_ranks=config.tensor_parallel_size,
        has_experts=config.expert_load == "experts",
    )
