"""A causal model of `transformers`, called as a runner calls a decoder.

Legend: T tokens of a step, E hidden_size, V vocab_size.
"""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pagewood.engine.models.rope import PositionTable
from pagewood.engine.runner.transformers.interface import Step, attending


class PositionedStep(Step, Protocol):
    """The attention of one step, which knows where its tokens are."""

    @property
    def positions(self) -> Tensor:
        """[T] int32, of the tokens."""
        ...


class _Output(NamedTuple):
    """The output of layers that return their last states only: what else classes may look for is None."""

    last_hidden_state: Tensor

    def __getattr__(self, name: str) -> None:
        """Return None for any other part of an output."""


class _Given(nn.Module):
    """Stands where the layers were, and returns states that were computed before."""

    def __init__(self) -> None:
        super().__init__()
        self.states: Tensor | None = None  # written by: model

    def forward(self, *_args: Any, **_others: Any) -> _Output:
        """Return the given states."""
        assert self.states is not None
        return _Output(self.states)


class TransformersModel:
    """The layers of a causal model, and what its class does after them.

    Invariant: all state of a text is in the attention's memory. `head` is the class's own code, with whatever it does
    to logits: the layers are taken out of it, and in their place it gets the states that they have returned.
    """

    __slots__ = ("_given", "_layers", "_whole", "ropes", "short_length")

    def __init__(self, whole: Any) -> None:
        """Take a model apart, whose `attn_implementation` must be `interface.NAME`.

        Args:
            whole: a model with an output projection, which must not be used otherwise any more.
        """
        self.ropes: Sequence[PositionTable] = ()
        self.short_length: int | None = None
        found = whole.get_decoder()
        self._layers = getattr(whole, "model", found) if found is whole else found
        name = next((name for name, module in whole.named_modules() if module is self._layers), "")
        if not name:
            raise ValueError(f"{type(whole).__name__} must have its layers in a module of their own")
        self._given = _Given()
        whole.set_submodule(name, self._given)
        self._whole = whole

    def states(
        self,
        tokens: Tensor,
        rotations: object,
        attention: PositionedStep,
        wanted: Tensor,
        *,
        captured: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute a step up to the input of the output projection.

        Args:
            tokens: `[T] int32`.
            rotations: ignored, because the model makes its own.
            attention: of this step.
            wanted: tokens whose states are wanted.
            captured: must be empty.

        Returns:
            `[W, E]`, the states of the wanted tokens after the last norm; and nothing else.
        """
        assert not captured
        ids = tokens.long()[None]
        with attending(attention):
            # Without a mask of ones, gaps between positions would count as borders of texts.
            states = self._layers(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                position_ids=attention.positions.long()[None],
                use_cache=False,
            ).last_hidden_state[0]
        return states.index_select(0, wanted), []

    def head(self, states: Tensor) -> Tensor:
        """Return the logits `[T, V]` of states `[T, E]` after the last norm."""
        self._given.states = states[None]
        ids = torch.zeros(1, len(states), dtype=torch.long, device=states.device)
        logits = self._whole(input_ids=ids, use_cache=False).logits[0]
        self._given.states = None
        return logits
