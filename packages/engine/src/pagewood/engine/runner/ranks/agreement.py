"""What all ranks of a model must say the same of, before they compute."""

from __future__ import annotations

from collections.abc import Sequence

from pagewood.engine.models.stage import Stage
from pagewood.engine.runner.ranks.messages import CanMeet, Loaded


def check_division(own: str, others: Sequence[Loaded | CanMeet]) -> None:
    """Compare the division of experts among ranks, which each has read for itself.

    Args:
        own: of rank 0.
        others: what ranks 1 to R - 1 say.

    Raises:
        ValueError: a rank has another one.
    """
    for rank, other in enumerate(others, 1):
        if other.division != own:
            raise ValueError(
                f"expert_map must say the same on all ranks, got{own or ' no division'} on rank 0 "
                f"and{other.division or ' no division'} on rank {rank}"
            )


def check_layers(own: tuple[int, int], others: Sequence[Loaded], stages: Sequence[Stage]) -> None:
    """Compare the layers that ranks have with those of their stages.

    Args:
        own: of rank 0, first and first behind.
        others: what ranks 1 to R - 1 say.
        stages: of the model; each has the same number of ranks.

    Raises:
        ValueError: a rank has others, so that a layer would be computed twice or not at all.
    """
    found = [own, *(other.layers for other in others)]
    num_in_stage = len(found) // len(stages)
    for rank, layers in enumerate(found):
        stage = stages[rank // num_in_stage]
        if tuple(layers) != (stage.first, stage.stop):
            raise ValueError(f"rank {rank} must have {stage}, got layers [{layers[0]}, {layers[1]})")
