"""The experts and the hidden states of a step's positions, read from the matrices of its program.

These matrices are outputs of a program once a step has asked for inner rows; before, their memory is used again within
the step. The last layer computes wanted tokens only, so the other positions asked for are kept, as pooled ones are.
Stages send the choices of their layers and of all before behind the hidden states, so that the last one has all.

Legend: T tokens, S sampled grants, K kept tokens, R reported positions, L layers, C experts of a token.
"""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.runner.cpu.program.passes import Grants, side_by_side
from pagewood.engine.runner.cpu.program.tape import Buffer, Program

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerOutputs:
    """Where a program leaves the inner rows of a step."""

    states: Float32
    """[K, hidden size]"""
    choices: Sequence[tuple[int, Int32, bool]]
    """The layers with experts, `[T or K, experts of a token]` of each, and whether its rows are kept tokens."""
    config: ModelConfig

    @classmethod
    def of(cls, program: Program, states: Buffer, choices: Choices, config: ModelConfig) -> InnerOutputs:
        """Return the views of the last outputs of a program: `states`, then those of `choices`."""
        found = choices.buffers
        first, *views = program.outputs[-1 - len(found) :]
        views = [view.view(np.int32) for view in views]
        layers = list(_sizes(config))
        if choices.before is not None:
            ends = np.cumsum(list(_sizes(config, stop=choices.first).values()))
            views[:1] = np.split(views[0], ends[:-1], axis=1)
        kept = [one.rows == states.rows for one in choices.own]
        kept = [*[False] * (len(views) - len(kept)), *kept]
        return cls(states=first, choices=list(zip(layers, views, kept, strict=True)), config=config)

    def experts_of(self, grants: Grants, yielded: Int32) -> Int32 | None:
        """Return the experts `[R, L, C]` that `Grants.routed` asks for, after the run; None: it asks for none."""
        if not len(grants.routed):
            return None
        tokens, kept = _places(grants.routed, grants, yielded)
        out = np.zeros((len(tokens), *(self.config.expert_shape or ())), np.int32)
        for layer, chosen, is_kept in self.choices:
            out[:, layer, : chosen.shape[1]] = chosen[kept if is_kept else tokens]
        return out

    def states_of(self, grants: Grants, yielded: Int32) -> Float32 | None:
        """Return the states that `Grants.stated` asks for, after the run; None: it asks for none."""
        return self.states[_places(grants.stated, grants, yielded)[1]] if len(grants.stated) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The experts that the layers of a stage have chosen for a program's tokens, and those of all stages before."""

    first: int
    """First layer of the stage."""
    before: Buffer | None
    """`[T, experts of a token in all layers before]`, side by side; None: they have none."""
    own: Sequence[Buffer]
    """`[T or K, experts of a token]` of each layer with experts."""

    @classmethod
    def written(cls, model: Decoder[Buffer], tokens: Buffer, own: Sequence[Buffer]) -> Choices:
        """Write the instruction that receives the choices of the stages before, if they have any."""
        first, before = model.stage.first, None
        if size := sum(_sizes(model.whole, stop=first).values()):
            assert model.relay is not None
            before = model.relay.receive(tokens, size)
        return cls(first=first, before=before, own=own)

    @property
    def buffers(self) -> list[Buffer]:
        """All of them, in the order of layers."""
        return [*(() if self.before is None else (self.before,)), *self.own]

    def send(self, model: Decoder[Buffer]) -> None:
        """Write the instructions that give all choices to the next stage."""
        assert model.relay is not None
        if found := self.buffers:
            model.relay.send(side_by_side(found))


def _sizes(config: ModelConfig, stop: int | None = None) -> dict[int, int]:
    """Return the layers with experts before layer `stop`, or all -> how many experts a token has there."""
    return {i: router.num_chosen for i, router in enumerate(config.routers[:stop]) if router is not None}


def _places(entries: Int32, grants: Grants, yielded: Int32) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the rows of reported positions among tokens and among kept ones, see `Granted.places`."""
    granted = grants.granted
    num_before = int(granted.num_wanted.sum() + grants.scored[:, 1].sum() + grants.pooled[:, 2].sum())
    return granted.places(entries, yielded, num_before)
