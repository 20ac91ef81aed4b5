"""Where parts of a model take their parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic

from pagewood.engine.models.ops import A, Ops, Weights
from pagewood.engine.models.shard import WHOLE, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(Generic[A]):
    """Where a part of a model takes the parameters of a rank, and what keeps them."""

    weights: Weights
    ops: Ops[A]
    prefix: str = ""
    """Beginning of the names of its parameters, with the dot at its end."""
    hidden_size: int
    """E, of the model."""
    shard: Shard = WHOLE
    """The rank."""

    def below(self, name: str) -> Source[A]:
        """Return the source of a part that is called `name` in this one."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    @property
    def of_mixers(self) -> Source[A]:
        """The same for mixers, which ranks may divide by request instead."""
        return replace(self, shard=self.shard.of_mixers)
