"""A layer: a mixer and a feed-forward, in a frame of norms around the residual stream.

Legend: T tokens of a step, W wanted tokens, E hidden_size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic

from pagewood.engine.models.ops import A, Norm, Ops, RowDivision, Step
from pagewood.engine.models.parts.absent import AbsentConfig
from pagewood.engine.models.parts.choice import AnyFeedForward, AnyMixer, make_feed_forward, make_mixer
from pagewood.engine.models.parts.experts_beside import ExpertsBesideConfig
from pagewood.engine.models.parts.layer_inputs import LayerInput, LayerInputsConfig
from pagewood.engine.models.parts.norm import NormConfig, read_norm
from pagewood.engine.models.parts.source import Source
from pagewood.engine.models.shard import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameConfig:
    """The names of a layer's parts, and of the norms around them without ".weight"; None: no norm.

    A norm before a part is applied to the part's input, and a norm after it to the part's addition to the residual
    stream.

    Raises:
        ValueError: the parts have norms in different places, or none; or parallel parts have no norm before the mixer,
            or one after a part.
    """

    before_mixer: str | None = "input_layernorm"
    behind_mixer: str | None = None
    before_feed_forward: str | None = "post_attention_layernorm"
    behind_feed_forward: str | None = None
    mixer: str | None = "self_attn"
    """None: there are two beside each other, which have names of their own in the layer."""
    feed_forward: str | None = "mlp"
    """None: it reads the residual stream, and its parts have names and norms of their own in the layer."""
    norms_sums: bool = False
    """Whether the norms behind parts are of the sums with the residual stream, and replace it, as in BERT."""
    is_parallel: bool = False
    """Whether both parts read the residual stream as it enters the layer; without a norm before the feed-forward, they
    share that of the mixer."""
    is_single: bool = False
    """Whether the layer is a mixer or a feed-forward alone, with the norm of a mixer before it."""

    def __post_init__(self) -> None:
        if self.is_single:
            others = (self.behind_mixer, self.before_feed_forward, self.behind_feed_forward)
            if self.before_mixer is None or any(name is not None for name in others):
                raise ValueError(f"a single part must have one norm, before it, got {self}")
            return
        if self.is_parallel:
            if self.before_mixer is None or self.behind_mixer is not None or self.behind_feed_forward is not None:
                raise ValueError(f"parallel parts must have norms before them and none behind them, got {self}")
            return
        if self.feed_forward is None:
            if self.before_feed_forward is not None or self.behind_feed_forward is None:
                raise ValueError(f"a feed-forward without a name must have a norm behind it alone, got {self}")
            return
        if self.norms_sums and (self.before_mixer is not None or self.before_feed_forward is not None):
            raise ValueError(f"norms must stand behind parts alone where they are of sums, got {self}")
        if self.before_mixer is None and self.before_feed_forward is not None and self.behind_mixer is None:
            return  # the first layer behind a norm of embeddings
        places = [
            (self.before_mixer is not None, self.behind_mixer is not None),
            (self.before_feed_forward is not None, self.behind_feed_forward is not None),
        ]
        if places[0] != places[1] or not any(places[0]):
            raise ValueError(f"norms must stand before both parts, behind both, or in all four places, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """The parts of a layer.

    Raises:
        ValueError: there are norms behind the parts, and a multiplier that they would undo; or a part is absent, and
            the frame is of two.
    """

    mixer: AnyMixer
    feed_forward: AnyFeedForward
    norm: NormConfig
    """The numbers of the norms of the frame."""
    frame: FrameConfig
    residual_multiplier: float = 1.0
    """Multiplies what the parts add to the residual stream."""
    inputs: LayerInputsConfig | None = None
    """What it adds of each token beside its embedding; None: nothing."""
    has_scalar: bool = False
    """Whether the residual stream is multiplied by the parameter `layer_scalar` in the end."""

    def __post_init__(self) -> None:
        num_absent = sum(isinstance(part, AbsentConfig) for part in (self.mixer, self.feed_forward))
        if num_absent != int(self.frame.is_single):
            raise ValueError(f"layers must have two parts, or one where frames have is_single, got {2 - num_absent}")
        if (self.inputs is not None or self.has_scalar) and self.frame.behind_feed_forward is None:
            raise ValueError("layers with inputs or a scalar must have a norm behind the feed-forward, got none")
        if self.residual_multiplier != 1 and self.frame.behind_mixer is not None:
            raise ValueError(
                f"residual_multiplier must be 1 where norms stand behind parts, got {self.residual_multiplier}"
            )

    def for_shard(self, shard: Shard) -> LayerConfig:
        """Return the layer of a rank.

        Raises:
            ValueError: a part cannot be divided among the ranks.
        """
        return replace(
            self, mixer=self.mixer.for_shard(shard.of_mixers), feed_forward=self.feed_forward.for_shard(shard)
        )


class Layer(Generic[A]):
    """A layer with its parameters.

    The residual stream is written in place. A part's addition to it may be pending: then the norm before the next part
    adds it.
    """

    __slots__ = ("_behind_feed_forward", "_behind_mixer", "_feed_forward", "_feed_forward_norm", "_input",
                 "_is_parallel", "_is_whole", "_mixer", "_mixer_is_whole", "_multiplier", "_norms_sums", "_ops",
                 "_scalar", "_sums_itself", "input_norm")  # fmt: skip

    def __init__(
        self,
        config: LayerConfig,
        source: Source[A],
        *,
        index: int = 0,
        mixer_inputs: int | None = None,
    ) -> None:
        """Take the parameters of a rank.

        Args:
            config: of the layer.
            source: of its parameters.
            index: its number in the model.
            mixer_inputs: columns of the mixer's input; None: E.
        """

        def norm(name: str | None) -> Norm | None:
            return None if name is None else read_norm(config.norm, source, name, source.hidden_size)

        frame, shard = config.frame, source.shard
        self._ops = source.ops
        self._is_parallel = frame.is_parallel
        self._norms_sums = frame.norms_sums
        self._is_whole = shard.is_whole
        self._mixer_is_whole = shard.of_mixers.is_whole
        self._sums_itself = isinstance(config.feed_forward, ExpertsBesideConfig)
        """Whether the feed-forward returns a sum over ranks."""
        self._multiplier = config.residual_multiplier
        self.input_norm = norm(frame.before_mixer)
        own = source if frame.mixer is None else source.below(frame.mixer)
        self._mixer = make_mixer(config.mixer, own.of_mixers, inputs=mixer_inputs)
        self._behind_mixer = norm(frame.behind_mixer)
        self._feed_forward_norm = norm(frame.before_feed_forward)
        own = source if frame.feed_forward is None else source.below(frame.feed_forward)
        self._feed_forward = make_feed_forward(config.feed_forward, own)
        self._behind_feed_forward = norm(frame.behind_feed_forward)
        self._input: LayerInput[A] | None = None
        if config.inputs is not None:
            self._input = LayerInput(config.inputs, source, index=index)
        self._scalar = 1.0
        if config.has_scalar:
            scalar = source.weights.exact(f"{source.prefix}layer_scalar", 1)
            self._scalar = float(scalar.sum())  # empty where only headers are read

    def enter(self, pending: A | None, residual: A) -> A:
        """Return the input `[T, E]` of the first part, after `pending` is added to the residual stream `[T, E]`.

        Without a norm before the part, the input is the residual stream itself.
        """
        return add_and_norm(self._ops, pending, residual, self.input_norm)

    def __call__(self, x: A, residual: A, step: Step[A], index: int, wanted: A | None = None) -> tuple[A | None, A]:
        """Compute the layer.

        Args:
            x: the input of the first part, see `enter`.
            residual: `[T, E]`, the residual stream.
            step: of the tokens.
            index: number of the layer's memory.
            wanted: `[W] int32`, the tokens that are needed after the layer; None: all.

        Returns:
            The pending addition, or None, and the residual stream, each `[T, E]`, or `[W, E]`.
        """
        if self._mixer is None or self._feed_forward is None:
            return self._alone(x, residual, step, index, wanted)
        mixed, division = self._mixer(x, step, index, wanted), step.division
        if wanted is not None:
            residual = self._ops.take(residual, wanted)
            division = None if division is None else division.kept
        if self._is_parallel:
            return self._beside(mixed, x, residual, wanted, division), residual
        mixed = mixed if self._mixer_is_whole else self._ops.sum_ranks(mixed)
        pending, residual = self._leave(mixed, residual, self._behind_mixer)
        x = self._fed(add_and_norm(self._ops, pending, residual, self._feed_forward_norm), division)
        pending, residual = self._leave(x, residual, self._behind_feed_forward)
        if self._input is not None:
            self._input(residual, step, wanted)
        if self._scalar != 1:
            residual = self._ops.scale(residual, self._scalar)
        return pending, residual

    def _alone(self, x: A, residual: A, step: Step[A], index: int, wanted: A | None) -> tuple[A, A]:
        """Compute a layer with one part; see `__call__`. What it adds is pending."""
        ops, division = self._ops, step.division
        if wanted is not None:
            residual = ops.take(residual, wanted)
            division = None if division is None else division.kept
        if self._mixer is not None:
            mixed = self._mixer(x, step, index, wanted)
            return self._scaled(mixed if self._mixer_is_whole else ops.sum_ranks(mixed)), residual
        return self._scaled(self._fed(x if wanted is None else ops.take(x, wanted), division)), residual

    def _fed(self, x: A, division: RowDivision[A] | None) -> A:
        """Return the feed-forward's result, the sum over ranks, for rows that may be divided among them."""
        assert self._feed_forward is not None
        if division is not None:
            fed = self._feed_forward(division.gather(x))
            return division.own(fed) if self._sums_itself else division.sum_own(fed)
        fed = self._feed_forward(x)
        return fed if self._is_whole or self._sums_itself else self._ops.sum_ranks(fed)

    def _beside(self, mixed: A, x: A, residual: A, wanted: A | None, division: RowDivision[A] | None) -> A:
        """Add the mixer's result to the residual after the feed-forward's input was made; return the pending addition.

        Args:
            mixed: the mixer's result for the tokens that go on.
            x: the mixer's input, for all tokens.
            residual: for the tokens that go on.
            wanted: which tokens these are; None: all.
            division: of the tokens that go on.
        """
        if self._feed_forward_norm is not None:
            x = self._ops.norm(residual, self._feed_forward_norm)
        elif wanted is not None:
            x = self._ops.take(x, wanted)
        if self._mixer_is_whole:
            self._ops.add(self._scaled(mixed), residual)
            return self._scaled(self._fed(x, division))
        assert self._feed_forward is not None
        fed = self._feed_forward(x)
        self._ops.add(mixed, fed)  # before the sum over ranks, so that there is one of both parts
        return self._scaled(self._ops.sum_ranks(fed))

    def _scaled(self, x: A) -> A:
        """Return a part's result times the multiplier."""
        return x if self._multiplier == 1 else self._ops.scale(x, self._multiplier)

    def _leave(self, x: A, residual: A, norm: Norm | None) -> tuple[A | None, A]:
        """Return a part's result as pending, and the residual stream; with a norm after the part, nothing is pending.

        Then the normed result has been added to the stream; or the stream is the norm of the sum.
        """
        if norm is None:
            return self._scaled(x), residual
        if self._norms_sums:
            return None, self._ops.add_norm(x, residual, norm)
        self._ops.norm_add(x, residual, norm)
        return None, residual


def add_and_norm(ops: Ops[A], pending: A | None, residual: A, norm: Norm | None) -> A:
    """Add `pending` to the residual stream, and return the norm of the sum; without a norm, the stream itself."""
    if norm is None:
        if pending is not None:
            ops.add(pending, residual)
        return residual
    return ops.norm(residual, norm) if pending is None else ops.add_norm(pending, residual, norm)
