"""A mixture of experts: a router chooses a few of many small feed-forwards for each token and adds up their results.

Legend: T tokens of a step, E hidden_size, N experts, K chosen experts of a token, I size of an expert.
Source: Shazeer et al., Outrageously Large Neural Networks, 2017; Fedus et al., Switch Transformers, 2021; DeepSeek-V3
Technical Report, 2024 (groups, and a bias for the choice).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Literal

import numpy as np

from pagewood.engine.models.expert_map import ExpertPlacement
from pagewood.engine.models.limits import check_size
from pagewood.engine.models.ops import A, ExpertMatrices, Linear, Placing, Projection
from pagewood.engine.models.parts.feed_forward import ExpertActivation, FeedForward, FeedForwardConfig, in_halves
from pagewood.engine.models.parts.linear import read_linear
from pagewood.engine.models.parts.plain_feed_forward import PlainFeedForward, PlainFeedForwardConfig
from pagewood.engine.models.parts.source import Source
from pagewood.engine.models.shard import Shard
from pagewood.engine.models.stored.head_order import RowOrder

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The numbers of a router.

    The scores of the experts are a function of its outputs. With a bias for the choice, the bias is added to the scores
    that experts are chosen by, and not to those that weigh their results.

    Raises:
        ValueError: a number is out of its range, or two numbers contradict each other.
    """

    num_experts: int
    """N."""
    num_chosen: int
    """K."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    scores_chosen_only: bool = False
    """Whether experts are chosen by the router's outputs, and the score is then computed over the chosen ones alone."""
    has_bias: bool = False
    has_choice_bias: bool = False
    num_groups: int = 1
    """Groups of consecutive experts, of which a few are chosen before experts are."""
    num_chosen_groups: int = 1
    best_of_group: int = 1
    """Experts of a group, the best ones, whose scores add up to the group's."""
    renormalises: bool = False
    """Whether the weights of a token are divided by their sum."""
    epsilon: float = 0.0
    """Added to that sum."""
    least_sum: float = 0.0
    """What the sum is at least."""
    factor: float = 1.0
    """Multiplies all weights."""
    has_factors: bool = False
    """Whether a weight is also multiplied by a parameter of its expert."""

    def __post_init__(self) -> None:
        check_size("num_experts", self.num_experts)
        if not 1 <= self.num_chosen <= self.num_experts:
            raise ValueError(f"num_experts_per_tok must be in [1, {self.num_experts}], got {self.num_chosen}")
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ValueError(f"n_group must divide the {self.num_experts} experts, got {self.num_groups}")
        if not 1 <= self.num_chosen_groups <= self.num_groups:
            raise ValueError(f"topk_group must be in [1, {self.num_groups}], got {self.num_chosen_groups}")
        size = self.num_experts // self.num_groups
        most = self.num_chosen_groups * size
        if self.num_chosen > most:
            raise ValueError(
                f"num_experts_per_tok must be at most {most}, the experts of the chosen groups, got {self.num_chosen}"
            )
        if self.num_groups > 1 and not 1 <= self.best_of_group <= min(2, size):
            raise ValueError(
                f"best_of_group must be 1 or 2, and a group have as many experts, got {self.best_of_group}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """The names of a mixture's tensors, behind the prefix of the part."""

    router: str = "gate"
    choice_bias: str = "gate.e_score_correction_bias"
    choice_bias_is_matrix: bool = False
    """Whether it is stored as `[1, N]`."""
    factors: str = "per_expert_scale"
    experts: str = "experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"
    to_latent: str = "fc1_latent_proj"
    from_latent: str = "fc2_latent_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The numbers of a mixture of experts.

    Raises:
        ValueError: the size is out of its range.
    """

    size: int
    """I."""
    router: RouterConfig
    activation: ExpertActivation = "silu"
    has_bias: bool = False
    """Whether the projections of the experts have biases."""
    latent_size: int | None = None
    """Elements of what experts read and return, which two projections around all of them make of the hidden state, and
    the reverse; None: they read and return the hidden state."""
    has_latent_bias: bool = False
    """Whether these two projections have biases."""
    weighs_inputs: bool = False
    """Whether the input of an expert is multiplied by its weight, and not its result."""
    shared: FeedForwardConfig | PlainFeedForwardConfig | None = None
    """A feed-forward whose result is added for every token."""
    has_shared_gate: bool = False
    """Whether that result is multiplied by the sigmoid of one output of its own."""
    names: ExpertNames = field(default_factory=ExpertNames)
    placement: ExpertPlacement | None = None
    """Which ranks have which experts; None: each has a part of the inner size of all."""
    counted_as: int | None = None
    """Number of the layer under which the rows of each placed expert are counted; None: they are not."""

    def __post_init__(self) -> None:
        check_size("intermediate_size", self.size)
        if self.latent_size is not None:
            check_size("hidden_size", self.latent_size)
        if self.has_shared_gate and self.shared is None:
            raise ValueError("has_shared_gate must be False without shared experts, got True")
        if self.placement is not None and len(self.placement.ranks) != self.router.num_experts:
            raise ValueError(f"placement must be of {self.router.num_experts} experts, got {len(self.placement.ranks)}")

    @property
    def has_gates(self) -> bool:
        """Whether each expert has a gate."""
        return self.activation != "relu_squared"

    def for_shard(self, shard: Shard) -> ExpertsConfig:
        """Return the mixture of a rank, which has a part of every expert, or the whole of some.

        Raises:
            ValueError: the size of an expert, or of a shared one, cannot be divided among the ranks.
        """
        shared = None if self.shared is None else self.shared.for_shard(shard)
        if self.placement is not None:
            assert self.placement.num_ranks == shard.count, "experts are placed on the ranks that there are"
            return replace(self, shared=shared)
        return replace(self, size=len(shard.part("intermediate_size of experts", self.size)), shared=shared)

    def num_idle(self, hidden_size: int) -> int:
        """Return the number of parameters of the experts that a token does not use."""
        outputs, width = self.size * (2 if self.has_gates else 1), self.latent_size or hidden_size
        of_expert = (outputs + self.size) * width + (outputs + width if self.has_bias else 0)
        return (self.router.num_experts - self.router.num_chosen) * of_expert


class Experts(Generic[A]):
    """A mixture of experts with its parameters."""

    __slots__ = (
        "_choice_bias", "_config", "_experts", "_factors", "_from_latent", "_ops", "_placing", "_router", "_shared",
        "_shared_gate", "_to_latent",
    )  # fmt: skip

    def __init__(self, config: ExpertsConfig, source: Source[A]) -> None:
        """Take the parameters of a rank."""
        weights, ops, prefix, shard = source.weights, source.ops, source.prefix, source.shard
        hidden_size = source.hidden_size
        router, names = config.router, config.names
        count = router.num_experts
        weight = weights.exact(f"{prefix}{names.router}.weight", count, hidden_size)
        bias = weights.exact(f"{prefix}{names.router}.bias", count) if router.has_bias else None
        placement = None if shard.is_whole else config.placement
        self._config = config
        self._ops = ops
        self._placing: Placing[A] | None = None
        if placement is not None and not placement.is_plain:
            self._placing = ops.placing(placement, near=weight)
        self._router: Linear[A] = ops.exact_linear(weight, bias)
        self._choice_bias: Tensor | None = None
        if router.has_choice_bias:
            shape = (1, count) if names.choice_bias_is_matrix else (count,)
            self._choice_bias = weights.exact(f"{prefix}{names.choice_bias}", *shape).flatten()
        self._factors = weights.exact(f"{prefix}{names.factors}", count) if router.has_factors else None
        self._experts = ops.experts(
            _read_matrices(config, source, config.latent_size or hidden_size, placement),
            config.activation,
            weighs_inputs=config.weighs_inputs,
        )
        self._to_latent: Linear[A] | None = None
        self._from_latent: Linear[A] | None = None
        if (size := config.latent_size) is not None:
            to, back = ([(names.to_latent, size)], [(names.from_latent, hidden_size)])
            has_bias = config.has_latent_bias
            self._to_latent = read_linear(source, to, has_bias=has_bias)
            self._from_latent = read_linear(source, back, size, has_bias=has_bias, is_summed=True)
        self._shared: FeedForward[A] | PlainFeedForward[A] | None = None
        self._shared_gate: Linear[A] | None = None
        match config.shared:
            case FeedForwardConfig() as own:
                self._shared = FeedForward(own, source.below(names.shared))
            case PlainFeedForwardConfig() as own:
                self._shared = PlainFeedForward(own, source.below(names.shared))
            case None:
                pass
        if config.has_shared_gate:
            gate = weights.exact(f"{prefix}{names.shared_gate}.weight", 1, hidden_size)
            self._shared_gate = ops.exact_linear(gate, None)

    def __call__(self, x: A, *, judged: A | None = None) -> A:
        """Return `[T, E]` of `[T, E]`, a part of the sum over ranks; the router reads `judged` `[T, E]`, or `x`."""
        logits = self._router(x if judged is None else judged)
        chosen, shares = self._ops.choose(logits, self._config.router, self._choice_bias)
        if self._factors is not None:
            shares = self._ops.scale_chosen(shares, chosen, self._factors)
        if self._placing is not None:
            chosen = self._placing(chosen, logits)
        routed = self._experts(x if self._to_latent is None else self._to_latent(x), chosen, shares)
        if self._from_latent is not None:
            routed = self._from_latent(routed)
        if self._shared is None:
            return routed
        gate = None if self._shared_gate is None else self._shared_gate(x)
        return self._ops.add_gated(routed, self._shared(x), gate)


def _read_matrices(
    config: ExpertsConfig, source: Source[Any], hidden_size: int, placement: ExpertPlacement | None
) -> ExpertMatrices:
    """Return a rank's part of the matrices of all experts, or, with `placement`, those of its experts.

    Each reads and returns `hidden_size` elements.
    """
    weights, prefix, shard = source.weights, source.prefix, source.shard
    names, count = config.names, config.router.num_experts

    def each(*parts: tuple[str, int], kind: str = "weight") -> list[tuple[str, int]]:
        return [
            (f"{prefix}{names.experts}.{expert}.{name}.{kind}", rows) for expert in range(count) for name, rows in parts
        ]

    def projection(
        expert: int,
        parts: Sequence[tuple[str, int]],
        inputs: int,
        *,
        order: RowOrder | None = None,
        part: range | None = None,
        adds_bias: bool = True,
    ) -> Projection:
        return Projection(
            parts=[(f"{prefix}{names.experts}.{expert}.{name}", rows) for name, rows in parts],
            inputs=inputs,
            order=order,
            part=part,
            has_bias=config.has_bias,
            adds_bias=adds_bias,
        )

    gate_up, down = [(names.gate, config.size), (names.up, config.size)], (names.down, hidden_size)
    gate_up = gate_up if config.has_gates else gate_up[1:]
    order = down_order = inner = None
    experts: Sequence[int] = range(count)
    if placement is not None:
        experts = placement.experts_of(shard.rank)
        order, down_order = _rows_of(experts, len(gate_up) * config.size), _rows_of(experts, hidden_size)
    elif (inner := shard.inputs("intermediate_size of experts", config.size)) is not None:
        order = in_halves(inner, config.size, count=len(gate_up) * count)
    adds_bias = placement is not None or shard.rank == 0  # of parts of a sum, one has it
    of_expert = None if inner is None else in_halves(inner, config.size, count=len(gate_up))
    down_bias = weights.stack(each(down, kind="bias"), order=down_order) if config.has_bias else None
    return ExpertMatrices(
        count=len(experts),
        first=0 if placement is None else placement.first_of(shard.rank),
        num_placed=count if placement is None else placement.num_placed,
        counted_as=config.counted_as,
        gate_up=weights.stack(each(*gate_up), hidden_size, order=order),
        down=weights.stack(each(down), config.size, order=down_order, inputs=inner),
        gate_up_bias=weights.stack(each(*gate_up, kind="bias"), order=order) if config.has_bias else None,
        down_bias=down_bias if adds_bias else None,
        gate_up_parts=[projection(expert, gate_up, hidden_size, order=of_expert) for expert in experts],
        down_parts=[projection(expert, [down], config.size, part=inner, adds_bias=adds_bias) for expert in experts],
    )


def _rows_of(experts: Sequence[int], size: int) -> RowOrder:
    """Return the rows of some experts, each of which has `size` of them."""
    return (np.asarray(experts, np.int64)[:, None] * size + np.arange(size)).reshape(-1)
