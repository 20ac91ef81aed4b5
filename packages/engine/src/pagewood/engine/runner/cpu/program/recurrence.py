"""Recurrent layers on a CPU, written to the tape once a layer.

Legend: T tokens of a scope, C channels of a convolution, W tokens that it reads.
"""

# pyright: basic
# torch's conversions from and to numpy have no types.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagewood.engine.models.ops import Convolution, RecurrentHeads
from pagewood.engine.models.parts.choice import AnyMixer, recurrent_part
from pagewood.engine.runner.cpu.compiled import recurrence
from pagewood.engine.runner.cpu.program.drafted_runs import DraftedRuns
from pagewood.engine.runner.cpu.program.tape import Buffer
from pagewood.kvpool.memory import PageMemory


class CPURecurrence:
    """`models.ops.Recurrence` over the memory of states, whose places the scope of a step names."""

    __slots__ = ("_memory", "_places", "runs")

    def __init__(self, memory: PageMemory, layers: Sequence[AnyMixer], *, runs: DraftedRuns | None = None) -> None:
        """Use the memory of the states of all recurrent ones among `layers`; `runs`: None if nothing is drafted."""
        self.runs = runs
        recurrent = [index for index, layer in enumerate(layers) if recurrent_part(layer) is not None]
        self._memory = memory
        self._places = {layer: place for place, layer in enumerate(recurrent)}
        """Which of the layers of `memory` a layer has."""

    def convolve(self, x: Buffer, column: int, convolution: Convolution, layer: int) -> Buffer:
        """Return the convolution `[T, C]` of columns of `x` `[T, n]`."""
        (width, channels), bias = convolution.weight.shape, convolution.bias

        def write(x: Buffer, column: int) -> Buffer:
            out = x.tape.buffer(x.rows, channels)
            x.tape.write(
                recurrence.convolve, x.rows, scope=x.rows.scope, x=x, weight=convolution.weight.numpy(),
                bias=None if bias is None else bias.numpy(), tails=self._array(layer, "tail"), out=out, x_size=x.size,
                column=column, channels=channels, width=width, activates=int(convolution.activates),
            )  # fmt: skip
            return out

        if self.runs is not None:
            write(self.runs.again(x, column, channels, layer=layer, name="tail"), 0)
        return write(x, column)

    def recur(self, x: Buffer, gates: Buffer, heads: RecurrentHeads, layer: int) -> Buffer:
        """Return the results `[T, H V]` of `x` `[T, 2 G K + H V]`, whose values are overwritten."""
        runs, state_size = self.runs, heads.num_heads * heads.key_dim * heads.value_dim

        def write(x: Buffer, gates: Buffer) -> Buffer:
            out = x.tape.buffer(x.rows, heads.value_size)
            matrices = self._array(layer, "matrices")
            passing = None if runs is None else runs.passing(state_size)
            if heads.decays_by_channel:
                x.tape.write(
                    recurrence.recur_by_channel, x.rows, scope=x.rows.scope, x=x, gates=gates, rates=heads.rate.numpy(),
                    biases=heads.bias.numpy(), matrices=matrices, passing=passing, out=out, num_heads=heads.num_heads,
                    key_dim=heads.key_dim, value_dim=heads.value_dim,
                )  # fmt: skip
                return out
            q_column, k_column, v_column = heads.columns
            x.tape.write(
                recurrence.recur, x.rows, scope=x.rows.scope, x=x, gates=gates, rates=heads.rate.numpy(),
                biases=heads.bias.numpy(), skips=None if heads.skip is None else heads.skip.numpy(), matrices=matrices,
                passing=passing, out=out, x_size=x.size, num_heads=heads.num_heads, num_key_heads=heads.num_key_heads,
                key_dim=heads.key_dim, value_dim=heads.value_dim, q_column=q_column, k_column=k_column,
                v_column=v_column, corrects=heads.most_strength if heads.corrects else 0,
            )  # fmt: skip
            return out

        if runs is not None:
            write(*(runs.again(one, 0, one.size, layer=layer, name=name) for one, name in ((x, "x"), (gates, "gates"))))
        return write(x, gates)

    def _array(self, layer: int, name: str) -> np.ndarray:
        return self._memory.array(self._places[layer], name).view(-1).numpy()
