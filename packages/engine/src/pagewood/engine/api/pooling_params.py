"""How the hidden states of a prompt become a vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How the hidden states of a prompt become one vector. They are those that the output projection reads.

    Raises:
        ValueError: a field is out of its range.
    """

    kind: Literal["last", "mean", "cls"] = "last"
    """last: the state at the last token; mean: the mean of all; cls: the state at the first token. With mean and cls
    the prompt is computed also where it is cached, as far as its states are needed."""
    normalize: bool = True
    """Whether the vector is divided by its length."""
    dimensions: int | None = None
    """How many of its first elements are kept, before it is normalised; None: all. Useful with models that are
    trained for it. Source: Kusupati et al., Matryoshka Representation Learning, 2022."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.kind not in ("last", "mean", "cls"):
            raise ValueError(f"kind must be last, mean or cls, got {self.kind!r}")
        if self.dimensions is not None and self.dimensions < 1:
            raise ValueError(f"dimensions must be >= 1, got {self.dimensions}")
