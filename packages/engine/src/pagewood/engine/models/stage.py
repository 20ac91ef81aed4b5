"""The layers of a model that one of several stages computes (pipeline parallelism).

The first stage has the embeddings, the last one the last norm and the output projection; a table that is both is read
by both. Between two stages goes the residual stream of a step, the inputs of layers if the model has any (they need
the embeddings of the step), and the hidden states of earlier layers that a drafting head behind the last stage reads.

A layer that reads the keys and values of another one is on its stage. So some models can be cut in few places only.

Source: Huang et al., GPipe, 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Protocol, TypeVar

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers of a model. Invariant: `0 <= first < stop <= num_layers`.

    Raises:
        ValueError: a number is out of its range.
    """

    first: int
    """Its first layer."""
    stop: int
    """The first layer behind it."""
    num_layers: int
    """Layers of the model."""

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.stop <= self.num_layers:
            raise ValueError(f"layers of a stage must be some of [0, {self.num_layers}), got {self}")

    def __str__(self) -> str:
        """Return as in "layers 0 to 11 of 24"."""
        return f"layers {self.first} to {self.stop - 1} of {self.num_layers}"

    @property
    def is_first(self) -> bool:
        """Whether it has the embeddings."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the output projection."""
        return self.stop == self.num_layers


def stages_of(cuts: Sequence[int], num_layers: int) -> list[Stage]:
    """Return the stages of a model.

    Args:
        cuts: first layer of each stage but the first one, ascending.
        num_layers: of the model.
    """
    edges = [0, *cuts, num_layers]
    return [Stage(first, stop, num_layers) for first, stop in pairwise(edges)]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNeeds:
    """What a drafting head behind the last stage reads of the model."""

    captured: tuple[int, ...]
    """Numbers of hidden states, see `Decoder.states`."""
    embeds: bool
    """Whether it uses the model's embedding, which the last stage then has too."""

    def relayed(self, edge: int) -> list[int]:
        """Return which hidden states of earlier layers go to the stage whose first layer is `edge`, in their order."""
        return sorted({state for state in self.captured if state < edge})


NO_HEAD = HeadNeeds(captured=(), embeds=False)
"""No head drafts."""


class Relay(Protocol[A]):
    """What passes the values of a step from stage to stage, in one order on both sides."""

    @property
    def needs(self) -> HeadNeeds:
        """What a drafting head behind the last stage reads of the model."""
        ...

    def receive(self, tokens: A, size: int) -> A:
        """Return what the stage before has sent, `[T, size]`; `tokens` `[T]` are those of the step."""
        ...

    def send(self, x: A) -> None:
        """Send `x` `[T, size]` to the next stage."""
        ...


def divide(
    weights: Sequence[int],
    count: int,
    allowed: Sequence[int],
    *,
    head: int = 0,
    have_pages: Sequence[bool] | None = None,
) -> tuple[int, ...]:
    """Return where to cut a model so that its heaviest stage is as light as possible; see `stages_of`.

    Args:
        weights: bytes of each layer.
        count: of stages.
        allowed: where it may be cut, each the number of the first layer behind a cut.
        head: bytes of the output projection, which the last stage reads too.
        have_pages: whether each layer has KV in pages, as one of each stage must; None: all have.

    Raises:
        ValueError: there are too few places for a cut, or layers with pages.
    """
    num_layers, places = len(weights), sorted(allowed)
    if len(places) < count - 1:
        raise ValueError(
            f"pipeline_parallel_size must be at most {len(places) + 1} for a model of {num_layers} layers that can be "
            f"cut before {_listed(places)}, got {count}"
        )
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    edges = [0, *places, num_layers]
    total = {num_layers: head}
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    """Edge -> the weight of the heaviest of the stages before it, and their first layers."""
    for number in range(count):
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        for stop in [num_layers] if number == count - 1 else edges[1:-1]:
            for first, (heaviest, firsts) in best.items():
                if first < stop and (have_pages is None or any(have_pages[first:stop])):
                    weight = max(heaviest, sums[stop] - sums[first] + total.get(stop, 0))
                    if weight < reached.get(stop, (inf, ()))[0]:
                        reached[stop] = weight, (*firsts, first)
        best = reached
    if num_layers not in best:
        raise ValueError(
            f"pipeline_parallel_size must be at most {sum(have_pages or ())}, the number of layers with attention, of "
            f"which each stage needs one, got {count}"
        )
    return best[num_layers][1][1:]


def _listed(places: Sequence[int]) -> str:
    return "no layer" if not places else f"layers {', '.join(map(str, places))}" if len(places) < 10 else "most layers"
