"""Steps that verify drafts as CUDA graphs: of several sizes, with the same number of tokens for each grant.

Legend: B grants of a graph, W tokens of each, V vocab_size.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pagewood.engine.api import Progress
from pagewood.engine.models.ops import Attention
from pagewood.engine.runner.cuda.attention import HostArrays, Places, Staging
from pagewood.engine.runner.cuda.device import Device
from pagewood.engine.runner.cuda.drafts.masks import Masks
from pagewood.engine.runner.cuda.graphs import Forward, copy_indices


class VerifyPlanner(Protocol):
    """Kernels that are planned for each step that verifies. Invariant: all layers use the latest plan."""

    def plan(self, host: HostArrays, kv_indices: Tensor, masks: Masks, staging: Staging) -> None:
        """Plan a step; kernels of a graph copy the page arrays to its memory, where the masks must be already."""
        ...


class VerifyAttention(Protocol):
    """The attention of a model."""

    @property
    def mask_windows(self) -> Sequence[int]:
        """The windows for which steps have masks."""
        ...

    def of_verify_graph(self, memory: Places, masks: Masks) -> tuple[VerifyPlanner, Attention[Tensor]]:
        """Return kernels for steps with masks, with exactly the number of grants of `memory`."""
        ...


def num_empty_grants(size: int, width: int) -> int:
    """Return the number of empty grants in a graph of `size` grants of `width` tokens.

    With a graph, FlashInfer chooses its tile as if every grant had one token, except one grant with all remaining
    tokens. Empty grants reduce that grant to one token, so the tile is that of a decode step.
    """
    return size * (width - 1)


class VerifyGraph:
    """A captured step of B grants of W tokens. Invariant: it reads and writes only the memory of its capture."""

    __slots__ = ("_kernels", "_logits", "_masks", "_memory", "_replay", "_sources", "num_empty")

    def __init__(
        self,
        memory: Places,
        masks: Masks,
        sources: Tensor,
        kernels: VerifyPlanner,
        logits: Tensor,
        replay: Callable[[], None],
        *,
        num_empty: int,
    ) -> None:
        self._memory = memory
        self._masks = masks
        self._sources = sources
        self._kernels = kernels
        self._logits = logits
        self._replay = replay
        self.num_empty = num_empty
        """Empty grants that every step has, after its B grants."""

    def launch(self, host: HostArrays, sources: Tensor, places: Places, masks: Masks, staging: Staging) -> Tensor:
        """Queue a step; return its logits `[B * W, V]`, which are valid until the next launch of any graph."""
        self._sources.copy_(sources)
        self._memory.grants.copy_(places.grants)
        self._memory.positions.copy_(places.positions)
        self._masks.offsets.copy_(masks.offsets)
        for window, memory in self._masks.by_window.items():
            mask = masks.by_window[window]
            memory[: len(mask)].copy_(mask)
        self._kernels.plan(host, places.kv_indices, self._masks, staging)
        copy_indices(self._memory, places.more_indices)
        self._replay()
        return self._logits


class VerifyGraphs:
    """The captured graphs by (B, W)."""

    __slots__ = ("_graphs", "_sizes", "_widths")

    def __init__(self, graphs: Mapping[tuple[int, int], VerifyGraph]) -> None:
        self._graphs = dict(graphs)
        self._sizes = sorted({size for size, _ in graphs})
        self._widths = sorted({width for _, width in graphs})

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """All (B, W), ascending."""
        return sorted(self._graphs)

    def shape_for(self, num_grants: int, num_tokens: int) -> tuple[int, int] | None:
        """Return the smallest shape with room for grants of `num_tokens`, or None if no graph is large enough."""
        size, width = bisect.bisect_left(self._sizes, num_grants), bisect.bisect_left(self._widths, num_tokens)
        if size == len(self._sizes) or width == len(self._widths):
            return None
        return self._sizes[size], self._widths[width]

    def of(self, shape: tuple[int, int]) -> VerifyGraph:
        """Return the graph of a shape."""
        return self._graphs[shape]


def mask_bytes(size: int, width: int, longest: int) -> int:
    """Return the largest size of a mask for `size` grants of `width` tokens and up to `longest` positions."""
    return size * ((width * longest + 7) // 8)


def capture_verify_graphs(
    sizes: Sequence[int],
    widths: Sequence[int],
    attention: VerifyAttention,
    forward: Forward,
    *,
    device: Device,
    padding_source: int,
    padding_page: int,
    pages_per_row: int,
    page_size: int,
    num_groups: int = 1,
    staging: Staging,
    progress: Progress | None = None,
) -> VerifyGraphs:
    """Capture steps that verify, the largest first, so that the smaller ones reuse its memory.

    Args:
        sizes: B of the graphs.
        widths: W of the graphs; each is captured in all sizes.
        attention: the attention of the model.
        forward: computes a step; called during the capture.
        device: the device that captures.
        padding_source: place in the token table of a token that is never read.
        padding_page: page that is never read.
        pages_per_row: maximum number of pages of a grant.
        page_size: positions of a page.
        num_groups: groups of layers.
        staging: pinned buffers for the plans during the capture.
        progress: called before each graph.
    """
    graphs: dict[tuple[int, int], VerifyGraph] = {}
    shapes = sorted(((size, width) for size in sizes for width in widths), key=lambda one: -one[0] * one[1])
    if not shapes:
        return VerifyGraphs(graphs)
    options = {"dtype": torch.int32, "device": device.torch_device}
    largest, widest = max(sizes), max(widths)
    # The page of padding follows those of the largest step.
    indices, *more_indices = torch.full((num_groups, largest * pages_per_row + 1), padding_page, **options)
    num_bytes = mask_bytes(largest, widest, pages_per_row * page_size)
    bits = {
        window: torch.full((num_bytes,), 255, dtype=torch.uint8, device=device.torch_device)
        for window in attention.mask_windows
    }
    shared: Tensor | None = None
    for done, (size, width) in enumerate(shapes):
        if progress:
            progress(f"capturing the graph of {size} requests with {width} tokens each", done, len(shapes))
        num_tokens, num_empty = size * width, num_empty_grants(size, width)
        num_owners = size + (num_empty > 0)  # grants that have a page
        num_grants = size + num_empty
        kv_indptr = torch.arange(num_grants + 1, dtype=torch.int32).clamp_(max=num_owners)
        last = torch.ones(num_grants, dtype=torch.int32)
        host = HostArrays(
            is_decode=False,
            qo_indptr=(torch.arange(num_grants + 1, dtype=torch.int32) * width).clamp_(max=num_tokens),
            kv_indptr=kv_indptr,
            last_page_len=last,
            kv_lens=(torch.arange(num_grants, dtype=torch.int32) < num_owners).int(),
        )
        memory = Places(
            grants=torch.arange(num_tokens, **options) // width,
            positions=torch.zeros(num_tokens, **options),
            kv_indptr=kv_indptr.to(device.torch_device),
            kv_indices=indices,
            last_page_len=last.to(device.torch_device),
            more_indices=tuple(more_indices),
            is_finite=torch.ones(num_tokens, 1, dtype=torch.bool, device=device.torch_device),
        )
        masks = Masks(by_window=bits, offsets=torch.zeros(num_grants + 1, **options))
        sources = torch.full((num_tokens,), padding_source, **options)
        everything = torch.arange(num_tokens, **options)
        kernels, planned = attention.of_verify_graph(memory, masks)
        kernels.plan(host, indices[:num_owners], masks, staging)
        device.finish()  # the next plan uses the same staging

        def work(
            sources: Tensor = sources,
            memory: Places = memory,
            planned: Attention[Tensor] = planned,
            all_: Tensor = everything,
        ) -> Tensor:
            nonlocal shared
            logits = forward(sources, memory.positions, planned, all_)
            if shared is None:  # in the first run of the largest graph, before it is captured
                shared = torch.empty_like(logits)
            return shared[: len(logits)].copy_(logits)

        logits, replay = device.capture(work)
        graphs[size, width] = VerifyGraph(memory, masks, sources, kernels, logits, replay, num_empty=num_empty)
    if progress:
        progress("graphs are captured", len(shapes), len(shapes))
    return VerifyGraphs(graphs)
