"""The states of recurrent layers on a CUDA device, in the places that batches name.

The last place is the runner's own: grants that pad a graph leave their states there. Beside them is what rows have of
the blocks that they are in; see `recurrence`.

Legend: T tokens of a step, G grants with tokens, H heads of values `[V]`.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

import torch
from torch import Tensor

from pagewood.engine.models.ops import Convolution, RecurrentHeads
from pagewood.engine.models.parts.channel_delta import ChannelDeltaConfig
from pagewood.engine.models.parts.choice import AnyMixer, Recurrent, recurrent_part
from pagewood.engine.runner.cuda.recurrence import LARGEST_BLOCK, StepStates, kernels_for
from pagewood.engine.runner.cuda.step_arrays import StepArrays, TableShape
from pagewood.kvpool import PageArray, StateLayout
from pagewood.kvpool.memory import PageMemory, allocate


class CUDAStates:
    """The memory of states, and what the graphs of decode steps read of a step.

    Invariant: steps run in the order in which they are queued, so graphs of all sizes share the latter.
    """

    __slots__ = ("_graph", "_kernels", "_memory", "_places", "_tables", "opened")

    def __init__(
        self, memory: PageMemory, layers: Sequence[AnyMixer], tables: TableShape, graph_sizes: Sequence[int]
    ) -> None:
        """Use the memory of the states of all recurrent ones among `layers`."""
        largest = max(graph_sizes, default=0)
        recurrent = {index: part for index, layer in enumerate(layers) if (part := recurrent_part(layer)) is not None}
        self._memory = memory
        self._tables = tables
        self._places = {layer: place for place, layer in enumerate(recurrent)}
        """Which of the layers of `memory` a layer has."""
        array = _opened(next(iter(recurrent.values())), gcd(tables.page_size, LARGEST_BLOCK))
        self.opened: PageMemory | None = None
        """The open block of each row; None: convolutions only."""  # contents written by: recur
        if array is not None:
            layout = StateLayout(num_layers=len(recurrent), arrays=(array,))
            self.opened = allocate(layout, tables.max_rows + 1, device=memory.device)
        self._kernels = kernels_for(memory.device)
        options = {"dtype": torch.int32, "device": memory.device}
        self._graph = StepStates(
            places=torch.empty(2 * largest, **options),
            saves=torch.empty(largest, **options),
            grants=torch.arange(largest, **options),
            offsets=torch.arange(largest + 1, **options),
            sources=torch.empty(0, **options),
            tokens_per_row=tables.tokens_per_row,
            longest=1,
        )
        """What graphs read of a step with one token a grant."""  # contents written by: clear_graph, fill_graph

    def of_step(self, host: StepArrays[Tensor], step: StepArrays[Tensor]) -> CUDARecurrence:
        """Return what recurrent layers do in a step, whose arrays are in pinned memory and on the device."""
        counts = host.qo_indptr.numpy()
        own = StepStates(
            places=step.states,
            saves=step.state_saves,
            grants=step.grants,
            offsets=step.qo_indptr,
            sources=step.sources,
            tokens_per_row=self._tables.tokens_per_row,
            longest=int((counts[1:] - counts[:-1]).max()),
        )
        return CUDARecurrence(self, own)

    def of_graph(self, sources: Tensor) -> CUDARecurrence:
        """Return the same of steps of grants with one token each, from `sources`, which `fill_graph` describes."""
        own, size = self._graph, len(sources)
        places, saves, grants = own.places[: 2 * size], own.saves[:size], own.grants[:size]
        offsets = own.offsets[: size + 1]
        return CUDARecurrence(
            self, replace(own, places=places, saves=saves, grants=grants, offsets=offsets, sources=sources)
        )

    def clear_graph(self) -> None:
        """Let steps of graphs read zeros and change nothing but the place of the runner itself, as captures must."""
        self._graph.places.view(-1, 2)[:, 0] = -1
        self._graph.places.view(-1, 2)[:, 1] = self._memory.num_pages - 1
        self._graph.saves.fill_(-1)

    def fill_graph(self, step: StepArrays[Tensor]) -> None:
        """Queue the copy of a step's places to where graphs read them."""
        self._graph.places[: len(step.states)].copy_(step.states)
        self._graph.saves[: len(step.state_saves)].copy_(step.state_saves)

    def convolve(self, x: Tensor, column: int, convolution: Convolution, layer: int, step: StepStates) -> Tensor:
        """Return the convolution of columns of `x` in `layer`; see `recurrence.RecurrentKernels`."""
        return self._kernels.convolve(x, column, convolution, self._memory.array(self._places[layer], "tail"), step)

    def recur(self, x: Tensor, gates: Tensor, heads: RecurrentHeads, layer: int, step: StepStates) -> Tensor:
        """Return the results of heads in `layer`; see `recurrence.RecurrentKernels`."""
        place = self._places[layer]
        assert self.opened is not None
        opened = self.opened.array(place, "opened")
        return self._kernels.recur(x, gates, heads, self._memory.array(place, "matrices"), opened, step)


def _opened(config: Recurrent, size: int) -> PageArray | None:
    """Return what a row keeps of an open block of `size` tokens in a layer, see `RecurrentKernels.recur`."""
    arrays = {one.name: one.shape for one in config.state}
    if "matrices" not in arrays:
        return None
    num_heads, key_dim, value_dim = arrays["matrices"]
    values = num_heads * value_dim
    keys, decays = (arrays["tail"][-1] - values) // 2, num_heads
    if isinstance(config, ChannelDeltaConfig):
        decays *= key_dim
    return PageArray(name="opened", dtype="float32", shape=(size, keys + decays + values))


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
