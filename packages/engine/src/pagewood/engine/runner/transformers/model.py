"""A causal model of `transformers`, called as a runner calls a decoder.

Legend: T tokens of a step, E hidden_size, V vocab_size.
"""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from pagewood.engine.models.limits import LARGEST
from pagewood.engine.models.rope import PositionTable
from pagewood.engine.runner.transformers.caches import TextStep, cache_of
from pagewood.engine.runner.transformers.interface import NAME, Step, attending

_ATTENDING = "_attn_implementation"
"""Field of a configuration that says what attends."""


class PositionedStep(Step, TextStep, Protocol):
    """The attention and the caches of one step, which knows where its tokens are."""

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

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.get_input_embeddings = layers.get_input_embeddings  # for classes that embed before their layers
        self.states: Tensor | None = None  # written by: model

    def forward(self, *_args: Any, **_others: Any) -> _Output:
        """Return the given states."""
        assert self.states is not None
        return _Output(self.states)


class TransformersModel:
    """The layers of a causal model, and what its class does after them.

    Invariant: all state of a text is in the step's memory. `head` is the class's own code, with whatever it does
    to logits: the layers are taken out of it, and in their place it gets the states that they have returned.
    """

    __slots__ = ("_given", "_layers", "_named", "_num_cached", "_whole", "ropes", "short_length")

    def __init__(self, whole: Any) -> None:
        """Take a model apart.

        Args:
            whole: a model with an output projection, which must not be used otherwise any more. If its
                `attn_implementation` is `interface.NAME`, the step attends, for all texts together.
        """
        self.ropes: Sequence[PositionTable] = ()
        self.short_length: int | None = None
        self._num_cached: int | None = None  # written by: attend_by_itself, set_cached_layers
        """Layers of the caches, if the layers attend by themselves."""
        found = whole.get_decoder()
        if not isinstance(found, PreTrainedModel):  # some call their output projection so
            found = whole.base_model
        self._layers = getattr(whole, "model", found) if found is whole else found
        name = next((name for name, module in whole.named_modules() if module is self._layers), "")
        if not name:
            raise ValueError(f"{type(whole).__name__} must have its layers in a module of their own")
        self._named = inspect.signature(self._layers.forward).parameters
        """Arguments that the layers know by name."""
        self._given = _Given(self._layers)
        whole.set_submodule(name, self._given)
        self._whole = whole

    @property
    def attends_by_itself(self) -> bool:
        """Whether the layers attend over caches, for one text after the other; otherwise the step attends for all."""
        return self._num_cached is not None

    def attend_by_itself(self) -> None:
        """Let the layers attend from now on.

        Raises:
            ValueError: they take no cache.
        """
        if "past_key_values" not in self._named:
            raise ValueError("it takes no past_key_values")
        self._num_cached = LARGEST["num_layers"]
        if self._layers.config._attn_implementation == NAME:
            setattr(self._layers.config, _ATTENDING, "eager")  # of all parts; the public function skips some classes

    def set_cached_layers(self, used: Sequence[int]) -> int:
        """Limit the caches to the layers that a step has used; return the layers of memory that they need."""
        assert self._num_cached is not None
        num_layers = 1 + max(layer for layer in used if layer < self._num_cached)
        num_indexed = max((layer + 1 - self._num_cached for layer in used), default=0)
        self._num_cached = num_layers
        return num_layers + max(num_indexed, 0)

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
        if self._num_cached is None:
            with attending(attention):
                # Without a mask of ones, gaps between positions would count as borders of texts.
                states = self._layers(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    position_ids=attention.positions.long()[None],
                    use_cache=False,
                ).last_hidden_state
        else:
            states = torch.cat(
                [
                    self._over_cache(ids[:, span], cache_of(attention, text, self._num_cached))
                    for text, (span, _) in enumerate(attention.texts)
                ],
                1,
            )
        return states[0].index_select(0, wanted), []

    def states_alone(self, tokens: Tensor) -> Tensor:
        """Return the last states `[T, E]` of one text, as the class computes them without pages."""
        config, ids = self._layers.config, tokens.long()[None]
        attention = getattr(config, _ATTENDING)
        setattr(config, _ATTENDING, "eager")
        try:
            return self._layers(input_ids=ids, **self._seeing(ids, len(tokens)), use_cache=False).last_hidden_state[0]
        finally:
            setattr(config, _ATTENDING, attention)

    def _over_cache(self, ids: Tensor, cache: Cache) -> Tensor:
        """Return the last states `[1, n, E]` of tokens `[1, n]` of a text, which attend over its cache."""
        length, _ = cache.get_mask_sizes(ids.shape[1], 0)
        given = self._seeing(ids, length)
        return self._layers(input_ids=ids, past_key_values=cache, use_cache=True, **given).last_hidden_state

    def _seeing(self, ids: Tensor, length: int) -> dict[str, Tensor]:
        """Return a mask by which tokens see all `length` positions up to theirs, if the class takes one.

        Positions are left to the class: some count them from another number than zero.
        """
        return {"attention_mask": ids.new_ones(1, length)} if "attention_mask" in self._named else {}

    def head(self, states: Tensor) -> Tensor:
        """Return the logits `[T, V]` of states `[T, E]` after the last norm."""
        self._given.states = states[None]
        ids = torch.zeros(1, len(states), dtype=torch.long, device=states.device)
        logits = self._whole(input_ids=ids, use_cache=False).logits[0]
        self._given.states = None
        return logits
