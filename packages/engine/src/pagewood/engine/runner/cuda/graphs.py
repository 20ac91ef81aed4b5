"""Decode steps as CUDA graphs of several sizes; a step uses the smallest graph with enough room.

Legend: B grants of a graph, V vocab_size.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pagewood.engine.api import Progress
from pagewood.engine.models.ops import Attention
from pagewood.engine.runner.cuda.attention import HostArrays, Places, Staging
from pagewood.engine.runner.cuda.device import Device

Forward = Callable[[Tensor, Tensor, Attention[Tensor], Tensor], Tensor]
"""(sources, positions, attention, wanted) -> logits; the arrays are those of `StepArrays`."""


class Planner(Protocol):
    """Kernels that are planned for each step. Invariant: all layers use the latest plan."""

    def plan(self, host: HostArrays, kv_indices: Tensor, staging: Staging) -> None:
        """Plan a step; kernels of a graph copy the arrays to its memory."""
        ...


class GraphAttention(Protocol):
    """The attention of a model."""

    def of_graph(self, memory: Places) -> tuple[Planner, Attention[Tensor]]:
        """Return kernels for steps of one token per grant, with exactly the number of grants of `memory`."""
        ...


def graph_sizes(largest: int) -> list[int]:
    """Return the sizes to capture, ascending: 1, 2, 4, multiples of 8 below 64, of 16 from there, and `largest`.

    Raises:
        ValueError: `largest` is less than 1.
    """
    if largest < 1:
        raise ValueError(f"largest must be >= 1, got {largest}")
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, largest, 16)]
    return [size for size in sizes if size < largest] + [largest]


class DecodeGraph:
    """A captured decode step. Invariant: it reads and writes only the memory that it was captured with."""

    __slots__ = ("_kernels", "_logits", "_memory", "_replay", "_sources")

    def __init__(
        self, memory: Places, sources: Tensor, kernels: Planner, logits: Tensor, replay: Callable[[], None]
    ) -> None:
        self._memory = memory
        self._sources = sources
        self._kernels = kernels
        self._logits = logits
        self._replay = replay

    def launch(
        self, host: HostArrays, sources: Tensor, positions: Tensor, indices: Sequence[Tensor], staging: Staging
    ) -> Tensor:
        """Queue a step of exactly B grants, with its page ids in each group of layers.

        Returns:
            Its logits `[B, V]`, which are valid until the next launch.
        """
        self._sources.copy_(sources)
        self._memory.positions.copy_(positions)
        self._kernels.plan(host, indices[0], staging)
        copy_indices(self._memory, indices[1:])
        self._replay()
        return self._logits


def copy_indices(memory: Places, more: Sequence[Tensor]) -> None:
    """Copy the page ids of a step in other groups of layers than the first to the memory of a graph."""
    for own, indices in zip(memory.more_indices, more, strict=True):
        own[: len(indices)].copy_(indices)


class DecodeGraphs:
    """The captured graphs by size."""

    __slots__ = ("_graphs", "sizes")

    def __init__(self, graphs: dict[int, DecodeGraph]) -> None:
        self._graphs = graphs
        self.sizes = sorted(graphs)
        """Ascending."""

    def size_for(self, num_grants: int) -> int | None:
        """Return the smallest size with room for `num_grants`, or None if no graph is large enough."""
        place = bisect.bisect_left(self.sizes, num_grants)
        return self.sizes[place] if place < len(self.sizes) else None

    def of(self, size: int) -> DecodeGraph:
        """Return the graph of a size."""
        return self._graphs[size]


def capture_graphs(
    sizes: Sequence[int],
    attention: GraphAttention,
    forward: Forward,
    *,
    device: Device,
    padding_source: int,
    padding_page: int,
    pages_per_row: int,
    num_groups: int = 1,
    num_ranks: int = 1,
    staging: Staging,
    progress: Progress | None = None,
) -> DecodeGraphs:
    """Capture decode steps, the largest first, so that the smaller ones reuse its memory.

    Args:
        sizes: grants of each graph.
        attention: the attention of the model.
        forward: computes a step; called during the capture.
        device: the device that captures.
        padding_source: place in the token table of a token that is never read.
        padding_page: page that is never read.
        pages_per_row: maximum number of pages of a grant.
        num_groups: groups of layers.
        num_ranks: ranks whose tokens a step embeds, this one's among them; each has as many as there are grants.
        staging: pinned buffers for the plans during the capture.
        progress: called before each graph.
    """
    graphs: dict[int, DecodeGraph] = {}
    options = {"dtype": torch.int32, "device": device.torch_device}
    all_indices, *more_indices = torch.full(
        (num_groups, max(sizes, default=0) * pages_per_row), padding_page, **options
    )
    for done, size in enumerate(sorted(sizes, reverse=True)):
        if progress:
            progress(f"capturing the graph of {size} requests", done, len(sizes))
        counts = torch.arange(size + 1, dtype=torch.int32)
        ones = torch.ones(size, dtype=torch.int32)
        memory = Places(
            grants=torch.arange(size, **options),
            positions=torch.zeros(size, **options),
            kv_indptr=torch.arange(size + 1, **options),
            kv_indices=all_indices,
            last_page_len=torch.ones(size, **options),
            more_indices=tuple(more_indices),
        )
        sources = torch.full((size * num_ranks,), padding_source, **options)
        kernels, planned = attention.of_graph(memory)
        kernels.plan(
            HostArrays(is_decode=True, qo_indptr=counts, kv_indptr=counts, last_page_len=ones, kv_lens=ones),
            all_indices[:size],
            staging,
        )
        device.finish()  # the next plan uses the same staging
        logits, replay = device.capture(
            lambda sources=sources, memory=memory, planned=planned: forward(
                sources, memory.positions, planned, memory.grants
            )
        )
        graphs[size] = DecodeGraph(memory, sources, kernels, logits, replay)
    if progress and sizes:
        progress("graphs are captured", len(sizes), len(sizes))
    return DecodeGraphs(graphs)
