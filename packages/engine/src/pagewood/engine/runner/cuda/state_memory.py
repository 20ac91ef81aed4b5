"""The states of recurrent layers on a CUDA device, in the places that batches name.

The last place is the runner's own: grants that pad a graph leave their states there.

Legend: T tokens of a step, G grants with tokens, H heads of values `[V]`.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagewood.engine.models.ops import Convolution, RecurrentHeads
from pagewood.engine.models.parts.choice import AnyMixer, recurrent_part
from pagewood.engine.runner.cuda.recurrence import StepStates, kernels_for
from pagewood.engine.runner.cuda.step_arrays import StepArrays
from pagewood.kvpool.memory import PageMemory


class CUDAStates:
    """The memory of states, and what the graphs of decode steps read of a step.

    Invariant: steps run in the order in which they are queued, so graphs of all sizes share the latter.
    """

    __slots__ = ("_graph", "_kernels", "_memory", "_places")

    def __init__(self, memory: PageMemory, layers: Sequence[AnyMixer], *, largest: int) -> None:
        """Use the memory of the states of all recurrent ones among `layers`; `largest`: most grants of a graph."""
        recurrent = [index for index, layer in enumerate(layers) if recurrent_part(layer) is not None]
        self._memory = memory
        self._places = {layer: place for place, layer in enumerate(recurrent)}
        """Which of the layers of `memory` a layer has."""
        self._kernels = kernels_for(memory.device)
        options = {"dtype": torch.int32, "device": memory.device}
        self._graph = StepStates(
            places=torch.empty(2 * largest, **options),
            saves=torch.empty(largest, **options),
            grants=torch.arange(largest, **options),
            offsets=torch.arange(largest + 1, **options),
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
            longest=int((counts[1:] - counts[:-1]).max()),
        )
        return CUDARecurrence(self, own)

    def of_graph(self, size: int) -> CUDARecurrence:
        """Return the same of steps of `size` grants with one token each, which `fill_graph` describes."""
        own = self._graph
        return CUDARecurrence(
            self,
            StepStates(
                places=own.places[: 2 * size], saves=own.saves[:size], grants=own.grants[:size],
                offsets=own.offsets[: size + 1], longest=1,
            ),
        )  # fmt: skip

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
        return self._kernels.recur(x, gates, heads, self._memory.array(self._places[layer], "matrices"), step)


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
