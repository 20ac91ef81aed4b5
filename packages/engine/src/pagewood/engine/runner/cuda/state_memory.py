"""The states of recurrent layers on a CUDA device, in the places that batches name.

The last place is the runner's own: grants that pad a graph leave their states there. Beside them is what rows have of
their latest tokens; see `recurrence`.

Legend: T tokens of a step, G grants with tokens, H heads of values `[V]`.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

import numpy as np
import torch
from torch import Tensor

from pagewood.engine.models.ops import Convolution, RecurrentHeads
from pagewood.engine.models.parts.channel_delta import ChannelDeltaConfig
from pagewood.engine.models.parts.choice import AnyMixer, Recurrent, recurrent_part
from pagewood.engine.runner.cuda.drafts.verify import ExactPlaces
from pagewood.engine.runner.cuda.drafts.verify_arrays import VerifyArrays
from pagewood.engine.runner.cuda.recurrence import LARGEST_BLOCK, StepStates, kernels_for
from pagewood.engine.runner.cuda.step_arrays import StepArrays, TableShape
from pagewood.kvpool import PageArray, StateLayout
from pagewood.kvpool.memory import PageMemory, allocate


class CUDAStates:
    """The memory of states, and what the graphs of steps read of a step.

    Invariant: steps run in the order in which they are queued, so graphs of all sizes share the latter.

    Args:
        memory: of the states of all recurrent ones among `layers`.
        layers: of the model.
        tables: of the runner.
        graph_sizes: grants of graphs.
        max_drafts: tokens of a grant that may be rejected, or that pad it, at most; None: no step verifies.
    """

    __slots__ = (
        "_block", "_borders", "_certain", "_kernels", "_places", "_saves", "_shapes", "_states", "_tables", "memory",
        "opened",
    )  # fmt: skip

    def __init__(
        self,
        memory: PageMemory,
        layers: Sequence[AnyMixer],
        tables: TableShape,
        graph_sizes: Sequence[int],
        *,
        max_drafts: int | None = None,
    ) -> None:
        largest, width = max(graph_sizes, default=0), 1 + (max_drafts or 0)
        recurrent = {index: part for index, layer in enumerate(layers) if (part := recurrent_part(layer)) is not None}
        self.memory = memory
        """The memory of states, by place."""  # contents written by: convolve, recur
        self._tables = tables
        self._places = {layer: place for place, layer in enumerate(recurrent)}
        """Which of the layers of `memory` a layer has."""
        self._block = gcd(tables.page_size, LARGEST_BLOCK)
        arrays = _rings(next(iter(recurrent.values())), self._block, width - 1)
        layout = StateLayout(num_layers=len(recurrent), arrays=arrays)
        self.opened = allocate(layout, tables.max_rows + 1, device=memory.device)
        """The latest tokens of each row."""  # contents written by: convolve, recur
        self._kernels = kernels_for(memory.device)
        options = {"dtype": torch.int32, "device": memory.device}
        self._borders = None if max_drafts is None else torch.zeros(tables.max_rows + 1, **options)
        """[rows], the position of the border that the place of each row has the state at; None: the last one before its
        next token."""  # contents written by: _begun
        self._states = torch.empty(2 * largest, **options)
        """`StepStates.places` of graphs."""  # contents written by: clear_graph, fill_graph
        self._saves = torch.empty(largest * width, **options)
        """`StepStates.saves` of graphs."""  # contents written by: clear_graph, fill_graph
        self._certain = torch.ones(largest, **options)
        self._shapes = {
            one: (torch.arange(largest * one, **options) // one, torch.arange(largest + 1, **options) * one)
            for one in {1, width}
        }
        """`StepStates.grants` and `offsets` of graphs, by the tokens of a grant."""

    def of_step(self, host: StepArrays[Tensor], step: StepArrays[Tensor], sources: Tensor) -> CUDARecurrence:
        """Return what recurrent layers do in a step, whose arrays are in pinned memory and on the device.

        `sources` `[T]` are those of this rank's tokens.
        """
        own = StepStates(
            places=step.states,
            saves=step.state_saves,
            grants=step.grants,
            offsets=step.qo_indptr,
            sources=sources,
            tokens_per_row=self._tables.tokens_per_row,
            longest=_longest(host.qo_indptr),
        )
        return self._begun(own)

    def of_verify(self, host: VerifyArrays[Tensor], step: VerifyArrays[Tensor], where: ExactPlaces) -> CUDARecurrence:
        """Return the same of a step that verifies without a graph."""
        own = StepStates(
            places=step.states,
            saves=exact_saves(step, where),
            grants=step.token_grants,
            offsets=step.qo_indptr,
            sources=where.sources,
            tokens_per_row=self._tables.tokens_per_row,
            longest=_longest(host.qo_indptr),
            certain=step.certain,
        )
        return self._begun(own)

    def of_graph(self, sources: Tensor, *, width: int = 1) -> CUDARecurrence:
        """Return the same of steps of grants with `width` tokens each, from `sources`, which `fill_graph` describes.

        A token that pads a grant is one more that is rejected.
        """
        size, (grants, offsets) = len(sources) // width, self._shapes[width]
        own = StepStates(
            places=self._states[: 2 * size],
            saves=self._saves[: len(sources)],
            grants=grants[: len(sources)],
            offsets=offsets[: size + 1],
            sources=sources,
            tokens_per_row=self._tables.tokens_per_row,
            longest=width,
            certain=None if width == 1 else self._certain[:size],
        )
        return self._begun(own)

    def clear_graph(self) -> None:
        """Let steps of graphs read zeros and change nothing but the place of the runner itself, as captures must."""
        self._states.view(-1, 2)[:, 0] = -1
        self._states.view(-1, 2)[:, 1] = self.memory.num_pages - 1
        self._saves.fill_(-1)

    def fill_graph(self, places: Tensor, saves: Tensor) -> None:
        """Queue the copy of what a step has to where graphs read it; see `StepStates`."""
        self._states[: len(places)].copy_(places)
        self._saves[: len(saves)].copy_(saves)

    def _begun(self, step: StepStates) -> CUDARecurrence:
        """Queue what finds the states of a step, where drafts were rejected, and notes how far it gets them."""
        if self._borders is None:
            return CUDARecurrence(self, step)
        sources, targets = step.places.view(-1, 2).unbind(1)
        firsts = step.offsets[: len(targets) + 1]
        at = step.sources.index_select(0, firsts[:-1])
        rows = torch.div(at, self._tables.tokens_per_row, rounding_mode="floor")
        starts = at - rows * self._tables.tokens_per_row
        borders = torch.where(sources == targets, self._borders.index_select(0, rows), starts - starts % self._block)
        ends = starts + (firsts.diff() if step.certain is None else step.certain)
        self._borders.index_copy_(0, rows.long(), ends - ends % self._block)
        return CUDARecurrence(self, replace(step, borders=borders))

    def convolve(self, x: Tensor, column: int, convolution: Convolution, layer: int, step: StepStates) -> Tensor:
        """Return the convolution of columns of `x` in `layer`; see `recurrence.RecurrentKernels`."""
        place = self._places[layer]
        tails, latest = self.memory.array(place, "tail"), self.opened.array(place, "latest")
        return self._kernels.convolve(x, column, convolution, tails, latest, step)

    def recur(self, x: Tensor, gates: Tensor, heads: RecurrentHeads, layer: int, step: StepStates) -> Tensor:
        """Return the results of heads in `layer`; see `recurrence.RecurrentKernels`."""
        place = self._places[layer]
        if step.certain is not None:  # products with zeros hide later tokens, and zero times NaN is NaN
            x, gates = (torch.nan_to_num(one, 0.0, 0.0, 0.0) for one in (x, gates))
        matrices, opened = self.memory.array(place, "matrices"), self.opened.array(place, "opened")
        return self._kernels.recur(x, gates, heads, matrices, opened, self._block, step)


def exact_saves(step: VerifyArrays[Tensor], where: ExactPlaces) -> Tensor:
    """Return `StepStates.saves` of a step that verifies, of which only the device knows where its grants begin."""
    num_tokens = len(where.sources)
    saves = torch.full((num_tokens + 1,), -1, dtype=torch.int32, device=where.sources.device)
    if len(step.state_copies):
        grants, counts, lengths, places = step.state_copies.view(-1, 4).unbind(1)
        index = lengths - 1 - where.starts.index_select(0, grants)
        tokens = step.qo_indptr.index_select(0, grants) + index
        is_here = (index >= 0) & (index < counts)
        saves.index_copy_(0, torch.where(is_here, tokens, num_tokens).long(), places)
    return saves[:num_tokens]


def _longest(offsets: Tensor) -> int:
    """Return the most tokens of a grant, from their first tokens on the host."""
    return int(np.diff(offsets.numpy()).max())


def _rings(config: Recurrent, size: int, num_drafts: int) -> tuple[PageArray, ...]:
    """Return what a row keeps of its tokens in a layer with blocks of `size` tokens, see `RecurrentKernels`."""
    arrays = {one.name: one.shape for one in config.state}
    before, channels = arrays["tail"]
    latest = PageArray(name="latest", dtype="float32", shape=(before + num_drafts, channels))
    if "matrices" not in arrays:
        return (latest,)
    num_heads, key_dim, value_dim = arrays["matrices"]
    values = num_heads * value_dim
    keys, decays = (channels - values) // 2, num_heads
    if isinstance(config, ChannelDeltaConfig):
        decays *= key_dim
    ring = size * (1 + -(-num_drafts // size))
    return latest, PageArray(name="opened", dtype="float32", shape=(ring, keys + decays + values))


class CUDARecurrence:
    """What recurrent layers do in one step; satisfies `models.ops.Recurrence`."""

    __slots__ = ("_states", "_step")

    def __init__(self, states: CUDAStates, step: StepStates) -> None:
        self._states = states
        self._step = step

    def convolve(self, x: Tensor, column: int, convolution: Convolution, layer: int) -> Tensor:
        """Return the convolution `[T, C]` of columns of `x` `[T, n]`."""
        return self._states.convolve(x, column, convolution, layer, self._step)

    def recur(self, x: Tensor, gates: Tensor, heads: RecurrentHeads, layer: int) -> Tensor:
        """Return the results `[T, H V]` of `x` `[T, 2 G K + H V]`."""
        return self._states.recur(x, gates, heads, layer, self._step)
