"""Attention of grouped heads with rotated positions, causal in decoders.

Legend: T tokens of a step, W wanted tokens, E hidden_size.
Source: Vaswani et al., Attention Is All You Need, 2017; Ainslie et al., GQA, 2023; Su et al., RoFormer, 2021.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic, Literal

import numpy as np

from pagewood.engine.models.limits import check_size
from pagewood.engine.models.ops import A, HeadSplit, Linear, Norm, Step
from pagewood.engine.models.parts.distances import NUM_BUCKETS, buckets
from pagewood.engine.models.parts.linear import read_linear
from pagewood.engine.models.parts.norm import NormConfig, read_norm
from pagewood.engine.models.parts.rope import PositionConfig, RopeConfig, TemperatureConfig
from pagewood.engine.models.parts.source import Source
from pagewood.engine.models.shard import Shard
from pagewood.engine.models.stored.head_order import RowOrder, head_order, in_heads
from pagewood.kvpool import MultiHeadLayout

Order = Literal["NHD", "HND"]
DISTANCES = "model.distances.weight"
"""The table of what is added because of distances, which all layers share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """The numbers of an attention.

    Raises:
        ValueError: a number is out of its range, or two numbers contradict each other.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    """None: nothing is rotated."""
    scale: float
    """Multiplies the products of queries and keys."""
    window: int | None = None
    """Number of positions that a token sees, itself included; None: itself and all before it."""
    is_chunked: bool = False
    """Whether the window does not slide: a token sees only the positions of its own chunk, of `window` positions."""
    soft_cap: float | None = None
    """Scaled products s of queries and keys become c tanh(s / c), where c is this number; None: they stay."""
    sinks: bool = False
    """Whether every query head has a score without a value in its softmax, the parameter `sinks`."""
    qkv_bias: bool = False
    output_bias: bool = False
    qkv_is_fused: bool = False
    """Whether checkpoints store one matrix, `qkv_proj`, with the rows of all queries, all keys and all values."""
    has_neighbours: bool = False
    """Whether elements 2i and 2i + 1 of a head are rotated together in checkpoints, rather than its two halves."""
    temperature: TemperatureConfig | None = None
    """How queries grow with their position; None: they do not."""
    qk_norm: NormConfig | None = None
    """The norm of each head of q and k; None: there is no norm."""
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    qk_norm_is_whole: bool = False
    """Whether that norm is of all heads together."""
    qk_norm_follows: bool = False
    """Whether it is computed behind the rotation, rather than before."""
    qk_norm_is_plain: bool = False
    """Whether it has no weights. Then its place does not matter, because a rotation changes no sum of squares."""
    values_are_keys: bool = False
    """Whether values are the keys as they are before their norm and rotation, rather than a projection of their own."""
    value_norm: NormConfig | None = None
    """The norm of each head of values, which has no weights; None: there is no norm."""
    source: int | None = None
    """The earlier layer whose keys and values it reads; None: it has its own."""
    has_output_gate: bool = False
    """Whether the attention of each head is multiplied by the logistic function of as many numbers, whose projection
    lies below that of the head's queries."""
    sees_later: bool = False
    """Whether a token sees later positions, too, so that its whole text must be computed in one step."""
    has_distances: bool = False
    """With `sees_later`: whether something is added to scores because of distances; see `parts.distances`."""
    sees_images: bool = False
    """Whether a token of an image sees later ones of its image, too, which is not wider than the window."""
    reach: int | None = None
    """With `sees_later`: how far it sees on both sides, positions; None: the whole text."""

    def __post_init__(self) -> None:
        check_size("num_heads", self.num_heads)
        check_size("num_kv_heads", self.num_kv_heads)
        check_size("head_dim", self.head_dim)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads {self.num_kv_heads}, got {self.num_heads}")
        if self.head_dim < 4 or self.head_dim % 4:
            raise ValueError(f"head_dim must be a multiple of 4, got {self.head_dim}")
        if self.qk_norm_is_whole and self.qk_norm is None:
            raise ValueError("qk_norm_is_whole must be False without qk_norm, got True")
        if self.qk_norm_follows and self.qk_norm_is_whole:
            raise ValueError("qk_norm_follows must be False for the norm of all heads together, got True")
        if self.source is not None and (self.qkv_is_fused or self.qk_norm_is_whole or self.qk_norm_follows):
            raise ValueError("source must be None in layers whose q and k have a projection or norm together")
        if self.values_are_keys and (self.qkv_is_fused or self.head_order is not None):
            raise ValueError("values_are_keys must be False where keys are stored with values or in another order")
        if self.has_output_gate and (self.qkv_is_fused or self.source is not None or self.values_are_keys):
            raise ValueError("has_output_gate must be False where q, k and v are not three projections")
        if self.window is not None and self.window < 1:
            raise ValueError(f"windows must be >= 1, got {self.window}")
        if self.is_chunked and self.window is None:
            raise ValueError("is_chunked must be False without window, got True")
        if self.sees_images and (self.sees_later or self.is_chunked):
            raise ValueError("sees_images must be False where tokens see their whole text, or chunks of it, got True")
        if self.sees_later and (self.window is not None or self.sinks or self.source is not None):
            raise ValueError("window, sinks and source must be absent where tokens see later ones")
        if self.has_distances and (not self.sees_later or self.soft_cap is not None):
            raise ValueError("has_distances must be False with soft_cap, and where tokens see no later ones, got True")
        if self.reach is not None and (not self.sees_later or self.reach < 1):
            raise ValueError(f"reach must be >= 1 where tokens see later ones, and None elsewhere, got {self.reach}")
        if self.soft_cap is not None and not 0 < self.soft_cap < 1e6:
            raise ValueError(f"soft_cap must be in (0, 1e6), got {self.soft_cap}")

    @property
    def q_size(self) -> int:
        """Elements of all query heads of a token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of all key heads (or value heads) of a token."""
        return self.num_kv_heads * self.head_dim

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def position_configs(self) -> tuple[PositionConfig, ...]:
        """What it needs to know of positions."""
        return tuple(one for one in (self.rope, self.temperature) if one is not None)

    def for_length(self, length: int) -> AttentionConfig:
        """Return the attention of a model whose sequences have at most `length` positions."""
        return self if self.rope is None else replace(self, rope=self.rope.for_length(length))

    def for_shard(self, shard: Shard) -> AttentionConfig:
        """Return the attention of a rank.

        Raises:
            ValueError: heads cannot be divided among the ranks.
        """
        heads, kv_heads = self.heads_of(shard)
        return replace(self, num_heads=len(heads), num_kv_heads=len(kv_heads))

    def heads_of(self, shard: Shard) -> tuple[range, range]:
        """Return the query heads and the key heads of a rank; see `for_shard`."""
        heads = shard.part("num_attention_heads", self.num_heads)
        return heads, shard.shared_part("num_key_value_heads", self.num_kv_heads)

    @property
    def head_order(self) -> RowOrder | None:
        """The order of the elements of a head; see `models.stored.head_order`."""
        if self.rope is None:
            return None
        return head_order(self.head_dim, rotated=self.rope.size, has_neighbours=self.has_neighbours)

    def memory(self, *, page_size: int, dtype: str, order: Order) -> MultiHeadLayout:
        """Return the layout of its keys and values; see `MultiHeadLayout` for the arguments."""
        return MultiHeadLayout(
            num_layers=1,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=page_size,
            dtype=dtype,
            order=order,
        )


