"""What all ranks of a model must say the same of, before they compute."""

from __future__ import annotations

from collections.abc import Sequence

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
