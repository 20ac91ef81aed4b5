"""The part of a model that one of several ranks computes (tensor parallelism).

Projections into a part of a layer are divided by their outputs: heads, or the inner elements of a feed-forward.
Projections out of it are divided by their inputs, so every rank has a part of a sum, and `Ops.sum_ranks` adds the parts
up, once a part of a layer. The embedding is divided by its columns and the output projection by its rows; the results
are gathered by `Ops.gather_ranks`. So a rank never needs to know which tokens it has, and a step has two exchanges
beside those of its layers. A table that is both is read as two: a rank then holds `2 / count` of it.

Inputs of layers are divided by columns and gathered too, once a step. Experts beside a feed-forward need another
exchange a layer, because the sum of each has a norm.

With `by_request`, attention is whole on every rank, which computes it for the tokens of its own requests only. Its
rows are then gathered before a divided part, and the sums of a part are given to the rank whose rows they are; see
`Ops` and `RowDivision`. The projection in front of a head's layers is whole, too.

Everything else is whole on every rank: norms, routers, gates, latents and embeddings of positions.

Logits differ in their last bits from those of one rank: a sum over inputs is then a sum of sums, one for each rank.

Source: Shoeybi et al., Megatron-LM, 2019.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagewood.engine.models.stored.head_order import RowOrder


@dataclass(frozen=True, slots=True)
class Shard:
    """Which of the parts of a model a rank computes. Invariant: `0 <= rank < count`.

    Raises:
        ValueError: a number is out of its range.
    """

    rank: int = 0
    count: int = 1
    """Ranks that compute the model together; 1: the model is whole."""
    by_request: bool = False
    """Whether attention is divided by request, and so whole on every rank."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count must be >= 1, got {self.count}")
        if not 0 <= self.rank < self.count:
            raise ValueError(f"rank must be in [0, {self.count}), got {self.rank}")

    def __str__(self) -> str:
        """Return as in "rank 1 of 4"."""
        return f"rank {self.rank} of {self.count}{' by request' if self.by_request else ''}"

    @property
    def is_whole(self) -> bool:
        """Whether one rank computes everything."""
        return self.count == 1

    @property
    def of_mixers(self) -> Shard:
        """The shard of the parts that let tokens see earlier ones."""
        return WHOLE if self.by_request else self

    def part(self, name: str, whole: int) -> range:
        """Return the rank's part of `whole` units, an equal one for every rank.

        Raises:
            ValueError: the number of ranks does not divide them; `name` is that of their number.
        """
        if whole % self.count:
            raise ValueError(f"{name} must be a multiple of tensor_parallel_size {self.count}, got {whole}")
        size = whole // self.count
        return range(self.rank * size, (self.rank + 1) * size)

    def inputs(self, name: str, whole: int, size: int = 1) -> range | None:
        """Return the elements of the rank's part of `whole` units of `size` elements each; None: all of them."""
        if self.is_whole:
            return None
        part = self.part(name, whole)
        return range(part.start * size, part.stop * size)

    def shared_part(self, name: str, whole: int) -> range:
        """Like `part`; where there are fewer units than ranks, ranks side by side have the same unit.

        Raises:
            ValueError: neither number divides the other one.
        """
        if whole >= self.count or self.count % whole:
            return self.part(name, whole)
        first = self.rank // (self.count // whole)
        return range(first, first + 1)

    def padded_part(self, whole: int) -> RowOrder:
        """Return the rank's part of `whole` units, of one size for every rank.

        The last ranks may have fewer; they have the last unit several times, and these come behind all others when the
        parts of all ranks are put side by side.
        """
        size = -(-whole // self.count)
        return np.minimum(np.arange(self.rank * size, (self.rank + 1) * size), whole - 1)


WHOLE = Shard()
"""The shard of a model that one rank computes alone."""