class SelfAttention(Generic[A]):
    """An attention with its parameters."""

    __slots__ = ("_biases", "_config", "_gate", "_ops", "_output", "_qkv", "_sinks", "_split", "_value_norm")

    def __init__(self, config: AttentionConfig, source: Source[A], *, inputs: int | None = None) -> None:
        """Take the parameters of a rank; `inputs` are the columns of the projections to q, k and v, None: E."""
        weights, shard = source.weights, source.shard
        own, heads, has_own = config.for_shard(shard), config.heads_of(shard), config.source is None
        self._config = own
        self._ops = source.ops
        order = _order(config, shard)
        self._qkv = read_linear(source, _parts(config), inputs, has_bias=config.qkv_bias, order=order)
        self._gate: Linear[A] | None = None
        if config.has_output_gate:
            size, bias = config.q_size, config.qkv_bias
            gates = in_heads(np.arange(config.head_dim, 2 * config.head_dim), heads[0], size=2 * config.head_dim)
            self._gate = read_linear(source, [("q_proj", 2 * size)], inputs, has_bias=bias, order=gates)
        q_name, k_name = config.qk_norm_names
        self._split = HeadSplit(
            head_dim=config.head_dim,
            q_size=own.q_size,
            kv_size=own.kv_size if has_own else 0,
            q_norm=_read_norm(config, source, q_name, config.num_heads, heads[0]),
            k_norm=_read_norm(config, source, k_name, config.num_kv_heads, heads[1]) if has_own else None,
            norms_are_whole=config.qk_norm_is_whole,
            num_ranks=shard.count,
            norms_follow=config.qk_norm_follows,
            values_are_keys=config.values_are_keys,
        )
        self._value_norm = None if config.value_norm is None else Norm(weight=None, epsilon=config.value_norm.epsilon)
        self._sinks = None
        if config.sinks:
            order = None if shard.is_whole else np.asarray(heads[0])
            self._sinks = weights.stack([(f"{source.prefix}sinks", config.num_heads)], order=order)
        self._biases = None
        if config.has_distances:
            self._biases = weights.numbers(DISTANCES, NUM_BUCKETS, config.num_heads, order=buckets())
        self._output: Linear[A] = read_linear(
            source,
            [("o_proj", source.hidden_size)],
            config.q_size,
            has_bias=config.output_bias,
            part=shard.inputs("num_attention_heads", config.num_heads, config.head_dim),
        )

    def __call__(self, x: A, step: Step[A], layer: int, wanted: A | None = None) -> A:
        """Return `[T, E]`, or `[W, E]` for the tokens that are `wanted`, a part of the sum over ranks.

        `layer` is the number of its KV memory.
        """
        config, ops = self._config, self._ops
        rotation = None if config.rope is None else step.rotations[config.rope]
        q, k, v = ops.split_heads(self._qkv(x), rotation, self._split)
        if self._value_norm is not None and v is not None:
            v = ops.norm_heads(v, self._value_norm, config.head_dim)
        if config.temperature is not None:
            q = ops.scale_rows(q, step.rotations[config.temperature])
        attended = step.attention.run(q, k, v, layer, self._sinks, self._biases)
        if self._gate is not None:
            attended = ops.multiply_columns(attended, self._gate(x), 0, "sigmoid")
        if wanted is not None:
            attended = ops.take(attended, wanted)
        return self._output(attended)


def _parts(config: AttentionConfig) -> list[tuple[str, int]]:
    """Return the matrices of the projection to queries, keys and values, with their outputs."""
    if config.qkv_is_fused:
        return [("qkv_proj", config.q_size + 2 * config.kv_size)]
    own = [("k_proj", config.kv_size), ("v_proj", config.kv_size)]
    return [("q_proj", config.q_size * (2 if config.has_output_gate else 1)), *own[: _num_own(config)]]


def _num_own(config: AttentionConfig) -> int:
    """Return how many of keys and values have a projection."""
    return 0 if config.source is not None else 1 if config.values_are_keys else 2


def _order(config: AttentionConfig, shard: Shard) -> RowOrder | None:
    """Return the order of the rows of a rank's queries, keys and values; None: all rows stay."""
    order = config.head_order
    if order is None and shard.is_whole and not config.has_output_gate:
        return None
    if shard.is_whole and order is not None and not config.has_output_gate:
        num_kv_heads = 0 if config.source is not None else config.num_kv_heads
        rotated = in_heads(order, range(config.num_heads + num_kv_heads))
        num_plain = 0 if config.source is not None or config.values_are_keys else config.kv_size
        return np.concatenate([rotated, len(rotated) + np.arange(num_plain)])
    plain = np.arange(config.head_dim)
    rotated = plain if order is None else order
    heads, kv_heads = config.heads_of(shard)
    width = 2 if config.has_output_gate else 1
    keys = config.q_size * width
    values = keys + config.kv_size
    parts = [
        in_heads(rotated, heads, size=width * config.head_dim),
        keys + in_heads(rotated, kv_heads),
        values + in_heads(plain, kv_heads),
    ]
    return np.concatenate(parts[: 1 + _num_own(config)])


def _read_norm(config: AttentionConfig, source: Source[Any], name: str, num_heads: int, kept: range) -> Norm | None:
    """Return the norm of queries or keys, of which there are `num_heads`, for those heads that are `kept`."""
    norm, order = config.qk_norm, config.head_order
    if norm is None:
        return None
    if config.qk_norm_is_plain:
        return Norm(weight=None, epsilon=norm.epsilon)
    if not config.qk_norm_is_whole:
        return read_norm(norm, source, name, config.head_dim, order=order).folded()
    whole = None
    if order is not None or len(kept) < num_heads:
        whole = in_heads(np.arange(config.head_dim) if order is None else order, kept)
    return read_norm(norm, source, name, num_heads * config.head_dim, order=whole).folded()
